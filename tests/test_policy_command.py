"""`imgscale policy` and `generate --model auto`: what they print and write, and what they refuse."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from imgscale.app import main
from imgscale.bandit import persistence
from imgscale.bandit.store import log_of, opened
from tests.auto import PROMPT, Double, auto, use

PROMPTS = (PROMPT, "a red circle", "three stars", PROMPT)


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy that has learned a little."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    use(monkeypatch, Double("small/one", lambda s, nfe: 0.2), Double("small/two", lambda s, nfe: 0.1 * nfe))
    made = auto(tmp_path / "a.policy", own={"epsilon": 0.5})
    for seed, prompt in enumerate(PROMPTS * 2):
        made(prompt, seed=seed, progress=False)
    return tmp_path / "a.policy"


def test_show_prints_what_is_preferred_by_category(file: Path, capsys: Any) -> None:
    status, out, err = run(capsys, "policy", "show", file, "--top", "2", "--mode", "quality")
    assert (status, err) == (0, "")
    assert "linucb, pool given, 4 actions; learned from 8 searches. Preferences where quality weighs 0.95" in out
    lines = out.splitlines()
    assert lines[2].split() == ["prompts", "of", "seen", "right", "prefers", "expected", "runs", "mean", "eFLOPs"]
    assert [line.split()[0] for line in lines[3::2]] == ["colours", "counting", "hard"]
    assert all("best-of-n" in line and " ± " in line for line in lines[3:9])


def test_show_as_json_and_as_a_plot(file: Path, tmp_path: Path, capsys: Any) -> None:
    plot = tmp_path / "new" / "p.png"
    status, out, _ = run(capsys, "policy", "show", file, "--json", "--plot", plot)
    said = json.loads(out)
    assert status == 0 and said["decisions"] == 8 and said["quality_weight"] == 0.8 and said["plot"] == str(plot)
    hard = said["categories"]["hard"]
    assert hard["prompts"] == 4 and hard["correct"] is None
    (best,) = hard["best"]
    assert best["action"].startswith(best["model"]) and best["uncertainty"] > 0 and 0 <= best["utility"] <= 1
    with Image.open(plot) as image:
        assert image.size[0] > 800


def test_export_writes_statistics_and_decisions(file: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "s.csv"
    assert run(capsys, "policy", "export", file, "-o", out)[0] == 0
    with out.open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert sum(int(row["runs"]) for row in rows) == 8 and "nan" not in out.read_text()
    assert {row["category"] for row in rows} == {"colours", "counting", "hard"}
    status, said, _ = run(capsys, "policy", "export", file, "-o", tmp_path / "d.jsonl", "--what", "decisions")
    assert status == 0 and said.startswith("Wrote 8 rows to ")
    first = json.loads((tmp_path / "d.jsonl").read_text().splitlines()[0])
    assert first["prompt"] == PROMPT and first["category"] == "hard" and 0 < first["propensity"] <= 1
    run(capsys, "policy", "export", file, "-o", tmp_path / "d.csv", "--what", "decisions")
    assert len((tmp_path / "d.csv").read_text().splitlines()) == 9


def test_reset_moves_it_aside(file: Path, capsys: Any) -> None:
    status, out, _ = run(capsys, "policy", "reset", file)
    assert status == 0 and out.startswith("The policy begins anew; the old one is kept as ")
    assert not file.exists() and not log_of(file).exists()
    (old,) = [path for path in file.parent.glob("a.policy.*") if path.suffix != ".jsonl"]
    assert opened(old)[0].learned == 8
    assert run(capsys, "policy", "reset", file)[1] == f"There is no policy {file} yet; nothing to reset.\n"
    assert json.loads(run(capsys, "policy", "reset", file, "--json")[1])["moved"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "nope"], "There is no policy 'nope' yet; run imgscale generate --model auto, or name another."),
        (["show"], "yet; run imgscale generate --model auto"),
        (["show", "FILE", "--mode", "fast"], "Unknown mode 'fast'"),
        (["show", "FILE", "--top", "0"], "--top can't be '0'"),
        (["export", "FILE", "-o", "x.txt"], "give a name that ends in .csv or .jsonl"),
        (["export", "FILE", "-o", "x.csv", "--what", "all"], "Unknown kind of export 'all'"),
        (["export", "FILE", "-o", "FILE/x.csv"], "can't be written"),
        (["shw"], "Unknown command 'shw'; choose one of: export, reset, show. Did you mean 'show'?"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments: list[str], sentence: str, file: Path, capsys: Any) -> None:
    status, out, err = run(capsys, "policy", *(a.replace("FILE", str(file)) for a in arguments))
    assert (status, out) == (2, "") and sentence in err and err.count("\n") == 1


def test_policy_alone_prints_its_help(capsys: Any) -> None:
    status, out, _ = run(capsys, "policy")
    assert status == 0 and "show" in out and "reset" in out and "export" in out


def test_a_policy_of_another_origin_is_one_sentence(file: Path, tmp_path: Path, capsys: Any) -> None:
    policy, _ = opened(file)
    persistence.save(policy, tmp_path / "b.policy", {"name": "clip"})
    _, _, err = run(capsys, "policy", "show", tmp_path / "b.policy")
    assert "says nothing of its actions" in err


# ---------------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mode", "cost"], "--mode is for --model auto; add that, or leave it out."),
        (["--policy", "x"], "--policy is for --model auto"),
        (["--pool", "x"], "--pool is for --model auto"),
        (
            ["-m", "auto", "--searcher", "rbf"],
            "With --model auto the bandit decides --searcher, or the pool file says it",
        ),
        (["-m", "auto", "--set", "n=2"], "the bandit decides --set"),
        (["-m", "auto", "--verifier", "clip"], "the bandit decides --verifier"),
        (["-m", "auto", "--steps", "4"], "the bandit decides --steps"),
        (["-m", "auto", "--journal", "x"], "the bandit decides --journal"),
        (["-m", "auto", "--mode", "fast"], "Unknown mode 'fast'"),
        (["-m", "auto", "--mode", "1.5"], "The weight of quality can't be 1.5"),
        (["-m", "auto", "--pool", "nope.toml"], "The pool file 'nope.toml' can't be read"),
    ],
)
def test_generate_refuses_what_does_not_go_together(arguments: list[str], sentence: str, capsys: Any) -> None:
    status, out, err = run(capsys, "generate", "a red circle", *arguments)
    assert (status, out) == (2, "") and sentence in err and err.count("\n") == 1


def test_generate_explains_and_tells_what_it_learned(file: Path, capsys: Any, monkeypatch: Any) -> None:
    """With a double for the bandit: the command's own part alone."""
    import imgscale
    from imgscale.app import auto as app
    from imgscale.app import outputs

    made = auto(file)
    asked: dict[str, Any] = {}

    def bandit(**given: Any) -> Any:
        asked.update(given)
        return made

    monkeypatch.setattr(imgscale, "auto", bandit)
    monkeypatch.setattr(outputs, "save", lambda output, folder: {"image": folder / "a.png", "trace": folder / "t.png"})
    monkeypatch.setattr(app, "default_judges", lambda pool, prompt: ("shapes",))
    settings: dict[str, Any] = {"options": {}, "guide": None, "report": [], "budget": {}}
    _run = made._run

    def real(*given: Any) -> Any:
        output = _run(*given)
        output.settings |= settings | {"verifiers": {}}
        return output

    monkeypatch.setattr(made, "_run", real)
    base = ["generate", PROMPT, "-m", "auto", "--mode", "0.6", "--policy", file, "--no-plain", "-o", file.parent]
    status, out, err = run(capsys, *base, "--json")
    said = json.loads(out)["auto"]
    assert status == 0 and asked["mode"] == 0.6 and asked["policy"] == file
    assert set(said) >= {"action", "expected", "uncertainty", "propensity", "quality", "correct", "learned", "reward"}
    assert said["learned"] is True and f"imgscale: {said['action']}: expected quality " in err
    assert "Learned: quality " in run(capsys, *base)[1]

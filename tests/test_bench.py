"""`imgscale bench`: rows that are made once, statistics against hand-computed ones, and what is written about them."""

import csv
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import imgscale
from imgscale import models, registry
from imgscale.app.bench import groups, page, plots, prompts, report, statistics, tables
from imgscale.app.bench import rows as store
from imgscale.app.bench.config import Config
from imgscale.app.bench.rows import Row, Rows
from imgscale.app.bench.statistics import Measure
from imgscale.app.bench.values import READ, threshold
from imgscale.assets.shapes.prompts import own_seed
from imgscale.denoiser import Denoiser
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.models import ModelSettings
from imgscale.scaler import Scaler
from tests import zoo
from tests.commands import Bright, Command, Ran

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ModelSettings(steps=4, guidance_scale=3.0, defaults={"max_sequence_length": 16})
PROMPTS = ("a red circle", "two blue stars")
BENCH = ("bench", "-m", "tiny", "-v", "bright", "-s", "best-of-n", "-s", "best-of-n(n=2)", "-b", "8,12")


@pytest.fixture(scope="module")
def scaler() -> Scaler:
    return Scaler(Engine(Denoiser(zoo.build("StableDiffusion3Pipeline"), SETTINGS.defaults)), "tiny", SETTINGS)


@pytest.fixture(autouse=True)
def loads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """A bundled model `tiny` and a verifier `bright`. Yields the models that were loaded."""
    loaded: list[str] = []
    if request.node.get_closest_marker("weights"):
        yield loaded
        return
    folder = tmp_path_factory.mktemp("bundled") / "tiny"
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")

    def load(model: str, **arguments: Any) -> Scaler:
        loaded.append(model)
        made: Scaler = request.getfixturevalue("scaler")
        return made

    monkeypatch.setattr(models, "bundled", lambda: {"tiny": folder})
    monkeypatch.setattr(imgscale, "load", load, raising=False)
    list(registry.verifier)  # or a later discovery would come after the next line
    monkeypatch.setitem(registry.verifier._entries, "bright", registry.Entry("bright", Bright))
    monkeypatch.setattr(Bright, "calls", 0)
    monkeypatch.setattr(Bright, "press_at", 0)
    yield loaded


@pytest.fixture(autouse=True)
def prompts_file(command: Command) -> None:
    """`prompts.txt`, a prompt a line, in the folder of the commands."""
    Path("prompts.txt").write_text("\n".join(PROMPTS))


def bench(command: Command, *more: str) -> Ran:
    return command(*BENCH, "--prompts", "prompts.txt", "-o", "out", *more)


def kept() -> list[Row]:
    return [json.loads(line) for line in Path("out/rows.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------ running


def test_every_search_leaves_a_row_with_everything(command: Command, scaler: Scaler) -> None:
    ran = bench(command, "--json")
    assert ran.status == 0
    assert (ran.json["rows"], ran.json["added"], ran.json["left_out"]) == (10, 10, {})
    rows = kept()
    assert len({store.key(row) for row in rows}) == len(rows) == 2 * (1 + 2 * 2)
    for row in rows:
        plain = row["searcher"] == "plain"
        assert row["nfe"] == (4 if plain else 8 if row["budget"] == 8 or "n=2" in row["searcher"] else 12)
        assert row["verifier_calls"] == row["decodes"] == row["nfe"] / 4
        assert set(row["held_out"]) == {"shapes"} and row["steers"] == "bright"
        assert row["noise_seed"] == own_seed(row["prompt"], 0)
        assert row["seconds"] >= row["trace"]["seconds"][-1] > 0 and row["together"] == 2
        assert row["trace"]["nfe"][-1] == row["nfe"]
        assert row["trace"]["scores"]["bright"][-1] == row["score"]
        assert row["trace"]["scores"]["shapes"][-1] == row["held_out"]["shapes"]
        with Image.open(Path("out", row["image"])) as image:
            assert image.size == (16, 16)
    by = {store.key(row)[1:5]: row for row in rows}
    for prompt in PROMPTS:  # the same noises for every searcher, of which the first is the plain sample's
        plain = by[prompt, 0, "plain", 0]
        assert by[prompt, 0, "best-of-n", 12]["score"] >= by[prompt, 0, "best-of-n(n=2)", 8]["score"] >= plain["score"]
        assert by[prompt, 0, "best-of-n", 8]["plain"] == {"bright": plain["score"], **plain["held_out"]}
    out = scaler(PROMPTS[1], searcher="best-of-n", verifier=Bright(), budget=12, seed=own_seed(PROMPTS[1], 0))
    assert out.scores["bright"] == pytest.approx(by[PROMPTS[1], 0, "best-of-n", 12]["score"], abs=1e-5)


def test_what_it_writes(command: Command) -> None:
    ran = bench(command)
    assert ran.status == 0
    assert "| best-of-n |" in ran.out and "10 rows, 10 of them new. Wrote out/index.html" in ran.out
    assert sorted(p.name for p in Path("out").iterdir() if p.suffix != ".parquet") == sorted(
        ["bench.yaml", "images", "index.html", "plots", "rows.csv", "rows.jsonl", "tables.md"]
    )
    with open("out/rows.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["score"]) for line in lines] == [row["score"] for row in kept()]
    assert {"held_out_shapes", "plain_bright", "plain_shapes", "nfe", "seconds", "trace"} <= set(lines[0])
    for path in Path("out/plots").iterdir():
        with Image.open(path) as image:
            image.load()
    assert "### Gain over best-of-n with the same budget" in Path("out/tables.md").read_text()


def test_the_same_command_does_nothing_twice(command: Command, loads: list[str]) -> None:
    bench(command)
    before = Path("out/rows.jsonl").read_bytes()
    assert loads == ["tiny"]
    assert bench(command, "--json").json["added"] == 0
    assert loads == ["tiny"] and Path("out/rows.jsonl").read_bytes() == before


def test_a_stopped_run_goes_on(command: Command) -> None:
    bench(command)
    whole = {store.key(row): row for row in kept()}
    lines = Path("out/rows.jsonl").read_text().splitlines(keepends=True)
    Path("out/rows.jsonl").write_text("".join(lines[:6]) + lines[6][:50])  # as a crash leaves it
    assert bench(command, "--json").json["added"] == 4
    again = {store.key(row): row for row in kept()}
    assert len(kept()) == 10 and set(again) == set(whole)
    for key, row in again.items():
        assert row["score"] == pytest.approx(whole[key]["score"], abs=1e-5)


def test_without_a_file_the_folder_says_what_to_do(command: Command, loads: list[str]) -> None:
    bench(command, "--seeds", "2")
    assert command("bench", "-o", "out", "--json").json["added"] == 0
    grown = command("bench", "-o", "out", "--json", "-s", "best-of-n(batch=1)").json
    assert grown["added"] == 2 * 2 * 2
    assert Config.read(Path("out/bench.yaml")).searchers == ("best-of-n", "best-of-n(n=2)", "best-of-n(batch=1)")
    assert "### Gain over best-of-n with" in Path("out/tables.md").read_text()


def test_more_of_a_comparison_extends_it(command: Command) -> None:
    bench(command, "--no-plain")
    ran = bench(command, "--no-plain", "-s", "best-of-n(n=1)", "--budget", "20", "--json")
    assert ran.json["added"] == 2 * (3 * 3 - 2 * 2)  # a searcher and a budget
    assert ran.err.count("imgscale:") == 0
    ran = command("bench", "-m", "tiny", "-s", "best-of-n", "-b", "8", "-o", "out", "--json")
    assert ran.json["added"] == 0 and ran.json["rows"] == 18
    assert re.search(r"imgscale: 'out' also holds 16 rows that this doesn't ask for; they stay, and are shown", ran.err)


def test_ctrl_c_keeps_finished_rows_and_only_those(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bright, "press_at", 9)  # in the last search, which scores one image after the other
    ran = bench(command, "-s", "best-of-n(batch=1)")
    assert ran.status == 130
    finished = len(kept())
    assert finished == 12
    assert f"stopped by Ctrl-C; {finished} finished rows are kept in 'out', and the same command goes on" in ran.err
    assert all(row["stopped"] != "cancelled" for row in kept())
    assert not Path("out/index.html").exists()
    assert command("bench", "-o", "out", "--no-run", "-q").status == 0
    assert Path("out/index.html").exists()
    Bright.press_at = 0
    assert bench(command, "-s", "best-of-n(batch=1)", "--json").json["added"] == 14 - finished


def test_what_cannot_be_run_is_left_out_and_the_rest_is_done(command: Command) -> None:
    ran = bench(command, "-s", "best-of-n(n=0)", "-b", "3", "--json")
    assert ran.status == 1
    assert ran.json["rows"] == 10
    refused = ran.json["left_out"]
    assert set(refused) == {
        *(f"best-of-n(n=0) at {b} NFE by bright on tiny" for b in (3, 8, 12)),
        *(f"{s} at 3 NFE by bright on tiny" for s in ("best-of-n", "best-of-n(n=2)")),
    }
    assert "can't finish one image, which takes 4" in refused["best-of-n at 3 NFE by bright on tiny"]
    assert ran.err.count("left out") == 5
    assert "can&#x27;t finish one image" in Path("out/index.html").read_text()


def test_a_search_that_breaks_is_left_out(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Any, rng: Any) -> Any:
        raise RuntimeError("the moon\nis full")
        yield

    list(registry.searcher)
    monkeypatch.setitem(registry.searcher._entries, "broken", registry.Entry("broken", broken))
    ran = bench(command, "-s", "broken", "--json")
    assert (ran.status, ran.json["rows"]) == (1, 10)
    assert ran.json["left_out"]["broken at 8 NFE by bright on tiny"] == "RuntimeError: the moon is full"


def test_two_processes_never_write_the_same_rows(command: Command) -> None:
    with store.opened(Path("out"), Config()):
        ran = bench(command)
    assert ran.status == 2 and "Another imgscale bench is writing to 'out'" in ran.err


def test_order_is_kept_and_categories_come_early(tmp_path: Path) -> None:
    chosen = [prompts.Prompt(f"{kind}{i}", {"category": kind}) for kind, n in (("a", 4), ("b", 2)) for i in range(n)]
    assert [p.text for p in prompts.spread(chosen)] == ["a0", "b0", "a1", "a2", "b1", "a3"]


# ------------------------------------------------------------------------------------------------------ mistakes

MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown model": (("-m", "tony"), "Unknown model 'tony'.*Did you mean 'tiny'?"),
    "unknown searcher": (("-s", "best-off-n"), "Unknown searcher 'best-off-n'.*Did you mean 'best-of-n'?"),
    "unknown searcher option": (("-s", "best-of-n(bach=3)"), "Unknown option of 'best-of-n' 'bach'"),
    "unknown verifier": (("-v", "brigt"), "Unknown verifier 'brigt'.*Did you mean 'bright'?"),
    "unknown report": (("--report", "shape"), "Unknown verifier 'shape'.*Did you mean 'shapes'?"),
    "budget as text": (("-b", "lots"), "--budget can't be 'lots'; give a whole number of at least 1"),
    "budget 0": (("-b", "50,0"), "--budget can't be '0'"),
    "open parenthesis": (("-s", "best-of-n(n=1"), "--searcher can't hold 'best-of-n.n=1', which lacks a parenthesis"),
    "every 0": (("--every", "0"), "--every can't be '0'; give a whole number of at least 1"),
    "seed": (("--seed", "-1"), "--seed can't be '-1'"),
    "no seeds": (("--seeds", "0"), "--seeds can't be '0'"),
    "solved": (("--solved", "shapes=1"), "--solved can't be 'shapes=1'; give VERIFIER>=VALUE"),
    "solved by nobody": (("--solved", "clip>=1"), "Unknown verifier in solved 'clip'; choose one of: bright, shapes"),
    "against nobody": (("--against", "rbf"), "Unknown searcher to compare against 'rbf'"),
    "dtype": (("--dtype", "float31"), "Unknown dtype 'float31'"),
    "prompt list": (("--prompts", "promts"), "Unknown prompt list 'promts'.*A file that ends in"),
    "prompts outside the oracle's world": (("--prompts", "cat.txt", "--report", "shapes"), "can't judge 'a cat'"),
    "empty prompt list": (("--prompts", "empty.txt"), "'empty.txt' is empty"),
    "no prompt column": (("--prompts", "other.csv"), "Row 1 of the prompt file 'other.csv' has no text in a column"),
    "damaged JSON": (("--prompts", "bad.json"), "'bad.json' can't be read"),
    "unknown ending": (("--prompts", "notes.md"), "'notes.md' has no known ending"),
    "unknown category": (("--categories", "hrd"), "Unknown category of 'prompts.txt' 'hrd'"),
    "missing file": (("nowhere.yaml",), "The configuration 'nowhere.yaml' can't be read"),
    "damaged YAML": (("damaged.yaml",), "'damaged.yaml' can't be read.*line 1"),
    "no keys": (("list.yaml",), "'list.yaml' holds no keys"),
    "unknown key": (("typo.yaml",), "Unknown key in 'typo.yaml' 'budgts'.*Did you mean 'budgets'?"),
    "wrong value": (("wrong.yaml",), "budgets in 'wrong.yaml' can't be '1.5'"),
    "commas in a list": (("commas.yaml",), r"searchers in 'commas.yaml' can't hold 'rbf\(draws=4'.*in quotes"),
    "no rows to show": (("--no-run",), "--no-run shows all rows of 'out'; leave out --model"),
}
FILES = {
    "cat.txt": "a cat",
    "empty.txt": "\n# nothing\n",
    "other.csv": "words\na cat\n",
    "bad.json": "[{]",
    "notes.md": "a cat",
    "damaged.yaml": "a: [1",
    "list.yaml": "- a\n",
    "typo.yaml": "budgts: 50",
    "wrong.yaml": "budgets: [50, 1.5]",
    "commas.yaml": "searchers: [best-of-n, rbf(draws=4, accept=best)]",
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence(case: str, command: Command, loads: list[str]) -> None:
    for name, text in FILES.items():
        Path(name).write_text(text)
    more, said = MISTAKES[case]
    ran = bench(command, *more)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.count("\n") == 1 and ran.err.rstrip()[-1] in ".?"
    assert re.search(said, ran.err), ran.err
    assert loads == [] and not Path("out").exists()


def test_other_settings_are_refused(command: Command) -> None:
    bench(command)
    before = Path("out/bench.yaml").read_bytes(), Path("out/rows.jsonl").read_bytes()
    for more, said in (
        (("--steps", "3"), "steps=the default and not 3"),
        (("--report", "none"), "report=shapes and not none"),
        (("--guidance", "2"), "guidance=the default and not 2.0"),
    ):
        ran = bench(command, *more)
        assert ran.status == 2 and f"The rows in 'out' were made with {said}; choose another --out." in ran.err
    assert before == (Path("out/bench.yaml").read_bytes(), Path("out/rows.jsonl").read_bytes())
    assert bench(command, "--together", "1").status == 0


def test_damaged_rows_are_named(command: Command) -> None:
    bench(command)
    text = Path("out/rows.jsonl").read_text()
    Path("out/rows.jsonl").write_text("{}\n" + text)
    assert "Line 1 of 'out/rows.jsonl' is damaged" in bench(command).err
    Path("out/rows.jsonl").write_text(text)
    Path("out/bench.yaml").unlink()
    assert "holds rows but no bench.yaml" in bench(command).err


def test_looking_needs_rows_and_names_that_are_there(command: Command) -> None:
    assert "There are no rows in 'out'" in command("bench", "-o", "out", "--no-run").err
    bench(command)
    for more, said in ((("--solved", "clip>=1"), "in solved 'clip'"), (("--against", "x"), "compare against 'x'")):
        ran = command("bench", "-o", "out", "--no-run", *more)
        assert ran.status == 2 and said in ran.err
    assert command("bench", "-o", "out", "--no-run", "--solved", "bright>=0.5", "--json").json["tables"][0][
        "title"
    ] == ("Solved (bright ≥ 0.5), % on tiny, steered by bright (95% interval)")


# ------------------------------------------------------------------------------------------- configuration, prompts


def test_every_setting_can_be_read() -> None:
    assert list(READ) == [f.name for f in fields(Config)]


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("searchers: rbf\nbudgets: 50, 25\nseeds: 2\nplain: false\nsolved: shapes>=0.5\nlimit:\n")
    config = Config.read(file)
    assert (config.searchers, config.budgets, config.seeds, config.plain) == (("rbf",), (25, 50), 2, False)
    assert (config.solved, config.limit, config.models) == ("shapes>=0.5", None, ("shapes-flow",))
    changed = config.but({"budgets": ["100,200", "300"], "searchers": ["a(b=1, c=2)", "d+e"], "seeds": None})
    assert changed.budgets == (100, 200, 300) and changed.searchers == ("a(b=1, c=2)", "d+e")
    assert (changed.seeds, changed.plain) == (2, False)


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "mine.txt").write_text("a cat")
    config = Config(
        searchers=("rbf(draws=4, accept=best)",), prompts=str(tmp_path / "lists" / "mine.txt"), report=(), guidance=2.5
    )
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "bench.yaml"
    file.write_text(config.dump(tmp_path / "out"))
    assert str(tmp_path) not in file.read_text()
    again = Config.read(file)
    assert again.but({"prompts": config.prompts}) == config
    assert [p.text for p in prompts.load(again.prompts)] == ["a cat"]


def test_the_bundled_configuration_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "bundled", lambda: {"shapes-flow": models.bundled_folder() / "shapes-flow"})
    config, chosen = Config.read(ROOT / "benchmarks" / "quick.yaml").checked()
    assert config.report == ("shapes",) and config.baseline == "best-of-n"
    assert [p.category for p in chosen] == ["single", "two", "counting", "colours", "position", "attribution", "hard"]


@pytest.mark.parametrize("text", ["shapes>=1", " shapes >= 1.0 ", "clip(model=a/b)>=0.25"])
def test_thresholds(text: str) -> None:
    assert threshold(text) == (text.strip().partition(">=")[0].strip(), 0.25 if "clip" in text else 1.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "\ufeffa cat\r\n\r\n# a comment\r\na dog, running\r\na cat\r\n"),
        ("a.csv", 'Prompt,Category,note\na cat,pets,x\n"a dog, running",pets,y\n'),
        ("a.tsv", "Category\tprompts\npets\ta cat\npets\ta dog, running\n"),
        ("a.json", '["a cat", {"text": "a dog, running", "category": "pets"}]'),
        ("a.jsonl", '{"prompt": "a cat", "n": 1}\n\n{"prompt": "a dog, running", "n": 2}\n'),
    ],
)
def test_prompt_files(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    found = prompts.load(str(tmp_path / name))
    assert sorted(p.text for p in found) == ["a cat", "a dog, running"]
    if name == "a.csv":
        assert found[0].columns == {"note": "x", "category": "pets"} and found[1].category == "pets"
    if name == "a.jsonl":
        assert [p.columns for p in found] == [{"n": 1}, {"n": 2}]


def test_every_and_limit_are_per_category() -> None:
    found = prompts.load("prompts", every=20, limit=2)
    assert [p.category for p in found] == ["single", "two", "counting", *["colours"] * 2, *["position"] * 2] + [
        *["attribution"] * 2,
        *["hard"] * 2,
    ]
    everything = prompts.load("prompts")
    assert found[-1].text == [p for p in everything if p.category == "hard"][20].text
    assert {p.category for p in prompts.load("prompts", ["hard", "two"])} == {"hard", "two"}


# -------------------------------------------------------------------------------------------------- statistics


def row(prompt: str, value: float, searcher: str = "a", budget: int = 10, seed: int = 0, **more: Any) -> Row:
    """A row whose held-out score rises to ``value`` at the end of its budget."""
    made = {
        **{"model": "m", "prompt": prompt, "seed": seed, "searcher": searcher, "budget": budget, "verifier": "v"},
        **{"steers": "v", "score": value / 2, "held_out": {"shapes": value}, "plain": None, "nfe": budget},
        **{"verifier_calls": 3, "decodes": 3, "gradients": 0, "seconds": budget / 100, "together": 2, "events": []},
        **{"imgscale": "0", "torch": "2", "device": "cpu", "dtype": "float32", "image": "images/x.png"},
        **{"stopped": "budget", "finished": True, "columns": {"category": "k"}},
        "trace": {
            "nfe": [budget // 2, budget],
            "seconds": [budget / 200, budget / 100],
            "verifier_calls": [1, 3],
            "scores": {"v": [value / 4, value / 2], "shapes": [0.0, value]},
        },
    }
    return made | more


SOLVED = Measure("shapes", 1.0)


def test_seeds_of_a_prompt_are_averaged_before_prompts() -> None:
    found = statistics.estimate({("a", 0): 1.0, ("a", 1): 1.0, ("a", 2): 0.0, ("a", 3): 0.0, ("b", 0): 1.0})
    assert found is not None
    assert (found.value, found.n) == pytest.approx((0.75, 2))
    assert (found.low, found.high) == pytest.approx((0.5, 1.0))  # a quarter of the draws are a, a


def test_the_interval_is_the_binomial_s() -> None:
    found = statistics.estimate({(str(i), 0): float(i < 40) for i in range(100)})
    assert found is not None and found.value == pytest.approx(0.4)
    # Binomial(100, 0.4) has its quantiles 2.5% and 97.5% at 31 and 50.
    assert found.low == pytest.approx(0.31, abs=0.011) and found.high == pytest.approx(0.50, abs=0.011)


def test_gains_are_paired() -> None:
    hard = {(str(i), 0): float(i % 2) for i in range(40)}
    better = {key: value + 0.1 for key, value in hard.items()}
    found = statistics.gain({**better, ("only here", 0): 9.0}, {**hard, ("5", 1): 7.0})
    assert found is not None and found.n == 40
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert statistics.gain(better, {("elsewhere", 0): 1.0}) is None


def test_no_score_solves_nothing_and_is_no_number_in_a_mean() -> None:
    missing = row("p", 1.0, score=None, held_out={"shapes": None})
    assert SOLVED(missing) == 0 and math.isnan(Measure("v")(missing))
    assert SOLVED(row("p", 1.0)) == 1 and SOLVED(row("p", 0.999)) == 0
    mean = statistics.estimate(statistics.values([missing, row("q", 0.5)], Measure("shapes")))
    assert mean is not None and (mean.value, mean.n) == (0.5, 1)


def test_what_counts_as_solved() -> None:
    rows = [row("p", 1.0)]
    assert statistics.measure(None, rows) == SOLVED
    assert statistics.measure("v>=0.4", rows) == Measure("v", 0.4)
    assert statistics.measure("none", rows) == Measure("shapes")
    assert statistics.measure(None, [row("p", 1.0, held_out={})]) == Measure("v")


def test_the_best_so_far_holds_until_it_changes() -> None:
    one = row("p", 1.0, budget=20)
    grid = np.array([5.0, 10.0, 19.0, 20.0, 30.0])
    assert statistics.best_so_far(one, "nfe", "v", grid).tolist()[1:] == [0.25, 0.25, 0.5, 0.5]
    assert math.isnan(statistics.best_so_far(one, "nfe", "v", grid)[0])
    assert statistics.best_so_far(one, "seconds", "shapes", np.array([0.15, 0.2])).tolist() == [0.0, 1.0]


def test_a_curve_begins_where_all_have_an_image() -> None:
    rows = [row("p", 1.0, budget=20), row("q", 0.5, budget=40), row("r", 1.0, score=None)]
    rows[2]["trace"]["scores"]["v"] = [None, None]  # no score ever: not in the curve
    found = statistics.curve(rows, "nfe", Measure("v"))
    assert found is not None
    assert found.at.tolist() == [20, 40]
    assert found.mean.tolist() == [pytest.approx((0.5 + 0.125) / 2), pytest.approx((0.5 + 0.25) / 2)]
    assert found.low[0] == pytest.approx(0.125) and found.high[0] == pytest.approx(0.5)


def runs(searcher: str, budget: int, solved: int, n: int = 10) -> list[Row]:
    return [row(str(i), float(i < solved), searcher, budget) for i in range(n)]


def test_evaluations_needed_to_reach_the_baseline() -> None:
    baseline = runs("base", 100, 4)
    mine = {20: runs("a", 20, 2), 60: runs("a", 60, 6), 100: runs("a", 100, 6)}
    found = statistics.need(mine, baseline, SOLVED)
    assert found is not None
    assert found.target == pytest.approx(0.4)
    assert found.by_budget.value == pytest.approx(40)  # half-way from 20% at 20 to 60% at 60
    assert found.by_trace.value == 100  # all at once, at the end of the runs with 100
    assert found.by_budget.low <= 40 <= found.by_budget.high
    never = statistics.need({20: runs("a", 20, 2), 50: runs("a", 50, 3)}, baseline, SOLVED)
    assert never is not None
    assert never.by_budget.value == never.by_trace.value == never.by_trace.high == statistics.NEVER
    at_once = statistics.need({20: runs("a", 20, 9)}, baseline, SOLVED)
    assert at_once is not None and (at_once.by_budget.value, at_once.by_budget.high) == (20, 20)
    assert statistics.need(mine, runs("base", 100, 4, n=0), SOLVED) is None


def test_needed_says_what_lies_beyond_the_runs() -> None:
    rows = [*runs("best-of-n", 20, 2), *runs("best-of-n", 100, 4), *runs("a", 20, 9), *runs("a", 100, 9)]
    rows += [*runs("b", 20, 1), *runs("b", 100, 1)]
    (group,) = groups.groups(rows, Config(searchers=("best-of-n", "a", "b")))
    table = tables.needed(group)
    assert table is not None and table.title == "NFE to reach what best-of-n reaches with 100 (40.0%)"
    cells = {line[0]: line[1:] for line in table.lines}
    assert cells["a"] == ["≤20 (≤20 to ≤20)", "100 (100 to 100)"]
    assert cells["b"][0].startswith(">100") and cells["best-of-n"][0].startswith("100 (")


# ------------------------------------------------------------------------------------------------ tables and page


def comparison() -> list[Row]:
    rows = [*runs("plain", 0, 1), *runs("best-of-n", 20, 2), *runs("best-of-n", 100, 4)]
    rows += [*runs("a", 20, 4), *runs("a", 100, 10)]
    for each in rows[:10]:
        each["nfe"] = 10
    for each in rows[30:]:
        each["seconds"] *= 2
    return rows


def test_tables_say_what_was_counted() -> None:
    config = Config(searchers=("a", "best-of-n"))
    (group,) = groups.groups(comparison(), config)
    assert group.title == "m, steered by v, shapes held out"
    assert group.searchers == ["best-of-n", "a"]
    (table,) = tables.summary([group])
    assert table.head == ["search", "plain", "20 NFE", "100 NFE", "prompts"]
    assert [[cell.partition(" (")[0] for cell in line] for line in table.lines] == [
        ["plain", "10.0", "", "", "10"],
        ["best-of-n", "", "20.0", "40.0", "10"],
        ["a", "", "40.0", "100.0", "10"],
    ]
    gains = tables.differences(group)
    assert gains is not None
    assert [cell.partition(" (")[0] for cell in gains.lines[0]] == ["a", "+20.0", "+60.0"]
    assert gains.lines[0][2].endswith("*")
    times = tables.times(group)
    assert times is not None
    assert [line[:3] for line in times.lines] == [["best-of-n", "10.0", "1.00"], ["a", "20.0", "2.00"]]
    detail = tables.detail(group)
    assert detail.head[:5] == ["search", "NFE", "spent", "solved (shapes ≥ 1), %", "k (10)"]
    assert detail.lines[0][:3] == ["plain", "", "10"] and detail.lines[0][4] == "10"


def test_models_stand_beside_each_other() -> None:
    rows = [each | {"model": model} for model in ("/home/me/mine", "m") for each in comparison()]
    (table,) = tables.summary(groups.groups(rows, Config(models=("m", "/home/me/mine"))))
    assert table.head[1] == "model"
    assert [line[1] for line in table.lines[:4]] == ["m", "mine", "m", "mine"]


def test_a_verifier_that_judges_itself_is_named() -> None:
    rows = [each | {"steers": "shapes", "verifier": "shapes", "held_out": {}, "score": 1.0} for each in comparison()]
    for each in rows:
        each["trace"]["scores"].pop("v")
    (table,) = tables.summary(groups.groups(rows, Config()))
    assert "judges itself" in table.note


def rewarded(searcher: str, budget: int, steering: Sequence[float], held_out: Sequence[float]) -> list[Row]:
    both = zip(steering, held_out, strict=True)
    return [row(str(i), judge, searcher, budget, score=score) for i, (score, judge) in enumerate(both)]


def test_the_gap_between_search_and_held_out_reward() -> None:
    plain, ones = [0.0, 0.2, 0.4, 0.6], [1.0] * 4
    rows = rewarded("plain", 0, plain, [0.1, 0.3, 0.5, 0.7])
    rows += rewarded("good", 10, ones, ones) + rewarded("good", 50, [2.0] * 4, [1.5] * 4)
    rows += rewarded("bad", 10, ones, ones) + rewarded("bad", 50, [2.0] * 4, [0.5, 0.6, 0.7, 0.4])
    rows += rewarded("unsure", 10, ones, ones) + rewarded("unsure", 50, [2.0] * 4, [0.5, 1.6, 1.4, 0.4])
    (group,) = groups.groups(rows, Config(searchers=("good", "bad", "unsure")))
    table = tables.rewards(group)
    assert table is not None and table.head == ["search", "NFE", "v (steers)", "shapes", "gap to shapes", ""]
    unit = np.std(plain)
    assert table.lines[1][2:5] == [f"{1.7 / unit:+.2f}", f"{1.1 / unit:+.2f}", f"{0.6 / unit:+.2f}"]
    assert [line[-1] for line in table.lines] == ["", "", "", "hacked: shapes fell since 10 NFE", "", ""]
    (alone,) = groups.groups([r for r in rows if r["searcher"] != "plain"], Config())
    assert tables.rewards(alone) is None


def test_an_ensemble_leaves_what_its_members_say(command: Command) -> None:
    ran = command(
        *BENCH[:3], "-v", "bright+sharpness", "-s", "best-of-n", "-b", "8", "--prompts", "prompts.txt", "-o", "out"
    )
    assert ran.status == 0
    made = [row for row in kept() if row["searcher"] != "plain"]
    assert made and all(row["steers"] == "bright+sharpness" and 0 < row["score"] < 1 for row in made)
    names = {"bright+sharpness", "bright", "sharpness", "shapes"}
    assert all(list(row["members"]) == ["bright", "sharpness"] and list(row["held_out"]) == ["shapes"] for row in made)
    assert all(set(row["trace"]["scores"]) == names for row in made)
    assert all(row["plain"].keys() == names for row in made)


def test_previews_are_a_setting_of_the_folder(command: Command) -> None:
    assert bench(command, "--preview", "linear").status == 0
    made = [row for row in kept() if row["searcher"] != "plain"]
    assert made and all(row["preview"] == "linear" and list(row["held_out"]) == ["shapes"] for row in made)
    again = bench(command, "--preview", "full")
    assert again.status == 2 and "preview=linear and not full" in again.err


EVIL = '<script src="http://evil.example/x.js"></script> | "quoted" & $x^2$'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A comparison whose prompt, category, searcher and verifier are hostile."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "images" / "x.png")
    (tmp_path / "secret.png").write_text("secret")
    return tmp_path


def test_the_page_holds_everything_and_asks_for_nothing(folder: Path) -> None:
    rows = comparison()
    for each in rows:
        each["prompt"] += EVIL
        each["columns"] = {"category": EVIL}
        each["searcher"] = each["searcher"].replace("a", EVIL) if each["searcher"] == "a" else each["searcher"]
    paths = report.write(folder, rows, Config(), left_out={EVIL: EVIL})
    text = paths["page"].read_text(encoding="utf-8")
    assert "<script" not in text
    assert re.findall(r"\b(?:href|src)=\"(?!data:image/|#)", text) == []
    assert re.findall(r"url\(|@import|<link|<iframe|<object", text) == []
    assert text.count("data:image/png;base64,") == 2 + 10 * 3  # two plots, ten prompts by plain and two searchers
    assert "✓ right" in text and "✗ wrong" in text
    table = (folder / "tables.md").read_text(encoding="utf-8")
    assert "<script" not in table and "\\|" in table


def test_grids_mark_right_and_wrong_at_the_largest_budget(folder: Path) -> None:
    (group,) = groups.groups(comparison(), Config())
    text = page.page(folder, [group], {page.plot_name(group, axis): b"" for axis in plots.AXES}, "", {})
    grid = text[text.index("Samples with seed 0") :]
    assert "best-of-n, 100 NFE" in grid and "a, 100 NFE" in grid and "20 NFE" not in grid
    assert grid.count("✓ right") == 1 + 4 + 10 and grid.count("✗ wrong") == 9 + 6 + 0


def test_a_grid_shows_only_images_of_its_folder(folder: Path) -> None:
    rows = [each | {"image": "../../secret.png"} for each in comparison()]
    (group,) = groups.groups(rows, Config())
    text = page.page(folder, [group], {page.plot_name(group, axis): b"" for axis in plots.AXES}, "", {})
    assert "<td>–</td>" in text and '<div class="good">' not in text


@pytest.mark.parametrize("searchers", [1, 2, 7])
@pytest.mark.parametrize("budgets", [(20,), (20, 100)])
def test_plots_of_few_and_many(searchers: int, budgets: tuple[int, ...]) -> None:
    names = ["best-of-n", *(f"s{i}(a=$1, b={'x' * 30})" for i in range(searchers - 1))]
    rows = [each for name in names for budget in budgets for each in runs(name, budget, 3)]
    (group,) = groups.groups(rows, Config(searchers=tuple(names)))
    for axis in plots.AXES:
        assert plots.plot(group, axis).startswith(b"\x89PNG")


def test_colours_differ_and_the_baseline_is_grey() -> None:
    rows = [each for name in ("a", "b", "best-of-n", "c") for each in runs(name, 20, 3)]
    (group,) = groups.groups(rows, Config(searchers=("a", "b", "best-of-n", "c")))
    styles = plots.style(group)
    assert styles["best-of-n"][0] == plots.BASELINE
    assert len({colour for colour, _ in styles.values()}) == len({m for _, m in styles.values()}) == 5


def test_parquet_holds_the_rows() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import io

    rows = [row("p", 1.0, columns={"n": 1}), row("q", 0.5, columns={"n": "two"})]
    data = store.to_parquet(rows)
    assert data is not None
    table = parquet.read_table(io.BytesIO(data)).to_pydict()
    assert table["prompt"] == ["p", "q"] and table["held_out_shapes"] == [1.0, 0.5]
    assert table["prompt_n"] == ["1", "two"]


def test_images_are_kept_small(tmp_path: Path) -> None:
    rows = Rows(tmp_path, [])
    one = row("p", 1.0)
    rows.add(one, Image.new("RGB", (1024, 512)))
    with Image.open(tmp_path / one["image"]) as image:
        assert image.size == (256, 128)
    rows.add(row("p", 0.5), Image.new("RGB", (8, 8)))
    assert len(rows.all) == len(Rows.of(tmp_path).all) == 1


def test_a_damaged_folder_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"model": "m"}\n')
    with pytest.raises(UserError, match="Line 1 .* is damaged"):
        Rows.of(tmp_path)


def test_the_help_loads_nothing_heavy() -> None:
    heavy = ("torch", "diffusers", "transformers", "matplotlib", "numpy", "PIL", "yaml", "rich.progress")
    code = (
        "import sys\nfrom imgscale.app.main import main\n"
        "try: main(['bench', '--help'])\nexcept SystemExit as e: assert not e.code\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]" and "--together" in done.stdout


@pytest.mark.weights
@pytest.mark.skipif(not (models.bundled_folder() / "shapes-flow" / "model_index.json").exists(), reason="not trained")
def test_the_bundled_comparison(command: Command) -> None:
    ran = command(
        "bench", str(ROOT / "benchmarks" / "quick.yaml"), "--categories", "hard", "-b", "20", "-o", "out", "--json"
    )
    assert ran.status == 0 and ran.json["rows"] == 3
    assert [row["searcher"] for row in kept()] == ["plain", "best-of-n", "rbf"]
    assert [row["nfe"] for row in kept()][:2] == [10, 20] and 10 <= kept()[2]["nfe"] <= 20

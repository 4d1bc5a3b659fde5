"""`imgscale profile`: the bundled model measured for a moment, kept where it says, and mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imgscale import usefulness
from imgscale.usefulness import Usefulness
from tests.commands import Command
from tests.test_cli import bundled_model

QUICK = ("--limit", "1", "--starts", "3", "--draws", "2", "--quiet")


@bundled_model
def test_it_measures_prints_and_keeps(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("imgscale.models.folder_of", lambda model: tmp_path / "model")
    ran = command("profile", *QUICK, "--json")
    assert ran.status == 0
    found = json.loads(ran.out)
    assert len(found["spread"]) == 10 and len(found["foresight"]) == 11 and found["foresight"][-1] == 1
    assert found["spread"][0] > 10 * found["spread"][8], "the picture is decided early"
    kept = usefulness.read(Path(found["file"]))
    assert Path(found["file"]).parent == tmp_path / "model"
    assert kept["clip"].spread == tuple(found["spread"]) and kept["clip"].look == found["look"]
    table = command("profile", *QUICK, "--no-save")
    assert "foresight" in table.out and "transitions decide the picture" in table.out and table.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "0"), "--limit can't be '0'"),
        (("--starts", "2"), "--starts can't be '2'; give a whole number of at least 3"),
        (("--draws", "one"), "--draws can't be 'one'"),
        (("--prompts", "promts"), "prompts"),
        (("--categories", "hard,hart"), "Unknown category of 'prompts-tuning' 'hart'"),
        (("shapes-flo",), "shapes-flow"),
        (("--verifier", "clop"), "clip"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], message: str, command: Command) -> None:
    assert message in command("profile", *arguments).sentence


@bundled_model
def test_a_picture_is_made_again_whatever_was_measured_since(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It carries the curves that its search went by."""

    def curves(spread: tuple[float, ...], look: int) -> dict[str, Usefulness]:
        return {"clip": Usefulness(spread, (*(0.0,) * look, *(1.0,) * (11 - look)))}

    def make(known: dict[str, Usefulness]) -> str:
        monkeypatch.setattr(usefulness, "known", lambda folder, name: known)
        job = ("generate", "a red circle above a blue star", "--budget", "60", "--no-plain", "--json")
        path: str = command(*job).json["images"][0]
        return path

    late, early = curves((0.0, 0.0, 1.0, 0.0, 0.0, *(0.0,) * 5), 6), curves((1.0, 1.0, *(0.0,) * 8), 3)
    picture, other = make(late), make(early)
    assert picture != other, "another search, so another picture beside it"
    again = command("rerun", picture, "--json")  # while the other curves are the ones that are known
    assert again.status == 0 and again.json["identical"] and again.json["changed"] == {}
    monkeypatch.setattr(usefulness, "known", lambda folder, name: {})
    assert command("rerun", other, "--json").json["identical"]

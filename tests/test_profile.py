"""`imgscale profile`: the bundled model measured for a moment, kept where it says, and mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imgscale import usefulness
from tests.test_cli import Command, bundled_model, command

__all__ = ["command"]

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
        (("shapes-flo",), "shapes-flow"),
        (("--verifier", "clop"), "clip"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], message: str, command: Command) -> None:
    assert message in command("profile", *arguments).sentence

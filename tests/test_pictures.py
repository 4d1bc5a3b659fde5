"""docs/searchers.md has every searcher, with its options and a picture of what it does, and its numbers are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from imgscale import registry
from scripts.searcher_pictures import PICTURES, World, make, reward
from tests.doubles import Reward, new, run

FOLDER = Path(__file__).parent.parent / "docs"
PAGE = (FOLDER / "searchers.md").read_text()
SEARCHERS = [entry for entry in registry.searcher if entry.target.__module__.startswith("imgscale.searchers")]
GUIDES = [entry for entry in registry.guide if entry.target.__module__.startswith("imgscale.searchers")]


def section(name: str) -> str:
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/searchers.md has no section on {name}."
    return found[1]


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each row of the tables in a text that begins with a name, by that name."""
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|")
    return {found[1]: row for row in cells if (found := re.match(r"\[?`([^`]+)`", row[0]))}


def written(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default).removesuffix(".0")


@pytest.mark.parametrize("entry", [*SEARCHERS, *GUIDES], ids=lambda entry: entry.name)
def test_each_has_a_section_with_its_picture_and_its_options(entry: registry.Entry) -> None:
    text = section(entry.name)
    assert f"](images/searchers/{entry.name}.png)" in text
    assert (FOLDER / "images" / "searchers" / f"{entry.name}.png").is_file()
    assert "**When:**" in text and "**Cost" in text
    table = rows(text)
    for name, option in entry.options().items():
        assert name in table, f"{entry.name}'s option {name} isn't in the table."
        if option.default is not None:
            assert table[name][1].strip("`") == written(option.default)


def test_no_table_has_an_option_that_isn_t_there() -> None:
    for entry in SEARCHERS:
        assert set(rows(section(entry.name))) == set(entry.options())


def test_the_guide_lists_every_searcher_with_what_it_spends() -> None:
    table = rows(section_of_the_guide())
    assert set(table) == {entry.name for entry in SEARCHERS}
    for name, row in table.items():
        ledger = run(World(), new(World(), name, budget=100, steps=10, verifier=Reward(reward))).meter.ledger
        assert row[5] == str(ledger.gradients or "none")
        if row[4].startswith("some "):
            assert ledger.verifier_calls == pytest.approx(int(row[4][5:]), rel=0.2)
        else:
            assert row[4] == str(ledger.verifier_calls), name


def section_of_the_guide() -> str:
    return PAGE[: PAGE.index("\n## ")]


def test_the_script_draws_every_searcher() -> None:
    assert set(PICTURES) == {entry.name for entry in SEARCHERS}


@pytest.mark.parametrize("name", ["rbf", "noise-gradient"])
def test_the_script_draws_the_picture_of_one_searcher(name: str, tmp_path: Path) -> None:
    file = make(name, tmp_path / "pictures")
    assert file == tmp_path / "pictures" / f"{name}.png"
    with Image.open(file) as image:
        assert image.format == "PNG" and image.size == (900, 300)
        colours = image.convert("RGB").getcolors(900 * 300)
    assert colours is not None and len(colours) > 20


def test_the_pictures_are_small() -> None:
    sizes = {file.name: file.stat().st_size for file in (FOLDER / "images" / "searchers").iterdir()}
    assert set(sizes) == {f"{name}.png" for name in PICTURES}
    assert max(sizes.values()) < 60_000 and sum(sizes.values()) < 900_000

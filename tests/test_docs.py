"""The pages say what is so: their examples run, and the references hold every command, option and public name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from imgscale import registry
from imgscale.app.main import app
from imgscale.budget import Budget
from tests.doubles import Watched, new, run

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "search.md"


def test_the_page_s_own_searcher_runs_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "@imgscale.searcher" in b
    ]
    list(registry.searcher)  # discovered before the example adds its own, which is taken back afterwards
    monkeypatch.setattr(registry.searcher, "_entries", dict(registry.searcher._entries))
    exec(compile(example, str(PAGE), "exec"), {})
    world = Watched()
    search = run(world, new(world, "two-stage", budget=Budget(nfe=60)))
    assert search.best is not None and search.best.finished
    assert search.stopped == "complete" and 0 < search.meter.ledger.nfe == world.evaluations <= 60


# The command reference


def commands(group: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command, such as "policy show", and its options as they are typed; those of a group are its commands'."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{word} ")
        elif not command.hidden:
            shown = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
            yield name + word, {o for p in shown for o in [*p.opts, *p.secondary_opts]} - {"-h", "--help"}


def sections(page: str) -> dict[str, str]:
    """The text under each heading "## word" or "### word word"; what stands below a deeper one isn't in it."""
    parts = re.split(r"^##+ (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("command", "options"), list(commands(typer.main.get_command(app))))
def test_the_command_reference_holds_every_command_and_option(command: str, options: set[str]) -> None:
    page = (DOCS / "cli.md").read_text()
    assert re.search(rf"^    imgscale {command.split()[0]}\b", page.partition("\n## ")[0], re.MULTILINE), (
        f"docs/cli.md doesn't list {command} at its top"
    )
    text = sections(page)[command]
    missing = {option for option in options if not re.search(rf"`{option}[` ]", text)}
    assert not missing, f"docs/cli.md lacks these options of {command}: {', '.join(sorted(missing))}"
    rows = re.findall(r"^\| (`-[^|]*)\|", text, re.MULTILINE)
    gone = {option for row in rows for option in re.findall(r"`(--?[\w-]+)", row)} - options
    assert not gone, f"docs/cli.md has options that {command} doesn't: {', '.join(sorted(gone))}"

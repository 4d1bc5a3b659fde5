"""`imgscale list`: the names that `generate` knows."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from imgscale.app.console import print_json
from imgscale.errors import UnknownName

if TYPE_CHECKING:
    from imgscale.registry import Entry

KINDS = ("models", "searchers", "guides", "verifiers")


def show(kind: str | None, as_json: bool = False) -> int:
    """Prints the models, searchers, guides and verifiers, or one kind of them.

    Args:
        kind: One of `KINDS`, or None for all.
        as_json: As a list of objects with ``name``.
    """
    if kind is not None and kind not in KINDS:
        raise UnknownName("kind of list", kind, KINDS)
    found = [entry for each in ([kind] if kind else KINDS) for entry in entries(each)]
    if as_json:
        print_json(found)
        return 0
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for each in [kind] if kind else KINDS:
        console.print(Text(each.capitalize(), style="bold"))
        mine = [entry for entry in found if entry["kind"] == each.removesuffix("s")]
        table = Table.grid(padding=(0, 2, 0, 0))
        for entry in mine:
            options = " ".join(f"{name}={default}" for name, default in entry.get("options", {}).items())
            table.add_row(Text(entry["name"], style="cyan"), Text(entry["summary"]))
            if options:
                table.add_row("", Text(options, style="dim"))
        console.print(Padding(table if mine else Text("none"), (0, 0, 0, 2)))
    return 0


def entries(kind: str) -> list[dict[str, Any]]:
    """The objects that ``list --json`` prints for one of `KINDS`."""
    if kind == "models":
        return _models()
    from imgscale import registry

    return [_entry(entry, kind.removesuffix("s")) for entry in getattr(registry, kind.removesuffix("s"))]


def _models() -> list[dict[str, Any]]:
    from imgscale.models import ModelSettings, bundled

    settings = {name: ModelSettings.read(folder) for name, folder in bundled().items()}
    return [
        {
            "name": name,
            "kind": "model",
            "summary": mine.summary,
            "steps": mine.steps,
            "guidance_scale": mine.guidance_scale,
            "distilled": mine.distilled,
        }
        for name, mine in settings.items()
    ]


def _entry(entry: Entry, kind: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": kind,
        "summary": entry.summary,
        "options": {name: _default(parameter) for name, parameter in entry.options().items()},
        "cite": list(entry.cite),
    }


def _default(parameter: inspect.Parameter) -> Any:
    value = None if parameter.default is parameter.empty else parameter.default
    return value if isinstance(value, bool | int | float | str | None) else str(value)

"""The `export` command: the images of a run where other programs look for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgscale.app.console import complain, only_results_on_stdout, print_json, waiting
from imgscale.errors import UnknownName, UserError

if TYPE_CHECKING:
    from imgscale.app.export.folder import Folder
    from imgscale.app.export.pictures import Picture

FORMATS = ("geneval", "t2i-compbench", "dpg-bench", "csv", "imagefolder")
HELP = (
    "Lay the images of a batch run out for an evaluator.\n\nFormats: geneval, t2i-compbench, dpg-bench, imagefolder"
    " (Hugging Face) and csv (docs/export.md). The run stays as it is."
)
_FLAG = " "


def export(
    run: Path = typer.Argument(..., metavar="RUN", help="A folder that batch wrote."),
    kind: str = typer.Option(..., "--format", "-f", metavar="NAME", help=", ".join(FORMATS) + "."),
    out: Path = typer.Option(..., "--out", "-o", metavar="FOLDER", help="Where it goes; new, or empty."),
    images: str = typer.Option(
        "best", metavar="best|kept|plain", help="Of each search: its winner, all, or the plain."
    ),
    as_json: bool = typer.Option(False, "--json", metavar=_FLAG, help="Print one JSON object."),
    quiet: bool = typer.Option(False, "--quiet", "-q", metavar=_FLAG, help="Print nothing but the folder."),
) -> None:
    raise typer.Exit(lay_out(run, kind, out, images=images, as_json=as_json, quiet=quiet))


def lay_out(
    run: Path, kind: str, out: Path, *, images: str = "best", as_json: bool = False, quiet: bool = False
) -> int:
    """Writes the folder, whole or not at all.

    Args:
        run: The run's folder.
        kind: One of `FORMATS`.
        out: The folder to write.
        images: One of `pictures.CHOICES`.
        as_json: Print one JSON object.
        quiet: Print nothing but the folder.

    Returns:
        The exit status, 0.

    Raises:
        UserError: There is no run, no image in it, or the layout can't hold it.
    """
    from imgscale.app.batch.store import Store
    from imgscale.app.export import pictures
    from imgscale.app.export.folder import Folder

    if kind not in FORMATS:
        raise UnknownName("format", kind, FORMATS)
    with Store.open(run) as store:
        items, failures, states = list(store.items()), store.failures(), store.states()
    verifiers = dict.fromkeys(name for item in items for name in item.scores)
    found = list(pictures.pictures(items, images, verifiers))
    if not found:
        what = "plain image" if images == "plain" and items else "image"
        raise UserError(f"The run in {str(run)!r} has no {what}; {'make it with one' if items else 'wait for one'}.")
    with only_results_on_stdout(), waiting(quiet, f"Writing {len(found)} images"), Folder(out) as folder:
        notes = _fill(kind, found, folder, run, pictures.lost(failures))
    notes += _missing(states, len(failures))
    for note in notes:
        complain(f"{note}.")
    if as_json:
        print_json({"folder": str(out), "format": kind, "images": len(found), "notes": notes})
    else:
        print(out if quiet else f"{len(found)} images for {kind} in {out}")
    return 0


def _fill(kind: str, found: list[Picture], folder: Folder, run: Path, lost: list[dict[str, Any]]) -> list[str]:
    from imgscale.app.export import layouts

    if kind != "csv":
        return layouts.LAYOUTS[kind](found, folder)
    rows = [{"file": _within(picture.path, run), **_flat(picture)} for picture in found]
    folder.write("images.csv", layouts.table([*rows, *lost]))
    return []


def _flat(picture: Picture) -> dict[str, Any]:
    """All that is known of an image, and its row's own columns, under names that can't be mixed up."""
    return {**picture.values, **{f"row_{name}": value for name, value in picture.prompt.columns.items()}}


def _within(path: Path, run: Path) -> str:
    return path.relative_to(run).as_posix()


def _missing(states: dict[str, int], failures: int) -> list[str]:
    left = sum(states.get(state, 0) for state in ("waiting", "claimed"))
    return [
        *([f"{failures} rows of the run failed and have no image here"] if failures else []),
        *([f"{left} searches of the run aren't done yet"] if left else []),
        *([f"{cut} images were cut short by a deadline"] if (cut := states.get("cut", 0)) else []),
    ]

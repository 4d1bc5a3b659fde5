"""The `report` command: one page about a batch run."""

from __future__ import annotations

from pathlib import Path

import typer

from imgscale.app.console import complain, only_results_on_stdout, print_json, waiting
from imgscale.errors import UserError

HELP = (
    "Write one page about a batch run.\n\nThe page holds everything, also the pictures, and needs no network: sums at"
    " the top, and all images, to be sorted by any score, filtered and opened. A run may go on meanwhile."
)
_FLAG = " "


def report(
    run: Path = typer.Argument(..., metavar="RUN", help="A folder that batch wrote."),
    out: Path | None = typer.Option(None, "--out", "-o", metavar="FILE", help="Where it goes; RUN/report.html."),
    as_json: bool = typer.Option(False, "--json", metavar=_FLAG, help="Print one JSON object."),
    quiet: bool = typer.Option(False, "--quiet", "-q", metavar=_FLAG, help="Print nothing but the path of the page."),
) -> None:
    raise typer.Exit(write(run, out, as_json=as_json, quiet=quiet))


def write(run: Path, out: Path | None = None, *, as_json: bool = False, quiet: bool = False) -> int:
    """Writes the page.

    Args:
        run: The run's folder.
        out: Where the page goes; `report.html` in the run's folder for None.
        as_json: Print one JSON object.
        quiet: Print nothing but its path.

    Returns:
        The exit status, 0.

    Raises:
        UserError: There is no run, nothing in it yet, or the page can't be written.
    """
    from imgscale import files
    from imgscale.app.batch.store import Store
    from imgscale.app.report import items, page, summary

    path = out or run / "report.html"
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder; give a file with --out, such as {str(path / 'report.html')!r}.")
    with Store.open(run) as store:
        found, failures, states = list(store.items()), store.failures(), store.states()
        config, versions = store.config, store.versions
    if not found and not failures:
        raise UserError(f"The run in {str(run)!r} has no image yet; wait for the first.")
    shown = {item.number for item in found}
    failures = [failure for failure in failures if failure.item is None or failure.item not in shown]
    with only_results_on_stdout(), waiting(quiet, f"Reading {len(found)} images"):
        verifiers = items.names(found)
        sums = summary.summary(found, failures, states, config, versions, verifiers)
        described = items.describe(found, failures, path.absolute())
        text = page.page(run.absolute().name, described, sums, tiny=items.tiny(found))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text.encode())
    except OSError as error:
        raise UserError(f"{str(path)!r} can't be written ({error.strerror or error}); choose another --out.") from error
    if lost := sum(item.get("image") == "" for item in described):
        complain(f"{lost} images can't be read, and are left blank.")
    if as_json:
        print_json({"page": str(path), "images": len(found), "failures": len(failures), "scores": sums.scores})
    else:
        print(path if quiet else f"{len(found)} images, {len(failures)} failures. Wrote {path}")
    return 0

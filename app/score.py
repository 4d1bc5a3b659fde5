"""`imgscale score`: what verifiers say of images that are there already."""

from __future__ import annotations

import csv as csv_format
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale import files
from imgscale.app import checks
from imgscale.app.console import CANCELLED, complain, only_results_on_stdout, print_json, waiting
from imgscale.errors import UnknownName, UserError

if TYPE_CHECKING:
    from imgscale.app.pairs import Pair
    from imgscale.rewards import Verifier
    from imgscale.scoring import Scored

    Row = tuple[Pair, Scored]

WORLDLY = "clip(model=ViT-B-32/laion2b_s34b_b79k)"  # one that knows more than shapes


def score(
    paths: Sequence[Path],
    verifiers: Sequence[str],
    *,
    prompt: str | None = None,
    recursive: bool = False,
    sort: str | None = None,
    top: int | None = None,
    max_batch: int = 32,
    device: str | None = None,
    csv: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Scores images and prints a table, JSON or CSV.

    Args:
        paths: Images, folders, and tables of pairs; see `pairs.gather`.
        verifiers: Names, or names with options, each text with one or with several between commas.
        prompt: For all images; None for that of their row, or else their own.
        recursive: Also folders within folders.
        sort: The verifier by which the best come first; in the order of the input for None.
        top: How many to show, by the first verifier if none is named.
        max_batch: Images per call of a verifier.
        device: Where verifiers run.
        csv: A file to write, or "-" for standard output.
        as_json: Print one JSON object.
        quiet: Show neither progress nor table.

    Returns:
        The exit status: 0, or 1 if a score is missing.
    """
    if csv == "-" and as_json:
        raise UserError("--json and --csv - would both print; write one of them into a file: --csv FILE.")
    if csv is not None and csv != "-":
        checks.folder(Path(csv).parent, "--csv")
        if Path(csv).is_dir():
            raise UserError(f"--csv can't be {csv!r}, which is a folder; give a file, or - for standard output.")
    if prompt is not None:
        checks.prompt(prompt)
    names = specs(verifiers)
    from imgscale import registry
    from imgscale.app import pairs

    asked = [judge for name in names for judge in registry.judges(name)]
    wanted = pairs.gather(paths, recursive)
    if prompt is not None:
        wanted = [pairs.Pair(pair.image, prompt, pair.columns) for pair in wanted]
    try:
        with only_results_on_stdout():
            judges, scored = _scored(wanted, names, sort, max_batch, device, quiet)
            if "clip" in asked and not all(each.prompt is None or _of_shapes(each.prompt) for each in scored):
                complain(f"clip is the bundled one and knows only shapes; for other pictures give one like {WORLDLY}.")
    except KeyboardInterrupt:
        complain("stopped; no score was kept.")
        return CANCELLED
    rows = list(zip(wanted, scored, strict=True))
    missing = [row for row in rows if row[1].error]
    by = sort or (judges[0].name if top else None)
    if by is not None:
        rows.sort(key=lambda row: (row[1].scores[by] is None, -(row[1].scores[by] or 0.0)))
    rows = rows[:top]
    if csv is not None:
        _write(csv, rows, judges)
    if as_json:
        print_json({"verifiers": {j.name: j.identity() for j in judges}, "images": [_object(row) for row in rows]})
    elif csv != "-" and not quiet:
        _show(rows, judges)
    if missing:
        complain(f"{len(missing)} of {len(scored)} images lack a score; the first is {_line(missing[0])}.")
    return int(bool(missing))


def specs(texts: Sequence[str]) -> list[str]:
    """The verifiers in texts such as ``"clip,aesthetic(head=v1)"``, each once.

    Raises:
        UserError: One is empty.
    """
    from imgscale import registry

    found = [spec.strip() for text in texts for spec in registry.split(text, empty=True)]
    if not all(found):
        raise UserError(f"--verifier can't be {','.join(texts)!r}; give names with single commas between them.")
    return list(dict.fromkeys(found))


def _scored(
    wanted: Sequence[Pair], names: Sequence[str], sort: str | None, max_batch: int, device: str | None, quiet: bool
) -> tuple[list[Verifier], list[Scored]]:
    from imgscale import scoring

    with waiting(quiet, f"Loading {', '.join(names)}"):
        judges = scoring.make(names, device)
    if sort is not None and sort not in {judge.name for judge in judges}:
        raise UnknownName("verifier to sort by", sort, [judge.name for judge in judges])
    shown = not quiet and sys.stderr.isatty()
    images, prompts = [pair.image for pair in wanted], [pair.prompt for pair in wanted]
    scored = scoring.score(images, prompts, judges, max_batch=max_batch, progress=shown)
    return judges, scored


def _of_shapes(prompt: str) -> bool:
    from imgscale.app.job import parse_shapes

    try:
        parse_shapes(prompt)
    except ValueError:
        return False
    return True


def _object(row: Row) -> dict[str, Any]:
    pair, scored = row
    about = {"image": _path(pair.image), "prompt": scored.prompt, "scores": scored.scores, "error": scored.error}
    return {**about, "columns": pair.columns} if pair.columns else about


def _write(to: str, rows: Sequence[Row], judges: Sequence[Verifier]) -> None:
    """CSV: image, prompt, a column for each verifier, error; then what else the table of pairs held."""
    head = ["image", "prompt", *(judge.name for judge in judges), "error"]
    head += dict.fromkeys(name for pair, _ in rows for name in pair.columns if name not in head)
    text = io.StringIO(newline="")
    sheet = csv_format.DictWriter(text, head, restval="")
    sheet.writeheader()
    for pair, scored in rows:
        more = {k: v if isinstance(v, str | None) else json.dumps(v) for k, v in pair.columns.items()}
        about = {"image": _path(pair.image), "prompt": scored.prompt, "error": scored.error}
        sheet.writerow({**more, **about, **scored.scores})
    if to == "-":
        print(text.getvalue(), end="", flush=True)
        return
    try:
        Path(to).parent.mkdir(parents=True, exist_ok=True)
        files.write(Path(to), text.getvalue().encode())
    except OSError as error:
        raise UserError(f"{to!r} can't be written ({error.strerror or error}); choose another with --csv.") from error


def _show(rows: Sequence[Row], judges: Sequence[Verifier]) -> None:
    """A table with the prompts, if there are several, and with what went wrong, if anything did."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)  # a line for each image, whatever the length
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("image", overflow="fold")
    several = len({scored.prompt for _, scored in rows}) > 1
    if several:
        table.add_column("prompt", no_wrap=True, max_width=40)
    for judge in judges:
        table.add_column(Text(judge.name), justify="right")
    failed = any(scored.error for _, scored in rows)
    if failed:
        table.add_column("what is wrong", overflow="fold", style="red")
    for pair, scored in rows:
        values = ["–" if v is None else f"{v:.4f}" for v in scored.scores.values()]
        texts = [_path(pair.image), *([scored.prompt or ""] if several else []), *values]
        table.add_row(*(Text(_printable(text)) for text in texts + ([scored.error or ""] if failed else [])))
    console.print(table)


def _line(row: Row) -> str:
    return _printable(f"{_path(row[0].image)!r}: {(row[1].error or '').rstrip('.')}")


def _path(path: Path) -> str:
    """A path as text; what isn't UTF-8 in it can't be printed."""
    return str(path).encode(errors="surrogateescape").decode(errors="replace")


def _printable(text: str) -> str:
    """One line, and nothing in it that a terminal would obey: file names and prompts come from anywhere."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))

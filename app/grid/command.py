"""The `grid` command: its options, and what it writes and says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgscale.app import checks
from imgscale.app.auto import AutoJob
from imgscale.app.console import CANCELLED, complain, only_results_on_stdout, print_json

if TYPE_CHECKING:
    from imgscale.app.grid.axes import Axis
    from imgscale.app.grid.cells import Cell

HELP = (
    "Compare the values of one or two settings on a prompt.\n\nWrites one picture and one page with a cell for each"
    " combination, such as --x searcher=best-of-n,rbf --y budget=25,50,100. SETTING is model, searcher, guide,"
    " verifier, budget, seconds, eflops, seed, steps, guidance, height, width, preview, negative, mode of --model auto,"
    " set.OPTION of the searcher, or prompt, whose first value is the part of PROMPT that the others replace. A number"
    " range is 1,2,..,8. Ctrl-C shows what is finished."
)
_FLAG = " "


def grid(
    prompt: str = typer.Argument(..., metavar="PROMPT", help="What the images should show."),
    x: str | None = typer.Option(None, "--x", "-x", metavar="SETTING=VALUES", help="Along the columns: a,b,c."),
    y: str | None = typer.Option(None, "--y", "-y", metavar="SETTING=VALUES", help="Along the rows."),
    model: str | None = typer.Option(None, "--model", "-m", metavar="NAME", help="Of all cells, or auto; shapes-flow."),
    searcher: str | None = typer.Option(None, "--searcher", "-s", metavar="NAME", help="rbf."),
    guide: str | None = typer.Option(None, metavar="NAME", help="Bends the searcher's steps."),
    settings: list[str] = typer.Option([], "--set", metavar="OPTION=VALUE", help="The searcher's option; repeatable."),
    verifier: str | None = typer.Option(None, "--verifier", "-v", metavar="NAME", help="What to steer by; clip."),
    report: list[str] = typer.Option([], metavar="NAME", help="Held-out judge, repeatable, or none."),
    budget: str | None = typer.Option(None, "--budget", "-b", metavar="NFE", help="Model evaluations a cell; 200."),
    seconds: str | None = typer.Option(None, metavar="S", help="Also a limit on the time of each search."),
    eflops: str | None = typer.Option(None, metavar="E", help="Also a limit on eFLOPs."),
    seed: str | None = typer.Option(None, metavar="INT", help="0."),
    steps: str | None = typer.Option(None, metavar="INT", help="Steps of an ordinary sample; the model's default."),
    guidance: str | None = typer.Option(None, metavar="SCALE", help="Guidance scale; the model's default."),
    height: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    width: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    negative: str | None = typer.Option(None, metavar="TEXT", help="What guidance steers away from."),
    device: str | None = typer.Option(None, metavar="NAME", help="cpu, cuda, …; the accelerator if there is one."),
    dtype: str | None = typer.Option(None, metavar="NAME", help="float32, bfloat16 or float16."),
    preview: str | None = typer.Option(None, metavar="NAME", help="What decodes previews; the model's default."),
    verifier_timeout: str | None = typer.Option(None, metavar="S", help="Longest time of one call of a verifier."),
    mode: str | None = typer.Option(
        None, metavar="MODE", help="Of --model auto: cost, balanced, quality, or the weight of quality."
    ),
    policy: Path | None = typer.Option(None, metavar="FILE", help="Of --model auto: what it has learned."),
    pool: Path | None = typer.Option(None, metavar="FILE", help="Of --model auto: what it chooses from (TOML)."),
    together: str = typer.Option("8", metavar="N", help="Cells of a model that are searched side by side."),
    out: Path = typer.Option(Path("imgscale-grid"), "--out", "-o", metavar="FOLDER", help="Where files go."),
    as_json: bool = typer.Option(False, "--json", metavar=_FLAG, help="Print one JSON object."),
    quiet: bool = typer.Option(False, "--quiet", "-q", metavar=_FLAG, help="Show no progress and no table."),
) -> None:
    flags = {
        **{"model": model, "searcher": searcher, "guide": guide, "set": settings, "verifier": verifier},
        **{"report": report, "budget": budget, "seconds": seconds, "eflops": eflops, "seed": seed, "steps": steps},
        **{"guidance": guidance, "height": height, "width": width, "negative": negative, "device": device},
        **{"dtype": dtype, "preview": preview, "verifier-timeout": verifier_timeout},
        **{"mode": mode, "policy": policy, "pool": pool},
    }
    raise typer.Exit(compare(prompt, x, y, flags, out, together=together, as_json=as_json, quiet=quiet))


def compare(
    prompt: str,
    x: str | None,
    y: str | None,
    flags: dict[str, Any],
    out: Path,
    *,
    together: str = "8",
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Searches every cell, and writes the picture and the page.

    Args:
        prompt: What the images should show.
        x: The axis along the columns, as text.
        y: The one along the rows.
        flags: The other settings by option, as texts; None where one isn't given.
        out: The folder.
        together: Cells that are searched side by side.
        as_json: Print one JSON object.
        quiet: Show neither progress nor table.

    Returns:
        The exit status: 0, 1 if a cell has no image, or 130 if Ctrl-C ended it early.
    """
    from imgscale.app.grid import axes, cells, run

    first, second = axes.pair(x, y)
    both = [axis for axis in (first, second) if axis]
    at_once = checks.whole(together, "--together", 1, 1024) or 1
    found = cells.cells(prompt, flags, first, second)
    checks.folder(out)
    command = _command(prompt, both, flags, x, y)
    stem = _stem(out, prompt, both, command)
    # A limit on time would be shared by all that run side by side.
    alone = any(cell.job is not None and cell.job.budget.seconds is not None for cell in found)
    stopped_by = run.run(found, both, out / stem, together=1 if alone else at_once, quiet=quiet)
    if not list(run.finished(found)):
        for reason in dict.fromkeys(cell.error for cell in found):
            complain(reason)
        return CANCELLED if stopped_by else 1
    shared = _shared(found, both)
    with only_results_on_stdout():
        paths = _write(out, stem, found, first, second, prompt, shared, command)
    _say(found, both, paths, as_json, quiet)
    failed = [cell for cell in found if cell.error]
    for reason in dict.fromkeys(cell.error for cell in failed):
        complain(f"{sum(cell.error == reason for cell in failed)} without an image: {reason}")
    if stopped_by:
        complain(f"stopped by {stopped_by}; what was finished is in {str(paths['picture'])!r}.")
        return CANCELLED
    return int(bool(failed))


def _command(prompt: str, axes: Sequence[Axis], flags: dict[str, Any], x: str | None, y: str | None) -> str:
    words = ["imgscale", "grid", *(["--x", x] if x is not None else []), *(["--y", y] if y is not None else [])]
    for name, value in flags.items():
        for each in value if isinstance(value, list) else [value] if value is not None else []:
            words += [f"--{name}", str(each)]
    return shlex.join([*words, *(["--"] if prompt.startswith("-") else []), prompt])


def _stem(out: Path, prompt: str, axes: Sequence[Axis], command: str) -> str:
    """The name of the files, numbered if another grid has it; the same command keeps its name."""
    from imgscale.app.outputs import slug

    base = f"{slug(prompt)}-{'-'.join(slug(axis.name) for axis in axes)}"
    name, number = base, 1
    while (out / f"{name}.png").exists() and _said(out / f"{name}.png") != command:
        number += 1
        name = f"{base}-{number}"
    return name


def _said(path: Path) -> str | None:
    """The command in a picture that was written before."""
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as image:
            return image.info.get("parameters")
    except OSError:
        return None


def _shared(cells: Sequence[Cell], axes: Sequence[Axis]) -> str:
    """What all cells have in common, in a line."""
    jobs = [cell.job for cell in cells if cell.output is not None and cell.job is not None]
    job, outputs = jobs[0], [cell.output for cell in cells if cell.output is not None]
    free = {axis.name for axis in axes}
    if any(isinstance(each, AutoJob) for each in jobs):
        mode = job.mode if isinstance(job, AutoJob) else None
        judges = {each.judge for each in jobs}
        parts = {
            **{"model": "auto", "mode": None if mode is None else f"mode {mode}", "seed": f"seed {job.seed}"},
            "verifier": f"steered by {judges.pop()}" if len(judges) == 1 else None,
        }
        return " · ".join(text for name, text in parts.items() if text and name not in free)
    options = " ".join(f"{k}={v}" for k, v in job.options.items() if f"set.{k}" not in free)
    parts = {
        **{"model": job.model, "searcher": " ".join(filter(None, [job.searcher, options])), "guide": job.guide},
        **{"verifier": f"steered by {job.verifier}", "budget": f"{job.budget.nfe} NFE", "seed": f"seed {job.seed}"},
        "steps": f"{outputs[0].settings['num_inference_steps']} steps" if "model" not in free else None,
        "guidance": None if job.guidance is None else f"guidance {job.guidance:g}",
    }
    return " · ".join(text for name, text in parts.items() if text and name not in free)


def _write(
    out: Path,
    stem: str,
    cells: Sequence[Cell],
    x: Axis,
    y: Axis | None,
    prompt: str,
    settings: str,
    command: str,
) -> dict[str, Path]:
    from imgscale import files, png
    from imgscale.app.grid import page, picture
    from imgscale.errors import UserError

    paths = {"picture": out / f"{stem}.png", "page": out / f"{stem}.html"}
    try:
        out.mkdir(parents=True, exist_ok=True)
        png.write(paths["picture"], picture.picture(cells, x, y, prompt, settings), text=command)
        files.write(paths["page"], page.page(cells, x, y, prompt, settings, command).encode())
    except OSError as error:
        raise UserError(
            f"The output folder {str(out)!r} can't be written ({error.strerror or error}); choose another with --out."
        ) from error
    return paths


def _say(cells: Sequence[Cell], axes: Sequence[Axis], paths: dict[str, Path], as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json({**{name: str(path) for name, path in paths.items()}, "cells": [_row(cell, axes) for cell in cells]})
    elif quiet:
        print(paths["picture"])
    else:
        _table(cells, axes)
        print(f"\nWrote {paths['picture']}\n      {paths['page']}")


def _row(cell: Cell, axes: Sequence[Axis]) -> dict[str, Any]:
    from imgscale import png

    index = {"--x": cell.column, "--y": cell.row}
    row: dict[str, Any] = {axis.flag[2:]: axis.values[index[axis.flag]] for axis in axes}
    if cell.output is None:
        return {**row, "image": None, "error": cell.error}
    of = cell.output
    return {
        **row,
        "image": None if cell.image is None else str(cell.image),
        "scores": png.finite(of.scores),
        "nfe": of.nfe,
        "seconds": of.ledger.seconds,
        "seed": of.settings["seed"],
        "seeds": of.seeds,
        "stopped": of.stopped,
        **({"auto": of.decision.as_dict()} if of.decision is not None else {}),
        "command": cell.job.command() if cell.job else None,
    }


def _table(cells: Sequence[Cell], axes: Sequence[Axis]) -> None:
    """The steering scores, as they stand in the picture."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    across = next((axis for axis in axes if axis.flag == "--x"), None)
    down = next((axis for axis in axes if axis.flag == "--y"), None)
    table.add_column(Text(down.title if down else ""))
    for value in across.values if across else ("",):
        table.add_column(Text(value), justify="right")
    rows: dict[int, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.row, []).append(cell)
    for k, row in rows.items():
        scores = [f"{of.scores[of.verifier]:.4f}" if (of := cell.output) else "–" for cell in row]
        table.add_row(*map(Text, [down.values[k] if down else "", *scores]))
    Console(highlight=False).print(table)

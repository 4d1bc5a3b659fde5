"""A grid as one HTML page: every cell opens with its settings and scores, to be copied."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from imgscale import png
from imgscale.app import pages
from imgscale.app.auto import NO_LIMIT, AutoJob
from imgscale.app.generate import REASONS
from imgscale.app.grid import picture
from imgscale.app.grid.axes import Axis
from imgscale.app.grid.cells import Cell
from imgscale.app.job import Job


def page(cells: Sequence[Cell], x: Axis, y: Axis | None, title: str, settings: str, command: str) -> str:
    """The page's HTML.

    Args:
        cells: All of them, row by row.
        x: See `cells.cells`.
        y: See there.
        title: The prompt.
        settings: What all cells share.
        command: The one that made the grid.
    """
    column = y is None and x.flag == "--y"
    across: Axis | None = None if column else x
    down: Axis | None = x if column else y
    best = picture.best(cells)
    rows: dict[int, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.row, []).append(cell)
    side = 768 if len(cells) <= 24 else 512 if len(cells) <= 100 else 256
    body = "".join(
        f"<tr>{_head(down.values[k]) if down else ''}{''.join(_cell(cell, cell is best, side) for cell in row)}</tr>\n"
        for k, row in rows.items()
    )
    corner = f'<th class="corner"><small>{escape(down.title)}</small></th>' if down else ""
    titles = [escape(across.title), *["&nbsp;"] * (len(across.values) - 1)] if across else []
    heads = "".join(
        f"<th><small>{text}</small>{escape(value)}</th>"
        for text, value in zip(titles, across.values if across else (), strict=True)
    )
    data = {"columns": max(cell.column for cell in cells) + 1, "cells": [_data(cell, x, y) for cell in cells]}
    return pages.document(
        f"{title} by {' and '.join(axis.title for axis in (x, y) if axis)}",
        f"<h1>{escape(title)}</h1>\n<p class='muted'>{escape(settings)}</p>\n{_tools(cells, best)}\n"
        f"<div class='wide' style='--columns: {data['columns']}'><table>"
        f"<thead><tr>{corner}{heads or '<th></th>'}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>\n"
        "<p class='note'>Searches that ran side by side share their seconds.</p>\n"
        f"<pre>{escape(command)}</pre>",
        package="imgscale.app.grid",
        data=data,
    )


def _tools(cells: Sequence[Cell], best: Cell | None) -> str:
    names = dict.fromkeys(name for cell in cells if cell.output for name in cell.output.scores)
    choices = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in names)
    failed = sum(bool(cell.error) for cell in cells)
    said = [f"{len(cells) - failed} of {len(cells)} cells have an image."]
    said += ["★ has the highest score of the verifier that steers."] if best else []
    return (
        f"<div class='tools'><span>{' '.join(said)}</span>"
        f'<label>Shade by <select id="shade"><option value="">nothing</option>{choices}</select></label></div>'
    )


def _head(value: str) -> str:
    return f'<th scope="row">{escape(value)}</th>'


def _cell(cell: Cell, best: bool, side: int) -> str:
    if cell.output is None:
        return (
            f'<td><button type="button" class="cell failed"><b class="bad">No image</b><br>{escape(cell.error)}'
            "</button></td>"
        )
    of = cell.output
    source, tiny = pages.embedded(of.images[0], side)
    texts = {name: f"{escape(name)} {_shown(score)}" for name, score in png.finite(of.scores).items()}
    texts[of.verifier] = f"<b>{'★ ' * best}{texts[of.verifier]}</b>"
    scores = "<br>".join(texts.values())
    early = "<br><span class='bad'>stopped early</span>" if of.stopped == "cancelled" else ""
    chosen = f"{escape(of.model)}, {escape(of.searcher)}<br>" if of.decision is not None else ""
    more = f"{chosen}{of.nfe} NFE · {of.ledger.seconds:.1f} s<br>seed {of.settings['seed']}"
    return (
        f'<td><button type="button" class="cell{" best" * best}"><span class="frame">'
        f'<img{" class=tiny" * tiny} src="{source}" alt="{escape(of.prompt)}"'
        f' width="{of.images[0].width}" height="{of.images[0].height}">'
        f'<span class="more">{more}</span></span><span class="scores">{scores}{early}</span></button></td>'
    )


def _shown(score: float | None) -> str:
    return "–" if score is None else f"{score:.3f}"


def _data(cell: Cell, x: Axis, y: Axis | None) -> dict[str, Any]:
    """What a cell says when it is opened."""
    index = {"--x": cell.column, "--y": cell.row}
    at = ", ".join(f"{axis.title} {axis.values[index[axis.flag]]}" for axis in (x, y) if axis)
    found: dict[str, Any] = {"title": at, "error": cell.error, "scores": [], "facts": [], "events": [], "settings": []}
    if cell.job is not None:
        found |= {"settings": _settings(cell, cell.job), "command": cell.job.command(), "seed": str(cell.job.seed)}
    if (of := cell.output) is not None:
        found["scores"] = [
            [name, score, " (steers)" if name == of.verifier else " (held out)" if name in of.held_out else ""]
            for name, score in png.finite(of.scores).items()
        ]
        ledger = of.ledger
        found["facts"] = [
            *(("NFE", ledger.nfe), ("verifier calls", ledger.verifier_calls), ("seconds", f"{ledger.seconds:.2f}")),
            ("ended", REASONS[of.stopped] if of.finished else f"{REASONS[of.stopped]} It is only a preview."),
            ("noise key", str(of.seeds[0])),
            *([("file", f"{cell.image.parent.name}/{cell.image.name}")] if cell.image else []),
        ]
        found["events"] = of.events
    return found


def _settings(cell: Cell, job: Job) -> list[tuple[str, str]]:
    limits = job.budget
    if isinstance(job, AutoJob):
        decision = None if cell.output is None else cell.output.decision
        chosen = {
            **{"prompt": job.prompt, "negative": job.negative, "model": job.model, "mode": job.mode},
            **{"chosen": decision, "verifier": job.judge, "report": ", ".join(job.report) or None},
            **{"budget": None if limits.nfe == NO_LIMIT else f"at most {limits.nfe} NFE", "seconds": limits.seconds},
            **{"eFLOPs": limits.eflops, "seed": job.seed, "guidance": job.guidance, "height": job.height},
            "width": job.width,
        }
        return [(name, str(value)) for name, value in chosen.items() if value is not None]
    values = {
        **{"prompt": job.prompt, "negative": job.negative, "model": job.model, "searcher": job.searcher},
        **{"guide": job.guide, "options": ", ".join(f"{k}={v}" for k, v in job.options.items()) or None},
        **{"verifier": job.verifier, "report": ", ".join(job.report) or None, "budget": f"{limits.nfe} NFE"},
        **{"seconds": limits.seconds, "eFLOPs": limits.eflops, "seed": job.seed, "steps": job.steps},
        **{"guidance": job.guidance, "height": job.height, "width": job.width, "preview": job.preview},
    }
    return [(name, str(value)) for name, value in values.items() if value is not None]

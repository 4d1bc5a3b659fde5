"""What a grid consists of: one search for each combination of values, or the reason why it can't be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.app import checks
from imgscale.app.grid.axes import OPTION, TEXTS, Axis, replaced
from imgscale.app.job import Job, default_report
from imgscale.budget import Budget
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.result import SearchOutput

STOPPED = "It was stopped before this one was begun."


@dataclass
class Cell:
    """One search of a grid.

    Args:
        column: From 0.
        row: From 0.
        job: What is searched for; None if the settings can't be read.
        output: What was found.
        image: Where it was written.
        error: Why there is no image.
    """

    column: int
    row: int
    job: Job | None = None
    output: SearchOutput | None = None
    image: Path | None = None
    error: str = ""


def cells(prompt: str, flags: Mapping[str, Any], x: Axis, y: Axis | None) -> list[Cell]:
    """All of them, row by row. No model is loaded.

    What doesn't go together with the value of the other axis is a cell's own matter, and said there; a value that goes
    with none is a mistake.

    Args:
        prompt: What the images should show.
        flags: The other settings by option, as texts; None where one isn't given.
        x: Along the columns, or along the rows if it is the only one and was given as ``--y``.
        y: Along the rows; None for one row.

    Raises:
        UserError: A value goes with no other, or an axis and an option set the same.
    """
    for axis in (x, y):
        if axis is not None and flags.get(axis.name) is not None:
            raise UserError(f"{axis.flag} and --{axis.name} both set {axis.name!r}; leave one of them out.")
    if y is None and x.flag == "--y":
        places = [(0, i, [(x, value)]) for i, value in enumerate(x.values)]
    else:
        rows = [[]] if y is None else [[(y, value)] for value in y.values]
        places = [(i, k, [(x, value), *row]) for k, row in enumerate(rows) for i, value in enumerate(x.values)]
    found = [_cell(prompt, flags, column, row, at) for column, row, at in places]
    for axis in (x, y):
        for value in axis.values if axis else ():
            with_it = [cell for cell, (_, _, at) in zip(found, places, strict=True) if (axis, value) in at]
            if all(cell.error for cell in with_it):
                raise UserError(with_it[0].error)
    return found


def _cell(prompt: str, flags: Mapping[str, Any], column: int, row: int, at: Sequence[tuple[Axis, str]]) -> Cell:
    try:
        job = _job(prompt, flags, at)
    except UserError as error:
        return Cell(column, row, error=str(error))
    try:
        job.check()
    except UserError as error:
        return Cell(column, row, job, error=str(error))
    return Cell(column, row, job)


def _job(prompt: str, flags: Mapping[str, Any], at: Sequence[tuple[Axis, str]]) -> Job:
    """The search of one combination.

    Raises:
        UserError: A value can't be read.
    """
    values = {axis.name: value for axis, value in at if axis.name != "prompt"}
    given = {**flags, **{name: value for name, value in values.items() if not name.startswith(OPTION)}}
    labels = {axis.name: f"{axis.flag} {axis.name}" for axis, _ in at}

    def label(name: str) -> str:
        return labels.get(name, f"--{name}")

    def whole(name: str, low: int, high: int | None = None) -> int | None:
        return checks.whole(given[name], label(name), low, high)

    def positive(name: str, *, zero: bool = False) -> float | None:
        return checks.positive(given[name], label(name), zero=zero)

    prompt = replaced(checks.prompt(prompt), at)
    texts = {name: given[name] for name in (*TEXTS, "device") if given[name] is not None}
    if texts.get("guide") == "none":
        del texts["guide"]
    options = {name.removeprefix(OPTION): value for name, value in values.items() if name.startswith(OPTION)}
    report = given["report"]
    return Job(
        prompt=prompt,
        **texts,
        options={**checks.options(given["set"]), **options},
        report=tuple(name for name in report if name != "none")
        if report
        else default_report(texts.get("model", Job.model), prompt),
        budget=Budget(nfe=whole("budget", 1) or 200, seconds=positive("seconds"), eflops=positive("eflops")),
        seed=whole("seed", 0, checks.LARGEST) or 0,
        steps=whole("steps", 1, 1000),
        guidance=positive("guidance", zero=True),
        height=whole("height", 1, 16384),
        width=whole("width", 1, 16384),
        dtype=checks.dtype(given["dtype"]),
        plain=False,
        verifier_timeout=positive("verifier-timeout"),
    )

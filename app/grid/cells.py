"""What a grid consists of: one search for each combination of values, or the reason why it can't be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.app import auto, checks
from imgscale.app.auto import AutoJob
from imgscale.app.grid.axes import OPTION, TEXTS, Axis, replaced
from imgscale.app.job import Job, default_report
from imgscale.budget import Budget
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.result import SearchOutput

DECIDED = ("searcher", "guide", "set", "verifier", "preview", "steps", "dtype")  # by a bandit, or said in its pool file
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
        UserError: A value goes with no other, an axis and an option set the same, or an option is of no cell's model.
    """
    for axis in (x, y):
        if axis is not None and flags.get(axis.name) is not None:
            raise UserError(f"{axis.flag} and --{axis.name} both set {axis.name!r}; leave one of them out.")
    if y is None and x.flag == "--y":
        places = [(0, i, [(x, value)]) for i, value in enumerate(x.values)]
    else:
        rows = [[]] if y is None else [[(y, value)] for value in y.values]
        places = [(i, k, [(x, value), *row]) for k, row in enumerate(rows) for i, value in enumerate(x.values)]
    models = next((axis.values for axis in (x, y) if axis and axis.name == "model"), (flags.get("model"),))
    for name in ("policy", "pool", "mode"):
        if flags.get(name) is not None and "auto" not in models:
            raise UserError(f"--{name} is for --model auto; add that, or leave it out.")
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

    prompt = replaced(checks.prompt(prompt), at)
    if given["model"] == "auto":
        return _automatic(prompt, given, values, label)
    if "mode" in values:
        raise UserError(f"{label('mode')} is for --model auto; add that, or leave it out.")
    texts = {name: given[name] for name in (*TEXTS, "device") if name != "mode" and given[name] is not None}
    if texts.get("guide") == "none":
        del texts["guide"]
    options = {name.removeprefix(OPTION): value for name, value in values.items() if name.startswith(OPTION)}
    report = given["report"] or default_report(texts.get("model", Job.model), prompt)
    return Job(
        prompt=prompt,
        **texts,
        **_numbers(given, label, 200),
        options={**checks.options(given["set"]), **options},
        report=tuple(name for name in report if name != "none"),
        steps=checks.whole(given["steps"], label("steps"), 1, 1000),
        dtype=checks.dtype(given["dtype"]),
        plain=False,
    )


def _automatic(prompt: str, given: Mapping[str, Any], values: Collection[str], label: Callable[[str], str]) -> AutoJob:
    """One whose model and search the bandit chooses.

    Raises:
        UserError: A value can't be read, or isn't the user's to set here.
    """
    for name in (*DECIDED, *values):
        if name.startswith(OPTION) or (name in DECIDED and given[name]):
            raise auto.decided(label(name))
    pool, policy = (None if given.get(name) is None else Path(given[name]) for name in ("pool", "policy"))
    report = given["report"] or auto.default_judges(pool, prompt)
    return AutoJob(
        prompt=prompt,
        model="auto",
        **_numbers(given, label, auto.NO_LIMIT),
        negative=given["negative"],
        device=given["device"],
        report=tuple(name for name in report if name != "none"),
        plain=False,
        mode=auto.weight(given["mode"]),
        policy=policy,
        pool=pool,
    )


def _numbers(given: Mapping[str, Any], label: Callable[[str], str], most: int) -> dict[str, Any]:
    """What every search is asked for in numbers.

    Args:
        given: The settings as texts.
        label: What the user calls a setting.
        most: NFE where no budget is given.
    """

    def whole(name: str, low: int, high: int | None = None) -> int | None:
        return checks.whole(given[name], label(name), low, high)

    def positive(name: str, *, zero: bool = False) -> float | None:
        return checks.positive(given[name], label(name), zero=zero)

    return {
        "budget": Budget(nfe=whole("budget", 1) or most, seconds=positive("seconds"), eflops=positive("eflops")),
        "seed": whole("seed", 0, checks.LARGEST) or 0,
        "guidance": positive("guidance", zero=True),
        "height": whole("height", 1, 16384),
        "width": whole("width", 1, 16384),
        "verifier_timeout": positive("verifier-timeout"),
    }

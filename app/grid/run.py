"""The searches of a grid: those of one model side by side, then those of the next, so that each is loaded once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.app.auto import AutoJob
from imgscale.app.console import Interrupt, complain, only_results_on_stdout
from imgscale.app.grid.axes import Axis
from imgscale.app.grid.cells import STOPPED, Cell
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.automatic import Auto
    from imgscale.watch import Progress


def run(cells: Sequence[Cell], axes: Sequence[Axis], folder: Path, *, together: int, quiet: bool = False) -> str | None:
    """Searches, and writes each image as soon as it is found. What fails is said in its cell, and the rest goes on.

    Args:
        cells: From `cells.cells`; they are filled in.
        axes: What the files are named by.
        folder: Where the images go.
        together: Searches that share batches.
        quiet: Show no progress.

    Returns:
        "Ctrl-C" or "SIGTERM" if that ended it.
    """
    todo = [cell for cell in cells if not cell.error]
    with Interrupt("what is finished will be shown (once more ends at once)") as interrupt, _Bar(quiet, todo) as bar:
        grid = _Grid(axes, folder, together, interrupt, bar)
        try:
            for group in by_model(todo):
                if not interrupt.asked:
                    grid.model(group, quiet)
        except KeyboardInterrupt:
            interrupt.asked = True
    for cell in todo:
        if cell.output is None and not cell.error:
            cell.error = STOPPED
    return interrupt.by if interrupt.asked else None


def by_model(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of each model, in the order in which models first appear."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        assert cell.job is not None
        groups.setdefault(cell.job.model, []).append(cell)
    return list(groups.values())


class _Grid:
    def __init__(self, axes: Sequence[Axis], folder: Path, together: int, interrupt: Interrupt, bar: _Bar) -> None:
        self._axes, self._folder, self._together = axes, folder, together
        self._interrupt, self._bar = interrupt, bar

    def model(self, cells: Sequence[Cell], quiet: bool) -> None:
        """All cells of one model. If something breaks while they share batches, the rest is done one by one."""
        assert cells[0].job is not None
        job = cells[0].job
        try:  # a bandit is to answer all cells by what it knew at first, whichever comes first
            scaler = job.load(quiet, learn=False) if isinstance(job, AutoJob) else job.load(quiet)
        except Exception as error:
            for cell in cells:
                self._fail(cell, error)
            return
        try:
            self._search(scaler, cells, self._together)
        except Exception as error:
            _let_developers_see(error)
            for cell in [cell for cell in cells if cell.output is None and not cell.error]:
                if self._interrupt.asked:
                    break
                try:
                    self._search(scaler, [cell], 1)
                except Exception as its_own:
                    self._fail(cell, its_own)

    def _search(self, scaler: Any, cells: Sequence[Cell], together: int) -> None:
        def follow(progress: Progress) -> None:
            if self._interrupt.asked:
                progress.cancel()

        if isinstance(cells[0].job, AutoJob):
            self._ask_bandit(scaler, cells, follow)
            return
        asks = (cell.job.ask() for cell in cells if cell.job is not None)
        with only_results_on_stdout():
            for done in scaler.stream(asks, together=together, callback=follow):
                cell = cells[done.place]
                if done.error is not None:
                    self._fail(cell, done.error)
                elif done.output is not None:
                    cell.output = done.output
                    self._save(cell)
                    self._bar.count()

    def _ask_bandit(self, bandit: Auto, cells: Sequence[Cell], follow: Callable[[Progress], None]) -> None:
        for cell in cells:
            if self._interrupt.asked:
                break
            assert isinstance(cell.job, AutoJob)
            try:
                with only_results_on_stdout():
                    cell.output = cell.job.answer(bandit, follow)
            except UserError as error:
                self._fail(cell, error)
            else:
                self._save(cell)
                self._bar.count()

    def _save(self, cell: Cell) -> None:
        from imgscale.app import outputs

        assert cell.output is not None
        index = {"--x": cell.column, "--y": cell.row}
        name = "-".join(outputs.slug(f"{axis.title} {axis.values[index[axis.flag]]}") for axis in self._axes)
        cut = name.encode()[: 2 * outputs.LONGEST_SLUG].decode(errors="ignore")
        try:
            cell.image = outputs.save_image(cell.output, self._folder, cut)
        except UserError as error:  # the picture and the page may still be possible
            complain(str(error))

    def _fail(self, cell: Cell, error: Exception) -> None:
        if isinstance(error, UserError):
            cell.error = str(error)
        else:
            _let_developers_see(error)
            cell.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self._bar.count()


def _let_developers_see(error: Exception) -> None:
    if not isinstance(error, UserError) and os.environ.get("IMGSCALE_DEBUG") == "1":
        raise error


class _Bar:
    """How many cells are done and how long the rest takes; off a terminal, a line at each tenth or half a minute."""

    def __init__(self, quiet: bool, todo: Sequence[Cell]) -> None:
        self._quiet, self._total, self._done = quiet, len(todo), 0
        self._bar: Any = None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> _Bar:
        from rich.console import Console

        console = Console(stderr=True)
        if not self._quiet and self._total and console.is_terminal and not console.is_dumb_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Columns

            left = TimeRemainingColumn(), TextColumn("left")
            self._bar = Columns(
                MofNCompleteColumn(), TextColumn("cells"), BarColumn(), *left, console=console, transient=True
            )
            self._task = self._bar.add_task("cells", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def count(self) -> None:
        """One more is done."""
        before, self._done = self._done, self._done + 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            return
        now = time.monotonic()
        if not self._quiet and (self._done * 10 // self._total > before * 10 // self._total or now - self._said >= 30):
            self._said = now
            print(f"{self._done}/{self._total} cells, {now - self._began:.0f} s", file=sys.stderr, flush=True)


def finished(cells: Sequence[Cell]) -> Iterator[Cell]:
    """The cells with an image."""
    return (cell for cell in cells if cell.output is not None)

"""How far a run has come and how long the rest takes, on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any


class Bar:
    """A line that moves on a terminal; off it, a line at each tenth or half a minute.

    Args:
        quiet: Say nothing.
        total: Items of the run.
        done: Of them, before this command.
    """

    def __init__(self, quiet: bool, total: int, done: int) -> None:
        self._quiet, self._total, self._before, self._done = quiet, total, done, done
        self._nfe = 0
        self._bar: Any = None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Bar:
        from rich.console import Console

        console = Console(stderr=True)
        if not self._quiet and console.is_terminal and not console.is_dumb_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Columns

            columns = BarColumn(), TextColumn("{task.fields[nfe]} NFE"), TimeRemainingColumn(), TextColumn("left")
            count = MofNCompleteColumn(), TextColumn("searches")
            self._bar = Columns(*count, *columns, console=console, transient=True)
            self._task = self._bar.add_task("searches", total=self._total, completed=self._done, nfe=0)
            self._bar.start()
        elif not self._quiet and self._before:
            print(f"{self._before}/{self._total} searches were done before", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def spent(self, nfe: int) -> None:
        """So many model evaluations, of the searches that share batches now and those that went before them."""
        self._nfe = nfe
        if self._bar is not None:
            self._bar.update(self._task, nfe=nfe)

    def count(self, done: int) -> None:
        """So many items are over now."""
        before, self._done = self._done, done
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        now = time.monotonic()
        tenth = done * 10 // self._total > before * 10 // self._total
        if self._quiet or self._bar is not None or not (tenth or now - self._said >= 30):
            return
        self._said = now
        new, spent = done - self._before, now - self._began
        left = f", about {duration(spent / new * (self._total - done))} left" if new and done < self._total else ""
        text = f"{done}/{self._total} searches, {self._nfe} NFE, {duration(spent)}{left}"
        print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time for people: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

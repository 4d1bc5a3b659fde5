"""What commands say: results to standard output, everything about the work to standard error."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imgscale.watch import Progress

CANCELLED = 130  # the exit status of a command that Ctrl-C ended


def complain(sentence: str) -> None:
    """One line on standard error."""
    print(f"imgscale: {sentence}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON value on standard output, and nothing that JSON doesn't know, such as infinity."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False), flush=True)


@contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Sends what libraries print to standard error, so that standard output holds results alone."""
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout


class Interrupt:
    """Ctrl-C or SIGTERM: the first asks the search to end with its best so far, the second ends the program.

    SIGTERM is what `kill`, `timeout`, systemd and SLURM send first.

    Args:
        promise: What is said at the first.

    Attributes:
        asked: Whether it was asked to stop.
        by: What asked.
    """

    def __init__(self, promise: str = "the best so far will be written (once more drops it)") -> None:
        self.asked = False
        self.by = "Ctrl-C"
        self._promise = promise

    def __enter__(self) -> Interrupt:
        self._old: dict[int, Any] = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        for each, old in self._old.items():
            if callable(old) or (each == signal.SIGTERM and old == signal.SIG_DFL):  # and not ignored
                signal.signal(each, self._first)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        for each, old in self._old.items():
            if old is not None:  # as a handler that isn't Python's reads
                signal.signal(each, old)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGTERM:
            self.by = "SIGTERM"
        self._restore()
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"\nimgscale: stopping; {self._promise}.\n".encode())


class Live:
    """A progress line in NFE with the best score and the time left.

    Where standard error is no terminal, it says so at each tenth of the total, and at least every half a minute.

    Args:
        quiet: Say nothing.
        total: NFE that may be spent.
        callback: Called with each `Progress`, too.
    """

    def __init__(self, quiet: bool, total: int | None, callback: Callable[[Progress], None]) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._quiet, self._total, self._callback = quiet, total, callback
        self._bar: Any = None
        self._tenth, self._began = 0, time.monotonic()
        self._said = self._began

    def __enter__(self) -> Live:
        if not self._quiet and self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = ("{task.description}", "{task.fields[spent]} NFE", "{task.fields[best]}")
            texts = [TextColumn(column) for column in columns]
            left = TimeRemainingColumn(), TextColumn("left")
            self._bar = Bar(texts[0], BarColumn(), *texts[1:], *left, console=self._console, transient=True)
            self._task = self._bar.add_task("searching", total=self._total, spent="0", best="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def aim(self, total: int) -> None:
        """Another total, where it is known only now."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def __call__(self, progress: Progress) -> None:
        self._callback(progress)
        if self._quiet:
            return
        best = _best(progress)
        spent = f"{progress.nfe}" + (f"/{self._total}" if self._total else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.nfe, spent=spent, best=best)
            return
        now, tenth = time.monotonic(), progress.nfe * 10 // self._total if self._total else 0
        if tenth > self._tenth or now - self._said >= 30:
            self._tenth, self._said = tenth, now
            said = ", ".join(filter(None, [f"{spent} NFE", best, f"{now - self._began:.0f} s"]))
            print(said, file=sys.stderr, flush=True)


def _best(progress: Progress) -> str:
    """The best score so far; that of the most promising preview while no image is finished; before that, nothing."""
    for name, score in (("best", progress.best[0]), ("best preview", progress.in_flight[0])):
        if score is not None and math.isfinite(score):
            return f"{name} {score:.4f}"
    return ""


@contextmanager
def waiting(quiet: bool, text: str) -> Iterator[None]:
    """Says what takes its time, on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(Text(text), spinner="dots"):
        yield

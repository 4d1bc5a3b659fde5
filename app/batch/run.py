"""The searches of a run: as many side by side as fill batches, each kept as soon as it ends."""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from imgscale.app.batch import choosing, rounds
from imgscale.app.batch.clock import Clock
from imgscale.app.batch.keep import keep
from imgscale.app.batch.plan import Plan, Task
from imgscale.app.batch.progress import Bar
from imgscale.app.batch.queue import Queue
from imgscale.app.batch.rounds import Turn
from imgscale.app.batch.store import CUT, DONE
from imgscale.app.console import Interrupt, only_results_on_stdout
from imgscale.budget import Budget
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.asks import Ask, Done
    from imgscale.result import SearchOutput
    from imgscale.scaler import Scaler
    from imgscale.watch import Progress

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # as bad for the next item
ALIKE = 5  # searches that break one after the other, after which the device is to blame
PAUSE = 0.5  # seconds between looks at what other processes do


class Broken(Exception):
    """Why no further search makes sense."""


@dataclass
class _Claimed:
    """An item that is being searched for."""

    task: Task
    ask: Ask
    since: float


class _Asks:
    """Claims the next item whenever the stream has room for one, and may have more to give later than now."""

    def __init__(self, run: Run, model: str) -> None:
        self._run, self._model = run, model
        self.running: dict[int, _Claimed] = {}  # by place
        self._place = 0

    def __iter__(self) -> Iterator[Ask]:
        return self

    def __next__(self) -> Ask:
        claimed = self._run.claim(self._model)
        if claimed is None:
            raise StopIteration
        self.running[self._place] = claimed
        self._place += 1
        return claimed.ask


class Run:
    """Does what is left of a run.

    Args:
        plan: What the run consists of.
        queue: What is left of it.
        interrupt: Ends it.
        clock: Ends it, too.
        bar: Shows how far it has come.
        together: Searches that run side by side.
        total: Model evaluations of all searches together, dealt in rounds; each has its own budget for None.
        quiet: Show nothing.

    Attributes:
        finished: How many items this process has done.
    """

    def __init__(
        self,
        plan: Plan,
        queue: Queue,
        interrupt: Interrupt,
        clock: Clock,
        bar: Bar,
        *,
        together: int = 8,
        total: int | None = None,
        quiet: bool = False,
    ) -> None:
        self.finished = 0
        self._plan, self._queue = plan, queue
        self._interrupt, self._clock, self._bar = interrupt, clock, bar
        self._together, self._total, self._quiet = together, total, quiet
        self._scaler: Scaler | None = None
        self._loaded: str | None = None
        self._spent = 0  # of searches that ran one by one
        self._alike: list[str] = []  # what the last searches broke by

    def all(self) -> None:
        """Goes on until there is nothing left, or no time.

        Raises:
            Broken: No further search makes sense; what is finished is kept.
        """
        try:
            while not self._ending() and self._more():
                if not any([self._model(model) for model in self._plan.models]):
                    self._queue.take_over()
                    time.sleep(PAUSE)
        except sqlite3.OperationalError as error:
            raise Broken(f"The store can't be written ({error}).") from error

    def claim(self, model: str) -> _Claimed | None:
        """The next item of a model, if there is one to be had and time for it."""
        while not self._ending():
            number = self._queue.claim(model)
            if number is None:
                return None
            task = self._plan.tasks[number]
            if not task.error:
                return _Claimed(task, self._ask(task), time.monotonic())
            self._fail(task, task.error)
        return None

    def _ending(self) -> bool:
        return self._interrupt.asked or not self._clock.room()

    def _more(self) -> bool:
        """Whether something is left to do; where a total is dealt in rounds, the next one is begun when one is over."""
        if self._total is None:
            return bool(self._queue.left())
        turns = self._queue.turns()
        if turns and self._queue.left():
            return True
        able = [task for task in self._plan.tasks if not task.error]
        least = {turn.item: turn.least for turn in turns} or self._least(able)
        weights = {task.number: float(task.job.budget.nfe or 1) for task in able}
        if able and (begun := rounds.deal(self._total, least, weights, turns)):
            self._queue.open(begun)
        return bool(self._queue.left())

    def _least(self, tasks: Sequence[Task]) -> dict[int, int]:
        """By item what one sample takes; 1 where its model can't be loaded, which will be said when its turn comes."""
        known: dict[tuple[str, int | None], int] = {}
        for task in tasks:
            kind = (task.job.model, task.job.steps)
            if kind not in known:
                known[kind] = self._sample_nfe(task)
        return {task.number: known[task.job.model, task.job.steps] for task in tasks}

    def _sample_nfe(self, task: Task) -> int:
        try:
            self._load(task.job.model)
        except Exception as error:
            _let_developers_see(error)
            return 1
        assert self._scaler is not None
        # The least budget that there is would do, but a searcher may refuse a small one.
        return self._scaler.sample_nfe(replace(task.job.ask(), budget=Budget(nfe=10**9)))

    def _ask(self, task: Task) -> Ask:
        ask = replace(task.job.ask(), keep=task.keep)
        turn = self._queue.turn(task.number)
        if turn is None:
            return ask
        return replace(
            ask,
            budget=replace(task.job.budget, nfe=turn.budget),
            seed=rounds.seed(ask.seed, turn.round),
            plain=ask.plain and turn.round == 0,
        )

    def _model(self, model: str) -> bool:
        """Searches for all items of a model that can be had; whether there were any."""
        if not self._queue.ready(model) or self._ending():
            return False
        try:
            self._load(model)
        except Exception as error:
            _let_developers_see(error)
            while (claimed := self.claim(model)) is not None:
                self._fail(claimed.task, reason(error))
            return True
        asks = _Asks(self, model)
        try:
            self._stream(asks)
        except (Broken, sqlite3.OperationalError):
            raise
        except Exception as error:  # of one of them, and nobody knows which
            _let_developers_see(error)
            for claimed in list(asks.running.values()):
                self._alone(claimed)
        return True

    def _load(self, model: str) -> None:
        if self._loaded != model:
            self._scaler = self._loaded = None  # before the next one takes its memory
            job = next(task.job for task in self._plan.tasks if task.job.model == model)
            self._scaler = job.load(self._quiet)
            if (known := self._queue.calibration(model)) is not None:  # whatever is learned meanwhile
                self._scaler.calibrations.hold(known)
            self._loaded = model

    def _stream(self, asks: _Asks) -> None:
        assert self._scaler is not None
        if self._model_is_chosen:
            for _ in asks:
                place, claimed = next(reversed(asks.running.items()))
                self._choosing(claimed)
                del asks.running[place]
            return
        with only_results_on_stdout():
            for done in self._scaler.stream(asks, together=self._together, callback=self._follow):
                self._settle(asks.running[done.place], done)
                del asks.running[done.place]

    @property
    def _model_is_chosen(self) -> bool:
        return self._loaded == "auto"

    def _choosing(self, claimed: _Claimed) -> None:
        """Searches for one item whose model is chosen, and learns from it."""
        auto: Any = self._scaler
        with only_results_on_stdout():
            done = choosing.search(auto, self._queue, claimed.task, claimed.ask, self._follow)
        self._settle(claimed, done)
        if done.output is not None:
            self._spent += done.output.nfe

    def _follow(self, progress: Progress) -> None:
        self._bar.spent(self._spent + progress.nfe)
        if self._interrupt.asked:
            progress.cancel()
        elif self._clock.over():
            self._clock.rung = True
            progress.cancel(finish=True)

    def _settle(self, claimed: _Claimed, done: Done) -> None:
        """Keeps what came of an item."""
        task, output = claimed.task, done.output
        if output is None:
            self._fail(task, str(done.error))
            return
        if output.stopped == "cancelled":
            self._queue.release(task.number)
            return
        turn = self._queue.turn(task.number)
        before = None if turn is None or turn.round == 0 else self._queue.result(task.number)
        cut = output.stopped == "deadline" and self._clock.rung
        if cut and before is not None:
            self._queue.cut(task)
            return
        try:
            result = keep(output, task, self._queue.folder, before)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise Broken(f"The run folder can't be written ({error.strerror}).") from error
            self._fail(task, f"Its images can't be written ({error.strerror or error}).")
            return
        if output.stopped == "verifier":
            self._queue.fail(task, _first(output.events) or "The verifier failed for every image.", result)
        elif self._queue.finish(task, result, CUT if cut else DONE, None if cut else self._ended(turn, task, output)):
            self.finished += not cut
            if not cut and self._model_is_chosen:
                choosing.learn(self._scaler, output)  # type: ignore[arg-type]
        self._alike.clear()
        self._clock.took(time.monotonic() - claimed.since)
        self._count()

    def _ended(self, turn: Turn | None, task: Task, output: SearchOutput) -> Turn | None:
        if turn is None:
            return None
        assert self._scaler is not None
        span = self._scaler.verifier(task.job.verifier).range
        scores = [score for score in output.scored if math.isfinite(score)]
        return replace(turn, nfe=output.nfe, scores=scores, ceiling=span[1] if span else None)

    def _alone(self, claimed: _Claimed) -> None:
        """Searches for one item by itself, after something broke while it shared batches with others."""
        if self._interrupt.asked or self._clock.over():
            self._queue.release(claimed.task.number)
            return
        assert self._scaler is not None
        try:
            if self._model_is_chosen:
                self._choosing(claimed)
                return
            with only_results_on_stdout():
                for done in self._scaler.stream([claimed.ask], callback=self._follow):
                    self._settle(claimed, done)
        except (Broken, sqlite3.OperationalError):
            raise
        except Exception as error:
            self._alike.append(reason(error))
            self._fail(claimed.task, reason(error))
            if len(self._alike) >= ALIKE and len(set(self._alike[-ALIKE:])) == 1:
                raise Broken(f"The last {ALIKE} searches broke in the same way ({reason(error)}).") from error

    def _fail(self, task: Task, why: str) -> None:
        self._queue.fail(task, why)
        self._count()

    def _count(self) -> None:
        states = self._queue.states()
        self._bar.count(len(self._plan.tasks) - states.get("waiting", 0) - states.get("claimed", 0))


def reason(error: Exception) -> str:
    """What went wrong, in one sentence."""
    return (
        str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    )


def _first(events: list[str]) -> str:
    return events[0] if events else ""


def _let_developers_see(error: Exception) -> None:
    if not isinstance(error, UserError) and os.environ.get("IMGSCALE_DEBUG") == "1":
        raise error

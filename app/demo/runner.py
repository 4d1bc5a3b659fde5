"""Does the searches of tickets: models stay loaded, pictures are made only for those who look."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.app.auto import AutoJob
from imgscale.app.demo.desk import Desk, Point, Ticket
from imgscale.app.demo.offer import AUTO, Offer
from imgscale.app.demo.pace import Pace
from imgscale.app.job import Job
from imgscale.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from imgscale.automatic import Auto, Decision
    from imgscale.bandit.poolfile import Entry
    from imgscale.png import Record
    from imgscale.result import SearchOutput
    from imgscale.scaler import Scaler
    from imgscale.watch import Progress

KEPT = 12  # finished candidates that the gallery shows
REST = 0.2  # seconds between two pictures of one search
PROBE = 3  # ordinary samples that a measurement of the pace takes


@dataclass(frozen=True)
class Again:
    """A picture to make once more.

    Args:
        record: Of how it was made.
        image: Its pixels, RGB.
    """

    record: Record
    image: Image


class Runner:
    """All searches of a demo.

    Args:
        offer: What it offers.
        out: The folder that results are written into.
        desk: The line before the device.
    """

    def __init__(self, offer: Offer, out: Path, desk: Desk | None = None) -> None:
        self.offer, self.out = offer, out
        self.desk = desk or Desk(offer.max_queue)
        self.pace = Pace()
        self._scalers: dict[tuple[str, str | None], Scaler] = {}  # by model and dtype
        self._bandit: Auto | None = None

    def enter(self, who: str, job: Job, again: Again | None = None) -> Ticket:
        """Joins the line with a search.

        Args:
            who: The person; each has one place.
            job: What to search for.
            again: The picture to compare with, where this makes one once more.

        Raises:
            UserError: There is no place.
        """
        return self.desk.enter(who, lambda ticket: self._search(ticket, job, again))

    def measure(self, model: str, who: str = "the demo") -> Ticket:
        """Joins the line with a short search that tells how long others will take.

        Of "auto" nothing is measured, since each of its searches takes its own time; it is made ready alone.

        Raises:
            UserError: There is no place.
        """
        if model == AUTO:
            return self.desk.enter(who, self._ready)
        job = self.offer.job(
            "a red circle", model, self.offer.searchers[0], self.offer.verifiers[:1], (), self.offer.max_budget, "0"
        )

        def work(ticket: Ticket) -> None:
            scaler = self._scaler(job)
            if ticket.stopped:
                return
            nfe = PROBE * (scaler.settings.steps or scaler.engine.denoiser.steps_default)
            short = replace(
                job, plain=False, report=(), budget=replace(job.budget, nfe=min(nfe, self.offer.max_budget))
            )
            for _ in range(2):  # the first warms up
                output = run(scaler, short, lambda progress: progress.cancel() if ticket.ending else None)
                if ticket.ending:
                    return
            self._note(short, output)
            ticket.show(state="done")

        return self.desk.enter(who, work)

    def estimate(self, model: str, searcher: str, verifiers: list[str], nfe: int) -> float | None:
        """Seconds of a search on this machine, or None where nothing like it has run yet."""
        return None if model == AUTO else self.pace.estimate(model, searcher, "+".join(verifiers), nfe)

    # --------------------------------------------------------------------------------------------- in the desk's thread

    def _ready(self, ticket: Ticket) -> None:
        self._auto(self.offer.job("a red circle", AUTO, "", (), (), self.offer.max_budget, "0"))
        ticket.show(state="done")

    def _search(self, ticket: Ticket, job: Job, again: Again | None) -> None:
        from imgscale.app import outputs, rerun

        if isinstance(job, AutoJob):
            return self._choose(ticket, job)
        loaded = self._scaler(job)
        if ticket.stopped:
            return
        ticket.show(state="searching", total=job.budget.nfe)
        watch = _Watch(ticket)
        if again is None:
            output = run(loaded, job, watch)
        else:
            with _as_recorded(loaded, again.record, job, self.offer.largest(job.model)) as scaler:
                output = run(scaler, job, _both(again.record, watch))
        self._note(job, output)
        said = ""
        if again is not None:
            said = f"Stopped after {output.nfe} of {again.record.nfe} NFE, so there is nothing to compare."
            if not ticket.stopped:
                said = rerun.compare(again.record, again.image, output)
        _done(ticket, output, files=outputs.save(output, self.out), said=said)

    def _choose(self, ticket: Ticket, job: AutoJob) -> None:
        """A search that the bandit chooses, and learns from at once."""
        from imgscale import png
        from imgscale.app import outputs, rerun

        bandit = self._auto(job)
        if ticket.stopped:
            return
        if job.mode is not None:
            bandit.switch(job.mode)

        def explain(decision: Decision) -> None:
            if ticket.stopped:
                raise _Left
            ticket.show(state="searching", total=decision.choice.action.nfe, chosen=str(decision))

        try:
            output = bandit(
                job.prompt,
                budget=job.budget,
                seed=job.seed,
                report=job.report,
                progress=False,
                callback=_Watch(ticket),
                explain=explain,
                keep=KEPT,
            )
        except _Left:
            return
        record = png.Record.of(output)
        made = rerun.job_of(record, record.model, record.verifier, record.preview, self.offer.device)
        _done(ticket, output, files=outputs.save(output, self.out), job=made)

    def _note(self, job: Job, output: SearchOutput) -> None:
        self.pace.note(job.model, job.searcher, job.verifier, output)

    def _auto(self, job: Job) -> Auto:
        if self._bandit is None:
            made: Any = job.load(quiet=True)
            self._bandit = made
            made.residents.lender = self._lent
        return self._bandit

    def _lent(self, entry: Entry) -> Scaler | None:
        """A model of the pool that is loaded here already."""
        for (model, dtype), scaler in self._scalers.items():
            if self._alike(entry, model) and entry.dtype in (dtype, _dtype(scaler)):
                return copy.copy(scaler)  # what the pool says of it is not for others
        return None

    def _borrowed(self, job: Job) -> Scaler | None:
        """A model that the bandit has loaded already."""
        if self._bandit is not None:
            for entry in self._bandit.file.models:
                scaler = self._bandit.residents.find(entry.name)
                if scaler and self._alike(entry, job.model) and job.dtype in (entry.dtype, _dtype(scaler)):
                    own = copy.copy(scaler)
                    own.price = None
                    return own
        return None

    def _alike(self, entry: Entry, model: str) -> bool:
        """Whether the pool loads a model as this demo does, but for the dtype."""
        loaded = (entry.model, entry.device or self.offer.device, entry.max_batch)
        return loaded == (model, self.offer.device, Job.max_batch)

    def _scaler(self, job: Job) -> Scaler:
        """The model in a dtype; bundled ones stay loaded, and of the others the one that was used last."""
        from imgscale.models import bundled

        key, usual = (job.model, job.dtype), self._scalers.get((job.model, self.offer.dtype))
        if usual is not None and job.dtype == _dtype(usual):
            return usual
        if key not in self._scalers:
            self._scalers = {key: scaler for key, scaler in self._scalers.items() if key[0] in bundled()}
            self._scalers[key] = self._borrowed(job) or job.load(quiet=True)
        return self._scalers[key]


def _dtype(scaler: Scaler) -> str:
    return str(scaler.engine.denoiser.description["dtype"])


class _Left(Exception):
    """Whoever asked stopped while the bandit's choice was loading."""


def _done(ticket: Ticket, output: SearchOutput, **more: Any) -> None:
    ticket.show(
        state="done",
        output=output,
        gallery=tuple(output.gallery),
        nfe=output.nfe,
        ledger=output.ledger,
        trace=tuple(Point(p.nfe, p.score, p.report) for p in output.trace),
        **more,
    )


def run(scaler: Scaler, job: Job, callback: Callable[[Progress], Any]) -> SearchOutput:
    """One search, which keeps its best candidates.

    Its plain image is made before it, not beside it as `Scaler.stream` does: a picture made again has none to share
    batches with.
    """
    ask = replace(job.ask(), keep=KEPT)
    given = {field.name: getattr(ask, field.name) for field in fields(ask)}
    more = given.pop("pipeline_arguments")
    output: SearchOutput = scaler(**given, **more, progress=False, callback=callback)
    return output


def _both(record: Record, watch: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """A callback that also ends the search where the recorded one was ended."""
    from imgscale.app import rerun

    def follow(progress: Progress) -> None:
        watch(progress)
        rerun.stop_again(record, progress)

    return follow


class _Watch:
    """Shows a ticket how its search is, after each engine step."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._began = time.monotonic()
        self._rested = 0.0
        self._points: list[Point] = []

    def __call__(self, progress: Progress) -> None:
        ticket, now = self._ticket, time.monotonic()
        if ticket.ending:
            progress.cancel()
            return
        score = progress.best[0]
        if score is not None and (not self._points or score != self._points[-1].score):
            self._points.append(Point(progress.nfe, score))
        changes: dict[str, Any] = {"nfe": progress.nfe, "seconds": now - self._began, "trace": tuple(self._points)}
        if now - self._rested >= REST and ticket.wanted:
            gallery = progress.gallery(0)
            if gallery and self._points and gallery[0].report:
                self._points[-1] = replace(self._points[-1], report=dict(gallery[0].report))
            changes |= {"preview": progress.preview(0), "gallery": tuple(gallery), "trace": tuple(self._points)}
            changes["ledger"] = replace(progress.ledger(0))  # a copy, since the engine goes on writing to its own
            self._rested = time.monotonic()
        ticket.show(**changes)


@contextmanager
def _as_recorded(loaded: Scaler, record: Record, job: Job, largest: int) -> Iterator[Scaler]:
    """The model as it was when a picture was made: what was known of it then, and the size of its batches.

    Raises:
        UserError: The picture is larger than those that the model makes by itself, and than ``largest`` pixels.
    """
    from imgscale.app import rerun

    own = loaded.engine.denoiser.encode(record.prompt)
    if record.width * record.height > max(own.width * own.height, largest):
        raise UserError(
            f"The picture has {record.width}x{record.height} pixels, more than the {own.width}x{own.height} that this"
            " demo makes with its model; use imgscale rerun on the command line."
        )
    scaler = copy.copy(loaded)  # others keep what they know
    rerun.as_recorded(scaler, record, job)
    size, scaler.engine.max_batch = scaler.engine.max_batch, min(record.max_batch, scaler.engine.max_batch)
    try:
        yield scaler
    finally:
        scaler.engine.max_batch = size

"""What the page's buttons and the API do: forms and pictures to tickets, and tickets to what is shown."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
from PIL.Image import Image

from imgscale import png, registry
from imgscale.app import outputs, rerun
from imgscale.app.auto import AutoJob
from imgscale.app.demo import view as html
from imgscale.app.demo.chart import chart
from imgscale.app.demo.desk import Ticket, View
from imgscale.app.demo.offer import AUTO
from imgscale.app.demo.pace import span
from imgscale.app.demo.runner import Again, Runner
from imgscale.app.job import Job
from imgscale.bandit import MODES
from imgscale.errors import UserError

REST = 0.25  # seconds between two updates of a page
PARTS = ("status", "stage", "chart", "ledger", "gallery", "download", "settings", "search", "stop")
Update = Any  # of one component
Told = tuple[str | None, str | None, dict[str, Any]]  # the image, the plain one, and what else there is to say


class Handlers:
    """The functions behind the page.

    Args:
        runner: Does the searches.
        cache: The folder that gradio serves; a file is copied into it before somebody gets it.
    """

    def __init__(self, runner: Runner, cache: Path) -> None:
        self._runner, self._cache = runner, cache

    # ------------------------------------------------------------------------------------------------- the page

    def search(
        self,
        prompt: str,
        model: str,
        searcher: str,
        verifiers: list[str],
        report: list[str],
        budget: float,
        seed: str,
        mode: str,
        request: gr.Request,
    ) -> Iterator[list[Update]]:
        """Searches, and shows how it goes."""
        try:
            job = self._runner.offer.job(prompt, model, searcher, verifiers, report, budget, seed, mode)
            self._runner.desk.stop(_measures(request))  # nobody waits for that
            ticket = self._runner.enter(_who(request), job)
        except UserError as error:
            yield _refused(error)
            return
        yield from self._shown(ticket, job)

    def again(self, picture: str | None, request: gr.Request) -> Iterator[list[Update]]:
        """Makes a picture again from the settings inside it, and shows them in the form."""
        form = [gr.skip()] * 8
        if picture is None:
            return
        try:
            record, image = png.read(Path(picture)), rerun.pixels(Path(picture))
            job = self._runner.offer.again(record)
            ticket = self._runner.enter(_who(request), job, Again(record, image))
        except UserError as error:
            said = str(error).replace(f"'{picture}'", "The picture")
            yield [*_refused(UserError(said)), *form, None]
            return
        for number, parts in enumerate(self._shown(ticket, job, image)):
            if number == 0:
                yield [*parts, *self._form(job), None]
            else:
                yield [*parts, *form, gr.skip()]

    def stop(self, request: gr.Request) -> Update:
        """Ends the search of whoever asks, with the best so far."""
        self._runner.desk.stop(_who(request))
        return gr.update(interactive=False)

    def close(self, request: gr.Request) -> None:
        """A page was closed: its search ends, and the device is free."""
        self._runner.desk.stop(_who(request))
        self._runner.desk.stop(_measures(request))

    def fits(self, model: str) -> list[Update]:
        """Shows the fields that a model takes: for "auto" the mode, for others searcher and verifiers."""
        chooses = model == AUTO
        return [gr.update(visible=chooses), gr.update(visible=not chooses), gr.update(visible=not chooses)]

    def estimate(self, model: str, searcher: str, verifiers: list[str], budget: float) -> str:
        """How long a search will take on this machine."""
        if model == AUTO:
            return _small("At most that many: how much this prompt gets is chosen, too.")
        seconds = self._runner.estimate(model, searcher, verifiers, int(budget or 0))
        if seconds is None:
            return _small("How long that takes shows once this model has run.")
        return _small(f"About {span(seconds)} on this machine")

    def measure(
        self, model: str, searcher: str, verifiers: list[str], budget: float, request: gr.Request
    ) -> Iterator[str]:
        """The same where a model was chosen: a short search measures it if nobody waits for the device."""
        runner = self._runner
        if model != AUTO and runner.estimate(model, searcher, verifiers, 1) is None and not len(runner.desk):
            yield _small("Measuring how fast this model is here …")
            try:
                ticket = runner.measure(model, _measures(request))
            except UserError:  # somebody was faster
                pass
            else:
                while not ticket.look().over:
                    time.sleep(REST)
        yield self.estimate(model, searcher, verifiers, budget)

    def _form(self, job: Job) -> list[Update]:
        """The form's fields as a picture has them, as far as it offers that."""
        offer, judges = self._runner.offer, registry.members(job.verifier)
        return [
            job.prompt,
            job.model if job.model in offer.models else gr.skip(),
            job.searcher if job.searcher in offer.searchers else gr.skip(),
            judges if set(judges) <= set(offer.verifiers) else gr.skip(),
            [name for name in job.report if name in offer.verifiers],
            job.budget.nfe,
            str(job.seed),
            gr.skip(),
        ]

    def _shown(self, ticket: Ticket, job: Job, given: Image | None = None) -> Iterator[list[Update]]:
        """Updates of the page until a search is over; closed before that, the search is stopped."""
        before: View | None = None
        try:
            for view in _views(ticket):
                yield self._parts(view, before, job, ticket.stopped, given)
                before = view
        finally:
            ticket.stop()

    def _parts(self, view: View, before: View | None, job: Job, stopping: bool, given: Image | None) -> list[Update]:
        """An update for each of `PARTS`; what is as it was is left alone."""
        first, output = before is None, view.output
        redrawn = first or output is not None or view.over or before is None or view.preview is not before.preview
        grown = first or before is None or (view.trace, view.nfe) != (before.trace, before.nfe) or output is not None
        candidates = [(c.seed, c.score) for c in view.gallery]
        shown = [] if before is None else [(c.seed, c.score) for c in before.gallery]
        judge = output.verifier if output is not None else job.judge  # an ensemble has a name of its own in results
        plain = output.plain.scores.get(judge) if output is not None and output.plain is not None else None
        seconds = view.ledger.seconds if output is not None else view.seconds
        return [
            html.status(view, job, stopping),
            html.stage(view, job, given) if redrawn else gr.skip(),
            chart(view.trace, judge, view.total or 1, view.nfe, plain) if grown else gr.skip(),
            html.ledger(view.ledger, seconds) if view.nfe else ("" if first else gr.skip()),
            html.gallery(view.gallery, judge) if first or candidates != shown else gr.skip(),
            self._download(view) if first or view.over else gr.skip(),
            html.settings(*filter(None, [view.job, _copied(job)])) if first or view.job else gr.skip(),
            gr.update(interactive=view.over) if first or view.over else gr.skip(),
            gr.update(interactive=not view.over and not stopping),
        ]

    def _download(self, view: View) -> Update:
        if "image" not in view.files:
            return gr.update(value=None, visible=False)
        return gr.update(value=self._handed_out(view.files["image"]), visible=True)

    def _handed_out(self, path: Path) -> str:
        """A copy under an address that nobody can guess: what others made stays theirs."""
        folder = self._cache / secrets.token_urlsafe(16)
        folder.mkdir()
        shutil.copyfile(path, folder / path.name)
        return os.fspath(folder / path.name)

    # ---------------------------------------------------------------------------------------------------- the API

    def api_search(
        self,
        prompt: str,
        model: str,
        searcher: str,
        verifiers: list[str],
        report: list[str],
        budget: float,
        seed: str,
        mode: str,
        request: gr.Request,
    ) -> Iterator[Told]:
        """Searches for a better image of a prompt.

        Sends how it goes several times a second. The last message holds the image, its settings inside; the plain one
        of the same seed; and all that is known of the search.
        """
        try:
            job = self._runner.offer.job(prompt, model, searcher, verifiers, report, budget, seed, mode)
            yield from self._told(self._runner.enter(_who(request), job), job)
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def api_rerun(self, picture: str, request: gr.Request) -> Iterator[Told]:
        """Makes a picture again from the settings inside it, and says whether it came out the same."""
        try:
            record, image = png.read(Path(picture)), rerun.pixels(Path(picture))
            job = self._runner.offer.again(record)
            yield from self._told(self._runner.enter(_who(request), job, Again(record, image)), job)
        except UserError as error:
            raise gr.Error(str(error).replace(f"'{picture}'", "The picture"), print_exception=False) from error

    def api_stop(self, request: gr.Request) -> bool:
        """Ends this client's search with the best so far; whether there was one."""
        return self._runner.desk.stop(_who(request))

    def api_choices(self) -> dict[str, Any]:
        """What may be chosen, and the limits."""
        offer = self._runner.offer
        names = {"models": offer.models, "searchers": offer.searchers, "verifiers": offer.verifiers, "modes": MODES}
        return {
            **{k: list(v) for k, v in names.items()},
            "max_budget": offer.max_budget,
            "in_line": len(self._runner.desk),
        }

    def _told(self, ticket: Ticket, job: Job) -> Iterator[Told]:
        try:
            for view in _views(ticket):
                told: dict[str, Any] = {"state": view.state, "ahead": view.ahead, "nfe": view.nfe, "total": view.total}
                told |= {"chosen": view.chosen} if view.chosen else {}
                if view.state == "failed":
                    raise UserError(view.said)
                if view.output is None:
                    best = view.trace[-1].score if view.trace else None
                    yield None, None, {**told, "best": best if best is not None and math.isfinite(best) else None}
                    continue
                summary = outputs.summary(view.output, view.files)
                for name in ("images", "trace", "compare"):  # places on this machine
                    summary.pop(name, None)
                summary.get("plain", {}).pop("image", None)
                more = {
                    **_texts(view.job or _copied(job)),
                    **({"auto": _texts(_copied(job))} if view.job else {}),
                    **({"said": view.said} if view.said else {}),
                }
                plain = self._handed_out(view.files["plain"]) if "plain" in view.files else None
                yield self._handed_out(view.files["image"]), plain, {**told, **summary, **more}
        finally:
            ticket.stop()


def _copied(job: Job) -> Job:
    """What somebody may copy: without places on this machine."""
    return replace(job, policy=None, pool=None) if isinstance(job, AutoJob) else job


def _texts(job: Job) -> dict[str, str]:
    return {"command": job.command(), "python": html.python(job)}


def _views(ticket: Ticket) -> Iterator[View]:
    """How a search is, a few times a second, until it is over."""
    number, ahead = -1, -1
    while True:
        view = ticket.look(number, 1.0)
        if (view.number, view.ahead) != (number, ahead) or ticket.stopped:
            yield view
        if view.over:
            return
        number, ahead = view.number, view.ahead
        ticket.rest(REST)


def _refused(error: UserError) -> list[Update]:
    """The sentence, and nothing else touched."""
    return [html.note(str(error), "failed"), *[gr.skip()] * (len(PARTS) - 1)]


def _small(text: str) -> str:
    return f'<p class="is-estimate">{text}</p>'


def _who(request: gr.Request) -> str:
    return str(request.session_hash)


def _measures(request: gr.Request) -> str:
    """The same person, who measures and doesn't search."""
    return f"{_who(request)} measures"

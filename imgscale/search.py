"""One search in the engine's care: the searcher's generator, what it has found, and why it ended."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from imgscale.budget import BudgetSpent, Meter
from imgscale.journal import Entry, Journal, magnitude, on_cpu
from imgscale.particles import Origin, Particles
from imgscale.problem import Gradient, Predict, Problem, Request, Score, Verb
from imgscale.result import Candidate, TracePoint
from imgscale.rewards import Verifier, is_ensemble, judge, panel


@dataclass
class Kept:
    """A finished candidate, whose image is decoded again only if the journal had no room for it.

    Args:
        score: The steering verifier's.
        seed: The key of the prior noise it grew from.
        latents: float32 (*latent), on the CPU.
        image: float32 (3, h, w) in [0, 1], on the CPU, or None.
        said: What an ensemble's members said of it, (1, members).
        origin: Where its trajectory can be taken up, on the CPU; None where nobody wants to know.
    """

    score: float
    seed: int
    latents: Tensor
    image: Tensor | None
    said: Tensor | None
    origin: Origin | None


@dataclass
class Search:
    """One search in the engine's care.

    Args:
        problem: What the searcher works on.
        steps: The searcher's generator.
        verifier: The one that steers.
        reports: Verifiers that score each new best image and never steer.
        preview: Decodes what isn't finished, in the place of the VAE; see `imgscale.previews`.
        keep: How many finished candidates to keep, at least 1; all of them for None.
        best: The best finished image so far.
        trace: A point for every new best.
        events: What went wrong without ending the search.
        stopped: Why it ended, or "" while it runs.
        rounds: Engine steps up to that end: to stop there again gives the same image again.
        number: Among the searches that run together.
        journal: Takes down the answers.
        scored: The steering scores of all finished images so far, in order.
        seen: What an ensemble's members said of all images so far, float64 (m, members).
    """

    problem: Problem
    steps: Verb
    verifier: Verifier
    reports: Sequence[Verifier] = ()
    preview: Any = None
    keep: int | None = 1
    best: Candidate | None = None
    trace: list[TracePoint] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    stopped: str = ""
    rounds: int = 0
    number: int = 0
    journal: Journal | None = None
    scored: list[float] = field(default_factory=list)
    seen: Tensor | None = None
    _kept: list[Kept] = field(default_factory=list)  # the best finished ones, best first, if more than one is kept
    _said: Tensor | None = None  # the same of the images at hand
    _said_of_best: Tensor | None = None  # and of the best one, (1, members)
    _request: Request | None = None
    _closing: bool = False
    _heard: bool = False  # a score from the verifier, ever
    _unheard: int = 0  # verifier calls that failed
    _checked: float = 0.0  # seconds at the last check of the clock
    _pace: float = 0.0  # seconds of the slowest engine step; the first, which warms up, counts only at first
    _told: int = 0  # events that the journal knows
    _replayed: Entry | None = None  # what is answered from the journal now

    @property
    def meter(self) -> Meter:
        return self.problem.meter

    @property
    def running(self) -> bool:
        return self._request is not None

    def notice(self, text: str) -> None:
        """Records an event once."""
        if text not in self.events:
            self.events.append(text)

    # -------------------------------------------------------------------------------------- the searcher's side

    def advance(self, answer: Any = None) -> None:
        """Sends an answer to the searcher and takes its next request, or its end."""
        try:
            request = self.steps.send(answer)
        except StopIteration:
            self.end("complete")
        except BudgetSpent:
            self.end("budget")
        else:
            if inspect.isgenerator(request):
                self.steps.close()
                raise TypeError(f"A searcher yielded {request.__qualname__}(…); write 'yield from' before it.")
            if not isinstance(request, Predict | Score | Gradient):
                self.steps.close()
                raise TypeError(f"A searcher yielded {request!r}, which is no request of imgscale.problem.")
            self._request = request

    def end(self, reason: str) -> None:
        """Ends the searcher; while nothing is finished, the engine goes on to finish the incumbent."""
        self.steps.close()
        self.stopped = self.stopped or reason
        self._request = None
        if self.best is None and not self._closing and reason != "cancelled":
            self._closing = True
            self.steps = self._last_resort()
            self.advance()

    def _last_resort(self) -> Verb:
        held = self.problem.incumbent
        particles = yield from (self.problem.sample(1) if held is None else self.problem.finish(held))
        yield from self.problem.score(particles)

    # ---------------------------------------------------------------------------------------- the engine's side

    def reward(self, said: Tensor) -> Tensor:
        """Scores float64 (n,) of images by what the steering verifier's members said of them, (n, members).

        An ensemble scores them among all that the search has seen, and then the best so far among these, too.
        """
        if not is_ensemble(self.verifier):
            return said[:, 0]
        self._said = said
        sound = said.isfinite().all(1)
        scores = torch.full((len(said),), -math.inf, dtype=torch.float64)
        self.seen = said[sound] if self.seen is None else torch.cat([self.seen, said[sound]])
        scores[sound] = self.verifier.combine(said[sound], self.seen)
        if self.best is not None and self._said_of_best is not None and bool(self._said_of_best.isfinite().all()):
            self.best = replace(self.best, score=float(self.verifier.combine(self._said_of_best, self.seen)[0]))
        return scores

    def value(self, other: Search) -> float:
        """The score of another search's best image, among what this one has seen if that matters."""
        assert other.best is not None
        if not is_ensemble(self.verifier) or other._said_of_best is None or not math.isfinite(other.best.score):
            return other.best.score
        seen = other._said_of_best if self.seen is None else torch.cat([self.seen, other._said_of_best])
        return float(self.verifier.combine(other._said_of_best, seen)[0])

    def settle(self, images: Tensor | None, scores: Tensor, particles: Particles) -> None:
        """Takes note of scored images: the best so far, the trace, the end of what can't get better.

        Without the images, which the journal doesn't hold, the new best is the one that it does.
        """
        self._request = None
        if particles.finished:
            self.problem.done = True
            self.scored += scores.tolist()
            i = int(scores.argmax())
            if self.best is None or float(scores[i]) > self.best.score:
                self.crown(images, particles.x0, scores, particles.seeds, i, origin=_origin(particles, i))
            if self.keep != 1:
                self._collect(images, scores, particles)
        if not self._closing and self.best is not None and self.problem.ceiling is not None:
            if self.best.score >= self.problem.ceiling:
                self.end("ceiling")

    def _collect(self, images: Tensor | None, scores: Tensor, particles: Particles) -> None:
        """Takes finished candidates in, and lets those go that are no longer among the best."""
        if is_ensemble(self.verifier) and self.seen is not None and self._kept:
            said = torch.cat([kept.said for kept in self._kept if kept.said is not None])
            for kept, value in zip(self._kept, self.verifier.combine(said, self.seen).tolist(), strict=True):
                kept.score = value
        least = self._kept[-1].score if self.keep is not None and len(self._kept) >= self.keep else -math.inf
        for i in (scores > least).nonzero().flatten().tolist():
            self._kept.append(
                Kept(
                    float(scores[i]),
                    int(particles.seeds[i]),
                    particles.x0[i].cpu().clone(),
                    None if images is None else images[i].nan_to_num(0.0, 1.0, 0.0).cpu().clone(),
                    None if self._said is None else self._said[i : i + 1],
                    _origin(particles, i),
                )
            )
        self._kept.sort(key=lambda kept: -kept.score)  # stable: of equal ones the first stays first
        del self._kept[len(self._kept) if self.keep is None else self.keep :]

    def gallery(self, decode: Callable[[Tensor], Tensor] | None = None) -> list[Candidate]:
        """The finished candidates that were kept, best first; the best preview alone if none is finished.

        Args:
            decode: Makes images (n, 3, h, w) of latents that came from the journal. Those are left out if None.
        """
        if self.best is None:
            return []
        found = [self.best]
        for kept in self._kept:
            if torch.equal(kept.latents, self.best.latents):
                continue
            if kept.image is None and decode is not None:
                kept.image = decode(kept.latents[None])[0].nan_to_num(0.0, 1.0, 0.0).cpu()
            if kept.image is not None:
                names = [] if kept.said is None else [v.name for v in panel(self.verifier)]
                report = dict(zip(names, [] if kept.said is None else kept.said[0].tolist(), strict=True))
                found.append(Candidate(kept.image, kept.latents, kept.score, kept.seed, True, report, kept.origin))
        return found if self.keep is None else found[: self.keep]

    def crown(
        self,
        images: Tensor | None,
        x0: Tensor,
        scores: Tensor,
        seeds: Tensor,
        i: int,
        finished: bool = True,
        origin: Origin | None = None,
    ) -> None:
        """Makes row ``i`` the best so far."""
        if images is not None:
            image = images[i : i + 1].nan_to_num(0.0, 1.0, 0.0)
            report = {}
            if self._said is not None:
                report = dict(zip([v.name for v in panel(self.verifier)], self._said[i].tolist(), strict=True))
            report |= {v.name: float(self.judge(v, image)[0]) for v in self.reports}
        else:
            assert self._replayed is not None
            image = self._replayed.tensors.get("image", torch.zeros(3, 1, 1))[None]  # a later one is kept there
            report = dict(self._replayed.report or {})
        self.meter.charge(report_calls=len(self.reports))
        score = float(scores[i])
        self._said_of_best = None if self._said is None else self._said[i : i + 1]
        self.best = Candidate(image[0].cpu(), x0[i].cpu(), score, int(seeds[i]), finished, report, origin)
        self.mark()

    def log(self, request: Request, tensors: dict[str, Tensor], *, best: Candidate | None, lost: bool = False) -> None:
        """Takes an answer down in the journal; ``best`` is the one before it."""
        if self.journal is None or self._replayed is not None or self.stopped in ("deadline", "cancelled"):
            return  # what a stop made the engine do isn't part of the search
        self.meter.tick()
        new = self.best if self.best is not best else None
        self.journal.add(
            Entry(
                search=self.number,
                request=type(request).__name__,
                shape=tuple(subject(request).shape),
                size=magnitude(subject(request)),
                rounds=self.rounds,
                seconds=self.meter.ledger.seconds,
                pace=self._pace,
                events=self.events[self._told :],
                lost=lost,
                report=None if new is None else new.report,
                tensors=on_cpu(tensors if new is None else {**tensors, "image": new.image}),
            )
        )
        self._told = len(self.events)

    def mark(self) -> None:
        """Adds the present state to the trace."""
        if self.best is not None:
            self.meter.tick()
            ledger = self.meter.ledger
            self.trace.append(
                TracePoint(ledger.nfe, ledger.seconds, ledger.verifier_calls, self.best.score, self.best.report)
            )

    def judge(self, verifier: Verifier, images: Tensor) -> Tensor:
        """Scores of images for this search's prompt, float64 (n,) on the CPU; −inf where there is no number."""
        scores = judge(verifier, images, [self.problem.cond.prompt] * len(images), self.notice)
        return scores.nan_to_num(nan=-math.inf, neginf=-math.inf)

    def clock(self) -> float:
        """Brings the clock up to date and learns from it how long an engine step takes; the seconds that are left."""
        left = self.meter.tick()
        now = self.meter.ledger.seconds
        self._pace = max(now - self._checked, self._pace if self.rounds > 2 else 0.0)
        self._checked = now
        return left


def _origin(particles: Particles, i: int) -> Origin | None:
    """Where the trajectory of a finished particle can be taken up, on the CPU; its last call is that of the decoder."""
    if particles.traced is None:
        return None
    origin = particles.origins[i].seen(len(particles), i)
    return replace(origin, x=(origin.x if len(origin.times) > 1 else particles.x0[i]).cpu().clone())


def subject(request: Request) -> Tensor:
    """The tensor that a request is about."""
    if isinstance(request, Predict):
        return request.x
    about = isinstance(request, Score) or request.to is None
    return request.particles.x0 if about else request.particles.x

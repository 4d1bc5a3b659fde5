"""The engine: answers the requests of one or many searches, and does once what no searcher should do again.

It merges the requests of concurrent searches into full batches, sizes them to memory, keeps the ledgers, scores, the
best image so far and the trace, and ends searches: by budget, deadline, cancellation or a score that can't rise.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from imgscale.budget import BudgetSpent, Meter
from imgscale.journal import Entry, Journal, magnitude, on_cpu
from imgscale.kernels import ODE
from imgscale.particles import Particles
from imgscale.paths import convert
from imgscale.problem import Gradient, Predict, Problem, Request, Score, Slope, Verb
from imgscale.result import Candidate, TracePoint

if TYPE_CHECKING:
    from imgscale.conditions import Condition
    from imgscale.denoiser import Denoiser

T = TypeVar("T")

PATIENCE = 3  # failed verifier calls, without any score before, that end a search


class Verifier(Protocol):
    """A reward: images float32 (n, 3, h, w) in [0, 1] and n prompts to float32 (n,), higher is better.

    Attributes:
        name: What it is called in results.
        range: Lowest and highest possible score, or None. A search ends when it reaches the highest.
        reads_prompt: Whether the prompts matter.
        differentiable: Whether gradients reach the images.
    """

    name: str
    range: tuple[float, float] | None
    reads_prompt: bool
    differentiable: bool

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor: ...

    def identity(self) -> dict[str, Any]: ...


@dataclass
class Search:
    """One search in the engine's care.

    Args:
        problem: What the searcher works on.
        steps: The searcher's generator.
        verifier: The one that steers.
        reports: Verifiers that score each new best image and never steer.
        best: The best finished image so far.
        trace: A point for every new best.
        events: What went wrong without ending the search.
        stopped: Why it ended, or "" while it runs.
        rounds: Engine steps up to that end: to stop there again gives the same image again.
        number: Among the searches that run together.
        journal: Takes down the answers.
    """

    problem: Problem
    steps: Verb
    verifier: Verifier
    reports: Sequence[Verifier] = ()
    best: Candidate | None = None
    trace: list[TracePoint] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    stopped: str = ""
    rounds: int = 0
    number: int = 0
    journal: Journal | None = None
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

    def settle(self, images: Tensor | None, scores: Tensor, particles: Particles) -> None:
        """Takes note of scored images: the best so far, the trace, the end of what can't get better.

        Without the images, which the journal doesn't hold, the new best is the one that it does.
        """
        self._request = None
        if particles.finished:
            self.problem.done = True
            i = int(scores.argmax())
            if self.best is None or float(scores[i]) > self.best.score:
                self.keep(images, particles.x0, scores, particles.seeds, i)
        if not self._closing and self.best is not None and self.problem.ceiling is not None:
            if self.best.score >= self.problem.ceiling:
                self.end("ceiling")

    def keep(
        self, images: Tensor | None, x0: Tensor, scores: Tensor, seeds: Tensor, i: int, finished: bool = True
    ) -> None:
        """Makes row ``i`` the best so far."""
        if images is not None:
            image = images[i : i + 1].nan_to_num(0.0, 1.0, 0.0)
            report = {v.name: float(self.judge(v, image)[0]) for v in self.reports}
        else:
            assert self._replayed is not None
            image = self._replayed.tensors.get("image", torch.zeros(3, 1, 1))[None]  # a later one is kept there
            report = dict(self._replayed.report or {})
        self.meter.charge(report_calls=len(self.reports))
        score = float(scores[i])
        self.best = Candidate(image[0].cpu(), x0[i].cpu(), score, int(seeds[i]), finished, report)
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
                shape=tuple(_subject(request).shape),
                size=magnitude(_subject(request)),
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


def _subject(request: Request) -> Tensor:
    """The tensor that a request is about."""
    if isinstance(request, Predict):
        return request.x
    about = isinstance(request, Score) or request.to is None
    return request.particles.x0 if about else request.particles.x


def _notices(members: Sequence[Search]) -> Callable[[str], None]:
    def notice(text: str) -> None:
        for search in members:
            search.notice(text)

    return notice


def judge(
    verifier: Verifier, images: Tensor, prompts: list[str], notice: Callable[[str], None], detach: bool = True
) -> Tensor:
    """One batched verifier call: float64 (n,) on the CPU, −inf where it gave no number, NaN where it failed."""
    from imgscale.errors import UserError

    try:
        scores = verifier(images, prompts)
        if tuple(scores.shape) != (len(images),):
            raise ValueError(f"it returned shape {tuple(scores.shape)} for {len(images)} images")
    except UserError:
        raise
    except Exception as error:  # anything a verifier may do must leave the search alive
        if len(images) > 1 and _is_out_of_memory(error):
            raise
        notice(f"The verifier {verifier.name} failed and cost its candidates −inf: {error!r}.")
        return torch.full((len(images),), math.nan, dtype=torch.float64)
    scores = (scores.detach() if detach else scores).to("cpu", torch.float64)
    if bool(scores.isnan().any()):
        notice(f"The verifier {verifier.name} gave NaN, which counts as −inf.")
    return scores.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)


class Engine:
    """Runs searches on one model.

    Args:
        denoiser: The model.
        max_batch: Images per call of the network and of the decoder; halved whenever memory runs out.
    """

    def __init__(self, denoiser: Denoiser, max_batch: int = 32) -> None:
        self.denoiser = denoiser
        self.max_batch = max_batch
        self.gradient_batch = max(1, max_batch // 4)  # activations are kept; halved by itself, too

    def prime(self, searches: Sequence[Search]) -> None:
        """Brings new searches to their first requests: what a searcher refuses, it refuses before anything is spent."""
        with torch.no_grad():
            for search in searches:
                if not search.running:
                    search.advance()

    def run(
        self,
        searches: Sequence[Search],
        tick: Callable[[Sequence[Search]], None] | None = None,
        stop: Callable[[], str] = lambda: "",
        journal: Journal | None = None,
    ) -> None:
        """Runs all searches to their ends; their fields then hold the outcome.

        Args:
            searches: New or primed ones. Requests that fit together share batches, whatever search they come from.
            tick: Called after every engine step.
            stop: Asked before every engine step. "cancelled" ends all searches with their best so far, another
                reason ends them once each has finished an image.
            journal: The answers up to where the same searches stopped before, and the place for further ones.

        Raises:
            UserError: The journal is of other searches.
        """
        try:
            with torch.no_grad():
                self.prime(searches)
                if journal is not None:
                    self._replay(searches, journal)
                while active := [s for s in searches if s.running]:
                    self._check_stops(active, stop())
                    for search in active:
                        search.rounds += not search.stopped
                    self._predict([s for s in active if isinstance(s._request, Predict)])
                    self._score([s for s in active if isinstance(s._request, Score)])
                    self._differentiate([s for s in active if isinstance(s._request, Gradient)])
                    if journal is not None:
                        journal.step()
                    if tick:
                        tick(searches)
                for search in searches:
                    if search.best is None:
                        self._show_preview(search)
                    if search._unheard and not search._heard and search.stopped in ("budget", "complete"):
                        search.stopped = "verifier"
                    search.mark()
        finally:
            for search in searches:
                search.steps.close()
            if journal is not None:
                journal.write()

    def _replay(self, searches: Sequence[Search], journal: Journal) -> None:
        """Answers the searches from the journal until it has no more, and has them write to it from there."""
        for number, search in enumerate(searches):
            search.number, search.journal = number, journal
        for entry in journal.read():
            if not 0 <= entry.search < len(searches):
                raise journal.damaged("it has more searches")
            search = searches[entry.search]
            while search.running and not self._open(search):
                pass  # it was answered without work, or ended and goes on to finish its incumbent
            request = search._request
            if request is None or not entry.answers(type(request).__name__, _subject(request)):
                raise journal.damaged("the search asks for something else than it did")
            search.rounds, search._checked, search._pace = entry.rounds, entry.seconds, entry.pace
            search.meter.restart(entry.seconds)
            for event in entry.events:
                search.notice(event)
            search._told = len(search.events)
            search._replayed = entry
            self._answer_again(search, request, entry)
            search._replayed = None

    def _answer_again(self, search: Search, request: Request, entry: Entry) -> None:
        device = _subject(request).device
        tensors = {name: t if name in ("scores", "image") else t.to(device) for name, t in entry.tensors.items()}
        try:
            if isinstance(request, Predict):
                self._answer(search, tensors["x0"])
                return
            scores = tensors["scores"]
            particles, answer = request.particles, scores
            if isinstance(request, Gradient):
                slope = Slope(tensors["x"], tensors["x0"], scores, tensors["gradient"])
                particles, answer = _there(request, slope), slope  # type: ignore[assignment]
        except KeyError as error:
            assert search.journal is not None
            raise search.journal.damaged(f"an answer lacks its {error}") from error
        self._settle(search, particles, None, scores, entry.lost, answer, {})

    def _open(self, search: Search) -> bool:
        """Whether a request needs work, and is paid: empty ones are answered, those beyond the budget end it."""
        request = search._request
        assert request is not None
        n = len(_subject(request))
        if n == 0:
            none = torch.zeros(0, dtype=torch.float64)
            if isinstance(request, Predict):
                self._answer(search, request.x)
            elif isinstance(request, Score):
                self._answer(search, none)
            else:
                self._answer(search, Slope(request.particles.x, request.particles.x0, none, request.particles.x))
            return False
        amounts = {"nfe": n}
        if not isinstance(request, Predict):
            amounts = {"verifier_calls": n, "decodes": n}
            if isinstance(request, Gradient):
                amounts |= {"nfe": n * request.nfe, "gradients": n}
        try:
            search.meter.require(**amounts)
        except BudgetSpent:
            search.end("budget")
            return False
        search.meter.charge(**amounts)
        return True

    def _check_stops(self, active: Sequence[Search], stop: str) -> None:
        for search in active:
            left = search.clock()
            incumbent = search.problem.incumbent
            if incumbent is None and search.best is None:
                continue  # there is nothing to leave yet
            if stop == "cancelled" or (stop and not search._closing):
                search.end(stop)
            elif not search._closing:
                rounds = 1
                # One slow step may be a warm-up: not yet a reason to give up searching.
                if search.best is None and incumbent is not None and search.rounds > 1:
                    rounds += search.problem.finishing_nfe(incumbent) + 1
                if left <= 0 or left < search._pace * rounds:
                    search.end("deadline")

    # ------------------------------------------------------------------------------------- model evaluations

    def _predict(self, searches: Sequence[Search]) -> None:
        own = self.denoiser.path
        groups: dict[Hashable, list[tuple[Search, Tensor, float]]] = {}
        for search in searches:
            request = search._request
            assert isinstance(request, Predict)
            if not self._open(search):
                continue
            x, t = convert(request.x, request.t, request.path, own)
            time = float(t)
            place = None if self.denoiser.mixed_times else time
            groups.setdefault((search.problem.cond.key, place), []).append((search, x, time))
        for members in groups.values():
            x0 = self._predict_group(members)
            for (search, _, _), answer in zip(members, x0.split([len(x) for _, x, _ in members]), strict=True):
                assert search._request is not None
                search.log(search._request, {"x0": answer}, best=search.best)
                self._answer(search, answer)

    def _answer(self, search: Search, answer: Any) -> None:
        search._request = None
        search.advance(answer)

    def _predict_group(self, members: list[tuple[Search, Tensor, float]]) -> Tensor:
        x = torch.cat([x for _, x, _ in members])
        counts = [len(x) for _, x, _ in members]
        times = torch.tensor([t for _, _, t in members], dtype=torch.float64).repeat_interleave(torch.tensor(counts))
        same = bool((times == times[0]).all())
        cond = _stack([s.problem.cond for s, _, _ in members], counts)

        def work(a: int, b: int) -> Tensor:
            t = float(times[a]) if same else times[a:b]
            return self.denoiser.predict(x[a:b], t, cond.at(range(a, b)))

        return torch.cat(self._in_batches(len(x), work))

    # ---------------------------------------------------------------------------------------------- rewards

    def _score(self, searches: Sequence[Search]) -> None:
        groups: dict[Hashable, list[Search]] = {}
        for search in searches:
            assert isinstance(search._request, Score)
            if self._open(search):
                groups.setdefault((search.problem.cond.key, id(search.verifier)), []).append(search)
        for members in groups.values():
            self._score_group(members)

    def _score_group(self, members: list[Search]) -> None:
        requests = [s._request for s in members if isinstance(s._request, Score)]
        counts = [len(r.particles) for r in requests]
        x0 = torch.cat([r.particles.x0 for r in requests])
        sound = x0.flatten(1).isfinite().all(1)
        images = self.decode(
            torch.where(sound.reshape(-1, *[1] * (x0.ndim - 1)), x0, 0.0),
            [s.problem.cond for s in members],
            counts,
        )
        finite = sound & images.flatten(1).isfinite().all(1)
        images = torch.where(finite.reshape(-1, 1, 1, 1), images, 0.0)  # one NaN must not spoil a verifier's batch
        prompts = [s.problem.cond.prompt for s, n in zip(members, counts, strict=True) for _ in range(n)]
        notice = _notices(members)

        def work(a: int, b: int) -> Tensor:
            return judge(members[0].verifier, images[a:b], prompts[a:b], notice)

        scores = torch.cat(self._in_batches(len(x0), work))
        failed = scores.isnan()
        scores[failed | ~finite.cpu()] = -math.inf
        for search, request, part, pictures, good, lost in zip(
            members, requests, *(rows.split(counts) for rows in (scores, images, finite, failed)), strict=True
        ):
            _tell(search, good)
            self._settle(search, request.particles, pictures, part, bool(lost.all()), part, {"scores": part})

    def _settle(
        self,
        search: Search,
        particles: Particles,
        images: Tensor | None,
        scores: Tensor,
        lost: bool,
        answer: Any,
        tensors: dict[str, Tensor],
    ) -> None:
        """Takes rewards of one search's images: ``lost`` if the verifier failed for all of them."""
        request, best = search._request, search.best
        assert request is not None
        search._heard |= bool(scores.isfinite().any())
        search._unheard += lost
        search.settle(images, scores, particles)
        search.log(request, tensors, best=best, lost=lost)
        if search.stopped and not search._closing:
            return
        if not search._heard and search._unheard >= PATIENCE:
            search.end("verifier")
        else:
            search.advance(answer)

    # -------------------------------------------------------------------------------------------- gradients

    def _differentiate(self, searches: Sequence[Search]) -> None:
        groups: dict[Hashable, list[Search]] = {}
        for search in searches:
            request = search._request
            assert isinstance(request, Gradient)
            if self._open(search):
                place = (request.particles.schedule, request.particles.step, request.to)
                groups.setdefault((search.problem.cond.key, id(search.verifier), place), []).append(search)
        for members in groups.values():
            self._differentiate_group(members)

    def _differentiate_group(self, members: list[Search]) -> None:
        requests = [s._request for s in members if isinstance(s._request, Gradient)]
        counts = [len(r.particles) for r in requests]
        first = requests[0]
        x = torch.cat([r.particles.x0 if first.to is None else r.particles.x for r in requests])
        cond = _stack([s.problem.cond for s in members], counts)
        prompts = [s.problem.cond.prompt for s, n in zip(members, counts, strict=True) for _ in range(n)]
        verifier, notice = members[0].verifier, _notices(members)

        def work(a: int, b: int) -> tuple[Tensor, ...]:
            part = cond.at(range(a, b))
            with torch.inference_mode(False), torch.enable_grad():
                leaf = x[a:b].clone().requires_grad_()
                end, x0 = (leaf, leaf) if first.to is None else self._solve(leaf, first, part)
                images = self.denoiser.decode(x0, part)
                sound = (x0.flatten(1).isfinite().all(1) & images.flatten(1).isfinite().all(1)).reshape(-1, 1, 1, 1)
                # As in _score_group: one NaN must not spoil a verifier's batch.
                scores = judge(verifier, torch.where(sound, images, 0.0), prompts[a:b], notice, detach=False)
                gradient = torch.zeros_like(leaf)
                if scores.requires_grad:
                    (gradient,) = torch.autograd.grad(scores[scores.isfinite()].sum(), leaf)
            return end.detach(), x0.detach(), images.detach(), scores.detach(), gradient

        rows = [torch.cat(parts) for parts in zip(*self._in_batches(len(x), work, "gradient_batch"), strict=True)]
        end, x0, images, scores, gradient = rows
        failed = scores.isnan()
        good = x0.flatten(1).isfinite().all(1) & images.flatten(1).isfinite().all(1)
        scores[failed | ~good.cpu()] = -math.inf
        if not bool(gradient.isfinite().all()):
            notice("Some gradients weren't finite; they count as 0.")
        sloping = gradient.flatten(1).isfinite().all(1).reshape(-1, *[1] * (x.ndim - 1))
        gradient = torch.where(sloping, gradient, 0.0)
        for search, request, *parts in zip(
            members,
            requests,
            *(rows.split(counts) for rows in (end, x0, images, scores, gradient, good, failed)),
            strict=True,
        ):
            x_end, x0_end, pictures, rewards, steepness, sound, lost = parts
            slope = Slope(x_end, x0_end, rewards, steepness)
            _tell(search, sound)
            self._settle(search, _there(request, slope), pictures, rewards, bool(lost.all()), slope, vars(slope))

    def _solve(self, x: Tensor, request: Gradient, cond: Condition) -> tuple[Tensor, Tensor]:
        """x and x0 where the ODE from x leads, with their graph."""
        assert request.to is not None
        schedule, own, ode = request.particles.schedule, self.denoiser.path, ODE()

        def predict(x: Tensor, t: float) -> Tensor:
            moved, time = convert(x, t, schedule.path, own)
            return self.denoiser.predict(moved, float(time), cond)

        start = max(request.particles.step, 0)
        x0 = predict(x, schedule.times[start])
        for step in range(start, request.to):
            t, t_next = schedule.times[step : step + 2]
            x = ode(schedule.path, t, t_next, x, x0)
            x0 = x if t_next == 0 else predict(x, t_next)
        return x, x0

    def decode(self, x0: Tensor, conds: Sequence[Condition], counts: Sequence[int]) -> Tensor:
        """Images float32 (n, 3, h, w) of latents; ``counts[i]`` rows belong to ``conds[i]``."""
        cond = _stack(conds, counts)
        return torch.cat(self._in_batches(len(x0), lambda a, b: self.denoiser.decode(x0[a:b], cond.at(range(a, b)))))

    def _show_preview(self, search: Search) -> None:
        """The answer of a search that was stopped before it finished anything: its most promising preview."""
        held = search.problem.incumbent
        if held is None:
            return
        images = self.decode(held.x0, [search.problem.cond], [1])
        search.meter.charge(decodes=1)
        scores = held.scores
        if scores is None:
            finite = images.flatten(1).isfinite().all(1)
            images = torch.where(finite.reshape(-1, 1, 1, 1), images, 0.0)
            scores = search.judge(search.verifier, images)
            scores[~finite.cpu()] = -math.inf
            search.meter.charge(verifier_calls=1)
        search.notice("The search was stopped before it finished an image; this is its best preview.")
        search.keep(images, held.x0, scores, held.seeds, 0, finished=held.finished)

    # -------------------------------------------------------------------------------------------- micro-batches

    def _in_batches(self, n: int, work: Callable[[int, int], T], size: str = "max_batch") -> list[T]:
        """``work(a, b)`` on equal slices of range(n), halved when memory runs out."""
        done: list[T] = []
        a = 0
        while a < n:
            rounds = math.ceil((n - a) / getattr(self, size))
            b = a + math.ceil((n - a) / rounds)
            try:
                done.append(work(a, b))
                a = b
            except RuntimeError as error:
                if b - a == 1 or not _is_out_of_memory(error):
                    raise
                setattr(self, size, (b - a) // 2)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        return done


def _there(request: Gradient, slope: Slope) -> Particles:
    """The particles where their rewards were taken."""
    step = request.particles.step if request.to is None else request.to
    return replace(request.particles, step=step, x=slope.x, x0=slope.x0)


def _tell(search: Search, good: Tensor) -> None:
    if not bool(good.all()):
        search.notice("Some latents or images weren't finite; they count as −inf.")


def _stack(conds: Sequence[Condition], counts: Sequence[int]) -> Condition:
    return conds[0] if len(conds) == 1 else type(conds[0]).stack(conds, counts)


def _is_out_of_memory(error: Exception) -> bool:
    """CUDA has a class for it; MPS and the CPU's allocator only say so."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text

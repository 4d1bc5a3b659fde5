"""What a searcher sees: the prompt's problem and the verbs on particles. No device, no batching, no bookkeeping.

Every verb is a generator: searchers use ``yield from``. A verb that doesn't fit into the budget ends the search.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from imgscale import kernels
from imgscale.budget import BACKWARD, BudgetSpent, Meter, Price
from imgscale.early_exit import Exits, Kind, Rule, ahead, race
from imgscale.errors import UserError
from imgscale.kernels import ODE, Kernel
from imgscale.keys import fold, normal, root
from imgscale.particles import Origins, Particles, Schedule
from imgscale.paths import Path, convert

if TYPE_CHECKING:
    from imgscale.denoiser import Condition, Denoiser
    from imgscale.usefulness import Usefulness


@dataclass(frozen=True)
class Predict:
    """Request: the model's x0 (n, *latent) at x, a place of a path. One model evaluation per row."""

    x: Tensor
    t: float
    path: Path


@dataclass(frozen=True)
class Score:
    """Request: the verifier's reward of the images of these particles, float64 (n,)."""

    particles: Particles


@dataclass(frozen=True)
class Gradient:
    """Request: the reward's gradient in the particles' x, through model, decoder and verifier.

    The model is evaluated (again) at x and the ODE solved to step ``to``; the reward is of the x0 there. With ``to``
    None it is the gradient in x0, which needs no model.
    """

    particles: Particles
    to: int | None

    @property
    def nfe(self) -> int:
        """Model evaluations per particle."""
        if self.to is None:
            return 0
        return 1 + self.particles.schedule.nfe(max(self.particles.step, 0), self.to)


@dataclass(frozen=True)
class Slope:
    """The answer to `Gradient`.

    Args:
        x: float32 (n, *latent) at step ``to``.
        x0: The same for x0, of which the reward is.
        scores: float64 (n,), −inf where there is no number.
        gradient: float32 (n, *latent), 0 where it isn't finite.
    """

    x: Tensor
    x0: Tensor
    scores: Tensor
    gradient: Tensor


Request = Predict | Score | Gradient
Verb = Generator[Request, Any, Any]


def bill(request: Request, price: Price | None) -> int:
    """What a request costs in eFLOPs; nothing where there is no price."""
    if price is None:
        return 0
    if isinstance(request, Predict):
        return len(request.x) * price.nfe
    step = request.particles.step if isinstance(request, Score) or request.to is None else request.to
    end = request.particles.schedule.times[max(step, 0)] == 0
    look = (price.decode if end else price.preview) + price.score
    if isinstance(request, Score):
        return len(request.particles) * look
    return BACKWARD * len(request.particles) * (request.nfe * price.nfe + look)


NOISE = -1  # folded into a key before the step: no child and no starting noise has this number
RENOISE = -2  # the same for going back
REMEMBERED = 256  # gradients of parents that may get further children


class Guide(Protocol):
    """What bends the transitions of another searcher, by the reward's gradient for example.

    One that follows gradients has an attribute ``slopes``. Where it is true it takes the gradient in x at every place:
    x0 and gradient then come of one evaluation where the model hasn't been asked yet.
    """

    def __call__(
        self, problem: Problem, particles: Particles, kernel: Kernel, noise: Tensor | None
    ) -> Generator[Request, Any, Tensor]:
        """x of the particles at their next step. The noise is that of the kernel; None where it draws none."""


class Problem:
    """One prompt for one model, under one budget.

    Args:
        denoiser: The model.
        cond: The encoded prompt.
        steps: Transitions of an ordinary sample.
        seed: Of the whole search; the first particle's noise is the pipeline's own for this seed.
        meter: What may still be spent.
        distilled: Whether the model is a few-step one, whose x0 is sharp from the start.
        path: Where stepwise searches walk unless they are told, see `imgscale.grids`.
        ceiling: The verifier's highest possible score, or None.
        differentiable: Whether the verifier has gradients.
        guide: Bends every transition that a searcher takes by a kernel of its own; ordinary samples stay as they are.
        usefulness: What was measured of the model and the verifier; left aside where it was for other steps.
        early_exit: Drops candidates on their way to the image; left aside where it is for other steps.
        traces: Whether particles know where their trajectories can be taken up.

    Attributes:
        schedule: The model's own path and time grid.
        kernel: The model's ordinary step (ODE).
        incumbent: The one particle that the engine would finish if the search ended now.
        done: Whether an image has been finished and scored.
        reached: The highest score of a finished image.
        exits: What came of early exit.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        cond: Condition,
        *,
        steps: int,
        seed: int,
        meter: Meter,
        distilled: bool = False,
        path: str | None = None,
        ceiling: float | None = None,
        differentiable: bool = False,
        guide: Guide | None = None,
        usefulness: Usefulness | None = None,
        early_exit: Rule | None = None,
        traces: bool = False,
    ) -> None:
        self._denoiser = denoiser
        self.cond = cond
        self.meter = meter
        self.seed = seed
        self.distilled = distilled
        self.path = path
        self.ceiling = ceiling
        self.differentiable = differentiable
        self.guide = guide
        self._traces = traces
        self.schedule = self.grid(steps)
        self.kernel: Kernel = ODE()
        self.usefulness = usefulness if usefulness and usefulness.steps == self.schedule.steps else None
        self.early_exit = early_exit if early_exit and early_exit.steps == self.schedule.steps else None
        self.exits = Exits()
        self.incumbent: Particles | None = None
        self.done = False
        self.reached = -math.inf
        self._drawn = 0
        if hasattr(guide, "slopes"):
            self.check_differentiable()
        self._slopes: tuple[tuple[Schedule, int], dict[bytes, Tensor]] = (self.schedule, 0), {}

    # ------------------------------------------------------------------------------------------- what is left

    @property
    def sample_nfe(self) -> int:
        """Model evaluations of one ordinary sample, from noise to image."""
        return 1 + self.schedule.nfe(0, self.schedule.steps)

    @property
    def left(self) -> float:
        """Model evaluations left; infinite when only something else is limited.

        Of a limit on eFLOPs, as many as may be made if as many images are scored besides.
        """
        return min(self.meter.left("nfe"), self._pairs)

    @property
    def scores_left(self) -> float:
        """Images that may still be decoded and scored; infinite when only something else is limited."""
        return min(self.meter.left("verifier_calls"), self.meter.left("decodes"), self._pairs)

    @property
    def _pairs(self) -> float:
        """Evaluations, each with a scored image, that the limit on eFLOPs leaves."""
        price = self.meter.price
        return math.inf if price is None else _quotient(self.meter.left("eflops"), price.nfe + price.look)

    def affordable(self, nfe: int, at_most: int = 64, gradients: int = 0) -> int:
        """How many particles still fit: the way to size a last batch.

        Args:
            nfe: Model evaluations of one of them.
            at_most: The largest answer.
            gradients: Gradients of one of them, besides the score of its image.
        """
        scores, price = gradients + 1, self.meter.price
        fits = [_quotient(self.meter.left(kind), scores) for kind in ("verifier_calls", "decodes")]
        fits += [_quotient(self.meter.left("nfe"), nfe), _quotient(self.meter.left("gradients"), gradients)]
        if price is not None:
            backward = gradients * ((BACKWARD - 1) * price.nfe + BACKWARD * price.look)
            looks = len(self.early_exit.checks) * (price.preview + price.score) if self.early_exit else 0
            fits.append(_quotient(self.meter.left("eflops"), nfe * price.nfe + backward + price.image + looks))
        return int(min(at_most, *fits))

    def may_look(self, particles: Particles) -> bool:
        """Whether previews of these particles may be scored besides all that can still be finished.

        A look saves evaluations, and takes decodes and verifier calls: so it never takes those of an image.
        """
        n, price, rest = len(particles), self.meter.price, self.finishing_nfe(particles)
        calls = min(self.meter.left("verifier_calls"), self.meter.left("decodes"))
        if calls < math.inf and calls < n + max(n, self.left // self.sample_nfe):
            return False
        if price is None:
            return True
        return n * (price.preview + price.score + rest * price.nfe + price.image) <= self.meter.left("eflops")

    def grid(self, steps: int) -> Schedule:
        """The model's own path with its grid of so many transitions."""
        return Schedule(self._denoiser.path, tuple(self._denoiser.grid(steps, self.cond).tolist()))

    # -------------------------------------------------------------------------------------------------- verbs

    def prior(self, n: int, schedule: Schedule | None = None) -> Particles:
        """``n`` fresh starting noises: particles at step -1, where the model hasn't looked at them yet.

        Their x may be replaced, by other noise of scale 1. Costs nothing.
        """
        keys = root(self.seed, self._drawn + n)[self._drawn :]
        self._drawn += n
        # Prior noise has scale 1 on every path; only a path that starts elsewhere than at t = 1 needs another.
        x = self._denoiser.prior(keys, self.cond)
        fresh = Particles(schedule or self.schedule, -1, x, torch.zeros_like(x), keys, keys)
        if not self._traces:
            return fresh
        traced = replace(fresh, traced=Origins(torch.empty(0), ()))
        return traced.tracing(traced.origins)

    def start(self, n: int, schedule: Schedule | None = None) -> Generator[Request, Any, Particles]:
        """``n`` fresh particles at step 0, with their x0."""
        schedule = schedule or self.schedule
        self._admit(n, schedule.nfe(-1, 0), schedule, 0)
        return (yield from self.denoise(self.prior(n, schedule), to=0))

    def denoise(
        self,
        particles: Particles,
        to: int | None = None,
        kernel: Kernel | None = None,
        guide: Guide | None = None,
        *,
        beat: float | None = None,
        keep: int = 1,
    ) -> Generator[Request, Any, Particles]:
        """Moves particles to step ``to`` (the end if None) by the kernel (the model's own ODE if None).

        A kernel's transitions are bent by the guide; by the problem's if None. Several that go to the end by the ODE
        are a race where there is an early exit: they come back scored, and those that were dropped score −inf.

        Args:
            particles: At one place.
            to: A step of their schedule.
            kernel: Of the transitions.
            guide: Bends them.
            beat: In a race, a score that has been reached, above which alone images matter; the best so far if None.
            keep: In a race, how many of the best matter.
        """
        schedule = particles.schedule
        guide = guide or (None if kernel is None else self.guide)
        to = schedule.steps if to is None else to
        if to == schedule.steps and kernel is None and guide is None and self._races(particles):
            return (yield from self._race(particles, "kin", beat, keep))
        return (yield from self.solve(particles, to, kernel, guide))

    def solve(
        self, particles: Particles, to: int, kernel: Kernel | None = None, guide: Guide | None = None
    ) -> Generator[Request, Any, Particles]:
        """The same for all of them, whatever becomes of them."""
        schedule, kernel = particles.schedule, kernel or self.kernel
        self._admit(len(particles), self.cost(schedule, particles.step, to, kernel), schedule, to)
        while particles.step < to:
            step, x = particles.step + 1, particles.x
            if step > 0:
                x = yield from self._move(particles, kernel, guide)
            particles = particles.moved(x, by_ode=guide is None and isinstance(kernel, ODE))
            if not particles.finished:
                sloped = step < to and getattr(guide, "slopes", False)
                particles = yield from (self._look_with_gradient(particles) if sloped else self._look(particles))
            self._follow(particles)
        return particles

    def _races(self, particles: Particles) -> bool:
        return self.early_exit is not None and len(particles) > 1 and bool(ahead(self.early_exit, self, particles))

    def _race(
        self, particles: Particles, kind: Kind, beat: float | None, keep: int, of: int | None = None
    ) -> Generator[Request, Any, Particles]:
        assert self.early_exit is not None
        schedule = particles.schedule
        # The first ones to leave may be the last: all could run to the end.
        cost = self.cost(schedule, particles.step, schedule.steps)
        self._admit(len(particles), cost, schedule, schedule.steps)
        beat = self.reached if beat is None else beat
        return (yield from race(self, particles, self.early_exit, kind=kind, beat=beat, keep=keep, of=of))

    def _look(self, particles: Particles) -> Generator[Request, Any, Particles]:
        """Asks the model for x0."""
        x0 = yield Predict(particles.x, particles.time, particles.schedule.path)
        return replace(particles, x0=x0).seen()

    def _look_with_gradient(self, particles: Particles) -> Generator[Request, Any, Particles]:
        """The same, and remembers the gradient that will be asked for next."""
        self.check_differentiable()
        slope = yield from self._slope(Gradient(particles, particles.step))
        self._remember(particles, dict(zip(_fingerprints(particles.x), slope.gradient, strict=True)))
        return replace(particles, x0=slope.x0, scores=slope.scores).seen()

    def _move(self, particles: Particles, kernel: Kernel, guide: Guide | None) -> Generator[Request, Any, Tensor]:
        """x at the next step."""
        noise = None
        if kernel.stochastic and particles.schedule.times[particles.step + 1] > 0:
            noise = normal(fold(particles.keys, NOISE, particles.step + 1), tuple(particles.x.shape[1:]))
            noise = noise.to(particles.x.device, non_blocking=True)
        if guide is not None:
            return (yield from guide(self, particles, kernel, noise))
        return (yield from self.advance(particles, kernel, noise))

    def advance(
        self, particles: Particles, kernel: Kernel, noise: Tensor | None, shift: Tensor | float = 0.0
    ) -> Generator[Request, Any, Tensor]:
        """x of the particles at their next step, with a shift of x0: `transition`, for guides."""
        t, t_next = particles.schedule.times[particles.step : particles.step + 2]
        path = particles.schedule.path
        return (yield from self.transition(kernel, path, t, t_next, particles.x, particles.x0, noise, shift))

    def transition(
        self,
        kernel: Kernel,
        path: Path,
        t: float,
        t_next: float,
        x: Tensor,
        x0: Tensor,
        noise: Tensor | None,
        shift: Tensor | float = 0.0,
    ) -> Generator[Request, Any, Tensor]:
        """x at ``t_next`` by the kernel, which may ask the model on its way. For guides; searchers `denoise`.

        The shift is added to x0, and to every other x0 that the kernel asks for.
        """
        # A guide may have spent what was admitted before.
        self._admit(len(x), kernel.evaluations * (t_next > 0) + (t_next > 0), Schedule(path, (t_next,)), 0)
        walk = kernel.walk(path, t, t_next, x, x0 + shift, noise)
        try:
            place, time = next(walk)
            while True:
                place, time = walk.send((yield Predict(place, time, path)) + shift)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def renoise(
        self, particles: Particles, to: int, schedule: Schedule | None = None, sloped: bool = False
    ) -> Generator[Request, Any, Particles]:
        """Takes particles back to step ``to``, of another schedule if one is given, by forward noising.

        The noise follows from their keys, and they get new ones: `branch` those that are to go back several ways.
        Of ``sloped`` ones the gradient that is asked for next comes of the same evaluation.
        """
        schedule = schedule or particles.schedule
        self._admit(len(particles), 1, schedule, to)
        x, t = convert(particles.x, particles.time, particles.schedule.path, schedule.path)
        keys = fold(particles.keys, RENOISE, to)
        noise = normal(fold(keys, NOISE, to), tuple(x.shape[1:])).to(x.device, non_blocking=True)
        x = kernels.renoise(schedule.path, t, schedule.times[to], x, noise)
        moved = replace(particles, schedule=schedule, step=to, x=x, x0=x, keys=keys, scores=None)
        return self._follow((yield from (self._look_with_gradient(moved) if sloped else self._look(moved))))

    def sample(self, n: int, *, keep: int = 1, of: int | None = None) -> Generator[Request, Any, Particles]:
        """``n`` fresh finished samples, as the pipeline itself makes them; a race as in `denoise`.

        Args:
            n: How many.
            keep: In a race, how many of the best matter.
            of: Samples that the search draws in all, if that is known.
        """
        self._admit(n, self.sample_nfe, self.schedule, self.schedule.steps)
        fresh = self.prior(n)
        if self._races(fresh):
            return (yield from self._race(fresh, "fresh", None, keep, of))
        return (yield from self.solve(fresh, self.schedule.steps))

    def finish(self, particles: Particles, *, keep: int = 1) -> Generator[Request, Any, Particles]:
        """Solves particles to the end by the model's own ODE, from wherever they are; a race as in `denoise`."""
        return (yield from self.denoise(self.on_own_path(particles), keep=keep))

    def score(self, particles: Particles) -> Generator[Request, Any, tuple[Particles, Tensor]]:
        """Rewards of the particles' x0, of an image if they are finished and of a preview if not.

        Returns:
            The particles, which now remember their scores, and the scores, float64 (n,). What isn't finite is −inf.
        """
        if particles.scores is not None:
            return particles, particles.scores
        reserve = int(not self.done and not particles.finished)
        n = len(particles) + reserve
        self.meter.require(verifier_calls=n, decodes=n)
        request = Score(particles)
        self._admit_bill(request, particles.schedule, particles.step)
        scores = yield request
        particles = replace(particles, scores=scores)
        if particles.finished and len(scores):
            self.reached = max(self.reached, float(scores.max()))
        self._follow(particles)
        return particles, scores

    def gradient(self, particles: Particles) -> Generator[Request, Any, Tensor]:
        """d r(x0(x)) / dx of unfinished particles, through the model: float32 like x.

        One more evaluation, decode and verifier call for each different x, so that children of one parent cost one;
        none where it was asked for at this place before.

        Raises:
            UserError: The verifier has no gradients.
        """
        self.check_differentiable()
        names = _fingerprints(particles.x)
        place, known = self._slopes
        if place != (particles.schedule, particles.step):
            known = {}
        first = {name: i for i, name in reversed([*enumerate(names)]) if name not in known}
        if leaders := sorted(first.values()):
            self._admit(len(leaders), 1, particles.schedule, max(particles.step, 0))
            slope = yield from self._slope(Gradient(particles[leaders], max(particles.step, 0)))
            known = known | {names[i]: row for i, row in zip(leaders, slope.gradient, strict=True)}
            if particles.step >= 0:
                self._follow(particles)  # what was the incumbent may have become too dear
        answer = torch.stack([known[name] for name in names]) if names else particles.x
        self._remember(particles, known if len(known) <= REMEMBERED else {})
        return answer

    def _remember(self, particles: Particles, slopes: dict[bytes, Tensor]) -> None:
        self._slopes = (particles.schedule, particles.step), slopes

    def gradient_x0(self, particles: Particles) -> Generator[Request, Any, tuple[Tensor, Tensor]]:
        """d r(x0) / dx0, float32 like x0, and the rewards, float64 (n,). No model evaluation.

        Raises:
            UserError: The verifier has no gradients.
        """
        self.check_differentiable()
        slope = yield from self._slope(Gradient(particles, None))
        return slope.gradient, slope.scores

    def solve_with_gradient(self, particles: Particles) -> Generator[Request, Any, tuple[Particles, Tensor]]:
        """Finishes and scores particles by the ODE, and differentiates through all of it.

        Memory grows with the steps that are left, since the activations of all are kept.

        Returns:
            The finished and scored particles, and d r / dx at the place where they came from, float32 like x.

        Raises:
            UserError: The verifier has no gradients.
        """
        self.check_differentiable()
        schedule = particles.schedule
        request = Gradient(particles, schedule.steps)
        self._admit(len(particles), request.nfe, schedule, schedule.steps)
        slope = yield from self._slope(request)
        ends = replace(particles.solved(schedule.steps, slope.x, slope.x0), scores=slope.scores)
        return ends, slope.gradient

    def check_differentiable(self) -> None:
        """Raises:
        UserError: The verifier has no gradients.
        """
        if not self.differentiable:
            raise UserError(
                "This search follows the reward's gradient, and the verifier has none; take one that has (such as clip)"
                " or a search without gradients (such as rbf)."
            )

    def _slope(self, request: Gradient) -> Generator[Request, Any, Slope]:
        n = len(request.particles)
        reserve = int(not self.done and (request.to is None or request.particles.schedule.times[request.to] > 0))
        self.meter.require(verifier_calls=n + reserve, decodes=n + reserve, gradients=n)
        step = request.particles.step if request.to is None else request.to
        self._admit_bill(request, request.particles.schedule, step)
        slope: Slope = yield request
        return slope

    def on_own_path(self, particles: Particles) -> Particles:
        """The same particles on the model's own path, at equal log-SNR, with the rest of its own grid before them."""
        own = self.schedule
        if particles.schedule == own or particles.finished:
            return particles
        x, t = convert(particles.x, particles.time, particles.schedule.path, own.path)
        times = (float(t), *(time for time in own.times if time < float(t) - 1e-6))
        there = replace(particles, schedule=Schedule(own.path, times), step=0, x=x)
        if x is particles.x:
            return there
        asked = [origin.calls[-1:] for origin in particles.origins]  # there as here: x0 is the same
        return there.tracing([replace(o, calls=calls) for o, calls in zip(there.origins, asked, strict=True)])

    # ------------------------------------------------------------------------------- always leaving an answer

    def cost(self, schedule: Schedule, start: int, stop: int, kernel: Kernel | None = None) -> int:
        """Model evaluations that one particle needs from step ``start`` (done) to ``stop`` by a kernel."""
        moves = sum(t > 0 for t in schedule.times[max(start, 0) + 1 : stop + 1])
        return schedule.nfe(start, stop) + moves * (kernel or self.kernel).evaluations

    def finishing_nfe(self, particles: Particles) -> int:
        """Model evaluations that one of these particles needs to become an image."""
        return self.finishing_from(particles.schedule, particles.step)

    def finishing_from(self, schedule: Schedule, step: int) -> int:
        """Model evaluations from a step of a schedule to the image, by the model's own grid."""
        own = self.schedule
        if schedule == own:
            return own.nfe(step, own.steps)
        t = float(own.path.time_at(schedule.path.log_snr(schedule.times[step])))
        return sum(0 < time < t - 1e-6 for time in own.times)

    def _admit(self, n: int, nfe: int, schedule: Schedule, to: int) -> None:
        """Ends the search unless ``n`` particles may take ``nfe`` evaluations each to step ``to``.

        While nothing is finished, enough is held back to finish one: the incumbent, or one of these.
        """
        eflops = n * nfe * self.meter.price.nfe if self.meter.price else 0
        self.meter.require(nfe=n * nfe, eflops=eflops)
        if not self.done:
            self._hold_back(n * nfe, eflops, schedule, to)

    def _admit_bill(self, request: Request, schedule: Schedule, step: int) -> None:
        """The same for what a request costs in eFLOPs; its answer is of particles at this step."""
        if self.meter.price is None:
            return
        eflops = bill(request, self.meter.price)
        self.meter.require(eflops=eflops)
        if not self.done and schedule.times[max(step, 0)] > 0:
            self._hold_back(0, eflops, schedule, max(step, 0))

    def _hold_back(self, nfe: int, eflops: int, schedule: Schedule, step: int) -> None:
        """Ends the search unless an image can be finished from here, or the incumbent, after so much is spent."""
        there = self.finishing_from(schedule, step) if schedule.times[step] > 0 else 0
        if not self._enough(there, nfe, eflops) and not self._can_finish(self.incumbent, nfe, eflops):
            raise BudgetSpent

    def _can_finish(self, particles: Particles | None, nfe: int = 0, eflops: int = 0) -> bool:
        """Whether one of these particles becomes an image for what is left after so much is spent."""
        return particles is not None and self._enough(self.finishing_nfe(particles), nfe, eflops)

    def _enough(self, finishing: int, nfe: int, eflops: int) -> bool:
        """Whether so many evaluations, and a score where that is priced, fit in what is left after so much is spent."""
        if finishing > self.meter.left("nfe") - nfe:
            return False
        price = self.meter.price
        return price is None or finishing * price.nfe + price.image <= self.meter.left("eflops") - eflops

    def _follow(self, particles: Particles) -> Particles:
        """Keeps the most promising particle in flight that can still be finished, until something is."""
        if self.done or not len(particles) or not self._can_finish(particles):
            return particles
        held = self.incumbent if self._can_finish(self.incumbent) else None
        if particles.scores is None:
            if held is None or held.scores is None:
                self.incumbent = particles[:1]
            return particles
        best = int(particles.scores.argmax())
        if held is None or held.scores is None or particles.scores[best] >= held.scores[0]:
            self.incumbent = particles[best : best + 1]
        return particles


def _quotient(left: float, each: int) -> float:
    """How often ``each`` fits into what is left; without end where it is nothing."""
    return left if left == math.inf else left // each if each > 0 else math.inf


def _fingerprints(x: Tensor) -> list[bytes]:
    """Of each row, equal for equal rows."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in x.flatten(1).cpu().numpy()]

"""What a searcher sees: the prompt's problem and the verbs on particles. No device, no batching, no bookkeeping.

Every verb is a generator: searchers use ``yield from``. A verb that doesn't fit into the budget ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from imgscale.budget import BudgetSpent, Meter
from imgscale.kernels import ODE, Kernel
from imgscale.keys import fold, normal, root
from imgscale.particles import Particles, Schedule
from imgscale.paths import Path, convert

if TYPE_CHECKING:
    from imgscale.denoiser import Condition, Denoiser


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


Request = Predict | Score
Verb = Generator[Request, Any, Any]

NOISE = -1  # folded into a key before the step: no child and no starting noise has this number


class Problem:
    """One prompt for one model, under one budget.

    Args:
        denoiser: The model.
        cond: The encoded prompt.
        steps: Transitions of an ordinary sample.
        seed: Of the whole search; the first particle's noise is the pipeline's own for this seed.
        meter: What may still be spent.
        distilled: Whether the model is a few-step one, whose x0 is sharp from the start.
        ceiling: The verifier's highest possible score, or None.

    Attributes:
        schedule: The model's own path and time grid.
        kernel: The model's ordinary step (ODE).
        incumbent: The one particle that the engine would finish if the search ended now.
        done: Whether an image has been finished and scored.
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
        ceiling: float | None = None,
    ) -> None:
        self._denoiser = denoiser
        self.cond = cond
        self.meter = meter
        self.seed = seed
        self.distilled = distilled
        self.ceiling = ceiling
        self.schedule = Schedule(denoiser.path, tuple(denoiser.grid(steps, cond).tolist()))
        self.kernel: Kernel = ODE()
        self.incumbent: Particles | None = None
        self.done = False
        self._drawn = 0

    # ------------------------------------------------------------------------------------------- what is left

    @property
    def sample_nfe(self) -> int:
        """Model evaluations of one ordinary sample, from noise to image."""
        return 1 + self.schedule.nfe(0, self.schedule.steps)

    @property
    def left(self) -> float:
        """Model evaluations left; infinite when only something else is limited."""
        return self.meter.left("nfe")

    @property
    def scores_left(self) -> float:
        """Images that may still be decoded and scored; infinite when only something else is limited."""
        return min(self.meter.left("verifier_calls"), self.meter.left("decodes"))

    def affordable(self, nfe: int, at_most: int = 64) -> int:
        """How many particles that cost ``nfe`` each still fit: the way to size a last batch."""
        evaluated = math.inf if self.left == math.inf else self.left // max(nfe, 1)
        return int(min(at_most, evaluated, self.scores_left))

    # -------------------------------------------------------------------------------------------------- verbs

    def start(self, n: int, schedule: Schedule | None = None) -> Generator[Request, Any, Particles]:
        """``n`` fresh particles at step 0, with their x0."""
        schedule = schedule or self.schedule
        self._admit(n, schedule.nfe(-1, 0), schedule, 0)
        keys = root(self.seed, self._drawn + n)[self._drawn :]
        self._drawn += n
        x = self._denoiser.prior(keys, self.cond)
        # Prior noise has scale 1 on every path; only a path that starts elsewhere than at t = 1 needs another.
        x0 = yield Predict(x, schedule.times[0], schedule.path)
        return self._follow(Particles(schedule, 0, x, x0, keys, keys))

    def denoise(
        self, particles: Particles, to: int | None = None, kernel: Kernel | None = None
    ) -> Generator[Request, Any, Particles]:
        """Moves particles to step ``to`` (the end if None) by the kernel (the model's own ODE if None)."""
        schedule, kernel = particles.schedule, kernel or self.kernel
        to = schedule.steps if to is None else to
        self._admit(len(particles), schedule.nfe(particles.step, to), schedule, to)
        while particles.step < to:
            t, t_next = particles.time, schedule.times[particles.step + 1]
            noise = None
            if kernel.stochastic and t_next > 0:
                noise = normal(fold(particles.keys, NOISE, particles.step + 1), tuple(particles.x.shape[1:]))
                noise = noise.to(particles.x.device, non_blocking=True)
            x = kernel(schedule.path, t, t_next, particles.x, particles.x0, noise)
            x0 = x if t_next == 0 else (yield Predict(x, t_next, schedule.path))
            particles = replace(particles, step=particles.step + 1, x=x, x0=x0, scores=None)
            self._follow(particles)
        return particles

    def sample(self, n: int) -> Generator[Request, Any, Particles]:
        """``n`` fresh finished samples, as the pipeline itself makes them."""
        self._admit(n, self.sample_nfe, self.schedule, self.schedule.steps)
        particles = yield from self.start(n)
        return (yield from self.denoise(particles))

    def finish(self, particles: Particles) -> Generator[Request, Any, Particles]:
        """Solves particles to the end by the model's own ODE, from wherever they are."""
        return (yield from self.denoise(self.on_own_path(particles)))

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
        scores = yield Score(particles)
        particles = replace(particles, scores=scores)
        self._follow(particles)
        return particles, scores

    def on_own_path(self, particles: Particles) -> Particles:
        """The same particles on the model's own path, at equal log-SNR, with the rest of its own grid before them."""
        own = self.schedule
        if particles.schedule == own or particles.finished:
            return particles
        x, t = convert(particles.x, particles.time, particles.schedule.path, own.path)
        times = (float(t), *(time for time in own.times if time < float(t) - 1e-6))
        return replace(particles, schedule=Schedule(own.path, times), step=0, x=x)

    # ------------------------------------------------------------------------------- always leaving an answer

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
        self.meter.require(nfe=n * nfe)
        if self.done or schedule.times[to] == 0:
            return
        rest = self.left - n * nfe
        if rest < self.finishing_from(schedule, to) and not self._can_finish(self.incumbent, rest):
            raise BudgetSpent

    def _can_finish(self, particles: Particles | None, nfe: float) -> bool:
        """Whether one of these particles becomes an image for so many evaluations."""
        return particles is not None and self.finishing_nfe(particles) <= nfe

    def _follow(self, particles: Particles) -> Particles:
        """Keeps the most promising particle in flight that can still be finished, until something is."""
        if self.done or not len(particles) or not self._can_finish(particles, self.left):
            return particles
        held = self.incumbent if self._can_finish(self.incumbent, self.left) else None
        if particles.scores is None:
            if held is None or held.scores is None:
                self.incumbent = particles[:1]
            return particles
        best = int(particles.scores.argmax())
        if held is None or held.scores is None or particles.scores[best] >= held.scores[0]:
            self.incumbent = particles[best : best + 1]
        return particles

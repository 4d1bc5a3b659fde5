"""Local search: annealed Langevin steps by the reward's gradient, with recurrence, as training-free guidance has it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.kernels import Kernel
from imgscale.kernels import kernel as read_kernel
from imgscale.keys import fold, normal
from imgscale.particles import Particles
from imgscale.problem import NOISE, Problem, Request, Verb
from imgscale.registry import guide, searcher
from imgscale.searchers.dps import guided_samples, limited, spread

Growth = Literal["increase", "decrease", "constant"]


@guide("local", cite=("zhang2025classical", "ye2024tfg"))
@dataclass(frozen=True, kw_only=True)
class Local:
    """Climbs by gradients in x and in x0 at each transition, and repeats it from re-noised particles.

    Going back up by forward noising and down by a guided stochastic step is a step of Langevin dynamics at the
    transition's noise level, whose law is the model's there, tilted by the reward.

    Args:
        rho: Scale of the gradient in x, through the model (variance guidance), as in dps.
        mu: Step along the gradient in x0, without the model (mean guidance).
        iterations: Steps of mu per turn.
        recur: Turns per transition (N_recur); all but the first take a model evaluation.
        schedule: How rho and mu change from noise to data. Their mean over the transitions stays.
        limit: The largest root mean square of all shifts of x0 in one turn.

    Source: algorithm 1 of Ye et al. 2024 (TFG, arXiv 2409.15761), as Zhang et al. 2025 (arXiv 2505.23614) search with.
    """

    rho: float = 10.0
    mu: float = 0.0
    iterations: int = 1
    recur: int = 2
    schedule: Growth = "increase"
    limit: float = 0.5

    def __post_init__(self) -> None:
        if not (self.rho >= 0 and self.mu >= 0 and self.limit > 0):
            raise UserError(
                f"local needs rho ({self.rho}) and mu ({self.mu}) of at least 0, and a limit ({self.limit}) above it."
            )
        if self.iterations < 1 or self.recur < 1:
            raise UserError(f"local's iterations ({self.iterations}) and recur ({self.recur}) must be at least 1.")

    @property
    def slopes(self) -> bool:
        return self.rho > 0

    def __call__(
        self, problem: Problem, particles: Particles, kernel: Kernel, noise: Tensor | None
    ) -> Generator[Request, Any, Tensor]:
        strength = growth(self.schedule, particles)
        for turn in range(self.recur):
            shift = torch.zeros_like(particles.x0)
            if self.rho:
                shift = self.rho * strength * spread(particles) * (yield from problem.gradient(particles))
            for _ in range(self.iterations if self.mu else 0):
                shift = limited(shift, self.limit)
                slope, _ = yield from problem.gradient_x0(replace(particles, x0=particles.x0 + shift))
                shift = shift + self.mu * strength * slope
            x = yield from problem.advance(particles, kernel, noise, limited(shift, self.limit))
            if turn + 1 < self.recur:
                there = replace(particles, step=particles.step + 1, x=x, keys=fold(particles.keys, turn))
                particles = yield from problem.renoise(there, particles.step, sloped=self.slopes)
                if noise is not None:
                    keys = fold(particles.keys, NOISE, particles.step + 1)
                    noise = normal(keys, tuple(x.shape[1:])).to(x.device)
        return x

    def price(self, kernel: Kernel) -> tuple[int, int]:
        gradients = (self.rho > 0) + (self.mu > 0) * self.iterations
        return (self.recur - 1) * (1 + kernel.evaluations), self.recur * gradients


def growth(schedule: Growth, particles: Particles) -> float:
    """How strong guidance is at this place: like alpha or sigma over the transitions, of mean 1."""
    if schedule == "constant":
        return 1.0
    path, times = particles.schedule.path, torch.tensor(particles.schedule.times[:-1])
    curve = path.alpha if schedule == "increase" else path.sigma
    mean = curve(times).mean()  # 0 where the only place is pure noise
    return float(curve(particles.time) / mean) if mean > 0 else 1.0


@searcher("local", cite=("zhang2025classical", "ye2024tfg"))
def local(
    problem: Problem,
    rng: np.random.Generator,
    *,
    rho: float = 10.0,
    mu: float = 0.0,
    iterations: int = 1,
    recur: int = 2,
    schedule: Growth = "increase",
    limit: float = 0.5,
    kernel: str = "ddim(1)",
    batch: int = 16,
) -> Verb:
    """Samples that climb the reward by annealed Langevin steps on their way, while the budget lasts.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        rho: Scale of the gradient in x, through the model.
        mu: Step along the gradient in x0, without the model.
        iterations: Steps of mu per turn.
        recur: Turns per transition (N_recur); all but the first take a model evaluation.
        schedule: How rho and mu change from noise to data. Their mean over the transitions stays.
        limit: The largest root mean square of all shifts of x0 in one turn.
        kernel: The step, such as "ddim(1)"; one without noise repeats itself from other noise only.
        batch: Samples at once.

    Source: Zhang et al. 2025 (arXiv 2505.23614) and Ye et al. 2024 (TFG, arXiv 2409.15761).
    """
    guide = Local(rho=rho, mu=mu, iterations=iterations, recur=recur, schedule=schedule, limit=limit)
    yield from guided_samples(problem, guide, read_kernel(kernel), batch, rng)

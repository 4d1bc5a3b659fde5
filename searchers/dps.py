"""Diffusion posterior sampling: every transition is bent by the reward's gradient through the model."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from imgscale.errors import UserError
from imgscale.kernels import Kernel
from imgscale.kernels import kernel as read_kernel
from imgscale.particles import Particles
from imgscale.problem import Guide, Problem, Request, Verb
from imgscale.registry import guide, searcher
from imgscale.searchers.best_of_n import best_of_n


@guide("dps", cite="chung2023dps")
@dataclass(frozen=True, kw_only=True)
class DPS:
    """Adds the reward's gradient, through the model, to the score.

    The score gains scale grad_x r(x0(x)), which in the form of x0 and eps is a shift of x0 by (s^2 / a) scale grad_x r.
    For an exact model that is scale Cov[x0 | x] grad r(x0), and finite; a learned one at small a can give anything,
    since 1 / a grows without end towards t = 1. Therefore the shift is limited.

    Args:
        scale: Of the gradient: the samples aim at the model's law times exp(scale * reward).
        limit: The largest root mean square of the shift. Latents have a standard deviation of about 1.

    Source: Chung et al. 2023 (arXiv 2209.14687), for any reward in the place of a measurement's likelihood.
    """

    scale: float = 10.0
    limit: float = 0.5
    slopes = True

    def __post_init__(self) -> None:
        if not (self.scale >= 0 and self.limit > 0):
            raise UserError(f"dps needs a scale of at least 0 and a limit above it, not {self.scale} and {self.limit}.")

    def __call__(
        self, problem: Problem, particles: Particles, kernel: Kernel, noise: Tensor | None
    ) -> Generator[Request, Any, Tensor]:
        gradient = yield from problem.gradient(particles)
        shift = limited(self.scale * spread(particles) * gradient, self.limit)
        return (yield from problem.advance(particles, kernel, noise, shift))

    def price(self, kernel: Kernel) -> tuple[int, int]:
        return 0, 1


def spread(particles: Particles) -> float:
    """s^2 / a: what turns a gradient in x into a shift of x0. Kept finite where there is no data in x."""
    path, t = particles.schedule.path, particles.time
    return float(path.sigma(t) ** 2 / path.alpha(t).clamp(min=1e-3))


def limited(shift: Tensor, limit: float) -> Tensor:
    """The shift (n, ...), scaled down row by row to a root mean square of at most ``limit``."""
    size = shift.flatten(1).square().mean(1).sqrt().reshape(-1, *[1] * (shift.ndim - 1))
    return shift * (limit / size.clamp(min=limit))


class Priced(Guide, Protocol):
    """A guide that knows what it takes."""

    def price(self, kernel: Kernel) -> tuple[int, int]:
        """Model evaluations and gradients per transition of a sample, beyond what the kernel takes."""


def guided_samples(problem: Problem, guide: Priced, kernel: Kernel, batch: int, rng: np.random.Generator) -> Verb:
    """Finished samples with every transition guided while the budget lasts, and plain ones of what is left then."""
    if problem.guide is not None:
        raise UserError("This searcher is a guide itself and takes no other; name another searcher before the plus.")
    if batch < 1:
        raise UserError(f"The batch can't be {batch}; it must be at least 1.")
    steps = problem.schedule.steps
    nfe, gradients = guide.price(kernel)
    nfe = problem.cost(problem.schedule, -1, steps, kernel) + steps * nfe
    while n := problem.affordable(nfe, batch, steps * gradients):
        ends = yield from problem.denoise(problem.prior(n), kernel=kernel, guide=guide)
        yield from problem.score(ends)
    yield from best_of_n(problem, rng)


@searcher("dps", cite="chung2023dps")
def dps(
    problem: Problem,
    rng: np.random.Generator,
    *,
    scale: float = 10.0,
    limit: float = 0.5,
    kernel: str = "ddim(1)",
    batch: int = 16,
) -> Verb:
    """Samples of which every transition follows the reward's gradient, while the budget lasts.

    x0 and gradient come of one evaluation, so that a sample costs as many as a plain one, each with a backward pass.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        scale: Of the gradient: the samples aim at the model's law times exp(scale * reward).
        limit: The largest root mean square of the shift of x0.
        kernel: The step, such as "ddim(1)" or "ode".
        batch: Samples at once.

    Source: Chung et al. 2023 (arXiv 2209.14687), for any reward.
    """
    yield from guided_samples(problem, DPS(scale=scale, limit=limit), read_kernel(kernel), batch, rng)

"""Noise optimisation: the reward's gradient, through the whole solution, climbs in the initial noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.problem import Problem, Verb
from imgscale.registry import searcher
from imgscale.searchers.best_of_n import best_of_n

MOMENTUM = 0.9


@searcher("noise-gradient", cite=("eyring2024reno", "tang2024dno"))
def noise_gradient(
    problem: Problem,
    rng: np.random.Generator,
    *,
    lr: float = 5.0,
    iterations: int = 50,
    clip: float = 0.1,
    regularise: float = 0.01,
    steps: int | None = None,
    chains: int = 4,
) -> Verb:
    """Ascends the reward in the initial noise by gradients through the whole ODE, and keeps the best iterate.

    Several noises climb side by side; what is left after their iterations buys new ones, and plain samples in the end.
    The norm of the noise is held where a Gaussian has it.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        lr: Learning rate of gradient ascent with Nesterov's momentum of .9.
        iterations: Per noise, at most.
        clip: The largest norm of a gradient.
        regularise: Weight of the log-density of the noise's norm.
        steps: Of the ODE that is climbed through: memory grows with them. By default the model's own on a distilled
            model, and 4 on an ordinary one, whose best noises are then solved with all.
        chains: Noises that climb side by side.

    Source: ReNO, Eyring et al. 2024 (arXiv 2406.04312), for one-step models; DNO, Tang et al. 2024 (arXiv 2405.18881).
    """
    _check(lr, clip, regularise, iterations, chains, steps)
    if steps is None:
        steps = problem.schedule.steps if problem.distilled else min(4, problem.schedule.steps)
    few = problem.grid(steps)
    climb, render = few.nfe(-1, steps), problem.sample_nfe if few != problem.schedule else 0
    while n := problem.affordable(climb + render, chains, gradients=1):
        noise = best = problem.prior(n, few)
        highest = torch.full((n,), -torch.inf, dtype=torch.float64)
        velocity = torch.zeros_like(noise.x)
        for _ in range(iterations):
            if problem.affordable(climb + render, n, gradients=1) < n:
                break
            ends, slope = yield from problem.solve_with_gradient(noise)  # each iterate is an image itself
            assert ends.scores is not None
            better = ends.scores > highest
            highest = torch.where(better, ends.scores, highest)
            best = replace(best, x=torch.where(_rows(better, noise.x), noise.x, best.x))
            slope = _clipped(slope + regularise * norm_slope(noise.x), clip)
            velocity = MOMENTUM * velocity + slope
            noise = replace(noise, x=noise.x + lr * (slope + MOMENTUM * velocity))
        if render:
            yield from problem.score((yield from problem.denoise(replace(best, schedule=problem.schedule))))
    yield from best_of_n(problem, rng)


def norm_slope(x: Tensor) -> Tensor:
    """The gradient of the log-density of a standard normal vector's norm, (d - 1) log |x| - |x|^2 / 2."""
    norm = x.flatten(1).norm(dim=1)
    return _rows((x[0].numel() - 1) / norm.square() - 1, x) * x


def _clipped(slope: Tensor, clip: float) -> Tensor:
    norm = slope.flatten(1).norm(dim=1)
    return slope * _rows(clip / norm.clamp(min=clip), slope)


def _rows(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device).reshape(-1, *[1] * (like.ndim - 1))


def _check(lr: float, clip: float, regularise: float, iterations: int, chains: int, steps: int | None) -> None:
    for name, value, right in (
        ("lr", lr, lr > 0),
        ("clip", clip, clip > 0),
        ("regularise", regularise, regularise >= 0),
        ("iterations", iterations, iterations >= 1),
        ("chains", chains, chains >= 1),
        ("steps", steps, steps is None or 1 <= steps <= 1000),
    ):
        if not right:
            raise UserError(f"noise-gradient's {name} can't be {value}; it must be a positive number.")

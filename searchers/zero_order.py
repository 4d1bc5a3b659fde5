"""Zero-order search: climb from noise to neighbouring noise, by the images that grow from them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
from torch.nn.functional import normalize

from imgscale.errors import UserError
from imgscale.keys import fold, normal
from imgscale.particles import Particles
from imgscale.problem import NOISE, Problem, Verb
from imgscale.registry import searcher


@searcher("zero-order", cite="ma2025inference")
def zero_order(
    problem: Problem, rng: np.random.Generator, *, neighbours: int = 4, cosine: float = 0.95, patience: int = 2
) -> Verb:
    """Climbs from a starting noise to the best of its neighbours, again and again.

    Every candidate is an ordinary sample, so it serves any model alike. The first is the pipeline's own image.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        neighbours: Neighbours of the pivot that are tried in a round.
        cosine: Of the angle between the pivot and a neighbour: the nearer to 1, the smaller the steps.
        patience: Rounds without a better image after which the climb starts anew from a fresh noise.

    Source: zero-order search in Ma et al. 2025 (arXiv 2501.09732). Beyond it: starting anew when stuck.
    """
    if neighbours < 1 or patience < 1:
        raise UserError(f"zero-order's neighbours ({neighbours}) and patience ({patience}) must be at least 1.")
    if not 0 <= cosine < 1:
        raise UserError(f"zero-order's cosine can't be {cosine}; give a number from 0 up to, but not including, 1.")
    while problem.affordable(problem.sample_nfe) > 0:
        pivot = problem.prior(1)
        _, scores = yield from problem.score((yield from problem.denoise(pivot)))
        best, stuck = float(scores), 0
        while stuck < patience and (n := problem.affordable(problem.sample_nfe, neighbours)) > 0:
            noises = near(pivot, cosine, n, first=stuck * neighbours)
            _, scores = yield from problem.score((yield from problem.denoise(noises, beat=best)))
            stuck += 1
            if scores.max() > best:
                pivot, best, stuck = noises[scores.argmax()], float(scores.max()), 0


def near(pivot: Particles, cosine: float, n: int, first: int = 0) -> Particles:
    """``n`` noises on the pivot's sphere, ‖p‖ (c p̂ + √(1 - c²) w), with w uniform among the directions orthogonal to p.

    Args:
        pivot: One particle.
        cosine: c.
        n: How many.
        first: The number of the first: neighbours of other numbers are others.
    """
    children = pivot.branch(n, first)
    p = children.x.flatten(1)
    direction = normalize(p)
    w = normal(fold(children.keys, NOISE, pivot.step), tuple(pivot.x.shape[1:])).to(p.device).flatten(1)
    w = normalize(w - (w * direction).sum(1, keepdim=True) * direction)
    x = p.norm(dim=1, keepdim=True) * (cosine * direction + sqrt(1 - cosine**2) * w)
    return replace(children, x=x.reshape(children.x.shape))

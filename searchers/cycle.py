"""ABCD: send the best images back to several noise levels at once, and see which of them find something better."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from imgscale.particles import Particles, join
from imgscale.problem import Problem, Verb
from imgscale.registry import searcher
from imgscale.searchers._population import at_least_one


@searcher("cycle", cite="lee2025adaptive")
def cycle(
    problem: Problem,
    rng: np.random.Generator,
    *,
    starts: int = 4,
    keep: int = 2,
    copies: int = 1,
    levels: int = 4,
    kappa: int = 2,
) -> Verb:
    """Cycles between noise and image: re-noises the best to several levels, solves them, and keeps the best of all.

    High levels explore and low ones polish, and which of them wins tells when to stop: after ``kappa`` cycles in which
    everything kept came from the lowest level or was there before, the pool ends, and a new one begins if enough is
    left for it.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        starts: Samples that a pool begins with (the paper's N).
        keep: Images that are kept after each cycle (K).
        copies: Ways that each of them is taken back to each level.
        levels: Noise levels, at places of the model's own grid that are spread evenly over it; all of its places if it
            has fewer.
        kappa: Cycles without a winner from above the lowest level that end a pool.

    Source: adaptive bi-directional cyclic diffusion, Lee et al. 2025 (arXiv 2505.14036). Here what was kept before
    stays in the contest, the solver is the model's own, and pools begin anew until the budget is spent.
    """
    at_least_one("cycle", starts=starts, keep=keep, copies=copies, levels=levels, kappa=kappa)
    own = problem.schedule
    levels = min(levels, own.steps - 1)
    places = [round(own.steps * (i + 1) / (levels + 1)) for i in range(levels)]  # the noisiest first
    costs = [own.nfe(place - 1, own.steps) for place in places]
    while n := problem.affordable(problem.sample_nfe, starts):
        pool, _ = yield from problem.score((yield from problem.sample(n, keep=keep)))
        pool, turn, quiet = pool.top(keep), 0, 0
        while any(counts := _fitting(problem, costs, len(pool) * copies)):
            if quiet >= kappa and problem.affordable(problem.sample_nfe):
                break
            children = pool.branch(copies, first=turn * copies)
            wave: list[Particles] = []
            for place, count in zip(places, counts, strict=True):
                if wave:  # those from further up pass by, and travel on together with those that start here
                    wave = [(yield from problem.denoise(join(wave), to=place))]
                if count:
                    wave.append((yield from problem.renoise(children[:count], place)))
            solved, _ = yield from problem.score((yield from problem.denoise(join(wave), keep=keep)))
            rivals = join([pool, solved])
            assert rivals.scores is not None
            winners = rivals.scores.argsort(descending=True, stable=True)[:keep]
            explored = (winners >= len(pool)) & (winners < len(rivals) - counts[-1])
            pool, turn, quiet = rivals[winners], turn + 1, 0 if explored.any() else quiet + 1


def _fitting(problem: Problem, costs: Sequence[int], rows: int) -> list[int]:
    """How many children, the best parent's first, may go to each level; the lowest, which is cheapest, comes first."""
    counts, left, calls = [0] * len(costs), problem.left, problem.scores_left
    for _ in range(rows):
        for level in reversed(range(len(costs))):
            if costs[level] <= left and calls >= 1:
                counts[level], left, calls = counts[level] + 1, left - costs[level], calls - 1
    return counts

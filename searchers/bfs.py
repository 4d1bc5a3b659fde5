"""BFS: a tree of which the promising nodes of a level get more children and the others none."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from imgscale.potentials import Potential, Tilt
from imgscale.problem import Problem, Verb
from imgscale.registry import searcher
from imgscale.resampling import Counts, Scheme, rounded, ssp, weights
from imgscale.searchers._population import at_least_one, course
from imgscale.searchers.best_of_n import best_of_n
from imgscale.searchers.smc import populations


@searcher("bfs", cite="zhang2025classical")
def bfs(
    problem: Problem,
    rng: np.random.Generator,
    *,
    particles: int | None = None,
    form: Literal["tempered", "resample", "prune"] = "tempered",
    levels: int = 4,
    strength: float = 3.0,
    standardise: bool = True,
    tempering: Literal["constant", "increase"] = "increase",
    path: Literal["own", "linear", "vp"] | None = None,
    steps: int = 10,
    kernel: str = "ddim(1)",
) -> Verb:
    """Breadth-first search: at a few levels of the trajectory, nodes get children by the softmax of their rewards.

    Fewer verifier calls than SMC at every transition, for the same model evaluations. Below the last level the model's
    ODE solves the rest. New trees begin while the budget lasts, and what is left buys plain samples.

    Args:
        problem: What to solve.
        rng: Draws the numbers of children of the tempered form; the others need none.
        particles: Nodes of the first level; as many as the budget holds if None, up to 64.
        form: How many children a node gets by its weight w among N. "tempered": SMC with the highest reward on the way
            as its potential, an increasing strength and SSP resampling; the paper's best. "resample": round(N w), made
            to add up to N. "prune": 1 where round(N w) isn't 0, so that the tree only thins out and the budget goes
            to more trees.
        levels: Where nodes are scored, evenly along the trajectory: 4 are 20, 40, 60 and 80%.
        strength: Lambda, what rewards are multiplied by.
        standardise: Rewards count in standard deviations of the level. If false, as they are.
        tempering: The strength grows from level to level up to its full value, or is constant.
        path: The path to walk: the model's own (with its own grid), or linear or vp with ``steps`` transitions. By
            default vp on a distilled flow model and own otherwise.
        steps: Transitions on the linear or vp path.
        kernel: The stochastic step, such as "ddim(1)" or "sde(g=3t^2)".

    Source: Zhang et al. 2025 (arXiv 2505.23614), section 3 and, for the tempered form, its second version.
    """
    at_least_one("bfs", levels=levels)
    plan = course(problem, "bfs", path=path, steps=steps, kernel=kernel, explore=1.0)
    evenly = {round(plan.schedule.steps * i / (levels + 1)) for i in range(1, levels + 1)}
    places = sorted(evenly & set(range(1, plan.searched)))  # children need a transition after it, to differ
    plan = replace(plan, searched=max(places, default=-1) + 1)
    potential, resample, threshold = FORMS[form]
    tilt = Tilt("bfs", potential, strength, standardise, tempering)
    yield from populations(plan, rng, particles, places, tilt, resample, threshold)
    yield from best_of_n(problem, rng)


def prune(log_weights: npt.ArrayLike, rng: np.random.Generator | None = None) -> Counts:
    """1 for each node whose n w rounds to 1 or more, 0 for the others."""
    w = weights(log_weights)
    return (len(w) * w > 0.5).astype(np.int64)


FORMS: dict[str, tuple[Potential, Scheme, float]] = {
    "tempered": ("max", ssp, 0.5),
    "resample": ("current", rounded, 1.0),
    "prune": ("current", prune, 1.0),
}

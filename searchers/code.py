"""CoDe: as SVDD, but the children go a block of transitions before one of them is chosen."""

from __future__ import annotations

from typing import Literal

import numpy as np

from imgscale.problem import Problem, Verb
from imgscale.registry import searcher
from imgscale.searchers._population import at_least_one, course
from imgscale.searchers.best_of_n import best_of_n
from imgscale.searchers.svdd import descend


@searcher("code", cite="singh2025code")
def code(
    problem: Problem,
    rng: np.random.Generator,
    *,
    block: int = 2,
    chains: int | None = None,
    children: int | None = None,
    starts: int | None = None,
    explore: float | None = None,
    path: Literal["own", "linear", "vp"] | None = None,
    steps: int = 10,
    kernel: str = "ddim(1)",
) -> Verb:
    """Blockwise control: every chain draws children, lets each go a block of transitions, and keeps the best.

    Costs as many model evaluations as SVDD, but a ``block``-th of its verifier calls. Chains never meet; new ones begin
    while the budget lasts, the last with fewer children, and what is left buys plain samples.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        block: Transitions between two choices; the last block may be shorter. 1 is SVDD.
        chains: Chains side by side. As many as the budget holds if None; if given without ``children``, these many
            share the budget.
        children: Draws per chain and block. By default 25 on a distilled model and 6 on an ordinary one, fewer where
            one chain couldn't pay for them.
        starts: Starting noises to choose from, per chain: by default 1 on an ordinary model, where x0 at t = 1 is the
            same for all, and as many as children on a distilled one.
        explore: Share of the transitions that is searched; the rest is solved. All of them by default on a distilled
            model, the first half on an ordinary one.
        path: The path to walk: the model's own (with its own grid), or linear or vp with ``steps`` transitions. By
            default vp on a distilled flow model and own otherwise.
        steps: Transitions on the linear or vp path.
        kernel: The stochastic step, such as "ddim(1)" or "sde(g=3t^2)".

    Source: Singh et al. 2025 (arXiv 2502.00968), algorithm 1. Beyond it: the choice of the start, the ODE finish, and
    chains until the budget is spent.
    """
    at_least_one("code", block=block, chains=chains, children=children, starts=starts)
    explore = (1.0 if problem.distilled else 0.5) if explore is None else explore
    plan = course(problem, "code", path=path, steps=steps, kernel=kernel, explore=explore)
    yield from descend(plan, chains, children, starts, block)
    yield from best_of_n(problem, rng)

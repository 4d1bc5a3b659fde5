"""SVDD: at every transition each chain draws children and goes on as the best of them."""

from __future__ import annotations

from math import ceil, inf
from typing import Literal

import numpy as np
import torch

from imgscale.problem import Problem, Verb
from imgscale.registry import searcher
from imgscale.searchers._population import Course, at_least_one, course
from imgscale.searchers.best_of_n import best_of_n

ROWS = 32  # children of all chains in one request: enough to fill a batch, few enough to heed a deadline
MOST = 64  # children that a budget alone may give to one parent


@searcher("svdd", cite="li2024derivative")
def svdd(
    problem: Problem,
    rng: np.random.Generator,
    *,
    chains: int | None = None,
    children: int | None = None,
    starts: int | None = None,
    explore: float | None = None,
    path: Literal["own", "linear", "vp"] | None = None,
    steps: int = 10,
    kernel: str = "ddim(1)",
) -> Verb:
    """Soft value-based decoding: at each transition every chain draws children and keeps the one with the best preview.

    The greedy end of it: the value of a place is the reward of its x0, at temperature 0. Chains never meet; new ones
    begin while the budget lasts, the last with fewer children, and what is left buys plain samples.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        chains: Chains side by side. As many as the budget holds if None; if given without ``children``, these many
            share the budget.
        children: Draws per chain and transition. By default the paper's 25 on a distilled model and 6 on an ordinary
            one, fewer where one chain couldn't pay for them.
        starts: Starting noises to choose from, per chain: by default 1 on an ordinary model, where x0 at t = 1 is the
            same for all, and as many as children on a distilled one.
        explore: Share of the transitions that is searched; the rest is solved. All of them by default on a distilled
            model, the first half on an ordinary one.
        path: The path to walk: the model's own (with its own grid), or linear or vp with ``steps`` transitions. By
            default vp on a distilled flow model and own otherwise.
        steps: Transitions on the linear or vp path.
        kernel: The stochastic step, such as "ddim(1)" or "sde(g=3t^2)".

    Source: Li et al. 2024 (arXiv 2408.08252), algorithm 1 (SVDD-PM) at alpha = 0. Beyond it: the choice of the start,
    the ODE finish, and chains until the budget is spent.
    """
    at_least_one("svdd", chains=chains, children=children, starts=starts)
    explore = (1.0 if problem.distilled else 0.5) if explore is None else explore
    plan = course(problem, "svdd", path=path, steps=steps, kernel=kernel, explore=explore)
    yield from descend(plan, chains, children, starts, block=1)
    yield from best_of_n(problem, rng)


def descend(plan: Course, chains: int | None, children: int | None, starts: int | None, block: int) -> Verb:
    """Chains that choose among their children after every block of transitions, while the budget holds any."""
    problem = plan.problem
    while plan.searched:
        n, width, firsts = _sizes(plan, chains, children, starts, block)
        if not n:
            return
        particles = yield from problem.start(n * firsts, plan.schedule)
        if firsts > 1:
            particles, scores = yield from problem.score(particles)
            particles = particles[_best_of_each(scores, n)]
        for step in range(0, plan.searched, block):
            brood = particles.branch(width)
            brood = yield from problem.denoise(brood, min(step + block, plan.searched), plan.kernel)
            brood, scores = yield from problem.score(brood)
            particles = brood[_best_of_each(scores, n)]
        yield from problem.score((yield from problem.finish(particles)))


def _best_of_each(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Rows of the best of each of n families, which stand together; of equals the first."""
    families = scores.reshape(n, -1)
    return families.argmax(1) + torch.arange(n) * families.shape[1]


def _sizes(
    plan: Course, chains: int | None, children: int | None, starts: int | None, block: int
) -> tuple[int, int, int]:
    """Chains (0 if none fits), children and starts: the most children, and then the most chains, that fit."""
    problem = plan.problem
    shared = chains is not None and children is None and min(problem.left, problem.scores_left) < inf
    most = children or (MOST if shared else 25 if problem.distilled else 6)
    blocks = ceil(plan.searched / block)
    for width in range(most, min(most, 2) - 1, -1):
        firsts = starts or (width if problem.distilled else 1)
        n = plan.fitting(
            chains or max(1, ROWS // width),
            nfe=firsts + width * plan.nfe + plan.tail,
            scores=firsts * (firsts > 1) + width * blocks + 1,
            parents=blocks + width * (plan.searched - blocks),
            moves=width * plan.searched,
        )
        if n == chains or (n and not shared):
            return n, width, firsts
    return 0, 0, 0

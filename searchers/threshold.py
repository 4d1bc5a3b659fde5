"""Verifier-threshold: go on to the next step as soon as a draw is good enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from typing import Literal

import numpy as np

from imgscale.errors import UserError
from imgscale.particles import Particles, join
from imgscale.problem import Problem, Verb
from imgscale.registry import searcher
from imgscale.searchers._population import Course, at_least_one, course
from imgscale.searchers.best_of_n import best_of_n


@searcher("threshold", cite="sundaresha2025verifier")
def verifier_threshold(
    problem: Problem,
    rng: np.random.Generator,
    *,
    threshold: float | None = None,
    quantile: float = 0.8,
    draws: int = 4,
    most: int = 16,
    explore: float | None = None,
    path: Literal["own", "linear", "vp"] | None = None,
    steps: int = 10,
    kernel: str = "ddim(1)",
) -> Verb:
    """Draws at each transition until the verifier passes one, and goes on; chain after chain.

    With a threshold of yours, the search also ends with the first image that passes it. Without one, each place has
    its own: previews sharpen from place to place, so a draw must pass a quantile of all that was seen at its place, in
    this chain and those before. What is too little for a chain is spent on plain samples.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        threshold: The score to pass everywhere, for verifiers of a known scale and models with a sharp x0; or None.
        quantile: Of the scores seen at the same place, to be passed if there is no threshold.
        draws: Draws at once, all of them charged; the best is taken.
        most: Draws at one place after which the best of them must do.
        explore: Share of the transitions that is searched; the rest is solved. All of them by default on a distilled
            model, where starting noises are drawn in the same way; the first half on an ordinary one.
        path: The path to walk: the model's own (with its own grid), or linear or vp with ``steps`` transitions. By
            default vp on a distilled flow model and own otherwise.
        steps: Transitions on the linear or vp path.
        kernel: The stochastic step, such as "ddim(1)" or "sde(g=3t^2)".

    Source: Sundaresha et al. 2025 (arXiv 2512.08985). Beyond it: thresholds learnt from what was seen, draws in
    batches, the ODE finish, and chains until the budget is spent.
    """
    at_least_one("threshold", draws=draws, most=most)
    if not 0 <= quantile <= 1:
        raise UserError(f"threshold's quantile can't be {quantile}; give a number from 0 to 1.")
    explore = (1.0 if problem.distilled else 0.5) if explore is None else explore
    plan = course(problem, "threshold", path=path, steps=steps, kernel=kernel, explore=explore)
    seen: dict[int, list[float]] = defaultdict(list)
    while last := next((last for last in range(plan.searched, 0, -1) if _room(plan, 0, last) >= 1), 0):
        at = None if problem.distilled else (yield from problem.start(1, plan.schedule))
        for place in range(0 if at is None else 1, last + 1):
            drawn: list[Particles] = []
            while n := int(min(draws, most - sum(map(len, drawn)), _room(plan, place, last))) or int(not drawn):
                fresh = problem.prior(n, plan.schedule) if at is None else at.branch(n, first=sum(map(len, drawn)))
                batch, scores = yield from problem.score((yield from problem.denoise(fresh, place, plan.kernel)))
                drawn.append(batch)
                seen[place] += scores.tolist()
                if scores.max() >= bar(seen[place], threshold, quantile):
                    break
            at = join(drawn).top(1)
        assert at is not None
        _, scores = yield from problem.score((yield from problem.finish(at)))
        if threshold is not None and scores.max() >= threshold:
            return
    yield from best_of_n(problem, rng)


def bar(seen: Sequence[float], threshold: float | None, quantile: float) -> float:
    """The score to pass: the threshold, or a quantile of those seen, which is one of them."""
    return sorted(seen)[ceil(quantile * (len(seen) - 1) - 1e-9)] if threshold is None else threshold


def _room(plan: Course, place: int, last: int) -> float:
    """Draws at a place that leave enough for one at each later place, and for the image."""
    problem, guided = plan.problem, int(plan.problem.guide is not None)  # a guide takes one gradient at each parent
    later = last - place
    nfe = problem.cost(plan.schedule, place, last, plan.kernel) + problem.finishing_from(plan.schedule, last)
    gradients = guided * (later + (place > 0))
    each = problem.cost(plan.schedule, place - 1, place, plan.kernel)
    return max(0.0, min((problem.left - nfe - gradients) / each, problem.scores_left - later - 1 - gradients))

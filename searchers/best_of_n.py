"""Best-of-n: finished samples, and the best of them."""

from __future__ import annotations

import numpy as np

from imgscale.errors import UserError
from imgscale.problem import Problem, Verb
from imgscale.registry import searcher


@searcher("best-of-n", cite="ma2025inference")
def best_of_n(problem: Problem, rng: np.random.Generator, *, n: int | None = None, batch: int = 32) -> Verb:
    """Draws finished samples and keeps the best.

    Args:
        problem: What to solve.
        rng: Not needed: the samples are the pipeline's own for the seed and the keys that follow from it.
        n: Samples; as many as the budget holds if None.
        batch: Samples drawn and scored at once.

    Source: random search in Ma et al. 2025 (arXiv 2501.09732).
    """
    if batch < 1 or (n is not None and n < 1):
        raise UserError(f"best-of-n's n ({n}) and batch ({batch}) must be at least 1.")
    drawn = 0
    while n is None or drawn < n:
        size = problem.affordable(problem.sample_nfe, batch if n is None else min(batch, n - drawn))
        if size == 0:
            return
        samples = yield from problem.sample(size, of=n)
        yield from problem.score(samples)
        drawn += size

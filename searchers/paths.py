"""Search over paths: take nearly finished samples far back, several ways, and keep the best of what becomes of them."""

from __future__ import annotations

from math import ceil

import numpy as np

from imgscale.errors import UserError
from imgscale.particles import Schedule
from imgscale.paths import Linear
from imgscale.problem import Problem, Verb
from imgscale.registry import searcher
from imgscale.searchers.best_of_n import best_of_n


@searcher("paths", cite="ma2025inference")
def paths(
    problem: Problem,
    rng: np.random.Generator,
    *,
    samples: int = 2,
    branches: int = 5,
    start: float = 0.11,
    forward: float = 0.78,
    back: float = 0.81,
) -> Verb:
    """Re-noises nearly finished samples several ways, solves them a little further than before, and keeps the best.

    Round by round the place to which they are solved comes nearer to the end; what the last round solves is finished.
    Where the budget is too small for all rounds, there are fewer, then fewer branches, then fewer samples. What is too
    little for one round is spent on plain samples.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        samples: Samples that are kept after each round (the paper's N).
        branches: Ways that each is taken back (K).
        start: Time to which the first samples are solved: of the linear path, and of equal log-SNR on any other. Where
            the model's own last time is above it, as in few steps, all times are stretched so that it is the start.
        forward: How far up in time samples are re-noised.
        back: How far down they are solved from there; more than ``forward``.

    Source: search over paths in Ma et al. 2025 (arXiv 2501.09732).
    """
    _check(samples, branches, start, forward, back)
    own = problem.schedule
    most = ceil(start / (back - forward) - 1e-6)
    opening = own.between(own.times[0], _place(own, start, start))

    def legs(rounds: int) -> list[Schedule]:
        """Each round's way from where samples are taken back to, down to where they are scored."""
        down = max(back - forward, start / rounds)
        lows = [start - i * down for i in range(rounds)] + [0.0]
        ways = zip([low + forward for low in lows[:-1]], lows[1:], strict=True)
        return [own.between(_place(own, high, start), _place(own, low, start)) for high, low in ways]

    def fits(n: int, k: int, rounds: int) -> bool:
        nfe = n * opening.nfe(-1, opening.steps) + n * k * sum(leg.nfe(-1, leg.steps) for leg in legs(rounds))
        return nfe <= problem.left and n * k * rounds <= problem.scores_left

    plans = [(n, k, r) for n in range(samples, 0, -1) for k in range(branches, 1, -1) for r in range(most, 0, -1)]
    while plan := next((plan for plan in plans if fits(*plan)), None):
        n, k, rounds = plan
        kept = yield from problem.denoise(problem.prior(n, opening))
        for leg in legs(rounds):
            noisy = yield from problem.renoise(kept.branch(k), 0, leg)
            solved, _ = yield from problem.score((yield from problem.denoise(noisy, keep=n)))
            kept = solved.top(n)
    yield from best_of_n(problem, rng)


def _place(own: Schedule, t: float, start: float) -> float:
    """A published time on the model's own path, stretched so that the start isn't below its last time."""
    level, first = (float(own.path.time_at(Linear().log_snr(time))) for time in (t, start))
    last = min(own.times[1:-1], default=0.0)
    return float(np.interp(level, [0.0, first, 1.0], [0.0, max(first, last), 1.0]))


def _check(samples: int, branches: int, start: float, forward: float, back: float) -> None:
    if samples < 1 or branches < 2:
        raise UserError(f"paths needs at least 1 sample and 2 branches, not {samples} and {branches}.")
    if not (0 < start < start + forward < 1 and 0.001 <= back - forward):
        raise UserError(
            f"paths can't take samples from {start} up by {forward} and down by {back}; start + forward must be less"
            " than 1, and back at least 0.001 more than forward."
        )

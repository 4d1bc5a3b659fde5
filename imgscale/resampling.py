"""Resampling: how many children each particle gets, by its weight.

Each scheme is a pure function of log-weights (n,) and a generator to counts, int64 (n,), that add up to n. Weights
need no normalising; −inf is weight 0, which never has children, NaN counts as −inf, and if all are, all are equal.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Scheme = Callable[[npt.ArrayLike, np.random.Generator], Counts]

SNAP = 1e-9  # what an expected count may miss a whole number by: 49 times 1/49 is below 1


def weights(log_weights: npt.ArrayLike) -> Floats:
    """Weights (n,) of sum 1. The exponential is only ever taken of differences to the largest."""
    logs = np.nan_to_num(np.asarray(log_weights, np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    raw = np.ones(len(logs))
    below = logs < logs.max()
    with np.errstate(over="ignore"):  # a difference beyond all numbers is weight 0
        raw[below] = np.exp(logs[below] - logs.max())
    normalised: Floats = raw / raw.sum()
    return normalised


def ess(log_weights: npt.ArrayLike) -> float:
    """The effective sample size, from 1 to n: 1 / sum of squared weights."""
    return float(1 / np.square(weights(log_weights)).sum())


def multinomial(log_weights: npt.ArrayLike, rng: np.random.Generator) -> Counts:
    """n independent draws. The counts vary most."""
    w = weights(log_weights)
    return _inverse(w, rng.random(len(w)))


def stratified(log_weights: npt.ArrayLike, rng: np.random.Generator) -> Counts:
    """One draw in each n-th of the cumulative weights."""
    w = weights(log_weights)
    return _inverse(w, (np.arange(len(w)) + rng.random(len(w))) / len(w))


def systematic(log_weights: npt.ArrayLike, rng: np.random.Generator) -> Counts:
    """One draw for all n-ths: counts are n w rounded down or up, but depend on the order of the particles."""
    w = weights(log_weights)
    return _inverse(w, (np.arange(len(w)) + rng.random()) / len(w))


def residual(log_weights: npt.ArrayLike, rng: np.random.Generator) -> Counts:
    """n w rounded down, and independent draws by what was cut off."""
    counts, fractions = _split(log_weights)
    left = len(counts) - int(counts.sum())
    return counts + _inverse(fractions / fractions.sum(), rng.random(left)) if left else counts


def ssp(log_weights: npt.ArrayLike, rng: np.random.Generator) -> Counts:
    """Srinivasan's process: n w rounded down or up, negatively associated, and consistent in any order.

    Two fractional parts at a time are settled without bias: the one gets 0 or 1 children, the other the rest.

    Source: Gerber, Chopin and Whiteley 2019 (doi 10.1214/18-AOS1746), section 3.
    """
    counts, fractions = _split(log_weights)
    (undecided,) = fractions.nonzero()
    if not len(undecided):
        return counts
    a, held = undecided[0], fractions[undecided[0]]
    for b in undecided[1:]:
        other, total = fractions[b], held + fractions[b]
        if total < 1:  # one of them gets nothing
            a = b if rng.random() * total < other else a
            held = total
        else:  # one of them gets a child
            first = rng.random() * (2 - total) < 1 - other
            counts[a if first else b] += 1
            a = b if first else a
            held = total - 1
    counts[a] += len(counts) - counts.sum()  # 0 or 1, whatever the rounding
    return counts


def rounded(log_weights: npt.ArrayLike, rng: np.random.Generator | None = None) -> Counts:
    """n w rounded, so that they add up to n: the largest fractional parts are rounded up. Nothing is random."""
    counts, fractions = _split(log_weights)
    left = len(counts) - int(counts.sum())
    counts[np.argsort(-fractions, kind="stable")[:left]] += 1
    return counts


SCHEMES: dict[str, Scheme] = {
    "multinomial": multinomial,
    "stratified": stratified,
    "systematic": systematic,
    "residual": residual,
    "ssp": ssp,
}


def _inverse(w: Floats, uniforms: Floats) -> Counts:
    """Counts of the draws by the inverse of the cumulative weights.

    Of equal sums the first exceeding one is meant, so that a draw of 0 passes over weights of 0; the last may end
    below 1 and below a draw, which then means the last particle with a weight.
    """
    index = np.searchsorted(np.cumsum(w), uniforms, side="right")
    return np.bincount(np.minimum(index, np.flatnonzero(w)[-1]), minlength=len(w)).astype(np.int64)


def _split(log_weights: npt.ArrayLike) -> tuple[Counts, Floats]:
    """n w as whole and fractional parts; what is within rounding of a whole number is one."""
    w = weights(log_weights)
    expected = len(w) * w
    whole = np.floor(expected + SNAP)
    fractions = np.where(expected - whole > SNAP, expected - whole, 0.0)
    return whole.astype(np.int64), fractions

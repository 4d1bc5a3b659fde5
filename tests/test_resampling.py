"""Resampling: unbiased counts that add up, in every corner of floating point."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from imgscale.resampling import (
    SCHEMES,
    Counts,
    Floats,
    ess,
    multinomial,
    residual,
    rounded,
    ssp,
    stratified,
    systematic,
    weights,
)

each = pytest.mark.parametrize("name", SCHEMES)
ALL = {**SCHEMES, "rounded": rounded}
SHARES = {
    "mixed": [0.05, 0.31, 0.0, 0.17, 0.4, 0.07],
    "one big": [0.9, 0.02, 0.02, 0.02, 0.02, 0.02],
    "whole": [0.5, 0.25, 0.25, 0.0],
    "two": [0.3, 0.7],
    "fractions that add up to less than one at a time": [0.02, 0.03, 0.05, 0.9],
}


class Fixed:
    """A generator whose uniform draws are all the same."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, n: int | None = None) -> Any:
        return self.value if n is None else np.full(n, self.value)


def logs(shares: list[float]) -> Floats:
    with np.errstate(divide="ignore"):
        log_w: Floats = np.log(np.array(shares))
    return log_w


def draws(name: str, shares: list[float], n: int = 3000) -> Counts:
    rng = np.random.default_rng(3)
    return np.stack([SCHEMES[name](logs(shares), rng) for _ in range(n)])


def chi_square(counts: Counts, expected: Floats) -> tuple[float, int]:
    """Of the mean counts against the expected ones, by the counts' own covariance; and the degrees of freedom."""
    gap, covariance = counts.mean(0) - expected, np.cov(counts.T) / len(counts)
    values, axes = np.linalg.eigh(covariance)
    varies = values > 1e-9 * max(values.max(), 1e-12)
    along = axes.T @ gap
    assert np.allclose(along[~varies], 0, atol=1e-9), "what never varies is exact"
    return float((along[varies] ** 2 / values[varies]).sum()), int(varies.sum())


def limit(freedom: int) -> float:
    """Beyond about 1 - 1e-5 of a chi-square law (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.3 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9


@each
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_counts_are_unbiased(name: str, shares: list[float]) -> None:
    counts, expected = draws(name, shares), len(shares) * np.array(shares)
    statistic, freedom = chi_square(counts, expected)
    assert statistic <= limit(freedom)
    assert (counts.sum(1) == len(shares)).all() and (counts >= 0).all()
    assert not counts[:, np.array(shares) == 0].any()


@each
def test_the_test_would_see_a_bias(name: str) -> None:
    """Of a tenth of one particle's weight."""
    shares = np.array(SHARES["mixed"])
    wrong = shares + 0.1 * shares[1] * np.array([0, 1, 0, 0, -1, 0])
    statistic, freedom = chi_square(draws(name, SHARES["mixed"]), len(shares) * wrong)
    assert statistic > limit(freedom)


@pytest.mark.parametrize("name", ["systematic", "ssp"])
@pytest.mark.parametrize("n", [1, 2, 7, 49, 200])
def test_counts_are_rounded_up_or_down(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(50):
        log_w = rng.normal(scale=rng.choice([0.1, 1, 4]), size=n)
        expected, counts = n * weights(log_w), SCHEMES[name](log_w, rng)
        assert (counts >= np.floor(expected + 1e-9)).all() and (counts <= np.ceil(expected - 1e-9)).all()


def test_residual_counts_are_at_least_rounded_down() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        log_w = rng.normal(size=20)
        assert (residual(log_w, rng) >= np.floor(20 * weights(log_w))).all()


def test_stratified_counts_differ_from_systematic_ones_by_less_than_two() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        log_w = rng.normal(size=20)
        assert (np.abs(stratified(log_w, rng) - 20 * weights(log_w)) < 2).all()


def test_ssp_varies_least_and_multinomial_most() -> None:
    variance = {name: draws(name, SHARES["mixed"], 1000).var(0).sum() for name in SCHEMES}
    assert variance["ssp"] < 0.8 * variance["residual"] and variance["residual"] < 0.8 * variance["multinomial"]


def test_ssp_counts_are_negatively_associated() -> None:
    """No two particles tend to be rounded up together; systematic resampling can't promise that."""
    covariance = np.cov(draws("ssp", [0.26, 0.24, 0.27, 0.23]).T)
    assert (covariance[~np.eye(4, dtype=bool)] < 0.005).all()


@pytest.mark.parametrize(
    ("expected", "draws", "counts"),
    [
        # Fractional parts .2, .7, .1. Of the first two, with .9 together, the second carries on if the draw is below
        # .7 / .9; the other gets nothing. A second draw of .5 settles .9 and .1.
        ([1.2, 0.7, 2.1, 0.0], [0.5, 0.5], [1, 1, 2, 0]),
        ([1.2, 0.7, 2.1, 0.0], [0.9, 0.5], [2, 0, 2, 0]),
        # Fractional parts .4, .7, .9. Of the first two, with 1.1 together, the first gets a child if the draw is below
        # .3 / .9; the other carries on with .1. A second draw of .5 settles .1 and .9.
        ([1.4, 0.7, 1.9, 0.0], [0.2, 0.5], [2, 0, 2, 0]),
        ([1.4, 0.7, 1.9, 0.0], [0.5, 0.5], [1, 1, 2, 0]),
    ],
)
def test_ssp_by_hand(expected: list[float], draws: list[float], counts: list[int]) -> None:
    class Script:
        def random(self) -> float:
            return draws.pop(0)

    rng: Any = Script()
    draws = [*draws]
    assert ssp(logs([e / 4 for e in expected]), rng).tolist() == counts and not draws


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 49, 300])
def test_equal_weights_keep_everyone(name: str, n: int) -> None:
    """49 times 1/49 is below 1 in floating point."""
    for log_w in (np.zeros(n), np.full(n, -1e300), np.full(n, -np.inf), np.full(n, np.nan), np.full(n, np.inf)):
        counts = ALL[name](log_w, np.random.default_rng(0))
        assert counts.sum() == n and counts.dtype == np.int64
        if name != "multinomial" and name != "stratified":
            assert (counts == 1).all()
    assert ess(np.full(n, -np.inf)) == pytest.approx(n)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53, 0.5])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_extreme_draws_never_choose_a_weight_of_zero(name: str, draw: float, kind: str) -> None:
    """A draw of exactly 0 falls on the first weight that isn't 0; one near 1 on the last, wherever the sum ends."""
    rng: Any = Fixed(draw)
    for shares in ([0, 0.1, 0, 0.2, 0.7, 0, 0], [0] + [0.1] * 10 + [0], [0, 0, 1], [1, 0, 0], [0.3, 0.7]):
        log_w = logs(list(map(float, shares))).astype(kind)
        counts = ALL[name](log_w, rng)
        assert counts.sum() == len(shares)
        assert not counts[np.array(shares) == 0].any()


@pytest.mark.parametrize("name", ALL)
def test_float32_sums_that_end_below_one(name: str) -> None:
    log_w = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    log_w[-7:] = -np.inf
    rng: Any = Fixed(1 - 2**-53)
    for generator in (rng, np.random.default_rng(1)):
        counts = ALL[name](log_w, generator)
        assert counts.sum() == 5000 and len(counts) == 5000 and not counts[-7:].any()


@pytest.mark.parametrize("name", ALL)
def test_huge_log_weights_do_not_overflow(name: str) -> None:
    for log_w, winner in (([1e4, 0.0, -1e4], 0), ([-1e308, 1e308, 0.0], 1), ([0.0, math.nan, math.inf], 2)):
        counts = ALL[name](np.array(log_w), np.random.default_rng(0))
        assert counts[winner] == 3 and counts.sum() == 3
    assert ess([1e4, 0, -1e4]) == pytest.approx(1)


def test_ess() -> None:
    assert ess(np.log([0.5, 0.25, 0.25])) == pytest.approx(1 / (0.25 + 2 * 0.0625))
    assert ess(np.log([0.5, 0.25, 0.25]) + 700) == pytest.approx(ess(np.log([0.5, 0.25, 0.25])))
    assert ess([0.0, -math.inf, 0.0, -math.inf]) == pytest.approx(2)


def test_rounding_to_whole_counts_that_add_up() -> None:
    # Expected 1.6, 1.6, .8 round to 2 + 2 + 1 = 5 of 4; the largest remainders are .8 and, the first of equals, .6.
    assert rounded(logs([0.4, 0.4, 0.2, 0.0])).tolist() == [2, 1, 1, 0]
    # Expected .4 twelve times round to nothing at all.
    assert rounded(logs([0.4 / 13] * 12 + [1 - 12 * 0.4 / 13])).sum() == 13
    for seed in range(50):
        rng = np.random.default_rng(seed)
        log_w = rng.normal(size=10)
        plain, counts = np.rint(10 * weights(log_w)), rounded(log_w)
        assert counts.sum() == 10
        if plain.sum() == 10:
            assert (counts == plain).all()


def test_the_same_draws_give_the_same_counts() -> None:
    log_w = np.random.default_rng(5).normal(size=30)
    for scheme in (multinomial, stratified, systematic, residual, ssp):
        before = log_w.copy()
        first, second = (scheme(log_w, np.random.default_rng(9)) for _ in range(2))
        assert (first == second).all() and (log_w == before).all()

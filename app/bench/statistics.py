"""What rows say: means over prompts with 95% intervals by bootstrap over prompts, paired where searches are compared.

Seeds of a prompt are averaged first, since images of one prompt succeed and fail together; what is drawn again is
prompts. All intervals use the same draws for the same number of prompts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from imgscale.app.bench.rows import Row
from imgscale.app.bench.values import threshold

Floats = NDArray[np.float64]
Values = dict[tuple[str, int], float]  # by prompt and seed
DRAWS = 4000
NEVER = math.inf


@dataclass(frozen=True)
class Estimate:
    """A mean, or a number of evaluations, with its 95% interval and the number of prompts behind it."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Measure:
    """What counts: how often a verifier's score reaches a value, or its mean score.

    Args:
        name: The verifier.
        at_least: The value; None for the mean score.
    """

    name: str
    at_least: float | None = None

    def of(self, score: float | None) -> float:
        """A score's worth. No score solves nothing, and is no number in a mean."""
        if self.at_least is not None:
            return float(score is not None and score >= self.at_least)
        return math.nan if score is None else score

    def __call__(self, row: Row) -> float:
        return self.of(score(row, self.name))

    @property
    def label(self) -> str:
        return self.name if self.at_least is None else f"{self.name} ≥ {self.at_least:g}"


def score(row: Row, name: str) -> float | None:
    """A row's score by one verifier, steering, a member of what steers, or held out."""
    others = {**row.get("members", {}), **row["held_out"]}
    found: float | None = row["score"] if row["steers"] == name else others.get(name)
    return found


def measure(solved: str | None, rows: Sequence[Row]) -> Measure:
    """What the rows of one steering verifier are measured by.

    Args:
        solved: Such as "shapes>=1", or "none" for a mean score; None for "shapes>=1" where shapes judged.
        rows: At least one.
    """
    names = [*rows[0]["held_out"], rows[0]["steers"]]
    if solved is None and "shapes" in names:
        return Measure("shapes", 1.0)
    name, value = threshold(solved) if solved not in (None, "none") else (names[0], None)
    return Measure(name, value) if name in names else Measure(names[0])


def values(rows: Iterable[Row], of: Callable[[Row], float]) -> Values:
    return {(row["prompt"], row["seed"]): of(row) for row in rows}


@lru_cache(maxsize=64)
def weights(n: int) -> Floats:
    """(1 + `DRAWS`, n) weights of n prompts: first the plain mean, then how often each prompt was drawn, over n."""
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=DRAWS) / n
    return np.vstack([np.full((1, n), 1 / n), draws])


def interval(draws: Floats) -> tuple[float, float]:
    """The middle 95% of draws, which may hold infinity: quantiles are draws, and nothing in between."""
    low, high = np.quantile(draws, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def estimate(found: Values) -> Estimate | None:
    """The mean over prompts, or None if there is no number."""
    means = np.array(list(_by_prompt(found).values()))
    if not len(means):
        return None
    draws = weights(len(means)) @ means
    return Estimate(float(draws[0]), *interval(draws[1:]), len(means))


def gain(a: Values, b: Values) -> Estimate | None:
    """The mean of a − b over what both have; None if that is nothing."""
    return estimate({key: value - b[key] for key, value in a.items() if key in b})


def _by_prompt(found: Mapping[tuple[str, int], float]) -> dict[str, float]:
    groups: dict[str, list[float]] = defaultdict(list)
    for (prompt, _), value in found.items():
        if not math.isnan(value):
            groups[prompt].append(value)
    return {prompt: float(np.mean(group)) for prompt, group in groups.items()}


# ------------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curve:
    """A mean over prompts against what was spent, with its 95% band: all (points,)."""

    at: Floats
    mean: Floats
    low: Floats
    high: Floats


def best_so_far(row: Row, axis: str, name: str, grid: Floats) -> Floats:
    """A verifier's score of the best image at each point of a grid (NaN before there is one), from the row's trace.

    Args:
        row: One search.
        axis: "nfe" or "seconds".
        name: The verifier.
        grid: (points,), ascending.
    """
    scores = [math.nan, *(math.nan if s is None else s for s in row["trace"]["scores"][name])]
    return np.array(scores)[np.searchsorted(row["trace"][axis], grid, side="right")]


def curve(rows: Sequence[Row], axis: str, by: Measure, points: int = 240) -> Curve | None:
    """The best so far of many searches. It begins where all of them have an image; one without any score is left out.

    Args:
        rows: Searches of one kind.
        axis: "nfe" or "seconds".
        by: What of their best images.
        points: How many at most.
    """
    rows = [row for row in rows if any(s is not None for s in row["trace"]["scores"].get(by.name, ()))]
    if not rows:
        return None
    spent = np.unique(np.concatenate([row["trace"][axis] for row in rows]))
    grid = spent if len(spent) <= points else np.linspace(spent[0], spent[-1], points)
    table = _worth(rows, axis, by, grid)
    whole = np.isfinite(table).all(0)
    if not whole.any():
        return None
    draws = weights(len(table)) @ table[:, whole]
    low, high = np.quantile(draws[1:], [0.025, 0.975], axis=0)
    return Curve(grid[whole], draws[0], low, high)


def _worth(rows: Sequence[Row], axis: str, by: Measure, grid: Floats, nothing: float = math.nan) -> Floats:
    """(prompts, points): what the best so far is worth, and ``nothing`` before there is an image."""
    groups: dict[str, list[Floats]] = defaultdict(list)
    for row in rows:
        best = best_so_far(row, axis, by.name, grid)
        worth = best if by.at_least is None else (best >= by.at_least).astype(float)
        groups[row["prompt"]].append(np.where(np.isnan(best), nothing, worth))
    return np.stack([np.mean(group, axis=0) for group in groups.values()])


# ------------------------------------------------------------------------- evaluations needed to reach a baseline


@dataclass(frozen=True)
class Need:
    """Evaluations that a searcher needs for what the baseline reaches with its largest budget.

    Args:
        target: What that is.
        by_budget: By runs with different budgets, interpolated linearly between two of them.
        by_trace: By the best so far within the runs with the largest budget.
        first: The smallest budget that was run: `by_budget` can't tell less.
        last: The largest, beyond which nothing is known: the estimates are then `NEVER`.
    """

    target: float
    by_budget: Estimate
    by_trace: Estimate
    first: int
    last: int


def need(mine: Mapping[int, Sequence[Row]], baseline: Sequence[Row], by: Measure) -> Need | None:
    """Compares on the prompts and seeds that all these rows share; None if there are none.

    Args:
        mine: A searcher's rows by budget.
        baseline: The baseline's rows with its largest budget.
        by: What is reached.
    """
    budgets = sorted(budget for budget, rows in mine.items() if rows)
    if not budgets or not baseline:
        return None
    found = [values(baseline, by), *(values(mine[budget], by) for budget in budgets)]
    shared = set.intersection(*(set(each) for each in found))
    tables = [_by_prompt({key: each[key] for key in sorted(shared)}) for each in found]
    prompts = sorted(set.intersection(*(set(table) for table in tables)))
    if not prompts:
        return None
    drawn = weights(len(prompts))
    target, *reached = (drawn @ np.array([table[prompt] for prompt in prompts]) for table in tables)
    largest = sorted(
        (row for row in mine[budgets[-1]] if (row["prompt"], row["seed"]) in shared and row["prompt"] in prompts),
        key=lambda row: str(row["prompt"]),
    )
    grid = np.unique(np.concatenate([row["trace"]["nfe"] for row in largest])).astype(float)
    worth = _worth(largest, "nfe", by, grid, nothing=-1e9 if by.at_least is None else 0.0)
    return Need(
        float(target[0]),
        _reach(np.stack(reached, 1), np.array(budgets, float), target, between=True, n=len(prompts)),
        _reach(drawn @ worth, grid, target, between=False, n=len(prompts)),
        budgets[0],
        budgets[-1],
    )


def _reach(reached: Floats, at: Floats, target: Floats, between: bool, n: int) -> Estimate:
    """Where ``reached`` (draws, points) first comes up to ``target`` (draws,)."""
    enough = reached >= target[:, None] - 1e-9
    first = enough.argmax(1)
    found = np.where(enough.any(1), at[first], NEVER)
    if between:
        rows = np.flatnonzero(enough.any(1) & (first > 0))
        k = first[rows]
        a, b = reached[rows, k - 1], reached[rows, k]
        share = np.clip((target[rows] - a) / (b - a), 0, 1)
        found[rows] = at[k - 1] + share * (at[k] - at[k - 1])
    return Estimate(float(found[0]), *interval(found[1:]), n)

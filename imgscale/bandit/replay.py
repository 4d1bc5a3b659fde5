"""Policies replayed on a table that holds the reward of every action for every prompt, so that regret is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from imgscale.bandit.actions import Action, Pool
from imgscale.bandit.features import Schema
from imgscale.bandit.offpolicy import Logged
from imgscale.bandit.policy import Context, Policy, quality_weight
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]

Factory = Callable[[Pool, str | float, int], Policy]  # of a pool, a mode and a seed


@dataclass(frozen=True)
class Table:
    """What every action brings for every prompt.

    Args:
        actions: k of them.
        z: Features of the prompts, (p, d).
        rewards: (p, k, s): s results of each, of which a replay draws one. Regret is by their mean, so with few of them
            the oracle profits from their luck, too.
        costs: (p, k) in [0, 1]: what each really cost; policies only know the actions' eFLOPs.
        correct: (p, k, s), whether a held-out judge agreed; None if there is none.
        categories: (p,), for a mix of prompts that drifts; by default all are of one.
        expected: (p, k), by which regret is reckoned where it is known better than by the mean of s results.

    Raises:
        UserError: Shapes that don't fit, rewards or costs that aren't finite, or costs outside [0, 1].
    """

    actions: tuple[Action, ...]
    z: Floats
    rewards: Floats
    costs: Floats
    correct: npt.NDArray[np.bool_] | None = None
    categories: tuple[str, ...] = ()
    expected: Floats | None = None

    def __post_init__(self) -> None:
        p, k = len(self.z), len(self.actions)
        fits = self.rewards.ndim == 3 and self.rewards.shape[:2] == (p, k) and self.costs.shape == (p, k)
        fits &= self.correct is None or self.correct.shape == self.rewards.shape
        fits &= self.expected is None or self.expected.shape == (p, k)
        if not fits or self.rewards.size == 0 or len(self.categories) not in (0, p):
            raise UserError(
                f"The table's parts don't fit {p} prompts and {k} actions; each pair needs a reward and a cost."
            )
        if not (np.isfinite(self.rewards).all() and self.costs.min() >= 0 and self.costs.max() <= 1):
            raise UserError("The table's rewards must be finite and its costs from 0 to 1; measure those pairs again.")

    def utility(self, weight: float) -> Floats:
        """(p, k): the mean of w r + (1 - w) (1 - C)."""
        quality = self.rewards.mean(2) if self.expected is None else self.expected
        utility: Floats = weight * quality + (1 - weight) * (1 - self.costs)
        return utility

    def best_fixed(self, mode: str | float, *, without: str | None = None) -> Action:
        """The action that is best for all prompts together, of all models but one: known in hindsight only."""
        mean = self.utility(quality_weight(mode)).mean(0)
        left = [action.model.name != without for action in self.actions]
        return self.actions[int(np.where(left, mean, -np.inf).argmax())]


@dataclass(frozen=True)
class Scenario:
    """What happens during a replay. Times are shares of its steps, 0 to 1.

    Args:
        name: For tables.
        steps: Prompts, one after another; the table's are shuffled anew when they are through.
        mode: At the beginning.
        switch: A time and the mode from then on.
        added: A time, and the model whose actions aren't known before.
        removed: A time, and the model whose actions can't be chosen from then on.
        drift: Whether the mix moves evenly from the first half of the categories, by name, to the second.
    """

    name: str = "steady"
    steps: int = 2000
    mode: str | float = "balanced"
    switch: tuple[float, str | float] | None = None
    added: tuple[float, str] | None = None
    removed: tuple[float, str] | None = None
    drift: bool = False

    def at(self, time: float) -> int:
        """The step of a time."""
        return round(time * self.steps)


STEADY = Scenario()


@dataclass(frozen=True)
class Outcome:
    """A policy's replays; all arrays are (runs, steps).

    Args:
        utility: Mean utility of the chosen actions, in the mode at the time.
        regret: Of the best that could have been chosen, minus that.
        reward: What was drawn.
        cost: In [0, 1].
        correct: By the held-out judge; NaN where there is none.
        tried: How many different actions had been chosen by then.
        log: The decisions of the last run.
    """

    utility: Floats
    regret: Floats
    reward: Floats
    cost: Floats
    correct: Floats
    tried: Floats
    log: tuple[Logged, ...]

    def band(self, level: float = 0.95) -> tuple[Floats, Floats, Floats]:
        """Mean cumulative regret with the lower and upper ends of its confidence interval over runs, each (steps,)."""
        return _interval(self.regret.cumsum(1), level)

    def mean(self, what: str, level: float = 0.95) -> tuple[float, float, float]:
        """Mean of a quantity over all steps (of "regret" its sum, of "tried" its end), and its interval over runs."""
        values: Floats = getattr(self, what)
        runs = {"regret": values.sum(1), "tried": values[:, -1]}.get(what, values.mean(1))
        middle, low, high = _interval(runs[:, None], level)
        return float(middle[0]), float(low[0]), float(high[0])


def replay(
    table: Table,
    make: Factory,
    scenario: Scenario = STEADY,
    *,
    schema: Schema | None = None,
    runs: int = 10,
    seed: int = 0,
) -> Outcome:
    """Replays a policy. All policies see the same prompts and draws, by run, so that their outcomes compare in pairs.

    Args:
        table: What there is to find.
        make: Makes a fresh policy from a pool, a mode and a seed.
        scenario: What happens.
        schema: Of the features; by default fitted to the actions known at the beginning.
        runs: Shuffles.
        seed: Of all of them.

    Raises:
        UserError: A scenario with a model that the table doesn't have.
    """
    models = {action.model.name for action in table.actions}
    for event in (scenario.added, scenario.removed):
        if event and event[1] not in models:
            raise UserError(
                f"The table has no model {event[1]!r} to add or remove; it has {', '.join(sorted(models))}."
            )
    played = [_play(table, make, scenario, schema, np.random.default_rng([seed, run]), run) for run in range(runs)]
    columns = [np.array(column) for column in zip(*(records for records, _ in played), strict=True)]
    utility, regret, reward, cost, correct, tried = columns
    return Outcome(utility, regret, reward, cost, correct, tried, tuple(played[-1][1]))


def _play(
    table: Table, make: Factory, scenario: Scenario, schema: Schema | None, rng: np.random.Generator, run: int
) -> tuple[Floats, list[Logged]]:
    """One run: (6, steps) of utility, regret, reward, cost, correctness and actions tried; and its log."""
    late = scenario.added[1] if scenario.added else None
    names = tuple(f"z{i}" for i in range(table.z.shape[1]))
    known = [action for action in table.actions if action.model.name != late]
    pool = Pool(known, schema or Schema.of(known, names), reference=max(action.eflops for action in table.actions))
    policy, weight = make(pool, scenario.mode, run), quality_weight(scenario.mode)
    column = {action.name: i for i, action in enumerate(table.actions)}
    order, draws = _order(table, scenario, rng), rng.integers(table.rewards.shape[2], size=scenario.steps)
    utilities, records, log = table.utility(weight), np.empty((6, scenario.steps)), []
    tried: set[int] = set()
    for step, (row, draw) in enumerate(zip(order, draws, strict=True)):
        if scenario.switch and step == scenario.at(scenario.switch[0]):
            policy.switch(scenario.switch[1])
            utilities = table.utility(quality_weight(scenario.switch[1]))
        _events(table, scenario, pool, step)
        truth = utilities[row, [column[action.name] for action in pool.actions]]
        context = Context(table.z[row], truth=truth)
        choice = policy.choose(context)
        place = column[choice.action.name]
        reward = float(table.rewards[row, place, draw])
        policy.learn(context, choice.action, reward)
        utility, best = utilities[row, place], truth[pool.alive].max()
        correct = np.nan if table.correct is None else table.correct[row, place, draw]
        tried.add(place)
        records[:, step] = utility, best - utility, reward, table.costs[row, place], correct, len(tried)
        log.append(Logged(context, choice.action, choice.propensity, reward))
    return records, log


def _events(table: Table, scenario: Scenario, pool: Pool, step: int) -> None:
    if scenario.added and step == scenario.at(scenario.added[0]):
        for action in table.actions:
            if action.model.name == scenario.added[1]:
                pool.add(action)
    if scenario.removed and step == scenario.at(scenario.removed[0]):
        pool.remove_model(scenario.removed[1])


def _order(table: Table, scenario: Scenario, rng: np.random.Generator) -> Sequence[int]:
    """Rows of the table, (steps,)."""
    rows = len(table.z)
    shuffles = -(-scenario.steps // rows)
    if not scenario.drift:
        return [int(i) for _ in range(shuffles) for i in rng.permutation(rows)][: scenario.steps]
    kinds = sorted(set(table.categories))
    if len(kinds) < 2:
        raise UserError("A drifting mix needs a table with two categories of prompts or more.")
    early = np.isin(table.categories, kinds[: len(kinds) // 2])
    first, second = np.flatnonzero(early), np.flatnonzero(~early)
    late = rng.random(scenario.steps) < np.arange(scenario.steps) / scenario.steps
    return [int(rng.choice(second if now else first)) for now in late]


def _interval(values: Floats, level: float) -> tuple[Floats, Floats, Floats]:
    """Mean over runs of (runs, n), and the ends of Student's interval for it; they are NaN for a single run."""
    runs, middle = len(values), values.mean(0)
    if runs < 2:
        return middle, np.full_like(middle, np.nan), np.full_like(middle, np.nan)
    half = stats.t.ppf((1 + level) / 2, runs - 1) * values.std(0, ddof=1) / np.sqrt(runs)
    return middle, middle - half, middle + half

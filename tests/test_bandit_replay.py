"""Replays: regret, scenarios, and the order of policies in a synthetic world."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from imgscale.bandit import Choice, Context, Policy, Pool, Schema, make
from imgscale.bandit.replay import Outcome, Scenario, Table, replay
from imgscale.errors import UserError
from tests.bandits import FEATURES, KINDS, world

TABLE = world(5, prompts=60)


def played(name: str, scenario: Scenario, runs: int = 1, table: Table = TABLE, schema: Any = None, **o: Any) -> Outcome:
    return replay(
        table,
        lambda pool, mode, seed: make(name, pool, mode=mode, seed=seed, **o),
        scenario,
        schema=schema,
        runs=runs,
        seed=1,
    )


SCENARIOS = {
    "steady": Scenario(steps=90),
    "switch": Scenario(steps=90, mode="cost", switch=(0.5, "quality")),
    "added": Scenario(steps=90, added=(0.5, "large")),
    "removed": Scenario(steps=90, removed=(1 / 3, "turbo")),
    "drift": Scenario(steps=90, drift=True),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_oracle_has_no_regret_in_any_scenario_and_random_has(name: str) -> None:
    oracle, random = (played(policy, SCENARIOS[name], runs=2) for policy in ("oracle", "random"))
    assert not oracle.regret.any() and oracle.regret.shape == (2, 90)
    assert (random.regret >= 0).all() and random.regret.mean() > 0.05
    np.testing.assert_allclose(random.utility + random.regret, oracle.utility)  # the same prompts


def test_what_is_recorded_is_what_the_table_says() -> None:
    found = played("random", Scenario(steps=60, mode=0.7))
    for step, event in enumerate(found.log):
        (row,) = np.flatnonzero((TABLE.z == event.context.z).all(1))
        place = TABLE.actions.index(event.action)
        assert event.reward == found.reward[0, step] in TABLE.rewards[row, place]
        assert found.cost[0, step] == TABLE.costs[row, place] and event.propensity == pytest.approx(1 / 48)
        utility = 0.7 * TABLE.rewards[row].mean(1) + 0.3 * (1 - TABLE.costs[row])
        assert found.utility[0, step] == pytest.approx(utility[place])
        assert found.regret[0, step] == pytest.approx(utility.max() - utility[place])
        assert found.correct[0, step] == (event.reward > 0.5)
    assert len({event.context.z.tobytes() for event in found.log}) == 60  # each prompt once in a shuffle


def test_models_come_and_go_when_they_should() -> None:
    chosen = [e.action.model.name for e in played("random", SCENARIOS["added"]).log]
    assert "large" not in chosen[:45] and chosen[45:].count("large") > 4
    chosen = [e.action.model.name for e in played("random", SCENARIOS["removed"]).log]
    assert chosen[:30].count("turbo") > 2 and "turbo" not in chosen[30:]


def test_the_mode_switches_when_it_should() -> None:
    found = played("oracle", SCENARIOS["switch"])
    early, late = found.cost[0, :45].mean(), found.cost[0, 45:].mean()
    assert late > 2 * early
    weights: list[float] = []

    class Spy(Policy):
        name = "spy"

        def choose(self, context: Context, mask: Any = None) -> Choice:
            weights.append(self.weight)
            return super().choose(context, mask)

        def _shares(self, context: Context, allowed: Any, value: Any) -> Any:
            return allowed / allowed.sum()

    replay(TABLE, lambda pool, mode, seed: Spy(pool, mode=mode, seed=seed), SCENARIOS["switch"], runs=1)
    assert weights == [0.5] * 45 + [0.95] * 45


def test_the_mix_drifts_from_some_categories_to_the_others() -> None:
    found = played("random", Scenario(steps=600, drift=True))
    rows = [int(np.flatnonzero((TABLE.z == e.context.z).all(1))[0]) for e in found.log]
    early = np.array([TABLE.categories[row] in sorted(KINDS)[:3] for row in rows])
    assert early[:200].mean() == pytest.approx(5 / 6, abs=0.1) and early[-200:].mean() == pytest.approx(1 / 6, abs=0.1)


def test_runs_differ_and_seeds_repeat_them() -> None:
    one, two = (played("linucb", Scenario(steps=40), runs=2) for _ in range(2))
    assert np.array_equal(one.regret, two.regret) and not np.array_equal(one.regret[0], one.regret[1])


def test_bands_are_students() -> None:
    found = played("random", Scenario(steps=50), runs=4)
    middle, low, high = found.band()
    total = found.regret.sum(1)
    assert middle[-1] == pytest.approx(total.mean())
    assert (high - low)[-1] == pytest.approx(2 * 3.18245 * total.std(ddof=1) / 2, rel=1e-5)
    assert found.mean("regret") == pytest.approx((middle[-1], low[-1], high[-1]))
    assert found.mean("cost")[0] == pytest.approx(found.cost.mean())
    assert np.isnan(played("random", Scenario(steps=5)).band()[1]).all()


def test_real_costs_count_where_they_differ_from_the_known_ones() -> None:
    dear = Table(TABLE.actions, TABLE.z, TABLE.rewards, np.ones_like(TABLE.costs))
    found = played("oracle", Scenario(steps=30, mode="cost"), table=dear)
    assert not found.regret.any() and (found.cost == 1).all() and np.isnan(found.correct).all()


def test_the_best_fixed_action_is_that_of_the_table() -> None:
    best = TABLE.best_fixed("cost")
    scores = {a.name: played("fixed", Scenario(steps=60, mode="cost"), action=a).utility.mean() for a in TABLE.actions}
    assert best.name == max(scores, key=lambda name: scores[name])


@pytest.mark.slow
def test_products_and_a_split_cost_are_worth_their_keep() -> None:
    """Regret: random, then [a, z] without products, then products with the cost learned, then with the cost known."""
    table = world(0)
    names = tuple(f"z{i}" for i in range(FEATURES))
    apart = Schema.of(table.actions, names, form="concatenated")
    total = dict.fromkeys(("random", "concatenated", "split", "knn"), 0.0)
    for scenario in (
        Scenario(mode="cost", steps=600),
        Scenario(mode="quality", steps=600),
        Scenario(mode="cost", steps=600, switch=(0.5, "quality")),
    ):
        found = {
            "random": played("random", scenario, 2, table),
            "concatenated": played("linucb", scenario, 2, table, apart, joint=True),
            "split": played("linucb", scenario, 2, table),
            "knn": played("knn", scenario, 2, table),
        }
        sums = {name: outcome.mean("regret")[0] for name, outcome in found.items()}
        assert sums["split"] < 0.8 * min(sums["random"], sums["concatenated"], sums["knn"])
        total = {name: total[name] + value for name, value in sums.items()}
    assert total["random"] > 1.1 * total["concatenated"] > 1.5 * total["split"]


SMALL = dict(actions=TABLE.actions[:2], z=np.zeros((3, 1)), rewards=np.zeros((3, 2, 1)), costs=np.zeros((3, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": np.zeros((4, 1))}, "don't fit 4 prompts and 2 actions"),
        ({"rewards": np.zeros((3, 2, 0))}, "don't fit 3 prompts"),
        ({"rewards": np.full((3, 2, 1), np.nan)}, "rewards must be finite"),
        ({"costs": np.full((3, 2), 1.5)}, "costs from 0 to 1"),
        ({"categories": ("a",)}, "don't fit 3 prompts"),
    ],
)
def test_tables_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Table(**{**SMALL, **change})


def test_scenarios_that_cannot_be_are_refused() -> None:
    table = Table(**SMALL)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no model 'flux' to add or remove; it has turbo"):
        played("random", Scenario(added=(0.5, "flux")), table=table)
    with pytest.raises(UserError, match="two categories of prompts"):
        played("random", Scenario(drift=True), table=table)
    with pytest.raises(UserError, match="The pool is empty"):
        played("random", Scenario(added=(0.5, "turbo")), table=table)


def test_the_schema_knows_nothing_of_a_model_that_comes_later() -> None:
    schemas = []

    def spy(pool: Pool, mode: Any, seed: int) -> Policy:
        schemas.append(pool.schema)
        return make("random", pool, seed=seed)

    replay(TABLE, spy, SCENARIOS["added"], runs=1)
    early = [action for action in TABLE.actions if action.model.name != "large"]
    assert schemas == [Schema.of(early, schemas[0].prompt)]

"""Estimates of a policy from another one's log are right within their errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from imgscale.bandit import LinUCB, Pool, Schema, make
from imgscale.bandit.offpolicy import Estimate, doubly_robust, ips, predictions, snips
from imgscale.bandit.replay import Scenario, Table, replay
from imgscale.errors import UserError
from tests.bandits import FEATURES, world

Floats = npt.NDArray[np.float64]


def test_formulas_by_hand() -> None:
    t, p, r = np.array([1.0, 0.0, 0.5]), np.array([0.5, 0.25, 0.25]), np.array([0.2, 0.9, 0.6])
    found = ips(t, p, r)
    terms = np.array([2 * 0.2, 0, 2 * 0.6])
    assert found.value == pytest.approx(terms.mean()) and found.error == pytest.approx(terms.std(ddof=1) / 3**0.5)
    assert found.effective == pytest.approx(2.0)
    found = snips(t, p, r)
    assert found.value == pytest.approx(0.4)
    assert found.error == pytest.approx(np.sqrt(2 * (2 * 0.2) ** 2) / 4 * np.sqrt(3 / 2))
    q, v = np.array([0.1, 0.5, 0.5]), np.array([0.3, 0.4, 0.5])
    assert doubly_robust(t, p, r, q, v).value == pytest.approx(np.mean([0.3 + 0.2, 0.4, 0.5 + 0.2]))
    assert doubly_robust(t, p, r, r, v).value == pytest.approx(v.mean())  # a perfect model needs no correction


ESTIMATORS: dict[str, Callable[[Floats, Floats, Floats, Floats, Floats], Estimate]] = {
    "ips": lambda t, p, r, q, v: ips(t, p, r),
    "snips": lambda t, p, r, q, v: snips(t, p, r),
    "dr": doubly_robust,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_intervals_cover_the_truth_as_often_as_they_should(name: str) -> None:
    """300 logs of 400 decisions by an epsilon-mixed policy; the evaluated policy prefers other actions."""
    rng = np.random.default_rng(0)
    quality = rng.random((5, 4))  # of four actions for five kinds of prompts
    logging = 0.6 * np.eye(4)[rng.integers(4, size=5)] + 0.1
    evaluated = rng.dirichlet(np.ones(4), size=5)
    truth = (evaluated * quality).sum(1).mean()
    model = quality + 0.2 * rng.standard_normal((5, 4))  # a wrong one
    found = []
    for _ in range(300):
        kind = rng.integers(5, size=400)
        action = (rng.random((400, 1)) > logging[kind].cumsum(1)).sum(1).clip(max=3)
        reward = quality[kind, action] + 0.1 * rng.standard_normal(400)
        t, p = evaluated[kind, action], logging[kind, action]
        found.append(ESTIMATORS[name](t, p, reward, model[kind, action], (evaluated * model).sum(1)[kind]))
    values, errors = (np.array([getattr(e, part) for e in found]) for part in ("value", "error"))
    assert abs(values.mean() - truth) < 4 * values.std() / 300**0.5
    assert errors.mean() == pytest.approx(values.std(), rel=0.15)
    assert 0.9 < np.mean(np.abs(values - truth) < 1.96 * errors) <= 0.99


def pool_of(table: Table) -> Pool:
    return Pool(table.actions, Schema.of(table.actions, tuple(f"z{i}" for i in range(FEATURES))))


def test_a_policy_s_own_log_tells_how_another_would_have_done() -> None:
    table = world(3, prompts=300)
    steps = 1500
    outcome = replay(
        table, lambda pool, mode, seed: make("random", pool, seed=seed), Scenario(steps=steps), runs=1, seed=2
    )
    target = LinUCB(pool_of(table), alpha=0.0, mode="quality", epsilon=0.3)
    for event in outcome.log[:500]:
        target.learn(event.context, event.action, event.reward)
    rest = outcome.log[500:]
    shares = np.array([target.probabilities(event.context) for event in rest])
    place = np.array([target.pool.index(event.action) for event in rest])
    rows = [int(np.flatnonzero((table.z == event.context.z).all(1))[0]) for event in rest]
    truth = (shares * table.rewards.mean(2)[rows]).sum(1).mean()
    t = shares[np.arange(len(rest)), place]
    p, r = np.array([event.propensity for event in rest]), np.array([event.reward for event in rest])
    q = predictions(target.pool, rest)
    found = {
        "ips": ips(t, p, r),
        "snips": snips(t, p, r),
        "dr": doubly_robust(t, p, r, q[np.arange(len(rest)), place], (shares * q).sum(1)),
    }
    for estimate in found.values():
        assert abs(estimate.value - truth) < 3 * estimate.error
    assert found["dr"].error < found["snips"].error < found["ips"].error
    assert abs(truth - r.mean()) > 3 * found["dr"].error  # it isn't the logging policy's own mean


def test_predictions_never_saw_their_own_fold() -> None:
    table = world(3, prompts=50)
    outcome = replay(table, lambda pool, mode, seed: make("random", pool, seed=seed), Scenario(steps=40), runs=1)
    pool = pool_of(table)
    log = list(outcome.log)
    before = predictions(pool, log, folds=4)
    assert before.shape == (40, 48)
    log[6] = replace(log[6], reward=50.0)
    changed = (predictions(pool, log, folds=4) != before).any(1)
    assert [i for i in range(40) if not changed[i]] == [i for i in range(40) if i % 4 == 2]


ONES = np.ones(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(0), np.ones(0), np.ones(0)), "give one of each for every decision"),
        ((ONES, np.ones(2), ONES), "give one of each for every decision"),
        ((ONES, np.array([1, 0, 1.0]), ONES), "Propensities must be above 0"),
        ((2 * ONES, ONES, ONES), "probabilities 0 to 1"),
        ((ONES, ONES, np.array([1, np.nan, 1])), "aren't finite"),
    ],
)
def test_impossible_logs_are_refused(arguments: tuple[Floats, Floats, Floats], message: str) -> None:
    for estimator in (ips, snips):
        with pytest.raises(UserError, match=message):
            estimator(*arguments)


def test_no_overlap_is_told() -> None:
    with pytest.raises(UserError, match="none of the logged actions"):
        snips(np.zeros(3), ONES, ONES)
    assert ips(ONES[:1], ONES[:1], ONES[:1]).error == np.inf


def test_an_estimate_reads_well() -> None:
    assert str(ips(ONES, ONES, np.array([0.2, 0.4, 0.6]))) == "0.400 ± 0.115 (as from 3 decisions)"

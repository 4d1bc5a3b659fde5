"""Limits, ledgers and quotas by themselves; that searches keep to them is in test_searchers.py."""

import math
from typing import Any

import pytest

from imgscale.budget import Budget, BudgetSpent, Ledger, Meter, Rollover
from imgscale.errors import UserError
from tests.doubles import Clock, clock

__all__ = ["clock"]

KINDS = ["nfe", "verifier_calls", "decodes", "seconds"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "200", True, [3]])
def test_a_limit_is_a_positive_number(kind: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        Budget(**{kind: value})
    message = str(caught.value)
    assert kind in message and repr(value) in message and "give a positive" in message and "\n" not in message
    assert ("whole" in message) == (kind != "seconds")


@pytest.mark.parametrize("kind", KINDS[:3])
def test_what_is_counted_is_whole(kind: str) -> None:
    with pytest.raises(UserError, match="2.5"):
        Budget(**{kind: 2.5})  # type: ignore[arg-type]
    assert getattr(Budget(**{kind: 2}), kind) == 2


def test_seconds_may_be_fractions() -> None:
    assert Budget(seconds=0.5).seconds == 0.5
    assert Budget(seconds=3).seconds == 3


def test_a_budget_needs_a_limit() -> None:
    with pytest.raises(UserError, match="budget=200"):
        Budget()


def test_a_number_means_model_evaluations() -> None:
    assert Budget.of(7) == Budget(nfe=7)
    both = Budget(nfe=7, seconds=1)
    assert Budget.of(both) is both
    with pytest.raises(UserError, match="nfe can't be '7'"):
        Budget.of("7")  # type: ignore[arg-type]


def test_a_meter_tells_what_is_left() -> None:
    meter = Meter(Budget(nfe=10, decodes=3))
    meter.charge(nfe=4, decodes=3, verifier_calls=100)
    assert (meter.left("nfe"), meter.left("decodes")) == (6, 0)
    assert meter.left("verifier_calls") == meter.left("seconds") == math.inf
    meter.require(nfe=6, verifier_calls=10**9)
    meter.require(decodes=0)
    for too_much in ({"nfe": 7}, {"decodes": 1}, {"nfe": 1, "decodes": 1}):
        with pytest.raises(BudgetSpent):
            meter.require(**too_much)
    assert meter.ledger == Ledger(nfe=4, decodes=3, verifier_calls=100), "asking costs nothing"


def test_a_meter_keeps_time(clock: Clock) -> None:
    meter = Meter(Budget(seconds=5))
    meter.restart()
    clock.pass_by(2)
    assert meter.tick() == 3 and meter.ledger.seconds == 2
    meter.restart()
    clock.pass_by(6)
    assert meter.tick() == -1 and meter.ledger.seconds == 6


def test_a_ledger_as_a_dict() -> None:
    expected = {"nfe": 3, "verifier_calls": 0, "report_calls": 2, "decodes": 0, "gradients": 0, "seconds": 0.0}
    assert Ledger(nfe=3, report_calls=2).as_dict() == expected


WEIGHTS: list[list[float]] = [
    [1],
    [1, 1],
    [1] * 3,
    [1] * 7,
    [1] * 50,
    [0.1] * 10,
    [1, 0, 2],
    [0, 0, 1],
    [5, 1, 1],
    [1e-9, 1, 1e9],
    [1 / 3, 1 / 7, 1 / 11, 1 / 13],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_a_split_adds_up_and_is_fair(weights: list[float]) -> None:
    for total in [*range(60), 97, 100, 1000, 10**6 + 7]:
        quotas = Rollover(total, weights).quotas
        assert sum(quotas) == total and min(quotas) >= 0 and len(quotas) == len(weights)
        for quota, weight in zip(quotas, weights, strict=True):
            assert abs(quota - total * weight / sum(weights)) <= 1


def test_equal_weights_differ_by_one_at_most() -> None:
    for total in range(100):
        for stages in (1, 2, 3, 4, 6, 7, 9, 10, 49):
            quotas = Rollover(total, [1] * stages).quotas
            assert max(quotas) - min(quotas) <= 1, (total, stages)
            assert min(quotas) == total // stages


@pytest.mark.parametrize(
    ("total", "weights", "quotas"),
    [(10, [1, 1, 1], [3, 4, 3]), (3, [1] * 4, [1, 1, 0, 1]), (7, [2, 1], [5, 2]), (0, [1, 1], [0, 0])],
)
def test_splits_by_hand(total: int, weights: list[float], quotas: list[int]) -> None:
    assert Rollover(total, weights).quotas == quotas


@pytest.mark.parametrize(("total", "weights"), [(-1, [1]), (3, []), (3, [0, 0]), (3, [2, -1])])
def test_what_cannot_be_split(total: int, weights: list[float]) -> None:
    with pytest.raises(ValueError, match="Cannot split"):
        Rollover(total, weights)


def test_the_rest_moves_on_and_the_last_stage_keeps_it() -> None:
    quotas = Rollover(12, [1, 1, 1])
    quotas.charge(0, 1)
    quotas.close(0)
    assert quotas.quotas == [1, 7, 4]
    quotas.charge(1, 7)
    quotas.close(1)
    assert quotas.quotas == [1, 7, 4] and quotas.left(2) == 4
    quotas.charge(2, 3)
    quotas.close(2)
    assert quotas.quotas == [1, 7, 4] and quotas.left(2) == 1


def test_a_stage_cannot_spend_more_than_it_has() -> None:
    quotas = Rollover(4, [1, 1])
    quotas.charge(0, 2)
    with pytest.raises(BudgetSpent):
        quotas.charge(0, 1)
    assert quotas.spent == [2, 0]


def test_what_is_charged_never_exceeds_the_total() -> None:
    for total in range(0, 40, 3):
        for stages in (1, 2, 5, 8):
            for greed in range(4):  # each stage takes so many at most
                quotas = Rollover(total, [1] * stages)
                for stage in range(stages):
                    quotas.charge(stage, min(quotas.left(stage), greed))
                    quotas.close(stage)
                assert sum(quotas.quotas) == total
                assert sum(quotas.spent) + quotas.left(stages - 1) == total
                assert sum(quotas.spent) <= min(total, greed * stages)


def test_a_stage_may_have_its_least_before_the_rest_is_split() -> None:
    split = Rollover(17, [3, 2, 1], [3, 0, 0])  # 14 by 3 : 2 : 1 is 7, 5 and 2
    assert split.quotas == [10, 5, 2]
    assert Rollover(4, [0, 1], [1, 3]).quotas == [1, 3]
    with pytest.raises(ValueError, match="Cannot split -1"):
        Rollover(3, [1, 1], [2, 2])

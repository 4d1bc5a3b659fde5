"""One budget for many prompts: who gets how much, and that nothing is lost or spent twice."""

from __future__ import annotations

import numpy as np
import pytest

from imgscale.errors import UserError
from imgscale.shares import ROUNDS, Shares

LEAST = 4


def play(shares: Shares, draw: object, order: int = 1) -> None:
    """Plays all rounds; ``draw(prompt, n)`` gives n scores, of which those after a 1.0 aren't drawn."""
    for round_ in range(len(shares.ledger.quotas)):
        plan = shares.plan(round_)
        assert sum(plan.values()) <= shares.ledger.left(round_)
        assert all(budget >= LEAST and budget % LEAST == 0 for budget in plan.values())
        for place, budget in list(plan.items())[::order]:
            scores = draw(place, budget // LEAST)  # type: ignore[operator]
            hits = [i for i, score in enumerate(scores) if score >= 1]
            scores = scores[: hits[0] + 1] if hits else scores
            shares.book(round_, place, len(scores) * LEAST, scores, 1.0)
        shares.close(round_)


def spent(shares: Shares) -> list[int]:
    return [prompt.nfe for prompt in shares.prompts]


def test_everybody_gets_the_same_at_first() -> None:
    shares = Shares(1000, [LEAST] * 10)
    assert shares.plan(0) == dict.fromkeys(range(10), 40)
    assert Shares(40, [LEAST] * 10).plan(0) == dict.fromkeys(range(10), LEAST)
    assert Shares(48, [LEAST] * 10, rounds=(1.0,)).plan(0) == {**dict.fromkeys(range(10), LEAST), 0: 8, 1: 8}


def test_too_little_for_one_image_each_is_refused() -> None:
    with pytest.raises(UserError, match="39 NFE can't give 10 searches one image each, which takes 40"):
        Shares(39, [LEAST] * 10)


@pytest.mark.parametrize("rounds", [ROUNDS, (1.0,), (0.5, 0.5), (0.0, 1.0)])
@pytest.mark.parametrize("total", [40, 41, 97, 400, 1003])
def test_the_total_is_spent_and_never_exceeded(total: int, rounds: tuple[float, ...]) -> None:
    rng = np.random.default_rng(total)
    shares = Shares(total, [LEAST] * 10, rounds=rounds)
    play(shares, lambda place, n: rng.uniform(0, 0.9, (n,)).tolist())
    assert total - LEAST < sum(spent(shares)) <= total
    assert min(spent(shares)) >= LEAST


def test_what_the_solved_leave_goes_to_those_that_are_not() -> None:
    rng = np.random.default_rng(0)
    shares = Shares(10 * 100, [LEAST] * 10)
    play(shares, lambda place, n: [1.0] * n if place < 5 else rng.uniform(0, 0.5, (n,)).tolist())
    assert spent(shares)[:5] == [LEAST] * 5
    assert sum(spent(shares)) > 1000 - LEAST and min(spent(shares)[5:]) > 100


def test_prompts_that_lack_more_get_more_and_the_more_they_have_got_the_less() -> None:
    shares = Shares(400, [1] * 2, rounds=(0.1, 0.9))
    shares.book(0, 0, 20, [0.2] * 20, 1.0)
    shares.book(0, 1, 20, [0.8] * 20, 1.0)
    shares.close(0)
    plan = shares.plan(1)
    # the bound is .8 + .5 * .3 = .95, so they lack .75 and .15, and samples go in that proportion
    assert abs((20 + plan[0]) / (20 + plan[1]) - 5) < 0.1


def test_the_bound_is_never_above_the_verifiers_ceiling() -> None:
    shares = Shares(400, [1] * 2, rounds=(0.1, 0.9))
    shares.book(0, 0, 20, [0.2] * 20, 0.85)
    shares.book(0, 1, 20, [0.8] * 20, 0.85)
    shares.close(0)
    plan = shares.plan(1)
    assert abs((20 + plan[0]) / (20 + plan[1]) - 13) < 0.3  # .65 and .05


@pytest.mark.parametrize("scale, shift", [(1.0, 0.0), (100.0, 5.0), (1e-3, -2.0)])
def test_the_unit_of_the_scores_changes_nothing(scale: float, shift: float) -> None:
    def run(scale: float, shift: float) -> list[int]:
        shares, rng = Shares(2000, [LEAST] * 10), np.random.default_rng(3)
        for round_ in range(len(ROUNDS)):
            for place, budget in shares.plan(round_).items():
                scores = rng.normal(place / 10, 0.1, budget // LEAST)
                shares.book(round_, place, budget, (shift + scale * scores).tolist())
            shares.close(round_)
        return spent(shares)

    assert run(scale, shift) == run(1.0, 0.0)


def test_the_order_of_results_changes_nothing() -> None:
    def draw(place: int, n: int) -> list[float]:
        return list(np.random.default_rng((place, n)).uniform(0, 0.9, n))

    one, other = Shares(2000, [LEAST] * 12), Shares(2000, [LEAST] * 12)
    play(one, draw)
    play(other, draw, -1)
    assert spent(one) == spent(other)


def test_scores_that_are_no_numbers_and_equal_ones_do_no_harm() -> None:
    shares = Shares(600, [LEAST] * 6)
    play(shares, lambda place, n: [float("nan")] * n if place < 3 else [0.5] * n)
    assert 600 - LEAST < sum(spent(shares)) <= 600
    assert max(spent(shares)[:3]) <= min(spent(shares)[3:])  # a verifier that fails gets no more


def test_all_solved_ends_the_run() -> None:
    shares = Shares(600, [LEAST] * 6)
    play(shares, lambda place, n: [1.0] * n)
    assert spent(shares) == [LEAST] * 6 and shares.plan(len(ROUNDS) - 1) == {}


def test_it_solves_more_than_an_even_split_where_prompts_differ() -> None:
    chances = np.random.default_rng(5).beta(0.5, 1.0, 200)

    def solved(rounds: tuple[float, ...], seed: int) -> float:
        rng = np.random.default_rng(seed)
        shares = Shares(200 * 40, [LEAST] * 200, rounds=rounds)
        play(shares, lambda place, n: np.where(rng.random(n) < chances[place], 1.0, rng.uniform(0.4, 0.9, n)).tolist())
        return float(np.mean([prompt.solved for prompt in shares.prompts]))

    gains = [solved(ROUNDS, seed) - solved((1.0,), seed) for seed in range(5)]
    assert min(gains) > 0.05


def test_the_mean_best_is_higher_than_by_an_even_split_without_a_ceiling() -> None:
    def mean(rounds: tuple[float, ...], seed: int) -> float:
        rng, shares = np.random.default_rng(seed), Shares(200 * 24, [LEAST] * 200, rounds=rounds)
        spreads = np.random.default_rng(9).uniform(0.5, 4, 200)
        for round_ in range(len(rounds)):
            for place, budget in shares.plan(round_).items():
                scores = 1 - rng.beta(1, 1, budget // LEAST) ** (1 / spreads[place])  # most far from 1, or near it
                shares.book(round_, place, budget, scores.tolist())
            shares.close(round_)
        return float(np.mean([prompt.best for prompt in shares.prompts]))

    assert min(mean(ROUNDS, seed) - mean((1.0,), seed) for seed in range(5)) > 0.01

"""Search over paths: the published times, what is kept, and how a small budget is spent."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale.budget import Budget
from imgscale.errors import UserError
from imgscale.kernels import ODE, renoise
from imgscale.keys import fold, normal, root
from imgscale.paths import VP, Discrete, Linear
from imgscale.problem import NOISE, RENOISE
from tests.doubles import STEPS, Scripted, Watched, new, run

TENTHS = [round(i / 10, 1) for i in range(10, 0, -1)]


class Told(Watched):
    """Remembers what the model was asked, by time."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: dict[float, list[Tensor]] = {}

    def predict(self, x: Tensor, t: float | Tensor, cond: Any) -> Tensor:
        self.asked.setdefault(round(float(torch.as_tensor(t).max()), 6), []).append(x.clone())
        return super().predict(x, t, cond)


def times(world: Watched) -> Counter[float]:
    return Counter(round(t, 5) for call in world.places for t, _ in call)


def test_the_published_rounds() -> None:
    """2 samples, 5 branches: .11, then .89 to .08, .86 to .05, .83 to .02, .80 to 0, each by the model's own times."""
    world = Watched()
    search = run(world, new(world, "paths", budget=400, steps=10))
    # To .11: ten evaluations for each of 2. Rounds of 10 branches, with 10, 10, 10 and 8 evaluations each.
    assert search.meter.ledger.nfe == 2 * 10 + 10 * (10 + 10 + 10 + 8) == world.evaluations
    assert search.meter.ledger.verifier_calls == 4 * 10 and search.stopped == "complete"
    expected = Counter({t: 2 for t in TENTHS if t > 0.11})
    expected[0.11] = 2
    for high, low in ((0.89, 0.08), (0.86, 0.05), (0.83, 0.02), (0.8, 0.0)):
        expected.update({t: 10 for t in (high, *(t for t in TENTHS if low < t < high), low) if t > 0})
    assert times(world) == expected
    assert max(world.batches) == 10


def test_few_steps_stretch_the_times() -> None:
    """Where the last own time is .25, it is the start, and the others move with it on either side."""
    world = Watched()
    run(world, new(world, "paths", budget=4 + 2 * (5 + 5 + 5 + 4), samples=1, branches=2))
    expected = Counter({1.0: 1, 0.75: 1, 0.5: 1, 0.25: 1})
    for high, low in ((0.89, 0.08), (0.86, 0.05), (0.83, 0.02), (0.8, 0.0)):
        leg = (1 - (1 - high) * 0.75 / 0.89, 0.75, 0.5, 0.25, low * 0.25 / 0.11)
        expected.update({round(t, 5): 2 for t in leg if t > 0})
    assert times(world) == expected


@pytest.mark.parametrize("path", [VP(), Discrete((1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0))], ids=str)
def test_other_paths_have_places_of_equal_log_snr(path: Any) -> None:
    world = Watched(path=path)
    run(world, new(world, "paths", budget=1200, steps=50, samples=1, branches=2))
    at = {t: round(float(path.time_at(Linear().log_snr(t))), 6) for t in (0.11, 0.89, 0.08, 0.86, 0.05)}
    seen = times(world)
    for t in at.values():
        assert any(abs(t - s) < 2e-5 for s in seen), t


def test_the_best_of_each_round_is_kept() -> None:
    """By hand: one sample to .3; up to .7 three ways and down to .15; the best up to .55 and down to 0."""
    world = Watched(shape=(3,))
    rewards = [0.1, 0.2, 0.6, 0.3, 0.9, 0.8]  # the 3rd branch, then the 2nd
    options = {"samples": 1, "branches": 3, "start": 0.3, "forward": 0.4, "back": 0.55}
    search = run(world, new(world, "paths", budget=29, steps=5, verifier=Scripted(rewards), seed=5, options=options))
    assert search.meter.ledger.nfe == 5 + 3 * 5 + 3 * 3 and search.meter.ledger.verifier_calls == 6
    cond, keys = world.encode(""), root(5, 1)
    x = world.prior(keys, cond)

    def solve(x: Tensor, *grid: float) -> Tensor:
        for t, t_next in zip(grid, grid[1:], strict=False):
            x = ODE()(world.path, t, t_next, x, world.predict(x, t, cond))
        return x

    x = solve(x, 1, 0.8, 0.6, 0.4, 0.3)
    for number, low, high, step, grid in (
        (2, 0.3, 0.7, 4, (0.7, 0.6, 0.4, 0.2, 0.15)),
        (1, 0.15, 0.55, 4, (0.55, 0.4, 0.2, 0)),
    ):
        keys = fold(fold(keys, step, number), RENOISE, 0)
        x = renoise(world.path, low, high, x, normal(fold(keys, NOISE, 0), (3,)))
        x = solve(x, *grid)
    assert search.best is not None and search.best.score == pytest.approx(0.9)
    torch.testing.assert_close(search.best.latents, x[0], atol=1e-5, rtol=0)


def test_branches_have_the_law_of_forward_noising() -> None:
    """From x at t0: mean (a'/a) x and variance s'^2 - (a'/a)^2 s^2, uncorrelated between coordinates."""
    world = Told(shape=(3,))
    options = {"samples": 1, "branches": 4000, "start": 0.2, "forward": 0.5, "back": 0.8}
    run(world, new(world, "paths", budget=4 + 4000 * 4 + 1, steps=5, options=options), max_batch=4000)
    origin, scattered = world.asked[0.2][0].double(), torch.cat(world.asked[0.7]).double()
    assert len(scattered) == 4000
    keep = 0.3 / 0.8
    spread = math.sqrt(0.7**2 - keep**2 * 0.2**2)
    torch.testing.assert_close(scattered.mean(0), keep * origin[0], atol=4 * spread / math.sqrt(4000), rtol=0)
    torch.testing.assert_close(scattered.T.cov(), spread**2 * torch.eye(3).double(), atol=0.03, rtol=0)


PLANS = {  # budget: samples, branches and rounds; on four own steps an opening takes 4, rounds 5, 5, 5 and 4 a branch
    8 + 10 * 19: (2, 5, 4),
    8 + 10 * 14: (2, 5, 3),
    8 + 10 * 9: (2, 5, 2),
    8 + 10 * 4: (2, 5, 1),
    8 + 8 * 4: (2, 4, 1),
    8 + 4 * 4: (2, 2, 1),
    4 + 4 * 4: (1, 4, 1),
    4 + 2 * 4: (1, 2, 1),
}


@pytest.mark.parametrize("budget", PLANS)
def test_small_budgets_have_fewer_rounds_then_branches_then_samples(budget: int) -> None:
    samples, branches, rounds = PLANS[budget]
    world = Watched()
    search = run(world, new(world, "paths", budget=budget))
    assert search.meter.ledger.nfe == budget
    assert search.meter.ledger.verifier_calls == samples * branches * rounds
    assert world.batches[:4] == [samples] * 4


@pytest.mark.parametrize("nfe", range(STEPS, 70, 5))
def test_less_than_a_sample_is_left(nfe: int) -> None:
    world = Watched()
    search = run(world, new(world, "paths", budget=nfe))
    assert 0 <= nfe - world.evaluations < STEPS and search.stopped == "complete"


@pytest.mark.parametrize("calls", [1, 3, 4, 9, 10, 43])
def test_all_verifier_calls_are_used(calls: int) -> None:
    world = Watched()
    search = run(world, new(world, "paths", budget=Budget(verifier_calls=calls)))
    assert search.meter.ledger.verifier_calls == calls and search.stopped == "complete"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "at least 1 sample and 2 branches, not 0 and 5"),
        ({"branches": 1}, "at least 1 sample and 2 branches"),
        ({"start": 0.0}, "can't take samples from 0.0 up by 0.78"),
        ({"start": 0.3}, r"start \+ forward must be less than 1"),
        ({"back": 0.78}, "at least 0.001 more than forward"),
        ({"forward": math.nan}, "can't take samples"),
    ],
    ids=str,
)
def test_what_options_may_be(options: dict[str, Any], message: str) -> None:
    world = Watched()
    with pytest.raises(UserError, match=message):
        run(world, new(world, "paths", budget=40, options=options))
    assert world.batches == []

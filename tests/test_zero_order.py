"""Zero-order search: where the neighbours lie, when the pivot moves and when a new one is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.kernels import ODE
from imgscale.keys import root
from imgscale.particles import Particles, Schedule
from imgscale.paths import Linear
from imgscale.search import Search
from imgscale.searchers.zero_order import near
from tests.doubles import STEPS, Scripted, Watched, new, run


def noise(d: int, seed: int = 3) -> Particles:
    """One starting noise of d coordinates."""
    x = torch.randn(1, d, generator=torch.Generator().manual_seed(seed))
    return Particles(Schedule(Linear(), (1.0, 0.0)), -1, x, torch.zeros_like(x), root(seed, 1), root(seed, 1))


class Told(Watched):
    """Remembers the noises that samples started from."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.noises: list[Tensor] = []

    def predict(self, x: Tensor, t: float | Tensor, cond: Any) -> Tensor:
        if float(torch.as_tensor(t).max()) == 1.0:
            self.noises.append(x.clone())
        return super().predict(x, t, cond)


def climb(scores: Sequence[float], budget: int, **options: Any) -> tuple[Search, list[Tensor]]:
    """A search on scripted rewards, and the noises of each of its rounds."""
    world = Told(shape=(8,))
    return run(world, new(world, "zero-order", budget=budget, verifier=Scripted(scores), options=options)), world.noises


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("d", [2, 5, 4096])
def test_neighbours_have_the_norm_of_the_pivot_and_the_angle_asked_for(d: int, cosine: float) -> None:
    pivot = noise(d)
    around = near(pivot, cosine, 6).x.double()
    p = pivot.x.double()
    torch.testing.assert_close(around.norm(dim=1), p.norm().expand(6), atol=0, rtol=1e-5)
    torch.testing.assert_close(
        torch.cosine_similarity(around, p), torch.full((6,), cosine, dtype=torch.float64), atol=1e-5, rtol=0
    )


def test_neighbours_lie_in_all_directions_and_keep_unit_variance() -> None:
    pivot = noise(6)
    p = pivot.x.double() / pivot.x.double().norm()
    around = near(pivot, 0.6, 20_000).x.double() / pivot.x.double().norm()
    side = (around - 0.6 * p) / 0.8
    # Unit vectors, uniform among those orthogonal to p: mean 0, covariance (I - p p^T) / 5.
    torch.testing.assert_close(side.mean(0), torch.zeros(6).double(), atol=0.012, rtol=0)
    expected = (torch.eye(6).double() - p.T @ p) / 5
    torch.testing.assert_close(side.T @ side / len(side), expected, atol=0.012, rtol=0)
    far = near(noise(20_000), 0.95, 3).x
    assert far.std(dim=1).sub(noise(20_000).x.std()).abs().max() < 0.01


def test_neighbours_of_other_numbers_are_others() -> None:
    pivot = noise(8)
    four, more = near(pivot, 0.9, 4), near(pivot, 0.9, 4, first=4)
    assert len({tuple(row.tolist()) for row in torch.cat([four.x, more.x])}) == 8
    torch.testing.assert_close(near(pivot, 0.9, 6, first=2).x[:2], four.x[2:])
    assert torch.equal(four.seeds, pivot.seeds.expand(4)) and len(set(four.keys.tolist() + more.keys.tolist())) == 8


def test_the_first_sample_is_the_pipelines_own() -> None:
    world = Watched()
    best = run(world, new(world, "zero-order", budget=STEPS, seed=11)).best
    cond = world.encode("")
    x, times = world.prior(root(11, 1), cond), world.grid(STEPS, cond).tolist()
    for t, t_next in zip(times, times[1:], strict=False):
        x = ODE()(world.path, t, t_next, x, world.predict(x, t, cond))
    assert best is not None and best.seed == 11
    torch.testing.assert_close(best.latents, x[0], atol=1e-6, rtol=0)


def test_the_best_neighbour_becomes_the_pivot() -> None:
    # A pivot of .2; round 1: the 3rd of 4 is better; round 2 around that one.
    _, noises = climb([0.2, 0.1, 0.3, 0.5, 0.4, 0.0], budget=9 * STEPS)
    assert [len(x) for x in noises] == [1, 4, 4]
    for centre, around in ((noises[0][0], noises[1]), (noises[1][2], noises[2])):
        torch.testing.assert_close(torch.cosine_similarity(around, centre[None]), torch.full((4,), 0.95))


def test_equal_is_no_improvement_and_a_stuck_climb_starts_anew() -> None:
    # Two rounds of 4 around the first pivot, none better; then a fresh noise: the seed's second.
    search, noises = climb([0.5], budget=14 * STEPS, patience=2)
    assert [len(x) for x in noises] == [1, 4, 4, 1, 4]
    cosines = torch.cosine_similarity(torch.cat(noises[1:3]), noises[0])
    torch.testing.assert_close(cosines, torch.full((8,), 0.95))
    assert len({tuple(row.tolist()) for row in torch.cat(noises)}) == 14, "no noise is tried twice"
    world = Watched(shape=(8,))
    torch.testing.assert_close(torch.cat([noises[0], noises[3]]), world.prior(root(0, 2), world.encode("")))
    assert search.best is not None and search.best.seed == 0


def test_an_improvement_makes_patient_again() -> None:
    # Around the pivot: a round without, a round with, then two without, and a new noise.
    scores = [0.5, *[0.1] * 4, 0.1, 0.6, 0.1, 0.1, *[0.2] * 9]
    _, noises = climb(scores, budget=18 * STEPS, patience=2)
    assert [len(x) for x in noises] == [1, 4, 4, 4, 4, 1]
    torch.testing.assert_close(torch.cosine_similarity(noises[4], noises[2][1:2]), torch.full((4,), 0.95))


@pytest.mark.parametrize("nfe", range(STEPS, 8 * STEPS))
def test_all_that_makes_a_sample_is_spent(nfe: int) -> None:
    world = Watched()
    search = run(world, new(world, "zero-order", budget=nfe))
    assert search.meter.ledger.nfe == nfe // STEPS * STEPS == world.evaluations and search.stopped == "complete"
    assert search.meter.ledger.verifier_calls == nfe // STEPS


def test_a_pivot_without_a_score_is_left_for_any_with_one() -> None:
    _, noises = climb([-math.inf, -math.inf, 0.1, -math.inf, -math.inf, 0.0], budget=9 * STEPS)
    torch.testing.assert_close(torch.cosine_similarity(noises[2], noises[1][1:2]), torch.full((4,), 0.95))


def test_climbing_beats_independent_samples_where_rewards_are_smooth() -> None:
    gains = []
    for seed in range(12):
        world = Watched(shape=(12,))
        found = run(world, new(world, "zero-order", budget=50 * STEPS, seed=seed)).best
        plain = run(world, new(world, "best-of-n", budget=50 * STEPS, seed=seed)).best
        assert found is not None and plain is not None
        gains.append(found.score - plain.score)
    assert sum(gain > 0 for gain in gains) >= 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neighbours": 0}, "must be at least 1"),
        ({"patience": 0}, "must be at least 1"),
        ({"cosine": 1.0}, "can't be 1.0; give a number from 0"),
        ({"cosine": -0.1}, "can't be -0.1"),
        ({"cosine": math.nan}, "can't be nan"),
    ],
    ids=str,
)
def test_what_options_may_be(options: dict[str, Any], message: str) -> None:
    world = Watched()
    with pytest.raises(UserError, match=message):
        run(world, new(world, "zero-order", budget=40, options=options))
    assert world.batches == []

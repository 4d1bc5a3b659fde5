"""EvoSearch: mutations, elites, tournaments, and what a population costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imgscale.budget import Budget
from imgscale.errors import UserError
from imgscale.keys import fold, normal, root
from imgscale.particles import Particles, Schedule
from imgscale.paths import VP, Linear, Path
from imgscale.problem import NOISE
from imgscale.searchers.evolve import _places, mutate
from tests.doubles import STEPS, Scripted, Watched, new, run
from tests.worlds import Gaussian

GRID = (1.0, 0.75, 0.5, 0.25, 0.0)


class Told(Watched):
    """Remembers every evaluation: its time and x."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: list[tuple[float, Tensor]] = []

    def predict(self, x: Tensor, t: float | Tensor, cond: Any) -> Tensor:
        self.asked.append((float(torch.as_tensor(t).max()), x.clone()))
        return super().predict(x, t, cond)


def some(n: int, d: int, step: int = 0, path: Path | None = None) -> Particles:
    """Particles of a Gaussian world at a step, from exact samples."""
    path, world = path or Linear(), Gaussian(shape=(d,))
    t = GRID[step]
    x0, eps = world.data(n, seed=1), torch.randn(n, d, generator=torch.Generator().manual_seed(2)).double()
    x = path.alpha(t) * x0 + path.sigma(t) * eps
    keys = root(5, n)
    return Particles(Schedule(path, GRID), step, x.float(), x0.float(), keys, keys)


@pytest.mark.parametrize("strength", [0.0, 0.2, 0.7, 1.0])
def test_a_mutated_starting_noise_keeps_its_variance(strength: float) -> None:
    parents = some(400, 100)
    children = mutate(parents, strength).x.double()
    assert children.std() == pytest.approx(1.0, abs=0.015)
    both = torch.stack([children.flatten(), parents.x.double().flatten()])
    assert torch.corrcoef(both)[0, 1] == pytest.approx((1 - strength**2) ** 0.5, abs=0.015)
    fresh = normal(fold(parents.keys, NOISE, 0), (100,))
    expected = (1 - strength**2) ** 0.5 * parents.x + strength * fresh
    torch.testing.assert_close(mutate(parents, strength).x, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("path", [Linear(), VP()], ids=str)
@pytest.mark.parametrize("step", [1, 3])
def test_a_mutated_state_keeps_its_data_and_the_level_of_its_noise(path: Path, step: int) -> None:
    parents = some(400, 100, step, path)
    children = mutate(parents, 0.6)
    data = path.alpha(GRID[step]) * parents.x0.double()
    noise, before = children.x.double() - data, parents.x.double() - data
    assert noise.std() == pytest.approx(float(path.sigma(GRID[step])), rel=0.015)
    assert torch.corrcoef(torch.stack([noise.flatten(), before.flatten()]))[0, 1] == pytest.approx(0.8, abs=0.015)
    assert children.scores is None and torch.equal(children.keys, parents.keys)


def test_places() -> None:
    assert _places("0 0.4 0.6 0.8", 50) == [0, 20, 30, 40], "as in the paper's example"
    assert _places("0 0.4 0.6 0.8", 10) == [0, 4, 6, 8]
    assert _places("0 0.4 0.6 0.8", 4) == [0, 2, 2, 3] and _places("0 0.99", 1) == [0, 0]


def evolve(scores: Sequence[float], budget: int, **options: Any) -> tuple[Any, Told]:
    world = Told(shape=(6,))
    search = run(world, new(world, "evolve", budget=budget, seed=3, verifier=Scripted(scores), options=options))
    assert search.meter.ledger.nfe == world.evaluations
    return search, world


def test_a_generation_by_hand() -> None:
    """Four noises, elites 1, one generation of noises: three mutants of the winners of the rng's tournaments."""
    search, world = evolve([0.3, 0.9, 0.1, 0.5, 0.2], 4 * 4 + 3 * 4, population=4, elites=1, schedule="0")
    starts, mutants = (x for t, x in world.asked if t == 1.0)
    ranked = [1, 3, 0, 2]
    winners = [ranked[min(pair)] for pair in np.random.default_rng(3).integers(4, size=(3, 2)).tolist()]
    keys = fold(root(3, 4)[winners], 0, torch.arange(3))
    expected = 0.96**0.5 * starts[winners] + 0.2 * normal(fold(keys, NOISE, 0), (6,))
    torch.testing.assert_close(mutants, expected, atol=1e-6, rtol=0)
    assert search.meter.ledger.verifier_calls == 4 + 3 and search.stopped == "complete"


def test_later_states_are_mutated_and_solved_again() -> None:
    """Places 0 and 2 of 4 steps: the second generation is mutated at t = .5, and costs 2 evaluations each."""
    _, world = evolve([0.1], 5 * 4 + 2 * 4 + 2 * 2, population=5, schedule="0 0.5")
    assert [(t, len(x)) for t, x in world.asked] == [
        *[(t, 5) for t in (1.0, 0.75, 0.5, 0.25)],
        *[(t, 2) for t in (1.0, 0.75, 0.5, 0.25)],
        *[(t, 2) for t in (0.5, 0.25)],
    ]


def test_mutants_resemble_their_parents_and_the_elites_stay() -> None:
    """The elites' states at the later place are among the parents there, too, though they were never solved again."""
    scores = [0.9, 0.8, 0.7, 0.1, 0.1, 0.0, 0.0, 0.05, 0.05]
    _, world = evolve(scores, 5 * 4 + 2 * 4 + 2 * 2, population=5, elites=3, schedule="0 0.5", mutation=0.01)
    at_half = [x for t, x in world.asked if t == 0.5]
    known, mutants = torch.cat(at_half[:2]), at_half[2]
    distance = torch.cdist(mutants, known)
    assert distance.min(1).values.max() < 0.05
    # Of 5 the tournaments' winners were ranked by their scores: 0, 1, 2 first, and then the children.
    ranks = np.random.default_rng(3)
    ranks.integers(5, size=(2, 2))
    expected = [[0, 1, 2, 5, 6][i] for i in ranks.integers(5, size=(2, 2)).min(1)]
    assert distance.argmin(1).tolist() == expected


def test_children_of_one_parent_differ() -> None:
    _, world = evolve([0.0], 32 * 8, population=32, elites=1, schedule="0")
    mutants = [x for t, x in world.asked if t == 1.0][1]
    assert len({tuple(row.tolist()) for row in mutants}) == 31


@pytest.mark.parametrize(
    ("budget", "population"),
    # On 4 steps a sample takes 4, and the generations take 4, 2, 2 and 1 of each of n - 3 children: 13 n - 27.
    [(4, 1), (15, 3), (24, 3), (25, 4), (37, 4), (38, 5), (181, 16), (389, 32), (600, 32)],
)
def test_populations_fill_the_budget(budget: int, population: int) -> None:
    world = Told()
    search = run(world, new(world, "evolve", budget=budget))
    assert len(world.asked[0][1]) == population
    assert search.stopped == "complete" and budget - world.evaluations < STEPS


@pytest.mark.parametrize("calls", [1, 3, 7, 20, 60])
def test_all_verifier_calls_are_used(calls: int) -> None:
    world = Watched()
    search = run(world, new(world, "evolve", budget=Budget(verifier_calls=calls)))
    assert search.meter.ledger.verifier_calls == calls and search.stopped == "complete"


def test_a_population_of_elites_is_plain_samples() -> None:
    for population in (3, 2):
        world = Watched()
        one = run(world, new(world, "evolve", budget=24, population=population, seed=8)).best
        two = run(world, new(world, "best-of-n", budget=24, seed=8)).best
        assert one is not None and two is not None
        torch.testing.assert_close(one.latents, two.latents, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"population": 0}, "must be at least 1"),
        ({"elites": 0}, "must be at least 1"),
        ({"mutation": 1.5}, "can't be 1.5; give a strength from 0 to 1"),
        ({"schedule": "0.4 0"}, "give increasing shares below 1"),
        ({"schedule": "0 1"}, "give increasing shares below 1"),
        ({"schedule": "often"}, "can't be 'often'"),
        ({"schedule": ""}, "can't be ''"),
    ],
    ids=str,
)
def test_what_options_may_be(options: dict[str, Any], message: str) -> None:
    world = Watched()
    with pytest.raises(UserError, match=message):
        run(world, new(world, "evolve", budget=40, options=options))
    assert world.batches == []

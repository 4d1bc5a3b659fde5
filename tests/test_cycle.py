"""ABCD: levels, what a cycle costs, who stays, and when a pool ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale.budget import Budget
from imgscale.errors import UserError
from imgscale.kernels import ODE, renoise
from imgscale.keys import fold, normal, root
from imgscale.problem import NOISE, RENOISE
from tests.doubles import STEPS, Scripted, Watched, new, run

CYCLE = 3 + 2 + 1  # evaluations of one image sent back to all three levels of four steps: .75, .5 and .25


class Told(Watched):
    """Remembers every evaluation: its time and x."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: list[tuple[float, Tensor]] = []

    def predict(self, x: Tensor, t: float | Tensor, cond: Any) -> Tensor:
        self.asked.append((float(torch.as_tensor(t).max()), x.clone()))
        return super().predict(x, t, cond)

    @property
    def calls(self) -> list[tuple[float, int]]:
        return [(round(t, 6), len(x)) for t, x in self.asked]


def cycle(scores: Sequence[float], budget: int, steps: int = STEPS, **options: Any) -> tuple[Any, Told]:
    world = Told(shape=(6,))
    search = run(
        world, new(world, "cycle", budget=budget, seed=3, steps=steps, verifier=Scripted(scores), options=options)
    )
    assert search.meter.ledger.nfe == world.evaluations <= budget
    return search, world


def test_one_cycle_by_hand() -> None:
    """One image to three levels; those from further up pick up the others on their way."""
    rewards = [0.1, 0.3, 0.9, 0.2]
    search, world = cycle(rewards, 4 + CYCLE, starts=1, keep=1)
    assert world.calls == [
        (1.0, 1),
        (0.75, 1),
        (0.5, 1),
        (0.25, 1),
        (0.75, 1),
        (0.5, 1),
        (0.5, 1),
        (0.25, 2),
        (0.25, 1),
    ]
    assert search.meter.ledger.verifier_calls == 1 + 3 and search.stopped == "complete"
    # The winner is the second of the wave, the one from .5.
    cond, path = world.encode(""), world.path

    def solve(x: Tensor, *grid: float) -> Tensor:
        for t, t_next in zip(grid, grid[1:], strict=False):
            x = ODE()(path, t, t_next, x, world.predict(x, t, cond))
        return x

    image = solve(world.prior(root(3, 1), cond), 1, 0.75, 0.5, 0.25, 0)
    keys = fold(fold(root(3, 1), STEPS, 0), RENOISE, 2)
    x = renoise(path, 0.0, 0.5, image, normal(fold(keys, NOISE, 2), (6,)))
    assert search.best is not None and search.best.score == pytest.approx(0.9)
    torch.testing.assert_close(search.best.latents, solve(x, 0.5, 0.25, 0)[0], atol=1e-5, rtol=0)


def test_levels_have_the_law_of_forward_noising() -> None:
    """From an image x0 to t: mean (1 - t) x0, standard deviation t, and no correlation between levels."""
    n = 500
    _, world = cycle([0.0], 4 + n * CYCLE, starts=1, keep=1, copies=n)
    sent = {t: torch.cat([x for time, x in world.asked[4:] if time == t]).double() for t in (0.75, 0.5)}
    # Those sent to .5 come after those that pass by from .75, or before: they alone have the law below.
    x = world.prior(root(3, 1), world.encode(""))
    for t, t_next in ((1.0, 0.75), (0.75, 0.5), (0.5, 0.25), (0.25, 0.0)):
        x = ODE()(world.path, t, t_next, x, world.predict(x, t, world.encode("")))
    far, near = sent[0.75], sent[0.5][n:]
    assert len(far) == len(near) == n
    for t, rows in ((0.75, far), (0.5, near)):
        z = (rows - (1 - t) * x.double()) / t
        torch.testing.assert_close(z.mean(0), torch.zeros(6).double(), atol=0.18, rtol=0)
        torch.testing.assert_close(z.T.cov(), torch.eye(6).double(), atol=0.25, rtol=0)
    assert torch.corrcoef(torch.stack([far.flatten(), near.flatten()]))[0, 1].abs() < 0.5


@pytest.mark.parametrize(
    ("steps", "levels", "times"),
    [
        (4, 4, (0.75, 0.5, 0.25)),
        (10, 4, (0.8, 0.6, 0.4, 0.2)),
        (10, 1, (0.5,)),
        (3, 9, (2 / 3, 1 / 3)),
        (2, 4, (0.5,)),
    ],
)
def test_places_of_the_levels(steps: int, levels: int, times: Sequence[float]) -> None:
    _, world = cycle([0.1], steps * 12, steps=steps, starts=1, keep=1, levels=levels, kappa=1)
    until = steps + sum(steps - round(steps * (1 - t)) for t in times)
    sent = [t for t, _ in world.calls[steps:]]
    assert sent[0] == pytest.approx(times[0], abs=1e-6)
    total = sum(n for _, n in world.calls[: world.calls[steps:].index((1.0, 1)) + steps])
    assert total == until, "each image is evaluated from its level on"


def test_a_pool_ends_after_kappa_cycles_that_only_the_lowest_level_won() -> None:
    """With one image and three levels: scores come noisiest level first."""
    lowest = [[0.0, 0.0, 0.2], [0.0, 0.0, 0.3]]  # .25 wins twice
    for kappa, cycles in ((1, 1), (2, 2)):
        scores = [0.1, *sum(lowest[:cycles], []), 0.0]
        _, world = cycle(scores, 4 + cycles * CYCLE + 4, starts=1, keep=1, kappa=kappa)
        assert [n for t, n in world.calls if t == 1.0] == [1, 1], "a new pool"
        assert [t for t, _ in world.calls].index(1.0, 1) == len(world.calls) - 4


def test_a_winner_from_above_keeps_a_pool_alive() -> None:
    """The 1st cycle is won by the lowest level, the 2nd by the middle one, the 3rd and 4th by nobody."""
    scores = [0.1, 0.0, 0.0, 0.2, 0.0, 0.5, 0.3, 0.5, 0.4, 0.5, 0.1, 0.5, 0.5, 0.9]
    search, world = cycle(scores, 4 + 4 * CYCLE + 4, starts=1, keep=1, kappa=2)
    assert [n for t, n in world.calls if t == 1.0] == [1, 1]
    assert [t for t, _ in world.calls].index(1.0, 1) == len(world.calls) - 4, "equal is no win"
    assert search.best is not None and search.best.seed == int(root(3, 2)[1])


def test_all_that_is_kept_counts() -> None:
    """Two are kept: in the first cycle one of them comes from the highest level, though not as the best."""
    scores = [0.3, 0.2, 0.45, *[0.0] * 4, 0.7, *[0.0] * 12, 0.1]
    _, world = cycle(scores, 8 + 3 * 2 * CYCLE + 4, starts=2, keep=2, kappa=2)
    calls = [t for t, _ in world.calls]
    assert calls.index(1.0, 1) == len(calls) - 4, "three cycles: the first explored"


def test_the_best_are_sent_back_and_what_was_kept_stays() -> None:
    """Starts score .1, .9, .5: the 2nd and 3rd go back; nothing better comes: so they do again, by other noise."""
    _, world = cycle([0.1, 0.9, 0.5, *[0.0] * 12], 12 + 2 * 2 * CYCLE, starts=3, keep=2, kappa=5)
    cond = world.encode("")
    x = world.prior(root(3, 3), cond)
    for t, t_next in ((1.0, 0.75), (0.75, 0.5), (0.5, 0.25), (0.25, 0.0)):
        x = ODE()(world.path, t, t_next, x, world.predict(x, t, cond))
    back = [rows for t, rows in world.asked[4:] if t == 0.75 and len(rows) == 2][:2]
    assert len(back) == 2 and not torch.allclose(back[0], back[1])
    for turn, rows in enumerate(back):
        keys = fold(fold(root(3, 3)[1:], STEPS, turn), RENOISE, 1)
        expected = renoise(world.path, 0.0, 0.75, x[1:], normal(fold(keys, NOISE, 1), (6,)))
        torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("keep", [1, 2])
def test_what_a_cycle_costs(keep: int, copies: int) -> None:
    world = Watched()
    nfe = 4 * 4 + keep * copies * CYCLE
    search = run(world, new(world, "cycle", budget=nfe, keep=keep, copies=copies))
    assert search.meter.ledger.nfe == nfe and search.meter.ledger.verifier_calls == 4 + keep * copies * 3


@pytest.mark.parametrize(
    ("left", "levels"), [(1, [0.25]), (2, [0.25]), (3, [0.5, 0.25]), (5, [0.5, 0.25]), (6, [0.75])]
)
def test_the_last_cycle_is_as_large_as_what_is_left(left: int, levels: Sequence[float]) -> None:
    """One image, and too little for all three levels: the lowest first. A rest of 2 sends it to the lowest twice."""
    _, world = cycle([0.0], 4 + left, starts=1, keep=1)
    assert world.evaluations == 4 + left
    assert world.calls[4][0] == levels[0]


@pytest.mark.parametrize("nfe", range(STEPS, 60, 5))
def test_everything_is_spent(nfe: int) -> None:
    world = Watched()
    search = run(world, new(world, "cycle", budget=nfe))
    assert search.meter.ledger.nfe == nfe and search.stopped == "complete"


@pytest.mark.parametrize("calls", [1, 4, 5, 6, 23])
def test_all_verifier_calls_are_used(calls: int) -> None:
    world = Watched()
    search = run(world, new(world, "cycle", budget=Budget(verifier_calls=calls)))
    assert search.meter.ledger.verifier_calls == calls and search.stopped == "complete"


def test_one_step_has_no_level_to_go_back_to() -> None:
    world = Watched()
    search = run(world, new(world, "cycle", budget=9, steps=1))
    assert search.meter.ledger.nfe == 9 and world.batches == [4, 4, 1]


@pytest.mark.parametrize("name", ["starts", "keep", "copies", "levels", "kappa"])
def test_what_options_may_be(name: str) -> None:
    world = Watched()
    with pytest.raises(UserError, match=f"cycle's {name} can't be 0; it must be at least 1"):
        run(world, new(world, "cycle", budget=40, options={name: 0}))
    assert world.batches == []

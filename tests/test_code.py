"""CoDe: blocks of transitions between two choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from imgscale.errors import UserError
from imgscale.kernels import DDIM, ODE
from imgscale.keys import fold, normal
from imgscale.paths import Discrete, Path
from imgscale.problem import NOISE
from tests.doubles import STEPS, Scripted, Watched, new, run

SEARCHED = STEPS - 1

PATHS = [None, Discrete((1 - torch.linspace(0.001, 0.2, 40)).cumprod(0))]


@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("budget", [STEPS, 23, 50, 101])
def test_a_block_of_one_is_svdd(distilled: bool, path: Path | None, budget: int) -> None:
    worlds = [Watched(path=path, shape=(3,)) for _ in range(2)]
    searches = [
        run(world, new(world, name, budget=budget, distilled=distilled, seed=8))
        for world, name in zip(worlds, ("code(block=1)", "svdd"), strict=True)
    ]
    a, b = (search.best for search in searches)
    assert a is not None and b is not None
    assert torch.equal(a.latents, b.latents) and a.score == b.score
    assert worlds[0].places == worlds[1].places
    assert searches[0].meter.ledger.verifier_calls == searches[1].meter.ledger.verifier_calls


def test_children_go_a_block_before_one_is_chosen() -> None:
    """Blocks of 2 transitions and of the 1 that is left; a child is chosen by its reward at the block's end."""
    rewards = [0.1, 0.4, 0.9] + [0.3, 0.7, 0.2] + [0.5]
    world = Watched()
    search = run(
        world,
        new(world, "code", budget=1 + 3 * SEARCHED, children=3, explore=1.0, verifier=Scripted(rewards)),
    )
    assert world.batches == [1, 3, 3, 3]
    assert search.meter.ledger.verifier_calls == 3 * 2 + 1
    fresh = Watched()
    cond = fresh.encode("")
    keys, times = torch.tensor([0]), fresh.grid(STEPS, cond).tolist()
    x = fresh.prior(keys, cond)
    for step, (t, t_next) in enumerate(zip(times, times[1:], strict=False)):
        if step in (0, 2):  # blocks begin here, and children get keys of their own
            keys = fold(keys, step, {0: 2, 2: 1}[step])
        x0 = fresh.predict(x, t, cond)
        noise = normal(fold(keys, NOISE, step + 1), fresh.shape)
        x = DDIM(1)(fresh.path, t, t_next, x, x0, noise) if t_next else ODE()(fresh.path, t, t_next, x, x0)
    assert search.best is not None
    torch.testing.assert_close(search.best.latents, x[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("block", "choices"), [(1, 5), (2, 3), (3, 2), (4, 2), (5, 1), (99, 1)])
def test_longer_blocks_take_fewer_verifier_calls_and_as_many_evaluations(block: int, choices: int) -> None:
    world = Watched()
    budget = 1 + 6 * 5 + 4  # a chain of an ordinary model with 10 steps, half of them searched
    search = run(world, new(world, "code", budget=budget, steps=10, block=block))
    assert search.meter.ledger.nfe == budget
    assert search.meter.ledger.verifier_calls == 6 * choices + 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ode": ({"kernel": "ode"}, "code needs noise to choose from, and the kernel ode has none; take ddim(1) or sde"),
    "block": ({"block": 0}, "code's block can't be 0; it must be at least 1"),
    "children": ({"children": 0}, "code's children can't be 0"),
    "explore": ({"explore": -0.5}, "code's explore can't be -0.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_code_says_what_its_options_may_be(case: str) -> None:
    options, message = REFUSED[case]
    world = Watched()
    with pytest.raises(UserError) as caught:
        run(world, new(world, "code", budget=40, options=options))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert world.batches == []

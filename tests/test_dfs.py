"""Depth-first search: when a chain backs up, how far, how often, and from where it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale import registry
from imgscale.budget import Budget
from imgscale.errors import UserError
from imgscale.kernels import DDIM, ODE, Kernel, renoise
from imgscale.keys import fold, normal, root
from imgscale.problem import NOISE, RENOISE
from imgscale.search import Search
from imgscale.searchers.dfs import _marks
from tests.doubles import STEPS, Reward, Scripted, Watched, new, run

TIMES = (1.0, 0.75, 0.5, 0.25, 0.0)


def dfs(scores: Sequence[float], budget: int, **options: Any) -> tuple[Search, list[tuple[float, int]]]:
    """One chain with one checkpoint at t = .5 unless told otherwise; the time and rows of each evaluation."""
    world = Watched(shape=(3,))
    options = {"chains": 1, "checkpoints": 1, "threshold": 0.5, **options}
    search = run(world, new(world, "dfs", budget=budget, verifier=Scripted(scores), options=options))
    assert search.meter.ledger.nfe == world.evaluations <= budget
    return search, [(call[0][0], len(call)) for call in world.places]


def march(tries: int, kernel: Kernel | None = None, top: int = 1) -> Tensor:
    """The image, by hand, of the seed-0 chain that went back from t = .5 so many times."""
    world, kernel = Watched(shape=(3,)), kernel or DDIM(1)
    cond, keys = world.encode(""), root(0, 1)
    x = world.prior(keys, cond)

    def steps(x: Tensor, start: int, stop: int, kernel: Kernel) -> Tensor:
        for k in range(start, stop):
            noise = normal(fold(keys, NOISE, k + 1), (3,)) if kernel.stochastic else None
            x = kernel(world.path, TIMES[k], TIMES[k + 1], x, world.predict(x, TIMES[k], cond), noise)
        return x

    x = steps(x, 0, 2, kernel)
    for _ in range(tries):
        keys = fold(keys, RENOISE, top)
        x = renoise(world.path, 0.5, TIMES[top], x, normal(fold(keys, NOISE, top), (3,)))
        x = steps(x, top, 2, kernel)
    return steps(x, 2, 4, ODE())[0]


def test_marks() -> None:
    assert [_marks(n, 4) for n in (1, 3, 9)] == [[2], [1, 2, 3], [1, 2, 3]]
    assert _marks(4, 10) == [2, 4, 6, 8] and _marks(3, 2) == [1] and _marks(3, 1) == []


@pytest.mark.parametrize(
    ("scores", "tries"),
    [([0.5], 0), ([0.9], 0), ([0.49, 0.5], 1), ([0.1, 0.2, 0.3, 0.8], 3)],
    ids=str,
)
def test_a_chain_backs_up_exactly_when_it_is_under_the_threshold(scores: list[float], tries: int) -> None:
    search, asked = dfs([*scores, 0.0], STEPS + 2 * tries)
    back = [(0.75, 1), (0.5, 1)]  # one of four transitions: re-noised to .75 and solved to .5 again
    assert asked == [(1.0, 1), *back, *(back * tries), (0.25, 1)]
    assert search.meter.ledger.verifier_calls == tries + 2 - (tries == 0), "no look where there's nothing to pay"
    assert search.best is not None
    torch.testing.assert_close(search.best.latents, march(tries), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backtracks", [0, 1, 3])
def test_as_often_as_allowed(backtracks: int) -> None:
    search, asked = dfs([0.1], 4 + 2 * 3 + 1, backtracks=backtracks)
    assert [t for t, _ in asked[: asked.index((0.25, 1))]].count(0.75) == 1 + backtracks


@pytest.mark.parametrize(
    ("scores", "best"), [([0.3, 0.4, 0.1], 1), ([0.4, 0.4, 0.1], 0), ([0.1, 0.2, 0.3], 2)], ids=str
)
def test_without_backtracks_the_best_seen_there_goes_on(scores: list[float], best: int) -> None:
    search, asked = dfs([*scores, 0.0], STEPS + 4, backtracks=2)
    assert len(asked) == STEPS + 4 and search.best is not None
    torch.testing.assert_close(search.best.latents, march(best), atol=1e-5, rtol=0)


def test_backtracks_are_for_all_checkpoints_together() -> None:
    """Of three backtracks, the first checkpoint takes two; the third has none left to take."""
    scores = [0.1, 0.1, 0.9, 0.2, 0.2, 0.2, 0.0]
    _, asked = dfs(scores, 4 + 2 * 2 + 2 + 1, checkpoints=3, backtracks=3)
    assert [t for t, _ in asked] == [1.0, 0.75, 1.0, 0.75, 1.0, 0.75, 0.5, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(("depth", "top"), [(0.25, 1), (0.26, 0), (0.5, 0), (1.0, 0)])
def test_depth_is_a_share_of_the_transitions_and_ends_at_pure_noise(depth: float, top: int) -> None:
    nfe = STEPS + 1 + 2 - top
    search, asked = dfs([0.1, 0.9, 0.0], nfe, depth=depth)
    assert asked[3][0] == TIMES[top] and len(asked) == nfe
    assert search.best is not None
    torch.testing.assert_close(search.best.latents, march(1, top=top), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("score", "tries"), [(0.4, 1), (0.5, 0), (0.6, 0)])
def test_a_threshold_scaled_by_alpha(score: float, tries: int) -> None:
    """At t = .5 of the linear path alpha is .5: of a threshold of 1, half is enough."""
    _, asked = dfs([score, 0.9, 0.0], STEPS + 2, threshold=1.0, scale="alpha")
    assert [t for t, _ in asked[:7]].count(0.75) == 1 + tries


def test_a_threshold_of_its_own_is_a_quantile_of_what_was_seen() -> None:
    """.1 .2 .3 .4: the upper median is .3. The 1st and the 2nd go back and score .35 and 0; of all six, the upper
    median is .3: the 2nd goes back again."""
    scores = [0.1, 0.2, 0.3, 0.4, 0.35, 0.0, 0.9, 0.0]
    _, asked = dfs(scores, 4 * 4 + 2 * 2 + 2, chains=4, threshold=None)
    assert [n for _, n in asked] == [4, 4, 4, 2, 2, 1, 1, 4]


def test_chains_share_batches_and_keep_apart() -> None:
    """As two seeds: chains with and without a retry are what they are alone."""
    world = Watched(shape=(3,))
    options = {"chains": 2, "checkpoints": 1, "threshold": 0.5}
    verifier = Scripted([0.1, 0.9, 0.9, 0.7, 0.6])  # the 1st goes back once; its image is the better one
    search = run(world, new(world, "dfs", budget=2 * 4 + 2, verifier=verifier, options=options))
    assert world.batches == [2, 2, 2, 1, 1, 2] and search.best is not None and search.best.seed == 0
    torch.testing.assert_close(search.best.latents, march(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("spare", "retried"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (6, 3)])
def test_no_more_go_back_than_what_is_left_pays_for(spare: int, retried: int) -> None:
    search, asked = dfs([0.1], 3 * 4 + spare, chains=3, backtracks=1)
    assert asked[3:5] == ([(0.75, retried), (0.5, retried)] if retried else [(0.25, 3)])
    assert search.stopped == "complete"


def test_without_noise_in_the_steps_trials_differ_by_re_noising() -> None:
    search, _ = dfs([0.1, 0.9, 0.0], STEPS + 2, kernel="ode")
    assert search.best is not None
    torch.testing.assert_close(search.best.latents, march(1, ODE()), atol=1e-5, rtol=0)
    plain, _ = dfs([0.9, 0.0], STEPS, kernel="ode")
    assert plain.best is not None
    torch.testing.assert_close(plain.best.latents, march(0, ODE()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("calls", [1, 2, 5, 9, 20])
@pytest.mark.parametrize("distilled", [False, True])
def test_all_verifier_calls_are_used(calls: int, distilled: bool) -> None:
    world = Watched()
    search = run(world, new(world, "dfs", budget=Budget(verifier_calls=calls), distilled=distilled))
    assert search.meter.ledger.verifier_calls == calls and search.stopped == "complete"


@pytest.mark.parametrize("nfe", range(STEPS, 60, 7))
def test_less_than_a_sample_is_left(nfe: int) -> None:
    world = Watched()
    search = run(world, new(world, "dfs", budget=nfe))
    assert nfe - search.meter.ledger.nfe < STEPS and search.stopped == "complete"


@pytest.mark.parametrize("guide", [entry.name for entry in registry.guide])
@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("budget", [4, 7, 13, 30, Budget(verifier_calls=30), Budget(nfe=60, gradients=9)], ids=str)
def test_guides_bend_its_steps_within_any_budget(guide: str, distilled: bool, budget: int | Budget) -> None:
    """One that takes more gradients than are reckoned with may end the search, in good order."""
    world, verifier = Watched(), Reward()
    verifier.differentiable = True
    search = run(world, new(world, f"dfs+{guide}", budget=budget, distilled=distilled, verifier=verifier))
    ledger = search.meter.ledger
    assert all(search.meter.left(kind) >= 0 for kind in ("nfe", "verifier_calls", "decodes", "gradients"))
    assert ledger.gradients > 0 or budget == 4 or distilled, "the guide had its say"
    assert search.best is not None and search.best.finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chains": 0}, "chains can't be 0; it must be at least 1"),
        ({"checkpoints": 0}, "checkpoints can't be 0; it must be at least 1"),
        ({"backtracks": -1}, r"backtracks \(-1\) not negative"),
        ({"depth": 0.0}, r"depth \(0.0\) must be above 0"),
        ({"quantile": 2.0}, r"quantile \(2.0\) from 0 to 1"),
        ({"kernel": "euler"}, "Unknown kernel 'euler'"),
        ({"scale": "beta"}, "give 'constant' or 'alpha'"),
    ],
    ids=str,
)
def test_what_options_may_be(options: dict[str, Any], message: str) -> None:
    world = Watched()
    with pytest.raises(UserError, match=message):
        run(world, new(world, "dfs", budget=40, options=options))
    assert world.batches == []

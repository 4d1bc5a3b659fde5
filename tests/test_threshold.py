"""Verifier-threshold: when it goes on, what it draws, and when it is done."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from imgscale import registry
from imgscale.budget import Budget
from imgscale.errors import UserError
from imgscale.keys import root
from imgscale.paths import VP, Linear
from imgscale.search import Search
from imgscale.searchers.threshold import bar
from tests.doubles import STEPS, Reward, Scripted, Watched, new, run
from tests.test_searchers import VP_TIMES, by_hand

PLACES = (0.75, 0.5, 0.25)


def chain(scores: Sequence[float], budget: int, **options: Any) -> tuple[Search, Watched]:
    """A search over all transitions, by single draws unless told otherwise, on scripted rewards."""
    world = Watched()
    options = {"explore": 1.0, "draws": 1, **options}
    return run(world, new(world, "threshold", budget=budget, verifier=Scripted(scores), options=options)), world


def drawn(world: Watched) -> list[tuple[float, int]]:
    """The time and the number of rows of each evaluation."""
    return [(call[0][0], len(call)) for call in world.places]


def test_a_quantile_is_one_of_those_seen() -> None:
    seen = [0.3, 0.1, -math.inf, 0.5, 0.2]
    assert [bar(seen, None, q) for q in (0.0, 0.25, 0.3, 0.5, 0.8, 1.0)] == [-math.inf, 0.1, 0.2, 0.2, 0.5, 0.5]
    assert bar([-math.inf] * 3, None, 0.8) == -math.inf and bar([0.4], None, 0.5) == 0.4
    assert bar(seen, 0.9, 0.0) == 0.9


def test_it_goes_on_exactly_when_the_threshold_is_passed() -> None:
    # To pass: .5. 1st place: .1, .5 (equal passes). 2nd: .7. 3rd: .2, .49, .9. The image scores .3, which isn't enough.
    search, world = chain([0.1, 0.5, 0.7, 0.2, 0.49, 0.9, 0.3], 1 + 6, threshold=0.5)
    at = Counter(t for call in world.places for t, _ in call)
    assert [at[t] for t in (1.0, *PLACES)] == [1, 2, 1, 3]
    assert search.meter.ledger.nfe == 7 and search.meter.ledger.verifier_calls == 7
    assert search.best is not None
    torch.testing.assert_close(search.best.latents, by_hand(Watched(), torch.tensor([0]), [1, 0, 2]), atol=1e-5, rtol=0)


def test_an_image_that_passes_ends_the_search() -> None:
    search, _ = chain([0.6], 100, threshold=0.5)
    assert search.meter.ledger.nfe == STEPS and search.stopped == "complete"
    search, _ = chain([0.6], 100, threshold=0.7)
    assert search.meter.ledger.nfe > 100 - STEPS
    search, _ = chain([0.6], 100)
    assert search.meter.ledger.nfe > 100 - STEPS, "no end without a threshold"


def test_after_the_most_draws_the_best_must_do() -> None:
    scores = [0.1, 0.3, 0.2, 0.2, 0.1, 0.0, 0.0, 0.1, 0.4, 0.0]
    search, world = chain(scores, 10, threshold=0.9, most=3)
    assert drawn(world) == [(t, 1) for t in (1.0, *[0.75] * 3, *[0.5] * 3, *[0.25] * 3)]
    assert search.best is not None
    torch.testing.assert_close(search.best.latents, by_hand(Watched(), torch.tensor([0]), [1, 0, 2]), atol=1e-5, rtol=0)


def test_the_best_of_a_batch_is_taken_and_all_of_it_charged() -> None:
    scores = [0.1, 0.2, 0.3, 0.6, 0.9, 0.7, *[0.8] * 6, 0.0]
    search, world = chain(scores, 1 + 6 + 3 + 3, threshold=0.5, draws=3)
    assert drawn(world) == [(1.0, 1), (0.75, 3), (0.75, 3), (0.5, 3), (0.25, 3)]
    assert search.best is not None
    torch.testing.assert_close(search.best.latents, by_hand(Watched(), torch.tensor([0]), [4, 0, 0]), atol=1e-5, rtol=0)


def test_each_place_learns_its_own_threshold() -> None:
    """Quantile 1: the best so far at the place. One place is searched; the second chain has to reach the first's .4."""
    scores = [0.2, 0.4, 0.9, 0.1, 0.3, 0.3, 0.4, 0.8, 0.5, 0.0]
    _, world = chain(scores, 2 * (1 + 2 + 2) + 2, draws=2, quantile=1.0, explore=0.3, most=9)
    assert drawn(world) == [
        *[(1.0, 1), (0.75, 2), (0.5, 1), (0.25, 1)],  # .2 .4 passes at once; the image .9 counts for nothing there
        *[(1.0, 1), (0.75, 2), (0.75, 2), (0.5, 1), (0.25, 1)],  # .1 .3 doesn't pass, .3 .4 does
    ]


def test_what_is_left_bounds_the_draws() -> None:
    """Nothing passes: what one draw at each of two later places doesn't need all goes to the first place."""
    _, world = chain([0.0], 9, threshold=1.0, most=100)
    assert drawn(world) == [(t, 1) for t in (1.0, *[0.75] * 6, 0.5, 0.25)]


def test_defaults_by_what_the_model_is() -> None:
    world = Watched()
    run(world, new(world, "threshold", budget=40, steps=10))
    at = Counter(round(t, 6) for call in world.places for t, _ in call)
    assert [t for t in sorted(at) if at[t] > at[1.0]] == [0.5, 0.6, 0.7, 0.8, 0.9], "the first half is searched"

    world = Watched()
    run(world, new(world, "threshold", budget=100, distilled=True, verifier=Scripted([0.0])))
    at = Counter(round(t, 6) for call in world.places for t, _ in call)
    times = [round(float(Linear().time_at(VP().log_snr(t))), 6) for t in VP_TIMES[:10]]
    assert all(at[t] >= 4 for t in times[:5]), "starting noises, too, are drawn four at a time"


def test_starting_noises_of_a_distilled_model_are_drawn_until_one_passes() -> None:
    world = Watched()
    options = {"draws": 2, "threshold": 0.5, "path": "own"}
    scores = [0.1, 0.2, 0.3, 0.7, 0.6, 0.1, 0.6, 0.2, 0.6, 0.1, 0.9]
    search = run(
        world, new(world, "threshold", budget=30, distilled=True, verifier=Scripted(scores), options=options, seed=4)
    )
    assert drawn(world) == [(1.0, 2), (1.0, 2), (0.75, 2), (0.5, 2), (0.25, 2)]
    assert search.best is not None and search.best.seed == int(root(4, 4)[3])


@pytest.mark.parametrize("calls", [1, 2, 3, 9, 20])
@pytest.mark.parametrize("distilled", [False, True])
def test_all_verifier_calls_are_used(calls: int, distilled: bool) -> None:
    world = Watched()
    search = run(world, new(world, "threshold", budget=Budget(verifier_calls=calls), distilled=distilled))
    assert search.meter.ledger.verifier_calls == calls and search.stopped == "complete"


@pytest.mark.parametrize("nfe", range(STEPS, 50, 7))
def test_less_than_a_sample_is_left(nfe: int) -> None:
    world = Watched()
    search = run(world, new(world, "threshold", budget=nfe))
    assert nfe - search.meter.ledger.nfe < STEPS and search.stopped == "complete"


@pytest.mark.parametrize("guide", [entry.name for entry in registry.guide])
@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("budget", [4, 7, 13, 30, Budget(verifier_calls=30), Budget(nfe=60, gradients=9)], ids=str)
def test_guides_bend_its_steps_within_any_budget(guide: str, distilled: bool, budget: int | Budget) -> None:
    """One that takes more gradients than are reckoned with may end the search, in good order."""
    world, verifier = Watched(), Reward()
    verifier.differentiable = True
    search = run(world, new(world, f"threshold+{guide}", budget=budget, distilled=distilled, verifier=verifier))
    ledger = search.meter.ledger
    assert all(search.meter.left(kind) >= 0 for kind in ("nfe", "verifier_calls", "decodes", "gradients"))
    assert ledger.gradients > 0 or budget == 4 or distilled, "the guide had its say"
    assert search.best is not None and search.best.finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "ode"}, "threshold needs noise to choose from, and the kernel ode has none"),
        ({"quantile": 1.5}, "quantile can't be 1.5; give a number from 0 to 1"),
        ({"draws": 0}, "draws can't be 0; it must be at least 1"),
        ({"most": 0}, "most can't be 0; it must be at least 1"),
        ({"explore": 0.0}, "explore can't be 0.0"),
    ],
    ids=str,
)
def test_what_options_may_be(options: dict[str, Any], message: str) -> None:
    world = Watched()
    with pytest.raises(UserError, match=message):
        run(world, new(world, "threshold", budget=40, options=options))
    assert world.batches == []

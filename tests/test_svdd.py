"""SVDD: which child is chosen, what chains cost, and its special cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from imgscale.budget import Budget
from imgscale.errors import UserError
from imgscale.kernels import kernel as read
from imgscale.keys import root
from imgscale.paths import VP, Linear
from tests.doubles import STEPS, Reward, Scripted, Watched, new, run
from tests.test_searchers import VP_TIMES, by_hand, plain_samples

SEARCHED = STEPS - 1  # transitions with an evaluation at their end, on the model's own path


def latents(*args: Any, **settings: Any) -> torch.Tensor:
    world = Watched(shape=(3,))
    best = run(world, new(world, *args, **settings)).best
    assert best is not None
    return best.latents


def test_the_best_child_goes_on() -> None:
    rewards = [0.1, 0.5, 0.2] + [0.3, 0.2, 0.1] + [0.2, 0.4, 0.6] + [0.6]
    world = Watched()
    search = run(
        world,
        new(world, "svdd", budget=1 + 3 * SEARCHED, children=3, explore=1.0, verifier=Scripted(rewards)),
    )
    assert world.batches == [1, 3, 3, 3]
    assert search.best is not None and search.meter.ledger.verifier_calls == 3 * SEARCHED + 1
    expected = by_hand(Watched(), torch.tensor([0]), [1, 0, 2])
    torch.testing.assert_close(search.best.latents, expected, atol=1e-5, rtol=0)


def test_of_equal_children_the_first_goes_on_and_a_chain_may_fall_back() -> None:
    rewards = [0.9, 0.9, 0.1] + [0.3, 0.2, 0.3] + [0.2, 0.2, 0.2] + [0.6]
    world = Watched()
    search = run(
        world,
        new(world, "svdd", budget=1 + 3 * SEARCHED, children=3, explore=1.0, verifier=Scripted(rewards)),
    )
    assert search.best is not None
    expected = by_hand(Watched(), torch.tensor([0]), [0, 0, 0])
    torch.testing.assert_close(search.best.latents, expected, atol=1e-5, rtol=0)


def test_chains_never_meet() -> None:
    """Each of two chains chooses among its own children, though all of the second score more."""
    rewards = [0.1, 0.2, 0.8, 0.7] + [0.2, 0.1, 0.7, 0.8] + [0.1, 0.2, 0.7, 0.8] + [0.9, 0.5]
    world = Watched()
    search = run(
        world,
        new(world, "svdd", budget=2 * (1 + 2 * SEARCHED), chains=2, explore=1.0, verifier=Scripted(rewards)),
    )
    assert world.batches == [2, 4, 4, 4]
    assert search.best is not None and search.best.seed == 0
    expected = by_hand(Watched(), torch.tensor([0]), [1, 0, 1])
    torch.testing.assert_close(search.best.latents, expected, atol=1e-5, rtol=0)


def test_the_best_start_is_taken() -> None:
    rewards = [0.2, 0.9, 0.1] + [0.5, 0.4] + [0.4, 0.5] + [0.4, 0.5] + [0.6]
    world = Watched()
    search = run(
        world,
        new(
            world,
            "svdd",
            budget=3 + 2 * SEARCHED,
            starts=3,
            children=2,
            explore=1.0,
            verifier=Scripted(rewards),
        ),
    )
    key = root(0, 3)[1]
    assert search.best is not None and search.best.seed == int(key)
    expected = by_hand(Watched(), key[None], [0, 1, 1])
    torch.testing.assert_close(search.best.latents, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", ["ddim(1)", "ddim(0.5)", "sde(g=3t^2)"])
@pytest.mark.parametrize("explore", [0.3, 0.5, 1.0])
def test_one_child_is_a_plain_stochastic_sample(kernel: str, explore: float) -> None:
    searched = {0.3: 1, 0.5: 2, 1.0: 3}[explore]
    found = latents("svdd", budget=STEPS, children=1, explore=explore, kernel=kernel, seed=21)
    expected = by_hand(Watched(shape=(3,)), torch.tensor([21]), [0] * searched, read(kernel))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(found, plain_samples(Watched(shape=(3,)), 21, 1)[0], atol=1e-2)


def test_only_the_first_transitions_are_searched_and_the_rest_is_solved() -> None:
    world = Watched()
    run(world, new(world, "svdd", budget=1 + 2 * 5 + 1, children=5))
    assert world.batches == [1, 5, 5, 1], "half of three transitions, rounded up"


def test_score_and_image_travel_together() -> None:
    """Along the chain the previews of what was chosen are the best of each batch, and the image is the last one's."""
    verifier = Reward()
    world = Watched(shape=(4,))
    search = run(world, new(world, "svdd", budget=1 + 8 * SEARCHED, children=8, explore=1.0, verifier=verifier))
    *previews, image = verifier.given
    assert search.best is not None
    # The last transition leads to x0 itself, so that the image is the best preview of the last batch.
    assert float(image[0]) == pytest.approx(float(previews[-1].max()), abs=1e-5)
    assert search.best.score == pytest.approx(float(image[0]), abs=1e-5)


# -------------------------------------------------------------------------------------------------- defaults and sizes


def test_defaults_by_what_the_model_is() -> None:
    """Ordinary: its own path, 6 children, half the transitions, one start. Distilled: VP, 25 of all, starts too."""
    world = Watched()
    run(world, new(world, "svdd", budget=1 + 6 * 5 + 4, steps=10))
    assert world.batches == [1, *[6] * 5, *[1] * 4]
    assert {round(t, 6) for call in world.places for t, _ in call} == {k / 10 for k in range(1, 11)}

    world = Watched()
    tail = 2  # of the own times .75, .5 and .25, those below the linear time .709 where the search ends
    run(world, new(world, "svdd", budget=25 * 10 + tail, distilled=True))
    assert world.batches == [*[25] * 10, *[1] * tail]
    expected = [float(Linear().time_at(VP().log_snr(t))) for t in VP_TIMES[:10]] + [0.5, 0.25]
    torch.testing.assert_close([call[0][0] for call in world.places], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("budget", "options", "rounds"),
    [
        # A chain of k children takes 1 + 3 k; what is left buys one with fewer, and then plain samples of 4.
        (2 * 19, {"children": 6}, [(2, 6)]),
        (2 * 19 + 10, {"children": 6}, [(2, 6), (1, 3)]),
        (2 * 19 + 6, {"children": 6}, [(2, 6)]),
        (17, {"children": 6}, [(1, 5)]),
        (17, {}, [(1, 5)]),
        # Two chains share the budget: (1 + 3 k) 2.
        (50, {"chains": 2}, [(2, 8)]),
        (80, {"chains": 3}, [(3, 8)]),
        # Both given: at most two at a time.
        (4 * 10, {"chains": 2, "children": 3}, [(2, 3), (2, 3)]),
        # A batch holds 32 rows.
        (7 * 19, {}, [(5, 6), (2, 6)]),
    ],
)
def test_chains_and_children_follow_from_the_budget(
    budget: int, options: dict[str, int], rounds: list[tuple[int, int]]
) -> None:
    world = Watched()
    search = run(world, new(world, "svdd", budget=budget, explore=1.0, options=options), max_batch=1000)
    expected = [size for n, width in rounds for size in (n, *[n * width] * SEARCHED)]
    assert world.batches[: len(expected)] == expected
    rest = budget - sum(n * (1 + SEARCHED * width) for n, width in rounds)
    assert world.batches[len(expected) :] == [rest // STEPS] * STEPS * (rest >= STEPS), "plain samples of the rest"
    assert search.stopped == "complete"


@pytest.mark.parametrize("calls", range(1, 24))
def test_the_verifiers_limit_sizes_chains_too(calls: int) -> None:
    world = Watched()
    search = run(world, new(world, "svdd", budget=Budget(verifier_calls=calls), children=4, explore=1.0))
    assert search.meter.ledger.verifier_calls == calls and search.stopped == "complete"


def test_a_budget_for_one_image_is_a_plain_sample() -> None:
    for budget in range(STEPS, 7):
        assert torch.equal(latents("svdd", budget=budget, explore=1.0), latents("best-of-n", budget=STEPS))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ode": ({"kernel": "ode"}, "svdd needs noise to choose from, and the kernel ode has none; take ddim(1) or sde"),
    "explore": ({"explore": 1.1}, "svdd's explore can't be 1.1; give a share above 0 and up to 1"),
    "children": ({"children": 0}, "svdd's children can't be 0; it must be at least 1"),
    "chains": ({"chains": -1}, "svdd's chains can't be -1"),
    "starts": ({"starts": 0}, "svdd's starts can't be 0"),
    "path": ({"path": "cosine"}, "option path can't be 'cosine'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_svdd_says_what_its_options_may_be(case: str) -> None:
    options, message = REFUSED[case]
    world = Watched()
    with pytest.raises(UserError) as caught:
        run(world, new(world, "svdd", budget=40, options=options))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert world.batches == [], "refused before anything was spent"


def test_svdd_beats_best_of_n_where_previews_tell() -> None:
    gains = []
    for seed in range(20):
        found, plain = (
            run(world, new(world, name, budget=40, seed=seed)).best
            for name, world in (("svdd", Watched(shape=(12,))), ("best-of-n", Watched(shape=(12,))))
        )
        assert found is not None and plain is not None
        gains.append(found.score - plain.score)
    gain = torch.tensor(gains)
    assert gain.mean() > 0.2 and (gain > 0).sum() >= 14

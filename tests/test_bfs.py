"""BFS: where nodes are scored, how many children they get, and what the tempered form is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from imgscale.errors import UserError
from imgscale.resampling import rounded, weights
from imgscale.searchers.bfs import FORMS, prune
from tests.doubles import STEPS, Reward, Scripted, Watched, new, run


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("steps", "levels", "times"),
    [
        (10, 4, [0.8, 0.6, 0.4, 0.2]),
        (20, 4, [0.8, 0.6, 0.4, 0.2]),
        (10, 1, [0.5]),
        (10, 2, [0.7, 0.3]),
        (4, 4, [0.75, 0.5]),
    ],
)
def test_nodes_are_scored_at_their_levels(form: str, steps: int, levels: int, times: list[float]) -> None:
    """At 20, 40, 60 and 80% of the trajectory by default, as far as a transition follows; and the images."""
    scored: list[float] = []
    world = Watched(render=lambda n: scored.append(world.places[-1][0][0]))
    verifier, options = Scripted([0.5]), {"levels": levels, "form": form}
    search = run(world, new(world, "bfs", budget=8 * steps, steps=steps, verifier=verifier, options=options))
    assert scored[:-1] == pytest.approx(times)
    assert [len(images) for images in verifier.seen] == [8] * (len(times) + 1)
    assert search.meter.ledger.nfe == 8 * steps


def test_the_tempered_form_is_smc() -> None:
    """With the maximum as its potential, an increasing strength and SSP: here at all places, to compare them."""
    published: dict[str, Any] = {"potential": "max", "tempering": "increase", "resampler": "ssp", "explore": 1.0}
    for seed in range(5):
        worlds = [Watched(shape=(3,)) for _ in range(2)]
        bfs = run(worlds[0], new(worlds[0], "bfs", budget=50, seed=seed, levels=3))
        smc = run(worlds[1], new(worlds[1], "smc", budget=50, seed=seed, options=published))
        assert bfs.best is not None and smc.best is not None
        assert torch.equal(bfs.best.latents, smc.best.latents) and worlds[0].places == worlds[1].places


def test_children_by_rounding_add_up_and_go_to_the_best() -> None:
    """Rewards log 4, log 2 and twice log 1 make expected counts of 2, 1, .5 and .5: the first of equals gets one."""
    rewards = [float(np.log(w)) for w in (4, 2, 1, 1)]
    world, verifier = Watched(), Reward()
    options = {"form": "resample", "levels": 1, "strength": 1.0, "standardise": False, "tempering": "constant"}
    script = Scripted([*rewards, 0.1, 0.2, 0.3, 0.9])
    search = run(world, new(world, "bfs", budget=4 * STEPS, particles=4, verifier=script, options=options))
    assert world.batches == [4] * STEPS and verifier.images == 0
    assert search.best is not None
    third = new(world, "best-of-n", budget=4).problem.prior(4).seeds[2]
    assert search.best.seed == int(third), "children of the nodes 0, 0, 1 and 2; the last was best"


def test_pruning_thins_out_and_buys_more_trees() -> None:
    # Weights of 15 and seven of 1: expected counts of 5.45 and .36, so that one of 8 nodes is left after 5 evaluations,
    # and takes 3 more. 64 - 43 = 21 evaluations are left, for a tree of 2, whose equal nodes both stay.
    rewards = [float(np.log(w)) for w in (15, 1, 1, 1, 1, 1, 1, 1)]
    options = {"form": "prune", "levels": 1, "strength": 1.0, "standardise": False, "tempering": "constant"}
    world = Watched()
    script = Scripted([*rewards, 0.1, 0.0])
    search = run(world, new(world, "bfs", budget=64, steps=8, verifier=script, options=options))
    assert world.batches == [8] * 5 + [1] * 3 + [2] * 8
    assert search.best is not None and search.best.seed == 0 and search.best.score == pytest.approx(0.1)


def test_counts_of_the_forms() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        log_w = rng.normal(scale=2, size=7)
        expected = 7 * weights(log_w)
        assert (prune(log_w) == (np.rint(expected) > 0)).all() and prune(log_w).sum() >= 1
        assert rounded(log_w).sum() == 7 and (np.abs(rounded(log_w) - expected) < 1).all()
    assert prune(np.array([0.0, -np.inf])).tolist() == [1, 0]
    assert prune(np.full(3, -np.inf)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("distilled", [False, True])
def test_every_form_fits_any_budget_and_beats_a_plain_sample(form: str, distilled: bool) -> None:
    gains = []
    for seed, budget in enumerate([STEPS, 9, 17, 40, 60, 60, 60, 100, 100]):
        world = Watched(shape=(4,))
        search = run(world, new(world, "bfs", budget=budget, form=form, distilled=distilled, seed=seed))
        plain = run(world, new(world, "best-of-n", budget=STEPS, seed=seed)).best
        assert search.meter.left("nfe") >= 0 and search.best is not None and plain is not None
        gains.append(search.best.score - plain.score)
    assert np.mean(gains) > 0.3


@pytest.mark.parametrize("form", FORMS)
def test_dead_nodes_have_no_children(form: str) -> None:
    world = Watched(spoil=lambda x: x[:, 0] > 1.0)
    search = run(world, new(world, "bfs", budget=120, form=form))
    assert search.best is not None and search.best.finished and np.isfinite(search.best.score)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ode": ({"kernel": "ode"}, "bfs needs noise to choose from, and the kernel ode has none; take ddim(1) or sde"),
    "levels": ({"levels": 0}, "bfs's levels can't be 0; it must be at least 1"),
    "particles": ({"particles": 0}, "bfs's particles can't be 0; it must be at least 1"),
    "strength": ({"strength": -1.0}, "bfs's strength can't be -1.0; give a number above 0"),
    "form": ({"form": "beam"}, "option form can't be 'beam'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bfs_says_what_its_options_may_be(case: str) -> None:
    options, message = REFUSED[case]
    world = Watched()
    with pytest.raises(UserError) as caught:
        run(world, new(world, "bfs", budget=40, options=options))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert world.batches == []

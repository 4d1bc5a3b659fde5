"""Ensembles: what they make of their members' scores, and how the engine ranks the images of one search by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import imgscale
from imgscale import journal as journals
from imgscale import registry, verification
from imgscale.budget import Budget
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.journal import Journal
from imgscale.search import Search
from imgscale.verifiers.ensemble import Ensemble
from tests.doubles import Reward, Watched, as_denoiser, near_one, new, run, stop_after

SAID = torch.tensor([[3.0, 10.0], [1.0, 10.0], [2.0, 30.0], [2.0, -5.0], [7.0, 0.0]], dtype=torch.float64)


def mean(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.flatten(1).mean(1)


def pair(combine: Any = "rank", **options: Any) -> Ensemble:
    return Ensemble(of=[Reward(near_one, "near"), Reward(mean, "mean")], combine=combine, **options)


# ------------------------------------------------------------------------------------------------------ arithmetic


def mid_ranks(seen: Tensor) -> np.ndarray[Any, Any]:
    return (stats.rankdata(seen.numpy(), axis=0) - 0.5) / len(seen)


def test_mean_rank() -> None:
    assert np.allclose(pair().combine(SAID, SAID), mid_ranks(SAID).mean(1))
    assert np.allclose(pair(weights="3:1").combine(SAID[1:3], SAID), (mid_ranks(SAID) @ [0.75, 0.25])[1:3])


def test_worst_rank_and_product() -> None:
    assert np.allclose(pair("min").combine(SAID, SAID), mid_ranks(SAID).min(1))
    assert np.allclose(pair("product").combine(SAID, SAID), stats.gmean(mid_ranks(SAID), axis=1))
    assert np.allclose(
        pair("product", weights=[1, 3]).combine(SAID, SAID), stats.gmean(mid_ranks(SAID), axis=1, weights=[1, 3])
    )


def test_z_scores() -> None:
    assert np.allclose(pair("zscore").combine(SAID, SAID), stats.zscore(SAID.numpy()).mean(1))
    constant = SAID.clone()
    constant[:, 1] = 4.0
    assert np.allclose(pair("zscore").combine(constant, constant), stats.zscore(SAID.numpy())[:, 0] / 2)


@pytest.mark.parametrize("combine", ["rank", "zscore", "min", "product"])
def test_no_member_weighs_more_for_its_unit(combine: Any) -> None:
    scaled = SAID * torch.tensor([1.0, 1000.0]) + torch.tensor([0.0, -77.0])
    assert torch.allclose(pair(combine).combine(scaled, scaled), pair(combine).combine(SAID, SAID))


def test_called_alone_it_compares_images_of_one_prompt() -> None:
    ensemble, images = pair(), torch.rand(5, 3, 1, 2)
    together = ensemble(images, ["a", "b", "a", "b", "a"])
    assert together.dtype == torch.float32
    for rows in ([0, 2, 4], [1, 3]):
        assert torch.equal(together[rows], ensemble(images[rows], ["a"] * len(rows)))
    assert ensemble(images[:0], []).shape == (0,)


# ---------------------------------------------------------------------------------------------------- in a search


def best_of(world: Watched, ensemble: Any, budget: int = 40, **more: Any) -> Search:
    return new(world, "best-of-n", verifier=ensemble, budget=budget, **more)


@pytest.mark.parametrize("combine", ["rank", "zscore", "min", "product"])
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_the_winner_is_the_best_among_all_images(combine: Any, batch: int) -> None:
    world = Watched()
    ensemble = pair(combine)
    search = run(world, best_of(world, ensemble), max_batch=batch)
    images = torch.cat(ensemble.parts[0].seen)  # type: ignore[attr-defined]
    said = torch.stack([near_one(images, []), mean(images, []).double()], 1)
    scores = ensemble.combine(said, said)
    assert search.best is not None and len(said) == 10
    winner = int(scores.argmax())
    assert torch.equal(search.best.image, images[winner])
    assert search.best.score == pytest.approx(float(scores[winner]))
    assert search.best.report == pytest.approx({"near": float(said[winner, 0]), "mean": float(said[winner, 1])})
    assert search.meter.ledger.verifier_calls == 10


def test_the_best_so_far_is_ranked_anew_as_more_is_seen() -> None:
    """Best of one image has rank 1/2 whatever it is; later that would lose to a worse one."""
    script = [[0.0, 0.0], [5.0, 5.0], [4.0, 4.0], [-1.0, -1.0], [3.0, 3.0], [-2.0, -2.0]]
    search = best_of(Watched(), pair())
    for row in script:
        scores = search.reward(torch.tensor([row], dtype=torch.float64))
        if search.best is None or float(scores[0]) > search.best.score:
            search.crown(torch.zeros(1, 3, 1, 1), torch.zeros(1, 1), scores, torch.zeros(1, dtype=torch.int64), 0)
    assert search.best is not None and search.best.report == {"near": 5.0, "mean": 5.0}
    assert search.best.score == pytest.approx(1 - 0.5 / len(script))


def test_searches_side_by_side_do_not_mix() -> None:
    world = Watched()
    alone = run(world, best_of(world, pair(), seed=1))
    ensemble = pair()
    both = [best_of(world, ensemble, seed=seed) for seed in (1, 2)]
    run(world, *both)
    assert alone.best is not None and both[0].best is not None
    assert both[0].best.score == alone.best.score and torch.equal(both[0].best.image, alone.best.image)


@pytest.mark.parametrize("searcher", ["best-of-n", "rbf", "smc"])
def test_resumes(searcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "EVERY", 2)
    world = Watched()

    def start() -> Search:
        return new(world, searcher, verifier=pair(), budget=40, reports=[Reward(mean, "held out")])

    def play(search: Search, **hooks: Any) -> Search:
        search.meter.restart()
        Engine(as_denoiser(world)).run([search], journal=Journal(tmp_path / "j", {}), **hooks)
        return search

    straight = run(world, start())
    play(start(), stop=stop_after(straight.rounds // 2))
    resumed = play(start())
    assert straight.best is not None and resumed.best is not None
    assert resumed.best.score == straight.best.score
    assert resumed.best.report == straight.best.report and len(straight.best.report) == 3
    assert [p.score for p in resumed.trace] == [p.score for p in straight.trace]
    assert torch.equal(resumed.best.image, straight.best.image)


def test_what_a_member_cannot_score_is_never_ranked() -> None:
    def sometimes(images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = mean(images, prompts)
        scores[scores < scores.median()] = math.nan
        return scores

    world = Watched()
    search = run(world, best_of(world, Ensemble(of=[Reward(near_one, "near"), Reward(sometimes, "some")])))
    assert search.best is not None and math.isfinite(search.best.score)
    assert "some gave NaN" in " ".join(search.events)
    assert search.seen is not None and bool(search.seen.isfinite().all()) and 0 < len(search.seen) < 10


def test_a_member_that_always_fails_ends_the_search_in_words() -> None:
    def broken(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise RuntimeError("it is down")

    world = Watched()
    ensemble = Ensemble(of=[Reward(near_one, "near"), Reward(broken, "broken")])
    search = run(world, new(world, "rbf", verifier=ensemble, budget=Budget(nfe=400)))
    assert search.stopped == "verifier" and search.best is not None
    assert "broken failed" in " ".join(search.events)


def test_the_plain_image_is_ranked_among_the_searched_ones() -> None:
    scaler = imgscale.load("shapes-turbo")
    prompt = "two red circles and a blue square"
    output = scaler(prompt, verifier="clip+shapes", report=["clip"], budget=24, searcher="best-of-n", progress=False)
    assert list(output.scores) == ["clip+shapes", "clip", "shapes"] and output.members == ["clip", "shapes"]
    assert output.plain is not None and list(output.plain.scores) == ["clip+shapes", "clip", "shapes"]
    better = output.scores["clip"] > output.plain.scores["clip"]
    assert better == (output.scores["clip+shapes"] > output.plain.scores["clip+shapes"])
    assert output.settings["verifiers"]["clip+shapes"]["of"].keys() == {"clip", "shapes"}


# ---------------------------------------------------------------------------------------------------------- names


def test_names() -> None:
    short = verification.make("clip(dtype=float32)+shapes")
    assert short.name == "clip(dtype=float32)+shapes" and short.reads_prompt and short.range is None
    long = verification.make("ensemble(of=clip+shapes, combine=zscore, weights=1:2)")
    assert long.name == "ensemble(of=clip+shapes, combine=zscore, weights=1:2)"
    assert long.identity()["weights"] == pytest.approx([1 / 3, 2 / 3])
    assert list(registry.judges("clip+shapes")) == ["clip", "shapes"]
    assert list(registry.judges("ensemble(of=clip(dtype=float32)+shapes)")) == ["clip(dtype=float32)", "shapes"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("clip+", "'clip\\+' is no name"),
        ("ensemble", "An ensemble can't be of"),
        ("ensemble(of=clip)", "give two verifiers or more"),
        ("clip+clip", "give each once"),
        ("clip+nothing", "Unknown verifier 'nothing'"),
        ("clip+ensemble(of=clip+shapes)", "can't be a member of another"),
        ("ensemble(of=clip+shapes, weights=1)", "weights of 2 members can't be '1'"),
        ("ensemble(of=clip+shapes, weights=1:-2)", "give 2 numbers above 0"),
        ("ensemble(of=clip+shapes, combine=min, weights=1:2)", "worst rank has no weights"),
        ("ensemble(of=clip+shapes, combine=max)", "max"),
    ],
)
def test_bad_names(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        verification.make(spec)


def test_an_ensemble_cannot_report() -> None:
    with pytest.raises(UserError, match="can't report"):
        imgscale.load("shapes-turbo")("a red circle", report=["clip+shapes"], budget=4, progress=False)

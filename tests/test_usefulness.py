"""Usefulness: the curves of analytic worlds, what they say, and how they are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imgscale import usefulness
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.usefulness import Usefulness
from tests.doubles import STEPS as SAMPLE
from tests.doubles import Reward, Watched, as_denoiser, latents, new, run

STEPS = 6


def measured(world: Watched, verifier: Reward, prompts: int = 12, **options: Any) -> Usefulness:
    engine = Engine(as_denoiser(world))
    conds = [as_denoiser(world).encode("") for _ in range(prompts)]
    return usefulness.measure(engine, verifier, conds, steps=STEPS, **options)


def first(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """The first coordinate of x0."""
    return latents(images)[:, 0]


def test_the_spread_is_what_the_noise_of_a_transition_does_to_the_image() -> None:
    """On a Gaussian of variance v, by the maps of the kernel and the ODE: both are linear, so it is exact."""
    world = Watched(cov=0.25, mean=0.0)
    found = measured(world, Reward(first), prompts=60, parents=2, draws=6)
    v, times = 0.25, torch.linspace(1, 0, STEPS + 1).tolist()

    def contraction(start: int) -> float:
        """d x0 / d x at a step, by the ODE's steps."""
        slope = 1.0
        for t, t_next in zip(times[start:], times[start + 1 :], strict=False):
            gain = (1 - t) * v / ((1 - t) ** 2 * v + t**2)  # d x0hat / d x
            eps = (1 - (1 - t) * gain) / t
            slope *= (1 - t_next) * gain + t_next * eps
        return slope

    for i in range(STEPS - 1):
        t, t_next = times[i], times[i + 1]
        snr = ((1 - t) * t_next / ((1 - t_next) * t)) ** 2
        expected = t_next * math.sqrt(1 - snr) * contraction(i + 1)
        assert found.spread[i] == pytest.approx(expected, rel=0.12), i
    assert found.spread[-1] == pytest.approx(0, abs=1e-9), "the last transition draws no noise"


def test_foresight_is_one_where_the_preview_orders_like_the_image() -> None:
    """On a Gaussian x0 is a linear function of x wherever x tells anything, and the ODE keeps the order."""
    found = measured(Watched(), Reward(first))
    assert found.foresight[0] == pytest.approx(0, abs=0.35), "at t = 1 all previews are the same"
    assert found.foresight[1:] == pytest.approx([1.0] * STEPS, abs=1e-6)
    assert found.look == 1


def test_looking_late_where_previews_mislead() -> None:
    world = Watched()
    seen: list[int] = []

    def contrary(images: Tensor, prompts: Sequence[str]) -> Tensor:
        early = not world.places or world.places[-1][0][0] > 0.5 - 1e-9
        seen.append(early)
        return latents(images)[:, 0] * (-1 if early else 1)

    found = measured(world, Reward(contrary), prompts=4, starts=12, parents=1, draws=2)
    assert any(seen) and not all(seen)
    assert all(value < 0 for value in found.foresight[1:3]) and found.foresight[4] == pytest.approx(1)
    assert found.look >= 4


def test_what_the_curves_say() -> None:
    found = Usefulness((0.1, 0.12, 0.05, 0.039, 0.0), (0.0, 0.2, 0.7, 0.92, 0.99, 1.0))
    assert (found.steps, found.look, found.decisive) == (5, 3, 3)
    never = Usefulness((0.0, 0.1), (0.0, 0.0, 1.0))
    assert never.look == 2 and never.decisive == 2


def test_ties_share_their_ranks() -> None:
    from imgscale.usefulness import _rank_correlation

    a = np.array([1.0, 1.0, 2.0, 3.0])
    assert _rank_correlation(a, np.array([0.5, 0.5, 1.0, 9.0])) == pytest.approx(1)
    assert _rank_correlation(a, -a) == pytest.approx(-1)
    assert _rank_correlation(a, np.ones(4)) == 0
    # By hand: ranks (.5 .5 2 3) and (3 0 1 2).
    expected = np.corrcoef([0.5, 0.5, 2, 3], [3, 0, 1, 2])[0, 1]
    assert _rank_correlation(a, np.array([9.0, 1.0, 2.0, 3.0])) == pytest.approx(expected)


def test_failed_images_count_as_the_worst() -> None:
    def some(images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = latents(images)[:, 0]
        return torch.where(scores < 0.2, torch.nan, scores)

    found = measured(Watched(), Reward(some))
    assert np.isfinite([*found.spread, *found.foresight]).all() and found.look == 1


def test_equal_rewards_teach_nothing() -> None:
    with pytest.raises(UserError, match="same reward, so nothing can be learnt"):
        measured(Watched(), Reward(lambda images, prompts: torch.ones(len(images))))


@pytest.mark.parametrize("options", [{"starts": 2}, {"parents": 0}, {"parents": 13}, {"draws": 1}, {"prompts": 0}])
def test_too_little_to_measure_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="can't be measured on"):
        measured(Watched(), Reward(first), **options)


def test_it_is_kept_by_verifier_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, two = Usefulness((1.0, 0.5), (0.0, 0.5, 1.0)), Usefulness((2.0, 0.5), (0.0, 0.6, 1.0))
    folder = tmp_path / "model"
    folder.mkdir()
    file = usefulness.keep(folder, "model", "clip", one)
    assert file.parent == folder and usefulness.known(folder, "model") == {"clip": one}
    usefulness.keep(folder, "model", "shapes", two)
    usefulness.keep(folder, "model", "clip", two)
    assert usefulness.known(folder, "model") == {"clip": two, "shapes": two}
    # A hub id has no folder of ours, and its name must not lead anywhere else.
    file = usefulness.keep(None, "../../owner/name", "clip", one)
    assert file.parent == tmp_path / "cache" / "imgscale" / "usefulness"
    assert usefulness.known(None, "../../owner/name") == {"clip": one}


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '{"clip": 3}', '{"clip": {"spread": [1]}}', '{"clip": {"spread": [1, "x"], "foresight": [1, 1, 1]}}']
    + [
        json.dumps({"clip": {"spread": s, "foresight": f}})
        for s, f in (([1.0], [1.0]), ([], [1.0]), ([-1.0], [0, 1.0]))
    ]
    + ['{"clip": {"spread": [NaN], "foresight": [0, 1]}}'],
)
def test_a_damaged_file_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "usefulness.json").write_text(text)
    with pytest.raises(UserError, match="usefulness.json") as caught:
        usefulness.known(tmp_path, "model")
    assert "\n" not in str(caught.value)


def test_a_budget_of_few_samples_is_best_of_n() -> None:
    """At 2.5 samples of shapes-flow, draws judged ahead solved 38% of 40 prompts and best-of-n 65%."""

    def found(name: str, budget: int, options: dict[str, Any] | None = None) -> tuple[float, int]:
        world = Watched()
        search = run(world, new(world, name, budget=budget, options=options))
        assert search.best is not None
        return search.best.score, search.meter.ledger.verifier_calls

    few = 5 * SAMPLE
    assert found("rbf", few - 1) == found("best-of-n", few - 1)
    assert found("rbf", few) != found("best-of-n", few)
    assert found("rbf", few - 1, {"chain_nfe": few}) != found("best-of-n", few - 1)

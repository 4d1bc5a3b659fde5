"""Reward hacking: its definition, and a search on a verifier that is there to be hacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale import hacking
from imgscale.engine import Engine
from imgscale.problem import Problem, Verb
from imgscale.result import SearchOutput, TracePoint
from imgscale.scaler import Scaler
from tests.doubles import STEPS, Watched, as_denoiser, latents


def trace(*held_out: float) -> list[TracePoint]:
    points = [TracePoint(i, 0.0, i, float(i), {"judge": value}) for i, value in enumerate(held_out)]
    return [*points, TracePoint(99, 0.0, 99, points[-1].score, points[-1].report)]  # where the search ended


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        ((4.0, 3.0, 2.0, 1.0), True),
        ((4.0, 3.0, 2.0), False),  # chance would do that once in six times
        ((1.0, 2.0, 3.0, 4.0), False),
        ((4.0, 1.0, 2.0, 3.0), False),  # lower at the end, but rising
        ((9.0, 8.0, 7.0, 5.0, 6.0, 4.0, 3.0), True),
        ((2.0, 2.0, 2.0, 2.0, 2.0), False),
        ((1.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 2.0), False),  # better than at first
    ],
)
def test_falling(scores: tuple[float, ...], found: bool) -> None:
    assert bool(hacking.hacked(trace(*scores), ["judge"])) is found
    assert (hacking.warning("clip", trace(*scores), ["judge"]) is not None) is found


def test_a_judge_of_noise_is_rarely_called_fallen() -> None:
    noise = torch.randn(2000, 6, generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(map(hacking.falling, noise)) / 2000 < 0.05


def test_a_failed_judge_is_left_out() -> None:
    nothing = -float("inf")
    assert hacking.hacked(trace(4.0, nothing, 3.0, 2.0, nothing, 1.0), ["judge"]) == {"judge": (4.0, 1.0)}
    assert hacking.hacked(trace(*[nothing] * 5), ["judge", "absent"]) == {}


def test_the_warning_names_everything() -> None:
    said = hacking.warning("clip", trace(4.0, 3.0, 2.5, 2.0, 1.0), ["judge"])
    assert said is not None and "clip rose from 0 to 4" in said and "judge from 4 to 1" in said


def hackable(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Likes bright images without end, where the judge wants them at 0.6."""
    return latents(images).mean(-1)


def judge(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return -(latents(images).mean(-1) - 0.6).abs()


def climb(problem: Problem, rng: Any) -> Verb:
    """Scores samples one by one, from the middling to the brightest."""
    samples = yield from problem.sample(64)
    for i in samples.x0.mean(-1).argsort()[32:]:
        yield from problem.score(samples[int(i)])


def outcome(verifier: Any, report: Any) -> SearchOutput:
    scaler = Scaler(Engine(as_denoiser(Watched(mean=0.6, cov=0.3))), "world")
    more: Any = {"budget": 64 * STEPS, "num_inference_steps": STEPS, "progress": False, "plain": False}
    output: SearchOutput = scaler("a cat", searcher=climb, verifier=verifier, report=[report], **more)
    return output


def test_a_hackable_verifier_is_named() -> None:
    output = outcome(hackable, judge)
    (first, last) = hacking.hacked(output.trace, ["judge"])["judge"]
    assert last < first
    assert [event for event in output.events if "hackable rose from" in event and f"to {last:.4g}" in event]


def test_an_honest_one_is_not() -> None:
    assert not outcome(judge, hackable).events
    assert not outcome(hackable, lambda images, prompts: hackable(images, prompts) / 2).events

"""The front door: what goes in, what comes out, what is refused, and what is heard on the way."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import imgscale
from imgscale import registry
from imgscale.budget import Budget
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.images import to_pil
from imgscale.kernels import ODE
from imgscale.keys import root
from imgscale.models import ModelSettings
from imgscale.problem import Problem, Verb
from imgscale.registry import Entry
from imgscale.result import SearchOutput
from imgscale.scaler import Scaler
from imgscale.usefulness import Usefulness
from imgscale.watch import Progress
from tests.doubles import STEPS, Clock, Reward, Watched, as_denoiser, clock, near_one
from tests.worlds import Gaussian

__all__ = ["clock"]

SIZE = (3, 4, 6)  # of the world's images: 4 high, 6 wide


def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.mean((1, 2, 3))


def redness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))


def scaler(settings: ModelSettings | None = None, world: Any = None, max_batch: int = 32) -> Scaler:
    world = world or Gaussian(shape=SIZE, shifts={"dark": -2.0, "bright": 2.0})
    return Scaler(Engine(as_denoiser(world), max_batch), "world", settings)


def call(made: Scaler | None = None, prompt: Any = "a cat", **settings: Any) -> Any:
    """A short, silent search."""
    settings = {
        "searcher": "best-of-n",
        "verifier": brightness,
        "budget": 5 * STEPS,
        "num_inference_steps": STEPS,
        "progress": False,
        **settings,
    }
    return (made or scaler())(prompt, **settings)


# ----------------------------------------------------------------------------------------------------- what comes out


def test_a_search_returns_image_scores_cost_and_trace() -> None:
    out = call(report=[redness], seed=3)
    assert isinstance(out, SearchOutput)
    assert (out.prompt, out.model, out.searcher, out.verifier) == ("a cat", "world", "best-of-n", "brightness")
    (image,) = out.images
    assert isinstance(image, Image.Image) and image.size == (6, 4) and image.mode == "RGB"
    assert list(out.scores) == ["brightness", "redness"]
    assert out.nfe == out.ledger.nfe == 5 * STEPS and out.ledger.verifier_calls == 5
    assert out.trace[-1].score == out.scores["brightness"] and out.trace[-1].nfe == out.nfe
    assert out.stopped == "complete" and out.finished and out.events == []
    assert out.seeds[0] in root(3, 5).tolist()
    pixels = torch.from_numpy(np.asarray(image).copy()).float() / 255
    assert float(pixels.mean()) == pytest.approx(out.scores["brightness"], abs=0.005)


def test_the_plain_image_is_the_models_own_for_the_seed() -> None:
    world = Gaussian(shape=SIZE)
    out = call(scaler(world=world), report=[redness], seed=8)
    cond = world.encode("a cat")
    x, times = world.prior(torch.tensor([8]), cond), world.grid(STEPS, cond).tolist()
    for t, t_next in zip(times, times[1:], strict=False):
        x = ODE()(world.path, t, t_next, x, world.predict(x, t, cond))
    expected = world.decode(x, cond)
    assert out.plain is not None
    assert np.array_equal(np.asarray(out.plain.image), np.asarray(to_pil(expected[0])))
    assert out.plain.scores == {
        "brightness": pytest.approx(float(brightness(expected, [""])[0])),
        "redness": pytest.approx(float(redness(expected, [""])[0])),
    }
    assert out.plain.ledger.nfe == STEPS and out.nfe == 5 * STEPS, "the comparison is outside of the budget"
    assert out.scores["brightness"] >= out.plain.scores["brightness"]


def test_the_plain_image_can_be_left_out() -> None:
    world = Watched()
    out = call(scaler(world=world), plain=False)
    assert out.plain is None and world.evaluations == out.nfe


def test_a_list_of_prompts_gives_a_list_of_outputs() -> None:
    made = scaler()
    prompts = ["dark", "a cat", "bright"]
    outs = call(made, prompts)
    assert isinstance(outs, list) and [out.prompt for out in outs] == prompts
    assert [out.settings["prompt"] for out in outs] == prompts
    for prompt, out in zip(prompts, outs, strict=True):
        alone = call(made, prompt)
        assert np.array_equal(np.asarray(alone.images[0]), np.asarray(out.images[0]))
        assert alone.scores == pytest.approx(out.scores, abs=1e-6) and alone.nfe == out.nfe
    assert outs[0].scores["brightness"] < outs[1].scores["brightness"] < outs[2].scores["brightness"]
    assert isinstance(call(made, ("a cat",)), list) and len(call(made, iter(["a cat"]))) == 1


def test_everything_needed_to_run_it_again_is_recorded() -> None:
    out = call(
        scaler(ModelSettings(guidance_scale=2.5), max_batch=7),
        negative_prompt="blur",
        searcher="rbf(draws=2, explore=0.5)",
        options={"starts": 3},
        report=[redness],
        budget=Budget(nfe=30, decodes=25),
        seed=5,
    )
    assert out.settings == {
        "prompt": "a cat",
        "model": "world",
        "negative_prompt": "blur",
        "searcher": "rbf",
        "options": {"draws": 2, "explore": 0.5, "starts": 3},
        "guide": None,
        "usefulness": None,
        "verifier": "brightness",
        "report": ["redness"],
        "verifiers": {
            "brightness": {"name": "brightness", "source": f"{__name__}.brightness"},
            "redness": {"name": "redness", "source": f"{__name__}.redness"},
        },
        "verifier_timeout": None,
        "preview": "full",
        "preview_decoder": None,
        "budget": {"nfe": 30, "decodes": 25},
        "seed": 5,
        "height": 4,
        "width": 6,
        "num_inference_steps": STEPS,
        "guidance_scale": 2.5,
        "max_batch": 7,
        "pipeline_arguments": {},
        "pipeline": {"name": "gaussian", "shape": [3, 4, 6], "path": "linear"},
        "distilled": False,
        "path": None,
        "stopped": out.stopped,
        "exact": False,
        "rounds": out.settings["rounds"],
        "nfe": out.nfe,
    }
    assert out.settings["rounds"] > STEPS
    kept = {key: out.settings[key] for key in ("negative_prompt", "searcher", "options", "seed")}
    again = call(scaler(), verifier=brightness, budget=Budget(nfe=30, decodes=25), **kept)
    assert np.array_equal(np.asarray(again.images[0]), np.asarray(out.images[0]))


def test_the_models_settings_are_the_defaults() -> None:
    asked: list[dict[str, Any]] = []

    class Asking(Gaussian):
        def encode(self, prompt: str, negative_prompt: str | None = None, **settings: Any) -> Any:
            asked.append(settings)
            return super().encode(prompt, negative_prompt, **settings)

    made = scaler(ModelSettings(steps=3, guidance_scale=4.0, distilled=True), Asking(shape=SIZE))
    seen: list[Problem] = []

    def look(problem: Problem, rng: np.random.Generator) -> Verb:
        seen.append(problem)
        yield from problem.score((yield from problem.sample(1)))

    call(made, searcher=look, num_inference_steps=None)
    call(made, searcher=look, num_inference_steps=2, guidance_scale=0.0)
    assert [problem.schedule.steps for problem in seen] == [3, 2] and all(problem.distilled for problem in seen)
    assert [settings["guidance_scale"] for settings in asked] == [4.0, 0.0]
    call(scaler(), searcher=look, num_inference_steps=None)
    assert seen[-1].schedule.steps == Gaussian.steps_default and not seen[-1].distilled


def test_a_verifiers_highest_score_ends_the_search() -> None:
    verifier = Reward(lambda images, prompts: (brightness(images, prompts) > 0.6).float(), range=(0.0, 1.0))
    out = call(verifier=verifier, budget=400 * STEPS, options={"batch": 1})
    assert out.stopped == "ceiling" and out.scores == {"reward": 1.0} and out.nfe < 400 * STEPS


def test_a_search_stopped_too_early_says_so() -> None:
    out = call(callback=lambda progress: progress.cancel(), plain=False)
    assert out.stopped == "cancelled" and not out.finished and out.images[0].size == (6, 4)
    assert "preview" in out.events[0]


# --------------------------------------------------------------------------------------------------------- searchers


def test_a_function_can_search() -> None:
    def my_search(problem: Problem, rng: np.random.Generator, *, n: int = 1) -> Verb:
        yield from problem.score((yield from problem.sample(n)))

    out = call(searcher=my_search, options={"n": 2})
    assert (out.searcher, out.nfe, out.settings["options"]) == ("my-search", 2 * STEPS, {"n": 2})
    with pytest.raises(UserError, match="Unknown option of 'my-search' 'm'"):
        call(searcher=my_search, options={"m": 2})


def test_each_of_several_prompts_may_have_a_seed_of_its_own() -> None:
    together = call(prompt=["a cat", "dark"], seed=[8, 21])
    for output, prompt, seed in zip(together, ["a cat", "dark"], [8, 21], strict=True):
        alone = call(prompt=prompt, seed=seed)
        assert output.settings["seed"] == seed
        assert output.seeds == alone.seeds
        assert output.scores == pytest.approx(alone.scores, abs=1e-6)
        assert np.array_equal(np.asarray(output.plain.image), np.asarray(alone.plain.image))
    assert together[0].seeds != call(prompt="a cat", seed=21).seeds


@pytest.mark.parametrize(("prompt", "seed"), [(["a cat", "dark"], [1]), (["a cat"], []), ("a cat", [1])])
def test_seeds_must_match_the_prompts(prompt: Any, seed: list[int]) -> None:
    with pytest.raises(UserError, match=f"There can't be {len(seed)} seeds for .* prompts; give one, or a list"):
        call(prompt=prompt, seed=seed)


def test_random_numbers_of_a_searcher_follow_from_the_seed() -> None:
    drawn: list[float] = []

    def gambler(problem: Problem, rng: np.random.Generator) -> Verb:
        drawn.append(rng.random())
        yield from problem.score((yield from problem.sample(1)))

    for seed in (1, 1, 2):
        call(searcher=gambler, seed=seed)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    "searcher", [3, None, lambda problem, rng: None, Problem], ids=["3", "none", "lambda", "class"]
)
def test_what_cannot_search(searcher: Any) -> None:
    with pytest.raises(UserError, match="The searcher can't be .*give a name or a generator function"):
        call(searcher=searcher)


# --------------------------------------------------------------------------------------------------------- verifiers


class Fake:
    """A registered verifier with options."""

    name = "fake"
    range = None
    reads_prompt = False
    differentiable = False
    made: list[dict[str, Any]] = []

    def __init__(self, *, power: float = 1.0, device: str | None = None, model: str = "own") -> None:
        self.power = power
        Fake.made.append({"power": power, "device": device, "model": model})

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return brightness(images, prompts) ** self.power

    def identity(self) -> dict[str, Any]:
        return {"name": "fake", "power": self.power}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    list(registry.verifier)  # discovered before, so that what is found stays found
    monkeypatch.setitem(registry.verifier._entries, "fake", Entry("fake", Fake))
    monkeypatch.setattr(Fake, "made", [])
    return Fake


def test_a_verifier_by_name_is_made_once_and_where_the_model_is(fake: type[Fake]) -> None:
    made = scaler()
    for _ in range(2):
        out = call(made, verifier="fake", report=["fake"])
    assert fake.made == [{"power": 1.0, "device": "cpu", "model": "own"}]
    assert list(out.scores) == ["fake"] and out.settings["verifiers"] == {"fake": {"name": "fake", "power": 1.0}}


def test_a_verifier_with_options_goes_by_what_was_written(fake: type[Fake]) -> None:
    """The same verifier with other options may be the held-out judge."""
    out = call(verifier="fake", report=["fake(power=2)", "fake(power=3, device=cpu)"])
    assert list(out.scores) == ["fake", "fake(power=2)", "fake(power=3, device=cpu)"]
    base = out.scores["fake"]
    assert [*out.scores.values()] == pytest.approx([base, base**2, base**3], rel=1e-5)
    assert out.settings["verifiers"]["fake(power=2)"]["power"] == 2.0
    assert out.settings["report"] == ["fake(power=2)", "fake(power=3, device=cpu)"]
    assert fake.made[1]["device"] == "cpu" and call(verifier="fake(power=2)").verifier == "fake(power=2)"


def test_clip_means_the_models_own_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    list(registry.verifier)
    monkeypatch.setitem(registry.verifier._entries, "clip", Entry("clip", Fake))
    monkeypatch.setattr(Fake, "made", [])
    made = scaler(ModelSettings(clip="its/own"))
    made.verifier("clip")
    made.verifier("clip(model=another)")
    scaler().verifier("clip")
    assert [options["model"] for options in Fake.made] == ["its/own", "another", ModelSettings().clip]
    assert made.verifier("clip").name == "fake" and made.verifier("clip(model=another)").name == "clip(model=another)"


def test_any_function_will_do() -> None:
    def listed(images: Tensor, prompts: Sequence[str]) -> Any:
        return brightness(images, prompts).tolist()

    def array(images: Tensor, prompts: Sequence[str]) -> Any:
        return brightness(images, prompts).double().numpy()

    class Model:
        def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
            return brightness(images, prompts)

    expected = call().scores["brightness"]
    for function, name in ((listed, "listed"), (array, "array"), (Model(), "Model")):
        assert call(verifier=function).scores == {name: pytest.approx(expected, abs=1e-6)}


def test_a_report_that_steers_already_is_not_asked_twice() -> None:
    calls: list[int] = []

    def counted(images: Tensor, prompts: Sequence[str]) -> Tensor:
        calls.append(len(images))
        return brightness(images, prompts)

    out = call(verifier=counted, report=[counted, redness, redness], plain=False)
    assert list(out.scores) == ["counted", "redness"] and sum(calls) == out.ledger.verifier_calls


def test_two_verifiers_of_one_name_are_refused_rather_than_confused() -> None:
    with pytest.raises(UserError, match="Two verifiers are called '<lambda>'; give one of them another name"):
        call(verifier=lambda images, prompts: brightness(images, prompts), report=[lambda images, prompts: None])


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("chlip", "Unknown verifier 'chlip'; choose one of: .*Did you mean 'clip'"),
        ("shapes(size=3)", "Unknown option of 'shapes' 'size'"),
        ("clip(model", "is no name"),
        (3, "The verifier can't be 3; give a name or a function"),
        (None, "The verifier can't be None"),
        (Fake, "The verifier can't be <class .*Fake'>; give a name or a function"),
    ],
)
@pytest.mark.parametrize("where", ["verifier", "report"])
def test_what_cannot_verify(verifier: Any, message: str, where: str) -> None:
    asked: dict[str, Any] = {where: verifier if where == "verifier" else [verifier]}
    with pytest.raises(UserError, match=message):
        call(**asked)


def test_a_verifier_that_fails_is_heard_of() -> None:
    def broken(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise ZeroDivisionError("no")

    out = call(verifier=broken)
    assert out.stopped == "verifier" and out.scores == {"broken": -math.inf} and "broken failed" in out.events[0]


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": ""}, "The prompt can't be ''; write what the image should show."),
        ({"prompt": " \n"}, "The prompt can't be"),
        ({"prompt": None}, "The prompt can't be None"),
        ({"prompt": 3}, "The prompt can't be 3"),
        ({"prompt": ["a cat", ""]}, "The prompt can't be ''"),
        ({"prompt": ["a cat", 3]}, "The prompt can't be 3"),
        ({"prompt": []}, "The list of prompts can't be empty; give at least one."),
        ({"seed": -1}, "The seed can't be -1; give a whole number from 0 to 2**63 - 1."),
        ({"seed": 2**63}, "The seed can't be"),
        ({"seed": 1.5}, "The seed can't be 1.5"),
        ({"seed": "7"}, "The seed can't be '7'"),
        ({"seed": True}, "The seed can't be True"),
        ({"budget": 0}, "The budget's nfe can't be 0; give a positive whole number, such as 200."),
        ({"budget": -3}, "The budget's nfe can't be -3"),
        ({"budget": 1.5}, "The budget's nfe can't be 1.5"),
        ({"budget": None}, "A budget needs a limit"),
        ({"num_inference_steps": 0}, "num_inference_steps can't be 0; give a whole number from 1 to 1000."),
        ({"num_inference_steps": 1001}, "num_inference_steps can't be 1001"),
        ({"num_inference_steps": 2.0}, "num_inference_steps can't be 2.0"),
        ({"num_inference_steps": True}, "num_inference_steps can't be True"),
        ({"height": 512}, "draws 4 x 6 images only, not 512 x 6"),
        ({"strength": 3}, "has no option 'strength'"),
        ({"searcher": "rfb"}, "Unknown searcher 'rfb'"),
        ({"searcher": "rbf(drawz=3)"}, "Unknown option of 'rbf' 'drawz'"),
        ({"searcher": "rbf", "options": {"explore": 2.0}}, "rbf's explore can't be 2.0"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_one_sentence_before_anything_is_spent(wrong: dict[str, Any], message: str) -> None:
    world = Watched(shape=SIZE)
    with pytest.raises(UserError) as caught:
        call(scaler(world=world), **{"prompt": "a cat", **wrong})
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert world.batches == []


@pytest.mark.parametrize("steps", [2, 4, 20])
def test_a_budget_too_small_for_an_image_names_the_number(steps: int) -> None:
    world = Watched(shape=SIZE)
    with pytest.raises(UserError) as caught:
        call(scaler(world=world), num_inference_steps=steps, budget=Budget(nfe=steps - 1, seconds=9))
    assert str(caught.value) == (
        f"A budget of {steps - 1} model evaluations can't finish one image, which takes {steps}; give a budget of"
        f" {steps} or more, or fewer steps."
    )
    assert world.batches == []


@pytest.mark.parametrize("steps", [1, 2, 4, 20])
@pytest.mark.parametrize("searcher", ["best-of-n", "rbf"])
def test_the_smallest_budget_that_is_allowed_is_enough(steps: int, searcher: str) -> None:
    out = call(searcher=searcher, num_inference_steps=steps, budget=steps)
    assert out.finished and out.nfe == steps and out.stopped == "complete"


@pytest.mark.parametrize("max_batch", [0, -1, 1.5, True, "8"])
def test_max_batch_is_a_positive_number(max_batch: Any) -> None:
    with pytest.raises(UserError, match="max_batch can't be .*give a whole number of at least 1"):
        imgscale.load("nowhere", max_batch=max_batch)


# ----------------------------------------------------------------------------------------------------------- progress


def test_the_callback_hears_of_every_step() -> None:
    heard: list[Progress] = []
    previews: list[Any] = []

    def listen(progress: Progress) -> None:
        heard.append(progress)
        previews.append(progress.preview(1))

    made = scaler()
    outs = call(made, ["dark", "bright"], budget=3 * STEPS, options={"batch": 1}, callback=listen, plain=False)
    assert [progress.nfe for progress in heard] == [2 * k for k in range(1, 3 * STEPS + 1)]
    assert all(progress.searches == 2 and progress.total == 6 * STEPS for progress in heard)
    assert heard[0].best == [None, None] and heard[0].rounds == [1, 1]
    assert heard[-1].best == [out.scores["brightness"] for out in outs]
    assert [image.size for image in previews] == [(6, 4)] * len(heard)
    assert np.array_equal(np.asarray(previews[-1]), np.asarray(outs[1].images[0]))
    assert not np.array_equal(np.asarray(previews[0]), np.asarray(previews[-1]))


def test_there_is_no_total_without_a_limit_on_evaluations() -> None:
    totals: list[int | None] = []
    call(budget=Budget(decodes=3), callback=lambda progress: totals.append(progress.total))
    assert set(totals) == {None}


def test_the_plain_image_comes_before_the_search_begins() -> None:
    heard: list[tuple[int, Any]] = []
    call(callback=lambda progress: heard.append((progress.nfe, progress.preview(0))))
    assert heard[0] == (0, None) and heard[STEPS - 1] == (0, None) and heard[STEPS][0] > 0


@pytest.mark.parametrize("finish", [False, True])
def test_a_callback_can_cancel(finish: bool) -> None:
    def listen(progress: Progress) -> None:
        if progress.nfe >= 2:
            progress.cancel(finish=finish)

    out = call(budget=1000, options={"batch": 1}, callback=listen)
    assert out.stopped == ("deadline" if finish else "cancelled") and out.finished == finish
    assert out.nfe == (STEPS if finish else 2)


def test_cancelling_during_the_plain_image_leaves_an_answer() -> None:
    out = call(callback=lambda progress: progress.cancel(), options={"batch": 1})
    assert out.stopped == "cancelled" and out.plain is None and out.nfe == 1 and len(out.images) == 1


def test_an_error_in_a_callback_comes_through() -> None:
    def broken(progress: Progress) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        call(callback=broken)


def test_the_clock_of_the_search_begins_with_the_search(clock: Clock) -> None:
    world = Watched(evaluate=lambda n: clock.pass_by(1.0))
    out = call(scaler(world=world), verifier=near_one, budget=Budget(seconds=30))
    assert out.stopped == "deadline" and 20 <= out.ledger.seconds <= 30 and out.plain.ledger.seconds == STEPS
    assert out.settings["rounds"] == out.ledger.seconds, "one second each, and none before"


@pytest.mark.parametrize("progress", [True, False])
def test_progress_can_be_silenced(progress: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(progress=progress)
    shown = capfd.readouterr()
    assert shown.out == "" and (f"/{5 * STEPS}" in shown.err) == progress
    assert progress or shown.err == ""


# ------------------------------------------------------------------------------------------------------------- to_pil


def test_pixels_are_rounded_and_clamped() -> None:
    image = torch.tensor([0.0, 1.0, 0.5, 0.2509, -1.0, 7.0]).reshape(1, 2, 3).expand(3, 2, 3)
    made = to_pil(image)
    assert made.mode == "RGB" and made.size == (3, 2)
    assert np.asarray(made)[..., 1].tolist() == [[0, 255, 128], [64, 0, 255]]


@pytest.mark.parametrize("name", imgscale.__all__)
def test_the_front_door_has_all_its_names(name: str) -> None:
    assert getattr(imgscale, name) is not None


def test_the_front_door_has_no_others() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        imgscale.nonsense  # noqa: B018


def test_what_was_measured_reaches_the_search() -> None:
    """By the verifier's name; what another verifier has measured is better than nothing."""
    seen: list[Any] = []

    def look(problem: Problem, rng: Any) -> Verb:
        seen.append(problem.usefulness)
        yield from problem.score((yield from problem.sample(1)))

    made = scaler()
    one, two, other = (
        Usefulness((v,) * n, (1.0,) * (n + 1)) for v, n in ((1.0, STEPS), (2.0, STEPS), (1.0, STEPS + 1))
    )
    made._verifiers["dummy"] = Reward(lambda images, prompts: images.mean((1, 2, 3)), name="dummy")
    cases: list[tuple[dict[str, Usefulness], Usefulness | None]] = [
        ({}, None),
        ({"clip": two, "dummy": one}, one),
        ({"clip": two}, two),
        ({"dummy": other}, None),  # of samples with another number of steps
    ]
    for measured, expected in cases:
        made.usefulness = measured
        call(made, searcher=look, verifier="dummy")
        assert seen.pop() == expected

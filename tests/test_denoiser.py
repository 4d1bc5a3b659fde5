"""What holds for a Denoiser whatever the pipeline; the pipelines one by one are in test_pipelines.py."""

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale.conditions import Condition
from imgscale.denoiser import Denoiser
from imgscale.errors import UnknownName, UserError
from imgscale.paths import Discrete, Linear
from tests import zoo

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers and transformers, about themselves

KEYS = torch.tensor([1, 2, 3])
SIZE: dict[str, Any] = {"height": 16, "width": 16}


@functools.cache
def flux() -> tuple[Any, Denoiser]:
    pipe = zoo.build("FluxPipeline")
    return pipe, Denoiser(pipe, {"max_sequence_length": 16})


@functools.cache
def sd() -> tuple[Any, Denoiser]:
    pipe = zoo.build("StableDiffusionPipeline")
    return pipe, Denoiser(pipe)


def rescheduled(scheduler: Any) -> Denoiser:
    """The tiny Stable Diffusion with another scheduler."""
    pipe = zoo.build("StableDiffusionPipeline")
    pipe.scheduler = scheduler
    return Denoiser(pipe)


# Schedules, read off the user's scheduler

BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@pytest.mark.parametrize(
    ("name", "settings", "first"),
    [
        ("DDIMScheduler", {"steps_offset": 1}, 751),
        ("DDIMScheduler", {"timestep_spacing": "trailing"}, 999),
        ("DDIMScheduler", {"timestep_spacing": "linspace"}, 999),
        ("DDIMScheduler", {"steps_offset": 1, "set_alpha_to_one": False}, 751),
        ("DDPMScheduler", {}, 750),
        ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}, 751),
        ("EulerDiscreteScheduler", {"steps_offset": 1, "timestep_spacing": "leading"}, 751),
        ("EulerDiscreteScheduler", {"use_karras_sigmas": True}, 999),
        ("EulerAncestralDiscreteScheduler", {}, 999),
        ("DPMSolverMultistepScheduler", {}, 999),
        ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, 999),
        ("UniPCMultistepScheduler", {}, 999),
        ("HeunDiscreteScheduler", {}, 999),
        ("KDPM2DiscreteScheduler", {}, 999),
        ("LMSDiscreteScheduler", {}, 999),
        ("DEISMultistepScheduler", {}, 999),
    ],
)
def test_the_grid_is_the_schedulers_own(name: str, settings: dict[str, Any], first: int) -> None:
    import diffusers

    denoiser = rescheduled(getattr(diffusers, name)(**BETAS, **settings))
    assert isinstance(denoiser.path, Discrete)
    times = denoiser.grid(4, denoiser.encode("a cat", **SIZE))
    assert len(times) == 5 and times[-1] == 0 and (times.diff() < 0).all() and times.dtype == torch.float64
    assert times[0] == (first + 1) / 1000


def test_a_sampler_never_changes_what_the_model_says() -> None:
    """Schedulers that scale the model's input (Euler's x is not DDIM's) see the same x on our path."""
    import diffusers

    x = torch.randn(3, 4, 8, 8)
    answers = []
    for name in ("DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"):
        denoiser = rescheduled(getattr(diffusers, name)(**BETAS))
        answers.append(denoiser.predict(x, 0.5, denoiser.encode("a cat", **SIZE)))
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_every_kind_of_prediction_gives_the_same_x0(prediction: str) -> None:
    """A network that knows the answer, asked in three ways."""
    denoiser = rescheduled(zoo.ddim(prediction_type=prediction))
    cond = denoiser.encode("a cat", guidance_scale=1.0, **SIZE)
    true, noise = torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8)
    t = 0.4
    alpha, sigma = denoiser.path.alpha(t).float(), denoiser.path.sigma(t).float()
    answers = {"epsilon": noise, "v_prediction": alpha * noise - sigma * true, "sample": true}
    network = denoiser._pipe.unet
    handle = network.register_forward_hook(lambda *_: (answers[prediction],))
    try:
        x0 = denoiser.predict(alpha * true + sigma * noise, t, cond)
    finally:
        handle.remove()
    torch.testing.assert_close(x0, true, rtol=1e-4, atol=1e-4)


def test_a_flow_model_may_have_a_diffusion_solver() -> None:
    """Sana ships with DPM-Solver on flow sigmas."""
    import diffusers

    pipe = zoo.build("SanaPipeline")
    reference = Denoiser(pipe, zoo.ZOO["SanaPipeline"].defaults)
    pipe = zoo.build("SanaPipeline")
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    denoiser = Denoiser(pipe, zoo.ZOO["SanaPipeline"].defaults)
    assert denoiser.path == Linear()
    conds = [d.encode("a cat", height=32, width=32) for d in (reference, denoiser)]
    x = reference.prior(KEYS, conds[0])
    assert torch.equal(reference.predict(x, 0.5, conds[0]), denoiser.predict(x, 0.5, conds[1]))
    assert denoiser.grid(4, conds[1])[0] > 0.99


def test_the_shift_by_image_size_is_read() -> None:
    _, denoiser = flux()
    small, large = (denoiser.grid(4, denoiser.encode("a cat", height=s, width=s)) for s in (16, 64))
    assert large[2] > small[2]


def test_a_single_step_starts_from_noise_where_the_last_time_is_a_setting() -> None:
    import diffusers

    pipe = zoo.build("StableDiffusion3Pipeline")
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift_terminal=0.4)
    denoiser = Denoiser(pipe, zoo.ZOO["StableDiffusion3Pipeline"].defaults)
    cond = denoiser.encode("a cat", height=32, width=32)
    assert denoiser.grid(1, cond).tolist() == [1, 0]
    assert denoiser.grid(2, cond).tolist() == pytest.approx([1, 0.4, 0])


def test_unknown_schedulers_are_refused() -> None:
    import diffusers

    with pytest.raises(UserError, match="EDMEulerScheduler has neither"):
        rescheduled(diffusers.EDMEulerScheduler())
    with pytest.raises(UserError, match="prediction_type 'noise'"):
        rescheduled(zoo.ddim(prediction_type="noise"))


# Users' mistakes


def test_sizes_that_a_model_cannot_draw() -> None:
    _, denoiser = flux()
    with pytest.raises(UserError, match="height of 18 pixels: give a multiple of 4, such as 16"):
        denoiser.encode("a cat", height=18, width=16)
    with pytest.raises(UserError, match="width of -4 pixels"):
        denoiser.encode("a cat", height=16, width=-4)
    sd3 = Denoiser(zoo.build("StableDiffusion3Pipeline"), {"max_sequence_length": 16})
    with pytest.raises(UserError, match="give 64 at most"):
        sd3.encode("a cat", height=128, width=16)


def test_unknown_arguments_are_refused() -> None:
    pipe, denoiser = flux()
    with pytest.raises(UnknownName, match="max_sequence_length"):
        denoiser.encode("a cat", max_sequence_lenght=3, **SIZE)
    with pytest.raises(UserError, match="'latents' of FluxPipeline is imgscale's own to set"):
        denoiser.encode("a cat", latents=torch.zeros(1), **SIZE)
    with pytest.raises(UnknownName):
        Denoiser(pipe, {"max_lenght": 3})
    with pytest.raises(UserError, match="refuses this call"):
        denoiser.encode("a cat", max_sequence_length=1000, **SIZE)


def test_guidance_and_negative_prompts_that_do_not_exist() -> None:
    lcm = Denoiser(zoo.build("LatentConsistencyModelPipeline"))
    with pytest.raises(UserError, match="takes no negative prompt"):
        lcm.encode("a cat", "a dog", **SIZE)


def test_pipelines_that_cannot_be_driven_are_refused() -> None:
    import diffusers

    class Pixels(diffusers.StableDiffusionPipeline):  # type: ignore[misc]
        def __call__(self, prompt: str) -> None: ...

    with pytest.raises(UserError, match="Pixels takes no `latents`"):
        Denoiser(Pixels(**sd()[0].components, requires_safety_checker=False))


# Guidance


def test_guidance_scale_finds_its_argument() -> None:
    _, denoiser = flux()
    assert denoiser.guidance == "true_cfg_scale" and denoiser.guidance_default == 1.0
    plain = denoiser.encode("a cat", **SIZE)
    guided = denoiser.encode("a cat", guidance_scale=3.0, **SIZE)
    assert (plain.passes, guided.passes) == (1, 2)
    assert plain.key != guided.key
    distilled = Denoiser(zoo.build("FluxKontextPipeline"), zoo.ZOO["FluxKontextPipeline"].defaults)
    assert distilled.guidance == "guidance_scale" and distilled.guidance_default == 3.5
    assert distilled.encode("a cat", guidance_scale=3.0, **SIZE).passes == 1
    assert Denoiser(flux()[0], {"true_cfg_scale": 2.0}).encode("a cat", **SIZE).passes == 2


def test_a_negative_prompt_counts() -> None:
    _, denoiser = sd()
    x = torch.randn(1, 4, 8, 8)
    a, b = (denoiser.encode("a cat", negative, **SIZE) for negative in ("a dog", "a red sky"))
    assert not torch.allclose(denoiser.predict(x, 0.5, a), denoiser.predict(x, 0.5, b))
    assert a.key == b.key and a.key != denoiser.encode("a cat", **SIZE).key


# Conditions


def test_conditions_are_remembered_by_what_they_say() -> None:
    _, denoiser = flux()
    cond = denoiser.encode("a cat", **SIZE)
    assert denoiser.encode("a cat", **SIZE) is cond
    assert denoiser.encode("a dog", **SIZE) is not cond
    assert (cond.prompt, cond.height, cond.width, cond.latent_shape) == ("a cat", 16, 16, (16, 16))
    assert denoiser.encode("a cat", height=32, width=16).key != cond.key


def test_stacking() -> None:
    _, denoiser = flux()
    cat, dog = (denoiser.encode(prompt, **SIZE) for prompt in ("a cat", "a dog"))
    both = Condition.stack([cat, dog], [2, 1])
    assert both.prompts == ["a cat", "a cat", "a dog"]
    assert both.at([2, 0]).prompts == ["a dog", "a cat"]
    assert Condition.stack([both, cat], [3, 1]).prompts == ["a cat", "a cat", "a dog", "a cat"]
    with pytest.raises(ValueError, match="stacked for 3 particles was given 2"):
        denoiser.predict(torch.zeros(2, 16, 16), 0.5, both)
    with pytest.raises(UserError, match="different keys"):
        Condition.stack([cat, denoiser.encode("a dog", height=32, width=32)], [1, 1])


def test_a_sequence_of_one_token_is_not_taken_for_a_batch() -> None:
    """The ids of Flux's text tokens are (tokens, 3), and the same for all rows."""
    pipe = zoo.build("FluxPipeline")
    for tokens in (1, 2):
        denoiser = Denoiser(pipe, {"max_sequence_length": tokens})
        cond = denoiser.encode("a cat", **SIZE)
        x = denoiser.prior(KEYS, cond)
        alone = torch.cat([denoiser.predict(row[None], 0.5, cond) for row in x])
        torch.testing.assert_close(denoiser.predict(x, 0.5, cond), alone, rtol=1e-4, atol=1e-5)


# Precision, gradients, threads


@pytest.mark.parametrize("name", ["FluxPipeline", "StableDiffusionPipeline", "Flux2KleinPipeline"])
def test_latents_stay_float32_around_a_bfloat16_model(name: str) -> None:
    pipe = zoo.build(name).to(torch.bfloat16)
    denoiser = Denoiser(pipe, zoo.ZOO[name].defaults)
    cond = denoiser.encode("a cat", **SIZE)
    assert denoiser.dtype == torch.bfloat16 and cond.latent_dtype == torch.bfloat16
    x = denoiser.prior(KEYS, cond)
    assert x.dtype == torch.float32
    x0 = denoiser.predict(x, 0.5, cond)
    assert x0.dtype == torch.float32
    nudged = denoiser.predict(x + 1e-4, 0.5, cond) - x0  # the network can't see so small a step; x0 can
    assert 0 < nudged.abs().max()
    assert denoiser.decode(x0, cond).dtype == torch.float32


@pytest.mark.parametrize("name", ["FluxPipeline", "StableDiffusionPipeline", "QwenImagePipeline", "Flux2KleinPipeline"])
def test_gradients_flow_through_predict_and_decode(name: str) -> None:
    denoiser = Denoiser(zoo.build(name), zoo.ZOO[name].defaults)
    with torch.inference_mode():  # leaves nothing behind that a gradient could stumble over
        cond = denoiser.encode("a cat", **SIZE)
        x = denoiser.prior(KEYS, cond)
        denoiser.predict(x, 0.5, cond)
    direction = torch.randn_like(x)

    def reward(x: Tensor) -> Tensor:
        return denoiser.decode(denoiser.predict(x, 0.5, cond), cond).mean()

    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reward(x), x)
    assert torch.isfinite(gradient).all()
    with torch.no_grad():
        step = 1e-2
        slope = (reward(x + step * direction) - reward(x - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=0.1, atol=1e-4)
    assert not denoiser.predict(x.detach(), 0.5, cond).requires_grad  # though the weights would ask for one


def test_inference_tensors_are_taken() -> None:
    _, denoiser = flux()
    cond = denoiser.encode("a cat", **SIZE)
    with torch.inference_mode():
        x = denoiser.prior(KEYS, cond) * 1
        first = denoiser.predict(x, 0.5, cond)
    assert torch.equal(first, denoiser.predict(x, 0.5, cond))


def test_threads_share_a_pipeline() -> None:
    _, denoiser = flux()
    cond = denoiser.encode("a cat", **SIZE)
    x = denoiser.prior(KEYS, cond)
    times = [0.1, 0.3, 0.5, 0.7, 0.9]
    expected = [denoiser.predict(x, t, cond) for t in times]
    found: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(3):
            found[i] = denoiser.predict(x, times[i], cond)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(times))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in range(len(times)))


# Pipelines of one's own, and safety checkers


def test_a_class_of_ones_own_holds_no_mixed_times_but_answers_to_them() -> None:
    import diffusers

    class MyFlux(diffusers.FluxPipeline):  # type: ignore[misc]
        pass

    pipe, known = flux()
    mine = Denoiser(MyFlux(**pipe.components), {"max_sequence_length": 16})
    assert known.mixed_times and not mine.mixed_times
    times = torch.tensor([0.9, 0.2, 0.9], dtype=torch.float64)
    conds = [d.encode("a cat", **SIZE) for d in (known, mine)]
    x = known.prior(KEYS, conds[0])
    torch.testing.assert_close(known.predict(x, times, conds[0]), mine.predict(x, times, conds[1]))


def test_a_safety_checker_flags_and_never_blackens() -> None:
    class Prude(torch.nn.Module):
        dtype, device = torch.float32, torch.device("cpu")

        def forward(self, images: Any, clip_input: Any) -> tuple[Any, list[bool]]:
            return images * 0, [True] * len(images)

    pipe, _ = sd()
    with_checker = zoo.build("StableDiffusionPipeline")
    with_checker.safety_checker = Prude()
    with_checker.feature_extractor = lambda images, return_tensors: _Features(len(images))
    denoiser = Denoiser(with_checker)
    cond = denoiser.encode("a cat", **SIZE)
    images = denoiser.decode(denoiser.prior(KEYS, cond), cond)
    kept = images.clone()
    assert images.std() > 0.01
    assert denoiser.flagged(images) == [True] * 3
    assert torch.equal(images, kept)
    assert isinstance(with_checker.safety_checker, Prude)
    assert Denoiser(pipe).flagged(images) == [False] * 3


class _Features:
    def __init__(self, n: int) -> None:
        self.pixel_values = torch.zeros(n)

    def to(self, *_: Any) -> "_Features":
        return self


def test_the_description_goes_into_records() -> None:
    import json

    _, denoiser = sd()
    assert json.loads(json.dumps(denoiser.description)) == {
        "pipeline": "StableDiffusionPipeline",
        "source": None,
        "scheduler": "DDIMScheduler",
        "prediction": "epsilon",
        "path": "discrete(1000)",
        "dtype": "float32",
        "defaults": {},
    }
    assert denoiser.steps_default == 50 and denoiser.guidance_default == 7.5


def test_a_vae_that_casts_itself_up_is_cast_back() -> None:
    """AuraFlow decodes in float32 where its VAE asks for it, and leaves it there."""
    pipe = zoo.build("AuraFlowPipeline")
    pipe.vae.to(torch.float16)
    denoiser = Denoiser(pipe, zoo.ZOO["AuraFlowPipeline"].defaults)
    cond = denoiser.encode("a cat", **SIZE)
    images = denoiser.decode(denoiser.prior(KEYS, cond), cond)
    assert torch.isfinite(images).all()
    assert pipe.vae.dtype == torch.float16


@pytest.mark.parametrize("name", ["StableDiffusion3Pipeline", "StableDiffusionXLPipeline", "FluxPipeline"])
def test_what_a_float16_vae_cannot_hold_is_decoded_in_float32(name: str) -> None:
    """Black frames of diffusers' SDXL VAE in float16: its activations pass 65504."""
    pipe = zoo.build(name)
    pipe.vae.decoder.conv_in.weight.data *= 3e4  # the norm after it brings it back, where the type can hold it
    pipe.vae.register_to_config(force_upcast=False)  # or SDXL would know
    exact = Denoiser(pipe, zoo.ZOO[name].defaults)
    cond = exact.encode("a cat", **SIZE)
    x0 = exact.prior(KEYS, cond)
    x0 *= torch.tensor([100, 1e-3, 100]).reshape(-1, *[1] * (x0.ndim - 1))  # the second passes
    expected = exact.decode(x0, cond)
    assert expected.isfinite().all()

    pipe.vae.to(torch.float16)
    denoiser = Denoiser(pipe.to(torch.float16), zoo.ZOO[name].defaults)
    with pytest.warns(UserWarning, match="decoded in float32. Load the VAE in bfloat16"):
        images = denoiser.decode(x0, denoiser.encode("a cat", **SIZE))
    torch.testing.assert_close(images, expected, rtol=0, atol=0.02)
    assert pipe.vae.dtype == torch.float16 and "decode" not in vars(pipe.vae)
    assert not denoiser._decode(x0, denoiser.encode("a cat", **SIZE)).isfinite().all()

"""Every pipeline of the zoo against its own run: nothing that a pipeline does may be lost on the way."""

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale.conditions import Condition
from imgscale.denoiser import Denoiser
from imgscale.kernels import ODE
from imgscale.paths import Linear
from imgscale.pipelines import MIXED_TIMES
from tests import zoo

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers and transformers, about themselves

MODES = [
    pytest.param(name, mode, id=f"{name}-{mode}")
    for name, species in zoo.ZOO.items()
    for mode in ("plain", "guided")
    if getattr(species, mode) is not None
]
KEYS = torch.tensor([5, 2**40 + 6])
STEPS = 4  # a divisor of 1000, or DDIM's own steps don't meet its timesteps


@dataclass(frozen=True)
class Case:
    """A pipeline with two prompts, and noise for a batch of two."""

    pipe: Any
    denoiser: Denoiser
    conds: tuple[Condition, Condition]
    x: Tensor
    settings: dict[str, Any]

    @property
    def cond(self) -> Condition:
        return self.conds[0]


@functools.cache
def pipeline(name: str) -> tuple[Any, Denoiser]:
    pipe = zoo.build(name)
    return pipe, Denoiser(pipe, zoo.ZOO[name].defaults)


@functools.cache
def case(name: str, mode: str) -> Case:
    species = zoo.ZOO[name]
    pipe, denoiser = pipeline(name)
    height, width = species.size
    settings = dict(getattr(species, mode))
    conds = [denoiser.encode(prompt, height=height, width=width, **settings) for prompt in ("a red cat", "the dogs!")]
    return Case(pipe, denoiser, (conds[0], conds[1]), denoiser.prior(KEYS, conds[0]), settings)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    """Equal up to `tolerance` of the values' size."""
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max())))


# What the pipeline does by itself


@dataclass(frozen=True)
class Own:
    latents: Tensor
    images: Tensor


def arguments(c: Case, n: int) -> dict[str, Any]:
    """Those of a call of the pipeline for n images of the first prompt, as a user would write them."""
    texts = {name: [text] * n for name, text in c.cond.rows[0].texts.items()}
    return {**copy.deepcopy(dict(c.cond.kwargs)), **texts}


@functools.cache
def own_run(name: str, mode: str) -> Own:
    c = case(name, mode)
    batches = [[int(key)] for key in KEYS] if alone(name, c) else [KEYS.tolist()]
    parts = []
    for keys in batches:
        with stepping(c.pipe.scheduler) as latents:
            images = c.pipe(
                **arguments(c, len(keys)),
                num_inference_steps=steps(name),
                generator=[torch.Generator().manual_seed(key) for key in keys],
                output_type="np",
                return_dict=False,
            )[0]
        parts.append((latents[-1].float(), torch.as_tensor(images).permute(0, 3, 1, 2)[:, :3].float()))
    return Own(*(torch.cat(column) for column in zip(*parts, strict=True)))


def steps(name: str) -> int:
    """LCM adds noise after every step but the last."""
    return 1 if name == "LatentConsistencyModelPipeline" else STEPS


def alone(name: str, c: Case) -> bool:
    """PRX guides one image at a time only."""
    return name == "PRXPipeline" and c.cond.passes == 2


@contextmanager
def stepping(scheduler: Any) -> Iterator[list[Tensor]]:
    """The latents after every step that the scheduler takes."""
    seen: list[Tensor] = []
    take = scheduler.step

    @functools.wraps(take)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = take(*args, **kwargs)
        seen.append(result[0] if isinstance(result, tuple) else result.prev_sample)
        return result

    scheduler.step = step
    try:
        yield seen
    finally:
        del scheduler.step


def solve(c: Case, n: int) -> Tensor:
    """The probability-flow ODE on the model's own grid."""
    x, step = c.x, ODE()
    times = c.denoiser.grid(n, c.cond)
    assert len(times) == n + 1 and times[-1] == 0 and (times.diff() < 0).all()
    for t, t_next in zip(times[:-1], times[1:], strict=True):
        x = step(c.denoiser.path, t, t_next, x, c.denoiser.predict(x, t, c.cond), None)
    return x


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_the_ode_on_its_grid_is_its_own_run(name: str, mode: str) -> None:
    close(solve(case(name, mode), steps(name)), own_run(name, mode).latents)


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_decoding_is_its_own(name: str, mode: str) -> None:
    c, own = case(name, mode), own_run(name, mode)
    images = c.denoiser.decode(own.latents, c.cond)
    assert images.shape == (len(KEYS), 3, c.cond.height, c.cond.width)
    assert images.dtype == torch.float32 and images.min() >= 0 and images.max() <= 1
    assert images.std() > 0.01  # not black
    close(images, own.images)


# The network's answers, guided and turned into x0 by hand

Guidance = Callable[[list[Tensor], float, float], Tensor]


def one(outputs: list[Tensor], g: float, s: float) -> Tensor:
    return outputs[0]


def halves(outputs: list[Tensor], g: float, s: float) -> Tensor:
    without, with_prompt = outputs[0].chunk(2)
    return without + g * (with_prompt - without)


def perturbed(outputs: list[Tensor], g: float, s: float) -> Tensor:
    with_prompt, disturbed = outputs[0].chunk(2)
    return with_prompt + s * (with_prompt - disturbed)


def thirds(outputs: list[Tensor], g: float, s: float) -> Tensor:
    without, with_prompt, disturbed = outputs[0].chunk(3)
    return without + g * (with_prompt - without) + s * (with_prompt - disturbed)


def pair(outputs: list[Tensor], g: float, s: float) -> Tensor:
    with_prompt, without = outputs
    return without + g * (with_prompt - without)


def normalised(outputs: list[Tensor], g: float, s: float) -> Tensor:
    guided = pair(outputs, g, s)
    return guided * (outputs[0].square().sum(-1, keepdim=True) / guided.square().sum(-1, keepdim=True)).sqrt()


def beyond(outputs: list[Tensor], g: float, s: float) -> Tensor:
    return pair(outputs, g + 1, s)


def first_channels(outputs: list[Tensor], g: float, s: float) -> Tensor:
    with_prompt, without = outputs[0].chunk(2)
    return torch.cat([pair([with_prompt, without], g, s)[:, :3], with_prompt[:, 3:]], 1)


def beyond_halves(outputs: list[Tensor], g: float, s: float) -> Tensor:
    return beyond([*outputs[0].chunk(2)], g, s)


def beyond_swapped(outputs: list[Tensor], g: float, s: float) -> Tensor:
    return beyond([*reversed(outputs[0].chunk(2))], g, s)


GUIDANCE: dict[str, Guidance] = {
    "ChromaPipeline": pair,
    "CogView4Pipeline": pair,
    "Flux2KleinPipeline": pair,
    "FluxKontextPipeline": pair,
    "FluxPipeline": pair,
    "Ideogram4Pipeline": pair,
    "Kandinsky3Pipeline": beyond_swapped,
    "Krea2Pipeline": beyond,
    "LatentConsistencyModelPipeline": one,
    "Lumina2Pipeline": normalised,
    "LuminaPipeline": first_channels,
    "NucleusMoEImagePipeline": normalised,
    "OvisImagePipeline": pair,
    "QwenImage21Pipeline": pair,
    "QwenImagePipeline": normalised,
    "ZImagePipeline": beyond_halves,
}
TOWARDS_DATA = {
    "Ideogram4Pipeline",
    "Lumina2Pipeline",
    "LuminaPipeline",
    "NucleusMoEImagePipeline",
    "ZImagePipeline",
}
"""Flow models trained on x0 - eps."""


@contextmanager
def listening(pipe: Any) -> Iterator[list[Tensor]]:
    """What the networks answer, call by call."""
    outputs: list[Tensor] = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        first = output[0]
        outputs.append(torch.stack(first).squeeze(2) if isinstance(first, list) else first)

    names = ("transformer", "unet", "unconditional_transformer")
    networks = [getattr(pipe, name) for name in names if getattr(pipe, name, None) is not None]
    handles = [network.register_forward_hook(hook) for network in networks]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def guidance(name: str, c: Case) -> Guidance:
    if "PAG" in name and c.settings["pag_scale"] > 0:
        return thirds if c.settings["guidance_scale"] > 1 else perturbed
    if c.cond.passes == 1:
        return one
    return GUIDANCE.get(name, halves)


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_predicting_is_the_network_guided_and_turned_into_x0(name: str, mode: str) -> None:
    c = case(name, mode)
    x = c.x[:1] if alone(name, c) else c.x
    t = c.denoiser.grid(5, c.cond)[2]
    with listening(c.pipe) as outputs:
        x0 = c.denoiser.predict(x, t, c.cond)
    rows = sum(len(output) for output in outputs)
    assert rows == c.cond.passes * len(x)
    if x.ndim == 3:  # text tokens may come first
        outputs = [output[:, -x.shape[1] :] for output in outputs]
    else:  # a learned variance may come in as many channels again
        outputs = [output[:, : x.shape[1]] for output in outputs]
    scale = c.settings.get("true_cfg_scale", c.settings.get("guidance_scale", 0.0))
    answer = guidance(name, c)(outputs, scale, c.settings.get("pag_scale", 0.0))
    if name in TOWARDS_DATA:
        answer = -answer
    if isinstance(c.denoiser.path, Linear):
        expected = x - float(t) * answer
    else:
        squared = float(c.pipe.scheduler.alphas_cumprod[round(float(t) * 1000) - 1])
        alpha, sigma = squared**0.5, (1 - squared) ** 0.5
        velocity = c.pipe.scheduler.config.prediction_type == "v_prediction"
        expected = alpha * x - sigma * answer if velocity else (x - sigma * answer) / alpha
    assert answer.std() > 0.01
    close(x0, expected)


# Batches


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_rows_depend_on_nothing_but_themselves(name: str, mode: str) -> None:
    c = case(name, mode)
    assert torch.equal(c.denoiser.prior(KEYS.flip(0), c.cond).flip(0), c.x)
    assert torch.equal(c.denoiser.prior(KEYS[1:], c.cond), c.x[1:])
    assert not torch.allclose(c.x[0], c.x[1])
    t = c.denoiser.grid(5, c.cond)[1]
    close(c.denoiser.predict(c.x, t, c.cond)[1:], c.denoiser.predict(c.x[1:], t, c.cond))


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_two_prompts_in_one_batch(name: str, mode: str) -> None:
    c = case(name, mode)
    assert c.conds[0].key == c.conds[1].key  # the prompts are of one length
    t = c.denoiser.grid(5, c.cond)[1]
    stacked = c.denoiser.predict(c.x, t, Condition.stack(c.conds, [1, 1]))
    apart = [c.denoiser.predict(c.x[i : i + 1], t, cond) for i, cond in enumerate(c.conds)]
    close(stacked, torch.cat(apart))
    swapped = c.denoiser.predict(c.x, t, Condition.stack(c.conds[::-1], [1, 1]))
    assert not torch.allclose(stacked, swapped, atol=1e-6)  # the prompt does something


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_mixed_times(name: str, mode: str) -> None:
    c = case(name, mode)
    times = c.denoiser.grid(5, c.cond)[1:3]
    mixed = c.denoiser.predict(c.x, times, c.cond)
    rows = [c.denoiser.predict(c.x[i : i + 1], times[i], c.cond) for i in range(2)]
    close(mixed, torch.cat(rows))
    assert not torch.allclose(mixed, c.denoiser.predict(c.x, times[0], c.cond), atol=1e-5)  # the time does something


@pytest.mark.parametrize("name", zoo.NAMES)
def test_mixed_times_are_recorded_as_measured(name: str) -> None:
    cases = [case(name, mode) for mode in ("plain", "guided") if getattr(zoo.ZOO[name], mode) is not None]
    measured = {c.cond.passes: table().measured_repeats(c.denoiser, c.cond, c.x) for c in cases}
    assert MIXED_TIMES.get(name, {}) == (measured if all(measured.values()) else {})
    assert cases[0].denoiser.mixed_times == all(measured.values())


# What a search must not do to a pipeline


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_prompt_is_encoded_once(name: str, mode: str) -> None:
    c = case(name, mode)
    calls: list[str] = []
    parts = [module for part, module in c.pipe.components.items() if "text_encoder" in part and module]
    handles = [module.register_forward_hook(lambda *_: calls.append("encoded")) for module in parts]
    try:
        height, width = zoo.ZOO[name].size
        cond = c.denoiser.encode("two blue stars", height=height, width=width, **c.settings)
        if name != "Ideogram4Pipeline":  # it calls the parts of its text encoder, not the whole
            assert calls
        calls.clear()
        x = c.denoiser.prior(torch.tensor([1, 2, 3]), cond)
        times = c.denoiser.grid(4, cond)
        c.denoiser.predict(x, times[0], cond)
        c.denoiser.predict(x[:1], times[1], cond)
        c.denoiser.predict(x, times[:3], cond)
        c.denoiser.decode(x, cond)
        assert c.denoiser.encode("two blue stars", height=height, width=width, **c.settings) is cond
        assert not calls
    finally:
        for handle in handles:
            handle.remove()


def state(pipe: Any) -> dict[str, Any]:
    """All that a call might change: attributes, config, scheduler, networks."""
    found = {f"pipe.{name}": value for name, value in vars(pipe).items() if not isinstance(value, dict)}
    found |= {f"config.{name}": value for name, value in pipe.config.items()}
    found |= {f"bar.{name}": value for name, value in pipe._progress_bar_config.items()}
    found |= {f"scheduler.{name}": str(value) for name, value in vars(pipe.scheduler).items()}
    parts: dict[str, Any] = pipe.components
    for part, module in parts.items():
        if isinstance(module, torch.nn.Module):
            found[f"{part}.mode"] = module.training, module.dtype, module.device
            found[f"{part}.hooks"] = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
            if hasattr(module, "attn_processors"):
                processors: Any = module.attn_processors
                found |= {f"{part}.{key}": value for key, value in processors.items()}
    return found


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_the_pipeline_is_left_as_found(name: str, mode: str) -> None:
    c = case(name, mode)
    before, seed = state(c.pipe), torch.get_rng_state()
    height, width = zoo.ZOO[name].size
    cond = c.denoiser.encode("a green square", height=height, width=width, **c.settings)
    times = c.denoiser.grid(4, cond)
    c.denoiser.decode(c.denoiser.predict(c.denoiser.prior(KEYS, cond), times[0], cond), cond)
    assert state(c.pipe) == before
    assert torch.equal(torch.get_rng_state(), seed)

    network = getattr(c.pipe, "transformer", None) or c.pipe.unet

    def fail(*_: Any) -> None:
        raise ArithmeticError("inside the network")

    handle = network.register_forward_hook(fail)
    try:
        with pytest.raises(ArithmeticError):
            c.denoiser.predict(c.x, times[0], cond)
    finally:
        handle.remove()
    assert state(c.pipe) == before
    assert torch.isfinite(c.denoiser.predict(c.x, times[0], cond)).all()


# The page about it


@functools.cache
def table() -> ModuleType:
    path = Path(__file__).parent.parent / "scripts" / "pipelines_table.py"
    spec = importlib.util.spec_from_file_location("pipelines_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["FluxPipeline", "StableDiffusionPipeline", "AuraFlowPipeline"])
def test_the_table_is_up_to_date(name: str) -> None:
    page = (Path(__file__).parent.parent / "docs" / "pipelines.md").read_text(encoding="utf-8")
    assert table().row(name) in page


def test_every_text_to_image_pipeline_of_diffusers_is_in_the_table() -> None:
    page = (Path(__file__).parent.parent / "docs" / "pipelines.md").read_text(encoding="utf-8")
    assert [name for name in table().text_to_image_classes() if f"`{name}`" not in page] == []

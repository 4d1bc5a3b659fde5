"""The models made from `shapes-flow`: what teaches them, and what ships."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from safetensors import safe_open
from torch import Tensor, nn

import imgscale
from imgscale.assets.shapes import training
from imgscale.assets.shapes.evaluate_flow import readable
from imgscale.assets.shapes.train_ddpm import Teacher, scheduler, timesteps
from imgscale.assets.shapes.train_turbo import TIMES, matching, walk
from imgscale.assets.shapes.training import run
from imgscale.models import ModelSettings, bundled, bundled_folder
from imgscale.paths import Discrete
from imgscale.verifiers.shapes import Shapes

NAMES = ("shapes-turbo", "shapes-ddpm")
PROMPT = "a blue circle"


class Knowing(nn.Module):
    """A flow network that always means the picture ``x0``; what it was called with is kept."""

    def __init__(self, x0: Tensor) -> None:
        super().__init__()
        self.x0 = nn.Parameter(x0)
        self.seen: list[tuple[Tensor, float]] = []

    def forward(self, x: Tensor, context: Tensor, pooled: Tensor, t: Tensor, return_dict: bool) -> tuple[Tensor]:
        self.seen.append((x, float(t[0]) / 1000))
        return ((x - self.x0) / (t / 1000)[:, None, None, None],)


def test_the_student_walks_the_steps_that_its_scheduler_takes() -> None:
    grid = FlowMatchEulerDiscreteScheduler(shift_terminal=TIMES[-1])
    grid.set_timesteps(len(TIMES))
    assert grid.sigmas.tolist() == pytest.approx([*TIMES, 0])

    chance = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 4, 16, 16, generator=chance), torch.randn(2, 4, 16, 16, generator=chance)
    network, fresh = Knowing(x0), torch.tensor([False, True])
    estimates = walk(network, noise, (torch.empty(0), torch.empty(0)), fresh, chance)
    assert len(estimates) == len(TIMES) and all(torch.allclose(e, x0, atol=1e-5) for e in estimates)
    assert [t for _, t in network.seen] == pytest.approx(TIMES)
    for x, t in network.seen[1:]:
        implied = (x - (1 - t) * x0) / t
        assert not x.requires_grad  # a step isn't blamed for the ones before
        assert torch.allclose(implied[0], noise[0], atol=1e-4)
        assert (implied[1] - noise[1]).abs().mean() > 0.5 and implied[1].std() == pytest.approx(1, abs=0.1)


def test_pictures_move_from_what_is_seen_to_what_is_wanted() -> None:
    chance = torch.Generator().manual_seed(1)
    x0, wanted, seen = (torch.randn(3, 4, 16, 16, generator=chance) for _ in range(3))
    x0.requires_grad_()
    matching(x0, wanted, seen).backward()
    assert x0.grad is not None
    for grad, now, there, here in zip(x0.grad, x0.detach(), wanted, seen, strict=True):
        assert torch.allclose(grad * x0.numel(), (here - there) / (now - there).abs().mean(), rtol=1e-4, atol=1e-5)
    assert matching(x0, wanted, wanted).item() == 0


def test_a_part_may_learn_at_a_rate_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "HERE", tmp_path)
    model = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("one", "fast", "still")})
    for part in model.values():
        part.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        value = sum((part(torch.ones(2)).square().sum() for part in model.values()), torch.zeros(()))
        return value, {"loss": value.item()}

    args: Any = argparse.Namespace(
        seed=0, device="cpu", steps=1, lr=1e-3, warmup=1, decay=0.25, log_every=1, save_every=1
    )
    run(args, "rates", model, loss, lambda: None, rates={"fast": 3.0, "still": 0.0})
    saved = torch.load(tmp_path / "checkpoints" / "rates.pt", weights_only=True)["model"]
    moved = {name: 1 - saved[f"{name}.bias"].item() for name in model}
    assert moved["one"] == pytest.approx(1e-3, rel=1e-2)
    assert moved["fast"] == pytest.approx(3e-3, rel=1e-2) and moved["still"] == 0


def test_timesteps_are_where_the_picture_is_decided() -> None:
    path = Discrete(scheduler().alphas_cumprod)
    drawn = timesteps(4000, path, torch.Generator().manual_seed(0))
    flow = torch.sigmoid(-path.log_snr(path.time(drawn)) / 2)  # the time of a flow model that sees as much
    assert drawn.min() < 50 and drawn.max() == 999 and 0.09 < (drawn >= 990).float().mean() < 0.2
    assert ((flow > 0.55) & (flow < 0.95)).float().mean() > 0.6


@pytest.mark.weights
def test_the_teacher_says_on_another_path_what_it_says_on_its_own() -> None:
    teacher, path = Teacher("cpu"), Discrete(scheduler().alphas_cumprod)
    t = path.time(torch.tensor([700, 400]))
    at = torch.sigmoid(-path.log_snr(t) / 2)
    chance = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(2, 4, 16, 16, generator=chance) for _ in range(2))
    alpha, sigma = (c(t).float()[:, None, None, None] for c in (path.alpha, path.sigma))
    told, tokens = teacher(alpha * x0 + sigma * eps, t, path, [PROMPT, PROMPT], torch.tensor([False, True]))
    assert [tuple(part.shape) for part in tokens] == [(2, 64, 192)] * 2
    denoiser = imgscale.load("shapes-flow", device="cpu").engine.denoiser
    for i, prompt in enumerate([PROMPT, ""]):
        cond = denoiser.encode(prompt, guidance_scale=1.0)
        linear = (1 - at[i]).float() * x0[i] + at[i].float() * eps[i]
        with torch.inference_mode():
            own = denoiser.predict(linear[None], float(at[i]), cond)
        assert torch.allclose(told[i], own[0], atol=1e-3)


@pytest.mark.weights
@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_model_draws_what_it_is_asked_for(name: str) -> None:
    scaler = imgscale.load(name, device="cpu")
    steps = {"shapes-turbo": 4, "shapes-ddpm": 12}[name]
    assert scaler.settings.steps == steps and scaler.settings.clip == "shapes-clip"
    assert scaler.settings.distilled == (name == "shapes-turbo")
    passes = 1 if name == "shapes-turbo" else 2
    cond = scaler.engine.denoiser.encode(PROMPT, guidance_scale=scaler.settings.guidance_scale)
    assert cond.passes == passes and cond.latent_shape == (4, 16, 16) and (cond.height, cond.width) == (64, 64)
    outputs = scaler(
        [PROMPT] * 6,
        searcher="best-of-n",
        options={"n": 1},
        verifier="shapes",
        budget=100,
        seed=range(6),
        plain=False,
        progress=False,
    )
    assert {output.nfe for output in outputs} == {steps}
    scores = [output.scores["shapes"] for output in outputs]
    assert sum(score == 1 for score in scores) >= 2, scores


@pytest.mark.weights
@pytest.mark.parametrize("name", sorted(bundled()))
def test_a_bundled_model_is_a_plain_pipeline_too(name: str) -> None:
    """As its card calls it: no dtype given, weights in float16."""
    pipe = DiffusionPipeline.from_pretrained(bundled()[name])
    pipe.set_progress_bar_config(disable=True)
    settings = ModelSettings.read(bundled()[name])
    told = {"guidance_scale": settings.guidance_scale, "num_inference_steps": settings.steps, "output_type": "pt"}
    images = pipe([PROMPT] * 4, generator=[torch.Generator().manual_seed(i) for i in range(4)], **told).images
    assert (Shapes()(torch.as_tensor(images).float(), [PROMPT] * 4) == 1).any()


@pytest.mark.weights
def test_the_first_estimate_of_the_few_step_model_can_be_read() -> None:
    def clear(name: str) -> int:
        scaler = imgscale.load(name, device="cpu")
        denoiser, guidance = scaler.engine.denoiser, scaler.settings.guidance_scale
        cond = denoiser.encode(PROMPT, guidance_scale=guidance)
        if name == "shapes-turbo":
            assert denoiser.grid(4, cond).tolist() == pytest.approx([*TIMES, 0])
        with torch.inference_mode():
            images = denoiser.decode(denoiser.predict(denoiser.prior(torch.arange(16), cond), 1.0, cond), cond)
        return sum(readable(images))

    assert clear("shapes-turbo") > clear("shapes-flow") + 2


@pytest.mark.parametrize("name", NAMES)
def test_what_ships_is_small_and_names_no_folder(name: str) -> None:
    folder = bundled()[name]
    files = [*folder.rglob("*.safetensors")]
    for file in files:
        with safe_open(file, "pt") as weights:
            assert {weights.get_slice(key).get_dtype() for key in weights.keys()} <= {"F16", "I64"}, file
    assert sum(file.stat().st_size for file in files) < 20e6
    for file in folder.rglob("*.json"):
        assert "_name_or_path" not in file.read_text()
    told = json.loads((folder / "evaluation.json").read_text())
    assert f"{told['overall']:.1%}" in (folder / "README.md").read_text()
    assert (bundled_folder() / "logs" / f"{name}.jsonl").exists()

"""Trains `shapes-ddpm`: a small Stable Diffusion 1 (UNet with cross-attention, cosine noise schedule, v prediction).

    python -m imgscale.assets.shapes.train_ddpm [--device cuda] [--steps 2550]

What it learns from isn't the noise that was drawn but what `shapes-flow` makes of the same noisy latents: at equal
log-SNR, both models see the same thing, and a trained model's estimate has the expectation of the drawn one without
most of its variance (``--truth`` mixes the drawn one in). Two linear probes, which aren't exported, also tell the
teacher's image tokens from the UNet's 8 x 8 features (as REPA does, Yu et al. 2024). Captions are dropped for
classifier-free guidance, and then the teacher's are, too. The text encoder starts as the first of the teacher's.
Writes `shapes-ddpm/`, a folder that `StableDiffusionPipeline.from_pretrained` loads, in float16.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from diffusers import DDIMScheduler, StableDiffusion3Pipeline, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel

from imgscale.assets.shapes.text import LENGTH
from imgscale.assets.shapes.train_flow import latents
from imgscale.assets.shapes.training import HERE, arguments, run, ship, shuffled
from imgscale.paths import Discrete, Linear, convert

WIDTHS = (64, 128)
# The teacher's blocks, the first being 0, that the UNet's lower level should tell before and after its middle.
TAUGHT = (1, 3)
SETTINGS = {
    "steps": 12,
    "guidance_scale": 3.0,
    "clip": "shapes-clip",
    "tiny": "shapes-tiny",
    "summary": "UNet of Stable Diffusion 1's kind (DDPM, 6 M parameters) of the shapes world, 64x64",
}


class Generator(nn.Module):
    """The trained parts of the pipeline as one module."""

    def __init__(self) -> None:
        super().__init__()
        self.text = CLIPTextModel.from_pretrained(HERE / "shapes-flow" / "text_encoder", dtype=torch.float32)
        self.unet = UNet2DConditionModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            block_out_channels=WIDTHS,
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2),
            attention_head_dim=WIDTHS[1] // 32,  # which means the number of heads
            cross_attention_dim=self.text.config.hidden_size,
            norm_num_groups=16,
        ).to(memory_format=torch.channels_last)
        self.probes = nn.ModuleList(nn.Linear(WIDTHS[1], 192) for _ in TAUGHT)
        self._passed: dict[int, Tensor] = {}
        self.unet.down_blocks[-1].register_forward_hook(lambda block, given, out: self._passed.update({0: out[0]}))
        self.unet.mid_block.register_forward_hook(lambda block, given, out: self._passed.update({1: out}))

    def forward(self, x: Tensor, index: Tensor, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """v at ``x`` (n, 4, 16, 16) and timesteps ``index`` (n,) for captions ``tokens`` (n, 16), and what probes say
        of 64 patches each, (n, 64, 192).
        """
        v: Tensor = self.unet(x, index, self.text(tokens)[0], return_dict=False)[0]
        return v, [probe(self._passed[i].flatten(2).mT) for i, probe in enumerate(self.probes)]


class Teacher:
    """`shapes-flow` as an oracle for the same noisy latents on another path."""

    def __init__(self, device: str) -> None:
        self.pipe = StableDiffusion3Pipeline.from_pretrained(HERE / "shapes-flow", dtype=torch.float32).to(device)
        self._passed: dict[int, Tensor] = {}
        for i in TAUGHT:
            hook = partial(lambda i, block, given, out: self._passed.update({i: out[1]}), i)
            self.pipe.transformer.transformer_blocks[i].register_forward_hook(hook)

    @torch.no_grad()
    def __call__(
        self, x: Tensor, t: Tensor, path: Discrete, captions: list[str], drop: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Its estimate of x0 for ``x`` (n, 4, 16, 16) on ``path`` at ``t``, without guidance, and its image tokens.

        Where ``drop`` (n,), without the caption.
        """
        text, nothing, pooled, pooled_nothing = self.pipe.encode_prompt(
            captions, captions, captions, max_sequence_length=1
        )
        text = torch.where(drop[:, None, None], nothing, text)
        pooled = torch.where(drop[:, None], pooled_nothing, pooled)
        moved, at = convert(x, t, path, Linear())
        at = at.to(x)
        velocity = self.pipe.transformer(moved, text, pooled, at * 1000, return_dict=False)[0]
        tokens = [nn.functional.layer_norm(self._passed[i], self._passed[i].shape[-1:]) for i in TAUGHT]
        return moved - at[:, None, None, None] * velocity, tokens


def timesteps(n: int, path: Discrete, chance: torch.Generator) -> Tensor:
    """Which of the model's timesteps to train on: most where `train_flow` does, some anywhere, some at the start."""
    flow = Linear().log_snr(torch.sigmoid(1.2 + 0.8 * torch.randn(n, generator=chance).double()))
    focused = path.index(path.time_at(flow)).round().long()
    anywhere = torch.randint(path.steps, (n,), generator=chance)
    start = torch.randint(path.steps - 10, path.steps, (n,), generator=chance)
    share = torch.rand(n, generator=chance)
    return torch.where(share < 0.65, focused, torch.where(share < 0.9, anywhere, start))


def scheduler() -> DDIMScheduler:
    return DDIMScheduler(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,  # of no effect here, but the pipeline insists
    )


def main() -> None:
    args = arguments(
        __doc__,
        steps=2550,
        batch=32,
        lr=1e-3,
        warmup=100,
        pool=60000,
        log_every=20,
        save_every=50,
        truth=0.0,  # share of the drawn noise in the target
        probe=0.5,  # weight of the probes
    )
    teacher = Teacher(args.device)
    pipe = teacher.pipe
    # This pipeline knows no shift of the latents: they keep the mean that Stable Diffusion 3 takes off.
    mean = pipe.vae.config.shift_factor * pipe.vae.config.scaling_factor
    data = latents(pipe.vae, args.pool, 1, args.device)
    pad = {"padding": "max_length", "max_length": LENGTH, "truncation": True, "return_tensors": "pt"}
    tokens, nothing = pipe.tokenizer(data["captions"], **pad).input_ids, pipe.tokenizer("", **pad).input_ids
    model = Generator()
    print({k: sum(p.numel() for p in m.parameters()) for k, m in model.named_children()}, flush=True)
    path = Discrete(scheduler().alphas_cumprod)
    batches: list[np.ndarray] = []
    order = shuffled(args.seed, args.pool, args.batch)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        while len(batches) <= step:  # a resumed run skips to its place
            batches.append(next(order))
        chance = torch.Generator().manual_seed(args.seed * 10**7 + step)
        x0 = data["x"][batches[step]].float()
        eps = torch.randn(x0.shape, generator=chance)
        index = timesteps(len(x0), path, chance)
        drop = torch.rand(len(x0), generator=chance) < 0.12
        ids = torch.where(drop[:, None], nothing, tokens[batches[step]])
        t = path.time(index)
        alpha, sigma = (c(t).float()[:, None, None, None].to(args.device) for c in (path.alpha, path.sigma))
        x0, eps, index, drop, ids = (v.to(args.device) for v in (x0, eps, index, drop, ids))
        x = alpha * x0 + sigma * eps
        told, image = teacher(x, t, path, [data["captions"][i] for i in batches[step]], drop)
        v, said = model((x + alpha * mean).contiguous(memory_format=torch.channels_last), index, ids)
        wanted = (1 - args.truth) * told + args.truth * x0
        value = (v - ((alpha * x - wanted) / sigma - sigma * mean)).square().mean()
        alike = torch.stack([(a - b).square().mean() for a, b in zip(said, image, strict=True)]).mean()
        return value + args.probe * alike, {"loss": value.item(), "probe": alike.item()}

    def finish() -> None:
        pipe.vae.register_to_config(shift_factor=0.0)
        made = StableDiffusionPipeline(
            vae=pipe.vae,
            text_encoder=model.text,
            tokenizer=pipe.tokenizer,
            unet=model.unet.to(memory_format=torch.contiguous_format),
            scheduler=scheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        ship(made, "shapes-ddpm", SETTINGS)

    run(args, "shapes-ddpm", model, loss, finish)


if __name__ == "__main__":
    main()

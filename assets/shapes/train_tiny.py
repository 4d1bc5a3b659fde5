"""Trains `shapes-tiny`: a tiny autoencoder (`AutoencoderTiny`) whose decoder draws previews of the shapes models.

    python -m imgscale.assets.shapes.train_tiny [--device cuda] [--steps 2000]

It learns what the VAE's own decoder makes of latents: of clean ones, and of the estimates of x0 that `shapes-flow` has
on the way, since previews are mostly of these. Its encoder, which nothing here needs, learns the latents beside it.
Writes `shapes-tiny/`, a folder that `AutoencoderTiny.from_pretrained` loads, in float16, and what it measured in it.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from diffusers import AutoencoderTiny, StableDiffusion3Pipeline
from torch import Tensor, nn

from imgscale.assets.shapes.train_flow import latents
from imgscale.assets.shapes.training import HERE, arguments, run, shuffled

NAME = "shapes-tiny"
CHANNELS = 24


class Tiny(nn.Module):
    """The autoencoder, on latents as `shapes-ddpm` has them: scaled, with their mean.

    Args:
        mean: What `shapes-flow` takes off its latents.
    """

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.vae = AutoencoderTiny(
            encoder_block_out_channels=(16, 16, 16),
            decoder_block_out_channels=(CHANNELS,) * 3,
            num_encoder_blocks=(1, 1, 1),
            num_decoder_blocks=(2, 1, 0),
            latent_channels=4,
            scaling_factor=1.0,
            shift_factor=mean,  # pipelines that take it off add this one again
        ).to(memory_format=torch.channels_last)

    def forward(self, latents: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images of latents (n, 4, 16, 16), and latents of images (n, 3, 64, 64) in [-1, 1]."""
        return self.vae.decode(latents, return_dict=False)[0], self.vae.encode(images, return_dict=False)[0]


@torch.no_grad()
def previews(pipe: StableDiffusion3Pipeline, x0: Tensor, captions: list[str], seed: int) -> Tensor:
    """What the model takes noisy versions of ``x0`` (n, 4, 16, 16) for, at times anywhere."""
    found = []
    chance = torch.Generator().manual_seed(seed)
    device = pipe.transformer.device
    for part, texts in zip(x0.split(32), [captions[i : i + 32] for i in range(0, len(captions), 32)], strict=True):
        t = torch.rand(len(part), generator=chance).to(device)
        noise = torch.randn(part.shape, generator=chance).to(device)
        text, _, pooled, _ = pipe.encode_prompt(texts, texts, texts, max_sequence_length=1)
        place = t[:, None, None, None]
        x = (1 - place) * part.to(device) + place * noise
        velocity = pipe.transformer(x, text, pooled, t * 1000, return_dict=False)[0]
        found.append((x - place * velocity).cpu())
    return torch.cat(found)


def main() -> None:
    args = arguments(
        __doc__, steps=2000, batch=16, lr=2e-3, warmup=100, pool=60000, seen=4000, log_every=100, save_every=250
    )
    pipe = StableDiffusion3Pipeline.from_pretrained(HERE / "shapes-flow", dtype=torch.float32).to(args.device)
    teacher = pipe.vae.to(memory_format=torch.channels_last).requires_grad_(False)
    scale, mean = teacher.config.scaling_factor, teacher.config.shift_factor * teacher.config.scaling_factor
    data = latents(teacher, args.pool, 1, args.device)
    seen = previews(pipe, data["x"][: args.seen].float(), data["captions"][: args.seen], args.seed)
    clean = data["x"][args.seen : 3 * args.seen].float()
    pool = torch.cat([seen, clean, clean[: args.seen // 2] + 0.1 * torch.randn_like(clean[: args.seen // 2])]) + mean
    model = Tiny(mean)
    order = shuffled(args.seed, len(pool), args.batch)
    batches: list[Tensor] = []

    def target(x: Tensor) -> Tensor:
        with torch.no_grad():
            image: Tensor = teacher.decode(x / scale, return_dict=False)[0]
        return image

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        while len(batches) <= step:  # a resumed run skips to its place
            batches.append(torch.from_numpy(next(order)))
        x = pool[batches[step]].to(args.device)
        wanted = target(x)
        image, code = model(x, wanted)
        off = image - wanted
        value = off.abs().mean() + off.square().mean() + 0.1 * (code - x).square().mean()
        return value, {"loss": value.item(), "l1": off.abs().mean().item()}

    def finish() -> None:
        measured = evaluate(model.vae.eval(), teacher, pipe, scale, mean, args.device)
        model.vae.half().cpu().save_pretrained(HERE / NAME, safe_serialization=True)
        config = json.loads((HERE / NAME / "config.json").read_text())
        del config["block_out_channels"]  # which diffusers writes, and warns of when it reads it
        (HERE / NAME / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (HERE / NAME / "evaluation.json").write_text(json.dumps(measured, indent=1) + "\n")
        print(json.dumps(measured))

    run(args, NAME, model, loss, finish)


@torch.no_grad()
def evaluate(
    tiny: AutoencoderTiny, vae: Any, pipe: StableDiffusion3Pipeline, scale: float, mean: float, device: str
) -> dict[str, float]:
    """PSNR against the VAE's own decoder on fresh latents and previews, and how long both take an image."""
    fresh = latents(vae, 2000, 7, device)
    x, captions = fresh["x"][:256].float(), fresh["captions"][:256]
    found: dict[str, float] = {}
    for name, z in {"clean": x, "previews": previews(pipe, x, captions, 10**6)}.items():
        parts = [
            (tiny.decode(p, return_dict=False)[0] - vae.decode(p / scale, return_dict=False)[0]).cpu()
            for p in (z.to(device) + mean).split(32)
        ]
        found[f"psnr_{name}_db"] = round(float(-10 * (torch.cat(parts) / 2).square().mean().log10()), 2)
    batch = (x[:32] + mean).to(device)
    for name, decoder, x in (("tiny", tiny, batch), ("vae", vae, batch / scale)):
        times = []
        for _ in range(8):
            began = time.perf_counter()
            decoder.decode(x, return_dict=False)
            times.append(time.perf_counter() - began)
        found[f"ms_{name}"] = round(1000 * min(times) / len(batch), 2)
    return found


if __name__ == "__main__":
    main()

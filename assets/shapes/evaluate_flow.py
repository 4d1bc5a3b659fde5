"""How often a generator's plain samples satisfy the 200 test prompts, by the oracle, per category.

    python -m imgscale.assets.shapes.evaluate_flow [--model shapes-flow] [--seeds 4] [--steps 0] [--guidance 0]

Writes the model's `evaluation.json` (with the defaults) and prints it; of a few-step model also how much of its first
estimate, x0 at t = 1, can be read. ``--first 1`` prints that for any model, ``--sheet FILE`` draws twelve samples, each
below its estimates on the way. ``--direct 1`` instead calls the folder as `DiffusionPipeline.from_pretrained` gives it,
with that pipeline's own defaults (Stable Diffusion 3: 28 steps, guidance 7, T5 padding).
``--decided 1`` tells where on the way the picture is decided: it noises true renders to a time and solves from there.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import imgscale
from imgscale.assets.shapes.prompts import own_seed
from imgscale.assets.shapes.training import HERE, arguments, to_tensor
from imgscale.assets.shapes.world import parse, render
from imgscale.kernels import ODE
from imgscale.verifiers.shapes import Shapes, read


def main() -> None:
    args = arguments(
        __doc__, seeds=4, steps=0, guidance=0.0, limit=0, direct=0, decided=0, first=0, sheet="", model="shapes-flow"
    )
    rows = json.loads((HERE / "prompts.json").read_text())
    if args.limit:
        kinds = dict.fromkeys(row["category"] for row in rows)
        rows = [row for kind in kinds for row in [r for r in rows if r["category"] == kind][: args.limit]]
    if args.decided:
        decided(rows)
        return
    if args.sheet:
        sheet(args)
        return
    if args.first:
        print(json.dumps(first(args.model, rows)))
        return
    hits: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        for start in range(0, len(rows), 50):
            part = rows[start : start + 50]
            texts = [row["prompt"] for row in part]
            scores = direct(args.model, texts, seed) if args.direct else searched(args, texts, seed)
            for row, score in zip(part, scores, strict=True):
                hits.setdefault(row["category"], []).append(float(score == 1))
    every = [hit for part in hits.values() for hit in part]
    result: dict[str, Any] = {
        "what": "share of plain samples that the oracle finds exactly as asked",
        "prompts": len(rows),
        "seeds": args.seeds,
        "overall": round(float(np.mean(every)), 4),
        "categories": {kind: round(float(np.mean(part)), 4) for kind, part in hits.items()},
    }
    if _scaler(args.model).settings.distilled and not (args.direct or args.steps or args.guidance):
        result["first_estimate"] = first(args.model, rows)
    print(json.dumps(result, indent=1))
    if not (args.direct or args.limit or args.steps or args.guidance):
        (HERE / args.model / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")


def searched(args: Any, texts: list[str], seed: int) -> list[float]:
    scaler = _scaler(args.model)
    outputs = scaler(
        texts,
        searcher="best-of-n",
        options={"n": 1},
        verifier="shapes",
        budget=10**6,
        seed=[own_seed(text, 1000 * args.seed + seed) for text in texts],
        num_inference_steps=args.steps or None,
        guidance_scale=args.guidance or None,
        plain=False,
        progress=False,
    )
    return [output.scores["shapes"] for output in outputs]


def direct(model: str, texts: list[str], seed: int) -> list[float]:
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(HERE / model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(own_seed(text, seed)) for text in texts]
    images = pipe(texts, generator=generators, output_type="pt").images
    return Shapes()(images.float(), texts).tolist()


@torch.inference_mode()
def first(model: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the oracle sees in x0 at t = 1: objects all of a clear shape and colour, and just what was asked for."""
    scaler, texts = _scaler(model), [row["prompt"] for row in rows]
    denoiser, guidance = scaler.engine.denoiser, scaler.settings.guidance_scale
    images = []
    for text in texts:
        cond = denoiser.encode(text, guidance_scale=guidance)
        noise = denoiser.prior(torch.tensor([own_seed(text, 0)]), cond)
        images.append(denoiser.decode(denoiser.predict(noise, 1.0, cond), cond))
    right = Shapes()(torch.cat(images), texts) == 1
    clear = float(np.mean(readable(torch.cat(images))))
    return {"readable": round(clear, 4), "right": round(float(right.float().mean()), 4)}


def readable(images: Tensor) -> list[bool]:
    """Which images show objects, each of a clear shape and colour."""
    return [bool(seen) and all(o.shape and o.colour for o in seen) for seen in read(images)]


@torch.inference_mode()
def sheet(args: Any, columns: int = 12) -> None:
    """Draws the first tuning prompts of the large categories: x0 at every step, and the sample below."""
    rows = json.loads((HERE / "prompts-tuning.json").read_text())
    kinds = [k for k in dict.fromkeys(row["category"] for row in rows) if k not in ("single", "two")]
    rows = [
        row for pair in zip(*([r for r in rows if r["category"] == k] for k in kinds), strict=False) for row in pair
    ]
    scaler = _scaler(args.model)
    denoiser, settings = scaler.engine.denoiser, scaler.settings
    steps, guidance = args.steps or settings.steps or 1, args.guidance or settings.guidance_scale
    images: list[Tensor] = []
    for row in rows[:columns]:
        cond = denoiser.encode(row["prompt"], guidance_scale=guidance)
        x = denoiser.prior(torch.tensor([own_seed(row["prompt"], 0)]), cond)
        times = denoiser.grid(steps, cond)
        for t, after in zip(times[:-1], times[1:], strict=True):
            x0 = denoiser.predict(x, t, cond)
            images.append(denoiser.decode(x0, cond))
            x = ODE()(denoiser.path, t, after, x, x0)
        print(row["prompt"])
    grid = nn.functional.pad(torch.cat(images), (1, 1, 1, 1)).unflatten(0, (-1, steps))  # columns, rows, 3, 66, 66
    pixels = grid.permute(1, 3, 0, 4, 2).flatten(0, 1).flatten(1, 2).mul(255).round().byte()
    Image.fromarray(pixels.numpy()).save(args.sheet)


def decided(rows: list[dict[str, Any]], guidance: float = 3.0, steps: int = 10) -> None:
    """Prints how often the oracle is satisfied by true renders that are noised to t, then solved in ``steps * t``."""
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(HERE / "shapes-flow", dtype=torch.float32)
    vae, scale, shift = pipe.vae, pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor
    texts, kinds = [row["prompt"] for row in rows], [row["category"] for row in rows]
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        images = to_tensor([render(parse(text), rng) for text in texts])
        clean = (vae.encode(images * 2 - 1).latent_dist.mean - shift) * scale
        text, nothing, pooled, pooled_nothing = pipe.encode_prompt(texts, texts, texts, max_sequence_length=1)
        context, pooled = torch.cat([nothing, text]), torch.cat([pooled_nothing, pooled])
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
        for start in (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            x = (1 - start) * clean + start * noise
            times = torch.linspace(start, 0, round(steps * start) + 1).tolist()
            for t, after in zip(times, times[1:], strict=False):
                both = pipe.transformer(torch.cat([x, x]), context, pooled, torch.full((2 * len(x),), 1000 * t))[0]
                without, velocity = both.chunk(2)
                x = x + (after - t) * (without + guidance * (velocity - without))
            right = Shapes()((vae.decode(x / scale + shift).sample / 2 + 0.5).clamp(0, 1), texts) == 1
            by = {
                kind: round(float(right[[k == kind for k in kinds]].float().mean()), 2) for kind in dict.fromkeys(kinds)
            }
            print(json.dumps({"t": start, "overall": round(float(right.float().mean()), 3), **by}), flush=True)


_scalers: dict[str, imgscale.Scaler] = {}


def _scaler(model: str) -> imgscale.Scaler:
    if model not in _scalers:
        _scalers[model] = imgscale.load(model)
    return _scalers[model]


if __name__ == "__main__":
    main()

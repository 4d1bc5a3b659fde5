"""Trains `shapes-aesthetic`: a head on the shapes CLIP that tells clean pictures of the shapes world from flawed ones.

    python -m imgscale.assets.shapes.train_aesthetic [--images 30000] [--steps 5000] [--threads 1]

A picture without a flaw should score 10, and one with a flaw of strength s in (0, 1] 10 − 9 s, by least squares. Flaws
are noise, blur, fading and warping of the whole picture, an object cut off by the border, two objects that overlap, and
pictures with no scene in them at all. The head is a small MLP on what `Aesthetic.read` sees of the CLIP's first stages.
Scenes are trained ones; `evaluate_aesthetic` uses the held-out ones. Writes `shapes-aesthetic/`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from imgscale.assets.shapes.training import HERE, arguments, schedule, to_tensor
from imgscale.assets.shapes.world import (
    CATEGORIES,
    SIZE,
    Placed,
    Scene,
    arrange,
    draw,
    draw_scene,
    held_out,
)
from imgscale.verifiers.aesthetic import pooled
from imgscale.verifiers.clip import Clip

FOLDER = HERE / "shapes-aesthetic"
READS = ["avgpool", "layer1", "layer2"]  # of the CLIP's image tower: its stem and first two stages
WIDTHS = (64, 16)
MIDDLE, SPREAD = 6.0, 3.0  # of the targets, about


# ------------------------------------------------------------------------------------------------- of the whole picture


def noise(x: Tensor, strength: Tensor, chance: torch.Generator) -> Tensor:
    """Gaussian noise, of standard deviation 0.3 at most."""
    return (x + 0.3 * _each(strength) * torch.randn(x.shape, generator=chance)).clamp(0, 1)


def blur(x: Tensor, strength: Tensor, chance: torch.Generator) -> Tensor:
    """Gaussian blur, of standard deviation 2.5 pixels at most."""
    n, reach = len(x), 8
    sigma = 2.5 * strength[:, None] + 1e-3
    kernel = torch.softmax(-(torch.arange(-reach, reach + 1) ** 2) / (2 * sigma**2), 1).repeat_interleave(3, 0)[:, None]
    y = functional.pad(x.reshape(1, 3 * n, SIZE, SIZE), (reach,) * 4, mode="replicate")
    y = functional.conv2d(y, kernel[..., None], groups=3 * n)
    return functional.conv2d(y, kernel[..., None, :], groups=3 * n).reshape(x.shape)


def fade(x: Tensor, strength: Tensor, chance: torch.Generator) -> Tensor:
    """Up to 80% of the way to the background's colour."""
    return x.lerp(x.amax((2, 3), keepdim=True), 0.8 * _each(strength))


def warp(x: Tensor, strength: Tensor, chance: torch.Generator) -> Tensor:
    """A smooth random displacement, of standard deviation 3 pixels at most: the shapes are bent."""
    n = len(x)
    field = torch.randn((n, 2, 6, 6), generator=chance) * _each(strength) * 3 * 2 / SIZE
    field = functional.interpolate(field, (SIZE, SIZE), mode="bicubic", align_corners=True)
    grid = functional.affine_grid(torch.eye(2, 3).expand(n, 2, 3), [n, 3, SIZE, SIZE], align_corners=False)
    return functional.grid_sample(x, grid + field.movedim(1, -1), padding_mode="border", align_corners=False)


def junk(x: Tensor, strength: Tensor, chance: torch.Generator) -> Tensor:
    """No scene at all: a plain colour, coloured clouds or snow, whatever the strength."""
    n = len(x)
    parts = [torch.rand((n, 3, side, side), generator=chance) for side in (1, 5, SIZE)]
    parts = [functional.interpolate(p, (SIZE, SIZE), mode="bilinear") for p in parts]
    return torch.stack(parts)[torch.randint(3, (n,), generator=chance), torch.arange(n)]


def _each(strength: Tensor) -> Tensor:
    return strength[:, None, None, None]


# ---------------------------------------------------------------------------------------------------- of the objects


def cut(placed: list[Placed], strength: float, rng: np.random.Generator) -> list[Placed]:
    """One object is moved out of the picture: at least a tenth of its radius, at most one and a half."""
    i = int(rng.integers(len(placed)))
    far = placed[i].r * (0.9 - 1.4 * strength)  # of the centre from the border
    place = ({"x": far}, {"x": SIZE - far}, {"y": far}, {"y": SIZE - far})[rng.integers(4)]
    return [*placed[:i], replace(placed[i], **place), *placed[i + 1 :]]  # type: ignore[arg-type]


def overlap(placed: list[Placed], strength: float, rng: np.random.Generator) -> list[Placed]:
    """One of the objects is moved onto another, until it covers about a half of it at most."""
    i, j = (int(k) for k in rng.permutation(len(placed))[:2])
    a, b = placed[i], placed[j]
    part = (a.r + b.r) * (0.8 - 0.4 * strength) / float(np.hypot(b.x - a.x, b.y - a.y))
    moved = replace(b, x=a.x + (b.x - a.x) * part, y=a.y + (b.y - a.y) * part)
    return [*(o for k, o in enumerate(placed) if k != j), moved]


IMAGES: dict[str, Callable[[Tensor, Tensor, torch.Generator], Tensor]] = {
    f.__name__: f for f in (noise, blur, fade, warp, junk)
}
OBJECTS: dict[str, Callable[[list[Placed], float, np.random.Generator], list[Placed]]] = {
    f.__name__: f for f in (cut, overlap)
}
FLAWS = (*IMAGES, *OBJECTS)


def flawed(scenes: list[Scene], flaws: list[str], strengths: Tensor, seed: int) -> Tensor:
    """Pictures ``(n, 3, 64, 64)`` of scenes, each with its flaw ("" for none) of its strength ``(n,)`` in (0, 1]."""
    rng, chance = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    drawn = []
    for scene, flaw, strength in zip(scenes, flaws, strengths.tolist(), strict=True):
        placed = arrange(scene, rng)
        if flaw in OBJECTS:
            placed = OBJECTS[flaw](placed, strength, rng)
        drawn.append(draw(placed, int(rng.integers(236, 256))))
    x = to_tensor(drawn)
    for name, spoil in IMAGES.items():
        if on := [i for i, flaw in enumerate(flaws) if flaw == name]:
            x[on] = spoil(x[on], strengths[on], chance)
    return x


def scene(rng: np.random.Generator, unseen: bool, least: int = 1) -> Scene:
    """A random scene, categories alike, of at least so many objects: one that training sees, or none such."""
    while True:
        drawn = draw_scene(CATEGORIES[rng.integers(len(CATEGORIES))], rng)
        always = drawn.total == 1 or (len(drawn.groups) == 2 and not drawn.groups[0].colour and drawn.total == 2)
        if drawn.total >= least and (always or held_out(drawn) == unseen):
            return drawn


def samples(seed: int, step: int, n: int) -> tuple[Tensor, Tensor]:
    """``n`` training pictures, a fifth of them clean and a fifth with two flaws, and their targets ``(n,)``."""
    rng = np.random.default_rng((seed, step))
    flaws = [str(rng.choice(FLAWS)) if rng.random() < 0.8 else "" for _ in range(n)]
    scenes = [scene(rng, False, 2 if flaw == "overlap" else 1) for flaw in flaws]
    strengths = torch.from_numpy(rng.uniform(0.05, 1, n)).float()
    strengths[[flaw == "" for flaw in flaws]] = 0
    strengths[[flaw == "junk" for flaw in flaws]] = 1
    x = flawed(scenes, flaws, strengths, int(rng.integers(2**31)))
    chance = torch.Generator().manual_seed(int(rng.integers(2**31)))
    for spoil in (noise, blur, fade, warp):
        on = torch.rand(n, generator=chance) < 0.06
        on &= strengths > 0
        more = torch.rand(n, generator=chance) * on
        if bool(on.any()):
            x[on] = spoil(x[on], more[on], chance)
        strengths = (strengths + more).clamp(max=1)
    return x, 10 - 9 * strengths


# -------------------------------------------------------------------------------------------------------- training


def train(x: Tensor, y: Tensor, args: Any) -> tuple[nn.Sequential, list[dict[str, float]]]:
    """The head, on inputs ``(n, d)`` with targets ``(n,)``, and the log; standardisation is folded into its layers."""
    mean, std = x.mean(0), x.std(0) + 1e-4
    x = (x - mean) / std
    first, second = WIDTHS
    linear = nn.Linear(x.shape[1], first), nn.Linear(first, second), nn.Linear(second, 1)
    drop = nn.Dropout(args.dropout)
    net = nn.Sequential(linear[0], nn.GELU(), drop, linear[1], nn.GELU(), linear[2])
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
    chance = torch.Generator().manual_seed(args.seed)
    log, sums, began = [], [], time.monotonic()
    for step in range(args.steps):
        optimiser.param_groups[0]["lr"] = schedule(step, args.steps, args.lr, args.warmup, args.decay)
        rows = torch.randint(len(x), (args.batch,), generator=chance)
        loss = (net(x[rows]).squeeze(1) * SPREAD + MIDDLE - y[rows]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        sums.append(loss.item())
        if (step + 1) % args.log_every == 0:
            seconds = round(time.monotonic() - began, 1)
            log.append({"step": step + 1, "seconds": seconds, "squared": round(float(np.mean(sums)), 4)})
            print(json.dumps(log[-1]), flush=True)
            sums = []
    with torch.no_grad():
        linear[0].weight /= std
        linear[0].bias.sub_(linear[0].weight @ mean)
        linear[2].weight *= SPREAD
        linear[2].bias.mul_(SPREAD).add_(MIDDLE)
    return nn.Sequential(*linear), log


def main() -> None:
    args = arguments(
        __doc__, images=30000, steps=5000, batch=256, lr=2e-3, decay=0.8, dropout=0.1, log_every=250, threads=1
    )
    clip = Clip(device=args.device)
    told, targets = [], []
    with torch.no_grad():
        for step in range(args.images // 200):
            x, y = samples(args.seed, step, 200)
            told.append(pooled(clip, READS, x.to(args.device)).cpu())
            targets.append(y)
            if step % 10 == 9:
                print(f"{(step + 1) * 200} of {args.images} pictures seen", flush=True)
    head, log = train(torch.cat(told), torch.cat(targets), args)
    FOLDER.mkdir(exist_ok=True)
    state = {f"layers.{k}": v.detach().contiguous() for k, v in head.state_dict().items()}
    about = {"format": "pt", "activation": "gelu", "reads": " ".join(READS)}
    save_file(state, FOLDER / "head.safetensors", metadata=about)
    (HERE / "logs" / "shapes-aesthetic.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


if __name__ == "__main__":
    main()

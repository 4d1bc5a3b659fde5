"""How far the oracle of the shapes world can be trusted on images that are less clean than renders.

    python -m imgscale.assets.shapes.evaluate_oracle [--scenes 1000]

Prints two tables in Markdown. For each way of spoiling an image: the share whose own caption still scores 1, and the
share whose caption with one mistake wrongly scores 1. For two objects of one colour ever closer together, and for one
object ever further beyond the border: the share that is still read as what it is.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageDraw
from scipy import ndimage
from torch import Tensor

from imgscale.assets.shapes.training import HERE, arguments, to_tensor
from imgscale.assets.shapes.world import (
    CATEGORIES,
    COLOURS,
    SHAPES,
    SIZE,
    Scene,
    draw_scene,
    hard_negatives,
    outline,
    render,
)
from imgscale.verifiers.shapes import Object, judge, read

Spoil = Callable[[Tensor], Tensor]


def pairs(n: int, seed: int) -> tuple[list[tuple[Scene, Scene]], Tensor]:
    """``n`` scenes of all categories, each with one that differs by a mistake that can be seen, and their renders."""
    rng = np.random.default_rng(seed)
    cases: list[tuple[Scene, Scene]] = []
    images = []
    while len(cases) < n:
        scene = draw_scene(CATEGORIES[len(cases) % len(CATEGORIES)], rng)
        # A turned relation may hold as well as the true one, so it is no mistake that must be found.
        wrong = [s for kind, s in hard_negatives(scene, rng).items() if kind != "turn"]
        cases.append((scene, wrong[rng.integers(len(wrong))]))
        images.append(render(scene, rng))
    return cases, to_tensor(images)


def noise(sigma: float) -> Spoil:
    return lambda x: (x + sigma * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)


def blur(sigma: float) -> Spoil:
    return lambda x: torch.from_numpy(ndimage.gaussian_filter(x.numpy(), (0, 0, sigma, sigma)))


def resize(size: int) -> Spoil:
    return lambda x: torch.nn.functional.interpolate(x, (size, size), mode="bilinear", antialias=True)


def fade(share: float) -> Spoil:
    return lambda x: x.lerp(x.amax((2, 3), keepdim=True), share)


def jpeg(quality: int) -> Spoil:
    def spoil(x: Tensor) -> Tensor:
        images = []
        for pixels in (x.permute(0, 2, 3, 1) * 255).round().byte().numpy():
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=quality)
            images.append(np.asarray(Image.open(file)))
        return to_tensor(images)

    return spoil


def autoencoder() -> dict[str, Spoil]:
    """The bundled autoencoder's reconstruction: what an ideal sample of the bundled models looks like."""
    from diffusers import AutoencoderKL

    folder = HERE / "shapes-flow" / "vae"
    if not folder.is_dir():
        return {}
    vae = AutoencoderKL.from_pretrained(folder).float()

    @torch.no_grad()
    def spoil(x: Tensor) -> Tensor:
        parts = (vae.decode(vae.encode(p * 2 - 1).latent_dist.mean).sample for p in x.split(50))
        return (torch.cat(list(parts)) / 2 + 0.5).clamp(0, 1)

    return {"bundled autoencoder": spoil}


def spoils() -> dict[str, Spoil]:
    return {
        "as rendered": lambda x: x,
        **autoencoder(),
        **{f"Gaussian noise, sigma {s}": noise(s) for s in (0.02, 0.05, 0.1, 0.15, 0.2)},
        **{f"Gaussian blur, sigma {s} pixels": blur(s) for s in (0.5, 1.0, 1.5, 2.0)},
        **{f"faded by {s:.0%}": fade(s) for s in (0.1, 0.2, 0.3, 0.4)},
        **{f"JPEG quality {q}": jpeg(q) for q in (90, 75, 50)},
        **{f"scaled to {s} x {s}": resize(s) for s in (32, 48, 128, 256)},
    }


def draw(objects: list[tuple[str, str, float, float, float]]) -> Tensor:
    """A picture ``(1, 3, 64, 64)`` of (shape, colour, x, y, radius) on light grey, anti-aliased as renders are."""
    canvas = Image.new("RGB", (SIZE * 4,) * 2, (245,) * 3)
    for shape, colour, x, y, r in objects:
        ImageDraw.Draw(canvas).polygon([(px * 4, py * 4) for px, py in outline(shape, x, y, r)], fill=COLOURS[colour])
    return to_tensor([np.asarray(canvas.reduce(4))])


def near(gap: float, same: bool, trials: int = 200) -> float:
    """The share of two circles or squares, ``gap`` pixels apart, that are read as those two."""
    rng = np.random.default_rng(2)
    right = 0
    for _ in range(trials):
        shape = SHAPES[rng.integers(2)]
        reach = 0.95 if shape == "circle" else 0.86
        colours = [list(COLOURS)[i] for i in (rng.permutation(6)[:2] if not same else [rng.integers(6)] * 2)]
        r, y = rng.uniform(6, 9, 2), rng.uniform(20, 44)
        x = rng.uniform(16, 22)
        second = x + reach * (r[0] + r[1]) + gap
        seen = read(draw([(shape, colours[0], x, y, r[0]), (shape, colours[1], second, y, r[1])]))[0]
        right += sorted((o.shape or "", o.colour or "") for o in seen) == sorted((shape, c) for c in colours)
    return right / trials


def cut(share: float, trials: int = 200) -> float:
    """The share of objects that are still read rightly with this share of their radius beyond the border."""
    rng = np.random.default_rng(3)
    right = 0
    for _ in range(trials):
        shape, colour, r = SHAPES[rng.integers(4)], list(COLOURS)[rng.integers(6)], rng.uniform(6, 10)
        inset, along = r * (0.9 - share), rng.uniform(15, 49)
        x, y = [(inset, along), (SIZE - inset, along), (along, inset), (along, SIZE - inset)][rng.integers(4)]
        right += [(o.shape, o.colour) for o in read(draw([(shape, colour, x, y, r)]))[0]] == [(shape, colour)]
    return right / trials


def main() -> None:
    args = arguments(__doc__, scenes=1000, threads=1)
    cases, images = pairs(args.scenes, args.seed)
    print("| image | own caption scores 1 | mistaken caption scores 1 |\n|---|---|---|")
    for name, spoil in spoils().items():
        seen: list[list[Object]] = [o for part in spoil(images).split(100) for o in read(part)]
        own = np.mean([judge(scene, o) == 1 for (scene, _), o in zip(cases, seen, strict=True)])
        other = np.mean([judge(wrong, o) == 1 for (_, wrong), o in zip(cases, seen, strict=True)])
        print(f"| {name} | {own:.1%} | {other:.1%} |", flush=True)
    print("\n| situation | read rightly |\n|---|---|")
    for gap in (2.5, 1.5, 1.0, 0.5, 0.0, -1.0, -2.0):
        what = f"{gap} pixels apart" if gap >= 0 else f"overlapping by {-gap} pixels"
        print(f"| two of one colour, {what} | {near(gap, True):.0%} |")
        print(f"| two of two colours, {what} | {near(gap, False):.0%} |")
    for share in (0.0, 0.1, 0.2, 0.3, 0.5):
        print(f"| {share:.0%} of the radius beyond the border | {cut(share):.0%} |")


if __name__ == "__main__":
    main()

"""How well a CLIP verifier judges the shapes world; writes `evaluation.json` beside the weights.

    python -m imgscale.assets.shapes.evaluate_clip [--model shapes-clip] [--scenes 300]

For held-out scenes of each category (`single` and `two` have none: theirs are trained scenes, newly rendered) and for
every kind of mistake: does the image score higher for its caption than for the mistaken one (text side), and does the
caption score its own image higher than an image of the mistaken scene (image side, which is what a search needs)? A
mistaken caption that happens to be true of the image, by the oracle, is left out.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imgscale.assets.shapes.train_clip import FOLDER, soften
from imgscale.assets.shapes.training import arguments, to_tensor
from imgscale.assets.shapes.world import CATEGORIES, Scene, draw_scene, hard_negatives, held_out, render
from imgscale.verifiers.clip import Clip
from imgscale.verifiers.shapes import judge, read


def trials(category: str, scenes: int, seed: int) -> tuple[list[tuple[str, Scene, Scene]], Tensor, Tensor]:
    """One trial for every mistake of ``scenes`` scenes: (kind, true, mistaken), and an image of each of the two."""
    rng = np.random.default_rng((seed, CATEGORIES.index(category)))
    cases: list[tuple[str, Scene, Scene]] = []
    images: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(scenes):
        scene = draw_scene(category, rng)
        while category not in ("single", "two") and not held_out(scene):
            scene = draw_scene(category, rng)
        for kind, wrong in hard_negatives(scene, rng).items():
            try:
                pair = render(scene, rng), render(wrong, rng)
            except RuntimeError:  # no room for that many
                continue
            seen = read(to_tensor(list(pair)))
            if judge(wrong, seen[0]) < 1 and judge(scene, seen[1]) < 1:
                cases.append((kind, scene, wrong))
                images[0].append(pair[0])
                images[1].append(pair[1])
    return cases, to_tensor(images[0]), to_tensor(images[1])


def shares(clip: Clip, scenes: int, seed: int, soft: bool = False) -> dict[str, Any]:
    """Shares of trials judged rightly: overall, by category and by kind of mistake, on either side.

    ``overall`` weighs the categories equally.
    """
    by_category: dict[str, dict[str, float]] = {}
    by_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for category in CATEGORIES:
        cases, right, wrong = trials(category, scenes, seed)
        if soft:
            chance = torch.Generator().manual_seed(seed)
            right, wrong = soften(right, chance, share=1), soften(wrong, chance, share=1)
        truth, mistake = [str(s) for _, s, _ in cases], [str(w) for _, _, w in cases]
        own = clip(right, truth)
        text = (own > clip(right, mistake)).double()
        image = (own > clip(wrong, truth)).double()
        by_category[category] = {"trials": len(cases), "text": mean(text), "image": mean(image)}
        for (kind, _, _), t, i in zip(cases, text.tolist(), image.tolist(), strict=True):
            by_kind[kind].append((t, i))
    kinds = {
        k: {"trials": len(v)} | dict(zip(("text", "image"), map(mean, torch.tensor(v).T), strict=True))
        for k, v in by_kind.items()
    }
    overall = {side: round(float(np.mean([c[side] for c in by_category.values()])), 4) for side in ("text", "image")}
    return {"overall": overall, "by_category": by_category, "by_kind": dict(sorted(kinds.items()))}


def mean(values: Tensor) -> float:
    return round(float(values.mean()), 4)


def milliseconds(clip: Clip, n: int) -> float:
    """Per image, at batches of ``n`` images of one prompt that was seen before."""
    images, prompts = torch.rand(n, 3, 64, 64), ["a red circle"] * n
    clip(images, prompts)
    times = []
    for _ in range(max(3, 60 // n)):
        start = time.perf_counter()
        clip(images, prompts)
        times.append(time.perf_counter() - start)
    return round(float(np.median(times)) / n * 1000, 3)


def main() -> None:
    args = arguments(__doc__, model="shapes-clip", scenes=300, threads=1)
    clip = Clip(model=args.model, device=args.device)
    with torch.inference_mode():
        report = {
            "seed": args.seed,
            "scenes_per_category": args.scenes,
            "sha256": clip.identity()["sha256"],
            "clean": shares(clip, args.scenes, args.seed + 10**6),
            "softened": shares(clip, args.scenes, args.seed + 10**6, soft=True),
            "milliseconds_per_image": {str(n): milliseconds(clip, n) for n in (1, 8, 32)},
        }
    text = json.dumps(report, indent=1)
    print(text)
    if args.model == FOLDER.name:
        (FOLDER / "evaluation.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

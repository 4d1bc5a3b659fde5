"""How well the bundled aesthetic head tells flaws; writes `evaluation.json` beside its weights.

    python -m imgscale.assets.shapes.evaluate_aesthetic [--scenes 400]

On held-out scenes (of `single` and `two`, which have none, trained ones newly rendered). For each flaw: how often a
clean picture of one scene scores above a flawed one of another (the area under the ROC curve), with strengths uniform
over (0, 1], over the stronger half, and by the rank correlation of a flaw's strength with the loss of score. How much
clean pictures of one caption differ from each other, and captions from each other: the head should prefer none.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from imgscale.assets.shapes.evaluate_oracle import autoencoder
from imgscale.assets.shapes.train_aesthetic import FLAWS, FOLDER, flawed, scene
from imgscale.assets.shapes.training import arguments
from imgscale.assets.shapes.world import Scene, category
from imgscale.verifiers.aesthetic import Aesthetic


def scores(verifier: Aesthetic, images: Tensor) -> np.ndarray:
    return torch.cat([verifier(part, [""] * len(part)) for part in images.split(100)]).double().cpu().numpy()


def above(a: np.ndarray, b: np.ndarray) -> float:
    """The share of pairs in which one of ``a`` is above one of ``b``: the area under the ROC curve."""
    return rounded((a[:, None] > b[None]).mean())


def tells(verifier: Aesthetic, scenes: int, seed: int) -> dict[str, Any]:
    """Of ``scenes`` pictures for each flaw, against as many clean ones: areas, correlation and mean scores."""
    rng = np.random.default_rng(seed)

    def drawn(flaw: str) -> tuple[np.ndarray, np.ndarray]:
        shown = [scene(rng, True, 2 if flaw == "overlap" else 1) for _ in range(scenes)]
        strengths = rng.uniform(0.05, 1, scenes)
        pictures = flawed(shown, [flaw] * scenes, torch.from_numpy(strengths).float(), int(rng.integers(2**31)))
        return scores(verifier, pictures), strengths

    clean = drawn("")[0]
    found: dict[str, Any] = {"clean": {"mean": rounded(clean.mean()), "deviation": rounded(clean.std())}}
    for flaw in FLAWS:
        told, strengths = drawn(flaw)
        strong = strengths > 0.5
        found[flaw] = {
            "auc": above(clean, told),
            "auc_strong": above(clean, told[strong]),
            "mean": rounded(told.mean()),
            "mean_strong": rounded(told[strong].mean()),
        }
        if flaw != "junk":  # which has no strength
            found[flaw]["rank_correlation"] = rounded(-stats.spearmanr(strengths, told).statistic)
    return found


def captions(verifier: Aesthetic, count: int, each: int, seed: int) -> dict[str, Any]:
    """``each`` clean pictures of ``count`` captions: deviations within captions and between them; means by category."""
    rng = np.random.default_rng(seed)
    shown: list[Scene] = [scene(rng, True) for _ in range(count)]
    pictures = flawed([s for s in shown for _ in range(each)], [""] * count * each, torch.zeros(count * each), seed)
    told = scores(verifier, pictures).reshape(count, each)
    within = told.var(1, ddof=1).mean()
    between = max(0.0, told.mean(1).var(ddof=1) - within / each)  # without what chance makes of means
    by_category: dict[str, list[float]] = {}
    for s, mean in zip(shown, told.mean(1), strict=True):
        by_category.setdefault(category(s), []).append(mean)
    return {
        "within": rounded(within**0.5),
        "between": rounded(between**0.5),
        "by_category": {k: rounded(np.mean(v)) for k, v in sorted(by_category.items())},
    }


def reconstructed(verifier: Aesthetic, count: int, seed: int) -> dict[str, float]:
    """Mean scores of clean pictures, and of what the bundled autoencoder makes of them."""
    rng = np.random.default_rng(seed)
    pictures = flawed([scene(rng, True) for _ in range(count)], [""] * count, torch.zeros(count), seed)
    spoilt = {"clean": pictures} | {name: spoil(pictures) for name, spoil in autoencoder().items()}
    return {name: rounded(scores(verifier, x).mean()) for name, x in spoilt.items()}


def rounded(value: Any) -> float:
    return round(float(value), 4)


def main() -> None:
    args = arguments(__doc__, scenes=400, threads=1)
    verifier = Aesthetic(device=args.device)
    with torch.inference_mode():
        report = {
            "seed": args.seed,
            "scenes_per_flaw": args.scenes,
            "sha256": verifier.identity()["sha256"],
            "flaws": tells(verifier, args.scenes, args.seed + 10**6),
            "captions": captions(verifier, 100, 8, args.seed + 10**6),
            "autoencoder": reconstructed(verifier, 200, args.seed + 10**6),
        }
    text = json.dumps(report, indent=1)
    print(text)
    (FOLDER / "evaluation.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

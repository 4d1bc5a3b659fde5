"""How often plain samples of `shapes-flow` satisfy the 200 test prompts, by the oracle, per category.

    python -m imgscale.assets.shapes.evaluate_flow [--seeds 4] [--steps 0] [--guidance 0]

Writes `shapes-flow/evaluation.json` (with the defaults) and prints it. ``--direct 1`` instead calls the folder as
`DiffusionPipeline.from_pretrained` gives it, with that pipeline's own defaults (28 steps, guidance 7, T5 padding).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

import imgscale
from imgscale.assets.shapes.prompts import own_seed
from imgscale.assets.shapes.training import HERE, arguments
from imgscale.verifiers.shapes import Shapes


def main() -> None:
    args = arguments(__doc__, seeds=4, steps=0, guidance=0.0, limit=0, direct=0, model="shapes-flow")
    rows = json.loads((HERE / "prompts.json").read_text())
    if args.limit:
        kinds = dict.fromkeys(row["category"] for row in rows)
        rows = [row for kind in kinds for row in [r for r in rows if r["category"] == kind][: args.limit]]
    hits: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        for start in range(0, len(rows), 50):
            part = rows[start : start + 50]
            texts = [row["prompt"] for row in part]
            scores = direct(texts, seed) if args.direct else searched(args, texts, seed)
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


def direct(texts: list[str], seed: int) -> list[float]:
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(HERE / "shapes-flow", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(own_seed(text, seed)) for text in texts]
    images = pipe(texts, generator=generators, output_type="pt").images
    return Shapes()(images.float(), texts).tolist()


_scalers: dict[str, imgscale.Scaler] = {}


def _scaler(model: str) -> imgscale.Scaler:
    if model not in _scalers:
        _scalers[model] = imgscale.load(model)
    return _scalers[model]


if __name__ == "__main__":
    main()

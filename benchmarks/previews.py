"""What preview decoders see: how well a preview's score predicts the finished image's, by step, and what it takes.

For each prompt some samples are solved by the model's ODE. At every step their x0 is decoded by each decoder and
scored, and the scores are compared with those of the finished images (by the VAE) by Spearman's rank correlation within
a prompt.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from scipy import stats

CATEGORIES = ("counting", "two", "position", "attribution", "hard")


def main(args: argparse.Namespace) -> None:
    import imgscale
    from imgscale.app.bench.prompts import load

    scaler = imgscale.load(args.model)
    denoiser = scaler.engine.denoiser
    judges = {name: scaler.verifier(name) for name in args.verifier.split(",")}
    decoders = {name: scaler.preview(name) for name in args.preview.split(",")}
    steps = scaler.settings.steps or denoiser.steps_default
    chosen = [prompt.text for prompt in load("prompts", CATEGORIES, limit=args.limit)]
    scores: dict[tuple[str, str], list[list[np.ndarray[Any, Any]]]] = {}
    spent: dict[str, list[float]] = {name: [] for name in decoders}
    for i, text in enumerate(chosen):
        cond = denoiser.encode(text, guidance_scale=scaler.settings.guidance_scale)
        keys = torch.arange(args.samples) + 1000 * (args.seed + i)
        for name in decoders:
            for judge in judges:
                scores.setdefault((name, judge), []).append([])
        for x0 in _estimates(denoiser, cond, denoiser.prior(keys, cond), steps):
            for name, decoder in decoders.items():
                began = time.perf_counter()
                images = denoiser.decode(x0, cond, decoder)
                spent[name].append((time.perf_counter() - began) / len(x0))
                for judge, verifier in judges.items():
                    scores[name, judge][-1].append(verifier(images, [text] * len(images)).numpy())
    print(f"{args.model}, {len(chosen)} prompts, {args.samples} samples each, {torch.get_num_threads()} threads")
    for name, times in spent.items():
        low, mid, high = 1000 * np.quantile(times, [0.25, 0.5, 0.75])
        print(f"{name:8} {mid:.2f} ms an image (quartiles {low:.2f} to {high:.2f})")
    print("\nRank correlation with the finished image's score, by step")
    print(f"{'decoder':8} {'verifier':10} " + " ".join(f"{step:>5}" for step in range(steps)))
    for judge in judges:
        finals = [prompt[-1] for prompt in scores["full", judge]]
        for name in decoders:
            rows = [
                [_correlation(previews, final) for previews in prompt]
                for prompt, final in zip(scores[name, judge], finals, strict=True)
            ]
            print(f"{name:8} {judge:10} " + " ".join(f"{value:5.2f}" for value in np.nanmean(rows, 0)[:steps]))


@torch.no_grad()
def _estimates(denoiser: Any, cond: Any, x: torch.Tensor, steps: int) -> Any:
    """x0 at each step of the ODE from noise ``x``, and at last the sample."""
    from imgscale.kernels import ODE

    grid, ode = denoiser.grid(steps, cond).tolist(), ODE()
    for t, t_next in zip(grid[:-1], grid[1:], strict=True):
        x0 = denoiser.predict(x, t, cond)
        yield x0
        x = ode(denoiser.path, t, t_next, x, x0)
    yield x


def _correlation(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float("nan") if np.ptp(a) == 0 or np.ptp(b) == 0 else float(stats.spearmanr(a, b)[0])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="shapes-flow")
    parser.add_argument("--verifier", default="clip,shapes", help="names, a,b")
    parser.add_argument("--preview", default="full,tiny,linear", help="decoders; full must be among them")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each of five categories")
    parser.add_argument("--samples", type=int, default=12, help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)

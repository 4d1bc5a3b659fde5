"""How much samples differ that share their start: what a stochastic step gives a search to choose from.

For each prompt several children of one starting noise walk to images of their own by a kernel and path, and so do
children without a common start. The mean distance between children, by the CLIP verifier's image embeddings (1 -
cosine), is given as a share of that between independent samples: 0 is no choice, 1 is that of best-of-n. (Kim et al.
2025 measured LPIPS, whose weights aren't bundled.) The share that the oracle finds right shows what the step costs.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

CATEGORIES = ("counting", "two", "position", "attribution", "hard")
CASES = (
    ("own path, ODE", "own", "ode"),
    ("own path, DDIM(1)", "own", "ddim(1)"),
    ("linear path, SDE g = 3t²", "linear", "sde(g=3t^2)"),
    ("VP path, SDE g = 3t²", "vp", "sde(g=3t^2)"),
    ("VP path, DDIM(1)", "vp", "ddim(1)"),
)


def main(args: argparse.Namespace) -> None:
    import imgscale
    from imgscale.app.bench.prompts import load
    from imgscale.budget import Budget, Meter
    from imgscale.problem import Problem
    from imgscale.search import Search

    scaler = imgscale.load(args.model)
    clip, oracle, engine = scaler.verifier("clip"), scaler.verifier("shapes"), scaler.engine
    steps = scaler.settings.steps or engine.denoiser.steps_default
    chosen = [prompt.text for prompt in load("prompts", CATEGORIES, limit=args.limit)]
    images: list[torch.Tensor] = []

    def keep(pictures: torch.Tensor, texts: Any) -> torch.Tensor:
        images.append(pictures)
        return torch.zeros(len(pictures))

    judge = scaler.verifier(keep)

    def children(text: str, seed: int, path: str, kernel: str, starts: int) -> torch.Tensor:
        cond = engine.denoiser.encode(text, guidance_scale=scaler.settings.guidance_scale)
        problem = Problem(engine.denoiser, cond, steps=steps, seed=seed, meter=Meter(Budget(nfe=10**9)))
        images.clear()
        engine.run([Search(problem, walk(problem, path, kernel, args.children, starts), judge)])
        return torch.cat(images)

    print(f"{args.model}, {len(chosen)} prompts, {args.children} children each, seed {args.seed}")
    print(f"{'kernel':28} {'distance':>9} {'of independent':>15} {'right, %':>9}")
    free: list[float] = []
    for name, path, kernel in (("independent samples", "own", "ode"), *CASES):
        apart, right = [], []
        for i, text in enumerate(chosen):
            starts = args.children if name == "independent samples" else 1
            found = children(text, args.seed + i, path, kernel, starts)
            embedded = clip.embed_images(found)
            distance = 1 - embedded @ embedded.T
            apart.append(float(distance.sum()) / (len(found) * (len(found) - 1)))
            right.append(float((oracle(found, [text] * len(found)) >= 1).float().mean()))
        free = free or apart
        share = np.mean(apart) / np.mean(free)
        print(f"{name:28} {np.mean(apart):9.3f} {share:15.2f} {100 * np.mean(right):9.1f}")


def walk(problem: Any, path: str, kernel: str, children: int, starts: int) -> Any:
    """Children of ``starts`` starting noises, each by its own noise to an image."""
    from imgscale.grids import search_schedule
    from imgscale.kernels import kernel as read

    schedule = search_schedule(problem, path, 10)
    here = (yield from problem.start(starts, schedule)).branch(children // starts)
    here = yield from problem.denoise(here, schedule.nfe(0, schedule.steps), read(kernel))
    yield from problem.score((yield from problem.finish(here)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="shapes-flow")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each of five categories")
    parser.add_argument("--children", type=int, default=8, help="of each start")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt")

"""What a search costs over calling the pipeline directly, as ratios of wall time in one run.

Best-of-n is compared with one call of the pipeline for the same images at the same batch; rbf by its time per model
evaluation, previews and verifier included, with the pipeline's. Repeats alternate, and the median ratio counts.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch


def main(args: argparse.Namespace) -> None:
    import imgscale
    from imgscale.keys import root

    scaler = imgscale.load(args.model, max_batch=args.n)
    pipe, settings = scaler.engine.denoiser._pipe, scaler.settings
    steps: int = settings.steps or scaler.engine.denoiser.steps_default
    prompt = "two red circles above three blue squares"
    pipe.set_progress_bar_config(disable=True)
    guidance = {} if settings.guidance_scale is None else {"guidance_scale": settings.guidance_scale}

    def direct() -> float:  # seconds per model evaluation
        generators = [torch.Generator("cpu").manual_seed(k) for k in root(0, args.n).tolist()]
        began = time.perf_counter()
        pipe(
            prompt,
            num_images_per_prompt=args.n,
            generator=generators,
            num_inference_steps=steps,
            output_type="pil",
            **guidance,
            **settings.defaults,
        )
        return (time.perf_counter() - began) / int(args.n * steps)

    def search(name: str, budget: int) -> float:
        began = time.perf_counter()
        out = scaler(prompt, searcher=name, verifier=args.verifier, budget=budget, plain=False, progress=False)
        return (time.perf_counter() - began) / int(out.nfe)

    nfe = args.n * steps
    names = {"best-of-n": f"best-of-n(n={args.n}, batch={args.n})", "rbf": "rbf"}
    for name in names.values():  # warm up: prompt encoding, verifier weights, allocator
        search(name, nfe)
    direct()
    times: dict[str, list[float]] = {"pipeline": [], **{name: [] for name in names}}
    for _ in range(args.repeats):
        times["pipeline"].append(direct())
        for name, spec in names.items():
            times[name].append(search(spec, nfe))
    base = np.array(times["pipeline"])
    print(f"{torch.get_num_threads()} threads, {args.n} images of {steps} steps, {args.repeats} repeats")
    for name, values in times.items():
        ratio = np.array(values) / base
        low, high = np.quantile(ratio, [0.25, 0.75])
        print(
            f"{name:10} {1e3 * np.median(values):7.2f} ms/NFE   ratio {np.median(ratio):.3f}"
            f"   (quartiles {low:.3f} to {high:.3f})"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="shapes-flow")
    parser.add_argument("--n", type=int, default=20, help="images, and the batch")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--verifier", default="clip")

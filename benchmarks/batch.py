"""Throughput of many prompts side by side against the same prompts one by one, as a ratio in one run.

Both search alike, on one loaded model: one by one with calls of `Scaler`, side by side with `Scaler.stream`, exact and
not. Also the batch sizes that the network was called with.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imgscale.scaler import Scaler


def main(args: argparse.Namespace) -> None:
    import torch

    from imgscale.app.bench import prompts as lists
    from imgscale.asks import Ask

    asks = [
        Ask(
            prompt.text,
            searcher=args.searcher,
            verifier=args.verifier,
            budget=args.budget,
            seed=seed,
            plain=False,
        )
        for seed, prompt in zip(range(args.prompts), itertools.cycle(lists.load("prompts")), strict=False)
    ]
    print(
        f"{len(asks)} prompts, {args.model}, {args.searcher}, {args.budget} NFE each, max_batch {args.max_batch},"
        f" {torch.get_num_threads()} threads, {args.repeats} repeats"
    )
    scalers = {exact: _counted(args, exact) for exact in (False, True)}
    ways = [("one by one", False, 1), *((f"{n} together", False, n) for n in args.together)]
    ways += [(f"{n} together, exact", True, n) for n in args.together]
    for _, exact, together in ways:  # warm up
        _run(scalers[exact][0], [replace(ask, seed=ask.seed + 1000) for ask in asks[:1]], together)
    times: dict[str, list[float]] = {name: [] for name, *_ in ways}
    for _ in range(args.repeats):
        for name, exact, together in ways:
            scaler, sizes = scalers[exact]
            sizes.clear()
            times[name].append(_run(scaler, asks, together))
            rows = sum(size * n for size, n in sizes.items()) / max(1, sum(sizes.values()))
            print(f"  {name}: {len(asks) / times[name][-1]:.3f} images/s, {rows:.1f} rows a call", flush=True)
    base = sorted(times["one by one"])[args.repeats // 2]
    for name, values in times.items():
        middle = sorted(values)[args.repeats // 2]
        print(f"{name:24s} {len(asks) / middle:7.3f} images/s  x{base / middle:.2f}")


def _run(scaler: Scaler, asks: list[Any], together: int) -> float:
    began = time.perf_counter()
    for done in scaler.stream(asks, together=together):
        if done.error is not None:
            raise done.error
    return time.perf_counter() - began


def _counted(args: argparse.Namespace, exact: bool) -> tuple[Scaler, Counter[int]]:
    """A model, and the sizes of the batches that it is called with."""
    import imgscale

    scaler = imgscale.load(args.model, max_batch=args.max_batch, exact=exact)
    sizes: Counter[int] = Counter()
    predict = scaler.engine.denoiser.predict

    def counted(x: Any, *rest: Any) -> Any:
        sizes[len(x)] += 1
        return predict(x, *rest)

    scaler.engine.denoiser.predict = counted  # type: ignore[method-assign, assignment]
    return scaler, sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="shapes-turbo", help="what draws")
    parser.add_argument("--searcher", default="rbf", help="what searches")
    parser.add_argument("--verifier", default="clip", help="what steers")
    parser.add_argument("--prompts", type=int, default=100, help="how many")
    parser.add_argument("--budget", type=int, default=40, help="NFE of each")
    parser.add_argument("--together", type=int, nargs="+", default=[8, 16], help="searches side by side")
    parser.add_argument("--max-batch", type=int, default=16, help="images per call of the network")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts")

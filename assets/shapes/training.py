"""What the training scripts share: seeded data by step, schedules, averaged weights, resumable checkpoints, a log."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imgscale.assets.shapes.world import Scene, render, training_scene

HERE = Path(__file__).parent


def arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Command-line arguments with these defaults; every script also has --seed, --device, --threads and --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value in ({"seed": 0, "device": "cpu", "threads": 0, "warmup": 200, "decay": 0.25} | defaults).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value, help=" ")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    return args


def batch(seed: int, step: int, n: int) -> tuple[list[Scene], Tensor]:
    """``n`` training scenes and their renders, float ``(n, 3, 64, 64)`` in [0, 1]: a function of (seed, step) alone."""
    rng = np.random.default_rng((seed, step))
    scenes = [training_scene(rng) for _ in range(n)]
    return scenes, to_tensor([render(s, rng) for s in scenes])


def to_tensor(images: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255


def schedule(step: int, steps: int, peak: float, warmup: int = 200, decay: float = 0.25) -> float:
    """Warm-up, plateau, then a linear fall over the last ``decay`` share of the steps."""
    return peak * min(1.0, (step + 1) / warmup, (steps - step) / max(1, decay * steps))


class Average:
    """Exponential moving average of a module's parameters (Polyak), with a horizon that grows with the steps."""

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for k, v in module.state_dict().items():
            if v.is_floating_point():
                self.shadow[k].lerp_(v, 1 - decay)
            else:
                self.shadow[k].copy_(v)


def run(
    args: argparse.Namespace,
    name: str,
    model: nn.Module,
    loss: Callable[[int], tuple[Tensor, dict[str, float]]],
    finish: Callable[[], None],
    phases: Sequence[int] = (),
    rates: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Trains ``model`` by AdamW on ``loss(step)``; resumes from, and keeps, one checkpoint; then calls ``finish``.

    ``finish`` finds the averaged weights loaded. A run that was stopped and resumed gives the same weights as one that
    wasn't; with ``--steps 0`` it only finishes what the checkpoint holds. Each phase that ends at one of ``phases`` has
    a schedule of its own. ``rates`` are factors of the learning rate by the module's children, 1 for the others.
    """
    device = torch.device(args.device)
    model.to(device)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for key, p in model.named_parameters():
        groups.setdefault((p.ndim <= 1, rates.get(key.partition(".")[0], 1.0)), []).append(p)
    optimiser = torch.optim.AdamW(
        [
            {"params": groups[plain, rate], "weight_decay": 0.0 if plain else 0.02, "rate": rate}
            for plain, rate in sorted(groups)
        ],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=True,
    )
    average = Average(model)
    folder = HERE / "checkpoints"
    folder.mkdir(exist_ok=True)
    file, log, start, spent = folder / f"{name}.pt", HERE / "logs" / f"{name}.jsonl", 0, 0.0
    if file.exists():
        saved = torch.load(file, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        average.shadow, start, spent = saved["average"], saved["step"], saved["seconds"]
    log.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() and start else []
    lines = [line for line in lines if line["step"] <= start]
    began, sums = time.monotonic() - spent, []

    def save(step: int) -> None:
        state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "average": average.shadow}
        torch.save(state | {"step": step, "seconds": time.monotonic() - began}, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))

    for step in range(start, args.steps):
        begin = max((end for end in phases if end <= step), default=0)
        end = min((end for end in phases if end > step), default=args.steps)
        for group in optimiser.param_groups:
            peak = args.lr * group.get("rate", 1.0)
            group["lr"] = schedule(step - begin, end - begin, peak, args.warmup, args.decay)
        value, parts = loss(step)
        model.zero_grad(set_to_none=True)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if math.isfinite(float(norm)):
            optimiser.step()
        average.update(model, step)
        sums.append(parts)
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            means = {k: round(float(np.mean([s[k] for s in sums if k in s])), 5) for k in sums[-1]}
            lines.append({"step": step + 1, "seconds": round(time.monotonic() - began, 1)} | means)
            print(json.dumps(lines[-1]), flush=True)
            sums = []
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(step + 1)
    model.load_state_dict(average.shadow)
    finish()


def ship(pipe: Any, name: str, settings: dict[str, Any]) -> None:
    """Writes a pipeline in float16, with its settings for imgscale, into the folder ``name``.

    What `imgscale profile` measured of earlier weights goes.
    """
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.half().cpu()
    pipe.save_pretrained(HERE / name, safe_serialization=True)
    for file in (HERE / name).rglob("*.json"):
        values = json.loads(file.read_text())
        tidy = {k: v for k, v in values.items() if k != "_name_or_path"}  # no folder of this machine in what ships
        if tidy.get("dtype") == "float16":  # else a plain from_pretrained has text encoders in float16, the rest wider
            tidy["dtype"] = "float32"
        if tidy != values:
            file.write_text(json.dumps(tidy, indent=2) + "\n")
    (HERE / name / "imgscale.json").write_text(json.dumps(settings, indent=1) + "\n")
    (HERE / name / "usefulness.json").unlink(missing_ok=True)


def shuffled(seed: int, size: int, n: int) -> Iterator[np.ndarray]:
    """Endless index batches, each pass over ``size`` items in a new order."""
    pass_ = 0
    while True:
        order = np.random.default_rng((seed, pass_)).permutation(size)
        yield from (order[i : i + n] for i in range(0, size - n + 1, n))
        pass_ += 1

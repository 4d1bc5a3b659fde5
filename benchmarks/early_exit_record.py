"""The table that early exit is measured on: scores of previews at each step, and of the image, of every candidate.

Kept as a file of arrays, so that any rule can be replayed over it for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESULTS = Path(__file__).parent / "results" / "early-exit"
CATEGORIES = ("counting", "two", "position", "attribution", "hard")
LISTS = ("prompts-tuning", "prompts")  # calibrated on the first and measured on the second


@dataclass(frozen=True)
class Table:
    """What was recorded of one model.

    Args:
        prompts: Their texts, those of the tuning list first.
        tuning: How many those are.
        previews: Scores (prompts, candidates, steps) of x0 at each step; NaN where it wasn't looked at.
        finals: Scores (prompts, candidates) of the images.
        held: The held-out judge's.
        facts: The model, its steps, verifier and prices.
    """

    prompts: list[str]
    tuning: int
    previews: Floats
    finals: Floats
    held: Floats
    facts: dict[str, Any]

    def save(self, path: Path) -> None:
        """As npz, in float32."""
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: getattr(self, name).astype(np.float32) for name in ("previews", "finals", "held")}
        np.savez_compressed(
            path, prompts=np.array(self.prompts), tuning=self.tuning, facts=json.dumps(self.facts), **arrays
        )

    @classmethod
    def load(cls, path: Path) -> Table:
        """What `save` wrote."""
        with np.load(path, allow_pickle=False) as data:
            previews, finals, held = (data[name].astype(np.float64) for name in ("previews", "finals", "held"))
            prompts = [str(text) for text in data["prompts"]]
            return cls(prompts, int(data["tuning"]), previews, finals, held, json.loads(str(data["facts"])))


def record(model: str, verifier: str, held_out: str, sizes: Sequence[int], candidates: int, seed: int) -> Table:
    """Runs every candidate to its end.

    Args:
        model: Its name.
        verifier: Which scores previews and images.
        held_out: Which scores images alone.
        sizes: Prompts of each of `LISTS`, spread evenly over the categories.
        candidates: Of each prompt: the first ones of a best-of-n with the prompt's seed.
        seed: Of the first prompt; the next ones count on.
    """
    import imgscale
    from imgscale.app.bench.prompts import load, spread
    from imgscale.budget import Budget, Meter
    from imgscale.problem import Problem
    from imgscale.search import Search

    scaler = imgscale.load(model)
    engine = scaler.engine
    judge, oracle = scaler.verifier(verifier), scaler.verifier(held_out)
    decoder = scaler.preview(scaler.settings.preview)
    steps = scaler.settings.steps or engine.denoiser.steps_default
    texts = [p.text for name, size in zip(LISTS, sizes, strict=True) for p in spread(load(name, CATEGORIES))[:size]]
    previews = np.full((len(texts), candidates, steps), np.nan)
    finals, held = np.zeros((len(texts), candidates)), np.zeros((len(texts), candidates))
    for i, text in enumerate(texts):
        cond = engine.denoiser.encode(text, guidance_scale=scaler.settings.guidance_scale)
        problem = Problem(engine.denoiser, cond, steps=steps, seed=seed + i, meter=Meter(Budget(nfe=10**12)))
        ends: list[Any] = []
        engine.run([Search(problem, _probe(problem, previews[i], finals[i], ends), judge, preview=decoder)])
        images = engine.decode(ends[0].x0, [cond], [candidates])
        held[i] = oracle(images, [text] * candidates).numpy()
        if i % 10 == 9:
            print(f"{model}: {i + 1} of {len(texts)} prompts", flush=True)
    price = scaler.cost(verifier=verifier).price
    facts = {
        "model": model,
        "steps": steps,
        "verifier": verifier,
        "held_out": held_out,
        "seed": seed,
        "price": asdict(price),
        "foresight": None if not scaler.usefulness else next(iter(scaler.usefulness.values())).foresight,
    }
    return Table(texts, sizes[0], previews, finals, held, facts)


def _probe(problem: Any, previews: Floats, finals: Floats, ends: list[Any]) -> Any:
    """A searcher that looks at everything; its first and last step but one are never judged."""
    steps = problem.schedule.steps
    particles = yield from problem.start(len(previews))
    for step in range(1, steps):
        particles = yield from problem.denoise(particles, to=step)
        if step < steps - 1 or steps < 6:
            particles, scores = yield from problem.score(particles)
            previews[:, step] = scores.numpy()
    particles, scores = yield from problem.score((yield from problem.denoise(particles)))
    finals[:] = scores.numpy()
    ends.append(particles)

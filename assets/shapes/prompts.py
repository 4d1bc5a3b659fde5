"""The fixed prompt lists: 200 test prompts in seven categories, and as many for tuning.

The two have no scene of the large categories in common (the small ones are listed whole).

    python -m imgscale.assets.shapes.prompts

writes `prompts.json` and `prompts-tuning.json`. Scenes of the categories position, attribution and hard are all held
out of training; of the small categories as many as there are (`held_out` says which).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from imgscale.assets.shapes.world import Scene, draw_scene, held_out

HERE = Path(__file__).parent
TEST = {"single": 4, "two": 12, "counting": 16, "colours": 24, "position": 44, "attribution": 40, "hard": 60}
ALWAYS_HELD_OUT = ("position", "attribution", "hard")


def draw(kind: str, n: int, rng: np.random.Generator, taken: set[str]) -> list[Scene]:
    """``n`` distinct scenes of a category that aren't ``taken``, held-out ones first; fewer if there are no more."""
    held: dict[str, Scene] = {}
    seen: dict[str, Scene] = {}
    for _ in range(60 * n + 2000):
        scene = draw_scene(kind, rng)
        if str(scene) not in taken:
            (held if held_out(scene) else seen)[str(scene)] = scene
        if len(held) >= n:
            break
    scenes = [*held.values(), *([] if kind in ALWAYS_HELD_OUT else seen.values())]
    return scenes[:n]


def own_seed(prompt: str, seed: int) -> int:
    """A seed for one prompt: with a shared one, all prompts would start from the same noises and fail together."""
    return int.from_bytes(hashlib.sha256(f"{seed}|{prompt}".encode()).digest()[:7], "big")


def main() -> None:
    taken: set[str] = set()
    for name, seed in (("prompts", 2026), ("prompts-tuning", 7)):
        rng = np.random.default_rng(seed)
        small = {k for k in TEST if k not in ALWAYS_HELD_OUT}
        rows = [
            {"prompt": str(scene), "category": kind, "held_out": held_out(scene)}
            for kind, n in TEST.items()
            for scene in draw(kind, n, rng, set() if kind in small else taken)
        ]
        taken |= {str(row["prompt"]) for row in rows}
        lines = ",\n".join(json.dumps(row) for row in rows)
        (HERE / f"{name}.json").write_text(f"[\n{lines}\n]\n")
        print(name, len(rows), {k: sum(r["category"] == k for r in rows) for k in TEST})


if __name__ == "__main__":
    main()

"""Draws docs/images/plain-vs-searched.png: the first test prompts of a category, plain above and searched below.

Run from the repository: python scripts/readme_picture.py. Nothing is picked: prompts in the order of the list, seed 0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import imgscale
from imgscale.assets.shapes.training import HERE

GREEN, RED, GREY = "#1a7f37", "#b42318", "#57606a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", type=int, default=6)
    parser.add_argument("--category", default="attribution")
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("docs/images/plain-vs-searched.png"))
    args = parser.parse_args()
    rows = json.loads((HERE / "prompts.json").read_text())
    prompts = [row["prompt"] for row in rows if row["category"] == args.category][: args.columns]
    scaler = imgscale.load("shapes-flow")
    outputs = scaler(prompts, searcher="rbf", verifier="clip", report=["shapes"], budget=args.budget, seed=0)
    draw(prompts, outputs, args.out)


def draw(prompts: list[str], outputs: list[imgscale.SearchOutput], file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.0 * len(prompts) + 0.9, 5.2), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(prompts), squeeze=False)
    figure.subplots_adjust(left=0.075, right=0.995, top=0.86, bottom=0.05, wspace=0.06, hspace=0.16)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.plain is not None
        pairs = (output.plain.image, output.plain.scores), (output.images[0], output.scores)
        for axis, (image, scores) in zip(axes[:, i], pairs, strict=True):
            right = scores["shapes"] == 1
            axis.imshow(image, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(
                "as asked" if right else "not as asked", color=GREEN if right else RED, fontsize=9, labelpad=3
            )
            for side in axis.spines.values():
                side.set(color=GREEN if right else RED, linewidth=2.2)
        axes[0, i].set_title(_wrapped(prompt), fontsize=9, color="black", pad=6)
    axes[0, 0].set_ylabel("plain", fontsize=12, color=GREY, labelpad=8)
    axes[1, 0].set_ylabel(f"rbf, {outputs[0].nfe} NFE", fontsize=12, color=GREY, labelpad=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def _wrapped(prompt: str, width: int = 24) -> str:
    lines = [""]
    for word in prompt.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    main()

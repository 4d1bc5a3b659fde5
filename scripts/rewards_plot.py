"""docs/images/rewards.png: search reward against held-out reward by budget, for verifiers that steer.

    python -m scripts.rewards_plot

Reads `benchmarks/results/rewards`; `imgscale bench benchmarks/results/rewards/bench.yaml --out rewards` makes its rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {"best-of-n": "#333333", "rbf": "#0072b2"}


def main() -> None:
    lines = (ROOT / "benchmarks" / "results" / "rewards" / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    verifiers = list(dict.fromkeys(row["verifier"] for row in rows))
    figure, axes = plt.subplots(1, len(verifiers), figsize=(3.4 * len(verifiers), 3.2), sharey=True)
    for axis, verifier in zip(axes, verifiers, strict=True):
        mine = [row for row in rows if row["verifier"] == verifier]
        plain = [row for row in mine if row["searcher"] == "plain"]
        steers = list(plain[0]["members"]) or [verifier]
        base = {name: [value(row, name) for row in plain] for name in [*steers, "shapes"]}
        found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        for searcher, budget in sorted({(r["searcher"], r["budget"]) for r in mine if r["searcher"] != "plain"}):
            part = [row for row in mine if (row["searcher"], row["budget"]) == (searcher, budget)]
            found[searcher, "search"][budget] = float(np.mean([above(part, name, base) for name in steers]))
            found[searcher, "held out"][budget] = above(part, "shapes", base)
        for (searcher, kind), curve in found.items():
            style = "-o" if kind == "search" else "--s"
            axis.plot(list(curve), list(curve.values()), style, color=COLOURS[searcher], label=f"{searcher}, {kind}")
        axis.set_xscale("log")
        budgets = sorted({budget for curve in found.values() for budget in curve})
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.minorticks_off()
        axis.set_title(f"steered by {verifier}", fontsize=10)
        axis.set_xlabel("model evaluations")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("above plain samples,\nin their standard deviations")
    axes[-1].legend(fontsize=7.5, frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "images" / "rewards.png", dpi=130)


def value(row: dict[str, Any], name: str) -> float:
    """A row's score by one verifier."""
    found = {row["steers"]: row["score"], **row["members"], **row["held_out"]}[name]
    return float("nan") if found is None else float(found)


def above(rows: list[dict[str, Any]], name: str, plain: dict[str, list[float]]) -> float:
    """The mean above the plain samples', in their standard deviations."""
    return float((np.nanmean([value(row, name) for row in rows]) - np.mean(plain[name])) / np.std(plain[name]))


if __name__ == "__main__":
    main()

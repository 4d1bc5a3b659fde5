"""Settings of the bandit and of what it is compared with, tried on a table of prompts that the comparison doesn't use.

First, how well the priors fit that table. Then, for each policy, a grid of its options; the lowest sum of regrets over
cost, balanced and quality mode and a switch of mode is the choice, the same for all modes. `imgscale bench bandit` has
the choices in its code (`SETTINGS`).
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

HOME = Path(__file__).parent / "results" / "bandit-table-tuning"
SEED = 100  # of the shuffles; those of `imgscale bench bandit` have 0
SCENARIOS = ("cost", "balanced", "quality", "mode switched")
LINEAR: dict[str, tuple[float, ...]] = {"ridge": (3, 10, 30), "products": (1, 4)}
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "linucb": {**LINEAR, "alpha": (0.05, 0.1, 0.2)},
    "thompson": {**LINEAR, "alpha": (0.05, 0.1)},
    "greedy": LINEAR,
    "epsilon-greedy": {**LINEAR, "epsilon": (0.02, 0.05)},
    "knn": {"neighbours": (5, 10, 20), "scale": (0.3, 1), "epsilon": (0.0, 0.02, 0.05)},
    "mlp": {"epochs": (1, 4), "epsilon": (0.02, 0.05)},
    "neuralucb": {"epochs": (1, 4), "alpha": (0.03, 0.1), "ridge": (0.1, 1)},
}


def main(args: argparse.Namespace) -> None:
    print(priors_fit(args.table), flush=True)
    for name in args.policies.split(",") if args.policies else GRIDS:
        grid = GRIDS[name]
        options = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        asked = [(name, each, args.table, args.steps, args.runs) for each in options]
        if args.jobs == 1:
            found = [regrets(*each) for each in asked]
        else:
            with ProcessPoolExecutor(args.jobs) as workers:
                found = list(workers.map(regrets, *zip(*asked, strict=True)))
        order = np.argsort([sum(each) for each in found])
        print(f"{name}: {len(options)} settings; regret in {', '.join(SCENARIOS)}; sum", flush=True)
        for i in [*order[: args.best], order[-1]]:
            print(f"  {options[i]}: {', '.join(f'{x:.1f}' for x in found[i])}; {sum(found[i]):.1f}", flush=True)


def priors_fit(table: Path) -> str:
    """How far the prior is from what actions bring on average, and which `CLOSED` would be nearest."""
    from imgscale.app.bench import bandit_table
    from imgscale.bandit import priors

    read = bandit_table.read(table).table
    quality = np.asarray(read.expected).mean(0)
    plain = np.array([action.model.prior for action in read.actions])
    gap = (1 - plain) * (1 - 1 / np.array([action.candidates for action in read.actions]))
    error = quality - [priors.expected(action) for action in read.actions]
    nearest = gap @ (quality - plain) / (gap @ gap)
    return f"priors: root mean square error {np.sqrt((error**2).mean()):.3f}; the nearest CLOSED is {nearest:.2f}"


def regrets(name: str, options: dict[str, Any], table: Path, steps: int, runs: int) -> list[float]:
    """The mean regret of a policy in each of `SCENARIOS`."""
    from imgscale.app.bench import bandit, bandit_table
    from imgscale.bandit import make, priors
    from imgscale.bandit.replay import replay

    read = bandit_table.read(table).table

    def new(pool: Any, mode: str | float, run: int) -> Any:
        return make(name, pool, mode=mode, seed=run, prior=priors.expected, **options)

    plans = bandit.scenarios(read, steps)
    return [replay(read, new, plans[kind], runs=runs, seed=SEED).mean("regret")[0] for kind in SCENARIOS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", type=Path, default=HOME, help="where the table lies")
    parser.add_argument("--policies", default="", help="some of them, with commas between")
    parser.add_argument("--steps", type=int, default=200, help="decisions")
    parser.add_argument("--runs", type=int, default=4, help="shuffles")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--best", type=int, default=3, help="how many settings to print of each, and the worst")

"""The bandit and its baselines in a synthetic world (see tests/bandits.py), and what a decision costs.

No model is run. For every policy the regret over so many decisions, with 95% intervals over worlds: abilities, prompts
and noise are drawn anew in each. Nothing was chosen on these worlds: the policies' settings are their defaults.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

POLICIES: dict[str, dict[str, Any]] = {
    "random": {},
    "fixed": {},
    "routing-only": {},
    "search-only": {},
    "greedy": {},
    "epsilon-greedy": {},
    "knn": {},
    "mlp": {},
    "neuralucb": {},
    "thompson": {},
    "vowpalwabbit": {},
    "linucb": {},
    "linucb, discount .999": {"discount": 0.999},
    "linucb, one-hot actions": {"onehot": True},
    "linucb, no products": {"form": "concatenated"},
    "linucb, no products, joint": {"form": "concatenated", "joint": True},
    "linucb, joint cost": {"joint": True},
}


def main(args: argparse.Namespace) -> None:
    from imgscale.bandit.replay import Scenario
    from tests.bandits import world

    if args.time:
        return decide(args.actions)
    scenarios = {
        "cost": Scenario(mode="cost", steps=args.steps),
        "quality": Scenario(mode="quality", steps=args.steps),
        "switch": Scenario(mode="cost", steps=args.steps, switch=(0.5, "quality")),
        "model added": Scenario(steps=args.steps, added=(0.5, "medium")),
        "model removed": Scenario(steps=args.steps, removed=(0.5, "medium")),
        "drift": Scenario(steps=args.steps, drift=True),
    }
    chosen = args.scenarios.split(",") if args.scenarios else list(scenarios)
    found: dict[str, dict[str, list[float]]] = {}
    for name in args.policies.split("|") if args.policies else POLICIES:
        if name == "vowpalwabbit" and find_spec(name) is None:
            print("vowpalwabbit isn't installed and is left out.", flush=True)
            continue
        for scenario in chosen:
            regrets = []
            for seed in range(args.worlds):
                table = world(seed, curved=args.curved)
                regrets.append(regret(name, table, scenarios[scenario], seed))
            found.setdefault(name, {})[scenario] = regrets
        print(row(name, found[name]), flush=True)
    if args.out:
        about = {"steps": args.steps, "curved": args.curved, "regrets by world": found}
        args.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def regret(name: str, table: Any, scenario: Any, seed: int) -> float:
    """The cumulative regret of a policy in one world."""
    from imgscale.bandit import Schema, make
    from imgscale.bandit.replay import replay

    options = dict(POLICIES[name])
    form, onehot = options.pop("form", "interactions"), options.pop("onehot", False)
    schema = None
    if form != "interactions" or onehot:
        names = tuple(f"z{i}" for i in range(table.z.shape[1]))
        schema = Schema.of(table.actions, names, form=form, onehot=onehot)
    if name == "fixed":
        late = scenario.added[1] if scenario.added else None
        options["action"] = table.best_fixed(scenario.mode, without=late)

    def new(pool: Any, mode: str | float, run: int) -> Any:
        return make(name.partition(",")[0], pool, mode=mode, seed=seed, **options)

    return float(replay(table, new, scenario, schema=schema, runs=1, seed=seed).regret.sum())


def row(name: str, found: dict[str, list[float]]) -> str:
    """A row of a Markdown table: mean regret and half its interval."""
    cells = []
    for values in found.values():
        n = len(values)
        half = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5 if n > 1 else float("nan")
        cells.append(f"{np.mean(values):.0f} ± {half:.0f}")
    return f"| {name} | " + " | ".join(cells) + " |"


def decide(actions: int) -> None:
    """Times of a decision and of learning, with a prompt's 7 counts and 24 directions of its embedding."""
    from dataclasses import replace

    from imgscale.bandit import Context, Pool, Prompts, Schema, make
    from tests.bandits import actions as base

    some = base()
    many = [replace(some[i % 48], nfe=some[i % 48].nfe + 1000 * (i // 48)) for i in range(actions)]
    prompts = Prompts(512, 24)
    pool = Pool(many, Schema.of(many, prompts.names))
    embedding = np.random.default_rng(0).standard_normal((400, 512))
    print(f"{actions} actions, phi of {pool.schema.dim}")
    for name, options in (("linucb", {}), ("linucb", {"discount": 0.999}), ("thompson", {}), ("neuralucb", {})):
        policy = make(name, pool, **options)
        contexts = [Context(prompts("two red circles above a blue square", vector)) for vector in embedding]
        taken = [
            (clock(policy.choose, c), clock(policy.learn, c, many[i % actions], 0.5)) for i, c in enumerate(contexts)
        ]
        times = np.array(taken[100:])
        middle, high = np.median(times, 0), np.percentile(times, 95, 0)
        label = f"{name} {options or ''}"
        print(f"{label:30} choose {middle[0]:.2f} ms (95%: {high[0]:.2f}), learn {middle[1]:.2f} ms ({high[1]:.2f})")


def clock(do: Callable[..., Any], *arguments: Any) -> float:
    """Milliseconds of processor time, which other programs on the machine don't lengthen much."""
    start = time.process_time()
    do(*arguments)
    return 1e3 * (time.process_time() - start)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worlds", type=int, default=4, help="seeds, from 0")
    parser.add_argument("--steps", type=int, default=2000, help="decisions")
    parser.add_argument("--curved", action="store_true", help="a logistic world, which no linear policy can know")
    parser.add_argument("--policies", default="", help="some of them, with | between")
    parser.add_argument("--scenarios", default="", help="some of them, with commas between")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the regrets of all worlds")
    parser.add_argument("--time", action="store_true", help="measure decisions instead")
    parser.add_argument("--actions", type=int, default=200, help="of the decisions that are timed")

"""`model="auto"` live on prompts that nothing was learned on, against fixed actions.

Auto begins as for every new user, with the lessons and priors of the bundled pool, and learns as it goes. Each prompt
is then searched with the fixed actions, too. Prompts of the tables that lessons, settings and fixed actions were chosen
on are left out. Quality is what auto learns by, with one scale of scores for all: the verifier's scores of all searches
of the run. Rows are written as they come, and the same command goes on where it was stopped (auto's policy lies beside
them).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import bandit_settings, bandit_table

TABLES = [bandit_table.HOME, bandit_settings.HOME]

Floats = npt.NDArray[np.float64]


def main(args: argparse.Namespace) -> None:
    if not args.no_run:
        run(args)
    rows = bandit_table.rows(args.out / "rows.jsonl")
    for line in compared(rows, args.mode):
        print(line)


def run(args: argparse.Namespace) -> None:
    import imgscale
    from imgscale.app.bench import prompts as lists

    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "rows.jsonl"
    done = {(row["who"], row["prompt"]) for row in bandit_table.rows(file)}
    auto = imgscale.auto(mode=args.mode, policy=args.out / "auto.policy", draws=0)
    fixed = [next(a for a in auto.pool.actions if a.name == name) for name in args.fixed]
    seen = {row["prompt"] for table in args.without for row in bandit_table.rows(table / "prompts.jsonl")}
    fresh = [prompt for source in args.source for prompt in lists.load(source, without=seen)]
    chosen = lists.spread(list({prompt.text: prompt for prompt in fresh}.values()))[: args.prompts]
    for number, prompt in enumerate(chosen):
        for who, action in [("auto", None), *((action.name, action) for action in fixed)]:
            if (who, prompt.text) in done:
                continue
            if action is not None:
                auto.pool.alive[:] = [each is action for each in auto.pool.actions]
            learn, auto._learns = auto._learns, action is None
            output = auto(prompt.text, seed=30_000 + number, plain=False, progress=False)
            auto._learns, auto.pool.alive[:] = learn, True
            made = output.decision
            row = {"who": who, "prompt": prompt.text, "category": prompt.category, "action": made.choice.action.name}
            row |= {"score": made.score, "correct": made.correct, "eflops": made.eflops, "nfe": output.nfe}
            with file.open("a", encoding="utf-8") as log:
                log.write(json.dumps(row | {"reference": auto.store.memory.reference}) + "\n")


def compared(rows: list[dict[str, Any]], mode: str | float) -> list[str]:
    """A line for each way, and the differences of auto to the others with 95% bootstrap intervals over prompts."""
    from imgscale.bandit.policy import quality_weight

    weight = quality_weight(mode)
    scores = np.sort([row["score"] for row in rows])
    found: dict[str, dict[str, Floats]] = {}
    for row in rows:
        rank = np.searchsorted(scores, row["score"], "left") + np.searchsorted(scores, row["score"], "right")
        quality = 0.5 * float(row["correct"]) + 0.5 * rank / 2 / len(scores)
        cost = min(row["eflops"] / row["reference"], 1.0)
        utility = weight * quality + (1 - weight) * (1 - cost)
        values = [float(row["correct"]), row["score"], row["eflops"] / 1e9, quality, utility]
        found.setdefault(row["who"], {})[row["prompt"]] = np.array(values)
    common = [prompt for prompt in found["auto"] if all(prompt in each for each in found.values())]  # as they came
    rng = np.random.default_rng(0)
    lines = [f"{len(common)} prompts, mode {mode}: right, score, GFLOPs, quality, utility"]
    mine = np.array([found["auto"][prompt] for prompt in common])
    for who, each in found.items():
        theirs = np.array([each[prompt] for prompt in common])
        means = theirs.mean(0)
        line = f"{who}: {100 * means[0]:.1f}%, {means[1]:.3f}, {means[2]:.0f}, {means[3]:.3f}, {means[4]:.3f}"
        if who != "auto":
            gain = mine - theirs
            again = gain[rng.integers(len(gain), size=(4000, len(gain)))].mean(1)
            low, high = np.quantile(again, (0.025, 0.975), axis=0)
            line += "; auto's right {:+.1f} points ({:+.1f} to {:+.1f})".format(
                *(100 * x for x in (gain.mean(0)[0], low[0], high[0]))
            )
            line += f", utility {gain.mean(0)[4]:+.3f} ({low[4]:+.3f} to {high[4]:+.3f})"
            half = len(gain) // 2
            line += f"; in the first half {gain[:half, 4].mean():+.3f}, in the second {gain[half:, 4].mean():+.3f}"
        lines.append(line)
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=200, help="how many, categories mixed evenly")
    parser.add_argument("--source", nargs="+", default=["prompts", "prompts-tuning"], help="lists of prompts")
    parser.add_argument("--without", nargs="+", type=Path, default=TABLES, help="tables whose prompts are left out")
    parser.add_argument("--mode", default="balanced", help="cost, balanced or quality")
    parser.add_argument("--fixed", nargs="+", default=[], help="names of actions to compare with")
    parser.add_argument("--no-run", action="store_true", help="only compare what is there")
    parser.add_argument("--out", type=Path, required=True, help="where rows and policy lie")

"""How often a search satisfies the prompt, by the held-out oracle: plain, best-of-n and rbf at several budgets.

Every prompt of the list is run once per seed, from starting noises of its own (the same for every search, so that they
are compared in pairs); nothing is selected afterwards. Rows are kept as they come (`--out`, JSON lines), so that a
stopped run goes on where it was; `--report` prints the tables of what is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from imgscale.assets.shapes.prompts import own_seed

Row = dict[str, Any]


def prompts(name: str, categories: list[str], limit: int, every: int = 1) -> list[Row]:
    """The rows of a fixed list: of each category the first of ``every`` so many, and at most ``limit`` of these."""
    file = resources.files("imgscale.assets") / "shapes" / f"{name}.json"
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    by: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if not categories or row["category"] in categories:
            by[row["category"]].append(row)
    return [row for group in by.values() for row in group[::every][: limit or None]]


def run(args: argparse.Namespace) -> None:
    import imgscale

    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {key(row) for row in read(out)}
    scaler = imgscale.load(args.model, max_batch=args.max_batch)
    todo = prompts(args.prompts, args.categories, args.limit, args.every)
    jobs = [("plain", 0, "shapes")] if args.plain else []
    jobs += list(itertools.product(args.searchers, args.budgets, args.verifiers))
    for seed, (searcher, budget, verifier) in itertools.product(range(args.seed, args.seed + args.seeds), jobs):
        fresh = [row for row in todo if (row["prompt"], seed, searcher, budget, verifier) not in done]
        for start in range(0, len(fresh), args.together):
            rows = fresh[start : start + args.together]
            began = time.monotonic()
            outputs = scaler(
                [row["prompt"] for row in rows],
                searcher="best-of-n" if searcher == "plain" else searcher,
                options={"n": 1} if searcher == "plain" else None,
                verifier=verifier,
                report=["shapes"],
                budget=budget or 10**6,
                seed=[own_seed(row["prompt"], seed) for row in rows],
                plain=False,
                progress=False,
                num_inference_steps=args.steps or None,
                guidance_scale=args.guidance or None,
            )
            seconds = (time.monotonic() - began) / len(rows)
            with out.open("a", encoding="utf-8") as file:
                for row, output in zip(rows, outputs, strict=True):
                    record = {
                        **row,
                        "seed": seed,
                        "searcher": searcher,
                        "budget": budget,
                        "verifier": verifier,
                        "nfe": output.nfe,
                        "verifier_calls": output.ledger.verifier_calls,
                        "seconds": round(seconds, 3),
                        "scores": output.scores,  # not rounded: solved means exactly 1
                    }
                    file.write(json.dumps(record) + "\n")


def key(row: Row) -> tuple[Any, ...]:
    return row["prompt"], row["seed"], row["searcher"], row["budget"], row["verifier"]


def read(file: Path) -> list[Row]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def solved(rows: Iterable[Row]) -> np.ndarray:
    """1 where the oracle finds everything as asked."""
    return np.array([float(row["scores"]["shapes"] == 1) for row in rows])


def interval(rows: list[Row], draws: int = 4000) -> tuple[float, float]:
    """95% by bootstrap over prompts (all seeds of a prompt together)."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row, value in zip(rows, solved(rows), strict=True):
        groups[row["prompt"]].append(value)
    means = np.array([np.mean(v) for v in groups.values()])
    picks = np.random.default_rng(0).integers(len(means), size=(draws, len(means)))
    low, high = np.quantile(means[picks].mean(1), [0.025, 0.975])
    return float(low), float(high)


def gain(a: list[Row], b: list[Row], draws: int = 4000) -> tuple[float, float, float]:
    """How much more often ``a`` solves than ``b``, with a paired 95% interval over prompts."""
    differences = defaultdict(list)
    other = {(row["prompt"], row["seed"]): v for row, v in zip(b, solved(b), strict=True)}
    for row, value in zip(a, solved(a), strict=True):
        if (row["prompt"], row["seed"]) in other:
            differences[row["prompt"]].append(value - other[row["prompt"], row["seed"]])
    means = np.array([np.mean(v) for v in differences.values()])
    picks = np.random.default_rng(0).integers(len(means), size=(draws, len(means)))
    low, high = np.quantile(means[picks].mean(1), [0.025, 0.975])
    return float(means.mean()), float(low), float(high)


def report(rows: list[Row]) -> str:
    """A Markdown table: rows are searches, columns categories."""
    kinds = list(dict.fromkeys(row["category"] for row in rows))
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["verifier"] if row["searcher"] != "plain" else "", row["searcher"], row["budget"]].append(row)
    lines = [
        f"| steered by | search | NFE | overall (95%) | {' | '.join(kinds)} | s/image | n |",
        "|---" * (6 + len(kinds)) + "|",
    ]
    for (verifier, searcher, budget), members in sorted(groups.items()):
        low, high = interval(members)
        cells = []
        for kind in kinds:
            part = [row for row in members if row["category"] == kind]
            cells.append(f"{100 * solved(part).mean():.0f}" if part else "")
        nfe = np.mean([row["nfe"] for row in members])
        lines.append(
            f"| {verifier or 'nothing'} | {searcher} | {budget or nfe:.0f} | **{100 * solved(members).mean():.1f}** "
            f"({100 * low:.1f} to {100 * high:.1f}) | {' | '.join(cells)} "
            f"| {np.mean([row['seconds'] for row in members]):.2f} | {len(members)} |"
        )
    plain = groups.get(("", "plain", 0))
    if plain:
        lines += ["", "| steered by | search | NFE | over plain, points (95%) | over best-of-n, hard only (95%) |"]
        lines += ["|---|---|---|---|---|"]
        for (verifier, searcher, budget), members in sorted(groups.items()):
            if searcher == "plain":
                continue
            cell = _gain_text(members, plain)
            rival = groups.get((verifier, "best-of-n", budget), [])
            hard = [row for row in members if row["category"] == "hard"]
            rival = [row for row in rival if row["category"] == "hard"]
            against = _gain_text(hard, rival) if hard and rival and searcher != "best-of-n" else ""
            lines.append(f"| {verifier} | {searcher} | {budget} | {cell} | {against} |")
    return "\n".join(lines)


def _gain_text(a: list[Row], b: list[Row]) -> str:
    mean, low, high = gain(a, b)
    return f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"can't be {text!r}; give a whole number from 1, such as 4")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="shapes-flow")
    parser.add_argument("--prompts", default="prompts", help="prompts or prompts-tuning")
    parser.add_argument("--categories", nargs="*", default=[], help="all if none is named")
    parser.add_argument("--limit", type=int, default=0, help="prompts per category; 0 for all")
    parser.add_argument(
        "--every", type=_positive, default=1, help="take one prompt of so many, in every category alike"
    )
    parser.add_argument("--searchers", nargs="*", default=["best-of-n", "rbf"])
    parser.add_argument("--budgets", nargs="*", type=int, default=[50, 100, 200])
    parser.add_argument("--verifiers", nargs="*", default=["clip", "shapes"])
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--together", type=int, default=20, help="prompts searched side by side")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--guidance", type=float, default=0.0)
    parser.add_argument("--out", default="benchmarks/results/accuracy.jsonl")
    parser.add_argument("--report", action="store_true", help="only print the tables")


def main(args: argparse.Namespace) -> None:
    if not args.report:
        run(args)
    print(report(read(Path(args.out))))

"""Early exit on the bundled models: evaluations saved, winners dropped, and what that does to the images, over delta.

Best-of-n is recorded once with every preview's score (`--record MODEL`). Then the races of the engine are replayed over
these scores for nothing: margins are learned on prompts of the tuning list, and measured on prompts of the other one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.early_exit_record import RESULTS, Table, record
from benchmarks.early_exit_replay import Outcome, replay
from imgscale.calibration import Race, margins
from imgscale.early_exit import EarlyExit, Rule
from imgscale.usefulness import Usefulness

Floats = npt.NDArray[np.float64]

DELTAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
FEW = 8  # samples that the budget holds where equal budgets are compared
PLOT = Path(__file__).parents[1] / "docs" / "images" / "early-exit.png"


def main(args: argparse.Namespace) -> None:
    if args.record:
        table = record(args.record, "clip", "shapes", (args.tuning, args.test), args.candidates, args.seed)
        table.save(RESULTS / f"{args.record}.npz")
    tables = [Table.load(path) for path in sorted(RESULTS.glob("*.npz"))]
    curves = {}
    for table in tables:
        curves[table.facts["model"]] = curve(table)
        show_curve(table, curves[table.facts["model"]])
        show_sizes(table)
        show_equal_budget(table)
        show_splits(table)
        if args.live:
            show_live(table, args.live)
        if args.ship:
            ship(table)
    plot(curves)


# ------------------------------------------------------------------------------------------------------------ replaying


def checks_of(table: Table) -> tuple[int, ...]:
    """Where a search on this model judges, unless it is told."""
    foresight = table.facts["foresight"]
    known = Usefulness((0.0,) * (len(foresight) - 1), tuple(foresight))
    return EarlyExit().steps(table.facts["steps"], known)


def rule_of(table: Table, delta: float, rows: Sequence[int], n: int) -> Rule | None:
    """The rule that the races of these prompts teach; None where they are too few for n candidates."""
    checks = checks_of(table)
    races = [Race.of(table.previews[i][:, checks], table.finals[i]) for i in rows]
    found = margins(races, delta)
    if found is None or found.factor(n) is None:
        return None
    return Rule(EarlyExit(delta=delta, audit=0.0), checks, table.facts["steps"], 1.0, {"fresh": found})


def papers(table: Table) -> Rule:
    """The paper's, at every step that was recorded, with the verifier's highest score."""
    steps = table.facts["steps"]
    checks = tuple(step for step in range(steps - 1) if np.isfinite(table.previews[:, :, step]).all())
    return Rule(EarlyExit("paper", v_sup=1.0), checks, steps, 1.0)


def eflops(table: Table, nfe: int, looks: int, images: int) -> float:
    """Of a race."""
    price: dict[str, float] = table.facts["price"]
    look, image = price["preview"] + price["score"], price["decode"] + price["score"]
    return nfe * price["nfe"] + looks * look + images * image


def compare(table: Table, rule: Rule, n: int) -> Floats:
    """For each test prompt: shares of evaluations and of eFLOPs that are saved, whether the winner was dropped, and the
    changes of the answer's score and held-out score (prompts, 5).
    """
    rows = []
    for i in range(table.tuning, len(table.prompts)):
        previews, finals, held = table.previews[i, :n], table.finals[i, :n], table.held[i, :n]
        found = replay(rule, previews, finals, seed=i)
        best, winner = int(found.scores.argmax()), int(finals.argmax())
        cost = eflops(table, found.nfe, found.looks, found.images) / eflops(table, found.full, 0, n)
        change = finals[best] - finals[winner], held[best] - held[winner]
        rows.append((1 - found.nfe / found.full, 1 - cost, float(best != winner), *change))
    return np.array(rows)


def interval(values: Floats) -> tuple[float, float, float]:
    """Mean, and a paired bootstrap interval of 95% over the prompts."""
    chance = np.random.default_rng(0)
    means = values[chance.integers(len(values), size=(4000, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def curve(table: Table) -> dict[str, Floats]:
    """What `compare` finds by rule."""
    n = table.finals.shape[1]
    rules = {f"{delta:g}": rule_of(table, delta, range(table.tuning), n) for delta in DELTAS}
    made = {**rules, "paper": papers(table)}
    return {name: compare(table, rule, n) for name, rule in made.items() if rule is not None}


# ------------------------------------------------------------------------------------------------------------- printing


def show_curve(table: Table, found: dict[str, Floats]) -> None:
    facts, n = table.facts, table.finals.shape[1]
    steps, checks, test = facts["steps"], checks_of(table), len(table.prompts) - table.tuning
    print(f"\n## {facts['model']}: best of {n}, {table.tuning} prompts to learn from, {test} to measure on\n")
    sight = ", ".join(f"{step}: {facts['foresight'][step]:.2f}" for step in checks)
    most = (1 - 1 / n) * (1 - (checks[0] + 1) / steps)
    print(f"Checks at steps {sight} (foresight), of {steps}. At most {most:.1%} of the evaluations can be saved.\n")
    print("| delta | NFE saved % | eFLOPs saved % | winner dropped % | score | held-out, points |")
    print("|---|---|---|---|---|---|")
    for name, rows in found.items():
        nfe, cost, lost, score, held = (interval(column) for column in rows.T)
        cells = _text(nfe, 100, 1), _text(cost, 100, 1), _text(lost, 100, 1), _text(score, 1, 4), _text(held, 100, 1)
        print(f"| {name} | {' | '.join(cells)} |")
    for delta in DELTAS:
        if f"{delta:g}" not in found:
            print(f"\ndelta {delta:g}: {table.tuning} races are too few, so nothing is dropped.")


def _text(value: tuple[float, float, float], scale: float, digits: int) -> str:
    mean, low, high = (scale * v + 0.0 for v in value)
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def show_sizes(table: Table) -> None:
    print("\nNFE saved % by the number of candidates:\n\n| delta | n = 4 | n = 8 | n = 16 |\n|---|---|---|---|")
    for delta in (0.1, 0.2, 0.5):
        cells = []
        for n in (4, 8, 16):
            rule = rule_of(table, delta, range(table.tuning), n)
            cells.append("–" if rule is None else _text(interval(compare(table, rule, n)[:, 0]), 100, 1))
        print(f"| {delta:g} | {' | '.join(cells)} |")


def show_equal_budget(table: Table) -> None:
    """Where what is saved buys further candidates, as far as some were recorded."""
    print(f"\nAt the budget of {FEW} samples, against best of {FEW}:\n")
    print("| delta | candidates | score | held-out, points |\n|---|---|---|---|")
    for delta in (0.05, 0.1, 0.2, 0.5):
        rule = rule_of(table, delta, range(table.tuning), table.finals.shape[1])
        if rule is None:
            continue
        rows = []
        for i in range(table.tuning, len(table.prompts)):
            scores = np.concatenate([found.scores for found in _spend(table, rule, i)])
            best, before = int(scores.argmax()), int(table.finals[i, :FEW].argmax())
            change = table.finals[i, best] - table.finals[i, before], table.held[i, best] - table.held[i, before]
            rows.append((float(len(scores)), *change))
        drawn, score, held = (interval(column) for column in np.array(rows).T)
        print(f"| {delta:g} | {_text(drawn, 1, 1)} | {_text(score, 1, 4)} | {_text(held, 100, 1)} |")


def _spend(table: Table, rule: Rule, i: int) -> Iterator[Outcome]:
    """Races of best-of-n until the budget of `FEW` samples, or what was recorded, is spent."""
    steps, total = table.facts["steps"], table.finals.shape[1]
    left, drawn, reached = FEW * steps, 0, -np.inf
    while n := min(left // steps, total - drawn):
        rows = slice(drawn, drawn + n)
        found = replay(rule, table.previews[i, rows], table.finals[i, rows], seed=i, beat=reached, of=total)
        left, drawn, reached = left - found.nfe, drawn + n, max(reached, float(found.scores.max()))
        yield found


def show_splits(table: Table) -> None:
    """How often winners are dropped if other prompts are learned from: an average over many ways to split them."""
    n, prompts = table.finals.shape[1], len(table.prompts)
    print("\nWinners dropped %, over 40 random splits of all prompts:", end=" ")
    cells = []
    for delta in DELTAS:
        lost = []
        for seed in range(40):
            order = np.random.default_rng(seed).permutation(prompts)
            rule = rule_of(table, delta, order[: table.tuning].tolist(), n)
            for i in order[table.tuning :] if rule is not None else ():
                assert rule is not None
                found = replay(rule, table.previews[i], table.finals[i], seed=int(i))
                lost.append(not np.isfinite(found.scores[table.finals[i].argmax()]))
        cells.append(f"{delta:g}: {100 * np.mean(lost):.1f}" if lost else f"{delta:g}: –")
    print("; ".join(cells))


# --------------------------------------------------------------------------------------------------- live, and shipping


def show_live(table: Table, prompts: int) -> None:
    """Whether searches do what was replayed."""
    import imgscale
    from imgscale.budget import Budget, Meter
    from imgscale.problem import Problem
    from imgscale.search import Search
    from imgscale.searchers.best_of_n import best_of_n

    scaler, n, facts = imgscale.load(table.facts["model"]), table.finals.shape[1], table.facts
    rule = rule_of(table, 0.2, range(table.tuning), n)
    assert rule is not None
    same = 0
    for i in range(table.tuning, table.tuning + prompts):
        cond = scaler.engine.denoiser.encode(table.prompts[i], guidance_scale=scaler.settings.guidance_scale)
        meter = Meter(Budget(nfe=10**6))
        seed = facts["seed"] + i
        problem = Problem(scaler.engine.denoiser, cond, steps=facts["steps"], seed=seed, meter=meter, early_exit=rule)
        search = Search(problem, best_of_n(problem, np.random.default_rng(0), n=n), scaler.verifier("clip"))
        scaler.engine.run([search])
        found = replay(rule, table.previews[i], table.finals[i])
        assert search.best is not None
        agrees = abs(search.best.score - found.scores.max()) < 1e-4
        same += agrees and meter.ledger.nfe == found.nfe and problem.exits.dropped == n - found.images
    print(f"\nLive searches at delta .2 with the evaluations, drops and answer of their replay: {same} of {prompts}")


def ship(table: Table) -> None:
    """Writes what was learned from the tuning list into the model's folder."""
    import imgscale
    from imgscale import calibration
    from imgscale.asks import Ask
    from imgscale.models import folder_of

    name = table.facts["model"]
    folder = folder_of(name)
    assert folder is not None
    scaler = imgscale.load(name)
    key = scaler.lessons_of(Ask("a circle", early_exit="calibrated"))
    checks = checks_of(table)
    races = [Race.of(table.previews[i][:, checks], table.finals[i]) for i in range(table.tuning)]
    digest = calibration.digest(key)
    calibration.write(folder / "early-exit.json", {digest: {"fresh": {race.name: race for race in races}}})


def plot(curves: dict[str, dict[str, Floats]]) -> None:
    """One panel a model: how the held-out score changes against what is saved."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(4 * len(curves), 4), sharey=True, squeeze=False)
    kinds = ((0, "C0", "model evaluations"), (1, "C1", "eFLOPs, looks included"))
    for axis, (model, found) in zip(axes[0], curves.items(), strict=True):
        for column, colour, label in kinds:
            points = {name: (interval(rows[:, column]), interval(rows[:, 4])) for name, rows in found.items()}
            line = [(100 * x, 100 * y) for name, ((x, *_), (y, *_)) in points.items() if name != "paper"]
            axis.plot(*zip(*line, strict=True), color=colour, label=label)
            for name, ((x, *_), (y, low, high)) in points.items():
                mark, bars = "x" if name == "paper" else "o", [[100 * (y - low)], [100 * (high - y)]]
                axis.errorbar(100 * x, 100 * y, bars, fmt=mark, color=colour, alpha=0.8, capsize=2, ms=4)
            for number, (name, ((x, *_), (_, _, high))) in enumerate(points.items()):
                if column == 0 and name != "paper":
                    axis.annotate(name, (100 * x, 100 * high), (0, 4 + 8 * (number % 2)), **_LABEL)
        axis.axhline(-1, color="grey", lw=0.8, ls=":")
        axis.axvline(87, color="grey", lw=0.8, ls=":")
        axis.set(xlim=(-35, 100), ylim=(-7, 6), xlabel="saved, %", title=model)
    axes[0, 0].set_ylabel("change of the held-out score, points")
    axes[0, -1].legend(loc="lower right", fontsize=8)
    figure.suptitle("Best of 16 with early exit, by delta (x: the paper's rule); dotted: 87% and one point")
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)


_LABEL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "ha": "center"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", metavar="MODEL", help="run this model's candidates first (minutes)")
    parser.add_argument("--tuning", type=int, default=60, help="prompts to learn from, when recording")
    parser.add_argument("--test", type=int, default=40, help="prompts to measure on, when recording")
    parser.add_argument("--candidates", type=int, default=16, help="of each prompt, when recording")
    parser.add_argument("--seed", type=int, default=1000, help="of the first prompt, when recording")
    parser.add_argument("--live", type=int, default=0, help="test prompts on which to run the search itself, too")
    parser.add_argument("--ship", action="store_true", help="write what was learned into the models' folders")

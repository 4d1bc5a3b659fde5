"""Replays of all policies on the bundled models' table: regret with bands, in every mode, scenario and ablation."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from imgscale import files
from imgscale.app.bench import bandit_table
from imgscale.bandit import lessons, poolfile
from imgscale.bandit.lessons import Lessons
from imgscale.bandit.policy import quality_weight
from imgscale.bandit.replay import Outcome, Scenario, Table, replay
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]

# Chosen on other prompts: python -m benchmarks bandit-settings
LINEAR = {"ridge": 10.0, "products": 4.0, "alpha": 0.2}
SETTINGS: dict[str, dict[str, Any]] = {
    "random": {},
    "always-large": {},
    "fixed": {},
    "routing-only": LINEAR,
    "search-only": LINEAR,
    "greedy": {"ridge": 10.0},
    "epsilon-greedy": {"ridge": 3.0, "epsilon": 0.02},
    "thompson": {"ridge": 30.0, "alpha": 0.05},
    "knn": {"neighbours": 5, "scale": 0.3, "epsilon": 0.05},
    "mlp": {"epochs": 4, "epsilon": 0.05},
    "neuralucb": {"epochs": 4, "alpha": 0.03, "ridge": 1.0},
    "vowpalwabbit": {},
    "linucb": LINEAR,
    "oracle": {},
}
CHANGES: dict[str, dict[str, Any]] = {  # one a row
    "linucb, with lessons": {"lessons": True},
    "greedy, with lessons": {"lessons": True},
    "thompson, with lessons": {"lessons": True},
    "knn, with lessons": {"lessons": True},
    "knn, no priors": {"prior": None},
    "linucb, one-hot actions": {"onehot": True},
    "linucb, no products": {"form": "concatenated"},
    "linucb, joint cost": {"joint": True},
    "linucb, no dense feedback": {"dense": False},
    "linucb, no priors": {"prior": None},
}
ABLATED = ("cost", "balanced", "quality", "mode switched")
MEASURES = ("regret", "utility", "correct", "cost", "tried")


@dataclass(frozen=True)
class Line:
    """What came of a policy in a scenario: means over steps (of regret: the sum), each with its 95% interval."""

    policy: str
    scenario: str
    values: dict[str, tuple[float, float, float]]
    curve: tuple[list[float], list[float], list[float]]


def scenarios(table: Table, steps: int) -> dict[str, Scenario]:
    """Those that are replayed. The model that comes or goes half way is the one of the highest prior."""
    moved = max((action.model for action in table.actions), key=lambda model: model.prior).name
    return {
        "cost": Scenario("cost", steps, "cost"),
        "balanced": Scenario("balanced", steps),
        "quality": Scenario("quality", steps, "quality"),
        "model added": Scenario("model added", steps, added=(0.5, moved)),
        "model removed": Scenario("model removed", steps, removed=(0.5, moved)),
        "mode switched": Scenario("mode switched", steps, "cost", switch=(0.5, "quality")),
        "drift": Scenario("drift", steps, drift=True),
    }


def play(table: Table, name: str, scenario: str, steps: int, runs: int) -> Line:
    """Replays one policy in one scenario; for the same arguments the same, in whichever process."""
    planned = scenarios(table, steps)[scenario]
    make, schema, seen = _maker(table, name, planned)
    found: Outcome = replay(seen, make, planned, schema=schema, runs=runs)
    places = np.unique(np.linspace(0, steps - 1, min(steps, 101)).round().astype(int))
    middle, low, high = ([round(float(x), 4) for x in band[places]] for band in found.band())
    return Line(name, scenario, {what: found.mean(what) for what in MEASURES}, (middle, low, high))


def _maker(table: Table, name: str, scenario: Scenario) -> tuple[Callable[..., Any], Any, Table]:
    from imgscale.bandit import LinUCB, Schema, make, priors

    kind = name.partition(",")[0]
    options = {"prior": priors.expected, **SETTINGS[kind], **CHANGES.get(name, {})}
    taught = _lessons(scenario) if options.pop("lessons", False) else None
    form, onehot, dense = options.pop("form", "interactions"), options.pop("onehot", False), options.pop("dense", True)
    schema = None
    if onehot or form != "interactions":
        names = tuple(f"z{i}" for i in range(table.z.shape[1]))
        schema = Schema.of(table.actions, names, form=form, onehot=onehot)
    if kind in ("fixed", "always-large"):
        options["action"], kind = _fixed(table, scenario, kind), "fixed"

    def new(pool: Any, mode: str | float, run: int) -> Any:
        made = make(kind, pool, mode=mode, seed=run, **options)
        if taught is not None and isinstance(made, LinUCB):
            taught.teach(made, poolfile.read().policy.worth)
        elif taught is not None:
            taught.show(made)
        return made

    seen = table if dense or table.correct is None else replace(table, rewards=table.correct.astype(float))
    return new, schema, seen


def _lessons(scenario: Scenario) -> Lessons:
    """What `model="auto"` begins with on the bundled models; without those that come later."""
    path = poolfile.read().lessons_path
    assert path is not None
    found = lessons.read(path)
    return found.without(scenario.added[1]) if scenario.added else found


def _fixed(table: Table, scenario: Scenario, kind: str) -> Any:
    """The best action in hindsight, over the modes of the whole replay; of the dearest model for "always-large"."""
    weights = [quality_weight(scenario.mode)] + ([quality_weight(scenario.switch[1])] if scenario.switch else [])
    mean = np.mean([table.utility(weight).mean(0) for weight in weights], 0)
    late = scenario.added[1] if scenario.added else None
    there = [action for action in table.actions if action.model.name != late]
    large = max(there, key=lambda action: action.steps * action.model.step_eflops).model.name
    fits = [a.model.name == large if kind == "always-large" else a.model.name != late for a in table.actions]
    return table.actions[int(np.where(fits, mean, -np.inf).argmax())]


def bench(
    folder: Path | None, out: Path, *, steps: int, runs: int, jobs: int, tell: Callable[[str], None]
) -> tuple[list[Line], dict[str, Path]]:
    """Replays all, and writes `results.json`, `results.csv`, `tables.md` and two plots into a folder.

    Raises:
        UserError: The table can't be read, or has fewer than two models.
    """
    read = bandit_table.read(folder)  # once: rows may be added meanwhile
    if len({action.model.name for action in read.table.actions}) < 2:
        raise UserError("The table has one model only; make rows of a second one, so that one can be added or removed.")
    for sentence in read.left_out:
        tell(sentence)
    names = [n for n in (*SETTINGS, *CHANGES) if n != "vowpalwabbit" or find_spec("vowpalwabbit")]
    if "vowpalwabbit" not in names:
        tell('vowpalwabbit isn\'t installed and is left out; run: pip install "imgscale[bandits]"')
    asked = [
        (read.table, name, scenario, steps, runs)
        for name in names
        for scenario in scenarios(read.table, steps)
        if name in SETTINGS or scenario in ABLATED or "lessons" in CHANGES[name]
    ]
    lines = []
    for line in _all(asked, jobs):
        lines.append(line)
        tell(f"{len(lines)} of {len(asked)}: {line.policy}, {line.scenario}: regret {line.values['regret'][0]:.1f}")
    out.mkdir(parents=True, exist_ok=True)
    about = _about(read, steps, runs)
    from imgscale.app.bench import bandit_plots

    paths = {name: out / name for name in ("results.json", "results.csv", "tables.md", "regret.png", "trade.png")}
    results = [{"policy": x.policy, "scenario": x.scenario, **x.values, "curve": x.curve} for x in lines]
    files.write(paths["results.json"], (json.dumps({**about, "results": results}) + "\n").encode())
    files.write(paths["results.csv"], _csv(lines).encode())
    files.write(paths["tables.md"], markdown(lines, about).encode())
    files.write(paths["regret.png"], bandit_plots.regrets(lines, steps))
    files.write(paths["trade.png"], bandit_plots.trade(lines))
    return lines, paths


def _all(asked: list[tuple[Any, ...]], jobs: int) -> Iterator[Line]:
    if jobs == 1:
        yield from (play(*each) for each in asked)
        return
    with ProcessPoolExecutor(jobs) as workers:
        yield from workers.map(play, *zip(*asked, strict=True))


def _about(read: bandit_table.Read, steps: int, runs: int) -> dict[str, Any]:
    table = read.table
    luck = {}
    for mode in ("cost", "balanced", "quality"):
        weight = quality_weight(mode)
        inside, outside = bandit_table.luck(read, weight)
        best = table.utility(weight)
        luck[mode] = {"oracle": best.max(1).mean(), "fixed": best.mean(0).max(), "half": inside, "other half": outside}
    return {
        **{"prompts": len(table.z), "actions": len(table.actions), "steps": steps, "runs": runs, "luck": luck},
        "models": sorted({action.model.name for action in table.actions}),
    }


def _csv(lines: list[Line]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["policy", "scenario", *(f"{what}{end}" for what in MEASURES for end in ("", " low", " high"))])
    for line in lines:
        writer.writerow([line.policy, line.scenario, *(round(x, 5) for what in MEASURES for x in line.values[what])])
    return text.getvalue()


def markdown(lines: list[Line], about: dict[str, Any]) -> str:
    """Regret in all scenarios; reward, accuracy, cost and actions tried in the three modes; the oracle's luck."""
    kinds, policies = (list(dict.fromkeys(getattr(x, f) for x in lines)) for f in ("scenario", "policy"))
    by = {(line.policy, line.scenario): line.values for line in lines}
    text = [
        f"{about['prompts']} prompts, {about['actions']} actions of {', '.join(about['models'])}; {about['runs']}"
        f" shuffles of {about['steps']} decisions. Mean ± half its 95% interval over shuffles.",
        "",
        *_table(
            ["cumulative regret", *kinds],
            [[name, *(_cell(by.get((name, kind)), 1) for kind in kinds)] for name in policies],
        ),
    ]
    modes = [kind for kind in kinds if kind in ("cost", "balanced", "quality")]
    head = [f"{kind}: {what}" for kind in modes for what in ("reward", "right", "cost", "tried")]
    rows = []
    for name in policies:
        row = [name]
        for kind in modes:
            values = by[name, kind]
            row += [f"{values['utility'][0]:.3f}", f"{100 * values['correct'][0]:.1f}%", f"{values['cost'][0]:.3f}"]
            row.append(f"{values['tried'][0]:.0f}")
        rows.append(row)
    text += ["", *_table(["policy", *head], rows), ""]
    columns = ("oracle", "fixed", "half", "other half")
    named = ["oracle", "best fixed", "chosen by half of the images, on it", "and on the other half"]
    rows = [[mode, *(f"{luck[column]:.3f}" for column in columns)] for mode, luck in about["luck"].items()]
    return "\n".join([*text, *_table(["utility", *named], rows)]) + "\n"


def _cell(found: dict[str, tuple[float, float, float]] | None, digits: int) -> str:
    if found is None:
        return ""
    middle, low, high = found["regret"]
    return f"{middle:.{digits}f} ± {(high - low) / 2:.{digits}f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]

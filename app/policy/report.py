"""What the `policy` commands do."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale import files
from imgscale.app.auto import weight
from imgscale.app.console import print_json
from imgscale.errors import UnknownName, UserError

if TYPE_CHECKING:
    from imgscale.bandit.linear import LinUCB
    from imgscale.bandit.memory import Category, Memory

KINDS = ("statistics", "decisions")
WIDE = 120  # columns of a table that goes into a file or a pipe


def show(file: Path | None, pool: Path | None, *, mode: str | None, top: int, plot: Path | None, as_json: bool) -> int:
    """Prints what is preferred in each category.

    Args:
        file: The policy.
        pool: Whose policy is meant, if no file is given.
        mode: Of the preferences; the one it was last used in for None.
        top: Actions of each category.
        plot: Where to draw it, or None.
        as_json: Print one JSON object.
    """
    from imgscale.bandit.store import opened

    path = place(file, pool)
    policy, memory = opened(path)
    asked = weight(mode)
    policy.switch(memory.weight if asked is None else asked)
    found = {name: _preferred(policy, kind, top) for name, kind in sorted(memory.categories.items())}
    head = {
        "policy": str(path),
        "pool": memory.pool,
        "kind": policy.name,
        "quality_weight": policy.weight,
        "decisions": policy.learned,
        "refused": policy.refused,
        "actions": len(policy.pool),
    }
    if plot is not None:
        _draw(plot, memory, found)
    if as_json:
        print_json({**head, "categories": _finite(found), **({"plot": str(plot)} if plot else {})})
        return 0
    _print(head, found, plot)
    return 0


def _preferred(policy: LinUCB, kind: Category, top: int) -> dict[str, Any]:
    """The best actions of a category, for its mean prompt."""
    import numpy as np

    from imgscale.bandit.policy import Context

    ranked = policy.ranking(Context(np.array(kind.z) / max(kind.n, 1)))
    best = []
    for choice, utility in ranked[:top]:
        cell = kind.cells.get(choice.action.name)
        best.append(
            {
                "action": choice.action.name,
                "model": choice.action.model.name,
                "eflops": choice.action.eflops,
                "expected": choice.expected,
                "uncertainty": choice.uncertainty,
                "utility": utility,
                "runs": cell.n if cell else 0,
                "mean": cell.mean if cell else math.nan,
                "deviation": cell.deviation if cell else math.nan,
                "correct": cell.correct / cell.judged if cell and cell.judged else math.nan,
            }
        )
    cells = kind.cells.values()
    runs, judged = sum(cell.n for cell in cells), sum(cell.judged for cell in cells)
    return {
        "prompts": kind.n,
        "quality": sum(cell.quality for cell in cells) / runs if runs else math.nan,
        "correct": sum(cell.correct for cell in cells) / judged if judged else math.nan,
        "best": best,
    }


def _print(head: dict[str, Any], found: dict[str, Any], plot: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from imgscale.app.cost import short

    terminal = Console(highlight=False)
    console = terminal if terminal.is_terminal else Console(highlight=False, width=WIDE)
    console.print(
        f"{head['policy']}: {head['kind']}, pool {head['pool']}, {head['actions']} actions; learned from"
        f" {head['decisions']} searches. Preferences where quality weighs {head['quality_weight']:g}:\n",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("prompts of")
    table.add_column("seen", justify="right")
    table.add_column("right", justify="right")
    table.add_column("prefers", no_wrap=True)
    for name in ("expected", "runs", "mean", "eFLOPs"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, kind in found.items():
        for i, best in enumerate(kind["best"]):
            first = [name, str(kind["prompts"]), _share(kind["correct"])] if i == 0 else ["", "", ""]
            expected = f"{best['expected']:.2f} ± {best['uncertainty']:.2f}"
            mean = "" if math.isnan(best["mean"]) else f"{best['mean']:.2f}"
            values = [*first, best["action"], expected, str(best["runs"]), mean, short(best["eflops"])]
            table.add_row(*map(Text, values))
    console.print(table if found else Text("Nothing has been learned yet."))
    if plot is not None:
        console.print(Text(f"\nWrote {plot}"), soft_wrap=True)


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.0f}%"


def _draw(path: Path, memory: Memory, found: dict[str, Any]) -> None:
    """Left: what is expected of the preferred action, and what it brought. Right: which models were chosen."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not found:
        raise UserError("The policy has seen no prompts yet, so there is nothing to draw; leave out --plot.")
    figure = Figure(figsize=(11, 1.5 + 0.5 * len(found)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    names = list(found)
    for row, name in enumerate(names):
        best = found[name]["best"][0]
        left.errorbar(best["expected"], row, xerr=best["uncertainty"], fmt="o", color="tab:blue", capsize=3)
        if not math.isnan(best["mean"]):
            left.plot(best["mean"], row, "x", color="tab:orange", zorder=3)
        left.annotate(best["action"], (0.01, row + 0.34), xycoords=("axes fraction", "data"), fontsize=7, color="0.35")
    left.plot([], [], "o", color="tab:blue", label="expected ± uncertainty")
    left.plot([], [], "x", color="tab:orange", label="mean of its runs")
    left.set(xlabel="quality of the preferred action", xlim=(-0.05, 1.05), yticks=range(len(names)), yticklabels=names)
    left.set_ylim(len(names) - 0.4, -0.6)
    left.grid(True, axis="x", color="0.92")
    models = list(dict.fromkeys(action.model.name for action in memory.actions))
    bottom = [0.0] * len(names)
    for model in models:
        cells = [memory.categories[name].cells for name in names]
        runs = [sum(c.n for key, c in kind.items() if key.startswith(f"{model}, ")) for kind in cells]
        right.barh(range(len(names)), runs, left=bottom, label=model, height=0.6)
        bottom = [a + b for a, b in zip(bottom, runs, strict=True)]
    right.set(xlabel="searches, by model")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    _write(path, data.getvalue())


def reset(file: Path | None, pool: Path | None, *, as_json: bool) -> int:
    """Moves a policy and its log aside.

    Args:
        file: The policy.
        pool: Whose policy is meant, if no file is given.
        as_json: Print one JSON object.
    """
    from imgscale.bandit.store import default_path, set_aside

    path = default_path(pool) if file is None else file.expanduser()
    moved = set_aside(path)
    if as_json:
        print_json({"policy": str(path), "moved": [str(each) for each in moved]})
    elif moved:
        print(f"The policy begins anew; the old one is kept as {moved[0]}.")
    else:
        print(f"There is no policy {path} yet; nothing to reset.")
    return 0


def export(file: Path | None, pool: Path | None, out: Path, what: str) -> int:
    """Writes statistics or decisions.

    Args:
        file: The policy.
        pool: Whose policy is meant, if no file is given.
        out: A name that ends in .csv or .jsonl.
        what: One of `KINDS`.
    """
    from imgscale.bandit.store import decisions, opened

    if what not in KINDS:
        raise UnknownName("kind of export", what, KINDS)
    if out.suffix not in (".csv", ".jsonl"):
        raise UserError(f"{str(out)!r} can't be written; give a name that ends in .csv or .jsonl.")
    path = place(file, pool)
    if what == "statistics":
        rows = list(_statistics(opened(path)[1]))
    else:
        rows = decisions(path)
    if out.suffix == ".jsonl":
        text = "".join(json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in rows)
    else:
        flat = io.StringIO(newline="")
        writer = csv.DictWriter(flat, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(
            {k: json.dumps(v) if isinstance(v, list) else v for k, v in _finite(row).items()} for row in rows
        )
        text = flat.getvalue()
    _write(out, text.encode())
    print(f"Wrote {len(rows)} rows to {out}")
    return 0


def _statistics(memory: Memory) -> Any:
    for name, kind in sorted(memory.categories.items()):
        for action, cell in sorted(kind.cells.items()):
            yield {
                "category": name,
                "action": action,
                "runs": cell.n,
                "mean_quality": cell.mean,
                "deviation": cell.deviation,
                "mean_eflops": cell.eflops / cell.n,
                "judged": cell.judged,
                "correct": cell.correct,
            }


def place(file: Path | None, pool: Path | None) -> Path:
    """The policy that is meant.

    Raises:
        UserError: It isn't there.
    """
    from imgscale.bandit.store import default_path

    path = default_path(pool) if file is None else file.expanduser()
    if not path.is_file():
        raise UserError(f"There is no policy {str(path)!r} yet; run imgscale generate --model auto, or name another.")
    return path


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, data)
    except OSError as error:
        raise UserError(f"{str(path)!r} can't be written ({error.strerror or error}); choose another.") from error


def _finite(value: Any) -> Any:
    """With null for what JSON doesn't know."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""The tables of a comparison, as texts that Markdown and the page both show."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from imgscale.app.bench import statistics
from imgscale.app.bench.groups import Group, category, short
from imgscale.app.bench.rows import PLAIN, Row
from imgscale.app.bench.statistics import Estimate, Measure, Need, score, values


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns.

    Args:
        title: What it shows.
        head: The names of the columns.
        lines: As many texts each.
        note: How to read it.
    """

    title: str
    head: list[str]
    lines: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return f"| {' | '.join(escaped(cell) for cell in cells)} |"

        note = f"\n\n{escaped(self.note)}" if self.note else ""
        lines = [line(self.head), "|---" * len(self.head) + "|", *map(line, self.lines)]
        return f"### {escaped(self.title)}\n\n" + "\n".join(lines) + note


def escaped(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def summary(found: Sequence[Group]) -> Iterator[Table]:
    """Searcher by model by NFE, a table for each steering verifier."""
    for verifier in dict.fromkeys(group.verifier for group in found):
        mine = [group for group in found if group.verifier == verifier]
        budgets = sorted({budget for group in mine for budget in group.budgets})
        plain = any((PLAIN, 0) in group.rows for group in mine)
        several = len(mine) > 1
        lines = []
        for name in dict.fromkeys(name for group in mine for name in [PLAIN, *group.searchers]):
            for group in mine:
                runs = {0: group.rows.get((PLAIN, 0), [])} if name == PLAIN else group.of(name)
                if not (rows := [row for part in runs.values() for row in part]):
                    continue
                label = f"plain ({mean(rows, 'nfe'):.0f} NFE)" if name == PLAIN else name
                model = [short(group.model)] if several else []
                cells = [worth(runs.get(budget, []), group.by) for budget in ([0, *budgets] if plain else budgets)]
                lines.append([label, *model, *cells, str(len({row["prompt"] for row in rows}))])
        where = "" if several else f" on {short(mine[0].model)}"
        what = f"{_what(mine[0].by)}{where}, steered by {verifier} (95% interval)"
        head = ["search", *(["model"] if several else []), *(["plain"] if plain else [])]
        head += [*(f"{b} NFE" for b in budgets), "prompts"]
        yield Table(what[0].upper() + what[1:], head, lines, _judged(mine[0]))


def detail(group: Group) -> Table:
    """One line for each search and budget, with the categories."""
    kinds = group.kinds
    scores = [group.steers, *group.held_out]
    lines = []
    for (searcher, budget), rows in group.rows.items():
        parts = [[row for row in rows if category(row) == kind] for kind in kinds]
        lines.append(
            [
                searcher,
                "" if searcher == PLAIN else str(budget),
                f"{mean(rows, 'nfe'):.0f}",
                worth(rows, group.by),
                *(worth(part, group.by, interval=False) for part in parts),
                *(_number(_finite_mean([score(row, name) for row in rows])) for name in scores),
                f"{mean(rows, 'seconds'):.2f}",
                str(len(rows)),
            ]
        )
    counts = {kind: len({row["prompt"] for row in group.all if category(row) == kind}) for kind in kinds}
    head = ["search", "NFE", "spent", _what(group.by), *(f"{kind} ({counts[kind]})" for kind in kinds)]
    head += [f"mean {name}" for name in scores] + ["s/image", "rows"]
    return Table("All searches", head, lines, "In brackets behind a category: its prompts." if kinds else "")


def differences(group: Group) -> Table | None:
    """What each searcher gains over the baseline with the same budget, prompt by prompt."""
    if group.baseline not in group.searchers or len(group.searchers) < 2:
        return None
    base = group.of(group.baseline)
    lines = []
    for name in group.searchers:
        if name != group.baseline:
            mine = group.of(name)
            gains = [
                statistics.gain(values(mine.get(b, []), group.by), values(base.get(b, []), group.by))
                for b in group.budgets
            ]
            lines.append([name, *(_signed(each, group.by) for each in gains)])
    unit = "points" if group.by.at_least is not None else f"mean {group.by.name}"
    title = f"Gain over {group.baseline} with the same budget, {unit} (95% interval)"
    note = "Paired: differences on the same prompt and seed. A star marks intervals without zero."
    return Table(title, ["search", *(f"{b} NFE" for b in group.budgets)], lines, note)


def needed(group: Group) -> Table | None:
    """Evaluations to reach what the baseline reaches with its largest budget."""
    base = group.of(group.baseline)
    if not base:
        return None
    largest = max(base)
    lines, targets = [], []
    for name in group.searchers:
        mine = group.of(name)
        if (found := statistics.need(mine, base[largest], group.by)) is not None:
            targets.append(found.target)
            lines.append([name, _need(found.by_budget, found), _need(found.by_trace, found, by_trace=True)])
    if not lines:
        return None
    title = f"NFE to reach what {group.baseline} reaches with {largest} ({_said(targets[0], group.by)})"
    note = (
        "By budgets: the budget at which separate runs come up to it, a straight line between two of them. Within a"
        " run: where the best so far of the runs with the largest budget first comes up to it. ≤ and >: beyond what was"
        " run."
    )
    return Table(title, ["search", "by budgets (95%)", "within a run (95%)"], lines, note)


def rewards(group: Group) -> Table | None:
    """The steering reward and the held-out ones as the budget grows, in one unit; where they part is named."""
    plain = group.rows.get((PLAIN, 0), [])
    judges = [name for name in group.held_out if name != group.steers]
    if not judges or len(plain) < 2:
        return None
    names = [group.steers, *judges]
    unit = {}
    for name in names:
        found = [v for row in plain if (v := score(row, name)) is not None]
        unit[name] = float(np.std(found)) if len(found) > 1 else 0.0
    if not all(unit.values()):
        return None

    def above(rows: Sequence[Row], base: Sequence[Row], name: str) -> Estimate | None:
        by = Measure(name)
        return statistics.gain(values(rows, by), values(base, by))

    lines = []
    for searcher in group.searchers:
        runs = group.of(searcher)
        first, last = min(runs), max(runs)
        change = {name: above(runs[last], runs[first], name) for name in names}
        rose = (up := change[group.steers]) is not None and up.low > 0
        fell = [name for name in judges if rose and (down := change[name]) is not None and down.high < 0]
        for budget, rows in runs.items():
            gains = [above(rows, plain, name) for name in names]
            scaled = [math.nan if g is None else g.value / unit[n] for g, n in zip(gains, names, strict=True)]
            cells = [f"{value:+.2f}" if math.isfinite(value) else "–" for value in scaled]
            gaps = [f"{scaled[0] - value:+.2f}" if math.isfinite(value) else "–" for value in scaled[1:]]
            verdict = f"hacked: {', '.join(fell)} fell since {first} NFE" if budget == last and fell else ""
            lines.append([searcher, str(budget), *cells, *gaps, verdict])
    head = ["search", "NFE", f"{names[0]} (steers)", *judges, *(f"gap to {name}" for name in judges), ""]
    note = (
        "Means above the plain samples of the same noises, in standard deviations of these. A gap that grows with the"
        " budget says that the search learns what its verifier likes and the held-out judge doesn't. Hacked: from the"
        " smallest to the largest budget the steering reward rises and a held-out one falls, both beyond their 95%"
        " intervals."
    )
    return Table("Search reward against held-out reward", head, lines, note)


def times(group: Group) -> Table | None:
    """Wall time per model evaluation, and what else each of them took."""
    base = [row for rows in group.of(group.baseline).values() for row in rows]
    kinds = [kind for kind in ("verifier_calls", "decodes", "gradients") if any(row.get(kind) for row in group.all)]
    lines = []
    for name in group.searchers:
        rows = [row for part in group.of(name).values() for row in part]
        ratio = f"{_per_nfe(rows, 'seconds') / _per_nfe(base, 'seconds'):.2f}" if base else ""
        spent = [f"{_per_nfe(rows, kind):.2f}" for kind in kinds]
        lines.append([name, f"{1000 * _per_nfe(rows, 'seconds'):.1f}", ratio, *spent])
    if not lines:
        return None
    head = ["search", "ms per NFE", f"of {group.baseline}'s", *(f"{kind.replace('_', ' ')} per NFE" for kind in kinds)]
    together = sorted({row["together"] for row in group.all})
    span = str(together[0]) if len(together) == 1 else f"{together[0]} to {together[-1]}"
    note = f"An image's share of the wall time of prompts searched side by side ({span} of them)."
    return Table("Wall time", head, lines, note)


def section(group: Group) -> list[Table]:
    """All tables about one model and verifier."""
    return [
        t for t in (detail(group), differences(group), needed(group), rewards(group), times(group)) if t is not None
    ]


def mean(rows: Sequence[Row], name: str) -> float:
    """The mean of a column."""
    return float(np.mean([row[name] for row in rows]))


def worth(rows: Sequence[Row], by: Measure, interval: bool = True) -> str:
    """The mean of rows in words, or nothing if there are none."""
    found = statistics.estimate(values(rows, by))
    if found is None:
        return ""
    share = by.at_least is not None
    text = _said(found.value, by).removesuffix("%") if share else _number(found.value)
    if not interval or found.n < 2:
        return text if interval or not share else f"{100 * found.value:.0f}"
    low, high = (f"{100 * v:.0f}" if share else _number(v) for v in (found.low, found.high))
    return f"{text} ({low} to {high})"


def _signed(found: Estimate | None, by: Measure) -> str:
    if found is None:
        return ""
    share = by.at_least is not None
    value, low, high = (f"{100 * v:+.1f}" if share else f"{v:+.4f}" for v in (found.value, found.low, found.high))
    if found.n < 2:
        return value
    return f"{value} ({low} to {high}){' *' if found.low > 1e-9 or found.high < -1e-9 else ''}"


def _need(found: Estimate, of: Need, by_trace: bool = False) -> str:
    def text(value: float) -> str:
        if value == statistics.NEVER:
            return f">{of.last}"
        return f"≤{of.first}" if not by_trace and value <= of.first else f"{value:.0f}"

    spread = f" ({text(found.low)} to {text(found.high)})" if found.n > 1 else ""
    return text(found.value) + spread


def _said(value: float, by: Measure) -> str:
    return f"{100 * value:.1f}%" if by.at_least is not None else f"{by.name} {_number(value)}"


def _what(by: Measure) -> str:
    return f"solved ({by.label}), %" if by.at_least is not None else f"mean {by.name}"


def _judged(group: Group) -> str:
    if group.by.name == group.steers:
        return f"{group.by.name} steers and judges itself: a search may have found its mistakes."
    return f"{group.by.name} is held out: no search saw its scores."


def _number(value: float) -> str:
    return f"{value:.4f}" if np.isfinite(value) else "–"


def _finite_mean(found: Sequence[float | None]) -> float:
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else float("nan")


def _per_nfe(rows: Sequence[Row], name: str) -> float:
    return float(sum(row.get(name, 0) for row in rows) / sum(row["nfe"] for row in rows))

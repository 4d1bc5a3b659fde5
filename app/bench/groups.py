"""Rows sorted into what can be compared: one model under one steering verifier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imgscale.app.bench import statistics
from imgscale.app.bench.config import Config
from imgscale.app.bench.rows import PLAIN, Row
from imgscale.app.bench.statistics import Measure


@dataclass(frozen=True)
class Group:
    """All rows of one model under one steering verifier.

    Args:
        model: Its name.
        verifier: What steered, as it was asked for.
        by: What counts.
        rows: By searcher and budget; plain ones by `PLAIN` and 0.
        baseline: The searcher that the others are compared with.
        kinds: The categories of the prompts, in order.
    """

    model: str
    verifier: str
    by: Measure
    rows: dict[tuple[str, int], list[Row]]
    baseline: str
    kinds: list[str]

    @property
    def all(self) -> list[Row]:
        return [row for rows in self.rows.values() for row in rows]

    @property
    def searchers(self) -> list[str]:
        """Without plain, the baseline first."""
        names = dict.fromkeys(name for name, _ in self.rows if name != PLAIN)
        return sorted(names, key=lambda name: name != self.baseline)

    @property
    def budgets(self) -> list[int]:
        return sorted({budget for name, budget in self.rows if name != PLAIN})

    @property
    def steers(self) -> str:
        """What results call the steering verifier."""
        return str(next(iter(self.rows.values()))[0]["steers"])

    @property
    def held_out(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.all for name in row["held_out"]))

    @property
    def title(self) -> str:
        judge = f", {self.by.name} held out" if self.by.name != self.steers else ""
        return f"{short(self.model)}, steered by {self.verifier}{judge}"

    def of(self, searcher: str) -> dict[int, list[Row]]:
        """A searcher's rows by budget."""
        return {budget: self.rows[searcher, budget] for budget in self.budgets if (searcher, budget) in self.rows}


def groups(rows: Sequence[Row], config: Config, kinds: Sequence[str] = ()) -> list[Group]:
    """The rows by model and verifier, in the configuration's order and then as they came.

    Args:
        rows: Of one folder.
        config: That they were made with.
        kinds: Categories in the order of the prompt list, as far as it is known.
    """
    known = dict.fromkeys(filter(None, map(category, rows)))
    kinds = sorted(known, key=lambda kind: (_place(kind, kinds), kind))
    found: dict[tuple[str, str], dict[tuple[str, int], list[Row]]] = defaultdict(lambda: defaultdict(list))
    order = [PLAIN, *config.searchers]
    ranked = sorted(rows, key=lambda row: (_place(row["searcher"], order), row["budget"]))
    for row in ranked:
        found[row["model"], row["verifier"]][row["searcher"], row["budget"]].append(row)
    places = sorted(found, key=lambda at: (_place(at[0], config.models), _place(at[1], config.verifiers)))
    return [
        Group(*at, statistics.measure(config.solved, next(iter(mine.values()))), dict(mine), config.baseline, kinds)
        for at in places
        if (mine := found[at])
    ]


def _place(name: str, order: Sequence[str]) -> int:
    return list(order).index(name) if name in order else len(order)


def short(model: str) -> str:
    """A model's name without the folder it lies in: results are shared, and folders tell who made them."""
    return Path(model).name if Path(model).is_absolute() else model


def category(row: Row) -> str:
    return str(row["columns"].get("category") or "")

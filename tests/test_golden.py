"""Golden numbers: what every searcher finds on an analytic world, so that no change of a result goes unnoticed.

After a change that is meant: ``python -m tests.test_golden`` writes the file anew. Look at the difference before it is
committed.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from imgscale import registry
from tests.doubles import Watched, new, run

FILE = Path(__file__).with_name("golden.csv")
COLUMNS = ("searcher", "model", "score", "nfe", "verifier_calls", "gradients")
BUDGET = 60
COMPOSED = ("rbf+dps", "svdd+dps", "bfs(local)", "dfs(local)")

Row = dict[str, str]


def found(searcher: str, model: str) -> Row:
    """The row of one search."""
    world = Watched(shape=(4,))
    search = run(world, new(world, searcher, budget=BUDGET, seed=3, steps=6, distilled=model == "distilled"))
    assert search.best is not None
    ledger = search.meter.ledger
    spent = (ledger.nfe, ledger.verifier_calls, ledger.gradients)
    return dict(zip(COLUMNS, (searcher, model, f"{search.best.score:.6f}", *map(str, spent)), strict=True))


def golden() -> dict[tuple[str, str], Row]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return {(row["searcher"], row["model"]): row for row in csv.DictReader(file)}


def searchers() -> list[str]:
    return [*(entry.name for entry in registry.searcher), *COMPOSED]


@pytest.mark.parametrize("model", ["ordinary", "distilled"])
@pytest.mark.parametrize("searcher", searchers())
def test_results_are_as_they_were(searcher: str, model: str) -> None:
    expected, row = golden()[searcher, model], found(searcher, model)
    assert float(row.pop("score")) == pytest.approx(float(expected.pop("score")), abs=1e-4)
    assert row == expected


def test_the_file_holds_nothing_else() -> None:
    assert {name for name, _ in golden()} == set(searchers())


if __name__ == "__main__":
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found(searcher, model) for searcher in searchers() for model in ("ordinary", "distilled"))

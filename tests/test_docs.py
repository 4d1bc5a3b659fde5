"""The examples in docs/search.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imgscale import registry
from imgscale.budget import Budget
from tests.doubles import Watched, new, run

PAGE = Path(__file__).parent.parent / "docs" / "search.md"


def test_the_page_s_own_searcher_runs_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "@imgscale.searcher" in b
    ]
    list(registry.searcher)  # discovered before the example adds its own, which is taken back afterwards
    monkeypatch.setattr(registry.searcher, "_entries", dict(registry.searcher._entries))
    exec(compile(example, str(PAGE), "exec"), {})
    world = Watched()
    search = run(world, new(world, "two-stage", budget=Budget(nfe=60)))
    assert search.best is not None and search.best.finished
    assert search.stopped == "complete" and 0 < search.meter.ledger.nfe == world.evaluations <= 60

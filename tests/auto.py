"""A bandit whose models are doubles: they draw nothing, and their scores are what a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import imgscale
from imgscale import models, verification
from imgscale.automatic import Auto
from imgscale.bandit import costs
from imgscale.bandit.actions import Action, Model
from imgscale.bandit.poolfile import Entry, PoolFile
from imgscale.budget import Ledger, Price
from imgscale.errors import UserError
from imgscale.result import SearchOutput

PRICE = Price(text=1, nfe=10, decode=5, preview=5, score=1)
PROMPT = "two red circles above a blue square"


class Double:
    """Has the call of a `Scaler`.

    Args:
        name: Of the model.
        score: Of a search by the searcher's name and budget.
        stopped: Why searches end.
    """

    def __init__(self, name: str, score: Callable[[str, int], float], stopped: str = "complete") -> None:
        self.name, self.score, self.stopped = name, score, stopped
        self.price: Price | None = None
        self.asked: list[dict[str, Any]] = []

    def __call__(self, prompt: str, negative_prompt: str | None = None, **asked: Any) -> SearchOutput:
        self.asked.append({"prompt": prompt, "price": self.price, **asked})
        nfe = asked["budget"].nfe
        return SearchOutput(
            prompt=prompt,
            model=self.name,
            searcher=asked["searcher"],
            verifier=asked["verifier"].name,
            images=[Image.new("RGB", (8, 8))],
            scores={asked["verifier"].name: self.score(asked["searcher"], nfe)},
            seeds=[asked["seed"]],
            ledger=Ledger(nfe=nfe, eflops=10 * nfe),
            trace=[],
            plain=None,
            stopped=self.stopped,
            finished=True,
            settings={"seed": asked["seed"]},
            events=[],
        )


class Models:
    """The models that can be loaded, by name.

    Attributes:
        loaded: Names in the order of loading.
        broken: What loading a name raises.
    """

    def __init__(self, *doubles: Double) -> None:
        self.doubles = {double.name: double for double in doubles}
        self.loaded: list[str] = []
        self.broken: dict[str, Exception] = {}

    def load(self, model: str, **_: Any) -> Double:
        self.loaded.append(model)
        if model in self.broken:
            raise self.broken[model]
        return self.doubles[model]


def use(monkeypatch: pytest.MonkeyPatch, *doubles: Double) -> Models:
    """Lets pools be of doubles: small/one to small/three, say, each with actions of 4 and 8 NFE."""
    there = Models(*doubles)

    def actions(pool: PoolFile, entry: Entry, verifier: Any, *, device: Any = None) -> Any:
        if entry.model not in there.doubles:
            raise UserError(f"There is no {entry.model}.")
        large = 1 + list(there.doubles).index(entry.model)
        model = Model(entry.name, 1e6 * large, 1e3 * large, prior=entry.prior)
        made = [
            Action(model, searcher, nfe, 10.0 * nfe * large, candidates=nfe // 4, steps=4)
            for searcher in entry.searchers or pool.searchers
            for nfe in entry.budgets or (4, 8)
        ]
        return made, PRICE, []

    monkeypatch.setattr(imgscale, "load", there.load)
    monkeypatch.setattr(costs, "actions", actions)
    monkeypatch.setattr(verification, "make", lambda spec, **_: _Judge(spec))
    monkeypatch.setattr(models, "locate", lambda name: Path("/there") if name in there.doubles else None)
    return there


class _Judge:
    range: tuple[float, float] | None = None
    reads_prompt = differentiable = False

    def __init__(self, name: str) -> None:
        self.name = name

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}


def auto(policy: Path, names: Sequence[str] = ("small/one", "small/two"), **more: Any) -> Auto:
    """A bandit over doubles, whose draws are the same in each test."""
    options = {name: more.pop(name) for name in ("mode", "learn", "draws") if name in more}
    own = {"epsilon": 0.0, **more.pop("own", {})}
    pool = {"models": [{"name": name} for name in names], "searchers": ["best-of-n"], "verifier": "aesthetic"}
    return imgscale.auto(pool={**pool, "policy": own, **more}, policy=policy, **{"draws": 0, **options})

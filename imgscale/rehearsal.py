"""What a search would ask for, found out on a stand-in: its evaluations, decodes and scores, at no cost.

The stand-in keeps the model's path, time grid and settings. Its latents are a few numbers, its x0 lies near x, and its
rewards are random, so that searches see neither a perfect score nor a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imgscale import registry
from imgscale.budget import Budget, Ledger, Meter, Price
from imgscale.engine import Engine
from imgscale.keys import normal
from imgscale.models import ModelSettings
from imgscale.particles import Schedule
from imgscale.problem import Problem
from imgscale.search import Search
from imgscale.usefulness import Usefulness


@dataclass(frozen=True)
class _Prompt:
    prompt: str = ""
    key: str = ""

    def at(self, rows: Sequence[int]) -> _Prompt:
        return self


class _StandIn:
    """Has the interface of `Denoiser`."""

    mixed_times = True

    def __init__(self, schedule: Schedule) -> None:
        self.path, self._schedule = schedule.path, schedule

    def grid(self, steps: int, cond: Any) -> Tensor:
        """Of other steps than its own: the same curve, read at as many places."""
        own = np.array(self._schedule.times)
        places = np.linspace(0, 1, steps + 1)
        return torch.from_numpy(np.interp(places, np.linspace(0, 1, len(own)), own))

    def prior(self, keys: Tensor, cond: Any) -> Tensor:
        return normal(keys, (4,))

    def predict(self, x: Tensor, t: Any, cond: Any) -> Tensor:
        return 0.9 * x

    def decode(self, x0: Tensor, cond: Any, preview: Any = None) -> Tensor:
        return x0.sigmoid()[:, None, None].expand(-1, 3, 1, -1).float()


class _Judge:
    """A reward that no two images share, and none of which is the highest."""

    name = "rehearsal"
    range: tuple[float, float] | None = None
    reads_prompt = differentiable = False

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return (images.flatten(1).sum(1) * 1e3).sin()

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}


def rehearse(
    schedule: Schedule,
    settings: ModelSettings,
    searcher: str,
    budget: Budget,
    price: Price,
    usefulness: Usefulness | None = None,
) -> Ledger:
    """The ledger of a search as it would be.

    Args:
        schedule: The model's path and grid.
        settings: The model's.
        searcher: A name, or a name with options, of one that follows no gradients.
        budget: Of the search.
        price: What its parts cost.
        usefulness: What was measured of the model, if anything.

    Raises:
        UserError: There is no such searcher.
    """
    stand_in: Any = _StandIn(schedule)
    problem = Problem(
        stand_in,
        _Prompt(),  # type: ignore[arg-type]
        steps=schedule.steps,
        seed=0,
        meter=Meter(budget, price=price),
        distilled=settings.distilled,
        path=settings.path,
        usefulness=usefulness,
    )
    entry, options = registry.searcher.resolve(searcher)
    search = Search(problem, entry.target(problem, np.random.default_rng(0), **options), _Judge(), preview=stand_in)
    Engine(stand_in).run([search])
    return search.meter.ledger

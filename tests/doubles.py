"""Doubles that the tests of the engine and the searchers share: verifiers that count, worlds that fail, searches.

A latent of the analytic worlds can be read off its image (`latents`), so a reward can be any function of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imgscale import registry
from imgscale.budget import Budget, Meter
from imgscale.engine import Engine
from imgscale.problem import Guide, Problem
from imgscale.search import Search
from tests.worlds import Condition, Gaussian, World

STEPS = 4  # of the tests' samples; on a uniform grid from 1 to 0 each takes as many evaluations

Rule = Callable[[Tensor, Sequence[str]], Any]


def latents(images: Tensor) -> Tensor:
    """x0 (n, w) of the grey rows that a world's `decode` made."""
    return images[:, 0, 0].double().logit()


def near_one(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A quadratic reward with its peak, 0, at x0 = 1."""
    return -(latents(images) - 1).square().sum(-1)


class Reward:
    """A verifier that remembers what it saw; differentiable where its rule is.

    Args:
        rule: Scores of images and prompts.
        range: Lowest and highest possible score.

    Attributes:
        seen: Images of each call.
        asked: Prompts of each call.
        given: What each call returned.
    """

    reads_prompt = False
    differentiable = True

    def __init__(self, rule: Rule = near_one, name: str = "reward", range: tuple[float, float] | None = None) -> None:
        self.rule, self.name, self.range = rule, name, range
        self.seen: list[Tensor] = []
        self.asked: list[list[str]] = []
        self.given: list[Any] = []

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Any:
        self.seen.append(images.detach().clone())
        self.asked.append(list(prompts))
        given = self.rule(images, prompts)
        self.given.append(given.detach() if isinstance(given, Tensor) else given)
        return given

    @property
    def images(self) -> int:
        return sum(map(len, self.seen))

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}


class Scripted(Reward):
    """Gives the scores of a list, one per image, in the order in which the images come; then the last one."""

    differentiable = False

    def __init__(self, scores: Sequence[float]) -> None:
        self.script = list(scores)
        super().__init__(self._next)

    def _next(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        taken = [self.script.pop(0) if len(self.script) > 1 else self.script[0] for _ in images]
        return torch.tensor(taken)


class Watched(Gaussian):
    """A Gaussian that counts what is decoded, and fails where a test wants it to.

    Args:
        evaluate: Called with the number of rows before every evaluation.
        render: The same before every decode.
        spoil: Which rows of x (n, d) get NaN for x0.

    Attributes:
        decoded: Rows of each `decode` call.
        places: The (time, shift) of each row of each `predict` call.
    """

    def __init__(
        self,
        evaluate: Callable[[int], None] = lambda n: None,
        render: Callable[[int], None] = lambda n: None,
        spoil: Callable[[Tensor], Tensor] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.evaluate, self.render, self.spoil = evaluate, render, spoil
        self.decoded: list[int] = []
        self.places: list[list[tuple[float, float]]] = []

    def predict(self, x: Tensor, t: float | Tensor, cond: Condition) -> Tensor:
        self.evaluate(len(x))
        times = torch.as_tensor(t).expand(len(x)).tolist()
        shifts = cond.shifts * (len(x) // len(cond.shifts))
        self.places.append(list(zip(times, shifts, strict=True)))
        x0 = super().predict(x, t, cond)
        return x0 if self.spoil is None else torch.where(self.spoil(x)[:, None], torch.nan, x0)

    def decode(self, x0: Tensor, cond: Condition, preview: Any = None) -> Tensor:
        self.render(len(x0))
        self.decoded.append(len(x0))
        return super().decode(x0, cond, preview)


MEMORY: dict[str, Callable[[], Exception]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB."),
    "mps": lambda: RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    "cpu": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
}


class Clock:
    """A monotonic clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("imgscale.budget.time.monotonic", lambda: made.now)
    return made


def new(
    world: World,
    searcher: str | Callable[..., Any] = "best-of-n",
    *,
    budget: int | Budget,
    verifier: Any = None,
    reports: Sequence[Any] = (),
    prompt: str = "",
    steps: int = STEPS,
    seed: int = 0,
    distilled: bool = False,
    ceiling: float | None = None,
    options: Mapping[str, Any] | None = None,
    guide: Guide | None = None,
    traces: bool = False,
    **more: Any,
) -> Search:
    """A search that has not begun, by a registered searcher with options or by a function ``(problem)``.

    A name may bring its guide, as in "rbf+dps".
    """
    verifier = verifier or Reward()
    bend = None
    if isinstance(searcher, str):
        searcher, bend = registry.compose(searcher)
    if bend:
        made, settings = registry.guide.resolve(bend)
        guide = made.target(**settings)
    problem = Problem(
        as_denoiser(world),
        as_denoiser(world).encode(prompt),
        steps=steps,
        seed=seed,
        meter=Meter(Budget.of(budget)),
        distilled=distilled,
        ceiling=ceiling,
        differentiable=getattr(verifier, "differentiable", False),
        guide=guide,
        traces=traces,
    )
    if isinstance(searcher, str):
        entry, checked = registry.searcher.resolve(searcher, {**(options or {}), **more})
        generator = entry.target(problem, np.random.default_rng(seed), **checked)
    else:
        generator = searcher(problem)
    return Search(problem, generator, verifier, reports)


def as_denoiser(world: World) -> Any:
    """A world has the Denoiser's interface, but not its type."""
    return world


def run(world: World, *searches: Search, max_batch: int = 32, **hooks: Any) -> Search:
    """Runs searches to their ends; the first of them."""
    for search in searches:
        search.meter.restart()
    Engine(as_denoiser(world), max_batch).run(searches, **hooks)
    return searches[0]


def stop_after(ticks: int, reason: str = "cancelled") -> Callable[[], str]:
    """A `stop` that gives the reason from the so-manieth engine step on."""
    steps: Iterator[int] = iter(range(10**9))
    return lambda: reason if next(steps) >= ticks else ""

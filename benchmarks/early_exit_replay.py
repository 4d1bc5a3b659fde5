"""Early exit over a table of recorded scores: the very races that a search runs, with a look-up for the model."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from imgscale.early_exit import Exits, Rule, race
from imgscale.kernels import ODE
from imgscale.keys import root
from imgscale.particles import Particles, Schedule
from imgscale.paths import Linear

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """What came of one race.

    Args:
        scores: Of the candidates (n,); −inf for those that were dropped.
        nfe: Model evaluations.
        looks: Previews that were scored.
        full: Evaluations of all candidates.
    """

    scores: Floats
    nfe: int
    looks: int
    full: int

    @property
    def images(self) -> int:
        """Candidates that weren't dropped."""
        return int(np.isfinite(self.scores).sum())


class Recorded:
    """Stands in for a `Problem` whose candidates are rows of a table.

    Args:
        previews: Scores (n, steps) of x0 at each step.
        finals: Scores (n,) of the images.
    """

    def __init__(self, previews: Floats, finals: Floats) -> None:
        steps = previews.shape[1]
        self.schedule = Schedule(Linear(), tuple(np.linspace(1, 0, steps + 1).tolist()))
        self.exits, self.kernel, self.left = Exits(), ODE(), math.inf
        self.nfe = self.looks = 0
        self._scores = torch.from_numpy(np.concatenate([previews, finals[:, None]], 1))

    def particles(self, seed: int) -> Particles:
        """All candidates, at the start."""
        n = len(self._scores)
        x = torch.zeros(n, 1)
        return Particles(self.schedule, -1, x, x, root(seed, n), torch.arange(n))

    def cost(self, schedule: Schedule, start: int, stop: int) -> int:
        return schedule.nfe(start, stop)

    def finishing_nfe(self, particles: Particles) -> int:
        return self.schedule.nfe(particles.step, self.schedule.steps)

    def may_look(self, particles: Particles) -> bool:
        return True

    def solve(self, particles: Particles, to: int) -> Generator[Any, Any, Particles]:
        self.nfe += len(particles) * self.schedule.nfe(particles.step, to)
        return replace(particles, step=to, scores=None)
        yield

    def score(self, particles: Particles) -> Generator[Any, Any, tuple[Particles, Tensor]]:
        scores = self._scores[particles.seeds, particles.step]
        self.looks += 0 if particles.finished else len(particles)
        return replace(particles, scores=scores), scores
        yield


def replay(
    rule: Rule, previews: Floats, finals: Floats, *, seed: int = 0, beat: float = -math.inf, of: int | None = None
) -> Outcome:
    """One race of all rows.

    Args:
        rule: What drops them.
        previews: Scores (n, steps) of x0 at each step of a sample.
        finals: Scores (n,) of the images.
        seed: Decides whether the race is audited.
        beat: A score that was reached before.
        of: Candidates of the whole search; these if None.
    """
    recorded: Any = Recorded(previews, finals)
    running = race(recorded, recorded.particles(seed), rule, kind="fresh", beat=beat, of=of or len(finals))
    try:
        next(running)
    except StopIteration as end:
        scores = end.value.scores.numpy()
        return Outcome(scores, recorded.nfe, recorded.looks, previews.shape[0] * previews.shape[1])
    raise AssertionError("a recorded race asks for nothing")

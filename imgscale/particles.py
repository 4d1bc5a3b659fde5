"""Particles: a batch of trajectories at one place of one schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from imgscale.keys import fold
from imgscale.paths import Path

UNSEEN = -3  # folded into the keys of children of pure noise in the place of a step

Index = int | slice | Sequence[int] | Tensor


@dataclass(frozen=True)
class Schedule:
    """Where trajectories are evaluated: a path and decreasing times on it.

    Args:
        path: The path that x lives on; the model's own or another.
        times: ``steps + 1`` times, from noise to data. The model is evaluated at each but a final 0.
    """

    path: Path
    times: tuple[float, ...]

    @property
    def steps(self) -> int:
        """The number of transitions."""
        return len(self.times) - 1

    def nfe(self, start: int, stop: int) -> int:
        """Model evaluations that one particle needs from step ``start`` (done) to step ``stop``."""
        return sum(t > 0 for t in self.times[start + 1 : stop + 1])

    def between(self, high: float, low: float) -> Schedule:
        """From one time of the path to a lower one, by way of this schedule's own times in between."""
        inner = (t for t in self.times if low + 1e-6 < t < high - 1e-6)
        return Schedule(self.path, (high, *inner, low))


@dataclass(frozen=True)
class Particles:
    """n trajectories at one step. Indexing gives Particles: it is how searchers select and resample.

    Args:
        schedule: Where they travel.
        step: In [0, schedule.steps]; they are at ``schedule.times[step]``. -1 is pure noise at ``times[0]``, whose x0
            nobody has asked the model for.
        x: float32 (n, *latent), the noisy latents.
        x0: float32 (n, *latent), Tweedie's estimate of the data, which previews and verifiers see.
        keys: int64 (n,), from which the noise of the next transitions derives.
        seeds: int64 (n,), the keys of the prior noise they started from.
        scores: float64 (n,), rewards of x0, or None while nobody has scored them.
    """

    schedule: Schedule
    step: int
    x: Tensor
    x0: Tensor
    keys: Tensor
    seeds: Tensor
    scores: Tensor | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Index) -> Particles:
        where = index if isinstance(index, slice) else _rows(index)
        there = where.to(self.x.device) if isinstance(where, Tensor) else where
        scores = None if self.scores is None else self.scores[where]
        return replace(
            self,
            x=self.x[there],
            x0=self.x0[there],
            keys=self.keys[where],
            seeds=self.seeds[where],
            scores=scores,
        )

    @property
    def time(self) -> float:
        return self.schedule.times[max(self.step, 0)]

    @property
    def finished(self) -> bool:
        """Whether x is data."""
        return self.time == 0

    def branch(self, n: int | npt.NDArray[np.int64], first: int = 0) -> Particles:
        """``n`` children of each particle, in order, with keys of their own.

        Args:
            n: Children per particle; or a count for each, int64 (len(self),), as resampling gives them.
            first: The number of the first child. Children of one parent with different numbers draw different noise.
        """
        counts = np.broadcast_to(np.asarray(n), len(self))
        index = np.repeat(np.arange(len(self)), counts)
        number = first + np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        children = self[torch.from_numpy(index)]
        # A step of -1 would make keys that noise is drawn from (see imgscale.problem.NOISE).
        place = self.step if self.step >= 0 else UNSEEN
        return replace(children, keys=fold(children.keys, place, torch.from_numpy(number)))

    def top(self, n: int) -> Particles:
        """The ``n`` with the highest scores, best first; of equals the first. They must have been scored."""
        assert self.scores is not None
        return self[self.scores.argsort(descending=True, stable=True)[:n]]


def _rows(index: int | Sequence[int] | Tensor) -> Tensor:
    """Row numbers or a mask, always (k,): one particle stays a batch, and no particle is one, too."""
    rows = torch.as_tensor(index).reshape(-1)
    return rows if len(rows) else rows.long()


def join(parts: Sequence[Particles]) -> Particles:
    """Particles at the same place as one batch; scored only if all are.

    Raises:
        ValueError: They are at different places.
    """
    first = parts[0]
    if any((p.schedule, p.step) != (first.schedule, first.step) for p in parts):
        raise ValueError("Only particles at the same step of the same schedule can be joined.")
    scores = [p.scores for p in parts]
    return replace(
        first,
        x=torch.cat([p.x for p in parts]),
        x0=torch.cat([p.x0 for p in parts]),
        keys=torch.cat([p.keys for p in parts]),
        seeds=torch.cat([p.seeds for p in parts]),
        scores=torch.cat([s for s in scores if s is not None]) if all(s is not None for s in scores) else None,
    )

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
class Origin:
    """Where a particle's trajectory last was led by anything but the model's own ODE, which makes it again from there.

    Args:
        path: Where it travels.
        x: float32 (*latent), the noisy latents there; or all noise, where nothing else ever led it.
        times: From there on, those that it has come by.
        calls: For each evaluation since, how many particles it was asked for with, and its place among them.
    """

    path: Path
    x: Tensor
    times: tuple[float, ...]
    calls: tuple[tuple[int, int], ...] = ()

    def seen(self, n: int, place: int) -> Origin:
        """The same once the model has been asked where the trajectory is, for ``n`` particles."""
        return replace(self, calls=(*self.calls[: len(self.times) - 1], (n, place)))


@dataclass(frozen=True)
class Origins:
    """Those of particles, as long as their x is what it was: a searcher that gives them another begins anew."""

    x: Tensor
    each: tuple[Origin, ...]


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
        traced: Where their trajectories can be taken up; None while nobody wants to know.
    """

    schedule: Schedule
    step: int
    x: Tensor
    x0: Tensor
    keys: Tensor
    seeds: Tensor
    scores: Tensor | None = None
    traced: Origins | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Index) -> Particles:
        where = index if isinstance(index, slice) else _rows(index)
        there = where.to(self.x.device) if isinstance(where, Tensor) else where
        scores = None if self.scores is None else self.scores[where]
        x, traced = self.x[there], self.traced
        if traced is not None and traced.x is self.x:
            traced = Origins(x, tuple(traced.each[i] for i in torch.arange(len(self))[where].tolist()))
        return replace(
            self,
            x=x,
            traced=traced,
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

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where the trajectory of each can be taken up; none where nobody wants to know."""
        if self.traced is None:
            return ()
        if self.traced.x is self.x:
            return self.traced.each
        return tuple(Origin(self.schedule.path, x.clone(), (self.time,)) for x in self.x)

    def tracing(self, origins: Sequence[Origin]) -> Particles:
        """The same with these origins of theirs, one for each; with none, untraced ones as they are."""
        return self if self.traced is None else replace(self, traced=Origins(self.x, tuple(origins)))

    def seen(self) -> Particles:
        """The same once the model has been asked for all of them together."""
        return self.tracing([origin.seen(len(self), i) for i, origin in enumerate(self.origins)])

    def moved(self, x: Tensor, by_ode: bool) -> Particles:
        """The same at the next step of their schedule, at ``x``; where the model's ODE led them, their origins stay.

        Nobody has asked the model there, and x0 is x until then.
        """
        step = self.step + 1
        there = replace(self, step=step, x=x, x0=x, scores=None)
        if not by_ode or step == 0:
            return there
        # Where x was replaced after the model was asked, x0 isn't what the model says of it: it begins after this move.
        anew = there.origins
        led = [
            replace(origin, times=(*origin.times, there.time)) if len(origin.calls) == len(origin.times) else anew[i]
            for i, origin in enumerate(self.origins)
        ]
        return there.tracing(led)

    def solved(self, step: int, x: Tensor, x0: Tensor) -> Particles:
        """The same where the model's own ODE has led all of them together, by way of each step."""
        there = replace(self, step=step, x=x, x0=x0, scores=None)
        times = self.schedule.times[max(self.step, 0) : step + 1]
        begun = [] if self.traced is None else [(i, self.x[i].clone()) for i in range(len(self))]
        asked = sum(time > 0 for time in times)
        return there.tracing([Origin(self.schedule.path, x, times, ((len(self), i),) * asked) for i, x in begun])

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
    x = torch.cat([p.x for p in parts])
    traced = None if first.traced is None else Origins(x, tuple(origin for p in parts for origin in p.origins))
    return replace(
        first,
        x=x,
        traced=traced,
        x0=torch.cat([p.x0 for p in parts]),
        keys=torch.cat([p.keys for p in parts]),
        seeds=torch.cat([p.seeds for p in parts]),
        scores=torch.cat([s for s in scores if s is not None]) if all(s is not None for s in scores) else None,
    )

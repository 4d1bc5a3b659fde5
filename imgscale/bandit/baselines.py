"""What the bandit is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from imgscale.bandit.actions import Action, Mask, Pool
from imgscale.bandit.linear import LinUCB
from imgscale.bandit.policy import Context, Policy, only
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]


class Random(Policy):
    """Any allowed action, evenly."""

    name = "random"

    def _shares(self, context: Context, allowed: Mask, value: Floats) -> Floats:
        even: Floats = allowed / allowed.sum()
        return even


class Fixed(Policy):
    """One action for all prompts; where it isn't allowed, the one of the nearest cost.

    Args:
        action: Which one, or its name.

    Raises:
        UserError: It isn't in the pool.
    """

    name = "fixed"

    def __init__(self, pool: Pool, *, action: Action | str, **options: Any) -> None:
        super().__init__(pool, **options)
        self.place = pool.index(action)

    def _shares(self, context: Context, allowed: Mask, value: Floats) -> Floats:
        distance = np.abs(self.pool.costs - self.pool.costs[self.place])
        distance[self.place] = -1.0
        return only(int(np.where(allowed, distance, np.inf).argmin()), len(allowed))


class Oracle(Policy):
    """The best action for every prompt, known beforehand: the ceiling, in replays only.

    Raises:
        UserError: (choose) A context whose truth isn't known.
    """

    name = "oracle"

    def _shares(self, context: Context, allowed: Mask, value: Floats) -> Floats:
        if context.truth is None:
            raise UserError("The oracle needs the utility of every action beforehand; it is for replays only.")
        return only(int(np.where(allowed, context.truth, -np.inf).argmax()), len(allowed))


class Neighbours(Policy):
    """k nearest neighbours: an action's quality is the mean of the k most similar (prompt, action) pairs seen.

    Args:
        neighbours: k, at least 1.
        scale: The weight of distances between actions beside those between prompts, above 0.

    Raises:
        UserError: A k or a scale that isn't one.
    """

    name = "knn"

    def __init__(
        self, pool: Pool, *, neighbours: int = 10, scale: float = 1.0, epsilon: float = 0.1, **options: Any
    ) -> None:
        super().__init__(pool, epsilon=epsilon, **options)
        if neighbours < 1 or not scale > 0:
            raise UserError(f"Neighbours can't be {neighbours!r} with scale {scale!r}; give 1 or more, and above 0.")
        self.neighbours, self.scale = neighbours, scale
        self._z: Floats = np.empty((0, len(pool.schema.prompt)))
        self._places: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._targets: Floats = np.empty(0)

    def _estimate(self, context: Context) -> tuple[Floats, Floats]:
        n = len(self.pool)
        if not len(self._targets):
            return np.zeros(n), np.zeros(n)
        a = self.pool.features
        between = ((a[:, None] - a[None]) ** 2).sum(-1)  # (actions, actions)
        prompts = ((self._z - context.z) ** 2).sum(1)  # (seen,)
        distance = self.scale * between[:, self._places] + prompts
        k = min(self.neighbours, len(self._targets))
        nearest = np.argpartition(distance, k - 1, axis=1)[:, :k]
        return self._targets[nearest].mean(1), np.zeros(n)

    def _learn(self, context: Context, place: int, target: float) -> None:
        self._z = np.vstack([self._z, context.z])
        self._places = np.append(self._places, place)
        self._targets = np.append(self._targets, target)


def routing_only(pool: Pool, **options: Any) -> LinUCB:
    """LinUCB that chooses the model but not how much search: with each model's cheapest action."""
    return LinUCB(pool, within=lambda action: action.eflops == _cheapest(pool, action.model.name), **options)


def _cheapest(pool: Pool, model: str) -> float:
    return min(action.eflops for action in pool.actions if action.model.name == model)


def search_only(pool: Pool, *, model: str | None = None, **options: Any) -> LinUCB:
    """LinUCB that chooses how much search, on one model: test-time scaling (TTS) alone.

    Args:
        pool: The actions.
        model: Its name; by default the one with the highest prior score (the dearest of those).
        options: See `LinUCB`.
    """
    best = max((action.model for action in pool.actions), key=lambda m: (m.prior, m.step_eflops)).name
    chosen = best if model is None else model
    return LinUCB(pool, within=lambda action: action.model.name == chosen, **options)

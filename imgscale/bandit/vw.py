"""Vowpal Wabbit as the outside reference (optional: pip install "imgscale[bandits]")."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from imgscale.bandit.actions import Mask, Pool
from imgscale.bandit.policy import Context, Policy
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]


class VowpalWabbit(Policy):
    """Its contextual bandit with action-dependent features, and their products with the prompt's.

    It learns costs, so it learns the utility jointly, and explores in its own way: the choice follows its
    probabilities.

    Args:
        arguments: For Vowpal Wabbit; the default explores by SquareCB (Foster and Rakhlin 2020).

    Raises:
        UserError: It isn't installed.
    """

    name = "vowpalwabbit"

    def __init__(
        self, pool: Pool, *, arguments: str = "--squarecb --gamma_scale 100", seed: int = 0, **options: Any
    ) -> None:
        if options.pop("joint", True) is not True:
            raise UserError("vowpalwabbit learns the utility; joint can't be False.")
        super().__init__(pool, joint=True, seed=seed, **options)
        try:
            from vowpalwabbit import Workspace
        except ImportError as error:
            raise UserError('vowpalwabbit isn\'t installed; run: pip install "imgscale[bandits]"') from error
        self._workspace = Workspace(f"--cb_explore_adf -q pa --quiet --random_seed {seed} {arguments}")

    def _shares(self, context: Context, allowed: Mask, value: Floats) -> Floats:
        places = np.flatnonzero(allowed)
        found = np.array(self._workspace.predict(self._example(context, places)))
        shares = np.zeros(len(allowed))
        shares[places] = found / found.sum()
        return shares

    def _learn(self, context: Context, place: int, target: float) -> None:
        # It weights by the propensity, which is the same as at the choice if nothing was learned in between.
        places = np.flatnonzero(self.pool.alive)
        if place not in places:  # a model that has left since: there is no decision to learn for
            return
        target += self._beforehand()[place]  # it knows nothing of what was expected
        probability = float(self.probabilities(context)[place])
        self._workspace.learn(self._example(context, places, (place, 1 - target, max(probability, 1e-3))))

    def _example(
        self, context: Context, places: npt.NDArray[np.intp], label: tuple[int, float, float] | None = None
    ) -> list[str]:
        """One decision in its text format: the prompt, then a line for each action."""
        lines = ["shared |p " + _written(context.z)]
        for place in places:
            cost = f"0:{label[1]:.6f}:{label[2]:.6f} " if label and label[0] == place else ""
            lines.append(f"{cost}|a {_written(self.pool.features[place])}")
        return lines


def _written(values: Floats) -> str:
    return " ".join(f"f{i}:{value:.6g}" for i, value in enumerate(values) if value)

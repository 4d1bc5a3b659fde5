"""Potentials: what rewards on a trajectory weigh, for searches that weigh and resample particles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from imgscale.errors import UserError
from imgscale.resampling import Floats

Potential = Literal["current", "diff", "max", "sum"]
Tempering = Literal["constant", "increase"]


@dataclass(frozen=True)
class Tilt:
    """How much rewards count.

    Args:
        name: Of the searcher whose options these are.
        potential: Of `log_potential`.
        strength: Lambda, what the potential is multiplied by.
        standardise: Rewards count in standard deviations of the population.
        tempering: The strength is constant, or grows as strength ((1 + gamma)^i - 1) with the i-th weighting.
        gamma: Growth of the increasing strength up to its full value; by default that is reached at the last weighting.

    Raises:
        UserError: A number out of range.

    Source: Kim et al. 2025, DAS (arXiv 2501.05803), for the increasing strength.
    """

    name: str
    potential: Potential
    strength: float
    standardise: bool
    tempering: Tempering
    gamma: float | None = None

    def __post_init__(self) -> None:
        for option, value in (("strength", self.strength), ("gamma", self.gamma)):
            if value is not None and not (0 < value < inf):
                raise UserError(f"{self.name}'s {option} can't be {value}; give a number above 0.")

    def at(self, i: int, last: int, rewards: Floats, before: Sequence[float]) -> float:
        """The strength of weighting i = 1 … last, for the rewards (n,) there and the strengths before."""
        strength = self.strength
        if self.tempering == "increase":
            gamma = 2 ** (1 / last) - 1 if self.gamma is None else self.gamma
            strength *= min((1 + gamma) ** i - 1, 1.0)
        if not self.standardise:
            return strength
        finite = rewards[np.isfinite(rewards)]
        spread = float(finite.std()) if len(finite) else 0.0
        if not spread > 1e-5 * np.abs(finite).max(initial=0.0):  # they differ by rounding only
            return before[-1] if before else 0.0
        return strength / spread


def log_potential(potential: Potential, rewards: Floats, strengths: Sequence[float]) -> Floats:
    """log G (n,) of each lineage at the last of k weightings.

    Args:
        rewards: (k, n), of each lineage at each weighting. −inf there before the last one has no say.
        strengths: (k,).

    Source: Singhal et al. 2025, FK steering (arXiv 2501.06848), section 3.
    """
    now, alive = rewards[-1], np.isfinite(rewards[-1])
    known = np.where(np.isfinite(rewards), rewards, 0.0)
    log_g: Floats
    if potential == "current":
        log_g = strengths[-1] * known[-1]
    elif potential == "diff":
        log_g = strengths[-1] * known[-1] - (strengths[-2] * known[-2] if len(known) > 1 else 0.0)
    elif potential == "max":
        log_g = strengths[-1] * np.where(alive, rewards.max(0), 0.0)
    else:
        log_g = strengths[-1] * known.sum(0)
    log_g = np.where(alive, log_g, now)
    return log_g

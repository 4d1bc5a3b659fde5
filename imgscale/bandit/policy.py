"""What all policies share: modes, masks, propensities, and rewards that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from imgscale.bandit.actions import Action, Mask, Pool
from imgscale.errors import UnknownName, UserError

Floats = npt.NDArray[np.float64]

MODES = {"cost": 0.5, "balanced": 0.8, "quality": 0.95}  # weights of quality; the rest is the weight of 1 - cost


@dataclass(frozen=True)
class Context:
    """A prompt as policies see it.

    Args:
        z: Its features, (d,), finite (see `Prompts`).
        prompt: The text, for people.
        truth: (actions,), the utility of each action: known in a replay only, and read by the oracle alone.

    Raises:
        UserError: A feature isn't finite.
    """

    z: Floats
    prompt: str = ""
    truth: Floats | None = None

    def __post_init__(self) -> None:
        if not np.isfinite(self.z).all():
            raise UserError(f"The features of the prompt {self.prompt[:80]!r} aren't finite: {self.z.tolist()}.")


@dataclass(frozen=True)
class Choice:
    """What a policy chose, and how sure it was.

    Args:
        action: To be run.
        propensity: The probability with which it was chosen, in (0, 1]: log it, and other policies can be evaluated
            on these runs (see `imgscale.bandit.offpolicy`).
        expected: Its quality (the utility, if learned jointly) as far as the policy knows; NaN if it has no idea.
        uncertainty: The half width of that, as the policy uses it to explore; 0 if it doesn't.
    """

    action: Action
    propensity: float
    expected: float
    uncertainty: float

    def __str__(self) -> str:
        quality = "quality unknown"
        if math.isfinite(self.expected):
            quality = f"expected quality {self.expected:.2f} ± {self.uncertainty:.2f}"
        return f"{self.action.name}: {quality}, {_eflops(self.action.eflops)}"


def quality_weight(mode: str | float) -> float:
    """The weight w of quality in the utility w q + (1 - w) (1 - C), from the name of a mode or as given.

    Raises:
        UserError: No such mode, or a weight outside [0, 1].
    """
    if isinstance(mode, str):
        if mode not in MODES:
            raise UnknownName("mode", mode, MODES, "Or give the weight of quality, a number from 0 to 1.")
        return MODES[mode]
    if not 0 <= mode <= 1:
        raise UserError(f"The weight of quality can't be {mode!r}; give a number from 0 to 1.")
    return float(mode)


class Policy:
    """Chooses actions for prompts and learns from their rewards.

    A kind of policy says what it expects of each action (`_estimate`), or with which probabilities it takes them
    (`_shares`), and how it learns (`_learn`). The utility of an action with quality q and cost C is
    w q + (1 - w) (1 - C), in a mode with weight w. Quality is learned and the known cost is subtracted, so that another
    mode, or other costs, need no relearning; or else (``joint``, for comparison) the utility itself is learned.
    What is learned is how rewards differ from what was expected beforehand, so that with little evidence a policy stays
    near that.

    Args:
        pool: The actions; it may change while the policy lives.
        mode: "cost", "balanced", "quality", or the weight of quality.
        epsilon: With this probability an allowed action is drawn evenly, in [0, 1]. Off-policy evaluation of policies
            that choose otherwise needs it above 0.
        joint: Whether to learn the utility in the stead of quality.
        prior: The quality that is expected of an action beforehand, such as `imgscale.bandit.priors.expected`; 0.5 of
            all for None.
        within: Restricts the policy to some actions, where any of those is allowed (else it is as if not given).
        seed: Of its draws. The same calls with the same seed give the same choices.

    Raises:
        UserError: A mode or an epsilon that isn't one.
    """

    name: ClassVar[str]

    def __init__(
        self,
        pool: Pool,
        *,
        mode: str | float = "balanced",
        epsilon: float = 0.0,
        joint: bool = False,
        prior: Callable[[Action], float] | None = None,
        within: Callable[[Action], bool] | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 <= epsilon <= 1:
            raise UserError(f"epsilon can't be {epsilon!r}; give a probability from 0 to 1.")
        self.pool = pool
        self.weight = quality_weight(mode)
        self.epsilon = epsilon
        self.joint = joint
        self.prior = prior
        self.within = within
        self._expected: Floats = np.empty(0)
        self.rng = np.random.default_rng(seed)
        self.learned = 0
        self.refused = 0  # rewards that were no numbers

    def switch(self, mode: str | float) -> None:
        """Goes on in another mode."""
        self.weight = quality_weight(mode)

    def choose(self, context: Context, mask: Mask | None = None) -> Choice:
        """Chooses an action.

        Args:
            context: The prompt.
            mask: (actions,), those that may be chosen; by default all in the pool.

        Raises:
            UserError: None may be, or the context has other features than the schema.
        """
        shares, mean, width = self._decide(context, mask)
        ends = np.cumsum(shares)
        place = int(np.searchsorted(ends, self.rng.random() * ends[-1], side="right"))
        return Choice(self.pool.actions[place], float(shares[place]), float(mean[place]), float(width[place]))

    def probabilities(self, context: Context, mask: Mask | None = None) -> Floats:
        """(actions,): the probability with which `choose` would take each action now (see there)."""
        return self._decide(context, mask)[0]

    def ranking(self, context: Context, mask: Mask | None = None) -> list[tuple[Choice, float]]:
        """The actions that may be chosen and the utilities by which they are, without optimism, the best first."""
        shares, mean, width = self._decide(context, mask)
        allowed, utility = self.pool.allowed(mask), self._utility(mean)
        order = sorted(np.flatnonzero(allowed), key=lambda i: -utility[i])
        actions = self.pool.actions
        return [
            (Choice(actions[i], float(shares[i]), float(mean[i]), float(width[i])), float(utility[i])) for i in order
        ]

    def learn(self, context: Context, action: Action, reward: float) -> bool:
        """Learns what an action brought.

        Args:
            context: The prompt.
            action: What was run; it may have left the pool since.
            reward: The quality of its result, usually in [0, 1].

        Returns:
            Whether the reward was a number. One that isn't is counted in ``refused``, and nothing is learned.

        Raises:
            UserError: The action has never been in the pool.
        """
        place = self.pool.index(action)
        self._check(context)
        if not math.isfinite(reward):
            self.refused += 1
            return False
        if self.joint:
            reward = self.weight * reward + (1 - self.weight) * (1 - float(self.pool.costs[place]))
        self._learn(context, place, float(reward - self._beforehand()[place]))
        self.learned += 1
        return True

    def _decide(self, context: Context, mask: Mask | None) -> tuple[Floats, Floats, Floats]:
        """Probabilities, expectations and their uncertainties of all actions."""
        self._check(context)
        allowed = self.pool.allowed(mask)
        if self.within is not None:
            inner = allowed & np.array([self.within(action) for action in self.pool.actions])
            allowed = inner if inner.any() else allowed
        surplus, width = self._estimate(context)
        mean = self._beforehand() + surplus
        shares = self._shares(context, allowed, mean + width)
        return (1 - self.epsilon) * shares + self.epsilon * allowed / allowed.sum(), mean, width

    def _beforehand(self) -> Floats:
        """(actions,): the quality, or utility, that is expected where nothing has been learned."""
        if len(self._expected) != len(self.pool):  # actions never leave their places
            actions = self.pool.actions
            self._expected = np.array([0.5 if self.prior is None else self.prior(action) for action in actions])
        if self.joint:
            return self.weight * self._expected + (1 - self.weight) * (1 - self.pool.costs)
        return self._expected

    def _utility(self, value: Floats) -> Floats:
        """Of learned values (…, actions)."""
        if self.joint:
            return value
        utility: Floats = self.weight * value + (1 - self.weight) * (1 - self.pool.costs)
        return utility

    def _estimate(self, context: Context) -> tuple[Floats, Floats]:
        """What is expected of each action beyond `_beforehand`, and the optimism added to it: two of (actions,)."""
        return np.full(len(self.pool), np.nan), np.zeros(len(self.pool))

    def _shares(self, context: Context, allowed: Mask, value: Floats) -> Floats:
        """The probability of each action, (actions,), before epsilon: all on the one of the highest utility."""
        return only(int(np.where(allowed, self._utility(value), -np.inf).argmax()), len(allowed))

    def _learn(self, context: Context, place: int, target: float) -> None:
        """Takes in by how much, a finite number, the action at a place of the pool was better than expected beforehand.

        A policy that doesn't learn does nothing.
        """

    def _check(self, context: Context) -> None:
        expected = len(self.pool.schema.prompt)
        if context.z.shape != (expected,):
            raise UserError(f"The prompt has features of shape {context.z.shape}; the schema has ({expected},).")


def only(place: int, n: int) -> Floats:
    """Certainty: 1 at a place and 0 elsewhere, (n,)."""
    shares = np.zeros(n)
    shares[place] = 1.0
    return shares


def _eflops(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}FLOPs"
    return f"{value:.3g} FLOPs"

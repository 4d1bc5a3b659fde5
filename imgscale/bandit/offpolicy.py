"""How another policy would have done, from runs that were logged with their propensities.

Each of n logged decisions has the probability p with which the logging policy took its action, the probability t with
which the evaluated policy would have, and the reward r. All logged p must be positive where t is: log with an epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from imgscale.bandit.actions import Action, Pool
from imgscale.bandit.policy import Context
from imgscale.bandit.ridge import Ridge
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Logged:
    """One decision that was made, run and rewarded."""

    context: Context
    action: Action
    propensity: float
    reward: float


@dataclass(frozen=True)
class Estimate:
    """Of a policy's mean reward.

    Args:
        value: The estimate.
        error: Its standard error; infinite from a single decision.
        effective: How many decisions it amounts to, (sum w)^2 / sum w^2 with w = t / p: few of them, and neither the
            value nor its error can be trusted.
    """

    value: float
    error: float
    effective: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f} (as from {self.effective:.0f} decisions)"


def ips(target: Floats, propensity: Floats, reward: Floats) -> Estimate:
    """Inverse propensity scoring, mean(w r): unbiased, with a large variance (Horvitz and Thompson 1952).

    Args:
        target: t, (n,).
        propensity: p, (n,).
        reward: r, (n,).

    Raises:
        UserError: No decisions, lengths that differ, or numbers that aren't probabilities or finite.
    """
    w = _weights(target, propensity, reward)
    return _mean(w * reward, w)


def snips(target: Floats, propensity: Floats, reward: Floats) -> Estimate:
    """Self-normalised, sum(w r) / sum(w): a little biased, steadier (Swaminathan and Joachims 2015).

    Arguments and errors as for `ips`. The standard error is that of a ratio, by the delta method.
    """
    w = _weights(target, propensity, reward)
    if not w.sum() > 0:
        raise UserError("The evaluated policy would have taken none of the logged actions; log with a larger epsilon.")
    value = float((w * reward).sum() / w.sum())
    n = len(w)
    spread = (
        float(np.sqrt((w**2 * (reward - value) ** 2).sum()) / w.sum()) * math.sqrt(n / (n - 1)) if n > 1 else math.inf
    )
    return Estimate(value, spread, _effective(w))


def doubly_robust(target: Floats, propensity: Floats, reward: Floats, predicted: Floats, expected: Floats) -> Estimate:
    """Doubly robust, mean(expected + w (r - predicted)): unbiased as IPS, and steadier as far as the model of rewards
    is good (Dudik et al. 2011).

    Args:
        target: t, (n,).
        propensity: p, (n,).
        reward: r, (n,).
        predicted: What a model expects of the logged action, (n,). It must not have learned from that reward: see
            `predictions`.
        expected: What it expects of the evaluated policy, sum over actions of its probability times the model, (n,).

    Raises:
        UserError: As for `ips`.
    """
    w = _weights(target, propensity, reward, predicted, expected)
    return _mean(expected + w * (reward - predicted), w)


def predictions(pool: Pool, log: Sequence[Logged], *, ridge: float = 1.0, folds: int = 5) -> Floats:
    """What a ridge regression expects of all actions for each logged prompt, without having seen its own fold.

    Args:
        pool: The actions.
        log: n decisions.
        ridge: lambda.
        folds: At least 2; a log of fewer decisions has as many folds as it has decisions.

    Returns:
        (n, actions)

    Raises:
        UserError: Fewer than two decisions or folds.
    """
    if min(len(log), folds) < 2:
        raise UserError(f"{len(log)} decisions in {folds} folds can't predict each other; give two of each, or more.")
    phi, made = pool.schema.phi, np.empty((len(log), len(pool)))
    fold = np.arange(len(log)) % folds
    for held in range(min(folds, len(log))):
        model = Ridge(np.ones(pool.schema.dim), ridge)
        rest = [event for event, own in zip(log, fold, strict=True) if own != held]
        seen = np.array([phi(pool.features[pool.index(event.action)], event.context.z) for event in rest])
        model.gram += seen.T @ seen
        model.moment += seen.T @ np.array([event.reward for event in rest])
        model.refresh()
        for i in range(held, len(log), folds):
            made[i] = phi(pool.features, log[i].context.z) @ model.theta
    return made


def _weights(target: Floats, propensity: Floats, *others: Floats) -> Floats:
    n = len(target)
    if not n or any(np.shape(values) != (n,) for values in (target, propensity, *others)):
        shapes = ", ".join(str(np.shape(values)) for values in (target, propensity, *others))
        raise UserError(f"The logged values have the shapes {shapes}; give one of each for every decision, and some.")
    if not all(np.isfinite(values).all() for values in (target, propensity, *others)):
        raise UserError("Some logged values aren't finite; leave those decisions out.")
    if propensity.min() <= 0 or propensity.max() > 1 + 1e-9 or target.min() < 0 or target.max() > 1 + 1e-9:
        raise UserError("Propensities must be above 0 and up to 1, and the evaluated policy's probabilities 0 to 1.")
    return target / propensity


def _mean(terms: Floats, w: Floats) -> Estimate:
    error = float(terms.std(ddof=1)) / math.sqrt(len(terms)) if len(terms) > 1 else math.inf
    return Estimate(float(terms.mean()), error, _effective(w))


def _effective(w: Floats) -> float:
    return float(w.sum() ** 2 / max(float((w**2).sum()), 1e-300))

"""Linear bandits on shared features: LinUCB and Thompson sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from imgscale.bandit.actions import Mask, Pool
from imgscale.bandit.policy import Context, Policy
from imgscale.bandit.ridge import Ridge
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]

DRAWS = 64  # of the posterior, for the probabilities of one decision
LEFT = 0.85  # of what a model's samples lack, after each doubling of them: a guess, that the first rewards correct


class LinUCB(Policy):
    """Optimism on a linear model that all actions share (Li et al. 2010), with the cost subtracted.

    Chooses the action with the highest w (theta.phi + alpha sqrt(phi' A^-1 phi)) + (1 - w) (1 - C).

    Args:
        pool: See `Policy`, as for the options that aren't listed.
        alpha: Optimism, at least 0; 0 is greedy.
        ridge: lambda, above 0.
        discount: What an observation counts after the next one, in (0, 1]: below 1 where prompts or models drift. 0.999
            remembers about a thousand.

    Raises:
        UserError: An alpha below 0; a ridge or a discount that isn't one.
    """

    name = "linucb"

    def __init__(
        self, pool: Pool, *, alpha: float = 0.3, ridge: float = 1.0, discount: float = 1.0, **options: Any
    ) -> None:
        super().__init__(pool, **options)
        if not (np.isfinite(alpha) and alpha >= 0):
            raise UserError(f"alpha can't be {alpha!r}; give a number from 0 on.")
        self.alpha = alpha
        self.model = Ridge(pool.schema.dim, ridge, discount)

    def warm(self, trust: float) -> None:
        """Begins with what is known beforehand: each action's quality is its model's prior, for all prompts alike.

        Search is taken to close a part of the gap: of log2(n) steps each leaves `LEFT` of what was missing.

        Args:
            trust: How many observations that counts for, all actions together; 0 for nothing.
        """
        if trust <= 0:
            return
        share = np.sqrt(trust / len(self.pool))
        nowhere = np.zeros(len(self.pool.schema.prompt))
        for action, a in zip(self.pool.actions, self.pool.features, strict=True):
            quality = 1 - (1 - action.model.prior) * LEFT ** np.log2(action.candidates)
            self.model.observe(share * self.pool.schema.phi(a, nowhere), share * quality)

    def _estimate(self, context: Context) -> tuple[Floats, Floats]:
        mean, covariance, designs = self._belief(context)
        variance = ((designs @ covariance) * designs).sum(1)
        return designs @ mean, self.alpha * np.sqrt(np.maximum(variance, 0.0))

    def _belief(self, context: Context) -> tuple[Floats, Floats, Floats]:
        """theta and A^-1 for this prompt, as forms on [1, a], and [1, a] of all actions."""
        project = self.pool.schema.project
        designs = np.concatenate([np.ones((len(self.pool), 1)), self.pool.features], 1)
        return project(self.model.theta, context.z), project(self.model.inverse, context.z), designs

    def _learn(self, context: Context, place: int, target: float) -> None:
        self.model.observe(self.pool.schema.phi(self.pool.features[place], context.z), target)


class Thompson(LinUCB):
    """Thompson sampling: the best action for a theta drawn from N(theta, alpha^2 A^-1) (Agrawal and Goyal 2013).

    For one prompt only the projection of theta onto [1, a] matters, and that is what is drawn. `DRAWS` of them vote,
    and the choice follows the votes: so its propensity is known exactly, given the draws. The options are LinUCB's.
    """

    name = "thompson"

    def __init__(self, pool: Pool, *, alpha: float = 0.1, **options: Any) -> None:
        super().__init__(pool, alpha=alpha, **options)

    def _shares(self, context: Context, allowed: Mask, value: Floats) -> Floats:
        mean, covariance, designs = self._belief(context)
        values, axes = np.linalg.eigh(covariance)
        root = axes * np.sqrt(np.maximum(values, 0.0))
        drawn = mean + self.alpha * self.rng.standard_normal((DRAWS, len(mean))) @ root.T
        utility = self._utility(drawn @ designs.T)
        best = np.where(allowed, utility, -np.inf).argmax(1)
        votes: Floats = np.bincount(best, minlength=len(allowed)) / DRAWS
        return votes

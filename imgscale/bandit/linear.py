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


class LinUCB(Policy):
    """Optimism on a linear model that all actions share (Li et al. 2010), with the cost subtracted.

    Chooses the action with the highest w (theta.phi + alpha sqrt(phi' A^-1 phi)) + (1 - w) (1 - C).

    The model is of what differs from the quality that was expected beforehand, so that lambda says how long that holds.

    Args:
        pool: See `Policy`, as for the options that aren't listed.
        alpha: Optimism, at least 0; 0 is greedy.
        ridge: lambda, above 0, of what all prompts have in common.
        products: How much larger lambda is where features of the prompt matter, above 0: with little evidence, prompts
            should differ less than actions do.
        discount: What an observation counts after the next one, in (0, 1]: below 1 where prompts or models drift. 0.999
            remembers about a thousand.

    Raises:
        UserError: An alpha below 0; a ridge, a factor or a discount that isn't one.
    """

    name = "linucb"

    def __init__(
        self,
        pool: Pool,
        *,
        alpha: float = 0.3,
        ridge: float = 1.0,
        products: float = 1.0,
        discount: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(pool, **options)
        if not (np.isfinite(alpha) and alpha >= 0):
            raise UserError(f"alpha can't be {alpha!r}; give a number from 0 on.")
        if not (np.isfinite(products) and products > 0):
            raise UserError(f"The factor of products can't be {products!r}; give a number above 0.")
        self.alpha, self.products = alpha, products
        self.model = Ridge(np.where(pool.schema.of_prompt, products, 1.0), ridge, discount)

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
        utility = self._utility(self._beforehand() + drawn @ designs.T)
        best = np.where(allowed, utility, -np.inf).argmax(1)
        votes: Floats = np.bincount(best, minlength=len(allowed)) / DRAWS
        return votes

"""Ridge regression one observation at a time, with forgetting."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import linalg

from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]

REFRESH = 500  # observations after which the inverse is computed afresh, so that roundings don't add up


class Ridge:
    """theta = A^-1 b, with A = lambda D + sum_s g^(t-s) phi_s phi_s' and b = sum_s g^(t-s) phi_s y_s.

    Without forgetting (g = 1) the inverse follows A by Sherman and Morrison's rank-one formula, O(d^2), and is computed
    afresh now and then. With it, A <- g A + (1 - g) lambda D + phi phi' is no rank-one change, and a Cholesky factor is
    computed for each observation, O(d^3): milliseconds for hundreds of features, beside a search that takes seconds.

    Args:
        weights: The diagonal of D, (dim,), above 0: how firmly each coefficient is held at 0, beside the others.
        ridge: lambda, above 0. Forgetting leads back to it.
        forget: g, in (0, 1]: how much an observation counts after another one.

    Attributes:
        gram: A, (dim, dim).
        moment: b, (dim,).
        inverse: A^-1, (dim, dim).
        theta: (dim,).

    Raises:
        UserError: A ridge or g that isn't one.
    """

    def __init__(self, weights: Floats, ridge: float = 1.0, forget: float = 1.0) -> None:
        if not (np.isfinite(ridge) and ridge > 0):
            raise UserError(f"The ridge can't be {ridge!r}; give a number above 0.")
        if not 0 < forget <= 1:
            raise UserError(f"The discount can't be {forget!r}; give a number above 0 and up to 1 (never forget).")
        self.ridge, self.forget = ridge, forget
        self._least: Floats = ridge * np.asarray(weights, np.float64)
        self.gram: Floats = np.diag(self._least)
        self.moment: Floats = np.zeros(len(weights))
        self.inverse: Floats = np.diag(1 / self._least)
        self.theta: Floats = np.zeros(len(weights))
        self._since = 0

    def observe(self, phi: Floats, y: float) -> None:
        """Takes in one observation: phi (dim,) and its value."""
        if self.forget < 1:
            self.gram *= self.forget
            self.gram.flat[:: len(phi) + 1] += (1 - self.forget) * self._least
            self.moment *= self.forget
        _add_outer(self.gram, phi, 1.0)
        self.moment += y * phi
        self._since += 1
        if self.forget < 1 or self._since >= REFRESH:
            self.refresh()
            return
        u = self.inverse @ phi
        _add_outer(self.inverse, u, -1 / (1 + float(phi @ u)))
        self.theta = self.inverse @ self.moment

    def study(self, phi: Floats, y: Floats, weight: float) -> None:
        """Takes in many observations at once, phi (n, dim) and y (n,), each of which counts ``weight`` of one."""
        self.gram += weight * phi.T @ phi
        self.moment += weight * phi.T @ y
        self.refresh()

    def refresh(self) -> None:
        """Computes the inverse and theta from A and b.

        Raises:
            numpy.linalg.LinAlgError: A isn't positive definite; it always is unless it was set from outside.
        """
        lower, failed = linalg.lapack.dpotrf(self.gram, lower=1)
        if failed:
            raise np.linalg.LinAlgError("not positive definite")
        half, _ = linalg.lapack.dpotri(lower, lower=1)
        self.inverse = np.ascontiguousarray(np.tril(half) + np.tril(half, -1).T)
        self.theta = self.inverse @ self.moment
        self._since = 0


def _add_outer(matrix: Floats, u: Floats, factor: float) -> None:
    """matrix += factor u u', in place and without a temporary matrix: BLAS wants columns to be contiguous, and a
    symmetric matrix is its own transpose."""
    linalg.blas.dger(factor, u, u, a=matrix.T, overwrite_a=1, overwrite_x=0, overwrite_y=0)

"""Neural bandits in plain numpy: a small network with random exploration, and NeuralUCB."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from imgscale.bandit.actions import Pool
from imgscale.bandit.policy import Context, Policy
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]

BATCH = 64
RATE = 3e-3


class Network:
    """y = w2 . relu(W1 x + b1) + b2, trained by Adam (Kingma and Ba 2015) on squared errors.

    Args:
        inputs: Length of x.
        hidden: Width.
        rng: Draws the first weights.
    """

    def __init__(self, inputs: int, hidden: int, rng: np.random.Generator) -> None:
        self.inputs, self.hidden = inputs, hidden
        first = rng.standard_normal((hidden, inputs)) * np.sqrt(2 / inputs)
        # All weights in one vector: [W1, b1, w2, b2].
        self.weights = np.concatenate([first.ravel(), np.zeros(2 * hidden + 1)])
        self._m, self._v, self._steps = np.zeros_like(self.weights), np.zeros_like(self.weights), 0

    def _parts(self) -> tuple[Floats, Floats, Floats, float]:
        h, cut = self.hidden, self.hidden * self.inputs
        w = self.weights
        return w[:cut].reshape(h, -1), w[cut : cut + h], w[cut + h : -1], float(w[-1])

    def __call__(self, x: Floats) -> Floats:
        """(n,) for x (n, inputs)."""
        w1, b1, w2, b2 = self._parts()
        value: Floats = np.maximum(x @ w1.T + b1, 0.0) @ w2 + b2
        return value

    def gradients(self, x: Floats) -> Floats:
        """Of each output by all weights: (n, weights)."""
        w1, b1, w2, _ = self._parts()
        active = x @ w1.T + b1
        back = (active > 0) * w2
        first = (back[:, :, None] * x[:, None, :]).reshape(len(x), -1)
        return np.concatenate([first, back, np.maximum(active, 0.0), np.ones((len(x), 1))], 1)

    def train(self, x: Floats, y: Floats) -> None:
        """One step of Adam on a batch: x (n, inputs), y (n,)."""
        w1, b1, w2, _ = self._parts()
        active = x @ w1.T + b1
        error = (self(x) - y) / len(y)
        back = error[:, None] * (active > 0) * w2
        second = error @ np.maximum(active, 0.0)
        gradient = np.concatenate([(back.T @ x).ravel(), back.sum(0), second, [error.sum()]])
        self._steps += 1
        self._m = 0.9 * self._m + 0.1 * gradient
        self._v = 0.999 * self._v + 0.001 * gradient**2
        m, v = self._m / (1 - 0.9**self._steps), self._v / (1 - 0.999**self._steps)
        self.weights -= RATE * m / (np.sqrt(v) + 1e-8)


class MLP(Policy):
    """A small network on [a, z], trained on all it has seen, with epsilon-greedy choices.

    Args:
        hidden: Width, at least 1.
        epochs: Steps of training for each reward, on batches drawn from all so far.

    Raises:
        UserError: A width or a number of steps below 1.
    """

    name = "mlp"

    def __init__(self, pool: Pool, *, hidden: int = 32, epochs: int = 4, epsilon: float = 0.1, **options: Any) -> None:
        super().__init__(pool, epsilon=epsilon, **options)
        if hidden < 1 or epochs < 1:
            raise UserError(f"{self.name} can't have width {hidden!r} and {epochs!r} epochs; give 1 or more of each.")
        self.epochs = epochs
        self.network = Network(pool.schema.action_dim + len(pool.schema.prompt), hidden, self.rng)
        self._x: Floats = np.empty((0, self.network.inputs))
        self._y: Floats = np.empty(0)

    def _inputs(self, context: Context) -> Floats:
        return np.concatenate([self.pool.features, np.broadcast_to(context.z, (len(self.pool), len(context.z)))], 1)

    def _estimate(self, context: Context) -> tuple[Floats, Floats]:
        return self.network(self._inputs(context)), np.zeros(len(self.pool))

    def _learn(self, context: Context, place: int, target: float) -> None:
        self._x = np.vstack([self._x, self._inputs(context)[place]])
        self._y = np.append(self._y, target)
        for _ in range(self.epochs):
            drawn = self.rng.integers(len(self._y), size=min(BATCH, len(self._y)))
            self.network.train(self._x[drawn], self._y[drawn])


class NeuralUCB(MLP):
    """Optimism by the network's gradients (Zhou et al. 2020): f + alpha sqrt(g' Z^-1 g), with Z = ridge I + sum g g'.

    As in their experiments only the diagonal of Z is kept.

    Args:
        alpha: Optimism, at least 0.
        ridge: Above 0.

    Raises:
        UserError: Another alpha or ridge.
    """

    name = "neuralucb"

    def __init__(
        self, pool: Pool, *, alpha: float = 0.1, ridge: float = 1.0, epsilon: float = 0.0, **options: Any
    ) -> None:
        super().__init__(pool, epsilon=epsilon, **options)
        if not (alpha >= 0 and ridge > 0):
            raise UserError(f"alpha can't be {alpha!r} with ridge {ridge!r}; give 0 or more, and above 0.")
        self.alpha = alpha
        self._seen = np.full(len(self.network.weights), float(ridge))

    def _estimate(self, context: Context) -> tuple[Floats, Floats]:
        x = self._inputs(context)
        return self.network(x), self.alpha * np.sqrt(self.network.gradients(x) ** 2 @ (1 / self._seen))

    def _learn(self, context: Context, place: int, target: float) -> None:
        self._seen += self.network.gradients(self._inputs(context)[place : place + 1])[0] ** 2
        super()._learn(context, place, target)

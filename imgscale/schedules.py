"""What a pipeline's own scheduler knows about its model, read off and never stepped.

Two families: flow models (the linear path; the network answers with a velocity) and DDPM-style models (a
table of `alphas_cumprod`; the network answers with the noise, the image or v). Both end up as one thing: a
path, the timestep to call the network with at a time on it, and x0 from the answer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.paths import Discrete, Linear, Path, Time, as_time, column

__all__ = ["Clock", "Schedule", "read"]

_PREDICTIONS = ("epsilon", "v_prediction", "sample")


@dataclass(frozen=True)
class Schedule:
    """How a model was trained to be called.

    Attributes:
        path: Its interpolant.
        prediction: What the network answers with: "flow", "epsilon", "v_prediction" or "sample".
        train_steps: Its timesteps run from 0 to this number.
    """

    path: Path
    prediction: str
    train_steps: int

    def x0(self, x: Tensor, t: Time, output: Tensor) -> Tensor:
        """E[x0 | x] from the network's answer.

        Args:
            x: (n, ...) float32 on `path`.
            t: Times: () or (n,).
            output: (n, ...) like x, or with twice the channels where the model also learned its variance.

        Returns:
            (n, ...) float32.
        """
        if output.shape[1:2] == (2 * x.shape[1],):
            output = output[:, : x.shape[1]]
        output = output.to(x.dtype)
        alpha, sigma = column(self.path.alpha(t), x), column(self.path.sigma(t), x)
        if self.prediction == "flow":
            return x - sigma * output
        if self.prediction == "epsilon":
            return (x - sigma * output) / alpha
        if self.prediction == "v_prediction":
            return alpha * x - sigma * output
        return output


class Clock:
    """The timestep that a network is called with at a time on its path.

    Flow pipelines that shift their sigmas but not their timesteps (CogView 4) have a clock of their own,
    which depends on the image size: it is read off a fine grid.

    Args:
        schedule: The model's.
        grid: (timesteps, sigmas) of the user's scheduler set to many steps, where they are not proportional.
    """

    def __init__(self, schedule: Schedule, grid: tuple[Tensor, Tensor | None] | None = None) -> None:
        self._schedule = schedule
        self._knots: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None
        if grid is not None and grid[1] is not None:
            steps, sigmas = (as_time(part).numpy() for part in (grid[0], grid[1]))
            order = np.argsort(sigmas[: len(steps)])
            self._knots = sigmas[order], steps[order]

    def timestep(self, t: Time) -> Tensor:
        """Timesteps, float32 of the shape of t."""
        if isinstance(self._schedule.path, Discrete):
            return self._schedule.path.index(t).float()
        if self._knots is None:
            # In float32 like the schedulers' own, so that their times come back bit by bit.
            return as_time(t).float() * self._schedule.train_steps
        return torch.as_tensor(np.interp(as_time(t).numpy(), *self._knots), dtype=torch.float32)


def read(scheduler: Any) -> Schedule:
    """The schedule of a diffusers scheduler.

    Raises:
        UserError: It belongs to no family that is known here.
    """
    name, config = type(scheduler).__name__, scheduler.config
    train_steps = int(config.get("num_train_timesteps") or 1000)
    prediction = config.get("prediction_type", "epsilon")
    flow = name.startswith("FlowMatch") or prediction == "flow_prediction" or config.get("use_flow_sigmas")
    if flow:
        return Schedule(Linear(), "flow", train_steps)
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None or name.startswith("EDM"):
        raise UserError(
            f"The scheduler {name} has neither flow sigmas nor alphas_cumprod to read the model's path from: "
            "give the pipeline a FlowMatch, DDIM, DPM-Solver, Euler or other DDPM-style scheduler."
        )
    if prediction not in _PREDICTIONS:
        raise UserError(
            f"The scheduler's prediction_type {prediction!r} is unknown here: set the one that the model was "
            f"trained with, {', '.join(_PREDICTIONS)} or flow_prediction."
        )
    return Schedule(Discrete(alphas), prediction, train_steps)


def proportional(schedule: Schedule, grid: tuple[Tensor, Tensor | None]) -> bool:
    """Whether a recorded grid's timesteps are what `Clock` takes them for without knots."""
    timesteps, sigmas = grid
    if not isinstance(schedule.path, Linear) or sigmas is None or len(timesteps) == 0:
        return True
    expected = as_time(sigmas[: len(timesteps)]) * schedule.train_steps
    # Some schedulers round timesteps to integers; the network was trained on the exact ones.
    return bool((as_time(timesteps) - expected).abs().max() <= 1.0)


def times(schedule: Schedule, grid: tuple[Tensor, Tensor | None], steps: int) -> Tensor:
    """The own-path times of a recorded grid, decreasing, with a last 0.

    Returns:
        float64 (steps + 1,).
    """
    timesteps, sigmas = grid
    if isinstance(schedule.path, Discrete):
        found = schedule.path.time(timesteps)
    elif sigmas is not None:
        found = as_time(sigmas[: len(timesteps)])
    else:
        found = as_time(timesteps) / schedule.train_steps
    # Where the last time is a setting (shift_terminal), a single step's grid is 0 / 0; all it can visit is noise.
    found = found.nan_to_num(nan=1.0).clamp(0, 1).unique().flip(0)  # second-order schedulers visit their times twice
    found = found[found > 0]
    if len(found) > steps:  # or put midpoints between them
        found = found[torch.linspace(0, len(found) - 1, steps).round().long()]
    return torch.cat([found, found.new_zeros(1)])

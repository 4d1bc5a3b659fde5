"""Where a stepwise search walks: the model's own path and grid, or those of the papers on few-step models."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from imgscale.errors import UserError
from imgscale.particles import Schedule
from imgscale.paths import VP, Linear

if TYPE_CHECKING:
    from imgscale.problem import Problem


def search_schedule(problem: Problem, path: str | None, steps: int) -> Schedule:
    """The path and the times of a stepwise search.

    Args:
        problem: Whose model it is.
        path: "own", or "linear" or "vp" at the times sqrt(1 - (i / steps)^2). None is what the model's settings say, or
            else vp on a distilled flow model and own otherwise: draws differ most on vp, but its grid ends early, where
            only a distilled x0 is sharp.
        steps: Transitions on the linear or vp path, at least 2.

    Raises:
        UserError: Fewer than 2 steps.

    Source: Kim et al. 2025, RBF (arXiv 2503.19385).
    """
    path = path or problem.path
    if path is None:
        path = "vp" if problem.distilled and isinstance(problem.schedule.path, Linear) else "own"
    if path == "own":
        return problem.schedule
    if steps < 2:
        raise UserError(f"The search's steps can't be {steps}; give 2 or more.")
    times = [sqrt(1 - (i / steps) ** 2) for i in range(steps + 1)]  # s = sqrt(1 - (1 - tau)^2)
    return Schedule(VP() if path == "vp" else Linear(), tuple(times))

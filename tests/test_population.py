"""What the searches over populations share: sizes with a guide, and the schedule they walk."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.grids import search_schedule
from imgscale.kernels import Kernel
from imgscale.particles import Particles
from imgscale.paths import VP, Discrete, Linear
from imgscale.problem import Problem, Request
from tests.doubles import STEPS, Watched, new, run

POPULATIONS = ["smc", "svdd", "code", "bfs"]


class Pull:
    """Moves x0 up the reward, the gradient taken ``turns`` times at each place.

    The first turn is that of all siblings; each later one asks the model anew.
    """

    slopes = True

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns

    def __call__(
        self, problem: Problem, particles: Particles, kernel: Kernel, noise: Tensor | None
    ) -> Generator[Request, Any, Tensor]:
        here, t_next = particles, particles.schedule.times[particles.step + 1]
        for turn in range(self.turns):
            if turn:
                here = yield from problem.renoise(here, here.step)
            slope = yield from problem.gradient(here)
        assert isinstance(slope, Tensor)
        shifted = particles.x0 + 0.02 * slope
        path = particles.schedule.path
        return (yield from problem.transition(kernel, path, particles.time, t_next, particles.x, shifted, noise))

    def price(self, kernel: Kernel) -> tuple[int, int]:
        return 2 * (self.turns - 1), self.turns  # a new place is an evaluation, and its gradient another


@pytest.mark.parametrize("name", POPULATIONS)
@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("budget", [STEPS, 11, 60, 150])
def test_populations_are_sized_for_their_guide(name: str, distilled: bool, turns: int, budget: int) -> None:
    """They come to their ends, which takes the budget that gradients need as well."""
    world = Watched(shape=(3,))
    search = run(world, new(world, name, budget=budget, distilled=distilled, guide=Pull(turns)))
    assert search.best is not None and search.stopped == "complete"
    assert search.meter.ledger.nfe == world.evaluations <= budget
    assert search.meter.ledger.gradients > 0 or budget < 150


def problem(path: Any = None, distilled: bool = False) -> Problem:
    return new(Watched(path=path), "best-of-n", budget=10, distilled=distilled).problem


def test_the_schedule_follows_from_the_model() -> None:
    discrete = Discrete((1 - torch.linspace(0.001, 0.2, 40)).cumprod(0))
    for made in (problem(), problem(discrete), problem(discrete, distilled=True)):
        assert search_schedule(made, None, 10) == made.schedule
    assert search_schedule(problem(distilled=True), "own", 0) == problem().schedule
    vp = search_schedule(problem(distilled=True), None, 10)
    assert vp.path == VP() and vp.steps == 10 and (vp.times[0], vp.times[-1]) == (1.0, 0.0)
    assert vp.times[9] == pytest.approx(0.435890, abs=1e-6)
    told = problem(distilled=True)
    told.path = "own"  # by the model's settings
    assert search_schedule(told, None, 10) == told.schedule and search_schedule(told, "vp", 10) == vp
    linear = search_schedule(problem(), "linear", 5)
    assert linear.path == Linear() and linear.times == pytest.approx([1, 0.979796, 0.916515, 0.8, 0.6, 0])


@pytest.mark.parametrize("path", ["vp", "linear"])
def test_a_path_of_ones_own_needs_two_steps(path: str) -> None:
    with pytest.raises(UserError, match="steps can't be 1; give 2 or more"):
        search_schedule(problem(), path, 1)

"""What searches over populations share: the searched part of a trajectory, and how many particles fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from imgscale.errors import UserError
from imgscale.grids import search_schedule
from imgscale.kernels import Kernel
from imgscale.kernels import kernel as read_kernel
from imgscale.particles import Schedule
from imgscale.problem import Problem


@dataclass(frozen=True)
class Course:
    """The part of a trajectory that is searched, by a stochastic kernel; from its end the model's ODE solves the rest.

    Args:
        problem: Whose trajectory.
        schedule: Where it is searched.
        kernel: The stochastic step.
        searched: Transitions that are searched, all of them with an evaluation at their end.
    """

    problem: Problem
    schedule: Schedule
    kernel: Kernel
    searched: int

    @property
    def nfe(self) -> int:
        """Model evaluations of one particle on the searched transitions; its start isn't among them."""
        return self.problem.cost(self.schedule, 0, self.searched, self.kernel)

    @property
    def tail(self) -> int:
        """Model evaluations that solve the rest."""
        return self.problem.finishing_from(self.schedule, self.searched)

    def guided(self, parents: int, moves: int) -> tuple[int, int]:
        """Model evaluations and gradients that the problem's guide takes.

        Args:
            parents: Different places where transitions start; children of one parent share the first gradient in x.
            moves: Transitions.
        """
        guide = self.problem.guide
        if guide is None:
            return 0, 0
        price = getattr(guide, "price", None)
        nfe, gradients = price(self.kernel) if price else (0, 1)
        if not getattr(guide, "slopes", True):
            return nfe * moves, gradients * moves
        return nfe * moves + parents, parents + (gradients - 1) * moves

    def fitting(self, at_most: int, *, nfe: int, scores: int, parents: int, moves: int) -> int:
        """How many particles or chains of this cost still fit into the budget.

        Args:
            at_most: The largest answer.
            nfe: Model evaluations of one, a guide's left out.
            scores: Verifier calls of one, with the same exception.
            parents: Different places of one where searched transitions start, for a guide.
            moves: Searched transitions of one.
        """
        evaluations, gradients = self.guided(parents, moves)
        each = (nfe + evaluations, scores + gradients, gradients)
        left = (self.problem.left, self.problem.scores_left, self.problem.meter.left("gradients"))
        fits = [have // cost for have, cost in zip(left, each, strict=True) if cost and have < inf]
        return int(min([at_most, *fits]))


def course(problem: Problem, name: str, *, path: str | None, steps: int, kernel: str, explore: float) -> Course:
    """The searched part of the trajectories of searcher ``name``, by its options.

    Args:
        explore: The share of the transitions that is searched.

    Raises:
        UserError: An option out of range, or a kernel without noise.
    """
    schedule = search_schedule(problem, path, steps)
    step = read_kernel(kernel)
    if not step.stochastic:
        raise UserError(f"{name} needs noise to choose from, and the kernel {step} has none; take ddim(1) or sde.")
    if not 0 < explore <= 1:
        raise UserError(f"{name}'s explore can't be {explore}; give a share above 0 and up to 1.")
    return Course(problem, schedule, step, ceil(explore * schedule.nfe(0, schedule.steps) - 1e-9))


def at_least_one(name: str, **options: int | None) -> None:
    """Raises:
    UserError: An option that is given is below 1.
    """
    for option, value in options.items():
        if value is not None and value < 1:
            raise UserError(f"{name}'s {option} can't be {value}; it must be at least 1.")

"""Where to draw and where to judge: the plan of a search that solves its draws on to where their previews tell."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor

from imgscale.errors import UserError
from imgscale.kernels import Kernel
from imgscale.particles import Schedule
from imgscale.problem import Problem
from imgscale.searchers._population import course


@dataclass(frozen=True)
class Plan:
    """What is searched by which kernel, where draws are judged, and what that takes.

    Args:
        problem: Whose trajectories.
        schedule: Where they are searched.
        kernel: The stochastic step.
        skipped: Transitions that pass before the first draws.
        searched: The first transition that isn't searched any more.
        looked: The step at which draws are judged, unless they land later.
    """

    problem: Problem
    schedule: Schedule
    kernel: Kernel
    skipped: int
    searched: int
    looked: int

    @property
    def stages(self) -> range:
        """The transitions that are searched."""
        return range(self.skipped, self.searched)

    @property
    def judges_starts(self) -> bool:
        """Whether draws are judged where they land, so that a start's preview compares with theirs."""
        return self.looked <= self.skipped + 1

    def judged(self, stage: int) -> int:
        """The step at which draws of a transition are judged."""
        return max(stage + 1, self.looked)

    def known(self, stage: int) -> bool:
        """Whether the last stage has shown already where the trajectories lead that nothing new is drawn from."""
        return self.skipped < stage < self.looked

    def cost(self, stage: int, n: int = 1, parents: int = 1) -> int:
        """Evaluations of ``n`` draws from so many parents."""
        landing = self.problem.cost(self.schedule, stage, stage + 1, self.kernel)
        guided = min(n, parents) if self.problem.guide is not None else 0
        return n * (landing + self.schedule.nfe(stage + 1, self.judged(stage))) + guided

    def fitting(self, nfe: int, stage: int, draws: int, parents: int = 1) -> int:
        """How many draws so many evaluations pay for."""
        return next((n for n in range(draws, 0, -1) if self.cost(stage, n, parents) <= nfe), 0)

    @property
    def musts(self) -> list[int]:
        """What a chain can't do without at each transition: one draw, or none where it is known how to go on."""
        return [0 if self.known(stage) else self.cost(stage) for stage in self.stages]

    @property
    def lean(self) -> int:
        """Evaluations of the leanest chain, up to where its last draw is judged."""
        return 1 + self.skipped + sum(self.musts)

    @property
    def tail(self) -> int:
        """Evaluations from there to the image."""
        return self.problem.finishing_from(self.schedule, self.judged(self.searched - 1) if self.searched else 0)

    @property
    def mean_cost(self) -> float:
        return sum(map(self.cost, self.stages)) / max(len(self.stages), 1)

    @property
    def weights(self) -> list[float]:
        """What the transitions get of the budget: what was measured, or for equally many draws."""
        useful = self.problem.usefulness
        measured = useful.spread[self.skipped : self.searched] if useful else ()
        if self.schedule == self.problem.schedule and sum(measured) > 0:
            return list(measured)
        return [float(self.cost(stage)) for stage in self.stages]

    def shorter(self) -> Plan:
        """The same with one transition less, or with none skipped."""
        if self.skipped:
            return replace(self, skipped=0)
        return replace(self, searched=self.searched - 1, looked=min(self.looked, self.searched - 1))


def make_plan(
    problem: Problem,
    name: str,
    *,
    skip: float | None,
    explore: float | None,
    look: float | None,
    path: str | None,
    steps: int,
    kernel: str,
) -> Plan:
    """The plan by the options of searcher ``name``; where they are None, by what was measured or by what the model is.

    Raises:
        UserError: An option out of range, or a kernel without noise.
    """
    for option, value in (("look", look), ("skip", skip)):
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"{name}'s {option} can't be {value}; give a share from 0 to 1.")
    share = (1.0 if problem.distilled else 0.3) if explore is None else explore
    way = course(problem, name, path=path, steps=steps, kernel=kernel, explore=share)
    useful = problem.usefulness if way.schedule == problem.schedule else None
    evaluated = way.schedule.nfe(0, way.schedule.steps)
    looked = ceil((0.5 * (not problem.distilled) if look is None else look) * evaluated - 1e-9)
    if useful is not None and look is None:
        looked = min(useful.look, evaluated)
    searched = way.searched
    if useful is not None and explore is None:
        searched = min(useful.decisive, evaluated)
    skipped = floor((0.1 if looked > 2 else 0.0) * way.schedule.steps + 1e-9 if skip is None else skip * evaluated)
    return Plan(problem, way.schedule, way.kernel, max(0, min(skipped, searched - 1)), searched, looked)

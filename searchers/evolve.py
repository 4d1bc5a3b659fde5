"""EvoSearch: a population whose noises, and later states, are mutated and selected by the images they grow into."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import torch

from imgscale.errors import UserError
from imgscale.kernels import eps_from
from imgscale.keys import fold, normal
from imgscale.particles import Particles, join
from imgscale.paths import column
from imgscale.problem import NOISE, Problem, Request, Verb
from imgscale.registry import searcher

MOST = 32  # individuals of a generation, unless told otherwise


@searcher("evolve", cite="he2025evosearch")
def evolve(
    problem: Problem,
    rng: np.random.Generator,
    *,
    population: int | None = None,
    elites: int = 3,
    mutation: float = 0.2,
    schedule: str = "0 0.4 0.6 0.8",
) -> Verb:
    """Evolves starting noises, and then the states at later places of the trajectories.

    The fitness of an individual is the score of its image. At each place of the schedule the elites stay, and the
    others are replaced: by mutated states of parents that won a tournament of two, solved from there. After the last
    place a new population begins, as large as what is left allows; one that isn't larger than the elites is just
    plain samples.

    Args:
        problem: What to solve.
        rng: Draws the tournaments; all noise follows from the seed.
        population: Individuals of a generation. As many as the budget holds, up to 32, if None.
        elites: Individuals that stay as they are.
        mutation: Strength b in [0, 1]: √(1 - b²) of a state's noise is kept, and b is fresh.
        schedule: Where new generations are bred, as increasing shares of the trajectory with spaces between them: 0 is
            the starting noise. A place that stands twice breeds two generations.

    Source: EvoSearch, He et al. 2025 (arXiv 2505.17618). There generations may differ in size, and later states get
    noise added; here their noise is mixed like that of the start, so that it is as much as the model expects.
    """
    _check(population, elites, mutation)
    own = problem.schedule
    places = _places(schedule, own.steps)
    costs = [own.nfe(place - 1, own.steps) for place in places]

    def fits(n: int) -> bool:
        children = max(n - elites, 0)
        nfe = n * problem.sample_nfe + children * sum(costs)
        return nfe <= problem.left and n + children * len(places) <= problem.scores_left

    while n := next((n for n in range(population or MOST, 0, -1) if fits(n)), 0):
        trail = yield from _grow(problem, (yield from problem.start(n)), places, elites)
        for generation, place in enumerate(places if n > elites else ()):
            ranked = _scores(trail[-1]).argsort(descending=True, stable=True)
            winners = torch.from_numpy(rng.integers(n, size=(n - elites, 2)).min(1))
            parents = trail[generation][ranked[winners]]
            children = replace(parents, keys=fold(parents.keys, generation, torch.arange(len(parents))))
            mutants = yield from problem.renoise(mutate(children, mutation), place)  # nothing but a look at them
            grown = yield from _grow(problem, mutants, places[generation:], elites)
            kept = [states[ranked[:elites]] for states in trail[generation:]]
            trail[generation:] = map(join, zip(kept, grown, strict=True))


def mutate(particles: Particles, strength: float) -> Particles:
    """The same states with noise √(1 - b²) eps + b z, z standard normal and following from their keys."""
    path, t, x = particles.schedule.path, particles.time, particles.x
    eps = eps_from(path, t, x, particles.x0)
    fresh = normal(fold(particles.keys, NOISE, particles.step), tuple(x.shape[1:])).to(x.device)
    mixed = sqrt(1 - strength**2) * eps + strength * fresh
    return replace(particles, x=x + column(path.sigma(t), x) * (mixed - eps), scores=None)


def _grow(
    problem: Problem, particles: Particles, places: Sequence[int], elites: int
) -> Generator[Request, Any, list[Particles]]:
    """The particles at each of the places, and finished and scored."""
    trail = []
    for place in places:
        particles = yield from problem.denoise(particles, to=place)
        trail.append(particles)
    finished, _ = yield from problem.score((yield from problem.finish(particles, keep=elites)))
    return [*trail, finished]


def _scores(particles: Particles) -> torch.Tensor:
    assert particles.scores is not None
    return particles.scores


def _places(schedule: str, steps: int) -> list[int]:
    """The steps at which generations are bred."""
    try:
        shares = [float(share) for share in schedule.split()]
    except ValueError:
        shares = []
    if not shares or shares != sorted(shares) or not all(0 <= share < 1 for share in shares):
        raise UserError(f"evolve's schedule can't be {schedule!r}; give increasing shares below 1, such as \"0 0.5\".")
    return [min(round(share * steps), steps - 1) for share in shares]


def _check(population: int | None, elites: int, mutation: float) -> None:
    if elites < 1 or (population is not None and population < 1):
        raise UserError(f"evolve's population ({population}) and elites ({elites}) must be at least 1.")
    if not 0 <= mutation <= 1:
        raise UserError(f"evolve's mutation can't be {mutation}; give a strength from 0 to 1.")

"""SMC: particles that are weighted by the rewards of their previews, and resampled."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import ceil, inf
from typing import Any, Literal

import numpy as np

from imgscale.errors import UserError
from imgscale.particles import Particles
from imgscale.potentials import Tilt, log_potential
from imgscale.problem import Problem, Request, Verb
from imgscale.registry import searcher
from imgscale.resampling import SCHEMES, Floats, Scheme, ess
from imgscale.searchers._population import Course, at_least_one, course
from imgscale.searchers.best_of_n import best_of_n

MOST = 64  # particles of one population, unless more are asked for
UNLIMITED = 8  # particles where only time is limited, so that a population comes to its end in time


@searcher("smc", cite=("singhal2025general", "kim2025test", "gerber2019negative"))
def smc(
    problem: Problem,
    rng: np.random.Generator,
    *,
    particles: int | None = None,
    potential: Literal["current", "diff", "max", "sum"] = "max",
    strength: float = 3.0,
    standardise: bool = True,
    tempering: Literal["constant", "increase"] = "constant",
    gamma: float | None = None,
    resampler: Literal["multinomial", "stratified", "systematic", "residual", "ssp"] = "ssp",
    threshold: float = 0.5,
    explore: float | None = None,
    path: Literal["own", "linear", "vp"] | None = None,
    steps: int = 10,
    kernel: str = "ddim(1)",
) -> Verb:
    """Sequential Monte Carlo: a population walks, is weighted by exp(reward of x0), and resampled where weights differ.

    The weighted particles sample p(x0) exp(strength r(x0)), the better the more there are; the answer is the one of the
    highest reward. New populations begin while the budget lasts, and what is left buys plain samples.

    Args:
        problem: What to solve.
        rng: Draws the numbers of children.
        particles: Of one population; as many as the budget holds if None, up to 64.
        potential: What a particle is weighed by: the reward of its x0, the difference to the one before, or the maximum
            or the sum of all rewards on its way.
        strength: Lambda, what the potential is multiplied by.
        standardise: Rewards count in standard deviations of the population, so that one strength fits all verifiers
            (cosines of CLIP vary by hundredths). If false, as they are: the paper has strength 10 for ImageReward.
        tempering: The strength is constant, or grows as strength ((1 + gamma)^i - 1) with the i-th weighting.
        gamma: Growth of the increasing strength up to its full value; by default that is reached at the last weighting.
        resampler: The scheme.
        threshold: Resample when the effective sample size is below this share of the particles; 1 is always.
        explore: Share of the transitions that is searched; the rest is solved. All of them by default on a distilled
            model, 0.8 on an ordinary one.
        path: The path to walk: the model's own (with its own grid), or linear or vp with ``steps`` transitions. By
            default vp on a distilled flow model and own otherwise.
        steps: Transitions on the linear or vp path.
        kernel: The stochastic step, such as "ddim(1)" or "sde(g=3t^2)".

    Source: FK steering, Singhal et al. 2025 (arXiv 2501.06848), and DAS without its gradient, Kim et al. 2025 (arXiv
    2501.05803).
    """
    explore = (1.0 if problem.distilled else 0.8) if explore is None else explore
    plan = course(problem, "smc", path=path, steps=steps, kernel=kernel, explore=explore)
    if not 0 <= threshold <= 1:
        raise UserError(f"smc's threshold can't be {threshold}; give a share from 0 to 1.")
    tilt = Tilt("smc", potential, strength, standardise, tempering, gamma)
    # At t = 1 the x0 of an ordinary model is the same for all.
    places = range(0 if problem.distilled else 1, plan.searched)
    yield from populations(plan, rng, particles, places, tilt, SCHEMES[resampler], threshold)
    yield from best_of_n(problem, rng)


def populations(
    plan: Course,
    rng: np.random.Generator,
    particles: int | None,
    places: Sequence[int],
    tilt: Tilt,
    resample: Scheme,
    threshold: float,
) -> Verb:
    """Fresh populations while the budget holds two particles (or the one that was asked for); none without places."""
    at_least_one(tilt.name, particles=particles)
    problem = plan.problem
    limited = min(problem.left, problem.scores_left) < inf
    while places:
        fits = plan.fitting(
            particles or (10**6 if limited else UNLIMITED),
            nfe=1 + plan.nfe + plan.tail,
            scores=len(places) + 1,
            parents=plan.searched,
            moves=plan.searched,
        )
        n = fits if particles else ceil(fits / max(1, ceil(fits / MOST)))
        if n < min(2, particles or 2):
            return
        yield from steer(plan, rng, n, places, tilt, resample, threshold)


def steer(
    plan: Course,
    rng: np.random.Generator,
    n: int,
    places: Sequence[int],
    tilt: Tilt,
    resample: Scheme,
    threshold: float,
) -> Generator[Request, Any, tuple[Particles, Floats]]:
    """One population of n, weighted and resampled at the places, which are steps before the last searched one.

    Returns:
        Finished, scored particles and their log-weights (n,): they sample p(x0) exp(strength r(x0)).
    """
    problem = plan.problem
    particles = yield from problem.start(n, plan.schedule)
    rewards, strengths, log_w = np.zeros((0, n)), list[float](), np.zeros(n)
    for step in range(plan.searched):
        if step in places:
            particles, scores = yield from problem.score(particles)
            rewards = np.vstack([rewards, scores.numpy()])
            strengths.append(tilt.at(len(rewards), len(places), rewards[-1], strengths))
            log_w = log_w + log_potential(tilt.potential, rewards, strengths)
            dead = np.isneginf(log_w)
            if dead.all():
                log_w, dead = np.zeros(len(log_w)), ~dead
            if ess(log_w) < threshold * len(log_w) or dead.any():
                counts = resample(log_w, rng)
                particles, rewards = particles.branch(counts), rewards.repeat(counts, axis=1)
                log_w = np.zeros(len(particles))
        particles = yield from problem.denoise(particles, step + 1, plan.kernel)
    particles, scores = yield from problem.score((yield from problem.finish(particles)))
    final = tilt.at(len(places), len(places), scores.numpy(), strengths)
    for k in range(1, len(rewards) + 1):  # the last potential is what makes the product of all exp(strength r)
        spent = log_potential(tilt.potential, rewards[:k], strengths[:k])
        log_w = log_w - np.where(np.isfinite(spent), spent, 0.0)
    return particles, log_w + log_potential("current", scores.numpy()[None], [final])

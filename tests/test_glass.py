"""The GLASS kernel: its draws have the law of the exact transition, the better the more inner steps it has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale.budget import Budget
from imgscale.kernels import DDIM, ODE, Glass, Kernel
from imgscale.paths import VP, Discrete, Linear, Path, as_time, convert
from imgscale.problem import Problem, Verb
from tests.doubles import STEPS, Watched, new, run
from tests.worlds import Gaussian, Mixture, World

N = 20_000
BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
PATHS = [Linear(), VP(), Discrete((1 - BETAS).cumprod(0))]
PLACES = [(1.0, 0.7), (0.9, 0.5), (0.6, 0.2)]

each_path = pytest.mark.parametrize("path", PATHS, ids=str)


def step(world: World, k: Kernel, path: Path, t: float, t_next: float, x: Tensor, seed: int = 0) -> tuple[Tensor, int]:
    """One transition of every row of x, and the model evaluations within it."""
    cond = world.encode("")

    def model(x: Tensor, t: float) -> Tensor:
        return world.predict(*convert(x, t, path, world.path), cond)

    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    walk, asked = k.walk(path, t, t_next, x, model(x, t), noise), 0
    try:
        place = next(walk)
        while True:
            asked += 1
            place = walk.send(model(*place))
    except StopIteration as end:
        return end.value, asked


def parts(path: Path, t: float, t_next: float, eta: float = 1.0) -> tuple[float, float, float]:
    """m, b and c of x' = m x + b x0 + c z."""
    _, residual, fresh = (float(w) for w in DDIM(eta).weights(path, as_time(t), as_time(t_next)))
    m = residual / float(path.sigma(t))
    return m, float(path.alpha(t_next)) - float(path.alpha(t)) * m, fresh


@each_path
@pytest.mark.parametrize("eta", [0.4, 1.0])
@pytest.mark.parametrize("times", [*PLACES, (0.5, 0.5), (0.4, 0.0)], ids=str)
def test_one_inner_step_is_ddim(path: Path, eta: float, times: tuple[float, float]) -> None:
    world = Mixture()
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stepped, asked = step(world, Glass(1, eta), path, *times, x)
    expected, _ = step(world, DDIM(eta), path, *times, x)
    assert asked == 0
    torch.testing.assert_close(stepped, expected, rtol=1e-9, atol=1e-9)


@each_path
def test_without_noise_it_is_the_ode_and_asks_nothing(path: Path) -> None:
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert not Glass(4, 0.0).stochastic and Glass(4, 0.0).evaluations == 0
    stepped, asked = step(Mixture(), Glass(4, 0.0), path, 0.6, 0.3, x)
    torch.testing.assert_close(stepped, step(Mixture(), ODE(), path, 0.6, 0.3, x)[0])
    assert asked == 0


def test_the_last_transition_is_the_data_and_asks_nothing() -> None:
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stepped, asked = step(Mixture(), Glass(4), Linear(), 0.3, 0.0, x)
    assert asked == 0
    torch.testing.assert_close(stepped, step(Mixture(), ODE(), Linear(), 0.3, 0.0, x)[0])


@each_path
@pytest.mark.parametrize("eta", [0.5, 1.0])
@pytest.mark.parametrize("times", PLACES, ids=str)
def test_on_a_gaussian_mean_and_variance_are_exact_in_the_limit(
    path: Path, eta: float, times: tuple[float, float]
) -> None:
    variance = 0.3
    world = Gaussian(0.5, variance, shape=(1,))
    t, t_next = times
    a, s = float(path.alpha(t)), float(path.sigma(t))
    m, b, c = parts(path, t, t_next, eta)
    start = 0.4
    gain = a * variance / (a**2 * variance + s**2)
    mean = m * start + b * (0.5 + gain * (start - a * 0.5))
    std = math.sqrt(b**2 * variance * s**2 / (a**2 * variance + s**2) + c**2)
    x = torch.full((N, 1), start, dtype=torch.float64)
    errors = []
    for steps in (1, 4, 16, 64):
        drawn, asked = step(world, Glass(steps, eta), path, t, t_next, x)
        assert asked == Glass(steps, eta).evaluations == steps - 1
        assert float(drawn.mean()) == pytest.approx(mean, abs=4 * std / N**0.5)
        errors.append(abs(float(drawn.std()) / std - 1))
    noise = 4 / (2 * N) ** 0.5
    assert errors[-1] < 0.02 + noise, errors
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert fine < max(0.6 * coarse, noise), errors


@pytest.mark.parametrize("path", PATHS[:2], ids=str)
def test_on_a_mixture_the_modes_get_their_weights(path: Path) -> None:
    """From where x tells little to where the modes lie apart: DDIM puts one blob at the mean, between the modes."""
    world = Mixture(std=0.2)
    t = 0.9
    t_next = float(path.time_at(as_time(math.log((0.8 / 0.2) ** 2))))
    m, b, c = parts(path, t, t_next)
    a, s = float(path.alpha(t)), float(path.sigma(t))
    x = torch.full((N, 2), 0.1, dtype=torch.float64)
    offsets = x[:1] - a * world.means
    weights = (world.weights.log() - offsets.square().sum(-1) / (2 * (a**2 * world.std**2 + s**2))).softmax(-1)
    errors = []
    for steps in (1, 2, 4, 16):
        drawn, _ = step(world, Glass(steps), path, t, t_next, x)
        modes = world.mode_of((drawn - m * x) / b)
        errors.append(abs(float((modes == 1).double().mean()) - float(weights[1])))
    assert errors[0] > 0.15 and errors[1] < errors[0] / 2 and errors[-1] < 0.02, errors
    inner = drawn[modes == 1]
    exact = math.sqrt((b * world.std * s) ** 2 / (a**2 * world.std**2 + s**2) + c**2)
    assert (inner.std(0) / exact - 1).abs().max() < 0.1


def test_samples_of_few_transitions_get_better_with_inner_steps() -> None:
    """Five transitions: the share of the modes .3 and .7, where DDIM(1) is off by .06."""
    world = Mixture()
    times = [k / 5 for k in range(5, -1, -1)]

    def error(k: Kernel) -> float:
        x = torch.randn(N, 2, generator=torch.Generator().manual_seed(1))
        for i, (t, t_next) in enumerate(zip(times, times[1:], strict=False)):
            x, _ = step(world, k, Linear(), t, t_next, x, seed=2 + i)
        return abs(float(world.mode_of(x).double().mean()) - 0.7)

    ddim, two, eight = error(DDIM()), error(Glass(2)), error(Glass(8))
    assert ddim > 0.05 and two < 0.6 * ddim and eight < 0.35 * ddim, (ddim, two, eight)


def test_missing_noise_is_refused() -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="glass.4. needs noise"):
        next(Glass().walk(Linear(), 0.5, 0.3, x, x))


# ------------------------------------------------------------------------------------------------- within a search


def walks(problem: Problem) -> Verb:
    """Sizes its batches by what a particle costs, as a searcher should."""
    each = problem.cost(problem.schedule, -1, problem.schedule.steps, Glass(3))
    while n := problem.affordable(each, 4):
        yield from problem.score((yield from problem.denoise(problem.prior(n), kernel=Glass(3))))


@pytest.mark.parametrize("nfe", [STEPS, 9, 10, 11, 20, 35, 64])
def test_what_it_asks_on_its_way_is_paid(nfe: int) -> None:
    world = Watched()
    search = run(world, new(world, walks, budget=nfe))
    each = STEPS + (STEPS - 1) * 2  # the last transition asks nothing
    assert search.meter.ledger.nfe == world.evaluations == max(nfe // each * each, STEPS)
    assert search.stopped == "complete" and search.best is not None and search.best.finished


def unaware(problem: Problem) -> Verb:
    """Takes what it can get, as if every transition cost one."""
    while True:
        particles = yield from problem.start(2)
        for step in range(1, problem.schedule.steps):
            particles = yield from problem.denoise(particles.branch(2), step, Glass(3))
            particles, scores = yield from problem.score(particles)
            particles = particles[scores.topk(2).indices]
        yield from problem.score((yield from problem.finish(particles)))


@pytest.mark.parametrize("limits", [{"nfe": n} for n in (4, 5, 7, 11, 19, 40, 80)] + [{"nfe": 40, "verifier_calls": 5}])
def test_a_search_that_does_not_know_stays_within_the_budget(limits: dict[str, Any]) -> None:
    world = Watched()
    search = run(world, new(world, unaware, budget=Budget(**limits)))
    assert search.meter.ledger.nfe == world.evaluations <= limits["nfe"]
    assert search.best is not None and search.best.finished

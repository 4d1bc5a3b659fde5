"""Samples of every kernel have the law of the data, on worlds where the model is exact.

Two kinds of error are kept apart. The *discretisation bias* of a Gaussian is known without sampling, since
every step is affine and so maps moments to moments (`propagated`); it is bounded by stated numbers. The
*sampling error* of n particles is bounded by 4 standard errors around the propagated law.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from imgscale.kernels import DDIM, ODE, SDE, Kernel, kernel, renoise
from imgscale.paths import VP, Discrete, Linear, Path, convert
from tests.worlds import Gaussian, Mixture, World

STEPS = 200
PARTICLES = 10_000
MEAN = torch.tensor([0.5, -1.0], dtype=torch.float64)
COV = torch.tensor([[0.09, 0.05], [0.05, 0.25]], dtype=torch.float64)

BIAS = {"ode": 0.015, "ddim(0.5)": 0.02, "ddim(1)": 0.03, "sde(g=3t^1)": 0.015, "sde(g=3t^2)": 0.015}
"""The relative error of a std that the kernels may make in 200 steps whose times fall like tau^2."""

BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
PATHS = [Linear(), VP(), Discrete((1 - BETAS).cumprod(0))]

each_path = pytest.mark.parametrize("p", PATHS[:2], ids=str)
each_kernel = pytest.mark.parametrize("k", [kernel(name) for name in BIAS], ids=str)


def uniform(steps: int) -> Tensor:
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


def quadratic(steps: int) -> Tensor:
    """Denser towards the data, where the paths bend most in log-SNR."""
    return uniform(steps).square()


def rbf(steps: int) -> Tensor:
    """The times of Kim et al. 2025 for VP: s = sqrt(1 - (1 - tau)^2)."""
    return (1 - (1 - uniform(steps)).square()).sqrt()


def sample(world: World, p: Path, k: Kernel, times: Tensor, n: int = PARTICLES, seed: int = 0) -> Tensor:
    """n samples, float64 (n, d), of the world's model taken along path p, which needn't be its own."""
    generator = torch.Generator().manual_seed(seed)
    cond = world.encode("")
    x = torch.randn(n, world.size, generator=generator)
    for t, t_next in pairwise(times):
        x0 = world.predict(*convert(x, t, p, world.path), cond)
        x = k(p, t, t_next, x, x0, torch.randn(x.shape, generator=generator))
    return x.double()


def propagated(p: Path, k: Kernel, times: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The exact mean and variance after each step from N(0, 1), for data N(mean, variance): (steps, ...)."""
    m, v = torch.zeros_like(mean), torch.ones_like(variance)
    means, variances = [], []
    now = times[:-1]
    steps = torch.stack([p.alpha(now), p.sigma(now), *k.weights(p, now, times[1:])], dim=1)
    for a, s, signal, residual, fresh in steps:
        gain = a * variance / (a**2 * variance + s**2)  # x0 = mean + gain (x - a mean)
        x0 = mean + gain * (m - a * mean)
        m = signal * x0 + residual * (m - a * x0) / s
        v = (signal * gain + residual * (1 - a * gain) / s).square() * v + fresh**2
        means.append(m)
        variances.append(v)
    return torch.stack(means), torch.stack(variances)


def std_ratios(p: Path, k: Kernel, times: Tensor, std: float = 0.3) -> Tensor:
    """The std of x after each step over that of the path's marginal there: (steps,)."""
    variance = torch.tensor(std**2, dtype=torch.float64)
    _, variances = propagated(p, k, times, torch.zeros_like(variance), variance)
    return (variances / (p.alpha(times[1:]).square() * variance + p.sigma(times[1:]).square())).sqrt()


@each_path
@each_kernel
def test_gaussian(p: Path, k: Kernel) -> None:
    world = Gaussian(MEAN, COV)
    times = quadratic(STEPS)
    means, variances = propagated(p, k, times, MEAN @ world.axes, world.variances)
    mean, cov = world.axes @ means[-1], world.axes @ variances[-1].diag() @ world.axes.T

    assert (mean - MEAN).abs().max() < 0.012
    assert (variances[-1].sqrt() / world.variances.sqrt() - 1).abs().max() < BIAS[str(k)]

    x = sample(world, p, k, times)
    assert ((x.mean(0) - mean).abs() < 4 * (cov.diag() / PARTICLES).sqrt()).all()
    error = ((cov.diag()[:, None] * cov.diag() + cov.square()) / PARTICLES).sqrt()
    assert ((x.T.cov() - cov).abs() < 4 * error).all()


@each_path
@each_kernel
def test_mixture(p: Path, k: Kernel) -> None:
    world = Mixture(weights=(0.3, 0.7), std=0.25)
    x = sample(world, p, k, quadratic(STEPS), seed=1)
    modes = world.mode_of(x)
    counts = modes.bincount(minlength=2)

    # .006 is the most that a run of 40,000 particles was off, within its own error.
    assert (counts / PARTICLES - world.weights).abs().max() < 0.006 + 4 * (0.3 * 0.7 / PARTICLES) ** 0.5
    for mode, count in enumerate(counts.tolist()):
        inner = x[modes == mode] - world.means[mode]
        assert inner.mean(0).abs().max() < 0.012 + 4 * world.std / count**0.5
        # The modes lie 8 std apart in a diagonal that both coordinates share.
        assert (inner.std(0) / world.std - 1).abs().max() < BIAS[str(k)] + 4 / (2 * count) ** 0.5
        assert inner.T.corrcoef()[0, 1].abs() < 0.05 + 4 / count**0.5
    spread = (world.cov.diag().sqrt() + 4 * world.std) / PARTICLES**0.5
    assert ((x.mean(0) - world.mean).abs() < 0.02 + 4 * spread).all()


def test_the_worlds_own_samples_pass_the_same_checks() -> None:
    gaussian, mixture = Gaussian(MEAN, COV), Mixture(weights=(0.3, 0.7))
    x = gaussian.data(PARTICLES)
    assert ((x.mean(0) - MEAN).abs() < 4 * (COV.diag() / PARTICLES).sqrt()).all()
    assert (x.T.cov() - COV).abs().max() < 4 * (2 * 0.25**2 / PARTICLES) ** 0.5
    x = mixture.data(PARTICLES)
    assert (mixture.mode_of(x) == 0).double().mean().item() == pytest.approx(0.3, abs=4 * 0.21**0.5 / 100)
    torch.testing.assert_close(x.T.cov(), mixture.cov, rtol=0.05, atol=0)


@pytest.mark.parametrize("p", PATHS, ids=str)
@pytest.mark.parametrize("name", ["gaussian", "mixture"])
def test_the_model_is_the_posterior_mean(p: Path, name: str) -> None:
    # Regression of exact pairs: x0 - E[x0 | x] has mean 0 and is uncorrelated with every function of x.
    n = 40_000
    world = Gaussian(MEAN, COV, path=p) if name == "gaussian" else Mixture(path=p)
    x0 = world.data(n, seed=3)
    eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for t in (0.05, 0.4, 0.8):
        x = p.alpha(t) * x0 + p.sigma(t) * eps
        residue = x0 - world.predict(x, t, world.encode(""))
        for probe in (torch.ones_like(x), x, x.sign(), x**3):
            product = residue * probe
            assert (product.mean(0).abs() < 4.5 * product.std(0) / n**0.5).all()


@each_path
@each_kernel
def test_the_bias_is_of_first_order(p: Path, k: Kernel) -> None:
    # Euler, and equally DDIM with a frozen x0: half the step, half the error.
    at = [std_ratios(p, k, quadratic(steps))[-1].item() - 1 for steps in (400, 800, 1600)]
    for coarse, fine in pairwise(at):
        assert abs(fine) < 0.02
        assert 0.35 < fine / coarse < 0.65


def test_ten_euler_maruyama_steps_overshoot_where_ddim_does_not() -> None:
    """RBF's setting (VP, g = 3 t^2, 10 steps), data of std .3: 1.003 for .932 at the last time evaluated."""
    times = rbf(10)
    marginal = (VP().alpha(times[-2]) ** 2 * 0.09 + VP().sigma(times[-2]) ** 2).sqrt()
    assert marginal.item() == pytest.approx(0.932, abs=5e-4)
    sde, ddim = std_ratios(VP(), SDE(3, 2), times), std_ratios(VP(), DDIM(), times)
    assert (sde[-2] * marginal).item() == pytest.approx(1.003, abs=1e-3)
    assert (ddim[-2] * marginal).item() == pytest.approx(0.927, abs=1e-3)
    # And so in samples, which for the SDE stop before the last, deterministic, transition.
    world = Gaussian(0.0, 0.09)
    for k, expected in ((SDE(3, 2), 1.003), (DDIM(), 0.927)):
        std = sample(world, VP(), k, times[:-1]).std()
        assert std.item() == pytest.approx(expected, abs=4 / (4 * PARTICLES) ** 0.5 + 1e-3)


@pytest.mark.parametrize("grid", [uniform, quadratic, rbf])
@pytest.mark.parametrize("p", PATHS, ids=str)
def test_ddim_and_ode_never_hold_more_noise_than_the_path(p: Path, grid: Callable[[int], Tensor]) -> None:
    for steps in (4, 10, 50):
        for std in (0.1, 0.3, 1.0):
            for k in (ODE(), DDIM(0.5), DDIM()):
                # Of the prior N(0, 1) itself, where a path keeps some of the data at t = 1, the ratio is > 1.
                assert (std_ratios(p, k, grid(steps), std) <= 1 / p.sigma(1.0) + 1e-12).all()
            assert std_ratios(p, SDE(3, 1), grid(10), 0.3).max() > 1.05


def test_one_jump_from_the_papers_last_time_loses_the_data_and_a_proper_solve_brings_it_back() -> None:
    times = rbf(10)
    jump = std_ratios(VP(), DDIM(), times)[-1]
    solve = std_ratios(VP(), DDIM(), torch.cat([times[:-1], quadratic(40)[1:] * times[-2]]))[-1]
    assert jump < 0.15
    assert solve > 0.9


@pytest.mark.parametrize("p", PATHS, ids=str)
def test_renoising_carries_the_marginals_upwards(p: Path) -> None:
    world = Gaussian(MEAN, COV, path=p)
    generator = torch.Generator().manual_seed(5)
    x, t = world.data(PARTICLES, seed=6), torch.tensor(0.0)
    for t_up in (0.1, 0.35, 0.8):
        x = renoise(p, t, t_up, x, torch.randn(x.shape, generator=generator, dtype=torch.float64))
        t = torch.tensor(t_up, dtype=torch.float64)
        cov = p.alpha(t) ** 2 * COV + p.sigma(t) ** 2 * torch.eye(2)
        assert ((x.mean(0) - p.alpha(t) * MEAN).abs() < 4 * (cov.diag() / PARTICLES).sqrt()).all()
        error = ((cov.diag()[:, None] * cov.diag() + cov.square()) / PARTICLES).sqrt()
        assert ((x.T.cov() - cov).abs() < 4 * error).all()


@each_kernel
def test_a_ddpm_path_samples_the_data_too(k: Kernel) -> None:
    """The model's own 1,000 timesteps, all of them, on its own discrete path."""
    p = PATHS[2]
    ratio = std_ratios(p, k, uniform(1000))[-1]
    assert ratio.item() == pytest.approx(1, abs=0.02)

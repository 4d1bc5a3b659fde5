"""Single steps: against the formulas they come from, at the edges, and by name."""

import pytest
import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.kernels import DDIM, ODE, SDE, Glass, Kernel, eps_from, kernel, renoise
from imgscale.paths import VP, Discrete, Linear, Path, as_time, column

BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
ALPHAS = (1 - BETAS).cumprod(0)
PATHS = [Linear(), VP(), Discrete(ALPHAS)]
KERNELS = [ODE(), SDE(), SDE(3, 1), SDE(0), DDIM(), DDIM(0.5), DDIM(0), Glass(), Glass(2, 0.5)]
T, NEXT = 0.7, 0.45

each_path = pytest.mark.parametrize("p", PATHS, ids=str)
each_kernel = pytest.mark.parametrize("k", KERNELS, ids=str)


def draws(n: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, x0 and noise of image-like shape (n, 3, 2, 2)."""
    x, x0, noise = torch.randn(3, n, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return x, x0, noise


@each_path
def test_eps_completes_the_interpolant(p: Path) -> None:
    x, x0, _ = draws()
    torch.testing.assert_close(p.alpha(T) * x0 + p.sigma(T) * eps_from(p, T, x, x0), x)
    assert (eps_from(p, 0.0, x, x0) == 0).all()


@each_path
def test_ode_carries_x0_and_eps_along(p: Path) -> None:
    x, x0, noise = draws()
    stepped = ODE()(p, T, NEXT, x, x0)
    torch.testing.assert_close(stepped, p.alpha(NEXT) * x0 + p.sigma(NEXT) * eps_from(p, T, x, x0))
    assert torch.equal(ODE()(p, T, NEXT, x, x0, noise), stepped)


def test_ode_on_the_linear_path_is_euler() -> None:
    x, x0, _ = draws()
    u = (x - x0) / T  # the model's output: x0 = x - t u
    torch.testing.assert_close(ODE()(Linear(), T, NEXT, x, x0), x + (NEXT - T) * u)


@each_path
@pytest.mark.parametrize("k", [DDIM(0), SDE(0)], ids=str)
def test_kernels_without_noise_are_the_ode(p: Path, k: Kernel) -> None:
    x, x0, _ = draws()
    small = T - 1e-6  # Euler agrees with the exact step to first order
    assert not k.stochastic
    torch.testing.assert_close(k(p, T, small, x, x0), ODE()(p, T, small, x, x0), rtol=0, atol=1e-8)
    if k == DDIM(0):
        torch.testing.assert_close(k(p, T, NEXT, x, x0), ODE()(p, T, NEXT, x, x0))


@each_path
@pytest.mark.parametrize("k", [SDE(), SDE(2, 0.5)], ids=str)
def test_sde_is_euler_maruyama(p: Path, k: SDE) -> None:
    x, x0, noise = draws()
    eps, span, g = eps_from(p, T, x, x0), T - NEXT, k.scale * T**k.power
    u = p.alpha_dot(T) * x0 + p.sigma_dot(T) * eps
    expected = x - (u + g**2 / (2 * p.sigma(T)) * eps) * span + g * span**0.5 * noise
    torch.testing.assert_close(k(p, T, NEXT, x, x0, noise), expected)


@each_path
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_ddim_is_the_published_form(p: Path, eta: float) -> None:
    x, x0, noise = draws()
    a, s, a_next, s_next = p.alpha(T), p.sigma(T), p.alpha(NEXT), p.sigma(NEXT)
    e = eta * s_next * (1 - (a * s_next / (a_next * s)) ** 2).sqrt()
    expected = a_next * x0 + (s_next**2 - e**2).sqrt() * eps_from(p, T, x, x0) + e * noise
    torch.testing.assert_close(DDIM(eta)(p, T, NEXT, x, x0, noise), expected)


def test_ddim_1_on_a_ddpm_path_is_the_ddpm_posterior() -> None:
    x, x0, noise = draws()
    i = 600
    now, before, beta = ALPHAS[i], ALPHAS[i - 1], BETAS[i]
    mean = (before.sqrt() * beta * x0 + (1 - beta).sqrt() * (1 - before) * x) / (1 - now)
    std = ((1 - before) / (1 - now) * beta).sqrt()
    p = Discrete(ALPHAS)
    stepped = DDIM()(p, p.time(i), p.time(i - 1), x, x0, noise)
    torch.testing.assert_close(stepped, mean + std * noise, rtol=1e-6, atol=1e-9)


@each_path
@each_kernel
def test_the_last_transition_is_the_data_without_noise(p: Path, k: Kernel) -> None:
    x, x0, noise = draws()
    assert torch.equal(k(p, T, 0.0, x, x0, noise), x0)
    assert torch.equal(k(p, T, 0.0, x, x0), x0)
    assert torch.equal(k(p, 0.0, 0.0, x, x), x)


@each_path
@each_kernel
def test_a_step_to_the_same_time_stays(p: Path, k: Kernel) -> None:
    x, x0, noise = draws()
    for t in (T, 1.0):
        torch.testing.assert_close(k(p, t, t, x, x0, noise), x)


@each_path
@each_kernel
def test_steps_from_pure_noise_are_finite(p: Path, k: Kernel) -> None:
    x, x0, noise = draws(1)
    stepped = k(p, 1.0, 0.9, x, x0, noise)
    assert stepped.shape == x.shape and stepped.isfinite().all()


def test_zero_terminal_snr_steps() -> None:
    p = Discrete(torch.cat([ALPHAS[:-1], torch.zeros(1)]))
    x, x0, noise = draws()
    torch.testing.assert_close(ODE()(p, 1.0, 0.5, x, x0), p.alpha(0.5) * x0 + p.sigma(0.5) * x)
    torch.testing.assert_close(DDIM()(p, 1.0, 0.5, x, x0, noise), p.alpha(0.5) * x0 + p.sigma(0.5) * noise)


@each_path
@each_kernel
def test_a_batch_may_mix_times(p: Path, k: Kernel) -> None:
    x, x0, noise = draws(4, torch.float32)
    now = torch.tensor([1.0, 0.7, 0.1, 0.0])
    then = torch.tensor([0.8, 0.7, 0.0, 0.0])
    together = k(p, now, then, x, x0, noise)
    assert together.dtype == torch.float32 and together.isfinite().all()
    for i in range(4):
        row = slice(i, i + 1)
        alone = k(p, float(now[i]), float(then[i]), x[row], x0[row], noise[row])
        torch.testing.assert_close(alone, together[row], rtol=1e-5, atol=1e-6)
    common = k(p, 0.9, torch.tensor([0.8, 0.7, 0.1, 0.0]), x, x0, noise)
    torch.testing.assert_close(common[3], x0[3])


@each_kernel
def test_float32_latents_lose_only_their_own_rounding(k: Kernel) -> None:
    x, x0, noise = draws()
    exact = k(VP(), 0.3, 0.29, x, x0, noise)
    rounded = k(VP(), 0.3, 0.29, x.float(), x0.float(), noise.float())
    torch.testing.assert_close(rounded.double(), exact, rtol=0, atol=3e-6)


@each_kernel
def test_steps_are_differentiable_to_the_end(k: Kernel) -> None:
    x, x0, noise = draws()
    x.requires_grad_(), x0.requires_grad_()
    k(VP(), torch.tensor([1.0, 0.7, 0.2, 0.0]), torch.tensor([0.9, 0.6, 0.0, 0.0]), x, x0, noise).sum().backward()
    for leaf in (x, x0):
        assert leaf.grad is not None and leaf.grad.isfinite().all() and leaf.grad.abs().sum() > 0


@each_path
def test_renoise_is_the_published_form_and_keeps_the_marginals(p: Path) -> None:
    x, _, noise = draws()
    keep = p.alpha(T) / p.alpha(NEXT)
    fresh = (p.sigma(T) ** 2 - keep**2 * p.sigma(NEXT) ** 2).sqrt()
    torch.testing.assert_close(renoise(p, NEXT, T, x, noise), keep * x + fresh * noise)
    # Data with its weight alpha and noise of std sigma arrive with alpha' and sigma'.
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    signal = renoise(p, NEXT, T, p.alpha(NEXT) * one, zero)
    carried, added = renoise(p, NEXT, T, p.sigma(NEXT) * one, zero), renoise(p, NEXT, T, zero, one)
    assert signal.item() == pytest.approx(p.alpha(T).item())
    assert (carried**2 + added**2).item() == pytest.approx(p.sigma(T).item() ** 2)


@each_path
def test_renoise_at_the_edges(p: Path) -> None:
    x, _, noise = draws()
    torch.testing.assert_close(renoise(p, 0.0, T, x, noise), p.alpha(T) * x + p.sigma(T) * noise)
    for t in (0.0, T, 1.0):
        torch.testing.assert_close(renoise(p, t, t, x, noise), x)
    torch.testing.assert_close(renoise(p, T, 1.0, x, noise), renoise(p, T, 1.0, x, noise).nan_to_num())
    if p == Linear():
        torch.testing.assert_close(renoise(p, T, 1.0, x, noise), noise)
    now, up = torch.tensor([0.0, 0.2, 0.5, 1.0]), torch.tensor([0.1, 0.2, 1.0, 1.0])
    together = renoise(p, now, up, x, noise)
    for i in range(4):
        row = slice(i, i + 1)
        torch.testing.assert_close(renoise(p, float(now[i]), float(up[i]), x[row], noise[row]), together[row])


@each_path
def test_renoise_undoes_a_ddim_step_in_law(p: Path) -> None:
    # Down to t' with the true x0 and up again: the weights of data and noise are those at t.
    one = torch.ones(1, 1, dtype=torch.float64)
    signal, residual, fresh = DDIM(0.6).weights(p, as_time(T), as_time(NEXT))
    assert signal == p.alpha(NEXT)
    assert (residual**2 + fresh**2).item() == pytest.approx(p.sigma(NEXT).item() ** 2)
    assert renoise(p, NEXT, T, column(signal, one) * one, 0 * one).item() == pytest.approx(p.alpha(T).item())


@pytest.mark.parametrize("times", [(0.4, 0.5), (1.1, 0.5), (0.5, -0.1), (float("nan"), 0.1), (0.5, float("nan"))])
def test_times_out_of_order_are_refused(times: tuple[float, float]) -> None:
    x, x0, noise = draws()
    with pytest.raises(ValueError, match="0 <= cleaner <= noisier <= 1"):
        DDIM()(Linear(), *times, x, x0, noise)
    with pytest.raises(ValueError, match="0 <= cleaner <= noisier <= 1"):
        renoise(Linear(), *times[::-1], x, noise)


@pytest.mark.parametrize("k", [DDIM(), SDE()], ids=str)
def test_missing_noise_is_refused(k: Kernel) -> None:
    x, x0, _ = draws()
    with pytest.raises(ValueError, match="needs noise"):
        k(Linear(), T, NEXT, x, x0)


def test_only_the_kernels_with_noise_are_stochastic() -> None:
    assert [k.stochastic for k in KERNELS] == [False, True, True, False, True, True, False, True, True]


@each_kernel
def test_names_read_back(k: Kernel) -> None:
    assert kernel(str(k)) == k and kernel(k) is k and {k: 1}[kernel(str(k))] == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ode", ODE()),
        ("sde", SDE(3, 2)),
        ("sde(g=3t)", SDE(3, 1)),
        ("SDE( g = 3 * t ** 2 )", SDE(3, 2)),
        ("sde(g=t^.5)", SDE(1, 0.5)),
        ("sde(g=2)", SDE(2, 0)),
        ("ddim", DDIM(1)),
        ("ddim(0.5)", DDIM(0.5)),
        ("ddim(eta=0)", DDIM(0)),
        ("glass", Glass(4)),
        ("glass(8)", Glass(8)),
        ("glass( 2, 0.5 )", Glass(2, 0.5)),
        ("glass(2,eta=1)", Glass(2)),
    ],
)
def test_names(name: str, meant: Kernel) -> None:
    assert kernel(name) == meant


@pytest.mark.parametrize(
    "name",
    ["", "euler", "ddim(", "ddim()", "ddim(x)", "sde(3)", "sde(g=)", "sde(g=t^)", "ode(1)", "glass()", "glass(.5)"],
)
def test_an_unknown_name_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(UserError, match=r"ddim\(0.5\)") as refused:
        kernel(name)
    assert repr(name) in str(refused.value)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="1.5"):
        kernel("ddim(1.5)")
    for name in ("glass(0)", "glass(4,1.5)"):
        with pytest.raises(UserError, match="1 step or more and an eta from 0 to 1"):
            kernel(name)
    for scale, power in ((-1.0, 2.0), (1.0, -0.5), (float("nan"), 2.0), (float("inf"), 2.0)):
        with pytest.raises(UserError, match="at least 0"):
            SDE(scale, power)

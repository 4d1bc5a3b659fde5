"""Curves, their inverses and conversions between paths."""

import pytest
import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.kernels import eps_from
from imgscale.paths import VP, Discrete, Linear, Path, as_time, convert, path
from tests.worlds import Gaussian, Mixture


def ddpm(steps: int = 1000) -> Tensor:
    """The "scaled linear" alphas_cumprod of Stable Diffusion."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, steps, dtype=torch.float64).square()
    return (1 - betas).cumprod(0)


PATHS = [Linear(), VP(), VP(2.0, 2.0), Discrete(ddpm())]
INNER = torch.tensor([1e-6, 1e-4, 0.0123, 0.1, 0.25, 0.5, 0.77, 0.9, 0.99], dtype=torch.float64)

each_path = pytest.mark.parametrize("p", PATHS, ids=str)


@each_path
def test_ends_are_data_and_noise(p: Path) -> None:
    assert p.alpha(0.0) == 1 and p.sigma(0.0) == 0 and p.log_snr(0.0) == torch.inf
    assert p.sigma(1.0) > 0.92
    times = torch.linspace(0, 1, 200)
    assert (p.alpha(times).diff() < 0).all() and (p.sigma(times).diff() > 0).all()
    assert (p.log_snr(times).diff() < 0).all()


@each_path
def test_log_snr_is_that_of_the_curves(p: Path) -> None:
    expected = 2 * (p.alpha(INNER) / p.sigma(INNER)).log()
    torch.testing.assert_close(p.log_snr(INNER), expected, rtol=1e-9, atol=1e-9)


@each_path
def test_time_at_inverts_log_snr(p: Path) -> None:
    times = torch.cat([torch.zeros(1), INNER, torch.ones(1)]).double()
    torch.testing.assert_close(p.time_at(p.log_snr(times)), times, rtol=1e-12, atol=1e-12)
    assert p.time_at(-torch.inf) == 1 and p.time_at(torch.inf) == 0
    assert p.time_at(-1e4) == 1  # below the lowest SNR, and beyond what exp can hold


@each_path
def test_derivatives_are_those_of_the_curves(p: Path) -> None:
    # One-sided, towards the data, which is the side that a step takes; off the kinks of the discrete path.
    times, h = INNER[2:] + 3e-4, 1e-7
    for curve, dot in ((p.alpha, p.alpha_dot), (p.sigma, p.sigma_dot)):
        torch.testing.assert_close(dot(times), (curve(times) - curve(times - h)) / h, rtol=1e-4, atol=1e-5)


@each_path
def test_schedule_arithmetic_is_float64_whatever_goes_in(p: Path) -> None:
    for t in (0.5, torch.tensor(0.5), torch.tensor([0.5, 0.25], dtype=torch.float32)):
        for curve in (p.alpha, p.sigma, p.alpha_dot, p.sigma_dot, p.log_snr, p.time_at):
            assert curve(t).dtype == torch.float64 and curve(t).shape == as_time(t).shape
    assert torch.equal(p.sigma(torch.tensor([0.5])), p.sigma(0.5)[None])


def test_vp_is_the_published_one() -> None:
    t = 0.6
    total = 0.5 * t**2 * (20 - 0.1) + 0.1 * t
    assert VP().alpha(t).item() == pytest.approx(torch.tensor(-total / 2).exp().item(), rel=1e-6)
    assert VP().alpha(t) ** 2 + VP().sigma(t) ** 2 == pytest.approx(1)
    snr = VP().alpha(t) / VP().sigma(t)
    back = -(snr**2 / (1 + snr**2)).log()
    assert ((-0.1 + (0.01 + 2 * 19.9 * back).sqrt()) / 19.9).item() == pytest.approx(t)
    assert VP().time_at(2 * snr.log()).item() == pytest.approx(t)


def test_discrete_passes_through_the_models_alphas() -> None:
    alphas = ddpm()
    p = Discrete(alphas)
    times = p.time(torch.arange(1000))
    assert times[0] == 1e-3 and times[-1] == 1
    torch.testing.assert_close(p.alpha(times).square(), alphas, rtol=1e-12, atol=0)
    torch.testing.assert_close(p.sigma(times).square(), 1 - alphas, rtol=1e-10, atol=0)


def test_discrete_timesteps_come_back_whole() -> None:
    # A time that went through another path is rounded, and a timestep just below i would truncate to i - 1.
    p = Discrete(ddpm())
    times = p.time(torch.arange(1000))
    _, there = convert(torch.ones(1000), times, p, Linear())
    _, back = convert(torch.ones(1000), there, Linear(), p)
    assert not torch.equal(back, times)
    for t in (times, back):
        assert p.index(t).long().tolist() == list(range(1000))
    assert p.index(p.time(7.25)).item() == pytest.approx(7.25)
    assert p.index(0.0) == 0 and p.index(0.0004) == 0


def test_discrete_interpolates_log_snr_and_runs_to_clean_data() -> None:
    p = Discrete(ddpm())
    whole = p.log_snr(p.time(torch.tensor([3, 4])))
    assert p.log_snr(p.time(3.25)).item() == pytest.approx((0.75 * whole[0] + 0.25 * whole[1]).item())
    first = (p.sigma(1e-3) / p.alpha(1e-3)).item()
    assert (p.sigma(4e-4) / p.alpha(4e-4)).item() == pytest.approx(0.4 * first)
    assert p.sigma_dot(0.0).item() == pytest.approx(1000 * first) and p.alpha_dot(0.0).abs() < 1e-6


def test_discrete_zero_terminal_snr_is_exact() -> None:
    alphas = ddpm()
    alphas[-1] = 0
    p = Discrete(alphas)
    assert p.alpha(1.0) == 0 and p.sigma(1.0) == 1 and p.log_snr(1.0) == -torch.inf
    assert p.alpha(0.999).square() == pytest.approx(alphas[-2])
    times = torch.linspace(0.998, 1, 50)
    assert p.log_snr(times).isnan().sum() == 0 and (p.alpha(times).diff() < 0).all()
    torch.testing.assert_close(p.time_at(p.log_snr(times)), as_time(times))


@pytest.mark.parametrize(
    "alphas", [[], [0.9], [0.5, 0.9], [0.9, 0.9], [1.0, 0.5], [0.9, -0.1], [0.9, 0.0, 0.0], [[0.9, 0.5]]]
)
def test_bad_alphas_are_refused(alphas: list[float]) -> None:
    with pytest.raises(UserError, match="alphas_cumprod"):
        Discrete(torch.tensor(alphas))


def test_paths_are_values() -> None:
    others: list[Path] = [VP(), VP(0.1, 10)]
    assert Linear() == Linear() not in others and VP(0.1, 20) == VP() == others[0] != others[1]
    assert Discrete(ddpm()) == Discrete(ddpm().tolist()) != Discrete(ddpm(999))
    assert len({*PATHS, Linear(), VP(), Discrete(ddpm())}) == len(PATHS)
    assert repr(Discrete(ddpm())) == "Discrete(1000 alphas_cumprod, 0.9991 to 0.00466)"
    assert eval(repr(VP(0.3, 7.0))) == VP(0.3, 7.0)


@pytest.mark.parametrize("p", [Linear(), VP(), VP(0.05, 12.5), VP(1e-5, 1 / 3)], ids=str)
def test_names_read_back(p: Path) -> None:
    assert path(str(p)) == p


def test_names() -> None:
    assert (str(Linear()), str(VP()), str(VP(0.1, 12))) == ("linear", "vp", "vp(0.1,12)")
    assert path(" VP( 0.1, 20 ) ") == VP() and path("Linear") == Linear()
    discrete = PATHS[-1]
    assert path(discrete) is discrete


@pytest.mark.parametrize("name", ["", "cosine", "vp(", "vp(1)", "vp(1,2,3)", "vp(a,b)", "discrete(1000)", "linear()"])
def test_an_unknown_name_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(UserError, match="linear") as refused:
        path(name)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize("betas", [(0, 20), (-1, 20), (20, 0.1), (0.1, float("inf")), (float("nan"), 1)])
def test_bad_betas_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="beta_min"):
        VP(*betas)


@pytest.mark.parametrize("target", PATHS, ids=str)
@pytest.mark.parametrize("source", PATHS, ids=str)
def test_conversion_keeps_data_and_noise_and_comes_back(source: Path, target: Path) -> None:
    # Up to where the noisier end of either path is reached; VP(2, 2) stops at log-SNR -1.9.
    times = source.time_at(torch.linspace(9, -1.8, 7))
    generator = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(2, 7, 3, 2, 2, generator=generator, dtype=torch.float64)
    x = source.alpha(times)[:, None, None, None] * x0 + source.sigma(times)[:, None, None, None] * eps
    moved, t = convert(x, times, source, target)
    torch.testing.assert_close(
        moved, target.alpha(t)[:, None, None, None] * x0 + target.sigma(t)[:, None, None, None] * eps
    )
    torch.testing.assert_close(target.log_snr(t), source.log_snr(times))
    back, t_back = convert(moved, t, target, source)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(t_back, times)


@pytest.mark.parametrize("target", PATHS, ids=str)
@pytest.mark.parametrize("source", PATHS, ids=str)
def test_conversion_at_the_ends(source: Path, target: Path) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    clean, t = convert(x, 0.0, source, target)
    assert t == 0 and torch.equal(clean, x)
    noise, t = convert(x, 1.0, source, target)
    assert noise.isfinite().all() and 0 < t <= 1
    if source == Linear():  # whose t = 1 is noiser than any other's: still noise of std 1 there
        assert t == 1
        torch.testing.assert_close(noise, x)


def test_conversion_of_one_particle_and_of_times_per_particle() -> None:
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([0.2, 0.0, 1.0])
    together, t = convert(x, times, Linear(), VP())
    assert together.dtype == torch.float32 and t.dtype == torch.float64 and t.shape == (3,)
    for i in range(3):
        alone, t_alone = convert(x[i : i + 1], float(times[i]), Linear(), VP())
        torch.testing.assert_close(alone, together[i : i + 1])
        assert t_alone.shape == () and t_alone.item() == pytest.approx(t[i].item())
    same, t_same = convert(x, times, VP(), VP())
    assert same is x and torch.equal(t_same, times.double())


@pytest.mark.parametrize("world", [Gaussian, Mixture])
def test_a_flow_model_sampled_on_vp_sees_what_a_vp_model_sees(world: type[Gaussian] | type[Mixture]) -> None:
    flow, vp = world(path=Linear()), world(path=VP())
    cond = flow.encode("")
    bar = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = torch.tensor([0.05, 0.3, 0.5, 0.8, 1.0])
    y, t = convert(bar, s, VP(), Linear())
    x0 = flow.predict(y, t, cond)
    torch.testing.assert_close(x0, vp.predict(bar, s, cond))
    # The same in the closed form for a flow model's u: c = abar + sbar, t = sbar / c, y = xbar / c.
    c = VP().alpha(s) + VP().sigma(s)
    torch.testing.assert_close(t, VP().sigma(s) / c)
    torch.testing.assert_close(y, bar / c[:, None])
    u = (y - x0) / t[:, None]
    torch.testing.assert_close(y + (1 - t[:, None]) * u, eps_from(VP(), s, bar, x0))

"""Steps from one time of a path to an earlier one, and forward noising: pure functions of their arguments.

Every step is written in (x0, eps), so the same code serves flow and diffusion models on any path: with
eps = (x - alpha x0) / sigma, a kernel is just the three weights of

    x' = signal x0 + residual eps + fresh z,    z standard normal.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from math import hypot, log

import torch
from torch import Tensor

from imgscale.errors import UnknownName, UserError
from imgscale.paths import NUMBER, Path, Time, as_time, column, short

__all__ = ["DDIM", "ODE", "SDE", "Glass", "Kernel", "eps_from", "kernel", "renoise"]


def eps_from(path: Path, t: Time, x: Tensor, x0: Tensor) -> Tensor:
    """The noise in x (n, ...) beside x0: (x - alpha x0) / sigma, and 0 at t = 0, where there is none."""
    alpha, sigma = path.alpha(t), path.sigma(t)
    per_sigma = torch.where(sigma > 0, 1 / sigma, 0.0)
    return column(per_sigma, x) * (x - column(alpha, x) * x0)


def _renewed(path: Path, noisier: Tensor, cleaner: Tensor) -> Tensor:
    """The share of the noise at `noisier` that isn't already in x at `cleaner`: sqrt(1 - SNR / SNR').

    Equal infinite log-SNRs subtract to NaN; it is the same place, so nothing is renewed.
    """
    gap = (path.log_snr(noisier) - path.log_snr(cleaner)).nan_to_num(nan=0.0)
    return (-torch.expm1(gap.clamp(max=0.0))).sqrt()


def renoise(path: Path, t: Time, t_up: Time, x: Tensor, noise: Tensor) -> Tensor:
    """Forward noising, exact in distribution: x at t becomes x at t_up.

    Args:
        path: Where x lives.
        t: Times of x.
        t_up: Times to reach, >= t.
        x: (n, ...).
        noise: Standard normal, like x.

    Returns:
        (a'/a) x + sqrt(s'^2 - (a'/a)^2 s^2) noise, like x; x itself where t_up = t.

    Raises:
        ValueError: Not 0 <= t <= t_up <= 1.
    """
    t, t_up = as_time(t), as_time(t_up)
    _check_order(t_up, t)
    alpha = path.alpha(t)
    # Where alpha = 0, x is pure noise already and t_up is t.
    keep = torch.where(alpha > 0, path.alpha(t_up) / alpha, 1.0)
    fresh = path.sigma(t_up) * _renewed(path, noisier=t_up, cleaner=t)
    return column(keep, x) * x + column(fresh, x) * noise


def _check_order(noisier: Tensor, cleaner: Tensor) -> None:
    if not bool(((cleaner >= 0) & (cleaner <= noisier) & (noisier <= 1)).all()):
        raise ValueError(
            f"Times must satisfy 0 <= cleaner <= noisier <= 1, but the noisier is {noisier.tolist()} and the "
            f"cleaner {cleaner.tolist()}: step from noisy to clean, and renoise from clean to noisy."
        )


class Kernel(ABC):
    """A transition of the sampler, without state; compares and hashes by value, and `kernel(str(k)) == k`."""

    @property
    @abstractmethod
    def stochastic(self) -> bool:
        """Whether two steps from one place can differ: what a search over transitions needs."""

    @property
    def evaluations(self) -> int:
        """Model evaluations within one transition, besides the one at its end."""
        return 0

    def walk(
        self, path: Path, t: float, t_next: float, x: Tensor, x0: Tensor, noise: Tensor | None = None
    ) -> Generator[tuple[Tensor, float], Tensor, Tensor]:
        """One step as a generator, for kernels that ask the model on their way: yields (x, t), is sent x0 there.

        As `__call__`, with one time for the whole batch; returns x at t_next.
        """
        return self(path, t, t_next, x, x0, noise)
        yield  # a generator that asks nothing

    @abstractmethod
    def weights(self, path: Path, t: Tensor, t_next: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(signal, residual, fresh) of the step from t > 0 to t_next, each float64 shaped like the times.

        fresh is 0 where t_next = 0: the last transition is deterministic.
        """

    def __call__(self, path: Path, t: Time, t_next: Time, x: Tensor, x0: Tensor, noise: Tensor | None = None) -> Tensor:
        """One step from t down to t_next.

        Args:
            path: Where x lives.
            t: Times of x.
            t_next: Times to reach, 0 <= t_next <= t.
            x: (n, ...).
            x0: The model's estimate of the data at (x, t), like x.
            noise: Standard normal, like x. May be left out if nothing random happens.

        Returns:
            x at t_next, like x.

        Raises:
            ValueError: The times are out of order, or noise is missing.
        """
        t, t_next = as_time(t), as_time(t_next)
        _check_order(t, t_next)
        signal, residual, fresh = self.weights(path, t, t_next)
        stepped = column(signal, x) * x0 + column(residual, x) * eps_from(path, t, x, x0)
        if noise is not None and self.stochastic:
            return stepped + column(fresh, x) * noise
        if bool((fresh > 0).any()):
            raise ValueError(f"The kernel {self} needs noise to step to t = {t_next.tolist()}: pass it.")
        return stepped


@dataclass(frozen=True)
class ODE(Kernel):
    """The probability-flow ODE, exact for frozen x0 and eps: Euler on the linear path, DDIM on DDPM's."""

    @property
    def stochastic(self) -> bool:
        return False

    def weights(self, path: Path, t: Tensor, t_next: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        signal, residual = path.alpha(t_next), path.sigma(t_next)
        return signal, residual, torch.zeros_like(signal * t)

    def __str__(self) -> str:
        return "ode"


@dataclass(frozen=True)
class SDE(Kernel):
    """Euler-Maruyama on the reverse SDE with diffusion g(t) = scale * t^power.

        x' = x - [u + g^2 / (2 sigma) eps] D + g sqrt(D) z,    u = alpha_dot x0 + sigma_dot eps,  D = t - t'

    In few steps it adds more noise than it removes, and the model sees more than t says: `DDIM` never does.

    Args:
        scale: At least 0.
        power: At least 0.

    Source: Kim et al. 2025, RBF (arXiv 2503.19385), equation 9 and g(t) = 3 t^2.
    """

    scale: float = 3.0
    power: float = 2.0

    def __post_init__(self) -> None:
        if not (0 <= self.scale < float("inf") and 0 <= self.power < float("inf")):
            raise UserError(
                f"The SDE's g(t) = scale * t^power needs scale and power of at least 0, not {self.scale} and "
                f'{self.power}: the usual one is "sde(g=3t^2)".'
            )

    @property
    def stochastic(self) -> bool:
        return self.scale > 0

    def weights(self, path: Path, t: Tensor, t_next: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        last = t_next == 0
        span = t - t_next
        diffusion = self.scale * t**self.power
        sigma = path.sigma(t)
        signal = path.alpha(t) - path.alpha_dot(t) * span
        residual = sigma - (path.sigma_dot(t) + diffusion.square() / (2 * sigma)) * span
        return (
            torch.where(last, path.alpha(t_next), signal),
            torch.where(last, path.sigma(t_next), residual),
            torch.where(last, 0.0, diffusion * span.sqrt()),
        )

    def __str__(self) -> str:
        return f"sde(g={short(self.scale)}t^{short(self.power)})"


@dataclass(frozen=True)
class DDIM(Kernel):
    """DDIM with noise: leaves exactly the noise that the path has at t', whatever the step size.

        x' = a' x0 + sqrt(s'^2 - e^2) eps + e z,    e = eta s' sqrt(1 - (a s' / (a' s))^2)

    In few steps the samples vary too little, since x0 is the mean of the data that x allows, not a draw.

    Args:
        eta: In [0, 1]: 1 is ancestral sampling, 0 the ODE.

    Source: Song, Meng and Ermon 2021 (arXiv 2010.02502), equations 12 and 16, on any path.
    """

    eta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise UserError(f'The eta of DDIM must be from 0 to 1, not {self.eta}: try "ddim(1)".')

    @property
    def stochastic(self) -> bool:
        return self.eta > 0

    def weights(self, path: Path, t: Tensor, t_next: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sigma = path.sigma(t_next)
        share = self.eta * _renewed(path, noisier=t, cleaner=t_next)
        return path.alpha(t_next), sigma * (1 - share.square()).sqrt(), sigma * share

    def __str__(self) -> str:
        return f"ddim({short(self.eta)})"


@dataclass(frozen=True)
class Glass(Kernel):
    """The stochastic transition itself, sampled by an inner ODE of the same model.

    The law of x' given x is that of m x + y with y = b x0 + c z and x0 ~ p(x0 | x), where, with the share h of the
    noise that `DDIM` renews, m = sqrt(1 - h^2) s' / s, b = a' - a m and c = s' h. `DDIM` puts the mean of x0 there;
    here y is drawn: it flows from pure noise n at u = 1 to y at u = 0 as

        y_u = (1 - u) y + u n = B x0 + C z,    B = (1 - u) b,    C^2 = (1 - u)^2 c^2 + u^2,

    by DDIM steps along u, frozen between at D = E[x0 | x, y_u]. The noises of x and y_u are independent, so that both
    are one measurement of x0, of mean (a x / s^2 + B y_u / C^2) / SNR and SNR = a^2 / s^2 + B^2 / C^2: the model is
    asked at the time of that SNR. At u = 1, D is the x0 at hand.

    Args:
        steps: Of the inner ODE, at least 1; all but the first cost a model evaluation. One step is `DDIM`.
        eta: As of `DDIM`.

    Source: GLASS Flows (arXiv 2509.25170), here on any path.
    """

    steps: int = 4
    eta: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.eta <= 1:
            raise UserError(
                f"glass can't have {self.steps} steps and eta {self.eta}; it needs 1 step or more and an eta from 0 to"
                ' 1, such as "glass(4)".'
            )

    @property
    def stochastic(self) -> bool:
        return self.eta > 0

    @property
    def evaluations(self) -> int:
        return self.steps - 1 if self.stochastic else 0

    def weights(self, path: Path, t: Tensor, t_next: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those of its single step, which is all that can be done without the model."""
        return DDIM(self.eta).weights(path, t, t_next)

    def walk(
        self, path: Path, t: float, t_next: float, x: Tensor, x0: Tensor, noise: Tensor | None = None
    ) -> Generator[tuple[Tensor, float], Tensor, Tensor]:
        if t_next == 0 or not self.stochastic:
            return self(path, t, t_next, x, x0, noise)
        if noise is None:
            raise ValueError(f"The kernel {self} needs noise to step to t = {t_next}: pass it.")
        now, then = as_time(t), as_time(t_next)
        _check_order(now, then)
        alpha, sigma = float(path.alpha(now)), float(path.sigma(now))
        _, residual, fresh = self.weights(path, now, then)
        m, c = float(residual) / sigma, float(fresh)
        b = float(path.alpha(then)) - alpha * m
        snr_x = (alpha / sigma) ** 2
        y, signal, scale = noise, 0.0, 1.0  # B and C at u = 1
        for u in (1 - k / self.steps for k in range(1, self.steps + 1)):
            next_signal, next_scale = (1 - u) * b, hypot((1 - u) * c, u)
            y = next_signal * x0 + next_scale / scale * (y - signal * x0)
            signal, scale = next_signal, next_scale
            if u > 1e-9:
                snr = snr_x + (signal / scale) ** 2
                place = float(path.time_at(log(snr))) if snr > 0 else t
                measured = (alpha / sigma**2 * x + signal / scale**2 * y) * (float(path.alpha(place)) / snr)
                x0 = yield measured, place
        return m * x + y

    def __str__(self) -> str:
        return f"glass({self.steps})" if self.eta == 1 else f"glass({self.steps},{short(self.eta)})"


def kernel(name: str | Kernel) -> Kernel:
    """The kernel of a short name; a kernel comes back as it is.

    "ode"; "sde", "sde(g=3t)", "sde(g=3t^2)", "sde(g=2)"; "ddim", "ddim(0.5)"; "glass", "glass(4)", "glass(4,0.5)".

    Raises:
        UserError: The name is none of these, or its number is out of range.
    """
    if isinstance(name, Kernel):
        return name
    text = name.replace(" ", "").lower()
    if text == "ode":
        return ODE()
    if text == "sde":
        return SDE()
    if text == "ddim":
        return DDIM()
    if match := re.fullmatch(rf"sde\(g=({NUMBER})?\*?(?:(t)(?:(?:\^|\*\*)({NUMBER}))?)?\)", text):
        scale, has_t, power = match.groups()
        if scale or has_t:
            return SDE(float(scale or 1), float(power or 1) if has_t else 0.0)
    if match := re.fullmatch(rf"ddim\((?:eta=)?({NUMBER})\)", text):
        return DDIM(float(match[1]))
    if match := re.fullmatch(rf"glass(?:\((\d+)(?:,(?:eta=)?({NUMBER}))?\))?", text):
        return Glass(int(match[1] or 4), float(match[2] or 1))
    known = ["ode", "sde", "sde(g=3t)", "sde(g=3t^2)", "ddim", "ddim(0.5)", "glass", "glass(4)"]
    raise UnknownName("kernel", name, known)

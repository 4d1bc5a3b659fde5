"""Interpolants between data and noise: x_t = alpha(t) x0 + sigma(t) eps, with t = 1 noise and t = 0 data.

A path is a pair of curves and nothing else; the steps taken along one are in `imgscale.kernels`. Two paths at
equal log-SNR hold the same information about x0, so a model trained on one can be sampled on any: `convert`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from imgscale.errors import UnknownName, UserError

__all__ = [
    "NUMBER",
    "VP",
    "Discrete",
    "Linear",
    "Path",
    "Time",
    "as_time",
    "column",
    "convert",
    "path",
    "short",
]

Time = float | Tensor
"""A time in [0, 1]: a number for the whole batch, or a tensor (n,) with one time per particle."""


def as_time(t: Time) -> Tensor:
    """Times as float64 on the CPU, where all schedule arithmetic happens (MPS has no float64).

    Returns:
        A tensor () for a number, (n,) for a tensor (n,).
    """
    if isinstance(t, Tensor):
        return t.detach().cpu().double()
    return torch.tensor(t, dtype=torch.float64)


def column(coefficient: Tensor, like: Tensor) -> Tensor:
    """A coefficient () or (n,), on the device and in the dtype of `like` (n, ...), shaped to multiply it."""
    return coefficient.to(like.device, like.dtype).reshape(coefficient.shape + (1,) * (like.ndim - 1))


class Path(ABC):
    """An interpolant. Every method takes times and returns float64 on the CPU, of the same shape.

    Paths compare and hash by their parameters, and `path(str(p)) == p` for all but `Discrete`.
    """

    @abstractmethod
    def alpha(self, t: Time) -> Tensor:
        """Weight of the data: 1 at t = 0, decreasing."""

    @abstractmethod
    def sigma(self, t: Time) -> Tensor:
        """Weight of the noise: 0 at t = 0, increasing."""

    @abstractmethod
    def alpha_dot(self, t: Time) -> Tensor:
        """d alpha / dt."""

    @abstractmethod
    def sigma_dot(self, t: Time) -> Tensor:
        """d sigma / dt; infinite at t = 0 where sigma grows like a square root (VP)."""

    @abstractmethod
    def log_snr(self, t: Time) -> Tensor:
        """log(alpha^2 / sigma^2): +inf at t = 0, decreasing, and -inf at t = 1 if no data is left there."""

    @abstractmethod
    def time_at(self, log_snr: Time) -> Tensor:
        """The inverse of `log_snr`. An SNR below the path's lowest gives t = 1."""


@dataclass(frozen=True)
class Linear(Path):
    """The straight path of flow models: alpha = 1 - t, sigma = t."""

    def alpha(self, t: Time) -> Tensor:
        return 1 - as_time(t)

    def sigma(self, t: Time) -> Tensor:
        return as_time(t)

    def alpha_dot(self, t: Time) -> Tensor:
        return -torch.ones_like(as_time(t))

    def sigma_dot(self, t: Time) -> Tensor:
        return torch.ones_like(as_time(t))

    def log_snr(self, t: Time) -> Tensor:
        t = as_time(t)
        return 2 * (torch.log1p(-t) - t.log())

    def time_at(self, log_snr: Time) -> Tensor:
        return torch.sigmoid(-as_time(log_snr) / 2)

    def __str__(self) -> str:
        return "linear"


class _VariancePreserving(Path):
    """alpha^2 + sigma^2 = 1, so that the log-SNR says it all."""

    @abstractmethod
    def _decay(self, t: Tensor) -> Tensor:
        """-d log(alpha^2) / dt: the beta(t) of the forward process."""

    def alpha(self, t: Time) -> Tensor:
        return self.log_snr(t).sigmoid().sqrt()

    def sigma(self, t: Time) -> Tensor:
        return (-self.log_snr(t)).sigmoid().sqrt()

    def alpha_dot(self, t: Time) -> Tensor:
        return -self._decay(as_time(t)) * self.alpha(t) / 2

    def sigma_dot(self, t: Time) -> Tensor:
        return self._decay(as_time(t)) * self.alpha(t).square() / (2 * self.sigma(t))


@dataclass(frozen=True)
class VP(_VariancePreserving):
    """The variance-preserving path of score SDEs: alpha^2 = exp(-T), T(t) = t^2 (B - b) / 2 + b t.

    About .7% of the data is left at t = 1 with the default betas.

    Args:
        beta_min: b > 0, the rate of the forward process at t = 0.
        beta_max: B >= b, the rate at t = 1.

    Source: Song et al. 2021 (arXiv 2011.13456), equation 32.
    """

    beta_min: float = 0.1
    beta_max: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.beta_min <= self.beta_max < float("inf"):
            raise UserError(
                f"A VP path needs 0 < beta_min <= beta_max, not {self.beta_min} and {self.beta_max}: "
                'swap or raise them, or take the usual "vp(0.1,20)".'
            )

    def _decay(self, t: Tensor) -> Tensor:
        return self.beta_min + t * (self.beta_max - self.beta_min)

    def log_snr(self, t: Time) -> Tensor:
        t = as_time(t)
        total = t.square() * (self.beta_max - self.beta_min) / 2 + self.beta_min * t
        return -total - (-torch.expm1(-total)).log()

    def time_at(self, log_snr: Time) -> Tensor:
        # logaddexp(0, -l) is T = -log(snr^2 / (1 + snr^2)) without overflow; the quadratic is solved in the
        # form that neither cancels at small T nor divides by B - b. T = inf gives inf / inf, which is t = 1.
        total = torch.logaddexp(torch.zeros((), dtype=torch.float64), -as_time(log_snr))
        b, slope = self.beta_min, self.beta_max - self.beta_min
        return (2 * total / (b + (b * b + 2 * slope * total).sqrt())).nan_to_num(nan=1.0).clamp(max=1.0)

    def __str__(self) -> str:
        return "vp" if self == VP() else f"vp({short(self.beta_min)},{short(self.beta_max)})"


class Discrete(_VariancePreserving):
    """The path of a DDPM-style model: alpha^2 = alphas_cumprod[i] at t = (i + 1) / T, for i = 0 … T - 1.

    The log-SNR is linear in i between the model's timesteps. Between the first one and clean data at t = 0,
    sigma / alpha is linear in t. A last value of 0 (zero terminal SNR) is kept exactly.

    Args:
        alphas_cumprod: (T,), T >= 2, strictly decreasing within [0, 1); only the last may be 0.
    """

    def __init__(self, alphas_cumprod: Iterable[float] | Tensor) -> None:
        values = (
            alphas_cumprod
            if isinstance(alphas_cumprod, Tensor)
            else torch.tensor([*alphas_cumprod], dtype=torch.float64)
        )
        table = values.detach().cpu().double().clone()
        inside = table.ndim == 1 and len(table) >= 2 and bool((table[:-1] > 0).all() and table[-1] >= 0)
        if not inside or not table[0] < 1 or not bool((table.diff() < 0).all()):
            raise UserError(
                "A discrete path needs at least 2 alphas_cumprod that decrease strictly within [0, 1), not "
                f"{table.flatten()[:4].tolist()}… of shape {tuple(table.shape)}: take the scheduler's."
            )
        self._values: tuple[float, ...] = tuple(table.tolist())
        self._last = table[-1].logit()
        # -inf can't be interpolated: the last segment runs to a quarter of the SNR before, and its end jumps.
        table[-1] = torch.where(table[-1] > 0, table[-1], table[-2] / 4)
        self._log_snr = table.logit()
        self._hash = hash(self._values)

    @property
    def steps(self) -> int:
        """T, the number of the model's own timesteps."""
        return len(self._values)

    def index(self, t: Time) -> Tensor:
        """The model's timestep i in [0, T - 1] at time t, possibly fractional; 0 below the first.

        Whole timesteps come back exact, so that truncating to an integer is safe.
        """
        return self._position(as_time(t)).clamp(min=0)

    def time(self, index: Time) -> Tensor:
        """The time (i + 1) / T of the model's timestep i, possibly fractional."""
        return (as_time(index) + 1) / self.steps

    def _position(self, t: Tensor) -> Tensor:
        position = t * self.steps - 1
        whole = position.round()
        return torch.where((position - whole).abs() < 1e-6, whole, position)

    def _upper(self, position: Tensor) -> Tensor:
        """The end of the segment below `position`, which is where a step down will lead."""
        return position.ceil().clamp(1, self.steps - 1).long()

    def log_snr(self, t: Time) -> Tensor:
        t = as_time(t)
        position = self._position(t)
        upper = self._upper(position)
        start, end = self._log_snr[upper - 1], self._log_snr[upper]
        between = start + (position - (upper - 1)) * (end - start)
        clean = self._log_snr[0] - 2 * (t * self.steps).log()
        inner = torch.where(position < 0, clean, between)
        return torch.where(position >= self.steps - 1, self._last, inner)

    def _decay(self, t: Tensor) -> Tensor:
        upper = self._upper(self._position(t))
        slope = (self._log_snr[upper - 1] - self._log_snr[upper]) * self.steps
        return torch.where(self._position(t) <= 0, 2 / t, slope) * self.sigma(t).square()

    def alpha_dot(self, t: Time) -> Tensor:
        return super().alpha_dot(self._off_zero(t))

    def sigma_dot(self, t: Time) -> Tensor:
        return super().sigma_dot(self._off_zero(t))

    def _off_zero(self, t: Time) -> Tensor:
        return as_time(t).clamp(min=1e-12)  # the limits at 0 are finite here, but read 0 / 0

    def time_at(self, log_snr: Time) -> Tensor:
        log_snr = as_time(log_snr)
        clean = ((self._log_snr[0] - log_snr) / 2).exp() / self.steps
        upper = torch.searchsorted(-self._log_snr, -log_snr).clamp(1, self.steps - 1)
        start, end = self._log_snr[upper - 1], self._log_snr[upper]
        position = upper - 1 + (log_snr - start) / (end - start)
        return torch.where(log_snr > self._log_snr[0], clean, self.time(position).clamp(max=1.0))

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, Discrete) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Discrete({self.steps} alphas_cumprod, {self._values[0]:.4g} to {self._values[-1]:.4g})"

    def __str__(self) -> str:
        return f"discrete({self.steps})"


def path(name: str | Path) -> Path:
    """The path of a short name: "linear", "vp" or "vp(0.1,20)"; a path comes back as it is.

    Raises:
        UserError: The name is none of these. A `Discrete` path has no name, since it belongs to a model.
    """
    if isinstance(name, Path):
        return name
    text = name.replace(" ", "").lower()
    if text == "linear":
        return Linear()
    if text == "vp":
        return VP()
    if betas := re.fullmatch(rf"vp\(({NUMBER}),({NUMBER})\)", text):
        return VP(float(betas[1]), float(betas[2]))
    raise UnknownName("path", name, ["linear", "vp", "vp(0.1,20)"], "Leave it out for the model's own path.")


NUMBER = r"\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?"


def short(value: float) -> str:
    """The shortest text of a number that reads back as itself: "20", "0.1"."""
    return repr(float(value)).removesuffix(".0")


def convert(x: Tensor, t: Time, source: Path, target: Path) -> tuple[Tensor, Tensor]:
    """The same noisy latents on another path: equal log-SNR and a rescale.

    Where `target` at t = 1 keeps more of the data than x holds, x becomes its t = 1: prior noise stays as is.

    Args:
        x: (n, ...) on `source`.
        t: Times on `source`.

    Returns:
        x on `target` in the dtype of x, and its times, float64 of the shape of t.
    """
    if source == target:
        return x, as_time(t)
    moved = target.time_at(source.log_snr(t))
    return column(_norm(target, moved) / _norm(source, t), x) * x, moved


def _norm(path: Path, t: Time) -> Tensor:
    """Of (alpha, sigma), never 0. At equal SNR a'/a = s'/s is the ratio of any two such norms."""
    return torch.hypot(path.alpha(t), path.sigma(t))

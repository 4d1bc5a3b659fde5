"""Test doubles with the interface of `imgscale.denoiser.Denoiser` and a closed-form E[x0 | x_t].

A searcher, kernel or engine run on one of these can be checked against the truth: exact samples, moments and
weights. Prompts matter only through `shifts`, which moves all the data of a prompt by a constant, so that a
test can see whether rows of different prompts were mixed up.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.keys import normal
from imgscale.paths import Discrete, Linear, Path, Time, as_time, column


@dataclass(frozen=True)
class Condition:
    """What a world knows of a prompt, or of the prompts of each row once stacked."""

    prompt: str
    height: int
    width: int
    latent_shape: tuple[int, ...]
    shifts: tuple[float, ...] = (0.0,)  # one for all rows, or one per row
    negative_prompt: str | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Conditions of equal key may share a batch."""
        return self.height, self.width

    def at(self, indices: Sequence[int]) -> "Condition":
        """The condition of some rows of the batch."""
        return replace(self, shifts=tuple(self.shifts[i] for i in indices)) if len(self.shifts) > 1 else self

    @staticmethod
    def stack(conditions: Sequence["Condition"], counts: Sequence[int]) -> "Condition":
        """One condition for a batch whose first counts[0] rows belong to conditions[0], and so on."""
        first = conditions[0]
        if any(condition.key != first.key for condition in conditions):
            raise ValueError(f"Can't stack conditions of keys {[c.key for c in conditions]}: group them by key.")
        rows = [s for c, n in zip(conditions, counts, strict=True) for s in c.shifts * (n // len(c.shifts))]
        prompt = " | ".join(dict.fromkeys(condition.prompt for condition in conditions))
        return Condition(prompt, first.height, first.width, first.latent_shape, tuple(rows))


class World(ABC):
    """Data of a known law under a model that is perfect on `path`.

    Args:
        shape: Of one latent: (d,), or (3, h, w).
        path: The model's own.
        shifts: What to add to every coordinate of the data for a prompt (0 for those not named).

    Attributes:
        evaluations: Model evaluations so far, one per row.
        batches: The number of rows of each `predict` call.
    """

    mixed_times = True
    vae: Any = None
    guidance: str | None = None
    guidance_default: float | None = None
    steps_default = 10
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self, shape: tuple[int, ...], path: Path | None = None, shifts: Mapping[str, float] | None = None
    ) -> None:
        self.shape = shape
        self.path = path or Linear()
        self.shifts = dict(shifts or {})
        self.batches: list[int] = []

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def description(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "path": str(self.path)}

    @property
    def evaluations(self) -> int:
        return sum(self.batches)

    @property
    def size(self) -> int:
        """d, the number of coordinates of a latent."""
        return torch.Size(self.shape).numel()

    @abstractmethod
    def posterior_mean(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """E[x0 | alpha x0 + sigma eps = x] for x float64 (n, d), with alpha and sigma (n, 1)."""

    @abstractmethod
    def data(self, n: int, seed: int = 0) -> Tensor:
        """n exact samples without shift, float64 (n, d)."""

    def encode(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        **extra: Any,
    ) -> Condition:
        if extra:
            raise UserError(f"{self.name} has no option {sorted(extra)[0]!r}: leave it out.")
        rows, columns = self.shape[-2:] if len(self.shape) == 3 else (1, self.size)
        size = f"{height or rows} x {width or columns}"
        if size != f"{rows} x {columns}":
            raise UserError(f"{self.name} draws {rows} x {columns} images only, not {size}: ask for that.")
        return Condition(
            prompt,
            rows,
            columns,
            self.shape,
            (self.shifts.get(prompt, 0.0),),
            negative_prompt=negative_prompt,
        )

    def prior(self, keys: Tensor, cond: Condition) -> Tensor:
        return normal(keys, self.shape)

    def grid(self, steps: int, cond: Condition) -> Tensor:
        """Uniform own-path times from 1 to 0; a discrete path's are whole timesteps."""
        times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        return (times * self.path.steps).round() / self.path.steps if isinstance(self.path, Discrete) else times

    def predict(self, x: Tensor, t: Time, cond: Condition) -> Tensor:
        self.batches.append(len(x))
        shift = column(torch.tensor(cond.shifts, dtype=torch.float64), x.double())
        alpha = column(self.path.alpha(t).expand(len(x)), x.double())
        flat = (x.double() - alpha * shift).flatten(1)
        alpha, sigma = (curve.expand(len(x))[:, None] for curve in (self.path.alpha(t), self.path.sigma(t)))
        x0 = torch.where(as_time(t).expand(len(x))[:, None] > 0, self.posterior_mean(flat, alpha, sigma), flat)
        return (x0.reshape(x.shape) + shift).to(x.dtype)

    def decode(self, x0: Tensor, cond: Condition, preview: Any = None) -> Tensor:
        """The sigmoid of x0; a latent (d,) becomes a grey row of d pixels. A preview decoder sees x0 itself."""
        if preview is not None:
            (images,) = preview.decode(x0)
            return images  # type: ignore[no-any-return]
        if len(self.shape) == 3:
            return x0.float().sigmoid()
        return x0.float().sigmoid()[:, None, None, :].expand(-1, 3, -1, -1)


class Gaussian(World):
    """x0 ~ N(mean, cov).

    Args:
        mean: (d,), or a number for all coordinates.
        cov: (d, d), or the variance of all coordinates.
        shape: Of one latent, of d coordinates.
    """

    def __init__(
        self,
        mean: Tensor | float = 0.5,
        cov: Tensor | float = 0.09,
        shape: tuple[int, ...] = (2,),
        path: Path | None = None,
        shifts: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(shape, path, shifts)
        self.mean = torch.as_tensor(mean, dtype=torch.float64).expand(self.size)
        cov = torch.as_tensor(cov, dtype=torch.float64)
        self.cov = cov if cov.ndim else cov * torch.eye(self.size, dtype=torch.float64)
        self.variances, self.axes = torch.linalg.eigh(self.cov)

    def posterior_mean(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        gain = alpha * self.variances / (alpha.square() * self.variances + sigma.square())
        x0: Tensor = self.mean + ((x - alpha * self.mean) @ self.axes * gain) @ self.axes.T
        return x0

    def data(self, n: int, seed: int = 0) -> Tensor:
        z = torch.randn(n, self.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        samples: Tensor = self.mean + z * self.variances.sqrt() @ self.axes.T
        return samples


class Mixture(World):
    """x0 ~ sum_k weights[k] N(means[k], std^2 I).

    Args:
        means: (k, d); by default two modes at -1 and +1 in every coordinate.
        weights: (k,), of sum 1.
        std: Of every mode and coordinate.
        shape: Of one latent, of d coordinates.
    """

    def __init__(
        self,
        means: Tensor | None = None,
        weights: Sequence[float] = (0.3, 0.7),
        std: float = 0.25,
        shape: tuple[int, ...] = (2,),
        path: Path | None = None,
        shifts: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(shape, path, shifts)
        ones = torch.ones(self.size, dtype=torch.float64)
        self.means = torch.stack([-ones, ones]) if means is None else means.double()
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.std = std

    @property
    def mean(self) -> Tensor:
        return self.weights @ self.means

    @property
    def cov(self) -> Tensor:
        centred = self.means - self.mean
        return centred.T @ (self.weights[:, None] * centred) + self.std**2 * torch.eye(self.size).double()

    def posterior_mean(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        total = alpha.square() * self.std**2 + sigma.square()  # the variance of each mode at this time
        offsets = x[:, None] - alpha[..., None] * self.means
        mode = (self.weights.log() - offsets.square().sum(-1) / (2 * total)).softmax(-1)
        x0: Tensor = mode @ self.means + alpha * self.std**2 / total * (mode[..., None] * offsets).sum(1)
        return x0

    def data(self, n: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        modes = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        z = torch.randn(n, self.size, generator=generator, dtype=torch.float64)
        return self.means[modes] + self.std * z

    def mode_of(self, x0: Tensor) -> Tensor:
        """The nearest mode of each sample (n, ...), int64 (n,)."""
        return torch.cdist(x0.double().flatten(1), self.means).argmin(1)

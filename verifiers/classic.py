"""Classic measures of a picture alone, without weights: how sharp it is, and how small JPEG makes it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.verifiers._network import check

LUMA = 0.299, 0.587, 0.114  # of red, green, blue (ITU-R BT.601)
LAPLACE = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))
SOBEL = ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0))


@verifier("sharpness", cite=("pechpacheco2000diatom", "pertuz2013focus"))
class Sharpness:
    """How sharp a picture is: the variance of its Laplacian, or its mean squared gradient. Noise counts as sharp, too.

    Args:
        measure: "laplacian": the variance over the pixels of the Laplacian of the luma (Pech-Pacheco et al. 2000; LAPV
            of Pertuz et al. 2013). "tenengrad": the mean over the pixels of the squared Sobel gradient of the luma
            (TENG there). Borders are repeated.
    """

    name = "sharpness"
    range: tuple[float, float]
    reads_prompt = False
    differentiable = True
    licence = "none"

    def __init__(self, *, measure: Literal["laplacian", "tenengrad"] = "laplacian") -> None:
        self.measure = measure
        # A Laplacian of values in [0, 1] lies in [-4, 4]; of nine such values, no squared Sobel gradient exceeds 20.
        self.range = (0.0, 16.0) if measure == "laplacian" else (0.0, 20.0)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1]: float32 ``(n,)``, at least 0. Gradients reach the images."""
        check("sharpness", images, prompts)
        luma = torch.einsum("nchw,c->nhw", images.float(), torch.tensor(LUMA, device=images.device))[:, None]
        if not len(images):
            return torch.zeros(0, device=images.device)
        luma = functional.pad(luma, (1, 1, 1, 1), mode="replicate")
        if self.measure == "laplacian":
            return functional.conv2d(luma, _kernel(LAPLACE, luma)).flatten(1).var(1, correction=0)
        across = _kernel(SOBEL, luma)
        edges = functional.conv2d(luma, torch.cat([across, across.mT]))
        return edges.square().sum(1).flatten(1).mean(1)

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: there is no checkpoint, only this rule."""
        return {"name": "sharpness", "source": "imgscale.verifiers.classic", "measure": self.measure, "luma": LUMA}


@verifier("jpeg", cite="black2024ddpo")
class Jpeg:
    """How small a picture is as a JPEG, or how large: compressibility and its opposite (Black et al. 2024).

    Args:
        direction: "compressibility": minus the size, so that plain pictures score high. "incompressibility": the size,
            so that detailed ones do.
        quality: Of the JPEG, from 1 to 95.

    Raises:
        UserError: There is no such quality.
    """

    name = "jpeg"
    range = None
    reads_prompt = False
    differentiable = False
    licence = "none"

    def __init__(
        self,
        *,
        direction: Literal["compressibility", "incompressibility"] = "compressibility",
        quality: int = 95,
    ) -> None:
        if not 1 <= quality <= 95:
            raise UserError(f"jpeg's quality can't be {quality!r}; give a whole number from 1 to 95.")
        self.direction, self.quality = direction, quality

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1]: float32 ``(n,)`` in kilobytes (1000 bytes), with a sign."""
        check("jpeg", images, prompts)
        pixels = (images.detach().float().clamp(0, 1) * 255).round().to("cpu", torch.uint8).permute(0, 2, 3, 1)
        sign = -1 if self.direction == "compressibility" else 1
        sizes = [sign * self._size(np.ascontiguousarray(one)) / 1000 for one in pixels.numpy()]
        return torch.tensor(sizes, dtype=torch.float32, device=images.device)

    def _size(self, pixels: np.ndarray[Any, Any]) -> int:
        """Bytes of the JPEG, which is made in memory."""
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=self.quality)
        return file.tell()

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: there is no checkpoint, only this rule and the library's JPEG."""
        rule = {"direction": self.direction, "quality": self.quality}
        return {"name": "jpeg", "source": "imgscale.verifiers.classic", **rule, "encoder": f"Pillow {PIL.__version__}"}


def _kernel(rows: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)[None, None]

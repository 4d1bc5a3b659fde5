"""Sharpness and JPEG size, against plain computations and on pictures whose order is known."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from scipy import ndimage
from torch import Tensor

from imgscale import registry
from imgscale.errors import UserError
from imgscale.verifiers.classic import Jpeg, Sharpness

LUMA = np.array([0.299, 0.587, 0.114])
EDGES = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
VERIFIERS: list[Any] = [
    Sharpness(),
    Sharpness(measure="tenengrad"),
    Jpeg(),
    Jpeg(direction="incompressibility", quality=50),
]


def pictures(n: int, h: int = 32, w: int = 32) -> Tensor:
    return torch.randint(0, 256, (n, 3, h, w)) / 255


def lumas(images: Tensor) -> list[Any]:
    return [image.double().permute(1, 2, 0).numpy() @ LUMA for image in images]


# ------------------------------------------------------------------------------------- against plain computations


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    images = pictures(3, 17, 30)
    expected = [ndimage.laplace(luma, mode="nearest").var() for luma in lumas(images)]
    assert Sharpness()(images, [""] * 3).tolist() == pytest.approx(expected, rel=1e-5)


def test_tenengrad_is_the_mean_squared_sobel_gradient() -> None:
    images = pictures(3, 17, 30)
    expected = [
        np.mean(sum(ndimage.correlate(luma, kernel, mode="nearest") ** 2 for kernel in (EDGES, EDGES.T)))
        for luma in lumas(images)
    ]
    assert Sharpness(measure="tenengrad")(images, [""] * 3).tolist() == pytest.approx(expected, rel=1e-5)


def test_no_gradient_exceeds_the_range() -> None:
    """The square is convex in the nine values, so that it is largest where each is 0 or 1."""
    corners = np.array(list(itertools.product((0, 1), repeat=9))).reshape(-1, 3, 3)
    largest = max(float((c * EDGES).sum() ** 2 + (c * EDGES.T).sum() ** 2) for c in corners)
    assert Sharpness(measure="tenengrad").range == (0, largest)
    board = torch.tensor(np.indices((8, 8)).sum(0) % 2, dtype=torch.float32).expand(1, 3, 8, 8)
    for verifier in VERIFIERS[:2]:
        assert 0 <= float(verifier(board, [""])) <= verifier.range[1]
    inner = 16 * 36 / 64  # a chequerboard's Laplacian is 4 or -4 but at the border
    assert inner < float(Sharpness()(board, [""])) < 16


@pytest.mark.parametrize("quality", [95, 30])
def test_jpeg_is_the_size_of_the_file(quality: int) -> None:
    images = pictures(3, 24, 40)
    expected = []
    for image in images:
        file = io.BytesIO()
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(file, format="JPEG", quality=quality)
        expected.append(len(file.getvalue()) / 1000)
    assert Jpeg(direction="incompressibility", quality=quality)(images, [""] * 3).tolist() == pytest.approx(expected)
    assert Jpeg(quality=quality)(images, [""] * 3).tolist() == pytest.approx([-size for size in expected])


# ------------------------------------------------------------------------------------------------- what they order


def test_blur_costs_sharpness_and_makes_files_small() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    blurred = [np.asarray(noise.filter(ImageFilter.GaussianBlur(radius))) for radius in (0, 1, 2, 4)]
    images = torch.tensor(np.stack(blurred)).permute(0, 3, 1, 2) / 255
    for verifier, sign in zip(VERIFIERS, (1, 1, -1, 1), strict=True):
        scores = sign * verifier(images, [""] * 4)
        assert (scores.diff() < 0).all(), verifier.identity()


def test_a_plain_picture_has_no_sharpness() -> None:
    flat = torch.full((1, 3, 9, 9), 0.3)
    assert Sharpness()(flat, [""]).item() == pytest.approx(0, abs=1e-10)
    assert Sharpness(measure="tenengrad")(flat, [""]).item() == pytest.approx(0, abs=1e-10)


# ----------------------------------------------------------------------------------------------------- conformance


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda v: f"{v.name}-{getattr(v, 'measure', '')}")
def test_conforms(verifier: Any) -> None:
    images = pictures(5, 20, 33)
    together = verifier(images, ["a"] * 5)
    assert together.shape == (5,) and together.dtype == torch.float32 and together.isfinite().all()
    alone = torch.cat([verifier(image[None], ["b"]) for image in images])
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(verifier(images.flip(0), [""] * 5), together.flip(0))
    torch.testing.assert_close(verifier(images.double(), [""] * 5), together)
    assert verifier(pictures(0), []).shape == (0,)
    for odd in (torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 2, 70)):
        assert verifier(odd, [""]).isfinite().all()
    with pytest.raises(UserError, match="each for its own prompt"):
        verifier(images, ["a"])
    assert not verifier.reads_prompt and verifier.licence == "none"
    json.dumps(verifier.identity())


@pytest.mark.parametrize("measure", ["laplacian", "tenengrad"])
def test_gradients_of_sharpness_are_right(measure: Any) -> None:
    verifier = Sharpness(measure=measure)
    images = pictures(2, 6, 7).requires_grad_()
    verifier(images, ["", ""]).sum().backward()
    assert images.grad is not None
    step = torch.randn(2, 3, 6, 7) * 1e-3
    with torch.no_grad():
        change = verifier(images + step, ["", ""]) - verifier(images - step, ["", ""])
    expected = 2 * (images.grad * step).flatten(1).sum(1)
    torch.testing.assert_close(change, expected, rtol=2e-2, atol=1e-5)
    assert verifier.differentiable


def test_options_and_identity() -> None:
    entry, options = registry.verifier.resolve("jpeg(direction=incompressibility, quality=80)")
    made = entry.target(**options)
    assert made.identity()["quality"] == 80 and made.identity()["direction"] == "incompressibility"
    entry, options = registry.verifier.resolve("sharpness(measure=tenengrad)")
    assert entry.target(**options).identity()["measure"] == "tenengrad"
    with pytest.raises(UserError, match="quality can't be 101; give a whole number from 1 to 95"):
        Jpeg(quality=101)
    with pytest.raises(UserError, match="'laplacian' or 'tenengrad'"):
        registry.verifier.resolve("sharpness(measure=sobel)")

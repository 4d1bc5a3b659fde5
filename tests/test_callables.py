"""Any callable as a verifier, and the two uses of `imgscale.verifier`."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import imgscale
from imgscale import registry
from imgscale.callables import Function
from imgscale.errors import UserError
from imgscale.verification import make


def redness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """How red."""
    return images[:, 0].mean((1, 2)).double()


PROMPTS = ["a", "b", "c"]


@pytest.mark.parametrize(
    "function",
    [
        redness,
        lambda images, prompts: redness(images, prompts).tolist(),
        lambda images, prompts: list(redness(images, prompts)),
        lambda images, prompts: tuple(redness(images, prompts).numpy()),
        lambda images, prompts: redness(images, prompts).numpy(),
        lambda images, prompts: redness(images, prompts).half(),
        functools.partial(redness),
    ],
    ids=["tensor", "list", "list of tensors", "tuple of numpy", "array", "half", "partial"],
)
def test_whatever_it_returns_becomes_float32_scores(function: Any) -> None:
    images = torch.rand(3, 3, 4, 5)
    scores = imgscale.verifier(function)(images, PROMPTS)
    assert scores.dtype == torch.float32 and scores.shape == (3,)
    torch.testing.assert_close(scores, images[:, 0].mean((1, 2)), atol=1e-3, rtol=0)


def test_an_array_is_copied() -> None:
    """A function may hand out the same buffer each time."""
    buffer = np.zeros(2, np.float32)

    def reused(images: Tensor, prompts: Sequence[str]) -> Any:
        buffer[:] = images.mean((1, 2, 3)).numpy()
        return buffer

    made = imgscale.verifier(reused)
    first = made(torch.ones(2, 3, 2, 2), ["", ""])
    made(torch.zeros(2, 3, 2, 2), ["", ""])
    assert first.tolist() == [1, 1]


def test_no_images_are_no_scores_and_no_call() -> None:
    def fails(images: Tensor, prompts: Sequence[str]) -> list[float]:
        raise AssertionError("called")

    scores = imgscale.verifier(fails)(torch.zeros(0, 3, 4, 4), [])
    assert scores.shape == (0,) and scores.dtype == torch.float32


def test_says_of_itself_what_it_is_told() -> None:
    made = imgscale.verifier(redness, name="red", range=(0, 1), reads_prompt=False, differentiable=True)
    assert (made.name, made.range, made.reads_prompt, made.differentiable) == ("red", (0.0, 1.0), False, True)
    assert made.identity() == {"name": "red", "source": f"{__name__}.redness"}
    assert made.__doc__ == "How red."
    plain = imgscale.verifier(redness)
    assert (plain.name, plain.range, plain.reads_prompt, plain.differentiable) == ("redness", None, True, False)
    partial = imgscale.verifier(functools.partial(redness))
    assert partial.name == "partial" and partial.identity()["source"] == "functools.partial"
    json.dumps(made.identity())


def test_decorates_with_settings_and_without() -> None:
    @imgscale.verifier(range=(-1, 1), reads_prompt=False)
    def blueness(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images[:, 2].mean((1, 2))

    @imgscale.verifier
    def greenness(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images[:, 1].mean((1, 2))

    assert isinstance(blueness, Function) and blueness.name == "blueness" and blueness.range == (-1, 1)
    assert isinstance(greenness, Function) and greenness.name == "greenness"
    image = torch.tensor([0.0, 0.25, 0.5]).reshape(1, 3, 1, 1)
    assert blueness(image, [""]).item() == 0.5 and greenness(image, [""]).item() == 0.25


def test_gradients_reach_the_images_if_it_says_so() -> None:
    images = torch.rand(2, 3, 4, 4, requires_grad=True)
    imgscale.verifier(redness, differentiable=True)(images, PROMPTS[:2]).sum().backward()
    assert images.grad is not None and torch.allclose(images.grad[:, 0], torch.tensor(1 / 16))
    listed = imgscale.verifier(lambda images, prompts: [0.0] * len(images), name="flat", differentiable=True)
    with pytest.raises(TypeError, match="flat is said to be differentiable and returned list"):
        listed(images, PROMPTS[:2])


def test_a_made_verifier_passes_through_where_functions_do() -> None:
    made = imgscale.verifier(redness, name="red", range=(0, 1))
    assert make(made) is made
    found = make(redness)
    assert isinstance(found, Function) and found.name == "redness"


def test_a_name_registers_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.verifier, "_entries", dict(registry.verifier._entries))

    @imgscale.verifier("red-class", cite="key")
    class Red:
        """Redness."""

    assert isinstance(Red, type)
    assert registry.verifier["red-class"].target is Red and registry.verifier["red-class"].cite == ("key",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: imgscale.verifier(3), "The verifier can't be 3; give a name or a function"),  # type: ignore[call-overload]
        (lambda: imgscale.verifier(Function), "The verifier can't be <class"),
        (lambda: imgscale.verifier(redness, name=" "), "A verifier's name can't be ' '; give a text"),
        (lambda: imgscale.verifier(redness, range=(1, 0)), r"A verifier's range can't be \(1, 0\); give \(lowest,"),
        (lambda: imgscale.verifier(redness, range=5), "A verifier's range can't be 5"),  # type: ignore[call-overload]
        (lambda: imgscale.verifier(redness, range=(0, float("nan"))), "A verifier's range can't be"),
        (lambda: imgscale.verifier("red", range=(0, 1)), "range can't be set beside the name 'red'"),  # type: ignore[call-overload]
        (lambda: imgscale.verifier(redness, cite="key"), "cite goes with a name"),  # type: ignore[call-overload]
    ],
)
def test_what_can_not_be_is_explained(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


def test_the_name_stays_a_function_whatever_is_imported_first() -> None:
    """`imgscale.verifiers` is a package and `imgscale.registry.verifier` a registry: neither takes the name."""
    code = "import imgscale.verifiers.shapes, imgscale.scaler, imgscale; print(imgscale.verifier.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "imgscale.callables"

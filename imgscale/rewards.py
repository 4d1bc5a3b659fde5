"""Rewards: what a verifier is, and how one is asked so that whatever it does leaves the search alive."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from imgscale.errors import UserError


class Verifier(Protocol):
    """A reward: images float32 (n, 3, h, w) in [0, 1] and n prompts to float32 (n,), higher is better.

    Attributes:
        name: What it is called in results.
        range: Lowest and highest possible score, or None. A search ends when it reaches the highest.
        reads_prompt: Whether the prompts matter.
        differentiable: Whether gradients reach the images.
    """

    name: str
    range: tuple[float, float] | None
    reads_prompt: bool
    differentiable: bool

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores a batch: float32 (n,) on the images' device. It is told all images at once, and may not mix them."""

    def identity(self) -> dict[str, Any]:
        """What a record needs to name it, in values that JSON can hold: name, source, hash of the weights, settings."""


class Ensemble(Verifier, Protocol):
    """A verifier made of others, whose scores mean nothing alone: they tell the images of one search apart.

    Attributes:
        parts: The others.
    """

    parts: Sequence[Verifier]

    def combine(self, rows: Tensor, seen: Tensor) -> Tensor:
        """Scores float64 (n,) of images whose scores by the k parts are ``rows`` (n, k), among ``seen`` (m, k), which
        holds them.
        """


def is_ensemble(verifier: Verifier) -> TypeGuard[Ensemble]:
    return hasattr(verifier, "parts")


def panel(verifier: Verifier) -> Sequence[Verifier]:
    """The verifiers that look at images: an ensemble's parts, or the verifier itself."""
    return verifier.parts if is_ensemble(verifier) else (verifier,)


def preview_name(name: str) -> str:
    """What results call a verifier's score of the winner's preview."""
    return f"{name} (preview)"


def opinions(
    verifier: Verifier, images: Tensor, prompts: list[str], notice: Callable[[str], None], detach: bool = True
) -> Tensor:
    """What each of its judges says, by `judge`: float64 (n, judges)."""
    return torch.stack([judge(member, images, prompts, notice, detach) for member in panel(verifier)], 1)


def judge(
    verifier: Verifier, images: Tensor, prompts: list[str], notice: Callable[[str], None], detach: bool = True
) -> Tensor:
    """One batched verifier call: float64 (n,) on the CPU, −inf where it gave no number, NaN where it failed."""
    try:
        scores = verifier(images, prompts)
        if tuple(scores.shape) != (len(images),):
            raise ValueError(f"it returned shape {tuple(scores.shape)} for {len(images)} images")
    except UserError:
        raise
    except Exception as error:  # anything a verifier may do must leave the search alive
        if len(images) > 1 and is_out_of_memory(error):
            raise
        notice(f"The verifier {verifier.name} failed and cost its candidates −inf: {error!r}.")
        return torch.full((len(images),), math.nan, dtype=torch.float64)
    scores = (scores.detach() if detach else scores).to("cpu", torch.float64)
    if bool(scores.isnan().any()):
        notice(f"The verifier {verifier.name} gave NaN, which counts as −inf.")
    return scores.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)


def is_out_of_memory(error: Exception) -> bool:
    """CUDA has a class for it; MPS and the CPU's allocator only say so."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text


def timed(verifier: Verifier, seconds: float) -> Verifier:
    """The verifier, each call of which fails when it takes longer."""
    if not is_ensemble(verifier):
        return Timed(verifier, seconds)
    bounded = copy.copy(verifier)
    bounded.parts = tuple(timed(part, seconds) for part in verifier.parts)
    return bounded


class Timed:
    """A verifier that is given up on when a call takes too long.

    A call that hangs can't be ended from outside: it runs on in a thread of its own, and until it has come back every
    further call fails, too, after the same time.

    Args:
        verifier: Whose calls they are.
        seconds: What one call may take.
    """

    def __init__(self, verifier: Verifier, seconds: float) -> None:
        self._verifier, self._seconds = verifier, seconds
        self._running: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies ask before there is a verifier
            raise AttributeError(name)
        return getattr(self._verifier, name)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """What the verifier says.

        Raises:
            TimeoutError: It didn't within the time.
        """
        answers: list[Tensor] = []
        errors: list[BaseException] = []
        learning = torch.is_grad_enabled()  # which belongs to a thread

        def work() -> None:
            try:
                with torch.set_grad_enabled(learning):
                    answers.append(self._verifier(images, prompts))
            except BaseException as error:  # raised where the verifier was called
                errors.append(error)

        if self._running is not None:
            self._running.join(self._seconds)
        if self._running is None or not self._running.is_alive():
            self._running = threading.Thread(target=work, daemon=True)
            self._running.start()
            self._running.join(self._seconds)
        if self._running.is_alive():
            raise TimeoutError(f"it took longer than {self._seconds:g} s")
        self._running = None
        if errors:
            raise errors[0]
        return answers[0]

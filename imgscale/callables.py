"""Any callable as a verifier, and the public name `imgscale.verifier` with its two uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from imgscale import registry
from imgscale.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=Callable[..., Any])


class Function:
    """A callable as a verifier.

    Args:
        function: Takes images, float32 ``(n, 3, h, w)`` in [0, 1], and n prompts; returns n scores, higher is better,
            as a list, a numpy array or a tensor. It is not called for no images.
        name: What results call it; its own name, if None.
        range: Lowest and highest possible score, or None. A search ends when it reaches the highest.
        reads_prompt: Whether the prompts matter.
        differentiable: Whether gradients reach the images. It has to return a tensor then.

    Raises:
        UserError: It can't be called, or its name or range can't be.
    """

    licence = "none"

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        range: tuple[float, float] | None = None,
        reads_prompt: bool = True,
        differentiable: bool = False,
    ) -> None:
        if not callable(function) or isinstance(function, type):
            raise UserError(f"The verifier can't be {function!r}; give a name or a function of images and prompts.")
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise UserError(f"A verifier's name can't be {name!r}; give a text, or leave it out.")
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.range = None if range is None else _range(range)
        self.reads_prompt, self.differentiable = reads_prompt, differentiable
        self.__doc__ = function.__doc__

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1] for their ``n`` prompts: float32 ``(n,)`` on their device.

        Raises:
            TypeError: It says that it is differentiable and returned something that carries no gradient.
        """
        import numpy as np
        import torch

        if not len(images):
            return torch.zeros(0, device=images.device)
        scores = self.function(images, prompts)
        if isinstance(scores, torch.Tensor):
            return scores.to(images.device, torch.float32)
        if self.differentiable:
            raise TypeError(f"{self.name} is said to be differentiable and returned {type(scores).__name__}, no tensor")
        return torch.tensor(np.asarray(scores, np.float32), device=images.device)

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: where the function is from, which is all that is known of it."""
        about = self.function if hasattr(self.function, "__qualname__") else type(self.function)
        return {"name": self.name, "source": f"{about.__module__}.{about.__qualname__}"}


@overload
def verifier(target: str, *, cite: str | tuple[str, ...] = ()) -> Callable[[T], T]: ...


@overload
def verifier(
    target: Callable[..., Any],
    *,
    name: str | None = None,
    range: tuple[float, float] | None = None,
    reads_prompt: bool = True,
    differentiable: bool = False,
) -> Function: ...


@overload
def verifier(
    *,
    name: str | None = None,
    range: tuple[float, float] | None = None,
    reads_prompt: bool = True,
    differentiable: bool = False,
) -> Callable[[Callable[..., Any]], Function]: ...


def verifier(target: Any = None, *, cite: str | tuple[str, ...] = (), **settings: Any) -> Any:
    """Makes a verifier of a callable, or registers a class of verifiers under a name.

    Of a callable, at once or as a decorator, with the settings of `Function`::

        redness = imgscale.verifier(fn, name="redness", range=(0, 1), reads_prompt=False, differentiable=True)

        @imgscale.verifier(range=(0, 1), reads_prompt=False)
        def redness(images, prompts): ...

    Of a class, which then has a name on the command line, and options::

        @imgscale.verifier("redness", cite="key")
        class Redness: ...

    Args:
        target: The callable, or the name to register; None for a decorator of callables.
        cite: BibTeX keys of the papers, with a name to register.
        **settings: Those of `Function`.
    """
    if isinstance(target, str):
        if settings:
            raise UserError(
                f"{', '.join(settings)} can't be set beside the name {target!r}; make them attributes of it."
            )
        return registry.verifier(target, cite=cite)
    if cite:
        raise UserError("cite goes with a name to register; leave it out for a function.")
    return (lambda function: Function(function, **settings)) if target is None else Function(target, **settings)


def _range(given: Any) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in given)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not low < high:
        raise UserError(f"A verifier's range can't be {given!r}; give (lowest, highest), or None if it isn't known.")
    return low, high

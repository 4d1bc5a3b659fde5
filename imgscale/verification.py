"""From what a user calls a verifier to one that scores: a name, a name with options, a verifier, or a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from imgscale import registry
from imgscale.callables import Function
from imgscale.rewards import Verifier

VerifierLike = str | Verifier | Callable[..., Any]


def make(spec: VerifierLike, *, clip: str | None = None, device: str | None = None) -> Verifier:
    """The verifier of a name, a name with options, or a function.

    Args:
        spec: What the user gave. A verifier stays as it is.
        clip: The model that "clip" stands for, unless its options say so.
        device: Where a verifier made by its name runs, unless its options say so.

    Raises:
        UserError: There is none such, or it can't be made; the message says why.
    """
    if not isinstance(spec, str):
        ready = hasattr(spec, "identity") and not isinstance(spec, type)
        return spec if ready else Function(spec)  # type: ignore[return-value]
    entry, options = registry.verifier.resolve(spec)
    written = bool(options)
    if entry.name == "clip" and clip is not None:
        options.setdefault("model", clip)
    if device is not None and "device" in entry.options():
        options.setdefault("device", device)
    made: Verifier = entry.target(**options)
    if written:
        made.name = spec  # "clip" and "clip(model=…)" may judge together
    return made

"""From what a user calls a verifier to one that scores: a name, a name with options, a verifier, or a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from imgscale import registry
from imgscale.callables import Function
from imgscale.rewards import Verifier

VerifierLike = str | Verifier | Callable[..., Any]


def make(
    spec: VerifierLike,
    *,
    clip: str | None = None,
    device: str | None = None,
    member: Callable[[str], Verifier] | None = None,
) -> Verifier:
    """The verifier of a name, a name with options, several of them with plus signs between, or a function.

    Args:
        spec: What the user gave. A verifier stays as it is.
        clip: The model that "clip" stands for, unless its options say so.
        device: Where a verifier made by its name runs, unless its options say so.
        member: Makes the members of an ensemble, or finds them if there are such already; as this one is made for None.

    Raises:
        UserError: There is none such, or it can't be made; the message says why.
    """
    if not isinstance(spec, str):
        ready = hasattr(spec, "identity") and not isinstance(spec, type)
        return spec if ready else Function(spec)  # type: ignore[return-value]
    short = len(registry.members(spec)) > 1
    entry, options = registry.verifier.resolve(f"ensemble(of={spec})" if short else spec)
    written = bool(options) and not short
    if isinstance(members := options.get("of"), str):
        find = member or partial(make, clip=clip, device=device)
        options["of"] = [find(name) for name in registry.members(members)]
    if entry.name == "clip" and clip is not None:
        options.setdefault("model", clip)
    if device is not None and "device" in entry.options():
        options.setdefault("device", device)
    made: Verifier = entry.target(**options)
    if written:
        made.name = spec  # "clip" and "clip(model=…)" may judge together
    return made

"""What can go wrong through a user's doing, said in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user asked; the message names the value, what is allowed and what to do."""


class UnknownName(UserError):
    """A name that isn't in a list of known ones; the message offers the nearest.

    Args:
        kind: What the name should have been, such as "searcher".
        name: What the user wrote.
        known: All allowed names.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known)
        near = difflib.get_close_matches(str(name), known, 1, 0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        choices = ", ".join(known) or "none is available"
        super().__init__(f"Unknown {kind} {name!r}; choose one of: {choices}.{guess}{' ' + hint if hint else ''}")

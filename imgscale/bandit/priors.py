"""What is expected of an action before any of its images was seen."""

from __future__ import annotations

from imgscale.bandit.actions import Action

CLOSED = 0.6  # of what a plain sample lacks, by ever so much search: verifiers are wrong about the rest


def expected(action: Action) -> float:
    """The mean quality of a search's image, from that of the model's plain samples, in [0, 1].

    The best of n is taken to close a share of 1 - 1/n of what search can close, `CLOSED`; and any search of n samples'
    worth as much as the best of n. Fitted to the bundled models (docs/bandit.md).
    """
    plain = action.model.prior
    return plain + (1 - plain) * CLOSED * (1 - 1 / action.candidates)

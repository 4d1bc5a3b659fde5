"""How long searches take on this machine, learnt from those that ran."""

from __future__ import annotations

from imgscale.result import SearchOutput

LEAST = 8  # NFE: less is mostly start-up
NEWEST = 0.5  # weight of the newest of several measurements


class Pace:
    """Seconds a model evaluation takes, with all that a search does between two of them."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str, str], float] = {}

    def note(self, model: str, searcher: str, verifier: str, output: SearchOutput) -> None:
        """Learns from a search."""
        ledger = output.ledger
        if ledger.nfe >= LEAST and ledger.seconds > 0:
            key, new = (model, searcher, verifier), ledger.seconds / ledger.nfe
            old = self._seconds.get(key, new)
            self._seconds[key] = old + NEWEST * (new - old)

    def estimate(self, model: str, searcher: str, verifier: str, nfe: int) -> float | None:
        """Seconds of a search; by others with the same model where this kind hasn't run, and None where none has."""
        key = (model, searcher, verifier)
        near = [s for k, s in self._seconds.items() if k[0] == model and k[2] == verifier]
        near = near or [s for k, s in self._seconds.items() if k[0] == model]
        if key not in self._seconds and not near:
            return None
        return nfe * (self._seconds[key] if key in self._seconds else sum(near) / len(near))


def span(seconds: float) -> str:
    """A time in words: "6 s", "3 min"."""
    if seconds < 1:
        return "under 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

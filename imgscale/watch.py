"""What people see of searches while they run: a progress bar, and what a callback hears."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgscale.images import to_pil
from imgscale.result import Candidate

if TYPE_CHECKING:
    from PIL.Image import Image

    from imgscale.budget import Ledger
    from imgscale.engine import Engine
    from imgscale.search import Search


@dataclass(frozen=True)
class Progress:
    """What a callback hears after every engine step.

    Args:
        searches: How many run together.
        nfe: Model evaluations spent by all of them.
        total: What they may spend together, or None.
        best: The best scores so far, one per search; None while there is none.
        in_flight: What the verifier said of the most promising unfinished candidates by their previews, one per search;
            None while none was looked at.
        rounds: Engine steps so far, one number per search; they stand still once it has stopped.
        places: Which searches these are: their numbers among the prompts, or among what `Scaler.stream` was asked for.
        preview: Decodes the most promising x0 of a search, by its place in these lists: a PIL image, or None at the
            very start.
        gallery: The best finished candidates so far of a search, by its place in these lists, as many as are kept.
        ledger: What a search has spent so far, by its place in these lists.
        cancel: Ends all searches with their best so far; with ``finish=True`` as a deadline does, once each has
            finished an image.
    """

    searches: int
    nfe: int
    total: int | None
    best: list[float | None]
    in_flight: list[float | None]
    rounds: list[int]
    places: list[int]
    preview: Callable[[int], Image | None]
    gallery: Callable[[int], list[Candidate]]
    ledger: Callable[[int], Ledger]
    cancel: Callable[..., None]


class Watch:
    """Tells people of searches: a tqdm bar and the callback; and takes the wish to cancel.

    Args:
        engine: Decodes previews.
        total: Model evaluations that may be spent together, or None.
        progress: Whether to show the bar.
        callback: Called at every tick.
    """

    def __init__(
        self, engine: Engine, total: int | None, progress: bool, callback: Callable[[Progress], None] | None
    ) -> None:
        self._engine, self._total = engine, total
        self._show, self._callback = progress, callback
        self._stop = ""
        self._over = 0  # NFE of searches that are no longer here

    def __enter__(self) -> Watch:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=self._total, unit="NFE", disable=not self._show, leave=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def stop(self) -> str:
        """Why the searches are to end, or ""."""
        return self._stop

    def cancel(self, finish: bool = False) -> None:
        """Ends the searches; see `Progress`."""
        self._stop = "deadline" if finish else "cancelled"

    def leave(self, search: Search) -> None:
        """A search is over, and ticks no longer tell of it."""
        self._over += search.meter.ledger.nfe

    def tick(self, searches: Sequence[Search], places: Sequence[int] | None = None) -> None:
        """Tells of the searches as they are now."""
        nfe = self._over + sum(s.meter.ledger.nfe for s in searches)
        best = [s.best.score if s.best else None for s in searches]
        known = [score for score in best if score is not None and math.isfinite(score)]
        if known:
            self._bar.set_postfix(best=f"{sum(known) / len(known):.4f}", refresh=False)
        self._bar.update(nfe - self._bar.n)
        if self._callback is None:
            return

        def preview(index: int) -> Image | None:
            search = searches[index]
            if search.best is not None:
                return to_pil(search.best.image)
            held = search.problem.incumbent
            if held is None:
                return None
            return to_pil(self._engine.decode(held.x0, [search.problem.cond], [1], search.preview)[0])

        self._callback(
            Progress(
                searches=len(searches),
                nfe=nfe,
                total=self._total,
                best=best,
                in_flight=[_in_flight(search) for search in searches],
                rounds=[s.rounds for s in searches],
                places=list(range(len(searches)) if places is None else places),
                preview=preview,
                gallery=lambda index: searches[index].gallery(),
                ledger=lambda index: searches[index].meter.ledger,
                cancel=self.cancel,
            )
        )


def _in_flight(search: Search) -> float | None:
    held = search.problem.incumbent
    return None if held is None or held.scores is None else float(held.scores[0])

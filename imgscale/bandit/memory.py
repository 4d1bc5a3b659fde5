"""What goes with a policy: the scale of its scores, and what was seen in each category of prompts."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from imgscale.bandit.actions import Action, Model
from imgscale.bandit.policy import MODES
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]

KEPT = 1000  # scores that the scale is read off


class Scale:
    """The empirical CDF of a verifier's scores: what puts them onto [0, 1].

    A uniform sample of `KEPT` of all scores is held (reservoir sampling, Vitter 1985). Of the first score nothing is
    known yet, so it is 0.5.

    Args:
        kept: The sample.
        seen: Scores so far.
    """

    def __init__(self, kept: list[float] | None = None, seen: int = 0) -> None:
        self.kept = sorted(kept or [])
        self.seen = max(seen, len(self.kept))

    def __call__(self, score: float) -> float:
        """The share of scores below, those that are equal by half; NaN for a score that isn't finite."""
        if not math.isfinite(score):
            return math.nan
        low, high = bisect.bisect_left(self.kept, score), bisect.bisect_right(self.kept, score)
        return ((low + high) / 2 + 0.5) / (len(self.kept) + 1)

    def add(self, score: float) -> None:
        """Takes in a score; one that isn't finite is left out."""
        if not math.isfinite(score):
            return
        self.seen += 1
        if len(self.kept) >= KEPT:
            # Which draw depends on the count alone, so that a policy that was saved and loaded goes on alike.
            place = int(np.random.default_rng(self.seen).integers(self.seen))
            if place >= KEPT:
                return
            del self.kept[place]
        bisect.insort(self.kept, score)


@dataclass
class Cell:
    """What an action brought in a category.

    Args:
        n: Times it was run.
        quality: Sum of qualities.
        squares: Sum of their squares.
        eflops: Sum of what was spent.
        judged: Times that a check judged the image.
        correct: Times that it was right.
    """

    n: int = 0
    quality: float = 0.0
    squares: float = 0.0
    eflops: float = 0.0
    judged: int = 0
    correct: int = 0

    @property
    def mean(self) -> float:
        return self.quality / self.n if self.n else math.nan

    @property
    def deviation(self) -> float:
        """Of single results; NaN from fewer than two."""
        if self.n < 2:
            return math.nan
        return math.sqrt(max(self.squares / self.n - self.mean**2, 0.0) * self.n / (self.n - 1))


@dataclass
class Category:
    """What was seen of a kind of prompts.

    Args:
        n: Prompts.
        z: The sum of their features: their mean is the prompt that stands for the category.
        cells: By the name of the action.
    """

    n: int = 0
    z: list[float] = field(default_factory=list)
    cells: dict[str, Cell] = field(default_factory=dict)


@dataclass
class Memory:
    """All of it.

    Args:
        scale: Of the verifier's scores.
        categories: By name.
        actions: Of the pool as it was last: `imgscale policy show` needs no models.
        reference: eFLOPs that count as cost 1.
        pool: The pool file's name.
        weight: Of quality, when it last learned.
    """

    scale: Scale = field(default_factory=Scale)
    categories: dict[str, Category] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    reference: float | None = None
    pool: str = "default"
    weight: float = MODES["balanced"]

    def note(
        self, category: str, z: Floats, action: Action, quality: float, eflops: float, correct: bool | None
    ) -> None:
        """Takes down a result; one that isn't finite counts as a prompt, and for nothing else."""
        kind = self.categories.setdefault(category, Category(z=[0.0] * len(z)))
        kind.n += 1
        kind.z = (np.array(kind.z) + z).tolist()
        if not math.isfinite(quality):
            return
        cell = kind.cells.setdefault(action.name, Cell())
        cell.n += 1
        cell.quality += quality
        cell.squares += quality**2
        cell.eflops += eflops
        cell.judged += correct is not None
        cell.correct += bool(correct)

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON can hold."""
        return {
            "scores": self.scale.kept,
            "seen": self.scale.seen,
            "categories": {name: asdict(kind) for name, kind in self.categories.items()},
            "actions": [asdict(action) for action in self.actions],
            "reference": self.reference,
            "pool": self.pool,
            "weight": self.weight,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Memory:
        """The inverse of `to_dict`; a memory of nothing from nothing.

        Raises:
            UserError: Other values.
        """
        if not values:
            return cls()
        try:
            return cls(
                scale=Scale([float(score) for score in values["scores"]], int(values["seen"])),
                categories={name: _category(kind) for name, kind in values["categories"].items()},
                actions=list(_actions(values["actions"])),
                reference=None if values["reference"] is None else float(values["reference"]),
                pool=str(values["pool"]),
                weight=float(values["weight"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"The policy file's statistics are damaged ({error!r}); put it aside with imgscale policy reset."
            ) from error


def _category(values: Mapping[str, Any]) -> Category:
    cells = {str(name): Cell(**cell) for name, cell in values["cells"].items()}
    return Category(int(values["n"]), [float(x) for x in values["z"]], cells)


def _actions(values: Any) -> Iterator[Action]:
    for each in values:
        yield Action(**{**each, "model": Model(**each["model"])})


def category(prompt: str) -> str:
    """The kind of a prompt: its category in the shapes world where it is of that, or else by its words."""
    from imgscale.assets.shapes import world
    from imgscale.bandit.prompts import counts

    try:
        return world.category(world.parse(prompt))
    except ValueError:
        pass
    numbers, _, spatial, colours, _, quoted, words = counts(prompt)
    if quoted:
        return "with text"
    if spatial and colours:
        return "places and colours"
    for name, share in (("numbers", numbers), ("places", spatial), ("colours", colours)):
        if share:
            return name
    return "long" if words * 3.5 > math.log1p(25) else "short"

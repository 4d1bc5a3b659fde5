"""Budgets: limits that are never exceeded, ledgers of what was spent, and quotas whose rest rolls over."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

from imgscale.errors import UserError

BACKWARD = 3  # a forward and a backward pass take about three times the forward pass alone


class BudgetSpent(Exception):
    """The next request doesn't fit into what is left; ends a search, never reaches users."""


@dataclass(frozen=True)
class Price:
    """Effective FLOPs, in whole numbers, of what a search pays for; see `imgscale.cost`.

    Args:
        text: Encoding the prompt, once a search.
        nfe: A model evaluation.
        decode: Decoding an image.
        preview: Decoding a preview.
        score: Scoring an image.
    """

    text: int
    nfe: int
    decode: int
    preview: int
    score: int

    @property
    def image(self) -> int:
        """A finished image, decoded and scored."""
        return self.decode + self.score

    @property
    def look(self) -> int:
        """A preview, or an image if that is dearer: decoded and scored."""
        return max(self.preview, self.decode) + self.score


@dataclass(frozen=True)
class Budget:
    """Limits of one search; None is no limit. At least one other than gradients must be set.

    Args:
        nfe: Model evaluations, one per image and step (with classifier-free guidance the two passes count as one).
        verifier_calls: Images scored by the steering verifier.
        decodes: Latents decoded to images.
        gradients: Images whose reward is differentiated; they count as decoded and scored, too.
        eflops: Effective FLOPs of everything that steers the search, see `imgscale.cost`.
        seconds: Wall time, checked at every engine step.

    Raises:
        UserError: A limit that isn't a positive number, or no limit at all.
    """

    nfe: int | None = None
    verifier_calls: int | None = None
    decodes: int | None = None
    gradients: int | None = None
    seconds: float | None = None
    eflops: float | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            whole = f.name not in ("seconds", "eflops")
            if value is None:
                continue
            right = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
            if not right or not value > 0 or not math.isfinite(value):
                raise UserError(
                    f"The budget's {f.name} can't be {value!r}; give a positive {'whole ' * whole}number, such as"
                    f" {'1e15' if f.name == 'eflops' else '200' if whole else '30'}."
                )
        # Gradients alone would never end a search that takes none.
        if all(getattr(self, f.name) is None for f in fields(self) if f.name != "gradients"):
            raise UserError("A budget needs a limit; give a number of model evaluations, such as budget=200.")

    @classmethod
    def of(cls, budget: int | Budget) -> Budget:
        """A budget from an int, which means model evaluations."""
        return budget if isinstance(budget, Budget) else cls(nfe=budget)


@dataclass
class Ledger:
    """What a search has spent so far.

    Args:
        nfe: Model evaluations.
        verifier_calls: Images scored by the steering verifier.
        report_calls: Images scored by the verifiers that only report.
        decodes: Latents decoded to images.
        gradients: Images whose reward was differentiated.
        seconds: Wall time since the search began. Searches that share batches share this time.
        eflops: Effective FLOPs of all this but the reports, and of encoding the prompt, each image reckoned alone; None
            where they weren't counted (`Scaler.cost`).
    """

    nfe: int = 0
    verifier_calls: int = 0
    report_calls: int = 0
    decodes: int = 0
    gradients: int = 0
    seconds: float = 0.0
    eflops: int | None = None

    def as_dict(self) -> dict[str, float]:
        """What was counted, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class Meter:
    """A budget and the ledger held against it.

    Args:
        price: What things cost in eFLOPs; needed where these are limited.
    """

    budget: Budget
    ledger: Ledger = field(default_factory=Ledger)
    price: Price | None = None
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.budget.eflops is not None and self.price is None:
            raise ValueError("A limit on eFLOPs needs a price.")
        if self.price is not None and self.ledger.eflops is None:
            self.ledger.eflops = self.price.text

    def left(self, kind: str) -> float:
        """What is left of one limit; infinite where there is none."""
        limit = getattr(self.budget, kind)
        return math.inf if limit is None else limit - (getattr(self.ledger, kind) or 0)

    def require(self, **amounts: int) -> None:
        """Checks that all the amounts still fit.

        Raises:
            BudgetSpent: One doesn't.
        """
        if any(amount > self.left(kind) for kind, amount in amounts.items()):
            raise BudgetSpent

    def charge(self, **amounts: int) -> None:
        """Books amounts that were spent; `require` them first."""
        for kind, amount in amounts.items():
            setattr(self.ledger, kind, (getattr(self.ledger, kind) or 0) + amount)

    def restart(self, seconds: float = 0.0) -> None:
        """Starts the clock anew, or where so many seconds have passed already."""
        self._began = time.monotonic() - seconds

    def tick(self) -> float:
        """Brings the seconds up to date and returns what is left of them."""
        self.ledger.seconds = time.monotonic() - self._began
        return self.left("seconds")


class Rollover:
    """A total split into quotas whose unspent part moves on to the next one.

    Serves at every level alike: the steps of a search, the stages of a request, the prompts of a batch.

    Args:
        total: To be split, at least 0.
        weights: One per stage, not negative, not all 0. The split is whole numbers that add up to the total.
        least: What each stage gets before the rest is split by the weights; nothing if None.

    Source: rollover budget forcing, Kim et al. 2025 (arXiv 2503.19385), algorithm 2.
    """

    def __init__(self, total: int, weights: Sequence[float], least: Sequence[int] | None = None) -> None:
        least = [0] * len(weights) if least is None else least
        total -= sum(least)
        if total < 0 or not weights or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"Cannot split {total} by the weights {list(weights)}.")
        ends = [sum(weights[: i + 1]) / sum(weights) for i in range(len(weights))]
        marks = [0, *(math.floor(total * end + 0.5 + 1e-9) for end in ends[:-1]), total]
        self.quotas = [b - a + base for a, b, base in zip(marks, marks[1:], least, strict=False)]
        self.spent = [0] * len(weights)

    def left(self, stage: int) -> int:
        """What stage ``stage`` may still spend."""
        return self.quotas[stage] - self.spent[stage]

    def charge(self, stage: int, amount: int) -> None:
        """Books what a stage spent.

        Raises:
            BudgetSpent: More than its quota.
        """
        if amount > self.left(stage):
            raise BudgetSpent
        self.spent[stage] += amount

    def close(self, stage: int) -> None:
        """Ends a stage: what it didn't spend moves to the next one (nowhere after the last)."""
        if stage + 1 < len(self.quotas):
            rest = self.left(stage)
            self.quotas[stage] -= rest
            self.quotas[stage + 1] += rest

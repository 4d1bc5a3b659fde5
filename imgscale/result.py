"""What a search returns: the image, its scores, what it cost, and how it got there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from imgscale.budget import Ledger
from imgscale.rewards import preview_name

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from imgscale.automatic import Decision
    from imgscale.noise import Noise
    from imgscale.particles import Origin


@dataclass(frozen=True)
class TracePoint:
    """The best image so far when it changed.

    Args:
        nfe: Model evaluations spent by then.
        seconds: Wall time by then.
        verifier_calls: Images scored by then.
        score: The steering verifier's.
        report: Scores by the verifiers that only report.
    """

    nfe: int
    seconds: float
    verifier_calls: int
    score: float
    report: dict[str, float] = field(default_factory=dict)


@dataclass
class Candidate:
    """A finished image and all that belongs to it.

    Args:
        image: float32 (3, h, w) in [0, 1], on the CPU.
        latents: float32 (*latent), on the CPU.
        score: The steering verifier's.
        seed: The key of the prior noise it grew from.
        finished: False for a preview, where a search was stopped before it finished anything.
        report: Scores by the verifiers that only report.
        origin: Where its trajectory can be taken up; None where that wasn't to be kept.
    """

    image: Tensor
    latents: Tensor
    score: float
    seed: int
    finished: bool = True
    report: dict[str, float] = field(default_factory=dict)
    origin: Origin | None = None


@dataclass
class Plain:
    """What the pipeline gives without a search, for the same seed, and what that cost."""

    image: Image
    scores: dict[str, float]
    ledger: Ledger


@dataclass
class SearchOutput:
    """The outcome of a search.

    Args:
        images: PIL images, the best first: the winner, and as many more as were to be kept.
        scores: The winner's scores by verifier name, the steering one first.
        seeds: The key of the prior noise of each image.
        nfe: Model evaluations spent.
        ledger: Everything spent.
        trace: The best so far each time it changed, and where the search ended.
        plain: The pipeline's own image for the seed, or None if it wasn't asked for.
        stopped: Why the search ended: "budget", "complete", "ceiling" (the score can't rise), "deadline", "cancelled"
            or "verifier" (it failed for every image).
        finished: False if the image is only a preview, because the search was stopped before it finished one.
        settings: All that is needed to run it again.
        events: Notices of what went wrong on the way without ending the search.
        gallery: The candidates behind ``images``, the winner first, with their own scores.
        scored: The steering scores of all finished images, in order.
        noises: What makes each of the ``images`` again in one trajectory, where that was to be kept.
        decision: What `model="auto"` chose and what came of it; None for other models.
    """

    prompt: str
    model: str
    searcher: str
    verifier: str
    images: list[Image]
    scores: dict[str, float]
    seeds: list[int]
    ledger: Ledger
    trace: list[TracePoint]
    plain: Plain | None
    stopped: str
    finished: bool
    settings: dict[str, Any]
    events: list[str]
    gallery: list[Candidate] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)
    noises: list[Noise] = field(default_factory=list)
    decision: Decision | None = None

    @property
    def nfe(self) -> int:
        return self.ledger.nfe

    @property
    def noise(self) -> Noise | None:
        """What makes the winner again in one trajectory; None for a preview, and where it wasn't to be kept."""
        return self.noises[0] if self.noises else None

    @property
    def held_out(self) -> dict[str, float]:
        """The winner's scores by the verifiers that only report."""
        steered = {self.verifier, *self.members}
        steered |= {preview_name(name) for name in steered}
        return {name: score for name, score in self.scores.items() if name not in steered}

    @property
    def members(self) -> list[str]:
        """The names of the verifiers that steered together, where an ensemble did."""
        return list(self.settings["verifiers"].get(self.verifier, {}).get("of", ()))

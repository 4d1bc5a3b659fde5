"""Early exit: candidates whose previews show that they can't win are denoised no further.

Several candidates that run to the end together are a race. At a few steps, the checks, their previews are scored; the
most promising ones finish first, and whoever can't reach the best of these leaves. What that saves stays in the budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from imgscale import registry
from imgscale.calibration import SMALLEST, Margins, Race
from imgscale.errors import UserError
from imgscale.keys import fold
from imgscale.particles import Particles, join

if TYPE_CHECKING:
    from imgscale.problem import Problem, Request
    from imgscale.usefulness import Usefulness

Kind = Literal["fresh", "kin"]  # candidates from fresh noise; those that descend from others

AUDIT = -4  # folded into a race's first key: no other purpose has this number
FORESIGHT = (0.7, 0.9, 0.97)  # the checks are where previews first foretell so much
SHARES = (0.4, 0.6, 0.8)  # or these shares of the steps, where that wasn't measured


@dataclass(frozen=True)
class EarlyExit:
    """How candidates are dropped on their way.

    Args:
        mode: "calibrated" drops those whose preview's score plus a learned margin is below the best finished score, and
            at first learns that margin, without dropping any. "paper" takes each image's score for the mean of the
            scores on its way, as UniScale does, which previews are not.
        delta: In at most this share of searches the winner is dropped, in (0, 1); calibrated only.
        checks: Steps at which previews are judged; where they begin to foretell the image, if None.
        v_sup: The highest possible score; the verifier's own if None. Paper needs one.
        lead: Candidates that finish first at each check, the most promising ones, so that there is a score to reach.
        audit: Share of the races that run in full although it is known how to drop, so that learning goes on.

    Raises:
        UserError: A value that can't be.

    Source: UniScale (arXiv 2605.30898) for "paper".
    """

    mode: Literal["calibrated", "paper"] = "calibrated"
    delta: float = 0.05
    checks: tuple[int, ...] | None = None
    v_sup: float | None = None
    lead: int = 1
    audit: float = 0.05

    def __post_init__(self) -> None:
        if self.mode not in ("calibrated", "paper"):
            raise UserError(f"early_exit's mode can't be {self.mode!r}; give calibrated or paper.")
        if not 0 < self.delta < 1:
            raise UserError(f"early_exit's delta can't be {self.delta}; give a share between 0 and 1, such as 0.05.")
        if self.lead < 1 or not 0 <= self.audit <= 1:
            raise UserError(
                f"early_exit's lead ({self.lead}) must be at least 1, and its audit ({self.audit}) from 0 to 1."
            )
        if self.v_sup is not None and not math.isfinite(self.v_sup):
            raise UserError(f"early_exit's v_sup can't be {self.v_sup}; give the verifier's highest score.")

    @classmethod
    def of(cls, value: str | EarlyExit) -> EarlyExit | None:
        """From "off", "calibrated", "paper" or a name with options, such as "calibrated(delta=0.1, checks=3 5)".

        Raises:
            UserError: It is none of them.
        """
        if isinstance(value, EarlyExit):
            return value
        mode, written = registry.parse(value) if isinstance(value, str) else (str(value), {})
        if mode == "off" and not written:
            return None
        if mode not in ("calibrated", "paper"):
            raise UserError(
                f"early_exit can't be {value!r}; give off, calibrated or paper, or one with options, such as"
                ' "calibrated(delta=0.1)".'
            )
        return _written(mode, **registry.Entry("early_exit", _written).check(written))  # type: ignore[arg-type]

    def steps(self, steps: int, usefulness: Usefulness | None = None) -> tuple[int, ...]:
        """The checks of samples of so many transitions: those that leave an evaluation to be saved.

        Raises:
            UserError: Checks that were given are none of these.
        """
        if self.checks is not None:
            wrong = [check for check in self.checks if not 0 <= check < steps - 1]
            if wrong or not self.checks:
                raise UserError(
                    f"early_exit can't judge at step {wrong[0] if wrong else 'none'} of {steps}; give checks from 0 to"
                    f" {steps - 2}."
                )
            return tuple(sorted(set(self.checks)))
        if usefulness is not None and usefulness.steps == steps:
            sight = usefulness.foresight
            found = {next((k for k, value in enumerate(sight) if value >= least), steps) for least in FORESIGHT}
        else:
            found = {round(share * steps) for share in SHARES}
        return tuple(sorted(step for step in found if 0 < step < steps - 1))


def _written(
    mode: Literal["calibrated", "paper"],
    *,
    delta: float = 0.05,
    checks: str | None = None,
    v_sup: float | None = None,
    lead: int = 1,
    audit: float = 0.05,
) -> EarlyExit:
    """`EarlyExit` from options as the command line writes them; checks with spaces between them."""
    try:
        places = None if checks is None else tuple(int(step) for step in str(checks).split())
    except ValueError:
        raise UserError(
            f"early_exit's checks can't be {checks!r}; give steps with spaces between, as in 3 5."
        ) from None
    return EarlyExit(mode, delta, places, v_sup, lead, audit)


@dataclass(frozen=True)
class Rule:
    """What decides in one search; fixed from its beginning, so that a search is a function of its rule and its seed.

    Args:
        exit: What was asked for.
        checks: Steps of the model's own schedule.
        steps: Its transitions.
        top: The highest possible score; infinite where it isn't known.
        margins: By kind of candidates, where enough was learned.
    """

    exit: EarlyExit
    checks: tuple[int, ...]
    steps: int
    top: float = math.inf
    margins: Mapping[str, Margins] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.exit.mode == "paper" and not math.isfinite(self.top):
            raise UserError(
                "early_exit's mode paper needs the highest possible score, which this verifier doesn't state; give it,"
                ' as in "paper(v_sup=1)", or take calibrated.'
            )

    def judges(self, kind: Kind, candidates: int) -> bool:
        """Whether enough is known to drop any of so many candidates."""
        known = self.margins.get(kind)
        return self.exit.mode == "paper" or (known is not None and known.factor(candidates) is not None)

    def bounds(self, kind: Kind, check: int, candidates: int, scores: Tensor) -> Tensor:
        """U: what the images of these previews score at most, float64 (n,); infinite for a preview without a score."""
        if self.exit.mode == "paper":
            share = (self.checks[check] + 1) / self.steps  # evaluations made, of those that a sample takes
            upper = share * scores + (1 - share) * self.top
        else:
            upper = (scores + self.margins[kind].above(check, candidates)).clamp(max=self.top)
        return torch.where(scores.isfinite(), upper, math.inf)

    def as_dict(self) -> dict[str, Any]:
        """For records, in values that JSON can hold."""
        margins = {kind: asdict(value) for kind, value in self.margins.items()}
        top = self.top if math.isfinite(self.top) else None
        return {**asdict(self.exit), "at": list(self.checks), "steps": self.steps, "top": top, "margins": margins}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rule:
        """The inverse.

        Raises:
            KeyError, TypeError, ValueError: It isn't what `as_dict` gives.
        """
        asked = {name: values[name] for name in EarlyExit.__dataclass_fields__}
        asked["checks"] = None if asked["checks"] is None else tuple(map(int, asked["checks"]))
        margins = {
            str(kind): Margins(
                tuple(map(float, found["centre"])),
                tuple(map(float, found["scale"])),
                tuple((int(n), float(factor)) for n, factor in found["factors"]),
            )
            for kind, found in values["margins"].items()
        }
        top = math.inf if values["top"] is None else float(values["top"])
        return cls(EarlyExit(**asked), tuple(map(int, values["at"])), int(values["steps"]), top, margins)


def chosen(value: str | EarlyExit | Rule) -> EarlyExit | Rule | None:
    """What is to decide: a rule as it is, or what is yet to be made one; None for "off".

    Raises:
        UserError: It is none of them.
    """
    return value if isinstance(value, Rule) else EarlyExit.of(value)


def resumed(head: Path, value: str | EarlyExit | Rule) -> str | EarlyExit | Rule:
    """The rule by which a search began, from its journal's head, if the same early exit is asked for again.

    What has been learned since would make it another search.
    """
    try:
        rule = Rule.from_dict(json.loads(head.read_text(encoding="utf-8"))["early_exit"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError):
        return value  # there is none yet, or the journal says what is wrong with it
    return rule if rule.exit == chosen(value) else value


@dataclass
class Exits:
    """What came of it in one search.

    Args:
        candidates: That ran in races.
        dropped: Of these.
        saved: Model evaluations that the dropped ones would have taken.
        lessons: Races that ran in full, by kind.
        fields: For each kind, candidates that the search may have in all.
    """

    candidates: int = 0
    dropped: int = 0
    saved: int = 0
    lessons: list[tuple[str, Race]] = field(default_factory=list)
    fields: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, int]:
        """What records say of it."""
        return {"candidates": self.candidates, "dropped": self.dropped, "saved_nfe": self.saved}


def ahead(rule: Rule, problem: Problem, particles: Particles) -> list[tuple[int, int]]:
    """The checks that particles have before them, as (step of their schedule, number of the check)."""
    own, schedule = problem.schedule, particles.schedule
    if schedule.path != own.path:
        return []
    places = [(k, t) for k, t in enumerate(schedule.times) if k > particles.step]
    found = ((k, check) for check, at in enumerate(rule.checks) for k, t in places if abs(t - own.times[at]) < 1e-6)
    return sorted(found)


def race(
    problem: Problem,
    particles: Particles,
    rule: Rule,
    *,
    kind: Kind,
    beat: float = -math.inf,
    keep: int = 1,
    of: int | None = None,
) -> Generator[Request, Any, Particles]:
    """Solves candidates to their images, and drops those on the way that can't be among the best.

    Args:
        problem: Whose they are.
        particles: At least two, with checks before them.
        rule: What drops them.
        kind: Of the candidates.
        beat: A score that has been reached: only what is above it matters.
        keep: How many of the best matter.
        of: How many candidates the search has in all; as many as its budget allows, if None.

    Returns:
        All candidates in their order, finished and scored. The dropped ones score −inf, and their x0 is a preview.
    """
    places = ahead(rule, problem, particles)
    candidates = _field(problem, particles, kind, places, of)
    judging = rule.judges(kind, candidates) and not (rule.exit.mode == "calibrated" and _audited(rule, particles))
    previews = np.full((len(particles), len(rule.checks)), np.nan)
    rows, alive = torch.arange(len(particles)), particles
    parts: list[tuple[Tensor, Particles]] = []
    reached: list[float] = [beat]
    looked = 0

    def finish(chosen: Tensor) -> Generator[Request, Any, None]:
        if len(chosen):
            ends, scores = yield from problem.score((yield from problem.solve(alive[chosen], particles.schedule.steps)))
            parts.append((rows[chosen], ends))
            reached.extend(scores.tolist())

    for place, check in places:
        alive = yield from problem.solve(alive, place)
        if not problem.may_look(alive):
            break
        alive, scores = yield from problem.score(alive)
        previews[rows.numpy(), check] = scores.numpy()
        looked += 1
        if not judging:
            continue
        upper = rule.bounds(kind, check, candidates, scores)
        lead = scores.argsort(descending=True, stable=True)[: rule.exit.lead]
        lead = lead[upper[lead] >= _mark(reached, keep)]
        yield from finish(lead)
        stay = upper >= _mark(reached, keep)
        leave = ~stay
        stay[lead] = leave[lead] = False
        if leave.any():
            parts.append((rows[leave], _dropped(alive[leave])))
            problem.exits.dropped += int(leave.sum())
            problem.exits.saved += int(leave.sum()) * problem.finishing_nfe(alive)
        rows, alive = rows[stay], alive[stay]
        if not len(rows):
            break
    yield from finish(torch.arange(len(rows)))
    problem.exits.candidates += len(particles)
    answer = join([part for _, part in parts])[torch.cat([where for where, _ in parts]).argsort()]
    if not judging and looked == len(rule.checks) and rule.exit.mode == "calibrated":
        _note(problem, kind, previews, answer)
    return answer


def _mark(reached: Sequence[float], keep: int) -> float:
    """V: the score that is to be reached."""
    return sorted(reached, reverse=True)[keep - 1] if len(reached) >= keep else -math.inf


def _audited(rule: Rule, particles: Particles) -> bool:
    """Whether a race runs in full: drawn from its key before anything is known of it, so that no race is likelier to be
    learned from than another.
    """
    return float(fold(particles.keys[:1], AUDIT)[0]) / 2**63 < rule.exit.audit


def _field(
    problem: Problem, particles: Particles, kind: Kind, places: Sequence[tuple[int, int]], of: int | None
) -> int:
    """Candidates that a search may have in all, since they share delta: what the budget brings to the first check.

    Where nothing but time limits it, that isn't known, and delta is of each race.
    """
    if of is not None:
        return max(of, len(particles))
    if kind not in problem.exits.fields:
        each = max(1, problem.cost(particles.schedule, particles.step, places[0][0]))
        most = problem.left / each
        problem.exits.fields[kind] = len(particles) if math.isinf(most) else max(len(particles), int(most))
    return max(problem.exits.fields[kind], len(particles))


def _dropped(particles: Particles) -> Particles:
    scores = torch.full((len(particles),), -math.inf, dtype=torch.float64)
    return replace(particles, step=particles.schedule.steps, x=particles.x0, scores=scores)


def _note(problem: Problem, kind: Kind, previews: np.ndarray, answer: Particles) -> None:
    """Keeps a race that ran in full for learning; never one of which nothing happened to be dropped."""
    assert answer.scores is not None
    finals = answer.scores.numpy()
    if len(finals) >= SMALLEST and np.isfinite(finals).any():
        problem.exits.lessons.append((kind, Race.of(np.where(np.isfinite(previews), previews, np.nan), finals)))

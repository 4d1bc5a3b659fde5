"""Where a search's evaluations are well spent on a model: how much draws differ, and how early previews tell.

Two curves over the steps of an ordinary sample, measured once per model and verifier and kept with the model. They say
which transitions decide the picture (draw there) and where on the way its preview can be trusted (judge there).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from imgscale import files
from imgscale.errors import UserError
from imgscale.kernels import DDIM

if TYPE_CHECKING:
    from imgscale.engine import Engine
    from imgscale.problem import Problem, Verb
    from imgscale.rewards import Verifier

Floats = npt.NDArray[np.float64]

TRUSTED = 0.9  # foresight from which on a preview is judged in the image's stead
DECISIVE = 1 / 3  # of the largest spread: transitions below are not worth drawing at


@dataclass(frozen=True)
class Usefulness:
    """What was measured of one model under one verifier.

    Args:
        spread: For each transition, the standard deviation of the finished images' rewards among draws that are the
            same up to there: stochastic at this transition and solved by the ODE from it.
        foresight: For each step from 0 on, the rank correlation between the reward of x0 there and that of the finished
            image, among starting noises of one prompt; the last is 1.
    """

    spread: tuple[float, ...]
    foresight: tuple[float, ...]

    @property
    def steps(self) -> int:
        """Transitions of the samples it was measured on; it says nothing about others."""
        return len(self.spread)

    @property
    def look(self) -> int:
        """The first step whose previews can be trusted."""
        return next(step for step, value in enumerate((*self.foresight[:-1], 1.0)) if value >= TRUSTED)

    @property
    def decisive(self) -> int:
        """How many transitions, from the first one, are worth drawing at."""
        limit = DECISIVE * max(self.spread)
        return max((i + 1 for i, value in enumerate(self.spread) if value >= limit > 0), default=1)


def measure(
    engine: Engine,
    verifier: Verifier,
    conds: Sequence[Any],
    *,
    steps: int,
    starts: int = 12,
    parents: int = 2,
    draws: int = 6,
    seed: int = 0,
) -> Usefulness:
    """Measures a model's usefulness on some prompts.

    Takes about starts * steps + parents * draws * steps^2 / 2 model evaluations for each of them.

    Args:
        engine: Of the model.
        verifier: Whose rewards.
        conds: The encoded prompts; a dozen or two, of the kind that will be searched for.
        steps: Transitions of a sample.
        starts: Starting noises per prompt, for the foresight; at least 3.
        parents: How many of them are drawn from at each transition, for the spread.
        draws: Draws from each, at least 2.
        seed: Of the first prompt; the next ones count on.

    Raises:
        UserError: Too few starts, parents or draws, or rewards that never differ.
    """
    from imgscale.budget import Budget, Meter
    from imgscale.problem import Problem
    from imgscale.search import Search

    if starts < 3 or not 1 <= parents <= starts or draws < 2 or not conds:
        raise UserError(
            f"The usefulness can't be measured on {len(conds)} prompts with {starts} starts, {parents} parents and"
            f" {draws} draws; give a prompt, 3 starts, 1 parent (no more than starts) and 2 draws, or more."
        )
    records: list[_Record] = []
    searches = []
    for i, cond in enumerate(conds):
        # No ceiling: a probe goes on when an image is perfect.
        problem = Problem(engine.denoiser, cond, steps=steps, seed=seed + i, meter=Meter(Budget(nfe=10**12)))
        records.append(_Record([], []))
        searches.append(Search(problem, _probe(problem, starts, parents, draws, records[-1]), verifier))
    engine.run(searches)
    return _summary(records)


@dataclass
class _Record:
    """Rewards of one prompt: ``previews[step]`` (starts,), the last of them images; ``ends[transition]`` of the draws,
    (parents, draws)."""

    previews: list[Floats]
    ends: list[Floats]


def _probe(problem: Problem, starts: int, parents: int, draws: int, record: _Record) -> Verb:
    particles = yield from problem.start(starts)
    for step in range(problem.schedule.steps):
        particles, scores = yield from problem.score(particles)
        record.previews.append(scores.numpy())
        kids = yield from problem.denoise(particles[:parents].branch(draws), step + 1, DDIM(1))
        _, scores = yield from problem.score((yield from problem.denoise(kids)))
        record.ends.append(scores.numpy().reshape(parents, draws))
        particles = yield from problem.denoise(particles, step + 1)
    _, scores = yield from problem.score(particles)
    record.previews.append(scores.numpy())


def _summary(records: Sequence[_Record]) -> Usefulness:
    steps = len(records[0].ends)
    spread = [
        float(np.sqrt(np.nanmean([_finite(record.ends[i]).var(1, ddof=1) for record in records]))) for i in range(steps)
    ]
    differing = [record for record in records if np.ptp(_finite(record.previews[-1])) > 0]
    if not differing or not max(spread) > 0:
        raise UserError("All images got the same reward, so nothing can be learnt; take other prompts or a verifier.")
    foresight = [np.mean([_rank_correlation(r.previews[k], r.previews[-1]) for r in differing]) for k in range(steps)]
    return Usefulness(tuple(spread), (*map(float, foresight), 1.0))


def _finite(rewards: Floats) -> Floats:
    """Failed images count as the worst that didn't fail."""
    good = rewards[np.isfinite(rewards)]
    return np.where(np.isfinite(rewards), rewards, good.min() if len(good) else 0.0)


def _rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's; 0 where one of them is constant."""
    first, second = _ranks(_finite(a)), _ranks(_finite(b))
    if min(np.ptp(first), np.ptp(second)) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Floats) -> Floats:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]


# ------------------------------------------------------------------------------------------------------- keeping it


def known(folder: Path | None, name: str) -> dict[str, Usefulness]:
    """What has been measured of a model, by verifier: with the model in its folder, or else on this machine.

    Raises:
        UserError: A file that isn't what `keep` writes.
    """
    found: dict[str, Usefulness] = {}
    for file in _places(folder, name):
        if file.is_file():
            found = {**read(file), **found}
    return found


def read(file: Path) -> dict[str, Usefulness]:
    """The usefulness by verifier in a file.

    Raises:
        UserError: The file isn't what `keep` writes.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        made = {
            str(name): Usefulness(*(tuple(map(float, curves[key])) for key in ("spread", "foresight")))
            for name, curves in values.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{file} holds no usefulness as `imgscale profile` writes it ({error!r}); delete it."
        ) from error
    for name, value in made.items():
        right = value.steps > 0 and len(value.foresight) == value.steps + 1 and min(value.spread) >= 0
        if not right or not np.isfinite([*value.spread, *value.foresight]).all():
            raise UserError(f"The curves of {name!r} in {file} don't fit together; measure them again.")
    return made


def keep(folder: Path | None, name: str, verifier: str, value: Usefulness) -> Path:
    """Keeps what was measured: in the model's folder if that can be written, else on this machine. The file."""
    for file in _places(folder, name):
        old = read(file) if file.is_file() else {}
        text = json.dumps({k: asdict(v) for k, v in {**old, verifier: value}.items()}, indent=1)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            files.write(file, text.encode())
        except OSError as error:
            reason = error
            continue
        return file
    raise UserError(f"The usefulness can't be written ({reason}); set XDG_CACHE_HOME to a folder that can.")


def _places(folder: Path | None, name: str) -> list[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imgscale" / "usefulness"
    safe = re.sub(r"[^\w.-]+", "--", name).strip(".-") or "model"
    return [*([folder / "usefulness.json"] if folder else []), cache / f"{safe}.json"]

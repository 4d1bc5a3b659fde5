"""The table that policies are replayed on, from the folder that `python -m benchmarks bandit-table` fills.

What an action brings for a prompt is what the images of the folder say, exactly. For best-of-n it is the mean over all
subsets of n images of the bank: with images sorted by clip's score, the i-th is the best of C(i - 1, n - 1) of the
C(bank, n) subsets. A replay draws such subsets, so that the mean of what a policy sees is what regret is reckoned by.
Other searches were run with a few seeds, of which the mean counts and one is drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from imgscale.bandit import poolfile
from imgscale.bandit.actions import Action, Model
from imgscale.bandit.prompts import Prompts
from imgscale.bandit.replay import Table
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]

DRAWS = 48  # results of each action for each prompt that a replay draws from
HOME = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "bandit-table"


@dataclass(frozen=True)
class Read:
    """A folder, read.

    Args:
        table: For `imgscale.bandit.replay.replay`.
        halves: Expected quality (p, k) by either half of the images, NaN where half of them is too few; see `luck`.
        scores: The verifier's of all images, sorted.
        left_out: Sentences about models that the table lacks.
    """

    table: Table
    halves: tuple[Floats, Floats]
    scores: Floats
    left_out: tuple[str, ...]


def read(folder: Path | None = None) -> Read:
    """The table of a folder: prompts that all models have, and the actions that those prompts have in common.

    Raises:
        UserError: The folder or its files aren't there or are damaged, or no prompt has all models.
    """
    place = HOME if folder is None else folder
    if not (place / "prompts.jsonl").is_file() or not (place / "models.json").is_file():
        said = "" if folder is not None else "it lies with the sources and isn't in an installed package; "
        raise UserError(
            f"There is no table in {str(place)!r}: {said}give its folder with --table, or make one from a copy of the"
            " sources with python -m benchmarks bandit-table."
        )
    try:
        return _read(place)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"The table in {str(place)!r} is damaged ({error!r}); make its rows again.") from error


def _read(place: Path) -> Read:
    said = poolfile.read()
    priors = {entry.name: entry.prior for entry in said.models}
    known = json.loads((place / "models.json").read_text(encoding="utf-8"))
    listed = {row["prompt"]: row for row in _lines(place / "prompts.jsonl")}
    rows = {name: _lines(place / f"{name}.jsonl") for name in known}
    left_out = tuple(f"{name} has no rows yet and is left out." for name, found in rows.items() if not found)
    models = [name for name, found in rows.items() if found]
    have = {name: _complete(rows[name]) for name in models}
    texts = [text for text in listed if models and all(text in have[name] for name in models)]
    if not texts:
        raise UserError(f"No prompt of {str(place)!r} has the rows of all its models; make more rows.")
    scores = np.sort(np.concatenate([np.ravel(row["clip"]) for name in models for row in rows[name]]))

    def quality(clip: Floats, correct: Floats) -> Floats:
        rank = (np.searchsorted(scores, clip, "left") + np.searchsorted(scores, clip, "right")) / 2 / len(scores)
        policy = said.policy
        value: Floats = (policy.correct * correct + policy.score * rank) / (policy.correct + policy.score)
        return value

    rng = np.random.default_rng(0)
    actions: list[Action] = []
    columns: list[list[Floats]] = []  # per action: draws of quality, draws of verdicts, mean, both halves, eFLOPs
    for name in models:
        about = known[name]
        model = Model(name, about["parameters"], about["step_eflops"], about["distilled"], priors.get(name, 0.5))
        banks = [_bank(have[name][text]) for text in texts]
        size = min(bank.shape[1] for bank in banks)
        for n in (n for n in said.samples if n <= size):
            eflops = _eflops(about, n * about["sample_nfe"], n, n)
            actions.append(_action(model, about, "best-of-n", n, eflops, 0))
            columns.append(_best_of(banks, n, quality, rng, eflops))
        common = set.intersection(*({key for key in have[name][t] if key[0] != "bank"} for t in texts))
        for searcher, samples in sorted(common):
            found = [have[name][t][(searcher, samples)] for t in texts]
            spent = [[_eflops(about, r["nfe"], r["decodes"], r["verifier_calls"]) for r in each] for each in found]
            checks = np.mean([r["verifier_calls"] for each in found for r in each]) - samples
            mean = float(np.mean([np.mean(each) for each in spent]))
            actions.append(_action(model, about, searcher, samples, mean, max(0, round(checks))))
            columns.append(_searched(found, quality, [float(np.mean(each)) for each in spent]))
    drawn, right, expected, first, second, spend = (np.stack(part, 1) for part in zip(*columns, strict=True))
    # Of p prompts and k actions. The dearest action's mean costs 1.
    dearest = max(action.eflops for action in actions)
    reader = Prompts(len(next(iter(listed.values()))["embedding"]), said.policy.projected)
    z = np.stack([reader(text, listed[text]["embedding"]) for text in texts])
    kinds = tuple(listed[text]["category"] for text in texts)
    costs = np.minimum(spend / dearest, 1.0)
    table = Table(tuple(actions), z, drawn, costs, right.astype(bool), kinds, expected)
    return Read(table, (first, second), scores, left_out)


def luck(read: Read, weight: float) -> tuple[float, float]:
    """How much of the oracle's utility is luck with the images that are there.

    Returns:
        The mean utility of the best action of each prompt by one half of its images, on that half and on the other
        half. Actions with more candidates than half a bank holds are left out of both.
    """
    inside, outside = [], []
    for mine, other in (read.halves, read.halves[::-1]):
        costs = (1 - weight) * (1 - read.table.costs)
        utility = np.where(np.isnan(mine), -np.inf, weight * mine + costs)
        best = utility.argmax(1)[:, None]
        inside.append(np.take_along_axis(utility, best, 1).mean())
        outside.append(np.take_along_axis(weight * other + costs, best, 1).mean())
    return float(np.mean(inside)), float(np.mean(outside))


def best_of(n: int, size: int) -> Floats:
    """(size,): the probability that the best of n of so many, drawn without replacement, is the i-th from below."""
    chances: Floats = np.array([math.comb(i, n - 1) for i in range(size)], float) / math.comb(size, n)
    return chances


Quality = Callable[[Any, Any], Floats]


def _best_of(banks: list[Floats], n: int, quality: Quality, rng: np.random.Generator, eflops: float) -> list[Floats]:
    parts: list[list[Any]] = [[], [], [], [], []]
    for bank in banks:
        clip, right = bank[0], (bank[1] >= 1).astype(float)
        value, size = quality(clip, right), len(clip)
        order = np.argsort(clip, kind="stable")
        places = rng.random((DRAWS, size)).argsort(1)[:, :n]
        winners = np.take_along_axis(places, clip[places].argmax(1)[:, None], 1)[:, 0]
        parts[0].append(value[winners])
        parts[1].append(right[winners])
        parts[2].append(best_of(n, size) @ value[order])
        for side in (0, 1):
            half = order[order % 2 == side]
            parts[3 + side].append(best_of(n, len(half)) @ value[half] if n <= len(half) else np.nan)
    return [*map(np.array, parts), np.full(len(banks), eflops)]


def _searched(found: list[list[dict[str, Any]]], quality: Quality, eflops: list[float]) -> list[Floats]:
    parts: list[list[Any]] = [[], [], [], [], []]
    for each in found:
        right = np.array([row["shapes"] >= 1 for row in each], float)
        value = quality(np.array([row["clip"] for row in each]), right)
        parts[0].append(np.resize(value, DRAWS))
        parts[1].append(np.resize(right, DRAWS))
        parts[2].append(value.mean())
        parts[3].append(value[::2].mean())
        parts[4].append(value[1::2].mean() if len(value) > 1 else np.nan)
    return [*map(np.array, parts), np.array(eflops)]


def _action(model: Model, about: dict[str, Any], searcher: str, samples: int, eflops: float, checks: int) -> Action:
    nfe = samples * about["sample_nfe"]
    return Action(model, searcher, nfe, eflops, candidates=samples, steps=about["sample_nfe"], checks=checks)


def _eflops(about: dict[str, Any], nfe: int, decodes: int, calls: int) -> float:
    price = about["price"]
    return float(price["text"] + nfe * price["nfe"] + decodes * price["decode"] + calls * price["score"])


def _bank(found: dict[tuple[str, int], list[dict[str, Any]]]) -> Floats:
    """Both scores of the images of the largest bank, (2, images)."""
    row = found["bank", max(n for kind, n in found if kind == "bank")][0]
    return np.array([row["clip"], row["shapes"]])


def _complete(rows: list[dict[str, Any]]) -> dict[str, dict[tuple[str, int], list[dict[str, Any]]]]:
    """Rows by prompt and action, of the prompts that have all actions with as many seeds as any has."""
    found: dict[str, dict[tuple[str, int], list[dict[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["prompt"], {}).setdefault((row["kind"], row["samples"]), []).append(row)
    wanted: dict[tuple[str, int], int] = {}
    for each in found.values():
        for key, several in each.items():
            wanted[key] = max(wanted.get(key, 0), len(several))
    return {text: e for text, e in found.items() if all(len(e.get(key, ())) == n for key, n in wanted.items())}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Rows that are whole: a last line may be half written just now."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

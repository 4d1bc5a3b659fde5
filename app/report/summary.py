"""What a batch run comes to: counts, means with intervals, and the mean of the best so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from imgscale.app.batch.store import Failure, Item
from imgscale.app.bench import statistics

POINTS = 80  # of the mean curve
MOST = 3000  # prompts that are bootstrapped
Values = dict[tuple[str, int], float]


@dataclass(frozen=True)
class Summary:
    """The top of the page.

    Args:
        line: What all searches share.
        names: Of the verifiers, the steering one first.
        tiles: Values and names of what is counted.
        scores: A table with its head; none if nothing has a score.
        failures: Why there is no image, and how often.
        categories: Of the prompts, in order.
        settings: The run's configuration, as text.
        curve: NFE, and the mean of the best so far by each verifier; None if there is none.
    """

    line: str
    names: Sequence[str]
    tiles: Sequence[tuple[str, str]]
    scores: Sequence[Sequence[str]]
    failures: Sequence[tuple[str, int]]
    categories: Sequence[str]
    settings: str
    curve: Sequence[Sequence[float | None]] | None


def summary(
    items: Sequence[Item],
    failures: Sequence[Failure],
    states: Mapping[str, int],
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    names: Sequence[str],
) -> Summary:
    """Sums a run up.

    Args:
        items: Those with an image.
        failures: Those without.
        states: How many items there are by state.
        config: Of the run.
        versions: Of the packages that made it.
        names: The verifiers, the steering one first.
    """
    shared = [_all(items, of) for of in (lambda i: i.model, lambda i: i.searcher, lambda i: f"steered by {i.verifier}")]
    made = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("imgscale", "torch"))
    return Summary(
        line=" · ".join(text for text in (*shared, made) if text),
        names=names,
        tiles=_tiles(items, failures, states),
        scores=_scores(items, names),
        failures=Counter(failure.reason for failure in failures).most_common(),
        categories=list(dict.fromkeys(item.prompt.category for item in items if item.prompt.category)),
        settings=_yaml(config),
        curve=_curve(items, names),
    )


def _all(items: Sequence[Item], of: Callable[[Item], str]) -> str:
    """What is the same for all items, or how many different ones there are."""
    found = sorted({of(item) for item in items})
    return found[0] if len(found) == 1 else ", ".join(found[:3]) + ", …" * (len(found) > 3)


def _tiles(items: Sequence[Item], failures: Sequence[Failure], states: Mapping[str, int]) -> list[tuple[str, str]]:
    left = sum(states.get(state, 0) for state in ("waiting", "claimed"))
    nfe, seconds = [item.nfe for item in items], [item.seconds for item in items]
    tiles = [(f"{len(items)}", "images"), (f"{len({item.prompt.number for item in items})}", "prompts")]
    tiles += [(f"{len(failures)}", "without an image")] if failures else []
    tiles += [(f"{left}", "still to be made")] if left else []
    tiles += [(f"{cut}", "cut short by a deadline")] if (cut := states.get("cut", 0)) else []
    if items:
        tiles += [(f"{sum(nfe):,}", "NFE in all"), (f"{np.mean(nfe):.0f}", "NFE an image")]
        tiles += [(f"{np.mean(seconds):.1f}", "seconds an image, shared")]
    return tiles


def _scores(items: Sequence[Item], names: Sequence[str]) -> list[list[str]]:
    """Means by verifier: plain, searched, the difference, and how often it is one."""
    rows = []
    for name in names:
        after = _values(items, lambda item, name=name: item.scores.get(name))  # type: ignore[misc]
        before = _values(items, lambda item, name=name: item.plain_scores.get(name))  # type: ignore[misc]
        if not after:
            continue
        both = [key for key in after if key in before]
        better = sum(after[key] > before[key] for key in both) / len(both) if both else None
        rows.append(
            [
                f"{name}{' (steers)' if name == names[0] else ' (held out)'}",
                *(
                    [
                        _estimate(before),
                        _estimate(after),
                        _estimate({key: after[key] - before[key] for key in both}, "+"),
                    ]
                    if both
                    else [_estimate(after)]
                ),
                *([f"{100 * better:.0f}%"] if better is not None else []),
                f"{len(after)}",
            ]
        )
    if not rows:
        return []
    plain = max(map(len, rows)) == 6
    head = ["", "plain", "searched", "gain", "better", "n"] if plain else ["", "searched", "n"]
    padded = [row if len(row) == len(head) else [row[0], "–", row[1], "–", "–", row[2]] for row in rows]
    return [head, *padded]


def _values(items: Sequence[Item], of: Callable[[Item], float | None]) -> Values:
    pairs = (((item.prompt.text, item.number), of(item)) for item in items)
    return {key: value for key, value in pairs if value is not None}


def _estimate(values: Values, sign: str = "") -> str:
    """The mean over prompts with its 95% interval."""
    prompts = {prompt for prompt, _ in values}
    if len(prompts) <= MOST:
        found = statistics.estimate(values)
        mean, low, high = (found.value, found.low, found.high) if found else (np.nan,) * 3
    else:  # so many that a bootstrap says the same, and takes gigabytes
        means = np.array([np.mean(group) for group in _by_prompt(values)])
        mean, error = means.mean(), 1.96 * means.std(ddof=1) / np.sqrt(len(means))
        low, high = mean - error, mean + error
    return f"{mean:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def _by_prompt(values: Values) -> list[list[float]]:
    found: dict[str, list[float]] = {}
    for (prompt, _), value in values.items():
        found.setdefault(prompt, []).append(value)
    return list(found.values())


def _curve(items: Sequence[Item], names: Sequence[str]) -> list[list[float | None]] | None:
    """NFE, and the mean of the best so far by each verifier from where all searches have one."""
    rows: list[Any] = [{"trace": item.trace} for item in items if item.trace.get("nfe")]
    if len(rows) < 2 or not names:
        return None
    spent = np.unique(np.concatenate([row["trace"]["nfe"] for row in rows])).astype(float)
    grid = spent if len(spent) <= POINTS else np.unique(np.linspace(spent[0], spent[-1], POINTS).round())
    columns: list[list[float | None]] = []
    for name in names:
        known = [row for row in rows if any(s is not None for s in row["trace"]["scores"].get(name, ()))]
        if not known:
            columns.append([None] * len(grid))
            continue
        means = np.mean([statistics.best_so_far(row, "nfe", name, grid) for row in known], axis=0)
        columns.append([float(f"{mean:.5g}") if np.isfinite(mean) else None for mean in means])
    nfe: list[float | None] = [float(at) for at in grid]
    return [nfe, *columns] if len(grid) > 2 else None


def _yaml(config: Mapping[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    return text

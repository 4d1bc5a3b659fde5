"""What is kept of a search: its images, with their settings inside, and what the store says of them.

A file holds nothing that the clock has a part in, so that a run that was killed and resumed leaves the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale import png
from imgscale.app.batch.plan import Task
from imgscale.app.batch.queue import Result
from imgscale.app.outputs import slug

if TYPE_CHECKING:
    from imgscale.png import Record
    from imgscale.result import SearchOutput


def keep(output: SearchOutput, task: Task, folder: Path, before: Result | None = None) -> Result:
    """Writes the images of a search into a run folder.

    Args:
        output: Its outcome.
        task: What asked for it.
        folder: The run's.
        before: What came of the same item in earlier rounds; its image stays unless this one is better.

    Raises:
        OSError: They can't be written.
    """
    if before is not None and not output.scores[output.verifier] > _score(before):
        return joined(before, _values(output, before.values["settings"]), better=False)
    stem = f"images/{task.prompt.number:05d}-{slug(task.prompt.text)}-{task.job.seed}"
    record = _timeless(png.Record.of(output))
    images = []
    for i, (image, candidate) in enumerate(zip(output.images, output.gallery, strict=True)):
        file = f"{stem}.png" if i == 0 else f"{stem}-{i + 1}.png"
        scores = png.finite({output.verifier: candidate.score, **candidate.report})
        own = record.model_copy(update={"scores": scores, "seeds": [candidate.seed]})
        if i == 0:
            record = own
            png.write(folder / file, image, own)
        else:  # a re-run finds the best one, so that the others carry text for viewers alone
            png.write(folder / file, image, text=png.parameters(own))
        images.append((file, candidate.seed, scores))
    plain = None
    if output.plain is not None:
        plain = f"{stem}-plain.png"
        png.write(folder / plain, output.plain.image, text=png.parameters(record, searched=False))
    values = _values(output, record.model_dump(mode="json"))
    if output.plain is not None:
        values |= {"plain": plain, "plain_scores": png.finite(output.plain.scores)}
    if before is None:
        return Result(values, images)
    return Result(joined(before, values, better=True).values, images)


def _values(output: SearchOutput, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "searcher": output.searcher,
        "verifier": output.verifier,
        "held_out": list(output.held_out),
        "nfe": output.nfe,
        "seconds": output.ledger.seconds,
        "ledger": output.ledger.as_dict(),
        "trace": curves(output),
        "settings": settings,
        "stopped": output.stopped,
        "finished": output.finished,
        "events": list(output.events),
        "plain": None,
        "plain_scores": None,
    }


def _score(result: Result) -> float:
    """The steering verifier's of the best image; -inf where it has none."""
    score = result.images[0][2].get(result.values["verifier"]) if result.images else None
    return -math.inf if score is None else score


def joined(before: Result, now: Mapping[str, Any], *, better: bool) -> Result:
    """What came of all rounds together: sums of what was spent, one trace, and all else of the one with the best image.

    Args:
        before: Of the earlier ones.
        now: Columns of the latest.
        better: Whether its image is the best.
    """
    then = before.values
    values = dict(now if better else then)
    for name in ("nfe", "seconds"):
        values[name] = then[name] + now[name]
    spent = then["ledger"]
    values["ledger"] = {name: spent[name] + value for name, value in now["ledger"].items() if name in spent}
    values["trace"] = _one_trace(then, now)
    values["events"] = [*then["events"], *(event for event in now["events"] if event not in then["events"])]
    values["plain"], values["plain_scores"] = then["plain"], then["plain_scores"]
    return Result(values, before.images)


def _one_trace(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The best so far over both, as if the later round went on where the earlier one ended."""
    old, new, steers = then["trace"], now["trace"], now["verifier"]
    best = max((score for score in old["scores"].get(steers, []) if score is not None), default=-math.inf)
    rises = [i for i, score in enumerate(new["scores"][steers]) if score is not None and score > best]
    starts = {"nfe": then["nfe"], "seconds": then["seconds"], "verifier_calls": then["ledger"].get("verifier_calls", 0)}
    found = {name: [*old[name], *(round(start + new[name][i], 5) for i in rises)] for name, start in starts.items()}
    names = dict.fromkeys([*old["scores"], *new["scores"]])
    gaps, none = [None] * len(old["nfe"]), [None] * len(new["nfe"])
    scores = {n: old["scores"].get(n, gaps) + [new["scores"].get(n, none)[i] for i in rises] for n in names}
    return {**found, "scores": scores}


def _timeless(record: Record) -> Record:
    return record.model_copy(update={"ledger": {k: v for k, v in record.ledger.items() if k != "seconds"}})


def curves(output: SearchOutput) -> dict[str, Any]:
    """The trace as lists: nfe, seconds, verifier_calls, and scores by verifier."""
    points = output.trace
    names = [output.verifier, *(name for name in output.scores if name != output.verifier)]
    said = [png.finite({**point.report, output.verifier: point.score}) for point in points]
    return {
        "nfe": [point.nfe for point in points],
        "seconds": [round(point.seconds, 5) for point in points],
        "verifier_calls": [point.verifier_calls for point in points],
        "scores": {name: [scores.get(name) for scores in said] for name in names},
    }

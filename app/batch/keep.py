"""What is kept of a search: its images, with their settings inside, and what the store says of them.

A file holds nothing that the clock has a part in, so that a run that was killed and resumed leaves the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale import png
from imgscale.app.batch.plan import Task
from imgscale.app.batch.queue import Result
from imgscale.app.outputs import slug

if TYPE_CHECKING:
    from imgscale.png import Record
    from imgscale.result import SearchOutput


def keep(output: SearchOutput, task: Task, folder: Path) -> Result:
    """Writes the images of a search into a run folder.

    Args:
        output: Its outcome.
        task: What asked for it.
        folder: The run's.

    Raises:
        OSError: They can't be written.
    """
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
    values = {
        "searcher": output.searcher,
        "verifier": output.verifier,
        "held_out": list(output.held_out),
        "nfe": output.nfe,
        "seconds": output.ledger.seconds,
        "ledger": output.ledger.as_dict(),
        "trace": curves(output),
        "settings": record.model_dump(mode="json"),
        "stopped": output.stopped,
        "finished": output.finished,
        "events": list(output.events),
        "plain": plain,
        "plain_scores": None if output.plain is None else png.finite(output.plain.scores),
    }
    return Result(values, images)


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

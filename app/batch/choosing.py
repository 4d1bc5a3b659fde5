"""Items whose model and search `model="auto"` chooses: one after another, since each teaches the next."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from imgscale.app.auto import AutoJob
from imgscale.app.batch.plan import Task
from imgscale.app.batch.queue import Queue
from imgscale.app.console import complain
from imgscale.asks import Ask, Done
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.automatic import Auto
    from imgscale.result import SearchOutput
    from imgscale.watch import Progress


def search(auto: Auto, queue: Queue, task: Task, ask: Ask, follow: Callable[[Progress], None]) -> Done:
    """Searches for an item by what was decided for it, or decides now and takes that down before the search runs.

    A run that was stopped goes on with the same decision, so that the image is the same, whatever was learned since.

    Args:
        auto: The bandit.
        queue: Keeps decisions.
        task: The item; its id seeds what is drawn for it.
        ask: Its search.
        follow: Called after every engine step.
    """
    job = task.job
    assert isinstance(job, AutoJob)
    kept = queue.decided(task.number)
    try:
        output = auto.search(
            ask,
            budget=job.budget,
            decided=None if kept is None else auto.recalled(ask.prompt, kept),
            draws=zlib.crc32(task.id.encode()),
            explain=lambda decision: queue.decide(task.number, decision.as_dict()),
            progress=False,
            callback=follow,
            **job.sizes,
        )
    except UserError as error:
        return Done(ask, task.number, error=error)
    return Done(ask, task.number, output)


def learn(auto: Auto, output: SearchOutput) -> None:
    """Learns from an item that is done, once: it is never made again."""
    told = len(output.events)
    auto.learn(output)
    for event in output.events[told:]:
        complain(event)

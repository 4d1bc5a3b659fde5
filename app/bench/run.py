"""The searches of a comparison, one batch of prompts after the other, each row kept as soon as it is finished.

All searchers get a batch of prompts before the next one is begun, so that a run that was stopped compares them on the
same prompts.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import imgscale
from imgscale import png
from imgscale.app.bench.config import Config
from imgscale.app.bench.prompts import Prompt, spread
from imgscale.app.bench.rows import PLAIN, Row, Rows
from imgscale.app.console import Interrupt, complain, only_results_on_stdout, waiting
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.result import SearchOutput
    from imgscale.scaler import Scaler
    from imgscale.watch import Progress


@dataclass(frozen=True)
class Task:
    """Searches that run side by side: some prompts, and all else in common."""

    model: str
    seed: int
    prompts: Sequence[Prompt]
    verifier: str
    searcher: str
    budget: int

    @property
    def what(self) -> str:
        search = PLAIN if self.searcher == PLAIN else f"{self.searcher} at {self.budget} NFE"
        return f"{search} by {self.verifier} on {self.model}"


@dataclass
class Outcome:
    """How a run went.

    Args:
        added: Rows that were finished.
        left_out: Searches that can't be run, and why.
        stopped_by: "Ctrl-C" or "SIGTERM" if it was stopped.
    """

    added: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    stopped_by: str | None = None


def tasks(config: Config, prompts: Sequence[Prompt], rows: Rows) -> Iterator[Task]:
    """What is still to be done, in order."""
    searches = list(itertools.product(config.searchers, config.budgets))
    searches = [(PLAIN, 0), *searches] if config.plain else searches
    seeds = range(config.seed, config.seed + config.seeds)
    starts = range(0, len(prompts), config.together)
    mixed = spread(prompts)
    for model, seed, start, verifier in itertools.product(config.models, seeds, starts, config.verifiers):
        batch = mixed[start : start + config.together]
        for searcher, budget in searches:
            left = [p for p in batch if (model, p.text, seed, searcher, budget, verifier) not in rows]
            if left:
                yield Task(model, seed, left, verifier, searcher, budget)


def run(config: Config, prompts: Sequence[Prompt], rows: Rows, quiet: bool = False) -> Outcome:
    """Does what isn't done yet.

    Args:
        config: From `Config.checked`.
        prompts: Likewise.
        rows: From `rows.opened`.
        quiet: Show no progress.

    Raises:
        UserError: A model can't be loaded.
    """
    todo = list(tasks(config, prompts, rows))
    outcome = Outcome()
    total = sum(len(task.prompts) for task in todo)
    with Interrupt("the finished rows are kept (once more ends at once)") as interrupt, _Bar(quiet, total) as bar:
        try:
            for model, group in itertools.groupby(todo, lambda task: task.model):
                scaler = _load(config, model, quiet, outcome)
                for i, task in enumerate(group):
                    if scaler is None or task.what in outcome.left_out:
                        bar.count(len(task.prompts))
                    elif not interrupt.asked:
                        _do(config, task, scaler, rows, outcome, interrupt, bar, warm_up=i == 0)
                del scaler  # before the next one is loaded
        except KeyboardInterrupt:
            interrupt.asked = True
    outcome.stopped_by = interrupt.by if interrupt.asked else None
    return outcome


def _load(config: Config, model: str, quiet: bool, outcome: Outcome) -> Scaler | None:
    try:
        with only_results_on_stdout(), waiting(quiet, f"Loading {model}"):
            import torch

            dtype = None if config.dtype is None else getattr(torch, config.dtype)
            scaler = imgscale.load(model, device=config.device, dtype=dtype, max_batch=config.max_batch)
            for spec in (*config.verifiers, *(config.report or ())):
                scaler.verifier(spec)
        return scaler
    except Exception as error:
        _leave_out(outcome, f"the model {model}", error)
        return None


def _leave_out(outcome: Outcome, what: str, error: Exception) -> None:
    """What one model or searcher can't do doesn't keep the others from being run."""
    mistake = isinstance(error, UserError)
    if not mistake and os.environ.get("IMGSCALE_DEBUG") == "1":
        raise error
    reason = str(error) if mistake else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    outcome.left_out[what] = reason
    complain(f"left out {what}: {reason}")


def _do(
    config: Config,
    task: Task,
    scaler: Scaler,
    rows: Rows,
    outcome: Outcome,
    interrupt: Interrupt,
    bar: _Bar,
    warm_up: bool,
) -> None:
    def follow(progress: Progress) -> None:
        bar.show(task, progress)
        if interrupt.asked:
            progress.cancel()

    try:
        with only_results_on_stdout():
            if warm_up:  # allocators, caches and lazily loaded weights aren't the first searcher's to pay for
                _search(config, task, scaler, task.prompts[:1], None, plain=True)
            began = time.monotonic()
            outputs = _search(config, task, scaler, task.prompts, follow, plain=task.searcher == PLAIN)
            seconds = time.monotonic() - began
    except Exception as error:
        _leave_out(outcome, task.what, error)
        outputs = []
    for prompt, output in zip(task.prompts, outputs, strict=False):
        if output.stopped != "cancelled":  # a search that was cut short is no row
            rows.add(_row(task, prompt, output, seconds, rows, scaler), output.images[0])
            outcome.added += 1
    if not interrupt.asked:
        bar.count(len(task.prompts))


def _search(
    config: Config, task: Task, scaler: Scaler, prompts: Sequence[Prompt], callback: Any, plain: bool
) -> list[SearchOutput]:
    from imgscale.assets.shapes.prompts import own_seed

    outputs: list[SearchOutput] = scaler(
        [prompt.text for prompt in prompts],
        searcher="best-of-n" if plain else task.searcher,
        options={"n": 1} if plain else None,
        verifier=task.verifier,
        report=config.report or (),
        budget=10**6 if plain else task.budget,
        seed=[own_seed(prompt.text, task.seed) for prompt in prompts],
        height=config.height,
        width=config.width,
        num_inference_steps=config.steps,
        guidance_scale=config.guidance,
        plain=False,
        preview=config.preview,
        progress=False,
        callback=callback,
    )
    return outputs


def _row(task: Task, prompt: Prompt, output: SearchOutput, seconds: float, rows: Rows, scaler: Scaler) -> Row:
    """All that is kept of a search, but for its image. Seconds are an image's share of what its batch took."""
    n = len(task.prompts)
    scores = png.finite(output.scores)
    plain = rows.get((task.model, prompt.text, task.seed, PLAIN, 0, task.verifier))
    points = output.trace
    names = [output.verifier, *(name for name in output.scores if name != output.verifier)]
    trace = {
        "nfe": [p.nfe for p in points],
        "seconds": [round(p.seconds / n, 5) for p in points],
        "verifier_calls": [p.verifier_calls for p in points],
        "scores": {name: [png.finite({**p.report, names[0]: p.score}).get(name) for p in points] for name in names},
    }
    spent = {name: value for name, value in output.ledger.as_dict().items() if name != "seconds"}
    return {
        "model": task.model,
        "prompt": prompt.text,
        "seed": task.seed,
        "searcher": task.searcher,
        "budget": task.budget,
        "verifier": task.verifier,
        "steers": output.verifier,
        "score": scores[output.verifier],
        "held_out": {name: scores[name] for name in output.held_out},
        "members": {name: scores[name] for name in output.members},
        "plain": plain and {plain["steers"]: plain["score"], **plain.get("members", {}), **plain["held_out"]},
        **spent,
        "seconds": round(seconds / n, 5),
        "together": n,
        "stopped": output.stopped,
        "finished": output.finished,
        "events": output.events,
        "noise_seed": output.settings["seed"],
        "steps": output.settings["num_inference_steps"],
        "guidance": output.settings["guidance_scale"],
        "height": output.settings["height"],
        "width": output.settings["width"],
        "preview": output.settings["preview"],
        "imgscale": imgscale.__version__,
        "torch": version("torch"),
        "device": str(scaler.engine.denoiser.device),
        "dtype": str(scaler.engine.denoiser.dtype).removeprefix("torch."),
        "columns": dict(prompt.columns),
        "trace": trace,
    }


class _Bar:
    """How many rows are done and how long the rest will take; off a terminal, a line at each tenth or half a minute."""

    def __init__(self, quiet: bool, total: int) -> None:
        self._quiet, self._total, self._done = quiet, total, 0
        self._bar: Any = None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> _Bar:
        from rich.console import Console

        console = Console(stderr=True)
        if not self._quiet and self._total and console.is_terminal and not console.is_dumb_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            left = TimeRemainingColumn(), TextColumn("left"), TextColumn("{task.description}", markup=False)
            self._bar = Bar(
                MofNCompleteColumn(), TextColumn("rows"), BarColumn(), *left, console=console, transient=True
            )
            self._task = self._bar.add_task("loading", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, task: Task, progress: Progress) -> None:
        if self._bar is not None:
            share = progress.nfe / progress.total if progress.total and task.searcher != PLAIN else 0.0
            self._bar.update(self._task, completed=int(self._done + share * len(task.prompts)), description=task.what)

    def count(self, n: int) -> None:
        """Counts rows as done."""
        before, self._done = self._done, self._done + n
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            return
        now = time.monotonic()
        if not self._quiet and (self._done * 10 // self._total > before * 10 // self._total or now - self._said >= 30):
            self._said = now
            print(f"{self._done}/{self._total} rows, {now - self._began:.0f} s", file=sys.stderr, flush=True)

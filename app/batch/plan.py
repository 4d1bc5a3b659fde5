"""What a run consists of, worked out from a file of prompts and the settings alone: the same ones make the same run."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from imgscale.app import asked, checks, records
from imgscale.app.auto import AutoJob, default_judges, undecided
from imgscale.app.batch import wildcards
from imgscale.app.batch.store import Prompt
from imgscale.app.job import Job, parse_shapes
from imgscale.early_exit import EarlyExit, Rule, chosen
from imgscale.errors import UnknownName, UserError
from imgscale.models import bundled
from imgscale.registry import judges, members, parse

STDIN = "-"
OVERRIDES = tuple(name for name in asked.READ if name not in ("device", "dtype", "max_batch"))
"""Settings that a row may change; the others are of the machine."""
CHECKED = ("negative", "model", "searcher", "guide", "options", "verifier", "report", "preview", "early_exit")
"""Those that `Job.check` looks at; it takes its time."""
SAMPLE = "a red circle"  # any verifier can judge it


@dataclass(frozen=True)
class Task:
    """An item of a run: a prompt and a seed.

    Args:
        number: From 0, in the order of the prompts and then the seeds.
        id: From what is asked for, and which copy it is where that is asked for more than once.
        prompt: What it belongs to.
        job: What is asked for.
        keep: How many images to keep; None for all.
        error: Why it can't be run, or "".
    """

    number: int
    id: str
    prompt: Prompt
    job: Job
    keep: int | None
    error: str = ""


@dataclass(frozen=True)
class Plan:
    """A run.

    Args:
        id: From everything below.
        config: The exact configuration, as JSON can hold it.
        prompts: In their order.
        tasks: In their order.
        bad: Rows that hold no prompt.
    """

    id: str
    config: dict[str, Any]
    prompts: list[Prompt]
    tasks: list[Task]
    bad: list[records.Bad]

    @property
    def calibrated(self) -> list[str]:
        """Models with searches whose early exit goes by what was learned before."""
        found = [task.job for task in self.tasks if not task.error and task.job.early_exit != "off"]
        return list(dict.fromkeys(job.model for job in found if _learns(job.early_exit)))

    @property
    def models(self) -> list[str]:
        """In the order in which they first appear."""
        return list(dict.fromkeys(task.job.model for task in self.tasks))


@dataclass(frozen=True)
class Wish:
    """What a command asks for.

    Args:
        source: A file, the name of a bundled list, or "-" for standard input.
        base: Every item's settings, unless its row has others; its prompt is empty.
        report: Held-out judges; None for the shapes oracle where it can judge.
        keep: How many images of an item to keep; None for all.
        seeds: Of every prompt.
        kind: How the source is written, such as "csv"; None to go by its name.
        wildcards: Whether braces in prompts are read.
        overrides: Whether rows may change settings.
        total: Model evaluations of all searches together, or None.
        together: Items that run side by side.
    """

    source: str
    base: Job
    report: tuple[str, ...] | None = None
    keep: int | None = 1
    seeds: Sequence[int] = (0,)
    kind: str | None = None
    wildcards: bool = True
    overrides: bool = True
    total: int | None = None
    together: int = 8


def plan(wish: Wish) -> Plan:
    """Reads the prompts and works out the run. What is wrong with one prompt is its own matter; no model is loaded.

    Raises:
        UserError: The file can't be read or is empty, or the settings can't be.
    """
    replace(wish.base, prompt=SAMPLE, report=wish.report or ()).check()
    if wish.total is not None and (error := _undivided(wish.base, wish.keep)):
        raise UserError(error)
    prompts: list[Prompt] = []
    tasks: list[Task] = []
    bad: list[records.Bad] = []
    make = _Maker(wish)
    for row in _rows(wish.source, wish.kind):
        if isinstance(row, records.Bad):
            bad.append(row)
            continue
        try:
            made = make.prompts(row, len(prompts))
        except UserError as error:
            bad.append(records.Bad(row.number, str(error), row.text))
            continue
        for prompt, seeds, settings in made:
            prompts.append(prompt)
            tasks += make.tasks(prompt, seeds, settings, len(tasks))
    if not (prompts or bad):
        raise UserError(f"The prompt file {wish.source!r} is empty; give one with at least one prompt.")
    config = _config(wish, prompts)
    told = json.dumps([config, [task.id for task in tasks]], sort_keys=True)
    return Plan(hashlib.sha256(told.encode()).hexdigest()[:16], config, prompts, tasks, bad)


def _rows(source: str, kind: str | None) -> Iterator[records.Row | records.Bad]:
    from imgscale.app.bench import prompts as lists

    known = lists.bundled()
    path = known.get(source) or Path(source).expanduser()
    ending = None if kind is None else f".{kind}"
    if source != STDIN and source not in known and not path.is_file():
        raise UnknownName("prompt file", source, known, f"Give a file ({', '.join(records.ENDINGS)}), or - for stdin.")
    if ending is None and source != STDIN:
        ending = path.suffix.lower()
        if ending not in records.ENDINGS:
            raise UserError(
                f"The prompt file {source!r} has no known ending; say how it is written with --format, such as"
                " --format txt."
            )
    try:
        text = records.decoded(sys.stdin.buffer.read() if source == STDIN else path.read_bytes())
        yield from records.prompts(ending or _guessed(text), text)
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"The prompt file {source!r} can't be read ({reason}); mend it.") from error


def _guessed(text: str) -> str:
    """How standard input is written: JSONL if its first line is an object, and else a prompt a line."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    try:
        return ".jsonl" if isinstance(json.loads(first), dict) else ".txt"
    except ValueError:
        return ".txt"


class _Maker:
    """Makes prompts and tasks of rows, and remembers what was found out for others."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._copies: dict[str, int] = {}
        self._known: dict[str, tuple[str, bool]] = {}
        self._bundled = set(bundled())
        if isinstance(wish.base, AutoJob) and default_judges(wish.base.pool, SAMPLE):
            self._bundled.add(wish.base.model)

    def prompts(self, row: records.Row, number: int) -> list[tuple[Prompt, Sequence[int], dict[str, Any]]]:
        """The prompts of a row, with their seeds and settings.

        Raises:
            UserError: A setting that can't be.
        """
        columns = dict(row.columns)
        settings, said, seeds = {}, {}, self._wish.seeds
        if self._wish.overrides:
            said = {name: value for name in OVERRIDES if (value := _override(columns, name)) is not None}
            settings = asked.read(said, lambda name: f"The {name} in its row")
            if isinstance(self._wish.base, AutoJob):
                undecided(settings)
            given = records.take(columns, ("seed", "seeds"))
            if given not in (None, ""):
                seeds = wildcards.seeds(given, "The seed in its row")
                said["seed"] = given
        texts = wildcards.expand(row.text) if self._wish.wildcards else [row.text]
        made = []
        for i, text in enumerate(texts):
            text = checks.prompt(text.strip())
            prompt = Prompt(number + i, _hash([text, said]), row.number, text, columns, said)
            made.append((prompt, seeds, settings))
        return made

    def tasks(self, prompt: Prompt, seeds: Sequence[int], settings: dict[str, Any], number: int) -> Iterator[Task]:
        error, shapes = self._checked(settings)
        base = asked.changed(self._wish.base, settings) if settings else self._wish.base
        report = settings.get("report", self._wish.report)
        unjudged = _unjudged(prompt.text) if shapes or (report is None and base.model in self._bundled) else ""
        if shapes and not error:
            error = unjudged
        if report is None:
            report = ("shapes",) if base.model in self._bundled and not unjudged else ()
        asks = _asks(base)
        keep = settings.get("keep", self._wish.keep)
        error = error or (_undivided(base, keep) if self._wish.total is not None else "")
        job = replace(base, prompt=prompt.text, report=report)
        for i, seed in enumerate(seeds):
            asks |= {"prompt": prompt.text, "seed": seed, "keep": keep, "report": report}
            id_ = _hash(asks)
            copy = self._copies[id_] = self._copies.get(id_, 0) + 1
            name = id_ if copy == 1 else f"{id_}-{copy}"
            yield Task(number + i, name, prompt, replace(job, seed=seed), keep, error)

    def _checked(self, settings: dict[str, Any]) -> tuple[str, bool]:
        """Why a search with some settings can't be, or "", and whether the oracle has to judge."""
        said = {name: value for name, value in settings.items() if name in CHECKED}
        key = json.dumps(said, sort_keys=True)
        if key not in self._known:
            job, report = asked.changed(self._wish.base, said), settings.get("report", self._wish.report) or ()
            error, shapes = "", False
            try:
                replace(job, prompt=SAMPLE, report=report).check()
                names = [entry.name for spec in (job.verifier, *report) for entry in judges(spec).values()]
                shapes = "shapes" in names
            except UserError as found:
                error = str(found)
            self._known[key] = error, shapes
        return self._known[key]


def _learns(early_exit: str | Rule) -> bool:
    exit = chosen(early_exit)
    return isinstance(exit, EarlyExit) and exit.mode == "calibrated"


def _override(columns: dict[str, Any], name: str) -> Any:
    """A setting in a row, taken out of it; None if it is empty, as in tables with gaps."""
    others = [alias for alias, meant in asked.ALIASES.items() if meant == name]
    value = records.take(columns, (name, *others))
    return None if value is None or value == "" else value


def _unjudged(prompt: str) -> str:
    try:
        parse_shapes(prompt)
    except ValueError as error:
        return f"The verifier 'shapes' can't judge this prompt: {error}"
    return ""


def _undivided(job: Job, keep: int | None) -> str:
    """Why a search can't have part in a total budget, which makes it in several rounds, or ""."""
    if isinstance(job, AutoJob):
        return "--total-budget can't be divided where --model auto chooses what each search takes; give --budget."
    if keep != 1:
        return "--total-budget keeps the best image of each search and no others; leave out --keep, or give --budget."
    if len(members(job.verifier)) > 1 or parse(job.verifier)[0] == "ensemble":
        return (
            f"--total-budget can't be divided by {job.verifier!r}: an ensemble's scores only compare the images of one"
            " search; give one verifier, or --budget."
        )
    return ""


def _asks(job: Job) -> dict[str, Any]:
    """Everything that an image depends on but its prompt, seed and report, as JSON can hold it."""
    values = asdict(job)
    for name in ("prompt", "seed", "report", "journal", "save_noise", "distilled"):
        del values[name]
    values = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return values | {"options": {name: str(value) for name, value in job.options.items()}}


def _config(wish: Wish, prompts: Sequence[Prompt]) -> dict[str, Any]:
    values = _asks(wish.base)
    limits = {name: limit for name, limit in values.pop("budget").items() if limit is not None}
    source = wish.source if wish.source == STDIN else Path(wish.source).name
    return {
        "source": source,
        "prompts": len(prompts),
        "texts": _hash([[prompt.id, dict(prompt.columns)] for prompt in prompts]),
        "seeds": list(wish.seeds),
        **values,
        "report": None if wish.report is None else list(wish.report),
        "budget": limits,
        "keep": wish.keep,
        "total_budget": wish.total,
    }


NOT_ASKED = ("source",)  # of the configuration: says where prompts came from and changes nothing


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not the same in two configurations, each in a few words."""
    said = {"texts": "other prompts"}
    found = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if old == new or name in NOT_ASKED or (name == "texts" and before["prompts"] != now["prompts"]):
            continue
        found.append(said.get(name) or f"{name.replace('_', '-')} {_said(old)} and not {_said(new)}")
    return found


def _said(value: Any) -> str:
    return "the default" if value is None else json.dumps(value, ensure_ascii=False)


def _hash(value: Any) -> str:
    told = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]

"""What a run folder knows: an SQLite database beside the images, to be read while a run is under way, too.

    RUN/run.sqlite             this
    RUN/images/00012-a-red-circle-7.png          the best image of prompt 12 for seed 7, and -2, -3, … those after it
    RUN/images/00012-a-red-circle-7-plain.png    what the model draws without a search

Reading never changes anything. Writing is the business of `imgscale.app.batch.queue`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgscale.errors import UserError

NAME = "run.sqlite"
VERSION = 2  # of the schema
WAITING, CLAIMED, DONE, CUT, FAILED = "waiting", "claimed", "done", "cut", "failed"  # states of an item

SCHEMA = """
CREATE TABLE run (id TEXT NOT NULL, config TEXT NOT NULL, versions TEXT NOT NULL, began REAL NOT NULL);
CREATE TABLE prompts (
    number INTEGER PRIMARY KEY,     -- from 0, as they came
    id TEXT NOT NULL,               -- from its text and settings
    row INTEGER NOT NULL,           -- of the file, from 1
    text TEXT NOT NULL,
    columns TEXT NOT NULL,          -- what else its row says: JSON object
    settings TEXT NOT NULL          -- in which it differs from the run's: JSON object
);
CREATE TABLE items (
    number INTEGER PRIMARY KEY,     -- from 0; one for each prompt and seed
    id TEXT NOT NULL UNIQUE,        -- from what was asked for, and its copy if that was asked for before
    prompt INTEGER NOT NULL REFERENCES prompts (number),
    seed INTEGER NOT NULL,
    model TEXT NOT NULL,
    state TEXT NOT NULL,            -- waiting, claimed, done, cut (by a deadline: made again), failed
    worker TEXT                     -- who claimed it
);
CREATE INDEX items_by_state ON items (state, model, number);
CREATE TABLE results (
    item INTEGER PRIMARY KEY REFERENCES items (number),
    searcher TEXT NOT NULL,
    verifier TEXT NOT NULL,         -- the one that steered
    held_out TEXT NOT NULL,         -- names of those that only judged: JSON list
    nfe INTEGER NOT NULL,
    seconds REAL NOT NULL,
    ledger TEXT NOT NULL,           -- all that was spent: JSON object
    trace TEXT NOT NULL,            -- the best so far: JSON object of lists; see Item
    settings TEXT NOT NULL,         -- as in the PNG: JSON object
    stopped TEXT NOT NULL,
    finished INTEGER NOT NULL,
    events TEXT NOT NULL,           -- notices: JSON list
    plain TEXT,                     -- file of the plain image
    plain_scores TEXT,              -- JSON object
    ended REAL NOT NULL             -- Unix time
);
CREATE TABLE images (
    item INTEGER NOT NULL REFERENCES items (number),
    rank INTEGER NOT NULL,          -- 1 is the best
    file TEXT NOT NULL,             -- in the run folder
    seed INTEGER NOT NULL,          -- the key of the noise that it grew from
    scores TEXT NOT NULL,           -- by verifier, the steering one first; null where there is none: JSON object
    PRIMARY KEY (item, rank)
);
CREATE TABLE rounds (               -- of a run with a total budget: what an item was given, and what came of it
    item INTEGER NOT NULL REFERENCES items (number),
    round INTEGER NOT NULL,         -- from 0
    least INTEGER NOT NULL,         -- model evaluations of one sample
    budget INTEGER NOT NULL,
    nfe INTEGER,                    -- spent; null until it is over
    scores TEXT NOT NULL,           -- of the finished images, by the verifier that steers: JSON list
    ceiling REAL,                   -- of that verifier
    PRIMARY KEY (item, round)
);
CREATE TABLE failures (
    number INTEGER PRIMARY KEY,
    row INTEGER NOT NULL,           -- of the file
    item INTEGER REFERENCES items (number),  -- none if the row itself is bad
    text TEXT NOT NULL,             -- the prompt, or what there is of it
    reason TEXT NOT NULL,
    at REAL NOT NULL
);
CREATE TABLE workers (name TEXT PRIMARY KEY, pid INTEGER NOT NULL, host TEXT NOT NULL, began REAL NOT NULL, ended REAL);
"""

Scores = dict[str, float | None]


@dataclass(frozen=True)
class Prompt:
    """A prompt of a run.

    Args:
        number: From 0, as they came.
        id: From its text and settings.
        row: Of the file, from 1; wildcards make several prompts of one.
        text: What to draw.
        columns: Everything else in its row that is no setting.
        settings: In which it differs from the run's.
    """

    number: int
    id: str
    row: int
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def category(self) -> str:
        """Its category, or GenEval's tag, or ""."""
        lower = {name.lower(): value for name, value in self.columns.items()}
        return str(lower.get("category") or lower.get("tag") or "")


@dataclass(frozen=True)
class Picture:
    """An image of an item.

    Args:
        rank: 1 is the best.
        path: Where it is.
        file: The same in the run folder.
        seed: The key of the noise that it grew from.
        scores: By verifier, the steering one first; None where there is none.
    """

    rank: int
    path: Path
    file: str
    seed: int
    scores: Scores


@dataclass(frozen=True)
class Item:
    """What came of a prompt and a seed.

    Args:
        number: From 0, in the order of the prompts and then the seeds.
        id: From what was asked for.
        prompt: Its prompt.
        seed: Its seed.
        model: What drew it.
        state: "done", "cut" if a deadline ended it early (the same command makes it again), or "failed" if no verifier
            judged it.
        searcher: What searched, with its guide.
        verifier: What steered.
        held_out: What only judged.
        nfe: Model evaluations spent.
        seconds: Wall time, which it shared with others.
        ledger: Everything spent.
        trace: The best so far each time it changed: lists "nfe", "seconds", "verifier_calls", and by verifier
            "scores".
        settings: What the PNG says, too.
        stopped: Why the search ended; see `SearchOutput`.
        finished: False if the image is only a preview.
        events: Notices.
        images: The best first.
        plain: The image without a search, or None.
        plain_scores: Its scores.
    """

    number: int
    id: str
    prompt: Prompt
    seed: int
    model: str
    state: str
    searcher: str
    verifier: str
    held_out: list[str]
    nfe: int
    seconds: float
    ledger: dict[str, float]
    trace: dict[str, Any]
    settings: dict[str, Any]
    stopped: str
    finished: bool
    events: list[str]
    images: list[Picture]
    plain: Path | None
    plain_scores: Scores

    @property
    def scores(self) -> Scores:
        """The best image's."""
        return self.images[0].scores


@dataclass(frozen=True)
class Failure:
    """What couldn't be made, and why.

    Args:
        row: Of the file, from 1.
        text: The prompt, or what there is of it.
        reason: One sentence.
        item: Its number, or None if the row itself is bad.
    """

    row: int
    text: str
    reason: str
    item: int | None = None


class Store:
    """A run folder, to read. Made by `open`.

    Attributes:
        folder: Where it is.
        id: Of the run: the same configuration and prompts have the same one.
        config: The exact configuration.
        versions: Of the packages that began it.
    """

    def __init__(self, folder: Path, database: sqlite3.Connection) -> None:
        self.folder = folder
        self._database = database
        self.id, config, versions = database.execute("SELECT id, config, versions FROM run").fetchone()
        self.config: dict[str, Any] = json.loads(config)
        self.versions: dict[str, str] = json.loads(versions)

    @classmethod
    def open(cls, folder: Path | str) -> Store:
        """The run in a folder; one that goes on meanwhile may be read, too.

        Raises:
            UserError: There is none, or it was written by a newer imgscale.
        """
        folder = Path(folder)
        file = folder / NAME
        if not file.is_file():
            raise UserError(f"There is no run in {str(folder)!r}; give a folder that imgscale batch wrote.")
        name = file.resolve().as_uri()
        for way in ("mode=ro", "immutable=1"):  # the second where even SQLite's own files can't be written
            with suppress(sqlite3.OperationalError):
                database = sqlite3.connect(f"{name}?{way}", uri=True, timeout=60)
                return cls._checked(folder, database)
        raise UserError(f"The run in {str(folder)!r} can't be read; give a folder that imgscale batch wrote.")

    @classmethod
    def _checked(cls, folder: Path, database: sqlite3.Connection) -> Store:
        check_version(folder, database)
        try:
            return cls(folder, database)
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            if isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
                raise
            raise UserError(f"The run in {str(folder)!r} was never begun; run the command again.") from error

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------- what there is

    def prompts(self) -> list[Prompt]:
        """All prompts in their order."""
        rows = self._database.execute("SELECT number, id, row, text, columns, settings FROM prompts ORDER BY number")
        return [
            Prompt(number, id_, row, text, json.loads(columns), json.loads(settings))
            for number, id_, row, text, columns, settings in rows
        ]

    def states(self) -> dict[str, int]:
        """How many items there are by state."""
        return dict(self._database.execute("SELECT state, count(*) FROM items GROUP BY state"))

    def items(self) -> Iterator[Item]:
        """The items with an image, in the order of their numbers, one at a time."""
        prompts = {prompt.number: prompt for prompt in self.prompts()}
        rows = self._database.execute(
            "SELECT i.number, i.id, i.prompt, i.seed, i.model, i.state, r.searcher, r.verifier, r.held_out, r.nfe,"
            " r.seconds, r.ledger, r.trace, r.settings, r.stopped, r.finished, r.events, r.plain, r.plain_scores"
            " FROM items i JOIN results r ON r.item = i.number ORDER BY i.number"
        )
        for row in rows:
            number, id_, prompt, seed, model, state, searcher, verifier, held_out, nfe, seconds, *rest = row
            ledger, trace, settings, stopped, finished, events, plain, plain_scores = rest
            said = json.loads(settings)
            yield Item(
                number=number,
                id=id_,
                prompt=prompts[prompt],
                seed=seed,
                model=said["model"] if model == "auto" else model,
                state=state,
                searcher=searcher,
                verifier=verifier,
                held_out=json.loads(held_out),
                nfe=nfe,
                seconds=seconds,
                ledger=json.loads(ledger),
                trace=json.loads(trace),
                settings=said,
                stopped=stopped,
                finished=bool(finished),
                events=json.loads(events),
                images=self._images(number),
                plain=None if plain is None else self._path(plain),
                plain_scores={} if plain_scores is None else json.loads(plain_scores),
            )

    def _images(self, item: int) -> list[Picture]:
        rows = self._database.execute(
            "SELECT rank, file, seed, scores FROM images WHERE item = ? ORDER BY rank", (item,)
        )
        return [Picture(rank, self._path(file), file, seed, json.loads(scores)) for rank, file, seed, scores in rows]

    def _path(self, file: str) -> Path:
        """A file of the run, which may not be anywhere else, whoever wrote the database."""
        path = (self.folder / file).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise UserError(f"The run in {str(self.folder)!r} names a file outside of it ({file!r}); don't trust it.")
        return self.folder / file

    def scores(self) -> dict[str, dict[int, float | None]]:
        """Scores of the best images by verifier and item, those that steered first."""
        found: dict[str, dict[int, float | None]] = {}
        rows = self._database.execute("SELECT item, scores FROM images WHERE rank = 1 ORDER BY item")
        for item, scores in rows:
            for name, score in json.loads(scores).items():
                found.setdefault(name, {})[item] = score
        return found

    def failures(self) -> list[Failure]:
        """What couldn't be made, in the order of the rows."""
        rows = self._database.execute("SELECT row, text, reason, item FROM failures ORDER BY row, number")
        return [Failure(*row) for row in rows]


def check_version(folder: Path, database: sqlite3.Connection) -> None:
    """Refuses what this imgscale can't read.

    Raises:
        UserError: It is no database, or newer than this imgscale.
    """
    try:
        version = int(database.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        raise UserError(
            f"{str(folder / NAME)!r} is no database of imgscale ({error}); choose another folder."
        ) from error
    if version > VERSION:
        raise UserError(
            f"The run in {str(folder)!r} was written by a newer imgscale (its store has version {version}, and this one"
            f" reads up to {VERSION}); update imgscale."
        )

"""What is still to be done in a run folder, who does it, and what came of it. Each step is one transaction.

A process that dies leaves its claims behind, and the next one to look takes them over. What is finished stays so.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgscale.app.batch import lock
from imgscale.app.batch.plan import Plan, Task, differences
from imgscale.app.batch.rounds import Turn
from imgscale.app.batch.store import (
    CLAIMED,
    CUT,
    DONE,
    FAILED,
    NAME,
    SCHEMA,
    VERSION,
    WAITING,
    check_version,
)
from imgscale.calibration import Calibrations
from imgscale.errors import UserError
from imgscale.models import folder_of

_JSON = ("held_out", "ledger", "trace", "settings", "events", "plain_scores")  # columns of results
PATIENCE = 60.0  # seconds to wait for another process's transaction


@dataclass(frozen=True)
class Result:
    """What came of an item, as it goes into the store; see there.

    Args:
        values: The columns of `results` by name, without the item's number.
        images: The columns of `images`, the best first: file, seed, scores.
    """

    values: Mapping[str, Any]
    images: Sequence[tuple[str, int, Mapping[str, float | None]]] = field(default=())


class Queue:
    """The work of a run. Made by `enter`.

    Attributes:
        others: Whether other processes were at work when this one came in.
        before: Versions of packages that began the run, where they were others.
    """

    def __init__(self, folder: Path, database: sqlite3.Connection, worker: lock.Worker, others: bool) -> None:
        self.folder = folder
        self.others = others
        self.before: dict[str, str] = {}
        self._database = database
        self._worker = worker

    # ------------------------------------------------------------------------------------------- coming and going

    def begin(self, plan: Plan, versions: Mapping[str, str]) -> None:
        """Writes the plan into a new folder, or checks it against what is there. To be called with the door held.

        Raises:
            UserError: The folder holds another run.
        """
        with self._transaction() as do:
            if do("PRAGMA user_version").fetchone()[0] == 0:
                self._write(plan, versions)
            run, config, before = do("SELECT id, config, versions FROM run").fetchone()
            if run != plan.id:
                what = ", ".join(differences(json.loads(config), plan.config)) or "other settings"
                raise UserError(
                    f"{str(self.folder)!r} holds another run ({what}); choose another --out, or add --fresh to begin"
                    " anew, which moves it aside."
                )
            do("CREATE TABLE IF NOT EXISTS decisions (item INTEGER PRIMARY KEY, decision TEXT NOT NULL)")
            do("CREATE TABLE IF NOT EXISTS calibrations (model TEXT PRIMARY KEY, races TEXT NOT NULL)")
            known = {model for (model,) in do("SELECT model FROM calibrations")}
            for model in (model for model in plan.calibrated if model not in known):
                races = Calibrations(folder_of(model), model).everything()
                do("INSERT INTO calibrations VALUES (?, ?)", (model, races))
            self.before = {n: v for n, v in json.loads(before).items() if versions.get(n) != v}
            if not self.others:  # what couldn't be done before may be possible now
                do("UPDATE items SET state = ?, worker = NULL WHERE state NOT IN (?, ?)", (WAITING, WAITING, DONE))
                do("DELETE FROM failures")
                for bad in plan.bad:
                    self._failure(bad.number, None, bad.text, bad.reason)
            name, now = self._worker.name, time.time()
            do("INSERT INTO workers VALUES (?, ?, ?, ?, NULL)", (name, os.getpid(), socket.gethostname(), now))

    def _write(self, plan: Plan, versions: Mapping[str, str]) -> None:
        do, many = self._database.execute, self._database.executemany
        for statement in SCHEMA.split(";\n"):
            do(statement)
        do(f"PRAGMA user_version = {VERSION}")
        do("INSERT INTO run VALUES (?, ?, ?, ?)", (plan.id, _json(plan.config), _json(versions), time.time()))
        many(
            "INSERT INTO prompts VALUES (?, ?, ?, ?, ?, ?)",
            ((p.number, p.id, p.row, p.text, _json(p.columns), _json(p.settings)) for p in plan.prompts),
        )
        many(
            "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, NULL)",
            ((t.number, t.id, t.prompt.number, t.job.seed, t.job.model, WAITING) for t in plan.tasks),
        )

    def close(self) -> None:
        """Gives back what was claimed and not done, and leaves."""
        with suppress(sqlite3.Error), self._transaction() as do:  # a full disk, say; the next one finds us gone
            do("UPDATE items SET state = ?, worker = NULL WHERE state = ? AND worker = ?", self._mine(WAITING))
            do("UPDATE workers SET ended = ? WHERE name = ?", (time.time(), self._worker.name))
        self._database.close()
        self._worker.leave()

    def _mine(self, state: str) -> tuple[str, str, str]:
        return state, CLAIMED, self._worker.name

    # ------------------------------------------------------------------------------------------------------ work

    def claim(self, model: str) -> int | None:
        """Takes the next item of a model; None if there is none to be had now.

        Args:
            model: The one that is loaded.
        """
        with self._transaction() as do:
            number = self._next(model)
            if number is not None:
                do(
                    "UPDATE items SET state = ?, worker = ? WHERE number = ?",
                    (CLAIMED, self._worker.name, number),
                )
            return number

    def ready(self, model: str) -> bool:
        """Whether there is something to be had of a model."""
        return self._next(model) is not None

    def _next(self, model: str) -> int | None:
        found = self._database.execute(
            "SELECT number FROM items WHERE state = ? AND model = ? ORDER BY number LIMIT 1", (WAITING, model)
        ).fetchone()
        return None if found is None else int(found[0])

    def turns(self) -> list[Turn]:
        """All turns of a run with a total budget, in the order of rounds and items."""
        rows = self._database.execute(
            "SELECT item, round, least, budget, nfe, scores, ceiling FROM rounds ORDER BY round, item"
        )
        return [
            Turn(item, round_, least, budget, nfe, json.loads(scores), ceiling)
            for item, round_, least, budget, nfe, scores, ceiling in rows
        ]

    def turn(self, item: int) -> Turn | None:
        """The turn that an item is to take now, if the run has a total budget."""
        row = self._database.execute(
            "SELECT item, round, least, budget FROM rounds WHERE item = ? AND nfe IS NULL ORDER BY round LIMIT 1",
            (item,),
        ).fetchone()
        return None if row is None else Turn(*row)

    def open(self, turns: Sequence[Turn]) -> None:
        """Begins a round, unless another process has done so already."""
        with self._transaction() as do:
            last = do("SELECT max(round) FROM rounds").fetchone()[0]
            if last is not None and last >= turns[0].round:
                return
            self._database.executemany(
                "INSERT INTO rounds VALUES (?, ?, ?, ?, NULL, '[]', NULL)",
                [(turn.item, turn.round, turn.least, turn.budget) for turn in turns],
            )
            self._database.executemany(
                "UPDATE items SET state = ?, worker = NULL WHERE number = ? AND state = ?",
                [(WAITING, turn.item, DONE) for turn in turns],
            )

    def result(self, item: int) -> Result | None:
        """What an earlier round brought an item."""
        found = self._database.execute("SELECT * FROM results WHERE item = ?", (item,))
        names = [column[0] for column in found.description]
        row = found.fetchone()
        if row is None:
            return None
        values = {
            name: json.loads(x) if name in _JSON and x is not None else x for name, x in zip(names, row, strict=True)
        }
        del values["item"], values["ended"]
        images = self._database.execute(
            "SELECT file, seed, scores FROM images WHERE item = ? ORDER BY rank", (item,)
        ).fetchall()
        return Result(values, [(file, seed, json.loads(scores)) for file, seed, scores in images])

    def calibration(self, model: str) -> str | None:
        """What early exit knew of a model when the run began, by which all its searches go; None if none needs it."""
        row = self._database.execute("SELECT races FROM calibrations WHERE model = ?", (model,)).fetchone()
        return None if row is None else str(row[0])

    def decided(self, item: int) -> dict[str, Any] | None:
        """What model="auto" chose for an item, here or before a run was stopped; None if nothing yet."""
        found = self._database.execute("SELECT decision FROM decisions WHERE item = ?", (item,)).fetchone()
        return None if found is None else dict(json.loads(found[0]))

    def decide(self, item: int, decision: Mapping[str, Any]) -> None:
        """Takes down what was chosen, before it is run."""
        with self._transaction() as do:
            do("INSERT OR REPLACE INTO decisions VALUES (?, ?)", (item, _json(dict(decision))))

    def release(self, number: int) -> None:
        """Gives an item back."""
        with self._transaction() as do:
            do("UPDATE items SET state = ?, worker = NULL WHERE number = ?", (WAITING, number))

    def finish(self, task: Task, result: Result, state: str = DONE, turn: Turn | None = None) -> bool:
        """Keeps what came of an item, whose files are written already.

        Args:
            task: The item.
            result: What came of it.
            state: "done", or "cut" if it is to be made again.
            turn: How its turn ended, if the run has a total budget.

        Returns:
            False if another process has it, which thought this one dead.
        """
        with self._transaction() as do:
            if not self._over(task, state):
                return False
            self._keep(task, result)
            if turn is not None:
                do(
                    "UPDATE rounds SET nfe = ?, scores = ?, ceiling = ? WHERE item = ? AND round = ?",
                    (turn.nfe, _json(turn.scores), turn.ceiling, turn.item, turn.round),
                )
            do("DELETE FROM failures WHERE item = ?", (task.number,))
            return True

    def cut(self, task: Task) -> None:
        """Says that an item is to be made again, and what it had before stays."""
        with self._transaction():
            self._over(task, CUT)

    def fail(self, task: Task, reason: str, result: Result | None = None) -> None:
        """Says why an item can't be made. It is tried again by the next command.

        Args:
            task: The item.
            reason: One sentence.
            result: An answer that there is all the same.
        """
        with self._transaction() as do:
            if self._over(task, FAILED):
                do("DELETE FROM failures WHERE item = ?", (task.number,))
                self._failure(task.prompt.row, task.number, task.prompt.text, reason)
                if result is not None:
                    self._keep(task, result)

    def _over(self, task: Task, state: str) -> bool:
        """Puts an item of ours into a state."""
        changed = self._database.execute(
            "UPDATE items SET state = ?, worker = NULL WHERE number = ? AND state = ? AND worker = ?",
            (state, task.number, CLAIMED, self._worker.name),
        )
        return changed.rowcount == 1

    def _keep(self, task: Task, result: Result) -> None:
        values = {"item": task.number, **result.values, "ended": time.time()}
        stored = [_json(value) if isinstance(value, dict | list) else value for value in values.values()]
        self._database.execute(
            f"INSERT OR REPLACE INTO results ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", stored
        )
        self._database.execute("DELETE FROM images WHERE item = ?", (task.number,))
        self._database.executemany(
            "INSERT INTO images VALUES (?, ?, ?, ?, ?)",
            [(task.number, i, file, seed, _json(scores)) for i, (file, seed, scores) in enumerate(result.images, 1)],
        )

    def _failure(self, row: int, item: int | None, text: str, reason: str) -> None:
        self._database.execute(
            "INSERT INTO failures (row, item, text, reason, at) VALUES (?, ?, ?, ?, ?)",
            (row, item, text, reason, time.time()),
        )

    def take_over(self) -> None:
        """Gives back what dead processes had claimed."""
        with lock.door(self.folder):
            living = lock.alive(self.folder)
            with self._transaction() as do:
                gone = [
                    name
                    for (name,) in do("SELECT DISTINCT worker FROM items WHERE state = ?", (CLAIMED,))
                    if name not in living
                ]
                for name in gone:
                    do("UPDATE items SET state = ?, worker = NULL WHERE worker = ?", (WAITING, name))

    def left(self) -> int:
        """How many items are neither done nor failed nor cut."""
        found = self._database.execute("SELECT count(*) FROM items WHERE state IN (?, ?)", (WAITING, CLAIMED))
        return int(found.fetchone()[0])

    def states(self) -> dict[str, int]:
        """How many items there are by state."""
        return dict(self._database.execute("SELECT state, count(*) FROM items GROUP BY state"))

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database.execute
        except BaseException:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def enter(folder: Path, plan: Plan, versions: Mapping[str, str], *, join: bool = False, fresh: bool = False) -> Queue:
    """Begins to work in a run folder, made if it doesn't exist.

    Args:
        folder: The run's.
        plan: What is to be done.
        versions: Of packages, to be remembered.
        join: Work beside other processes.
        fresh: Move a run that is there aside, and begin anew.

    Raises:
        UserError: It holds another run, or others are at work, or it can't be written.
    """
    try:
        if fresh and (folder / NAME).exists():
            _aside(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "images").mkdir(exist_ok=True)
        with lock.door(folder):
            others = lock.alive(folder)
            if others and not join:
                raise _busy(folder)
            worker = lock.Worker(folder)
            try:
                queue = Queue(folder, _connect(folder), worker, bool(others))
                queue.begin(plan, versions)
            except BaseException:
                worker.leave()
                raise
            if not others:
                for part in (folder / "images").glob(".*.part"):  # a dead process's, cut off in the middle
                    part.unlink()
        return queue
    except (OSError, sqlite3.OperationalError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"The run folder {str(folder)!r} can't be written ({reason}); choose another with --out."
        ) from error


def _connect(folder: Path) -> sqlite3.Connection:
    database = sqlite3.connect(folder / NAME, timeout=PATIENCE, isolation_level=None)
    try:
        check_version(folder, database)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # a power cut loses nothing that was finished, either
    except BaseException:
        database.close()
        raise
    return database


def _busy(folder: Path) -> UserError:
    return UserError(
        f"Another imgscale batch is at work in {str(folder)!r}; wait for it, stop it, or add --join to share the work."
    )


def _aside(folder: Path) -> None:
    """Renames a run folder by the first free number; nothing is deleted."""
    with lock.door(folder):
        if lock.alive(folder):
            raise _busy(folder)
        number = 1
        while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        folder.resolve().rename(aside.resolve())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)

"""A policy that lives in a file: read, taught and written under a lock, so that several processes teach it together."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from imgscale.bandit import persistence
from imgscale.bandit.actions import Pool
from imgscale.bandit.linear import LinUCB
from imgscale.bandit.memory import Memory
from imgscale.bandit.offpolicy import Logged
from imgscale.bandit.policy import Context
from imgscale.errors import UserError

ENDING = ".policy"


def default_path(pool: str | Path | None = None) -> Path:
    """Where a pool's policy lies if nobody says otherwise: in the user's data folder."""
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "imgscale"
    if pool is None:
        return home / f"default{ENDING}"
    place = Path(pool).expanduser().resolve()
    return home / f"{place.stem}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}{ENDING}"


def path_of_given(pool: str) -> Path:
    """The same for a pool that isn't a file, from its text."""
    return default_path().with_name(f"given-{hashlib.sha256(pool.encode()).hexdigest()[:8]}{ENDING}")


def log_of(path: Path) -> Path:
    """The log of decisions beside a policy."""
    return path.with_name(path.name + ".jsonl")


class Store:
    """A policy and its file.

    Args:
        path: The file; it needn't be there yet.
        fresh: Makes a policy that has learned nothing: what the file begins with. Its pool and options are kept.
        verifier: The identity of the verifier that judges.
        memory: What goes with a fresh policy.
        log: Whether decisions are logged.
        writes: Whether it will be taught; else the file may be one that can only be read.

    Raises:
        UserError: The file is damaged, of other features or another verifier, or its folder can't be written.
    """

    def __init__(
        self,
        path: Path,
        fresh: Callable[[], LinUCB],
        verifier: Mapping[str, Any],
        memory: Memory,
        *,
        log: bool = True,
        writes: bool = True,
    ) -> None:
        self.path, self.policy, self.memory = path, fresh(), memory
        self._fresh, self._blank = fresh, memory.to_dict()
        self._verifier, self._log = dict(verifier), log
        self._stamp: tuple[int, ...] | None = None
        if writes:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(_unkept(path, error)) from error
            with locked(path):
                pass  # said now rather than after a search
        self._refresh()

    def teach(self, context: Context, decision: Mapping[str, Any], place: int, quality: float) -> bool:
        """Learns from a decision and writes the policy, with what other processes taught it meanwhile.

        Args:
            context: The prompt.
            decision: For the log and the memory: category, score, eflops and correct, and what else is worth keeping.
            place: Of the action in the pool.
            quality: Of the image, in [0, 1].

        Returns:
            Whether the quality was a number.

        Raises:
            UserError: The file is damaged meanwhile, or can't be written.
        """
        action = self.policy.pool.actions[place]
        with locked(self.path):
            self._refresh()
            learned = self.policy.learn(context, action, quality)
            self.memory.scale.add(float(decision["score"]))
            self.memory.note(decision["category"], context.z, action, quality, decision["eflops"], decision["correct"])
            self.memory.weight = self.policy.weight
            pool = self.policy.pool
            self.memory.actions = [a for a, there in zip(pool.actions, pool.alive, strict=True) if there]
            self._write()
            if self._log:
                self._append({**decision, "quality": quality, "z": context.z.tolist()})
        return learned

    def _refresh(self) -> None:
        """Takes over the file, if it isn't the one that was read or written last; begins anew where it was reset."""
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return
        before = self.policy
        if stamp is None:
            self.policy, self.memory = self._fresh(), Memory.from_dict(self._blank)
        else:
            options = {name: getattr(before, name) for name in ("alpha", "epsilon", "prior")}
            options["discount"] = before.model.forget
            policy = persistence.load(self.path, before.pool, self._verifier, kind=type(before), **options)
            found = Memory.from_dict(persistence.stored(self.path).extra)
            found.actions, found.pool = found.actions or self.memory.actions, self.memory.pool
            found.reference = self.memory.reference
            self.policy, self.memory = policy, found
        self.policy.switch(before.weight)
        self.policy.rng = before.rng  # two processes that draw alike would explore alike
        self._stamp = stamp

    def _write(self) -> None:
        try:
            persistence.save(self.policy, self.path, self._verifier, self.memory.to_dict())
        except OSError as error:
            raise UserError(f"The policy {self.path} can't be written ({error.strerror or error}).") from error
        self._stamp = _stamp(self.path)

    def _append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False) + "\n"
        try:
            with log_of(self.path).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise UserError(f"The log {log_of(self.path)} can't be written ({error.strerror or error}).") from error


def _plain(value: Any) -> Any:
    """Without what JSON doesn't know: a number that isn't finite is null."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _unkept(path: Path, error: OSError) -> str:
    return f"The policy {path} can't be kept there ({error.strerror or error}); name another file."


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes out while a policy is changed.

    Raises:
        UserError: The folder can't be written.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        file = lock.open("a")
    except OSError as error:
        raise UserError(_unkept(path, error)) from error
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed, also by a crash
        except ImportError:  # Windows: the file is replaced whole all the same, but one of two rewards may be lost
            pass
        yield


def set_aside(path: Path) -> list[Path]:
    """Moves a policy and its log aside, under the time of day.

    Returns:
        Where they are now; nothing if there were none.

    Raises:
        UserError: They can't be moved.
    """
    moved: list[Path] = []
    if not (path.exists() or log_of(path).exists()):
        return moved
    with locked(path):
        stem = f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}"
        number = 1
        while any(path.with_name(stem + end).exists() for end in ("", ".jsonl")):
            number += 1
            stem = f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}-{number}"
        for old, new in ((path, path.with_name(stem)), (log_of(path), path.with_name(f"{stem}.jsonl"))):
            if not old.exists():
                continue
            try:
                old.rename(new)
            except OSError as error:
                raise UserError(f"{old} can't be moved aside ({error.strerror}); move it yourself.") from error
            moved.append(new)
    return moved


def decisions(path: Path) -> list[dict[str, Any]]:
    """The logged decisions of a policy, oldest first; a last line that a crash cut short is left out.

    Raises:
        UserError: The log is damaged.
    """
    file = log_of(path)
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines[:-1] if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"The log {file} is damaged ({error}); mend it or move it away.") from error
    return rows


def logged(path: Path, pool: Pool) -> list[Logged]:
    """The logged decisions for `imgscale.bandit.offpolicy`: those whose action is in a pool and whose quality is known.

    Raises:
        UserError: The log is damaged.
    """
    known = {action.name: action for action in pool.actions}
    found = []
    for row in decisions(path):
        if row.get("action") in known and row.get("quality") is not None:
            context = Context(np.array(row["z"], np.float64), row["prompt"])
            found.append(Logged(context, known[row["action"]], float(row["propensity"]), float(row["quality"])))
    return found


def opened(path: Path) -> tuple[LinUCB, Memory]:
    """A saved policy to look at, with the pool as it was last: no models are needed.

    Raises:
        UserError: There is none, it is damaged, or it was saved without its actions.
    """
    kept = persistence.stored(path)
    memory = Memory.from_dict(kept.extra)
    if not memory.actions:
        raise UserError(f'The policy in {path} says nothing of its actions, since it wasn\'t kept by model="auto".')
    pool = Pool(memory.actions, kept.schema, reference=memory.reference)
    return persistence.load(path, pool, kept.verifier), memory

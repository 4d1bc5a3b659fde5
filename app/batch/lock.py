"""Who is at work in a run folder. A lock ends with its process, however that ends: none is ever stale.

Every worker holds a file of its own, so that others can tell which claims are a dead one's. The door, another file, is
held only while somebody looks round or comes in.
"""

from __future__ import annotations

import errno
import importlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DOOR = ".door"
_PREFIX, _SUFFIX = ".worker-", ".lock"


@contextmanager
def door(folder: Path) -> Iterator[None]:
    """Keeps others from coming in or looking round meanwhile."""
    with (folder / DOOR).open("a+b") as file:
        _hold(file, wait=True)
        yield


class Worker:
    """One process at work in a run folder. Made with the door held.

    Attributes:
        name: Nobody else's, ever.
    """

    def __init__(self, folder: Path) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = _path(folder, self.name)
        self._file = self._path.open("a+b")
        _hold(self._file, wait=False)

    def leave(self) -> None:
        self._file.close()
        with suppress(OSError):
            self._path.unlink()


def alive(folder: Path) -> set[str]:
    """The names of all workers that live; traces of dead ones are cleared away. To be called with the door held."""
    found = set()
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            with path.open("a+b") as file:
                dead = _hold(file, wait=False)
            if dead:
                path.unlink()  # once it is closed, or Windows wouldn't
            else:
                found.add(path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX))
    return found


def _path(folder: Path, name: str) -> Path:
    return folder / f"{_PREFIX}{name}{_SUFFIX}"


def _hold(file: Any, wait: bool) -> bool:
    """Whether the lock is ours now; others are told apart by their open files, so that a process may meet itself."""
    try:
        import fcntl
    except ImportError:
        return _hold_on_windows(file, wait)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _hold_on_windows(file: Any, wait: bool) -> bool:
    """The same by the file's first byte, which needn't be there. Waiting there is to try ten times in ten seconds."""
    windows: Any = importlib.import_module("msvcrt")
    while True:
        file.seek(0)
        try:
            windows.locking(file.fileno(), windows.LK_LOCK if wait else windows.LK_NBLCK, 1)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EDEADLK):
                raise
            if not wait:
                return False
        else:
            return True

"""Who is at work in a run folder: with fcntl, and on Windows, which is played by a double of its msvcrt."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from imgscale.app.batch import lock


class Windows(ModuleType):
    """`msvcrt` as far as locks go: an open file holds its first byte against all others until it is closed.

    Attributes:
        waits: How often somebody waited in vain.
    """

    LK_LOCK, LK_NBLCK = 1, 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.waits = 0

    def locking(self, number: int, mode: int, count: int) -> None:
        assert count == 1 and os.lseek(number, 0, os.SEEK_CUR) == 0
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.waits += mode == self.LK_LOCK
            time.sleep(0.01)
            raise OSError(errno.EDEADLK if mode == self.LK_LOCK else errno.EACCES, "it is held") from error


@pytest.fixture(params=["fcntl", "msvcrt"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Windows:
    """The double; where it is in use, no open file can be deleted, either."""
    made = Windows()
    if request.param == "fcntl":
        return made
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", made)
    unlink = Path.unlink

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        held = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        if str(path.resolve()) in held:
            raise PermissionError(errno.EACCES, "it is open")
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(Path, "unlink", refuse)
    return made


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != lock.DOOR]


def test_workers_live_until_they_leave_or_die(windows: Windows, tmp_path: Path) -> None:
    with lock.door(tmp_path):
        assert lock.alive(tmp_path) == set()
        one, two = lock.Worker(tmp_path), lock.Worker(tmp_path)
        assert lock.alive(tmp_path) == {one.name, two.name}
    one.leave()
    assert len(files(tmp_path)) == 1 and lock.alive(tmp_path) == {two.name}
    two._file.close()  # as when a process is killed
    assert len(files(tmp_path)) == 1
    assert lock.alive(tmp_path) == set() and files(tmp_path) == []


def test_the_door_is_waited_for_however_long(windows: Windows, tmp_path: Path) -> None:
    told: list[str] = []

    def come_in() -> None:
        with lock.door(tmp_path):
            told.append("in")

    with lock.door(tmp_path):
        other = threading.Thread(target=come_in)
        other.start()
        other.join(0.3)
        assert other.is_alive() and told == []
    other.join(30)
    assert told == ["in"]
    assert (windows.waits > 1) == (sys.modules["fcntl"] is None)  # where it stands in, it was asked again and again


def test_what_no_waiting_mends_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Windows):
        def locking(self, number: int, mode: int, count: int) -> None:
            raise OSError(errno.EBADF, "no such file")

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", Broken())
    with pytest.raises(OSError, match="no such file"), lock.door(tmp_path):
        pass

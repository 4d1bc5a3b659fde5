"""Files that are whole or absent: a crash, a full disk or a second writer never leaves half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Writes a file at once: under a temporary name beside it, flushed to the disk, then renamed over ``path``.

    Raises:
        OSError: It can't be written; ``path`` is then as it was.
    """
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the renaming itself survive a power cut, where the system can."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""A folder that is whole or absent: it is filled under another name, and gets its own at the end."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path, PurePosixPath
from types import TracebackType

from imgscale.errors import UserError


class Folder:
    """Files to be written, in a folder that doesn't exist yet or is empty.

    Args:
        path: Where it goes.

    Raises:
        UserError: There are files already, or it can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")
        self._made: set[Path] = set()
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UserError(
                    f"{str(path)!r} isn't empty, and evaluators would take what is in there for images of this run;"
                    " choose another folder with --out, or empty it first."
                )
        except OSError as error:
            raise self._cant(error) from error

    def __enter__(self) -> Folder:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._part.mkdir()
        except OSError as error:
            raise self._cant(error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                if self.path.exists():
                    self.path.rmdir()
                os.rename(self._part, self.path)
        except OSError as failed:
            raise self._cant(failed) from failed
        finally:
            shutil.rmtree(self._part, ignore_errors=True)
        if isinstance(error, OSError):
            raise self._cant(error) from error

    def write(self, name: str, data: bytes) -> None:
        """Writes a file; ``name`` is relative, with forward slashes."""
        self._place(name).write_bytes(data)

    def copy(self, name: str, source: Path) -> None:
        """Copies a file.

        Raises:
            UserError: It can't be read.
        """
        try:
            data = source.read_bytes()
        except OSError as error:
            raise UserError(
                f"The image {str(source)!r} can't be read ({error.strerror or error}); put it back."
            ) from error
        self.write(name, data)

    def _place(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        assert parts and not name.startswith("/") and ".." not in parts and "\\" not in name and "\0" not in name
        path = self._part.joinpath(*parts)
        if path.parent not in self._made:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(path.parent)
        return path

    def _cant(self, error: OSError) -> UserError:
        return UserError(
            f"The output folder {str(self.path)!r} can't be written ({error.strerror or error}); choose another with"
            " --out."
        )

"""The journal that makes a stopped search resumable: what the engine answered, from which the search is played again.

A searcher is a function of its answers. So a journal is the list of them, and a search that is given one runs through
it without a model or a verifier, and goes on where it ends. It is a folder with a head, which says what was asked for,
and parts, each of so many engine steps, whole or not there at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from imgscale import files
from imgscale.errors import UserError

FORMAT = 1
EVERY = 10  # engine steps in a part
LARGEST = 1 << 26  # bytes of answers kept in memory before a part is written sooner
HEAD = "head.json"


@dataclass(frozen=True)
class Entry:
    """An answer of the engine to one search, and what is known of the search by then.

    Args:
        search: Its number among those that ran together.
        request: The kind of request that was answered.
        shape: Of the tensor that was asked about.
        size: The mean magnitude of that tensor: a check that it is the same search, which roundings pass.
        rounds: Of the search.
        seconds: Since it began.
        pace: Of its engine steps, in seconds.
        events: Notices since its last entry.
        lost: Whether the verifier failed for all.
        report: Scores of a new best image by the verifiers that only report; None if there is none.
        tensors: The answer by name, on the CPU, and a new best "image".
    """

    search: int
    request: str
    shape: tuple[int, ...]
    size: float
    rounds: int
    seconds: float
    pace: float
    events: list[str]
    lost: bool = False
    report: dict[str, float] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def answers(self, request: str, about: Tensor) -> bool:
        """Whether this is the answer to a request of this kind about this tensor."""
        size = magnitude(about)
        close = math.isclose(self.size, size, rel_tol=1e-3, abs_tol=1e-6) or not math.isfinite(self.size + size)
        return self.request == request and self.shape == tuple(about.shape) and close


def magnitude(tensor: Tensor) -> float:
    """The mean magnitude of a tensor; NaN if it holds one."""
    return float(tensor.float().abs().mean())


class Journal:
    """A folder of answers: read them first, then add to them.

    Args:
        folder: Where it lies, or will.
        asked: What was asked for, in values that JSON can hold: another search's journal is refused.

    Raises:
        UserError: It is another search's, damaged, or no journal.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        self._folder = folder
        self._asked = json.loads(json.dumps({"format": FORMAT, **asked}, default=str))
        self._parts = 0
        self._waiting: list[Entry] = []
        self._complete = 0  # of those waiting: they belong to engine steps that are over
        self._steps = 0
        try:
            if folder.exists():
                self._check()
            else:
                folder.mkdir(parents=True)
            if not (folder / HEAD).exists():
                files.write(folder / HEAD, json.dumps(self._asked, indent=1).encode())
        except OSError as error:
            raise UserError(
                f"The journal {str(folder)!r} can't be written ({error.strerror or error}); choose another place."
            ) from error

    def _check(self) -> None:
        if not self._folder.is_dir() or not ((self._folder / HEAD).exists() or not any(self._folder.iterdir())):
            raise UserError(f"{str(self._folder)!r} is there and is no journal of imgscale; choose another place.")
        if not (self._folder / HEAD).exists():
            return
        try:
            head = json.loads((self._folder / HEAD).read_text(encoding="utf-8"))
            missing = object()
            for name in dict.fromkeys([*self._asked, *head]):
                there, here = head.get(name, missing), self._asked.get(name, missing)
                if there != here:
                    there, here = (_short(value) if value is not missing else "not set" for value in (there, here))
                    raise UserError(
                        f"The journal {str(self._folder)!r} is another search's: its {name} is {there}, and here it is"
                        f" {here}; choose another place."
                    )
        except (ValueError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise self.damaged("its head can't be read") from error

    def damaged(self, why: str) -> UserError:
        """The error that says so."""
        return UserError(f"The journal {str(self._folder)!r} is damaged or of other code ({why}); delete it.")

    def read(self) -> Iterator[Entry]:
        """All entries in order; one part is in memory at a time."""
        from safetensors import SafetensorError, safe_open

        found = sorted(self._folder.glob("part-*.safetensors"))
        for path in found:
            if path != self._path(self._parts):
                raise self.damaged(f"{self._path(self._parts).name} is missing")
            try:
                with safe_open(path, "pt") as part:
                    entries = json.loads(part.metadata()["entries"])
                    names = sorted(part.keys())
                    tensors: list[dict[str, Tensor]] = [{} for _ in entries]
                    for name in names:
                        number, _, kind = name.partition(".")
                        tensors[int(number)][kind] = part.get_tensor(name)
                made = [
                    Entry(**{**entry, "shape": tuple(entry["shape"])}, tensors=mine)
                    for entry, mine in zip(entries, tensors, strict=True)
                ]
            except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
                raise self.damaged(f"{path.name} can't be read") from error
            self._parts += 1
            yield from made

    def add(self, entry: Entry) -> None:
        """Takes an answer, to be written when its engine step is over."""
        self._waiting.append(entry)

    def step(self) -> None:
        """An engine step is over; writes a part when it is time."""
        self._steps += 1
        self._complete = len(self._waiting)
        held = sum(t.numel() * t.element_size() for entry in self._waiting for t in entry.tensors.values())
        if self._steps % EVERY == 0 or held > LARGEST:
            self.write()

    def write(self) -> None:
        """Writes what is complete and not yet written.

        Raises:
            UserError: It can't be written, or another process writes here.
        """
        from safetensors.torch import save

        entries, self._waiting = self._waiting[: self._complete], self._waiting[self._complete :]
        self._complete = 0
        if not entries:
            return
        shown = {entry.search: i for i, entry in enumerate(entries) if "image" in entry.tensors}
        tensors = {
            f"{i}.{name}": tensor.contiguous()
            for i, entry in enumerate(entries)
            for name, tensor in entry.tensors.items()
            if name != "image" or shown[entry.search] == i  # an image that was surpassed isn't needed again
        }
        heads = [{name: value for name, value in vars(entry).items() if name != "tensors"} for entry in entries]
        path = self._path(self._parts)
        if path.exists():
            raise UserError(f"Another search writes to the journal {str(self._folder)!r}; give each its own.")
        try:
            files.write(path, save(tensors, {"entries": json.dumps(heads)}))
        except OSError as error:
            raise UserError(
                f"The journal {str(self._folder)!r} can't be written ({error.strerror or error}); make room."
            ) from error
        self._parts += 1

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}.safetensors"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:99] + "…"


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of an answer's tensors that nothing else will change."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

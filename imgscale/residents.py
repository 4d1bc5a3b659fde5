"""Models that are loaded when they are needed; the least recently used leaves when there are too many."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

import imgscale
from imgscale.bandit.poolfile import Entry

if TYPE_CHECKING:
    from imgscale.scaler import Scaler


class Residents:
    """The loaded models of a pool.

    Args:
        most: How many stay loaded.
        device: Where models run that don't say otherwise.

    Attributes:
        lender: Asked for a model before it is loaded, by whoever has models, too.
    """

    def __init__(self, most: int, device: str | None = None) -> None:
        self._most, self._device = most, device
        self._loaded: OrderedDict[str, Scaler] = OrderedDict()
        self.lender: Callable[[Entry], Scaler | None] | None = None

    @property
    def names(self) -> list[str]:
        """Of the models that are loaded, the least recently used first."""
        return list(self._loaded)

    def find(self, name: str) -> Scaler | None:
        """The model if it is loaded."""
        return self._loaded.get(name)

    def get(self, entry: Entry) -> Scaler:
        """The model, loaded.

        Raises:
            UserError: It can't be loaded. Then there is room for another.
        """
        if entry.name not in self._loaded:
            while len(self._loaded) >= self._most:
                self._loaded.popitem(last=False)
                _free()
            lent = self.lender(entry) if self.lender else None
            self._loaded[entry.name] = self._load(entry) if lent is None else lent
        self._loaded.move_to_end(entry.name)
        return self._loaded[entry.name]

    def _load(self, entry: Entry) -> Scaler:
        dtype = None if entry.dtype is None else getattr(torch, entry.dtype)
        device = entry.device or self._device
        return imgscale.load(entry.model, device=device, dtype=dtype, max_batch=entry.max_batch)

    def drop(self, name: str) -> None:
        """Lets a model leave, if it is here."""
        if self._loaded.pop(name, None) is not None:
            _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

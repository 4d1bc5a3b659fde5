"""What a model is asked for: everything of a pipeline's call that is neither latents nor time.

A prompt is encoded once, however many candidates it gets: the pipeline's own `encode_prompt` is intercepted
on a private copy, run for one prompt at a time and remembered with the condition, so that a row's encoding
depends neither on the batch nor on who shares it.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.schedules import Clock

__all__ = ["Condition", "Encoder", "Row", "freeze"]


@dataclass(frozen=True, eq=False)
class Row:
    """One prompt with its encodings.

    Attributes:
        texts: The prompt arguments of the call, such as {"prompt": …, "negative_prompt": …}.
        encoded: By the other arguments of `encode_prompt`, what it returned for this row alone.
    """

    texts: Mapping[str, str]
    encoded: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Condition:
    """What to draw, at which size, with how much guidance. Opaque to searches; made by `Denoiser.encode`.

    Attributes:
        key: Hashable; conditions with equal keys may share one batch (see `stack`).
        height: Of the image, pixels.
        width: Of the image, pixels.
        latent_shape: Of one particle's latents, in the pipeline's own layout: (channels, height, width), or
            packed as (tokens, channels) for Flux.
        latent_dtype: What the pipeline calls its network with.
        device: Where it runs.
        passes: Forward passes of the network in one evaluation: 2 with classifier-free guidance.
    """

    key: Hashable
    height: int
    width: int
    latent_shape: tuple[int, ...]
    latent_dtype: torch.dtype
    device: torch.device
    passes: int
    rows: tuple[Row, ...]
    stacked: bool
    kwargs: Mapping[str, Any]
    clock: Clock

    @property
    def prompt(self) -> str:
        """The prompt; of a stacked condition, that of its first row."""
        return self.rows[0].texts["prompt"]

    @property
    def prompts(self) -> list[str]:
        """The prompt of every row: one, or as many as a stacked condition has."""
        return [row.texts["prompt"] for row in self.rows]

    def rows_for(self, n: int) -> tuple[Row, ...]:
        """The rows of a batch of n particles.

        Raises:
            ValueError: The condition is stacked for another number.
        """
        if not self.stacked:
            return self.rows * n
        if n != len(self.rows):
            raise ValueError(f"A condition stacked for {len(self.rows)} particles was given {n}.")
        return self.rows

    def at(self, indices: Sequence[int]) -> "Condition":
        """The condition of some particles of the batch."""
        return replace(self, rows=tuple(self.rows[i] for i in indices)) if self.stacked else self

    @staticmethod
    def stack(conditions: Sequence["Condition"], counts: Sequence[int]) -> "Condition":
        """One condition for a batch: counts[0] particles of conditions[0], then counts[1] of conditions[1], …

        Raises:
            UserError: The conditions' keys differ, so no one batch can hold them.
        """
        first = conditions[0]
        if any(condition.key != first.key for condition in conditions):
            raise UserError(
                "Conditions with different keys can't share a batch, since they differ in size, guidance or "
                "the length of their encoding: call the model once for each key."
            )
        rows = [c.rows_for(n) for c, n in zip(conditions, counts, strict=True)]
        return replace(first, rows=tuple(row for part in rows for row in part), stacked=True)


def freeze(value: Any) -> Hashable:
    """A hashable stand-in that is equal for equal plain values, and for the same object otherwise."""
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, freeze(item)) for name, item in sorted(value.items()))
    if value is None or isinstance(value, str | int | float | torch.device | torch.dtype):
        return value
    return type(value).__name__, id(value)


class Encoder:
    """A pipeline's `encode_prompt`, run once for each row and remembered there.

    Args:
        encode_prompt: The pipeline's bound method.
    """

    def __init__(self, encode_prompt: Callable[..., Any]) -> None:
        self._encode = encode_prompt
        self._signature = inspect.signature(encode_prompt)
        # The last few batches, put together: a search asks for the same few sizes again and again.
        self._joined: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = Lock()

    def bind(self, rows: tuple[Row, ...]) -> Callable[..., Any]:
        """An `encode_prompt` for a batch of these rows."""

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            bound = self._signature.bind(*args, **kwargs)
            arguments = bound.arguments
            texts = [
                name
                for name, value in arguments.items()
                if "prompt" in name and isinstance(value, list) and len(value) == len(rows)
            ]
            shared = tuple((name, freeze(value)) for name, value in arguments.items() if name not in texts)
            asked = (rows, shared, tuple((name, tuple(arguments[name])) for name in texts))
            with self._lock:
                if asked in self._joined:
                    self._joined.move_to_end(asked)
                    return self._joined[asked]
            if texts:
                encoded = [
                    self._row(row, bound, shared, {name: [arguments[name][i]] for name in texts})
                    for i, row in enumerate(rows)
                ]
                joined = _join(encoded, self._per_row(bound, texts, encoded[0])) if len(rows) > 1 else encoded[0]
            else:  # a text for the whole batch
                joined = self._row(rows[0], bound, shared, {})
            with self._lock:
                self._joined[asked] = joined
                if len(self._joined) > 8:
                    self._joined.popitem(last=False)
            return joined

        return encode_prompt

    def _per_row(self, bound: inspect.BoundArguments, texts: list[str], encoded: Any) -> Any:
        """Which parts of an encoding are a row's own: ids of text tokens, for one, are the same for all."""
        if not _one_token(encoded):
            return _rows_of(encoded, 1)
        pair = {name: [bound.arguments[name][0]] * 2 for name in texts}
        return _rows_of(self._run(bound, pair), 2)

    def _run(self, bound: inspect.BoundArguments, texts: Mapping[str, list[str]]) -> Any:
        call = inspect.BoundArguments(self._signature, OrderedDict(bound.arguments, **texts))
        with torch.no_grad():
            return self._encode(*call.args, **call.kwargs)

    def _row(self, row: Row, bound: inspect.BoundArguments, shared: Hashable, texts: Mapping[str, list[str]]) -> Any:
        key = (shared, freeze(texts))
        if key not in row.encoded:
            row.encoded[key] = self._run(bound, texts)
        return row.encoded[key]


def _join(parts: list[Any], per_row: Any) -> Any:
    """Rows of one batch, from what each is alone; what isn't `per_row` is the same for all."""
    first = parts[0]
    if isinstance(first, tuple):
        columns = zip(*parts, strict=True)
        return tuple(_join(list(column), own) for column, own in zip(columns, per_row, strict=True))
    if not per_row:
        return first
    if isinstance(first, list):
        return [item for part in parts for item in part]
    return torch.cat(parts)


def _rows_of(encoded: Any, n: int) -> Any:
    """Which parts of the encoding of a batch of n have one entry for each row: bools, in its own structure."""
    if isinstance(encoded, tuple):
        return tuple(_rows_of(item, n) for item in encoded)
    return isinstance(encoded, list) or (isinstance(encoded, Tensor) and encoded.ndim > 0 and len(encoded) == n)


def _one_token(encoded: Any) -> bool:
    """Whether there is a text of a single token, so that an axis of 1 may be the tokens' or the batch's."""
    parts = encoded if isinstance(encoded, tuple) else (encoded,)
    return any(isinstance(part, Tensor) and part.ndim > 2 and part.shape[1] == 1 for part in parts)


def shapes(encoded: Any) -> Hashable:
    """The sizes of an encoding, which rows of one batch must share."""
    if isinstance(encoded, Tensor):
        return tuple(encoded.shape)
    if isinstance(encoded, tuple):
        return tuple(shapes(item) for item in encoded)
    return type(encoded).__name__

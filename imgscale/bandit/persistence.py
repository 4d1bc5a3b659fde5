"""A LinUCB's knowledge as one file: numpy arrays and a head in JSON, no pickle, whole or not there at all."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from imgscale import files
from imgscale.bandit import priors
from imgscale.bandit.actions import Pool
from imgscale.bandit.features import Schema
from imgscale.bandit.linear import LinUCB, Thompson
from imgscale.errors import UserError

FORMAT = 3  # the first two learned rewards themselves, not what differs from what was expected

_KINDS: dict[str, type[LinUCB]] = {kind.name: kind for kind in (LinUCB, Thompson)}
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error)


def save(policy: LinUCB, path: Path, verifier: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> None:
    """Writes what a policy has learned.

    The mode isn't part of it: quality is the same in all of them (a joint policy's file says that it is joint).

    Args:
        policy: LinUCB or Thompson.
        path: The file.
        verifier: The identity of the verifier whose scores were the rewards (its ``identity()``).
        extra: What else belongs to it, in values that JSON can hold; see `Stored.extra`.

    Raises:
        OSError: It can't be written; an older file is then as it was.
    """
    policy.model.refresh()  # so that the saved policy and this one go on alike to the last bit
    head = {
        "format": FORMAT,
        "kind": policy.name,
        "schema": policy.pool.schema.to_dict(),
        "schema hash": policy.pool.schema.hash,
        "verifier": dict(verifier),
        "alpha": policy.alpha,
        "ridge": policy.model.ridge,
        "products": policy.products,
        "discount": policy.model.forget,
        "epsilon": policy.epsilon,
        "joint": policy.joint,
        "prior": policy.prior is not None,
        "learned": policy.learned,
        "refused": policy.refused,
        "rng": policy.rng.bit_generator.state,
        "extra": dict(extra or {}),
    }
    data = io.BytesIO()
    text = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez_compressed(data, head=text, A=policy.model.gram, b=policy.model.moment)
    files.write(path, data.getvalue())


@dataclass(frozen=True)
class Stored:
    """What a policy's file says beside its statistics.

    Args:
        schema: To build the pool with that it goes on in.
        verifier: The identity of the verifier whose scores were the rewards.
        extra: As given to `save`.
    """

    schema: Schema
    verifier: dict[str, Any]
    extra: dict[str, Any]


def stored(path: Path) -> Stored:
    """What a saved policy says of itself.

    Raises:
        UserError: There is no such file, or it isn't what `save` writes.
    """
    head = _read(path)[0]
    return Stored(Schema.from_dict(head["schema"]), head["verifier"], head["extra"])


def schema(path: Path) -> Schema:
    """The schema of a saved policy, to build the pool with that it goes on in.

    Raises:
        UserError: There is no such file, or it isn't what `save` writes.
    """
    return stored(path).schema


def check_verifier(path: Path, kept: Mapping[str, Any], verifier: Mapping[str, Any]) -> None:
    """Refuses a policy that was rewarded by another verifier.

    Args:
        path: Its file.
        kept: The identity in it.
        verifier: That of the one that will judge.

    Raises:
        UserError: They differ.
    """
    if _canonical(kept) != _canonical(verifier):
        old, new = (identity.get("name", identity) for identity in (kept, verifier))
        which = f"{old!r}, not by {new!r}" if old != new else f"{old!r} with other weights or settings"
        raise UserError(
            f"The policy in {path} was rewarded by {which}; take that verifier, or begin a new policy"
            " (imgscale policy reset moves this one aside)."
        )


def load(
    path: Path, pool: Pool, verifier: Mapping[str, Any], *, kind: type[LinUCB] | None = None, **options: Any
) -> LinUCB:
    """The policy in a file, to go on with.

    Args:
        path: The file.
        pool: The actions, in the file's schema; they needn't be those it was learned on.
        verifier: The identity of the verifier that will judge.
        kind: LinUCB or Thompson, which learn the same; the file's for None.
        options: Of `Policy`, such as mode; they replace the file's. A prior other than `priors.expected` isn't in the
            file, and has to be given again.

    Raises:
        UserError: There is no such file; it is damaged, of another format, of another schema or another verifier.
    """
    head, arrays = _read(path)
    if head["schema hash"] != pool.schema.hash:
        raise UserError(
            f"The policy in {path} was learned with other features; build the pool with its schema"
            " (persistence.schema), or begin a new policy."
        )
    check_verifier(path, head["verifier"], verifier)
    try:
        known = {"prior": priors.expected if head["prior"] else None}
        kept = known | {name: head[name] for name in ("alpha", "ridge", "products", "discount", "epsilon", "joint")}
        policy = (kind or _KINDS[head["kind"]])(pool, **{**kept, **options})
        _restore(policy, head, arrays)
    except (*_DAMAGE, np.linalg.LinAlgError) as error:
        raise UserError(_damaged(path, error)) from error
    return policy


def _restore(policy: LinUCB, head: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    model, gram, moment = policy.model, arrays["A"], arrays["b"]
    fits = gram.shape == model.gram.shape and moment.shape == model.moment.shape
    if not fits or gram.dtype != np.float64 or moment.dtype != np.float64:
        raise ValueError(f"statistics of shapes {gram.shape} and {moment.shape}")
    if not (np.isfinite(gram).all() and np.isfinite(moment).all() and np.allclose(gram, gram.T)):
        raise ValueError("statistics that aren't finite and symmetric")
    model.gram, model.moment = np.ascontiguousarray(gram), moment
    model.refresh()
    policy.learned, policy.refused = int(head["learned"]), int(head["refused"])
    policy.rng.bit_generator.state = head["rng"]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The head and the arrays, with the format and the schema's hash checked."""
    if not path.is_file():
        raise UserError(f"There is no policy file {path}; name one that was saved, or begin a new policy.")
    try:
        # From memory: numpy leaves a file open when it finds it damaged.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("head", "A", "b")}
        head = json.loads(arrays.pop("head").tobytes())
        version = head["format"]
        whole = version != FORMAT or Schema.from_dict(head["schema"]).hash == head["schema hash"]
        complete = version != FORMAT or (
            {"kind", "rng", "learned"} <= head.keys()
            and isinstance(head["verifier"], dict)
            and isinstance(head["extra"], dict)
        )
    except _DAMAGE as error:
        raise UserError(_damaged(path, error)) from error
    if version != FORMAT:
        raise UserError(
            f"The policy in {path} has format {version!r}, and this imgscale reads {FORMAT}; begin a new one (imgscale"
            " policy reset moves this one aside)."
        )
    if not whole or not complete:
        raise UserError(_damaged(path, "its head doesn't fit together"))
    return head, arrays


def _canonical(identity: Mapping[str, Any]) -> str:
    return json.dumps(dict(identity), sort_keys=True, default=str)


def _damaged(path: Path, why: object) -> str:
    return (
        f"The policy file {path} is damaged or isn't one ({why}); restore it from a copy, or move it aside (imgscale"
        " policy reset)."
    )

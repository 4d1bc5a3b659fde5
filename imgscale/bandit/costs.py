"""The actions of a pool with what each costs: counted on hollow networks, rehearsed on stand-ins, and remembered.

Counting takes seconds a model, so what was found is kept in the user's cache, under a hash of everything that it
follows from: the model's configs, its settings in the pool, the verifier, the hardware, and this code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale import files
from imgscale.bandit.actions import Action, Model
from imgscale.bandit.poolfile import Entry, PoolFile
from imgscale.budget import Budget, Price
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.cost import Cost
    from imgscale.rewards import Verifier

MOST = 200  # actions that a pool may have


@dataclass(frozen=True)
class Spent:
    """What a search was found to take, on a rehearsal."""

    nfe: int
    decodes: int
    verifier_calls: int
    eflops: int


@dataclass
class Known:
    """What was counted of a model.

    Args:
        parameters: Of its denoiser.
        sample_nfe: Model evaluations of an ordinary sample.
        distilled: Whether it is a few-step model.
        price: Of its parts in eFLOPs.
        searches: What searches take, by searcher and budget.
    """

    parameters: int
    sample_nfe: int
    distilled: bool
    price: Price
    searches: dict[str, Spent | None]


def actions(
    pool: PoolFile, entry: Entry, verifier: Verifier, *, device: str | None = None
) -> tuple[list[Action], Price, list[str]]:
    """The actions of one model of a pool, those left out that no policy needs (see `pruned`); its price; and a sentence
    for each searcher that can't be had.

    Args:
        pool: The pool.
        entry: The model.
        verifier: What scores.
        device: Where the model runs if its entry doesn't say so.

    Raises:
        UserError: The model isn't here, or its cost can't be counted.
    """
    file, count = _file(pool, entry, device), _Count(entry, verifier, device)
    known = _read(file)
    fresh = known is None
    if known is None:
        known = count.known()
    asked = list(_asked(pool, entry, known.sample_nfe))
    for searcher, nfe in asked:
        key = f"{searcher}|{nfe}"
        if key not in known.searches:
            known.searches[key], fresh = count.spent(searcher, nfe), True
    if fresh:
        _write(file, known)
    model = Model(entry.name, known.parameters, known.price.nfe, known.distilled, entry.prior)
    found = [(known.searches[f"{searcher}|{nfe}"], searcher, nfe) for searcher, nfe in asked]
    made = [(_action(model, known, searcher, nfe, spent), spent) for spent, searcher, nfe in found if spent]
    if not made:
        raise UserError(
            f"None of its searches can be had: their budgets can't finish an image, which takes {known.sample_nfe} NFE,"
            " or they follow gradients, whose cost isn't known beforehand; give others."
        )
    there = {action.searcher for action, _ in made}
    return pruned(made), known.price, [_left_out(entry, name) for name in dict(asked) if name not in there]


def _left_out(entry: Entry, searcher: str) -> str:
    return (
        f"The searcher {searcher!r} is left out on {entry.name}: its cost isn't known beforehand, or its budgets can't"
        " finish an image."
    )


def pruned(rehearsed: Sequence[tuple[Action, Spent]]) -> list[Action]:
    """The actions of one model without those that the cost table alone rules out.

    An action leaves if another of its model was listed before it and did exactly the same on its rehearsal (rbf with
    less than five samples is best-of-n), or if another of its searcher takes as many evaluations and is cheaper, or
    takes more and isn't dearer. Which model or searcher is better isn't judged here: that is what is to be learned.
    """
    kept: list[Action] = []
    for i, (action, spent) in enumerate(rehearsed):
        twin = any(spent == earlier for _, earlier in rehearsed[:i])
        beaten = any(
            other.family == action.family
            and (done.nfe, -done.eflops) > (spent.nfe, -spent.eflops)
            and done.eflops <= spent.eflops
            for other, done in rehearsed
        )
        if not (twin or beaten):
            kept.append(action)
    return kept


def _asked(pool: PoolFile, entry: Entry, sample_nfe: int) -> Iterator[tuple[str, int]]:
    """Searchers and budgets, in the order of the file; the simplest searcher is listed first."""
    if entry.actions is not None:
        yield from ((action.searcher, action.nfe) for action in entry.actions)
        return
    samples = entry.samples or ([] if entry.budgets else pool.samples)
    budgets = sorted({n * sample_nfe for n in samples} | set(entry.budgets or ()))
    for searcher in entry.searchers or pool.searchers:
        yield from ((searcher, nfe) for nfe in budgets if nfe >= sample_nfe)


def _action(model: Model, known: Known, searcher: str, nfe: int, spent: Spent) -> Action:
    from imgscale import registry

    candidates = max(1, spent.nfe // known.sample_nfe)
    made = Action(
        model,
        searcher,
        nfe,
        float(spent.eflops),
        candidates=candidates,
        steps=known.sample_nfe,
        checks=max(0, spent.verifier_calls - candidates),
    )
    options = registry.parse(registry.compose(searcher)[0])[1]
    for field in ("children", "kept"):
        if (text := options.get("keep" if field == "kept" else field, "")).isdecimal() and int(text) >= 1:
            made = replace(made, **{field: int(text)})  # type: ignore[arg-type]
    return made


class _Count:
    """Counts a model when it is first needed.

    Args:
        entry: The model in the pool.
        verifier: What scores.
        device: Where it runs if the entry doesn't say so.
    """

    def __init__(self, entry: Entry, verifier: Verifier, device: str | None) -> None:
        self._entry, self._verifier, self._device = entry, verifier, device
        self._cost: Cost | None = None

    @property
    def cost(self) -> Cost:
        if self._cost is None:
            import torch

            from imgscale import cost

            entry = self._entry
            self._cost = cost.of(
                entry.model,
                device=entry.device or self._device,
                dtype=None if entry.dtype is None else getattr(torch, entry.dtype),
                preview=entry.preview,
                verifier=self._verifier,
                steps=entry.steps,
                height=entry.height,
                width=entry.width,
                guidance_scale=entry.guidance,
            )
        return self._cost

    def known(self) -> Known:
        cost = self.cost
        return Known(
            parameters=cost.evaluation.parameters,
            sample_nfe=cost.sample_nfe,
            distilled=_settings(self._entry).distilled,
            price=cost.price,
            searches={},
        )

    def spent(self, searcher: str, nfe: int) -> Spent | None:
        """None where the search can't be rehearsed: one that follows gradients, or has too small a budget."""
        from imgscale import usefulness
        from imgscale.models import folder_of
        from imgscale.rehearsal import rehearse

        cost = self.cost
        if nfe < cost.sample_nfe:
            return None
        measured = next(iter(usefulness.known(folder_of(self._entry.model), self._entry.model).values()), None)
        try:
            ledger = rehearse(cost.schedule, _settings(self._entry), searcher, Budget(nfe=nfe), cost.price, measured)
        except UserError:
            return None
        return Spent(ledger.nfe, ledger.decodes, ledger.verifier_calls, int(ledger.eflops or 0))


def _settings(entry: Entry) -> Any:
    from imgscale.models import ModelSettings, locate

    folder = locate(entry.model)
    return ModelSettings.read(folder) if folder else ModelSettings()


# ------------------------------------------------------------------------------------------------- what is remembered


def _file(pool: PoolFile, entry: Entry, device: str | None) -> Path:
    import torch

    import imgscale
    from imgscale.hardware import of as hardware_of
    from imgscale.models import place

    where = place(entry.device or device)
    hardware = hardware_of(where, None if entry.dtype is None else getattr(torch, entry.dtype))
    follows = [
        imgscale.__version__,
        _sources(),
        _texts(entry.model),
        entry.model_dump(include={"source", "name", "dtype", "steps", "guidance", "height", "width", "preview"}),
        pool.verifier,
        hardware.name,
        round(hardware.ridge, 6),
    ]
    name = hashlib.sha256(json.dumps(follows, sort_keys=True).encode()).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "imgscale" / "costs" / f"{name}.json"


@lru_cache(maxsize=1)
def _sources() -> str:
    """A hash of the code that rehearsals follow from."""
    import imgscale.searchers

    here = Path(__file__).resolve().parents[1]
    modules = [*Path(next(iter(imgscale.searchers.__path__))).glob("*.py"), here / "cost.py", here / "flops.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(modules))).hexdigest()


def _texts(model: str) -> str:
    """A hash of the configs that lie with a model; of a hub id, those in its cache.

    Raises:
        UserError: There is no such model, or its configs aren't here.
    """
    from imgscale.models import locate
    from imgscale.outlines import cached

    folder = locate(model) or cached(model)
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.json")):
        if path.stat().st_size < 2**20:  # tokenizers' vocabularies cost nothing
            found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


def _read(file: Path) -> Known | None:
    """What was counted before; None where the file isn't there, or isn't what `_write` writes."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        searches = {key: None if spent is None else Spent(**spent) for key, spent in values.pop("searches").items()}
        return Known(**{**values, "price": Price(**values["price"]), "searches": searches})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(file: Path, known: Known) -> None:
    with suppress(OSError):  # it is counted anew next time
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, json.dumps(asdict(known)).encode())

"""How far previews fall short of the image: whole races kept as data, and margins for early exit learned from them.

A race is some candidates of one prompt, all of which ran to the end. What early exit must not drop is the winner, so
the margin is a conformal quantile of the *winners'* shortfalls, one of each race: that the winner is no ordinary
candidate, that candidates of one prompt are alike, and that previews of one trajectory are, is all in that number.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from imgscale import files

Floats = npt.NDArray[np.float64]

FORMAT = 1
PILOT = 8  # races that give the shape of the margins, and then no longer count for their size
MOST = 400  # races kept of one kind; the oldest after the pilot leave
KEYS = 8  # settings kept of one model; those that learned longest ago leave
SMALLEST = 4  # candidates of a race that is kept
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # candidates that margins are made for; others are rounded up
LEAST = -1e9  # factor: what is never judged falls short by no more
DIGITS = 6  # of scores in the file


@dataclass(frozen=True)
class Race:
    """Candidates of one prompt, none of which was dropped.

    Args:
        name: Tells it from others: the same search again teaches nothing new.
        previews: Scores (n, checks); NaN where there was none.
        finals: Scores (n,) of the images; −inf where there was none.
    """

    name: str
    previews: Floats
    finals: Floats

    @classmethod
    def of(cls, previews: Floats, finals: Floats) -> Race:
        """Named by its scores, and rounded as the file is."""
        previews, finals = np.round(previews, DIGITS), np.round(finals, DIGITS)
        name = hashlib.blake2b(previews.tobytes() + finals.tobytes(), digest_size=8)
        return cls(name.hexdigest(), previews, finals)


@dataclass(frozen=True)
class Margins:
    """How far above a preview's score that of its image may be: centre + scale · factor, at each check.

    Args:
        centre: For each check the mean of image minus preview.
        scale: And its standard deviation.
        factors: (candidates, factor) in increasing order, for as many candidates as the races are enough for.
    """

    centre: tuple[float, ...]
    scale: tuple[float, ...]
    factors: tuple[tuple[int, float], ...]

    def factor(self, candidates: int) -> float | None:
        """The factor for a search of so many candidates; None where too few races were seen for it."""
        return next((factor for n, factor in self.factors if n >= candidates), None)

    def above(self, check: int, candidates: int) -> float:
        """q: what is to be added to a preview's score, for candidates that there is a factor for."""
        factor = self.factor(candidates)
        assert factor is not None
        return self.centre[check] + self.scale[check] * factor


def margins(races: Sequence[Race], delta: float) -> Margins | None:
    """The margins by which the winner is dropped in at most a share ``delta`` of searches; None for too few races.

    Args:
        races: In the order in which they were seen, all with the same checks.
        delta: In (0, 1).
    """
    pilot, rest = races[:PILOT], races[PILOT:]
    if not rest:
        return None
    centre, scale = _shape(pilot)
    marks = [(_shortfalls(race, centre, scale), race.finals) for race in rest]
    factors = [(n, factor) for n in SIZES if (factor := _factor(marks, n, delta)) is not None]
    return Margins(tuple(centre.tolist()), tuple(scale.tolist()), tuple(factors)) if factors else None


def _shape(races: Sequence[Race]) -> tuple[Floats, Floats]:
    """Mean and standard deviation of image minus preview at each check, over all candidates."""
    gaps = np.concatenate([race.finals[:, None] - race.previews for race in races])
    centre, scale = [], []
    for column in gaps.T:
        good = column[np.isfinite(column)]
        centre.append(float(good.mean()) if len(good) else 0.0)
        scale.append(max(float(good.std()), 1e-9) if len(good) else 1.0)
    return np.array(centre), np.array(scale)


def _shortfalls(race: Race, centre: Floats, scale: Floats) -> Floats:
    """The factor above which each candidate would never be dropped, (n,): the largest over the checks.

    One whose previews have no score isn't judged, so it isn't dropped.
    """
    gaps = (race.finals[:, None] - race.previews - centre) / scale
    largest: Floats = np.where(np.isfinite(gaps), gaps, LEAST).max(1, initial=LEAST)
    return largest


def _factor(marks: Sequence[tuple[Floats, Floats]], candidates: int, delta: float) -> float | None:
    """The least factor that conformal risk control allows for a search of so many candidates.

    The winner of all is the winner of its block of k candidates. So delta is spread over the blocks, of which there is
    one if a race is at least as large as the search, and over nothing else. Of a race with more than k candidates, the
    loss is the share of its subsets of size k whose winner would be dropped.

    Source: Angelopoulos et al. 2022 (arXiv 2208.02814), theorem 1; the bound of the loss is 1.
    """
    sizes = sorted({min(len(finals), candidates) for _, finals in marks})
    block = max(sizes, key=lambda k: (k * sum(len(finals) >= k for _, finals in marks), k))
    used = [mark for mark in marks if len(mark[1]) >= block]
    allowed = delta / -(-candidates // block) * (len(used) + 1) - 1  # the sum of losses that is left
    if allowed < -1e-9:
        return None
    values, weights = [], []
    for shortfalls, finals in used:
        values.append(shortfalls[np.argsort(-finals, kind="stable")])
        weights.append(_chances(len(finals), block))
    value, weight = np.concatenate(values), np.concatenate(weights)
    order = np.argsort(-value, kind="stable")
    lost = np.cumsum(weight[order])  # if the factor were just below the value
    index = int(np.searchsorted(lost, allowed + 1e-9, side="right"))
    return float(value[order[min(index, len(order) - 1)]])


def _chances(n: int, block: int) -> Floats:
    """For each rank of n, the chance to be the best of a random subset: C(n−1−rank, block−1) / C(n, block)."""
    chances = np.zeros(n)
    chance = block / n
    for rank in range(n - block + 1):
        chances[rank] = chance
        chance *= (n - block - rank) / max(n - 1 - rank, 1)
    return chances


# -------------------------------------------------------------------------------------------------------- keeping it


class Calibrations:
    """The races of one model that are kept on this machine, besides those that ship with it.

    A race counts only where the model's weights, the verifier, the preview decoder and all settings are the same.

    Args:
        folder: The model's own, from which shipped races are read.
        name: The model's.

    Attributes:
        complaint: What was wrong with a file, in a sentence, or "".
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._shipped = None if folder is None else folder / "early-exit.json"
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imgscale" / "early-exit"
        self._kept = cache / (re.sub(r"[^\w.-]+", "--", name).strip(".-")[:100] or "model")
        self._kept = self._kept.with_name(self._kept.name + ".json")
        self.complaint = ""
        self._held: dict[str, dict[str, dict[str, Race]]] | None = None

    def everything(self) -> str:
        """All races, shipped ones and those of this machine, as `hold` takes them."""
        found: dict[str, dict[str, dict[str, Race]]] = {}
        for file in (self._shipped, self._kept):
            for place, kinds in (self._read(file) if file is not None and file.is_file() else {}).items():
                for kind, races in kinds.items():
                    found.setdefault(place, {}).setdefault(kind, {}).update(races)
        return _text(found)

    def hold(self, everything: str) -> None:
        """From now on only these races count; what is learned still goes to the file on this machine.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: It isn't what `everything` gave.
        """
        self._held = _parse(json.loads(everything))

    def races(self, key: Mapping[str, Any], kind: str) -> list[Race]:
        """The races of a kind under these settings, each once, the shipped ones first."""
        if self._held is not None:
            return list(self._held.get(digest(key), {}).get(kind, {}).values())
        found: dict[str, Race] = {}
        for file in (self._shipped, self._kept):
            if file is not None and file.is_file():
                found |= self._read(file).get(digest(key), {}).get(kind, {})
        return list(found.values())

    def learn(self, key: Mapping[str, Any], lessons: Iterable[tuple[str, Race]]) -> None:
        """Adds races, by their kinds, to the file on this machine; where it can't be written they are lost."""
        lessons = list(lessons)
        if not lessons:
            return
        known = self._read(self._kept) if self._kept.is_file() else {}
        place = digest(key)
        mine = known.pop(place, {})
        known[place] = mine  # the last to have learned
        for kind, race in lessons:
            races = mine.setdefault(kind, {})
            races.setdefault(race.name, race)
            for name in list(races)[PILOT : PILOT + len(races) - MOST]:
                del races[name]
        try:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            write(self._kept, {name: known[name] for name in list(known)[-KEYS:]})
        except OSError:
            pass  # they are learned anew next time

    def _read(self, file: Path) -> dict[str, dict[str, dict[str, Race]]]:
        try:
            return _parse(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.complaint = f"{file} holds no races as early exit keeps them ({error!r}), so it learns anew."
            return {}


def write(file: Path, known: Mapping[str, Mapping[str, Mapping[str, Race]]]) -> None:
    """Writes races by the digest of their settings, kind and name.

    Raises:
        OSError: It can't be written.
    """
    files.write(file, _text(known).encode())


def _text(known: Mapping[str, Mapping[str, Mapping[str, Race]]]) -> str:
    body = {
        place: {
            kind: {
                name: {"previews": _rows(race.previews), "finals": _row(race.finals)} for name, race in races.items()
            }
            for kind, races in kinds.items()
        }
        for place, kinds in known.items()
    }
    return json.dumps({"format": FORMAT, "races": body}, separators=(",", ":"))


def _row(values: Floats) -> list[float | None]:
    return [round(value, DIGITS) if np.isfinite(value) else None for value in values.tolist()]


def _rows(values: Floats) -> list[list[float | None]]:
    return [_row(row) for row in values]


def _parse(text: Any) -> dict[str, dict[str, dict[str, Race]]]:
    """What `write` wrote.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: It isn't that.
    """
    if text["format"] != FORMAT:
        raise ValueError(f"format {text['format']!r}")
    found: dict[str, dict[str, dict[str, Race]]] = {}
    for place, kinds in text["races"].items():
        for kind, races in kinds.items():
            for name, race in races.items():
                finals = np.array([-np.inf if value is None else float(value) for value in race["finals"]])
                previews = np.array(
                    [[np.nan if value is None else float(value) for value in row] for row in race["previews"]]
                )
                if previews.ndim != 2 or len(previews) != len(finals) or np.isnan(finals).any():
                    raise ValueError(f"race {name!r}")
                found.setdefault(place, {}).setdefault(kind, {})[name] = Race(name, previews, finals)
    return found


def digest(key: Mapping[str, Any]) -> str:
    """What races are kept under: a hash of all that they depend on."""
    return hashlib.blake2b(json.dumps(key, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def fingerprint(pipe: Any) -> str:
    """Tells a pipeline's weights from others: a hash of their names, shapes, types and first values.

    Adapters that are loaded into a model change it.
    """
    found = hashlib.blake2b(digest_size=16)
    for part, module in sorted(pipe.components.items()):
        found.update(f"{part} {type(module).__name__}".encode())
        if not isinstance(module, torch.nn.Module):
            continue
        for name, tensor in module.state_dict().items():
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            if tensor.device.type != "meta" and tensor.numel():
                found.update(str(tensor.detach().flatten()[:8].double().cpu().tolist()).encode())
    return found.hexdigest()

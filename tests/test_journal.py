"""The journal: a search that was stopped anywhere goes on from it, and ends as if it had never been stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale import journal as journals
from imgscale import registry
from imgscale.budget import Budget
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.journal import Journal
from imgscale.scaler import Scaler
from imgscale.search import Search
from tests.doubles import STEPS, Clock, Reward, Watched, as_denoiser, clock, near_one, new, stop_after

__all__ = ["clock"]

ALL = [entry.name for entry in registry.searcher] + ["rbf+dps", "svdd+local"]
ASKED = {"model": "world"}


def mean(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.flatten(1).mean(1)


def start(world: Watched, name: str | Callable[..., Any], **settings: Any) -> Search:
    reports = [Reward(mean, "mean")]
    return new(world, name, **{"budget": 40, "reports": reports, "verifier": Reward(), **settings})


def play(world: Watched, folder: Path | None, *searches: Search, **hooks: Any) -> Search:
    for search in searches:
        search.meter.restart()
    log = None if folder is None else Journal(folder, ASKED)
    Engine(as_denoiser(world)).run(searches, journal=log, **hooks)
    return searches[0]


def outcome(search: Search) -> dict[str, Any]:
    """All that a search leaves, but for seconds."""
    assert search.best is not None
    ledger = search.meter.ledger.as_dict()
    del ledger["seconds"]
    return {
        "ledger": ledger,
        "trace": [(p.nfe, p.verifier_calls, p.score, p.report) for p in search.trace],
        "best": (search.best.score, search.best.seed, search.best.finished, search.best.report),
        "latents": search.best.latents.tolist(),
        "image": search.best.image.tolist(),
        "end": (search.stopped, search.rounds, search.events),
    }


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("distilled", [False, True], ids=["ordinary", "distilled"])
def test_a_resumed_search_is_a_straight_one(
    name: str, distilled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped early, half-way and just before the end, and once more on the way."""
    monkeypatch.setattr(journals, "EVERY", 3)
    whole = Watched()
    straight = outcome(play(whole, None, start(whole, name, distilled=distilled)))
    rounds = straight["end"][1]
    for ticks in sorted({1, rounds // 2, rounds - 1}):
        folder = tmp_path / str(ticks)
        first = Watched()
        stopped = play(first, folder, start(first, name, distilled=distilled), stop=stop_after(ticks))
        spent = stopped.meter.ledger.nfe
        second = Watched()
        again = play(second, folder, start(second, name, distilled=distilled), stop=stop_after(3))
        more = again.meter.ledger.nfe
        assert second.evaluations == more - spent, "nothing is evaluated twice"
        third = Watched()
        resumed = play(third, folder, start(third, name, distilled=distilled))
        assert outcome(resumed) == straight
        assert third.evaluations == whole.evaluations - more
    last = Watched()
    assert outcome(play(last, folder, start(last, name, distilled=distilled))) == straight
    assert last.evaluations == 0 and last.decoded == [], "all is known"


def test_searches_side_by_side_resume_together(tmp_path: Path) -> None:
    shifts = {"left": -1.0, "right": 2.0}

    def pair(world: Watched) -> list[Search]:
        return [
            start(world, "rbf", prompt="left", budget=45),
            start(world, "best-of-n", prompt="right", budget=70, seed=3),
        ]

    whole = pair(world := Watched(shifts=shifts))
    play(world, None, *whole)
    for ticks in (2, 5, 8):
        folder = tmp_path / str(ticks)
        world = Watched(shifts=shifts)
        play(world, folder, *pair(world), stop=stop_after(ticks))
        resumed = pair(world := Watched(shifts=shifts))
        play(world, folder, *resumed)
        assert [outcome(s) for s in resumed] == [outcome(s) for s in whole]


def test_a_crash_loses_only_what_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything may end the process: what is on the disk is whole, and enough."""
    monkeypatch.setattr(journals, "EVERY", 2)
    whole = Watched()
    straight = outcome(play(whole, None, start(whole, "rbf")))
    calls = len(whole.batches)

    def crash_at(call: int) -> Callable[[int], None]:
        left = iter(range(call))

        def evaluate(n: int) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        return evaluate

    for call in range(0, calls, 3):
        folder = tmp_path / str(call)
        first = Watched(evaluate=crash_at(call))
        with pytest.raises(KeyboardInterrupt):
            play(first, folder, start(first, "rbf"))
        second = Watched()
        assert outcome(play(second, folder, start(second, "rbf"))) == straight
        assert second.evaluations <= whole.evaluations


def test_failures_and_ends_are_replayed_too(tmp_path: Path) -> None:
    def failing(images: Tensor, prompts: Sequence[str]) -> Tensor:
        if float(images.sum()) % 1 < 0.4:
            raise ZeroDivisionError("now and then")
        scores = near_one(images, prompts)
        return torch.where(scores < -1.5, math.nan, scores)

    def ceiling(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return (near_one(images, prompts) > -0.4).double()

    for rule, top in ((failing, None), (ceiling, 1.0)):
        whole = Watched()
        straight = outcome(play(whole, None, start(whole, "best-of-n", verifier=Reward(rule), ceiling=top, batch=2)))
        assert straight["end"][2] or straight["end"][0] == "ceiling"
        for ticks in (3, 8, 10**6):
            folder = tmp_path / f"{top}{ticks}"
            for _ in range(2):
                world = Watched()
                search = start(world, "best-of-n", verifier=Reward(rule), ceiling=top, batch=2)
                play(world, folder, search, stop=stop_after(ticks))
            world = Watched()
            again = start(world, "best-of-n", verifier=Reward(rule), ceiling=top, batch=2)
            assert outcome(play(world, folder, again)) == straight


def test_the_clock_goes_on_where_it_stood(tmp_path: Path, clock: Clock) -> None:
    def world() -> Watched:
        return Watched(evaluate=lambda n: clock.pass_by(1.0))

    budget = Budget(seconds=40)
    first = world()
    play(first, tmp_path / "j", start(first, "best-of-n", budget=budget), stop=stop_after(20))
    clock.pass_by(3600)
    second = world()
    resumed = play(second, tmp_path / "j", start(second, "best-of-n", budget=budget))
    assert resumed.stopped == "deadline" and 35 <= resumed.meter.ledger.seconds <= 40
    assert len(second.batches) < 24, "twenty seconds were spent before"
    assert [p.seconds for p in resumed.trace] == sorted(p.seconds for p in resumed.trace)
    third = world()
    again = play(third, tmp_path / "j", start(third, "best-of-n", budget=budget))
    assert again.stopped == "deadline" and len(third.batches) <= STEPS
    assert again.best is not None and resumed.best is not None and again.best.score >= resumed.best.score


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large answers are written before their time is come."""
    monkeypatch.setattr(journals, "EVERY", 10**6)
    monkeypatch.setattr(journals, "LARGEST", 1000)
    world = Watched()
    play(world, tmp_path / "j", start(world, "best-of-n", budget=400))
    assert len(list((tmp_path / "j").glob("part-*"))) > 3


# -------------------------------------------------------------------------------------------------- what is refused


def written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A journal of some parts."""
    monkeypatch.setattr(journals, "EVERY", 1)
    world = Watched()
    play(world, folder, start(world, "rbf"))
    parts = sorted(folder.glob("part-*"))
    assert len(parts) > 3
    return parts


def refusal(folder: Path, asked: dict[str, Any] = ASKED, name: str = "rbf", **settings: Any) -> str:
    world = Watched()
    search = start(world, name, **settings)
    with pytest.raises(UserError) as caught:
        Engine(as_denoiser(world)).run([search], journal=Journal(folder, asked))
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and message[-1] == "."
    assert world.evaluations == 0
    return message


def test_the_journal_of_another_search_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "j"
    written(folder, monkeypatch)
    assert "its model is 'world', and here it is 'other'" in refusal(folder, {"model": "other"})
    assert "its seed is not set, and here it is 1" in refusal(folder, {**ASKED, "seed": 1})
    assert "asks for something else" in refusal(folder, name="best-of-n")
    assert "asks for something else" in refusal(folder, seed=1)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "missing", "head", "no head", "entries", "tensors"])
def test_a_damaged_journal_is_refused(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "j"
    parts = written(folder, monkeypatch)
    head = folder / "head.json"
    match damage:
        case "cut":
            parts[1].write_bytes(parts[1].read_bytes()[:-20])
        case "noise":
            parts[1].write_bytes(b"\xff" * 1000)
        case "empty":
            parts[1].write_bytes(b"")
        case "missing":
            parts[1].unlink()
        case "head":
            head.write_text("{")
        case "no head":
            head.unlink()
        case "entries" | "tensors":
            from safetensors.torch import load_file, save_file

            tensors, meta = load_file(parts[0]), {"entries": "[{}]"}
            if damage == "tensors":
                from safetensors import safe_open

                with safe_open(parts[0], "pt") as part:
                    meta = part.metadata()
                tensors.pop(next(iter(tensors)))
            save_file(tensors, parts[0], meta)
    message = refusal(folder)
    assert "damaged" in message or "no journal" in message


def test_what_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert "no journal of imgscale; choose another place" in refusal(file)
    assert "no journal of imgscale" in refusal(tmp_path)
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]
    (tmp_path / "empty").mkdir()
    Journal(tmp_path / "empty", ASKED)
    assert json.loads((tmp_path / "empty" / "head.json").read_text()) == {"format": 1, **ASKED}


def test_two_writers_are_kept_apart(tmp_path: Path) -> None:
    folder = tmp_path / "j"
    world = Watched()
    one = Journal(folder, ASKED)
    play(world, folder, start(world, "best-of-n"))
    with pytest.raises(UserError, match="Another search writes"):
        Engine(as_denoiser(world)).run([start(world, "best-of-n")], journal=_deaf(one))


def _deaf(journal: Journal) -> Journal:
    """One that read before the other wrote."""
    journal.read = lambda: iter(())  # type: ignore[method-assign]
    return journal


# ------------------------------------------------------------------------------------------------ from the front door


def test_the_scaler_resumes(tmp_path: Path) -> None:
    def search(stop: int = 10**6, **settings: Any) -> tuple[Any, Watched]:
        world = Watched(shape=(3, 4, 6))
        made = Scaler(Engine(as_denoiser(world)), "world")

        def callback(progress: Any) -> None:
            if progress.rounds[0] >= stop:
                progress.cancel()

        given: dict[str, Any] = {
            "searcher": "rbf+dps",
            "verifier": Reward(mean, "mean"),
            "budget": 60,
            "num_inference_steps": STEPS,
        }
        given |= {"progress": False, "plain": False, "callback": callback, **settings}
        return made("a cat", **given), world

    straight, whole = search()
    first, _ = search(stop=6, journal=tmp_path / "j")
    assert first.stopped == "cancelled" and first.nfe < straight.nfe
    resumed, world = search(journal=str(tmp_path / "j"))
    assert resumed.images[0].tobytes() == straight.images[0].tobytes()
    assert resumed.scores == straight.scores and resumed.nfe == straight.nfe
    assert world.evaluations == whole.evaluations - first.nfe
    for changed in ({"seed": 1}, {"budget": 61}, {"searcher": "rbf"}, {"searcher": "rbf+dps(scale=1)"}):
        with pytest.raises(UserError, match="is another search's: its"):
            search(journal=tmp_path / "j", **changed)

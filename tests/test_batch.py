"""Runs of many prompts: what is kept, resumed, shared, refused and said."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import imgscale
from benchmarks import kill
from imgscale import files, models, png, registry
from imgscale.app.batch import clock, lock, plan, queue, store
from imgscale.app.batch.store import Store
from imgscale.app.console import Interrupt
from imgscale.app.job import Job
from imgscale.calibration import Calibrations
from imgscale.denoiser import Denoiser
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.models import ModelSettings
from imgscale.scaler import Scaler
from tests import zoo
from tests.commands import Bright, Command, Ran
from tests.test_cli import bundled_model

SETTINGS = ModelSettings(steps=2, guidance_scale=3.0, defaults={"max_sequence_length": 16}, summary="Random weights.")
BASE = ("--model", "tiny", "--searcher", "best-of-n", "--verifier", "bright", "--budget", "6", "--report", "none")
TEXTS = ("a red circle", "a blue square", "two stars", "a cat", "a dog")

Batch = Callable[..., Ran]


@pytest.fixture(scope="module")
def scaler() -> Scaler:
    engine = Engine(Denoiser(zoo.build("StableDiffusion3Pipeline"), SETTINGS.defaults), 4, exact=True)
    return Scaler(engine, "tiny", SETTINGS)


@pytest.fixture(autouse=True)
def tiny(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, Any]]]:
    """Bundled models `tiny` and `other`, which are one, and a verifier `bright`. Yields the arguments of each load."""
    loads: list[dict[str, Any]] = []
    if request.node.get_closest_marker("weights"):
        yield loads
        return
    folder = tmp_path_factory.mktemp("bundled") / "tiny"
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    (folder / models.SETTINGS).write_text(json.dumps({"steps": 2, "summary": "Random weights."}))

    def load(model: str, **arguments: Any) -> Scaler:
        loads.append({"model": model, **arguments})
        made: Scaler = request.getfixturevalue("scaler")
        return made

    known = {"tiny": folder, "other": folder}
    monkeypatch.setattr(models, "bundled", lambda: known)
    monkeypatch.setattr(plan, "bundled", lambda: known)
    monkeypatch.setattr(imgscale, "load", load, raising=False)
    list(registry.verifier)  # or a later discovery would come after the next line
    monkeypatch.setitem(registry.verifier._entries, "bright", registry.Entry("bright", Bright))
    yield loads


@pytest.fixture
def batch(command: Command) -> Batch:
    """Runs ``imgscale batch`` on some prompts in an empty folder."""

    def run(*more: str, texts: tuple[str, ...] = TEXTS, out: str = "run") -> Ran:
        Path("p.txt").write_text("\n".join(texts), encoding="utf-8")
        return command("batch", "p.txt", *BASE, "--out", out, *more)

    return run


def images(folder: str = "run") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (Path(folder) / "images").iterdir()}


def by_prompt(folder: str = "run") -> dict[str, str]:
    """Hashes of the images by their prompts and seeds, whatever their numbers."""
    return {name.partition("-")[2]: hashlib.sha256(data).hexdigest() for name, data in images(folder).items()}


# ---------------------------------------------------------------------------------------------------- what is kept


def test_a_run_keeps_images_and_says_what_came_of_them(batch: Batch) -> None:
    ran = batch("--json", "--seed", "7,8", "--keep", "2")
    assert ran.status == 0, ran.err
    found = ran.json
    assert (found["prompts"], found["searches"], found["done"], found["images"]) == (5, 10, 10, 20)
    assert found["nfe"] == 60 and found["failures"] == [] and found["left"] == 0
    assert len(images()) == 30  # two of each, and a plain one
    with Store.open("run") as kept:
        items = list(kept.items())
        assert [item.number for item in items] == list(range(10)) and kept.states() == {"done": 10}
        first = items[0]
        assert (first.prompt.text, first.seed, first.nfe, first.verifier) == ("a red circle", 7, 6, "bright")
        assert [image.rank for image in first.images] == [1, 2]
        best, second = (image.scores["bright"] for image in first.images)
        assert best is not None and second is not None and best >= second
        assert first.trace["scores"]["bright"][-1] == best == first.scores["bright"]
        assert first.plain is not None and first.plain.is_file() and first.plain_scores["bright"] is not None
        assert kept.scores()["bright"][0] == best and kept.config["budget"] == {"nfe": 6}
        record = png.read(first.images[0].path)
        assert record.model_dump(mode="json") == first.settings
        assert (record.prompt, record.seed, record.scores) == ("a red circle", 7, {"bright": best})
        assert "seconds" not in record.ledger and first.ledger["seconds"] > 0


def test_an_image_is_that_of_generate(batch: Batch, command: Command) -> None:
    from PIL import Image

    batch("--seed", "3")
    words = [word for word in BASE if word not in ("--report", "none")]
    made = command("generate", "a blue square", *words, "--report", "none", "--seed", "3", "--json").json
    with Image.open(made["images"][0]) as one, Image.open("run/images/00001-a-blue-square-3.png") as other:
        assert one.tobytes() == other.tobytes()


def test_the_table_is_short(batch: Batch) -> None:
    ran = batch()
    lines = ran.out.splitlines()
    assert lines[0].split() == ["mean", "of", "plain", "searched"] and lines[1].startswith("bright")
    assert lines[-1] == "5 prompts, 5 searches: 5 done; 5 images, 30 NFE. The run is in run"
    assert re.search(r"^5/5 searches, 30 NFE, \d+ s$", ran.err, re.MULTILINE)
    again = batch("--quiet")
    assert again.out == "run\n" and again.err == ""


def test_the_order_of_prompts_changes_no_image(batch: Batch) -> None:
    batch("--together", "3")
    batch("--together", "2", texts=TEXTS[::-1], out="turned")
    assert by_prompt() == by_prompt("turned") and len(by_prompt()) == 10


EARLY = ("--steps", "5", "--budget", "20", "--early-exit", "calibrated(delta=0.5, audit=0)", "--no-plain")


@pytest.fixture
def lessons(scaler: Scaler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of what early exit has learned on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(scaler, "calibrations", Calibrations(None, "tiny"))
    return tmp_path / "cache" / "imgscale" / "early-exit" / "tiny.json"


def dropped(folder: str = "run") -> int:
    """Candidates that early exit stopped in a run."""
    with Store.open(folder) as kept:
        return sum(item.settings["exits"]["dropped"] for item in kept.items())


LEARNED: list[bytes] = []  # by the first run of `learned`, which takes its time


def learned(batch: Batch, lessons: Path) -> None:
    """A run from which there is enough to drop candidates in the next one."""
    if not LEARNED:
        assert batch(*EARLY, texts=tuple(f"a {i}" for i in range(12)), out="first").status == 0
        assert dropped("first") == 0, "what a run learns counts from the next one on"
        LEARNED.append(lessons.read_bytes())
    lessons.parent.mkdir(parents=True, exist_ok=True)
    lessons.write_bytes(LEARNED[0])


def test_early_exit_depends_neither_on_the_order_nor_on_what_the_run_learns(batch: Batch, lessons: Path) -> None:
    learned(batch, lessons)
    assert batch(*EARLY, "--together", "1").status == 0 and dropped() > 0
    batch(*EARLY, "--together", "3", texts=TEXTS[::-1], out="turned")
    assert by_prompt() == by_prompt("turned") and dropped("turned") == dropped()
    with Store.open("run") as kept:
        rule = png.read(next(iter(kept.items())).images[0].path).early_exit
    assert rule is not None and rule.margins


@contextmanager
def stopped_at_the_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if SIGTERM came when the first search is finished."""
    finish = queue.Queue.finish

    def stop(self: queue.Queue, *rest: Any) -> bool:
        os.kill(os.getpid(), 15)
        return finish(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(queue.Queue, "finish", stop)
        patch.setattr(Interrupt, "_restore", lambda self: None)
        yield


@pytest.mark.parametrize("more", [(), ("--join",)])
def test_a_resumed_run_goes_by_what_was_known_when_it_began(
    more: tuple[str, ...], batch: Batch, lessons: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned(batch, lessons)
    batch(*EARLY, out="straight")
    with stopped_at_the_first(monkeypatch):
        assert batch(*EARLY, "--together", "1").status == 130
    lessons.unlink()  # whatever has been learned or lost since
    assert batch(*EARLY, *more, "--json").json["done"] == 5
    assert dropped() == dropped("straight") > 0 and images() == images("straight")


def test_rows_may_have_an_early_exit_of_their_own(command: Command, lessons: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "early_exit": "calibrated"}, {"prompt": "c", "early_exit": "soon"}]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = command("batch", "p.jsonl", *BASE, "--steps", "5", "--budget", "20", "--json", "--out", "run").json
    assert found["done"] == 2 and "early_exit can't be 'soon'" in found["failures"][0]["reason"]
    with Store.open("run") as kept:
        assert ["early_exit" in item.settings and bool(item.settings["early_exit"]) for item in kept.items()] == [
            False,
            True,
        ]


def test_a_dry_run_teaches_early_exit_nothing(batch: Batch, lessons: Path) -> None:
    assert batch(*EARLY, "--dry-run").status == 0 and not lessons.exists()


def test_copies_get_files_of_their_own(batch: Batch) -> None:
    assert batch("--json", texts=("a cat", "a cat")).json["done"] == 2
    assert {"00000-a-cat-0.png", "00001-a-cat-0.png"} < images().keys()


def test_models_are_loaded_once_each(batch: Batch, command: Command, tiny: list[dict[str, Any]]) -> None:
    rows = [{"prompt": text, "model": model} for text in ("a", "b") for model in ("tiny", "other")]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert command("batch", "p.jsonl", *BASE, "--json", "--out", "run").json["done"] == 4
    assert [load["model"] for load in tiny] == ["tiny", "other"] and all(load["exact"] for load in tiny)


# ------------------------------------------------------------------------------------------------ going on, or not


def test_the_same_command_does_nothing_twice(batch: Batch, tiny: list[dict[str, Any]]) -> None:
    batch()
    before = images()
    times = {path: path.stat().st_mtime_ns for path in Path("run/images").iterdir()}
    ran = batch("--json")
    assert ran.json["done"] == 5 and len(tiny) == 1, "no model is loaded where there is nothing to do"
    assert images() == before and times == {path: path.stat().st_mtime_ns for path in Path("run/images").iterdir()}


class Killed(BaseException):
    """As sudden as a signal, as far as a process can do that to itself."""


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(
    at: int, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch(out="straight")
    writes = 0
    write = files.write

    def cut(path: Path, data: bytes) -> None:
        nonlocal writes
        writes += 1
        if writes == at:
            (path.parent / ".abc.part").write_bytes(data[:7])
            raise Killed
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", cut)
        patch.setattr(queue.Queue, "close", lambda self: (self._database.close(), self._worker._file.close()))
        with pytest.raises(Killed):
            batch()
    assert batch("--json").json["done"] == 5
    assert images() == images("straight")
    assert not [name for name in os.listdir("run") if name.startswith(".worker")]


def test_another_run_is_refused_and_names_the_difference(batch: Batch) -> None:
    batch()
    before = images()
    said = batch("--searcher", "rbf", "--seed", "1").sentence
    assert re.match(
        r"'run' holds another run \(seeds \[0\] and not \[1\], searcher \"best-of-n\" and not \"rbf\"\); choose"
        r" another --out, or add --fresh",
        said,
    )
    assert "(other prompts)" in batch(texts=("x", *TEXTS[1:])).sentence
    assert "(prompts 5 and not 1)" in batch(texts=("x",)).sentence
    assert images() == before


def test_fresh_moves_the_old_run_aside(batch: Batch) -> None:
    batch()
    assert batch("--fresh", "--seed", "1", "--json").json["done"] == 5
    assert "00000-a-red-circle-0.png" in images("run-1") and "00000-a-red-circle-1.png" in images()
    batch("--fresh", "--seed", "2")
    assert "00000-a-red-circle-1.png" in images("run-2")
    assert "leave one of them out" in batch("--fresh", "--join").sentence


def test_without_a_folder_the_run_is_named_by_what_is_asked_for(command: Command) -> None:
    Path("My prompts.txt").write_text("a cat")
    one, two, three = (command("batch", "My prompts.txt", *BASE, "-q", "--seed", s).out for s in ("0", "0", "1"))
    assert one == two != three and re.fullmatch(r"imgscale-runs/my-prompts-[0-9a-f]{8}\n", one)


def test_newer_stores_and_other_files_are_refused(batch: Batch) -> None:
    batch()
    database = sqlite3.connect("run/run.sqlite")
    database.execute(f"PRAGMA user_version = {store.VERSION + 1}")
    database.close()
    versions = f"its store has version {store.VERSION + 1}, and this one reads up to {store.VERSION}"
    assert f"was written by a newer imgscale ({versions})" in batch().sentence
    with pytest.raises(UserError, match="newer imgscale"):
        Store.open("run")
    Path("odd").mkdir()
    Path("odd/run.sqlite").write_text("no database, but long enough to look like one: " * 9)
    assert "is no database of imgscale" in batch(out="odd").sentence
    with pytest.raises(UserError, match="There is no run in 'nowhere'"):
        Store.open("nowhere")


def test_a_store_names_no_file_elsewhere(batch: Batch) -> None:
    batch()
    database = sqlite3.connect("run/run.sqlite", isolation_level=None)
    database.execute("UPDATE images SET file = '../p.txt' WHERE item = 3")
    database.close()
    with Store.open("run") as kept, pytest.raises(UserError, match="a file outside of it"):
        list(kept.items())


# --------------------------------------------------------------------------------------------- several processes


def test_a_second_process_is_refused_unless_it_joins(batch: Batch) -> None:
    Path("run").mkdir()
    other = lock.Worker(Path("run"))
    said = batch().sentence
    assert said == (
        "Another imgscale batch is at work in 'run'; wait for it, stop it, or add --join to share the work."
    )
    assert batch("--join", "--json").json["done"] == 5
    other.leave()
    assert batch("--json").json["done"] == 5


def test_claims_are_shared_and_those_of_the_dead_taken_over(batch: Batch, tmp_path: Path) -> None:
    Path("p.txt").write_text("\n".join(TEXTS))
    wish = plan.Wish("p.txt", Job(prompt="", model="tiny", verifier="bright"))
    made = plan.plan(wish)
    one = queue.enter(tmp_path / "r", made, {})
    two = queue.enter(tmp_path / "r", made, {}, join=True)
    assert [one.claim("tiny"), two.claim("tiny"), one.claim("tiny")] == [0, 1, 2]
    two.take_over()
    assert two.claim("tiny") == 3, "the living keep their claims"
    one._database.close()
    one._worker._file.close()  # it dies
    two.take_over()
    assert [two.claim("tiny") for _ in range(4)] == [0, 2, 4, None]
    two.fail(made.tasks[0], "why")
    assert two.states() == {"failed": 1, "claimed": 4} and two.left() == 4
    two.close()
    with Store.open(tmp_path / "r") as kept:
        assert kept.states() == {"failed": 1, "waiting": 4}
        assert [(f.row, f.item, f.reason) for f in kept.failures()] == [(1, 0, "why")]


def test_an_item_that_was_taken_over_is_not_kept_twice(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a cat")
    made = plan.plan(plan.Wish(str(tmp_path / "p.txt"), Job(prompt="", model="tiny", verifier="bright")))
    one = queue.enter(tmp_path / "r", made, {})
    two = queue.enter(tmp_path / "r", made, {}, join=True)
    assert one.claim("tiny") == 0
    one.release(0)
    assert two.claim("tiny") == 0
    assert one.finish(made.tasks[0], queue.Result({})) is False
    one.close()
    two.close()


# ---------------------------------------------------------------------------------------------------- what goes wrong


def test_what_fails_is_isolated_reported_and_tried_again(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = ['{"prompt": "a cat"}', "{", '{"prompt": "b", "budget": 1}', '{"prompt": "c", "searcher": "rfb"}']
    Path("p.jsonl").write_text("\n".join(rows))
    words = ("batch", "p.jsonl", *BASE, "--out", "run", "--json")
    ran = command(*words)
    assert ran.status == 1
    assert (ran.json["done"], ran.json["failed"], ran.json["searches"]) == (1, 2, 3)
    said = {failure["row"]: failure["reason"] for failure in ran.json["failures"]}
    assert said[2].startswith("is no JSON") and "budget of 1 model evaluations can't finish" in said[3]
    assert "Unknown searcher 'rfb'" in said[4]
    assert "imgscale: row 3 failed: A budget of 1" in ran.err
    assert command(*words).json["failures"] == ran.json["failures"]


def test_what_breaks_a_batch_is_found_by_itself(batch: Batch, monkeypatch: pytest.MonkeyPatch, scaler: Scaler) -> None:
    batch(out="straight")
    decode = scaler.engine.denoiser.decode

    def breaks(x0: torch.Tensor, cond: Any, *rest: Any) -> torch.Tensor:
        if "two stars" in cond.prompt:
            raise RuntimeError("device-side assert")
        return decode(x0, cond, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(scaler.engine.denoiser, "decode", breaks)
        ran = batch("--json", "--no-plain")
        failed = [f for f in ran.json["failures"]]
        assert ran.status == 1 and ran.json["done"] == 4 and [f["prompt"] for f in failed] == ["two stars"]
        assert failed[0]["reason"] == "RuntimeError: device-side assert"
    assert batch("--json", "--no-plain").json["done"] == 5
    assert images().items() <= images("straight").items()


def test_a_verifier_that_dies_fails_its_items_and_keeps_an_answer(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: Any, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        raise RuntimeError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(Bright, "__call__", dies)
        ran = batch("--json")
        assert ran.status == 1 and ran.json["failed"] == 5 and ran.json["images"] == 5
        assert "gone" in ran.json["failures"][0]["reason"]
    assert batch("--json").json["done"] == 5


def test_a_full_disk_ends_the_run_and_loses_nothing(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch(out="straight")
    writes, write = 0, files.write

    def full(path: Path, data: bytes) -> None:
        nonlocal writes
        writes += 1
        if writes > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        ran = batch("--json", "--together", "1")
    assert ran.status == 1 and ran.json["done"] == 2 and ran.json["left"] == 3
    assert (
        "imgscale: The run folder can't be written (No space left on device). What is finished is kept; mend that, and"
        " the same command goes on.\n"
    ) in ran.err
    assert batch("--json").json["done"] == 5 and images() == images("straight")


def test_a_folder_that_cannot_be_written(batch: Batch, tiny: list[dict[str, Any]]) -> None:
    Path("file").write_text("in the way")
    assert re.match(r"The output folder 'file/r' can't be written \(.+\); choose another", batch(out="file/r").sentence)
    assert tiny == []


def test_stopping_keeps_what_is_finished(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch(out="straight")
    with stopped_at_the_first(monkeypatch):
        ran = batch("--together", "1")
    assert ran.status == 130
    assert "imgscale: stopped by SIGTERM; 1 searches are kept, and the same command goes on.\n" in ran.err
    assert batch("--json").json["done"] == 5 and images() == images("straight")


def test_a_deadline_ends_searches_with_an_answer_and_the_next_command_makes_them_whole(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch(out="straight", texts=TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(clock.Clock, "over", lambda self: True)
        ran = batch("--json", "--hours", "1", "--together", "5", "--no-plain", "--set", "batch=1", out="cut")
    assert ran.status == 1 and ran.json["cut"] == 5 and ran.json["images"] == 5
    assert "5 searches were cut short" in ran.err
    with Store.open("cut") as kept:
        assert all(item.stopped == "deadline" and item.nfe < 6 for item in kept.items())
    assert batch("--json", "--no-plain", "--set", "batch=1", out="cut").json["done"] == 5
    monkeypatch.setattr(clock.Clock, "room", lambda self: False)
    ran = batch("--json", "--hours", "1", out="never")
    assert ran.status == 1 and ran.json["left"] == 5


def turns(folder: str = "run") -> list[tuple[int, int, int, int | None]]:
    with sqlite3.connect(f"{folder}/run.sqlite") as database:
        return list(database.execute("SELECT item, round, budget, nfe FROM rounds ORDER BY round, item"))


def test_a_total_goes_in_rounds_to_those_that_gain_most(batch: Batch) -> None:
    ran = batch("--json", "--total-budget", "100", "--keep", "best")
    assert ran.status == 0 and ran.json["nfe"] == 100 and ran.json["images"] == 5, ran.err
    rows = turns()
    assert {round_ for _, round_, *_ in rows} == {0, 1, 2, 3} and all(budget == nfe for *_, budget, nfe in rows)
    assert [budget for _, round_, budget, _ in rows if round_ == 0] == [8] * 5
    with Store.open("run") as kept:
        items = list(kept.items())
    spent = {i: sum(nfe or 0 for item, *_, nfe in rows if item == i) for i in range(5)}
    assert {item.number: item.nfe for item in items} == spent == {i.number: int(i.ledger["nfe"]) for i in items}
    assert len(set(spent.values())) > 1
    for item in items:
        best, steps = item.trace["scores"]["bright"], item.trace["nfe"]
        assert best == sorted(best) and steps == sorted(steps) and steps[-1] <= item.nfe
        assert abs(best[-1] - item.scores["bright"]) < 1e-6
        assert png.read(item.images[0].path).scores["bright"] == item.scores["bright"]
        assert item.plain is not None and item.plain.exists()
    # A prompt that had several turns has the best image of all of them.
    later = {item for item, round_, *_ in rows if round_}
    with_turns = [item for item in items if item.number in later]
    assert any(item.settings["seed"] != item.seed for item in with_turns)


@pytest.mark.parametrize("ticks", [1, 9, 17, 26, 40])
def test_a_total_that_was_interrupted_goes_on_to_the_same(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, ticks: int
) -> None:
    batch("--total-budget", "100", out="straight")
    calls = 0

    def asked(self: Interrupt) -> bool:
        nonlocal calls
        calls += 1
        return calls > ticks * 3

    with monkeypatch.context() as patch:
        patch.setattr(Interrupt, "asked", property(asked, lambda self, value: None), raising=False)
        batch("--total-budget", "100", "--together", "2")
    ran = batch("--json", "--total-budget", "100", "--together", "3")
    assert ran.status == 0 and ran.json["nfe"] == 100
    assert turns() == turns("straight") and images() == images("straight")


def test_a_total_with_what_cannot_be_divided_is_refused(batch: Batch) -> None:
    assert "--total-budget can't be '0'" in batch("--total-budget", "0").sentence
    assert "keeps the best image of each search" in batch("--total-budget", "99", "--keep", "2").sentence
    assert "9 NFE can't give 5 searches one image each, which takes 10" in batch("--total-budget", "9").sentence
    said = batch("--total-budget", "99", "--verifier", "bright+jpeg", out="other").sentence
    assert "an ensemble's scores only compare the images of one search" in said


# -------------------------------------------------------------------------------------------------------- and the rest


def test_an_image_can_be_made_again(batch: Batch, command: Command) -> None:
    batch("--together", "5", "--keep", "2")
    ran = command("rerun", "run/images/00002-two-stars-0.png", "--json", "--out", "again")
    assert ran.status == 0 and ran.json["identical"], ran.err
    assert "no imgscale settings" in command("rerun", "run/images/00002-two-stars-0-2.png").sentence


def test_the_page_s_example_reads_a_run(batch: Batch, capfd: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "batch.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    batch()
    exec(compile(example, "docs/batch.md", "exec"), {})
    assert capfd.readouterr().out.splitlines()[2].startswith("two stars 0 {'bright': ")


def test_a_dry_run_counts_and_writes_nothing(batch: Batch) -> None:
    ran = batch("--dry-run", "--json", "--seed", "1..3", "--keep", "2")
    assert ran.status == 0, ran.err
    found = ran.json
    assert (found["prompts"], found["searches"], found["images"]) == (5, 15, 30)
    assert (found["nfe"], found["plain_nfe"]) == (90, 30) and found["eflops"] > 0 and found["seconds"] > 0
    assert not Path("run").exists()
    assert "15 searches" in batch("--dry-run", "--seed", "1..3").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--keep", "0"), "--keep can't be '0'; give best, all, or how many"),
        (("--until", "noon"), "--until can't be 'noon'"),
        (("--seed", "1,1"), "--seed names 1 twice"),
        (("--format", "xml"), "Unknown format 'xml'"),
        (("--together", "0"), "--together can't be '0'"),
        (("--budget", "0"), "--budget can't be '0'"),
        (("--set", "n"), "--set can't be 'n'"),
        (("--searcher", "rfb"), "Unknown searcher 'rfb'"),
        (("--early-exit", "soon"), "early_exit can't be 'soon'; give off, calibrated or paper"),
    ],
)
def test_mistakes_are_one_sentence(words: tuple[str, ...], said: str, batch: Batch, tiny: list[dict[str, Any]]) -> None:
    assert re.match(said, batch(*words).sentence)
    assert tiny == [] and not Path("run").exists()


@pytest.mark.slow
@pytest.mark.weights
@bundled_model
def test_killed_runs_end_as_if_they_had_not_been(tmp_path: Path) -> None:
    """As `python -m benchmarks kill`."""
    lines: list[str] = []
    found = kill.trial(tmp_path, 20, 1, lines.append)
    assert found.passed, lines
    assert found.kills >= 15, lines

"""Kills a run of `imgscale batch` at random moments by SIGKILL, resumes it each time, and compares every byte.

The moments are drawn over start-up and over the time after the first image, half and half. The images of the killed
run must be those of a run that nobody touched, no item may be done twice, and none may be lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROMPTS = (
    *("a red circle", "two blue squares", "a green star", "three yellow triangles", "a red circle above a blue square"),
    *(
        "a green triangle left of a red star",
        "two red circles and a blue square",
        "a yellow star",
        "four green squares",
    ),
    *("a blue circle below a red triangle", "two {red|green} stars", "five red circles"),
)
OPTIONS = ("--model", "shapes-turbo", "--searcher", "best-of-n", "--budget", "8", "--keep", "2", "--together", "4")
SEEDS = ("--seed", "1..6")


@dataclass
class Outcome:
    """What came of it.

    Args:
        kills: How many times a process was killed.
        items: Of the run.
        done: How many of them are done.
        again: How often an item that was done was done once more.
        images: How many files there are in the run that nobody touched.
        same: How many of them the killed run has byte for byte, and no others.
    """

    kills: int
    items: int
    done: int
    again: int
    images: int
    same: int

    @property
    def passed(self) -> bool:
        return self.done == self.items and self.again == 0 and self.same == self.images > 0


def trial(folder: Path, kills: int, seed: int, say: Callable[[str], None], options: Sequence[str] = ()) -> Outcome:
    """Runs, kills, resumes and compares.

    Args:
        folder: An empty one.
        kills: How many times.
        seed: Of the moments.
        say: Called with each line of the log.
        options: Further ones of the command.
    """
    file = folder / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    words = [sys.executable, "-m", "imgscale.app", "batch", file.name, *OPTIONS, *SEEDS, *options, "--quiet", "--out"]
    rng = random.Random(seed)
    began = time.monotonic()
    process = _start([*words, "straight"], folder)
    while not _images(folder / "straight") and process.poll() is None:
        time.sleep(0.01)
    first = time.monotonic() - began
    if process.wait() != 0:
        raise SystemExit("the run that nobody touches failed")
    say(f"untouched: first image after {first:.1f} s, all after {time.monotonic() - began:.1f} s")
    killed, run = 0, folder / "killed"
    ended: dict[int, float] = {}  # of each item that is done, when
    again = 0
    while True:
        process = _start([*words, "killed"], folder)
        if killed < kills:
            late = rng.random() < 0.5
            # After an image in powers of ten: from the middle of the next file to the middle of the next searches.
            limit = 10 ** rng.uniform(-3, 0) if late else rng.uniform(0, first)
            moment = _wait(process, run, late, limit)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
        status = process.wait()
        now = _ended(run)
        again += sum(now.get(item) != when for item, when in ended.items())  # changed, or lost
        ended, done = now, len(now)
        if status != -signal.SIGKILL:
            say(f"ended by itself with status {status}: {done} done")
            break
        say(f"kill {killed:2d} {moment}: {done} done, {len(_images(run))} files")
    straight, other = _images(folder / "straight"), _images(run)
    same = sum(other.get(name) == data for name, data in straight.items())
    same -= len(other.keys() - straight.keys())
    return Outcome(killed, _total(run), len(ended), again, len(straight), same)


def _start(words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def _wait(process: subprocess.Popen[bytes], run: Path, late: bool, limit: float) -> str:
    """Waits for a moment after the next image, or in start-up, which the next image ends; says which it was."""
    began, names = time.monotonic(), set(_names(run))

    def passed() -> float:
        return time.monotonic() - began

    while process.poll() is None and set(_names(run)) <= names and (late or passed() < limit):
        time.sleep(0.002)
    if late:
        began = time.monotonic()
        while process.poll() is None and passed() < limit:
            time.sleep(0.001)
    return f"{passed():6.3f} s after {'the next image' if late else 'the start'}"


def _names(run: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return [name for name in os.listdir(run / "images") if name.endswith(".png")]
    return []


def _images(run: Path) -> dict[str, bytes]:
    return {name: (run / "images" / name).read_bytes() for name in _names(run)}


def _ask(run: Path, query: str) -> list[tuple[int, float]]:
    if not (run / "run.sqlite").exists():
        return []
    database = sqlite3.connect(run / "run.sqlite")
    try:
        return list(database.execute(query))
    except sqlite3.OperationalError:  # killed before there was anything in it
        return []
    finally:
        database.close()


def _ended(run: Path) -> dict[int, float]:
    return dict(_ask(run, "SELECT item, ended FROM results JOIN items ON number = item WHERE state = 'done'"))


def _total(run: Path) -> int:
    return len(_ask(run, "SELECT number, 0.0 FROM items"))


def main(args: argparse.Namespace) -> None:
    import tempfile

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"python -m benchmarks kill --kills {args.kills} --seed {args.seed}")
    with tempfile.TemporaryDirectory() as folder:
        found = trial(Path(folder), args.kills, args.seed, say)
    say(
        f"{found.kills} kills: {found.done} of {found.items} items done, {found.again} of them twice;"
        f" {found.same} of {found.images} files the same byte for byte"
    )
    if not found.passed:
        raise SystemExit(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")

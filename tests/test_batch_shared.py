"""Two real processes on one run folder: they share the work, nothing is made twice, and no image is another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

# Its verifier lets a process go on with its first image only once so many processes have one.
CHILD = """
import os, pathlib, sys, time

from imgscale import registry
from imgscale.app import main

together, made = int(sys.argv.pop(1)), pathlib.Path("made")


@registry.verifier("waiting")
class Waiting:
    name, range, reads_prompt, differentiable = "waiting", None, False, False

    def __call__(self, images, prompts):
        with (made / str(os.getpid())).open("a") as file:
            file.write("".join(f"{prompt}\\n" for prompt in prompts))
        began = time.monotonic()
        while len(list(made.iterdir())) < together and time.monotonic() - began < 400:
            time.sleep(0.02)
        return images.flatten(1).mean(1)

    def identity(self):
        return {}


main.main(sys.argv[1:])
"""
PROMPTS = [f"{count} {colour} circles" for count in ("two", "three") for colour in ("red", "blue", "green")]


def begin(folder: Path, together: int, *more: str) -> subprocess.Popen[str]:
    words: tuple[str, ...] = (
        "batch",
        "p.txt",
        "-m",
        "shapes-turbo",
        "-s",
        "best-of-n",
        "-v",
        "waiting",
        "-b",
        "8",
        "--report",
        "none",
    )
    words += ("--together", "1", "-o", "run", "-q", *more)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(together), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *others: tuple[str, ...]) -> list[list[str]]:
    """Runs a process, and others beside it; which prompts each of them scored images of."""
    (folder / "made").mkdir(parents=True)
    (folder / "p.txt").write_text("\n".join(PROMPTS))
    processes = [begin(folder, 1 + len(others))]
    while not list((folder / "made").iterdir()) and processes[0].poll() is None:
        time.sleep(0.05)  # until the first is at work
    processes += [begin(folder, 1 + len(others), *more) for more in others]
    for process in processes:
        _, said = process.communicate(timeout=500)
        assert process.returncode == 0, said
    return [list(dict.fromkeys(file.read_text().splitlines())) for file in sorted((folder / "made").iterdir())]


def images(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted((folder / "run").rglob("*.png")):
        with Image.open(path) as image:
            found[str(path.relative_to(folder))] = image.convert("RGB").tobytes()
    return found


@pytest.mark.slow
@pytest.mark.weights
def test_two_processes_share_a_run(tmp_path: Path) -> None:
    (alone,) = run(tmp_path / "one")
    one, other = run(tmp_path / "two", ("--join",))
    assert sorted(alone) == sorted(PROMPTS)
    assert one and other and sorted(one + other) == sorted(PROMPTS), "each is made once, by one of them"
    assert images(tmp_path / "two") == images(tmp_path / "one") and len(images(tmp_path / "one")) >= len(PROMPTS)

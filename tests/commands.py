"""What tests of the command line share: running a command in this process, and a quick verifier."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from imgscale.app import main


@dataclass
class Ran:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """What it refused, which must be one line with the command's name and a full stop."""
        assert self.status == 2, self.err
        assert self.out == ""
        assert self.err.count("\n") == 1
        assert self.err.startswith("imgscale: ") and self.err.rstrip()[-1] in ".?", self.err
        return self.err.removeprefix("imgscale: ").rstrip()


Command = Callable[..., Ran]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs ``imgscale …`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        monkeypatch.setenv(name, "error")

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main(arguments)
        return Ran(int(ended.value.code or 0), *capfd.readouterr())

    return run


class Bright:
    """A verifier that likes light images; quick, and of no known range, so that searches spend their budget.

    Attributes:
        calls: How often any was asked.
        press_at: The call at which it presses Ctrl-C; never for 0. Tests reset both.
    """

    name = "bright"
    range = None
    reads_prompt = False
    differentiable = True
    calls, press_at = 0, 0

    def __call__(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        Bright.calls += 1
        if Bright.calls == Bright.press_at:
            os.kill(os.getpid(), signal.SIGINT)
        return images.flatten(1).mean(1)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

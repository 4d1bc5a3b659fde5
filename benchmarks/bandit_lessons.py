"""What the table of the tuning prompts says, as lessons for new policies of the bundled pool.

The table is of `python -m benchmarks bandit-table --source prompts-tuning …`, so that neither the prompts of
`imgscale bench bandit` nor those of `bandit-live` are in the lessons.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bandit_settings import HOME

SCORES = 500


def main(args: argparse.Namespace) -> None:
    from imgscale import verification
    from imgscale.app.bench import bandit_table
    from imgscale.bandit import lessons, poolfile
    from imgscale.bandit.prompts import Prompts

    clip: Any = verification.make("clip", clip="shapes-clip", device="cpu")
    read = bandit_table.read(args.table)
    length = len(clip.embed_texts(["a circle"])[0])
    made = lessons.Lessons(
        verifier=clip.identity(),
        prompt=Prompts(length, poolfile.read().policy.projected).names,
        actions=read.table.actions,
        z=read.table.z,
        quality=np.asarray(read.table.expected),
        scores=tuple(np.quantile(read.scores, (np.arange(SCORES) + 0.5) / SCORES)),
    )
    lessons.write(made, args.out)
    print(f"{len(made.z)} prompts, {len(made.actions)} actions, {args.out.stat().st_size / 1e3:.0f} kB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from imgscale.bandit import poolfile

    parser.add_argument("--table", type=Path, default=HOME, help="where the table lies")
    parser.add_argument("--out", type=Path, default=Path(poolfile.__file__).with_name("lessons.json"), help="the file")

"""What the bundled models and searches bring for each of some prompts: the table that `imgscale bench bandit` replays.

best-of-n is sampled, not run: a bank of finished images per model and prompt, each with its clip score and the
oracle's, gives every n. Other searchers are run with a few seeds. A row a line, written as soon as it is there: the
same command goes on where it was stopped, and models and prompts can be added. Costs follow from what was spent.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HOME = Path(__file__).parent / "results" / "bandit-table"
CHUNK = 5  # prompts searched side by side, which share batches


def plans() -> dict[str, dict[str, Any]]:
    """By model: images in the bank, and the other searches as (searcher, budget in samples, seeds)."""
    return {
        "shapes-turbo": {"bank": 24, "searches": [("rbf", 8, 2), ("rbf", 16, 2), ("svdd", 8, 2), ("bfs", 4, 2)]},
        "shapes-flow": {"bank": 16, "searches": [("rbf", 8, 2), ("svdd", 4, 2)]},
        "shapes-flow-large": {"bank": 12, "searches": [("rbf", 6, 2)]},
        "shapes-ddpm": {"bank": 10, "searches": [("rbf", 6, 2)]},
    }


def main(args: argparse.Namespace) -> None:
    from imgscale import models
    from imgscale.app.bench import prompts as lists

    wanted = args.models.split(",") if args.models else [name for name in plans() if name in models.bundled()]
    args.out.mkdir(parents=True, exist_ok=True)
    left_out = {row["prompt"] for table in args.without for row in rows(table / "prompts.jsonl")}
    chosen = lists.spread(lists.load(args.source, limit=args.each, without=left_out))[: args.prompts]
    makers = {name: Maker(name, args.out) for name in wanted}
    about(args.out, chosen, list(makers.values()))
    began = time.monotonic()
    for at in range(0, len(chosen), CHUNK):
        for maker in makers.values():
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                return print(f"{args.minutes:g} minutes are over; the same command goes on.", flush=True)
            maker.make([prompt.text for prompt in chosen[at : at + CHUNK]], at)
        print(f"{min(at + CHUNK, len(chosen))} of {len(chosen)} prompts, {time.monotonic() - began:.0f} s", flush=True)


def about(folder: Path, prompts: Sequence[Any], makers: Sequence[Maker]) -> None:
    """Writes what the replay needs beside rewards: the prompts' embeddings, and the models' descriptors and prices."""
    from imgscale import files, verification

    clip: Any = verification.make("clip", clip="shapes-clip", device="cpu")
    embedded = clip.embed_texts([prompt.text for prompt in prompts]).tolist()
    rows = [
        {"prompt": p.text, "category": p.category, "embedding": [round(x, 5) for x in e]}
        for p, e in zip(prompts, embedded, strict=True)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    files.write(folder / "prompts.jsonl", lines.encode())
    file = folder / "models.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for maker in makers:
        if maker.name not in known:
            known[maker.name] = maker.described(clip)
    files.write(file, (json.dumps(known, indent=1) + "\n").encode())


class Maker:
    """Makes the rows of one model.

    Args:
        name: Of the model, bundled.
        folder: Where the table lies.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.file = name, folder / f"{name}.jsonl"
        self.done = {_key(row) for row in rows(self.file)}
        self._scaler: Any = None

    def described(self, verifier: Any) -> dict[str, Any]:
        """Descriptors and prices, counted on hollow networks; eFLOPs at the ridge of this machine."""
        from dataclasses import asdict

        from imgscale import cost, models

        found = cost.of(self.name, verifier=verifier)
        settings = models.ModelSettings.read(models.bundled()[self.name])
        return {
            "parameters": found.evaluation.parameters,
            "step_eflops": found.price.nfe,
            "distilled": settings.distilled,
            "sample_nfe": found.sample_nfe,
            "ridge": found.hardware.ridge,
            "price": asdict(found.price),
        }

    def make(self, prompts: Sequence[str], first: int) -> None:
        """Runs what isn't there yet for these prompts, of which the first has this number."""
        plan = plans()[self.name]
        new = [prompt for prompt in prompts if ("bank", prompt, 0, plan["bank"]) not in self.done]
        self._write(self._bank(new, [10_000 + first + prompts.index(p) for p in new], plan["bank"]))
        for searcher, samples, seeds in plan["searches"]:
            for seed in range(seeds):
                new = [p for p in prompts if (searcher, p, seed, samples) not in self.done]
                starts = [20_000 + 1000 * seed + first + prompts.index(p) for p in new]
                self._write(self._search(new, starts, searcher, samples, seed))

    def _write(self, rows: Iterator[dict[str, Any]]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                self.done.add(_key(row))

    @property
    def scaler(self) -> Any:
        import imgscale

        if self._scaler is None:
            self._scaler = imgscale.load(self.name)
        return self._scaler

    @property
    def sample_nfe(self) -> int:
        steps = self.scaler.settings.steps
        assert steps is not None
        return int(steps)

    def _bank(self, prompts: list[str], seeds: list[int], n: int) -> Iterator[dict[str, Any]]:
        """Independent finished images, with both scores of each."""
        if not prompts:
            return
        from imgscale import verification

        clip, oracle = self.scaler.verifier("clip"), self.scaler.verifier("shapes")
        seen: dict[str, list[tuple[float, float]]] = {prompt: [] for prompt in prompts}

        def both(images: Any, texts: Sequence[str]) -> Any:
            liked = clip(images, texts)
            for text, *scores in zip(texts, liked.tolist(), oracle(images, texts).tolist(), strict=True):
                seen[text].append((round(scores[0], 5), round(scores[1], 4)))
            return liked

        self.scaler(
            prompts,
            searcher="best-of-n",
            verifier=verification.make(both),
            budget=n * self.sample_nfe,
            seed=seeds,
            plain=False,
            progress=False,
        )
        for prompt, seed in zip(prompts, seeds, strict=True):
            assert len(seen[prompt]) == n, (prompt, len(seen[prompt]))
            liked, judged = zip(*seen[prompt], strict=True)
            yield {"kind": "bank", "prompt": prompt, "seed": 0, "samples": n, "start": seed} | {
                "clip": liked,
                "shapes": judged,
            }

    def _search(
        self, prompts: list[str], starts: list[int], searcher: str, samples: int, seed: int
    ) -> Iterator[dict[str, Any]]:
        if not prompts:
            return
        outputs = self.scaler(
            prompts,
            searcher=searcher,
            verifier="clip",
            report=("shapes",),
            budget=samples * self.sample_nfe,
            seed=starts,
            plain=False,
            progress=False,
        )
        for prompt, start, output in zip(prompts, starts, outputs, strict=True):
            ledger = output.ledger
            yield {"kind": searcher, "prompt": prompt, "seed": seed, "samples": samples, "start": start} | {
                "clip": round(output.scores["clip"], 5),
                "shapes": round(output.scores["shapes"], 4),
                **{"nfe": ledger.nfe, "decodes": ledger.decodes, "verifier_calls": ledger.verifier_calls},
            }


def rows(file: Path) -> list[dict[str, Any]]:
    """Rows that are there; a last line that a crash cut short is none."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        file.write_text(text, encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _key(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["kind"], row["prompt"], row["seed"], row["samples"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="", help="some of the bundled ones, with commas between")
    parser.add_argument("--source", default="prompts", help="the list of prompts")
    parser.add_argument("--without", nargs="+", type=Path, default=[], help="tables whose prompts are left out")
    parser.add_argument("--prompts", type=int, default=40, help="how many, categories mixed evenly")
    parser.add_argument("--each", type=int, default=9, help="at most so many of a category")
    parser.add_argument("--minutes", type=float, default=0, help="stop after these; no limit for 0")
    parser.add_argument("--out", type=Path, default=HOME, help="where the table lies")

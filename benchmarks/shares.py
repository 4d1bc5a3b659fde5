"""A total budget over many prompts, split by what each gains or evenly, replayed on banks of samples.

For each model the bandit's table has a bank of plain samples of every prompt with their scores, so a run of best-of-n
with any split is a draw from it (with replacement: the bank stands for what the model makes of the prompt). Both splits
have the same total. A prompt whose score is at the top of the verifier's range stops in either.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HOME = Path(__file__).parent / "results"
Floats = npt.NDArray[np.float64]


def main(args: argparse.Namespace) -> None:
    rows = []
    for model in args.models.split(","):
        banks = _banks(args.table / f"{model}.jsonl")[args.skip :]
        for steers in ("shapes", "clip"):
            for samples in args.samples:
                rows.append(_compared(model, banks, steers, samples, args.replays))
                print(_line(rows[-1]), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _banks(file: Path) -> list[dict[str, Floats]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{key: np.array(row[key]) for key in ("clip", "shapes")} for row in rows if row["kind"] == "bank"]


def _compared(model: str, banks: list[dict[str, Floats]], steers: str, samples: int, replays: int) -> dict[str, Any]:
    from imgscale.shares import ROUNDS

    ways = {"even": (1.0,), "by gain": ROUNDS}
    found = {name: np.zeros((replays, len(banks), 2)) for name in ways}
    spent = dict.fromkeys(ways, 0.0)
    for replay in range(replays):
        for name, rounds in ways.items():
            best, judged, total = play(banks, steers, samples * len(banks), rounds, replay)
            found[name][replay] = np.stack([best, judged >= 1], 1)
            spent[name] += total / replays / len(banks)
    gain = (found["by gain"] - found["even"]).mean(0)
    rng = np.random.default_rng(0)
    again = gain[rng.integers(len(gain), size=(2000, len(gain)))].mean(1)
    low, high = np.quantile(again, (0.025, 0.975), axis=0)
    row: dict[str, Any] = {"model": model, "prompts": len(banks), "steers": steers, "samples": samples}
    for i, what in enumerate(("score", "correct")):
        row[what] = {name: round(float(values[..., i].mean()), 4) for name, values in found.items()}
        row[f"{what} gained"] = [round(float(x), 4) for x in (gain.mean(0)[i], low[i], high[i])]
    return row | {"spent": {name: round(value, 3) for name, value in spent.items()}, "replays": replays}


def play(
    banks: list[dict[str, Floats]], steers: str, total: int, rounds: tuple[float, ...], seed: int
) -> tuple[Floats, Floats, int]:
    """A run of best-of-n over all prompts.

    Returns:
        By prompt the steering verifier's best score and the oracle's of that image; and the samples spent.
    """
    from imgscale.shares import Shares

    shares = Shares(total, [1] * len(banks), rounds=rounds)
    ceiling = 1.0 if steers == "shapes" else None
    best = np.full(len(banks), -np.inf)
    judged = np.zeros(len(banks))
    for round_ in range(len(shares.ledger.quotas)):
        for place, n in shares.plan(round_).items():
            bank = banks[place]
            drawn = np.random.default_rng((seed, place, round_)).integers(len(bank["clip"]), size=n)
            scores = bank[steers][drawn]
            if ceiling is not None and (hits := np.flatnonzero(scores >= ceiling)).size:
                drawn, scores = drawn[: hits[0] + 1], scores[: hits[0] + 1]
            if scores.max() > best[place]:
                best[place] = scores.max()
                judged[place] = bank["shapes"][drawn[scores.argmax()]]
            shares.book(round_, place, len(drawn), scores.tolist(), ceiling)
        shares.close(round_)
    return best, judged, sum(prompt.nfe for prompt in shares.prompts)


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['model']}, {row['steers']} steers, {row['samples']} samples a prompt, {row['prompts']} prompts:"]
    for what in ("score", "correct"):
        mean, low, high = row[f"{what} gained"]
        values = row[what]
        parts.append(
            f"{what} {values['even']:.3f} -> {values['by gain']:.3f} ({mean:+.3f}, 95% {low:+.3f} to {high:+.3f});"
        )
    return " ".join(parts) + f" spent {row['spent']['even']:.2f} and {row['spent']['by gain']:.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="shapes-turbo,shapes-flow,shapes-ddpm", help="with commas between")
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 4, 8, 16], help="samples a prompt, in the mean")
    parser.add_argument("--skip", type=int, default=0, help="so many prompts at the beginning of the table")
    parser.add_argument("--replays", type=int, default=50, help="of every run")
    parser.add_argument("--table", type=Path, default=HOME / "bandit-table", help="the banks")
    parser.add_argument("--out", type=Path, default=None, help="a file for the rows")

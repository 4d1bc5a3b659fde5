"""`imgscale generate`: search for one image, write it, and say how it compares with the plain one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.app import checks
from imgscale.app.console import CANCELLED, Interrupt, complain, only_results_on_stdout, print_json
from imgscale.app.job import Job

if TYPE_CHECKING:
    from imgscale.automatic import Decision
    from imgscale.result import SearchOutput

REASONS = {
    "budget": "The budget is spent.",
    "complete": "The search is complete.",
    "ceiling": "The score can't get any higher.",
    "deadline": "The time is up.",
    "cancelled": "Stopped by Ctrl-C: this is the best so far.",
    "verifier": "The verifier failed for every image, so that nothing could be ranked.",
}


def generate(job: Job, out: Path, *, as_json: bool = False, quiet: bool = False) -> int:
    """Searches and writes.

    Args:
        job: What to search for.
        out: The folder to write to.
        as_json: Print one JSON object instead of the table.
        quiet: Print nothing but the path of the image, or the JSON.

    Returns:
        The exit status: 0, or 130 if Ctrl-C ended the search early.
    """
    from imgscale.app import outputs

    checks.folder(out)
    job.check()
    scaler = job.load(quiet)
    with Interrupt() as interrupt:
        output = job.run(scaler, interrupt, quiet)
        with only_results_on_stdout():
            paths = outputs.save(output, out)
    if as_json:
        print_json(outputs.summary(output, paths))
    elif quiet:
        print(paths["image"])
    else:
        show(output, list(paths.values()))
    for event in output.events:
        complain(event)
    if job.save_noise and output.noise is None:
        complain("no noise was saved, since no image was finished.")
    if output.stopped == "cancelled":
        kept = "the best so far" if output.finished else "a preview, since no image was finished yet,"
        complain(f"stopped by {interrupt.by} after {output.nfe} NFE; {kept} is in {str(paths['image'])!r}.")
        return CANCELLED
    return 0


def show(output: SearchOutput, paths: Sequence[Path]) -> None:
    """The short table at the end, and the files."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    plain = output.plain
    table.add_column("")
    if plain:
        table.add_column("plain", justify="right")
    table.add_column("searched", justify="right")

    def row(name: str, before: str, after: str) -> None:
        table.add_row(*map(Text, [name, before, after] if plain else [name, after]))

    steering = (output.verifier, *output.members)
    for name, score in output.scores.items():
        role = " (held out)" if name in output.held_out else " (steers)" * (name in steering)
        row(f"{name}{role}", _score(plain.scores[name]) if plain and name in plain.scores else "", _score(score))
    before, after = plain.ledger if plain else None, output.ledger
    for label, kind in (("NFE", "nfe"), ("verifier calls", "verifier_calls"), ("decodes", "decodes")):
        row(label, str(getattr(before, kind, "")), str(getattr(after, kind)))
    row("seconds", f"{before.seconds:.1f}" if before else "", f"{after.seconds:.1f}")
    console.print(table)
    if "exits" in output.settings:
        console.print(Text(f"\n{_exits(output.settings)}"), soft_wrap=True)
    if output.decision is not None and output.decision.learned:
        console.print(Text(f"\n{_lesson(output.decision)}"), soft_wrap=True)
    console.print(Text(f"\n{REASONS[output.stopped]} Wrote"))
    for path in paths:
        console.print(Text(f"  {path}"), soft_wrap=True)


def _lesson(decision: Decision) -> str:
    """What was learned, in a sentence."""
    expected = decision.choice.expected
    verdict = {None: "", True: ", and the image is right", False: ", and the image is wrong"}[decision.correct]
    return f"Learned: quality {decision.quality:.2f}, where {expected:.2f} was expected{verdict}."


def _exits(settings: Mapping[str, Any]) -> str:
    """What came of early exit, in a sentence."""
    found, rule = settings["exits"], settings["early_exit"]
    if found["dropped"]:
        return (
            f"Early exit stopped {found['dropped']} of {found['candidates']} candidates, which saved"
            f" {found['saved_nfe']} NFE."
        )
    if rule["mode"] == "calibrated" and not rule["margins"]:
        return "Early exit stopped none: it is still learning from searches of this model with this verifier."
    return f"Early exit stopped none of {found['candidates']} candidates."


def _score(score: float) -> str:
    return f"{score:.4f}" if math.isfinite(score) else "–"

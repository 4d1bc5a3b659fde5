"""What a run has come to: counts, mean scores beside those without a search, and what failed."""

from __future__ import annotations

from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import imgscale
from imgscale.app.console import complain, print_json

if TYPE_CHECKING:
    from imgscale.app.batch.store import Store

LINES = 10  # of reasons that are shown
_PACKAGES = ("torch", "diffusers", "transformers")


def versions() -> dict[str, str]:
    """Of what images depend on."""
    found = {"imgscale": imgscale.__version__}
    return found | {name: metadata.version(name) for name in _PACKAGES}


def summary(store: Store) -> dict[str, Any]:
    """Counts, means and failures, as JSON can hold them.

    ``scores`` has for each verifier the mean over all images with a score, and ``plain`` and ``beside``, the means of
    the plain images and of the searched ones over items with both.
    """
    states = store.states()
    nfe, images, notices = 0, 0, 0
    held_out: dict[str, bool] = {}
    values: dict[str, list[tuple[float, float | None]]] = {}
    for item in store.items():
        nfe += item.nfe
        images += len(item.images)
        notices += bool(item.events)
        for name, score in item.scores.items():
            if score is not None:
                values.setdefault(name, []).append((score, item.plain_scores.get(name)))
                held_out[name] = name in item.held_out
    scores = {}
    for name, pairs in values.items():
        both = [(score, plain) for score, plain in pairs if plain is not None]
        scores[name] = {
            "held_out": held_out[name],
            "mean": _mean([score for score, _ in pairs]),
            "plain": _mean([plain for _, plain in both]),
            "beside": _mean([score for score, _ in both]),
        }
    failures = [{"row": f.row, "item": f.item, "prompt": f.text, "reason": f.reason} for f in store.failures()]
    return {
        "run": store.id,
        "prompts": len(store.prompts()),
        "searches": sum(states.values()),
        "done": states.get("done", 0),
        "failed": states.get("failed", 0),
        "cut": states.get("cut", 0),
        "left": states.get("waiting", 0) + states.get("claimed", 0),
        "images": images,
        "nfe": nfe,
        "notices": notices,
        "scores": scores,
        "failures": failures,
    }


def _mean(values: list[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def show(found: dict[str, Any], folder: Path, *, as_json: bool, quiet: bool) -> None:
    """Prints a summary; failures always go to standard error."""
    reasons = Counter(failure["reason"] for failure in found["failures"])
    for reason, n in reasons.most_common(LINES):
        first = next(f for f in found["failures"] if f["reason"] == reason)
        others = f" and {n - 1} more" if n > 1 else ""
        complain(f"row {first['row']}{others} failed: {reason}")
    if len(reasons) > LINES:
        complain(f"{len(reasons) - LINES} more reasons are in the run folder.")
    if as_json:
        print_json({"folder": str(folder), **found})
    elif quiet:
        print(folder)
    else:
        _table(found, folder)


def _table(found: dict[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    plain = any(score["plain"] is not None for score in found["scores"].values())
    for name in ("mean of", *(("plain",) if plain else ()), "searched"):
        table.add_column(name, justify="left" if name == "mean of" else "right")
    for name, score in found["scores"].items():
        role = " (held out)" if score["held_out"] else ""
        values = (score["plain"], score["beside"]) if plain else (score["mean"],)
        table.add_row(*map(Text, [f"{name}{role}", *("–" if v is None else f"{v:.4f}" for v in values)]))
    if found["scores"]:
        console.print(table)
        console.print()
    counts = {"failed": found["failed"], "cut short": found["cut"], "left": found["left"]}
    more = "".join(f", {n} {name}" for name, n in counts.items() if n)
    console.print(
        Text(
            f"{found['prompts']} prompts, {found['searches']} searches: {found['done']} done{more};"
            f" {found['images']} images, {found['nfe']} NFE. The run is in {folder}"
        ),
        soft_wrap=True,
    )
    if found["notices"]:
        console.print(Text(f"{found['notices']} searches have notices, which are in the run's report."))

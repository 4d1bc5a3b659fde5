"""`imgscale cost`: what a model's parts and a search cost in effective FLOPs, before anybody pays."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from imgscale.app.console import complain, only_results_on_stdout, print_json, waiting
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.cost import Cost
    from imgscale.models import ModelSettings
    from imgscale.rewards import Verifier

SEARCHERS = ("best-of-n", "rbf")
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def cost(
    model: str,
    *,
    verifier: str | None,
    preview: str | None,
    device: str | None,
    dtype: str | None,
    steps: int | None,
    budget: int,
    sizes: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> int:
    """Counts and prints what ``model`` and searches with ``budget`` model evaluations cost.

    Args:
        model: Bundled name, folder, or hub id whose configs are in the cache.
        verifier: What scores; "clip" where it is here for None, and "none" for none.
        preview: What decodes previews; the model's default for None.
        device: What it is to run on.
        dtype: Of the weights.
        steps: Of an ordinary sample.
        budget: Model evaluations.
        sizes: height, width and guidance_scale.
        as_json: Print one JSON object.
        quiet: Show no progress.
    """
    with waiting(quiet, f"Counting {model}"), only_results_on_stdout():
        import torch

        from imgscale import cost as costs
        from imgscale.models import ModelSettings, locate

        folder = locate(model)
        settings = ModelSettings.read(folder) if folder else ModelSettings()
        judge, missing = _judge(verifier, settings)
        found = costs.of(
            model,
            device=device,
            dtype=None if dtype is None else getattr(torch, dtype),
            preview=preview,
            verifier=judge,
            steps=steps,
            **sizes,
        )
        searches = _searches(found, settings, budget)
    notes = [*missing, *found.notes]
    name = judge.name if judge else None
    if as_json:
        parts = {kind: _part(found, work) for kind, _, work in _rows(found, name)}
        print_json({**_head(found), "parts": parts, "budget": {"nfe": budget}, "searches": searches, "notes": notes})
        return 0
    _show(found, name, searches, budget)
    for note in notes:
        complain(note)
    return 0


def _judge(name: str | None, settings: ModelSettings) -> tuple[Verifier | None, list[str]]:
    """The verifier, and why there is none."""
    from imgscale import verification

    if name == "none":
        return None, []
    if name is not None:
        return verification.make(name, clip=settings.clip, device="cpu"), []
    logging.disable()  # libraries shout when weights aren't here
    try:
        return verification.make("clip", clip=settings.clip, device="cpu"), []
    except UserError as error:
        return None, [f"Scores aren't counted, since this model's default verifier isn't here: {error}"]
    finally:
        logging.disable(logging.NOTSET)


def _searches(found: Cost, settings: ModelSettings, budget: int) -> dict[str, Any]:
    """What searches with so many evaluations do and cost, by a rehearsal on a stand-in."""
    from imgscale import usefulness
    from imgscale.budget import Budget
    from imgscale.models import folder_of
    from imgscale.rehearsal import rehearse

    if budget < found.sample_nfe:
        raise UserError(
            f"A budget of {budget} model evaluations can't finish one image, which takes {found.sample_nfe}; give a"
            f" budget of {found.sample_nfe} or more, or fewer steps."
        )
    known = next(iter(usefulness.known(folder_of(found.model), found.model).values()), None)
    table: dict[str, Any] = {}
    for label, searcher, limit in (("plain", "best-of-n", found.sample_nfe), *((s, s, budget) for s in SEARCHERS)):
        ledger = rehearse(found.schedule, settings, searcher, Budget(nfe=limit), found.price, known)
        table[label] = {
            "nfe": ledger.nfe,
            "decodes": ledger.decodes,
            "verifier_calls": ledger.verifier_calls,
            "eflops": ledger.eflops,
            "seconds": found.hardware.seconds(ledger.eflops or 0),
        }
    return table


def _rows(found: Cost, verifier: str | None) -> list[tuple[str, str, Any]]:
    passes = f", {found.passes} passes" if found.passes > 1 else ""
    return [
        ("text", "text encoding", found.text),
        ("evaluation", f"model evaluation{passes}", found.evaluation),
        ("decode", "VAE decode", found.decode),
        *([("preview", "preview decode", found.preview)] if found.preview else []),
        *([("verifier", f"score by {verifier}", found.verifier)] if found.verifier else []),
    ]


def _head(found: Cost) -> dict[str, Any]:
    return {
        "model": found.model,
        "height": found.height,
        "width": found.width,
        "steps": found.schedule.steps,
        "passes": found.passes,
        "dtype": found.dtype,
        "hardware": asdict(found.hardware),
    }


def _part(found: Cost, work: Any) -> dict[str, Any]:
    return {**asdict(work), "eflops": work.eflops(found.hardware.ridge)}


def _show(found: Cost, verifier: str | None, searches: dict[str, Any], budget: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    hardware = found.hardware
    console.print(
        f"{found.model}, {found.width}x{found.height}, {found.schedule.steps} steps, {found.dtype}; {hardware.name}:"
        f" {hardware.ridge:.3g} FLOP per byte ({hardware.source})\n",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("for one image", no_wrap=True)
    for name in ("parameters", "FLOPs", "weights read", "other traffic", "eFLOPs"):
        table.add_column(name, justify="right")
    for _, label, work in _rows(found, verifier):
        traffic = (f"{short(work.weights)}B", f"{short(work.activations)}B")
        table.add_row(label, short(work.parameters), short(work.flops), *traffic, short(work.eflops(hardware.ridge)))
    console.print(table)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"\nwith {budget} NFE")
    for name in ("NFE", "decodes", "scores", "eFLOPs", *(["seconds at least"] if hardware.speed else [])):
        table.add_column(f"\n{name}", justify="right")
    for label, spent in searches.items():
        seconds = [f"{spent['seconds']:.3g}"] if hardware.speed else []
        counts = [str(spent[kind]) for kind in ("nfe", "decodes", "verifier_calls")]
        table.add_row("one plain sample" if label == "plain" else label, *counts, short(spent["eflops"]), *seconds)
    console.print(table)


def short(value: float) -> str:
    """Three digits and a unit: 1.23T."""
    for size, unit in _UNITS:
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 999.5 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} "

"""`imgscale profile`: measures where a search's evaluations are well spent on a model, and keeps it with the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from imgscale.app import checks
from imgscale.app.console import complain, only_results_on_stdout, print_json, waiting

if TYPE_CHECKING:
    from imgscale.usefulness import Usefulness


def profile(
    model: str,
    verifier: str,
    source: str,
    *,
    categories: Sequence[str],
    limit: str | None,
    starts: str | None,
    draws: str | None,
    seed: str | None,
    device: str | None,
    save: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Measures, prints and keeps the usefulness of ``model`` under ``verifier`` on the prompts of ``source``."""
    from imgscale import models, registry
    from imgscale.app.bench import prompts as lists

    most, noises = checks.whole(limit, "--limit", 1), checks.whole(starts, "--starts", 3)
    children, first = checks.whole(draws, "--draws", 2), checks.whole(seed, "--seed", 0, checks.LARGEST)
    assert most is not None and noises is not None and children is not None and first is not None
    models.locate(model)
    registry.judges(verifier)
    prompts = [prompt.text for prompt in lists.spread(lists.load(source, categories))[:most]]
    with waiting(quiet, f"Loading {model}"), only_results_on_stdout():
        import imgscale
        from imgscale import usefulness

        scaler = imgscale.load(model, device=device)
        judge = scaler.verifier(verifier)
        conds = [scaler.engine.denoiser.encode(text, guidance_scale=scaler.settings.guidance_scale) for text in prompts]
    with waiting(quiet, f"Measuring {model} on {len(prompts)} prompts"), only_results_on_stdout():
        found = usefulness.measure(
            scaler.engine,
            judge,
            conds,
            steps=scaler.settings.steps or scaler.engine.denoiser.steps_default,
            starts=noises,
            draws=children,
            seed=first,
        )
    kept = str(usefulness.keep(models.folder_of(model), model, verifier, found)) if save else None
    if as_json:
        print_json(
            {
                "model": model,
                "verifier": verifier,
                "prompts": len(prompts),
                "spread": found.spread,
                "foresight": found.foresight,
                "look": found.look,
                "decisive": found.decisive,
                "file": kept,
            }
        )
        return 0
    _show(found)
    if kept:
        complain(f"kept in {kept}; searches with this model and verifier use it from now on.")
    return 0


def _show(found: Usefulness) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("step", "foresight", "spread of draws from here"):
        table.add_column(name, justify="right")
    for step, foresight in enumerate(found.foresight):
        spread = f"{found.spread[step]:.4f}" if step < found.steps else ""
        table.add_row(str(step), f"{foresight:.2f}", spread, style="bold" if step < found.decisive else None)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"Previews can be trusted from step {found.look} on; the first {found.decisive} of {found.steps} transitions"
        " decide the picture."
    )

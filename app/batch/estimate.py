"""`imgscale batch --dry-run`: what a run would cost, counted, and how long it would take here, by a short probe."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from imgscale.app.auto import AutoJob
from imgscale.app.console import complain, only_results_on_stdout, print_json, waiting
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.app.batch.plan import Plan, Task, Wish
    from imgscale.app.job import Job
    from imgscale.scaler import Scaler
    from imgscale.watch import Progress

PROBE = 10.0  # seconds of searching per model, at most


def estimate(wish: Wish, *, as_json: bool = False, quiet: bool = False) -> int:
    """Counts a run, measures the pace of its models, and prints both. Nothing is written.

    Args:
        wish: What the run would be of.
        as_json: Print one JSON object.
        quiet: Show no progress.

    Returns:
        The exit status: 0, or 1 if something couldn't be run.
    """
    from imgscale.app.batch import plan as plans

    if isinstance(wish.base, AutoJob):
        raise UserError("--dry-run can't reckon what --model auto will choose; see imgscale cost for each model.")
    plan = plans.plan(wish)
    failures = [f"row {bad.number}: {bad.reason}" for bad in plan.bad]
    failures += [f"row {task.prompt.row}: {task.error}" for task in plan.tasks if task.error]
    found: dict[str, Any] = {"prompts": len(plan.prompts), "searches": len(plan.tasks), "failures": failures}
    models = {}
    for model in plan.models:
        tasks = [task for task in plan.tasks if task.job.model == model and not task.error]
        if not tasks:
            continue
        try:
            models[model] = _model(tasks, wish, plan, quiet)
        except UserError as error:
            failures.append(f"{model}: {error}")
    for kind in ("images", "nfe", "plain_nfe", "seconds"):
        found[kind] = sum(each[kind] for each in models.values())
    counted = [each["eflops"] for each in models.values()]
    found["eflops"] = None if None in counted else sum(counted)
    found["models"] = models
    _say(found, as_json)
    return int(bool(failures))


def _model(tasks: list[Task], wish: Wish, plan: Plan, quiet: bool) -> dict[str, Any]:
    """What the items of one model come to."""
    scaler = tasks[0].job.load(quiet)
    kinds = Counter(_kind(task.job) for task in tasks)
    example = {_kind(task.job): task.job for task in tasks}
    nfe, plain, eflops = 0, 0, 0
    notes = []
    counted = True
    for kind, n in kinds.items():
        job = example[kind]
        steps = scaler.cost(verifier=job.verifier, preview=job.preview, **_sizes(job)).sample_nfe
        spent = job.budget.nfe or 0
        plain += n * steps * job.plain
        nfe += n * spent
        try:
            eflops += n * _eflops(scaler, job)
        except UserError as error:
            counted = False
            notes.append(f"eFLOPs of {job.searcher} aren't counted: {error}")
    if wish.total is not None:
        nfe = round(wish.total * len(tasks) / len(plan.tasks))
    pace = _pace(scaler, tasks, wish.together, quiet)
    for note in notes:
        complain(note)
    return {
        "searches": len(tasks),
        "images": sum(1 for task in tasks if task.keep is not None for _ in range(task.keep)),
        "nfe": nfe,
        "plain_nfe": plain,
        "eflops": eflops if counted else None,
        "nfe_per_second": pace,
        "seconds": (nfe + plain) / pace,
    }


def _kind(job: Job) -> str:
    """What searches that cost the same have in common."""
    return repr(replace(job, prompt="", seed=0, report=()))


def _sizes(job: Job) -> dict[str, Any]:
    return {
        "height": job.height,
        "width": job.width,
        "guidance_scale": job.guidance,
        "negative_prompt": job.negative,
    }


def _eflops(scaler: Scaler, job: Job) -> int:
    """eFLOPs of a search, by a rehearsal on a stand-in.

    Raises:
        UserError: It can't be rehearsed.
    """
    from imgscale import registry
    from imgscale.rehearsal import rehearse

    cost = scaler.cost(verifier=job.verifier, preview=job.preview, **_sizes(job))
    searcher, guide = registry.compose(job.searcher, job.guide)
    if guide is not None or job.options:
        raise UserError("a search with a guide or with options can't be rehearsed.")
    useful = next(iter(scaler.usefulness.values()), None)
    ledger = rehearse(cost.schedule, scaler.settings, searcher, job.budget, cost.price, useful)
    return int(ledger.eflops or 0)


def _pace(scaler: Scaler, tasks: list[Task], together: int, quiet: bool) -> float:
    """Model evaluations a second of the first searches side by side, all that belongs to them included."""
    began, nfe = 0.0, 0

    def follow(progress: Progress) -> None:
        nonlocal nfe
        nfe = progress.nfe
        if time.monotonic() - began > PROBE and nfe:
            progress.cancel()

    # Nothing is learned from a probe.
    first = [replace(task.job.ask(), plain=False, early_exit="off") for task in tasks[:together]]
    with waiting(quiet, "Measuring"), only_results_on_stdout():
        for asks in (first[:1], first):  # the first warms up
            began = time.monotonic()
            errors = [done.error for done in scaler.stream(asks, together=together, callback=follow) if done.error]
            if len(errors) == len(asks):
                raise errors[0]
    return nfe / (time.monotonic() - began)


def _say(found: dict[str, Any], as_json: bool) -> None:
    from imgscale.app.batch.progress import duration
    from imgscale.app.cost import short

    if as_json:
        print_json(found)
        return
    for failure in found["failures"][:10]:
        complain(failure)
    if len(found["failures"]) > 10:
        complain(f"and {len(found['failures']) - 10} more rows that can't be run.")
    eflops = "" if found["eflops"] is None else f", {short(found['eflops'])}eFLOPs"
    print(
        f"{found['prompts']} prompts, {found['searches']} searches, at least {found['images']} images:"
        f" at most {found['nfe']} NFE{eflops}, and {found['plain_nfe']} NFE for plain images."
    )
    for model, each in found["models"].items():
        print(f"{model} does {each['nfe_per_second']:.3g} NFE a second here: about {duration(each['seconds'])}.")

"""The `batch` command: its options, and what it says."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgscale.app import checks
from imgscale.app.console import CANCELLED, Interrupt, complain
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.app.batch.plan import Wish

HELP = (
    "Search for images of all prompts in a file.\n\nThe same command goes on where it was stopped, even by kill -9. A"
    " row may change any setting (docs/batch.md); {red|blue} in a prompt makes one of each. The exit status is 0 if"
    " all is done, 1 if something failed or is left, 130 if it was stopped."
)
RUNS = Path("imgscale-runs")
_FLAG = " "


def batch(
    prompts: str = typer.Argument(
        ..., metavar="PROMPTS", help="txt, JSONL, JSON, CSV, TSV, a bundled list, or - for standard input."
    ),
    out: Path | None = typer.Option(
        None, "--out", "-o", metavar="FOLDER", help="The run folder; imgscale-runs/NAME-ID by what is asked for."
    ),
    model: str | None = typer.Option(None, "--model", "-m", metavar="NAME", help="shapes-flow."),
    searcher: str | None = typer.Option(None, "--searcher", "-s", metavar="NAME", help="rbf."),
    guide: str | None = typer.Option(None, metavar="NAME", help="Bends the searcher's steps."),
    settings: list[str] = typer.Option([], "--set", metavar="OPTION=VALUE", help="The searcher's option; repeatable."),
    verifier: str | None = typer.Option(None, "--verifier", "-v", metavar="NAME", help="What to steer by; clip."),
    report: list[str] = typer.Option(
        [], metavar="NAME", help="Held-out judge, repeatable, or none; the shapes oracle where it fits."
    ),
    budget: str | None = typer.Option(None, "--budget", "-b", metavar="NFE", help="Of each search; 200."),
    total_budget: str | None = typer.Option(
        None, metavar="NFE", help="Of all searches; what some don't need goes to those that gain most."
    ),
    seconds: str | None = typer.Option(None, metavar="S", help="Also a limit on the time of each search."),
    eflops: str | None = typer.Option(None, metavar="E", help="Also a limit on the eFLOPs of each search."),
    seed: str = typer.Option("0", "--seed", "--seeds", metavar="SEEDS", help="1,5,9 or 1..10 or 1,3,..,9."),
    keep: str = typer.Option("best", metavar="N", help="Images of each search to keep: best, all, or how many."),
    steps: str | None = typer.Option(None, metavar="INT", help="Steps of an ordinary sample; the model's default."),
    guidance: str | None = typer.Option(None, metavar="SCALE", help="Guidance scale; the model's default."),
    height: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    width: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    negative: str | None = typer.Option(None, metavar="TEXT", help="What guidance steers away from."),
    preview: str | None = typer.Option(None, metavar="NAME", help="What decodes previews; the model's default."),
    verifier_timeout: str | None = typer.Option(None, metavar="S", help="Longest time of one call of a verifier."),
    early_exit: str | None = typer.Option(
        None, metavar="MODE", help="Stop hopeless candidates: off, calibrated (by what was learned before), paper."
    ),
    no_plain: bool = typer.Option(False, "--no-plain", metavar=_FLAG, help="Don't make the plain images."),
    device: str | None = typer.Option(None, metavar="NAME", help="cpu, cuda, …; the accelerator if there is one."),
    dtype: str | None = typer.Option(None, metavar="NAME", help="float32, bfloat16 or float16."),
    together: str = typer.Option("8", metavar="N", help="Searches that run side by side and share batches."),
    max_batch: str | None = typer.Option(None, metavar="N", help="Images per call of the network; 16."),
    mode: str | None = typer.Option(None, metavar="MODE", help="Of --model auto: cost, balanced, quality or a weight."),
    policy: Path | None = typer.Option(None, metavar="FILE", help="Of --model auto: what it has learned."),
    pool: Path | None = typer.Option(None, metavar="FILE", help="Of --model auto: what it chooses from (TOML)."),
    until: str | None = typer.Option(None, metavar="HH:MM", help="Be ready by then."),
    hours: str | None = typer.Option(None, metavar="H", help="Be ready after so many."),
    kind: str | None = typer.Option(None, "--format", metavar="NAME", help="txt, json, jsonl, csv, tsv; by the name."),
    no_wildcards: bool = typer.Option(False, "--no-wildcards", metavar=_FLAG, help="Braces are text."),
    no_overrides: bool = typer.Option(False, "--no-overrides", metavar=_FLAG, help="Rows change no settings."),
    join: bool = typer.Option(False, "--join", metavar=_FLAG, help="Share the work with processes that are at it."),
    fresh: bool = typer.Option(False, "--fresh", metavar=_FLAG, help="Move the run aside and begin anew."),
    dry_run: bool = typer.Option(False, "--dry-run", metavar=_FLAG, help="Only say what it would cost, and how long."),
    as_json: bool = typer.Option(False, "--json", metavar=_FLAG, help="Print one JSON object."),
    quiet: bool = typer.Option(False, "--quiet", "-q", metavar=_FLAG, help="Show no progress and no table."),
) -> None:
    flags = {
        **{"model": model, "searcher": searcher, "guide": guide, "options": settings or None, "verifier": verifier},
        **{"budget": budget, "seconds": seconds, "eflops": eflops, "steps": steps, "guidance": guidance},
        **{"height": height, "width": width, "negative": negative, "preview": preview, "device": device},
        **{"dtype": dtype, "verifier_timeout": verifier_timeout, "plain": False if no_plain else None},
        **{"max_batch": max_batch, "report": report or None, "keep": keep, "early_exit": early_exit},
    }
    from imgscale.app.batch.clock import Clock

    chooser = {"mode": mode, "policy": policy, "pool": pool}
    wish = _wish(prompts, flags, seed, kind, not no_wildcards, not no_overrides, total_budget, together, chooser)
    clock = Clock.of(until, hours)
    if join and fresh:
        raise UserError("--join shares the work of a run and --fresh begins another; leave one of them out.")
    if dry_run:
        from imgscale.app.batch import estimate

        raise typer.Exit(estimate.estimate(wish, as_json=as_json, quiet=quiet))
    raise typer.Exit(work(wish, out, clock, join=join, fresh=fresh, as_json=as_json, quiet=quiet))


def _wish(
    source: str,
    flags: dict[str, Any],
    seed: str,
    kind: str | None,
    wildcards: bool,
    overrides: bool,
    total: str | None,
    together: str,
    chooser: dict[str, Any],
) -> Wish:
    """What the command line asks for.

    Raises:
        UserError: A value that can't be.
    """
    from imgscale.app import asked, auto, records
    from imgscale.app.batch.plan import Wish
    from imgscale.app.batch.wildcards import seeds
    from imgscale.app.job import Job
    from imgscale.errors import UnknownName

    found = asked.read(flags, lambda name: "--set" if name == "options" else f"--{name.replace('_', '-')}")
    report, keep = found.pop("report", None), found.pop("keep")
    if kind is not None and f".{kind}" not in records.ENDINGS:
        raise UnknownName("format", kind, [ending[1:] for ending in records.ENDINGS])
    # Every call of the network is filled up to max_batch: small enough to be filled by what runs side by side.
    base = Job(prompt="", max_batch=16, exact=True)
    if found.get("model") == "auto":
        auto.undecided(found)
        base = auto.batched(**chooser)
    elif said := [name for name, value in chooser.items() if value is not None]:
        raise UserError(f"--{said[0]} is for --model auto; add that, or leave it out.")
    base = asked.changed(base, found)
    return Wish(
        source=source,
        base=base,
        report=report,
        keep=keep,
        seeds=seeds(seed, "--seed"),
        kind=kind,
        wildcards=wildcards,
        overrides=overrides,
        total=checks.whole(total, "--total-budget", 1),
        together=checks.whole(together, "--together", 1, 1024) or 1,
    )


def work(
    wish: Wish,
    out: Path | None,
    clock: Any,
    *,
    join: bool = False,
    fresh: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Does what is left of a run, and says how it went.

    Args:
        wish: What is asked for.
        out: The run folder; named by what is asked for if None.
        clock: When to end.
        join: Work beside other processes.
        fresh: Begin anew.
        as_json: Print one JSON object.
        quiet: Show neither progress nor table.

    Returns:
        The exit status: 0, 1 if something failed or is left, or 130 if Ctrl-C ended it.
    """
    from imgscale.app.batch import plan as plans
    from imgscale.app.batch import queue, summary
    from imgscale.app.batch.progress import Bar
    from imgscale.app.batch.run import Broken, Run
    from imgscale.app.batch.store import DONE, Store

    plan = plans.plan(wish)
    folder = out or RUNS / f"{_name(wish.source)}-{plan.id[:8]}"
    checks.folder(folder)
    together = wish.together
    if together > 1 and any(task.job.budget.seconds is not None for task in plan.tasks):
        complain("searches with a limit on their seconds don't share batches: they run one by one.")
        together = 1
    broken: str | None = None
    with Interrupt("what is finished is kept (once more ends at once)") as interrupt:
        desk = queue.enter(folder, plan, summary.versions(), join=join, fresh=fresh)
        try:
            for name, version in desk.before.items():
                complain(f"the run was begun with {name} {version}; images may differ in their last bits from now on.")
            with Bar(quiet, len(plan.tasks), desk.states().get(DONE, 0)) as bar:
                run = Run(
                    plan,
                    desk,
                    interrupt,
                    clock,
                    bar,
                    together=together,
                    total=wish.total,
                    quiet=quiet,
                )
                run.all()
        except Broken as error:
            broken = str(error)
        except KeyboardInterrupt:
            interrupt.asked = True
        finally:
            desk.close()
    with Store.open(folder) as store:
        found = summary.summary(store)
    summary.show(found, folder, as_json=as_json, quiet=quiet)
    if broken is not None:
        complain(f"{broken} What is finished is kept; mend that, and the same command goes on.")
        return 1
    if interrupt.asked:
        complain(f"stopped by {interrupt.by}; {found['done']} searches are kept, and the same command goes on.")
        return CANCELLED
    if found["cut"] or found["left"]:
        complain(
            f"the time is up; {found['cut']} searches were cut short and {found['left']} not begun. The same command"
            " goes on with them."
        )
    return int(found["done"] < found["searches"] or bool(found["failures"]))


def _name(source: str) -> str:
    from imgscale.app.outputs import slug

    with suppress(ValueError):
        return slug(Path(source).stem) if source != "-" else "stdin"
    return "prompts"

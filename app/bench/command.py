"""The `bench` command: its options, and what it says."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgscale.app import checks
from imgscale.app.console import CANCELLED, complain, only_results_on_stdout, print_json
from imgscale.errors import UnknownName, UserError

if TYPE_CHECKING:
    from imgscale.app.bench.config import Config
    from imgscale.app.bench.rows import Rows
    from imgscale.app.bench.run import Outcome

HELP = (
    "Compare searches over prompts, budgets and models.\n\nSeeds and verifiers may vary, too. Writes rows, tables,"
    " plots and a page into a folder; the same command goes on where it was stopped. Options override the file"
    " (docs/bench.md), and without a file the folder's own bench.yaml."
)
_FLAG = " "


def bench(
    config: Path | None = typer.Argument(None, metavar="FILE.yaml", help="What to compare; options may say it, too."),
    model: list[str] = typer.Option([], "--model", "-m", metavar="NAME", help="Repeatable; shapes-flow."),
    searcher: list[str] = typer.Option([], "--searcher", "-s", metavar="NAME", help="Repeatable; best-of-n and rbf."),
    verifier: list[str] = typer.Option([], "--verifier", "-v", metavar="NAME", help="What steers; repeatable; clip."),
    report: list[str] = typer.Option(
        [], metavar="NAME", help="Held-out judge, repeatable, or none; shapes if it fits."
    ),
    budget: list[str] = typer.Option([], "--budget", "-b", metavar="NFE", help="Repeatable, or 50,100,200."),
    prompts: str | None = typer.Option(
        None, metavar="LIST", help="prompts, prompts-tuning, or a file (one a line, …)."
    ),
    categories: list[str] = typer.Option([], metavar="NAME", help="Of the prompts, repeatable, or a,b; all of them."),
    every: str | None = typer.Option(None, metavar="INT", help="Take one prompt of so many, per category."),
    limit: str | None = typer.Option(None, metavar="INT", help="At most so many prompts per category."),
    seed: str | None = typer.Option(None, metavar="INT", help="The first seed; 0."),
    seeds: str | None = typer.Option(None, metavar="INT", help="How many seeds; 1."),
    plain: bool | None = typer.Option(None, "--plain/--no-plain", help="Also a sample without a search; yes."),
    solved: str | None = typer.Option(
        None, metavar="NAME>=VALUE", help="When a prompt is solved; shapes>=1 if judged."
    ),
    against: str | None = typer.Option(None, metavar="SEARCHER", help="What to compare with; best-of-n."),
    together: str | None = typer.Option(None, metavar="INT", help="Prompts searched side by side; 16."),
    max_batch: str | None = typer.Option(None, metavar="INT", help="Images per call of the network; 32."),
    steps: str | None = typer.Option(None, metavar="INT", help="Steps of an ordinary sample; the model's default."),
    guidance: str | None = typer.Option(None, metavar="SCALE", help="Guidance scale; the model's default."),
    height: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    width: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    preview: str | None = typer.Option(None, metavar="NAME", help="What decodes previews; the model's default."),
    device: str | None = typer.Option(None, metavar="NAME", help="cpu, cuda, …; the accelerator if there is one."),
    dtype: str | None = typer.Option(None, metavar="NAME", help="float32, bfloat16 or float16."),
    out: Path = typer.Option(Path("imgscale-bench"), "--out", "-o", metavar="FOLDER", help="Where files go."),
    no_run: bool = typer.Option(False, "--no-run", metavar=_FLAG, help="Only write about the rows that are there."),
    as_json: bool = typer.Option(False, "--json", metavar=_FLAG, help="Print one JSON object."),
    quiet: bool = typer.Option(False, "--quiet", "-q", metavar=_FLAG, help="Show no progress and no table."),
) -> None:
    flags = {
        **{"models": model, "searchers": searcher, "verifiers": verifier, "report": report, "budgets": budget},
        **{"prompts": prompts, "categories": categories, "every": every, "limit": limit, "seed": seed, "seeds": seeds},
        **{"plain": plain, "solved": solved, "against": against, "together": together, "max_batch": max_batch},
        **{"steps": steps, "guidance": guidance, "height": height, "width": width, "preview": preview},
        **{"device": device, "dtype": dtype},
    }
    raise typer.Exit(compare(config, flags, out, no_run=no_run, as_json=as_json, quiet=quiet))


def compare(
    file: Path | None,
    flags: dict[str, Any],
    out: Path,
    *,
    no_run: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Runs what isn't done yet, and writes about all rows of the folder.

    Args:
        file: YAML, or None.
        flags: By field of `Config`, as the command line gives them.
        out: The folder.
        no_run: Only write.
        as_json: Print one JSON object.
        quiet: Show neither progress nor table.

    Returns:
        The exit status: 0, 1 if some searches couldn't be run, or 130 if Ctrl-C ended it early.
    """
    from imgscale.app.bench import config as configs
    from imgscale.app.bench import groups, report, tables
    from imgscale.app.bench.run import Outcome

    checks.folder(out)
    config = configs.merged(file, flags, out)
    if no_run:
        outcome, kept = Outcome(), _looked_at(config, flags, out)
    else:
        kept, outcome = _ran(config, out, quiet)
        if outcome.stopped_by:
            complain(
                f"stopped by {outcome.stopped_by}; {len(kept.all)} finished rows are kept in {str(out)!r}, and the same"
                " command goes on (with --no-run it shows them)."
            )
            return CANCELLED
    if not kept.all:
        raise UserError("No search could be run; the reasons are above.")
    with only_results_on_stdout():
        kinds = _kinds(kept.config)
        paths = report.write(out, kept.all, kept.config, kinds, outcome.left_out)
    summary = list(tables.summary(groups.groups(kept.all, kept.config, kinds)))
    if as_json:
        found = [{"title": t.title, "head": t.head, "lines": t.lines, "note": t.note} for t in summary]
        files = {"rows": str(out / "rows.jsonl"), **{name: str(path) for name, path in paths.items()}}
        counts = {"rows": len(kept.all), "added": outcome.added}
        print_json({**counts, "left_out": outcome.left_out, "files": files, "tables": found})
    elif quiet:
        print(paths["page"])
    else:
        for table in summary:
            _show(table)
        print(f"{len(kept.all)} rows, {outcome.added} of them new. Wrote {paths['page']} and what it shows beside it.")
    return int(bool(outcome.left_out))


def _ran(config: Config, out: Path, quiet: bool) -> tuple[Rows, Outcome]:
    from imgscale.app.bench import rows, run

    config, prompts = config.checked()
    with rows.opened(out, config) as kept:
        asked = {row for row in map(rows.key, kept.all) if _asked_for(config, {p.text for p in prompts}, row)}
        if others := len(kept.all) - len(asked):
            complain(f"{str(out)!r} also holds {others} rows that this doesn't ask for; they stay, and are shown, too.")
        return kept, run.run(config, prompts, kept, quiet)


def _asked_for(config: Config, prompts: set[str], key: tuple[str, str, int, str, int, str]) -> bool:
    model, prompt, seed, searcher, budget, verifier = key
    search = config.plain if budget == 0 else searcher in config.searchers and budget in config.budgets
    right = model in config.models and verifier in config.verifiers and prompt in prompts
    return right and search and config.seed <= seed < config.seed + config.seeds


def _looked_at(config: Config, flags: dict[str, Any], out: Path) -> Rows:
    """The rows that are there, where the flags say nothing but how to look at them."""
    from imgscale.app.bench import rows
    from imgscale.app.bench.config import flag
    from imgscale.app.bench.values import threshold

    for key, value in flags.items():
        if value not in (None, [], ()) and key not in ("solved", "against"):
            raise UserError(f"--no-run shows all rows of {str(out)!r}; leave out {flag(key)}.")
    kept = rows.Rows.of(out, config)
    if not kept.all:
        raise UserError(f"There are no rows in {str(out)!r}; run without --no-run first.")
    searchers = {row["searcher"] for row in kept.all} - {rows.PLAIN}
    if config.against is not None and config.against not in searchers:
        raise UnknownName("searcher to compare against", config.against, searchers)
    judges = {name for row in kept.all for name in (row["steers"], *row["held_out"])}
    if config.solved not in (None, "none") and threshold(config.solved)[0] not in judges:
        raise UnknownName("verifier in solved", threshold(config.solved)[0], judges)
    return kept


def _kinds(config: Config) -> list[str]:
    """The categories in the order of the prompt list; none if it is gone."""
    from imgscale.app.bench import prompts

    with suppress(UserError):
        return list(dict.fromkeys(prompt.category for prompt in prompts.load(config.prompts)))
    return []


def _show(table: Any) -> None:
    """A table as wide as the terminal, or as Markdown where there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        print(f"{table.markdown()}\n")
        return
    shown = Table(box=None, pad_edge=False, header_style="bold", title=Text(table.title, "bold"), title_justify="left")
    for i, name in enumerate(table.head):
        shown.add_column(Text(name), justify="left" if i == 0 or name == "model" else "right")
    for line in table.lines:
        shown.add_row(*map(Text, line))
    console.print(shown)
    console.print(Text(f"{table.note}\n", "dim"))

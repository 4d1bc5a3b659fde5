"""The `bench bandit` command: its options, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from imgscale.app import checks
from imgscale.app.console import complain, only_results_on_stdout, print_json

NAME = "bench bandit"
HELP = (
    "Replay the bandit and its baselines on a table.\n\nNo model is run. Writes regret, reward,"
    " accuracy and cost in all modes, scenarios and ablations, with plots, into a folder (docs/bandit.md)."
)
_FLAG = " "


class Words(TyperGroup):
    """The root of the commands, of which `bench bandit` has a name of two words. A file bandit is ./bandit."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:2] == NAME.split():
            args = [NAME, *args[2:]]
        return super().resolve_command(ctx, args)


def bench_bandit(
    table: Path | None = typer.Option(None, metavar="FOLDER", help="The table; the one that lies with the sources."),
    steps: str = typer.Option("400", metavar="INT", help="Decisions of a replay; prompts come again, shuffled anew."),
    runs: str = typer.Option("20", metavar="INT", help="Shuffles, with seeds 0, 1, …."),
    jobs: str = typer.Option("1", metavar="INT", help="Processes."),
    quick: bool = typer.Option(False, "--quick", metavar=_FLAG, help="20 decisions and 2 shuffles: does it work?"),
    out: Path = typer.Option(Path("imgscale-bench-bandit"), "--out", "-o", metavar="FOLDER", help="Where files go."),
    as_json: bool = typer.Option(False, "--json", metavar=_FLAG, help="Print one JSON object."),
    quiet: bool = typer.Option(False, "--quiet", "-q", metavar=_FLAG, help="Show no progress and no table."),
) -> None:
    from imgscale.app.bench import bandit

    many, several = checks.whole(steps, "--steps", 10, 100_000), checks.whole(runs, "--runs", 2, 1000)
    workers = checks.whole(jobs, "--jobs", 1, 256)
    assert many and several and workers
    checks.folder(out)
    if quick:
        many, several = 20, 2
    with only_results_on_stdout():
        lines, paths = bandit.bench(
            table, out, steps=many, runs=several, jobs=workers, tell=(lambda _: None) if quiet else complain
        )
    if as_json:
        found = [{"policy": line.policy, "scenario": line.scenario, **line.values} for line in lines]
        print_json({"results": found, "files": {name: str(path) for name, path in paths.items()}})
    elif quiet:
        print(paths["tables.md"])
    else:
        print(paths["tables.md"].read_text(encoding="utf-8"))
        print(f"Wrote {paths['tables.md']} and plots beside it.")

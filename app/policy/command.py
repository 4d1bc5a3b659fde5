"""The `policy` commands: their options, and nothing heavy."""

from __future__ import annotations

from pathlib import Path

import typer

from imgscale.app import checks

_FLAG = " "
_FILE = typer.Argument(None, metavar="[FILE]", help="The policy; that of the pool in the user's data folder.")
_POOL = typer.Option(None, "--pool", metavar="FILE", help="Whose policy is meant, if no file is given.")
_JSON = typer.Option(False, "--json", metavar=_FLAG, help="Print JSON for machines, and nothing else.")

app = typer.Typer(
    help="What the bandit of --model auto has learned.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def show(
    file: Path | None = _FILE,
    pool: Path | None = _POOL,
    mode: str | None = typer.Option(
        None, metavar="MODE", help="cost, balanced, quality or a weight from 0 to 1; the one it was last used in."
    ),
    top: str = typer.Option("1", metavar="N", help="Actions of each category."),
    plot: Path | None = typer.Option(None, metavar="FILE.png", help="Also draw it."),
    as_json: bool = _JSON,
) -> None:
    """Print what is preferred in each category of prompts, what is expected of it, and what it has brought."""
    from imgscale.app.policy import report

    raise typer.Exit(
        report.show(file, pool, mode=mode, top=checks.whole(top, "--top", 1, 200) or 1, plot=plot, as_json=as_json)
    )


@app.command()
def reset(file: Path | None = _FILE, pool: Path | None = _POOL, as_json: bool = _JSON) -> None:
    """Begin anew: the policy and its log are moved aside, not deleted."""
    from imgscale.app.policy import report

    raise typer.Exit(report.reset(file, pool, as_json=as_json))


@app.command()
def export(
    file: Path | None = _FILE,
    pool: Path | None = _POOL,
    out: Path = typer.Option(..., "--out", "-o", metavar="FILE", help="FILE.csv or FILE.jsonl."),
    what: str = typer.Option("statistics", metavar="KIND", help="statistics, or decisions: the log."),
) -> None:
    """Write the statistics of every category and action, or all logged decisions, as CSV or JSONL."""
    from imgscale.app.policy import report

    raise typer.Exit(report.export(file, pool, out, what))

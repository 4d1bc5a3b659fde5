"""The `demo` command: its options, and nothing heavy before they are read."""

from __future__ import annotations

from pathlib import Path

import typer

from imgscale.app import checks
from imgscale.errors import UserError

HELP = (
    "Serve a page to search from, until Ctrl-C.\n\nOne search runs at a time and others wait in line. Listens on this"
    " machine alone unless --host says otherwise."
)
_FLAG = " "


def demo(
    model: list[str] = typer.Option([], "--model", "-m", metavar="NAME", help="Also offer it; repeatable."),
    verifier: list[str] = typer.Option([], "--verifier", "-v", metavar="NAME", help="Also offer it; repeatable."),
    host: str = typer.Option("127.0.0.1", metavar="NAME", help="Where to listen; 0.0.0.0 lets other machines in."),
    port: str = typer.Option("7860", metavar="N", help="Where to listen; 0 takes a free port."),
    max_budget: str = typer.Option("1000", metavar="NFE", help="The largest budget of a search."),
    max_queue: str = typer.Option("16", metavar="N", help="How many searches may run or wait."),
    device: str | None = typer.Option(None, metavar="NAME", help="cpu, cuda, …; the accelerator if there is one."),
    dtype: str | None = typer.Option(None, metavar="NAME", help="float32, bfloat16 or float16."),
    policy: Path | None = typer.Option(None, metavar="FILE", help="Of the model auto: what it has learned."),
    pool: Path | None = typer.Option(None, metavar="FILE", help="Of the model auto: what it chooses from (TOML)."),
    out: Path = typer.Option(Path("imgscale-out/demo"), "--out", "-o", metavar="FOLDER", help="Where images are kept."),
    quiet: bool = typer.Option(False, "--quiet", "-q", metavar=_FLAG, help="Don't say where it listens."),
) -> None:
    from imgscale.app.demo.offer import Offer

    listen = checks.whole(port, "--port", 0, 65535) or 0
    offer = Offer.of(
        model,
        verifier,
        max_budget=checks.whole(max_budget, "--max-budget", 1, 1_000_000),
        max_queue=checks.whole(max_queue, "--max-queue", 1, 1000),
        device=device,
        dtype=checks.dtype(dtype),
        policy=policy,
        pool=pool,
    )
    checks.folder(out)
    try:
        from imgscale.app.demo import serve
    except ImportError as error:
        raise UserError(f"The demo needs gradio ({error}); get it with pip install 'imgscale[demo]'.") from error
    raise typer.Exit(serve.demo(offer, out, host=host, port=listen, quiet=quiet))

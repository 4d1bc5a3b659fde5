"""`imgscale demo`: the page on a port of this machine, until Ctrl-C."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware

from imgscale.app.console import Interrupt, complain, waiting
from imgscale.app.demo import page, theme
from imgscale.app.demo.guard import Guard
from imgscale.app.demo.offer import Offer
from imgscale.app.demo.runner import Runner
from imgscale.errors import UserError

UPLOAD = 32 * 2**20  # bytes of a picture
PATIENCE = 3  # attempts to start


def demo(offer: Offer, out: Path, *, host: str, port: int, quiet: bool = False) -> int:
    """Serves until Ctrl-C.

    Args:
        offer: What the page offers.
        out: Where results go.
        host: Where to listen.
        port: Where to listen; 0 takes a free one.
        quiet: Say nothing but what failed.

    Returns:
        The exit status, 0.

    Raises:
        UserError: The first model can't be used, or it can't listen there.
    """
    runner = Runner(offer, out)
    with waiting(quiet, f"Loading {offer.models[0]} and measuring how fast it is here"):
        ticket = runner.measure(offer.models[0])
        while not (view := ticket.look()).over:
            ticket.rest(0.5)
    if view.state == "failed":
        raise UserError(view.said)
    with served(runner, host, port) as url, Interrupt("searches end with their best so far") as interrupt:
        if not quiet:
            complain(f"the demo is at {url}; results go to {str(out)!r}; Ctrl-C ends.")
        while not interrupt.asked:
            threading.Event().wait(0.2)
    return 0


@contextmanager
def served(runner: Runner, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The page while the context lasts, and its address.

    Raises:
        UserError: It can't listen there.
    """
    with tempfile.TemporaryDirectory(prefix="imgscale-demo-") as folder, _settings(folder):
        blocks, url = _launched(runner, Path(folder).resolve(), host, port)
        try:
            yield url
        finally:
            runner.desk.close()
            blocks.close(verbose=False)


def _launched(runner: Runner, cache: Path, host: str, port: int) -> tuple[gr.Blocks, str]:
    for attempt in range(PATIENCE):
        blocks = page.build(runner, cache)
        try:
            _, url, _ = blocks.queue().launch(
                server_name=host,
                server_port=port or _free(host),
                share=False,
                prevent_thread_lock=True,
                quiet=True,
                show_error=False,
                enable_monitoring=False,
                ssr_mode=False,
                pwa=False,
                mcp_server=False,
                run_history=False,
                footer_links=[],
                allowed_paths=[],
                max_file_size=UPLOAD,
                max_threads=runner.offer.max_queue + 8,
                app_kwargs={
                    "middleware": [Middleware(Guard)],
                    "docs_url": None,
                    "redoc_url": None,
                    "openapi_url": None,
                },
                theme=theme.theme(),
                css_paths=theme.CSS,
                head=f"<script>{theme.SCRIPT.read_text(encoding='utf-8')}</script>",
            )
            return blocks, str(url)
        except OSError as error:
            raise UserError(f"The demo can't listen at {host} port {port} ({error}); choose another.") from error
        except ValueError as error:  # gradio asked its own page, which took more than three seconds
            blocks.close(verbose=False)
            if attempt == PATIENCE - 1:
                raise UserError(
                    f"The demo didn't answer itself at {host} in {PATIENCE} attempts: the machine is too busy, or a"
                    " proxy stands between (set NO_PROXY=127.0.0.1)."
                ) from error
    raise AssertionError("unreachable")


@contextmanager
def _settings(folder: str) -> Iterator[None]:
    """What gradio reads from the environment, as long as the context lasts."""
    ours = {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_SHARE": "False"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ |= ours
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _free(host: str) -> int:
    """A port that is free now."""
    import socket

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])

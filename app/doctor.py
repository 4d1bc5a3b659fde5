"""`imgscale doctor`: what works on this machine, and what is missing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any, Literal

from imgscale.app.console import only_results_on_stdout, print_json, waiting
from imgscale.errors import UserError

PACKAGES = (
    *("torch", "torchvision", "diffusers", "transformers", "open_clip_torch", "accelerate", "safetensors"),
    *("numpy", "scipy", "pillow", "matplotlib", "pydantic", "typer", "rich"),
)
EXTRAS = {"gradio": "demo"}  # packages of single commands, and the extras that bring them
MODEL, PROMPT = "shapes-flow", "a red circle"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        kind: "package", "device", "model", "verifier" or "job".
        name: Of the thing.
        ok: Whether it works.
        detail: Its version, or what is missing.
        needs: What a verifier that is as it should be waits for: "option", "package" or "weights"; "package", too, for
            one that a single command needs.
    """

    kind: str
    name: str
    ok: bool
    detail: str
    needs: Literal["option", "package", "weights"] | None = None


def doctor(as_json: bool = False, quiet: bool = False) -> int:
    """Looks at everything and prints what it finds.

    Args:
        as_json: As one object with ``ok`` and ``findings``.
        quiet: Show no progress.

    Returns:
        The exit status: 0 if a search with the bundled model works, 1 if not.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # what would have to be fetched is missing; the doctor fetches nothing
    findings: list[Finding] = []
    with only_results_on_stdout(), waiting(quiet or as_json, "Looking around"):
        findings += _packages()
        missing = [f.name for f in findings if not f.ok and not f.needs]
        if missing:
            findings.append(Finding("job", MODEL, False, f"install {', '.join(missing)} first"))
        else:
            findings += [*_devices(), *_models(), *_job(), *_verifiers()]
    works = all(f.ok for f in findings if f.kind == "job")
    if as_json:
        print_json({"ok": works, "findings": [asdict(f) for f in findings]})
    else:
        _show(findings, works)
    return int(not works)


def _packages() -> Iterator[Finding]:
    yield Finding("package", "python", True, platform.python_version())
    for name in PACKAGES:
        try:
            yield Finding("package", name, True, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding("package", name, False, f"missing: pip install {name}")
    for name, extra in EXTRAS.items():
        try:
            yield Finding("package", name, True, metadata.version(name))
        except metadata.PackageNotFoundError:
            detail = f"imgscale {extra} needs it: pip install 'imgscale[{extra}]'"
            yield Finding("package", name, False, detail, "package")


def _devices() -> Iterator[Finding]:
    import torch

    yield Finding("device", "cpu", True, f"{torch.get_num_threads()} threads on {platform.machine()}")
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        yield Finding("device", f"cuda:{i}", True, f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        yield Finding("device", "mps", True, "Apple GPU")


def _models() -> Iterator[Finding]:
    import imgscale
    from imgscale.models import bundled

    def load(name: str) -> str:
        return f"loads as a {imgscale.load(name).engine.denoiser.name}"

    for name in bundled():
        yield _tried("model", name, partial(load, name))


def _job() -> Iterator[Finding]:
    """The bundled job."""
    import imgscale

    try:
        scaler = imgscale.load(MODEL)
    except Exception as error:  # whatever it is, it is the finding
        yield Finding("job", MODEL, False, _line(error))
        return

    def search() -> str:
        began = time.monotonic()
        steps = scaler.settings.steps or scaler.engine.denoiser.steps_default
        output = scaler(PROMPT, budget=3 * steps, plain=False, progress=False)
        if output.stopped == "verifier":
            raise RuntimeError(output.events[0] if output.events else "the verifier failed")
        return f"{output.searcher} with {output.verifier}: {output.nfe} NFE in {time.monotonic() - began:.1f} s"

    yield _tried("job", MODEL, search)


def _verifiers() -> Iterator[Finding]:
    """Every verifier with its default options, on a grey image."""
    import torch

    from imgscale import registry, verification

    def score(name: str) -> str:
        return f"scores a grey image {float(verification.make(name)(torch.full((1, 3, 64, 64), 0.5), [PROMPT])[0]):.3f}"

    for entry in registry.verifier:
        lacks = [f"{name}=…" for name, option in entry.options().items() if option.default is option.empty]
        if lacks:
            detail = f"give {entry.name}({', '.join(lacks)})"
            yield Finding("verifier", entry.name, False, detail, "option")
        else:
            found = _tried("verifier", entry.name, partial(score, entry.name))
            if found.needs == "weights":  # the hub's client would say so in a paragraph
                model = entry.options().get("model")
                whose = f" of {model.default}" if model else ""
                found = replace(found, detail=f"the weights{whose} aren't here; they are fetched on first use")
            yield found


def _tried(kind: str, name: str, trial: Callable[[], str]) -> Finding:
    try:
        return Finding(kind, name, True, trial())
    except Exception as error:  # whatever it is, it is the finding
        return Finding(kind, name, False, _line(error), _needs(error) if kind == "verifier" else None)


def _needs(error: BaseException) -> Literal["option", "package", "weights"] | None:
    """What would make a verifier work; None if it should work as it is, and doesn't."""
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    if any(isinstance(each, ImportError) for each in causes):
        return "package"
    if any(type(each).__module__.startswith("huggingface_hub.") for each in causes):
        return "weights"  # the hub's client, which is offline
    return "option" if isinstance(error, UserError) and len(causes) == 1 else None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def _show(findings: list[Finding], works: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    before = ""
    for f in findings:
        said, colour = ("ok", "green") if f.ok else (f"needs {f.needs}", "yellow") if f.needs else ("no", "red")
        row: list[Any] = [f.kind if f.kind != before else "", f.name, said, f.detail]
        before = f.kind
        styles = ("dim", "", colour, "" if f.ok or f.needs else "red")
        table.add_row(*(Text(text, style=style) for text, style in zip(row, styles, strict=True)))
    console.print(table)
    verdict = "A search with the bundled model works here." if works else "A search with the bundled model fails here."
    console.print(Text(f"\n{verdict}", style="bold"))

"""Quantised pipelines: the blocks of docs/own-models.md load a folder of tiny weights with the packages themselves."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import imgscale
from imgscale import hardware
from imgscale.cost import measure
from imgscale.denoiser import Denoiser
from imgscale.scaler import Scaler
from tests import zoo

PAGE = Path(__file__).parent.parent / "docs" / "own-models.md"
GATED = "black-forest-labs/FLUX.1-dev"
PACKAGES = [
    pytest.param(
        package,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(package) is None, reason=f"{package} isn't installed; pip install {package}"
        ),
    )
    for package in ("bitsandbytes", "torchao")
]
PLACE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL: dict[str, Any] = {"verifier": "sharpness", "num_inference_steps": 2, "height": 16, "width": 16}
PROMPT = "a light"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the page's pipeline with random weights."""
    path = tmp_path_factory.mktemp("flux")
    zoo.build("FluxPipeline").save_pretrained(path)
    return path


def block(package: str) -> str:
    """The page's code for a package."""
    found: str
    (found,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if package in b]
    return found


def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, lets diffusers go on where it refuses bitsandbytes; the rest is its own and runs on the CPU."""
    if torch.cuda.is_available():
        return
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    gate: Any = bnb_quantizer.BnB4BitDiffusersQuantizer
    monkeypatch.setattr(gate, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(gate, "update_device_map", lambda self, given: given or {"": "cpu"})


def run(package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's block leaves behind, on this folder and at small sizes."""
    import diffusers

    if not torch.accelerator.is_available():
        monkeypatch.setattr(diffusers.FluxPipeline, "enable_model_cpu_offload", lambda self: None)
    small = {
        f'"{GATED}"': repr(str(folder)),
        'pipe.to("cuda")': f"pipe.to({PLACE!r})",
        'verifier="clip"': 'verifier="sharpness", height=16, width=16, progress=False',
        "budget=280": "budget=4",
        "num_inference_steps=28": "num_inference_steps=2",
    }
    source = block(package)
    for before, after in small.items():
        assert before in source or "pipe" in before
        source = source.replace(before, after)
    names: dict[str, Any] = {}
    exec(compile(source, PAGE.name, "exec", dont_inherit=True), names)
    return names


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes isn't installed")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_bitsandbytes_needs_a_gpu_to_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="No GPU found"):
        run("bitsandbytes", folder, monkeypatch)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_s_block_searches_with_quantised_weights(
    package: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gate(monkeypatch) if package == "bitsandbytes" else None
    names = run(package, folder, monkeypatch)
    scaler, out = names["scaler"], names["out"]
    weights = dict(names["pipe"].transformer.named_parameters())
    kind = {"bitsandbytes": "Params4bit", "torchao": "Int8Tensor"}[package]
    assert type(weights["transformer_blocks.0.attn.to_q.weight"]).__name__ == kind
    assert out.finished and out.nfe == 4 and out.stopped == "complete" and not out.events
    denoiser = scaler.engine.denoiser
    assert denoiser.dtype == torch.bfloat16 and out.settings["pipeline"]["dtype"] == "bfloat16"
    with pytest.raises(imgscale.UserError, match="since the weights of its .* are quantised; limit nfe or seconds"):
        scaler.cost(verifier="sharpness", height=16, width=16)
    again = scaler("a lighthouse at dawn", searcher="rbf", budget=4, progress=False, **SMALL)
    assert again.finished and again.nfe <= 4
    as_it_was(scaler, folder)


def as_it_was(scaler: Scaler, folder: Path) -> None:
    """Estimates and gradients of quantised weights lie close to those of the weights that they were made of."""
    from diffusers import FluxPipeline

    whole = Denoiser(FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16).to(PLACE))
    found = []
    for denoiser in (scaler.engine.denoiser, whole):
        cond = denoiser.encode(PROMPT, height=16, width=16)
        x = denoiser.prior(torch.tensor([3]), cond).requires_grad_()
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device)
        with torch.enable_grad():
            x0 = denoiser.predict(x, torch.tensor(0.6, dtype=torch.float64), cond)
            (x0 * weights).sum().backward()
        assert x.grad is not None
        found.append((x0.detach().float(), x.grad.float()))
    for quantised, exact in zip(*found, strict=True):
        assert 0 < float((quantised - exact).norm() / exact.norm()) < 0.3


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("searcher", ["dps", "noise-gradient"])
def test_gradients_pass_through_quantised_weights(
    searcher: str, package: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gate(monkeypatch) if package == "bitsandbytes" else None
    scaler = run(package, folder, monkeypatch)["scaler"]
    out = scaler(PROMPT, searcher=searcher, budget=4, progress=False, **SMALL)
    assert out.finished and out.ledger.gradients > 0 and not out.events


class Whole(torch.nn.Module):
    """A network whose weights are all integers, as some quantisers leave them."""

    def __init__(self, compute: torch.dtype | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
        self.inner = torch.nn.Identity()
        if compute is not None:
            self.inner.compute_dtype = compute  # type: ignore[assignment]

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8


@pytest.mark.parametrize(
    ("compute", "dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (None, torch.float32)]
)
def test_integer_weights_aren_t_what_is_computed_in(compute: torch.dtype | None, dtype: torch.dtype) -> None:
    pipe = zoo.build("FluxPipeline")
    denoiser = imgscale.load(pipe).engine.denoiser
    pipe.register_modules(transformer=Whole(compute))
    with pytest.raises(imgscale.UserError, match="The cost of 'it' .* the weights of its transformer are quantised"):
        measure(pipe, "it", hardware.of("H100"), height=16, width=16)
    assert denoiser.dtype == dtype
    assert denoiser.description["dtype"] == str(dtype).removeprefix("torch.")

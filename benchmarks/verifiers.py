"""What verifiers cost: time per image by batch, of the bundled ones and of the real architectures.

On a machine that does other work, too, ``--clock cpu`` counts the processor's time instead of the wall's; with one
thread it is the wall time of a free core. The bundled ones score 64-pixel scenes. The others score the same scenes at
512 pixels with random weights, which cost as much as trained ones; they are written to a temporary folder first, so
that the loading code is the real one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from imgscale import verification
from imgscale.rewards import Verifier
from imgscale.verifiers._network import Network

PROMPT = "two red circles above a blue square"


@dataclass(frozen=True)
class Case:
    """A verifier to time.

    Args:
        name: What tables call it.
        spec: As users write it; ``{folder}`` stands for where `write` wrote.
        pixels: Height and width of the images.
        write: Writes random weights into a folder.
    """

    name: str
    spec: str
    pixels: int = 64
    write: Callable[[Path], None] | None = None


def open_clip_weights(architecture: str) -> Callable[[Path], None]:
    """Writes one of open_clip's architectures in its own format."""

    def write(folder: Path) -> None:
        import open_clip
        from safetensors.torch import save_file

        save_file(open_clip.create_model(architecture).state_dict(), folder / "open_clip_model.safetensors")
        config = {"model_cfg": open_clip.get_model_config(architecture), "preprocess_cfg": {}}
        (folder / "open_clip_config.json").write_text(json.dumps(config))

    return write


def owlv2_weights(folder: Path) -> None:
    """Writes OWLv2 of the size of google/owlv2-base-patch16-ensemble, with a small vocabulary."""
    from transformers import CLIPTokenizer, Owlv2Config, Owlv2ForObjectDetection, Owlv2ImageProcessor, Owlv2Processor

    from imgscale.assets.shapes.text import write_tokenizer

    write_tokenizer(folder)
    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=16)
    text = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = Owlv2Config(text_config=text, vision_config={"image_size": 960, "patch_size": 16})
    Owlv2ForObjectDetection(config).save_pretrained(folder)
    Owlv2Processor(Owlv2ImageProcessor(), tokenizer).save_pretrained(folder)


CASES = (
    Case("shapes", "shapes"),
    Case("sharpness", "sharpness"),
    Case("jpeg", "jpeg"),
    Case("clip, the bundled one", "clip"),
    Case("aesthetic, the bundled one", "aesthetic"),
    Case("sharpness at 512", "sharpness", 512),
    Case("jpeg at 512", "jpeg", 512),
    *(
        Case(f"clip {name}", "clip(model={folder})", 512, open_clip_weights(name))
        for name in ("ViT-B-32", "ViT-L-14", "ViT-H-14")
    ),
    Case("count OWLv2 base", "count(model={folder})", 512, owlv2_weights),
)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    batches = [int(n) for n in args.batches.split(",")]
    chosen = [case for case in CASES if args.only in case.name]
    about = f"{torch.get_num_threads()} threads, {args.device}, {args.clock} time"
    print(f"{about}; milliseconds per image, median (quartiles) of the calls")
    print(
        f"\n| verifier | parameters | {' | '.join(f'batch {n}' for n in batches)} |\n|---|---|{'---|' * len(batches)}"
    )
    for case in chosen:
        with ExitStack() as stack:
            verifier = _made(case, stack, args.device)
            times = list(_times(verifier, case.pixels, batches, args))
        print(f"| {case.name} | {_size(verifier)} | {' | '.join(times)} |", flush=True)


def _made(case: Case, stack: ExitStack, device: str) -> Verifier:
    if case.write is None:
        return verification.make(case.spec, device=device)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    case.write(folder)
    return verification.make(case.spec.format(folder=folder), device=device)


def _times(verifier: Verifier, pixels: int, batches: list[int], args: argparse.Namespace) -> Iterator[str]:
    """Milliseconds per image at each batch; a dash where a single call would take longer than may be."""
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    last = 0.0  # seconds per image at the batch before
    for n in batches:
        if n * last > args.longest:
            yield "–"
            continue
        images, prompts = _scenes(n, pixels).to(args.device), [PROMPT] * n
        seconds: list[float] = []
        with torch.inference_mode():
            if not last:
                verifier(images, prompts)  # what is done once: the prompt's embedding, the allocator
            while len(seconds) < args.repeats and sum(seconds) < args.longest:
                began = clock()
                verifier(images, prompts).cpu()
                seconds.append(clock() - began)
        each = 1e3 * np.array(seconds) / n
        last = float(np.median(each)) / 1e3
        low, middle, high = np.quantile(each, [0.25, 0.5, 0.75])
        spread = f" ({_digits(low)} to {_digits(high)})" if len(seconds) > 2 else ""
        yield f"{_digits(middle)}{spread}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _size(verifier: Verifier) -> str:
    """Parameters of its networks, and of those of the verifiers within it."""
    found = [getattr(part, "network", part) for part in vars(verifier).values()]
    numbers = [p.numel() for part in found if isinstance(part, Network) for p in part.module.parameters()]
    return f"{sum(numbers) / 1e6:.1f} M" if numbers else "none"


def _scenes(n: int, pixels: int) -> Tensor:
    from imgscale.assets.shapes.world import parse, render

    rng = np.random.default_rng(0)
    drawn = torch.from_numpy(np.stack([render(parse(PROMPT), rng) for _ in range(n)])).permute(0, 3, 1, 2) / 255
    if pixels == drawn.shape[-1]:
        return drawn
    return torch.nn.functional.interpolate(drawn, (pixels, pixels), mode="bicubic").clamp(0, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=9, help="calls at each batch")
    parser.add_argument("--longest", type=float, default=60.0, help="seconds for the calls at one batch")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--device", default="cpu")

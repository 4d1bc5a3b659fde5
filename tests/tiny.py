"""Tiny random checkpoints of every verifier's real classes, for the tests that walk the whole registry.

A new verifier gets an entry in `VERIFIERS`: how to write a checkpoint of it into a folder, and what else the tests of
`tests/test_verifiers.py` should know of it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PROMPTS = ("a red circle", "two blue stars", "a green square above a red circle", "three yellow triangles")


@dataclass(frozen=True)
class Tiny:
    """How the tests make a verifier, and what they may ask of it.

    Args:
        options: Writes what the verifier needs into an empty folder and returns its options; what must be closed in the
            end goes into the stack.
        weights: Whether it has any.
        cut: Whether it reads only so much of a prompt, and warns once.
        any_prompt: Whether it reads any prompt, or may refuse those that ask for nothing it knows.
        prompts: For the images, which get them in turn.
        pictures: Different images ``(n, 3, h, w)`` that it tells apart.
    """

    options: Callable[[Path, ExitStack], dict[str, Any]] = lambda folder, stack: {}
    weights: bool = True
    cut: bool = False
    any_prompt: bool = True
    prompts: Sequence[str] = PROMPTS
    pictures: Callable[[int, int, int], Tensor] = lambda n, h, w: torch.randint(0, 256, (n, 3, h, w)) / 255


def scenes(n: int, h: int, w: int) -> Tensor:
    """Pictures of the shapes world, in any size."""
    from imgscale.assets.shapes.world import parse, render

    rng = np.random.default_rng(0)
    drawn = [render(parse(PROMPTS[i % 3]), rng) for i in range(n)]  # so that some show what is asked
    images = (
        torch.from_numpy(np.stack(drawn) if drawn else np.zeros((0, 64, 64, 3), np.uint8)).permute(0, 3, 1, 2) / 255
    )
    return torch.nn.functional.interpolate(images, (h, w), mode="area") if n and (h, w) != (64, 64) else images


def randomise(model: torch.nn.Module, spread: float = 0.3) -> None:
    """Wilder weights than a new model's, which answers nearly the same to everything."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, spread)


# ---------------------------------------------------------------------------------------------------------- open_clip

VISION: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
TEXT: dict[str, Any] = {"width": 32, "heads": 2, "layers": 2}
PREPROCESS = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic", "resize_mode": "shortest"}


def open_clip(folder: Path) -> None:
    """A model in open_clip's format with a tokenizer of its own, which reads 12 tokens."""
    import open_clip
    from safetensors.torch import save_file

    from imgscale.assets.shapes.text import write_tokenizer

    write_tokenizer(folder)
    vocabulary = len(json.loads((folder / "vocab.json").read_text()))
    text = {**TEXT, "context_length": 12, "vocab_size": vocabulary, "hf_tokenizer_name": "own"}
    settings = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": text}
    save_file(open_clip.CLIP(**settings).state_dict(), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": settings, "preprocess_cfg": PREPROCESS}))


def _clip(folder: Path, stack: ExitStack) -> dict[str, Any]:
    open_clip(folder)
    return {"model": str(folder)}


def _aesthetic(folder: Path, stack: ExitStack) -> dict[str, Any]:
    open_clip(folder)
    torch.save({"weight": torch.randn(1, 24), "bias": torch.randn(1)}, folder / "head.pth")
    return {"head": str(folder / "head.pth"), "backbone": str(folder)}


def _hps(folder: Path, stack: ExitStack) -> dict[str, Any]:
    import open_clip

    text = {**TEXT, "context_length": 12, "vocab_size": 49408}
    settings = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": text}
    (folder / "tiny-hps.json").write_text(json.dumps(settings))
    open_clip.add_model_config(folder / "tiny-hps.json")
    torch.save({"state_dict": open_clip.CLIP(**settings).state_dict()}, folder / "hps.pt")
    return {"model": str(folder / "hps.pt"), "architecture": "tiny-hps"}


# ------------------------------------------------------------------------------------------------------- transformers


def _pickscore(folder: Path, stack: ExitStack) -> dict[str, Any]:
    from transformers import CLIPConfig, CLIPModel

    from imgscale.assets.shapes.text import END, write_tokenizer

    write_tokenizer(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    wide = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    end = vocabulary[END]
    text = {
        **wide,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 12,
        "eos_token_id": end,
        "bos_token_id": 0,
    }
    vision = {**wide, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
    randomise(model)
    model.save_pretrained(folder)
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(size))
    return {"model": str(folder)}


def _imagereward(folder: Path, stack: ExitStack) -> dict[str, Any]:
    from tests.test_imagereward import WORDS, Reference

    words = list(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.save(Reference(len(words) + 2).state_dict(), folder / "ImageReward.pt")
    return {"model": str(folder / "ImageReward.pt"), "tokenizer": str(folder)}


def _count(folder: Path, stack: ExitStack) -> dict[str, Any]:
    from transformers import CLIPTokenizer, Owlv2Config, Owlv2ForObjectDetection, Owlv2ImageProcessor, Owlv2Processor

    from imgscale.assets.shapes.text import write_tokenizer

    write_tokenizer(folder)
    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=16)
    wide = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**wide, "vocab_size": len(tokenizer), "max_position_embeddings": 16, "pad_token_id": tokenizer.pad_token_id}
    vision = {**wide, "image_size": 48, "patch_size": 8}
    model = Owlv2ForObjectDetection(Owlv2Config(text_config=text, vision_config=vision, projection_dim=32))
    randomise(model)
    model.save_pretrained(folder)
    Owlv2Processor(Owlv2ImageProcessor(size={"height": 48, "width": 48}), tokenizer).save_pretrained(folder)
    return {"model": str(folder), "threshold": 0.5}


def _vqa(folder: Path, stack: ExitStack) -> dict[str, Any]:
    from tests.test_vqa import llava

    llava(folder)
    return {"model": str(folder)}


def _ensemble(folder: Path, stack: ExitStack) -> dict[str, Any]:
    from imgscale.verifiers.classic import Jpeg, Sharpness

    return {"of": [Sharpness(), Jpeg()], "combine": "zscore", "weights": "3:1"}


def _http(folder: Path, stack: ExitStack) -> dict[str, Any]:
    import imgscale
    from imgscale.app.serve import Server

    def light_and_letters(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.mean((1, 2, 3)) + torch.tensor([float(sum(map(ord, prompt)) % 7) for prompt in prompts])

    server = stack.enter_context(Server(imgscale.verifier(light_and_letters), quiet=True))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.shutdown)
    return {"url": server.url}


VERIFIERS: dict[str, Tiny] = {
    "aesthetic": Tiny(_aesthetic),
    "clip": Tiny(_clip, cut=True),
    "count": Tiny(_count, any_prompt=False),
    "ensemble": Tiny(_ensemble, weights=False, prompts=PROMPTS[:1]),  # it compares the images of one prompt
    "hps": Tiny(_hps, cut=True),
    "http": Tiny(_http, weights=False),
    "imagereward": Tiny(_imagereward, cut=True),
    "jpeg": Tiny(weights=False),
    "pickscore": Tiny(_pickscore, cut=True),
    "shapes": Tiny(weights=False, any_prompt=False, pictures=scenes),
    "sharpness": Tiny(weights=False),
    "vqa": Tiny(_vqa),
}

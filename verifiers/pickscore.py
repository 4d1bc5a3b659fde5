"""PickScore (Kirstain et al. 2023): a CLIP ViT-H/14 trained on which of two images users of a web app picked."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.verifiers._network import Network, check, fetch, plain_tensors, why_not
from imgscale.verifiers.clip import REMEMBERED, preprocess

PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # PickScore was tuned from it: its tokenizer, where one is missing
# How that one prepares images, as transformers writes it.
PREPARED: dict[str, Any] = {
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
FILTERS = {2: "bilinear", 3: "bicubic"}  # PIL's numbers


@verifier("pickscore", cite="kirstain2023pick")
class PickScore:
    """PickScore: how likely people would pick an image for its prompt, a CLIP's cosine times its scale (18 to 24).

    Differences are logits: exp(a − b) is the odds that an image of score a is picked over one of score b.

    Args:
        model: A folder or hub id with a CLIPModel of transformers, its tokenizer, and its preprocessor_config.json;
            those of CLIP-H stand in where they are missing.
        revision: A branch, tag or commit of the hub.
        device: Where it runs; where the images are, if None.
        dtype: Of both towers: float32, bfloat16 or float16. The embeddings are normalised and compared in float32.
        offload: Leave the device after every call.

    Raises:
        UserError: when there is no such model or it can't be loaded; the message says which and why.
    """

    name = "pickscore"
    range = None
    reads_prompt = True
    differentiable = True
    licence = "MIT"

    def __init__(
        self,
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        offload: bool = False,
    ) -> None:
        folder, files, found = fetch("PickScore model", model, revision)
        loaded, self._tokenise = _load(model, folder)
        self.preprocessing = _preparation(model, folder)
        self._scale = float(loaded.logit_scale.detach().float().exp())
        self._room = int(loaded.config.text_config.max_position_embeddings)
        self.network = Network(loaded, files, model, revision=found, device=device, dtype=dtype, offload=offload)
        self._texts: dict[str, Tensor] = {}
        self._warned = False

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1] for their ``n`` prompts: float32 ``(n,)``.

        Gradients reach the images where autograd is on.
        """
        check("pickscore", images, prompts)
        if not len(images):
            return torch.zeros(0, device=images.device)
        network = self.network
        with network.on(images.device) as device:
            pixels = preprocess(images.to(device, torch.float32), self.preprocessing).to(network.dtype)
            seen = network.module.visual_projection(network.module.vision_model(pixels).pooler_output)
            cosine = (functional.normalize(seen.float(), dim=-1) * self.embed_texts(prompts).to(device)).sum(-1)
        return (self._scale * cosine).to(images.device)

    def embed_texts(self, prompts: Sequence[str]) -> Tensor:
        """Unit embeddings, float32 ``(n, d)``, of the prompts; each is computed once and remembered."""
        if len(self._texts) > REMEMBERED:
            self._texts.clear()
        new = [p for p in dict.fromkeys(prompts) if p not in self._texts]
        with self.network.on() as device, plain_tensors(), torch.no_grad():
            if new:
                self._warn_of_length(new)
                told = self._tokenise(new, padding=True, truncation=True, max_length=self._room, return_tensors="pt")
                read = self.network.module.text_model(**told.to(device)).pooler_output
                found = functional.normalize(self.network.module.text_projection(read).float(), dim=-1)
                self._texts.update(zip(new, found, strict=True))
            return torch.stack([self._texts[p].to(device) for p in prompts])

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: source, revision, hash, preprocessing, dtype, room for prompts."""
        about = {"name": self.name, **self.network.identity(), "preprocessing": self.preprocessing}
        return {**about, "context_length": self._room}

    def _warn_of_length(self, prompts: list[str]) -> None:
        """Says once that a prompt is cut; its end token is kept, which is where the tower sums up."""
        lengths = [len(ids) for ids in self._tokenise(prompts, verbose=False).input_ids]
        if max(lengths) > self._room and not self._warned:
            self._warned = True
            prompt = prompts[lengths.index(max(lengths))]
            warnings.warn(
                f"PickScore reads {self._room} tokens of a prompt; {prompt[:60]!r}… is longer and its rest doesn't"
                " count. Shorten it, or use the verifier vqa, which reads all.",
                UserWarning,
                stacklevel=4,
            )


def _load(model: str, folder: Path) -> tuple[Any, Any]:
    """The CLIPModel on the CPU and its tokenizer."""
    from transformers import CLIPModel, CLIPTokenizer

    own = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    try:
        with plain_tensors():
            loaded, told = CLIPModel.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
            tokenise = CLIPTokenizer.from_pretrained(folder if own else PROCESSOR)
        if missing := sorted(k for k in told["missing_keys"] if not k.endswith("position_ids")):
            raise ValueError(f"it has no {missing[0]}")
        vocabulary = loaded.config.text_config.vocab_size
        if len(tokenise) > vocabulary:
            raise ValueError(f"its tokenizer knows {len(tokenise)} tokens and its text tower {vocabulary}")
    except Exception as error:  # transformers, safetensors, the hub and json each raise their own
        raise UserError(why_not("PickScore model", model, error)) from error
    return loaded, tokenise


def _preparation(model: str, folder: Path) -> dict[str, Any]:
    """How images are prepared, in open_clip's words, from the checkpoint's preprocessor_config.json or CLIP-H's.

    Raises:
        UserError: It asks for something that CLIP's preparation doesn't do.
    """
    file = folder / "preprocessor_config.json"
    told = PREPARED | (json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})
    size, crop = told["size"], told["crop_size"]
    crop = [crop["height"], crop["width"]] if isinstance(crop, dict) else [crop, crop]
    edge = size.get("shortest_edge") if isinstance(size, dict) else size
    whole = [size.get("height"), size.get("width")] if isinstance(size, dict) else None
    if edge == crop[0] == crop[1]:
        mode = "shortest"
    elif whole == crop:
        mode = "squash"
    else:
        raise UserError(
            f"The PickScore model {model!r} resizes images to {size} and crops {crop}; imgscale knows checkpoints that"
            " crop what they resize to: take another, or write crop_size as size in its preprocessor_config.json."
        )
    return {
        "size": crop,
        "mean": list(told["image_mean"]),
        "std": list(told["image_std"]),
        "interpolation": FILTERS.get(told["resample"], "bicubic"),
        "resize_mode": mode,
        "fill_color": 0,
    }

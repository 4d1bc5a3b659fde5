"""Counting by zero-shot detection: does the image show as many of each thing as the prompt asks for?

The reward is minus the sum over the asked classes of (detected − asked)², the residual sum of squares (RSS): 0 if and
only if all counts are right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.verifiers import _counts
from imgscale.verifiers._network import Network, check, fetch, plain_tensors, why_not

MODEL = "IDEA-Research/grounding-dino-tiny"
GROUNDING = "grounding-dino", "mm-grounding-dino"  # model types whose scores are of words
OWL = "owlv2", "owlvit"  # and of classes
THRESHOLDS = {**dict.fromkeys(GROUNDING, 0.35), **dict.fromkeys(OWL, 0.2)}
OWL_TEXT = "a photo of a {}"  # the first of the templates of CLIP, which OWL's text encoder is


@verifier("count", cite=("liu2024grounding", "minderer2023scaling"))
class Count:
    """Minus the sum of squared errors of object counts, by zero-shot detection. A search ends at 0: all are right.

    What to count is read off the prompt: "three red apples, two cats and no dog" asks for 3 apples, 2 cats and 0 dogs.
    Colours, sizes, and things without a number, "a" or "no" don't count.

    Args:
        model: A folder or a hub id of Grounding DINO, such as IDEA-Research/grounding-dino-tiny, or of OWLv2, such as
            google/owlv2-base-patch16-ensemble.
        revision: A branch, tag or commit of the hub.
        counts: What to count whatever the prompt says: "apple:3, cat:2"; within a name "count(counts=(apple:3,cat:2))".
        threshold: Confidence from which on a box counts; for None 0.35 with Grounding DINO and 0.2 with OWL.
        iou: Of two boxes of one class that overlap more than this (intersection over union), only the more confident
            one counts.
        device: Where it runs; where the images are, if None.
        dtype: Of the network: float32, bfloat16 or float16. Scores are compared in float32.
        offload: Leave the device after every call.

    Raises:
        UserError: There is no such model, or it is no such detector, or an option can't be; the message says why.
    """

    name = "count"
    range = (-math.inf, 0.0)
    differentiable = False
    licence = "Apache-2.0"

    def __init__(
        self,
        *,
        model: str = MODEL,
        revision: str | None = None,
        counts: str | None = None,
        threshold: float | None = None,
        iou: float = 0.5,
        device: str | None = None,
        dtype: str = "float32",
        offload: bool = False,
    ) -> None:
        for what, value in (("threshold", threshold), ("iou", iou)):
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"count's {what} can't be {value!r}; give a number from 0 to 1.")
        self._given = None if counts is None else _counts.given(counts)
        self.reads_prompt = self._given is None
        files, found, self._processor, loaded = _load(model, revision)
        self.network = Network(loaded, files, model, revision=found, device=device, dtype=dtype, offload=offload)
        self._kind = str(loaded.config.model_type)
        self.threshold = THRESHOLDS[self._kind] if threshold is None else threshold
        self.iou = iou
        self._asked: dict[str, dict[str, int]] = {}

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1] for their ``n`` prompts: float32 ``(n,)``, at most 0.

        Raises:
            UserError: A prompt asks for nothing that can be counted. No image of the batch is looked at then.
        """
        check("count", images, prompts)
        asked = [self._counts(prompt) for prompt in prompts]
        scores = torch.zeros(len(images), device=images.device)
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, each in enumerate(asked):
            groups.setdefault(tuple(each), []).append(i)
        for classes, rows in groups.items():
            wanted = torch.tensor([[asked[i][name] for name in classes] for i in rows], dtype=torch.float32)
            errors = self.counts(images[rows], classes).cpu().float() - wanted
            scores[rows] = (0.0 - errors.square().sum(1)).to(images.device)
        return scores

    def counts(self, images: Tensor, classes: Sequence[str]) -> Tensor:
        """How many of each class are detected: int64 ``(n, classes)``.

        Args:
            images: ``(n, 3, h, w)`` in [0, 1].
            classes: What to look for, in the singular.
        """
        with self.network.on(images.device) as device, torch.no_grad():
            confidence, boxes = self._detect(images, classes, device)
        best, which = confidence.max(-1)
        rows, places = (best > self.threshold).nonzero(as_tuple=True)
        label = rows * len(classes) + which[rows, places]
        kept = label[_apart(boxes[rows, places], best[rows, places], label, self.iou)]
        return kept.bincount(minlength=len(images) * len(classes)).reshape(len(images), len(classes))

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: model, hash of its weights, preprocessing, what is found."""
        images = self._processor.image_processor
        keys = ("size", "image_mean", "image_std", "resample", "do_pad")
        known = images.to_dict()
        about = {key: _plain(known[key]) for key in keys if key in known}
        rule = {"threshold": self.threshold, "iou": self.iou, "counts": self._given}
        return {"name": self.name, **self.network.identity(), "preprocessing": {**about, "bits": 8}, **rule}

    def _counts(self, prompt: str) -> dict[str, int]:
        """What a prompt asks for."""
        if self._given is not None:
            return self._given
        if prompt not in self._asked:
            found = _counts.parse(prompt)
            if not found:
                raise UserError(
                    f"The prompt {prompt[:80]!r} asks for nothing that can be counted; write how many, as in 'three"
                    " apples', or give counts=(apple:3)."
                )
            self._asked[prompt] = found
        return self._asked[prompt]

    def _detect(self, images: Tensor, classes: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Confidence ``(n, boxes, classes)`` in [0, 1] and corners ``(n, boxes, 4)``, both float32."""
        pixels = (images.detach().to(device).float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
        seen = self._processor.image_processor(list(pixels), return_tensors="pt", input_data_format="channels_first")
        inputs = {"pixel_values": seen["pixel_values"].to(device, self.network.dtype)}
        if "pixel_mask" in seen:
            inputs["pixel_mask"] = seen["pixel_mask"].to(device)
        detect = self._detect_words if self._kind in GROUNDING else self._detect_classes
        confidence, boxes = detect(inputs, classes, device)
        middle, half = boxes.float()[..., :2], boxes.float()[..., 2:] / 2
        return confidence, torch.cat([middle - half, middle + half], -1)

    def _detect_classes(self, inputs: Any, classes: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """OWL: a box has a logit for each class."""
        texts = [OWL_TEXT.format(name) for name in classes]
        tokens = self._processor.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").to(device)
        n = len(inputs["pixel_values"])
        text = {key: tokens[key].repeat(n, 1) for key in ("input_ids", "attention_mask")}
        found = self.network.module(**inputs, **text)
        return found.logits.float().sigmoid(), found.pred_boxes

    def _detect_words(self, inputs: Any, classes: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Grounding DINO: a box has a logit for each token of "apple. cat."; a class counts by its most likely one."""
        tokenise = self._processor.tokenizer
        tokens = tokenise(f"{'. '.join(classes)}.", return_tensors="pt", return_special_tokens_mask=True).to(device)
        ids, special = tokens["input_ids"][0], tokens.pop("special_tokens_mask")[0].bool()
        stop = ids == tokenise.convert_tokens_to_ids(".")
        stops = stop.cumsum(0)  # so many classes end before or at a token
        if int(stops[-1]) != len(classes) or len(ids) > self.network.module.config.max_text_len:
            raise UserError(f"Grounding DINO can't read {len(classes)} classes at once ({', '.join(classes)[:80]}…).")
        text = {key: value.expand(len(inputs["pixel_values"]), -1) for key, value in tokens.items()}
        found = self.network.module(**inputs, **text)
        logits = found.logits.float()[..., : len(ids)]
        by_class = [logits[..., (stops == k) & ~stop & ~special].amax(-1) for k in range(len(classes))]
        return torch.stack(by_class, -1).sigmoid(), found.pred_boxes


def _apart(boxes: Tensor, confidence: Tensor, label: Tensor, iou: float) -> Tensor:
    """The places of boxes that no more confident one of the same label overlaps."""
    from torchvision.ops import batched_nms  # type: ignore[import-untyped]

    kept: Tensor = batched_nms(boxes, confidence, label, iou)
    return kept


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return list(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _load(model: str, revision: str | None) -> tuple[list[Path], str | None, Any, Any]:
    """The weights files, the hub's commit, the processor, and the network on the CPU."""
    from transformers import AutoConfig, AutoModelForZeroShotObjectDetection, AutoProcessor

    folder, files, found = fetch("detection model", model, revision)
    try:
        kind = AutoConfig.from_pretrained(folder).model_type
        if kind not in THRESHOLDS:
            raise UserError(f"The model {model!r} is a {kind}; count takes {', '.join(THRESHOLDS)}, such as {MODEL}.")
        with plain_tensors():
            processor = AutoProcessor.from_pretrained(folder)
            network = AutoModelForZeroShotObjectDetection.from_pretrained(folder, dtype=torch.float32)
    except UserError:
        raise
    except Exception as error:  # transformers, json and safetensors each raise their own
        raise UserError(why_not("detection model", model, error)) from error
    return files, found, processor, network

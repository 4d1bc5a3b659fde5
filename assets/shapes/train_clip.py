"""Trains `shapes-clip`: a small CLIP in open_clip's format, the learned verifier of the shapes world.

    python -m imgscale.assets.shapes.train_clip [--device cuda] [--steps 5000]

Every batch holds families: a scene and two scenes one mistake away, all rendered, so that the symmetric contrastive
loss has hard negatives on both sides; further mistaken captions join the image-to-text side. Pairs that happen to be
true (the oracle knows) are neither positive nor negative. A linear probe that reads counts and mean positions off the
image embedding speeds up the start; it is not exported. Half of the images are softened the way a flow model's
estimates x0 are. Writes `shapes-clip/`, in float16.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import torch
from open_clip.model import CLIP
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTokenizer

from imgscale.assets.shapes.text import LENGTH, write_tokenizer
from imgscale.assets.shapes.training import HERE, arguments, run, to_tensor
from imgscale.assets.shapes.world import (
    COLOURS,
    SHAPES,
    SIZE,
    Scene,
    hard_negatives,
    held_out,
    render,
    training_scene,
)
from imgscale.verifiers.shapes import Object, judge, read

FOLDER = HERE / "shapes-clip"
KINDS = [(s, c) for s in SHAPES for c in COLOURS]
MEAN, STD = [0.85] * 3, [0.25] * 3


def config(vocabulary: int) -> dict[str, Any]:
    """open_clip's `model_cfg`."""
    return {
        "embed_dim": 192,
        "vision_cfg": {"image_size": SIZE, "layers": [2, 2, 2, 1], "width": 20},
        "text_cfg": {
            "context_length": LENGTH,
            "vocab_size": vocabulary,
            "hf_tokenizer_name": "shapes-clip",
            "width": 128,
            "heads": 4,
            "layers": 2,
        },
    }


class Trained(nn.Module):
    """The model and the probe that trains beside it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        cfg = config(vocabulary)
        self.clip = CLIP(cfg["embed_dim"], cfg["vision_cfg"], cfg["text_cfg"])
        self.clip.visual.to(memory_format=torch.channels_last)  # several times faster on a CPU
        self.probe = nn.Linear(cfg["embed_dim"], len(KINDS) * 8)  # for each kind of object: counts 0 to 5, x, y


def families(seed: int, step: int, n: int, members: int = 3) -> tuple[list[Scene], Tensor, list[Scene]]:
    """``n`` families of training scenes, their renders, and more captions one mistake away from one of them."""
    rng = np.random.default_rng((seed, step))
    scenes: list[Scene] = []
    others: list[Scene] = []
    images = []
    for _ in range(n):
        base = training_scene(rng)
        near = [s for s in hard_negatives(base, rng).values() if not held_out(s)]
        picked = rng.permutation(len(near))[: members - 1]
        for scene in [base, *(near[i] for i in picked)]:
            try:
                images.append(render(scene, rng))
            except RuntimeError:  # no room
                continue
            scenes.append(scene)
            wrong = [s for s in hard_negatives(scene, rng).values() if not held_out(s)]
            others += [wrong[i] for i in rng.permutation(len(wrong))[:2]]
    return scenes, to_tensor(images), others


def truths(captions: list[str], scenes: dict[str, Scene], seen: list[list[Object]]) -> Tensor:
    """Which caption is true of which image, bool ``(images, captions)``."""
    held = torch.zeros(len(seen), len(captions), dtype=torch.bool)
    counts = [tuple(sorted((o.shape or "") for o in objects)) for objects in seen]
    for j, caption in enumerate(captions):
        scene = scenes[caption]
        shapes = tuple(sorted(g.shape for g in scene.groups for _ in range(g.count)))
        for i, objects in enumerate(seen):
            if counts[i] == shapes:
                held[i, j] = judge(scene, objects) == 1
    return held


def soften(x: Tensor, chance: torch.Generator, share: float = 0.5) -> Tensor:
    """A share of the images blurred, ghosted by a shifted copy, faded, tinted and noisy, by random amounts."""
    n = len(x)

    def amount(top: float, share: float) -> Tensor:
        on = torch.rand(n, generator=chance) < share
        return (top * on * torch.rand(n, generator=chance))[:, None, None, None].to(x.device)

    soft = (torch.rand(n, generator=chance) < share).to(x.device)[:, None, None, None]
    dx, dy = (int(v) for v in torch.randint(-4, 5, (2,), generator=chance))
    y = x.lerp(x.roll((dy, dx), (2, 3)), amount(0.5, 0.4))
    sigma = amount(2.2, 0.7).flatten() + 1e-3
    offsets = torch.arange(-5, 6, device=x.device)
    kernel = torch.softmax(-(offsets**2) / (2 * sigma[:, None] ** 2), 1).repeat_interleave(3, 0)[:, None]
    y = nn.functional.pad(y.reshape(1, 3 * n, SIZE, SIZE), (5, 5, 5, 5), mode="replicate")
    y = nn.functional.conv2d(y, kernel[..., None], groups=3 * n)
    y = nn.functional.conv2d(y, kernel[..., None, :], groups=3 * n).reshape(n, 3, SIZE, SIZE)
    y = y.lerp(y.amax((2, 3), keepdim=True), amount(0.5, 0.5))
    y = y + (torch.rand(n, 3, 1, 1, generator=chance).to(x.device) - 0.5) * amount(0.12, 0.5)
    y = y + torch.randn(x.shape, generator=chance).to(x.device) * amount(0.08, 0.5)
    return torch.where(soft, y.clamp(0, 1), x)


def probe_loss(out: Tensor, seen: list[list[Object]]) -> Tensor:
    """Cross-entropy of the counts plus the error of the mean positions, of ``out`` (images, kinds * 8)."""
    counts = torch.zeros(len(seen), len(KINDS))
    places = torch.zeros(len(seen), len(KINDS), 2)
    for i, objects in enumerate(seen):
        for o in objects:
            k = KINDS.index((o.shape or o.likely[0], o.colour or o.likely[1]))
            counts[i, k] += 1
            places[i, k] += torch.tensor([o.x, o.y]) / (SIZE / 2) - 1
    counts, places = counts.to(out.device), places.to(out.device)
    there = counts > 0
    out = out.unflatten(1, (len(KINDS), 8))
    error = nn.functional.cross_entropy(
        out[..., :6].flatten(0, 1), counts.long().clamp(max=5).flatten(), reduction="none"
    )
    count = (error * torch.where(there, 1.0, 0.1).flatten()).sum() / len(seen)
    place = (out[..., 6:] - places / counts.clamp(min=1)[..., None])[there].square().mean()
    return count + place


def main() -> None:
    args = arguments(__doc__, steps=5000, batch=16, lr=1.5e-3, log_every=50, save_every=250, probe=0.3)
    tokenizers = HERE / "checkpoints" / "tokenizer"
    write_tokenizer(tokenizers)
    tokenizer = CLIPTokenizer.from_pretrained(tokenizers)
    vocabulary = json.loads((tokenizers / "vocab.json").read_text())
    model = Trained(len(vocabulary))
    print({k: sum(p.numel() for p in m.parameters()) for k, m in model.named_children()}, flush=True)
    mean, std = (torch.tensor(v, device=args.device)[:, None, None] for v in (MEAN, STD))

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        scenes, clean, others = families(args.seed, step, args.batch)
        chance = torch.Generator().manual_seed(args.seed * 10**7 + step)
        seen = read(clean)
        x = soften(clean.to(args.device), chance).contiguous(memory_format=torch.channels_last)
        by_caption = {str(s): s for s in [*scenes, *others]}
        captions = list(by_caption)
        own = torch.tensor([captions.index(str(s)) for s in scenes])
        hidden = truths(captions, by_caption, seen)
        hidden[torch.arange(len(scenes)), own] = False
        ids = tokenizer(captions, padding="max_length", max_length=LENGTH, return_tensors="pt").input_ids
        raw = model.clip.encode_image((x - mean) / std)
        images = nn.functional.normalize(raw, dim=-1)
        texts = nn.functional.normalize(model.clip.encode_text(ids.to(args.device)), dim=-1)
        scale = model.clip.logit_scale.exp().clamp(max=100)
        logits = (scale * images @ texts.T).masked_fill(hidden.to(args.device), -torch.inf)
        own = own.to(args.device)
        rows = torch.arange(len(scenes), device=args.device)
        # The same caption may have several images; each of them is ranked against the images it isn't true of.
        columns = logits.T[own]
        columns = columns.masked_fill((own[:, None] == own[None]) & (rows[:, None] != rows), -torch.inf)
        to_text = nn.functional.cross_entropy(logits, own)
        to_image = nn.functional.cross_entropy(columns, rows)
        probe = probe_loss(model.probe(raw), seen)
        right = (logits.argmax(1) == own).float().mean(), (columns.argmax(1) == rows).float().mean()
        return (to_text + to_image) / 2 + args.probe * probe, {
            "to_text": to_text.item(),
            "to_image": to_image.item(),
            "probe": probe.item(),
            "right_text": right[0].item(),
            "right_image": right[1].item(),
            "scale": scale.item(),
        }

    def finish() -> None:
        export(model.clip, len(vocabulary))
        shutil.copy(HERE / "logs" / "shapes-clip.jsonl", FOLDER / "train.jsonl")

    run(args, "shapes-clip", model, loss, finish)


def export(clip: nn.Module, vocabulary: int) -> None:
    """Writes the folder that `open_clip.create_model_and_transforms('local-dir:…')` loads."""
    write_tokenizer(FOLDER)
    preprocess = {
        "mean": MEAN,
        "std": STD,
        "interpolation": "bicubic",
        "resize_mode": "squash",
        "size": [SIZE, SIZE],
    }
    settings = {"model_cfg": config(vocabulary), "preprocess_cfg": preprocess}
    (FOLDER / "open_clip_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    state = {k: (v.half() if v.is_floating_point() else v).cpu().contiguous() for k, v in clip.state_dict().items()}
    save_file(state, FOLDER / "open_clip_model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()

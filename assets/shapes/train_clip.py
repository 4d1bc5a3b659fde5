"""Trains `shapes-clip`: a small CLIP in open_clip's format, the learned verifier of the shapes world.

    python -m imgscale.assets.shapes.train_clip [--device cuda] [--steps 8300] [--start shapes-clip]

Contrastive throughout. Every batch holds families: a scene and two scenes one mistake away, all rendered, so that there
are hard negatives on both sides; further mistaken captions join the side of texts. Pairs that happen to be true (the
oracle knows) are neither positive nor negative.

First the text tower learns against a scholar, a small network that is told what is in the picture; a linear probe makes
the tower tell at each noun, one layer before it sums up, how many of what there are and on which side of a relation:
without it the tower doesn't bind relations. Then the text tower rests, and the image tower learns against it and to
embed as the scholar does; linear probes make its stages tell what they see, which speeds up the start. Scholar and
probes are not exported. At last it sees more of what is hard. More and more images, up to half, are softened the way a
flow model's estimates x0 are. Writes `shapes-clip/`, in float16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_clip.model import CLIP
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTokenizer

from imgscale.assets.shapes.text import ANSWERS, LENGTH, nouns_of, parsed, parsing_loss, write_tokenizer
from imgscale.assets.shapes.training import HERE, arguments, run, to_tensor
from imgscale.assets.shapes.world import (
    COLOURS,
    KINDS,
    SHAPES,
    SIZE,
    TRAIN_SHARE,
    Placed,
    Scene,
    arrange,
    category,
    draw,
    hard_negatives,
    held_out,
    training_scene,
)
from imgscale.verifiers.shapes import Object, judge

FOLDER = HERE / "shapes-clip"
WIDTH = 20  # of the convolutions
MOST = 5  # objects of one kind
TOTAL = 8  # objects of one shape, or at all
REFINED = {"counting": 0.3, "position": 0.1, "attribution": 0.1, "hard": 0.5}  # shares of what is left to learn
FACTS = len(KINDS) * (MOST + 5) + (len(SHAPES) + 1) * (TOTAL + 1)
PROBES, ALIKE = (0.3, 0.1, 0.1, 0.1), 5.0  # weights of the probes' losses, and of likeness to the scholar
GRAMMAR = 1.0  # weight of the text probe's
MEAN, STD = [0.85] * 3, [0.25] * 3


def config(vocabulary: int) -> dict[str, Any]:
    """open_clip's `model_cfg`."""
    return {
        "embed_dim": 256,
        "vision_cfg": {"image_size": SIZE, "layers": [2, 2, 2, 1], "width": WIDTH},
        "text_cfg": {
            "context_length": LENGTH,
            "vocab_size": vocabulary,
            "hf_tokenizer_name": "shapes-clip",
            "width": 128,
            "heads": 4,
            "layers": 3,
            "no_causal_mask": True,  # a noun hears which relation follows it
        },
    }


class Trained(nn.Module):
    """The model and what trains beside it: the scholar, and probes of what the stages see at each of their places.

    After the second stage (8 x 8 places): the kind of the object centred there, or none. After the third (4 x 4), the
    fourth (2 x 2), and of the embedding: for each kind, how many are centred there, and where.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        cfg = config(vocabulary)
        self.clip = CLIP(cfg["embed_dim"], cfg["vision_cfg"], cfg["text_cfg"])
        self.clip.visual.to(memory_format=torch.channels_last)  # several times faster on a CPU
        answers = (len(KINDS) + 1, *[len(KINDS) * (MOST + 3)] * 3)
        widths = (8 * WIDTH, 16 * WIDTH, 32 * WIDTH, cfg["embed_dim"])
        self.probes = nn.ModuleList(nn.Linear(w, a) for w, a in zip(widths, answers, strict=True))
        self.scholar = nn.Sequential(nn.Linear(FACTS, 768), nn.GELU(), nn.Linear(768, cfg["embed_dim"]))
        self.grammar = nn.Linear(cfg["text_cfg"]["width"], sum(ANSWERS))

    def load(self, folder: Path) -> None:
        """Takes a checkpoint's average, or the image tower of a folder, but for a last layer of another width."""
        if folder.suffix == ".pt":
            self.load_state_dict(torch.load(folder, weights_only=True)["average"])
            return
        saved = load_file(folder / "open_clip_model.safetensors")
        own = self.clip.state_dict()
        same = {k: v.float() for k, v in saved.items() if k.startswith("visual.") and v.shape == own[k].shape}
        self.clip.load_state_dict(own | same)

    def texts(self, ids: Tensor, nouns: Tensor) -> tuple[Tensor, Tensor]:
        """Text embeddings ``(n, d)`` of tokens ``(n, LENGTH)``; what the probe says at ``nouns``: (caption, place)."""
        kept: list[Tensor] = []
        block = self.clip.transformer.resblocks[-2]
        handle = block.register_forward_hook(lambda *call: kept.append(call[2]))
        embedded = nn.functional.normalize(self.clip.encode_text(ids), dim=-1)
        handle.remove()
        return embedded, self.grammar(kept[0][nouns[:, 0], nouns[:, 1]])

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Image embeddings ``(n, d)`` and the probes' answers ``(n, side, side, …)``."""
        kept: list[Tensor] = []
        stages = (getattr(self.clip.visual, f"layer{i}") for i in (2, 3, 4))
        handles = [stage.register_forward_hook(lambda *call: kept.append(call[2])) for stage in stages]
        raw = self.clip.encode_image(images)
        for handle in handles:
            handle.remove()
        seen = [*kept, raw[..., None, None]]
        return raw, [probe(x.movedim(1, -1)) for probe, x in zip(self.probes, seen, strict=True)]


def families(
    seed: int, step: int, n: int, share: Mapping[str, float], members: int = 3
) -> tuple[list[Scene], list[list[Placed]], list[int], list[Scene]]:
    """``n`` families of training scenes, their objects and backgrounds, and more captions one mistake from them."""
    rng = np.random.default_rng((seed, step))
    scenes: list[Scene] = []
    others: list[Scene] = []
    pictures: list[list[Placed]] = []
    backgrounds: list[int] = []
    for _ in range(n):
        base = varied(training_scene(rng, share), rng)
        near = [s for s in hard_negatives(base, rng).values() if not held_out(s)]
        picked = rng.permutation(len(near))[: members - 1]
        for scene in [base, *(near[i] for i in picked)]:
            try:
                pictures.append(arrange(scene, rng))
            except RuntimeError:  # no room
                continue
            scenes.append(scene)
            backgrounds.append(int(rng.integers(236, 256)))
            wrong = [s for s in hard_negatives(scene, rng).values() if not held_out(s)]
            others += [wrong[i] for i in rng.permutation(len(wrong))[:3]]
    return scenes, pictures, backgrounds, others


def varied(scene: Scene, rng: np.random.Generator) -> Scene:
    """In half of the cases a caption of a sort that the prompts don't have: coloured counts, counts without colours.

    There are but 16 captions such as "five stars", too few to learn from that five and stars are two things.
    """
    first = scene.groups[0]
    if rng.random() < 0.5 and category(scene) == "counting":
        return _unless_held_out(Scene((replace(first, colour=list(COLOURS)[rng.integers(6)]),)), scene)
    if rng.random() < 0.5 and category(scene) == "hard" and len({g.shape for g in scene.groups}) == len(scene.groups):
        return _unless_held_out(Scene(tuple(replace(g, colour=None) for g in scene.groups), scene.relation), scene)
    return scene


def _unless_held_out(scene: Scene, other: Scene) -> Scene:
    return other if held_out(scene) else scene


def as_seen(placed: list[Placed]) -> list[Object]:
    """What the oracle reads off a picture of these objects."""
    return [Object(o.shape, o.colour, o.x, o.y, o.r**2, 1.0, (o.shape, o.colour)) for o in placed]


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


def probe_losses(answers: list[Tensor], seen: list[list[Object]]) -> list[Tensor]:
    """The error of each probe, summed over an image, of answers ``(n, side, side, …)``."""
    return [kind_loss(answers[0], seen), *(count_loss(a, seen) for a in answers[1:])]


def kind_loss(answer: Tensor, seen: list[list[Object]]) -> Tensor:
    """Cross-entropy of the kind that is centred at each place; nothing, the usual case, weighs a tenth."""
    side = answer.shape[1]
    target = torch.zeros(answer.shape[:3], dtype=torch.long)
    for i, (k, y, x) in objects(seen):
        target[i, int(y * side), int(x * side)] = 1 + k
    target = target.to(answer.device)
    error = nn.functional.cross_entropy(answer.movedim(-1, 1), target, reduction="none")
    return (error * torch.where(target > 0, 1.0, 0.1)).sum() / len(seen)


def count_loss(answer: Tensor, seen: list[list[Object]]) -> Tensor:
    """Cross-entropy of how many of each kind are centred at each place, and the squared error of where in the image."""
    side = answer.shape[1]
    answer = answer.unflatten(-1, (len(KINDS), MOST + 3))
    counts, places = torch.zeros(answer.shape[:-1]), torch.zeros(*answer.shape[:-1], 2)
    for i, (k, y, x) in objects(seen):
        counts[i, int(y * side), int(x * side), k] += 1
        places[i, int(y * side), int(x * side), k] += torch.tensor([2 * y - 1, 2 * x - 1])
    counts, places = counts.to(answer.device), places.to(answer.device)
    there = counts > 0
    error = nn.functional.cross_entropy(
        answer[..., : MOST + 1].movedim(-1, 1), counts.long().clamp(max=MOST), reduction="none"
    )
    count = (error * torch.where(there, 1.0, 0.1)).sum() / len(seen)
    return count + 10 * (answer[..., MOST + 1 :] - places / counts.clamp(min=1)[..., None])[there].square().mean()


def objects(seen: list[list[Object]]) -> Iterator[tuple[int, tuple[int, float, float]]]:
    """Image by image: kind, and centre as shares of height and width."""
    for i, image in enumerate(seen):
        for o in image:
            y, x = (min(max(v / SIZE, 0.0), 1 - 1e-6) for v in (o.y, o.x))
            yield i, (KINDS.index((o.shape or o.likely[0], o.colour or o.likely[1])), y, x)


def contrast(logits: Tensor, own: Tensor, true: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Symmetric contrastive loss of ``logits`` (images, captions) and how often the right one of either is first.

    Args:
        logits: Scaled cosines.
        own: Each image's caption. It may have several images; each of them is ranked against those it isn't true of.
        true: Which captions are true of which images.
    """
    rows = torch.arange(len(own), device=own.device)
    other = true.clone()
    other[rows, own] = False
    logits = logits.masked_fill(other, -torch.inf)
    columns = logits.T[own]
    columns = columns.masked_fill((own[:, None] == own[None]) & (rows[:, None] != rows), -torch.inf)
    to_text, to_image = nn.functional.cross_entropy(logits, own), nn.functional.cross_entropy(columns, rows)
    return (to_text + to_image) / 2, {
        "to_text": to_text.item(),
        "to_image": to_image.item(),
        "right_text": (logits.argmax(1) == own).float().mean().item(),
        "right_image": (columns.argmax(1) == rows).float().mean().item(),
    }


def facts(seen: list[list[Object]]) -> Tensor:
    """What the scholar is told, ``(n, FACTS)``: each kind's count and extent, each shape's count, and the total's."""
    told = torch.zeros(len(seen), len(KINDS), MOST + 5)
    totals = torch.zeros(len(seen), len(SHAPES) + 1, TOTAL + 1)
    for i, image in enumerate(seen):
        of_kind: dict[int, list[tuple[float, float]]] = {}
        for _, (k, y, x) in objects([image]):
            of_kind.setdefault(k, []).append((2 * y - 1, 2 * x - 1))
        for k, centres in of_kind.items():
            told[i, k, min(MOST, len(centres))] = 1
            ys, xs = zip(*centres, strict=True)
            told[i, k, MOST + 1 :] = torch.tensor([min(ys), max(ys), min(xs), max(xs)])
        for j, shape in enumerate(SHAPES):
            totals[i, j, min(TOTAL, sum(o.shape == shape for o in image))] = 1
        totals[i, -1, min(TOTAL, len(image))] = 1
    return torch.cat([told.flatten(1), totals.flatten(1)], 1)


def main() -> None:
    args = arguments(
        __doc__,
        steps=8300,
        study=3000,
        refine=5800,
        decay=0.4,
        batch=16,
        lr=1.5e-3,
        log_every=50,
        save_every=250,
        start="",
    )
    tokenizers = HERE / "checkpoints" / "tokenizer"
    write_tokenizer(tokenizers)
    tokenizer = CLIPTokenizer.from_pretrained(tokenizers)
    vocabulary = json.loads((tokenizers / "vocab.json").read_text())
    nouns = nouns_of(vocabulary)
    model = Trained(len(vocabulary))
    if args.start:
        model.load(HERE / args.start)
    print({k: sum(p.numel() for p in m.parameters()) for k, m in model.named_children()}, flush=True)
    mean, std = (torch.tensor(v, device=args.device)[:, None, None] for v in (MEAN, STD))

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        studying = step < args.study
        scenes, pictures, backgrounds, others = families(
            args.seed, step, args.batch, REFINED if step >= args.refine else TRAIN_SHARE
        )
        seen = [as_seen(placed) for placed in pictures]
        by_caption = {str(s): s for s in [*scenes, *others]}
        captions = list(by_caption)
        own = torch.tensor([captions.index(str(s)) for s in scenes])
        true = truths(captions, by_caption, seen).to(args.device)
        ids = tokenizer(captions, padding="max_length", max_length=LENGTH, return_tensors="pt").input_ids
        places, asked = parsed(list(by_caption.values()), ids, nouns)
        with torch.set_grad_enabled(studying):
            texts, said = model.texts(ids.to(args.device), places.to(args.device))
            taught = nn.functional.normalize(model.scholar(facts(seen).to(args.device)), dim=-1)
        scale = model.clip.logit_scale.exp().clamp(max=100)
        if studying:
            grammar = parsing_loss(said, asked.to(args.device))
            value, parts = contrast(scale * taught @ texts.T, own.to(args.device), true)
            return value + GRAMMAR * grammar, parts | {"grammar": grammar.item()}
        chance = torch.Generator().manual_seed(args.seed * 10**7 + step)
        softened = 0.5 * min(1.0, (step - args.study) / (0.3 * (args.steps - args.study)))
        clean = to_tensor([draw(*picture) for picture in zip(pictures, backgrounds, strict=True)])
        x = soften(clean.to(args.device), chance, softened).contiguous(memory_format=torch.channels_last)
        raw, answers = model((x - mean) / std)
        images = nn.functional.normalize(raw, dim=-1)
        value, parts = contrast(scale * images @ texts.T, own.to(args.device), true)
        alike = (images * taught).sum(-1).mean()
        probes = probe_losses(answers, seen)
        value = value + ALIKE * (1 - alike) + sum(w * p for w, p in zip(PROBES, probes, strict=True))
        return value, parts | {"alike": alike.item(), **{f"probe_{i}": p.item() for i, p in enumerate(probes)}}

    def finish() -> None:
        export(model.clip, len(vocabulary))
        shutil.copy(HERE / "logs" / "shapes-clip.jsonl", FOLDER / "train.jsonl")

    run(args, "shapes-clip", model, loss, finish, phases=(args.study, args.refine))


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

"""Counting: what prompts ask for, and detections of tiny random models of both real classes against plain loops."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from imgscale import registry
from imgscale.errors import UserError
from imgscale.verifiers._counts import given, parse, singular
from imgscale.verifiers.count import Count

GENEVAL = Path(__file__).parents[2] / "shared" / "data" / "geneval" / "evaluation_metadata.jsonl"
WORDS = "red apple cat dog bench traffic light a photo of three two no and ' - . ?".split()

# -------------------------------------------------------------------------------------------------- what is asked for

ASKED: dict[str, dict[str, int]] = {
    "three red apples and two cats": {"apple": 3, "cat": 2},
    "a dog": {"dog": 1},
    "An Owl.": {"owl": 1},
    "no cats": {"cat": 0},
    "two dogs without a leash": {"dog": 2, "leash": 0},
    "zero birds": {"bird": 0},
    "5 zebras": {"zebra": 5},
    "exactly two bananas": {"banana": 2},
    "twenty-one candles on a cake": {"candle": 21, "cake": 1},
    "twenty one cats": {"cat": 21},
    "two hundred birds": {"bird": 200},
    "two dozen eggs and a dozen buns": {"egg": 24, "bun": 12},
    "a pair of shoes": {"shoe": 2},
    "a couple of dogs playing in a park": {"dog": 2, "park": 1},
    "both cats": {"cat": 2},
    "a photo of a bench": {"bench": 1},
    "a group of seven people": {"person": 7},
    "two big red apples and three small green apples": {"apple": 5},
    "an orange and two orange cats": {"orange": 1, "cat": 2},
    "three dogs play chess": {"dog": 3},
    "a dog barks at two cats": {"dog": 1, "cat": 2},
    "five teddy bears sitting on a bench": {"teddy bear": 5, "bench": 1},
    "a fluffy white cat sleeping on a red sofa next to two potted plants": {"cat": 1, "sofa": 1, "potted plant": 2},
    "four brightly painted eggs": {"painted egg": 4},
    "two wedding rings and a frying pan": {"wedding ring": 2, "frying pan": 1},
    "a three-legged stool": {"stool": 1},
    "two double-decker buses": {"bus": 2},
    "three sports balls, 4 tennis rackets": {"sports ball": 3, "tennis racket": 4},
    "a light blue car under three traffic lights": {"car": 1, "traffic light": 3},
    "six geese, four mice, two knives and 3 potatoes": {"goose": 6, "mouse": 4, "knife": 2, "potato": 3},
    "eight red circles above three blue squares": {"circle": 8, "square": 3},
    "two sheep": {"sheep": 2},
    "in 2024, two men, 4k, 35mm lens": {"man": 2},
    "the moon": {},
    "cats on the roof": {},
    "a beautiful sunny day": {},
    "a photo": {},
    "": {},
    "?! 立方体 7": {},
}


@pytest.mark.parametrize("prompt", ASKED)
def test_what_a_prompt_asks_for(prompt: str) -> None:
    found = parse(prompt)
    assert found == ASKED[prompt] and list(found) == list(ASKED[prompt])


@pytest.mark.skipif(not GENEVAL.is_file(), reason="GenEval's prompts aren't here")
def test_agrees_with_geneval() -> None:
    """All of its prompts, those that count and those that don't."""
    rows = [json.loads(line) for line in GENEVAL.read_text().splitlines()]
    assert sum(row["tag"] == "counting" for row in rows) == 80
    for row in rows:
        wanted: dict[str, int] = {}
        for each in row["include"]:
            wanted[each["class"]] = wanted.get(each["class"], 0) + each["count"]
        assert parse(row["prompt"]) == wanted, row["prompt"]


@pytest.mark.parametrize(
    ("plural", "one"),
    [
        *[("cats", "cat"), ("buses", "bus"), ("boxes", "box"), ("benches", "bench"), ("benchs", "bench")],
        *[("glasses", "glass"), ("vases", "vase"), ("horses", "horse"), ("butterflies", "butterfly"), ("ties", "tie")],
        *[("tomatoes", "tomato"), ("shoes", "shoe"), ("wolves", "wolf"), ("gloves", "glove"), ("women", "woman")],
        *[("children", "child"), ("fish", "fish"), ("scissors", "scissors"), ("skis", "skis"), ("taxis", "taxi")],
        *[
            ("bus", "bus"),
            ("glass", "glass"),
            ("cactus", "cactus"),
            ("tennis", "tennis"),
            ("dog", "dog"),
            ("tvs", "tv"),
        ],
    ],
)
def test_plurals(plural: str, one: str) -> None:
    assert singular(plural) == one


@pytest.mark.parametrize("text", ["apple:3,cat:2", "(apple:3, cat:2)", " Apple : 3 , cat:2 "])
def test_counts_can_be_given(text: str) -> None:
    assert given(text) == {"apple": 3, "cat": 2}
    assert given("hot dog:0") == {"hot dog": 0}


@pytest.mark.parametrize("text", ["", "apple", "apple:three", "apple:-1", "apple:3;cat:2", "a.b:1", "3:apple", ":3"])
def test_counts_in_another_form_are_explained(text: str) -> None:
    with pytest.raises(UserError, match=r"counts can't be .*; give what and how many, such as \(apple:3,cat:2\)"):
        given(text)


# ------------------------------------------------------------------------------------------------------------- models


def wild(model: Any, path: Path, processor: Any, spread: float) -> None:
    """Random models find the same in every image; wilder ones don't."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.1 if "box" in name else spread)
            elif "box" in name and len(p) == 4:  # larger boxes, so that some overlap
                p[2:] += 3 if "box_head" in name else 1
    model.eval().save_pretrained(path)
    processor.save_pretrained(path)


def grounding_dino(path: Path) -> None:
    from transformers import (
        BertTokenizer,
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        GroundingDinoImageProcessor,
        GroundingDinoProcessor,
    )

    # Its delimiters stand where they stand for the real model.
    known = {"[CLS]": 101, "[SEP]": 102, ".": 1012, "?": 1029, "[PAD]": 0, "[UNK]": 100, "[MASK]": 103}
    words = [f"[unused{i}]" for i in range(1100)]
    for word, place in known.items():
        words[place] = word
    words += [word for word in WORDS if word not in known]
    (path / "vocab.txt").write_text("\n".join(words))
    swin = {"model_type": "swin", "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}
    bert = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = GroundingDinoConfig(
        backbone_config={**swin, "image_size": 64, "out_indices": [2, 3, 4]},
        text_config={"model_type": "bert", **bert, "vocab_size": len(words)},
        num_queries=30,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    images = GroundingDinoImageProcessor(size={"shortest_edge": 128, "longest_edge": 192})
    processor = GroundingDinoProcessor(
        images,
        BertTokenizer(vocab_file=str(path / "vocab.txt"), vocab=dict(zip(words, range(len(words)), strict=True))),
    )
    wild(GroundingDinoForObjectDetection(config), path, processor, 0.3)


def owlv2(path: Path) -> None:
    from transformers import CLIPTokenizer, Owlv2Config, Owlv2ForObjectDetection, Owlv2ImageProcessor, Owlv2Processor

    letters = "abcdefghijklmnopqrstuvwxyz'-."
    tokens = ["!", *letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], pad_token="!", model_max_length=40)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Owlv2Config(
        text_config={
            **small,
            "vocab_size": len(tokens),
            "max_position_embeddings": 40,
            "bos_token_id": vocabulary["<|startoftext|>"],
            "eos_token_id": vocabulary["<|endoftext|>"],
        },
        vision_config={**small, "image_size": 64, "patch_size": 16},
        projection_dim=16,
    )
    images = Owlv2ImageProcessor(size={"height": 64, "width": 64})
    wild(Owlv2ForObjectDetection(config), path, Owlv2Processor(images, tokenizer), 0.3)


MODELS: dict[str, Callable[[Path], None]] = {"grounding-dino": grounding_dino, "owlv2": owlv2}
THRESHOLD = {"grounding-dino": 0.6, "owlv2": 0.5}
PROMPTS = ["two cats and a dog", "three red apples", "two cats and a dog", "no dogs, a cat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, write in MODELS.items():
        write(made[name])
    return made


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Count]:
    return {name: Count(model=str(folder), threshold=THRESHOLD[name]) for name, folder in folders.items()}


def pictures(n: int, h: int = 48, w: int = 64) -> Tensor:
    """Noise on the 8-bit grid, so that a PIL image holds exactly the same."""
    return torch.randint(0, 256, (n, 3, h, w)) / 255


def overlap(a: list[float], b: list[float]) -> float:
    def area(x0: float, y0: float, x1: float, y1: float) -> float:
        return max(0.0, x1 - x0) * max(0.0, y1 - y0)

    both = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    return both / (area(*a) + area(*b) - both)


def found(name: str, folder: Path, image: Tensor, classes: list[str]) -> list[tuple[int, float, list[float]]]:
    """Class, confidence and corners of all boxes of one image above the threshold, as the model cards find them."""
    from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForZeroShotObjectDetection.from_pretrained(folder, dtype=torch.float32)
    picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    if name == "owlv2":
        texts = [[f"a photo of a {c}" for c in classes]]
        inputs = processor(text=texts, images=picture, return_tensors="pt")
        with torch.no_grad():
            outputs = model(**inputs)
        side = max(picture.size)
        result = processor.post_process_grounded_object_detection(
            outputs, threshold=THRESHOLD[name], target_sizes=torch.tensor([(side, side)])
        )[0]
        labels = result["labels"].tolist()
        return list(zip(labels, result["scores"].tolist(), result["boxes"].tolist(), strict=True))
    inputs = processor(text=[classes], images=picture, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**inputs)
    tokens = processor.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    boxes = []
    for logits, (x, y, w, h) in zip(outputs.logits[0].tolist(), outputs.pred_boxes[0].tolist(), strict=True):
        best = [-math.inf] * len(classes)
        k = 0
        for token, logit in zip(tokens, logits, strict=False):  # logits are padded
            if token == ".":
                k += 1
            elif token not in ("[CLS]", "[SEP]"):
                best[k] = max(best[k], logit)
        label = max(range(len(classes)), key=lambda c: best[c])
        confidence = 1 / (1 + math.exp(-best[label]))
        if confidence > THRESHOLD[name]:
            boxes.append((label, confidence, [x - w / 2, y - h / 2, x + w / 2, y + h / 2]))
    return boxes


def counted(boxes: list[tuple[int, float, list[float]]], classes: list[str], iou: float = 0.5) -> list[int]:
    """How many of each class are left when the less confident ones of overlapping pairs are dropped, one by one."""
    kept: list[tuple[int, list[float]]] = []
    for label, _, box in sorted(boxes, key=lambda b: -b[1]):
        if all(other != label or overlap(box, corners) <= iou for other, corners in kept):
            kept.append((label, box))
    return [sum(label == k for label, _ in kept) for k in range(len(classes))]


# ------------------------------------------------------------------------------------- against plain computations


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("classes", [["cat", "dog"], ["dog"], ["traffic light", "cat", "red dog"]], ids=str)
def test_counts_what_a_plain_loop_counts(
    name: str, classes: list[str], folders: dict[str, Path], models: dict[str, Count]
) -> None:
    images = pictures(4)
    boxes = [found(name, folders[name], image, classes) for image in images]
    expected = [counted(each, classes) for each in boxes]
    assert models[name].counts(images, classes).tolist() == expected
    assert sum(map(sum, expected)) < sum(map(len, boxes)), "nothing was suppressed, which proves little"
    assert len({*map(tuple, expected)}) > 1, "all images have the same counts, which proves little"


@pytest.mark.parametrize("name", MODELS)
def test_the_reward_is_minus_the_squared_errors(name: str, models: dict[str, Count]) -> None:
    """Prompts with different classes, and different numbers of one class, in one batch."""
    images = pictures(4)
    scores = models[name](images, PROMPTS)
    expected = []
    for image, prompt in zip(images, PROMPTS, strict=True):
        asked = parse(prompt)
        seen = models[name].counts(image[None], list(asked))[0].tolist()
        expected.append(-sum((a - b) ** 2 for a, b in zip(seen, asked.values(), strict=True)))
    assert scores.dtype == torch.float32 and scores.tolist() == expected and len({*expected}) > 1


@pytest.mark.parametrize("name", MODELS)
def test_right_counts_reach_the_top_of_the_range(name: str, folders: dict[str, Path]) -> None:
    images = pictures(1)
    plain = Count(model=str(folders[name]), threshold=THRESHOLD[name])
    n = int(plain.counts(images, ["cat"])[0, 0])
    right = Count(model=str(folders[name]), threshold=THRESHOLD[name], counts=f"cat:{n}")
    assert right.range == (-math.inf, 0.0) and float(right(images, ["anything"])) == 0.0
    assert math.copysign(1, float(right(images, ["anything"]))) == 1  # −0 would be printed as such
    assert not right.reads_prompt and plain.reads_prompt
    assert right(images, [f"{n + 2} cats"]).item() == 0
    assert float(plain(images, [f"{n + 2} cats"])) == -4


@pytest.mark.parametrize("name", MODELS)
def test_one_pass_for_each_list_of_classes(
    name: str, models: dict[str, Count], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    forward = models[name].network.module.forward

    def watched(**inputs: Any) -> Any:
        seen.append(len(inputs["pixel_values"]))
        return forward(**inputs)

    monkeypatch.setattr(models[name].network.module, "forward", watched)
    models[name](pictures(4), PROMPTS)
    assert seen == [2, 1, 1]  # cat and dog; apple; dog and cat


def test_boxes_of_one_image_or_class_do_not_suppress_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cats at one place are one, but a cat and a dog there are two; and other images have theirs."""
    count = Count.__new__(Count)
    count.threshold, count.iou = 0.5, 0.5

    class Here:
        def on(self, near: Any) -> Any:
            import contextlib

            return contextlib.nullcontext(torch.device("cpu"))

    confidence = torch.tensor([[[0.9, 0.1], [0.8, 0.2], [0.1, 0.7], [0.6, 0.3], [0.5, 0.4]]] * 2)
    here, far = [0.0, 0.0, 0.4, 0.4], [0.6, 0.6, 1.0, 1.0]
    boxes = torch.tensor([[here, here, here, far, far]] * 2)
    monkeypatch.setattr(count, "network", Here(), raising=False)
    monkeypatch.setattr(count, "_detect", lambda *_: (confidence, boxes))
    assert count.counts(pictures(2), ["cat", "dog"]).tolist() == [[2, 1], [2, 1]]
    count.iou = 1.0
    assert count.counts(pictures(2), ["cat", "dog"]).tolist() == [[3, 1], [3, 1]]
    count.threshold = 0.65
    assert count.counts(pictures(2), ["cat", "dog"]).tolist() == [[2, 1], [2, 1]]


# ----------------------------------------------------------------------------------------------------- conformance


@pytest.mark.parametrize("name", MODELS)
def test_shape_order_and_batch(name: str, models: dict[str, Count]) -> None:
    images = pictures(6)
    prompts = [PROMPTS[i % 4] for i in range(6)]
    together = models[name](images, prompts)
    assert together.isfinite().all() and (together <= 0).all()
    alone = torch.cat([models[name](images[i : i + 1], prompts[i : i + 1]) for i in range(6)])
    assert torch.equal(together, alone)
    order = torch.randperm(6)
    assert torch.equal(models[name](images[order], [prompts[i] for i in order]), together[order])


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 3, 32, 32), torch.full((2, 3, 20, 50), 0.5), torch.ones(2, 3, 99, 33)]
)
@pytest.mark.parametrize("prompt", ["a cat " * 30, "an unheard-of thing and 2 Würfel", "999 bulls' eyes"])
@pytest.mark.parametrize("name", MODELS)
def test_any_image_and_any_count_get_a_number(name: str, images: Tensor, prompt: str, models: dict[str, Count]) -> None:
    assert models[name](images, [prompt, "a cat"]).isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_no_images_are_no_scores(name: str, models: dict[str, Count]) -> None:
    assert models[name](pictures(0), []).shape == (0,)


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_runs(name: str, folders: dict[str, Path]) -> None:
    scores = Count(model=str(folders[name]), dtype="bfloat16")(pictures(2), PROMPTS[:2])
    assert scores.dtype == torch.float32 and scores.isfinite().all()


def test_a_prompt_without_anything_to_count_is_the_users_mistake(
    models: dict[str, Count], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the search at its first batch: no other image of the prompt could be scored, either."""
    monkeypatch.setattr(models["owlv2"], "_detect", None)
    with pytest.raises(UserError, match="'the moon at night' asks for nothing that can be counted; write how many"):
        models["owlv2"](pictures(2), ["a cat", "the moon at night"])


# --------------------------------------------------------------------------------------------------------- loading


def test_names_itself_in_records(folders: dict[str, Path], models: dict[str, Count]) -> None:
    identity = models["owlv2"].identity()
    assert identity["sha256"] == hashlib.sha256((folders["owlv2"] / "model.safetensors").read_bytes()).hexdigest()
    assert identity["threshold"] == 0.5 and identity["iou"] == 0.5 and identity["counts"] is None
    assert identity["preprocessing"]["size"] == {"height": 64, "width": 64}
    assert len(identity["preprocessing"]["image_mean"]) == 3
    json.dumps([identity, models["grounding-dino"].identity()], allow_nan=False)
    assert Count(model=str(folders["grounding-dino"])).threshold == 0.35
    assert Count(model=str(folders["owlv2"])).threshold == 0.2


def test_is_named_with_its_options(folders: dict[str, Path]) -> None:
    entry, options = registry.verifier.resolve("count(counts=(apple:3,cat:2), threshold=0.4, iou=0.7)")
    assert options == {"counts": "(apple:3,cat:2)", "threshold": 0.4, "iou": 0.7}
    made = entry.target(**options, model=str(folders["owlv2"]))
    assert made.identity()["counts"] == {"apple": 3, "cat": 2}


def test_what_cannot_be_loaded_is_explained(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no detection model 'nowhere'; give a folder, or a hub id"):
        Count(model="nowhere")
    with pytest.raises(UserError, match="'IDEA-Research/grounding-dino-tiny' can't be loaded"):
        Count()
    with pytest.raises(UserError, match="threshold can't be 2; give a number from 0 to 1"):
        Count(model=str(folders["owlv2"]), threshold=2)
    with pytest.raises(UserError, match="iou can't be -1"):
        Count(model=str(folders["owlv2"]), iou=-1)
    for file in folders["owlv2"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(UserError, match="is a clip; count takes grounding-dino, mm-grounding-dino, owlv2, owlvit"):
        Count(model=str(tmp_path))


def test_too_many_classes_are_explained(models: dict[str, Count]) -> None:
    many = [f"red {'cat ' * (i % 5)}dog" for i in range(200)]
    with pytest.raises(UserError, match="Grounding DINO can't read 200 classes at once"):
        models["grounding-dino"].counts(pictures(1), many)

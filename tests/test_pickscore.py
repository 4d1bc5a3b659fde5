"""PickScore on tiny random CLIPModels of transformers, against a computation from their parts' definitions."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from imgscale.assets.shapes.text import LENGTH, write_tokenizer
from imgscale.errors import UserError
from imgscale.verifiers.pickscore import PickScore

SIDE = 32
PROMPTS = ["a red circle", "two stars above a square", "a red circle", ""]
PREPARED = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_resize": True,
    "do_center_crop": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
}


def save(path: Path, **text: Any) -> Path:
    """A tiny random checkpoint as transformers writes it, with a tokenizer and settings for images."""
    from transformers import CLIPConfig, CLIPModel

    write_tokenizer(path)
    vocabulary = json.loads((path / "vocab.json").read_text())
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    end = {"bos_token_id": len(vocabulary) - 2, "eos_token_id": len(vocabulary) - 1}
    told = {**small, "vocab_size": len(vocabulary), "max_position_embeddings": LENGTH, **end, **text}
    config = CLIPConfig(
        text_config=told,
        vision_config={**small, "image_size": SIDE, "patch_size": 8},
        projection_dim=24,
        logit_scale_init_value=3.0,
    )
    torch.manual_seed(0)
    model = CLIPModel(config)
    with torch.no_grad():  # unlike what they start from
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        model.logit_scale.fill_(3.0)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("pickscore"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> PickScore:
    return PickScore(model=str(folder))


def pictures(n: int, h: int = SIDE, w: int = SIDE) -> Tensor:
    return torch.randint(0, 256, (n, 3, h, w)) / 255


def expected(folder: Path, images: Tensor, prompts: list[str]) -> Tensor:
    """As PickScore's model card computes it: one image and prompt after another, by transformers' processor."""
    from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

    model = CLIPModel.from_pretrained(folder).eval()
    prepare, tokenise = CLIPImageProcessor.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
    scores = []
    for image, prompt in zip(images, prompts, strict=True):
        picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        inputs = {**prepare(picture, return_tensors="pt"), **tokenise(prompt, return_tensors="pt")}
        with torch.no_grad():
            told = model(**inputs)  # logits are the scaled cosines
        scores.append(told.logits_per_image[0, 0])
    return torch.stack(scores)


@pytest.mark.parametrize(("h", "w", "near"), [(SIDE, SIDE, 1e-4), (70, 45, 0.05), (20, 24, 0.05)])
def test_scores_are_scaled_cosines(folder: Path, tiny: PickScore, h: int, w: int, near: float) -> None:
    images = pictures(4, h, w)
    scores = tiny(images, PROMPTS)
    truth = expected(folder, images, PROMPTS)
    assert scores.dtype == torch.float32
    assert truth.std() > 5 * near
    assert torch.allclose(scores, truth, atol=near)  # PIL rounds to 8 bits between resizing and normalising


def test_old_configurations_sum_up_at_the_highest_token(tmp_path: Path) -> None:
    folder = save(tmp_path, eos_token_id=2, bos_token_id=0)  # as the published PickScore's
    images = pictures(4)
    scores = PickScore(model=str(folder))(images, PROMPTS)
    assert torch.allclose(scores, expected(folder, images, PROMPTS), atol=1e-4)


def test_without_settings_images_are_prepared_as_for_clip_h(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = PickScore(model=str(tmp_path)).preprocessing
    assert settings["size"] == [224, 224] and settings["resize_mode"] == "shortest"
    assert settings["mean"] == [0.48145466, 0.4578275, 0.40821073] and settings["interpolation"] == "bicubic"


def test_order_batch_and_nothing(tiny: PickScore) -> None:
    images = pictures(4)
    together = tiny(images, PROMPTS)
    alone = torch.cat([tiny(images[i : i + 1], PROMPTS[i : i + 1]) for i in range(4)])
    assert torch.allclose(together, alone, atol=1e-4)
    order = [2, 0, 3, 1]
    assert torch.allclose(tiny(images[order], [PROMPTS[i] for i in order]), together[order], atol=1e-4)
    assert tiny(pictures(0), []).shape == (0,)
    with pytest.raises(UserError, match="pickscore scores images"):
        tiny(images, ["a star"])


def test_gradients_are_those_of_finite_differences(folder: Path) -> None:
    with torch.inference_mode():  # as the engine calls it
        verifier = PickScore(model=str(folder))
        verifier(pictures(2), PROMPTS[:2])
    images = pictures(2, 40, 36).requires_grad_()
    verifier(images, PROMPTS[:2]).sum().backward()
    assert images.grad is not None and images.grad.abs().amax((1, 2, 3)).gt(0).all()
    step = 1e-2 * torch.nn.functional.normalize(images.grad.flatten(), dim=0).view_as(images)
    with torch.no_grad():
        rise = (verifier(images + step, PROMPTS[:2]) - verifier(images - step, PROMPTS[:2])).sum()
    assert torch.isclose(rise, 2 * (images.grad * step).sum(), rtol=0.02)


def test_half_precision_compares_in_float32(folder: Path, tiny: PickScore) -> None:
    images = pictures(4)
    scores = PickScore(model=str(folder), dtype="bfloat16")(images, PROMPTS)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, tiny(images, PROMPTS), atol=0.6)  # 3% of the scale


def test_a_prompt_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = PickScore(model=str(folder))
    seen: list[int] = []
    tower = verifier.network.module.text_model
    tower.register_forward_hook(lambda *call: seen.append(len(call[2].pooler_output)))
    for _ in range(3):
        verifier(pictures(4), PROMPTS)
    assert seen == [3]


def test_a_long_prompt_keeps_its_end_token_and_is_warned_of_once(folder: Path) -> None:
    verifier = PickScore(model=str(folder))
    long = "a red circle above " + " and ".join(["two blue squares"] * 4)
    read: list[Tensor] = []
    verifier.network.module.text_model.register_forward_pre_hook(
        lambda module, given, named: read.append(named["input_ids"]), with_kwargs=True
    )
    with pytest.warns(UserWarning, match=f"PickScore reads {LENGTH} tokens of a prompt; 'a red circle above") as caught:
        verifier(pictures(1), [long])
        verifier(pictures(1), [long + " and a star"])
    assert len(caught) == 1
    end = json.loads((folder / "vocab.json").read_text())["<|endoftext|>"]
    assert read[0].shape == (1, LENGTH) and read[0][0, -1] == end and (read[0][0, :-1] != end).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verifier = PickScore(model=str(folder))
        verifier(pictures(1), ["a red circle above " + " and ".join(["a star"] * 3) + " and a"])  # 14 words just fit


def test_names_itself_in_records(folder: Path, tiny: PickScore) -> None:
    identity = tiny.identity()
    assert identity["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert identity["preprocessing"]["mean"] == PREPARED["image_mean"] and identity["context_length"] == LENGTH
    json.dumps(identity)


def test_what_cannot_be_loaded_is_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no PickScore model 'nothing'"):
        PickScore(model="nothing")
    with pytest.raises(UserError, match="PickScore_v1' can't be loaded"):
        PickScore()
    with pytest.raises(UserError, match="has no revisions"):
        PickScore(model=str(folder), revision="main")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PREPARED, "size": {"shortest_edge": 40}}))
    with pytest.raises(UserError, match="crop what they resize to"):
        PickScore(model=str(tmp_path))


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    state = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in state.items() if not k.startswith("text_projection")}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="it has no text_projection.weight"):
        PickScore(model=str(tmp_path))

"""The CLIP verifier, on tiny random open_clip models against plain computations, and on the bundled one."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from imgscale import registry
from imgscale.assets.shapes.evaluate_clip import shares
from imgscale.assets.shapes.text import write_tokenizer
from imgscale.errors import UserError
from imgscale.verifiers.clip import Clip, preprocess

VISION: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
TEXT: dict[str, Any] = {"width": 32, "heads": 2, "layers": 2}
PREPROCESS = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic", "resize_mode": "shortest"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in open_clip's format with a tokenizer of its own."""
    import open_clip

    path = tmp_path_factory.mktemp("clip")
    write_tokenizer(path)
    vocabulary = len(json.loads((path / "vocab.json").read_text()))
    text = {**TEXT, "context_length": 12, "vocab_size": vocabulary, "hf_tokenizer_name": "own"}
    settings = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": text}
    torch.manual_seed(0)
    model = open_clip.CLIP(**settings)
    save_file(model.state_dict(), path / "open_clip_model.safetensors")
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": settings, "preprocess_cfg": PREPROCESS}))
    return path


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Clip:
    return Clip(model=str(folder))


@pytest.fixture(scope="module")
def bundled() -> Clip:
    return Clip()


def pictures(n: int, h: int = 32, w: int = 32) -> Tensor:
    """Noise on the 8-bit grid, so that a PIL image holds exactly the same."""
    return torch.randint(0, 256, (n, 3, h, w)) / 255


def to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


PROMPTS = ["a red circle", "two stars above a square", "a red circle", ""]


# ------------------------------------------------------------------------------------- against plain computations


def test_is_the_cosine_that_open_clip_gives(folder: Path, tiny: Clip) -> None:
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(PROMPTS)
    images = pictures(4, 48, 40)
    with torch.no_grad():
        seen = model.eval().encode_image(torch.stack([transform(to_pil(i)) for i in images]))
        expected = torch.cosine_similarity(seen, model.encode_text(tokens))
    scores = tiny(images, PROMPTS)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, expected, atol=2e-3)  # PIL rounds to 8 bits between resizing and normalising


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", [32, (32, 32), (32, 48)])
@pytest.mark.parametrize(("h", "w"), [(32, 32), (45, 70), (70, 45), (20, 24), (32, 33), (1, 1)])
def test_preprocessing_is_open_clips(mode: str, size: Any, h: int, w: int) -> None:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    settings = {**PREPROCESS, "size": size, "resize_mode": mode, "fill_color": 127}
    # Smooth, so that the two libraries' rounding of sizes and pixels matters little.
    ramp = torch.linspace(0, 1, h)[:, None] * torch.linspace(1, 0.2, w)[None]
    image = (torch.stack([ramp, 1 - ramp, ramp / 2]) * 255).round() / 255
    expected = image_transform_v2(PreprocessCfg(**settings), is_train=False)(to_pil(image))
    result = preprocess(image[None], settings)[0]
    assert result.shape == expected.shape
    assert torch.allclose(result, expected, atol=0.03)


def test_a_long_prompt_keeps_its_end_token_and_is_warned_of_once(folder: Path) -> None:
    clip = Clip(model=str(folder))
    long = "a red circle above " + " and ".join(["two blue squares"] * 4)
    images = pictures(1)
    with pytest.warns(UserWarning, match="CLIP reads 12 tokens of a prompt; 'a red circle above") as caught:
        clip(images, [long])
        clip(images, [long + " and a star"])
    assert len(caught) == 1
    words = clip._tokenise([long])[0]
    assert words[-1] == words.max()  # the end token is the highest
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Clip(model=str(folder))(images, ["a red circle above two blue squares and a star"])  # 12 tokens: just fits


def test_open_clips_own_tokenizer_is_cut_in_the_same_way(tmp_path: Path) -> None:
    import open_clip

    text = {**TEXT, "context_length": 8, "vocab_size": 49408}
    settings = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": text}
    save_file(open_clip.CLIP(**settings).state_dict(), tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": settings}))
    clip = Clip(model=f"local-dir:{tmp_path}")
    with pytest.warns(UserWarning, match="CLIP reads 8 tokens"):
        assert clip(pictures(1), ["a photo of a very small dog beside a tree"]).isfinite().all()


# ----------------------------------------------------------------------------------------------------- conformance


def test_shape_order_and_batch(tiny: Clip) -> None:
    images = pictures(7)
    prompts = [PROMPTS[i % 4] for i in range(7)]
    together = tiny(images, prompts)
    assert together.shape == (7,) and together.dtype == torch.float32
    assert together.isfinite().all() and (together.abs() <= 1 + 1e-6).all()
    alone = torch.cat([tiny(images[i : i + 1], prompts[i : i + 1]) for i in range(7)])
    assert torch.allclose(together, alone, atol=1e-6)
    order = torch.randperm(7)
    assert torch.allclose(tiny(images[order], [prompts[i] for i in order]), together[order], atol=1e-6)


def test_no_images_are_no_scores(tiny: Clip) -> None:
    assert tiny(pictures(0), []).shape == (0,)


@pytest.mark.parametrize(
    "images",
    [torch.zeros(2, 3, 32, 32), torch.full((2, 3, 9, 50), 0.5), torch.ones(2, 3, 1, 1), torch.ones(2, 3, 64, 7)],
)
@pytest.mark.parametrize("prompt", ["", "?!", "star " * 60, "ein Würfel 立方体"])
@pytest.mark.filterwarnings("ignore:CLIP reads")
def test_any_image_and_any_prompt_get_a_number(tiny: Clip, images: Tensor, prompt: str) -> None:
    assert tiny(images, [prompt] * 2).isfinite().all()


def test_gradients_reach_the_images_even_after_inference_mode(folder: Path) -> None:
    with torch.inference_mode():  # as the engine calls it
        clip = Clip(model=str(folder))
        clip(pictures(2), PROMPTS[:2])
    images = pictures(2, 40, 40).requires_grad_()
    clip(images, PROMPTS[:2]).sum().backward()
    assert images.grad is not None and images.grad.abs().amax((1, 2, 3)).gt(0).all()
    assert not any(p.requires_grad for p in clip._model.parameters())


def test_a_prompt_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = Clip(model=str(folder))
    seen: list[int] = []
    encode = clip._model.encode_text

    def counted(tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        return encode(tokens)  # type: ignore[no-any-return]

    monkeypatch.setattr(clip._model, "encode_text", counted)
    for _ in range(3):
        clip(pictures(4), PROMPTS)
    assert seen == [3]


def test_half_precision_towers_compare_in_float32(folder: Path, tiny: Clip) -> None:
    images = pictures(4)
    scores = Clip(model=str(folder), dtype="bfloat16")(images, PROMPTS)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, tiny(images, PROMPTS), atol=0.03)


def test_refuses_what_does_not_pair_up(tiny: Clip) -> None:
    with pytest.raises(UserError, match="each for its own prompt"):
        tiny(pictures(2), ["a star"])
    with pytest.raises(UserError, match=r"\(n, 3, h, w\)"):
        tiny(pictures(2)[0], ["a star"])


# --------------------------------------------------------------------------------------------------------- loading


def test_names_itself_in_records(folder: Path, tiny: Clip) -> None:
    identity = tiny.identity()
    digest = hashlib.sha256((folder / "open_clip_model.safetensors").read_bytes()).hexdigest()
    assert identity["sha256"] == digest
    assert identity["preprocessing"]["mean"] == PREPROCESS["mean"]
    assert identity["preprocessing"]["size"] == 32 or tuple(identity["preprocessing"]["size"]) == (32, 32)
    assert identity["context_length"] == 12 and identity["dtype"] == "float32"
    json.dumps(identity)


def test_a_named_architecture_loads_weights_from_a_file(folder: Path, tmp_path: Path) -> None:
    import open_clip

    name = "tiny-for-tests"
    settings = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": {**TEXT, "context_length": 9, "vocab_size": 49408}}
    (tmp_path / f"{name}.json").write_text(json.dumps(settings))
    open_clip.add_model_config(tmp_path / f"{name}.json")
    torch.save(open_clip.CLIP(**settings).state_dict(), tmp_path / "weights.pt")
    clip = Clip(model=name, pretrained=str(tmp_path / "weights.pt"))
    assert clip(pictures(1), ["a cat"]).isfinite().all()
    assert clip.identity()["source"] == f"{name}/{tmp_path / 'weights.pt'}"


def test_pickled_code_is_never_run(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "run",)

    (tmp_path / "open_clip_config.json").write_bytes((folder / "open_clip_config.json").read_bytes())
    torch.save({"state_dict": Evil()}, tmp_path / "open_clip_pytorch_model.bin")
    with pytest.raises(UserError, match="can't be loaded"):
        Clip(model=str(tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "ViT-B-23"}, "Did you mean 'ViT-B-32'"),
        ({"model": "no/such/folder"}, "There is no CLIP model 'no'"),
        ({"model": "ViT-B-32"}, "has no weights None; give a file or one of: .*openai"),
        ({"model": "ViT-B-32/openia"}, "has no weights 'openia'"),
        ({"model": "shapes-clip", "pretrained": "openai"}, "brings its own weights"),
        ({"model": "shapes-clip", "dtype": "int8"}, "choose one of float32, bfloat16, float16"),
        ({"model": "hf-hub:nobody/nothing"}, "can't be loaded"),
    ],
)
def test_what_cannot_be_loaded_is_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Clip(**options)


def test_an_incomplete_folder_is_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no open_clip_config.json"):
        Clip(model=str(tmp_path))
    (tmp_path / "open_clip_config.json").write_bytes((folder / "open_clip_config.json").read_bytes())
    with pytest.raises(UserError, match="holds no weights"):
        Clip(model=str(tmp_path))


# --------------------------------------------------------------------------------------------- the bundled weights


@pytest.mark.weights
def test_the_bundled_model_judges_scenes_it_never_saw(bundled: Clip) -> None:
    with torch.inference_mode():
        result = shares(bundled, scenes=20, seed=99)
    recorded = json.loads((Path(str(bundled.network.files[0])).parent / "evaluation.json").read_text())["clean"][
        "overall"
    ]
    for side in ("text", "image"):  # as good as the evaluation beside the weights says, within sampling error
        assert recorded[side] >= 0.95 and abs(result["overall"][side] - recorded[side]) < 0.03, result
    assert sum(c["trials"] for c in result["by_category"].values()) > 300


@pytest.mark.weights
def test_the_bundled_model_loads_plainly_in_open_clip() -> None:
    import open_clip

    from imgscale.assets.shapes.train_clip import FOLDER

    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{FOLDER}")
    tokens = open_clip.get_tokenizer(f"local-dir:{FOLDER}")(["a red circle", "two blue stars"])
    picture = transform(Image.fromarray(np.full((64, 64, 3), 240, np.uint8)))
    assert model.eval().encode_image(picture[None]).shape == (1, model.encode_text(tokens).shape[1])
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 6.5e6


@pytest.mark.weights
def test_the_bundled_model_is_the_default() -> None:
    entry, options = registry.verifier.resolve("clip")
    clip = entry.target(**options)
    evaluation = json.loads((Path(str(clip.network.files[0])).parent / "evaluation.json").read_text())
    assert clip.identity()["source"] == "shapes-clip"
    assert clip.identity()["sha256"] == evaluation["sha256"]  # the figures are these weights'

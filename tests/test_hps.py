"""HPS v2.1: checkpoints of the published form on a tiny open_clip architecture, against a plain computation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as pil  # type: ignore[import-untyped]

from imgscale.errors import UserError
from imgscale.verifiers.hps import Hps

NAME, SIDE = "tiny-hps-for-tests", 32
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PROMPTS = ["a red circle", "a cat on a mat", "a red circle", ""]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tiny random CLIP of an architecture that open_clip knows by name meanwhile."""
    import open_clip
    from open_clip import factory

    path = tmp_path_factory.mktemp("architecture")
    vision = {"image_size": SIDE, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    (path / f"{NAME}.json").write_text(json.dumps({"embed_dim": 24, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(path / f"{NAME}.json")
    torch.manual_seed(0)
    yield open_clip.create_model(NAME).eval()
    factory._MODEL_CONFIG_PATHS.remove(path / f"{NAME}.json")
    factory._rescan_model_configs()


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like HPS_v2.1_compressed.pt."""
    path = tmp_path_factory.mktemp("hps") / "HPS_v2.1_compressed.pt"
    torch.save({"epoch": 1, "state_dict": model.state_dict()}, path)
    return path


@pytest.fixture(scope="module")
def tiny(file: Path) -> Hps:
    return Hps(model=str(file), architecture=NAME)


def pictures(n: int, h: int = SIDE, w: int = SIDE) -> Tensor:
    return torch.randint(0, 256, (n, 3, h, w)) / 255


def prepared(image: Tensor) -> Tensor:
    """One image as the hpsv2 package prepares it: the longer side fits, the rest is black."""
    picture = pil.to_tensor(Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()))
    h, w = picture.shape[1:]
    scale = SIDE / max(h, w)
    if scale != 1:
        size = [round(h * scale), round(w * scale)]
        picture = pil.resize(picture, size, pil.InterpolationMode.BICUBIC)
    down, across = SIDE - picture.shape[1], SIDE - picture.shape[2]
    picture = pil.pad(picture, [across // 2, down // 2, across - across // 2, down - down // 2])
    result: Tensor = pil.normalize(picture, MEAN, STD)
    return result


@pytest.mark.parametrize(("h", "w", "near"), [(SIDE, SIDE, 1e-5), (SIDE, 20, 1e-5), (64, 100, 2e-3)])
def test_scores_are_raw_cosines_of_whole_images(model: Any, tiny: Hps, h: int, w: int, near: float) -> None:
    import open_clip

    images = pictures(4, h, w)
    with torch.no_grad():
        seen = model.encode_image(torch.stack([prepared(i) for i in images]))
        truth = torch.cosine_similarity(seen, model.encode_text(open_clip.tokenize(PROMPTS)))
        scores = tiny(images, PROMPTS)
    assert scores.dtype == torch.float32
    assert truth.std() > 5 * near
    assert torch.allclose(scores, truth, atol=near)  # here a clamp of what bicubic overshoots is the difference


def test_what_clip_would_cut_off_is_seen(tiny: Hps) -> None:
    wide = torch.full((2, 3, SIDE, 2 * SIDE), 0.5)
    wide[1, :, :, :8] = 1  # outside the middle square
    scores = tiny(wide, ["a cat"] * 2)
    assert (scores[0] - scores[1]).abs() > 1e-4


def test_a_folder_and_safetensors_do_as_well(model: Any, tiny: Hps, file: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    images = pictures(4)
    truth = tiny(images, PROMPTS)
    assert torch.equal(Hps(model=str(file.parent), architecture=NAME)(images, PROMPTS), truth)
    save_file(model.state_dict(), tmp_path / "hps.safetensors")
    assert torch.equal(Hps(model=str(tmp_path), architecture=NAME)(images, PROMPTS), truth)


def test_gradients_are_those_of_finite_differences(file: Path) -> None:
    with torch.inference_mode():  # as the engine calls it
        verifier = Hps(model=str(file), architecture=NAME)
        verifier(pictures(2), PROMPTS[:2])
    images = (0.2 + 0.6 * pictures(2, 40, 50)).requires_grad_()
    verifier(images, PROMPTS[:2]).sum().backward()
    assert images.grad is not None and images.grad.abs().amax((1, 2, 3)).gt(0).all()
    step = 1e-2 * torch.nn.functional.normalize(images.grad.flatten(), dim=0).view_as(images)
    with torch.no_grad():
        rise = (verifier(images + step, PROMPTS[:2]) - verifier(images - step, PROMPTS[:2])).sum()
    assert torch.isclose(rise, 2 * (images.grad * step).sum(), rtol=0.02)


def test_nothing_and_what_does_not_pair_up(tiny: Hps) -> None:
    assert tiny(pictures(0), []).shape == (0,)
    with pytest.raises(UserError, match="The verifier hps scores images"):
        tiny(pictures(2), ["a star"])


def test_names_itself_in_records(tiny: Hps, file: Path) -> None:
    identity = tiny.identity()
    assert identity["name"] == "hps" and identity["source"] == str(file) and identity["architecture"] == NAME
    assert identity["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert identity["preprocessing"]["resize_mode"] == "longest"
    json.dumps(identity)


def test_what_cannot_be_loaded_is_explained(model: Any, file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no HPS model 'no.pt'; give a file"):
        Hps(model="no.pt")
    with pytest.raises(UserError, match="HPS_v2.1_compressed.pt' can't be loaded"):
        Hps()
    with pytest.raises(UserError, match="There is no CLIP model 'ViT-H-41'"):
        Hps(model=str(file), architecture="ViT-H-41")
    with pytest.raises(UserError, match="has no revisions"):
        Hps(model=str(file), revision="main")
    torch.save({"state_dict": {"logit_scale": torch.zeros(())}}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="Missing key"):
        Hps(model=str(tmp_path / "other.pt"), architecture=NAME)
    (tmp_path / "second.pt").touch()
    with pytest.raises(UserError, match="should hold one weights file"):
        Hps(model=str(tmp_path), architecture=NAME)


def test_pickled_code_is_never_run(model: Any, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "run",)

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="can't be loaded"):
        Hps(model=str(tmp_path / "evil.pt"), architecture=NAME)
    assert not (tmp_path / "run").exists()

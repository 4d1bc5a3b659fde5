"""The aesthetic verifier: LAION's published heads and answers, heads of each form, and the bundled one."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from imgscale.assets.shapes.evaluate_aesthetic import above, captions, scores
from imgscale.assets.shapes.text import write_tokenizer
from imgscale.assets.shapes.train_aesthetic import FLAWS, FOLDER, flawed, scene
from imgscale.errors import UserError
from imgscale.verifiers import aesthetic
from imgscale.verifiers.aesthetic import Aesthetic, pooled
from imgscale.verifiers.clip import Clip

PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "data" / "laion_aesthetic"
WIDTHS = (768, 1024, 128, 64, 16, 1)  # of LAION's second predictor


def backbone(path: Path, width: int) -> str:
    """A tiny random CLIP, saved in open_clip's format, that gives embeddings of this width."""
    import open_clip

    write_tokenizer(path)
    vocabulary = len(json.loads((path / "vocab.json").read_text()))
    text = {"width": 32, "heads": 2, "layers": 1, "context_length": 8, "vocab_size": vocabulary}
    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
    settings = {"embed_dim": width, "vision_cfg": vision, "text_cfg": {**text, "hf_tokenizer_name": "own"}}
    torch.manual_seed(0)
    save_file(open_clip.CLIP(**settings).state_dict(), path / "open_clip_model.safetensors")
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": settings}))
    return str(path)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CLIP as wide as ViT-L/14."""
    return backbone(tmp_path_factory.mktemp("wide"), 768)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CLIP as wide as ViT-B/32."""
    return backbone(tmp_path_factory.mktemp("narrow"), 512)


@pytest.fixture(scope="module")
def bundled() -> Aesthetic:
    return Aesthetic()


def linear(path: Path, width: int = 768) -> tuple[Path, Tensor, Tensor]:
    """A file of the form of LAION's first predictors."""
    weight, bias = torch.randn(1, width), torch.randn(1)
    torch.save({"weight": weight, "bias": bias}, path)
    return path, weight, bias


def second() -> nn.Sequential:
    """LAION's second predictor, in training mode with its dropouts; random weights."""
    layers = [nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]
    drops = [nn.Dropout(0.2), nn.Dropout(0.2), nn.Dropout(0.1)]
    parts = [layers[0], drops[0], layers[1], drops[1], layers[2], drops[2], layers[3], layers[4]]
    return nn.Sequential(*parts)


def pictures(n: int, side: int = 32) -> Tensor:
    return torch.rand(n, 3, side, side)


# ----------------------------------------------------------------------------------------------- LAION's own heads


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published heads and embeddings aren't beside the repository")
@pytest.mark.parametrize(("name", "width", "first", "last"), [("b_32", 512, -1.47, 11.01), ("l_14", 768, -2.46, 11.30)])
def test_published_heads_rate_published_embeddings(
    name: str, width: int, first: float, last: float, wide: str, narrow: str
) -> None:
    head = PUBLISHED / f"sa_0_4_vit_{name}_linear.pth"
    verifier = Aesthetic(head=str(head), backbone=wide if width == 768 else narrow)
    folder = PUBLISHED / f"vit_{name}_embeddings"
    embeddings = torch.from_numpy(np.concatenate([np.load(folder / f"rating{i}.npy") for i in range(10)]))
    assert embeddings.shape == (10, width)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(10), atol=1e-3)
    rated = verifier.rate(embeddings)
    assert rated.dtype == torch.float32 and (rated.diff() > 0).all()
    assert rated[0].item() == pytest.approx(first, abs=0.01) and rated[-1].item() == pytest.approx(last, abs=0.01)
    assert verifier.licence == "MIT"
    images = pictures(3)
    expected = verifier.rate(Clip(model=wide if width == 768 else narrow).embed_images(images))
    assert torch.allclose(verifier(images, [""] * 3), expected, atol=1e-5)


def test_a_linear_head_rates_unit_embeddings(wide: str, tmp_path: Path) -> None:
    file, weight, bias = linear(tmp_path / "head.pth")
    images = pictures(5, 40)
    embeddings = Clip(model=wide).embed_images(images)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(5), atol=1e-5)
    result = Aesthetic(head=str(file), backbone=wide)(images, [""] * 5)
    assert torch.allclose(result, embeddings @ weight[0] + bias, atol=1e-5)


def test_the_second_predictor_has_neither_dropout_nor_activation(wide: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    reference = second()
    torch.save({f"layers.{k}": v for k, v in reference.state_dict().items()}, tmp_path / "sac+logos+ava1-l14.pth")
    assert set(reference.state_dict()) == {f"{i}.{k}" for i in (0, 2, 4, 6, 7) for k in ("weight", "bias")}
    verifier = Aesthetic(head=str(tmp_path), backbone=wide)
    embeddings = nn.functional.normalize(torch.randn(6, 768), dim=1)
    x = embeddings
    for i in (0, 2, 4, 6, 7):
        layer = reference[i]
        assert isinstance(layer, nn.Linear)
        x = x @ layer.weight.T + layer.bias
    assert torch.allclose(verifier.rate(embeddings), x[:, 0], atol=1e-6)
    assert verifier.licence == "Apache-2.0"


def test_a_safetensors_file_says_what_stands_between_its_layers(wide: str, tmp_path: Path) -> None:
    state = {"layers.0.weight": torch.randn(8, 768), "layers.0.bias": torch.randn(8)}
    state |= {"layers.1.weight": torch.randn(1, 8), "layers.1.bias": torch.randn(1)}
    embeddings = nn.functional.normalize(torch.randn(6, 768), dim=1)
    inner = embeddings @ state["layers.0.weight"].T + state["layers.0.bias"]
    for name, between in (("none", inner), ("relu", inner.relu()), ("gelu", nn.functional.gelu(inner))):
        save_file(state, tmp_path / f"{name}.safetensors", metadata={"activation": name})
        expected = between @ state["layers.1.weight"][0] + state["layers.1.bias"]
        rated = Aesthetic(head=str(tmp_path / f"{name}.safetensors"), backbone=wide).rate(embeddings)
        assert torch.allclose(rated, expected, atol=1e-4)


def test_the_backbone_is_the_one_with_quick_gelu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip

    asked: list[str] = []

    def instead(*, model: str, **_: Any) -> Clip:
        asked.append(model)
        name, tag = model.split("/")
        assert tag in open_clip.list_pretrained_tags_by_model(name)
        assert open_clip.get_pretrained_cfg(name, tag)["quick_gelu"] and open_clip.get_model_config(name)["quick_gelu"]
        raise UserError("not fetched")

    monkeypatch.setattr(aesthetic, "Clip", instead)
    for name, width in (("l_14", 768), ("b_32", 512), ("b_16", 512)):
        file, *_ = linear(tmp_path / f"sa_0_4_vit_{name}_linear.pth", width)
        with pytest.raises(UserError, match="not fetched"):
            Aesthetic(head=str(file))
    assert asked == ["ViT-L-14-quickgelu/openai", "ViT-B-32-quickgelu/openai", "ViT-B-16-quickgelu/openai"]


def test_heads_that_do_not_fit_are_explained(wide: str, tmp_path: Path) -> None:
    file, *_ = linear(tmp_path / "odd.pth", 100)
    with pytest.raises(UserError, match="reads 100 numbers; give the CLIP it is for"):
        Aesthetic(head=str(file))
    with pytest.raises(UserError, match="reads 100 numbers of an image, and .* gives 768"):
        Aesthetic(head=str(file), backbone=wide)
    torch.save({"something": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="is no aesthetic head .*something"):
        Aesthetic(head=str(tmp_path / "other.pth"))
    torch.save({"weight": torch.zeros(2, 768), "bias": torch.zeros(2)}, tmp_path / "two.pth")
    with pytest.raises(UserError, match="doesn't give one number"):
        Aesthetic(head=str(tmp_path / "two.pth"))
    with pytest.raises(UserError, match="There is no aesthetic head 'nothing'"):
        Aesthetic(head="nothing")
    (tmp_path / "evil.pth").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match="can't be loaded"):
        Aesthetic(head=str(tmp_path / "evil.pth"))


# ----------------------------------------------------------------------------------------------------- conformance


def test_order_batch_and_nothing(wide: str, tmp_path: Path) -> None:
    verifier = Aesthetic(head=str(linear(tmp_path / "head.pth")[0]), backbone=wide)
    images = pictures(5)
    together = verifier(images, [""] * 5)
    assert together.shape == (5,) and together.dtype == torch.float32
    alone = torch.cat([verifier(images[i : i + 1], ["a star"]) for i in range(5)])
    assert torch.allclose(together, alone, atol=1e-5)
    assert verifier(pictures(0), []).shape == (0,)
    with pytest.raises(UserError, match="The verifier aesthetic scores images"):
        verifier(images, ["a star"])


def test_half_precision_keeps_the_head_in_float32(wide: str, tmp_path: Path) -> None:
    file, *_ = linear(tmp_path / "head.pth")
    images = pictures(5)
    verifier = Aesthetic(head=str(file), backbone=wide, dtype="bfloat16")
    result = verifier(images, [""] * 5)
    assert result.dtype == torch.float32 and verifier.head.module.layers[0].weight.dtype == torch.float32
    assert torch.allclose(result, Aesthetic(head=str(file), backbone=wide)(images, [""] * 5), atol=0.2)


@pytest.mark.parametrize("which", ["linear", "bundled"])
@pytest.mark.weights
def test_gradients_are_those_of_finite_differences(which: str, wide: str, tmp_path: Path) -> None:
    with torch.inference_mode():  # as the engine calls it
        mine = which == "linear"
        verifier = Aesthetic(head=str(linear(tmp_path / "head.pth")[0]), backbone=wide) if mine else Aesthetic()
        verifier(pictures(2), [""] * 2)
    images = (0.2 + 0.6 * pictures(2, 64)).requires_grad_()
    verifier(images, [""] * 2).sum().backward()
    assert images.grad is not None and images.grad.abs().amax((1, 2, 3)).gt(0).all()
    step = 2e-3 * nn.functional.normalize(images.grad.flatten(), dim=0).view_as(images)
    with torch.no_grad():
        rise = (verifier(images + step, [""] * 2) - verifier(images - step, [""] * 2)).sum()
    assert torch.isclose(rise, 2 * (images.grad * step).sum(), rtol=0.1)


# ------------------------------------------------------------------------------------------------ the bundled head


@pytest.mark.weights
def test_flaws_cost_and_no_caption_is_preferred(bundled: Aesthetic) -> None:
    n, rng = 60, np.random.default_rng(7)
    with torch.inference_mode():
        shown = [scene(rng, True, 2) for _ in range(n)]
        clean = scores(bundled, flawed(shown, [""] * n, torch.zeros(n), 7))
        assert 9 < clean.mean() < 10.5
        recorded = json.loads((FOLDER / "evaluation.json").read_text())["flaws"]
        for flaw in FLAWS:
            told = scores(bundled, flawed(shown, [flaw] * n, torch.linspace(0.5, 1, n), 8))
            assert above(clean, told) > 0.95 and recorded[flaw]["auc_strong"] > 0.98, flaw
            assert told.mean() < 5.5, flaw
        spread = captions(bundled, 15, 4, seed=9)
    assert spread["between"] < 0.6  # of the nine points between clean and spoilt


@pytest.mark.weights
def test_a_grey_picture_has_a_score_and_a_gradient(bundled: Aesthetic) -> None:
    images = torch.full((2, 3, 64, 64), 0.9).requires_grad_()
    rated = bundled(images, [""] * 2)
    rated.sum().backward()
    assert (rated < 5).all()  # there is no scene in it
    assert images.grad is not None and images.grad.isfinite().all()


@pytest.mark.weights
def test_the_bundled_head_reads_statistics_of_stages() -> None:
    clip = Clip()
    images = pictures(3, 64)
    kept: list[Tensor] = []
    hook = clip.network.module.visual.layer1.register_forward_hook(lambda *call: kept.append(call[2]))
    told = pooled(clip, ["layer1"], images)
    hook.remove()
    x = kept[0].flatten(2)
    expected = torch.cat([x.mean(2), x.std(2, correction=0), x.max(2).values], 1)
    assert torch.allclose(told, expected, atol=1e-3)
    assert not clip.network.module.visual.layer1._forward_hooks  # ours is gone


@pytest.mark.weights
def test_the_bundled_head_is_the_default_and_names_all_of_itself(bundled: Aesthetic, tmp_path: Path) -> None:
    identity = bundled.identity()
    file = FOLDER / "head.safetensors"
    assert identity["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert identity["sha256"] == json.loads((FOLDER / "evaluation.json").read_text())["sha256"]
    assert identity["source"] == "shapes" and identity["reads"] == ["avgpool", "layer1", "layer2"]
    assert identity["backbone"] == {**Clip().identity()}
    assert "resize_mode" in identity["backbone"]["preprocessing"]
    json.dumps(identity)
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 3e5
    shutil.copy(file, tmp_path / "mine.safetensors")
    copied = Aesthetic(head=str(tmp_path / "mine.safetensors"), backbone="shapes-clip")
    images = pictures(3, 64)
    assert torch.equal(copied(images, [""] * 3), bundled(images, [""] * 3))

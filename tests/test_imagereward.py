"""ImageReward: a tiny BLIP in plain torch with the published names, saved and loaded by the verifier."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms  # type: ignore[import-untyped]

from imgscale.errors import UserError
from imgscale.verifiers.imagereward import MEAN, STD, ImageReward

WIDE, CHANNELS, SIDE, PATCH, DEEP = 128, 64, 48, 16, 2
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), "a", "red", "star", "two"]
PROMPTS = ["a red star", "two", "", "a red star"]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention with heads of 64 channels: (n, q, d), (n, k, d), (n, k, d) to (n, q, d)."""
    q, k, v = (x.unflatten(-1, (-1, 64)).transpose(1, 2) for x in (q, k, v))
    weights = q @ k.transpose(-1, -2) / math.sqrt(64)
    if mask is not None:
        weights = weights.masked_fill(mask[:, None, None] == 0, -torch.inf)
    return (weights.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Part(nn.Module):
    """A module whose parts may be called and indexed, as far as types are concerned."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Named(Part):
    """Modules under any names, such as "self"."""

    def __init__(self, /, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Block(Part):
    """A block of a vision transformer, normalised before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDE, eps=1e-6) for _ in range(2))
        self.attn = Named(qkv=nn.Linear(WIDE, 3 * WIDE), proj=nn.Linear(WIDE, WIDE))
        self.mlp = Named(fc1=nn.Linear(WIDE, 200), fc2=nn.Linear(200, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn.proj(attend(*self.attn.qkv(self.norm1(x)).chunk(3, -1)))
        y: Tensor = self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(x))))
        return x + y


class Vit(Part):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDE))
        self.pos_embed = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2 + 1, WIDE))
        self.patch_embed = Named(proj=nn.Conv2d(3, WIDE, PATCH, PATCH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEEP))
        self.norm = nn.LayerNorm(WIDE, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Layer(Part):
    """A layer of BERT, normalised after: itself, then what it is told, then the feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        for name, told in (("attention", CHANNELS), ("crossattention", WIDE)):
            parts = {"query": nn.Linear(CHANNELS, CHANNELS), "key": nn.Linear(told, CHANNELS)}
            inner = Named(**parts, value=nn.Linear(told, CHANNELS))
            self.add_module(name, Named(**{"self": inner, "output": self.closing(CHANNELS)}))
        self.intermediate = Named(dense=nn.Linear(CHANNELS, 100))
        self.output = self.closing(100)

    @staticmethod
    def closing(wide: int) -> Named:
        return Named(dense=nn.Linear(wide, CHANNELS), LayerNorm=nn.LayerNorm(CHANNELS, eps=1e-12))

    def forward(self, x: Tensor, mask: Tensor, seen: Tensor) -> Tensor:
        for part, told, hidden in ((self.attention, x, mask), (self.crossattention, seen, None)):
            inner: Any = part.self
            told = x if hidden is not None else told
            y = attend(inner.query(x), inner.key(told), inner.value(told), hidden)
            x = part.output.LayerNorm(part.output.dense(y) + x)
        y = self.output.dense(nn.functional.gelu(self.intermediate.dense(x)))
        return self.output.LayerNorm(y + x)  # type: ignore[no-any-return]


class Bert(Part):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embeddings = Named(
            word_embeddings=nn.Embedding(vocabulary, CHANNELS),
            position_embeddings=nn.Embedding(40, CHANNELS),
            LayerNorm=nn.LayerNorm(CHANNELS, eps=1e-12),
        )
        self.embeddings.register_buffer("position_ids", torch.arange(40)[None])
        self.encoder = Named(layer=nn.ModuleList(Layer() for _ in range(DEEP)))

    def forward(self, ids: Tensor, mask: Tensor, seen: Tensor) -> Tensor:
        at = self.embeddings
        x = at.LayerNorm(at.word_embeddings(ids) + at.position_embeddings.weight[: ids.shape[1]])
        for layer in self.encoder.layer:
            x = layer(x, mask, seen)
        return x  # type: ignore[no-any-return]


class Reference(Part):
    """ImageReward in its authors' naming, with two tensors that its score doesn't need."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.blip = Named(
            visual_encoder=Vit(),
            text_encoder=Bert(vocabulary),
            vision_proj=nn.Linear(WIDE, 8),
            text_proj=nn.Linear(CHANNELS, 8),
        )
        widths = (CHANNELS, 32, 16, 8, 4, 1)
        linear = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
        drop = nn.Dropout(0.2)
        self.mlp = Named(layers=nn.Sequential(linear[0], drop, linear[1], drop, linear[2], drop, linear[3], linear[4]))

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        read = self.blip.text_encoder(ids, mask, self.blip.visual_encoder(pixels))
        return (self.mlp.layers(read[:, 0])[:, 0] - MEAN) / STD  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights, `ImageReward.pt`, and in `bert` a tokenizer."""
    path = tmp_path_factory.mktemp("imagereward")
    (path / "bert").mkdir()
    words = list(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    (path / "bert" / "vocab.txt").write_text("\n".join(words) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (path / "bert" / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    model = Reference(len(words) + 2).eval()
    with torch.no_grad():  # unlike the identity that layer norms start from
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for layer in model.mlp.layers:
            if isinstance(layer, nn.Linear):  # at first they shrink what they are given
                layer.weight.mul_(2.5)
    torch.save(model.state_dict(), path / "ImageReward.pt")
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    state = torch.load(folder / "ImageReward.pt", weights_only=True)
    model = Reference(len(state["blip.text_encoder.embeddings.word_embeddings.weight"])).eval()
    model.load_state_dict(state)
    return model


def load(folder: Path, **options: Any) -> ImageReward:
    return ImageReward(model=str(folder / "ImageReward.pt"), tokenizer=str(folder / "bert"), **options)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> ImageReward:
    return load(folder)


def tokens(folder: Path, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Ids and masks, word by word from the list of words; all the words in PROMPTS are in it."""
    words = (folder / "bert" / "vocab.txt").read_text().split()
    ids = [[words.index(w) for w in ["[CLS]", *p.split(), "[SEP]"]] for p in prompts]
    padded = torch.tensor([row + [0] * (35 - len(row)) for row in ids])
    return padded, torch.tensor([[1] * len(row) + [0] * (35 - len(row)) for row in ids])


def prepared(image: Tensor) -> Tensor:
    """By torchvision's transforms of a PIL image, as ImageReward's code does it."""
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    steps = transforms.Compose(
        [
            transforms.Resize(SIDE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(SIDE),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )
    result: Tensor = steps(Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()))
    return result


def pictures(n: int, h: int = SIDE, w: int = SIDE) -> Tensor:
    return torch.randint(0, 256, (n, 3, h, w)) / 255


@pytest.mark.parametrize(("h", "w", "near"), [(SIDE, SIDE, 1e-4), (100, 70, 0.05)])
def test_scores_are_those_of_the_original_model(
    folder: Path, tiny: ImageReward, reference: Reference, h: int, w: int, near: float
) -> None:
    images = pictures(4, h, w)
    with torch.no_grad():
        expected = reference(torch.stack([prepared(i) for i in images]), *tokens(folder, PROMPTS))
        scores = tiny(images, PROMPTS)
    assert scores.dtype == torch.float32 and scores.shape == (4,)
    assert expected.std() > 5 * near  # the inputs matter
    assert torch.allclose(scores, expected, atol=near)


def test_image_and_prompt_matter_and_padding_does_not(tiny: ImageReward) -> None:
    images = pictures(1).expand(3, -1, -1, -1)
    scores = tiny(images, ["a red star", "two", "a red star"])
    assert scores[0] != scores[1] and torch.isclose(scores[0], scores[2], atol=1e-6)
    assert tiny(pictures(2), ["two"] * 2).unique().numel() == 2


def test_order_batch_and_nothing(tiny: ImageReward) -> None:
    images = pictures(4)
    together = tiny(images, PROMPTS)
    alone = torch.cat([tiny(images[i : i + 1], PROMPTS[i : i + 1]) for i in range(4)])
    assert torch.allclose(together, alone, atol=1e-5)
    assert tiny(pictures(0), []).shape == (0,)
    with pytest.raises(UserError, match="imagereward scores images"):
        tiny(images, ["two"])


def test_gradients_are_those_of_finite_differences(folder: Path) -> None:
    with torch.inference_mode():  # as the engine calls it
        verifier = load(folder)
        verifier(pictures(1), ["two"])
    images = pictures(2, 60, 50).requires_grad_()
    verifier(images, ["a red star", "two"]).sum().backward()
    assert images.grad is not None and images.grad.abs().amax((1, 2, 3)).gt(0).all()
    step = 1e-2 * torch.nn.functional.normalize(images.grad.flatten(), dim=0).view_as(images)
    with torch.no_grad():
        rise = (verifier(images + step, PROMPTS[:2]) - verifier(images - step, PROMPTS[:2])).sum()
    assert torch.isclose(rise, 2 * (images.grad * step).sum(), rtol=0.02)


def test_half_precision_keeps_the_head_in_float32(folder: Path, tiny: ImageReward) -> None:
    images = pictures(4)
    verifier = load(folder, dtype="bfloat16")
    scores = verifier(images, PROMPTS)
    assert scores.dtype == torch.float32
    assert next(verifier._head.module.parameters()).dtype == torch.float32
    assert torch.allclose(scores, tiny(images, PROMPTS), atol=0.1)


def test_a_long_prompt_keeps_its_end_and_is_warned_of_once(folder: Path) -> None:
    verifier = load(folder)
    with pytest.warns(UserWarning, match="ImageReward reads 35 tokens of a prompt; 'star star") as caught:
        verifier(pictures(2), ["star " * 34, "two " * 50])
        verifier(pictures(1), ["two " * 50])
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder)(pictures(1), ["star " * 33])  # with its ends, 35: just fits


def test_names_itself_in_records(folder: Path, tiny: ImageReward) -> None:
    identity = tiny.identity()
    assert identity["sha256"] == hashlib.sha256((folder / "ImageReward.pt").read_bytes()).hexdigest()
    assert identity["preprocessing"]["size"] == SIDE and identity["context_length"] == 35
    json.dumps(identity)


def test_what_cannot_be_loaded_is_explained(folder: Path, tmp_path: Path) -> None:
    state = torch.load(folder / "ImageReward.pt", weights_only=True)
    lacking = {k: v for k, v in state.items() if not k.endswith("blocks.1.attn.proj.bias")}
    torch.save(lacking, tmp_path / "lacking.pt")
    torch.save({"weight": torch.zeros(1, 8)}, tmp_path / "other.pt")
    for name, message in (("lacking.pt", "self_attn.projection.bias"), ("other.pt", "pos_embed")):
        with pytest.raises(UserError, match=message):
            ImageReward(model=str(tmp_path / name), tokenizer=str(folder / "bert"))
    with pytest.raises(UserError, match="There is no ImageReward model 'no.pt'"):
        ImageReward(model="no.pt")
    with pytest.raises(UserError, match="THUDM/ImageReward/ImageReward.pt' can't be loaded"):
        ImageReward()
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    with pytest.raises(UserError, match="it has 8 tokens with BLIP's two"):
        ImageReward(model=str(folder), tokenizer=str(tmp_path))

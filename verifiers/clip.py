"""CLIP similarity: the cosine of an open_clip model's image and text embeddings (Radford et al. 2021).

Any open_clip model will do; the default is the shapes CLIP that imgscale ships.
"""

from __future__ import annotations

import difflib
import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.verifiers._network import Network, check, plain_tensors

BUNDLED = "shapes-clip"
REMEMBERED = 4096  # text embeddings kept, the least recently used go first


@verifier("clip", cite="radford2021learning")
class Clip:
    """Cosine similarity of image and prompt under an open_clip model.

    Args:
        model: The bundled `shapes-clip`; a folder with an `open_clip_config.json` (also as ``local-dir:…``);
            ``hf-hub:owner/name``; or one of open_clip's models, as ``name`` with ``pretrained`` or as
            ``name/pretrained`` in one text, such as ``ViT-L-14/openai``.
        pretrained: For one of open_clip's models: the tag of its weights, or a file of them (safetensors, or a torch
            file without pickled code).
        device: Where it runs; where the images are, if None.
        dtype: Of both towers: float32, bfloat16 or float16. The embeddings are normalised and compared in float32.
        offload: Leave the device after every call.

    Raises:
        UserError: when there is no such model or weights, or they can't be loaded; the message says which and why.
    """

    name = "clip"
    range = (-1.0, 1.0)
    reads_prompt = True
    differentiable = True

    def __init__(
        self,
        *,
        model: str = BUNDLED,
        pretrained: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        offload: bool = False,
    ) -> None:
        source, weights, loaded, self._tokenise = _load(model, pretrained)
        self.licence = "Apache-2.0" if model == BUNDLED else "that of the model"
        self.network = Network(loaded, [weights], source, device=device, dtype=dtype, offload=offload)
        self._model = self.network.module
        self._texts: OrderedDict[str, Tensor] = OrderedDict()
        self._warned = False

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1] for their ``n`` prompts: float32 ``(n,)`` in [-1, 1].

        Gradients reach the images where autograd is on.
        """
        check("clip", images, prompts)
        if not len(images):
            return torch.zeros(0, device=images.device)
        seen = self.embed_images(images)  # first, since it decides the device
        return (seen * self.embed_texts(prompts)).sum(-1).to(images.device)

    def embed_images(self, images: Tensor) -> Tensor:
        """Unit embeddings, float32 ``(n, d)``, of images ``(n, 3, h, w)`` in [0, 1] of any size."""
        with self.network.on(images.device) as device:
            pixels = preprocess(images.to(device, torch.float32), self.preprocessing)
            return functional.normalize(self._model.encode_image(pixels.to(self.network.dtype)).float(), dim=-1)

    def embed_texts(self, prompts: Sequence[str]) -> Tensor:
        """Unit embeddings, float32 ``(n, d)``, of the prompts; each is computed once and remembered."""
        new = [p for p in dict.fromkeys(prompts) if p not in self._texts]
        with self.network.on() as device:
            if new:
                with plain_tensors(), torch.no_grad():
                    tokens = self._tokenise(new)
                    self._warn_of_length(new, tokens)
                    found = functional.normalize(self._model.encode_text(tokens.to(device)).float(), dim=-1)
                self._texts.update(zip(new, found, strict=True))
        for prompt in prompts:
            self._texts.move_to_end(prompt)
        texts = torch.stack([self._texts[p].to(device) for p in prompts])
        while len(self._texts) > REMEMBERED:
            self._texts.popitem(last=False)
        return texts

    @property
    def preprocessing(self) -> dict[str, Any]:
        """open_clip's settings: size, mean, std, interpolation, resize_mode, fill_color."""
        return dict(self._model.visual.preprocess_cfg)

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: source, hash of the weights file, preprocessing, dtype."""
        return {
            "name": self.name,
            **self.network.identity(),
            "preprocessing": self.preprocessing,
            "context_length": self._tokenise.context_length,
        }

    def _warn_of_length(self, prompts: list[str], tokens: Tensor) -> None:
        """Says once that a prompt is cut. It is if one more token of room changes what is in the present room."""
        limit = self._tokenise.context_length
        cut = (self._tokenise(prompts, context_length=limit + 1)[:, :limit] != tokens).any(1)
        if bool(cut.any()) and not self._warned:
            self._warned = True
            prompt = prompts[int(cut.int().argmax())]
            warnings.warn(
                f"CLIP reads {limit} tokens of a prompt; {prompt[:60]!r}… is longer and its rest doesn't count."
                " Shorten it, or use the verifier vqa, which reads all.",
                UserWarning,
                stacklevel=4,
            )


def preprocess(images: Tensor, settings: dict[str, Any]) -> Tensor:
    """What open_clip's transform does to a picture, on tensors, batched and differentiable.

    Args:
        images: float32 ``(n, 3, h, w)`` in [0, 1].
        settings: open_clip's `PreprocessCfg` as a dict.
    """
    size = settings["size"]
    height, width = (size, size) if isinstance(size, int) else size
    h, w = images.shape[-2:]
    mode = "bilinear" if settings["interpolation"] == "bilinear" else "bicubic"
    match settings["resize_mode"]:
        case "squash":
            target = (height, width)
        case "longest":
            ratio = max(h / height, w / width)
            target = (round(h / ratio), round(w / ratio))
        case _ if height == width:  # torchvision's Resize to the shorter side rounds down
            target = (height, int(height * w / h)) if h <= w else (int(height * h / w), height)
        case _:
            mode, ratio = "bicubic", min(h / height, w / width)
            target = (round(h / ratio), round(w / ratio))
    target = (max(1, target[0]), max(1, target[1]))
    if target != (h, w):
        images = functional.interpolate(images, target, mode=mode, antialias=True, align_corners=False)
        images = images.clamp(0, 1)  # bicubic overshoots, and pictures can't
    top, left = height - target[0], width - target[1]
    if max(top, left) > 0:
        pad = [max(0, v) for v in (left // 2, left - left // 2, top // 2, top - top // 2)]
        images = functional.pad(images, pad, value=settings["fill_color"] / 255)
    y, x = (round(max(0, -v) / 2.0) for v in (top, left))
    images = images[..., y : y + height, x : x + width]
    mean, std = (torch.tensor(settings[k], device=images.device)[:, None, None] for k in ("mean", "std"))
    return (images - mean) / std


def _load(model: str, pretrained: str | None) -> tuple[str, Path, Any, Any]:
    """The source as records name it, the weights file, the model on the CPU, and its tokenizer."""
    import open_clip
    from open_clip.pretrained import download_pretrained_from_hf

    where = model
    if model == BUNDLED:
        where = f"local-dir:{resources.files('imgscale.assets') / 'shapes' / BUNDLED}"
    elif not model.startswith(("local-dir:", "hf-hub:")):
        if Path(model).expanduser().is_dir():
            where = f"local-dir:{Path(model).expanduser()}"
        elif pretrained is None and "/" in model:
            where, _, pretrained = model.partition("/")
    schema = next((s for s in ("local-dir:", "hf-hub:") if where.startswith(s)), None)
    if schema and pretrained is not None:
        raise UserError(f"{model!r} brings its own weights; leave out pretrained={pretrained!r}.")
    if schema is None:
        _check_known(where, pretrained)
    try:
        with plain_tensors(), _quiet():
            if schema == "local-dir:":
                weights = _weights_in(Path(where.removeprefix(schema)))
                loaded = open_clip.create_model(where, load_weights=False)
                open_clip.load_checkpoint(loaded, str(weights))
            else:
                loaded = open_clip.create_model(where, pretrained=pretrained)
                if schema:
                    weights = Path(download_pretrained_from_hf(where.removeprefix(schema)))
                else:
                    tag = open_clip.get_pretrained_cfg(where, pretrained)
                    weights = Path(open_clip.download_pretrained(tag) if tag else str(pretrained))
                if not weights.is_file():
                    raise FileNotFoundError("its weights are missing")
            tokenise = open_clip.get_tokenizer(where)
    except UserError:
        raise
    except Exception as error:  # open_clip, the hub, json and safetensors each raise their own
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"The CLIP model {model!r} can't be loaded ({reason}); check its name and files.") from error
    return model if pretrained is None or "/" in model else f"{model}/{pretrained}", weights, loaded, tokenise


def _check_known(model: str, pretrained: str | None) -> None:
    import open_clip

    known = open_clip.list_models()
    if model not in known:
        near = difflib.get_close_matches(model, known, 1, 0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"There is no CLIP model {model!r}; give {BUNDLED!r}, a folder with open_clip_config.json,"
            f" hf-hub:owner/name or one of open_clip.list_models().{guess}"
        )
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained is None or not (pretrained in tags or Path(pretrained).is_file()):
        raise UserError(
            f"The CLIP model {model!r} has no weights {pretrained!r}; give a file or one of:"
            f" {', '.join(tags) or 'none'}."
        )


def _weights_in(folder: Path) -> Path:
    """The weights file of a folder in open_clip's format, safetensors first.

    Raises:
        UserError: when a file is missing.
    """
    if not (folder / "open_clip_config.json").is_file():
        raise UserError(f"{str(folder)!r} holds no open_clip_config.json; give a folder in open_clip's format.")
    for pattern in ("open_clip*.safetensors", "*.safetensors", "open_clip*.bin", "*.bin", "*.pt", "*.pth"):
        files = sorted(folder.glob(pattern))
        if files:
            return files[0]
    raise UserError(f"{str(folder)!r} holds no weights; put open_clip_model.safetensors there.")


@contextmanager
def _quiet() -> Iterator[None]:
    """open_clip reports through the root logger, and warns that weights are missing which are loaded next."""
    root = logging.getLogger()
    level, root.level = root.level, max(root.level, logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)

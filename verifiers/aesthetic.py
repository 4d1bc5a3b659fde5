"""Aesthetic scores: a small head on the image embeddings of a CLIP, as LAION's predictors (Schuhmann et al. 2022).

LAION's first predictors are one linear layer; the second, for ViT-L/14, is several with nothing between them. The
head that imgscale ships judges pictures of the shapes world. Its CLIP was trained to embed a blurred scene as it does a
sharp one, so this head doesn't read the embedding: it reads the mean, the standard deviation and the maximum over the
picture of each channel of the tower's first stages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.verifiers._network import Network, check, fetch_file, plain_tensors, read_state
from imgscale.verifiers.clip import BUNDLED, Clip

SHAPES = "shapes"
# Not the same as without quick GELU: the scores of one picture differ by up to a point.
BACKBONES = {768: "ViT-L-14-quickgelu/openai", 512: "ViT-B-32-quickgelu/openai"}
B_16 = "ViT-B-16-quickgelu/openai"  # as wide as B/32; LAION's head for it says so by its name
LICENCES = {"sa_0_4_vit": "MIT", "sac+logos+ava1": "Apache-2.0"}  # of the published heads, by their names
ACTIVATIONS: dict[str, type[nn.Module]] = {"none": nn.Identity, "gelu": nn.GELU, "relu": nn.ReLU}


class Head(nn.Module):
    """Linear layers one after another; maps ``(n, d)`` to ``(n,)``.

    Args:
        state: "weight" and "bias" of one layer, or "layers.0.weight", "layers.2.weight", … of several.
        activation: What stands between the layers: "none", "gelu" or "relu".

    Raises:
        ValueError: The tensors are no such layers.
    """

    def __init__(self, state: dict[str, Tensor], activation: str = "none") -> None:
        super().__init__()
        if set(state) == {"weight", "bias"}:
            state = {f"layers.0.{k}": v for k, v in state.items()}
        numbers = sorted({int(m[1]) for k in state if (m := re.fullmatch(r"layers\.(\d+)\.(?:weight|bias)", k))})
        if len(state) != 2 * len(numbers) or not numbers:
            raise ValueError(f"its tensors are {', '.join(list(state)[:4])}…, not those of linear layers")
        layers: list[nn.Module] = []
        for i in numbers:
            weight, bias = state[f"layers.{i}.weight"], state[f"layers.{i}.bias"]
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            layer.load_state_dict({"weight": weight, "bias": bias})
            layers += [ACTIVATIONS[activation](), layer] if layers else [layer]
        if layers[-1].out_features != 1:
            raise ValueError("its last layer doesn't give one number")
        self.layers = nn.Sequential(*layers)

    @property
    def width(self) -> int:
        """What it reads of an image, in numbers."""
        first: Any = self.layers[0]
        return int(first.in_features)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x).squeeze(-1)
        return scores


@verifier("aesthetic", cite="schuhmann2022laion")
class Aesthetic:
    """How pleasing an image is, whatever the prompt: a head on CLIP's image embedding, about 1 to 10.

    Args:
        head: The bundled `shapes`, for pictures of the shapes world; or LAION's `sa_0_4_vit_l_14_linear.pth`,
            `sa_0_4_vit_b_32_linear.pth` or `sac+logos+ava1-l14-linearMSE.pth`, or another of their form: a file
            (safetensors, or a torch file without pickled code), a folder with one, or ``owner/name/file`` of the hub.
        backbone: The CLIP that it reads, as the verifier `clip` takes its model; if None, the one that the head was
            made for: shapes-clip, or OpenAI's ViT-L/14 or ViT-B/32 with quick GELU, by the width of the head.
        device: Where both run; where the images are, if None.
        dtype: Of the CLIP: float32, bfloat16 or float16. The head is computed in float32.
        offload: Leave the device after every call.

    Raises:
        UserError: when the head or the CLIP can't be loaded, or they don't fit.
    """

    name = "aesthetic"
    range = None
    reads_prompt = False
    differentiable = True
    licence = "Apache-2.0"

    def __init__(
        self,
        *,
        head: str = SHAPES,
        backbone: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        offload: bool = False,
    ) -> None:
        module, self._reads, file, revision = _load(head)
        if backbone is None:
            backbone = BUNDLED if head == SHAPES else B_16 if "b_16" in file.name else BACKBONES.get(module.width)
        if backbone is None:
            raise UserError(f"The head {head!r} reads {module.width} numbers; give the CLIP it is for, as backbone=….")
        if head != SHAPES:
            self.licence = next((v for k, v in LICENCES.items() if file.name.startswith(k)), "see the head's source")
        self.head = Network(module, [file], head, revision=revision, device=device)
        self.clip = Clip(model=backbone, device=device, dtype=dtype, offload=offload)
        wide = self._width()
        if wide != module.width:
            raise UserError(
                f"The head {head!r} reads {module.width} numbers of an image, and {backbone!r} gives {wide}; give the"
                " CLIP that it was made for, as backbone=…."
            )

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1]: float32 ``(n,)``, about 1 to 10; the prompts don't matter.

        Gradients reach the images where autograd is on.
        """
        check("aesthetic", images, prompts)
        if not len(images):
            return torch.zeros(0, device=images.device)
        return self.rate(self.read(images)).to(images.device)

    def rate(self, read: Tensor) -> Tensor:
        """Scores, float32 ``(n,)``, of what the head reads ``(n, d)``: unit embeddings, or what `read` returns."""
        with self.head.on(read.device) as device:
            scores: Tensor = self.head.module(read.to(device, torch.float32))
            return scores

    def read(self, images: Tensor) -> Tensor:
        """What the head reads of images ``(n, 3, h, w)`` in [0, 1]: unit embeddings, or statistics of stages.

        Returns:
            float32 ``(n, d)``.
        """
        if not self._reads:
            return self.clip.embed_images(images)
        return pooled(self.clip, self._reads, images)

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: the head's source and hash, and all of its CLIP's identity."""
        about = {"name": self.name, **self.head.identity(), "dtype": self.clip.identity()["dtype"]}
        return {**about, "reads": self._reads or "embedding", "backbone": self.clip.identity()}

    def _width(self) -> int:
        if not self._reads:
            return int(self.clip.network.module.visual.output_dim)
        size = self.clip.preprocessing["size"]
        side = size if isinstance(size, int) else size[0]
        with plain_tensors(), torch.no_grad():
            return self.read(torch.zeros(1, 3, side, side)).shape[1]


def pooled(clip: Clip, stages: Sequence[str], images: Tensor) -> Tensor:
    """Mean, standard deviation and maximum over the places of each channel of some stages of a CLIP's image tower.

    Args:
        clip: Whose tower.
        stages: Its modules, which return ``(n, channels, height, width)``.
        images: ``(n, 3, h, w)`` in [0, 1].

    Returns:
        float32 ``(n, 3 · channels of all stages)``.
    """
    told: list[Tensor] = []

    def keep(module: nn.Module, given: Any, x: Tensor) -> None:
        x = x.float()
        # A flat picture has no deviation, and the square root no slope there.
        told.extend((x.mean((2, 3)), (x.var((2, 3), correction=0) + 1e-6).sqrt(), x.amax((2, 3))))

    with ExitStack() as hooks:
        for name in stages:
            hook = clip.network.module.visual.get_submodule(name).register_forward_hook(keep)
            hooks.callback(hook.remove)
        clip.embed_images(images)
    return torch.cat(told, 1)


def _load(head: str) -> tuple[Head, list[str], Path, str | None]:
    """The head, the stages that it reads (none: the embedding), its file and its revision on the hub."""
    source = str(resources.files("imgscale.assets") / "shapes" / "shapes-aesthetic") if head == SHAPES else head
    file, revision = fetch_file("aesthetic head", source)
    state = read_state("aesthetic head", head, file)
    about: dict[str, str] = {}
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            about = opened.metadata() or {}
    try:
        with plain_tensors():
            module = Head({k: v.float() for k, v in state.items()}, about.get("activation", "none"))
    except (ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"The file {head!r} is no aesthetic head ({' '.join(str(error).split())[:200]}); give one of LAION's form:"
            " weight and bias, or layers.0.weight and so on."
        ) from error
    return module, about.get("reads", "").split(), file, revision

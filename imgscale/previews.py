"""Cheap decoders for previews: a tiny autoencoder, or a linear map from latents to colours.

A stepwise search looks at x0 far more often than it finishes images, and the VAE's decoder may then cost more than the
model. Unfinished x0 can be decoded by something cheaper; finished images always come from the VAE itself.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from imgscale.errors import UnknownName, UserError

if TYPE_CHECKING:
    from imgscale.denoiser import Denoiser
    from imgscale.models import ModelSettings

# What the tiny autoencoders were made for, by the latents: (channels, scaling factor). All are MIT.
TINY = {
    (4, 0.18215): "madebyollin/taesd",
    (4, 0.13025): "madebyollin/taesdxl",
    (16, 1.5305): "madebyollin/taesd3",
    (16, 0.3611): "madebyollin/taef1",
}
NAMES = ("full", "linear", "tiny")
SAMPLES, SIDE = 24, 256  # images that the linear map is fitted to, and their side in pixels

_fitted: weakref.WeakKeyDictionary[Any, Linear] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Linear(nn.Module):
    """A linear map from each latent pixel to the mean colour of its part of the image, in the place of a VAE.

    Args:
        weight: float32 (3, channels).
        bias: float32 (3,).
        factor: Image pixels to a latent pixel, on a side.
        config: The VAE's own, by which pipelines scale latents before they decode.
    """

    def __init__(self, weight: Tensor, bias: Tensor, factor: int, config: Any) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)
        self.factor, self.config = factor, config

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def decode(self, z: Tensor, return_dict: bool = False, **_: Any) -> tuple[Tensor]:
        """Images (n, 3, h * factor, w * factor), about in [-1, 1], of latents (n, channels, h, w) or, of a video VAE,
        (n, channels, 1, h, w).
        """
        flat = z[:, :, 0] if z.ndim == 5 else z
        colours = torch.einsum("kc,nchw->nkhw", self.weight, flat.to(self.weight)) + self.bias[:, None, None]
        images = functional.interpolate(colours, scale_factor=self.factor, mode="bilinear", align_corners=False)
        return (images[:, :, None] if z.ndim == 5 else images,)


def load(preview: Any, denoiser: Denoiser, settings: ModelSettings) -> Any:
    """A preview decoder that takes the place of a pipeline's VAE; None for "full", the VAE itself.

    Args:
        preview: "full"; "tiny", the tiny autoencoder made for these latents; "linear"; a folder or hub id of an
            `AutoencoderTiny`; or a loaded one.
        denoiser: The pipeline.
        settings: Say what "tiny" is for the model.

    Raises:
        UserError: There is none such, or none that fits the VAE's latents.
    """
    if preview == "full":
        return None
    vae, device = denoiser.vae, denoiser.device  # which an offloaded VAE doesn't show itself
    if vae is None or not hasattr(vae, "decode") or not hasattr(vae, "encode"):
        raise UserError(f"This pipeline has no VAE whose previews could be {preview!r}; use preview='full'.")
    if preview == "linear":
        if vae not in _fitted:
            _fitted[vae] = fit(vae, device)
        return _fitted[vae]
    if not isinstance(preview, str | Path):
        if not all(hasattr(preview, name) for name in ("decode", "config", "state_dict")):
            raise UserError(
                f"The preview can't be {preview!r}; give full, tiny, linear, a folder or hub id of an AutoencoderTiny,"
                " or a loaded one."
            )
        return _fitting(preview, vae, str(type(preview).__name__))
    return _tiny(settings.tiny or made_for(vae) if preview == "tiny" else str(preview), vae, device)


def identity(decoder: Any) -> str | None:
    """What records know a preview decoder by: its kind and a hash of its weights, made once; None for the VAE."""
    if decoder is None:
        return None
    if decoder not in _known:
        digest = hashlib.sha256()
        for name, tensor in sorted(decoder.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().numpy().tobytes())
        _known[decoder] = f"{type(decoder).__name__} {digest.hexdigest()[:16]}"
    return _known[decoder]


def made_for(vae: Any) -> str:
    config = vae.config
    latents = int(config.get("latent_channels") or 0), float(config.get("scaling_factor") or math.nan)
    for (channels, scale), name in TINY.items():
        if channels == latents[0] and math.isclose(scale, latents[1], rel_tol=1e-3):
            return name
    raise UserError(
        f"No tiny autoencoder is known for this VAE ({latents[0]} channels, scaling factor {latents[1]:g}); give the"
        " folder or hub id of one that was made for its latents, or use linear or full."
    )


def check(preview: str) -> str:
    """Where the decoder of a name is loaded from, or the name itself for "full", "tiny" and "linear". Loads nothing.

    Raises:
        UserError: It can be none.
    """
    from imgscale.models import bundled_folder, may_be_hub_id

    bundled = bundled_folder() / preview
    if preview in NAMES or may_be_hub_id(preview):
        return preview
    if "/" not in preview and (bundled / "config.json").is_file():
        return str(bundled)
    folder = Path(preview).expanduser()
    if not folder.is_dir():
        raise UnknownName(
            "preview", preview, NAMES, "A folder or a hub id (owner/name) of an AutoencoderTiny will do, too."
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"The folder {preview!r} holds no config.json, so it is no AutoencoderTiny; give one.")
    return str(folder)


def _tiny(name: str, vae: Any, device: torch.device) -> Any:
    from diffusers import AutoencoderTiny

    try:
        made = AutoencoderTiny.from_pretrained(check(name), torch_dtype=vae.dtype, use_safetensors=True)
    except UserError:
        raise
    except Exception as error:  # diffusers, the hub and safetensors raise a dozen kinds
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"The preview decoder {name!r} can't be loaded ({reason}); give full, tiny, linear, or a folder or hub id"
            " of an AutoencoderTiny."
        ) from error
    return _fitting(made.to(device).eval().requires_grad_(False), vae, name)


def _fitting(decoder: Any, vae: Any, name: str) -> Any:
    there, here = decoder.config.get("latent_channels"), vae.config.get("latent_channels")
    if there != here:
        raise UserError(
            f"The preview decoder {name!r} takes latents of {there} channels, and this model's have {here}; give one"
            " that was made for them."
        )
    return decoder


# ---------------------------------------------------------------------------------------------------- the linear map


@torch.no_grad()
def fit(vae: Any, device: torch.device) -> Linear:
    """The linear map that a VAE's decoder is nearest to, by least squares on synthetic images.

    They are dead leaves (discs that cover each other, with sizes by a power law), whose statistics are near those of
    photographs (Lee, Mumford, Huang 2001). Each is encoded and decoded once; nothing random is left.
    """
    with torch.inference_mode(False):
        rows, colours = [], []
        factor = 1
        side = max(int(vae.config.get("sample_size") or SIDE), 64)
        for image in dead_leaves(SAMPLES, min(side, SIDE)):
            pixels = (image[None] * 2 - 1).to(device, vae.dtype)
            video = "Conv3d" in {type(m).__name__ for m in vae.modules()} or _is_causal(vae)
            encoded = vae.encode(pixels[:, :, None] if video else pixels)
            latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded[0]
            decoded = vae.decode(latents, return_dict=False)[0]
            if video:
                latents, decoded = latents[:, :, 0], decoded[:, :, 0]
            factor = decoded.shape[-1] // latents.shape[-1]
            rows.append(latents[0].flatten(1).T.double().cpu())
            colours.append(functional.avg_pool2d(decoded.float()[:, :3], factor)[0].flatten(1).T.double().cpu())
        a = torch.cat(rows)
        solution = torch.linalg.lstsq(torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1), torch.cat(colours))
        weight, bias = solution.solution[:-1].T.float().contiguous(), solution.solution[-1].float()
        return Linear(weight, bias, factor, vae.config).to(device)


def _is_causal(vae: Any) -> bool:
    return any("Causal" in type(m).__name__ and "3d" in type(m).__name__.lower() for m in vae.modules())


def dead_leaves(n: int, side: int, seed: int = 0) -> Tensor:
    """Synthetic images float32 (n, 3, side, side) in [0, 1]."""
    chance = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    images = torch.rand(n, 3, 1, 1, generator=chance).expand(n, 3, side, side).clone()
    low, high = 2.0, side / 3
    for image in images:
        for _ in range(150):
            u = float(torch.rand((), generator=chance))
            radius = (low**-2 + u * (high**-2 - low**-2)) ** -0.5  # density r^-3: scale invariant
            cx, cy = (torch.rand(2, generator=chance) * side).tolist()
            inside = (x - cx) ** 2 + (y - cy) ** 2 < radius**2
            image[:, inside] = torch.rand(3, 1, generator=chance)
    return images

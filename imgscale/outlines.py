"""A pipeline without its weights: built from the configs that lie in its folder, with hollow networks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from imgscale import previews
from imgscale.errors import UserError
from imgscale.flops import Counter
from imgscale.models import ModelSettings, bundled_folder, locate

_TEXTS = ("*.json", "*.txt", "*.model")  # what a pipeline's folder holds besides weights


def outline(model: str, dtype: torch.dtype) -> tuple[Any, ModelSettings]:
    """A hollow pipeline and its settings.

    Args:
        model: A bundled name, a folder, or a hub id whose configs are in the hub's cache.
        dtype: What the networks would compute in.

    Raises:
        UserError: There is none such, or it can't be built without its weights.
    """
    folder = locate(model) or cached(model)
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        own = getattr(importlib.import_module("diffusers"), index["_class_name"])
        parts = {name: _part(folder / name, *value) for name, value in index.items() if isinstance(value, list)}
        plain = {name: v for name, v in index.items() if not isinstance(v, list) and not name.startswith("_")}
        pipe = own(**parts, **plain)
    except Exception as error:  # configs may ask for anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"The model {model!r} can't be built from its configs ({type(error).__name__}: {reason}); load it with"
            " imgscale.load and ask its cost()."
        ) from error
    for part in parts.values():
        if isinstance(part, nn.Module):
            part.to(dtype).eval()
    return pipe, ModelSettings.read(folder)


def cached(model: str) -> Path:
    """The folder of a hub id's configs in the hub's cache.

    Raises:
        UserError: They aren't there.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, local_files_only=True, allow_patterns=list(_TEXTS)))
    except Exception as error:  # the hub's client raises a dozen kinds
        raise UserError(
            f"The configs of {model!r} aren't in the hub's cache here; fetch them with: hf download {model} --include"
            " '*.json' '*.txt' '*.model'."
        ) from error
    if not (folder / "model_index.json").exists():
        raise UserError(f"What the hub's cache holds of {model!r} has no model_index.json; give a diffusers pipeline.")
    return folder


def _part(folder: Path, library: str | None, name: str | None) -> Any:
    """A component: a network hollow, anything else (tokenizer, scheduler) as it is. None for what isn't there."""
    if library not in ("diffusers", "transformers") or name is None:  # a safety checker, say
        return None
    made: Any = getattr(importlib.import_module(library), name)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        return made.from_pretrained(str(folder))
    network: Any = made
    with torch.device("meta"), Counter():
        if library == "diffusers":
            return network.from_config(network.load_config(str(folder)))
        return network(network.config_class.from_pretrained(str(folder)))


def preview(name: str, vae: Any, settings: ModelSettings) -> Any:
    """A hollow decoder of previews, or None for the VAE; see `imgscale.previews`.

    Raises:
        UserError: There is none such for this VAE, or its config isn't here.
    """
    from diffusers import AutoencoderTiny

    if name == "full":
        return None
    channels = int(vae.config.get("latent_channels") or 4)
    if name == "linear":
        factor = 2 ** (len(vae.config.get("block_out_channels") or (0,) * 4) - 1)
        return previews.Linear(torch.zeros(3, channels), torch.zeros(3), factor, vae.config).to("meta")
    source = (settings.tiny or previews.made_for(vae)) if name == "tiny" else name
    with torch.device("meta"):
        if source in previews.TINY.values():  # all of one architecture
            return AutoencoderTiny(latent_channels=channels).to(vae.dtype)
        folder = bundled_folder() / source
        try:
            config = AutoencoderTiny.load_config(str(folder if folder.is_dir() else source), local_files_only=True)
        except Exception as error:  # diffusers and the hub raise a dozen kinds
            raise UserError(
                f"The config of the preview decoder {source!r} isn't here; give full, tiny, linear, or a folder."
            ) from error
        return AutoencoderTiny.from_config(config).to(vae.dtype)

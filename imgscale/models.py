"""From what a user calls a model to a loaded pipeline and its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.errors import UnknownName, UserError

if TYPE_CHECKING:
    import torch

SETTINGS = "imgscale.json"


@dataclass(frozen=True)
class ModelSettings:
    """What the search should know of a model; `imgscale.json` in its folder, all of it optional.

    Args:
        steps: Transitions of an ordinary sample; the pipeline's own default for None.
        guidance_scale: The pipeline's own default for None.
        distilled: Whether it is a few-step model, whose x0 is sharp from the start.
        path: Where stepwise searches walk by default, "own", "linear" or "vp"; None is vp on a distilled flow model and
            own otherwise. A model that was distilled at the very times of its grid knows no others: "own".
        clip: What `verifier="clip"` means for this model: an open_clip folder or "model/pretrained", or a bundled CLIP.
        tiny: What `preview="tiny"` means for this model: a bundled tiny autoencoder, or the folder or hub id of one;
            the one that is known for the VAE's latents for None.
        preview: What decodes previews by default: "full", "tiny" or "linear".
        defaults: Further arguments of every pipeline call.
        summary: One line for lists.
    """

    steps: int | None = None
    guidance_scale: float | None = None
    distilled: bool = False
    path: str | None = None
    clip: str = "ViT-B-32/laion2b_s34b_b79k"
    tiny: str | None = None
    preview: str = "full"
    defaults: dict[str, Any] = field(default_factory=dict)
    summary: str = ""

    @classmethod
    def read(cls, folder: Path) -> ModelSettings:
        """The settings in a model's folder, or the defaults.

        Raises:
            UserError: The file can't be read or has unknown keys.
        """
        file = folder / SETTINGS
        if not file.exists():
            return cls()
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} can't be read as JSON ({error}); mend it or delete it.") from error
        if not isinstance(values, dict):
            raise UserError(f'{file} holds {values!r}, but settings are an object, such as {{"steps": 20}}; mend it.')
        known = {f.name for f in fields(cls)}
        for key, value in values.items():
            if key not in known:
                raise UnknownName(f"key in {file}", key, known)
            wanted, right = _KINDS[key]
            if not right(value):
                raise UserError(f"The key {key!r} in {file} can't be {value!r}; give {wanted}.")
        return cls(**values)

    def but(self, **said: Any) -> ModelSettings:
        """The same with what somebody says of the model; None says nothing. Defaults are added to.

        Raises:
            UserError: A value that can't be.
        """
        said = {key: value for key, value in said.items() if value is not None}
        for key, value in said.items():
            wanted, right = _KINDS[key]
            if not right(value):
                raise UserError(f"{key} can't be {value!r}; give {wanted.removesuffix(' or null')}.")
        return replace(self, **{**said, "defaults": {**self.defaults, **said.get("defaults", {})}})


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "steps": ("a whole number from 1 or null", lambda v: v is None or (_number(v) and isinstance(v, int) and v >= 1)),
    "guidance_scale": ("a number or null", lambda v: v is None or _number(v)),
    "distilled": ("true or false", lambda v: isinstance(v, bool)),
    "path": ("one of own, linear, vp or null", lambda v: v in (None, "own", "linear", "vp")),
    "clip": ("a text", lambda v: isinstance(v, str) and bool(v)),
    "tiny": ("a text or null", lambda v: v is None or (isinstance(v, str) and bool(v))),
    "preview": ("full, tiny or linear", lambda v: v in ("full", "tiny", "linear")),
    "defaults": ("a dictionary", lambda v: isinstance(v, dict)),
    "summary": ("a text", lambda v: isinstance(v, str)),
}


def bundled_folder() -> Path:
    """Where the bundled models lie."""
    return Path(str(resources.files("imgscale.assets") / "shapes"))


def bundled() -> dict[str, Path]:
    """The bundled generators by name."""
    return {p.parent.name: p.parent for p in sorted(bundled_folder().glob("*/model_index.json"))}


def load_pipeline(
    model: Any, *, device: str | torch.device | None, dtype: torch.dtype | None
) -> tuple[Any, str, ModelSettings]:
    """The pipeline, what to call it in records, and its settings.

    Args:
        model: A bundled name, a folder, a hub id, or a loaded diffusers pipeline, which stays as it is.
        device: Where to load to; CUDA or MPS where there is one, if None. Not for a loaded pipeline.
        dtype: Of the weights; float32 on a CPU and bfloat16 elsewhere, if None. Not for a loaded pipeline.

    Raises:
        UserError: Nothing loads by this name; the message says why.
    """
    if not isinstance(model, str | Path):
        if device is not None or dtype is not None:
            raise UserError(
                "A loaded pipeline keeps its device and dtype; move it yourself (pipe.to(…)) and leave out"
                " device= and dtype=."
            )
        if not hasattr(model, "components"):
            raise UserError(
                f"The model can't be {model!r}; give a name, a folder, a hub id or a loaded diffusers pipeline."
            )
        source = str(getattr(model, "config", {}).get("_name_or_path") or type(model).__name__)
        folder = Path(source)
        return model, source, ModelSettings.read(folder) if folder.is_dir() else ModelSettings()

    name = str(model)
    place = locate(name)
    settings = ModelSettings.read(place) if place else ModelSettings()
    return _from_pretrained(str(place or name), name, device, dtype), name, settings


def folder_of(model: Any) -> Path | None:
    """The folder that a model, in any form that `load_pipeline` takes, was or will be loaded from, if it was one."""
    if isinstance(model, str | Path):
        return locate(str(model))
    folder = Path(str(getattr(model, "config", {}).get("_name_or_path") or ""))
    return folder if folder.is_dir() and folder != Path() else None


def locate(name: str) -> Path | None:
    """The folder of a model that is bundled or lies on this machine; None for a hub id. Nothing is loaded.

    Raises:
        UserError: It can be none of these.
    """
    known = bundled()
    folder = known.get(name) or Path(name).expanduser()
    if not folder.is_dir():
        if not may_be_hub_id(name):
            raise UnknownName("model", name, known, "A folder or a hub id (owner/name) will do, too.")
        return None
    if not (folder / "model_index.json").exists():
        raise UserError(f"The folder {name!r} holds no model_index.json, so it is no diffusers pipeline; give one.")
    return folder


def place(device: str | torch.device | None = None) -> torch.device:
    """A device that can be used here; CUDA or MPS where there is one, if None.

    Raises:
        UserError: It can't be used.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"The device {str(device)!r} can't be used here ({_line(error)}); try 'cpu'.") from error
    return device


def may_be_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name, and isn't a path."""
    owner, slash, rest = name.partition("/")
    return bool(owner and slash and rest) and not name.startswith((".", "/", "~")) and "/" not in rest


def _from_pretrained(source: str, name: str, device: str | torch.device | None, dtype: torch.dtype | None) -> Any:
    import torch
    from diffusers import DiffusionPipeline

    device = place(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        with _without_bars() if Path(source).is_dir() else nullcontext():
            pipe = DiffusionPipeline.from_pretrained(source, dtype=dtype, use_safetensors=True)
    except Exception as error:  # diffusers, the hub and safetensors raise a dozen kinds
        raise UserError(_why_not(name, error)) from error
    if device.type == "cpu" and getattr(pipe, "vae", None) is not None:
        pipe.vae.to(memory_format=torch.channels_last)  # convolutions run several times faster so
    return pipe.to(device)


@contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bar for each file read from the disk; what comes over the network keeps its own."""
    from diffusers.utils import logging as diffusers
    from transformers.utils import logging as transformers

    shown = [library for library in (diffusers, transformers) if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


def _why_not(name: str, error: Exception) -> str:
    text = _line(error)
    lower = text.lower()
    if "gated" in lower or "401 client" in lower or "403 client" in lower:
        return f"The model {name!r} is gated: accept its licence on the hub and log in with 'hf auth login'."
    if isinstance(error, MemoryError) or "out of memory" in lower:
        return f"There isn't enough memory to load {name!r}; choose a smaller model or dtype."
    if "no file named" in lower and ".safetensors" in lower:
        return (
            f"The model {name!r} lacks {_weights(text)}; give one with all its weights as safetensors, since pickled"
            " ones (.bin, .ckpt) can run code and are never loaded."
        )
    if "header" in lower or "safetensor" in lower or "corrupt" in lower or "incomplete" in lower:
        return f"A weights file of {name!r} is damaged or incomplete ({_weights(text)}); fetch the model again."
    return f"The model {name!r} can't be loaded: {text} Check the name, the network, or give a local folder."


def _weights(text: str) -> str:
    """The weights file that an error speaks of, or all of its text."""
    file = re.search(r"[^\s'\"]+\.safetensors", text)
    folder = re.search(r"in directory (\S+?)\.?(?: |$)", text)
    return text if file is None else str(Path(folder[1]) / file[0]) if folder else file[0]


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "…"

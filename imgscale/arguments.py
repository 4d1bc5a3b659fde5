"""What a user asks of a pipeline's call, checked and put the way that the pipeline wants it."""

import inspect
import re
from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from imgscale.errors import UnknownName, UserError

__all__ = ["Arguments"]


class Arguments:
    """The arguments that a pipeline's call takes.

    Args:
        pipe: The pipeline.
        network: Its denoising network, or None.
        defaults: Arguments for every call.

    Attributes:
        guidance: The argument that classifier-free guidance goes by, or the one that a distilled model embeds;
            None where there is neither.

    Raises:
        UserError: The pipeline lacks an argument that it is driven through, or doesn't know a default.
    """

    def __init__(self, pipe: Any, network: Any, defaults: Mapping[str, Any]) -> None:
        self._pipe, self._network = pipe, network
        self._name = type(pipe).__name__
        self._parameters = inspect.signature(type(pipe).__call__).parameters
        for needed in ("prompt", "latents", "output_type"):
            if needed not in self._parameters:
                raise UserError(
                    f"{self._name} takes no `{needed}`, which imgscale drives a pipeline through: choose a "
                    "text-to-image pipeline with latents (docs/pipelines.md lists those that work)."
                )
        self.defaults = dict(defaults)
        self._check_names(self.defaults)
        embeds = getattr(getattr(network, "config", None), "guidance_embeds", False)
        names = ("guidance_scale", "true_cfg_scale") if embeds else ("true_cfg_scale", "guidance_scale")
        self.guidance = next((name for name in names if name in self._parameters), None)

    def default(self, name: str) -> Any:
        """The value of an argument that isn't given."""
        parameter = self._parameters.get(name)
        own = None if parameter is None or parameter.default is parameter.empty else parameter.default
        return self.defaults.get(name, own)

    def read(
        self,
        prompt: str,
        negative: str | None,
        size: Mapping[str, int | None],
        scale: float | None,
        extra: Mapping[str, Any],
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """A user's request as arguments: the prompts, which come one a row, and the others.

        Raises:
            UserError: The pipeline doesn't know an argument, can't draw at this size, or has no such guidance.
        """
        self._check_names(extra)
        kwargs = {**self.defaults, **extra}
        texts = {"prompt": prompt}
        texts |= {name: kwargs.pop(name) for name in list(kwargs) if _is_text(name, kwargs[name])}
        for name, value in size.items():
            if value is not None:
                self._check_size(name, value)
                kwargs[name] = value
        if negative is not None:
            if "negative_prompt" not in self._parameters:
                raise UserError(f"{self._name} takes no negative prompt: leave it out.")
            texts["negative_prompt"] = negative
        self._guide(kwargs, texts, scale)
        return texts, kwargs

    def _guide(self, kwargs: dict[str, Any], texts: dict[str, str], scale: float | None) -> None:
        if scale is not None:
            if self.guidance is None:
                raise UserError(f"{self._name} takes no guidance_scale: leave it out.")
            kwargs[self.guidance] = scale
        if "guidance_schedule" in self._parameters:  # by step, which a search has none of: its first value
            schedule = kwargs.pop("guidance_schedule", None) or self.default("guidance_schedule")
            kwargs["guidance_schedule"] = None
            kwargs.setdefault("guidance_scale", schedule[0])
        if self.guidance == "true_cfg_scale":
            # Such pipelines guide only against a negative prompt: an empty one where guidance was asked for. They
            # warn in every call of one without the other.
            own = self.default("true_cfg_scale") if "negative_prompt" in texts else 1.0
            if kwargs.setdefault("true_cfg_scale", own) > 1:
                texts.setdefault("negative_prompt", "")
            else:
                texts.pop("negative_prompt", None)

    def _check_names(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in _OURS:
                raise UserError(f"The argument {name!r} of {self._name} is imgscale's own to set: leave it out.")
            if name not in self._parameters:
                raise UnknownName(f"argument of {self._name}", name, set(self._parameters) - _OURS - {"self"})

    def _check_size(self, name: str, value: int) -> None:
        unit, limit = self._size_unit(), self._size_limit()
        if value < unit or value % unit:
            near = max(unit, round(value / unit) * unit)
            raise UserError(
                f"{self._name} can't draw a {name} of {value} pixels: give a multiple of {unit}, such as {near}."
            )
        if limit is not None and value > limit:
            raise UserError(f"{self._name} can't draw a {name} of {value} pixels: give {limit} at most.")

    def _size_limit(self) -> int | None:
        """The side of the largest image that a table of position embeddings has room for, where there is one."""
        for name in ("pos_embed", "patch_embed"):
            embedding = getattr(self._network, name, None)
            positions = getattr(embedding, "pos_embed", None)
            if getattr(embedding, "pos_embed_max_size", None) and isinstance(positions, Tensor):
                return isqrt(positions.numel() // positions.shape[-1]) * self._size_unit()
        return None

    def _size_unit(self) -> int:
        """What heights and widths must be a multiple of; some pipelines would silently round them down."""
        unit = int(getattr(self._pipe, "vae_scale_factor", 1))
        patch = getattr(getattr(self._network, "config", None), "patch_size", 1)
        packed = hasattr(self._pipe, "_pack_latents") or hasattr(self._pipe, "_patchify_latents")
        return unit * (patch if isinstance(patch, int) and patch > 1 else 2 if packed else 1)


_OURS = {
    "latents",
    "generator",
    "output_type",
    "return_dict",
    "num_images_per_prompt",
    "num_inference_steps",
    "timesteps",
    "sigmas",
    "prompt",
}
"""Arguments of a pipeline's call that imgscale sets itself."""

_TEXT = re.compile(r"(negative_)?prompt(_\d+)?")


def _is_text(name: str, value: Any) -> bool:
    """Whether an argument is one of the prompts, which come one a row."""
    return isinstance(value, str) and _TEXT.fullmatch(name) is not None

"""A pipeline's own call, made on a copy of it that is thrown away.

What a call writes to the pipeline goes to the copy. What it writes to the networks, which are shared, is
undone: attention processors (perturbed-attention guidance), the VAE's dtype (upcasting).
"""

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from imgscale.conditions import Encoder, Row
from imgscale.recorder import Idle, record

__all__ = ["Caller", "Latents"]


class Latents:
    """Stands between a pipeline and its `prepare_latents`: sees what is drawn, may put particles in its place.

    Attributes:
        drawn: What the pipeline drew, in the layout of its loop.
        size: {"height": …, "width": …} of the image in pixels, as far as the pipeline says.
    """

    def __init__(self, pipe: Any, given: Tensor | None = None) -> None:
        self._prepare = pipe.prepare_latents
        self._signature = inspect.signature(self._prepare)
        self._given = given
        self.drawn: Tensor | None = None
        self.size: dict[str, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._signature.bind(*args, **kwargs).arguments
        self.size = {name: int(arguments[name]) for name in ("height", "width") if name in arguments}
        result = self._prepare(*args, **kwargs)
        first, *rest = result if isinstance(result, tuple) else (result,)
        self.drawn = first
        if self._given is not None:
            first = self._given.to(first)
        return (first, *rest) if isinstance(result, tuple) else first


class Caller:
    """Calls one pipeline.

    Args:
        pipe: The user's own; never written to.

    Attributes:
        injects: The pipeline takes or returns latents in another layout than its loop has them in (Flux 2), so
            that particles are put in the place of what it draws. The first call finds out.
        turns: The pipeline can't do without a turn of its loop (LCM); it gets one with networks that do
            nothing. The first call finds out.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._function = type(pipe).__call__
        self._encoder = Encoder(pipe.encode_prompt) if hasattr(pipe, "encode_prompt") else None
        self._networks = [
            name
            for name, part in pipe.components.items()
            if ("transformer" in name or "unet" in name) and isinstance(part, torch.nn.Module)
        ]
        self.injects = False
        self.turns = False

    @property
    def network(self) -> Any:
        """The pipeline's denoising network, or None."""
        return getattr(self._pipe, self._networks[0]) if self._networks else None

    def __call__(
        self,
        rows: tuple[Row, ...],
        kwargs: Mapping[str, Any],
        timesteps: Tensor | None = None,
        *,
        read: bool = False,
        x: Tensor | None = None,
        latents: Latents | None = None,
        idle: Idle | None = None,
        vae: Any = None,
        device: torch.device | None = None,
    ) -> tuple[Tensor, Any]:
        """One call for a batch of these rows.

        Args:
            rows: One for each particle.
            kwargs: Further arguments of the call.
            timesteps: What the network is to be called with, see `record`; None for no evaluation.
            read: Whether the recorder is to keep the grid of the user's scheduler.
            x: (n, ...) the particles, in the dtype that the pipeline takes.
            latents: To look at, or to replace, what the pipeline draws.
            idle: Takes the place of the networks.
            vae: Takes the place of the VAE.
            device: Where the pipeline runs; it is asked for None, which takes it a walk through all its modules.

        Returns:
            What the pipeline returns first, and the recorder.
        """
        if timesteps is None:
            timesteps = torch.zeros(1 if self.turns else 0)
            idle = Idle(self.network) if self.turns else idle
        recorder = record(self._pipe.scheduler, timesteps, read)
        texts = {name: [row.texts[name] for row in rows] for name in rows[0].texts}
        arguments = {"num_inference_steps": 1, **kwargs, **texts, "return_dict": False}
        arguments.setdefault("generator", torch.Generator().manual_seed(0))  # the global one mustn't move on
        if x is not None and self.injects:
            latents = Latents(self._pipe, x)
        elif x is not None:
            arguments["latents"] = x
        differentiable = torch.is_grad_enabled() and x is not None and x.requires_grad
        function = inspect.unwrap(self._function) if differentiable else self._function
        device = device or self._pipe._execution_device
        decodes = arguments["output_type"] != "latent"
        with _plain_mode(differentiable), self._copy(rows, recorder, device, decodes) as view:
            if latents is not None:
                view.__dict__["prepare_latents"] = latents
            if vae is not None:
                view.__dict__["vae"] = vae
            if idle is not None:
                view.__dict__.update(dict.fromkeys(self._networks, idle))
            return function(view, **arguments)[0], recorder

    @contextmanager
    def _copy(self, rows: tuple[Row, ...], recorder: Any, device: torch.device, decodes: bool) -> Iterator[Any]:
        view = copy.copy(self._pipe)
        own: Any = type(view)
        view.__class__ = _settled(own)
        view.__dict__["_settled_device"] = device
        # Straight into the dictionary: a pipeline's __setattr__ would write to its config, too.
        view.__dict__.update(scheduler=recorder, _progress_bar_config={"disable": True})
        if self._encoder is not None:
            view.__dict__["encode_prompt"] = self._encoder.bind(rows)
        if getattr(view, "safety_checker", None) is not None:
            view.__dict__["safety_checker"] = None
        if getattr(view, "_all_hooks", None):
            view.__dict__["_all_hooks"] = []  # or the pipeline would rebuild its offloading after every call
        vae, network = getattr(view, "vae", None) if decodes else None, self.network
        dtype = getattr(vae, "dtype", None)
        processors = dict(network.attn_processors) if hasattr(view, "pag_applied_layers") else None
        try:
            yield view
        finally:
            if vae is not None and vae.dtype != dtype:
                vae.to(dtype)
            if processors is not None and network.attn_processors != processors:
                network.set_attn_processor(processors)


@functools.cache
def _settled(own: Any) -> Any:
    """The pipeline's class, but it knows where it runs, and needn't look through its modules in every call."""
    place = property(lambda self: self.__dict__["_settled_device"])
    return type(own.__name__, (own,), {"_execution_device": place, "__module__": own.__module__})


@contextmanager
def _plain_mode(differentiable: bool) -> Iterator[None]:
    """Gradients as asked, and never inference mode.

    Pipelines and networks keep tensors (encodings, rotary tables) that a later call with gradients couldn't use
    if they were inference tensors.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
        yield

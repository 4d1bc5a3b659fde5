"""Any diffusers text-to-image pipeline as four pure functions: encode, prior, predict, decode.

There is no adapter for a model: see `imgscale.recorder` for how a pipeline's own call becomes one model
evaluation. The pipeline that the user passes in is never written to: every call runs on a shallow copy that
is thrown away.
"""

import copy
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from imgscale import schedules
from imgscale.conditions import Condition, Encoder, Row, freeze, shapes
from imgscale.errors import UnknownName, UserError
from imgscale.paths import Path, Time, as_time
from imgscale.pipelines import MIXED_TIMES
from imgscale.recorder import Idle, record
from imgscale.schedules import Clock

__all__ = ["Condition", "Denoiser"]

_REMEMBERED_PROMPTS = 64  # a T5 encoding of 512 tokens in bfloat16 is 4 MB


class Denoiser:
    """A diffusers pipeline seen as pure functions of (keys, latents, time, condition).

    Latents are float32 in the pipeline's own layout, on its device; times run from 1 (noise) to 0 (data) on
    `path`.

    Args:
        pipe: A loaded pipeline. LoRAs, offloading, tiling and quantisation stay as they are set on it.
        defaults: Further arguments for every call of it, such as {"max_sequence_length": 256}.

    Attributes:
        path: The path that the model was trained on.
        mixed_times: Whether particles at different times can share one call of the network. Where it is
            False, `predict` still takes a tensor of times, but calls the pipeline once for each of them.
        guidance: What the pipeline calls guidance_scale ("guidance_scale", "true_cfg_scale"), or None.

    Raises:
        UserError: The pipeline can't be driven this way.
    """

    def __init__(self, pipe: Any, defaults: Mapping[str, Any] | None = None) -> None:
        self._pipe = pipe
        self._call = type(pipe).__call__
        self._parameters = inspect.signature(self._call).parameters
        self.name = type(pipe).__name__
        for needed in ("prompt", "latents", "output_type"):
            if needed not in self._parameters:
                raise UserError(
                    f"{self.name} takes no `{needed}`, which imgscale drives a pipeline through: choose a "
                    "text-to-image pipeline with latents (docs/pipelines.md lists those that work)."
                )
        self._defaults = dict(defaults or {})
        self._check_names(self._defaults)
        self._schedule = schedules.read(pipe.scheduler)
        self.path: Path = self._schedule.path
        self._encoder = Encoder(pipe.encode_prompt) if hasattr(pipe, "encode_prompt") else None
        self._conditions: OrderedDict[Any, Condition] = OrderedDict()
        self._network = next(
            (n for n in ("transformer", "unet") if isinstance(getattr(pipe, n, None), torch.nn.Module)), None
        )
        self.guidance = self._guidance_argument()
        self.guidance_default: float | None = self._default(self.guidance) if self.guidance else None
        self.steps_default: int = self._default("num_inference_steps") or 50
        self._mixed = MIXED_TIMES.get(self.name, {})
        self.mixed_times = bool(self._mixed)

    @property
    def device(self) -> torch.device:
        """Where latents live."""
        return torch.device(self._pipe._execution_device)

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in."""
        network = getattr(self._pipe, self._network) if self._network else self._pipe
        return network.dtype  # type: ignore[no-any-return]

    @property
    def description(self) -> dict[str, Any]:
        """What the records say about the model."""
        return {
            "pipeline": self.name,
            "source": self._pipe.config.get("_name_or_path"),
            "scheduler": type(self._pipe.scheduler).__name__,
            "prediction": self._schedule.prediction,
            "path": str(self.path),
            "dtype": str(self.dtype).removeprefix("torch."),
            "defaults": {name: repr(value) for name, value in self._defaults.items()},
        }

    def encode(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        **extra: Any,
    ) -> Condition:
        """Everything of a pipeline's call that is neither latents nor time, with the prompt encoded once.

        Args:
            prompt: What to draw.
            negative_prompt: What guidance steers away from.
            height: Of the image in pixels; the pipeline's default for None.
            width: Of the image in pixels; the pipeline's default for None.
            guidance_scale: Strength of guidance; the pipeline's default for None.
            extra: Further arguments of the pipeline's call.

        Raises:
            UserError: The pipeline doesn't know an argument or can't draw at this size.
        """
        self._check_names(extra)
        kwargs = {**self._defaults, **extra}
        texts = {"prompt": prompt} | {
            name: kwargs.pop(name) for name in list(kwargs) if _is_text(name, kwargs[name])
        }
        for name, value in (("height", height), ("width", width)):
            if value is not None:
                kwargs[name] = value
                self._check_size(name, value)
        self._guide(kwargs, texts, negative_prompt, guidance_scale)
        key = (freeze(texts), freeze(kwargs))
        if key in self._conditions:
            self._conditions.move_to_end(key)
            return self._conditions[key]
        condition = self._conditions[key] = self._encode(texts, kwargs)
        if len(self._conditions) > _REMEMBERED_PROMPTS:
            self._conditions.popitem(last=False)
        return condition

    def prior(self, keys: Tensor, cond: Condition) -> Tensor:
        """The noise that the pipeline itself draws from a CPU generator seeded with each key.

        Args:
            keys: int64 (n,) in [0, 2**63).
            cond: From `encode`.

        Returns:
            (n, *cond.latent_shape) float32.
        """
        generators = [torch.Generator("cpu").manual_seed(int(key)) for key in keys.tolist()]
        latents, _ = self._run(cond, len(generators), generator=generators, output_type="latent")
        return latents.float()

    def grid(self, steps: int, cond: Condition) -> Tensor:
        """The times that the pipeline's own scheduler would visit, with its shift and spacing.

        Returns:
            float64 (steps + 1,), decreasing on `path`; the last is 0.
        """
        return schedules.times(self._schedule, self._read_grid(cond, steps), steps)

    def predict(self, x: Tensor, t: Time, cond: Condition) -> Tensor:
        """The model's estimate E[x0 | x_t], guidance included: one model evaluation for each row.

        Differentiable with respect to x where gradients are on and x requires one.

        Args:
            x: (n, *cond.latent_shape) on `path`.
            t: A time, or one for each row, (n,).
            cond: From `encode`, or stacked for n particles.

        Returns:
            (n, *cond.latent_shape) float32.
        """
        t = as_time(t)
        distinct = t.unique()
        if len(distinct) == 1:
            return self._evaluate(x, distinct[0], cond)
        copies = self._mixed.get(cond.passes, 0)
        if copies:
            return self._evaluate(x, t, cond, copies)
        answer = [torch.empty(0)] * len(x)
        for time in distinct:
            rows = (t == time).nonzero()[:, 0].tolist()
            for row, x0 in zip(rows, self._evaluate(x[rows], time, cond.at(rows)), strict=True):
                answer[row] = x0
        return torch.stack(answer)

    def decode(self, x0: Tensor, cond: Condition) -> Tensor:
        """Images of latents, as the pipeline itself decodes them.

        A safety checker is left out: its black images would look like bugs and be ranked; see `flagged`.

        Args:
            x0: (n, *cond.latent_shape).
            cond: From `encode`, or stacked for n particles.

        Returns:
            (n, 3, height, width) float32 in [0, 1].
        """
        images, _ = self._run(cond, len(x0), latents=x0, output_type="pt")
        return images.float()

    # How the pipeline is called

    def _evaluate(self, x: Tensor, t: Tensor, cond: Condition, copies: int = 1) -> Tensor:
        timesteps = cond.clock.timestep(t).repeat(copies)[None] if t.ndim else cond.clock.timestep(t)[None]
        _, recorder = self._run(cond, len(x), timesteps, latents=x, output_type="latent")
        return self._schedule.x0(x.float(), t, recorder.recorded_output)

    def _run(
        self, cond: Condition, n: int, timesteps: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """One call of the pipeline for a batch of n: what it returns, and the recorder."""
        rows = cond.rows_for(n)
        recorder = record(self._pipe.scheduler, torch.empty(0) if timesteps is None else timesteps)
        return self._run_rows(rows, cond.kwargs, recorder, cond.latent_dtype, **kwargs), recorder

    def _run_rows(
        self,
        rows: tuple[Row, ...],
        kwargs: Mapping[str, Any],
        recorder: Any,
        dtype: torch.dtype | None = None,
        latents: Tensor | None = None,
        idle: Idle | None = None,
        observe: dict[str, int] | None = None,
        **more: Any,
    ) -> Tensor:
        texts = {name: [row.texts[name] for row in rows] for name in rows[0].texts}
        differentiable = torch.is_grad_enabled() and latents is not None and latents.requires_grad
        call = inspect.unwrap(self._call) if differentiable else self._call
        with _plain_mode(differentiable), self._view(rows, recorder) as view:
            if idle is not None and self._network is not None:
                view.__dict__[self._network] = idle
            if observe is not None:
                view.__dict__["prepare_latents"] = _observed(self._pipe.prepare_latents, observe)
            if latents is not None:
                # A tensor made under inference_mode may not meet an in-place operation outside of it.
                latents = latents.clone() if latents.is_inference() else latents
                more["latents"] = latents.to(self.device, dtype)
            answer = call(view, **texts, **{"num_inference_steps": 1, **kwargs, **more}, return_dict=False)
        return answer[0]  # type: ignore[no-any-return]

    @contextmanager
    def _view(self, rows: tuple[Row, ...], recorder: Any) -> Iterator[Any]:
        """A copy of the pipeline to throw away. Its networks are shared: what a call changes there is undone."""
        view = copy.copy(self._pipe)
        # Straight into the dictionary: a pipeline's __setattr__ would write to its config, too.
        view.__dict__.update(scheduler=recorder, _progress_bar_config={"disable": True})
        if self._encoder is not None:
            view.__dict__["encode_prompt"] = self._encoder.bind(rows)
        if getattr(view, "safety_checker", None) is not None:
            view.__dict__["safety_checker"] = None
        if getattr(view, "_all_hooks", None):
            view.__dict__[
                "_all_hooks"
            ] = []  # offloading hooks stay; a pipeline rebuilds them after every call
        vae = getattr(view, "vae", None)
        vae_dtype = getattr(vae, "dtype", None)
        network = getattr(view, self._network) if self._network else None
        processors = (
            dict(network.attn_processors) if hasattr(view, "pag_applied_layers") and network else None
        )
        try:
            yield view
        finally:
            if vae is not None and vae.dtype != vae_dtype:
                vae.to(vae_dtype)
            if network is not None and processors is not None and network.attn_processors != processors:
                network.set_attn_processor(processors)

    # How a condition is made

    def _encode(self, texts: dict[str, str], kwargs: dict[str, Any]) -> Condition:
        row = Row(texts)
        size: dict[str, int] = {}
        recorder = record(self._pipe.scheduler, None)
        probe = {**kwargs, "num_inference_steps": self.steps_default}
        try:
            latents = self._run_rows((row,), probe, recorder, observe=size, output_type="latent")
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.name} refuses this call: {' '.join(str(error).split())}") from error
        shape = tuple(latents.shape[1:])
        clock = Clock(self._schedule)
        if not schedules.proportional(self._schedule, recorder.recorded_grid):
            fine = record(self._pipe.scheduler, None)
            self._run_rows((row,), {**kwargs, "num_inference_steps": 1000}, fine, output_type="latent")
            clock = Clock(self._schedule, fine.recorded_grid)
        return Condition(
            key=(tuple(texts), freeze(kwargs), shape, *map(shapes, row.encoded.values())),
            height=kwargs.get("height") or size.get("height") or self._default("height") or 0,
            width=kwargs.get("width") or size.get("width") or self._default("width") or 0,
            latent_shape=shape,
            latent_dtype=latents.dtype,
            passes=self._passes(row, kwargs, latents, clock),
            rows=(row,),
            stacked=False,
            kwargs=kwargs,
            clock=clock,
        )

    def _passes(self, row: Row, kwargs: Mapping[str, Any], latents: Tensor, clock: Clock) -> int:
        """Forward passes in one evaluation, counted on a network that does nothing."""
        if self._network is None:
            return 1
        idle = Idle(getattr(self._pipe, self._network))
        recorder = record(self._pipe.scheduler, clock.timestep(torch.ones(1, dtype=torch.float64)))
        self._run_rows(
            (row,), kwargs, recorder, latents.dtype, latents=latents, idle=idle, output_type="latent"
        )
        return max(idle.rows, 1)

    def _read_grid(self, cond: Condition, steps: int) -> tuple[Tensor, Tensor | None]:
        recorder = record(self._pipe.scheduler, None)
        kwargs = {**cond.kwargs, "num_inference_steps": steps}
        self._run_rows(cond.rows[:1], kwargs, recorder, cond.latent_dtype, output_type="latent")
        return recorder.recorded_grid  # type: ignore[no-any-return]

    def _guidance_argument(self) -> str | None:
        """The argument that classifier-free guidance goes by, or the one that a distilled model embeds."""
        network = getattr(self._pipe, self._network) if self._network else None
        embeds = getattr(getattr(network, "config", None), "guidance_embeds", False)
        names = ("guidance_scale", "true_cfg_scale") if embeds else ("true_cfg_scale", "guidance_scale")
        return next((name for name in names if name in self._parameters), None)

    def _guide(
        self, kwargs: dict[str, Any], texts: dict[str, str], negative: str | None, scale: float | None
    ) -> None:
        if negative is not None:
            if "negative_prompt" not in self._parameters:
                raise UserError(f"{self.name} takes no negative prompt: leave it out.")
            texts["negative_prompt"] = negative
        if scale is not None:
            if self.guidance is None:
                raise UserError(f"{self.name} takes no guidance_scale: leave it out.")
            kwargs[self.guidance] = scale
        if self.guidance == "true_cfg_scale" and "negative_prompt" not in texts:
            # Such pipelines guide only against a negative prompt: an empty one where guidance was asked for.
            if kwargs.setdefault("true_cfg_scale", 1.0) > 1:
                texts["negative_prompt"] = ""

    def _check_names(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in _OURS:
                raise UserError(
                    f"The argument {name!r} of {self.name} is imgscale's own to set: leave it out."
                )
            if name not in self._parameters:
                raise UnknownName(f"argument of {self.name}", name, set(self._parameters) - _OURS - {"self"})

    def _check_size(self, name: str, value: int | None) -> None:
        unit = self._size_unit()
        if value is not None and (value < unit or value % unit):
            near = max(unit, round(value / unit) * unit)
            raise UserError(
                f"{self.name} can't draw a {name} of {value} pixels: give a multiple of {unit}, like {near}."
            )

    def _size_unit(self) -> int:
        """What heights and widths must be a multiple of; some pipelines would silently round them down."""
        unit = int(getattr(self._pipe, "vae_scale_factor", 1))
        network = getattr(self._pipe, self._network) if self._network else None
        patch = getattr(getattr(network, "config", None), "patch_size", 1)
        packed = hasattr(self._pipe, "_pack_latents") or hasattr(self._pipe, "_patchify_latents")
        return unit * (patch if isinstance(patch, int) and patch > 1 else 2 if packed else 1)

    def _default(self, name: str) -> Any:
        """The value of an argument that isn't given."""
        parameter = self._parameters.get(name)
        own = None if parameter is None or parameter.default is parameter.empty else parameter.default
        return self._defaults.get(name, own)


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


@contextmanager
def _plain_mode(differentiable: bool) -> Iterator[None]:
    """Gradients as asked, and never inference mode.

    Pipelines and networks keep tensors (encodings, rotary tables) that a later call with gradients couldn't
    use if they were inference tensors.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
        yield


def _observed(prepare_latents: Callable[..., Any], size: dict[str, int]) -> Callable[..., Any]:
    """A pipeline's `prepare_latents` that leaves the image size it is called with in `size`."""
    signature = inspect.signature(prepare_latents)

    def observed(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        size.update({name: int(arguments[name]) for name in ("height", "width") if name in arguments})
        return prepare_latents(*args, **kwargs)

    return observed

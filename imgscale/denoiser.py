"""Any diffusers text-to-image pipeline as four pure functions: encode, prior, predict, decode.

There is no adapter for a model: see `imgscale.recorder` for how a pipeline's own call becomes one model
evaluation. The pipeline that the user passes in is never written to: every call runs on a shallow copy that
is thrown away.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor

from imgscale import schedules
from imgscale.arguments import Arguments
from imgscale.calls import Caller, Latents
from imgscale.conditions import Condition, Row, freeze, shapes
from imgscale.errors import UserError
from imgscale.paths import Path, Time, as_time
from imgscale.pipelines import MIXED_TIMES, SINGLE
from imgscale.recorder import Idle
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
        self.name = type(pipe).__name__
        self._caller = Caller(pipe)
        self._arguments = Arguments(pipe, self._caller.network, defaults or {})
        self._schedule = schedules.read(pipe.scheduler)
        self.path: Path = self._schedule.path
        self._conditions: OrderedDict[Any, Condition] = OrderedDict()
        self._lock = Lock()
        self.guidance = self._arguments.guidance
        self.guidance_default: float | None = self._arguments.default(self.guidance) if self.guidance else None
        self.steps_default: int = self._arguments.default("num_inference_steps") or 50
        self.mixed_times = self.name in MIXED_TIMES

    @property
    def device(self) -> torch.device:
        """Where latents live."""
        return torch.device(self._pipe._execution_device)

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in, which isn't what quantised weights are kept in."""
        network = self._caller.network or self._pipe
        modules = network.modules() if isinstance(network, torch.nn.Module) else ()
        said = (getattr(module, "compute_dtype", None) for module in modules)  # as of bitsandbytes' layers
        for dtype in (network.dtype, *said, getattr(self.vae, "dtype", None)):
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
        return torch.float32

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
            "defaults": {name: repr(value) for name, value in self._arguments.defaults.items()},
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
        size = {"height": height, "width": width}
        texts, kwargs = self._arguments.read(prompt, negative_prompt, size, guidance_scale, extra)
        key = (freeze(texts), freeze(kwargs))
        with self._lock:
            if key in self._conditions:
                self._conditions.move_to_end(key)
                return self._conditions[key]
        condition = self._encode(texts, kwargs)
        with self._lock:
            self._conditions[key] = condition
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
        latents = Latents(self._pipe)
        kwargs = {**cond.kwargs, "generator": generators, "output_type": "latent"}
        output, _ = self._caller(cond.rows_for(len(generators)), kwargs, latents=latents, device=cond.device)
        return (output if latents.drawn is None else latents.drawn).float()

    def grid(self, steps: int, cond: Condition) -> Tensor:
        """The times that the pipeline's own scheduler would visit, with its shift and spacing.

        Returns:
            float64 (steps + 1,), decreasing on `path`; the last is 0.
        """
        return schedules.times(self._schedule, self._read_grid(cond.rows[0], cond.kwargs, steps), steps)

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
            return self.evaluate(x, distinct[0], cond)
        if repeats := self.repeats(cond):
            return self.evaluate(x, t, cond, repeats)
        answer = [torch.empty(0)] * len(x)
        for time in distinct:
            rows = (t == time).nonzero()[:, 0].tolist()
            for row, x0 in zip(rows, self.evaluate(x[rows], time, cond.at(rows)), strict=True):
                answer[row] = x0
        return torch.stack(answer)

    def repeats(self, cond: Condition) -> int:
        """How often the times of a batch are repeated in one call for mixed times; 0 where it can't hold them."""
        return MIXED_TIMES.get(self.name, {}).get(cond.passes, 0)

    @property
    def pipe(self) -> Any:
        """The user's own pipeline, to look at."""
        return self._pipe

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Further arguments for every call of it."""
        return self._arguments.defaults

    @property
    def vae(self) -> Any:
        """The pipeline's VAE, or None."""
        return getattr(self._pipe, "vae", None)

    def decode(self, x0: Tensor, cond: Condition, preview: Any = None) -> Tensor:
        """Images of latents, as the pipeline itself decodes them.

        A safety checker is left out, since its black images would be scored and ranked: see `flagged`. What a VAE
        in float16 can't hold, and would come out black, is decoded in float32.

        Args:
            x0: (n, *cond.latent_shape).
            cond: From `encode`, or stacked for n particles.
            preview: Takes the place of the VAE, see `imgscale.previews`.

        Returns:
            (n, 3, height, width) float32 in [0, 1].
        """
        images = self._decode(x0, cond, preview)
        if preview is None and getattr(getattr(self._pipe, "vae", None), "dtype", None) == torch.float16:
            held = images.isfinite().flatten(1).all(1)
            if not held.all():
                images = torch.where(held[:, None, None, None], images, self._decode(x0, cond, self._wide_vae))
        return images

    def _decode(self, x0: Tensor, cond: Condition, vae: Any = None) -> Tensor:
        kwargs = {**cond.kwargs, "output_type": "pt"}
        rows, x = cond.rows_for(len(x0)), self._cast(x0, cond)
        images, _ = self._caller(rows, kwargs, x=x, vae=vae, device=cond.device)
        if not hasattr(self._pipe, "image_processor"):  # which is what brings images from [-1, 1] to [0, 1]
            images = (images / 2 + 0.5).clamp(0, 1)
        return images[:, :3].float()  # Qwen-Image 2.1 draws a fourth channel, opacity

    @cached_property
    def _wide_vae(self) -> Any:
        """A float32 copy of the VAE, kept: one that overflowed will again."""
        warnings.warn(
            f"The VAE of {self.name} gives no number for some images in float16; they are decoded in float32. Load"
            " the VAE in bfloat16 or float32 to spare the second decoding.",
            stacklevel=2,
        )
        with torch.inference_mode(False), torch.no_grad():
            vae = remove_hook_from_module(copy.deepcopy(self._pipe.vae), recurse=True).to(self.device, torch.float32)
        narrow = vae.decode
        vae.decode = lambda z, *args, **kwargs: narrow(z.float(), *args, **kwargs)
        return vae

    def flagged(self, images: Tensor) -> list[bool]:
        """Which images the pipeline's own safety checker objects to; none where it has no checker.

        Args:
            images: (n, 3, height, width) in [0, 1].
        """
        if getattr(self._pipe, "safety_checker", None) is None:
            return [False] * len(images)
        images = images.to(self.device) * 2 - 1  # a new tensor, as the checker blackens what it objects to
        _, unsafe = self._pipe.run_safety_checker(images, self.device, self.dtype)
        return [bool(flag) for flag in unsafe]

    def evaluate(self, x: Tensor, t: Tensor, cond: Condition, repeats: int = 1) -> Tensor:
        """`predict` in one call of the pipeline, whether or not it can hold mixed times.

        Args:
            x: (n, *cond.latent_shape) on `path`.
            t: float64 () or (n,) on the CPU.
            cond: From `encode`, or stacked for n particles.
            repeats: How often the pipeline is to see the vector of times.
        """
        if cond.passes in SINGLE.get(self.name, ()) and len(x) > 1:
            return torch.cat([self.evaluate(x[i : i + 1], t, cond.at([i])) for i in range(len(x))])
        timesteps = cond.clock.timestep(t).repeat(repeats)[None] if t.ndim else cond.clock.timestep(t)[None]
        kwargs = {**cond.kwargs, "output_type": "latent"}
        _, recorder = self._caller(cond.rows_for(len(x)), kwargs, timesteps, x=self._cast(x, cond), device=cond.device)
        return self._schedule.x0(x.float(), t, recorder.recorded_output)

    def _cast(self, x: Tensor, cond: Condition) -> Tensor:
        # A tensor made under inference mode may not meet an in-place operation outside of it.
        return (x.clone() if x.is_inference() else x).to(cond.device, cond.latent_dtype)

    # How a condition is made

    def _encode(self, texts: dict[str, str], kwargs: dict[str, Any]) -> Condition:
        row = Row(texts)
        try:
            drawn, size, grid = self._probe(row, kwargs)
            clock = Clock(self._schedule)
            if not schedules.proportional(self._schedule, grid):
                clock = Clock(self._schedule, self._read_grid(row, kwargs, 1000))
            passes = self._passes(row, kwargs, drawn, clock)
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.name} refuses this call: {' '.join(str(error).split())}") from error
        shape = tuple(drawn.shape[1:])
        return Condition(
            key=(tuple(texts), freeze(kwargs), shape, *map(shapes, row.encoded.values())),
            height=self._image_size("height", kwargs, size),
            width=self._image_size("width", kwargs, size),
            latent_shape=shape,
            latent_dtype=drawn.dtype,
            device=self.device,
            passes=passes,
            rows=(row,),
            stacked=False,
            kwargs=kwargs,
            clock=clock,
        )

    def _image_size(self, name: str, kwargs: Mapping[str, Any], drawn: Mapping[str, int]) -> int:
        """Some pipelines draw another size than asked for; some of these resize the image to it at the end."""
        asked = kwargs.get(name) or self._arguments.default(name) or 0
        resized = hasattr(getattr(self._pipe, "image_processor", None), "resize_and_crop_tensor")
        return int((asked if resized else None) or drawn.get(name) or asked)

    def _probe(
        self, row: Row, kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, int], tuple[Tensor, Tensor | None]]:
        """Encodes the prompt, and finds out how the pipeline wants to be called."""
        probe = {**kwargs, "num_inference_steps": self.steps_default, "output_type": "latent"}
        latents = Latents(self._pipe)
        try:
            output, recorder = self._caller((row,), probe, read=True, latents=latents)
        except UnboundLocalError:  # a variable of the loop is read after it
            self._caller.turns = True
            output, recorder = self._caller((row,), probe, read=True, latents=latents)
        if recorder.recorded_grid is None:
            raise UserError(
                f"{self.name} never asked its scheduler for timesteps, so it runs a loop that imgscale can't reach: "
                "choose one of the pipelines in docs/pipelines.md."
            )
        drawn = output if latents.drawn is None else latents.drawn
        if drawn.shape != output.shape or not torch.equal(drawn, output):
            self._caller.injects = True
        return drawn, latents.size, recorder.recorded_grid

    def _passes(self, row: Row, kwargs: Mapping[str, Any], x: Tensor, clock: Clock) -> int:
        """Forward passes in one evaluation, counted on a network that does nothing."""
        kwargs = {**kwargs, "output_type": "latent"}
        timesteps = clock.timestep(torch.ones(1, dtype=torch.float64))
        idle = Idle(self._caller.network)
        try:
            self._caller((row,), kwargs, timesteps, x=x, idle=idle)
        except (ValueError, RuntimeError):
            if self._caller.injects:
                raise
            self._caller.injects = True  # it doesn't take latents in the layout of its own loop
            idle = Idle(self._caller.network)
            self._caller((row,), kwargs, timesteps, x=x, idle=idle)
        return max(idle.rows, 1)

    def _read_grid(self, row: Row, kwargs: Mapping[str, Any], steps: int) -> tuple[Tensor, Tensor | None]:
        kwargs = {**kwargs, "num_inference_steps": steps, "output_type": "latent"}
        _, recorder = self._caller((row,), kwargs, read=True)
        return recorder.recorded_grid  # type: ignore[no-any-return]

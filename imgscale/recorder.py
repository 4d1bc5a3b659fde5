"""A scheduler that only writes down: it hands a pipeline the times asked for and keeps the model's answer.

diffusers' pipelines are loops over `scheduler.timesteps` around a network. Given a scheduler with one time,
a pipeline is one model evaluation, with its guidance, packing, position ids and masks; given none, it is the
drawing of the noise or the decoding of the latents.
"""

import copy
import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["Answer", "Idle", "record"]


class Answer(tuple[Tensor, ...]):
    """What `step` returns, for every way pipelines read it: `[0]`, `.prev_sample`, or two values (LCM)."""

    @property
    def prev_sample(self) -> Tensor:
        return self[0]

    @property
    def pred_original_sample(self) -> Tensor:
        return self[0]


class _Recorder:
    """Laid over the class of the user's scheduler: `isinstance`, config and attributes stay its own."""

    order = 1
    timesteps: Tensor
    recorded_output: Tensor | None
    recorded_grid: tuple[Tensor, Tensor | None] | None
    _asked: Tensor
    _reads: bool
    _own: Any

    @property
    def init_noise_sigma(self) -> float:
        return 1.0

    @property
    def step_index(self) -> None:
        return None

    @property
    def begin_index(self) -> None:
        return None

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Pipelines announce where they start; a recorder has no place to lose."""


@functools.cache
def _recorder_class(own: Any) -> Any:
    # Pipelines look at signatures to decide what to pass (sigmas, mu, eta): show them the user's own.

    @functools.wraps(own.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        device = kwargs.get("device", args[1] if len(args) > 1 else None)
        if self._reads:
            original = copy.deepcopy(self._own)
            original.set_timesteps(*args, **kwargs)
            self.recorded_grid = original.timesteps, getattr(original, "sigmas", None)
        self.timesteps = self._asked if device is None else self._asked.to(device)
        self.sigmas = torch.zeros(len(self.timesteps) + 1, device=device)
        self.num_inference_steps = len(self.timesteps)

    @functools.wraps(own.step)
    def step(self: Any, model_output: Tensor, timestep: Any, sample: Tensor, *_: Any, **__: Any) -> Answer:
        self.recorded_output = model_output
        return Answer((sample, sample))

    overlay: dict[str, Any] = {"set_timesteps": set_timesteps, "step": step}
    if hasattr(own, "scale_model_input"):
        overlay["scale_model_input"] = lambda self, sample, *_, **__: sample
    return type(f"Recording{own.__name__}", (_Recorder, own), overlay)


def record(scheduler: Any, timesteps: Tensor, read: bool = False) -> Any:
    """A stand-in for `scheduler`, which is neither changed nor stepped.

    Args:
        scheduler: The user's own diffusers scheduler.
        timesteps: What the model is to be called with, float32: (0,) for no evaluation, (1,) for one, (1, m)
            for one with m times in the batch.
        read: Whether to keep the grid that `scheduler` would have used, as `recorded_grid`: (timesteps,
            sigmas).

    Returns:
        A scheduler. After the pipeline's run its `recorded_output` is what the model answered, guidance
        included.
    """
    own: Any = type(scheduler)
    recorder: Any = object.__new__(_recorder_class(own))
    recorder.__dict__.update(vars(scheduler))
    recorder.__dict__.update(_own=scheduler, _asked=timesteps, _reads=read)
    recorder.__dict__.update(recorded_output=None, recorded_grid=None)
    return recorder


class Idle:
    """A network that costs nothing: it answers with what it was given and counts the rows.

    Tells how many forward passes an evaluation takes, without one.
    """

    def __init__(self, network: Any) -> None:
        self._network = network
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sample: Any = args[0] if args else kwargs.get("hidden_states", kwargs.get("sample"))
        self.rows += len(sample)
        return _NetworkOutput((sample,))


class _NetworkOutput(tuple[Any, ...]):
    @property
    def sample(self) -> Any:
        return self[0]

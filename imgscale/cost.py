"""What a model's parts cost in effective FLOPs, before anything is paid: counted from its structure alone.

    E = F_text + I B_text + sum_k [g n_k F_den + I (B_weights + n_k g B_act)] + decodes E_vae + scores E_verifier

Memory traffic counts as the FLOPs that the hardware would do meanwhile: I is its ridge (`imgscale.hardware`). g, the
passes of the network in one evaluation, is counted rather than assumed: 2 with classifier-free guidance and 1 without,
or where guidance is distilled.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from imgscale.budget import Price
from imgscale.denoiser import Condition, Denoiser
from imgscale.errors import UserError
from imgscale.flops import Counter, Work, hollow, networks
from imgscale.hardware import Hardware, default_dtype
from imgscale.hardware import of as hardware_of
from imgscale.outlines import outline
from imgscale.outlines import preview as outline_of_preview
from imgscale.particles import Schedule
from imgscale.rewards import Verifier, panel

PROMPT = "two red circles above a blue square"


@dataclass(frozen=True)
class Cost:
    """What one call of each part costs, for one image.

    Args:
        model: Its name in records.
        height: Of the image, pixels.
        width: Of the image, pixels.
        dtype: What the network computes in.
        passes: Forward passes of the network in one evaluation.
        schedule: The model's path and the times of an ordinary sample.
        hardware: What it is to run on.
        text: Encoding the prompt, and the negative one where guidance has it.
        evaluation: One model evaluation, all passes.
        decode: The VAE's decoder.
        preview: What decodes previews in its place, or None.
        verifier: Scoring one image; None where none was asked for.
        notes: What is counted as nothing.
    """

    model: str
    height: int
    width: int
    dtype: str
    passes: int
    schedule: Schedule
    hardware: Hardware
    text: Work
    evaluation: Work
    decode: Work
    preview: Work | None = None
    verifier: Work | None = None
    notes: tuple[str, ...] = ()

    @property
    def price(self) -> Price:
        """What a search's budget and ledger reckon with: each image alone, whatever shared its batch."""
        ridge = self.hardware.ridge
        return Price(
            text=self.text.eflops(ridge),
            nfe=self.evaluation.eflops(ridge),
            decode=self.decode.eflops(ridge),
            preview=(self.preview or self.decode).eflops(ridge),
            score=self.verifier.eflops(ridge) if self.verifier else 0,
        )

    @property
    def sample_nfe(self) -> int:
        """Model evaluations of an ordinary sample."""
        return 1 + self.schedule.nfe(0, self.schedule.steps)

    def sample(self, batch: int = 1) -> int:
        """eFLOPs of a batch of ordinary samples of one prompt, each decoded and scored once; they share weights."""
        ridge = self.hardware.ridge
        once = [self.decode, *([self.verifier] if self.verifier else [])]
        walk = self.sample_nfe * self.evaluation.eflops(ridge, batch)
        return self.text.eflops(ridge) + walk + sum(part.eflops(ridge, batch) for part in once)


def measure(
    pipe: Any,
    name: str,
    hardware: Hardware,
    *,
    defaults: Mapping[str, Any] | None = None,
    steps: int | None = None,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float | None = None,
    preview: Any = None,
    verifier: Verifier | None = None,
    **arguments: Any,
) -> Cost:
    """Counts what a pipeline's parts cost. Nothing runs on its device and no weight is read.

    Args:
        pipe: A diffusers pipeline, loaded or hollow.
        name: What to call the model.
        hardware: What it is to run on.
        defaults: As of `Denoiser`.
        steps: Transitions of an ordinary sample; the pipeline's default for None.
        height: Of the image in pixels; the pipeline's default for None.
        width: Of the image in pixels; the pipeline's default for None.
        guidance_scale: The pipeline's default for None.
        preview: What decodes previews, loaded or hollow; the VAE for None.
        verifier: What scores.
        **arguments: Further ones of the pipeline's call.

    Raises:
        UserError: The pipeline's course depends on numbers that only a run would give, or its weights are quantised.
    """
    for part, network in pipe.components.items():
        if isinstance(network, nn.Module) and _quantised(network):
            raise UserError(
                f"The cost of {name!r} can't be counted, since the weights of its {part} are quantised; limit nfe or"
                " seconds, and ask imgscale cost what they take as they were."
            )
    try:
        with Counter(), torch.no_grad():
            view, text = _hollow_pipeline(pipe)
            denoiser = Denoiser(view, defaults)
            cond = denoiser.encode(PROMPT, height=height, width=width, guidance_scale=guidance_scale, **arguments)
            evaluation = _evaluate(view, denoiser, cond)
            decode = _decode(denoiser, cond, None)
            tiny = None if preview is None else _decode(denoiser, cond, hollow(preview))
            times = denoiser.grid(steps or denoiser.steps_default, cond)
    except UserError:
        raise
    except Exception as error:  # a network may do anything
        raise UserError(
            f"The cost of {name!r} can't be counted ({type(error).__name__}: {_line(error)}); limit nfe or seconds."
        ) from error
    score, notes = (None, ()) if verifier is None else _judge(verifier, cond.height, cond.width)
    return Cost(
        model=name,
        height=cond.height,
        width=cond.width,
        dtype=str(denoiser.dtype).removeprefix("torch."),
        passes=cond.passes,
        schedule=Schedule(denoiser.path, tuple(times.tolist())),
        hardware=hardware,
        text=text[-1] if text else Work(),
        evaluation=evaluation,
        decode=decode,
        preview=tiny,
        verifier=score,
        notes=notes,
    )


def _quantised(network: nn.Module) -> bool:
    """Whether packages of others compute it, in ways that can't be counted from shapes."""
    if getattr(network, "hf_quantizer", None) is not None:  # kept by diffusers and transformers
        return True
    return any(not parameter.is_floating_point() for parameter in network.parameters())


def _hollow_pipeline(pipe: Any) -> tuple[Any, list[Work]]:
    """A copy with hollow networks that takes itself to be on the CPU, and the list of what encoding prompts took."""
    view = copy.copy(pipe)
    own: Any = type(view)
    here = property(lambda self: torch.device("cpu"))
    view.__class__ = type(own.__name__, (own,), {"_execution_device": here, "__module__": own.__module__})
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    for name, part in parts.items():
        view.__dict__[name] = hollow(part)
    counted: list[Work] = []
    if not hasattr(pipe, "encode_prompt"):
        return view, counted
    own_encode = view.encode_prompt
    encoders = [view.__dict__[name] for name in parts if "text_encoder" in name]

    @functools.wraps(own_encode)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        with Counter(encoders) as counter:
            found = own_encode(*args, **kwargs)
        counted.append(counter.work)
        return found

    view.__dict__["encode_prompt"] = encode_prompt
    return view, counted


def _evaluate(view: Any, denoiser: Denoiser, cond: Condition) -> Work:
    parts = [p for n, p in view.components.items() if any(kind in n for kind in ("transformer", "unet", "controlnet"))]
    with Counter([p for p in parts if isinstance(p, nn.Module)]) as counter:
        denoiser.evaluate(torch.zeros(1, *cond.latent_shape), torch.tensor(0.5, dtype=torch.float64), cond)
    return counter.work


def _decode(denoiser: Denoiser, cond: Condition, preview: Any) -> Work:
    decoder = denoiser.vae if preview is None else preview
    with Counter(networks(decoder)) as counter:
        denoiser.decode(torch.zeros(1, *cond.latent_shape), cond, preview)
    return counter.work


def _judge(verifier: Verifier, height: int, width: int) -> tuple[Work, tuple[str, ...]]:
    """What scoring one image takes, and which verifiers it takes nothing of that could be counted."""
    total, notes = Work(), []
    for part in panel(verifier):
        if not networks(part):
            notes.append(f"The verifier {part.name} has no network here: it counts as nothing.")
            continue
        try:
            total += _score(hollow(part), height, width)
        except Exception:  # it looks at numbers, as detectors do: a real call has them
            total += _score(part, height, width)
    return total, tuple(notes)


def _score(verifier: Any, height: int, width: int) -> Work:
    image = torch.full((1, 3, height, width), 0.5)
    with torch.no_grad():
        with Counter():
            verifier(image, [PROMPT])  # a prompt is embedded once, and weights move to where they run
        with Counter(networks(verifier)) as counter:
            verifier(image, [PROMPT])
    return counter.work


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def of(
    model: str,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    preview: str | None = None,
    verifier: Verifier | None = None,
    steps: int | None = None,
    **arguments: Any,
) -> Cost:
    """What a model's parts cost, from its configs: no weights are needed, nor memory for them.

    Args:
        model: A bundled name, a folder, or a hub id whose configs are in the hub's cache.
        device: What it is to run on: a device here, or a GPU to plan for (A100, H100, H200).
        dtype: Of its weights; float32 on a CPU and bfloat16 elsewhere, if None.
        preview: What decodes previews: full, tiny, linear, a folder or hub id; the model's default for None.
        verifier: What scores.
        steps: Transitions of an ordinary sample; the model's default for None.
        **arguments: height, width, guidance_scale, and others of the pipeline's call.

    Raises:
        UserError: It can't be counted; the message says why.
    """
    hardware = hardware_of(device, dtype)
    dtype = dtype or default_dtype(device)
    pipe, settings = outline(model, dtype)
    decoder = outline_of_preview(preview or settings.preview, getattr(pipe, "vae", None), settings)
    if arguments.get("guidance_scale") is None:
        arguments["guidance_scale"] = settings.guidance_scale
    return measure(
        pipe,
        model,
        hardware,
        defaults=settings.defaults,
        steps=steps or settings.steps,
        preview=decoder,
        verifier=verifier,
        **arguments,
    )

"""Distils `shapes-flow` to four steps without guidance: `shapes-turbo`.

    python -m imgscale.assets.shapes.train_turbo [--device cuda] [--steps 500] [--compile 1]

Distribution matching (DMD, Yin et al. 2024, with its own rollouts as in DMD2): the student starts as the teacher and
walks its four steps from noise. Each of its estimates is noised to a random time s, where the guided teacher says what
the picture should be and a second copy, which learns the student's own pictures as it goes, says what it is; the
difference of the two moves the student. No pictures are needed, only captions. Some walks take fresh
noise between steps, so that searches may.
The text encoders stay, and the autoencoder. Writes `shapes-turbo/`, in float16.
"""

from __future__ import annotations

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn

from imgscale.assets.shapes.training import HERE, arguments, run, ship
from imgscale.assets.shapes.world import training_scene

TIMES = (1.0, 0.8, 0.6, 0.4)  # of the four steps: from .5 on little is decided (docs/shapes.md)
SETTINGS = {
    "steps": len(TIMES),
    "guidance_scale": 1.0,
    "distilled": True,
    "path": "own",  # it has seen no times but those of its grid
    "clip": "shapes-clip",
    "tiny": "shapes-tiny",
    "defaults": {"max_sequence_length": 1},
    "summary": "shapes-flow distilled to 4 steps without guidance (8 M parameters), 64x64",
}


class Pair(nn.Module):
    """The student, and the copy that learns what the student draws."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.mirror = (
            SD3Transformer2DModel.from_pretrained(HERE / "shapes-flow" / "transformer", dtype=torch.float32)
            for _ in range(2)
        )


def velocity(network: nn.Module, x: Tensor, t: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
    """Of ``x`` (n, 4, 16, 16) at times ``t`` (n,) for encoded captions."""
    answer: Tensor = network(x, text[0], text[1], t * 1000, return_dict=False)[0]
    return answer


def walk(
    student: nn.Module, x: Tensor, text: tuple[Tensor, Tensor], fresh: Tensor, chance: torch.Generator
) -> list[Tensor]:
    """The student's estimates at each of `TIMES`, from noise ``x``; gradients stay within a step.

    ``fresh`` (n,) says which walks take new noise between steps; the others keep what the estimate implies.
    """
    estimates: list[Tensor] = []
    for i, t in enumerate(TIMES):
        v = velocity(student, x, torch.full((len(x),), t, device=x.device), text)
        estimates.append(x - t * v)
        if i + 1 < len(TIMES):
            known, after = estimates[-1].detach(), TIMES[i + 1]
            new = torch.randn(x.shape, generator=chance).to(x.device)
            noise = torch.where(fresh[:, None, None, None], new, known + v.detach())
            x = (1 - after) * known + after * noise
    return estimates


def matching(x0: Tensor, wanted: Tensor, seen: Tensor) -> Tensor:
    """A loss whose gradient at ``x0`` points from what the teacher wants to what is seen, in units of what is amiss."""
    amiss = (x0 - wanted).abs().mean((1, 2, 3), keepdim=True).clamp(min=0.1)
    towards = (x0 - (seen - wanted) / amiss).detach()
    return 0.5 * (x0 - towards).square().mean()


def main() -> None:
    args = arguments(
        __doc__,
        steps=500,
        batch=8,  # walks, each of four estimates
        lr=1e-4,
        warmup=50,
        log_every=10,
        save_every=25,
        compile=0,
        guidance=3.0,  # of the teacher
        fresh=0.25,  # share of the walks that take new noise between steps
        mirror=3.0,  # the copy's learning rate, times the student's: it has to keep up
        start="",  # a checkpoint here, from whose average to start, without its optimiser
        long_every=24,  # steps with the empty T5 tokens of a plain call
    )
    pipe = StableDiffusion3Pipeline.from_pretrained(HERE / "shapes-flow", dtype=torch.float32).to(args.device)
    teacher = pipe.transformer.requires_grad_(False)
    model = Pair()
    if args.start:
        model.load_state_dict(torch.load(HERE / args.start, weights_only=True)["average"])
    if args.compile:
        for network in (teacher, model.student, model.mirror):
            for block in network.transformer_blocks:
                block.compile(dynamic=False)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        chance = torch.Generator().manual_seed(args.seed * 10**7 + step)
        rng = np.random.default_rng((args.seed, step))
        long = step % args.long_every == args.long_every - 1
        captions = [str(training_scene(rng)) for _ in range(args.batch // (4 if long else 1))]
        with torch.no_grad():
            context, nothing, pooled, pooled_nothing = pipe.encode_prompt(
                captions, captions, captions, max_sequence_length=256 if long else 1
            )
        x = torch.randn(len(captions), 4, 16, 16, generator=chance).to(args.device)
        fresh = (torch.rand(len(captions), generator=chance) < args.fresh).to(args.device)
        x0 = torch.cat(walk(model.student, x, (context, pooled), fresh, chance))
        s = torch.rand(len(x0), generator=chance).mul(0.93).add(0.05)
        eps = torch.randn(x0.shape, generator=chance)
        s, eps = s.to(args.device), eps.to(args.device)
        share, n = s[:, None, None, None], len(TIMES)
        noisy = ((1 - share) * x0 + share * eps).detach()
        text = context.repeat(n, 1, 1), pooled.repeat(n, 1)
        blank = nothing.repeat(n, 1, 1), pooled_nothing.repeat(n, 1)
        with torch.no_grad():
            guided, without = velocity(teacher, noisy, s, text), velocity(teacher, noisy, s, blank)
            wanted = noisy - share * (without + args.guidance * (guided - without))
        told = velocity(model.mirror, noisy, s, text)
        learned = (told - (eps - x0.detach())).square().mean()
        value = matching(x0, wanted, (noisy - share * told).detach())
        amiss = (x0 - wanted).detach().abs().mean((1, 2, 3)).chunk(n)
        parts = {"mirror": learned.item(), "first": amiss[0].mean().item(), "last": amiss[-1].mean().item()}
        return value + learned, parts

    def finish() -> None:
        pipe.transformer = model.student.half().cpu()
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift_terminal=TIMES[-1])
        ship(pipe, "shapes-turbo", SETTINGS)

    run(args, "shapes-turbo", model, loss, finish, rates={"mirror": args.mirror})


if __name__ == "__main__":
    main()

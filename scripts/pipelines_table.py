"""Measures the pipelines of tests/zoo.py and writes what it finds to docs/pipelines.md and imgscale/pipelines.py.

Run from the repository: python scripts/pipelines_table.py
"""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from imgscale.conditions import Condition  # noqa: E402
from imgscale.denoiser import Denoiser  # noqa: E402
from imgscale.pipelines import SINGLE  # noqa: E402
from tests import zoo  # noqa: E402

NOTES = {
    "AuraFlowPipeline": "one time a call: it turns the time into a number",
    "CogView4Pipeline": "shifts its sigmas but not its timesteps: the clock is read off its scheduler",
    "Flux2KleinPipeline": "takes and returns latents in other layouts than its loop has: particles are put in place",
    "Flux2Pipeline": "the same as Flux 2 Klein; guidance is embedded",
    "FluxKontextPipeline": "without an image it draws like Flux, at the area of `max_area`",
    "FluxPipeline": "`guidance_scale` is embedded guidance where the model has it, else `true_cfg_scale`",
    "HunyuanDiTPAGPipeline": "perturbed attention without guidance fails upstream",
    "Ideogram4Pipeline": "two networks; of `guidance_schedule` only the first value has a meaning",
    "LatentConsistencyModelPipeline": "guidance is embedded; decoding needs a turn of its loop, with an idle network",
    "Lumina2Pipeline": "`cfg_trunc_ratio` below 1 counts steps, which a search has none of",
    "PRXPipeline": "guides one image at a time, so a batch is one call for each",
    "QwenImage21Pipeline": "the fourth channel, opacity, is dropped; prompts of different length don't share a batch",
    "QwenImagePipeline": "guidance needs a negative prompt (empty if `guidance_scale` is given); "
    "prompts of different length don't share a batch",
    "Kandinsky3Pipeline": "prompts of different length don't share a batch",
    "NucleusMoEImagePipeline": "prompts of different length don't share a batch",
    "StableDiffusion3Pipeline": "`skip_guidance_layers` counts steps, which a search has none of",
}
CONTROL = "the control image is given to `encode(…, image=…)`"
SAMPLED = "encodes the control image at random anew in every call"
STAGES = "several models in a row, each with a loop of its own"
LEFT_OUT = {
    "CogView4ControlPipeline": SAMPLED,
    "FluxControlNetPipeline": SAMPLED,
    "FluxControlPipeline": SAMPLED,
    "GlmImagePipeline": "writes image tokens with a language model in every call, before the first step",
    "HeliosPipeline": "draws videos",
    "HeliosPyramidPipeline": "draws videos",
    "IFPipeline": "works on pixels and takes no `latents`",
    "KandinskyCombinedPipeline": STAGES,
    "KandinskyV22CombinedPipeline": STAGES,
    "QwenImageControlNetPipeline": SAMPLED,
    "StableCascadeCombinedPipeline": STAGES,
    "StableDiffusion3ControlNetPipeline": SAMPLED,
    "StableDiffusionXLControlNetUnionPipeline": "not tried: several control images with modes",
    "WuerstchenCombinedPipeline": STAGES,
    "ZImageControlNetInpaintPipeline": "repaints an image",
    "ZImageControlNetPipeline": "not tried",
    "ZImageOmniPipeline": "not tried",
}


def text_to_image_classes() -> list[str]:
    """Names of the classes behind diffusers' AutoPipelineForText2Image."""
    from diffusers.pipelines.auto_pipeline import AUTO_TEXT2IMAGE_PIPELINES_MAPPING

    return sorted({cls.__name__ for cls in AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()})


def measured_repeats(denoiser: Denoiser, cond: Condition, x: Tensor) -> int:
    """How often to repeat the vector of times for a batch of mixed times to equal its rows alone; 0 for never.

    Args:
        denoiser: Of the pipeline.
        cond: For which the number of forward passes counts.
        x: (n, ...), n >= 2.
    """
    if cond.passes in SINGLE.get(denoiser.name, ()):
        return 0
    times = denoiser.grid(len(x) + 3, cond)[1 : len(x) + 1]
    rows = torch.cat([denoiser.predict(x[i : i + 1], t, cond) for i, t in enumerate(times)])
    for repeats in (1, 2, 3):
        try:
            mixed = denoiser.evaluate(x, times, cond, repeats)
        except (RuntimeError, ValueError, TypeError):
            continue
        if mixed.shape == rows.shape and torch.allclose(mixed, rows, rtol=1e-3, atol=1e-4):
            return repeats
    return 0


def measured(name: str) -> tuple[Denoiser, dict[str, tuple[Condition, int]]]:
    """The denoiser, and by mode ("plain", "guided") a condition and what `measured_repeats` says."""
    species = zoo.ZOO[name]
    denoiser = Denoiser(zoo.build(name), species.defaults)
    height, width = species.size
    found: dict[str, tuple[Condition, int]] = {}
    for mode, settings in (("plain", species.plain), ("guided", species.guided)):
        if settings is not None:
            cond = denoiser.encode("a red cat", height=height, width=width, **settings)
            x = denoiser.prior(torch.tensor([1, 2, 3]), cond)
            found[mode] = cond, measured_repeats(denoiser, cond, x)
    return denoiser, found


def row(name: str) -> str:
    """The table's line about a pipeline."""
    denoiser, found = measured(name)
    passes = {mode: cond.passes for mode, (cond, _) in found.items()}
    guided = passes.get("guided", 1)
    kind = f"`{denoiser.guidance}`, {guided} passes" if guided > 1 else "embedded"
    mixed = {mode: bool(repeats) for mode, (_, repeats) in found.items()}
    words = "yes" if all(mixed.values()) else "no"
    path = "flow" if str(denoiser.path) == "linear" else "diffusion"
    shape = "tokens, channels" if len(found["plain"][0].latent_shape) == 2 else "channels, height, width"
    note = NOTES.get(name, CONTROL if "ControlNet" in name else "")
    return f"| `{name}` | {path} | {kind} | {words} | ({shape}) | {note} |"


def page() -> str:
    """The whole of docs/pipelines.md."""
    missing = [name for name in text_to_image_classes() if name not in zoo.ZOO]
    lines = [
        "# Pipelines",
        "",
        "Written by `scripts/pipelines_table.py` from tiny random models of each class: don't edit it by hand.",
        "",
        "Any diffusers text-to-image pipeline that takes `prompt` and `latents` can be tried, yours as well. Those",
        "below are tested: an ODE solved by imgscale on the pipeline's own time grid ends at the pipeline's own image,",
        "with guidance and without, in batches.",
        "",
        "*Passes*: forward passes of the network in one evaluation with guidance (which is one NFE). *Mixed*: whether",
        "particles at different times can share one call of the network; elsewhere, and for classes that aren't",
        "listed, it is called once for each time.",
        "",
        "| pipeline | model | guidance | mixed | latents | |",
        "|---|---|---|---|---|---|",
        *(row(name) for name in sorted(zoo.ZOO)),
        "",
        "## Not carried",
        "",
        "| pipeline | why |",
        "|---|---|",
        *(f"| `{name}` | {LEFT_OUT[name]} |" for name in missing),
        "",
        "## What is different from calling the pipeline",
        "",
        "- A safety checker doesn't run while images are decoded, since its black images would be scored and ranked.",
        "  `Denoiser.flagged` asks it about finished images.",
        "- Settings that count steps (a guidance interval, layer skipping, truncated guidance) have no meaning for a",
        "  search, which has no step numbers. Each evaluation is the first and only step of its call.",
        "- Sampling ends at clean data. Schedulers of Stable Diffusion 1.5 with `set_alpha_to_one=False` stop just",
        "  before it.",
        "- Latents are float32 between evaluations, and cast to the model's precision for each.",
        "- A `clip_sample` or `thresholding` of the scheduler isn't applied.",
        "- Schedulers that precondition the network (EDM) aren't carried.",
        "",
    ]
    return "\n".join(lines)


def data() -> dict[str, dict[int, int]]:
    """MIXED_TIMES as measured."""
    table: dict[str, dict[int, int]] = {}
    for name in sorted(zoo.ZOO):
        _, found = measured(name)
        if all(times for _, times in found.values()):  # or a search couldn't rely on it
            table[name] = {cond.passes: times for cond, times in found.values()}
    return table


def main() -> None:
    warnings.filterwarnings("ignore")
    (ROOT / "docs" / "pipelines.md").write_text(page(), encoding="utf-8")
    target = ROOT / "imgscale" / "pipelines.py"
    lines = "".join(f"    {name!r}: {repeats},\n".replace("'", '"') for name, repeats in data().items())
    text: Any = re.sub(
        r"(MIXED_TIMES: [^\n]*= \{\n)(.*?)(\n?\}\n)",
        lambda found: found[1] + lines + "}\n",
        target.read_text(encoding="utf-8"),
        count=1,
        flags=re.DOTALL,
    )
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

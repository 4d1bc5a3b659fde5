"""Which pipelines can hold different times in one batch.

Measured by `scripts/pipelines_table.py` on the tiny pipelines of `tests/zoo.py`, and checked by the tests.
"""

MIXED_TIMES: dict[str, dict[int, int]] = {
    "ChromaPipeline": {1: 1, 2: 1},
    "CogView3PlusPipeline": {1: 1, 2: 2},
    "CogView4Pipeline": {1: 1, 2: 1},
    "Flux2KleinPipeline": {1: 1, 2: 1},
    "Flux2Pipeline": {1: 1},
    "FluxKontextPipeline": {1: 1, 2: 1},
    "FluxPipeline": {1: 1, 2: 1},
    "Ideogram4Pipeline": {2: 1},
    "Kandinsky3Pipeline": {1: 1, 2: 2},
    "KolorsPAGPipeline": {2: 2, 3: 3},
    "KolorsPipeline": {1: 1, 2: 2},
    "Krea2Pipeline": {1: 1, 2: 1},
    "LatentConsistencyModelPipeline": {1: 1},
    "Lumina2Pipeline": {1: 1, 2: 1},
    "LuminaPipeline": {1: 1, 2: 2},
    "NucleusMoEImagePipeline": {1: 1, 2: 1},
    "OvisImagePipeline": {1: 1, 2: 1},
    "PixArtAlphaPipeline": {1: 1, 2: 2},
    "PixArtSigmaPAGPipeline": {2: 2, 3: 3},
    "PixArtSigmaPipeline": {1: 1, 2: 2},
    "QwenImage21Pipeline": {1: 1, 2: 1},
    "QwenImagePipeline": {1: 1, 2: 1},
    "SanaPAGPipeline": {2: 2, 3: 3},
    "SanaPipeline": {1: 1, 2: 2},
    "StableDiffusion3PAGPipeline": {2: 2, 3: 3},
    "StableDiffusion3Pipeline": {1: 1, 2: 2},
    "StableDiffusionControlNetPAGPipeline": {2: 2, 3: 3},
    "StableDiffusionControlNetPipeline": {1: 1, 2: 2},
    "StableDiffusionPAGPipeline": {2: 2, 3: 3},
    "StableDiffusionPipeline": {1: 1, 2: 2},
    "StableDiffusionXLControlNetPAGPipeline": {2: 2, 3: 3},
    "StableDiffusionXLControlNetPipeline": {1: 1, 2: 2},
    "StableDiffusionXLPAGPipeline": {2: 2, 3: 3},
    "StableDiffusionXLPipeline": {1: 1, 2: 2},
}
"""By class and by the network's forward passes in one evaluation (2 with classifier-free guidance): how often
the vector of times is repeated, so that every row of the network's batch meets its own. The rest can't."""

SINGLE: dict[str, tuple[int, ...]] = {"PRXPipeline": (2,)}
"""By class, the numbers of forward passes at which the pipeline itself fails on more than one prompt."""

"""Which pipelines can hold different times in one batch.

Measured by `scripts/pipelines_table.py` on the tiny pipelines of `tests/zoo.py`, and checked by the tests.
"""

MIXED_TIMES: dict[str, dict[int, int]] = {
    "FluxPipeline": {1: 1, 2: 1},
    "StableDiffusion3Pipeline": {1: 1, 2: 2},
    "StableDiffusionPipeline": {1: 1, 2: 2},
    "StableDiffusionXLPipeline": {1: 1, 2: 2},
}
"""By class and by the network's forward passes in one evaluation (2 with classifier-free guidance): how often
the vector of times is repeated, so that every row of the network's batch meets its own. The rest can't."""

SINGLE: dict[str, tuple[int, ...]] = {"PRXPipeline": (2,)}
"""By class, the numbers of forward passes at which the pipeline itself fails on more than one prompt."""

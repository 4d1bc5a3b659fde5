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
the vector of times is repeated for every row of the network's batch to meet its own. What isn't listed can't."""

"""Random keys: all noise of a particle derives from its key, whatever the batch, device or order of the work.

A key is an int64 in [0, 2**63). Keys are split by `fold` instead of drawn from, as in JAX: there is no hidden
state to keep, to save or to get out of step.
"""

import torch
from torch import Tensor

from imgscale.errors import UserError

__all__ = ["fold", "normal", "root"]


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(z: Tensor, bits: int) -> Tensor:
    # The shift of an int64 copies the sign into the high bits; splitmix64 wants zeros there.
    shifted: Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _mix(z: Tensor) -> Tensor:
    """One output of splitmix64 from the state z - gamma, in wrapping int64 arithmetic."""
    z = z + _GAMMA
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def fold(keys: Tensor, *data: int | Tensor) -> Tensor:
    """New keys, one for each old key and the data folded in: a step, a candidate's number, a purpose.

    `fold(k, a, b) == fold(fold(k, a), b)`; the order of the data matters.

    Args:
        keys: int64 (n,).
        data: Any ints (their low 64 bits count), or int64 tensors that broadcast with the keys.

    Returns:
        int64 (n,) in [0, 2**63).

    Source: splitmix64, Steele, Lea and Flood 2014 (doi 10.1145/2660193.2660195).
    """
    for datum in data:
        value = datum if isinstance(datum, Tensor) else torch.tensor(_signed(int(datum)), device=keys.device)
        keys = _mix(keys ^ _mix(value)) & (2**63 - 1)
    return keys


def root(seed: int, n: int) -> Tensor:
    """The keys of n particles. The first is the seed itself, so that one sample is the pipeline's own.

    Args:
        seed: In [0, 2**63).
        n: At least 0.

    Returns:
        int64 (n,): keys[0] == seed and keys[i] == fold(seed, i). A larger n only appends.

    Raises:
        UserError: The seed is out of range.
    """
    if not 0 <= seed < 2**63:
        raise UserError(f"The seed must be a whole number from 0 to 2**63 - 1, not {seed}: choose such a one.")
    keys = fold(torch.full((n,), seed), torch.arange(n))
    keys[:1] = seed
    return keys


def normal(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise, one draw per key.

    torch seeds its CPU generator with the low 32 bits, so two keys share their noise once in 4e9 pairs.

    Args:
        keys: int64 (n,).
        shape: Of one particle.

    Returns:
        float32 (n, *shape) on the CPU; row i is what `torch.Generator("cpu").manual_seed(keys[i])` draws.
    """
    noise = torch.empty((len(keys), *shape))
    generator = torch.Generator("cpu")
    for row, key in zip(noise, keys.tolist(), strict=True):
        row.copy_(torch.randn(shape, generator=generator.manual_seed(key)))
    return noise

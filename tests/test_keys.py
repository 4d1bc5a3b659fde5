"""Keys are reproducible anywhere, independent of batching, and never repeat in practice."""

import pytest
import torch

from imgscale.errors import UserError
from imgscale.keys import fold, normal, root

MASK = 2**64 - 1


def splitmix64(z: int) -> int:
    """One output of the published generator from the state z, in Python's exact integers."""
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def exact_fold(key: int, *data: int) -> int:
    for datum in data:
        key = splitmix64(key ^ splitmix64(datum & MASK)) & (2**63 - 1)
    return key


def test_the_reference_is_splitmix64() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the first output from seed 0, as published


@pytest.mark.parametrize("data", [(0,), (1,), (-1,), (2**63 - 1,), (2**63,), (-(2**63),), (2**70 + 5,), (3, 1, 4), ()])
def test_fold_agrees_with_exact_integers(data: tuple[int, ...]) -> None:
    keys = [0, 1, 7, 2**31, 2**32 + 9, 2**63 - 1]
    assert fold(torch.tensor(keys), *data).tolist() == [exact_fold(key, *data) for key in keys]


def test_fold_never_changes() -> None:
    # Golden numbers: a result recorded by one version is re-run exactly by all later ones.
    assert fold(torch.tensor([0, 2**63 - 1]), 0).tolist() == [2812178212566171247, 5166163656159961296]
    assert root(42, 3).tolist() == [42, 9129838320742759465, 2139811525164838579]


def test_fold_composes_and_is_ordered() -> None:
    keys = root(5, 4)
    assert torch.equal(fold(keys, 2, 9), fold(fold(keys, 2), 9))
    assert not (fold(keys, 2, 9) == fold(keys, 9, 2)).any()
    assert not (fold(keys, 0) == keys).any()


def test_fold_takes_a_datum_per_key() -> None:
    keys, steps = root(5, 3), torch.tensor([4, 0, 9])
    assert fold(keys, steps).tolist() == [fold(keys[i : i + 1], int(steps[i])).item() for i in range(3)]


def test_keys_are_in_range_and_distinct() -> None:
    keys = torch.cat([fold(root(seed, 500), step) for seed in range(20) for step in range(5)])
    assert keys.dtype == torch.int64 and keys.min() >= 0
    assert len(keys.unique()) == len(keys)
    # torch's CPU generator reads the low 32 bits: they must spread as well as the whole.
    # 50,000 draws of 32 bits are expected to meet .3 times.
    assert len((keys & 0xFFFFFFFF).unique()) >= len(keys) - 3
    share = (keys[:, None] >> torch.arange(63) & 1).double().mean(0)
    assert (share - 0.5).abs().max() < 4.5 * 0.5 / len(keys) ** 0.5


def test_root_starts_with_the_seed_and_grows_by_appending() -> None:
    assert root(11, 1).tolist() == [11]
    assert root(11, 3).tolist() == [11, exact_fold(11, 1), exact_fold(11, 2)]
    assert torch.equal(root(11, 50)[:3], root(11, 3))
    assert root(11, 0).shape == (0,)
    assert root(2**63 - 1, 1).tolist() == [2**63 - 1]


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused_by_name(seed: int) -> None:
    with pytest.raises(UserError, match=str(seed)):
        root(seed, 2)


def test_normal_is_what_torch_draws_for_the_key() -> None:
    keys = root(3, 4)
    noise = normal(keys, (3, 4, 4))
    assert noise.shape == (4, 3, 4, 4) and noise.dtype == torch.float32
    for row, key in zip(noise, keys.tolist(), strict=True):
        assert torch.equal(row, torch.randn(3, 4, 4, generator=torch.Generator("cpu").manual_seed(key)))


def test_normal_depends_on_neither_batch_nor_order_nor_global_state() -> None:
    keys = root(3, 6)
    noise = normal(keys, (5,))
    torch.manual_seed(99)
    order = torch.tensor([4, 0, 5, 1, 1])
    assert torch.equal(normal(keys[order], (5,)), noise[order])
    assert torch.equal(normal(keys[2:3], (5,)), noise[2:3])
    assert normal(keys[:0], (5,)).shape == (0, 5)


def test_normal_is_standard_normal_across_keys() -> None:
    # One number per key: the first draws of 20,000 seeds, where related keys would show.
    z = normal(fold(root(0, 20_000), 1), (1,)).double().flatten()
    assert z.mean().abs() < 4 / len(z) ** 0.5
    assert (z.var() - 1).abs() < 4 * (2 / len(z)) ** 0.5
    assert (z[1:] * z[:-1]).mean().abs() < 4 / len(z) ** 0.5

"""The test doubles themselves, as far as other tests lean on them."""

import pytest
import torch

from imgscale.errors import UserError
from imgscale.keys import root
from imgscale.paths import VP, Discrete
from tests.worlds import Condition, Gaussian, Mixture, World

IMAGE = (3, 4, 4)


@pytest.mark.parametrize("world", [Gaussian(shape=IMAGE), Mixture(shape=IMAGE)], ids=lambda world: world.name)
def test_an_image_world_runs_end_to_end(world: World) -> None:
    cond = world.encode("a red circle", height=4, width=4)
    x = world.prior(root(0, 5), cond)
    assert x.shape == (5, *cond.latent_shape) and x.dtype == torch.float32
    x0 = world.predict(x, 1.0, cond)
    # At pure noise, one answer for all: the mean of the data.
    torch.testing.assert_close(x0, x0[:1].expand_as(x0), rtol=0, atol=1e-5)
    image = world.decode(x0, cond)
    assert image.shape == (5, 3, 4, 4) and image.dtype == torch.float32
    assert 0 <= image.min() and image.max() <= 1
    assert torch.equal(world.predict(x, 0.0, cond), x)


def test_evaluations_are_counted_by_rows() -> None:
    world = Gaussian()
    cond = world.encode("")
    for n in (1, 4):
        world.predict(world.prior(root(0, n), cond), 0.5, cond)
    assert world.batches == [1, 4] and world.evaluations == 5


@pytest.mark.parametrize("world", [Gaussian(), Mixture()], ids=lambda world: world.name)
def test_rows_do_not_mix(world: World) -> None:
    cond = world.encode("")
    x = world.prior(root(0, 4), cond)
    times = torch.tensor([1.0, 0.5, 0.1, 0.0])
    together = world.predict(x, times, cond)
    for i in range(4):
        alone = world.predict(x[i : i + 1], float(times[i]), cond)
        torch.testing.assert_close(alone, together[i : i + 1])


def test_stacked_prompts_keep_their_own_data() -> None:
    world = Gaussian(shifts={"up": 5.0, "down": -5.0}, path=VP())
    up, down, plain = (world.encode(prompt) for prompt in ("up", "down", "else"))
    x = world.prior(root(0, 4), up)
    stacked = Condition.stack([up, down, plain], counts=[1, 2, 1])
    x0 = world.predict(x, 0.6, stacked)
    for rows, cond in ((slice(0, 1), up), (slice(1, 3), down), (slice(3, 4), plain)):
        torch.testing.assert_close(x0[rows], world.predict(x[rows], 0.6, cond))
    assert (x0.mean(1) > 2).tolist() == [True, False, False, False]
    with pytest.raises(ValueError, match="group them by key"):
        Condition.stack([up, Gaussian(shape=IMAGE).encode("")], counts=[1, 1])


def test_grids_fall_from_noise_to_data() -> None:
    for world in (Gaussian(), Gaussian(path=VP()), Gaussian(path=Discrete([0.9, 0.5, 0.1]))):
        grid = world.grid(3, world.encode(""))
        assert grid.dtype == torch.float64 and grid.shape == (4,)
        assert grid[0] == 1 and grid[-1] == 0 and (grid.diff() < 0).all()


def test_the_model_is_differentiable() -> None:
    world = Mixture()
    x = torch.zeros(2, 2, requires_grad=True)
    world.predict(x, torch.tensor([0.7, 0.0]), world.encode("")).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and (x.grad != 0).all()


def test_what_a_world_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="8 x 4"):
        Gaussian(shape=IMAGE).encode("", height=8)
    with pytest.raises(UserError, match="max_sequence_length"):
        Gaussian().encode("", max_sequence_length=77)

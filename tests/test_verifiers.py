"""What every registered verifier keeps to, on tiny random checkpoints of its real classes (`tests/tiny.py`)."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale import registry
from imgscale.errors import UserError
from imgscale.rewards import Verifier, is_ensemble
from tests import tiny

NAMES = [entry.name for entry in registry.verifier]
each = pytest.mark.parametrize("name", NAMES)
N = 5
LONG = "a very small red circle and " * 150 + "a star"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Verifier]]:
    """Makes a verifier by its name on a checkpoint of its own, which is written once; `anew` makes another."""
    options: dict[str, dict[str, Any]] = {}
    made: dict[str, Verifier] = {}
    with ExitStack() as stack:

        def build(name: str, anew: bool = False, **more: Any) -> Verifier:
            if name not in tiny.VERIFIERS:
                pytest.fail(
                    f"The verifier {name} isn't tested: add a tiny checkpoint of it to VERIFIERS in tests/tiny.py."
                )
            entry = registry.verifier[name]
            if name not in options:
                torch.manual_seed(0)
                options[name] = tiny.VERIFIERS[name].options(tmp_path_factory.mktemp(name), stack)
            if anew or name not in made:
                new: Verifier = entry.target(**entry.check({**options[name], **more}))
                if anew:
                    return new
                made[name] = new
            return made[name]

        yield build


def pictures(name: str, n: int = N, h: int = 64, w: int = 64) -> Tensor:
    return tiny.VERIFIERS[name].pictures(n, h, w)


def prompts(name: str, n: int = N) -> list[str]:
    texts = tiny.VERIFIERS[name].prompts
    return [texts[i % len(texts)] for i in range(n)]


def close(a: Tensor, b: Tensor, among: Tensor) -> bool:
    """Whether scores are equal as far as the differences between images go."""
    spread = among.max() - among.min()
    assert spread > 0, "all images get one score, which would prove nothing"
    return bool((a - b).abs().max() <= 0.01 * spread)


# ----------------------------------------------------------------------------------------------- what it says of itself


def test_every_checkpoint_is_of_a_verifier_that_there_is() -> None:
    assert set(tiny.VERIFIERS) <= set(NAMES)


@each
def test_says_what_it_is(name: str, make: Callable[..., Verifier]) -> None:
    verifier = make(name)
    assert verifier.name == name or is_ensemble(verifier)
    assert isinstance(verifier.reads_prompt, bool) and isinstance(verifier.differentiable, bool)
    assert verifier.range is None or verifier.range[0] < verifier.range[1]
    licence = getattr(verifier, "licence", None)
    assert isinstance(licence, str) and licence.strip(), "licence, of the weights"
    entry = registry.verifier[name]
    assert entry.summary.endswith(".")
    documented = entry.target.__doc__ or ""
    for option in entry.options():
        assert f"        {option}: " in documented, f"the option {option} has no line in the docstring"


@each
def test_identity_is_complete_and_json(name: str, make: Callable[..., Verifier]) -> None:
    identity = make(name).identity()
    assert json.loads(json.dumps(identity, allow_nan=False)) is not None
    assert identity["name"] == make(name).name
    assert identity == make(name, anew=True).identity()
    if is_ensemble(make(name)):
        return
    assert identity["source"]
    if tiny.VERIFIERS[name].weights:
        assert len(identity["sha256"]) == 64 and int(identity["sha256"], 16) >= 0
        assert identity["dtype"] == "float32"
        seen_by = identity.get("backbone", identity)
        assert seen_by["preprocessing"], "what is done to images before the network"


# ------------------------------------------------------------------------------------------------------------- scores


@each
def test_scores_have_a_shape_a_dtype_an_order_and_a_range(name: str, make: Callable[..., Verifier]) -> None:
    verifier, images = make(name), pictures(name)
    together = verifier(images, prompts(name))
    assert together.shape == (N,) and together.dtype == torch.float32 and together.device == images.device
    assert together.isfinite().all()
    if verifier.range is not None:
        low, high = verifier.range
        assert ((together >= low - 1e-6) & (together <= high + 1e-6)).all()
    order = torch.tensor([3, 1, 4, 0, 2])
    again = verifier(images[order], [prompts(name)[i] for i in order])
    assert close(again, together[order], together)
    if not is_ensemble(verifier):  # whose scores depend on the others
        alone = torch.cat([verifier(images[i : i + 1], prompts(name)[i : i + 1]) for i in range(N)])
        assert close(alone, together, together)


@each
def test_the_same_again(name: str, make: Callable[..., Verifier]) -> None:
    images = pictures(name)
    first = make(name)(images, prompts(name))
    assert torch.equal(make(name)(images, prompts(name)), first)
    assert torch.allclose(make(name, anew=True)(images, prompts(name)), first, atol=1e-6, rtol=1e-5)


@each
def test_no_images_and_one(name: str, make: Callable[..., Verifier]) -> None:
    none = make(name)(pictures(name)[:0], [])
    assert none.shape == (0,) and none.dtype == torch.float32
    assert make(name)(pictures(name, 1), prompts(name, 1)).shape == (1,)


@each
def test_one_prompt_for_all_and_one_for_each(name: str, make: Callable[..., Verifier]) -> None:
    verifier = make(name)
    image = pictures(name, 1).expand(4, -1, -1, -1)
    same, different = verifier(image, prompts(name, 1) * 4), verifier(image, tuple(prompts(name, 4)))
    assert same.max() - same.min() <= 1e-5 * same.abs().max()
    if verifier.reads_prompt:
        assert different.max() - different.min() > 10 * (same.max() - same.min()), "prompts matter"
    else:
        assert torch.allclose(different, same, atol=1e-6, rtol=1e-5), "prompts don't matter"


@each
@pytest.mark.parametrize("size", [(40, 72), (72, 40), (9, 200), (8, 8), (3, 5), (1, 1)])
def test_any_size(name: str, size: tuple[int, int], make: Callable[..., Verifier]) -> None:
    assert make(name)(torch.rand(2, 3, *size), prompts(name, 2)).isfinite().all()


@each
@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_grey_images(name: str, level: float, make: Callable[..., Verifier]) -> None:
    assert make(name)(torch.full((2, 3, 64, 64), level), prompts(name, 2)).isfinite().all()


@each
def test_images_of_half_precision_are_scored_as_what_they_hold(name: str, make: Callable[..., Verifier]) -> None:
    verifier = make(name)
    reference = verifier(pictures(name), prompts(name))
    for dtype in (torch.float16, torch.bfloat16):
        images = pictures(name).to(dtype)
        scores = verifier(images, prompts(name))
        assert scores.dtype == torch.float32
        assert close(scores, verifier(images.float(), prompts(name)), reference)


@each
@pytest.mark.parametrize("prompt", ["", " ", "?! <x> {y} %s", "ein Würfel 立方体 🟥", LONG], ids=lambda p: p[:12])
def test_any_prompt(name: str, prompt: str, make: Callable[..., Verifier]) -> None:
    case = tiny.VERIFIERS[name]
    verifier = make(name, anew=True)  # what is warned of once hasn't been yet
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with nullcontext() if case.any_prompt else suppress(UserError):
                assert verifier(pictures(name, 2), [prompt, "a red circle"]).isfinite().all()
    ours = [warning for warning in caught if issubclass(warning.category, UserWarning)]
    said = [str(warning.message) for warning in ours]
    assert len(ours) == case.cut if prompt == LONG else len(ours) <= case.cut, said


@each
def test_what_does_not_pair_up_is_refused(name: str, make: Callable[..., Verifier]) -> None:
    verifier, images = make(name), pictures(name, 2)
    for bad, texts in (
        (images, prompts(name, 3)),
        (images, prompts(name, 1)),
        (images[0], prompts(name, 1)),
        (images[:, :1], prompts(name, 2)),
    ):
        with pytest.raises(UserError):
            verifier(bad, texts)
    with pytest.raises(UserError):
        verifier(images, "ab")  # two letters are no two prompts


# ---------------------------------------------------------------------------------------------------- how it is called


@each
def test_nothing_that_is_passed_is_changed(name: str, make: Callable[..., Verifier]) -> None:
    images, texts = pictures(name), prompts(name)
    before = images.clone()
    make(name)(images, texts)
    assert torch.equal(images, before) and texts == prompts(name)
    assert not images.requires_grad


@each
def test_the_same_under_every_mode_of_autograd(name: str, make: Callable[..., Verifier]) -> None:
    images = pictures(name)
    plainly = make(name)(images, prompts(name)).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert close(make(name)(images, prompts(name)), plainly, plainly)
            assert close(make(name, anew=True)(images, prompts(name)), plainly, plainly)


@each
def test_gradients_reach_the_images_where_it_says_so(name: str, make: Callable[..., Verifier]) -> None:
    with torch.inference_mode():  # as the engine calls it first
        verifier = make(name, anew=True)
        verifier(pictures(name), prompts(name))
    images = pictures(name, N, 48, 56).requires_grad_()
    plainly = verifier(images.detach(), prompts(name))
    scores = verifier(images, prompts(name))
    assert close(scores.detach(), plainly.detach(), plainly)
    if not verifier.differentiable:
        return
    (gradient,) = torch.autograd.grad(scores.sum(), images)
    assert gradient.isfinite().all()
    assert gradient.abs().amax((1, 2, 3)).gt(0).all()


@each
def test_images_do_not_mix(name: str, make: Callable[..., Verifier]) -> None:
    """The gradient of one image's score is zero for all others."""
    verifier = make(name)
    if not verifier.differentiable:
        pytest.skip("has no gradients")
    images = pictures(name).requires_grad_()
    (gradient,) = torch.autograd.grad(verifier(images, prompts(name))[1], images)
    seen = gradient.abs().amax((1, 2, 3))
    assert seen[1] > 0 and seen[[0, 2, 3, 4]].max() == 0


OPENED: list[str] = []
_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open":
        OPENED.append(str(arguments[0]))


sys.addaudithook(_audit)  # which can't be removed, only told to be silent


@contextmanager
def watching() -> Iterator[list[str]]:
    """The files that are opened within this context."""
    global _watching
    OPENED.clear()
    _watching = True
    try:
        yield OPENED
    finally:
        _watching = False


@each
def test_it_is_loaded_once(name: str, make: Callable[..., Verifier], tmp_path: Path) -> None:
    make(name)  # so that the case is known
    with ExitStack() as stack:
        entry = registry.verifier[name]
        torch.manual_seed(0)
        verifier = entry.target(**entry.check(tiny.VERIFIERS[name].options(tmp_path, stack)))
        first = verifier(pictures(name), prompts(name))
        shutil.rmtree(tmp_path)  # nor what isn't Python may open anything
        with watching() as opened:
            assert verifier(pictures(name), prompts(name)).shape == first.shape
    assert opened == []


def test_the_watch_sees_files() -> None:
    with watching() as opened:
        Path(__file__).read_bytes()
    assert opened == [__file__]


@pytest.mark.gpu
@each
def test_scores_are_where_the_images_are(name: str, make: Callable[..., Verifier]) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    images = pictures(name)
    expected = make(name)(images, prompts(name))
    scores = make(name, anew=True)(images.to(device), prompts(name))
    assert scores.device.type == device.type
    assert close(scores.cpu(), expected, expected)
    if "offload" in registry.verifier[name].options():
        off = make(name, anew=True, offload=True)
        with torch.inference_mode():
            assert close(off(images.to(device), prompts(name)).cpu(), expected, expected)
            assert close(off(images.to(device), prompts(name)).cpu(), expected, expected)


# --------------------------------------------------------------------------------------------------------- its page

PAGE = (Path(__file__).parents[1] / "docs" / "verifiers.md").read_text(encoding="utf-8")


def test_the_page_has_a_row_and_a_section_for_every_verifier() -> None:
    rows = re.findall(r"^\| \[`(.+?)`\]\(#(.+?)\)", PAGE, re.MULTILINE)
    assert sorted(name for name, _ in rows) == NAMES
    headings = {re.sub(r"\W+", "-", title.lower()) for title in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
    assert {place for _, place in rows} <= headings


def test_the_pages_examples_name_what_there_is() -> None:
    """The specs in its commands and in the Python below them."""
    commands = re.findall(r"""(?:--verifier|-v|--report|serve) ("[^"]+"|\S+)""", PAGE)
    specs = [spec for text in commands for spec in registry.split(text.strip('"'))]
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                assert all(hasattr(importlib.import_module(str(node.module)), a.name) for a in node.names), block
        texts = [node.value for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Constant)]
        starts = tuple(f"{name}{after}" for name in NAMES for after in "(+")
        specs += [text for text in texts if isinstance(text, str) and (text in NAMES or text.startswith(starts))]
    assert {re.split(r"[(+]", spec)[0] for spec in specs} >= set(NAMES) - {"ensemble"}
    for spec in specs:
        registry.judges(spec)

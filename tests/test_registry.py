"""Names, options and their types, and how users write them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from imgscale import registry
from imgscale.errors import UnknownName, UserError
from imgscale.registry import Entry, Registry, parse

if TYPE_CHECKING:
    from fractions import Fraction


def made(problem: Any, *, n: int = 1, share: float = 0.5, fast: bool = False, kind: Literal["a", "b"] = "a") -> None:
    """First line.

    More.
    """


def unions(
    *,
    count: int | None = None,
    share: float | None = None,
    mode: Literal["x", 3] | None = None,
    text: str | None = None,
    either: int | str = 0,
    anything: Any = None,
    items: Sequence[str] = (),
) -> None:
    pass


class Made:
    """A class."""

    def __init__(self, *, device: str | None = None, size: int = 3) -> None:
        pass


# -------------------------------------------------------------------------------------------------- registering


def test_a_decorator_registers_and_returns_its_target() -> None:
    names = Registry("thing", "imgscale.searchers")
    assert names("made", cite="a2020")(made) is made
    entry = names["made"]
    assert entry == Entry("made", made, ("a2020",)) and entry.summary == "First line."
    assert names("class", cite=("b", "c"))(Made) is Made
    assert names["class"].cite == ("b", "c") and names["class"].summary == "A class."


def test_a_name_can_be_taken_only_once() -> None:
    names = Registry("thing", "imgscale.searchers")
    names("made")(made)
    with pytest.raises(ValueError, match=f"thing name 'made' is taken by {__name__}"):
        names("made")(unions)
    assert names["made"].target is made


def test_a_reloaded_module_may_register_again() -> None:
    def again() -> Callable[..., Any]:
        def fresh(problem: Any) -> None: ...

        return fresh

    names = Registry("thing", "imgscale.searchers")
    first, second = again(), again()
    names("fresh")(first)
    names("fresh")(second)
    assert names["fresh"].target is second


def test_entries_come_sorted_and_complete() -> None:
    names = [entry.name for entry in registry.searcher]
    assert names == sorted(names) and {"best-of-n", "rbf"} <= set(names)
    assert {"clip", "shapes"} <= {entry.name for entry in registry.verifier}


def test_modules_are_imported_on_first_use_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "found_things"
    folder.mkdir()
    (folder / "__init__.py").write_text("things = None\n")
    one = "from found_things import things\n\n@things('one')\ndef one(problem):\n    'One.'\n"
    (folder / "one.py").write_text(one)
    monkeypatch.syspath_prepend(str(tmp_path))
    things = Registry("thing", "found_things")
    assert "found_things" not in sys.modules
    import found_things  # type: ignore[import-not-found]

    found_things.things = things
    assert "found_things.one" not in sys.modules
    assert [entry.name for entry in things] == ["one"] and things["one"].summary == "One."
    (folder / "two.py").write_text("raise RuntimeError('imported again')\n")
    assert len(list(things)) == 1
    for name in ("found_things", "found_things.one"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("name", "near"), [("rfb", "rbf"), ("best-of-N", "best-of-n"), ("best_of_n", "best-of-n"), ("qqqq", None)]
)
def test_an_unknown_name_gets_the_nearest(name: str, near: str | None) -> None:
    with pytest.raises(UnknownName) as caught:
        registry.searcher.resolve(name)
    message = str(caught.value)
    assert message.startswith(f"Unknown searcher {name!r}; choose one of: best-of-n, ") and "rbf" in message
    assert message.endswith(f"Did you mean {near!r}?" if near else ".")


# ------------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("rbf", "rbf", {}),
        ("rbf()", "rbf", {}),
        (" rbf ( ) ", "rbf", {}),
        ("best-of-n(n=3)", "best-of-n", {"n": "3"}),
        ("rbf( draws = 4 ,path=vp )", "rbf", {"draws": "4", "path": "vp"}),
        ("rbf(draws=4,)", "rbf", {"draws": "4"}),
        ("rbf(kernel=ddim(0.5), draws=2)", "rbf", {"kernel": "ddim(0.5)", "draws": "2"}),
        ("rbf(kernel=sde(g=3t^2))", "rbf", {"kernel": "sde(g=3t^2)"}),
        ("a(path=vp(0.1,20),b=f(g(1,2),3))", "a", {"path": "vp(0.1,20)", "b": "f(g(1,2),3)"}),
        ("clip(model=ViT-L-14/openai)", "clip", {"model": "ViT-L-14/openai"}),
        ("x(a=)", "x", {"a": ""}),
        ("x(a=b=c)", "x", {"a": "b=c"}),
        ("v2.1+x_y(a=1)", "v2.1+x_y", {"a": "1"}),
    ],
)
def test_how_names_and_options_are_written(spec: str, name: str, options: dict[str, str]) -> None:
    assert parse(spec) == (name, options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "'' is no name; write it like rbf or rbf(option=value, other=value)."),
        ("rbf(", "'rbf(' is no name"),
        ("rbf)", "is no name"),
        ("two words", "is no name"),
        ("(a=1)", "is no name"),
        ("rbf(a=1) b", "is no name"),
        ("rbf(4)", "The option '4' in 'rbf(4)' is no option=value pair."),
        ("rbf(a=1, fast)", "The option 'fast' in"),
        ("rbf(=1)", "The option '=1' in"),
        ("rbf(1a=2)", "The option '1a=2' in"),
        ("rbf(a=1, a=2)", "The option a stands twice in 'rbf(a=1, a=2)'; give it once."),
    ],
)
def test_how_they_are_not_written(spec: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(spec)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_options_given_apart_win_over_written_ones() -> None:
    entry, options = registry.searcher.resolve("rbf(draws=2, path=vp)", {"draws": 8})
    assert entry.name == "rbf" and options == {"draws": 8, "path": "vp"}


# ------------------------------------------------------------------------------------------------------- typing

MADE = Entry("made", made)
UNIONS = Entry("unions", unions)


def test_only_keyword_parameters_are_options() -> None:
    assert list(MADE.options()) == ["n", "share", "fast", "kind"]
    assert list(Entry("class", Made).options()) == ["device", "size"]


@pytest.mark.parametrize(
    ("entry", "option", "given", "expected"),
    [
        (MADE, "n", 3, 3),
        (MADE, "n", "3", 3),
        (MADE, "n", " -2 ", -2),
        (MADE, "n", "1e3", 1000),
        (MADE, "n", 4.0, 4),
        (MADE, "share", "0.25", 0.25),
        (MADE, "share", 1, 1.0),
        (MADE, "share", "1", 1.0),
        (MADE, "fast", True, True),
        (MADE, "fast", "true", True),
        (MADE, "fast", "False", False),
        (MADE, "kind", "b", "b"),
        (UNIONS, "count", None, None),
        (UNIONS, "count", "none", None),
        (UNIONS, "count", "None", None),
        (UNIONS, "count", "7", 7),
        (UNIONS, "share", "none", None),
        (UNIONS, "share", "0.5", 0.5),
        (UNIONS, "mode", "x", "x"),
        (UNIONS, "mode", 3, 3),
        (UNIONS, "mode", "none", None),
        (UNIONS, "text", "anything at all", "anything at all"),
        (UNIONS, "text", "3", "3"),
        (UNIONS, "text", "none", None),
        (UNIONS, "text", None, None),
        (UNIONS, "either", "3", 3),
        (UNIONS, "either", "three", "three"),
        (UNIONS, "anything", [1], [1]),
        (UNIONS, "anything", "none", "none"),
        (Entry("class", Made), "size", "5", 5),
        (Entry("class", Made), "device", "cpu", "cpu"),
        (Entry("class", Made), "device", "none", None),
    ],
    ids=lambda value: value.name if isinstance(value, Entry) else str(value),
)
def test_options_get_the_types_of_the_signature(entry: Entry, option: str, given: Any, expected: Any) -> None:
    checked = entry.check({option: given})
    assert checked == {option: expected} and type(checked[option]) is type(expected)


@pytest.mark.parametrize(
    ("entry", "option", "given", "allowed"),
    [
        (MADE, "n", "three", "a whole number"),
        (MADE, "n", 2.5, "a whole number"),
        (MADE, "n", "2.5", "a whole number"),
        (MADE, "n", "nan", "a whole number"),
        (MADE, "n", "inf", "a whole number"),
        (MADE, "n", True, "a whole number"),
        (MADE, "n", None, "a whole number"),
        (MADE, "n", [3], "a whole number"),
        (MADE, "share", "half", "a number"),
        (MADE, "share", False, "a number"),
        (MADE, "fast", "yes", "true or false"),
        (MADE, "fast", 1, "true or false"),
        (MADE, "kind", "c", "'a' or 'b'"),
        (MADE, "kind", None, "'a' or 'b'"),
        (UNIONS, "count", "many", "a whole number or none"),
        (UNIONS, "share", "much", "a number or none"),
        (UNIONS, "mode", "y", "'x' or 3 or none"),
        (UNIONS, "text", 3, "text or none"),
        (UNIONS, "either", None, "a whole number or text"),
    ],
    ids=lambda value: value.name if isinstance(value, Entry) else str(value),
)
def test_an_option_of_another_type_is_refused(entry: Entry, option: str, given: Any, allowed: str) -> None:
    with pytest.raises(UserError) as caught:
        entry.check({option: given})
    name = entry.name
    assert str(caught.value) == f"{name.capitalize()}'s option {option} can't be {given!r}; give {allowed}."


def test_an_unknown_option_gets_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        MADE.check({"shar": 1})
    message = "Unknown option of 'made' 'shar'; choose one of: fast, kind, n, share. Did you mean 'share'?"
    assert str(caught.value) == message
    with pytest.raises(UnknownName, match="'problem'"):
        MADE.check({"problem": 1})


def test_types_that_are_imported_for_checkers_only_do_not_matter() -> None:
    def own(problem: Any, *, part: Fraction | None = None, n: int = 1) -> None:
        """A searcher of one's own."""

    assert Entry("own", own).check({"n": 3, "part": "1/2"}) == {"n": 3, "part": "1/2"}


# --------------------------------------------------------------------------------------------------- with a guide


@pytest.mark.parametrize(
    ("spec", "searcher", "guide"),
    [
        ("rbf", "rbf", None),
        ("rbf+dps", "rbf", "dps"),
        (" rbf + dps ", "rbf", "dps"),
        ("rbf+dps(scale=2)", "rbf", "dps(scale=2)"),
        ("rbf(draws=4)+dps(scale=2, limit=1)", "rbf(draws=4)", "dps(scale=2, limit=1)"),
        ("bfs(local)", "bfs", "local"),
        ("bfs(local, width=4)", "bfs(width=4)", "local"),
        ("bfs(width=4, local(recur=2, rho=1))", "bfs(width=4)", "local(recur=2, rho=1)"),
        ("rbf(kernel=ddim(0.5), draws=2)", "rbf(kernel=ddim(0.5), draws=2)", None),
        ("rbf(kernel=sde(g=3t^2))+dps", "rbf(kernel=sde(g=3t^2))", "dps"),
        ("rbf(kernel=a+b)", "rbf(kernel=a+b)", None),
        ("rbf()", "rbf()", None),
    ],
)
def test_how_a_guide_is_written(spec: str, searcher: str, guide: str | None) -> None:
    assert registry.compose(spec) == (searcher, guide)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rbf+dps+local", "'rbf+dps+local' has 2 guides (dps, local); give one."),
        ("bfs(local)+dps", "has 2 guides (local, dps); give one."),
        ("bfs(local, dps)", "has 2 guides"),
        ("rbf+", "'rbf+' is no name; write it like rbf, rbf(option=value) or rbf+dps."),
        ("+dps", "'+dps' is no name"),
        ("", "'' is no name"),
        ("+", "'+' is no name"),
        ("rbf++dps", "has 2 guides"),
    ],
)
def test_how_a_guide_is_not_written(spec: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        registry.compose(spec)
    assert message in str(caught.value) and "\n" not in str(caught.value)

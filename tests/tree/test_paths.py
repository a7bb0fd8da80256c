"""Paths and their text."""

from __future__ import annotations

import copy
import pickle
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cowalk
from cowalk import Path
from cowalk.tree import Index
from cowalk.tree.paths import brief, compile_pattern, twin

keys = st.one_of(
    st.text(max_size=6),
    st.text(alphabet=string.ascii_letters + "_.[]'\"\\0123", max_size=6),
    st.integers(),
    st.tuples(st.integers(), st.text(max_size=2)),
    st.none(),
    st.booleans(),
)


@given(st.lists(keys, max_size=5))
def test_a_path_can_be_read_back_from_its_text(parts: list[object]) -> None:
    assert Path.parse(str(Path(parts))) == tuple(parts)


@given(st.lists(keys, min_size=1, max_size=4), st.lists(keys, min_size=1, max_size=4))
def test_different_paths_have_different_texts(one: list[object], two: list[object]) -> None:
    same = [(type(key), key) for key in one] == [(type(key), key) for key in two]
    assert (str(Path(one)) == str(Path(two))) == same


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((), ""),
        (("encoder", "layers", Index(0), "weight"), "encoder.layers.0.weight"),
        (("encoder", "layers", "0", "weight"), "encoder.layers.0.weight"),
        ((1,), "[1]"),
        (("a.b", "c"), "['a.b'].c"),
        (("mlp/~/linear_0", "w"), "['mlp/~/linear_0'].w"),
        (("größe",), "größe"),
        (("",), "['']"),
        (("it's",), '["it\'s"]'),
    ],
)
def test_the_text_of_a_path(parts: tuple[object, ...], text: str) -> None:
    assert str(Path(parts)) == text
    assert repr(Path(parts)) == f"Path({text!r})"


@pytest.mark.parametrize("text", ["a..b", ".a", "a.", "a[", "a[b", "a]b", "a['b", "a[b]", "a[os.system('x')]"])
def test_a_text_that_is_no_path_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(ValueError, match="not a path") as caught:
        Path.parse(text)
    assert repr(text) in str(caught.value)


def test_a_path_is_a_tuple_and_stays_a_path_when_cut_and_joined() -> None:
    path = Path(("a", Index(1), "b"))
    assert isinstance(path[:2], Path)
    assert str(path.parent) == "a.1"
    joined = path + Path(("c", "d"))
    assert isinstance(joined, Path)
    assert joined == ("a", 1, "b", "c", "d")
    assert {path: 1}["a", 1, "b"] == 1
    for again in (pickle.loads(pickle.dumps(path)), copy.deepcopy(path)):
        assert again == path
        assert str(again) == "a.1.b"


def test_numeric_spellings() -> None:
    assert [twin(key) for key in ("0", "12", 0, Index(3), "01", "-1", "x", "", -1, True, 1.0, "٣", "9" * 30)] == [
        0,
        12,
        "0",
        "3",
        *[None] * 9,
    ]


def test_patterns_are_texts_with_stars() -> None:
    assert compile_pattern("encoder.*.weight").fullmatch("encoder.layers.0.weight")
    assert not compile_pattern("encoder.*.weight").fullmatch("decoder.0.weight")
    assert compile_pattern("a[1]").fullmatch("a[1]")
    assert not compile_pattern("a?").fullmatch("a")


def test_a_very_long_path_is_cut_in_messages() -> None:
    assert len(brief(Path(("layer",) * 10_000))) < 300
    assert len(brief(Path(("x" * 10_000,)))) < 300
    assert brief(()) == "the root"


def test_a_path_is_freed_whatever_it_holds() -> None:
    deep: tuple[object, ...] = ()
    for _ in range(100_000):
        deep = Path((deep, "x"))
    del deep

    class Longer(Path):
        """A subclass with attributes."""

    longer = Longer(("a",))
    longer.note = "mine"  # type: ignore[attr-defined]
    del longer
    assert str(next(cowalk.walk({"a": 1}))[0]) == "a"

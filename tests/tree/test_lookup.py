"""get, replace, flatten, unflatten, aliases, children."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cowalk
from cowalk import Path, PathError, flatten, get, replace, unflatten
from tests.tree.kinds_under_test import Layer, Module, Pair, Wrapper

TREE: dict[str, Any] = {"layers": [Layer(1.0, None), {"w": Wrapper({"x": 2.0})}], 3: "three"}


def test_get_takes_text_or_keys() -> None:
    assert get(TREE, "layers.0.weight") == 1.0
    assert get(TREE, ("layers", 0, "weight")) == 1.0
    assert get(TREE, "layers.1.w.x") == 2.0
    assert get(TREE, "[3]") == "three"
    assert get(TREE, "") is TREE
    assert get(Module({"0": 5.0}, {}), "0") == 5.0
    assert get(Module({"0": 5.0}, {}), (0,)) == 5.0


@pytest.mark.parametrize(
    ("path", "at", "said"),
    [
        ("layers.0.wieght", "layers.0", "did you mean 'weight'"),
        ("layers.7", "layers", "it has 0, 1"),
        ("layers.0.weight.x", "layers.0.weight", "is a leaf (float)"),
        ("nothing", "", "the root (dict) has no 'nothing'"),
    ],
)
def test_a_path_that_leads_nowhere_says_how_far_it_led(path: str, at: str, said: str) -> None:
    with pytest.raises(PathError) as caught:
        get(TREE, path)
    assert str(caught.value.at) == at
    assert said in str(caught.value)
    with pytest.raises(PathError):
        replace(TREE, path, 0)


def test_replace_changes_a_copy() -> None:
    made = replace(TREE, "layers.0.weight", 9.0)
    assert get(made, "layers.0.weight") == 9.0
    assert get(TREE, "layers.0.weight") == 1.0
    assert made["layers"][1]["w"].content == {"x": 2.0}
    assert get(replace(TREE, "layers.1", [7]), "layers.1.0") == 7
    assert get(replace(TREE, "layers.0.bias", 4.0), "layers.0.bias") == 4.0
    assert replace(TREE, "", 5) == 5


def test_replace_keeps_ties() -> None:
    shared = np.ones(2)
    made = replace({"emb": shared, "head": [shared]}, "head.0", np.zeros(2))
    assert made["emb"] is made["head"][0]
    assert made["emb"].tolist() == [0, 0]


def test_flatten_and_unflatten_are_each_others_inverse() -> None:
    nested = {"enc": {"0": {"weight": 1, "a.b": 2}}, "head": {"weight": 3}}
    assert flatten(nested) == {"enc.0.weight": 1, "enc.0['a.b']": 2, "head.weight": 3}
    assert unflatten(flatten(nested)) == nested
    assert flatten(Pair(1, [None, 2])) == {"left": 1, "right.1": 2}


def test_flatten_lists_a_tied_leaf_under_all_its_names() -> None:
    shared = np.ones(1)
    assert list(flatten({"emb": shared, "head": shared})) == ["emb", "head"]


@pytest.mark.parametrize("flat", [{"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}, {"a.b": {}, "a.b.c": 1}])
def test_unflatten_refuses_names_that_lead_through_a_value(flat: dict[str, Any]) -> None:
    with pytest.raises(PathError, match="holds a value"):
        unflatten(flat)


def test_unflatten_refuses_two_names_for_one_place() -> None:
    with pytest.raises(PathError, match="same path"):
        unflatten({"a": 1, "['a']": 2})


def test_children_of_any_node() -> None:
    assert cowalk.children(Wrapper(Layer(1, 2))) == {"weight": 1, "bias": 2}
    assert cowalk.children(3.0) == {}
    assert cowalk.children(Module({"w": 1, "b": None}, {"sub": 2})) == {"w": 1, "sub": 2}


def test_a_shared_box_is_an_alias() -> None:
    box = Wrapper(np.ones(2))
    (alias,) = cowalk.aliases({"a": box, "b": [box]})
    assert alias.kind == "tie"
    assert alias.paths == (Path(("a",)), Path(("b", 0)))


def test_arrays_side_by_side_in_one_buffer_do_not_overlap() -> None:
    buffer = np.zeros(10)
    assert cowalk.aliases({"a": buffer[:5], "b": buffer[5:]}) == []
    assert [a.kind for a in cowalk.aliases({"a": buffer[:6], "b": buffer[5:]})] == ["overlap"]

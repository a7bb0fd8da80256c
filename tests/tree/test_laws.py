"""The fourteen laws of the walk, by number, on both implementations (law 9 and 12 also in tests/frameworks)."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import pickle
import sys
import threading
import time
import types
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import attrs
import numpy as np
import pytest

import cowalk
from cowalk import (
    MISSING,
    CycleError,
    Path,
    StructureError,
    TieError,
    WriteError,
    diff,
    fmap,
    fmap_,
    fmapstructure,
    walk,
)
from cowalk.tree import Index, kinds
from tests.tree.kinds_under_test import (
    MAPPINGS,
    RECORDS,
    SEQUENCES,
    AttrsLayer,
    Cell,
    FrozenLayer,
    Layer,
    Module,
    NamedPair,
    Pair,
    PartlyOpened,
    Registered,
    SlottedLayer,
    Void,
    Wrapper,
)


def pairs(*trees: Any, **options: Any) -> dict[str, Any]:
    return {str(path): leaves for path, leaves in walk(*trees, **options)}


def minus(p: Any, g: Any) -> Any:
    return p - g


# --- 1. one matching rule ---


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_law_1_any_kind_follows_any_kind_by_key(record: Any, mapping: Any) -> None:
    lead = record(10.0, 20.0)
    first, second = cowalk.children(lead)
    follower = mapping({second: 2.0, first: 1.0})
    assert list(cowalk.children(fmap(minus, lead, follower)).values()) == [9.0, 18.0]
    assert dict(cowalk.children(fmap(minus, follower, lead))) == {second: -18.0, first: -9.0}


@pytest.mark.parametrize("record", RECORDS[2:])
@pytest.mark.parametrize("other", RECORDS[2:])
def test_law_1_records_of_other_classes_match_by_name(record: Any, other: Any) -> None:
    assert list(pairs(record(1, 2), other(3, 4)).values()) == [(1, 3), (2, 4)]


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("other", SEQUENCES)
def test_law_1_sequences_of_other_types_match_by_position(sequence: Any, other: Any) -> None:
    assert pairs(sequence([1, 2]), other([3, 4])) == {"0": (1, 3), "1": (2, 4)}


def test_law_1_a_numeric_name_and_an_index_match() -> None:
    assert pairs([1.0, 2.0], {"1": 20.0, "0": 10.0}) == {"0": (1.0, 10.0), "1": (2.0, 20.0)}
    assert pairs({"1": 20.0, "0": 10.0}, [1.0, 2.0]) == {"1": (20.0, 2.0), "0": (10.0, 1.0)}
    assert pairs(Module({"0": 1.0, "1": 2.0}, {}), [3.0, 4.0]) == {"0": (1.0, 3.0), "1": (2.0, 4.0)}
    assert pairs(Module({"0": 1.0}, {}), {0: 3.0}) == {"0": (1.0, 3.0)}


def test_law_1_a_dict_key_1_and_a_dict_key_text_1_do_not_match() -> None:
    with pytest.raises(StructureError) as caught:
        fmap(minus, {1: 1.0}, {"1": 1.0})
    assert {d.kind for d in caught.value.differences} == {"absent", "extra"}
    assert pairs({1: "int", "1": "text"}, {"1": "their text", 1: "their int"}) == {
        "[1]": ("int", "their int"),
        "1": ("text", "their text"),
    }


@pytest.mark.parametrize("key", ["01", "-1", " 1", "1.0", "", "٣"])
def test_law_1_only_plain_decimal_names_are_numeric(key: str) -> None:
    assert diff([5.0, 6.0, 7.0, 8.0], {"0": 1.0, key: 1.0, "2": 1.0, "3": 1.0})


def test_law_1_the_order_of_a_follower_does_not_matter() -> None:
    lead = {"a": 1, "b": {"c": 2, "d": 3}}
    assert pairs(lead, {"b": {"d": 30, "c": 20}, "a": 10}) == {"a": (1, 10), "b.c": (2, 20), "b.d": (3, 30)}


# --- 2. the lead's order and types ---


@pytest.mark.parametrize("make", [*SEQUENCES, *MAPPINGS])
def test_law_2_containers_keep_their_type(make: Any) -> None:
    lead = make({"z": 1, "a": 2}) if make in MAPPINGS else make([1, 2])
    made = fmap(lambda x: x + 1, lead)
    assert type(made) is type(lead)
    assert list(cowalk.children(made).items()) == [(key, value + 1) for key, value in cowalk.children(lead).items()]


def test_law_2_nothing_is_sorted() -> None:
    lead = {"z": 1, 3: 2, "a": 3, (1, 2): 4, None: 5}
    assert list(fmap(lambda x: x, lead)) == ["z", 3, "a", (1, 2), None]
    ordered = collections.OrderedDict(b=1, a=2)
    ordered.move_to_end("b")
    assert list(fmap(lambda x: x, ordered)) == ["a", "b"]
    assert [leaf for _, (leaf,) in walk(ordered)] == [2, 1]


def test_law_2_subclasses_keep_their_class_and_attributes() -> None:
    class Tagged(dict[str, Any]):
        pass

    class Steps(list[Any]):
        pass

    for made in (Tagged(a=1), Steps([1]), NamedPair(1, 2)):
        made.tag = "kept"  # type: ignore[union-attr]
        new = fmap(lambda x: x * 10, made)
        assert type(new) is type(made)
        assert new.tag == "kept"
        assert new is not made
    counter = fmap(lambda n: n + 1, collections.Counter("aab"))
    assert type(counter) is collections.Counter
    assert counter == {"a": 3, "b": 2}


def test_law_2_struct_sequences_come_back_as_what_they_were() -> None:
    now = time.localtime(0)
    made = fmap(lambda x: x, now)
    assert type(made) is time.struct_time
    assert made == now
    assert made.tm_zone == now.tm_zone
    assert [str(path) for path, _ in walk(now)][:2] == ["tm_year", "tm_mon"]
    assert fmap(lambda x: 0, sys.float_info).max == 0


def test_law_2_a_deque_keeps_its_bound_and_a_default_dict_its_factory() -> None:
    assert fmap(lambda x: x, collections.deque([1, 2], maxlen=2)).maxlen == 2
    made = fmap(lambda x: x, collections.defaultdict(list, a=1))
    assert made["new"] == []


def test_law_2_looking_a_key_up_does_not_change_a_follower() -> None:
    follower: Any = collections.defaultdict(lambda: 0.0, a=1.0)
    assert diff({"a": 1.0, "b": 2.0}, follower)
    assert list(walk({"a": 1.0, "b": 2.0}, follower, strict=False))
    assert list(follower) == ["a"]


# --- 3. closing runs no constructor ---


class Refusing:
    def __init__(self) -> None:
        raise AssertionError("__init__ ran")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError("__setattr__ ran")


def refuse(*_: Any) -> Any:
    raise AssertionError("user code ran")


def test_law_3_no_constructor_validator_or_setter_runs() -> None:
    @dataclass
    class Checked:
        weight: Any
        limit: int = field(default=3, metadata={"static": True})

        def __post_init__(self) -> None:
            if not isinstance(self.weight, float):
                raise AssertionError("__post_init__ ran")

    @attrs.define
    class Validated:
        weight: Any = attrs.field(validator=attrs.validators.instance_of(float), converter=float)

    assert fmap(str, Checked(1.0)).weight == "1.0"
    assert fmap(str, Validated(1.0)).weight == "1.0"
    opened = cowalk.functor("weight")(type("Mine", (Refusing,), {}))
    node = object.__new__(opened)
    node.__dict__.update(weight=1.0, other="kept")
    made = fmap(lambda w: w + 1, node)
    assert (made.weight, made.other, node.weight) == (2.0, "kept", 1.0)


def test_law_3_the_original_is_unchanged_and_the_rest_is_carried_over() -> None:
    lead = PartlyOpened(3.0, rate := object())
    before = copy.copy(lead.__dict__)
    made = fmap(lambda w: w * 2, lead)
    assert made.weight == 6.0
    assert made.rate is rate
    assert lead.__dict__ == before
    assert fmap(lambda x: x + 1, FrozenLayer(1, 2)) == FrozenLayer(2, 3)
    assert fmap(lambda x: x + 1, SlottedLayer(1, 2)) == SlottedLayer(2, 3)
    assert fmap(lambda x: x + 1, Layer(1, 2, "static")).name == "static"


def test_law_3_attributes_that_are_no_fields_survive() -> None:
    layer = Layer(1, 2)
    layer.cache = [1, 2]  # type: ignore[attr-defined]
    assert fmap(lambda x: x, layer).cache == [1, 2]  # type: ignore[attr-defined]


def test_law_3_a_mapping_whose_store_is_unknown_says_how_to_teach_it() -> None:
    class Computed(collections.abc.Mapping[str, int]):
        def __getitem__(self, key: str) -> int:
            return len(key)

        def __iter__(self) -> Any:
            return iter(("a", "bb"))

        def __len__(self) -> int:
            return 2

    assert fmapstructure(lambda x: x * 2, Computed()) == {"a": 2, "bb": 4}
    with pytest.raises(cowalk.KindError, match=r"cowalk\.register\(Computed"):
        fmap(lambda x: x, Computed())


# --- 4. where ---


def test_law_4_where_is_asked_from_the_root_down_and_stops_the_descent() -> None:
    asked: list[Any] = []

    def where(node: Any) -> bool:
        asked.append(node)
        return isinstance(node, tuple)

    lead = {"a": (1, 2), "b": [3, None]}
    assert fmap(len, lead, where=where) == {"a": 2, "b": [3, None]}
    assert asked == [lead, (1, 2), [3, None], 3, None]


def test_law_4_a_leaf_where_it_is_false_is_carried_along() -> None:
    lead = {"w": np.ones(2), "act": max, "n": 3}
    made = fmap(lambda w: w * 2, lead, where=cowalk.isnumeric)
    assert made["act"] is max
    assert made["n"] == 3
    assert made["w"].tolist() == [2, 2]
    assert fmapstructure(lambda w: 0, lead, where=cowalk.isnumeric) == {"w": 0, "act": max, "n": 3}


def test_law_4_none_in_the_lead_is_an_empty_place_unless_where_asks_for_it() -> None:
    assert fmap(refuse, {"a": None, "b": [None]}) == {"a": None, "b": [None]}
    assert fmap(lambda x: 0, {"a": None}, where=lambda node: node is None) == {"a": 0}
    assert pairs({"a": None}, {"a": {"deep": 1.0}}) == {}


def test_law_4_where_may_be_a_type_or_a_pattern() -> None:
    lead = {"encoder": {"0": {"weight": 1.0, "bias": 2}, "1": {"weight": 3.0}}, "weight": 4.0}
    assert list(pairs(lead, where=int)) == ["encoder.0.bias"]
    assert list(pairs(lead, where=(int, float))) == ["encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "weight"]
    assert list(pairs(lead, where="encoder.*.weight")) == ["encoder.0.weight", "encoder.1.weight"]
    assert list(pairs(lead, where="weigh?")) == ["weight"]
    with pytest.raises(TypeError, match="where= takes"):
        walk(lead, where=3)  # type: ignore[arg-type]


# --- 5. missing ---

X = {"a": np.array([1.0, 2.0]), "b": (3.0, [4.0])}
DX = {"a": np.array([2.0, 1.0]), "b": None}


def test_law_5_missing_at_a_node_is_missing_at_every_leaf_below() -> None:
    assert list(pairs(X, DX)) == ["a"]
    assert [g is MISSING for _, (_, g) in walk(X, DX, missing="pass")] == [False, True, True]


def test_law_5_skip_keeps_the_lead_and_gives_none_in_a_structure() -> None:
    ratio: Any = lambda p, g: float(np.mean(p / g))  # noqa: E731
    assert fmap(ratio, X, DX) == {"a": 1.25, "b": (3.0, [4.0])}
    assert fmapstructure(ratio, X, DX) == {"a": 1.25, "b": (None, [None])}


def test_law_5_error_names_every_missing_place_before_f_runs() -> None:
    with pytest.raises(StructureError) as caught:
        fmap(refuse, X, DX, missing="error")
    assert [(d.kind, str(d.path)) for d in caught.value.differences] == [("missing", "b.0"), ("missing", "b.1.0")]


def test_law_5_a_function_makes_the_value_from_the_lead() -> None:
    assert fmapstructure(lambda p, g: g, X["b"], None, missing=lambda p: -p) == (-3.0, [-4.0])


@pytest.mark.parametrize("value", [None, MISSING, Void(), Wrapper(None)])
def test_law_5_every_missing_value_is_missing_and_zero_is_not(value: Any) -> None:
    assert pairs({"w": 1.0}, {"w": value}) == {}
    assert pairs({"w": {"v": 1.0}}, {"w": value}) == {}
    assert pairs({"w": 1.0}, {"w": 0.0}) == {"w": (1.0, 0.0)}


def test_law_5_bad_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="missing="):
        fmap(minus, X, X, missing="zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ties="):
        fmap(minus, X, X, ties="add")  # type: ignore[arg-type]


# --- 6. strict ---


def test_law_6_all_differences_come_at_once_as_data() -> None:
    lead = {"enc": {"weight": 1.0, "bias": 2.0}, "layers": [1.0, 2.0], "head": {"w": 1.0}, "x": 1.0}
    follower = {"enc": {"wieght": 1.0, "bias": 2.0}, "layers": [1.0, 2.0, 3.0], "head": 5.0, "x": {"y": 1.0}}
    with pytest.raises(StructureError) as caught:
        fmap(refuse, lead, lead, follower)
    found = [(d.kind, d.tree, str(d.path), str(d.follower_path)) for d in caught.value.differences]
    assert found == [
        ("absent", 2, "enc.weight", "enc"),
        ("extra", 2, "enc", "enc.wieght"),
        ("length", 2, "layers", "layers"),
        ("leaf", 2, "head", "head"),
        ("branch", 2, "x", "x"),
    ]
    assert caught.value.differences[0].nearest == "wieght"
    assert caught.value.differences[2].lengths == (2, 3)
    message = str(caught.value)
    assert "did you mean its 'wieght'" in message
    assert "2 items in the lead, 3 in tree 2" in message
    assert diff(lead, lead, follower) == list(caught.value.differences)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.differences == caught.value.differences
    assert str(again) == message


def test_law_6_a_message_prints_no_array_and_stays_short() -> None:
    many = {f"p{i}": np.zeros((100, 100)) for i in range(500)}
    with pytest.raises(StructureError) as caught:
        fmap(minus, many, {})
    assert len(caught.value.differences) == 500
    assert len(str(caught.value)) < 1500
    assert "494 more" in str(caught.value)


def test_law_6_well_known_mistakes_get_advice_that_fits() -> None:
    model = Module({"w": Cell(1.0), "running": Cell(1.0)}, {"sub": Module({"w": Cell(2.0)}, {})})
    with pytest.raises(StructureError, match=r"pass cowalk\.unflatten"):
        walk(model, {"w": Cell(1.0), "sub.w": Cell(1.0)})
    with pytest.raises(StructureError, match=r"where=cowalk\.istrainable"):
        walk(model, {"w": Cell(1.0), "sub": {"w": Cell(1.0)}})
    with pytest.raises(StructureError, match="strict=False"):
        walk(model, {"w": Cell(1.0), "sub": {}})
    with pytest.raises(StructureError, match="missing='skip'"):
        walk(model, None, missing="error")


def test_law_6_not_strict_takes_absent_as_missing_and_ignores_extras() -> None:
    lead, follower = {"a": 1.0, "b": [1.0, 2.0]}, {"b": [5.0, 6.0, 7.0], "c": 1.0}
    assert pairs(lead, follower, strict=False) == {"b.0": (1.0, 5.0), "b.1": (2.0, 6.0)}
    assert pairs([1.0, 2.0], [5.0], strict=False) == {"0": (1.0, 5.0)}
    with pytest.raises(StructureError, match="a leaf"):
        walk({"a": {"b": 1.0}}, {"a": 1.0}, strict=False)


def test_law_6_nothing_is_truncated_silently() -> None:
    for lead, follower in (([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0]), ((), [1.0]), ({}, {"a": 1.0})):
        with pytest.raises(StructureError):
            walk(lead, follower)


def test_law_6_a_place_without_any_value_is_no_difference() -> None:
    assert diff({"relu": {}, "w": 1.0}, {"w": 1.0}) == []
    assert diff({"w": 1.0}, {"w": 1.0, "relu": {}, "bias": None, "sub": [None, {}]}) == []
    assert diff({"act": max, "w": np.ones(1)}, {"w": np.ones(1)}, where=cowalk.isnumeric) == []
    assert diff({"act": max, "w": np.ones(1)}, {"w": np.ones(1)}) != []


def test_law_6_follower_paths_are_in_the_followers_own_keys() -> None:
    (difference,) = diff({"layers": [{"w": 1.0, "b": 1.0}]}, {"layers": {"0": {"w": 1.0}}})
    assert tuple(difference.path) == ("layers", 0, "b")
    assert tuple(difference.follower_path) == ("layers", "0")


# --- 7. ties ---


def test_law_7_a_tied_leaf_is_visited_once_and_comes_back_tied() -> None:
    shared, equal_array = np.ones(2), np.ones(2)
    lead = {"emb": shared, "mid": equal_array, "head": [shared]}
    calls: list[Any] = []
    made = fmap(lambda w: calls.append(w) or w * 2, lead)
    assert len(calls) == 2
    assert made["emb"] is made["head"][0]
    assert made["mid"] is not made["emb"]
    assert list(pairs(lead)) == ["emb", "mid"]
    assert list(pairs(lead, ties="each")) == ["emb", "mid", "head.0"]


def test_law_7_followers_that_differ_are_an_error_naming_the_paths() -> None:
    shared = np.ones(2)
    lead = {"emb": shared, "head": shared}
    with pytest.raises(TieError) as caught:
        walk(lead, {"emb": np.ones(2), "head": np.zeros(2)})
    assert [str(p) for p in caught.value.paths] == ["emb", "head"]
    assert caught.value.tree == 1
    assert "ties='sum'" in str(caught.value)
    (difference,) = diff(lead, {"emb": np.ones(2), "head": np.ones(2)})
    assert difference.kind == "tie"


def test_law_7_a_leaf_asked_for_at_one_path_changes_at_all() -> None:
    shared, box = np.ones(2), Wrapper(1.0)
    for pattern in ("a", "c.0"):
        made = fmap(lambda w: w * 2, {"a": shared, "b": shared, "c": [shared]}, where=pattern)
        assert made["a"] is made["b"] is made["c"][0]
        assert made["a"].tolist() == [2, 2]
    made = fmap(lambda x: x + 1, [box, box], where="1")
    assert made[0] is made[1]
    assert made[0].content == 2.0
    apart = fmap(lambda w: w * 2, {"a": shared, "b": shared}, where="a", ties="each")
    assert apart["b"] is shared


def test_law_7_policies_join_the_followers() -> None:
    shared, one, two = np.ones(2), np.array([1.0, 2.0]), np.array([10.0, 20.0])
    lead, follower = {"emb": shared, "head": shared}, {"emb": one, "head": two}
    assert pairs(lead, follower, ties="sum")["emb"][1].tolist() == [11, 22]
    assert one.tolist() == [1, 2], "contributions are added into an array that is not ours"
    assert pairs(lead, follower, ties="first")["emb"][1] is one
    each = [g for _, g in pairs(lead, follower, ties="each").values()]
    assert each[0] is one
    assert each[1] is two
    assert pairs(lead, {"emb": one, "head": one}, ties="sum")["emb"][1].tolist() == [2, 4]


def test_law_7_one_value_for_the_whole_tie_is_enough() -> None:
    shared, g = np.ones(2), np.ones(2)
    lead = {"emb": shared, "head": shared}
    for follower in (
        {"emb": g, "head": None},
        {"head": g, "emb": None},
        {"emb": g},
        {"head": g},
        {"emb": g, "head": g},
    ):
        assert pairs(lead, follower)["emb"][1] is g
    assert pairs(lead, {"emb": g, "head": g[:]})["emb"][1] is g, "two views of the same cells are one value"
    assert [d.kind for d in diff(lead, {})] == ["absent"]


def test_law_7_gradients_that_are_one_object_are_no_tie() -> None:
    g = np.ones(2)
    made = fmap(minus, {"a": np.zeros(2), "b": np.full(2, 5.0)}, {"a": g, "b": g})
    assert made["b"].tolist() == [4, 4]
    assert made["a"] is not made["b"]


def test_law_7_numbers_and_equal_arrays_are_no_ties() -> None:
    assert len(pairs([1.5, 1.5, "a", "a", np.zeros(0), np.zeros(0)])) == 6


def test_law_7_overlapping_arrays_are_reported_and_not_merged() -> None:
    table = np.arange(8.0).reshape(4, 2)
    tree = {"emb": table, "top": table[:2], "turned": table.T, "other": np.ones(3), "again": table}
    assert [(a.kind, str(a)) for a in cowalk.aliases(tree)] == [
        ("tie", "emb = again"),
        ("overlap", "emb ~ top ~ turned"),
    ]
    assert len(pairs(tree)) == 4


def test_law_7_shared_nodes_stay_shared() -> None:
    layer = Module({"w": Cell(1.0)}, {})
    model = Module({}, {"first": layer, "second": layer})
    model.favourite = layer
    made = fmap(lambda c: Cell(c.value + 1), model)
    assert made.modules["first"] is made.modules["second"]
    assert made.modules["first"] is not layer
    assert made.favourite is made.modules["first"], "a reference that is no child still points into the old tree"


def test_law_7_a_shared_box_stays_shared() -> None:
    box = Wrapper(1.0)
    made = fmap(lambda x: x + 1, [box, box, Wrapper(1.0)])
    assert made[0] is made[1]
    assert made[0] is not made[2]
    assert made[0].content == 2.0


# --- 8. cycles, depth, exceptions ---


def cyclic() -> list[Any]:
    knot: list[Any] = [1.0]
    knot.append({"again": knot})
    module = Module({"w": 1.0}, {})
    module.modules["child"] = Module({}, {"parent": module})
    custom = Registered({})
    custom.items["me"] = custom
    return [knot, module, custom]


@pytest.mark.parametrize(("number", "first", "path"), [(0, "", "1.again"), (1, "", "child.parent"), (2, "", "me")])
def test_law_8_a_cycle_is_an_error_with_both_paths(number: int, first: str, path: str) -> None:
    for call in (
        lambda t: fmap(refuse, t, where=lambda _: False),
        lambda t: list(walk(t)),
        lambda t: fmap_(refuse, t, t),
    ):
        with pytest.raises(CycleError) as caught:
            call(cyclic()[number])
        assert (str(caught.value.first), str(caught.value.path)) == (first, path)
    assert [d.kind for d in diff(cyclic()[number])] == ["cycle"]


def test_law_8_a_cycle_below_a_deep_tree_and_in_a_follower() -> None:
    deep = cyclic()[0]
    for _ in range(50):
        deep = [deep]
    with pytest.raises(CycleError) as caught:
        walk(deep)
    assert len(caught.value.first) == 50
    assert len(caught.value.path) == 52
    assert pairs({"a": 1.0}, {"a": 1.0, "more": cyclic()[0]}, strict=False) == {"a": (1.0, 1.0)}
    assert [d.kind for d in diff({"a": 1.0}, {"a": 1.0, "more": cyclic()[1]})] == ["extra"]
    empty: list[Any] = []
    empty.append(empty)
    assert diff({"a": 1.0}, {"a": 1.0, "more": empty}) == []


def nested(depth: int) -> Any:
    tree: Any = 1.0
    for _ in range(depth):
        tree = [tree]
    return tree


def test_law_8_100_000_nested_lists_walk_and_are_freed() -> None:
    one, two = nested(100_000), nested(100_000)
    made = fmap(lambda a, b: a + b, one, two)
    ((path, leaves),) = walk(one, two)
    assert len(path) == 100_000
    assert leaves == (1.0, 1.0)
    depth = 0
    while isinstance(made, list):
        (made,) = made
        depth += 1
    assert (depth, made) == (100_000, 2.0)
    assert len(diff(one, nested(99_999))) == 1
    assert fmap_(lambda a: 5.0, one) is one
    del one, two, made
    gc.collect()


def test_law_8_a_deep_tree_with_a_leaf_at_every_level_needs_no_quadratic_memory() -> None:
    tree: Any = 0
    for i in range(5_000):
        tree = {"leaf": i, "next": tree}
    assert sum(leaf for _, (leaf,) in walk(tree)) == sum(range(5_000))


def free_depth() -> int:
    try:
        return 1 + free_depth()
    except RecursionError:
        return 1


def test_law_8_failing_callbacks_leave_the_interpreter_as_it_was() -> None:
    class Failing:
        pass

    cowalk.register(Failing, open=refuse, close=refuse)
    before = free_depth()
    for _ in range(1000):
        with pytest.raises(AssertionError):
            fmap(refuse, [[[[1.0]]]])
        with pytest.raises(AssertionError):
            fmap(lambda x: x, [[[[Failing()]]]])
        with pytest.raises(AssertionError):
            list(walk([[[1.0]]], where=refuse))
    assert free_depth() == before


def test_law_8_an_exception_of_f_names_the_leaf() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        fmap(lambda x: 1 / x, {"layers": [{"w": 1.0}, {"w": 0.0}]})
    assert any("layers.1.w" in note for note in caught.value.__notes__)


# --- 9. wrappers ---


def test_law_9_wrappers_are_seen_through_in_any_nesting() -> None:
    inner = {"w": 1.0}
    wrapped = Wrapper(Wrapper({"module": Wrapper(inner)}))
    assert pairs(wrapped, {"module": {"w": 2.0}}) == {"module.w": (1.0, 2.0)}
    assert pairs({"module": {"w": 2.0}}, wrapped) == {"module.w": (2.0, 1.0)}
    made = fmap(lambda x: x + 1, wrapped)
    assert isinstance(made, Wrapper)
    assert made.content.content["module"].content == {"w": 2.0}
    assert fmapstructure(lambda x: x + 1, wrapped) == {"module": {"w": 2.0}}


# --- 10. in place ---


def test_law_10_results_are_written_into_the_leads_own_arrays() -> None:
    weight, bias = np.ones(2), np.ones(1)
    lead = {"w": weight, "b": (bias,)}
    assert fmap_(lambda p, g: p - g, lead, {"w": np.full(2, 0.5), "b": [np.zeros(1)]}) is lead
    assert lead["w"] is weight
    assert weight.tolist() == [0.5, 0.5]


def test_law_10_f_may_change_its_argument_and_return_it() -> None:
    total = {"w": np.zeros(3)}

    def add(acc: Any, g: Any) -> Any:
        acc += g
        return acc

    for _ in range(3):
        fmap_(add, total, {"w": np.ones(3)})
    assert total["w"].tolist() == [3, 3, 3]


def test_law_10_immutable_leaves_are_replaced_in_their_container() -> None:
    for lead in ({"a": 1.0, "b": [2.0]}, Layer(1.0, [2.0]), Module({"a": 1.0}, {"b": Wrapper(2.0)}), Wrapper([1.0])):
        if isinstance(lead, Module):
            with pytest.raises(WriteError):  # this kind of module has no `put`
                fmap_(lambda x: x + 1, lead)
            continue
        expected = [leaf + 1 for _, (leaf,) in walk(lead)]
        assert fmap_(lambda x: x + 1, lead) is lead
        assert [leaf for _, (leaf,) in walk(lead)] == expected


def test_law_10_everything_is_checked_before_anything_is_written() -> None:
    weight, frozen, stretched = np.ones(2), np.ones(2), np.broadcast_to(np.ones(1), (3,)).copy()
    frozen.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(stretched, (3, 2), (8, 8))
    lead = {"w": weight, "frozen": frozen, "over": overlapping, "t": (1.0,)}
    with pytest.raises(WriteError) as caught:
        fmap_(lambda x: refuse(), lead)
    assert [str(path) for path, _ in caught.value.problems] == ["frozen", "over", "t.0"]
    assert weight.tolist() == [1, 1]
    with pytest.raises(WriteError, match="shape"):
        fmap_(lambda x: np.zeros(3) if x[1] == 7 else x + 1, {"w": weight, "v": np.array([0.0, 7.0])})
    with pytest.raises(WriteError, match="complex"):
        fmap_(lambda x: x + 1j, {"w": weight})
    assert weight.tolist() == [1, 1]
    with pytest.raises(StructureError):
        fmap_(minus, {"w": weight}, {"v": weight})


def test_law_10_a_result_in_the_memory_of_another_leaf_is_refused() -> None:
    x, y, own = np.zeros(2), np.ones(2), np.arange(4.0)
    with pytest.raises(WriteError, match="lies in the memory of b"):
        fmap_(lambda _, other: other, {"a": x, "b": y}, {"a": y, "b": x})
    assert (x.tolist(), y.tolist()) == ([0, 0], [1, 1])
    fmap_(lambda w: w[::-1], [own, np.zeros(3)])
    assert own.tolist() == [3, 2, 1, 0]
    fmap_(lambda _, other: other, [x, y], [own[:2], own[2:]])
    assert (x.tolist(), y.tolist()) == ([3, 2], [1, 0])


def test_law_10_a_tied_array_is_written_once() -> None:
    shared = np.zeros(1)
    fmap_(lambda p: p + 1, [shared, shared])
    assert shared.tolist() == [1]


# --- 11. paths ---


def test_law_11_paths_are_tuples_of_raw_keys_with_an_unambiguous_text() -> None:
    tree = {"encoder": {"layers": [{"weight": 1}]}, 1: {"a.b": 2}, "1": 3, (1, 2): 4, "": 5, None: 6}
    texts = ["encoder.layers.0.weight", "[1]['a.b']", "1", "[(1, 2)]", "['']", "[None]"]
    assert list(pairs(tree)) == texts
    first = next(iter(walk(tree)))[0]
    assert first == ("encoder", "layers", 0, "weight")
    assert isinstance(first, Path)
    assert type(first[2]) is Index
    assert [cowalk.get(tree, text) for text in texts] == [1, 2, 3, 4, 5, 6]
    assert cowalk.get(tree, ("encoder", "layers", 0)) == {"weight": 1}
    assert [cowalk.get(tree, path) for path, _ in walk(tree)] == [1, 2, 3, 4, 5, 6]


# --- 13. own types ---


def test_law_13_plain_objects_are_leaves_until_registered() -> None:
    class Plain:
        def __init__(self, weight: float) -> None:
            self.weight = weight

    assert list(pairs(Plain(1.0))) == [""]
    cowalk.functor(Plain)
    assert list(pairs(Plain(1.0))) == ["weight"]
    cowalk.leaf(Plain)
    assert list(pairs(Plain(1.0))) == [""]


def test_law_13_dataclasses_and_attrs_open_by_themselves_with_static_fields_closed() -> None:
    @attrs.define
    class Head:
        w: Any
        rate: Any = attrs.field(default=0.1, metadata={"static": True})

    assert list(pairs(Layer(1, 2))) == ["weight", "bias"]
    assert list(pairs(Head(1))) == ["w"]
    assert list(pairs(AttrsLayer(1, Head(2)))) == ["weight", "bias.w"]

    class Derived(Layer):
        pass

    assert list(pairs(Derived(1, 2))) == ["weight", "bias"]


def test_law_13_unset_fields_are_no_children() -> None:
    layer = SlottedLayer(1, 2)
    del layer.bias
    assert list(pairs(layer)) == ["weight"]
    assert not hasattr(fmap(lambda x: x, layer), "bias")


def test_law_13_registration_mistakes_are_named() -> None:
    with pytest.raises(cowalk.KindError, match="expected a type"):
        cowalk.register(3, open=dict, close=dict)  # type: ignore[arg-type]
    with pytest.raises(cowalk.KindError, match="opened by cowalk itself"):
        cowalk.leaf(dict)
    with pytest.raises(cowalk.KindError, match="names of attributes"):
        cowalk.functor(3)  # type: ignore[call-overload]


def test_law_13_a_class_can_come_and_go() -> None:
    for i in range(200):  # a new type may have the address of a dead one
        cls = type(f"Local{i}", (), {})
        if i % 2:
            cowalk.functor(cls)
        node = cls()
        node.w = 1.0
        assert list(pairs(node)) == (["w"] if i % 2 else [""])
        del node, cls
        gc.collect(0)


# --- 14. threads ---


def test_law_14_walks_in_many_threads_while_types_are_registered() -> None:
    lead = {"a": [Pair(1.0, {"b": 2.0})] * 20, "c": np.ones(3)}
    failures: list[Exception] = []

    def work() -> None:
        try:
            for i in range(200):
                made = fmap(lambda x, y: x, lead, lead)
                assert made["a"][19].right["b"] == 2.0
                cowalk.functor(type(f"T{i}", (), {}))
        except Exception as error:  # noqa: BLE001  (told to the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_law_3_what_f_does_to_the_lead_is_not_in_the_result() -> None:
    lead = {"a": 1, "b": 2, "c": [3]}

    def spoil(x: int) -> int:
        lead.pop("b", None)
        lead["new"] = 5
        lead["a"] = lead.pop("a", 0)
        return -x

    assert list(fmap(spoil, lead).items()) == [("a", -1), ("b", -2), ("c", [-3])]


def test_law_14_f_may_walk() -> None:
    tree = {"a": [1, 2]}
    assert fmap(lambda x: fmap(lambda y: y + x, tree), [1, 2]) == [{"a": [2, 3]}, {"a": [3, 4]}]


# --- what once broke ---


def test_a_tuple_that_does_not_have_the_fields_it_claims_is_refused() -> None:
    odd = type("Odd", (tuple,), {"_fields": ("a", "b")})
    for items in ((), (1,), range(50)):
        for call in (cowalk.flatten, lambda t: fmap(lambda x: x, t), lambda t: fmapstructure(lambda x: x, t)):
            with pytest.raises(cowalk.KindError, match="2 _fields"):
                call(odd(items))
    assert pairs(odd((1, 2))) == {"a": (1,), "b": (2,)}


def test_a_walk_that_is_moved_on_from_inside_says_so() -> None:
    def advance(p: float) -> float:
        list(walking)
        return p

    walking = walk({i: float(i) for i in range(100)}, dict.fromkeys(range(100)), missing=advance)
    with pytest.raises(ValueError, match="already"):
        next(walking)


def test_absurd_numbers_of_outputs_are_refused() -> None:
    for outputs in (2**62, 2**63, 2**70, 1001):
        with pytest.raises(ValueError, match="outputs="):
            fmap(lambda x: (x,), {"e": 1.0}, outputs=outputs)


def test_a_slotted_class_without_open_fields_is_an_empty_node() -> None:
    @dataclass(slots=True)
    class Empty:
        pass

    assert isinstance(fmap(lambda x: x, [Empty()])[0], Empty)


def test_records_over_containers_and_values_lose_nothing() -> None:
    @attrs.define(slots=False)
    class Tagged(dict[str, Any]):
        tag: int = 3

    node = Tagged()
    node["w"] = 1.0
    assert pairs(node) == {"w": (1.0,)}
    made = fmap(lambda x: x + 1, node)
    assert (dict(made), made.tag) == ({"w": 2.0}, 3)
    number = dataclass(init=False)(type("Number", (float,), {}))(3.5)
    assert fmap(lambda x: x, [number]) == [3.5]
    with pytest.raises(cowalk.KindError):
        cowalk.functor("x")(list)


def test_what_was_cached_of_the_old_values_is_not_carried_over() -> None:
    @dataclass
    class Squared:
        w: float

        @functools.cached_property
        def square(self) -> float:
            return self.w**2

    node = Squared(3.0)
    assert node.square == 9.0
    assert fmap(lambda w: 10 * w, node).square == 900.0
    assert node.square == 9.0


def test_a_result_inside_a_large_leaf_is_refused_whatever_lies_between() -> None:
    a = np.arange(100.0)
    lead = {"big": a, "small": a[10:20], "z": np.zeros(10)}
    with pytest.raises(WriteError, match="lies in the memory of big"):
        fmap_(lambda _, g: g, lead, {"big": np.full(100, 7.0), "small": np.full(10, 7.0), "z": a[50:60]})


def test_one_container_at_two_paths_is_not_written_twice() -> None:
    shared = [1.0]
    with pytest.raises(WriteError, match=r"it is a\.0 again"):
        fmap_(minus, {"a": shared, "b": shared}, {"a": [0.25], "b": [0.5]})
    assert shared == [1.0]
    fmap_(minus, {"a": shared, "b": shared}, {"a": [0.25], "b": [0.25]})
    assert shared == [0.75]


def test_a_registration_during_a_look_up_is_not_lost() -> None:
    class Late:
        pass

    def finder(cls: type) -> None:
        if cls is Late and not done:
            done.append(cls)
            cowalk.functor(Late)

    done: list[type] = []
    kinds.add_finder(finder)
    node = Late()
    node.w = 1.0  # type: ignore[attr-defined]
    list(walk([node]))
    assert pairs([node]) == {"0.w": (1.0,)}


def test_texts_of_keys_that_print_as_something_else_are_their_own() -> None:
    class Name(str):
        def __str__(self) -> str:
            return "same"

    assert cowalk.flatten({Name("a"): 1, Name("b"): 2}) == {"a": 1, "b": 2}


# --- options that belong to no single law ---


def test_several_outputs_make_several_trees() -> None:
    low, high = fmap(lambda x: (x - 1, x + 1), Layer(1, [2]), outputs=2)
    assert low == Layer(0, [1])
    assert high == Layer(2, [3])
    with pytest.raises(TypeError, match="tuple of 2 values; at a"):
        fmap(lambda x: x, {"a": 1}, outputs=2)


def test_with_path_gives_the_path_first() -> None:
    assert fmapstructure(lambda path, x: str(path), {"a": [1, 2]}, with_path=True) == {"a": ["a.0", "a.1"]}


def test_a_walk_needs_a_tree() -> None:
    for call in (lambda: fmap(refuse), lambda: walk(), lambda: fmap_(refuse), lambda: diff()):
        with pytest.raises(TypeError, match="at least one tree"):
            call()


def test_structures_are_plain() -> None:
    lead = Pair(
        Layer(1, FrozenLayer(2, ())), collections.deque([collections.OrderedDict(a=3), types.MappingProxyType({1: 4})])
    )
    made = fmapstructure(lambda x: x, lead)
    assert made == {"left": {"weight": 1, "bias": {"weight": 2, "bias": ()}}, "right": [{"a": 3}, {1: 4}]}
    assert type(made["right"][0]) is dict
    assert type(made["right"]) is list


def test_frozen_classes_refuse_in_place_replacement_by_name() -> None:
    with pytest.raises(WriteError, match="weight"):
        fmap_(lambda x: x + 1, FrozenLayer(1.0, 2.0))
    with pytest.raises(FrozenInstanceError):
        FrozenLayer(1.0, 2.0).weight = 3  # type: ignore[misc]

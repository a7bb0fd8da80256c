"""`ratio`: model and gradients walked together, what is missing, tied, frozen, and what cannot be measured."""

import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest

import cowalk
from cowalk import MeasureError, Path, Ratio, StructureError, TieError, isleaf, ratio

Layer = namedtuple("Layer", "weight bias")


@dataclass
class Net:
    name: str
    layers: list
    act: object = max
    steps: int = 3


def net():
    return Net("net", [Layer(np.array([1.0, 2.0]), np.array([0.0])), Layer(np.array([3.0]), np.array([5.0]))])


def by_path(table):
    return {str(row.path): row for row in table.rows}


def test_a_row_for_every_array_in_the_order_of_the_model():
    model = OrderedDict((f"layer{i}", np.ones(1)) for i in (2, 10, 1))
    table = ratio(model, dict(sorted(model.items())))
    assert [str(row.path) for row in table.rows] == ["layer2", "layer10", "layer1"]


def test_gradients_in_containers_of_any_kind():
    grads = {
        "name": None,
        "layers": (
            MappingProxyType({"bias": np.array([2.0]), "weight": np.array([2.0, 1.0])}),
            Layer(np.array([1.0]), np.array([0.0])),
        ),
    }
    table = ratio(net(), {"act": None, "steps": None, **grads})
    assert [row.ratio.mean for row in table.rows] == [1.25, 0.0, 3.0, None]
    assert by_path(table)["layers.1.bias"].ratio.x_by_zero == 1
    assert (table.rows[0].shape, table.rows[0].dtype, table.rows[0].state) == ((2,), "float64", "measured")


def test_the_structure_has_the_shape_of_the_model_with_ratios_at_its_arrays():
    table = ratio(
        net(), {"layers": [{"weight": np.array([2.0, 1.0]), "bias": None}, None]}, ties="share", where="layers*"
    )
    first = table.structure["layers"][0]["weight"]
    assert isinstance(first, Ratio)
    assert first.mean == 1.25
    assert table.structure == {
        "name": None,
        "layers": [{"weight": first, "bias": None}, {"weight": None, "bias": None}],
        "act": None,
        "steps": None,
    }


def test_a_missing_branch_is_a_row_that_says_so_for_every_array_in_it():
    table = ratio({"a": np.ones(2), "b": [np.ones(1), (np.ones(3),)]}, {"a": np.ones(2), "b": None})
    assert [(str(row.path), row.state, row.ratio is None) for row in table.rows] == [
        ("a", "measured", False),
        ("b.0", "no gradient", True),
        ("b.1.0", "no gradient", True),
    ]
    assert table.total.n == 2


def test_a_zero_gradient_is_not_a_missing_one():
    table = ratio({"zero": np.ones(2), "missing": np.ones(2)}, {"zero": np.zeros(2), "missing": None})
    assert (table.rows[0].ratio.x_by_zero, table.rows[0].state) == (2, "measured")
    assert (table.rows[1].ratio, table.rows[1].state) == (None, "no gradient")


def test_no_gradient_at_all():
    assert [row.state for row in ratio({"a": np.ones(2), "b": np.ones(2)}, None).rows] == ["no gradient"] * 2


def test_a_model_that_is_one_array():
    table = ratio(np.array([1.0, 2.0]), np.array([2.0, 1.0]))
    assert table.structure.mean == 1.25
    assert table.rows[0].path == Path()


def test_plain_numbers_only_where_they_are_asked_for():
    model, grads = {"w": 3.0, "n": 4}, {"w": 6.0, "n": 2}
    with pytest.raises(MeasureError, match="nothing to measure"):
        ratio(model, grads)
    assert [row.ratio.mean for row in ratio(model, grads, where=isleaf).rows] == [0.5, 2.0]


def test_the_total_is_the_ratio_of_all_elements():
    rng = np.random.default_rng(0)
    model, grads = ([rng.normal(size=n) for n in (3, 1, 8)] for _ in range(2))
    whole = np.concatenate(model) / np.concatenate(grads)
    total = ratio(model, grads).total
    assert (total.n, total.min, total.max) == (12, whole.min(), whole.max())
    assert total.mean == pytest.approx(whole.mean())
    assert ratio([], []).total == Ratio()


class TestTies:
    def test_a_tied_array_is_one_row_with_all_its_names(self):
        shared, g = np.array([1.0, 2.0]), np.array([2.0, 1.0])
        table = ratio({"emb": shared, "mid": np.ones(1), "head": shared}, {"emb": g, "mid": np.ones(1), "head": None})
        assert [(str(row.path), list(map(str, row.aliases))) for row in table.rows] == [("emb", ["head"]), ("mid", [])]
        assert table.structure["emb"] is table.structure["head"]
        assert table.total.n == 3

    def test_different_gradients_of_one_array_are_an_error_that_says_what_to_do(self):
        shared = np.ones(1)
        with pytest.raises(TieError, match="sum"):
            ratio([shared, shared], [np.ones(1), np.ones(1)])

    def test_contributions_are_added_where_asked(self):
        shared = np.array([6.0])
        table = ratio([shared, shared], [np.array([1.0]), np.array([2.0])], ties="sum")
        assert [row.ratio.mean for row in table.rows] == [2.0]

    def test_each_path_a_row_where_asked(self):
        shared = np.array([6.0])
        table = ratio([shared, shared], [np.array([1.0]), np.array([2.0])], ties="each")
        assert [row.ratio.mean for row in table.rows] == [6.0, 3.0]

    def test_one_gradient_object_for_two_parameters_is_no_tie(self):
        g = np.array([2.0])
        assert [row.ratio.mean for row in ratio([np.array([2.0]), np.array([4.0])], [g, g]).rows] == [1.0, 2.0]

    def test_a_tied_array_without_a_gradient_keeps_its_names(self):
        shared = np.ones(1)
        (row,) = ratio([shared, shared], [None, None]).rows
        assert (row.state, list(map(str, row.aliases))) == ("no gradient", ["1"])


class TestErrors:
    def test_trees_that_do_not_fit_name_all_places(self):
        with pytest.raises(StructureError) as caught:
            ratio({"weight": np.ones(1), "bias": np.ones(1)}, {"wieght": np.ones(1), "bias": [np.ones(1)]})
        assert {each.kind for each in caught.value.differences} == {"absent", "branch", "extra"}
        assert all(name in str(caught.value) for name in ("weight", "bias", "wieght"))

    def test_all_shapes_that_differ_are_named_with_both_shapes(self):
        with pytest.raises(MeasureError) as caught:
            ratio(
                {"a": np.ones(2), "b": [np.ones((2, 3))], "c": np.ones(1)},
                {"a": np.ones(3), "b": [np.ones((3, 2))], "c": np.ones(1)},
            )
        assert [str(path) for path, _ in caught.value.problems] == ["a", "b.0"]
        for text in ("(2,)", "(3,)", "(2, 3)", "(3, 2)", "a:", "b.0:"):
            assert text in str(caught.value)

    def test_shapes_are_never_broadcast(self):
        with pytest.raises(MeasureError):
            ratio([np.ones((2, 1))], [np.ones((1, 2))])

    def test_what_is_no_array_of_numbers_is_named(self):
        with pytest.raises(
            MeasureError, match=r"f: the parameter is no array of numbers but a builtin_function_or_method"
        ):
            ratio({"f": max}, {"f": 1.0}, where=isleaf)
        with pytest.raises(MeasureError, match=r"w: the gradient is no array of numbers but a str"):
            ratio({"w": np.ones(1)}, {"w": "w"})
        with pytest.raises(MeasureError, match="a list"):
            ratio({"w": [np.ones(1)]}, {"w": [np.ones(1)]}, where=list)

    def test_a_long_list_is_cut_in_the_message_but_not_in_the_data(self):
        model, grads = ({str(i): np.ones(n) for i in range(50)} for n in (1, 2))
        with pytest.raises(MeasureError, match="44 more") as caught:
            ratio(model, grads)
        assert len(caught.value.problems) == 50
        assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems

    def test_nothing_is_changed(self):
        model, grads = net(), {"name": None, "act": None, "steps": None, "layers": None}
        before = cowalk.flatten(model)
        ratio(model, grads)
        assert all(before[path] is leaf for path, leaf in cowalk.flatten(model).items())

"""`stats` and `ratio`: trees walked together, what is missing or tied, and what cannot be measured."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import cowalk
from cowalk import MeasureError, Moments, Pair, Path, Row, StructureError, Table, TieError, isleaf, ratio, stats


class Layer(NamedTuple):
    weight: Any
    bias: Any


@dataclass
class Net:
    name: str
    layers: list[Layer]
    act: object = max
    steps: int = 3


def net() -> Net:
    return Net("net", [Layer(np.array([1.0, 2.0]), np.array([0.0])), Layer(np.array([3.0]), np.array([5.0]))])


def names(table: Table) -> list[str]:
    return [str(row.path) for row in table]


def means(table: Table) -> list[float | None]:
    """The mean quotient of each row."""
    return table.column("ratio.mean")


def test_a_row_for_every_array_in_the_order_of_the_model() -> None:
    model = OrderedDict((f"layer{i}", np.ones(1)) for i in (2, 10, 1))
    assert names(stats(model, dict(sorted(model.items())))) == ["layer2", "layer10", "layer1"]


def test_gradients_in_containers_of_any_kind() -> None:
    grads = {
        "name": None,
        "layers": (
            MappingProxyType({"bias": np.array([2.0]), "weight": np.array([2.0, 1.0])}),
            Layer(np.array([1.0]), np.array([0.0])),
        ),
    }
    table = stats(net(), {"act": None, "steps": None, **grads})
    assert means(table) == [1.25, 0.0, 3.0, None]
    last = table["layers.1.bias"].ratio
    assert last is not None
    assert last.x_by_zero == 1
    assert (table[0].shape, table[0].dtype, table[0].state) == ((2,), "float64", "ok")


def test_the_structure_has_the_shape_of_the_model_with_rows_at_its_arrays() -> None:
    table = stats(
        net(), {"layers": [{"weight": np.array([2.0, 1.0]), "bias": None}, None]}, ties="share", where="layers*"
    )
    first, bias = (table.structure["layers"][0][name] for name in ("weight", "bias"))
    assert isinstance(first, Row)
    assert first.ratio is not None
    assert first.ratio.mean == 1.25
    assert (bias.ratio, bias.state) == (None, "unused")
    assert table.structure["name"] is table.structure["act"] is table.structure["steps"] is None
    assert [row.state for row in table.structure["layers"][1].values()] == ["unused", "unused"]


def test_a_missing_branch_is_a_row_that_says_so_for_every_array_in_it() -> None:
    table = stats({"a": np.ones(2), "b": [np.ones(1), (np.ones(3),)]}, {"a": np.ones(2), "b": None})
    assert [(str(row.path), row.state, row.ratio is None) for row in table] == [
        ("a", "ok", False),
        ("b.0", "unused", True),
        ("b.1.0", "unused", True),
    ]
    total = table.total
    assert total.ratio is not None
    assert (total.n, total.ratio.n) == (6, 2)


def test_a_zero_gradient_is_not_a_missing_one() -> None:
    table = stats({"zero": np.ones(2), "missing": np.ones(2)}, {"zero": np.zeros(2), "missing": None})
    zero, missing = table
    assert zero.ratio is not None
    assert (zero.ratio.x_by_zero, zero.state) == (2, "zero")
    assert (missing.gradient, missing.ratio, missing.state) == (None, None, "unused")


def test_without_gradients_only_the_parameters_are_measured() -> None:
    table = stats({"a": np.array([3.0, 4.0]), "b": np.ones(2)})
    assert [(row.state, row.gradient, row.ratio) for row in table] == [("ok", None, None)] * 2
    assert table.column("parameter.max") == [4.0, 1.0]


def test_where_no_parameter_has_a_gradient_nothing_has_run() -> None:
    model = {"a": np.ones(2), "b": np.ones(2)}
    assert [row.state for row in stats(model, {"a": None, "b": None})] == ["not run"] * 2
    assert [row.state for row in ratio(model, None)] == ["not run"] * 2


def test_a_model_that_is_one_array() -> None:
    table = stats(np.array([1.0, 2.0]), np.array([2.0, 1.0]))
    assert table.structure.ratio.mean == 1.25
    assert table[0].path == Path()


def test_plain_numbers_only_where_they_are_asked_for() -> None:
    model, grads = {"w": 3.0, "n": 4}, {"w": 6.0, "n": 2}
    with pytest.raises(MeasureError, match="nothing to measure"):
        stats(model, grads)
    table = stats(model, grads, where=isleaf)
    assert means(table) == [0.5, 2.0]
    assert [row.shape for row in table] == [(), ()]


def test_an_empty_model_is_an_empty_table() -> None:
    table = stats([], [])
    assert (len(table), table.total.n, table.structure) == (0, 0, [])


def test_the_total_is_that_of_all_elements() -> None:
    rng = np.random.default_rng(0)
    model, grads = ([rng.normal(size=n) for n in (3, 1, 8)] for _ in range(2))
    total, one = stats(model, grads).total, stats(np.concatenate(model), np.concatenate(grads)).total
    assert total.n == 12
    for name in ("parameter", "gradient", "ratio"):
        found, right = getattr(total, name), getattr(one, name)
        assert {each: getattr(found, each) for each in found.names()} == pytest.approx(
            {each: getattr(right, each) for each in right.names()}, rel=1e-12
        )


def test_updates_are_measured_beside_the_parameters() -> None:
    model, update = {"w": np.array([3.0, 4.0]), "b": np.ones(1)}, {"w": np.array([0.0, -0.5]), "b": None}
    weight, bias = stats(model, updates=update)
    assert weight.update is not None
    assert weight.update_ratio is not None
    assert weight.update.norm == pytest.approx(0.5)
    assert (weight.update_ratio.ratio_of_norms, weight.update_ratio.min) == (pytest.approx(0.1), -0.125)
    assert (bias.update, bias.update_ratio, bias.state) == (None, None, "ok")
    assert weight.gradient is weight.ratio is weight.adam is None


def test_all_arguments_are_matched_by_key_and_measured_side_by_side() -> None:
    model = {"a": np.array([2.0]), "b": np.array([3.0])}
    grads, updates = ({key: factor * model[key] for key in ("b", "a")} for factor in (10.0, 100.0))
    state = {key: {"m": np.array([0.5]), "v": 1e4 * model[key] ** 2} for key in ("b", "a")}
    table = stats(model, grads, updates, state)
    assert [row.value("gradient.max") for row in table] == [20.0, 30.0]
    assert [row.value("update.max") for row in table] == [200.0, 300.0]
    assert [row.value("adam.rms") for row in table] == pytest.approx([0.1, 0.1])


def test_histograms_are_made_where_they_are_asked_for() -> None:
    model, grads = [np.array([1.0, 1.5, 4.0, 0.0])], [np.array([0.25, np.inf, 0.0, 0.3])]
    assert stats(model, grads)[0].histograms is None
    found = stats(model, grads, histograms=True)[0].histograms
    assert found is not None
    parameter, gradient, update = found
    assert parameter is not None
    assert gradient is not None
    assert (parameter.low, parameter.counts) == (0, (2, 0, 1))
    assert (gradient.low, gradient.counts, update) == (-2, (2,), None)


def test_the_number_of_threads_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    model, grads = ({"w": rng.normal(size=300_000), "b": rng.normal(size=7)} for _ in range(2))
    assert stats(model, grads, threads=1).matrix.tobytes() == stats(model, grads, threads=3).matrix.tobytes()


def test_ratio_is_the_table_of_stats_that_shows_quotients() -> None:
    model, grads = {"w": np.array([1.0, 2.0])}, {"w": np.array([2.0, 1.0])}
    table = ratio(model, grads)
    assert table.rows == stats(model, grads).rows
    assert isinstance(table["w"].ratio, Pair)
    assert isinstance(table["w"].parameter, Moments)
    assert table.columns == ("n", "ratio.mean", "ratio.min", "ratio.max", "ratio.mean_abs")
    assert table.structure["w"] == table["w"]


def test_a_mean_fits_where_the_sum_does_not() -> None:
    (row,) = stats([np.full(7, np.finfo(float).max)], [np.ones(7)])
    assert row.ratio is not None
    assert row.parameter is not None
    assert row.ratio.mean == row.ratio.mean_abs == row.parameter.mean == np.finfo(float).max


def test_nothing_is_changed() -> None:
    model, grads = net(), {"name": None, "act": None, "steps": None, "layers": None}
    before = cowalk.flatten(model)
    stats(model, grads)
    assert all(before[path] is leaf for path, leaf in cowalk.flatten(model).items())


def test_a_table_does_not_keep_the_model_alive() -> None:
    model = net()
    table = stats(model)
    assert names(table[model]) == names(table)
    del model
    with pytest.raises(cowalk.CowalkError, match="gone"):
        table[net()]


class TestTies:
    def test_a_tied_array_is_one_row_with_all_its_names(self) -> None:
        shared, g = np.array([1.0, 2.0]), np.array([2.0, 1.0])
        table = stats({"emb": shared, "mid": np.ones(1), "head": shared}, {"emb": g, "mid": np.ones(1), "head": None})
        assert [(str(row.path), list(map(str, row.aliases))) for row in table] == [("emb", ["head"]), ("mid", [])]
        assert table.structure["emb"] is table.structure["head"]
        assert table["head"] == table["emb"]
        assert table.total.n == 3

    def test_contributions_are_added(self) -> None:
        shared = np.array([6.0])
        assert means(stats([shared, shared], [np.array([1.0]), np.array([2.0])])) == [2.0]

    def test_contributions_that_cancel_are_a_zero_gradient(self) -> None:
        shared = np.ones(2)
        (row,) = stats([shared, shared], [np.array([1.0, -2.0]), np.array([-1.0, 2.0])])
        assert row.state == "zero"

    def test_contributions_are_added_without_changing_them(self) -> None:
        shared, one, other = np.ones(2), np.array([1.0, 2.0]), np.array([3.0, 4.0])
        stats([shared, shared, shared], [one, other, None])
        assert (one.tolist(), other.tolist()) == ([1.0, 2.0], [3.0, 4.0])

    def test_different_gradients_of_one_array_are_an_error_where_asked(self) -> None:
        shared = np.ones(1)
        with pytest.raises(TieError, match="sum"):
            stats([shared, shared], [np.ones(1), np.ones(1)], ties="share")

    def test_the_first_alone_where_asked(self) -> None:
        shared = np.array([6.0])
        assert means(stats([shared, shared], [np.array([1.0]), np.array([2.0])], ties="first")) == [6.0]

    def test_each_path_a_row_where_asked(self) -> None:
        shared = np.array([6.0])
        table = ratio([shared, shared], [np.array([1.0]), np.array([2.0])], ties="each")
        assert means(table) == [6.0, 3.0]
        assert table.ties == []

    def test_one_gradient_object_for_two_parameters_is_no_tie(self) -> None:
        g = np.array([2.0])
        assert means(stats([np.array([2.0]), np.array([4.0])], [g, g])) == [1.0, 2.0]

    def test_a_tied_array_without_a_gradient_keeps_its_names(self) -> None:
        shared = np.ones(1)
        (row,) = stats([shared, shared], [None, None])
        assert (row.state, list(map(str, row.aliases))) == ("not run", ["1"])

    def test_a_tied_array_has_a_gradient_if_any_of_its_paths_has_one(self) -> None:
        shared = np.array([2.0])
        (row,) = stats([shared, shared], [None, np.array([4.0])])
        assert (row.state, row.value("ratio.mean")) == ("ok", 0.5)

    def test_contributions_of_different_shapes_are_an_error(self) -> None:
        shared = np.ones(2)
        with pytest.raises((MeasureError, ValueError, TieError)):
            stats([shared, shared], [np.ones(2), np.ones(3)])


class TestErrors:
    def test_trees_that_do_not_fit_name_all_places(self) -> None:
        with pytest.raises(StructureError) as caught:
            stats({"weight": np.ones(1), "bias": np.ones(1)}, {"wieght": np.ones(1), "bias": [np.ones(1)]})
        assert {each.kind for each in caught.value.differences} == {"absent", "branch", "extra"}
        assert all(name in str(caught.value) for name in ("weight", "bias", "wieght"))

    def test_all_shapes_that_differ_are_named_with_both_shapes(self) -> None:
        with pytest.raises(MeasureError) as caught:
            stats(
                {"a": np.ones(2), "b": [np.ones((2, 3))], "c": np.ones(1)},
                {"a": np.ones(3), "b": [np.ones((3, 2))], "c": np.ones(1)},
            )
        assert [str(path) for path, _ in caught.value.problems] == ["a", "b.0"]
        for text in ("(2,)", "(3,)", "(2, 3)", "(3, 2)", "a:", "b.0:", "gradient"):
            assert text in str(caught.value)

    @pytest.mark.parametrize(("place", "what"), [(1, "gradient"), (2, "update")])
    def test_shapes_are_never_broadcast(self, place: int, what: str) -> None:
        trees: list[Any] = [[np.ones((2, 1))], None, None]
        trees[place] = [np.ones((1, 2))]
        with pytest.raises(MeasureError, match=rf"0: the parameter has shape \(2, 1\), its {what} \(1, 2\)"):
            stats(*trees)

    def test_adam_s_moments_have_the_parameter_s_shape(self) -> None:
        state = [{"m": np.ones(2), "v": np.ones(3)}]
        with pytest.raises(MeasureError, match=r"0: the parameter has shape \(2,\), its second moment \(3,\)"):
            stats([np.ones(2)], [np.ones(2)], opt_state=state)

    def test_what_is_no_array_of_numbers_is_named(self) -> None:
        with pytest.raises(
            MeasureError, match=r"f: the parameter is no array of numbers but a builtin_function_or_method"
        ):
            stats({"f": max}, {"f": 1.0}, where=isleaf)
        with pytest.raises(MeasureError, match=r"w: the gradient is no array of numbers but a str"):
            stats({"w": np.ones(1)}, {"w": "w"})
        with pytest.raises(MeasureError, match=r"w: the update is no array of numbers but a str"):
            stats({"w": np.ones(1)}, updates={"w": "w"})
        with pytest.raises(MeasureError, match="a list"):
            stats({"w": [np.ones(1)]}, {"w": [np.ones(1)]}, where=list)

    def test_ratio_says_the_same(self) -> None:
        with pytest.raises(MeasureError, match="shape"):
            ratio([np.ones(2)], [np.ones(3)])

    def test_a_long_list_is_cut_in_the_message_but_not_in_the_data(self) -> None:
        model, grads = ({str(i): np.ones(n) for i in range(50)} for n in (1, 2))
        with pytest.raises(MeasureError, match="44 more") as caught:
            stats(model, grads)
        assert len(caught.value.problems) == 50
        assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems

    def test_ties_and_adam_have_to_be_known_words(self) -> None:
        with pytest.raises(ValueError, match="ties="):
            stats([np.ones(1)], ties="add")  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="'lrr'"):
            stats([np.ones(1)], adam={"lrr": 0.1})


class TestWrongPlaces:
    def test_what_stands_in_another_argument_s_place_is_told(self) -> None:
        class Optimizer:
            param_groups: tuple[()] = ()

        model = {"w": np.ones(2)}
        for wrong, message in (
            (Optimizer(), "an optimizer: give it as opt_state="),
            (max, "is a function, 'max'"),
        ):
            with pytest.raises(cowalk.CowalkError, match=f"grads= is .*{message}|grads= {message}"):
                stats(model, wrong)
            with pytest.raises(cowalk.CowalkError, match=f"updates= is .*{message}|updates= {message}"):
                stats(model, None, wrong)
        with pytest.raises(cowalk.CowalkError, match="give the optimizer itself"):
            stats(model, opt_state={"state": {}, "param_groups": []})

    @pytest.mark.parametrize("threads", [0, -3, 2.5, "2"])
    def test_threads_are_a_number_of_them(self, threads: Any) -> None:
        with pytest.raises(ValueError, match="threads= is a whole number"):
            stats({"w": np.ones(2)}, threads=threads)

    @pytest.mark.parametrize(
        "adam", [3, {1: 2, "x": 3}, {"lr": "x"}, {"lr": np.ones(3)}, {"epsilon": -1}, {"epsilon": "a"}], ids=str
    )
    def test_settings_of_adam_that_are_none(self, adam: Any) -> None:
        with pytest.raises(ValueError, match="adam="):
            stats({"w": np.ones(2)}, adam=adam)

    def test_more_axes_than_numpy_has_are_named(self) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(cowalk.MeasureError, match="y: the parameter has 65 axes"):
            stats({"y": torch.ones((1,) * 64 + (2,))})


class TestWhatATableHolds:
    def test_it_holds_on_to_nothing_that_it_did_not_measure(self) -> None:
        model = {"w": np.ones(3), "ids": np.arange(10), "f": lambda x: x, "nothing": None}
        ids = weakref.ref(model["ids"])
        table = stats(model)
        assert table.structure == {"w": table[0], "ids": None, "f": None, "nothing": None}
        del model
        gc.collect()
        assert ids() is None
        assert pickle.loads(pickle.dumps(table)).rows == table.rows

    def test_it_is_made_and_shown_whatever_numpy_s_errors_are_set_to(self) -> None:
        model = {"a": np.array([1e-310, 1e308]), "b": np.array([1e-310, 0.0])}
        with np.errstate(all="raise"):
            table = stats(model, dict(model), scale=2.0**20)
            assert str(table)
            assert table.layers(0)
            assert table.to_json()
            assert table._repr_html_()


def test_updates_of_a_tied_parameter_count_once() -> None:
    shared = np.ones(2)
    model = {"a": shared, "b": shared}
    change = np.full(2, 0.5)
    for updates in ({"a": change, "b": change}, {"a": change, "b": change.copy()}, {"a": None, "b": change}):
        assert stats(model, updates=updates)[0].value("update.max") == 0.5


def test_a_torch_gradient_under_several_names_of_a_tie_counts_once_and_contributions_add_up() -> None:
    torch = pytest.importorskip("torch")
    shared = torch.nn.Parameter(torch.ones(2))
    one, other = torch.full((2,), 0.5), torch.full((2,), -0.5)
    for grads, expected in (((one, one), 0.5), ((one, other), 0.0), ((None, one), 0.5)):
        row = stats({"a": shared, "b": shared}, {"a": grads[0], "b": grads[1]})[0]
        assert row.value("gradient.max_abs") == expected

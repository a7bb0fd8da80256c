"""The table as programs use it: looked up, sorted, folded, and handed on as data."""

import copy
import functools
import importlib.util
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowalk import CowalkError, Path
from cowalk.measure.backend import AdamSettings, Operands, empty_matrix
from cowalk.measure.reference import measure
from cowalk.measure.rows import TABLE_SECTIONS, TABLE_SPANS, TABLE_WIDTH, Columns, Row, fold_matrix, widened
from cowalk.measure.table import FrameError, Table, TableKeyError
from cowalk.tree import Index, isleaf


def table_of(leaves, *, states=None, aliases=None, histograms=False, **options):
    """A table of {path text or keys: array, or arrays (parameter, gradient, update)}; None has no values."""
    paths = [Path(key.split(".")) if isinstance(key, str) else Path(key) for key in leaves]
    arrays = [leaf if isinstance(leaf, tuple) else (leaf,) for leaf in leaves.values()]
    matrix, found = measure([Operands(*each) for each in arrays if each[0] is not None], histograms)
    lines = empty_matrix(len(paths))
    lines[[each[0] is not None for each in arrays]] = matrix
    by_text = {str(path): i for i, path in enumerate(paths)}
    return Table(
        paths,
        lines,
        aliases={by_text[text]: tuple(map(Path.parse, others)) for text, others in (aliases or {}).items()},
        states=[(states or {}).get(str(path), ()) for path in paths],
        shapes=[None if each[0] is None else np.shape(each[0]) for each in arrays],
        dtypes=["?" if each[0] is None else str(each[0].dtype) for each in arrays],
        histograms=found,
        **options,
    )


def ones(*shape, p=1.0, g=0.5):
    return np.full(shape, p), np.full(shape, g)


def transformer(**options):
    leaves = {"embed.weight": ones(5, 2)}
    for i in (2, 10, 0):
        leaves[f"layers.{i}.weight"] = ones(2, 2, g=i + 1.0)
        leaves[f"layers.{i}.bias"] = ones(2, p=0.0)
    return table_of(leaves, aliases={"embed.weight": ["head.weight"]}, **options)


# --- rows and lookup ---


def test_rows_are_in_the_models_order():
    table = transformer()
    assert len(table) == len(table.rows) == 7
    assert [str(row.path) for row in table][:3] == ["embed.weight", "layers.2.weight", "layers.2.bias"]
    assert table.rows is table.rows


def test_a_row_knows_what_was_measured():
    row = table_of({"w": ones(2, 3)}, states={"w": ("zero",)})["w"]
    assert (row.n, row.count, row.shape, row.dtype, row.state) == (6, 1, (2, 3), "float64", "zero")
    assert row.parameter.mean == 1.0
    assert row.ratio.mean == row.value("ratio.mean") == 2.0
    assert row.update is row.adam is row.value("update.norm") is None
    assert table_of({"w": ones(2)})["w"].state == "ok"


def test_a_walk_sees_a_row_as_a_leaf():
    assert isleaf(Row(Path()))


@pytest.mark.parametrize("key", ["layers.10.bias", Path(("layers", "10", "bias")), ("layers", 10, "bias"), 4, -3])
def test_a_row_is_found_by_text_keys_and_position(key):
    assert str(transformer()[key].path) == "layers.10.bias"
    assert key in transformer()


def test_positions_are_found_by_their_texts_and_integer_keys_by_theirs():
    table = table_of({("layers", Index(0)): ones(1), ("scores", 0): ones(2)})
    assert table["layers.0"].n == table[Path(("layers", "0"))].n == 1
    assert table["scores[0]"].n == table["scores.0"].n == 2


def test_what_two_spellings_share_is_found_by_the_exact_one():
    table = table_of({("a", 0): ones(1), ("a", "0"): ones(2)})
    assert (table["a[0]"].n, table["a.0"].n, table[Path(("a", 0))].n, table[Path(("a", "0"))].n) == (1, 2, 1, 2)


def test_a_tied_row_is_found_by_each_of_its_paths():
    table = transformer()
    assert table["head.weight"] == table["embed.weight"]
    assert table["head.*"].rows == (table[0],)
    assert table["head.weight"].aliases == (Path(("head", "weight")),)


def test_a_pattern_gives_a_table():
    assert [str(row.path) for row in transformer()["layers.?.weight"]] == ["layers.2.weight", "layers.0.weight"]
    assert len(transformer()["*"]) == 7


def test_a_path_that_looks_like_a_pattern_is_a_path():
    assert table_of({("a*b",): ones(3), ("acb",): ones(1)})["['a*b']"].n == 3


def test_a_slice_gives_a_table():
    assert [str(row.path) for row in transformer()[-1:0:-3]] == ["layers.0.bias", "layers.10.weight"]


def test_no_such_row_names_those_that_are_near():
    with pytest.raises(TableKeyError, match=r"no row 'layers\.2\.wieght'.*'layers\.2\.weight'") as caught:
        transformer()["layers.2.wieght"]
    assert caught.value.key == "layers.2.wieght"
    assert caught.value.nearest[0] == "layers.2.weight"
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, CowalkError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.nearest) == (str(caught.value), caught.value.nearest)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("layers.2", r"a layer of 2 rows.*table\['layers\.2\.\*'\]"),
        ("", r"a layer of 7 rows.*table\['\*'\]"),
        ("entirely", "it has 7 rows; the first is 'embed.weight'"),
        ("..", "no row"),
        (Path(("layers", "3", "bias")), "did you mean"),
        ("x" * 100_000, "no row 'xxx"),
        ("nothing.*", r"the pattern 'nothing\.\*' matches none of the 7 rows.*the first is 'embed\.weight'"),
    ],
)
def test_errors_of_lookup_say_what_to_do(key, message):
    with pytest.raises(TableKeyError, match=message) as caught:
        transformer()[key]
    assert len(str(caught.value)) < 600
    assert key not in transformer()


def test_a_position_beyond_the_end_is_an_index_error():
    with pytest.raises(IndexError):
        transformer()[7]
    assert 7 not in transformer()


class Module:
    pass


def test_a_module_gives_the_rows_below_it():
    layer, other, empty = Module(), Module(), Module()
    places = {layer: [Path(("layers", Index(2)))], empty: [Path(("activation",))]}
    table = transformer(locate=places.get)
    assert [str(row.path) for row in table[layer]] == ["layers.2.weight", "layers.2.bias"]
    assert len(table["layers.*"][layer]) == 2
    with pytest.raises(TableKeyError, match="no part of the model"):
        table[other]
    with pytest.raises(TableKeyError, match="the Module at activation has no rows"):
        table[empty]
    with pytest.raises(TableKeyError, match="does not know the model"):
        transformer()[layer]


def test_a_module_that_shares_its_parameters_has_the_tied_rows():
    head = Module()
    assert transformer(locate={head: [Path(("head",))]}.get)[head][0].aliases == (Path(("head", "weight")),)


def test_tables_are_copied_and_pickled_without_the_model():
    model = Module()
    table = transformer(locate=lambda module: [Path()] if module is model else None, structure=dict)
    assert len(table[model]) == 7
    for again in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert again.rows == table.rows
        assert again.structure == {row.path: row for row in table.rows}
        assert again.total == table.total


# --- folding ---


def test_parameters_fold_into_the_modules_that_hold_them():
    layers = transformer().layers()
    assert [str(row.path) for row in layers] == ["embed", "layers.2", "layers.10", "layers.0"]
    row = layers["layers.10"]
    assert (row.n, row.count, row.shape, row.dtype) == (6, 2, None, "float64")
    assert row.parameter == transformer()["layers.10.weight"].parameter.merge(transformer()["layers.10.bias"].parameter)


@pytest.mark.parametrize(
    ("depth", "paths"),
    [(0, [""]), (1, ["embed", "layers"]), (2, ["embed.weight", "layers.2", "layers.10", "layers.0"])],
)
def test_or_into_what_the_first_keys_say(depth, paths):
    assert [str(row.path) for row in transformer().layers(depth)] == paths


def test_layers_fold_again_and_count_parameters():
    again = transformer().layers().layers(1)
    assert [row.count for row in again] == [1, 6]
    assert again.total.n == transformer().total.n == 28


def test_a_parameter_that_no_other_joins_stays_what_it_is():
    row = transformer().layers(2)["embed.weight"]
    assert row.shape == (5, 2)
    assert row.aliases == (Path(("head", "weight")),)


def test_states_are_counted_in_layers():
    states = {"m.a": ("frozen",), "m.b": ("zero", "no optimizer"), "m.c": ("frozen",)}
    row = table_of({f"m.{x}": ones(2) for x in "abcd"}, states=states).layers()[0]
    assert row.states == ("frozen", "zero", "no optimizer")
    assert row.state_counts == (2, 1, 1)
    assert row.to_dict()["states"] == {"frozen": 2, "zero": 1, "no optimizer": 1}


def test_dtypes_and_histograms_join():
    leaves = {"m.a": np.ones(2, np.float32), "m.b": np.full(3, 4.0)}
    row = table_of(leaves, histograms=True).layers()[0]
    assert row.dtype == "float32, float64"
    assert row.histograms[0].low == 0
    assert row.histograms[0].counts == (2, 0, 3)
    assert row.histograms[1:] == (None, None)


def test_a_negative_depth_is_an_error():
    with pytest.raises(ValueError, match="0 or more"):
        transformer().layers(-1)


def test_the_total_is_over_what_was_measured():
    total = table_of({"a": ones(2), "lazy": None}, states={"lazy": ("uninitialised",)}).total
    assert (total.path, total.n, total.count, total.states) == (Path(), 2, 1, ())
    assert table_of({}).total == Row(Path(), count=0, n=0)


def test_of_a_model_without_values_it_says_the_size():
    table = Table(
        [Path("a"), Path("b")],
        empty_matrix(2),
        aliases={},
        states=[("meta",), ("meta",)],
        shapes=[(3, 4), (5,)],
        dtypes=["float32", "float32"],
    )
    assert (table.total.n, table.total.parameter, table.layers(0)[0].n) == (17, None, 17)


SPECIAL = [0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e-300, 1e300, -1e300, 5e-324]
numbers = st.one_of(st.sampled_from(SPECIAL), st.floats(-1e3, 1e3))


@st.composite
def operands(draw):
    """Arrays of one leaf, of any size, some of them absent."""
    n = draw(st.integers(0, 4))
    arrays = [np.array(draw(st.lists(numbers, min_size=n, max_size=n)), dtype=np.float64) for _ in range(4)]
    present = [draw(st.booleans()) for _ in range(3)]
    p, g, u, m = (array if here else None for array, here in zip(arrays, [True, *present], strict=True))
    if g is None or draw(st.booleans()):
        return Operands(p, g, u)
    settings = AdamSettings(draw(st.sampled_from([0.0, 1e-8])), 1.0, 1.0, draw(st.sampled_from([0.1, math.nan])))
    return Operands(p, g, u, m, abs(arrays[0]), settings)


def agree(one, other):
    """To rounding; signed values may cancel, but for that of their size."""
    if one is None or other is None:
        assert one is other
        return
    for name in one.names():
        a, b = getattr(one, name), getattr(other, name)
        if a is None or b is None:
            assert a is b, name
        else:
            scale = (
                one.max_abs
                if hasattr(one, "max_abs")
                else max(abs(one.min or 0), abs(one.max or 0))
                if hasattr(one, "min")
                else 0
            )
            slack = {"mean": 1e-12 * (scale or 0), "std": 1e-12 * (scale or 0), "cosine": 1e-12}.get(name, 0)
            assert a == pytest.approx(b, rel=1e-9, abs=slack + 1e-320), name  # a few of the least numbers there are


@settings(deadline=None)
@given(leaves=st.lists(operands(), max_size=8), data=st.data())
def test_folding_a_matrix_is_merging_its_rows(leaves, data):
    labels = data.draw(st.lists(st.integers(0, 3), min_size=len(leaves), max_size=len(leaves)))
    matrix = widened(measure(leaves)[0])
    folded = fold_matrix(matrix, np.array(labels, dtype=np.intp), 4)
    assert folded.shape == (4, TABLE_WIDTH)
    for label, line in enumerate(folded):
        for name, section in TABLE_SECTIONS.items():
            span = TABLE_SPANS[name]
            parts = [
                section.of_columns(row[span].tolist())
                for row, own in zip(matrix, labels, strict=True)
                if own == label and not np.isnan(row[span.start])
            ]
            expected = functools.reduce(section.merge, parts) if parts else None
            agree(None if np.isnan(line[span.start]) else section.of_columns(line[span].tolist()), expected)


def test_one_row_alone_folds_into_itself_exactly():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(3, 7)) for _ in range(4)]
    matrix = widened(measure([Operands(*arrays, np.square(arrays[1]), AdamSettings(1e-8, lr=0.1))])[0])
    folded = fold_matrix(matrix, np.zeros(1, dtype=np.intp), 1)
    np.testing.assert_allclose(folded, matrix, rtol=1e-15)


def test_a_column_is_what_its_rows_hold():
    rng = np.random.default_rng(1)
    table = table_of({"a": tuple(rng.normal(size=(3, 4))), "b": (rng.normal(size=2),), "c": None})
    for name in ("path", "n", "count", "state", "shape", "dtype", "gradient.zeros", "ratio.cosine", "update.norm"):
        assert table.column(name) == [row.value(name) for row in table], name


# --- order and choice ---


def test_numbers_in_paths_sort_as_numbers():
    paths = [str(row.path) for row in transformer().sort("path")]
    assert paths[1::2] == ["layers.0.bias", "layers.2.bias", "layers.10.bias"]
    names = table_of({f"h_{i}": ones(1) for i in (10, 9, "x", "9" * 5000)}).sort("path")
    assert [str(row.path)[:4] for row in names] == ["h_9", "h_10", "h_99", "h_x"]


def test_a_column_sorts_and_what_has_no_value_is_last():
    table = table_of({"a": ones(1, g=2.0), "b": (np.ones(1),), "c": ones(1, g=3.0), "d": ones(1, g=1.0)})
    assert [str(row.path) for row in table.sort("gradient.norm")] == ["d", "a", "c", "b"]
    assert [str(row.path) for row in table.sort("gradient.norm", descending=True)] == ["c", "a", "d", "b"]


def test_equal_rows_keep_their_order():
    table = transformer().sort("gradient.zeros", descending=True)
    assert [row.path for row in table] == [row.path for row in transformer()]


def test_states_sort_by_how_much_is_wrong():
    table = table_of(dict.fromkeys("abcd", ones(1)), states={"a": ("zero",), "b": ("frozen",), "c": ("unused",)})
    assert [row.state for row in table.sort("state")] == ["ok", "frozen", "zero", "unused"]


def test_ties_follow_their_rows():
    table = transformer().sort("n")
    assert table["head.weight"].path == Path(("embed", "weight"))
    assert table.ties == [(Path(("embed", "weight")), Path(("head", "weight")))]


@pytest.mark.parametrize(
    ("name", "near"),
    [("norm", "parameter.norm"), ("gradient.nrom", "gradient.norm"), ("xyz", "there are path"), ("n.n", "no column")],
)
def test_no_such_column_names_those_that_are_near(name, near):
    for ask in (transformer().column, transformer().sort, transformer().select):
        with pytest.raises(TableKeyError, match=near):
            ask(name)


def test_select_changes_what_is_printed_only():
    table = transformer(structure=list).select("dtype", "gradient.max")
    assert table.columns == ("dtype", "gradient.max")
    assert table.rows == transformer().rows
    assert table.structure == [row.path for row in table.rows]
    assert table.select().columns is None


# --- data ---


def test_plain_data_holds_rows_and_total():
    data = transformer().to_dict()
    row = data["rows"][0]
    assert (row["path"], row["aliases"], row["shape"], row["n"]) == ("embed.weight", ["head.weight"], [5, 2], 10)
    assert row["gradient"]["norm"] == pytest.approx(0.5 * math.sqrt(10))
    assert row["update"] is None
    assert "histograms" not in row
    assert data["total"]["n"] == 28


def test_histograms_are_in_the_data_when_asked_for():
    row = table_of({"w": np.array([1.0, 5.0])}, histograms=True).to_dict()["rows"][0]
    assert row["histograms"] == {"parameter": {"low": 0, "counts": [1, 0, 1]}, "gradient": None, "update": None}


def test_json_says_what_is_not_finite_as_text():
    table = table_of({"w": (np.ones(1), np.zeros(1))})
    assert table.to_dict()["rows"][0]["ratio"]["ratio_of_norms"] == math.inf
    data = json.loads(table.to_json(), parse_constant=pytest.fail)
    assert data["rows"][0]["ratio"]["ratio_of_norms"] == "inf"
    assert table.to_json(indent=2).startswith("{\n  ")


@pytest.mark.parametrize("backend", ["pandas", "polars", "pyarrow"])
def test_a_frame_has_a_column_for_all_that_was_measured(backend):
    pytest.importorskip(backend)
    narwhals = pytest.importorskip("narwhals")
    table = table_of({"a": ones(2, 3), "b": (np.ones(2),), "lazy": None}, states={"lazy": ("uninitialised",)})
    frame = table.to_frame(backend)
    assert type(frame).__module__.startswith(backend)
    columns = narwhals.from_native(frame).to_dict(as_series=False)
    assert columns["path"] == ["a", "b", "lazy"]
    assert columns["shape"] == ["(2, 3)", "(2,)", None] or math.isnan(columns["shape"][2])
    assert columns["state"] == ["ok", "ok", "uninitialised"]
    assert columns["gradient.mean"][0] == 0.5
    assert columns["parameter.n"][:2] == [6, 2]
    assert "update.mean" not in columns


@pytest.mark.parametrize("backend", ["pandas", "polars", "pyarrow"])
def test_an_empty_table_is_an_empty_frame(backend):
    pytest.importorskip(backend)
    pytest.importorskip("narwhals")
    assert table_of({}).to_frame(backend).shape[0] == 0


def test_the_frame_is_of_what_is_installed(monkeypatch):
    pytest.importorskip("narwhals")
    pytest.importorskip("polars")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pandas" else find(name))
    assert type(transformer().to_frame()).__module__.startswith("polars")


@pytest.mark.parametrize(
    ("lacking", "backend", "message"),
    [
        ({"narwhals"}, None, r"needs narwhals: pip install narwhals$"),
        ({"pandas", "polars", "pyarrow"}, None, r"needs pandas \(polars or pyarrow will do too\): pip install pandas$"),
        ({"narwhals", "polars"}, "polars", r"pip install narwhals polars$"),
    ],
)
def test_what_is_not_installed_is_named(monkeypatch, lacking, backend, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacking else object())
    with pytest.raises(FrameError, match=message) as caught:
        transformer().to_frame(backend)
    assert isinstance(caught.value, ImportError)


def test_a_frame_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="'pandas', 'polars', 'pyarrow', not 'excel'"):
        transformer().to_frame("excel")


def test_no_row_is_made_before_one_is_asked_for(monkeypatch):
    def made(self, i):
        raise AssertionError("a row was made")

    monkeypatch.setattr(Columns, "row", made)
    table = transformer()
    assert len(table) == 7
    assert len(table["layers.*"].sort("gradient.norm").layers()) == 3

"""The noise of a gradient over batches: what follows from it, how it folds into layers, and how a table shows it."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cowalk import Path, isleaf
from cowalk.measure.backend import SECTIONS, SPANS, WIDTH, Operands
from cowalk.measure.moments import Noise
from cowalk.measure.reference import measure
from cowalk.measure.rows import COLUMNS, TABLE_SECTIONS, TABLE_SPANS, TABLE_WIDTH, fold_matrix, widened
from cowalk.measure.table import Table, TableKeyError

NAN, INF = math.nan, math.inf
PATHS = ["encoder.weight", "encoder.bias", "head.weight", "frozen"]
LINES = np.array(
    [
        [6, 10, 16, 64.0, 0.25],
        [2, 10, 16, 16.0, -0.5],
        [3, 1, 16, NAN, NAN],
        [NAN, NAN, NAN, NAN, NAN],
    ]
)


def table_of(lines: Any = LINES, **options: Any) -> Table:
    """A model of four parameters, the last without a gradient; None leaves out the noise."""
    sizes = [6, 2, 3, 5]
    leaves = [
        Operands(np.ones(n), None if path == "frozen" else np.full(n, 0.5))
        for path, n in zip(PATHS, sizes, strict=True)
    ]
    table = Table(
        [Path(path.split(".")) for path in PATHS],
        measure(leaves)[0],
        aliases={0: (Path(("tied",)),)},
        states=[(), (), (), ("frozen",)],
        shapes=[(n,) for n in sizes],
        dtypes=["float64"] * 4,
        **options,
    )
    return table if lines is None else table.with_noise(lines)


def printed(table: Table, **how: Any) -> str:
    file = io.StringIO()
    table.print(Console(file=file), **how)
    return file.getvalue()


def line_of(noise: Noise) -> list[float]:
    return [NAN if getattr(noise, name) is None else float(getattr(noise, name)) for name in Noise.names()]


# --- what follows from it ---


def test_the_noise_scale_is_the_batch_whose_noise_is_as_large_as_the_gradient() -> None:
    noise = Noise(n=3, batches=5, batch=8.0, trace=12.0, square=3.0)
    assert noise.noise_scale == 4.0
    at_that_scale = Noise(n=3, batches=5, batch=noise.noise_scale, trace=12.0, square=3.0)
    assert at_that_scale.signal_to_noise == pytest.approx(1.0)


def test_the_signal_to_noise_is_of_one_batch_and_grows_with_its_root() -> None:
    assert Noise(batch=8.0, trace=12.0, square=6.0).signal_to_noise == pytest.approx(2.0)
    assert Noise(batch=32.0, trace=12.0, square=6.0).signal_to_noise == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("trace", "square", "noise_scale", "signal_to_noise"),
    [
        (2.0, -1.0, INF, 0.0),
        (2.0, 0.0, INF, 0.0),
        (0.0, 2.0, 0.0, INF),
        (-1e-20, 2.0, 0.0, INF),
        (0.0, 0.0, None, None),
        (0.0, -1.0, None, None),
        (None, None, None, None),
        (1.0, None, None, None),
        (None, 1.0, None, None),
        (INF, 1.0, INF, 0.0),
        (INF, INF, None, None),
        (5e-324, 1.0, 5e-324, pytest.approx(2**538)),
        (1e-300, 1e300, 0.0, pytest.approx(2e300)),
    ],
)
def test_what_has_no_noise_or_no_gradient_has_limits(
    trace: float | None, square: float | None, noise_scale: float | None, signal_to_noise: float | None
) -> None:
    noise = Noise(n=1, batches=2, batch=4.0, trace=trace, square=square)
    assert noise.noise_scale == noise_scale
    assert noise.signal_to_noise == signal_to_noise


def test_without_the_size_of_a_batch_there_is_no_signal_to_noise_but_a_noise_scale() -> None:
    noise = Noise(n=1, batches=2, trace=4.0, square=1.0)
    assert (noise.noise_scale, noise.signal_to_noise) == (4.0, None)


def test_of_gaussian_gradients_the_estimates_lead_to_the_true_scale() -> None:
    """Batches of b examples, each with the gradient G + noise of variance 4 in 50 elements: tr Σ = 200, |G|² = 50."""
    rng = np.random.default_rng(0)
    batch, batches, size = 8, 4000, 50
    gradients = 1.0 + 2.0 / math.sqrt(batch) * rng.normal(size=(batches, size))
    trace = batch * gradients.var(axis=0, ddof=1).sum()
    square = np.square(gradients.mean(axis=0)).sum() - trace / (batch * batches)
    noise = Noise(n=size, batches=batches, batch=batch, trace=float(trace), square=float(square))
    assert noise.noise_scale == pytest.approx(4.0, rel=0.02)
    assert noise.signal_to_noise == pytest.approx(math.sqrt(2.0), rel=0.02)


# --- merging ---

amounts = st.none() | st.floats(-1e3, 1e3)


@st.composite
def noises(draw: st.DrawFn) -> Noise:
    """Of parameters with and without batches, known and not."""
    batches = draw(st.integers(0, 3))
    if not batches:
        return Noise(n=draw(st.integers(0, 9)))
    return Noise(
        n=draw(st.integers(0, 9)),
        batches=batches,
        batch=draw(st.none() | st.sampled_from([0.5, 16.0, 17.0])),
        trace=draw(amounts),
        square=draw(amounts),
    )


def assert_same(found: Noise, right: Noise) -> None:
    for name in Noise.names():
        one, other = getattr(found, name), getattr(right, name)
        assert one == (other if other is None else pytest.approx(other, rel=1e-9, abs=1e-9)), name


@settings(deadline=None)
@given(noises(), noises(), noises())
def test_merge_is_commutative_and_associative(a: Noise, b: Noise, c: Noise) -> None:
    assert a.merge(b) == b.merge(a)
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))


@settings(deadline=None)
@given(noises())
def test_merging_nothing_changes_nothing(noise: Noise) -> None:
    assert noise.merge(Noise()) == Noise().merge(noise) == noise


def test_variances_and_squares_add_up_over_the_parameters_of_a_layer() -> None:
    weight = Noise(n=6, batches=10, batch=16.0, trace=64.0, square=0.25)
    bias = Noise(n=2, batches=7, batch=15.0, trace=16.0, square=-0.5)
    assert weight.merge(bias) == Noise(n=8, batches=10, batch=16.0, trace=80.0, square=-0.25)


def test_a_part_with_too_few_batches_makes_the_whole_unknown_and_one_without_any_does_not() -> None:
    known = Noise(n=2, batches=10, batch=16.0, trace=2.0, square=1.0)
    once = Noise(n=3, batches=1, batch=16.0)
    assert known.merge(once) == Noise(n=5, batches=10, batch=16.0)
    assert known.merge(Noise(n=3)) == Noise(n=5, batches=10, batch=16.0, trace=2.0, square=1.0)


def test_infinities_of_either_sign_do_not_add_up() -> None:
    one, other = (Noise(n=1, batches=2, batch=1.0, trace=INF, square=square) for square in (INF, -INF))
    assert one.merge(other) == Noise(n=2, batches=2, batch=1.0, trace=INF)


@settings(deadline=None)
@given(parts=st.lists(st.none() | noises(), max_size=8), data=st.data())
def test_folding_lines_is_merging_them(parts: list[Noise | None], data: st.DataObject) -> None:
    labels = data.draw(st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts)))
    span = TABLE_SPANS["noise"]
    matrix = np.full((len(parts), TABLE_WIDTH), NAN)
    for line, noise in zip(matrix, parts, strict=True):
        if noise is not None:
            line[span] = line_of(noise)
    folded = fold_matrix(matrix, np.array(labels, dtype=np.intp), 3)
    assert np.isnan(folded[:, : span.start]).all()
    for label, line in enumerate(folded[:, span]):
        own = [part for part, other in zip(parts, labels, strict=True) if other == label and part is not None]
        assert np.isnan(line[0]) == (not own)
        if own:
            assert_same(Noise.of_columns(line.tolist()), reduce(Noise.merge, own))


@settings(deadline=None)
@given(noises())
def test_noise_is_read_from_the_columns_it_fills(noise: Noise) -> None:
    again = Noise.of_columns(line_of(noise))
    assert again == noise
    assert (type(again.n), type(again.batches)) == (int, int)


def test_a_walk_sees_noise_as_a_leaf() -> None:
    assert isleaf(Noise())


# --- in a table ---


def test_back_ends_do_not_know_of_it() -> None:
    assert "noise" not in SECTIONS
    assert WIDTH + len(Noise.names()) == TABLE_WIDTH
    assert {name: TABLE_SPANS[name] for name in SPANS} == SPANS
    assert list(TABLE_SECTIONS) == [*SECTIONS, "noise"]
    assert measure([])[0].shape == (0, WIDTH)


def test_a_back_ends_matrix_gets_columns_of_which_nothing_is_known() -> None:
    matrix = np.arange(2.0 * WIDTH).reshape(2, WIDTH)
    wide = widened(matrix)
    np.testing.assert_array_equal(wide[:, :WIDTH], matrix)
    assert np.isnan(wide[:, WIDTH:]).all()
    assert widened(wide) is wide
    assert table_of(None).matrix.shape == (4, TABLE_WIDTH)


def test_a_row_knows_its_noise() -> None:
    table = table_of()
    assert table["encoder.weight"].noise == Noise(n=6, batches=10, batch=16.0, trace=64.0, square=0.25)
    assert table["head.weight"].noise == Noise(n=3, batches=1, batch=16.0)
    assert table["frozen"].noise is None
    assert table["encoder.weight"].value("noise.noise_scale") == 256.0
    assert table_of(None)["encoder.weight"].noise is None


def test_the_first_table_stays_as_it_was_and_the_new_one_keeps_all_else() -> None:
    first = table_of(None, structure=list, columns=("dtype",), locate=lambda module: [Path(("encoder",))])
    table = first.with_noise(LINES)
    assert not first.measured("noise").any()
    assert table.measured("noise").tolist() == [True, True, True, False]
    assert table.structure == [row.path for row in table]
    assert table.columns == ("dtype",)
    assert table["tied"].noise == table[0].noise
    assert len(table[object]) == 2
    again = table.with_noise(np.full((4, 5), NAN))
    assert again.rows == first.rows


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5,), (20,), (5, 4), (1, 5), ()])
def test_lines_of_another_shape_are_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"of shape \(4, 5\), a line for each row, not \("):
        table_of(None).with_noise(np.zeros(shape))


def test_layers_and_total_merge_it() -> None:
    table = table_of()
    layers = table.layers()
    rows = {str(row.path): row for row in layers}
    assert rows["encoder"].noise == table[0].noise.merge(table[1].noise)
    assert rows["encoder"].noise.noise_scale == INF
    assert rows["head"].noise == table["head.weight"].noise
    assert rows[""].noise is None
    assert table.total.noise == Noise(n=11, batches=10, batch=16.0)
    assert table["encoder.*"].total.noise == rows["encoder"].noise


def test_layers_may_get_noise_of_their_own() -> None:
    layers = table_of(None).layers().with_noise(LINES[:3])
    assert layers.is_folded
    assert layers[0].noise == table_of()[0].noise


def test_its_columns_are_those_of_any_section() -> None:
    table = table_of()
    own = ("n", "batches", "batch", "trace", "square", "noise_scale", "signal_to_noise")
    assert tuple(name for name in COLUMNS if name.startswith("noise.")) == tuple(f"noise.{name}" for name in own)
    assert table.column("noise.trace") == [64.0, 16.0, None, None]
    assert table.column("noise.batches") == [10, 10, 1, None]
    assert table.column("noise.noise_scale") == [256.0, INF, None, None]
    assert table.column("noise.signal_to_noise") == [0.25, 0.0, None, None]
    assert table_of(None).column("noise.trace") == [None] * 4
    for name in own:
        assert table.column(f"noise.{name}") == [row.value(f"noise.{name}") for row in table]
    with pytest.raises(TableKeyError, match=r"noise\.noise_scale"):
        table.column("noise_scale")


def test_it_sorts_the_infinite_last_and_what_is_unknown_after_it() -> None:
    table = table_of()
    assert [row.path for row in table.sort("noise.noise_scale")] == [row.path for row in table]
    backwards = table.sort("noise.noise_scale", descending=True)
    assert [str(row.path) for row in backwards] == ["encoder.bias", "encoder.weight", "head.weight", "frozen"]
    assert backwards["encoder.weight"].noise == table["encoder.weight"].noise


def test_tables_with_it_are_copied_and_pickled() -> None:
    table = table_of()
    for again in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert again.rows == table.rows


def test_json_holds_it_and_gives_it_back() -> None:
    table = table_of()
    rows = json.loads(table.to_json(), parse_constant=pytest.fail)["rows"]
    for row, data in zip(table, rows, strict=True):
        held = data["noise"]
        if row.noise is None:
            assert held is None
            continue
        assert Noise(**{name: held[name] for name in Noise.names()}) == row.noise
    assert [row["noise"]["noise_scale"] for row in rows[:3]] == [256.0, "inf", None]
    assert table_of(None).to_dict()["total"]["noise"] is None


@pytest.mark.parametrize("backend", ["pandas", "polars", "pyarrow"])
def test_a_frame_has_its_columns_where_it_was_measured(backend: Any) -> None:
    pytest.importorskip(backend)
    narwhals = pytest.importorskip("narwhals")
    columns = narwhals.from_native(table_of().to_frame(backend)).to_dict(as_series=False)
    assert columns["noise.trace"][:2] == [64.0, 16.0]
    assert columns["noise.noise_scale"][:2] == [256.0, INF]
    without = narwhals.from_native(table_of(None).to_frame(backend)).to_dict(as_series=False)
    assert not any(name.startswith("noise.") for name in without)


# --- printed ---


def test_where_it_was_measured_it_is_what_is_printed() -> None:
    above, header, *lines = str(table_of()).splitlines()
    assert above.split() == ["noise", "signal/"]
    assert header.split() == ["parameter", "n", "rms", "p", "rms", "g", "scale", "noise", "batches", "notes"]
    assert lines[0].split() == ["encoder.weight", "6", "1", "0.5", "256", "0.25", "10"]
    assert lines[1].split() == ["encoder.bias", "2", "1", "0.5", "inf", "0", "10"]
    assert lines[2].split() == ["head.weight", "3", "1", "0.5", "-", "-", "1"]
    assert lines[3].split() == ["frozen", "5", "1", "-", "-", "-", "-", "frozen"]


def test_where_it_was_not_nothing_is_printed_of_it() -> None:
    text = str(table_of(None))
    assert "noise" not in text
    assert "|p|/|g|" in text
    assert "noise" not in printed(table_of(None), wide=True)


def test_without_gradients_it_is_printed_all_the_same() -> None:
    bare = Table([Path(("w",))], np.full((1, WIDTH), NAN), aliases={}, states=[()], shapes=[(6,)], dtypes=["?"])
    header = " ".join(str(bare.with_noise(LINES[:1])).splitlines()[:2]).split()
    assert header == ["noise", "signal/", "parameter", "n", "scale", "noise", "batches"]


def test_each_symbol_has_a_line_that_says_what_it_means() -> None:
    *_, letters, scale, ratio, batches = printed(table_of()).splitlines()
    assert letters == "p, g: parameter, gradient; rms: root mean square"
    assert scale.startswith("noise scale: tr Σ / |G|²")
    assert ratio.startswith("signal/noise: |G|")
    assert batches.startswith("batches: ")
    chosen = str(table_of().select("noise.trace", "noise.square", "noise.batch")).splitlines()
    assert chosen[0].split() == ["parameter", "tr", "Σ", "|G|²", "batch", "notes"]
    assert [line.partition(":")[0] for line in chosen[-3:]] == ["tr Σ", "|G|²", "batch"]
    quotients = str(table_of().select("ratio.mean", "noise.batches")).splitlines()
    assert quotients[-1].startswith("batches: ")


def test_chosen_columns_are_printed_in_its_place() -> None:
    text = str(table_of().select("gradient.max", "noise.n"))
    assert "scale" not in text
    assert text.splitlines()[0].split() == ["noise"]


def test_wide_prints_all_of_it() -> None:
    header = " ".join(printed(table_of(), wide=True).splitlines()[:2])
    for name in ("tr Σ", "|G|²", "scale", "signal/", "batches", "batch "):
        assert name in header


def test_it_fits_80_columns_with_its_explanations() -> None:
    chosen = table_of().select(*(f"noise.{name}" for name in Noise.names()))
    for table in (table_of(), chosen):
        file = io.StringIO()
        table.print(Console(file=file, width=200))
        assert max(map(len, file.getvalue().splitlines())) <= 80  # before anything is wrapped


def test_a_notebook_shows_it_too() -> None:
    html = table_of()._repr_html_()
    for text in ("noise<br>scale", ">inf<", "noise scale: "):
        assert text in html

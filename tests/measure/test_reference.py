"""The reference against the definitions in exact fractions, one element after the other: the oracle itself must be right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.arrays_under_test import (
    EDGES,
    FORMS,
    NOT_FINITE,
    SETTINGS,
    agrees,
    allowance,
    assert_agrees,
    converted,
    draws,
    expectation,
    leaf_of,
    leaves,
    make,
)

from cowalk.measure import reference
from cowalk.measure.backend import SECTIONS, SPANS, WIDTH, Histogram, Operands
from cowalk.measure.moments import Moments

LIMITS = [np.finfo(np.float64).max, -np.finfo(np.float64).max]
reals = st.sampled_from([*EDGES, *NOT_FINITE]) | st.floats(-1e306, 1e306) | st.floats(-4, 4, width=16)
lists = st.lists(reals, max_size=12)  # whose norms fit into float64


def root(square: Fraction) -> float:
    """The root of a fraction, to 200 bits."""
    bits = 200 + 2 * abs(square.denominator.bit_length() - square.numerator.bit_length())
    return number(Fraction(math.isqrt((square.numerator << 2 * bits) // square.denominator), 1 << bits))


def number(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def fields(section: Any) -> dict[str, float | None]:
    return {name: getattr(section, name) for name in section.names()}


def assert_same(found: Any, right: dict[str, float | None], is_complex: bool = False) -> None:
    """The fields of a section are right, within what a back end may be off."""
    kind = type(found)
    expected = {name: math.nan if value is None else float(value) for name, value in right.items()}
    assert set(expected) == set(kind.names())
    for name, value in expected.items():
        mine = getattr(found, name)
        mine = math.nan if mine is None else float(mine)
        assert agrees(mine, value, allowance(kind, name, expected, is_complex)), f"{name}: {mine!r}, expected {value!r}"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(reals | st.sampled_from(LIMITS), max_size=12),
    st.sampled_from([np.finfo(np.float64).smallest_normal, 1e-30, 0.0]),
)
def test_moments_are_those_of_the_definition(values: list[float], tiny: float) -> None:
    finite = [Fraction(x) for x in values if math.isfinite(x)]
    middle = mean(finite) if finite else None
    assert_same(
        reference.moments_of(np.array(values), tiny),
        {
            "n": len(values),
            "nan": sum(map(math.isnan, values)),
            "posinf": values.count(math.inf),
            "neginf": values.count(-math.inf),
            "zeros": values.count(0.0),
            "subnormals": sum(x != 0 and abs(x) < tiny for x in values),
            "zero_rows": 0,
            "mean": None if middle is None else number(middle),
            "std": None if middle is None else root(mean([(x - middle) ** 2 for x in finite])),
            "min": number(min(finite)) if finite else None,
            "max": number(max(finite)) if finite else None,
            "mean_abs": number(mean([abs(x) for x in finite])) if finite else None,
        },
    )


@settings(max_examples=50, deadline=None)
@given(lists)
def test_norm_rms_and_largest_modulus_are_those_of_the_definition(values: list[float]) -> None:
    found = reference.moments_of(np.array(values), 0.0)
    finite = [Fraction(x) for x in values if math.isfinite(x)]
    squares = sum((x * x for x in finite), Fraction(0))
    assert found.finite == len(finite)
    assert found.nonfinite == len(values) - len(finite)
    assert found.norm == pytest.approx(root(squares), rel=1e-12, abs=1e-322)
    assert found.rms == (pytest.approx(root(squares / len(finite)), rel=1e-12, abs=1e-322) if finite else None)
    assert found.max_abs == (number(max(map(abs, finite))) if finite else None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(reals, reals), max_size=12))
def test_a_pair_is_that_of_the_definition(pairs: list[tuple[float, float]]) -> None:
    both = [(Fraction(x), Fraction(y)) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    found = reference.pair_of(*np.array(pairs).reshape(-1, 2).T)
    quotients = [x / y for x, y in both if y and math.isfinite(number(x / y))]
    xx, yy, xy = (sum((p * q for p, q in each), Fraction(0)) for each in _products(both))
    signed = [(x > 0) == (y > 0) for x, y in both if x and y]
    assert_same(
        found,
        {
            "n": len(pairs),
            "defined": len(quotients),
            "x_by_zero": sum(x != 0 and y == 0 for x, y in both),
            "zero_by_zero": sum(x == 0 and y == 0 for x, y in both),
            "nonfinite": len(pairs) - len(quotients) - sum(y == 0 for _, y in both),
            "mean": number(mean(quotients)) if quotients else None,
            "min": number(min(quotients)) if quotients else None,
            "max": number(max(quotients)) if quotients else None,
            "mean_abs": number(mean([abs(q) for q in quotients])) if quotients else None,
            "norm_x": root(xx),
            "norm_y": root(yy),
            "cosine": (1 if xy > 0 else -1) * root(xy * xy / (xx * yy)) if xx and yy else None,
            "equal_signs": sum(signed),
            "signed": len(signed),
        },
    )
    assert found.n == found.defined + found.x_by_zero + found.zero_by_zero + found.nonfinite


def _products(both: list[tuple[Fraction, Fraction]]) -> list[list[tuple[Fraction, Fraction]]]:
    return [[(x, x) for x, _ in both], [(y, y) for _, y in both], both]


small = st.floats(-1e30, 1e30) | st.sampled_from([0.0, 1e-45, 1e-30, 1e-16, 1e-8, 2.0**-20, *NOT_FINITE])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(small, small, small), max_size=12), st.sampled_from(SETTINGS), st.booleans())
def test_adam_is_that_of_the_definition(rows: list[tuple[float, ...]], chosen: Any, with_m: bool) -> None:
    epsilon, m_scale, v_scale, lr = chosen
    g, m, v = np.array(rows).reshape(-1, 3).T
    defined = [
        row
        for row in rows
        if math.isfinite(row[0]) and math.isfinite(row[2]) and row[2] >= 0 and (not with_m or math.isfinite(row[1]))
    ]
    roots = [math.sqrt(row[2] * v_scale) for row in defined]
    quotients = [_quotient(row[0], max(r, epsilon)) for row, r in zip(defined, roots, strict=True)]
    steps = [_quotient(lr * row[1] * m_scale, r + epsilon) for row, r in zip(defined, roots, strict=True)]
    known = defined and with_m and not math.isnan(lr)
    assert_same(
        reference.adam_of(g, m if with_m else None, v, chosen),
        {
            "n": len(rows),
            "defined": len(defined),
            "below_epsilon": sum(r < epsilon for r in roots),
            "rms": math.hypot(*quotients) / math.sqrt(len(defined)) if defined else None,
            "step": math.hypot(*steps) / math.sqrt(len(defined)) if known else None,
        },
    )


def _quotient(x: float, y: float) -> float:
    return x / y if y else math.copysign(math.inf, x) if x else 0.0


@settings(max_examples=50, deadline=None)
@given(lists)
def test_a_histogram_counts_powers_of_two(values: list[float]) -> None:
    powers = Counter(_power(Fraction(x)) for x in values if math.isfinite(x) and x)
    found = reference.histogram_of(np.array(values))
    counted = {found.low + i: count for i, count in enumerate(found.counts) if count}
    assert counted == dict(powers)
    assert found.counts == () or (found.counts[0] and found.counts[-1])


def _power(x: Fraction) -> int:
    """⌊log₂|x|⌋."""
    x = abs(x)
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.complex_numbers(max_magnitude=1e300) | st.sampled_from([0j, -0j, complex("nan+infj")]), max_size=9))
def test_of_complex_numbers_the_modulus_is_measured(values: list[complex]) -> None:
    moduli = [abs(value) if not math.isinf(value.imag) else math.inf for value in values]
    assert_same(
        reference.moments_of(np.array(values, np.complex128), 0.0),
        fields(reference.moments_of(np.array(moduli), 0.0)),
        is_complex=True,
    )
    assert sum(reference.histogram_of(np.array(values, np.complex128)).counts) == sum(
        math.isfinite(x) and x != 0 for x in moduli
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.complex_numbers(max_magnitude=1e30, allow_nan=False)] * 2), max_size=9))
def test_a_complex_pair_has_quotients_of_moduli_no_signs_and_the_real_inner_product(
    pairs: list[tuple[complex, complex]],
) -> None:
    x, y = np.array(pairs, np.complex128).reshape(-1, 2).T
    flat = [[part for value in each for part in (value.real, value.imag)] for each in (x, y)]
    cosine = reference.pair_of(*map(np.array, flat)).cosine
    right = fields(reference.pair_of(abs(x), abs(y))) | {"cosine": cosine, "signed": 0, "equal_signs": 0}
    assert_same(reference.pair_of(x, y), right)


LARGE = ["normal", "offset", "offset after NaN", "cancelling", "1e±30", "half zeros", "partly not finite", "subnormal"]


@pytest.mark.parametrize("kind", LARGE)
def test_large_arrays_are_cut_and_merged_without_a_change(kind: str) -> None:
    shape = (3, 211, 517)  # more than a block, which no axis divides
    x, y = draws(kind, shape), draws("half zeros", shape, seed=1)
    x[1, :17], y[2] = 0.0, 0.0
    matrix, histograms = reference.measure([Operands(x, y, None, x, abs(y), SETTINGS[2])], True)
    tiny = float(np.finfo(np.float64).smallest_normal)
    whole = {
        "parameter": reference.moments_of(x, tiny),
        "gradient": reference.moments_of(y, tiny),
        "ratio": reference.pair_of(x, y),
        "adam": reference.adam_of(y, x, abs(y), SETTINGS[2]),
    }
    for name, right in whole.items():
        assert_same(SECTIONS[name].of_columns(matrix[0, SPANS[name]].tolist()), fields(right))
    assert histograms == [(reference.histogram_of(x), reference.histogram_of(y), None)]


@pytest.mark.parametrize("kind", LARGE)
def test_sums_of_large_arrays_are_those_in_extended_precision(kind: str) -> None:
    x = draws(kind, 600_011)
    found = Moments.of_columns(reference.measure([Operands(x)])[0][0, SPANS["parameter"]].tolist())
    finite = x[np.isfinite(x)].astype(np.longdouble)
    assert found.mean_abs == pytest.approx(float(abs(finite).mean()), rel=1e-12)
    assert found.mean == pytest.approx(float(finite.mean()), rel=0, abs=1e-12 * float(abs(finite).mean()))
    assert found.std == pytest.approx(float(finite.std()), rel=1e-9)
    assert found.norm == pytest.approx(float(np.sqrt(np.square(finite).sum())), rel=1e-12)


def test_rows_of_zeros_are_slices_along_the_first_axis_wherever_a_leaf_is_cut() -> None:
    values = np.ones((5, 60_000), np.float32)
    values[1], values[2, :-1], values[4] = 0.0, 0.0, -0.0
    assert rows_of(values) == 2
    assert rows_of(values.T) == 0
    assert rows_of(np.zeros((4, 0))) == 0
    assert rows_of(np.zeros((0, 4))) == 0
    assert rows_of(np.zeros(4)) == 0
    assert rows_of(np.zeros((4, 1, 1))) == 4
    assert rows_of(np.array([[0.0, np.nan], [0.0, np.inf]])) == 0


def rows_of(values: Any) -> int:
    return int(reference.measure([Operands(values)])[0][0, Moments.names().index("zero_rows")])


@pytest.mark.parametrize("form", FORMS)
def test_every_dtype_is_measured_by_its_values_and_its_own_smallest_normal_number(form: str) -> None:
    array = make(form, abs(draws("subnormal", 200)))  # some dtypes have no sign
    values = moduli(array)
    assert np.isfinite(values).all()
    tiny = SMALLEST_NORMAL.get(form.split()[1], 0.0)
    found = Moments.of_columns(reference.measure([Operands(array)])[0][0, SPANS["parameter"]].tolist())
    assert found.subnormals == sum(0 < abs(value) < tiny for value in values)
    assert found.zeros == sum(value == 0 for value in values)
    assert (found.min, found.max) == (min(values), max(values))


SMALLEST_NORMAL = {
    **dict.fromkeys(["float16", ">f2"], 2.0**-14),
    **dict.fromkeys(["float32", ">f4", "complex64", ">c8", "bfloat16"], 2.0**-126),
    **dict.fromkeys(["float64", ">f8", "complex128"], 2.0**-1022),
    **dict.fromkeys(["float8_e5m2", "float8_e5m3fnu"], 2.0**-14),
    "float8_e5m2fnuz": 2.0**-15,
    **dict.fromkeys(["float8_e4m3", "float8_e4m3fn"], 2.0**-6),
    "float8_e4m3fnuz": 2.0**-7,
    "float8_e4m3b11fnuz": 2.0**-10,
    "float8_e3m4": 2.0**-2,
    "float6_e2m3fn": 1.0,
    "float6_e3m2fn": 2.0**-2,
    "float4_e2m1fn": 1.0,
}
"""Of the dtypes that have subnormal numbers in float64's range; float8_e8m0fnu has none."""


def moduli(array: Any) -> list[float]:
    """One element after the other, by the framework's own conversion."""
    if isinstance(array, torch.Tensor):
        flat = [each.item() for each in array.detach().reshape(-1)]
    else:
        flat = np.asarray(array).reshape(-1).tolist()
    return [float(abs(value)) if isinstance(value, complex) else float(value) for value in flat]


@settings(max_examples=50, deadline=None)
@given(leaves())
def test_a_leaf_is_measured_by_its_values_whatever_holds_them(leaf: Operands) -> None:
    as_numbers = converted(leaf, lambda array: np.array(numbers_of(array)).reshape(array.shape))
    with np.errstate(all="ignore"):
        found, right = (reference.measure([each])[0] for each in (leaf, as_numbers))
    subnormals = [
        SPANS[name].start + Moments.names().index("subnormals") for name in ("parameter", "gradient", "update")
    ]
    found[:, subnormals] = right[:, subnormals] = 0
    np.testing.assert_array_equal(found, right)


def numbers_of(array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        return [each.item() for each in array.detach().reshape(-1)]
    flat = np.asarray(array).reshape(-1)
    return flat.astype(np.complex128 if flat.dtype.kind == "c" else np.float64)


# --- what the checks of back ends catch ---

FULL = leaf_of("torch float32", (11, 13), ["half zeros", "partly not finite", "normal"], seed=1)


@pytest.mark.parametrize("column", range(WIDTH))
def test_a_wrong_statistic_in_any_column_is_caught(column: int) -> None:
    leaves = [FULL, FULL]
    right, histograms = expectation(leaves)
    assert_agrees(right, leaves, histograms)
    for wrong in (right[1, column] + 1e-3 + 1e-4 * abs(right[1, column]), np.nan, np.inf):
        found = right.copy()
        found[1, column] = wrong
        with pytest.raises(AssertionError, match=r"1 statistics are wrong:\nleaf 1, "):
            assert_agrees(found, leaves, histograms)


@pytest.mark.parametrize("operand", range(3))
def test_a_wrong_histogram_is_caught(operand: int) -> None:
    right, histograms = expectation([FULL])
    counted = histograms[0][operand]
    assert counted is not None
    for wrong in (None, Histogram(counted.low + 1, counted.counts), Histogram(counted.low, (*counted.counts, 0))):
        parameter, gradient, update = (wrong if i == operand else each for i, each in enumerate(histograms[0]))
        with pytest.raises(AssertionError, match="histogram of the"):
            assert_agrees(right, [FULL], [(parameter, gradient, update)])


def test_a_histogram_of_moduli_may_differ_where_they_are_rounded() -> None:
    leaf = [Operands(np.array([1 + 0j, 0.7 + 0j, 3j]))]
    right, histograms = expectation(leaf)
    assert histograms == [(Histogram(-1, (1, 1, 1)), None, None)]
    assert_agrees(right, leaf, [(Histogram(-1, (2, 0, 1)), None, None)])
    for wrong in (Histogram(-1, (0, 2, 1)), Histogram(-1, (1, 0, 2)), Histogram(-1, (1, 1)), Histogram(0, ()), None):
        with pytest.raises(AssertionError, match="histogram of the parameter"):
            assert_agrees(right, leaf, [(wrong, None, None)])


def test_a_missing_line_is_caught() -> None:
    right, histograms = expectation([FULL])
    with pytest.raises(AssertionError):
        assert_agrees(right, [FULL, FULL], histograms)

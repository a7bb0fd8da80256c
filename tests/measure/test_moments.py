"""Moments of parts merge into those of the whole, in any order and however it is cut."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.arrays_under_test import EDGES, NOT_FINITE, agrees, allowance

from cowalk import isleaf
from cowalk.measure import reference
from cowalk.measure.backend import SECTIONS, SPANS, WIDTH, AdamSettings, Histogram, empty_matrix
from cowalk.measure.moments import Adam, Moments, Pair

reals = st.sampled_from([*EDGES, *NOT_FINITE]) | st.floats(-1e150, 1e150) | st.floats(-4, 4, width=16)
rows = st.lists(st.tuples(reals, reals, reals), min_size=1, max_size=20)
SETTINGS = AdamSettings(1e-8, 2.0, 4.0, lr=0.1)
Section = Any


def moments(x: Any, y: Any, z: Any) -> Moments:
    return reference.moments_of(x, 2.0**-126)


def complex_moments(x: Any, y: Any, z: Any) -> Moments:
    return reference.moments_of(x + 1j * np.nan_to_num(y), 2.0**-126)


def pair(x: Any, y: Any, z: Any) -> Pair:
    return reference.pair_of(x, y)


def adam(x: Any, y: Any, z: Any) -> Adam:
    return reference.adam_of(x, y, z, SETTINGS)


def adam_without_step(x: Any, y: Any, z: Any) -> Adam:
    return reference.adam_of(x, None, z, SETTINGS)


def histogram(x: Any, y: Any, z: Any) -> Histogram:
    return reference.histogram_of(x)


SECTION_MEASURES = [moments, complex_moments, pair, adam, adam_without_step]
MEASURES = [*SECTION_MEASURES, histogram]
each_measure = pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.__name__)


def columns(values: Sequence[tuple[float, ...]]) -> Any:
    return np.array(values, float).reshape(-1, 3).T


def merged(parts: Sequence[Section]) -> Section:
    return reduce(lambda one, other: one.merge(other), parts)


def assert_same(found: Section, right: Section) -> None:
    """Alike within what a back end may be off."""
    if isinstance(right, Histogram):
        assert found == right
        return
    assert type(found) is type(right)
    one, other = (
        {name: math.nan if getattr(part, name) is None else getattr(part, name) for name in part.names()}
        for part in (found, right)
    )
    for name, value in other.items():
        allowed = allowance(type(right), name, other, is_complex=False)
        assert agrees(one[name], value, allowed), f"{name}: {one[name]!r}, expected {value!r}"


@each_measure
@settings(max_examples=40, deadline=None)
@given(rows=rows, cuts=st.lists(st.integers(0, 20), max_size=6), rng=st.randoms(use_true_random=False))
def test_parts_of_any_random_split_merge_into_the_whole_in_any_order(
    measure: Callable[..., Section], rows: list[tuple[float, ...]], cuts: list[int], rng: random.Random
) -> None:
    whole = measure(*columns(rows))
    shuffled = rng.sample(rows, len(rows))
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    parts = [measure(*columns(shuffled[start:stop])) for start, stop in pairwise(edges)]
    assert_same(merged(parts), whole)
    assert_same(merged(rng.sample(parts, len(parts))), whole)


@each_measure
@settings(max_examples=40, deadline=None)
@given(rows=rows, more=rows, rest=rows)
def test_merge_is_commutative_and_associative(
    measure: Callable[..., Section],
    rows: list[tuple[float, ...]],
    more: list[tuple[float, ...]],
    rest: list[tuple[float, ...]],
) -> None:
    a, b, c = (measure(*columns(each)) for each in (rows, more, rest))
    assert_same(a.merge(b), b.merge(a))
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))


@each_measure
@settings(max_examples=40, deadline=None)
@given(rows=rows)
def test_merging_nothing_changes_nothing(measure: Callable[..., Section], rows: list[tuple[float, ...]]) -> None:
    part, nothing = measure(*columns(rows)), measure(*columns([]))
    assert part.merge(nothing) == nothing.merge(part) == part
    if not isinstance(nothing, Histogram):
        assert nothing == type(nothing)()


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
def test_the_spread_beside_an_offset_survives_a_thousand_merges(offset: float) -> None:
    values = offset + np.random.default_rng(0).normal(size=100_000)
    found = merged([reference.moments_of(part, 0.0) for part in np.split(values, 1000)])
    assert found.std == pytest.approx(float(values.std()), rel=1e-9)
    assert found.mean == pytest.approx(float(values.mean()), rel=1e-12, abs=1e-12)


def test_the_spread_of_equal_values_is_zero_however_large_they_are() -> None:
    for value in (0.1, 3.0, 1e300, 1e-300):
        found = reference.moments_of(np.full(1000, value), 0.0)
        assert (found.mean, found.std, found.min, found.max) == (value, 0.0, value, value)
        both = found.merge(found)
        assert both.mean == value
        assert both.std == 0.0


@pytest.mark.parametrize("size", [1e150, 1e300, 1e-150, 1e-300])
def test_squares_that_do_not_fit_into_float64_do_no_harm(size: float) -> None:
    x, y = size * np.array([3.0, -4.0]), np.array([4.0, 3.0]) / size
    found = reference.moments_of(x[:1], 0.0).merge(reference.moments_of(x[1:], 0.0))
    assert found.norm == pytest.approx(5 * size)
    assert found.rms == pytest.approx(5 * size / math.sqrt(2))
    assert found.std == pytest.approx(3.5 * size)
    assert found.max_abs == pytest.approx(4 * size)
    both = reference.pair_of(x[:1], y[:1]).merge(reference.pair_of(x[1:], y[1:]))
    assert both.norm_x == pytest.approx(5 * size)
    assert both.norm_y == pytest.approx(5 / size)
    assert both.cosine == pytest.approx(0.0, abs=1e-15)


ordinary = st.lists(st.sampled_from([0.0, -0.0, *NOT_FINITE]) | st.integers(-99, 99).map(float), max_size=20)
powers = st.integers(-60, 60).map(lambda exponent: 2.0**exponent)


@settings(max_examples=40, deadline=None)
@given(ordinary, powers)
def test_scaled_moments_are_those_of_scaled_values(values: list[float], factor: float) -> None:
    x = np.array(values)
    assert_same(reference.moments_of(x, 0.0).scaled(factor), reference.moments_of(x * factor, 0.0))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(-99, 99).map(float)] * 2), max_size=20), powers, powers)
def test_a_scaled_pair_is_that_of_scaled_values(values: list[tuple[float, float]], one: float, other: float) -> None:
    x, y = np.array(values, float).reshape(-1, 2).T
    assert_same(reference.pair_of(x, y).scaled(one, other), reference.pair_of(x * one, y * other))


def test_the_step_of_merged_adams_is_unknown_if_that_of_a_part_is() -> None:
    known, unknown = Adam(n=2, defined=2, rms=1.0, step=3.0), Adam(n=2, defined=1, rms=1.0)
    assert known.merge(known).step == pytest.approx(3.0)
    assert known.merge(unknown).step is None
    assert unknown.merge(known).step is None
    assert known.merge(Adam(n=5)).step == 3.0


def test_shares_and_ratios_of_nothing_are_unknown() -> None:
    assert Adam().share_below_epsilon is None
    assert Adam(n=4, defined=4, below_epsilon=1).share_below_epsilon == 0.25
    assert Pair().sign_agreement is None
    assert Pair(n=4, equal_signs=1, signed=4).sign_agreement == 0.25
    assert (Pair().ratio_of_norms, Pair().log10, Pair().dot) == (None, None, 0.0)
    assert (Pair(norm_x=1.0).ratio_of_norms, Pair(norm_x=1.0).log10) == (math.inf, None)
    assert (Pair(norm_y=1.0).ratio_of_norms, Pair(norm_y=1.0).log10) == (0.0, None)
    assert Pair(norm_x=100.0, norm_y=1.0, cosine=-0.5).log10 == 2.0
    assert Pair(norm_x=100.0, norm_y=1.0, cosine=-0.5).dot == -50.0
    assert (Moments().norm, Moments().rms, Moments().max_abs, Moments().finite) == (0.0, None, None, 0)
    assert Moments(min=-3.0, max=2.0).max_abs == 3.0
    assert Moments(min=-3.0, max=-2.0).max_abs == 3.0
    assert Moments(min=2.0, max=3.0).max_abs == 3.0


@pytest.mark.parametrize("section", [Moments(), Pair(), Adam()])
def test_a_walk_sees_a_section_as_a_leaf(section: Section) -> None:
    assert isleaf(section)


def test_sections_are_runs_of_columns_that_follow_each_other_and_fill_a_line() -> None:
    starts = [span.start for span in SPANS.values()]
    assert starts == [0, *[span.stop for span in SPANS.values()]][:-1]
    assert sum(len(section.names()) for section in SECTIONS.values()) == WIDTH
    assert empty_matrix(3).shape == (3, WIDTH)
    assert np.isnan(empty_matrix(3)).all()


@pytest.mark.parametrize("measure", SECTION_MEASURES, ids=lambda measure: measure.__name__)
@settings(max_examples=40, deadline=None)
@given(rows=rows)
def test_a_section_is_read_from_the_columns_it_fills(
    measure: Callable[..., Section], rows: list[tuple[float, ...]]
) -> None:
    section = measure(*columns(rows))
    values = [math.nan if getattr(section, name) is None else float(getattr(section, name)) for name in section.names()]
    again = type(section).of_columns(values)
    assert again == section
    assert [type(getattr(again, name)) for name in again.names()] == [
        type(getattr(section, name)) for name in section.names()
    ]


def test_histograms_merge_where_they_overlap_and_where_they_do_not() -> None:
    low, high = Histogram(-3, (1, 0, 2)), Histogram(2, (5,))
    assert low.merge(high) == high.merge(low) == Histogram(-3, (1, 0, 2, 0, 0, 5))
    assert low.merge(Histogram(-2, (1, 1, 1))) == Histogram(-3, (1, 1, 3, 1))
    assert low.merge(Histogram(0, ())) == Histogram(0, ()).merge(low) == low

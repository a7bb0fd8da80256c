"""The native back end reads the memory of arrays and nothing beside it: on NumPy alone, so that a sanitizer can watch it."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest

from cowalk.measure import native, reference
from cowalk.measure.backend import SPANS, AdamSettings, Matrix, Operands
from cowalk.tree import engine

pytestmark = pytest.mark.skipif(engine.NATIVE is None, reason="the native extension is not built")

DTYPES = ("float16", "float32", "float64", "complex64", "complex128")
SIZES = (0, 1, 2, 7, 31, 33, 255, 257, 2047, 2048, 2049, 65_535, 65_537, 150_001)


@pytest.fixture(params=native.levels(), autouse=True)
def level(request: pytest.FixtureRequest) -> Any:
    native.set_level(request.param)
    yield request.param
    native.set_level(None)


def exactly(dtype: str, n: int, seed: int) -> Any:
    """Numbers in memory that ends with them: a sanitizer sees each byte that is read beyond."""
    numbers = np.random.default_rng(seed).normal(size=n)
    numbers[::5] = 0
    numbers[3::97] = np.nan
    return numbers.astype(dtype)


def counts(matrix: Matrix) -> Any:
    """The columns that are the same to the bit: counts, and the least and the greatest of an array."""
    moments = [matrix[:, SPANS[name]][:, [0, 1, 2, 3, 4, 5, 6, 9, 10]] for name in ("parameter", "gradient", "update")]
    return np.hstack([*moments, matrix[:, SPANS["ratio"]][:, :5]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_size_are_read_to_their_ends(dtype: str) -> None:
    leaves = [
        Operands(
            *(exactly(dtype, n, seed) for seed in range(3)),
            abs(exactly(dtype, n, 3)),
            abs(exactly(dtype, n, 4)),
            AdamSettings(1e-8),
        )
        for n in SIZES
    ]
    found, histograms = native.measure(leaves, True, threads=2)
    expected, powers = reference.measure(leaves, True)
    np.testing.assert_array_equal(counts(found), counts(expected))
    assert [each[:2] for each in histograms or ()] == [each[:2] for each in powers or ()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_are_read_within_their_memory(dtype: str) -> None:
    grid = exactly(dtype, 61 * 67, 0).reshape(61, 67)
    line = exactly(dtype, 61 * 67, 1)
    layouts = [
        grid,
        grid[::-1],
        grid[:, ::-1],
        grid[::-1, ::-1],
        line.reshape(67, 61).T,
        line.reshape(67, 61)[::-1].T,
        np.broadcast_to(line[:67], (61, 67)),
        np.broadcast_to(line[:61, None], (61, 67)),
        np.lib.stride_tricks.sliding_window_view(line[:127], 67)[:61],
    ]
    leaves = [Operands(one, other) for one in layouts for other in layouts]
    leaves += [Operands(grid[1::2, 3::5], grid[::2][:30, 3::5]), Operands(line[::7], line[::-7])]
    np.testing.assert_array_equal(counts(native.measure(leaves)[0]), counts(reference.measure(leaves)[0]))


def test_an_array_at_an_odd_address() -> None:
    memory = np.zeros(4 * 5001 + 1, np.uint8)
    odd = memory[1:].view(np.float32)
    odd[:] = exactly("float32", 5001, 0)
    leaves = [Operands(odd, exactly("float32", 5001, 1))]
    np.testing.assert_array_equal(counts(native.measure(leaves)[0]), counts(reference.measure(leaves)[0]))


def test_many_axes() -> None:
    deep = exactly("float32", 2**12, 0).reshape((2,) * 12 + (1,) * 52)
    twice = exactly("float32", 2**12, 1).reshape(deep.shape)
    leaves = [Operands(deep, twice), Operands(deep.T, twice.T), Operands(deep, np.swapaxes(twice, 0, 11)[::-1])]
    np.testing.assert_array_equal(counts(native.measure(leaves)[0]), counts(reference.measure(leaves)[0]))


def test_what_is_no_leaf_is_an_error_and_nothing_is_held() -> None:
    array = np.ones(3)
    before = sys.getrefcount(array)
    for wrong in ([(array,)], [array], [(None,) * 6], [(array, array, None, None, array, 3)], 7):
        with pytest.raises((TypeError, ValueError)):
            native.measure_seen(wrong, False, 1)  # type: ignore[arg-type]
    gc.collect()
    assert sys.getrefcount(array) == before

"""NumPy arrays: leaves with identity, written in place; float0 arrays (how JAX says "no gradient") are missing values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from cowalk.tree.kinds import Leaf, set_subclass_kind

Array = np.ndarray[Any, Any]


def is_inexact(dtype: Any) -> bool:
    """Whether a NumPy dtype is of floating or complex numbers, the small floats of ml_dtypes included."""
    if dtype.kind in "fc":
        return True
    # ml_dtypes registers its floats with kind "V"; only they can be cast to float and name themselves so.
    return dtype.kind == "V" and dtype.names is None and dtype.name.startswith(("bfloat", "float"))


def is_float0(array: Any) -> bool:
    """Whether an array has JAX's dtype float0: the gradient of something that has none."""
    return array.dtype.kind == "V" and array.dtype.names == ("float0",)


def writable(array: Array) -> str | None:
    if not array.flags.writeable:
        return "the array is read-only"
    return overlap(array.shape, array.strides)


def overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    """Why an array whose elements may share memory cells cannot be written: two of its indices may mean one cell."""
    if 0 in shape:
        return None
    reach = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= reach:
            return "its elements overlap in memory (an expanded or broadcast array); write into a copy of it"
        reach += stride * (size - 1)
    return None


def fits(array: Array, value: Any) -> str | None:
    made = np.asarray(value)
    if made.shape != array.shape:
        return f"the result has shape {made.shape}, the array {array.shape}"
    if not np.can_cast(made.dtype, array.dtype, casting="same_kind"):
        return f"the result is {made.dtype}, which an array of {array.dtype} cannot hold"
    return None


def same(one: Array, other: Array) -> bool:
    return (
        one.__array_interface__["data"] == other.__array_interface__["data"]
        and one.shape == other.shape
        and one.strides == other.strides
        and one.dtype == other.dtype
    )


def span(array: Array) -> tuple[Hashable, int, int] | None:
    if array.size == 0:
        return None
    start, stop = np.lib.array_utils.byte_bounds(array)
    return "cpu", start, stop


def write(array: Array, value: Any) -> None:
    np.copyto(array, value, casting="same_kind")


set_subclass_kind(
    np.ndarray,
    Leaf(
        ties=True,
        numeric=lambda array: is_inexact(array.dtype),
        missing=is_float0,
        same=same,
        unwritable=writable,
        write=write,
        check=fits,
        span=span,
    ),
)
set_subclass_kind(np.generic, Leaf())

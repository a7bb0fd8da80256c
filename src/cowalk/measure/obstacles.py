"""What cannot be measured, and why, in words: no array, no values yet, no memory of its own, another shape."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from cowalk.frameworks.numpy import is_inexact
from cowalk.measure.arrays import is_tensor, local
from cowalk.measure.backend import Operands
from cowalk.measure.dispatch import is_jax
from cowalk.measure.rows import State
from cowalk.tree import CowalkError, Leaf, Path, isleaf, kind_of
from cowalk.tree.paths import brief

_MOST_AXES = 64  # NumPy's limit too
_WHAT = ("parameter", "gradient", "update", "first moment", "second moment")


class MeasureError(CowalkError, ValueError):
    """Leaves that cannot be measured. `problems` holds (path, reason) of all of them; nothing was measured."""

    _SHOWN = 6

    def __init__(self, problems: Sequence[tuple[Path, str]]) -> None:
        count = len(problems)
        lines = [f"{count} {'leaf' if count == 1 else 'leaves'} cannot be measured:"]
        lines += [f"  {brief(path)}: {reason}" for path, reason in problems[: self._SHOWN]]
        if count > self._SHOWN:
            lines.append(f"  … and {count - self._SHOWN} more (all in .problems)")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[MeasureError], tuple[tuple[tuple[Path, str], ...]]]:
        return MeasureError, (self.problems,)


def obstacle(operands: Operands) -> str | None:
    """Why a leaf cannot be measured."""
    shape: Any = None
    for what, array in zip(_WHAT, operands[:5], strict=True):
        if array is None:
            continue
        if (reason := _no_numbers(array)) is not None:
            return f"the {what} {reason}"
        if is_uninitialised(array):
            return None
        found = _shape(array)
        if len(found) > _MOST_AXES:
            return f"the {what} has {len(found)} axes; {_MOST_AXES} are the most"
        if shape is None:
            shape = found
        elif found != shape and tuple(found) != tuple(shape):
            return f"the parameter has shape {tuple(shape)}, its {what} {tuple(found)}"
    return None


def _shape(array: Any) -> Any:
    if is_tensor(array):
        return local(array).shape
    return array.shape if hasattr(array, "shape") else np.shape(array)


def _no_numbers(array: Any) -> str | None:
    """Why something is no array of numbers that could be read, in words that follow "the parameter"."""
    cls = type(array)
    if cls is np.ndarray:
        return None if array.dtype.kind in "fc" or _is_numbers(array) else f"is an array of {array.dtype}"
    if is_traced(array):
        return "is a tracer, which has no values yet: call cowalk outside, on what the traced function returns" + (
            "" if is_tensor(array) else "; or inside of jax.jit use cowalk.jax.stats"
        )
    if is_tensor(array):
        return _unreadable_tensor(array)
    if isinstance(array, np.ma.MaskedArray):
        return "is a masked array; measure its compressed() or filled() values"
    if not (isleaf(array) and _is_numbers(array)):
        return f"is no array of numbers but a {cls.__name__}"
    if is_jax(array) and array.is_deleted():
        return "was deleted (donated to a jitted function); use the array that this function returned"
    return None


def is_traced(array: Any) -> bool:
    """Whether an array exists only while a function is traced, and has no values."""
    kind = kind_of(type(array))
    return isinstance(kind, Leaf) and kind.traced is not None and kind.traced(array)


def _is_numbers(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        try:
            dtype = np.asarray(array).dtype
        except TypeError:  # what JAX says of random keys
            return False
    return dtype.kind in "biu" or is_inexact(dtype)


def _unreadable_tensor(tensor: Any) -> str | None:
    torch = sys.modules["torch"]
    if tensor.is_nested:
        return "is a nested tensor, whose parts have shapes of their own; measure its values()"
    if str(tensor.dtype).endswith("_x2"):
        return f"is packed ({tensor.dtype}): unpack its numbers first"
    if is_uninitialised(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    if tensor.numel() and not hasattr(tensor, "to_local") and _has_no_memory(tensor):
        return f"is a {type(tensor).__name__} without memory of its own: it wraps others, or its memory was freed"
    placements = getattr(tensor, "placements", None)
    if placements is not None and any(type(each).__name__.endswith("Partial") for each in placements):
        return "is a DTensor with partial sums that are not yet added up over the processes; redistribute it first"
    return None


def _has_no_memory(tensor: Any) -> bool:
    try:
        return tensor.data_ptr() == 0 or tensor.untyped_storage().nbytes() == 0
    except RuntimeError:  # as for wrappers in C++
        return True


def is_uninitialised(array: Any) -> bool:
    """Whether a parameter is a lazy one of torch's, without a shape."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.nn.parameter.UninitializedTensorMixin)


def state_without_values(operands: Operands) -> State | None:
    """The state of a leaf whose arrays have no values to measure."""
    for array in operands[:5]:
        if is_tensor(array):
            if is_uninitialised(array):
                return "uninitialised"
            if array.is_meta:
                return "meta"
    return None

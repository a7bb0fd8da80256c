"""Two arrays of any framework as blocks of float64, side by side, so that no array of a leaf's own size is ever made.

On the CPU everything is read as NumPy arrays, without a copy; torch tensors on a device stay there. Complex numbers become
their modulus.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from cowalk.frameworks.numpy import is_inexact

BLOCK = 1 << 17
"""How many elements are widened at once: 1 MiB as float64."""


def is_tensor(array: Any) -> bool:
    """Whether an array is torch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_numbers(array: Any) -> bool:
    """Whether something is an array of numbers, or a number."""
    if is_tensor(array):
        return True
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        try:
            dtype = np.asarray(array).dtype
        except TypeError:  # what JAX says of random keys
            return False
    return dtype.kind in "biu" or is_inexact(dtype)


def blocks(parameter: Any, gradient: Any) -> Iterator[tuple[Any, Any]]:
    """Both arrays, of one shape, as pairs of flat float64 blocks: NumPy's, or torch's if both are on a device."""
    pair = _plain(parameter), _plain(gradient)
    modulus = any(map(_is_complex, pair))
    for one, other in _cut(*pair):
        if _on_device(one) and _on_device(other):
            yield _widened_there(one, modulus), _widened_there(other.to(one.device), modulus)
        else:
            yield _widened(one, modulus), _widened(other, modulus)


def _plain(array: Any) -> Any:
    """A tensor without its history, or a NumPy array. A sparse tensor is written out: its implicit zeros are zeros."""
    if not is_tensor(array):
        return np.asarray(array)
    array = array.detach()
    return array if array.layout == sys.modules["torch"].strided else array.to_dense()


def _is_complex(array: Any) -> bool:
    return array.is_complex() if is_tensor(array) else array.dtype.kind == "c"


def _on_device(array: Any) -> bool:
    """Whether a block is measured where it is. Apple's GPUs have no float64, so their blocks come to the CPU."""
    return is_tensor(array) and array.device.type not in ("cpu", "mps")


def _cut(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Views of both arrays that are small enough: the first axis that can be halved is, whatever the strides."""
    waiting = [(one, other)]
    while waiting:
        one, other = waiting.pop()
        shape = tuple(one.shape)
        if np.prod(shape, dtype=object) <= BLOCK:
            yield one, other
            continue
        axis = next(axis for axis, length in enumerate(shape) if length > 1)
        before, half = (slice(None),) * axis, shape[axis] // 2
        parts = (*before, slice(half, None)), (*before, slice(half))
        waiting.extend((one[part], other[part]) for part in parts)


def _widened(block: Any, modulus: bool) -> Any:
    if is_tensor(block):
        block = _as_numpy(block.cpu())
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit into float64 is infinite, and counted so
        wide = block.astype(np.complex128 if modulus else np.float64, order="C")
        return (np.abs(wide) if modulus else wide).reshape(-1)


def _as_numpy(block: Any) -> Any:
    """A tensor's block as NumPy has it; what NumPy does not know (bfloat16, float8) fits into the next wider type."""
    torch = sys.modules["torch"]
    if block.dtype == torch.complex32:
        block = block.to(torch.complex64)
    elif block.dtype.is_floating_point and block.dtype.itemsize < 4:
        block = block.to(torch.float32)
    return block.resolve_conj().resolve_neg().numpy()


def _widened_there(block: Any, modulus: bool) -> Any:
    torch = sys.modules["torch"]
    wide = block.to(torch.complex128 if modulus else torch.float64)
    return (wide.abs() if modulus else wide).reshape(-1)

"""Two arrays of any framework as blocks of float64, side by side, so that no array of a leaf's own size is ever made.

torch tensors stay on their device; everything else is read as a NumPy array, which copies nothing on the CPU. Complex numbers
become their modulus.
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
    dtype = np.asarray(array).dtype
    return dtype.kind in "biu" or is_inexact(dtype)


def blocks(parameter: Any, gradient: Any) -> Iterator[tuple[Any, Any]]:
    """Both arrays, of one shape, as pairs of flat float64 blocks of one framework, on one device."""
    if is_tensor(parameter) and is_tensor(gradient):
        parameter, gradient = _plain(parameter), _plain(gradient)
        # Apple's GPUs have no float64.
        device = "cpu" if parameter.device.type == "mps" else parameter.device
        modulus = parameter.is_complex() or gradient.is_complex()
        for pair in _cut(parameter, gradient):
            yield _widened(pair[0], modulus, device), _widened(pair[1], modulus, device)
    else:
        one, other = _as_numpy(parameter), _as_numpy(gradient)
        modulus = "c" in (one.dtype.kind, other.dtype.kind)
        for p, g in _cut(one, other):
            yield _widened_numpy(p, modulus), _widened_numpy(g, modulus)


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
        for part in (slice(half, None), slice(half)):
            waiting.append((one[(*before, part)], other[(*before, part)]))


def _plain(tensor: Any) -> Any:
    """A tensor without its history; a sparse one is written out, its implicit zeros are zeros."""
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _widened(block: Any, modulus: bool, device: Any) -> Any:
    torch = sys.modules["torch"]
    wide = block.to(device=device, dtype=torch.complex128 if modulus else torch.float64)
    return (wide.abs() if modulus else wide).reshape(-1)


def _widened_numpy(block: Any, modulus: bool) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit into float64 is infinite, and counted so
        wide = block.astype(np.complex128 if modulus else np.float64, order="C")
        return (np.abs(wide) if modulus else wide).reshape(-1)


def _as_numpy(array: Any) -> np.ndarray[Any, Any]:
    if not is_tensor(array):
        return np.asarray(array)
    tensor = _plain(array).cpu()
    torch = sys.modules["torch"]
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()  # NumPy has no bfloat16 of its own

"""Which back end measures what: arrays are measured where they live, and the lines come together in one matrix."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from cowalk.measure import native, reference
from cowalk.measure.arrays import is_tensor, plain, written_out
from cowalk.measure.backend import Histograms, Matrix, Operands, empty_matrix

Home = Literal["cpu", "numpy", "torch device", "jax"]


def measure(leaves: Sequence[Operands], histograms: bool, threads: int | None) -> tuple[Matrix, Histograms | None]:
    """Measure each leaf where its arrays are: in CPU memory, on torch's devices, or where JAX keeps them."""
    homes: list[Home] = [home_of(leaf) for leaf in leaves]
    matrix = empty_matrix(len(leaves))
    found: Histograms = [(None, None, None)] * len(leaves)
    for home in set(homes):
        places = [i for i, each in enumerate(homes) if each == home]
        lines, powers = _measure_at(home, [leaves[i] for i in places], histograms, threads)
        matrix[places] = lines
        for i, three in zip(places, powers or (), strict=False):
            found[i] = three
    return matrix, found if histograms else None


def measure_as_they_are(
    leaves: Sequence[Operands], histograms: bool, threads: int | None
) -> tuple[Matrix, Histograms | None] | None:
    """The usual case, without a question asked: plain arrays in CPU memory, of one shape a leaf. None if it is not the case."""
    return native.measure_seen(leaves, histograms, threads) if native.available() else None


def home_of(leaf: Operands) -> Home:
    """Where a leaf is measured: on the accelerator that any of its arrays is on; in NumPy where only that knows its dtype."""
    for array in leaf[:5]:
        if is_tensor(array):
            if array.device.type != "cpu":
                return "torch device"
        elif is_jax(array):
            if not native.is_local_jax(array):
                return "jax"
        elif array is not None and not native.is_known(array):
            return "numpy"
    return "cpu"


def is_jax(array: Any) -> bool:
    """Whether an array is JAX's."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def _measure_at(
    home: Home, leaves: Sequence[Operands], histograms: bool, threads: int | None
) -> tuple[Matrix, Histograms | None]:
    if home == "torch device":
        from cowalk.measure import torch_device

        return torch_device.measure([_on_one_device(leaf) for leaf in leaves], histograms)
    if home == "jax":
        from cowalk.measure import jax_arrays

        return jax_arrays.measure([_placed_alike(leaf) for leaf in leaves], histograms)
    if home == "cpu" and native.available():
        return native.measure(leaves, histograms, threads)
    return reference.measure(leaves, histograms)


def _placed_alike(leaf: Operands) -> Operands:
    """A leaf's arrays as JAX arrays on the same devices."""
    import jax

    lead = next(each for each in leaf[:5] if is_jax(each) and not native.is_local_jax(each))
    devices = lead.sharding.device_set

    def there(array: Any) -> Any:
        if array is None or (is_jax(array) and array.sharding.device_set == devices):
            return array
        return jax.device_put(plain(array).values, lead.sharding)

    p, g, u, m, v = map(there, leaf[:5])
    return Operands(p, g, u, m, v, leaf.adam)


def _on_one_device(leaf: Operands) -> Operands:
    """A leaf's arrays as tensors on one accelerator; sparse and quantised ones written out."""
    torch = sys.modules["torch"]
    device = next(each.device for each in leaf[:5] if is_tensor(each) and each.device.type != "cpu")

    def there(array: Any) -> Any:
        if array is None:
            return None
        return written_out(array if is_tensor(array) else torch.as_tensor(np.asarray(array))).to(device)

    p, g, u, m, v = map(there, leaf[:5])
    return Operands(p, g, u, m, v, leaf.adam)

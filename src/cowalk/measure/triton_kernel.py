"""The rows of `torch_device` in one launch for all leaves of a group, on CUDA: each program reads one span of a leaf, once.

A span is a tile after another; tiles merge as `Moments.merge` does. Sums are in float64: float32 squared fits without units.
Importing this needs Triton, which comes with torch's CUDA builds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cowalk.measure.arrays import tensor_tiny

triton: Any = import_module("triton")  # where it is not installed, a type checker knows nothing of it
tl: Any = import_module("triton.language")
if TYPE_CHECKING:
    constexpr = tensor = Any
else:  # of Triton itself, which lets a kernel's annotations name nothing else
    constexpr, tensor = tl.constexpr, tl.tensor

TILE = 1024
"""How many elements a program holds at once; twice as many spill far more registers."""
PROGRAMS = 4096
"""About how many programs there are at most, besides one for each leaf: enough for any GPU, and few rows for the host."""

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class UnavailableError(Exception):
    """Triton cannot compile or launch here."""


def serves(operands: Sequence[Tensor]) -> bool:
    """Whether a leaf can be measured by the kernel. Under Triton's interpreter (TRITON_INTERPRET=1), leaves on the CPU can."""
    device = operands[0].device
    if device.type == "cuda":
        able = torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        able = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return able and all(each.dtype in TYPES and each.is_contiguous() and not each.is_neg() for each in operands)


def rows(
    leaves: Sequence[tuple[Tensor | None, ...]], settings: Sequence[tuple[float, float, float]], columns: int
) -> tuple[Tensor, list[int], list[int]]:
    """The rows, and for each its leaf and its number of elements. All leaves have the same operands, of the same dtypes.

    Raises:
        UnavailableError: if Triton fails to compile or to launch the kernel, for want of a C compiler for example.
    """
    operands = leaves[0]
    device = next(each.device for each in operands if each is not None)
    counts = np.array([next(each.numel() for each in leaf if each is not None) for leaf in leaves], dtype=np.int64)
    span = max(1, -(-int(counts.sum()) // (PROGRAMS * TILE))) * TILE
    spans = -(-counts // span)
    slots = np.repeat(np.arange(len(leaves)), spans)
    starts = (np.arange(len(slots)) - np.repeat(np.cumsum(spans) - spans, spans)) * span
    sizes = np.minimum(counts[slots] - starts, span)
    table = [sizes, slots]
    for i, operand in enumerate(operands):
        first = np.array([0 if (each := leaf[i]) is None else each.data_ptr() for leaf in leaves], dtype=np.int64)
        table.append(first[slots] + starts * (0 if operand is None else operand.dtype.itemsize))
    found = torch.empty((len(slots), columns), dtype=torch.float64, device=device)
    if len(slots):
        spots = torch.from_numpy(np.stack(table, axis=1)).to(device, non_blocking=True)
        numbers = torch.tensor(settings, dtype=torch.float64, device="cpu").to(device, non_blocking=True)
        types = [None if each is None else TYPES[each.dtype] for each in operands]
        tiny = [0.0 if each is None else tensor_tiny(each.dtype) for each in operands[:3]]
        smallest = [int(np.float32(each).view(np.int32)) for each in tiny]
        _launch(device, len(slots), (spots, numbers, found, *types, *smallest, columns, TILE))
    return found, slots.tolist(), sizes.tolist()


def _launch(device: torch.device, programs: int, arguments: tuple[Any, ...]) -> None:
    try:
        if device.type == "cuda":
            with torch.cuda.device(device):  # Triton launches on the current one
                _measure[(programs,)](*arguments, enable_fp_fusion=False)
        else:
            _measure[(programs,)](*arguments, enable_fp_fusion=False)
    except Exception as error:
        raise UnavailableError(f"Triton's kernel does not run: {error}") from error


@triton.jit
def _measure(
    table: tensor,
    settings: tensor,
    found: tensor,
    p_type: constexpr,
    g_type: constexpr,
    u_type: constexpr,
    m_type: constexpr,
    v_type: constexpr,
    p_tiny: constexpr,
    g_tiny: constexpr,
    u_tiny: constexpr,
    columns: constexpr,
    tile: constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    entry = table + program * 7
    size = tl.load(entry)
    own = settings + tl.load(entry + 1) * 3
    epsilon, m_scale, v_scale = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    zero = tl.full((), 0.0, tl.float64)
    infinity = tl.full((), float("inf"), tl.float64)
    nothing = (zero, zero, zero, zero, zero, infinity, -infinity, zero, zero, zero, zero)
    no_pair = (zero, zero, zero, infinity, -infinity, zero, zero, zero, zero, zero, zero, zero)
    in_p, in_g, in_u, ratio, update_ratio = nothing, nothing, nothing, no_pair, no_pair
    adam = (zero, zero, zero, zero)
    for start in range(0, size, tile):
        offsets = start + tl.arange(0, tile)
        inside = offsets < size
        p = _load(entry + 2, offsets, inside, p_type)
        in_p = _moments_step(in_p, p, inside, p_tiny)
        if g_type is not None:
            g = _load(entry + 3, offsets, inside, g_type)
            in_g = _moments_step(in_g, g, inside, g_tiny)
            ratio = _pair_step(ratio, p, g, inside)
            if v_type is not None:
                v = _load(entry + 6, offsets, inside, v_type)
                if m_type is not None:
                    m = _load(entry + 5, offsets, inside, m_type)
                    adam = _adam_step(adam, g, m, v, inside, epsilon, m_scale, v_scale)
                else:
                    adam = _adam_step(adam, g, tl.zeros_like(g), v, inside, epsilon, m_scale, v_scale)
        if u_type is not None:
            u = _load(entry + 4, offsets, inside, u_type)
            in_u = _moments_step(in_u, u, inside, u_tiny)
            update_ratio = _pair_step(update_ratio, u, p, inside)
    row = found + program * columns
    row = _store_moments(row, in_p)
    if g_type is not None:
        row = _store_moments(row, in_g)
    if u_type is not None:
        row = _store_moments(row, in_u)
    if g_type is not None:
        row = _store_pair(row, ratio)
    if u_type is not None:
        row = _store_pair(row, update_ratio)
    if v_type is not None:
        tl.store(row, adam[0])
        tl.store(row + 1, adam[1])
        tl.store(row + 2, tl.sqrt(adam[2]))
        tl.store(row + 3, tl.sqrt(adam[3]))


@triton.jit
def _load(entry: tensor, offsets: tensor, inside: tensor, dtype: constexpr):
    if dtype == tl.bfloat16:  # float32's upper half: by bits, as not every conversion keeps subnormal numbers
        start = tl.load(entry).to(tl.pointer_type(tl.int16))
        upper = tl.load(start + offsets, mask=inside, other=0).to(tl.int32) << 16
        return upper.to(tl.float32, bitcast=True)
    start = tl.load(entry).to(tl.pointer_type(dtype))
    return tl.load(start + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _finite(x: tensor):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def _count(where: tensor):
    return tl.sum(where.to(tl.int32), 0).to(tl.float64)


@triton.jit
def _moments_step(state: tensor, values: tensor, inside: tensor, tiny: constexpr):
    nan, posinf, neginf, zeros, subnormals, low, high, finite, mean, squares, sum_abs = state
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF  # of the absolute value: a subnormal number is one, whatever is flushed to zero
    real = inside & (size < 0x7F800000)
    infinite = inside & (size == 0x7F800000)
    x = values.to(tl.float64)
    least = tl.min(tl.where(real, x, float("inf")), 0)
    greatest = tl.max(tl.where(real, x, float("-inf")), 0)
    count = _count(real)
    shift = tl.where(least > 0, least, tl.where(greatest < 0, greatest, 0.0))
    shift = tl.where(count > 0, shift, 0.0)
    shifted = tl.where(real, x - shift, 0.0)
    total = tl.sum(shifted, 0)
    some = tl.maximum(count, 1.0)
    spread = tl.maximum(tl.sum(shifted * shifted, 0) - total * (total / some), 0.0)
    apart = shift + total / some - mean
    share = count / tl.maximum(finite + count, 1.0)
    return (
        nan + _count(inside & (size > 0x7F800000)),
        posinf + _count(infinite & (bits > 0)),
        neginf + _count(infinite & (bits < 0)),
        zeros + _count(inside & (size == 0)),
        subnormals + _count(inside & (size > 0) & (size < tiny)),
        tl.minimum(low, least),
        tl.maximum(high, greatest),
        finite + count,
        mean + apart * share,
        squares + spread + apart * apart * (finite * share),
        sum_abs + tl.sum(tl.where(real, tl.abs(x), 0.0), 0),
    )


@triton.jit
def _pair_step(state: tensor, first: tensor, second: tensor, inside: tensor):
    defined, zero_y, zero_both, low, high, total, total_abs, xx, yy, xy, equal, signed = state
    both = inside & _finite(first) & _finite(second)
    x = tl.where(both, first.to(tl.float64), 0.0)
    y = tl.where(both, second.to(tl.float64), 0.0)
    by_zero = both & (y == 0.0)
    is_quotient = both & (y != 0.0)
    quotients = tl.where(is_quotient, x / tl.where(is_quotient, y, 1.0), 0.0)
    have_sign = is_quotient & (x != 0.0)
    return (
        defined + _count(is_quotient),
        zero_y + _count(by_zero),
        zero_both + _count(by_zero & (x == 0.0)),
        tl.minimum(low, tl.min(tl.where(is_quotient, quotients, float("inf")), 0)),
        tl.maximum(high, tl.max(tl.where(is_quotient, quotients, float("-inf")), 0)),
        total + tl.sum(quotients, 0),
        total_abs + tl.sum(tl.abs(quotients), 0),
        xx + tl.sum(x * x, 0),
        yy + tl.sum(y * y, 0),
        xy + tl.sum(x * y, 0),
        equal + _count(have_sign & ((x > 0.0) == (y > 0.0))),
        signed + _count(have_sign),
    )


@triton.jit
def _adam_step(
    state: tensor, g: tensor, m: tensor, v: tensor, inside: tensor, epsilon: tensor, m_scale: tensor, v_scale: tensor
):
    defined, below, rms, step = state
    known = inside & _finite(g) & _finite(v) & _finite(m) & (v >= 0.0)
    root = tl.sqrt(tl.where(known, v.to(tl.float64), 0.0) * v_scale)
    above = tl.where(known, g.to(tl.float64), 0.0)
    # 0/0 is 0 here: ε = 0, and nothing happened yet.
    quotients = tl.where(above == 0.0, 0.0, above / tl.maximum(root, epsilon))
    above = tl.where(known, m.to(tl.float64) * m_scale, 0.0)
    steps = tl.where(above == 0.0, 0.0, above / (root + epsilon))
    return (
        defined + _count(known),
        below + _count(known & (root < epsilon)),
        rms + tl.sum(quotients * quotients, 0),
        step + tl.sum(steps * steps, 0),
    )


@triton.jit
def _store_moments(row: tensor, state: tensor):
    """In the order of `torch_device.MOMENTS`; what is shifted by the mean sums up to 0."""
    for i in tl.static_range(7):
        tl.store(row + i, state[i])
    tl.store(row + 7, state[8])
    tl.store(row + 8, 1.0)
    tl.store(row + 9, 0.0)
    tl.store(row + 10, state[10])
    tl.store(row + 11, tl.sqrt(state[9]))
    return row + 12


@triton.jit
def _store_pair(row: tensor, state: tensor):
    """In the order of `torch_device.PAIR`."""
    for i in tl.static_range(5):
        tl.store(row + i, state[i])
    tl.store(row + 5, 1.0)
    tl.store(row + 6, state[5])
    tl.store(row + 7, state[6])
    tl.store(row + 8, 1.0)
    tl.store(row + 9, tl.sqrt(state[7]))
    tl.store(row + 10, 1.0)
    tl.store(row + 11, tl.sqrt(state[8]))
    tl.store(row + 12, state[9])
    tl.store(row + 13, state[10])
    tl.store(row + 14, state[11])
    return row + 15

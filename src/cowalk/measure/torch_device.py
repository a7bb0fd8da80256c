"""The back end for torch tensors on a device (CUDA, XPU, MPS): few launches whatever the number of leaves, one copy to the host.

Leaves whose operands have the same dtypes are cut into pieces, and pieces of about one length are laid into one rectangle, a
piece a row, filled up with NaN, which every statistic but the count of NaN leaves out. Reductions along its rows need no
atomics, so that a measurement gives the same bits each time. The host then makes the lines of the matrix from the rows.

All is computed in float64. A device that has none (Apple's, some of Intel's) hands its packed rectangles to the CPU.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cowalk.measure.arrays import tensor_tiny
from cowalk.measure.backend import SPANS, AdamSettings, Histogram, Histograms, Matrix, Operands, empty_matrix
from cowalk.measure.moments import Adam, Moments, Pair

VOLUME = 1 << 19
"""How many elements a rectangle has at most: 4 MiB as float64, of which up to thirteen are alive at a time."""

# What a row holds, in this order; the Triton kernel writes the same. A `unit` is a power of two near the largest absolute
# value: divided by it, squares neither overflow nor vanish.
MOMENTS = (
    *("nan", "posinf", "neginf", "zeros", "subnormals", "min", "max"),
    *("shift", "unit", "sum", "sum_abs", "norm"),  # the last three are of (x - shift) / unit
)
PAIR = (
    *("defined", "zero_y", "zero_both", "min", "max", "unit", "sum", "sum_abs"),  # of the quotients
    *("unit_x", "norm_x", "unit_y", "norm_y", "dot", "equal_signs", "signed"),
)
ADAM = ("defined", "below_epsilon", "rms", "step")  # the last two as 2-norms, step without the learning rate

_fails = False
Numbers = NDArray[np.float64]
Tensors = tuple[Tensor | None, ...]


class _Group(NamedTuple):
    """What leaves have in common that are measured together: p, g, u, m and v have these dtypes, or are absent."""

    device: torch.device
    dtypes: tuple[torch.dtype | None, ...]
    fused: bool

    @property
    def sections(self) -> dict[str, tuple[str, ...]]:
        """The sections that its leaves have, with the columns of each."""
        p, g, u, _, v = (dtype is not None for dtype in self.dtypes)
        present = {
            "parameter": p,
            "gradient": g,
            "update": u,
            "ratio": p and g,
            "update_ratio": u and p,
            "adam": g and v,
        }
        columns = dict.fromkeys(SPANS, MOMENTS) | {"ratio": PAIR, "update_ratio": PAIR, "adam": ADAM}
        return {name: columns[name] for name in SPANS if present[name]}

    @property
    def home(self) -> torch.device:
        """Where it is computed."""
        return self.device if _has_float64(self.device) else torch.device("cpu")


class _Piece(NamedTuple):
    slot: int
    """Which of its group's leaves it is of."""
    size: int
    parts: Tensors


class _Rows(NamedTuple):
    """One row a piece; `slots` and `sizes` say of which leaf, and of how many elements (the NaN that fill it up left out)."""

    values: Tensor
    slots: list[int]
    sizes: list[int]
    width: list[int]
    """How many elements were measured, those that fill it up included."""


@torch.no_grad()
def measure(leaves: Sequence[Operands], histograms: bool = False) -> tuple[Matrix, Histograms | None]:
    """See `Backend.measure`. The operands of a leaf are tensors on one device; it may be the CPU.

    >>> from cowalk.measure.backend import SPANS
    >>> matrix, _ = measure([Operands(torch.tensor([3.0, -4.0]), torch.tensor([1.0, 0.0]))])
    >>> Moments.of_columns(matrix[0, SPANS["parameter"]]).mean
    -0.5
    >>> Pair.of_columns(matrix[0, SPANS["ratio"]]).x_by_zero
    1
    """
    matrix = empty_matrix(len(leaves))
    tensors = [_tensors(leaf) for leaf in leaves]
    groups: defaultdict[_Group, list[int]] = defaultdict(list)
    for line, operands in enumerate(tensors):
        groups[_group(operands, histograms)].append(line)
    rows: dict[_Group, _Rows] = {}
    for group, lines in groups.items():
        settings = [leaves[line].adam or AdamSettings(0.0) for line in lines]
        measured = _fused_rows if group.fused else _rows
        rows[group] = measured(group, [tensors[line] for line in lines], settings, histograms)
    powers: Histograms = [(None, None, None)] * len(leaves)
    for group, values in _on_host({group: part.values for group, part in rows.items()}).items():
        lines, part = groups[group], rows[group]
        lr = np.array([(leaves[line].adam or AdamSettings(0.0)).lr for line in lines])
        start = 0
        for name, columns in group.sections.items():
            named = dict(zip(columns, values[:, start : start + len(columns)].T, strict=True))
            matrix[lines, SPANS[name]] = _finished(name, named, part, len(lines), lr, group.dtypes[3] is not None)
            start += len(columns)
        if histograms:
            for line, found in zip(lines, _histograms(group, values[:, start:], part, len(lines)), strict=True):
                powers[line] = found
    _count_zero_rows(matrix, tensors)
    return matrix, powers if histograms else None


def _tensors(leaf: Operands) -> Tensors:
    """The operands without their history; the moments of the gradient only where Adam's section can be had."""
    whole = leaf.adam is not None and leaf.gradient is not None and leaf.v is not None
    return tuple(None if each is None else _strided(each) for each in (leaf if whole else leaf[:3])[:5]) + (
        () if whole else (None, None)
    )


def _strided(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()  # implicit zeros are zeros
    return tensor.dequantize() if tensor.is_quantized else tensor


def _group(operands: Tensors, histograms: bool) -> _Group:
    present = [each for each in operands if each is not None]
    kernel = _kernel() if present[0].is_cuda or "TRITON_INTERPRET" in os.environ else None
    fused = kernel is not None and not histograms and operands[0] is not None and kernel.serves(present)
    return _Group(present[0].device, tuple(None if each is None else each.dtype for each in operands), fused)


def _has_float64(device: torch.device) -> bool:
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def _on_host(rows: Mapping[_Group, Tensor]) -> dict[_Group, Numbers]:
    """All rows with one copy from each device."""
    found: dict[_Group, Numbers] = {}
    for device in {values.device for values in rows.values()}:
        here = {group: values for group, values in rows.items() if values.device == device}
        flat = torch.cat([values.reshape(-1) for values in here.values()]).cpu().numpy()
        parts = np.split(flat, np.cumsum([values.numel() for values in here.values()])[:-1])
        found |= {group: part.reshape(values.shape) for (group, values), part in zip(here.items(), parts, strict=True)}
    return found


# --- from leaves to rectangles ---


def _rows(group: _Group, leaves: Sequence[Tensors], settings: Sequence[AdamSettings], histograms: bool) -> _Rows:
    volume = VOLUME // 4 if any(dtype is not None and dtype.is_complex for dtype in group.dtypes) else VOLUME
    pieces = [piece for slot, leaf in enumerate(leaves) for piece in _pieces(slot, leaf, volume)]
    pieces.sort(key=lambda piece: -piece.size)
    bins = max((_powers(dtype)[1] for dtype in group.dtypes[:3] if dtype is not None), default=0)
    table = [settings[piece.slot][:3] for piece in pieces]
    on_device = torch.tensor(table, dtype=torch.float64, device="cpu").reshape(-1, 3).to(group.home, non_blocking=True)
    width: list[int] = []
    found = [torch.empty((0, _breadth(group, histograms)), dtype=torch.float64, device=group.home)]
    for chunk in _chunks(pieces, volume, volume // bins if histograms else volume):
        here = on_device[len(width) : len(width) + len(chunk)]
        found.append(torch.stack(_columns(group, chunk, here, histograms), dim=1))
        width += [chunk[0].size] * len(chunk)
    return _Rows(torch.cat(found), [piece.slot for piece in pieces], [piece.size for piece in pieces], width)


def _breadth(group: _Group, histograms: bool) -> int:
    breadth = sum(map(len, group.sections.values()))
    if histograms:
        breadth += sum(_powers(dtype)[1] for dtype in group.dtypes[:3] if dtype is not None)
    return breadth


def _pieces(slot: int, leaf: Tensors, volume: int) -> Iterator[_Piece]:
    """Views of the operands, all cut in the same way: the first axis that can be halved is, whatever the strides."""
    waiting = [leaf]
    while waiting:
        parts = waiting.pop()
        shape = next(part.shape for part in parts if part is not None)
        if shape.numel() > volume:
            axis = next(axis for axis, length in enumerate(shape) if length > 1)
            half = shape[axis] // 2
            for start, length in ((half, shape[axis] - half), (0, half)):
                waiting.append(tuple(None if part is None else part.narrow(axis, start, length) for part in parts))
        elif shape.numel():
            yield _Piece(slot, shape.numel(), parts)


def _chunks(pieces: Sequence[_Piece], volume: int, most: int) -> Iterator[Sequence[_Piece]]:
    """Runs of pieces, the longest first, that fill a rectangle. What a short row wastes costs less than one more launch."""
    start = 0
    while start < len(pieces):
        stop = start + max(1, min(most, volume // pieces[start].size))
        yield pieces[start:stop]
        start = stop


def _packed(parts: Sequence[Tensor], home: torch.device) -> Tensor:
    """One part a row, filled up with NaN to the length of the first, the longest."""
    dtype = parts[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):  # integers have no NaN
        parts, dtype = [part.to(home, torch.float64) for part in parts], torch.float64
    elif dtype == torch.complex32:  # few operations know it
        parts, dtype = [part.to(torch.complex64) for part in parts], torch.complex64
    flat = [part.reshape(-1).resolve_conj().resolve_neg() for part in parts]
    width, gap = flat[0].numel(), flat[0].numel() - flat[-1].numel()
    if dtype.itemsize == 1:  # torch.cat need not know every kind of float8
        flat = [part.view(torch.uint8) for part in flat]
    if gap:
        wide = dtype if dtype.is_complex else torch.float32
        blank = torch.full((gap,), float("nan"), dtype=wide, device=flat[0].device).to(dtype)
        blank = blank.view(flat[0].dtype)
        flat = [each for part in flat for each in (part, blank[: width - part.numel()])]
    whole = flat[0] if len(flat) == 1 else torch.cat(flat)
    return whole.view(dtype).view(-1, width).to(home)


# --- from rectangles to rows ---


class _Loaded(NamedTuple):
    """An operand as a rectangle."""

    vector: Tensor
    """float64 or complex128."""
    values: Tensor
    """float64: the moduli of complex numbers, or the vector itself."""
    finite: Tensor

    @property
    def is_complex(self) -> bool:
        return self.vector.is_complex()


def _columns(group: _Group, chunk: Sequence[_Piece], settings: Tensor, histograms: bool) -> list[Tensor]:
    """Every statistic of every row, in the order of the sections. Operands are loaded as late, and let go as early, as can be."""
    columns: dict[str, list[Tensor]] = {}
    powers: list[Tensor] = []

    def load(i: int, name: str = "") -> _Loaded | None:
        dtype = group.dtypes[i]
        if dtype is None:
            return None
        packed = _packed([part for piece in chunk if (part := piece.parts[i]) is not None], group.home)
        loaded, bits = _loaded(packed)
        if name:
            columns[name] = _moments_columns(loaded, bits, tensor_tiny(dtype))
        if name and histograms:
            powers.extend(_power_columns(loaded.values, *_powers(dtype)))
        return loaded

    p, g = load(0, "parameter"), load(1, "gradient")
    if p and g:
        columns["ratio"] = _pair_columns(p, g)
    if g and "adam" in group.sections and (v := load(4)):
        columns["adam"] = _adam_columns(g, load(3), v, settings)
        del v
    del g
    if (u := load(2, "update")) and p:
        columns["update_ratio"] = _pair_columns(u, p)
    found = [column for name in group.sections for column in columns[name]]
    counts = torch.stack([column for column in found if column.dtype == torch.int64]).to(torch.float64)  # in one launch
    widened = iter(counts.unbind(0))
    return [next(widened) if column.dtype == torch.int64 else column for column in found] + powers


def _loaded(packed: Tensor) -> tuple[_Loaded, Tensor]:
    """An operand, and its absolute values' bits, in which a subnormal number is one whatever the device flushes to zero."""
    if packed.is_complex():
        vector = packed.to(torch.complex128)
        values = torch.hypot(vector.real, vector.imag)
        return _Loaded(vector, values, torch.isfinite(vector)), values.view(torch.int64)
    carrier = packed if packed.dtype == torch.float64 else packed.to(torch.float32)
    if carrier.dtype == torch.float64:
        bits = carrier.view(torch.int64) & 0x7FFF_FFFF_FFFF_FFFF
    else:
        bits = carrier.view(torch.int32) & 0x7FFF_FFFF
    values = carrier.to(torch.float64)
    return _Loaded(values, values, torch.isfinite(values)), bits


def _moments_columns(x: _Loaded, bits: Tensor, tiny: float) -> list[Tensor]:
    values = x.values
    finite = torch.isfinite(values) if x.is_complex else x.finite  # a modulus may overflow where neither part does
    infinity = float("inf")
    wide = np.float64(tiny) if bits.dtype == torch.int64 else np.float32(tiny)
    smallest = int(wide.view(np.int64 if bits.dtype == torch.int64 else np.int32))
    counts = (
        torch.isnan(values),
        values == infinity,
        values == -infinity,
        bits == 0,
        (bits > 0) & (bits < smallest),
    )
    low = torch.where(finite, values, infinity).amin(1)
    high = torch.where(finite, values, -infinity).amax(1)
    # The least or the greatest element where they have one sign, else 0: a mean of equal values is that value, their spread is
    # zero, and since an element lies there, or on the other side, sums of squares lose no more than n roundings.
    shift = (low.clamp(min=0) + high.clamp(max=0)).nan_to_num_(nan=0.0)
    unit, inverse = _unit(torch.maximum(-low, high).clamp_(min=0))
    shifted = torch.where(finite, values, shift[:, None]).sub_(shift[:, None]).mul_(inverse[:, None])
    return [count.sum(1) for count in counts] + [low, high, shift, unit, *_sums(shifted), _norm(shifted)]


def _pair_columns(x: _Loaded, y: _Loaded) -> list[Tensor]:
    both = x.finite & y.finite
    is_complex = x.is_complex or y.is_complex
    a, b = (each.values.abs() if is_complex else each.values for each in (x, y))
    zero_x, zero_y = a == 0, (b == 0) & both
    quotients = a / b
    defined = torch.isfinite(quotients) & both  # x/0 is not finite
    low = torch.where(defined, quotients, float("inf")).amin(1)
    high = torch.where(defined, quotients, float("-inf")).amax(1)
    unit, inverse = _unit(torch.maximum(-low, high).clamp_(min=0))
    quotients = torch.where(defined, quotients, 0.0).mul_(inverse[:, None])
    sums = _sums(quotients)
    del quotients
    if is_complex:
        signed = equal = torch.zeros_like(both)
    else:
        signed = both & ~(zero_x | zero_y)
        equal = signed & (torch.signbit(a) == torch.signbit(b))
    counts = (defined.sum(1), zero_y.sum(1), (zero_y & zero_x).sum(1))
    (unit_x, u), (unit_y, w) = _scaled(x.vector, both), _scaled(y.vector, both)
    norms = _norm(u), _norm(w)
    dot = (u.conj() * w).real if is_complex else u.mul_(w)
    vectors = [unit_x, norms[0], unit_y, norms[1], dot.sum(1)]
    return [*counts, low, high, unit, *sums, *vectors, equal.sum(1), signed.sum(1)]


def _adam_columns(g: _Loaded, m: _Loaded | None, v: _Loaded, settings: Tensor) -> list[Tensor]:
    epsilon, m_scale, v_scale = settings[:, :, None].unbind(1)
    second = v.vector.real if v.is_complex else v.vector
    defined = g.finite & torch.isfinite(second) & (second >= 0)
    if m is not None:
        defined &= m.finite
    root = torch.where(defined, second, float("inf")).mul_(v_scale).sqrt_()
    below = root < epsilon

    def norm_of_quotients(above: Tensor, under: Tensor) -> Tensor:
        quotients = torch.where(defined, above, 0.0).div_(under)
        return _norm(quotients.nan_to_num_(nan=0.0, posinf=float("inf")))  # 0/0: ε = 0, and nothing happened yet

    rms = norm_of_quotients(g.values.abs(), torch.maximum(root, epsilon))
    step = torch.zeros_like(rms) if m is None else norm_of_quotients(m.values.abs().mul_(m_scale), root.add_(epsilon))
    return [defined.sum(1), below.sum(1), rms, step]


def _unit(largest: Tensor) -> tuple[Tensor, Tensor]:
    """A power of two near each of some numbers, not negative, and its inverse, both normal: exact, as they are made of bits."""
    exponent = ((largest.view(torch.int64) >> 52) + 1).clamp_(2, 2044)
    return (exponent << 52).view(torch.float64), ((2046 - exponent) << 52).view(torch.float64)


def _scaled(vector: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    vector = torch.where(where, vector, 0.0)
    unit, inverse = _unit(torch.linalg.vector_norm(vector, float("inf"), dim=1))
    return unit, vector.mul_(inverse[:, None])


def _sums(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.sum(1), torch.linalg.vector_norm(values, 1, dim=1)


def _norm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, 2, dim=1)


def _powers(dtype: torch.dtype) -> tuple[int, int]:
    """The least ⌊log₂|x|⌋ that a dtype's numbers have, and how many there are."""
    if dtype.is_floating_point and dtype != torch.float64:
        return -149, 277
    return -1074, 2098


def _power_columns(values: Tensor, low: int, bins: int) -> list[Tensor]:
    counted = torch.isfinite(values) & (values != 0)
    index = torch.where(
        counted, torch.frexp(values).exponent.to(torch.int64) - (1 + low), bins
    )  # the last bin is no one's
    one = torch.ones((), dtype=torch.int64, device=values.device)
    found = torch.zeros((len(values), bins + 1), dtype=torch.int64, device=values.device)
    found.scatter_add_(1, index, one.expand_as(index))
    return list(found[:, :bins].to(torch.float64).unbind(1))


# --- all leaves of a group in one launch ---


@cache
def _kernel() -> ModuleType | None:
    """Triton's kernel, where Triton is: it takes a while to load, so it is not asked for before it can be of use."""
    try:
        from cowalk.measure import triton_kernel
    except ImportError:
        return None
    return triton_kernel


def _fused_rows(group: _Group, leaves: Sequence[Tensors], settings: Sequence[AdamSettings], histograms: bool) -> _Rows:
    global _fails  # what failed to compile once is not tried again
    kernel = None if _fails else _kernel()
    if kernel is None:
        return _rows(group, leaves, settings, histograms)
    try:
        values, slots, sizes = kernel.rows(leaves, [each[:3] for each in settings], _breadth(group, histograms))
    except kernel.UnavailableError as error:
        _fails = True
        warnings.warn(f"{error}\nSlower operations of torch serve in its place.", RuntimeWarning, stacklevel=2)
        return _rows(group, leaves, settings, histograms)
    return _Rows(values, slots, sizes, sizes)


# --- from rows to lines ---


def _finished(name: str, rows: Mapping[str, Numbers], part: _Rows, leaves: int, lr: Numbers, has_step: bool) -> Numbers:
    """The section of each leaf. Rows merge as `Moments.merge` and its like do, all at once."""
    merge = _Merge(np.array(part.slots, dtype=np.intp), leaves)
    sizes = np.array(part.sizes, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        if name == "adam":
            found = _adam_lines(rows, sizes, merge, lr if has_step else np.full(leaves, np.nan))
            return _in_order(found, Adam.names())
        if name in ("ratio", "update_ratio"):
            return _in_order(_pair_lines(rows, sizes, merge), Pair.names())
        filling = np.array(part.width, dtype=np.float64) - sizes
        return _in_order(_moments_lines(rows, sizes, filling, merge), Moments.names())


def _in_order(found: Mapping[str, Numbers], names: Sequence[str]) -> Numbers:
    return np.stack([found[name] for name in names], axis=1)


class _Merge(NamedTuple):
    """Merges numbers of rows into numbers of leaves; a leaf without rows, an empty one, has counts of 0 and no values."""

    slots: NDArray[np.intp]
    leaves: int

    def total(self, numbers: Numbers) -> Numbers:
        found = np.zeros(self.leaves)
        np.add.at(found, self.slots, numbers)
        return found

    def least(self, numbers: Numbers) -> Numbers:
        found = np.full(self.leaves, np.nan)
        np.fmin.at(found, self.slots, numbers)
        return found

    def greatest(self, numbers: Numbers) -> Numbers:
        found = np.full(self.leaves, np.nan)
        np.fmax.at(found, self.slots, numbers)
        return found

    def mean(self, numbers: Numbers, weights: Numbers) -> Numbers:
        """NaN where all weights are 0, and NaN counts for nothing where its own weight is."""
        share = weights / self.total(weights)[self.slots]
        # From the least of them, so that equal means have that mean; by halves, whose differences do not overflow.
        base = self.least(np.where(weights > 0, numbers, np.nan)) / 2
        return (base + self.total(np.where(weights > 0, (numbers / 2 - base[self.slots]) * share, 0.0))) * 2

    def norm(self, numbers: Numbers) -> Numbers:
        largest = np.nan_to_num(self.greatest(numbers), nan=0.0, posinf=np.inf)
        squares = np.square(numbers / largest[self.slots])
        found = largest * np.sqrt(self.total(np.where(numbers > 0, squares, 0.0)))
        return np.where(np.isinf(largest), largest, found)

    def norm_of_scaled(self, numbers: Numbers, units: Numbers) -> tuple[Numbers, Numbers]:
        """The norms, and each row's share in its leaf's, which is known even where the norm itself overflows."""
        unit = np.nan_to_num(self.greatest(units))
        scaled = numbers * (units / unit[self.slots])
        norm = np.sqrt(self.total(np.square(scaled)))
        return norm * unit, np.where(scaled > 0, scaled / norm[self.slots], 0.0)


def _moments_lines(rows: Mapping[str, Numbers], sizes: Numbers, filling: Numbers, merge: _Merge) -> dict[str, Numbers]:
    nan = rows["nan"] - filling
    finite = sizes - nan - rows["posinf"] - rows["neginf"]
    some = finite > 0
    share = rows["sum"] / finite
    means = rows["shift"] + share * rows["unit"]
    stds = np.sqrt(np.maximum(np.square(rows["norm"]) / finite - np.square(share), 0.0)) * rows["unit"]
    magnitudes = rows["sum_abs"] / finite * rows["unit"]
    one_sign = (rows["min"] >= 0) | (rows["max"] <= 0)
    magnitudes = np.where(one_sign, abs(means), magnitudes)
    mean = merge.mean(means, finite)
    weights = np.sqrt(finite / merge.total(finite)[merge.slots])
    spread = np.where(some, weights * np.hypot(stds, means - mean[merge.slots]), 0.0)
    return {
        "n": merge.total(sizes),
        "nan": merge.total(nan),
        **{name: merge.total(rows[name]) for name in ("posinf", "neginf", "zeros", "subnormals")},
        "zero_rows": np.zeros(merge.leaves),
        "mean": mean,
        "std": np.where(np.isnan(mean), np.nan, merge.norm(spread)),
        "min": merge.least(np.where(some, rows["min"], np.nan)),
        "max": merge.greatest(np.where(some, rows["max"], np.nan)),
        "mean_abs": merge.mean(magnitudes, finite),
    }


def _pair_lines(rows: Mapping[str, Numbers], sizes: Numbers, merge: _Merge) -> dict[str, Numbers]:
    defined = rows["defined"]
    some = defined > 0
    norm_x, share_x = merge.norm_of_scaled(rows["norm_x"], rows["unit_x"])
    norm_y, share_y = merge.norm_of_scaled(rows["norm_y"], rows["unit_y"])
    cosines = rows["dot"] / rows["norm_x"] / rows["norm_y"] * share_x * share_y
    cosine = merge.total(np.where((share_x > 0) & (share_y > 0), cosines, 0.0))
    return {
        "n": merge.total(sizes),
        "defined": merge.total(defined),
        "x_by_zero": merge.total(rows["zero_y"] - rows["zero_both"]),
        "zero_by_zero": merge.total(rows["zero_both"]),
        "nonfinite": merge.total(sizes - defined - rows["zero_y"]),
        "mean": merge.mean(rows["sum"] / defined * rows["unit"], defined),
        "min": merge.least(np.where(some, rows["min"], np.nan)),
        "max": merge.greatest(np.where(some, rows["max"], np.nan)),
        "mean_abs": merge.mean(rows["sum_abs"] / defined * rows["unit"], defined),
        "norm_x": norm_x,
        "norm_y": norm_y,
        "cosine": np.where((norm_x > 0) & (norm_y > 0), cosine, np.nan),
        "equal_signs": merge.total(rows["equal_signs"]),
        "signed": merge.total(rows["signed"]),
    }


def _adam_lines(rows: Mapping[str, Numbers], sizes: Numbers, merge: _Merge, lr: Numbers) -> dict[str, Numbers]:
    defined = merge.total(rows["defined"])
    return {
        "n": merge.total(sizes),
        "defined": defined,
        "below_epsilon": merge.total(rows["below_epsilon"]),
        "rms": np.where(defined > 0, merge.norm(rows["rms"]) / np.sqrt(defined), np.nan),
        "step": np.where(defined > 0, lr * merge.norm(rows["step"]) / np.sqrt(defined), np.nan),
    }


def _histograms(
    group: _Group, values: Numbers, part: _Rows, leaves: int
) -> list[tuple[Histogram | None, Histogram | None, Histogram | None]]:
    found: list[list[Histogram | None]] = []
    start = 0
    for dtype in group.dtypes[:3]:
        if dtype is None:
            found.append([None] * leaves)
            continue
        low, bins = _powers(dtype)
        counts = np.zeros((leaves, bins), dtype=np.int64)
        np.add.at(counts, np.array(part.slots, dtype=np.intp), values[:, start : start + bins].astype(np.int64))
        found.append([_histogram(low, line) for line in counts])
        start += bins
    return list(zip(*found, strict=True))


def _histogram(low: int, counts: NDArray[np.int64]) -> Histogram:
    seen = np.flatnonzero(counts)
    if not seen.size:
        return Histogram(0, ())
    return Histogram(low + int(seen[0]), tuple(counts[seen[0] : seen[-1] + 1].tolist()))


# --- rows of zeros, which only few leaves can have ---


def _count_zero_rows(matrix: Matrix, tensors: Sequence[Tensors]) -> None:
    """Fills in `zero_rows`: nothing is launched unless a leaf has enough zeros for one row, and something else."""
    zeros, found = (Moments.names().index(name) for name in ("zeros", "zero_rows"))
    open_places: list[tuple[int, int]] = []
    counts: list[Tensor] = []
    for line, operands in enumerate(tensors):
        for name, tensor in zip(("parameter", "gradient", "update"), operands, strict=False):
            if tensor is None or tensor.ndim < 2 or not tensor.numel():
                continue
            start = SPANS[name].start
            if matrix[line, start + zeros] == tensor.numel():
                matrix[line, start + found] = len(tensor)
            elif matrix[line, start + zeros] >= tensor[0].numel():
                open_places.append((line, start + found))
                counts.append(_zero_rows(tensor))
    for device in {count.device for count in counts}:
        here = [i for i, count in enumerate(counts) if count.device == device]
        for i, count in zip(here, torch.stack([counts[i] for i in here]).tolist(), strict=True):
            matrix[open_places[i]] = count


def _zero_rows(tensor: Tensor) -> Tensor:
    """How many slices along the first axis hold zeros only; by blocks of rows, or by parts of a row that is long itself."""
    length = tensor[0].numel()
    many = max(1, VOLUME // length)
    count = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in tensor.split(many):
        filled = torch.zeros(len(block), dtype=torch.bool, device=tensor.device)
        for piece in _pieces(0, (block,), VOLUME) if length <= VOLUME else _pieces(0, (block[0],), VOLUME):
            for part in piece.parts:
                if part is not None:
                    wide = part.to(torch.float32) if part.dtype.is_floating_point and part.dtype.itemsize == 1 else part
                    filled |= (wide.reshape(len(block), -1) != 0).any(1)
        count += len(block) - filled.sum()
    return count

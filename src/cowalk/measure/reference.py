"""What is measured, in plain float64 NumPy: the specification, the oracle of the tests, and where nothing faster serves.

Where there is no native extension it is the back end for CPU memory. A leaf is then cut into blocks, so that nothing of its
own size is made, and the blocks are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cowalk.measure.arrays import Plain, plain
from cowalk.measure.backend import SPANS, AdamSettings, Histogram, Histograms, Matrix, Operands, empty_matrix
from cowalk.measure.moments import Adam, Moments, Pair

BLOCK = 1 << 18
"""How many elements are widened to float64 at once."""
Values = NDArray[Any]


def moments_of(values: Values, tiny: float) -> Moments:
    """The moments of an array; `tiny` is its dtype's smallest normal number."""
    x = modulus(values)
    finite = x[np.isfinite(x)]
    counts = Moments(
        n=x.size,
        nan=int(np.isnan(x).sum()),
        posinf=int(np.isposinf(x).sum()),
        neginf=int(np.isneginf(x).sum()),
        zeros=int((x == 0).sum()),
        subnormals=int(((x != 0) & (abs(x) < tiny)).sum()),
        zero_rows=int((x.reshape(len(x), -1) == 0).all(axis=1).sum()) if x.ndim >= 2 and x.size else 0,
    )
    if not finite.size:
        return counts
    unit = _unit(finite)
    scaled = finite * (1 / unit)
    # As a shift of the first element, so that a mean of equal values is that value and their spread is zero.
    shift = scaled.flat[0] if scaled.min() > 0 or scaled.max() < 0 else 0.0
    mean = shift + (scaled - shift).mean()
    return counts.merge(
        Moments(
            mean=float(mean) * unit,
            std=float(np.sqrt(np.square(scaled - mean).mean())) * unit,
            min=float(finite.min()),
            max=float(finite.max()),
            mean_abs=float(abs(scaled).mean()) * unit,
        )
    )


def pair_of(x: Values, y: Values) -> Pair:
    """How two arrays of one shape relate."""
    is_complex = any(map(np.iscomplexobj, (x, y)))
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    a, b = modulus(x, is_complex), modulus(y, is_complex)
    with np.errstate(over="ignore", under="ignore"):
        quotients = a[b != 0] / b[b != 0]
    quotients = quotients[np.isfinite(quotients)]
    zero = b == 0
    signed = (a != 0) & ~zero if not is_complex else np.zeros_like(zero)
    unit_x, unit_y = _unit(a), _unit(b)
    u, w = x * (1 / unit_x), y * (1 / unit_y)
    norm_u, norm_w = (float(np.sqrt(np.square(abs(each)).sum())) for each in (u, w))
    dot = float((np.conj(u) * w).real.sum())
    unit = _unit(quotients)
    return Pair(
        n=both.size,
        defined=quotients.size,
        x_by_zero=int((zero & (a != 0)).sum()),
        zero_by_zero=int((zero & (a == 0)).sum()),
        nonfinite=both.size - quotients.size - int(zero.sum()),
        mean=float((quotients * (1 / unit)).mean()) * unit if quotients.size else None,
        min=float(quotients.min()) if quotients.size else None,
        max=float(quotients.max()) if quotients.size else None,
        mean_abs=float(abs(quotients * (1 / unit)).mean()) * unit if quotients.size else None,
        norm_x=norm_u * unit_x,
        norm_y=norm_w * unit_y,
        cosine=dot / norm_u / norm_w if norm_u and norm_w else None,
        equal_signs=int((signed & ((a > 0) == (b > 0))).sum()),
        signed=int(signed.sum()),
    )


def adam_of(g: Values, m: Values | None, v: Values, settings: AdamSettings) -> Adam:
    """How a gradient stands to Adam's moments of it."""
    epsilon, m_scale, v_scale, lr = settings
    v = np.real(v).astype(np.float64)
    defined = np.isfinite(g) & np.isfinite(v) & (v >= 0)
    if m is not None:
        defined &= np.isfinite(m)
    root = np.sqrt(v[defined]) * np.sqrt(v_scale)
    count = int(defined.sum())
    rms = step = None
    if count:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            quotients = abs(g[defined]) / np.maximum(root, epsilon)
            quotients[(g[defined] == 0) & (np.maximum(root, epsilon) == 0)] = 0.0  # ε = 0, and nothing happened yet
            rms = float(np.sqrt(np.square(quotients).mean()))
            if m is not None and lr == lr:
                steps = abs(m[defined]) * m_scale / (root + epsilon)
                steps[(m[defined] == 0) & (root + epsilon == 0)] = 0.0
                step = lr * float(np.sqrt(np.square(steps).mean()))
    return Adam(n=defined.size, defined=count, below_epsilon=int((root < epsilon).sum()), rms=rms, step=step)


def histogram_of(values: Values) -> Histogram:
    """How many elements have which power of two."""
    x = modulus(values)
    exponents = np.frexp(x[np.isfinite(x) & (x != 0)])[1] - 1
    if not exponents.size:
        return Histogram(0, ())
    low = int(exponents.min())
    return Histogram(low, tuple(np.bincount(exponents - low).tolist()))


def modulus(values: Values, is_complex: bool | None = None) -> Values:
    """The values as float64; of complex numbers the modulus."""
    if np.iscomplexobj(values) if is_complex is None else is_complex:
        with np.errstate(over="ignore", invalid="ignore"):
            return abs(values)
    return values


def _unit(values: Values) -> float:
    """A power of two near the largest absolute value: divided by it, squares neither overflow nor vanish."""
    largest = float(abs(values).max()) if values.size else 0.0
    return float(2.0 ** np.clip(np.frexp(largest)[1], -1021, 1021)) if largest else 1.0


# --- as a back end ---


def measure(leaves: Sequence[Operands], histograms: bool = False) -> tuple[Matrix, Histograms | None]:
    """See `Backend.measure`."""
    with np.errstate(all="ignore"):  # what does not fit is counted so
        return _measured(leaves, histograms)


def _measured(leaves: Sequence[Operands], histograms: bool) -> tuple[Matrix, Histograms | None]:
    matrix = empty_matrix(len(leaves))
    found: Histograms = []
    for line, leaf in zip(matrix, leaves, strict=True):
        arrays = [None if each is None else plain(each) for each in leaf[:5]]
        sections: dict[str, Any] = {}
        powers: list[Histogram | None] = [None, None, None]
        for parts in _blocks(arrays):
            for name, section in _sections(parts, leaf.adam).items():
                sections[name] = sections[name].merge(section) if name in sections else section
            if histograms:
                for i, part in enumerate(parts[:3]):
                    if part is not None:
                        one, before = histogram_of(_wide(part)), powers[i]
                        powers[i] = one if before is None else before.merge(one)
        for name, array in zip(("parameter", "gradient", "update"), arrays, strict=False):
            if array is not None and array.values.ndim >= 2:
                rows = _zero_rows(array.values)
                section = sections[name]
                sections[name] = section.merge(Moments(zero_rows=rows - section.zero_rows))
        for name, section in sections.items():
            values = (getattr(section, field) for field in section.names())
            line[SPANS[name]] = [np.nan if value is None else value for value in values]
        found.append((powers[0], powers[1], powers[2]))
    return matrix, found if histograms else None


def _sections(parts: Sequence[Plain | None], settings: AdamSettings | None) -> dict[str, Moments | Pair | Adam]:
    p, g, u, m, v = (None if part is None else _wide(part) for part in parts)
    found: dict[str, Moments | Pair | Adam] = {}
    for name, values, part in (("parameter", p, parts[0]), ("gradient", g, parts[1]), ("update", u, parts[2])):
        if values is not None and part is not None:
            found[name] = moments_of(values, part.tiny)
    if p is not None and g is not None:
        found["ratio"] = pair_of(p, g)
    if u is not None and p is not None:
        found["update_ratio"] = pair_of(u, p)
    if settings is not None and g is not None and v is not None:
        found["adam"] = adam_of(g, m, v, settings)
    return found


def _wide(part: Plain) -> Values:
    with np.errstate(over="ignore", invalid="ignore"):
        return part.values.astype(np.complex128 if part.values.dtype.kind == "c" else np.float64)


def _zero_rows(values: Values) -> int:
    """By row, in slices that are small: the blocks of a leaf may cut its rows."""
    if not values.size:
        return 0
    together = max(1, BLOCK * len(values) // values.size)
    slices = (values[i : i + together] for i in range(0, len(values), together))
    return sum(int((part == 0).all(axis=tuple(range(1, part.ndim))).sum()) for part in slices)


def _blocks(arrays: Sequence[Plain | None]) -> Iterator[list[Plain | None]]:
    """Views of the arrays, all cut in the same way."""
    present = [array for array in arrays if array is not None]
    for parts in _cut(tuple(array.values for array in present)):
        cut = iter(zip(parts, present, strict=True))
        yield [None if array is None else Plain(*_with_tiny(next(cut))) for array in arrays]


def _with_tiny(part: tuple[Values, Plain]) -> tuple[Values, float]:
    return part[0], part[1].tiny


def _cut(arrays: tuple[Values, ...]) -> Iterator[tuple[Values, ...]]:
    """The first axis that can be halved is, until the parts are small enough, whatever the strides."""
    waiting = [arrays]
    while waiting:
        arrays = waiting.pop()
        shape = arrays[0].shape
        if arrays[0].size <= BLOCK:
            yield arrays
            continue
        axis = next(axis for axis, length in enumerate(shape) if length > 1)
        before, half = (slice(None),) * axis, shape[axis] // 2
        parts = (*before, slice(half, None)), (*before, slice(half))
        waiting.extend(tuple(array[part] for array in arrays) for part in parts)

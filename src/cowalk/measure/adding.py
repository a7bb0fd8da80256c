"""Adding gradients into sums, and measuring them in the same pass over memory.

With a compensation a sum is a pair of numbers, about twice as exact as one. What an addition lost to rounding (found by
Knuth's TwoSum) goes into the compensation, and the pair is put in order after each gradient: the sum alone is the whole,
rounded. Kahan's and Neumaier's summations were not enough: of Kahan's a gradient that is much larger than the sum wipes
out what was lost so far, and Neumaier's sum is not right without its compensation.

The extension adds arrays in CPU memory where they lie. Without it, NumPy does the same in blocks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from cowalk.frameworks.numpy import is_inexact
from cowalk.measure import native
from cowalk.measure.arrays import is_tensor, plain, written_out

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUM_TYPES = ("float32", "float64", "complex64", "complex128")
"""The dtypes that can be added to."""
BLOCK = 1 << 16
"""How many elements NumPy adds at once."""


class Addend(NamedTuple):
    """A gradient and where it is added."""

    sum: Any
    """A NumPy array or a CPU tensor of torch's, of one of `SUM_TYPES`, in C order without gaps; it is written."""
    compensation: Any
    """An array like the sum, zero at the beginning, for what rounding lost; or None. It is written."""
    gradient: Any
    """An array of the same shape: of any framework, of any inexact dtype that the sum's holds, of any strides; only read."""


def add(addends: Sequence[Addend], factor: float, threads: int | None = None) -> NDArray[np.float64]:
    """Do sum += factor · gradient for each addend, in the arithmetic of the sum's dtype.

    Returns the 2-norm of each gradient (of complex ones, of the moduli), before the factor, right to 1e-6 whatever its
    magnitude; NaN where a gradient has a NaN, or else infinity where it has one. The norms do not depend on the number of
    threads.

    A sum that becomes infinite or NaN stays so; its compensation is zero then.

    Raises:
        ValueError: a sum or a compensation cannot be written in place, arrays that are written overlap others in memory,
            the arrays of an addend differ in shape, or a gradient's dtype is none that the sum's dtype holds. Nothing has
            been added then.

    >>> import numpy as np
    >>> total = np.zeros(3, np.float32)
    >>> add([Addend(total, None, np.array([3.0, 4.0, 0.0], np.float16))], 0.5)
    array([5.])
    >>> total
    array([1.5, 2. , 0. ], dtype=float32)
    """
    if not native.available():
        return _added_by_numpy(addends, factor)
    extension, level = native.ready()
    norms = np.frombuffer(bytearray(8 * len(addends)), np.float64)  # no array is allocated
    threads = threads or native.threads_by_default()
    if extension.add(addends, factor, norms, threads, level):
        return norms
    kept: list[Any] = []  # what was written out lives as long as it is read
    as_seen = [
        (_in_place(i, "sum", total), _compensation(i, lost), _prepared(i, gradient, kept))
        for i, (total, lost, gradient) in enumerate(addends)
    ]
    if not extension.add(as_seen, factor, norms, threads, level):
        raise ValueError("the memory of an addend cannot be read")
    return norms


def _prepared(i: int, gradient: Any, kept: list[Any]) -> Any:
    _checked_name(i, gradient)
    return native.prepared(gradient, kept)


def _in_place(i: int, role: str, array: Any) -> NDArray[Any]:
    """A sum or a compensation as a view of its memory."""
    if is_tensor(array) and _is_plain(array):
        return array.detach().numpy()
    if isinstance(array, np.ndarray) and _name(array) in SUM_TYPES and array.dtype.isnative:
        return cast("NDArray[Any]", array).view(np.ndarray)
    raise ValueError(
        f"addend {i}: its {role} is {_described(array)}; a NumPy array or a CPU tensor of torch's can be added to, "
        f"of {', '.join(SUM_TYPES[:-1])} or {SUM_TYPES[-1]}"
    )


def _compensation(i: int, array: Any) -> NDArray[Any] | None:
    return None if array is None else _in_place(i, "compensation", array)


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor's numbers lie in CPU memory as it means them, in a dtype of NumPy's."""
    strided = tensor.device.type == "cpu" and tensor.layout is sys.modules["torch"].strided
    return (
        strided
        and _name(tensor) in SUM_TYPES
        and not (tensor.is_conj() or tensor.is_neg() or hasattr(tensor, "to_local"))
    )


def _described(array: Any) -> str:
    dtype = getattr(array, "dtype", None)
    return f"a {type(array).__module__}.{type(array).__qualname__}" + (f" of {dtype}" if dtype is not None else "")


def _name(array: Any) -> str:
    """What NumPy calls the dtype, of tensors too."""
    return str(array.dtype).removeprefix("torch.") if is_tensor(array) else array.dtype.name


def _checked_name(i: int, gradient: Any) -> str:
    """The name of a gradient's dtype, if it is one that can be read."""
    if is_tensor(gradient):
        readable = (name := _name(gradient)) in native.TYPE_CODES or name in ("complex32", "qint8", "quint8", "qint32")
    else:
        dtype = getattr(gradient, "dtype", None)
        readable = isinstance(dtype, np.dtype) and is_inexact(cast("Any", dtype)) and native.is_known(gradient)
    if not readable:
        raise ValueError(f"addend {i}: its gradient is {_described(gradient)}, which is no type of gradients")
    return _name(gradient)


# --- without the extension ---


class _Addition(NamedTuple):
    total: NDArray[Any]
    lost: NDArray[Any] | None
    gradient: Any
    """A strided CPU tensor, or a NumPy array."""


def _added_by_numpy(addends: Sequence[Addend], factor: float) -> NDArray[np.float64]:
    additions = [_checked(i, addend) for i, addend in enumerate(addends)]
    _check_memory(additions)
    with np.errstate(all="ignore"):  # what overflows is infinite, as it is everywhere
        return np.array([_added(addition, factor) for addition in additions], np.float64)


def _checked(i: int, addend: Addend) -> _Addition:
    total, lost = _in_place(i, "sum", addend.sum), _compensation(i, addend.compensation)
    for role, array in (("sum", total), ("compensation", lost)):
        if array is None:
            continue
        if not array.flags.c_contiguous:
            raise ValueError(f"addend {i}: its {role} does not lie in C order without gaps")
        if not array.flags.aligned:
            raise ValueError(f"addend {i}: its {role} does not begin at a multiple of its numbers' size")
        if not array.flags.writeable:
            raise ValueError(f"addend {i}: its {role} is read-only")
    if lost is not None and (lost.dtype != total.dtype or lost.shape != total.shape):
        raise ValueError(f"addend {i}: its compensation and its sum differ in type or shape")
    name, gradient = _checked_name(i, addend.gradient), addend.gradient
    if tuple(gradient.shape) != total.shape:
        raise ValueError(f"addend {i}: its gradient and its sum have different shapes")
    if name.startswith("complex") and total.dtype.kind != "c":
        raise ValueError(f"addend {i}: its gradient is of {name}, its sum of {total.dtype}, which is real")
    if name in ("float64", "complex128") and total.dtype.name not in ("float64", "complex128"):
        raise ValueError(f"addend {i}: its gradient is of {name}, which is wider than its sum's {total.dtype}")
    return _Addition(total, lost, written_out(gradient).cpu() if is_tensor(gradient) else np.asarray(gradient))


def _check_memory(additions: Sequence[_Addition]) -> None:
    """Nothing that is written may overlap anything else."""
    memory = [
        (*_memory(array), i, array is not addition.gradient)
        for i, addition in enumerate(additions)
        for array in addition
        if array is not None and addition.total.size
    ]
    end, end_of_written, last = 0, 0, 0
    for begin, stop, i, written in sorted(memory, key=lambda each: each[:2]):
        if begin < (end if written else end_of_written):
            raise ValueError(f"addends {last} and {i}: a sum or a compensation overlaps another array in memory")
        if stop > end:
            end, last = stop, i
        if written:
            end_of_written = max(end_of_written, stop)


def _memory(array: Any) -> tuple[int, int]:
    """The addresses where an array begins and ends, whichever way its axes run."""
    if is_tensor(array):
        size = array.element_size()
        address, strides = array.data_ptr(), [stride * size for stride in array.stride()]
    else:
        address, size, strides = array.ctypes.data, array.itemsize, array.strides
    reaches = [(length - 1) * stride for length, stride in zip(array.shape, strides, strict=True)]
    return address + sum(min(reach, 0) for reach in reaches), address + size + sum(max(reach, 0) for reach in reaches)


def _added(addition: _Addition, factor: float) -> float:
    total, lost, gradient = addition
    norms: list[float] = []
    for block in _blocks(total.shape):
        values = plain(gradient[block]).values
        parts = _parts(values)
        # Part by part: a product of complex numbers would make NaN of infinity.
        into = _parts(total[block])[: len(parts)]
        losses = _parts(lost[block]) if lost is not None else [None, None]
        norms += [_added_block(*each, factor) for each in zip(into, losses, parts, strict=False)]
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def _parts(values: Any) -> list[NDArray[Any]]:
    """Views of the real and the imaginary parts."""
    return [values.real, values.imag] if np.iscomplexobj(values) else [values]


def _added_block(total: NDArray[Any], lost: NDArray[Any] | None, values: NDArray[Any], factor: float) -> float:
    """Adds real numbers; returns their norm."""
    gradient = values.astype(total.dtype)
    addend = gradient * total.dtype.type(factor)
    if lost is None:
        total += addend
    else:
        after = total + addend
        added = after - total
        loss = _finite_or_zero((total - (after - added)) + (addend - added) + lost)
        total[...] = after + loss
        lost[...] = _finite_or_zero(loss - (total - after))
    sizes = abs(gradient.astype(np.float64))
    largest = float(sizes.max(initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    scale = math.ldexp(1.0, -min(max(math.frexp(largest)[1], -1000), 1000))
    return math.sqrt(float(np.square(sizes * scale).sum())) / scale


def _finite_or_zero(loss: NDArray[Any]) -> NDArray[Any]:
    """Beside a sum that is infinite or NaN nothing is lost: the difference of infinities would make it NaN for ever."""
    return np.where(np.isfinite(loss), loss, 0)


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Slices of an array of a shape, small enough: the first axis that can be halved is."""
    waiting = [tuple((0, length) for length in shape)]
    while waiting:
        ends = waiting.pop()
        if math.prod(stop - start for start, stop in ends) <= BLOCK:
            yield *(slice(*each) for each in ends), ...
            continue
        axis = next(axis for axis, (start, stop) in enumerate(ends) if stop - start > 1)
        start, stop = ends[axis]
        half = (start + stop) // 2
        waiting += [(*ends[:axis], each, *ends[axis + 1 :]) for each in ((half, stop), (start, half))]

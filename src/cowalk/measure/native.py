"""The native back end: arrays in CPU memory, of torch, NumPy and JAX, measured where they lie.

Most arrays are seen by the extension itself. The rest is prepared here: what can be seen under another name is described by
address, and only what has no plain memory (sparse, quantised, conjugated, of a foreign byte order) is written out, leaf by leaf.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np

from cowalk.frameworks.numpy import is_inexact
from cowalk.measure.arrays import is_tensor, written_out
from cowalk.measure.backend import Histogram, Histograms, Matrix, Operands, empty_matrix
from cowalk.tree import CowalkError, engine

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CODES = {
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "bfloat16": (4, 16),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "float8_e3m4": (7, 8),
    "float8_e4m3": (8, 8),
    "float8_e4m3b11fnuz": (9, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
    "float6_e2m3fn": (15, 8),
    "float6_e3m2fn": (16, 8),
    "float4_e2m1fn": (17, 8),
}
"""DLPack's codes. NumPy keeps the six- and four-bit floats in a byte each; torch's packed ones are not among them."""

TYPE_CODES = {name: code << 8 | bits for name, (code, bits) in _CODES.items()}

_dtype_codes: dict[np.dtype[Any], int] = {
    np.dtype(name): TYPE_CODES[name] for name in ("float16", "float32", "float64", "complex64", "complex128")
}
_level = -1


class Extension(Protocol):
    """What the extension offers for measuring and adding; native/measuring.cpp and native/adding.cpp say more."""

    def measure(
        self, leaves: Sequence[Any], matrix: Matrix, threads: int, level: int, histograms: bool, /
    ) -> tuple[tuple[tuple[int, tuple[int, ...]] | None, ...], ...] | Literal[False] | None: ...

    def add(
        self, addends: Sequence[Any], factor: float, norms: NDArray[np.float64], threads: int, level: int, /
    ) -> bool: ...

    def know_arrays(self, ndarray: type, codes: Mapping[Any, int], tensors: Any, exchange: Any, /) -> None: ...

    def instruction_sets(self) -> tuple[str, ...]: ...


def available() -> bool:
    """Whether the extension is there."""
    return engine.NATIVE is not None


def _extension() -> Extension:
    if engine.NATIVE is None:
        raise CowalkError(f"the native back end is not there: {engine.native_state}")
    return cast("Extension", engine.NATIVE)


def levels() -> tuple[str, ...]:
    """The instruction sets that can be chosen here, the least first."""
    return _extension().instruction_sets() if available() else ()


def set_level(name: str | None) -> None:
    """Choose an instruction set; None is the best. The environment variable COWALK_SIMD does so at the start.

    Raises:
        ValueError: there is none of that name here.
    """
    global _level
    if name is not None and name not in levels():
        raise ValueError(f"COWALK_SIMD or set_level: this processor has {', '.join(levels())}, not {name!r}")
    _level = levels().index(name) if name is not None else len(levels()) - 1


def threads_by_default() -> int:
    """The processors this process may run on; fewer where OMP_NUM_THREADS says so, as it does for torch."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(count, int(wanted)) if wanted.isdecimal() and int(wanted) else count


def measure(
    leaves: Sequence[Operands], histograms: bool = False, threads: int | None = None
) -> tuple[Matrix, Histograms | None]:
    """See `Backend.measure`. The result does not depend on the number of threads.

    Raises:
        CowalkError: there is no extension.
    """
    found = measure_seen(leaves, histograms, threads)
    if found is not None:
        return found
    kept: list[Any] = []  # what was written out lives as long as it is read
    as_seen = [(*(prepared(array, kept) for array in leaf[:5]), leaf[5]) for leaf in leaves]
    found = measure_seen(as_seen, histograms, threads)
    if found is None:
        unknown = [array for leaf in leaves for array in leaf[:5] if array is not None and not is_known(array)]
        if not unknown:
            raise ValueError("the arrays of a leaf have one shape")
        raise CowalkError(f"a {type(unknown[0]).__name__} of {unknown[0].dtype} cannot be read from memory")
    return found


def measure_seen(
    leaves: Sequence[Any], histograms: bool, threads: int | None
) -> tuple[Matrix, Histograms | None] | None:
    """The same of arrays all of which the extension can see by itself; None if there are others."""
    native, level = ready()
    matrix = empty_matrix(len(leaves))
    found = native.measure(leaves, matrix, threads or threads_by_default(), level, histograms)
    if found is None:
        return matrix, None
    if found is False:
        return None
    return matrix, [cast("Any", tuple(None if each is None else Histogram(*each) for each in three)) for three in found]


def ready() -> tuple[Extension, int]:
    """The extension, knowing which types it may see by itself, and the number of the instruction set that is chosen."""
    native = _extension()
    if _level < 0:
        set_level(os.environ.get("COWALK_SIMD") or None)
    _introduce(native)
    return native, _level


_introduced: tuple[Any, ...] = ()


def _introduce(native: Extension) -> None:
    """Tell the extension which types it may see by itself; again once torch has come."""
    global _introduced
    torch = sys.modules.get("torch")
    tensors = exchange = None
    if torch is not None and hasattr(torch, "nn"):
        tensors = (torch.Tensor, torch.nn.Parameter)
        exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if not _introduced or (tensors, exchange) != _introduced[1:]:
        native.know_arrays(np.ndarray, _dtype_codes, tensors, exchange)
        _introduced = (True, tensors, exchange)


# --- JAX ---

_on_this_cpu: dict[Any, bool] = {}


def is_local_jax(array: Any) -> bool:
    """Whether a JAX array lies in this process's CPU memory as one piece."""
    sharding = array.sharding
    known = _on_this_cpu.get(sharding)
    if known is None:
        devices = list(sharding.device_set)
        known = _on_this_cpu[sharding] = len(devices) == 1 and devices[0].platform == "cpu"
    return known


# --- what has to be prepared ---


def _code_of(dtype: Any) -> int | None:
    code = _dtype_codes.get(dtype)
    if code is None and isinstance(dtype, np.dtype) and dtype.isnative and is_inexact(dtype):
        code = TYPE_CODES.get(dtype.name)
        if code is not None:
            _dtype_codes[dtype] = code
    return code


def is_known(array: Any) -> bool:
    """Whether the numbers of an array, not of torch's, are of a type that the extension reads, or fits without loss."""
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        return True  # Python's own numbers
    return dtype.kind in "biu" or _code_of(dtype if dtype.isnative else dtype.newbyteorder("=")) is not None


def prepared(array: Any, kept: list[Any]) -> Any:
    """An array as the extension can see it, if it can; what has to live as long as that is read is put into `kept`."""
    if array is None or type(array) is tuple:
        return array
    if is_tensor(array):
        return _prepared_tensor(array, kept)
    if type(array) is np.ndarray and array.dtype in _dtype_codes:
        return array
    values = np.asarray(array)  # of JAX a view; a copy only where its layout is none of NumPy's
    if _code_of(values.dtype) is None:
        values = values.astype(_wide(values.dtype))
    kept.append(values)
    return values.view(np.ndarray)


def _wide(dtype: np.dtype[Any]) -> Any:
    """The type in which the extension reads numbers of a dtype that it does not know: a foreign byte order, integers."""
    if dtype.kind in "biu":
        return np.float64
    return dtype.newbyteorder("=")


def _prepared_tensor(tensor: Any, kept: list[Any]) -> Any:
    torch = sys.modules["torch"]
    with torch.no_grad():
        tensor = written_out(tensor).cpu()
        if tensor.dtype == torch.complex32:
            tensor = tensor.to(torch.complex64)
        elif not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            tensor = tensor.to(torch.float64)
    code = TYPE_CODES.get(str(tensor.dtype).removeprefix("torch."))
    if code is None:
        return tensor
    kept.append(tensor)
    size = tensor.element_size()
    return tensor.data_ptr(), code, tuple(tensor.shape), tuple(stride * size for stride in tensor.stride())

"""Arrays of any framework as NumPy arrays: a view of their memory wherever there is one, and a copy only where there is none.

torch's narrow floats, which NumPy has no name for, are widened to float32; their own smallest normal number goes along.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cowalk.frameworks.numpy import is_inexact

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Plain(NamedTuple):
    """An array that NumPy can read, and the smallest normal number of the dtype that it came from."""

    values: NDArray[Any]
    tiny: float


def is_tensor(array: Any) -> bool:
    """Whether an array is torch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def plain(array: Any) -> Plain:
    """An array of any framework for NumPy."""
    if is_tensor(array):
        return _plain_tensor(array)
    values = np.asarray(array)
    return Plain(values, tiny(values.dtype))


def tiny(dtype: np.dtype[Any]) -> float:
    """The smallest normal number of a dtype; 0.0 where there are no subnormal ones."""
    if dtype.kind in "fc":
        return float(np.finfo(dtype).smallest_normal)
    if is_inexact(dtype):
        import ml_dtypes  # what made this dtype

        info = ml_dtypes.finfo(dtype)
        return float(info.smallest_normal) if info.smallest_subnormal < info.smallest_normal else 0.0
    return 0.0


def local(tensor: Any) -> Any:
    """This process's part of a tensor that is distributed over several (DTensor); any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def written_out(tensor: Any) -> Any:
    """A tensor without its history, over plain memory: sparse and quantised ones are written out, views read as they mean."""
    torch = sys.modules["torch"]
    tensor = local(tensor.detach())
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()  # implicit zeros are zeros
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.resolve_conj().resolve_neg()


def _plain_tensor(tensor: Any) -> Plain:
    torch = sys.modules["torch"]
    tensor = written_out(tensor).cpu()
    least = tensor_tiny(tensor.dtype)
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    elif tensor.dtype.is_floating_point and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)
    return Plain(tensor.numpy(), least)


def tensor_tiny(dtype: Any) -> float:
    """The smallest normal number of a torch dtype; 0.0 where there are no subnormal ones."""
    torch = sys.modules["torch"]
    if not (dtype.is_floating_point or dtype.is_complex) or dtype == getattr(torch, "float8_e8m0fnu", None):
        return 0.0
    return float(torch.finfo(dtype).smallest_normal)

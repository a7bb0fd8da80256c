"""Torch tensors: leaves with identity. Some have no values (lazy, meta), no plain memory (sparse, nested), or only a trace."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from cowalk.frameworks.numpy import overlap
from cowalk.tree.kinds import Leaf

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_numeric(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor exists only inside of torch.func (vmap, grad)."""
    functorch: Any = torch._C._functorch  # noqa: SLF001  # pyright: ignore  (there is no public way)
    return functorch.is_functorch_wrapped_tensor(tensor)


def _is_traced(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or is_wrapped(tensor)


def _no_memory(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no memory that could be read or written, or None."""
    if isinstance(tensor, UninitializedTensorMixin):
        return "the parameter is lazy and has no shape yet; run the model once"
    if tensor.device.type == "meta":
        return "the tensor is on the meta device and has no values"
    return None


def _is_strided(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided and not tensor.is_nested
    )  # a nested tensor calls itself strided, but has no strides


def _unwritable(tensor: torch.Tensor) -> str | None:
    reason = _no_memory(tensor)
    if reason is not None:
        return reason
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode, outside of which it cannot be written"
    if tensor.is_nested and tensor.layout is torch.strided:
        return "it is a nested tensor without one shape; those of layout torch.jagged can be written"
    if _is_strided(tensor) and not is_wrapped(tensor):
        return overlap(tuple(tensor.shape), tensor.stride())
    return None


def _misfit(tensor: torch.Tensor, value: Any) -> str | None:
    try:
        made = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return f"the result is a {type(value).__name__}, of which no tensor can be made"
    reason = _no_memory(made)
    if reason is not None:
        return f"the result has no values: {reason}"
    if isinstance(tensor, FakeTensor) and not isinstance(made, FakeTensor):
        return "the tensor is a fake one, which holds no values; write within its FakeTensorMode"
    if made.layout != tensor.layout or made.is_nested != tensor.is_nested:
        return f"the result is {_form(made)}, the tensor {_form(tensor)}"
    if made.shape != tensor.shape:
        return f"the result has shape {tuple(made.shape)}, the tensor {tuple(tensor.shape)}"
    if not torch.can_cast(made.dtype, tensor.dtype):
        return f"the result is {made.dtype}, which a tensor of {tensor.dtype} cannot hold"
    if tensor.layout in _COMPRESSED and made.values().shape != tensor.values().shape:
        return f"the result specifies {made._nnz()} elements, the tensor {tensor._nnz()}"  # noqa: SLF001
    return None


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.layout}, nested" if tensor.is_nested else str(tensor.layout)


def _write(tensor: torch.Tensor, value: Any) -> None:
    with torch.no_grad():
        made = torch.as_tensor(value)
        ours, theirs = _memory(tensor), _memory(made)
        if ours and theirs and ours[0] < theirs[1] and theirs[0] < ours[1]:
            made = made.clone()  # such as its own transpose, which copying would overwrite while reading it
        tensor.copy_(made)


def _memory(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a tensor's values and the one past the last, or None if there is no such thing."""
    if isinstance(tensor, (UninitializedTensorMixin, FakeTensor)) or not _is_strided(tensor) or tensor.numel() == 0:
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # tensors that wrap others
        return None
    if start == 0:
        return None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    memory = _memory(one)
    return memory is not None and memory == _memory(other) and _reading(one) == _reading(other)


def _reading(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor's cells are read as its values: conjugates and negatives are views too."""
    layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return *layout, tensor.is_conj(), tensor.is_neg()


def _span(tensor: torch.Tensor) -> tuple[Hashable, int, int] | None:
    memory = _memory(tensor)
    return None if memory is None else (str(tensor.device), *memory)


TENSOR = Leaf(
    ties=True,
    numeric=is_numeric,
    same=_same,
    unwritable=_unwritable,
    write=_write,
    check=_misfit,
    traced=_is_traced,
    span=_span,
)

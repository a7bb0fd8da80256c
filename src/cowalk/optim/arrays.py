"""What rules need of arrays beside their operators, for NumPy, torch and JAX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from cowalk.measure.arrays import is_tensor
from cowalk.measure.dispatch import is_jax

HALF_EPSILON = 1e-7
"""What ε is raised to in half precision, where 1e-8 would be zero."""


def functions(x: Any) -> Any:
    """The module whose functions take arrays like x: `numpy`, `torch` or `jax.numpy`.

    >>> import numpy, cowalk
    >>> cowalk.optim.functions(numpy.ones(2)).sign(numpy.array([3.0, -2.0])).tolist()
    [1.0, -1.0]
    """
    if isinstance(x, np.ndarray | np.generic):
        return np
    return sys.modules["torch"] if is_tensor(x) else sys.modules["jax.numpy"]


def is_parameter(x: Any) -> bool:
    """Whether an array is a Parameter of torch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.nn.Parameter)


def is_traced(x: Any) -> bool:
    """Whether an array is a tracer of JAX's, which has no value yet."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


def is_complex(x: Any) -> bool:
    """Whether an array is of complex numbers."""
    return x.dtype.is_complex if is_tensor(x) else x.dtype.kind == "c"


def square(x: Any) -> Any:
    """|x|² of each element, a real number."""
    return (x * x.conj()).real if is_complex(x) else x * x


def average(old: Any, new: Any, decay: Any) -> Any:
    """decay · old + (1 − decay) · new."""
    if is_tensor(old) and not is_complex(old):
        return functions(old).lerp(old, new, 1 - decay)
    return decay * old + (1 - decay) * new


def average_square(old: Any, new: Any, decay: Any) -> Any:
    """decay · old + (1 − decay) · |new|²."""
    if is_tensor(new) and not is_complex(new):
        return functions(old).addcmul(old * decay, new, new, value=1 - decay)
    return decay * old + (1 - decay) * square(new)


def zeros(x: Any) -> Any:
    """Zeros like x."""
    return functions(x).zeros_like(x)


def real_zeros(x: Any) -> Any:
    """Zeros like |x|: real where x is complex."""
    return functions(x).zeros_like(x.real if is_complex(x) else x)


def real_full(x: Any, value: float) -> Any:
    """An array like |x| of one value."""
    return functions(x).full_like(x.real if is_complex(x) else x, value)


def sign(x: Any) -> Any:
    """x / |x|, and 0 for 0."""
    if not is_complex(x):
        return functions(x).sign(x)
    size = functions(x).abs(x)
    return x / functions(x).where(size == 0, functions(x).ones_like(size), size)


def is_half(x: Any) -> bool:
    """Whether an array is of half precision, whose least number is 6e-8."""
    return str(x.dtype) in ("float16", "torch.float16")


def raised(epsilon: Any, x: Any) -> Any:
    """ε for arrays like x: in half precision at least 1e-7, unless it is zero."""
    return max(epsilon, HALF_EPSILON) if epsilon != 0 and is_half(x) else epsilon


def _sizes(x: Any) -> Any:
    """|x|, of half precision and narrower in float32, where squares do not overflow."""
    size = functions(x).abs(x)
    return cast(size, "float32") if size.dtype.itemsize < 4 else size


def norm(x: Any, p: float) -> Any:
    """The p-norm of an array, as an array of one number. Nothing overflows or vanishes on the way to it."""
    fs, size = functions(x), _sizes(x)
    if 0 in x.shape:
        return size.sum()
    largest = size.max()
    if p == float("inf"):
        return largest
    unit = fs.where((largest > 0) & fs.isfinite(largest), largest, fs.ones_like(largest))
    return unit * ((size / unit) ** p).sum() ** (1 / p)


def norm_of_norms(norms: Sequence[Any], p: float) -> Any:
    """The p-norm of arrays together, from those of each."""
    lead = norms[0]
    if is_tensor(lead):
        norms = [each.to(lead.device) for each in norms]
    return norm(functions(lead).stack(list(norms)), p)


def cast(x: Any, dtype: Any) -> Any:
    """An array in another dtype, which may be named as NumPy names it; the same array where it has that dtype."""
    if is_tensor(x):
        return x.to(getattr(sys.modules["torch"], dtype) if isinstance(dtype, str) else dtype)
    if isinstance(x, np.ndarray | np.generic):
        return x.astype(dtype, copy=False)
    return x.astype(dtype)


def copied(x: Any, dtype: Any = None) -> Any:
    """An array of its own with the same values, in another dtype if one is named. A JAX array may be shared: it cannot change."""
    if is_tensor(x):
        wanted = x.dtype if dtype is None else getattr(sys.modules["torch"], dtype)
        return x.detach().to(wanted, copy=True)
    if isinstance(x, np.ndarray | np.generic):
        return np.array(x, dtype)
    return x if dtype is None else x.astype(dtype)


def address(x: Any) -> int | None:
    """Where a tensor's values begin; None of arrays that keep their memory, or have none."""
    if not is_tensor(x):
        return None
    try:
        return x.data_ptr()
    except RuntimeError:
        return None


def as_like(gradient: Any, x: Any) -> Any:
    """A gradient as an array of x's framework, without its history; a sparse one is written out."""
    if is_tensor(x):
        torch = sys.modules["torch"]
        if not is_tensor(gradient):
            values = np.asarray(gradient)  # of JAX it is read-only, which torch does not know
            return torch.as_tensor(values if values.flags.writeable else values.copy(), device=x.device)
        if gradient.requires_grad:
            gradient = gradient.detach()
        return gradient if gradient.layout is torch.strided else gradient.to_dense()
    if is_jax(x):
        return gradient if is_jax(gradient) else functions(x).asarray(np.asarray(gradient))
    return gradient if isinstance(gradient, np.ndarray) else np.asarray(gradient)

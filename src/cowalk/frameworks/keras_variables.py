"""Keras variables: boxes whose identity makes a tie, each around memory of its own.

Assignments write into a variable's memory on torch, and jitted steps give it away on JAX. So a new variable never shares it
with the old one: a value that does (f returned what it got, or another array over the same cells) is copied.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

from cowalk.frameworks.framework import keeps_history
from cowalk.tree.kinds import Box, Leaf, kind_of
from cowalk.tree.records import blank, copy_state

BACKEND: str = keras.backend.backend()
ops: Any = keras.ops
# The common base of what users make as keras.Variable and of what other parts of Keras make.
Variable: Any = next(base for base in keras.Variable.__mro__ if base.__module__ == "keras.src.backend.common.variables")


def _open(variable: Any) -> Any:
    return None if variable._value is None else variable.value  # noqa: SLF001  (`value` would run the initialiser)


def _close(variable: Any, content: Any) -> Any:
    new = blank(type(variable))
    copy_state(variable, new)
    content = _stored(variable, content)
    object.__setattr__(new, "_value", content)  # with KERAS_NNX_ENABLED a property over a slot
    if hasattr(content, "shape") and hasattr(content, "dtype"):
        shape = tuple(content.shape)
        vars(new).update(_shape=shape, _ndim=len(shape), _dtype=keras.backend.standardize_dtype(content.dtype))
    return new


def copied(variable: Any) -> Any:
    """An equal variable around a copy of the value."""
    return _close(variable, variable._value)  # noqa: SLF001


def _stored(variable: Any, content: Any) -> Any:
    """A value as the back end keeps it in a variable; what is no array (f may return anything) stays what it is."""
    if isinstance(content, np.ndarray) and BACKEND != "numpy":
        content = ops.convert_to_tensor(content)
    if content is not None and _shares_memory(content, variable._value):  # noqa: SLF001
        content = ops.copy(content)
    return _as_parameter(variable, content) if BACKEND == "torch" else content


def _as_parameter(variable: Any, content: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if not isinstance(content, torch.Tensor):
        return content
    if torch._C._functorch.is_functorch_wrapped_tensor(content):  # noqa: SLF001  (its gradient is still wanted)
        return content
    if keeps_history(content):
        return content
    inexact = content.is_floating_point() or content.is_complex()
    return torch.nn.Parameter(content.detach(), requires_grad=bool(variable.trainable) and inexact)


def _shares_memory(one: Any, other: Any) -> bool:
    if one is other:
        return ops.is_tensor(one)
    address = _address(one)
    return address is not None and address == _address(other)


def _address(array: Any) -> Any:
    """Where the values of an array begin, or None if that is unknown."""
    if BACKEND == "jax":  # distinct arrays may hold one buffer
        try:
            return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        except (AttributeError, RuntimeError, TypeError, ValueError):  # a tracer, a deleted array, no array
            return None
    kind = kind_of(type(array))
    span = kind.span(array) if isinstance(kind, Leaf) and kind.span is not None else None
    return None if span is None else span[:2]


def _check(variable: Any, content: Any) -> str | None:
    """Why a value cannot be assigned to a variable."""
    try:
        shape = tuple(ops.shape(ops.convert_to_tensor(content)))
    except (TypeError, ValueError):
        return f"the result is a {type(content).__name__}, which no variable can hold"
    if shape != tuple(variable.shape):
        return f"the result has shape {shape}, the variable {tuple(variable.shape)}"
    return None


VARIABLE = Box(
    open=_open,
    close=_close,
    put=lambda variable, content: variable.assign(content),
    ties=True,
    trainable=lambda variable: bool(variable.trainable),
    check=_check,
)

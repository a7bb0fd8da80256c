"""`destructure`: the parameters of a model as one flat vector, and the way back."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cowalk.frameworks.framework import framework_of
from cowalk.optim.arrays import cast, copied, functions, is_complex, is_jax, is_tensor
from cowalk.tree import CowalkError, Path, fmap, istrainable, walk


class DestructureError(CowalkError, ValueError):
    """A vector that is not the parameters of the model."""


def destructure(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """All trained parameters of a model as one flat vector, and a function that makes the model of such a vector.

    The vector holds the parameters in the model's order, each row by row, a tied one once; its dtype is one that holds all of
    theirs. The rebuilt model has the parameters' own dtypes, ties, and all else that the model has. Both directions can be
    differentiated, in JAX and in torch: there a model that is rebuilt of a vector that requires a gradient has, in the place of
    Parameters, tensors with a history.

    Returns:
        (vector, rebuild): the vector has shape (n,); `rebuild(vector)` raises DestructureError for another shape. Without a
        parameter the vector is empty, and rebuild gives the model itself.

    >>> import jax, jax.numpy as jnp, cowalk
    >>> model = {"w": jnp.array([[1.0, 2.0]]), "b": jnp.array([3.0], jnp.bfloat16), "name": "fc"}
    >>> vector, rebuild = cowalk.destructure(model)
    >>> vector
    Array([1., 2., 3.], dtype=float32)
    >>> rebuild(vector * 2)["b"].dtype.name, rebuild(vector)["name"]
    ('bfloat16', 'fc')
    >>> jax.grad(lambda v: (rebuild(v)["w"] ** 2).sum())(vector).tolist()
    [2.0, 4.0, 0.0]
    """
    places = [(path, x) for path, (x,) in walk(model, where=istrainable)]
    if not places:
        return np.zeros(0, np.float32), lambda vector: _nothing_to_rebuild(model, vector)
    arrays = [x for _, x in places]
    if any(map(is_jax, arrays)):
        import jax.numpy as jnp

        arrays = [jnp.asarray(x) for x in arrays]
    dtype = functools.reduce(functions(arrays[0]).promote_types, (x.dtype for x in arrays))
    parts = [cast(x.reshape(-1), dtype) for x in arrays]
    vector = functions(parts[0]).concatenate(parts)  # of one array too: the vector is never the parameter's own memory
    shapes = [(path, tuple(x.shape), x.dtype) for path, x in places]
    return vector, lambda vector: _rebuilt(model, shapes, vector)


def _nothing_to_rebuild(model: Any, vector: Any) -> Any:
    if tuple(np.shape(vector)) != (0,):
        raise DestructureError(f"this model has no parameters, but the vector has shape {tuple(np.shape(vector))}")
    return model


def _rebuilt(model: Any, shapes: list[tuple[Path, tuple[int, ...], Any]], vector: Any) -> Any:
    if hasattr(shapes[0][2], "is_complex") and not is_tensor(vector):
        vector = sys.modules["torch"].as_tensor(np.array(vector))
    total = sum(math.prod(shape) for _, shape, _ in shapes)
    if tuple(np.shape(vector)) != (total,):
        raise DestructureError(
            f"the vector has shape {tuple(np.shape(vector))}, and the {len(shapes)} parameters of this model need ({total},)"
        )
    parts: dict[Path, Any] = {}
    begin = 0
    for path, shape, dtype in shapes:
        end = begin + math.prod(shape)
        parts[path] = _part(vector[begin:end], shape, dtype)
        begin = end
    framework = framework_of(model)
    context = framework.with_history if framework is not None else None
    with context() if context is not None else contextlib.nullcontext():
        return fmap(lambda path, _: parts[path], model, where=istrainable, with_path=True)


def _part(flat: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A parameter made of its part of the vector: of its own dtype, in memory of its own."""
    is_real = not (dtype.is_complex if hasattr(dtype, "is_complex") else dtype.kind == "c")
    flat = flat.real if is_real and is_complex(flat) else flat
    made = cast(flat, dtype)
    if is_tensor(made):
        return made.clone().reshape(shape)
    return (made if is_jax(made) else copied(made)).reshape(shape)

"""`gradient`, `value_and_gradient`, `gradients_of`, `optimizer_state`, `trainables`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cowalk.frameworks.framework import Framework, framework_of
from cowalk.tree import CowalkError, Path, istrainable, walk


class FrameworkError(CowalkError, TypeError):
    """A model that belongs to no framework, or to one that cannot do what was asked."""


def gradient(loss: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """The gradient of a loss with respect to every trainable parameter of a model.

    Args:
        loss: `loss(model, *args, **kwargs)`, a scalar.
        model: a torch, Equinox, Flax NNX or Keras model, or any tree of torch tensors or JAX arrays.

    Returns:
        Plain containers (dicts, lists, tuples) under the model's paths. None stands where the loss does not depend on a
        parameter, and at everything that is not trained: missing is not zero. A tied parameter has its whole gradient under
        its first path and None under the others. The model, and its `.grad` fields, are left as they are, but for what the
        loss itself does to it (batch statistics, counters).

    Raises:
        FrameworkError: the model belongs to no framework that differentiates.
        ValueError: the loss is no scalar.

    >>> import jax.numpy as jnp, cowalk
    >>> model = {"w": jnp.array([1.0, 2.0]), "unused": jnp.array([3.0])}
    >>> grads = cowalk.gradient(lambda m, x: ((m["w"] * x) ** 2).sum(), model, 2.0)
    >>> grads["w"].tolist(), grads["unused"]
    ([8.0, 16.0], None)
    """
    return _framework(model).differentiate(loss, model, args, kwargs, False).gradients


def value_and_gradient(
    loss: Callable[..., Any], model: Any, *args: Any, has_aux: bool = False, **kwargs: Any
) -> tuple[Any, Any]:
    """The loss's value and its gradient: `(value, gradients)`, or `((value, aux), gradients)` with `has_aux`.

    With `has_aux`, the loss returns a pair: the scalar, and anything else to be handed back. Otherwise as `gradient`.

    >>> import jax.numpy as jnp, cowalk
    >>> value, grads = cowalk.value_and_gradient(lambda m: (m["w"] ** 2).sum(), {"w": jnp.array([3.0])})
    >>> float(value), grads["w"].tolist()
    (9.0, [6.0])
    """
    found = _framework(model).differentiate(loss, model, args, kwargs, has_aux)
    return ((found.value, found.aux) if has_aux else found.value), found.gradients


def gradients_of(model: Any) -> Any:
    """The gradients that a model's own parameters carry (torch's `.grad`), in the shape that `gradient` gives.

    The arrays are the model's own, not copies: the next backward pass or `zero_grad` may change them.

    Raises:
        FrameworkError: the model belongs to no framework, or its framework keeps gradients apart from parameters (JAX).
    """
    framework = _framework(model)
    if framework.stored_gradients is None:
        raise FrameworkError(
            f"{framework.name} keeps gradients apart from parameters; use cowalk.gradient(loss, model, …), or the tree that "
            "its own grad function returns"
        )
    return framework.stored_gradients(model)


def optimizer_state(model: Any, optimizer: Any) -> Any:
    """An optimizer's state of each parameter, under the model's paths: `{"fc": {"weight": {"exp_avg": …}}}`.

    Parameters are found by identity, never by position. None stands where the optimizer has no state for a parameter. The
    state of one parameter is a dict that walks take for a leaf, so that it stands beside its parameter:
    `for path, (p, g, s) in walk(model, gradients_of(model), optimizer_state(model, optimizer))`.

    Raises:
        FrameworkError: the model's framework keeps optimizer states as trees of their own (Optax): walk them as they are.
    """
    framework = _framework(model)
    if framework.optimizer_state is None:
        raise FrameworkError(f"optimizer states of {framework.name} are trees themselves: walk them as they are")
    return framework.optimizer_state(model, optimizer)


def trainables(model: Any) -> dict[Path, Any]:
    """The arrays of a model that training may change, by path; a tied one once, under its first path.

    >>> import numpy, cowalk
    >>> [str(path) for path in cowalk.trainables({"w": numpy.ones(2), "steps": 3})]
    ['w']
    """
    return {path: leaf for path, (leaf,) in walk(model, where=istrainable)}


def _framework(model: Any) -> Framework:
    found = framework_of(model)
    if found is None:
        raise FrameworkError(
            f"no framework knows how to differentiate a {type(model).__module__}.{type(model).__qualname__}. cowalk knows torch, "
            "JAX (Equinox, Flax NNX, trees of arrays) and Keras; open a class of your own with cowalk.functor"
        )
    return found

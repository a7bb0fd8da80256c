"""What a framework says of itself to the rooms above: which models are its own, and how it differentiates.

Adding a framework is one file with one `Framework`, and one word in `cowalk.frameworks`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cowalk.tree.kinds import leaf, load_imported
from cowalk.tree.paths import Path
from cowalk.tree.walk import Ties


class Differentiated(NamedTuple):
    """What one differentiation gives: the loss's value, its auxiliary output (None without `has_aux`), the gradients.

    `gradients` is made of plain containers under the model's paths (as `fmapstructure` makes them), with None at every leaf
    that the loss does not depend on or that is not trained. A tied parameter has its whole gradient under its first path.
    """

    value: Any
    aux: Any
    gradients: Any


@dataclass(frozen=True, eq=False, slots=True)
class Framework:
    """One framework.

    Attributes:
        name: as users call it.
        owns: whether a model, or a tree of arrays, belongs to this framework.
        differentiate: `differentiate(loss, model, args, kwargs, has_aux)`; `loss(model, *args, **kwargs)` is a scalar, or with
            `has_aux` a pair of a scalar and anything.
        stored_gradients: the gradients that the model's own arrays carry (`.grad`), or None where arrays carry none.
        optimizer_state: the state of an optimizer under the model's paths, or None where states are trees already.
        with_history: a context in which `fmap` puts arrays that have a history into a model as they are, so that gradients go
            through it; None where arrays have none of their own.
        is_pure_jax: whether a loss and its gradient can be compiled together, with the model's arrays as arguments.
        hyperparameters: the settings of an optimizer for each parameter that it owns, by path; None if the object is no optimizer
            of this framework.
    """

    name: str
    owns: Callable[[Any], bool]
    differentiate: Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any], bool], Differentiated]
    stored_gradients: Callable[[Any], Any] | None = None
    optimizer_state: Callable[[Any, Any], Any] | None = None
    hyperparameters: Callable[[Any, Any], dict[Path, Hyperparameters] | None] | None = None
    with_history: Callable[[], AbstractContextManager[None]] | None = None
    is_pure_jax: bool = False


class Hyperparameters(NamedTuple):
    """The settings of an optimizer for one parameter, as far as it has them; `betas` and `step` debias Adam's moments."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    epsilon: float | None = None
    step: float | None = None


@leaf
class ParameterState(dict[str, Any]):
    """An optimizer's state of one parameter, by name. A walk takes it for a leaf, as the parameter is one."""

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The settings that the parameter is updated with, as far as the state knows them."""
        return Hyperparameters()


_frameworks: list[Framework] = []
_keeps_history = ContextVar("keeps_history", default=False)


@contextmanager
def with_history() -> Generator[None]:
    """Within it, tensors with a history that take the place of parameters keep it: they are put there as they are."""
    token = _keeps_history.set(True)
    try:
        yield
    finally:
        _keeps_history.reset(token)


def keeps_history(tensor: Any) -> bool:
    """Whether a torch tensor that takes the place of a parameter is put there as it is."""
    return tensor.grad_fn is not None and _keeps_history.get()


TiedGradients = Literal["total", "per_position"]
"""What stands at the paths of a tied parameter in a tree of gradients: its whole gradient, or parts that are added up."""


def joins_ties(model: Any, grads: TiedGradients | None) -> Ties:
    """How a walk joins the gradients of a tied parameter.

    Where that is not said, by whose gradients they are: those of torch, Keras and NNX are total; trees of NumPy arrays, which
    belong to no framework, have a part for each position.

    Raises:
        ValueError: `grads` is something else.
    """
    if grads not in (None, "total", "per_position"):
        raise ValueError(f"grads= is 'total' or 'per_position', not {grads!r:.60}")
    return "share" if grads == "total" or (grads is None and framework_of(model) is not None) else "sum"


def add_framework(framework: Framework) -> None:
    """Add a framework. The one added last is asked first, so one that builds on another is added after it."""
    _frameworks.insert(0, framework)


def framework_of(model: Any) -> Framework | None:
    """The framework that a model belongs to, or None."""
    load_imported()
    return next((framework for framework in _frameworks if framework.owns(model)), None)

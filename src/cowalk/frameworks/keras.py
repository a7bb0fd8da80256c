"""Keras 3: layers open into their variables and sublayers by name, on the torch and JAX back ends.

A layer's children are its own variables (trainable, non-trainable, states of seed generators) and its sublayers, under the
names that stand in `variable.path`. Equal names are kept apart: a layer's second "w" is "w_1". Input layers, which hold
nothing, are left out. An optimizer's children are its variables.

A new model is made in two steps: each layer is closed as an empty shell, and when all are there, `keras_rewiring` fills them.
No `__init__`, `build`, `from_config` or initialiser runs. A new model is not compiled, whatever the old one was, as with
`keras.models.clone_model`: an optimizer belongs to the variables it was made for.

Losses are differentiated in the variables that are trainable themselves, whatever the `trainable` of the layers above says:
that is what Keras trains. What the loss assigns to other variables (batch statistics, seeds, metrics) is assigned, as it would
be without cowalk.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
from keras.src.backend.common.stateless_scope import in_stateless_scope

from cowalk.frameworks.framework import (
    Differentiated,
    Framework,
    Hyperparameters,
    ParameterState,
    add_framework,
    with_history,
)
from cowalk.frameworks.keras_rewiring import Rewiring, own_variables
from cowalk.frameworks.keras_variables import BACKEND, VARIABLE, Variable
from cowalk.tree.errors import CowalkError
from cowalk.tree.kinds import Branch, Kind, add_finder, istrainable
from cowalk.tree.paths import Key, Path
from cowalk.tree.records import blank
from cowalk.tree.walk import fmapstructure, walk

# Loaded before this file's framework is added: the one added last is asked first.
backend: Any = importlib.import_module(f"cowalk.frameworks.{BACKEND}") if BACKEND in ("torch", "jax") else None

Layer: Any = keras.Layer
Optimizer: Any = keras.Optimizer

# --- layers and optimizers ---


def _by_name(parts: Iterable[Any]) -> dict[Key, Any]:
    """Parts by their names, each part once. The first to have a name keeps it, a later one gets the first free number."""
    unique = list({id(part): part for part in parts}.values())
    taken = Counter(part.name for part in unique)
    children: dict[Key, Any] = {}
    for part in unique:
        name, number = part.name, 0
        while name in children or (number and name in taken):
            number += 1
            name = f"{part.name}_{number}"
        children[name] = part
    return children


def _open_layer(layer: Any) -> dict[Key, Any]:
    sublayers = [each for each in vars(layer).get("_layers", ()) if not isinstance(each, keras.layers.InputLayer)]
    return _by_name([*own_variables(layer), *sublayers])


def _open_optimizer(optimizer: Any) -> dict[Key, Any]:
    return _by_name(optimizer.variables)


_CHILDREN = "_cowalk_children"


def _close(node: Any, children: dict[Key, Any]) -> Any:
    """A shell that holds nothing but its children, until all are closed."""
    new = blank(type(node))
    vars(new)[_CHILDREN] = children
    return new


def _finish(pairs: Sequence[tuple[Any, Any]], renewed: Mapping[int, Any]) -> None:
    # A part that a walk skipped stands for itself in `renewed`.
    wiring = Rewiring({key: new for key, new in renewed.items() if id(new) != key})
    for old, new in pairs:
        wiring.add(old, new)
    for old, new in pairs:
        children = vars(new).pop(_CHILDREN)
        for key, child in (_open_layer if isinstance(old, Layer) else _open_optimizer)(old).items():
            wiring.add_child(child, children[key])
    wiring.add_layers(pairs)


_LAYER = Branch(_open_layer, _close, shared=True, finish=_finish)
_OPTIMIZER = Branch(_open_optimizer, _close, shared=True, finish=_finish)


def _find_keras(cls: type) -> Kind | None:
    """Asked before the kinds of torch and Flax NNX, of whose modules Keras's layers are subclasses on those back ends."""
    if issubclass(cls, Variable):
        return VARIABLE
    if issubclass(cls, Layer):
        return _LAYER
    return _OPTIMIZER if issubclass(cls, Optimizer) else None


add_finder(_find_keras)

# --- gradients ---


def owns(model: Any) -> bool:
    """Whether a model is a Keras layer, or a tree that holds a layer or a variable."""
    return isinstance(model, Layer) or any(True for _ in walk(model, where=(Layer, Variable)))


def differentiate(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> Differentiated:
    """The gradients of a loss in a model's trainable variables."""
    if BACKEND not in ("torch", "jax"):
        raise CowalkError(
            f"cowalk differentiates Keras models on the torch and JAX back ends, not on {BACKEND}; set KERAS_BACKEND before "
            "Keras is imported"
        )
    before = _variables(model)
    if not before:
        raise CowalkError(
            f"{_called(model)} is not built, so it has no variables yet; call it once on data, or call its build(…)"
        )
    found = (_differentiate_jax if BACKEND == "jax" else backend.differentiate)(loss, model, args, kwargs, has_aux)
    made = _variables(model).keys() - before.keys()
    if made:
        raise CowalkError(
            f"{_called(model)} was not fully built: the loss made {', '.join(map(str, sorted(made)[:5]))}, whose gradient is "
            "not known. The variables are there now; call it again"
        )
    return found


def _called(model: Any) -> str:
    return f"the Keras model {model.name!r}" if isinstance(model, Layer) else "this tree of Keras layers"


def _variables(model: Any) -> dict[Path, Any]:
    return {path: variable for path, (variable,) in walk(model, where=Variable)}


class _Scope(keras.StatelessScope):
    """A scope that knows which variables were assigned to: Keras itself only keeps their ids."""

    def __init__(self, values: Iterable[tuple[Any, Any]]) -> None:
        super().__init__(state_mapping=values, collect_losses=True)
        self.assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


def _differentiate_jax(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> Differentiated:
    variables = _variables(model)
    trained = {path: leaf for path, (leaf,) in walk(model, where=istrainable)}
    assigned: list[Any] = []

    def run(values: dict[Path, Any]) -> tuple[Any, Any]:
        mapping = [(variable, values.get(path, variable.value)) for path, variable in variables.items()]
        with _Scope(mapping) as scope:
            value, aux = backend.outcome(loss(model, *args, **kwargs), has_aux)
        assigned[:] = scope.assigned.values()
        return value, (aux, [scope.get_current_value(variable) for variable in assigned])

    found = backend.differentiate_run(run, trained)
    aux, states = found.aux
    for variable, state in zip(assigned, states, strict=True):
        # Inside of a jitted function an assignment would leak a tracer, unless a scope around it catches it.
        if in_stateless_scope() or not backend.is_traced(state):
            variable.assign(state)
    return found._replace(aux=aux, gradients=_under_paths(model, found.gradients))


def _under_paths(model: Any, found: Mapping[Path, Any]) -> Any:
    """Plain containers in the model's shape with what was found at each path; a tie's other paths hold None."""
    return fmapstructure(lambda path, _: found.get(path), model, ties="each", with_path=True)


# --- optimizer states ---


def optimizer_state(model: Any, optimizer: Any) -> Any:
    """What an optimizer keeps for each variable of a model, found by the variable's identity.

    The names are those that Keras gives (momentum, velocity, average, …), or where it gives none those of the optimizer's
    attributes (Adafactor's r, c, v).

    Raises:
        CowalkError: `optimizer` is no Keras optimizer, or it was built for other variables.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if not isinstance(optimizer, Optimizer):
        raise CowalkError(f"expected a Keras optimizer, got {type(optimizer).__name__}")
    owners: list[Any] = list(optimizer._trainable_variables)  # noqa: SLF001
    variables = _variables(model)
    if owners and not {id(owner) for owner in owners} & {id(variable) for variable in variables.values()}:
        raise CowalkError(
            f"this {type(optimizer).__name__} was built for other variables than those of {_called(model)} (before it was "
            "copied or rebuilt?)"
        )
    state: dict[int, dict[str, Any]] = {}
    for attribute, slots in vars(optimizer).items():
        if attribute not in ("_trainable_variables", "_variables") and _are_slots(slots, len(owners)):
            for owner, slot in zip(owners, slots, strict=True):
                if slot is not None:
                    state.setdefault(id(owner), {})[_slot_name(owner, slot, attribute)] = slot.value
    found = {path: ParameterState(state[id(variable)]) for path, variable in variables.items() if id(variable) in state}
    return _under_paths(model, found)


def hyperparameters(model: Any, optimizer: Any) -> dict[Path, Hyperparameters] | None:
    """The settings of each variable that an optimizer was built for."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(optimizer, Optimizer):
        return None
    owned = {id(variable) for variable in optimizer._trainable_variables}  # noqa: SLF001
    beta_1, beta_2 = getattr(optimizer, "beta_1", None), getattr(optimizer, "beta_2", None)
    settings = Hyperparameters(
        lr=float(optimizer.learning_rate),
        betas=None if beta_1 is None or beta_2 is None else (beta_1, beta_2),
        epsilon=getattr(optimizer, "epsilon", None),
        step=float(optimizer.iterations),
    )
    return {path: settings for path, variable in _variables(model).items() if id(variable) in owned}


def _are_slots(value: Any, count: int) -> bool:
    """Whether an attribute of an optimizer is a list with a variable for each trained one (or None)."""
    return (
        isinstance(value, list)
        and len(value) == count
        and any(slot is not None for slot in value)
        and all(slot is None or isinstance(slot, Variable) for slot in value)
    )


def _slot_name(owner: Any, slot: Any, attribute: str) -> str:
    """Keras calls a slot by the path of its owner and its role: "dense_kernel_momentum"."""
    prefix = owner.path.replace("/", "_") + "_"
    return slot.name.removeprefix(prefix) if slot.name.startswith(prefix) else attribute.strip("_")


add_framework(
    Framework(
        "Keras",
        owns,
        differentiate,
        backend.stored_gradients if BACKEND == "torch" else None,
        optimizer_state,
        hyperparameters,
        with_history if BACKEND == "torch" else None,
    )
)

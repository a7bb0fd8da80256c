"""Keras 3: layers open into their variables and sublayers by name, variables are boxes, on the torch and JAX back ends.

Keras ties a model together with references of many kinds (trackers, graph nodes, symbolic tensors), so a new model is made in
two steps: each layer is closed as a shallow copy, and when all are there, every reference in them is turned to the copies.
No `__init__`, `build` or `from_config` runs. A new model is not compiled, whatever the old one was: an optimizer belongs to
the variables it was made for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras.src.backend.common.keras_tensor import KerasTensor
from keras.src.ops.node import Node
from keras.src.ops.operation import Operation
from keras.src.ops.symbolic_arguments import SymbolicArguments
from keras.src.utils.tracking import Tracker

from cowalk.frameworks.framework import Differentiated, Framework, add_framework
from cowalk.tree.errors import CowalkError
from cowalk.tree.kinds import Box, Branch, set_subclass_kind
from cowalk.tree.paths import Key, Path
from cowalk.tree.records import blank
from cowalk.tree.walk import fmapstructure, walk

Layer: Any = keras.Layer
Variable: Any = keras.Variable
BACKEND: str = keras.backend.backend()

# --- variables ---


def _open_variable(variable: Any) -> Any:
    return None if variable._value is None else variable.value  # noqa: SLF001  (`value` would run the initialiser)


def _close_variable(variable: Any, content: Any) -> Any:
    new = object.__new__(type(variable))
    new.__dict__.update(variable.__dict__)
    new.__dict__["_value"] = _as_stored(variable, content)
    return new


def _as_stored(variable: Any, content: Any) -> Any:
    """A value as the back end stores it in a variable: on torch a Parameter stands for a Parameter.

    On JAX, Keras gives a model's arrays away to its jitted steps, so two models must not hold one array.
    """
    if BACKEND == "torch":
        import torch

        if isinstance(content, torch.Tensor) and not isinstance(content, torch.nn.Parameter):
            numeric = content.is_floating_point() or content.is_complex()
            return torch.nn.Parameter(content.detach(), requires_grad=bool(variable.trainable) and numeric)
    elif BACKEND == "jax" and content is variable._value and content is not None:  # noqa: SLF001
        import jax.numpy as jnp

        return jnp.copy(content)
    return content


def _put_variable(variable: Any, content: Any) -> None:
    variable.assign(content)


_common: Any = next(base for base in Variable.__mro__ if base.__module__ == "keras.src.backend.common.variables")
set_subclass_kind(
    _common,
    Box(
        _open_variable,
        _close_variable,
        put=_put_variable,
        ties=True,
        trainable=lambda variable: bool(variable.trainable),
    ),
)

# --- layers ---


def _open_layer(layer: Any) -> dict[Key, Any]:
    own = [*layer._trainable_variables, *layer._non_trainable_variables]  # noqa: SLF001
    parts = [*own, *layer._flatten_layers(include_self=False, recursive=False)]  # noqa: SLF001
    children: dict[Key, Any] = {}
    for part in parts:
        name, number = part.name, 0
        while name in children:  # equal names are kept apart
            number += 1
            name = f"{part.name}_{number}"
        children[name] = part
    return children


def _close_layer(layer: Any, children: dict[Key, Any]) -> Any:
    new = Layer.__new__(type(layer))  # Keras's own `__new__`, which binds `build` to the new layer
    bound = {name: new.__dict__[name] for name in ("build", "quantize") if name in new.__dict__}
    new.__dict__.update(layer.__dict__)
    new.__dict__.update(bound)
    new.__dict__["_cowalk_children"] = [*zip(_open_layer(layer).values(), children.values(), strict=True)]
    return new


# What `compile` sets, and what is traced for one model only.
_COMPILED: dict[str, Any] = {
    "compiled": False,
    **dict.fromkeys(
        (
            "optimizer",
            "_optimizer",
            "loss",
            "_compile_loss",
            "_compile_metrics",
            "_compile_config",
            "_loss_tracker",
            "train_function",
            "test_function",
            "predict_function",
            "_compiled_call_impl",
        )
    ),
}


def _finish_layers(pairs: Sequence[tuple[Any, Any]], renewed: Mapping[int, Any]) -> None:
    """Turn every reference in the new layers to the new parts."""
    copies: dict[int, Any] = {id(old): new for old, new in pairs}
    for _, new in pairs:
        copies.update({id(old): made for old, made in new.__dict__.pop("_cowalk_children", ())})
    copier = _Copier({**renewed, **copies})
    for old, new in pairs:
        copier.turn_attributes(old, new)
    for _, new in pairs:
        _track_for_torch(new)


def _track_for_torch(layer: Any) -> None:
    """On the torch back end a built layer is also a torch module: let Keras list the new parameters for it."""
    if BACKEND == "torch" and layer.__dict__.get("_modules", {}).pop("_torch_params", None) is not None:
        layer._track_variables()  # noqa: SLF001


# What belongs to one model; all else (initialisers, policies, functions) may serve several.
_PARTS: Any = (
    Operation,
    Node,
    SymbolicArguments,
    KerasTensor,
    Tracker,
    keras.Metric,
    keras.random.SeedGenerator,
)


class _Copier:
    """Copies what a Keras model is made of, each thing once; values that belong to no one model are left as they are."""

    def __init__(self, copies: dict[int, Any]) -> None:
        self.copies = copies
        self.alive: list[Any] = []  # ids in `copies` stay good as long as their objects live

    def turn_attributes(self, old: Any, new: Any) -> None:
        for name, value in old.__dict__.items():
            if name in _COMPILED and isinstance(old, keras.Model):
                new.__dict__[name] = _COMPILED[name]
            elif name == "_nodes":
                new.__dict__[name] = {self.node_key(key) for key in value}
            elif name not in ("build", "quantize"):
                new.__dict__[name] = self.copy(value)
        if isinstance(old, keras.Model) and "_metrics" in new.__dict__:
            compiled = {id(old.__dict__.get(name)) for name in ("_loss_tracker", "_compile_metrics")}
            kept = [metric for metric in old._metrics if id(metric) not in compiled]  # noqa: SLF001
            new.__dict__["_metrics"][:] = [self.copy(metric) for metric in kept]

    def node_key(self, key: str) -> str:
        """Keras names the nodes of a functional model by the id of their operation."""
        address, mark, number = key.partition("_ib-")
        new = self.copies.get(int(address)) if mark and address.isdigit() else None
        return key if new is None else f"{id(new)}{mark}{number}"

    def copy(self, value: Any) -> Any:
        found = self.copies.get(id(value))
        if found is not None:
            return found
        if isinstance(value, _common):
            return self.remember(value, _close_variable(value, value._value))  # noqa: SLF001
        if isinstance(value, list | tuple | dict | set):
            return self.copy_container(value)
        if not isinstance(value, _PARTS):
            return value
        new = self.remember(value, blank(type(value)))
        self.turn_attributes(value, new)
        return new

    def remember(self, old: Any, new: Any) -> Any:
        self.alive.append(old)
        self.copies[id(old)] = new
        return new

    def copy_container(self, value: Any) -> Any:
        """A container of the same class with copied items; a tuple only if an item changed (named tuples keep their class)."""
        if isinstance(value, tuple):
            items = [self.copy(item) for item in value]
            changed = any(one is not other for one, other in zip(items, value, strict=True))
            return tuple.__new__(type(value), items) if changed else value
        new = self.remember(value, blank(type(value)))
        if hasattr(value, "__dict__"):
            new.__dict__.update({name: self.copy(held) for name, held in value.__dict__.items()})
        if isinstance(value, dict):
            if isinstance(value, defaultdict):
                new.default_factory = value.default_factory
            for key, held in value.items():
                dict.__setitem__(new, self.copy(key), self.copy(held))
        elif isinstance(value, list):
            list.extend(new, map(self.copy, value))
        else:
            set.update(new, map(self.copy, value))
        return new


set_subclass_kind(Layer, Branch(_open_layer, _close_layer, shared=True, finish=_finish_layers))


# --- gradients ---


def owns(model: Any) -> bool:
    return isinstance(model, Layer)


def differentiate(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> Differentiated:
    """The gradients of a loss in a model's trainable variables. Batch statistics and the like are updated in the model."""
    _check_built(model)
    if BACKEND == "torch":
        from cowalk.frameworks import torch

        return torch.differentiate(loss, model, args, kwargs, has_aux)
    if BACKEND == "jax":
        return _differentiate_jax(loss, model, args, kwargs, has_aux)
    raise CowalkError(f"cowalk differentiates Keras models on the torch and JAX back ends, not on {BACKEND}")


def _check_built(model: Any) -> None:
    if not model.built:
        raise CowalkError(
            f"the Keras model {model.name!r} is not built, so it has no variables yet; call it once, or build it"
        )


def _differentiate_jax(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> Differentiated:
    from cowalk.frameworks.jax import differentiate_run, is_traced, outcome

    variables = {path: variable for path, (variable,) in walk(model, where=_common)}
    trained = {path: variable for path, variable in variables.items() if variable.trainable}
    others = [variable for variable in model.variables if not variable.trainable]

    def run(values: dict[Path, Any]) -> tuple[Any, Any]:
        mapping = [(variable, values[path]) for path, variable in trained.items()]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            value, aux = outcome(loss(model, *args, **kwargs), has_aux)
        return value, (aux, [scope.get_current_value(variable) for variable in others])

    found = differentiate_run(run, {path: variable.value for path, variable in trained.items()})
    aux, states = found.aux
    for variable, state in zip(others, states, strict=True):
        if state is not None and not is_traced(state):
            variable.assign(state)
    return Differentiated(found.value, aux, _under_paths(model, found.gradients))


def _under_paths(model: Any, found: Mapping[Path, Any]) -> Any:
    return fmapstructure(lambda path, _: found.get(path), model, ties="each", with_path=True)


def stored_gradients(model: Any) -> Any:
    from cowalk.frameworks import torch

    return torch.stored_gradients(model)


def optimizer_state(model: Any, optimizer: Any) -> Any:
    """The slot variables of a Keras optimizer, by the identity of the variable they belong to.

    Raises:
        CowalkError: `optimizer` is no Keras optimizer, or it was built for other variables.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if not isinstance(optimizer, keras.Optimizer):
        raise CowalkError(f"expected a Keras optimizer, got {type(optimizer).__name__}")
    owned: list[Any] = list(getattr(optimizer, "_trainable_variables", ()))
    slots = {
        name.lstrip("_"): value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and name not in ("_trainable_variables", "_variables")
        and _are_slots(value, len(owned))
    }
    state = {id(variable): {name: slot[i].value for name, slot in slots.items()} for i, variable in enumerate(owned)}
    found = {path: state[id(variable)] for path, (variable,) in walk(model, where=_common) if id(variable) in state}
    if owned and not found:
        raise CowalkError(f"this {type(optimizer).__name__} was built for other variables than those of {model.name!r}")
    return _under_paths(model, found)


def _are_slots(value: list[Any], count: int) -> bool:
    return len(value) == count > 0 and all(isinstance(slot, _common) for slot in value)


add_framework(
    Framework("Keras", owns, differentiate, stored_gradients if BACKEND == "torch" else None, optimizer_state)
)

"""How new Keras layers are put together: every reference in them is turned from the old parts to the new ones.

A Keras model is held together by references of many kinds: lists and trackers of variables, bound methods, wrapped `build`s,
nodes of a graph and its symbolic tensors. No constructor can be run to make them anew, so each is copied once. What belongs to
a model is copied (its bookkeeping, graph, metrics, seed generators, optimizers, plain containers); what may serve several
(initialisers, policies, activation functions, constants) stays the same object.

A graph can lead out of the model that is copied: a layer remembers every call, also those of models around it. Copied are only
the calls that the copied models themselves are made of.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import keras
from keras.src.ops.symbolic_arguments import SymbolicArguments
from keras.src.utils import tracking

from cowalk.frameworks.keras_variables import Variable, copied
from cowalk.tree.errors import KindError
from cowalk.tree.records import blank
from cowalk.tree.walk import fmap

Layer: Any = keras.Layer
_OBJECTS: tuple[Any, ...] = (
    *(keras.Metric, keras.Optimizer, keras.random.SeedGenerator, keras.KerasTensor),
    *(SymbolicArguments, tracking.Tracker),
)
_CONTAINERS: frozenset[type] = frozenset(
    {list, dict, set, OrderedDict, defaultdict}
    | {cls for name, cls in vars(tracking).items() if name.startswith("Tracked") and isinstance(cls, type)}
)

# What `compile` sets, and what is traced for one model only. A new model is not compiled.
_UNCOMPILED: dict[str, Any] = {
    "compiled": False,
    **dict.fromkeys(
        (
            *("optimizer", "loss", "history", "_compile_loss", "_compile_metrics", "_compile_config", "_loss_tracker"),
            *("train_function", "test_function", "predict_function", "_compiled_call_impl"),
        )
    ),
}


def own_variables(layer: Any) -> list[Any]:
    """The variables that a layer itself holds: trainable, then non-trainable, then the states of its seed generators."""
    state = vars(layer)
    generators = [generator.state for generator in state.get("_seed_generators", ())]
    return [*state.get("_trainable_variables", ()), *state.get("_non_trainable_variables", ()), *generators]


class Rewiring:
    """One rewiring: what each old part has become, and the copies whose contents are still to come."""

    def __init__(self, parts: dict[int, Any]) -> None:
        self.parts = parts  # by the id of the old part
        self.alive: list[Any] = []  # an id is good as long as its object lives
        self.unfilled: list[tuple[Any, Any]] = []
        self.layers: list[Any] = []  # the old ones, also those that are no children
        self.number_of: dict[int, int] = {}  # of each copied node of a graph among the calls of its operation

    # --- the parts ---

    def add(self, old: Any, new: Any) -> None:
        """Say what an old part has become."""
        if self.parts.setdefault(id(old), new) is not new:
            raise KindError(
                f"{type(old).__name__} {getattr(old, 'path', None) or getattr(old, 'name', '')!r} stands at several paths of "
                "a Keras model and got a different result at each. Keras keeps it in one place, so they cannot come apart: "
                "use ties='share', or fmapstructure."
            )
        self.alive.append(old)
        if isinstance(old, Variable):
            self.add_tensor(old, new)

    def add_tensor(self, old: Any, new: Any) -> None:
        """On the torch back end a layer, as a torch module, also holds the tensor in a variable."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(old._value, torch.Tensor):  # noqa: SLF001
            self.parts.setdefault(id(old._value), getattr(new, "_value", new))  # noqa: SLF001

    def add_child(self, old: Any, new: Any) -> None:
        """Say what a child has become. One that a walk left alone is copied: two models share nothing that changes."""
        if old is not new:
            self.add(old, new)
        elif isinstance(old, Variable):
            self.add_variable(old)
        else:
            self.add_operation(old)

    def add_variable(self, variable: Any) -> None:
        if id(variable) not in self.parts:
            self.add(variable, copied(variable))

    def add_operation(self, operation: Any) -> None:
        """Copy a layer or another operation that is no child of a new layer but belongs to its graph."""
        if id(operation) in self.parts:
            return
        self.shell(operation)
        self.layers.append(operation)
        for variable in own_variables(operation):
            self.add_variable(variable)
        for layer in vars(operation).get("_layers", ()):
            self.add_operation(layer)

    def add_layers(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Fill new layers and optimizers, and all that they are made of."""
        for old, new in pairs:
            self.unfilled.append((old, new))
            if isinstance(old, Layer):
                self.layers.append(old)
        functions: list[Any] = []
        for layer in self.layers:  # grows on the way
            if "_operations" in vars(layer):
                functions.append(layer)
            for operation in vars(layer).get("_operations", ()):
                self.add_operation(operation)
            # Such as the functional model inside of a Sequential. On torch it stands among the children of a module.
            for value in [*vars(layer).values(), *vars(layer).get("_modules", {}).values()]:
                if isinstance(value, keras.Function):
                    self.add_operation(value)
        graph = {id(node): node for function in functions for node in _nodes(function)}
        for node in graph.values():
            self.shell(node)
            calls = [id(call) for call in node.operation._inbound_nodes if id(call) in graph]  # noqa: SLF001
            self.number_of[id(node)] = calls.index(id(node))
        while self.unfilled:
            self.fill(*self.unfilled.pop())

    # --- references ---

    def shell(self, old: Any) -> Any:
        """A copy that is filled later: parts may hold each other, and may be nested deeply."""
        new = self.parts[id(old)] = blank(type(old))
        self.alive.append(old)
        self.unfilled.append((old, new))
        return new

    def turn(self, value: Any) -> Any:
        """What takes the place of a value in a new part."""
        if id(value) in self.parts:
            return self.parts[id(value)]
        cls = type(value)
        if cls in _CONTAINERS:
            return self.shell(value)
        if cls in _TURNED:
            return _TURNED[cls](self, value)
        if isinstance(value, tuple):
            items = [self.turn(item) for item in value]
            changed = any(one is not other for one, other in zip(items, value, strict=True))
            return tuple.__new__(cls, items) if changed else value
        if isinstance(value, Variable):  # one that its layer does not track, such as the state of a stateful RNN
            self.add_variable(value)
            return self.parts[id(value)]
        if isinstance(value, _OBJECTS):
            return self.shell(value)
        if not isinstance(value, Layer) and _is_module(value):
            new = fmap(lambda tensor: self.parts.get(id(tensor), tensor), value)
            self.add(value, new)
            return new
        return value

    def turn_method(self, value: Any) -> Any:
        owner = self.parts.get(id(value.__self__), value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)

    def turn_partial(self, value: Any) -> Any:
        keywords = {name: self.turn(argument) for name, argument in value.keywords.items()}
        return partial(self.turn(value.func), *map(self.turn, value.args), **keywords)

    def turn_reference(self, value: Any) -> Any:
        target = value()
        new = None if target is None else self.parts.get(id(target))
        return value if new is None else weakref.ref(new)

    def turn_function(self, value: Any) -> Any:
        """A function whose closure holds a part of the model, such as Keras's wrapper around `build`, or a user's lambda."""
        if not value.__closure__:
            return value
        self.parts[id(value)] = value  # while its own closure is looked at, which may hold it
        cells = tuple(map(self.turn_cell, value.__closure__))
        if all(one is other for one, other in zip(cells, value.__closure__, strict=True)):
            del self.parts[id(value)]
            return value
        new = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        self.parts[id(value)] = new
        self.alive.append(value)
        for name in ("__kwdefaults__", "__qualname__", "__doc__", "__module__", "__annotations__"):
            setattr(new, name, getattr(value, name))
        for name, attribute in vars(value).items():
            setattr(new, name, self.turn(attribute) if callable(attribute) else attribute)
        return new

    def turn_cell(self, cell: Any) -> Any:
        if id(cell) in self.parts:
            return self.parts[id(cell)]
        try:
            content = cell.cell_contents
        except ValueError:  # nothing is in it yet
            return cell
        # Only what is a part itself, or a function over one: a container in a closure may be anybody's.
        new = (
            _TURNED[type(content)](self, content) if type(content) in _TURNED else self.parts.get(id(content), content)
        )
        if new is content:
            return cell
        self.alive.append(cell)
        return self.parts.setdefault(id(cell), types.CellType(new))

    # --- contents ---

    def fill(self, old: Any, new: Any) -> None:
        if isinstance(old, keras.Optimizer):  # without its model it stays with the variables that it was built for
            for variable in old._trainable_variables:  # noqa: SLF001
                self.parts.setdefault(id(variable), variable)
                self.alive.append(variable)
        if hasattr(old, "__dict__"):
            vars(new).update({name: self.turn(value) for name, value in vars(old).items()})
        if isinstance(old, dict):
            if isinstance(old, defaultdict):
                new.default_factory = old.default_factory
            base = OrderedDict if isinstance(old, OrderedDict) else dict
            for key, value in old.items():
                base.__setitem__(new, self.turn(key), self.turn(value))
        elif isinstance(old, list):
            list.extend(new, map(self.turn, old))
        elif isinstance(old, set):
            set.update(new, map(self.turn, old))
        else:
            for cls, fill in _FILLED.items():
                if isinstance(old, cls):
                    fill(self, old, new)

    def fill_operation(self, old: Any, new: Any) -> None:
        for name in ("_inbound_nodes", "_outbound_nodes"):
            calls = vars(old).get(name, ())
            vars(new)[name] = [self.parts[id(call)] for call in calls if id(call) in self.number_of]

    def fill_layer(self, old: Any, new: Any) -> None:
        vars(new).update(_losses=[], _loss_ids=set())  # of the old layer's last call
        if isinstance(old, keras.Model):
            vars(new).update({name: value for name, value in _UNCOMPILED.items() if name in vars(old)})
            vars(new).pop("_compiled_trainable_state", None)

    def fill_function(self, old: Any, new: Any) -> None:
        if "_nodes" in vars(old):  # Keras names the nodes by the id of their operation
            names = {f"{id(self.parts[id(node.operation)])}_ib-{self.number_of[id(node)]}" for node in _nodes(old)}
            vars(new)["_nodes"] = names

    def fill_tensor(self, old: Any, new: Any) -> None:
        history = vars(old).get("_keras_history")
        if history is None:
            return
        calls = vars(history.operation)["_inbound_nodes"] if history.operation is not None else ()
        node = calls[history.node_index] if history.node_index < len(calls) else None
        if id(node) in self.number_of:
            operation, number = self.parts[id(history.operation)], self.number_of[id(node)]
            vars(new)["_keras_history"] = history._replace(operation=operation, node_index=number)
        else:  # made outside of what is copied: here the tensor is where a graph begins
            vars(new)["_keras_history"] = history._replace(operation=None, node_index=0, tensor_index=0)

    def fill_tracker(self, old: Any, new: Any) -> None:
        vars(new)["stored_ids"] = {
            name: {id(self.turn(item)) for item in store} for name, (_, store) in old.config.items()
        }

    def fill_optimizer(self, old: Any, new: Any) -> None:
        new_ids = {id(variable): id(self.turn(variable)) for variable in old._trainable_variables}  # noqa: SLF001
        positions = old._trainable_variables_indices  # noqa: SLF001
        vars(new)["_trainable_variables_indices"] = {new_ids.get(key, key): i for key, i in positions.items()}


_TURNED: dict[type, Callable[[Rewiring, Any], Any]] = {
    types.MethodType: Rewiring.turn_method,
    types.FunctionType: Rewiring.turn_function,
    partial: Rewiring.turn_partial,
    weakref.ref: Rewiring.turn_reference,
}
_FILLED: dict[Any, Callable[[Rewiring, Any, Any], None]] = {
    keras.Operation: Rewiring.fill_operation,
    keras.Layer: Rewiring.fill_layer,
    keras.Function: Rewiring.fill_function,
    keras.KerasTensor: Rewiring.fill_tensor,
    tracking.Tracker: Rewiring.fill_tracker,
    keras.Optimizer: Rewiring.fill_optimizer,
}


def _nodes(function: Any) -> Iterator[Any]:
    for nodes in vars(function)["_nodes_by_depth"].values():
        yield from nodes


def _is_module(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)

"""Types of every kind, for the tests of the walk."""

from __future__ import annotations

import collections
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import attrs

from cowalk import functor, register
from cowalk.tree import Box, Branch, Leaf
from cowalk.tree.kinds import set_kind


class Pair(NamedTuple):
    left: Any
    right: Any


class NamedPair(Pair):
    """A subclass of a named tuple with attributes of its own."""


@dataclass
class Layer:
    weight: Any
    bias: Any
    name: str = field(default="layer", metadata={"static": True})


@dataclass(frozen=True)
class FrozenLayer:
    weight: Any
    bias: Any

    def __post_init__(self) -> None:
        if self.weight == "refuse":
            raise AssertionError("a constructor ran")


@dataclass(slots=True)
class SlottedLayer:
    weight: Any
    bias: Any


@attrs.define
class AttrsLayer:
    weight: Any
    bias: Any


@attrs.frozen
class FrozenAttrsLayer:
    weight: Any
    bias: Any = attrs.field(default=None)


@functor
class Opened:
    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight = weight
        self.bias = bias


@functor("weight")
class PartlyOpened:
    def __init__(self, weight: Any, rate: Any) -> None:
        self.weight = weight
        self.rate = rate


class Registered:
    def __init__(self, items: dict[Any, Any]) -> None:
        self.items = items


register(Registered, open=lambda node: node.items, close=lambda node, children: Registered(children), mapping=True)


class Wrapper:
    """A box: what it holds is seen through."""

    def __init__(self, content: Any) -> None:
        self.content = content


def _put(box: Wrapper, content: Any) -> None:
    box.content = content


set_kind(Wrapper, Box(lambda box: box.content, lambda box, content: Wrapper(content), put=_put, ties=True))


class Module:
    """A node whose children lie in two dicts, as those of a torch module, and which keeps its identity."""

    def __init__(self, parameters: dict[str, Any], modules: dict[str, Any]) -> None:
        self.parameters = parameters
        self.modules = modules
        self.favourite: Any = None  # a reference that is no child


def _open_module(node: Module) -> dict[Any, Any]:
    groups = (node.parameters, node.modules)
    return {key: child for group in groups for key, child in group.items() if child is not None}


def _close_module(node: Module, children: dict[Any, Any]) -> Module:
    new = Module({k: children.get(k) for k in node.parameters}, {k: children.get(k) for k in node.modules})
    new.favourite = node.favourite
    return new


def _finish_modules(pairs: Any, renewed: Any) -> None:
    for _, new in pairs:
        new.favourite = renewed.get(id(new.favourite), new.favourite)


set_kind(
    Module,
    Branch(
        _open_module,
        _close_module,
        shared=True,
        finish=_finish_modules,
        trainable=lambda node: [key for key in _open_module(node) if not str(key).startswith("running")],
        layout="groups",
        names=("parameters", "modules"),
    ),
)


class Cell:
    """A mutable leaf whose identity matters, as an array's."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __add__(self, other: Any) -> Cell:
        return Cell(self.value + other.value) if isinstance(other, Cell) else NotImplemented

    def __repr__(self) -> str:
        return f"Cell({self.value})"


class Void:
    """A leaf that stands for a missing value, as a float0 array."""


set_kind(Cell, Leaf(ties=True, numeric=lambda cell: cell.value >= 0))
set_kind(Void, Leaf(missing=lambda _: True))

SEQUENCES = [list, tuple, collections.deque]
MAPPINGS = [
    dict,
    collections.OrderedDict,
    lambda items: collections.defaultdict(list, items),
    collections.UserDict,
    lambda items: types.MappingProxyType(dict(items)),
    lambda items: Registered(dict(items)),
]
RECORDS = [Pair, NamedPair, Layer, FrozenLayer, SlottedLayer, AttrsLayer, FrozenAttrsLayer, Opened]

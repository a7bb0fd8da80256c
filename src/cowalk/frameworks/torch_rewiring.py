"""References in new torch modules: what is no child but refers to a part of the old module comes to refer to the new part.

An LSTM's flat weights, a plain list of blocks, a way back to the parent, hooks that are methods or close over the model: with
any of them left as it was, the new module would compute with the old parameters or write into the old module.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import _WrappedHook
from torch.utils.hooks import RemovableHandle

from cowalk.tree.matching import unbox
from cowalk.tree.records import UNSET, blank, read, slot_names, write

GROUPS = ("_parameters", "_buffers", "_modules")

# How a container of each plain type begins. Plain containers become new ones: a new module shares none with the old one.
_EMPTY: dict[type, Callable[[Any], Any]] = {
    list: lambda _: [],
    set: lambda _: set[Any](),
    dict: lambda _: {},
    OrderedDict: lambda _: OrderedDict[Any, Any](),
    defaultdict: lambda old: defaultdict[Any, Any](old.default_factory),
    deque: lambda old: deque[Any](maxlen=old.maxlen),
}
# What torch itself keeps in dicts and sets of every module beside its members: hooks and the like.
_BOOKKEEPING = frozenset(
    name for name, value in Module().__dict__.items() if isinstance(value, dict | set) and name not in GROUPS
)
_ATOMS = frozenset({bool, int, float, str, type(None)})


class Rewiring:
    """Turns what modules hold beside their members: directly, in plain containers, and in functions over their parts.

    What stands in one place of the old modules stands in one place of the new ones.
    """

    def __init__(self, parts: dict[int, Any]) -> None:
        self.parts = parts  # by the id of the old part; the walk and the old modules hold those
        self.unfilled: list[tuple[Any, Any]] = []

    def mend(self, pairs: Sequence[tuple[Module, Module]], parameters: Sequence[Any]) -> None:
        rest: list[tuple[dict[str, Any], str, Any]] = []
        done: set[int] = set()
        for old, new in pairs:  # containers first: a hook may close over one that a module holds
            state = new.__dict__
            apart = id(old) in done  # a shared module that becomes two, each with hooks of its own
            done.add(id(old))
            for name, value in state.items():
                cls = type(value)
                if name in _BOOKKEEPING and not value:  # most of a module's attributes
                    state[name] = cls()
                elif cls in _ATOMS:
                    continue
                elif name in GROUPS:
                    self.parts.setdefault(id(old.__dict__[name]), value)
                elif cls in _EMPTY:
                    known = None if apart else self.parts.get(id(value))
                    state[name] = self.shell(value) if known is None else known
                else:
                    rest.append((state, name, value))
        for state, name, value in rest:
            state[name] = self.turn(value)
        slots: dict[type, list[str]] = {}
        for _, new in pairs:
            for name in slots.setdefault(type(new), slot_names(type(new))):
                value = read(new, name)
                if value is not UNSET:
                    write(new, name, self.turn(value))
        for parameter in parameters:
            for name, value in parameter.__dict__.items():
                parameter.__dict__[name] = self.turn(value)
        while self.unfilled:
            self.fill(*self.unfilled.pop())

    def turn(self, value: Any) -> Any:
        """What takes the place of a value in a new module."""
        if id(value) in self.parts:
            return self.parts[id(value)]
        cls = type(value)
        if cls in _EMPTY:
            return self.shell(value)
        if isinstance(value, Module):
            inner, _ = unbox(value)  # a wrapper's place is taken by what it held
            return self.parts.get(id(inner), value)
        turned = _FUNCTIONS.get(cls) or _TURNED.get(cls)
        if turned is not None:
            return turned(self, value)
        if isinstance(value, tuple) and hasattr(cls, "_fields"):
            return self.turn_tuple(value)
        return value

    def turn_captured(self, value: Any) -> Any:
        """As `turn`, for what a function holds: only parts and functions over them. A container there may be anybody's."""
        if isinstance(value, Module):
            return self.turn(value)
        turned = None if id(value) in self.parts else _FUNCTIONS.get(type(value))
        return self.parts.get(id(value), value) if turned is None else turned(self, value)

    # --- containers ---

    def shell(self, container: Any) -> Any:
        """A new container to be filled later: containers may hold each other, and may be nested deeply."""
        new = self.parts[id(container)] = _EMPTY[type(container)](container)
        if container:
            self.unfilled.append((container, new))
        return new

    def fill(self, container: Any, new: Any) -> None:
        if isinstance(container, dict):
            for key, value in container.items():
                new[self.turn(key)] = self.turn(value)
        elif isinstance(container, set):
            new.update(map(self.turn, container))
        else:
            new.extend(map(self.turn, container))

    def turn_tuple(self, value: Any) -> Any:
        items = tuple(map(self.turn, value))
        return value if _all_same(items, value) else tuple.__new__(type(value), items)

    # --- functions ---

    def turn_method(self, value: Any) -> Any:
        owner = self.turn_captured(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)

    def turn_partial(self, value: Any) -> Any:
        held = (value.func, *value.args, *value.keywords.values())
        turned = tuple(map(self.turn_captured, held))
        if _all_same(turned, held):
            return value
        positional, named = turned[1 : 1 + len(value.args)], turned[1 + len(value.args) :]
        new = partial(turned[0], *positional, **dict(zip(value.keywords, named, strict=True)))
        return self.carry_attributes(value, new)

    def turn_reference(self, value: Any) -> Any:
        """A weak reference; what it refers to is turned only if it is a part, never made anew."""
        target = value()
        return weakref.ref(self.parts[id(target)]) if target is not None and id(target) in self.parts else value

    def turn_function(self, value: Any) -> Any:
        """A function whose closure or defaults hold a part, such as a hook that is a lambda, or a method in a decorator."""
        cells, defaults = value.__closure__ or (), value.__defaults__ or ()
        named = value.__kwdefaults__ or {}
        if not cells and not defaults and not named:
            return value
        self.parts[id(value)] = value  # while its own closure is looked at, which may hold it
        turned_cells = tuple(map(self.turn_cell, cells))
        turned_defaults = tuple(map(self.turn_captured, defaults))
        turned_named = {name: self.turn_captured(default) for name, default in named.items()}
        if (
            _all_same(turned_cells, cells)
            and _all_same(turned_defaults, defaults)
            and _all_same(turned_named.values(), named.values())
        ):
            return value
        closure = tuple(types.CellType(None) if _content(cell) is value else cell for cell in turned_cells)
        new = types.FunctionType(value.__code__, value.__globals__, value.__name__, turned_defaults or None, closure)
        for own, cell in zip(closure, cells, strict=True):
            if _content(cell) is value:  # it calls itself: the new one is to call the new one
                own.cell_contents = new
        self.parts[id(value)] = new
        new.__kwdefaults__ = turned_named or None
        for name in ("__qualname__", "__doc__", "__module__", "__annotations__"):
            setattr(new, name, getattr(value, name))
        return self.carry_attributes(value, new)

    def turn_cell(self, cell: Any) -> Any:
        if id(cell) not in self.parts:
            content = _content(cell)
            turned = content if content is UNSET else self.turn_captured(content)
            if turned is content:
                return cell
            self.parts[id(cell)] = types.CellType(turned)
        return self.parts[id(cell)]

    def carry_attributes(self, old: Any, new: Any) -> Any:
        """Give a new function what was set on the old one, such as the function that it wraps."""
        for name, attribute in vars(old).items():
            setattr(new, name, self.turn_captured(attribute))
        return new

    def turn_state(self, value: Any) -> Any:
        """A hook of torch's, or the handle that removes one: an object that is all in its attributes."""
        new = blank(type(value))
        new.__dict__.update({name: self.turn(attribute) for name, attribute in value.__dict__.items()})
        return new


def _all_same(ones: Any, others: Any) -> bool:
    return all(one is other for one, other in zip(ones, others, strict=True))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return UNSET


_FUNCTIONS: dict[type, Callable[[Rewiring, Any], Any]] = {
    types.FunctionType: Rewiring.turn_function,
    types.MethodType: Rewiring.turn_method,
    partial: Rewiring.turn_partial,
    weakref.ref: Rewiring.turn_reference,
}
_TURNED: dict[type, Callable[[Rewiring, Any], Any]] = {
    tuple: Rewiring.turn_tuple,
    RemovableHandle: Rewiring.turn_state,
    _WrappedHook: Rewiring.turn_state,
}

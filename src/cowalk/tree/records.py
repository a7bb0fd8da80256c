"""Records: types whose children are attributes (dataclasses, attrs classes, classes opened by `functor`).

A record is closed by copying the old object's state into a blank one and setting the children there: no `__init__`, no
`__post_init__`, no validator, no `__setattr__` of the class runs.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast, overload

from cowalk.tree.errors import KindError
from cowalk.tree.kinds import Branch, Kind, add_finder, check_registrable, set_kind
from cowalk.tree.paths import Key

T = TypeVar("T", bound=type)
UNSET = object()
# Classes over these hold more than attributes: they open as their base does, or are leaves.
_VALUES = (dict, list, tuple, deque, set, frozenset, str, bytes, bytearray, int, float, complex)
_EMPTY: dict[str, Any] = {}


def blank(cls: type) -> Any:
    """A new object of a class, made by the first `__new__` that is not written in Python, without any initialisation."""
    for base in cls.__mro__:
        new = base.__dict__.get("__new__")
        if new is not None and not isinstance(new, staticmethod):
            return new(cls)
    return object.__new__(cls)


def slot_names(cls: type) -> list[str]:
    """The names of all `__slots__` of a class and its bases, mangled as Python mangles them."""
    names: list[str] = []
    for base in reversed(cls.__mro__):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name in ("__dict__", "__weakref__"):
                continue
            mangled = (
                f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            )
            names.append(mangled)
    return names


def read(node: Any, name: str) -> Any:
    """An attribute's stored value (instance dict or slot), past properties and `__getattr__`; `UNSET` if there is none."""
    stored = getattr(node, "__dict__", _EMPTY).get(name, UNSET)
    if stored is UNSET:
        slot = _slot(type(node), name)
        if slot is not None:
            try:
                return slot.__get__(node)
            except AttributeError:
                return UNSET
    return stored


def write(node: Any, name: str, value: Any) -> None:
    """Set an attribute where it is stored, past properties, `__setattr__` and frozen classes."""
    slot = _slot(type(node), name)
    if slot is not None:
        slot.__set__(node, value)
    else:
        node.__dict__[name] = value


def _slot(cls: type, name: str) -> types.MemberDescriptorType | None:
    for base in cls.__mro__:
        found = base.__dict__.get(name)
        if isinstance(found, types.MemberDescriptorType):
            return found
    return None


_cached: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _cached_names(cls: type) -> tuple[str, ...]:
    """The names of a class's cached properties."""
    names = _cached.get(cls)
    if names is None:
        members = ((name, member) for base in cls.__mro__ for name, member in base.__dict__.items())
        names = tuple(name for name, member in members if isinstance(member, functools.cached_property))
        _cached[cls] = names
    return names


def copy_state(node: Any, new: Any) -> None:
    """Copy all attributes but cached properties, stored in the instance dict or in slots, to another object of the class."""
    if hasattr(node, "__dict__"):
        new.__dict__.update(node.__dict__)
        for name in _cached_names(type(node)):  # what was computed from the old values
            new.__dict__.pop(name, None)
    for name in slot_names(type(node)):
        value = read(node, name)
        if value is not UNSET:
            write(new, name, value)


def open_record(node: Any, names: Iterable[str]) -> dict[Key, Any]:
    """The stored attributes among `names`; attributes that are not set are no children."""
    return {name: value for name in names if (value := read(node, name)) is not UNSET}


def close_record(node: Any, children: dict[Key, Any]) -> Any:
    """A copy of an object with other children."""
    new = blank(type(node))
    copy_state(node, new)
    for name, child in children.items():
        write(new, str(name), child)
    return new


def record(cls: type, names: tuple[str, ...], *, frozen: bool = False) -> Branch:
    """The kind of a class whose children are the named attributes."""
    return Branch(
        open=lambda node: open_record(node, names),
        close=close_record,
        put=None if frozen else write,
        layout="record" if cls.__dictoffset__ and not set(names) & set(slot_names(cls)) else None,
        names=names,
    )


def _all_attributes(node: Any) -> dict[Key, Any]:
    return open_record(node, dict.fromkeys([*slot_names(type(node)), *getattr(node, "__dict__", {})]))


@overload
def functor(cls: T, /) -> T: ...
@overload
def functor(*names: str) -> Callable[[T], T]: ...
def functor(*args: Any) -> Any:
    """Open a class by its attributes: all of them, or only the named ones; the others are carried along.

    A class decorator, with or without names. It can also be called on a class that is not yours:
    `functor("weight", "bias")(TheirLayer)`.

    Raises:
        KindError: the argument is no class, or a name is no text.

    >>> import cowalk
    >>> @cowalk.functor("weight")
    ... class Layer:
    ...     def __init__(self, weight, activation):
    ...         self.weight, self.activation = weight, activation
    >>> doubled = cowalk.fmap(lambda w: 2 * w, Layer(3.0, max))
    >>> doubled.weight, doubled.activation
    (6.0, <built-in function max>)
    """
    if len(args) == 1 and isinstance(args[0], type):
        check_registrable(args[0])
        set_kind(args[0], Branch(open=_all_attributes, close=close_record, put=write))
        return args[0]
    for name in args:
        if not isinstance(name, str):
            raise KindError(f"functor takes a class or names of attributes, got {type(name).__name__} {name!r:.80}")

    def decorate(cls: T) -> T:
        if not isinstance(cls, type):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KindError(f"functor(…) decorates a class, got {type(cls).__name__}")
        check_registrable(cls)
        set_kind(cls, record(cls, args))
        return cls

    return decorate


def _is_static(metadata: Any) -> bool:
    return bool(metadata.get("static", False))


def _find_dataclass(cls: type) -> Kind | None:
    if not dataclasses.is_dataclass(cls) or issubclass(cls, _VALUES):
        return None
    names = tuple(field.name for field in dataclasses.fields(cls) if not _is_static(field.metadata))
    return record(cls, names, frozen=cast("Any", cls).__dataclass_params__.frozen)


def _find_attrs(cls: type) -> Kind | None:
    fields = getattr(cls, "__attrs_attrs__", None)
    if fields is None or issubclass(cls, _VALUES):
        return None
    frozen = (
        getattr(cls.__setattr__, "__name__", "") == "_frozen_setattrs"
    )  # the mark that attrs leaves on frozen classes
    return record(cls, tuple(field.name for field in fields if not _is_static(field.metadata)), frozen=frozen)


add_finder(_find_dataclass)
add_finder(_find_attrs)

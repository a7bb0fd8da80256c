"""Kinds: how one type opens into children and closes around new ones.

A type is one of four kinds, found once per type and cached:

    Leaf     has no children; f is applied to it
    Branch   has children under keys; `open` lists them, `close` builds a new node around new ones
    Box      holds one thing under no key and is seen through (a compiled module, an nnx Variable, a Keras variable)
    Nothing  stands for a missing value (None, MISSING, optax.MaskedNode)

`register`, `functor` and `leaf` teach cowalk a type. Frameworks teach theirs through `on_import`: their file is loaded when
the framework is already imported and a type that nobody knows yet arrives.
"""

from __future__ import annotations

import abc
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from cowalk.tree.errors import KindError
from cowalk.tree.missing import Missing
from cowalk.tree.paths import Key

T = TypeVar("T", bound=type)
Layout = Literal["dict", "list", "tuple", "namedtuple", "record", "groups"]
Finish = Callable[[Sequence[tuple[Any, Any]], Mapping[int, Any]], None]


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """A type without children.

    Attributes:
        ties: the identity of its objects means sharing (mutable arrays), so one object at two paths is one leaf.
        numeric: whether an object is a floating or complex array; None for types that never are.
        missing: whether an object stands for a missing value (float0 arrays); None for types that never do.
        same: whether two distinct objects are one array (two views of the same cells); None where only identity counts.
        unwritable: why `write` cannot write into an object, or None; `write` None means that the type is immutable.
        write: copies a value into the object: `write(leaf, value)`.
        check: why a value does not fit into the object (another shape), or None.
        traced: whether a value is a tracer that must not escape into an object outside the trace.
        span: the memory an object's values lie in, as (device, first address, address past the end); None if it has none.
    """

    ties: bool = False
    numeric: Callable[[Any], bool] | None = None
    missing: Callable[[Any], bool] | None = None
    same: Callable[[Any, Any], bool] | None = None
    unwritable: Callable[[Any], str | None] | None = None
    write: Callable[[Any, Any], None] | None = None
    check: Callable[[Any, Any], str | None] | None = None
    traced: Callable[[Any], bool] | None = None
    span: Callable[[Any], tuple[Hashable, int, int] | None] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Branch:
    """A type with children under keys.

    Attributes:
        open: the children by key, in order: `open(node) -> mapping`.
        close: a new node around new children, without running the type's constructor: `close(node, children)`.
        mapping: the keys are data (a dict's keys), not names or positions.
        plain: what `fmapstructure` makes of it.
        put: writes one child in place: `put(node, key, value)`; None if nodes are immutable.
        trainable: the keys under which trained values may stand; None for all.
        shared: a node at two paths comes back as one node if its new children agree (modules).
        finish: called once after a walk with all (old, new) nodes of this kind, and the new object for each id of an old
            shared node or tied leaf, to mend references that are not children.
        layout: how the native walk may open and close it by itself, without calling `open` and `close`.
        names: with layout "record" the attributes, with "namedtuple" the fields, with "groups" the attributes whose dicts
            hold the children.
    """

    open: Callable[[Any], Mapping[Key, Any]]
    close: Callable[[Any, dict[Key, Any]], Any]
    mapping: bool = False
    plain: type[dict[Any, Any] | list[Any] | tuple[Any, ...]] = dict
    put: Callable[[Any, Any, Any], None] | None = None
    trainable: Callable[[Any], Collection[Key]] | None = None
    shared: bool = False
    finish: Finish | None = None
    layout: Layout | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Box:
    """A type that holds one thing under no key.

    Attributes:
        open: what the box holds: `open(box)`.
        close: a new box around a new content: `close(box, content)`.
        put: writes a content in place: `put(box, content)`; None if boxes are immutable.
        ties: one box object at two paths is one leaf.
        trainable: whether the content is trained; None for yes.
        check: why a content cannot be put into the box (another shape), or None.
    """

    open: Callable[[Any], Any]
    close: Callable[[Any, Any], Any]
    put: Callable[[Any, Any], None] | None = None
    ties: bool = False
    trainable: Callable[[Any], bool] | None = None
    check: Callable[[Any, Any], str | None] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Nothing:
    """A type whose objects always stand for a missing value."""


Kind = Leaf | Branch | Box | Nothing
Finder = Callable[[type], Kind | None]

NOTHING = Nothing()
PLAIN_LEAF = Leaf()

_registered: weakref.WeakKeyDictionary[type, Kind] = weakref.WeakKeyDictionary()
_cache: weakref.WeakKeyDictionary[type, Kind] = weakref.WeakKeyDictionary()
_subclass_kinds: weakref.WeakKeyDictionary[type, Kind | Finder] = weakref.WeakKeyDictionary()
_changes = [0]  # how often the cached kinds were dropped
_loaders: list[tuple[str, Callable[[], object]]] = []
_finders: list[Finder] = []
_listeners: list[Callable[[], None]] = []


def set_kind(cls: type, kind: Kind) -> None:
    """Give exactly this type a kind."""
    _registered[cls] = kind
    forget()


def set_subclass_kind(cls: type, kind: Kind | Finder) -> None:
    """Give this type and its subclasses a kind (or a function that makes one for each subclass). The nearest base wins."""
    _subclass_kinds[cls] = kind
    forget()


def add_finder(finder: Finder) -> None:
    """Add a function that may know the kind of a type by other means than its bases. The one added last is asked first."""
    _finders.insert(0, finder)
    forget()


def on_import(module: str, load: Callable[[], object]) -> None:
    """Call `load` once, when a type of unknown kind arrives while `module` is already imported."""
    _loaders.append((module, load))


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` whenever cached kinds may have become wrong."""
    _listeners.append(listener)


def forget() -> None:
    """Drop the cached kinds."""
    _changes[0] += 1
    _cache.clear()
    for listener in _listeners:
        listener()


def load_imported() -> None:
    """Load the file of every framework that is imported by now. One that fails is told of once, and its types stay unknown."""
    for loader in [each for each in list(_loaders) if _is_imported(each[0])]:
        module, load = loader
        try:
            load()  # another thread that comes here meanwhile waits in the import
        except Exception as error:  # noqa: BLE001  (an odd version of a framework must not break the walks of all others)
            warnings.warn(
                f"cowalk does not get on with the {module} that is installed, so it takes objects of {module}'s own types for "
                f"leaves: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        finally:
            if loader in _loaders:  # another thread may have been here
                _loaders.remove(loader)


def _is_imported(module: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False)


def kind_of(cls: type) -> Kind:
    """The kind of a type: registered, else inherited from the nearest base with one, else from a registry, else a leaf."""
    found = _cache.get(cls)
    if found is None:
        changes = _changes[0]
        found, lasting = find_kind(cls)
        if lasting and changes == _changes[0]:  # else somebody registered something while we looked
            _cache[cls] = found
    return found


def find_kind(cls: type) -> tuple[Kind, bool]:
    """The kind of a type and whether it may be cached: a type nobody knows yet is a leaf for now."""
    load_imported()
    if cls in _registered:
        return _registered[cls], True
    for finder in _finders:
        kind = finder(cls)
        if kind is not None:
            return kind, True
    for base in cls.__mro__:
        inherited = _subclass_kinds.get(base)
        if inherited is None:
            continue
        kind = inherited(cls) if callable(inherited) else inherited
        if kind is not None:
            return kind, True
    for base, inherited in list(_subclass_kinds.items()):  # classes that only say they are subclasses (abc's register)
        if isinstance(base, abc.ABCMeta) and issubclass(cls, base):
            kind = inherited(cls) if callable(inherited) else inherited
            if kind is not None:
                return kind, True
    return PLAIN_LEAF, not cls.__flags__ & _HEAP_TYPE


_HEAP_TYPE = 1 << 9

set_kind(type(None), NOTHING)
set_kind(Missing, NOTHING)


def is_missing(value: Any) -> bool:
    """Whether a value stands for "no value here": None, `MISSING`, optax.MaskedNode, a float0 array, a symbolic zero."""
    kind = kind_of(type(value))
    return isinstance(kind, Nothing) or (isinstance(kind, Leaf) and kind.missing is not None and kind.missing(value))


def isleaf(node: Any) -> bool:
    """Whether a node is a leaf: no children, and not an empty place.

    >>> import cowalk
    >>> cowalk.isleaf(3.0), cowalk.isleaf([3.0]), cowalk.isleaf(()), cowalk.isleaf(None)
    (True, False, False, False)
    """
    kind = kind_of(type(node))
    return isinstance(kind, Leaf) and (kind.missing is None or not kind.missing(node))


def isnumeric(node: Any) -> bool:
    """Whether a node is an array of floating or complex numbers. Integers, bools, random keys, strings and functions are not.

    A box is as numeric as what it holds.

    >>> import numpy, cowalk
    >>> cowalk.isnumeric(numpy.ones(3)), cowalk.isnumeric(numpy.arange(3)), cowalk.isnumeric(3.0), cowalk.isnumeric("a")
    (True, False, False, False)
    """
    kind = kind_of(type(node))
    while isinstance(kind, Box):
        node = kind.open(node)
        kind = kind_of(type(node))
    return isinstance(kind, Leaf) and kind.numeric is not None and kind.numeric(node)


def istrainable(node: Any) -> bool:
    """Whether a node is a numeric array that training may change.

    As `where` of a walk it also leaves out what the node's holder keeps from training: buffers and frozen parameters of a
    torch module, nnx variables other than Param, non-trainable variables of a Keras layer.

    >>> import numpy, cowalk
    >>> [str(path) for path, _ in cowalk.walk({"w": numpy.ones(2), "steps": 3}, where=cowalk.istrainable)]
    ['w']
    """
    kind = kind_of(type(node))
    if isinstance(kind, Box) and kind.trainable is not None and not kind.trainable(node):
        return False
    return isnumeric(node)


def children(node: Any) -> dict[Key, Any]:
    """The children of a node by key, in order; of a leaf, none. Boxes are seen through.

    >>> import cowalk
    >>> cowalk.children({"a": 1, "b": [2]}), cowalk.children((5, 6)), cowalk.children(7)
    ({'a': 1, 'b': [2]}, {0: 5, 1: 6}, {})
    """
    kind = kind_of(type(node))
    while isinstance(kind, Box):
        node = kind.open(node)
        kind = kind_of(type(node))
    return dict(kind.open(node)) if isinstance(kind, Branch) else {}


def register(
    cls: type,
    open: Callable[[Any], Mapping[Any, Any]],
    close: Callable[[Any, dict[Any, Any]], Any],
    *,
    mapping: bool = False,
) -> None:
    """Teach cowalk how a type opens and closes. Subclasses have to be registered on their own.

    Args:
        cls: the type.
        open: gives the children of a node by key, in order.
        close: gives a new node around new children; it gets the old node, for all that is not a child, and the children
            by key. It must not change the old node.
        mapping: the keys are data, as in a dict, rather than names.

    Raises:
        KindError: `cls` is no type, or cowalk itself opens it (dict, list, tuple, None).

    >>> import cowalk
    >>> class Pair:
    ...     def __init__(self, left, right):
    ...         self.left, self.right = left, right
    >>> cowalk.register(
    ...     Pair, open=lambda p: {"left": p.left, "right": p.right}, close=lambda p, c: Pair(c["left"], c["right"])
    ... )
    >>> cowalk.fmap(lambda x: x + 1, Pair(1, 2)).right
    3
    """
    check_registrable(cls)
    set_kind(cls, Branch(open, close, mapping=mapping))


def leaf(cls: T) -> T:
    """Make a type a leaf: walks hand its objects to f and never look inside. Use it as a class decorator or call it.

    >>> import cowalk
    >>> @cowalk.leaf
    ... class Quantity(tuple):
    ...     pass
    >>> cowalk.isleaf(Quantity((1, "m")))
    True
    """
    check_registrable(cls)
    set_kind(cls, PLAIN_LEAF)
    return cls


def check_registrable(cls: Any) -> None:
    """Raise KindError for what is no type, or one that cowalk itself opens."""
    if not isinstance(cls, type):
        raise KindError(f"expected a type to register, got {type(cls).__name__} {cls!r:.80}")
    if cls in (dict, list, tuple, type(None), Missing):
        raise KindError(f"{cls.__name__} is opened by cowalk itself; register a subclass of it instead")

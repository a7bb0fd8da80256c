"""The kinds of Python's own containers and their subclasses: mappings, lists, tuples, named tuples, struct sequences, deques."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from cowalk.tree.errors import KindError
from cowalk.tree.kinds import Branch, Kind, set_kind, set_subclass_kind
from cowalk.tree.paths import Index, Key
from cowalk.tree.records import blank, copy_state

_HEAP_TYPE = 1 << 9


def _carry(node: Any, new: Any) -> Any:
    if type(node).__flags__ & _HEAP_TYPE:  # a subclass may hold attributes of its own
        copy_state(node, new)
    return new


def _open_sequence(items: Callable[[Any], Any]) -> Callable[[Any], dict[Key, Any]]:
    def open_sequence(node: Any) -> dict[Key, Any]:
        return {Index(i): item for i, item in enumerate(items(node))}

    return open_sequence


# --- dict and its kin ---


def _close_dict(node: Any, children: dict[Key, Any]) -> Any:
    new = blank(type(node))
    if isinstance(node, collections.defaultdict):
        new.default_factory = node.default_factory
    base = collections.OrderedDict if isinstance(node, collections.OrderedDict) else dict
    for key, child in children.items():
        base.__setitem__(new, key, child)
    return _carry(node, new)


def _open_ordered(node: Any) -> Mapping[Key, Any]:
    return {key: dict.__getitem__(node, key) for key in collections.OrderedDict.__iter__(node)}


def _find_dict(cls: type) -> Kind:
    if issubclass(cls, collections.OrderedDict):
        return Branch(open=_open_ordered, close=_close_dict, mapping=True, put=collections.OrderedDict.__setitem__)
    if cls is dict:  # said in the plainest way, which torch.compile can trace
        return Branch(open=dict, close=lambda _, children: children, mapping=True, put=dict.__setitem__, layout="dict")
    return Branch(open=dict.copy, close=_close_dict, mapping=True, put=dict.__setitem__)


def _mapping_store(node: Any) -> str | None:
    """The attribute of a mapping object that is the dict it stores its items in."""
    for name, value in getattr(node, "__dict__", {}).items():
        if (
            isinstance(value, dict)
            and len(value) == len(node)
            and all(key in value and value[key] is node[key] for key in node)
        ):
            return name
    return None


def _close_mapping(node: Any, children: dict[Key, Any]) -> Any:
    store = _mapping_store(node)
    if store is None:
        name = f"{type(node).__module__}.{type(node).__qualname__}"
        raise KindError(
            f"cowalk can open the mapping {name} but not build a new one: where it stores its items is unknown. "
            f"Teach it with cowalk.register({type(node).__name__}, open=dict, close=…, mapping=True), or use fmapstructure."
        )
    new = blank(type(node))
    copy_state(node, new)
    new.__dict__[store] = _close_dict(node.__dict__[store], children)
    return new


def _put_mapping(node: Any, key: Key, value: Any) -> None:
    node[key] = value


def _find_mapping(cls: type) -> Kind:
    return Branch(
        open=lambda node: {key: node[key] for key in node},
        close=_close_mapping,
        mapping=True,
        put=_put_mapping if issubclass(cls, MutableMapping) else None,
    )


def _close_chain_map(node: Any, children: dict[Key, Any]) -> Any:
    new = blank(type(node))
    copy_state(node, new)
    new.maps = [dict(children)]
    return new


# --- list, tuple, deque ---


def _close_list(node: Any, children: dict[Key, Any]) -> Any:
    new = blank(type(node))
    list.extend(new, children.values())
    return _carry(node, new)


def _close_tuple(node: Any, children: dict[Key, Any]) -> Any:
    return _carry(node, tuple.__new__(type(node), children.values()))


def _close_struct_sequence(node: Any, children: dict[Key, Any]) -> Any:
    (cls, (_, hidden)) = node.__reduce__()
    return cls(tuple(children.values()), hidden)


def _close_deque(node: Any, children: dict[Key, Any]) -> Any:
    new = blank(type(node))
    collections.deque[Any].__init__(new, children.values(), node.maxlen)
    return _carry(node, new)


def _find_list(cls: type) -> Kind:
    if cls is list:
        return Branch(
            _open_sequence(iter), lambda _, new: list(new.values()), plain=list, put=list.__setitem__, layout="list"
        )
    return Branch(_open_sequence(list.__iter__), _close_list, plain=list, put=list.__setitem__)


def _find_tuple(cls: type) -> Kind:
    if cls is tuple:
        return Branch(_open_sequence(iter), lambda _, new: tuple(new.values()), plain=tuple, layout="tuple")
    if hasattr(cls, "n_sequence_fields") and not hasattr(cls, "_fields"):
        names = _struct_sequence_names(cls)
        return Branch(
            open=lambda node: dict(zip(names, tuple.__iter__(node), strict=True)), close=_close_struct_sequence
        )
    fields: Any = getattr(cls, "_fields", None)
    if isinstance(fields, tuple) and all(isinstance(name, str) for name in fields):  # pyright: ignore[reportUnknownVariableType]
        names = tuple(map(str, fields))  # pyright: ignore[reportUnknownArgumentType]
        return Branch(
            open=_open_named(names),
            close=_close_tuple,
            layout="namedtuple",
            names=names,
        )
    return Branch(_open_sequence(tuple.__iter__), _close_tuple, plain=tuple)


def _open_named(names: tuple[str, ...]) -> Callable[[Any], dict[Key, Any]]:
    def open_named(node: Any) -> dict[Key, Any]:
        items = tuple(tuple.__iter__(node))
        if len(items) != len(names):
            raise KindError(
                f"a {type(node).__name__} of {len(items)} items has {len(names)} _fields; make the type a leaf with cowalk.leaf"
            )
        return dict(zip(names, items, strict=True))

    return open_named


def _struct_sequence_names(cls: Any) -> tuple[Key, ...]:
    """The visible fields of a struct sequence by position; unnamed ones keep their position as key."""
    named = [name for name, member in cls.__dict__.items() if isinstance(member, types.MemberDescriptorType)]
    if cls.n_unnamed_fields:
        return tuple(Index(i) for i in range(cls.n_sequence_fields))
    return tuple(named[: cls.n_sequence_fields])


def _put_deque(node: Any, key: Any, value: Any) -> None:
    node[int(key)] = value


set_subclass_kind(dict, _find_dict)
set_subclass_kind(list, _find_list)
set_subclass_kind(tuple, _find_tuple)
_DEQUE = Branch(_open_sequence(iter), _close_deque, plain=list, put=_put_deque)
set_subclass_kind(collections.deque, _DEQUE)
set_subclass_kind(Mapping, _find_mapping)
set_subclass_kind(collections.ChainMap, Branch(dict, _close_chain_map, mapping=True, put=_put_mapping))
set_kind(
    types.MappingProxyType,
    Branch(dict, lambda _, children: types.MappingProxyType(_close_dict({}, children)), mapping=True),
)
for _cls in (
    dict,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
):  # other registries hold these too
    set_kind(_cls, _find_dict(_cls))
set_kind(list, _find_list(list))
set_kind(tuple, _find_tuple(tuple))
set_kind(collections.deque, _DEQUE)

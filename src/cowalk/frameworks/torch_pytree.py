"""Types registered with torch's own pytree (transformers' outputs and caches, users' classes): opened as registered there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils import _pytree as pytree

from cowalk.tree.kinds import Branch, Kind
from cowalk.tree.paths import Index, Key


def find_registered(cls: type) -> Kind | None:
    """The kind of a type that torch's pytree knows. Struct sequences are declined: they open by their fields' names."""
    registration: Any = pytree.SUPPORTED_NODES.get(cls)
    if registration is None or hasattr(cls, "n_sequence_fields"):
        return None

    def open_registered(node: Any) -> dict[Key, Any]:
        if registration.flatten_with_keys_fn is None:
            return {Index(i): child for i, child in enumerate(registration.flatten_fn(node)[0])}
        return {_key(entry): child for entry, child in registration.flatten_with_keys_fn(node)[0]}

    def close_registered(node: Any, children: dict[Key, Any]) -> Any:
        return registration.unflatten_fn(list(children.values()), registration.flatten_fn(node)[1])

    return Branch(open_registered, close_registered, mapping=issubclass(cls, Mapping))


def _key(entry: Any) -> Key:
    match entry:
        case pytree.SequenceKey():
            return Index(entry.idx)
        case pytree.MappingKey():
            return entry.key
        case pytree.GetAttrKey():
            return entry.name
        case _:
            return getattr(entry, "key", entry)

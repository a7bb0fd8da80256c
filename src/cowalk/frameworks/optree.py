"""optree: what is registered in the global namespace opens as registered there.

Registrations in a namespace of their own belong to whoever made them: a walk is not told which one is meant.
"""

from __future__ import annotations

from typing import Any

import optree

from cowalk.tree.kinds import Branch, Kind, add_finder
from cowalk.tree.paths import Index, Key

_MAPPING_ENTRIES = (optree.MappingEntry, optree.GetItemEntry)


def _find_registered(cls: type) -> Kind | None:
    entry: Any = optree.register_pytree_node.get(cls, namespace="")  # pyright: ignore[reportFunctionMemberAccess]
    if entry is None or entry.type is not cls:  # for a named tuple it answers with a general entry
        return None
    mapping = issubclass(entry.path_entry_type, _MAPPING_ENTRIES)

    def open_registered(node: Any) -> dict[Key, Any]:
        items, _, *rest = entry.flatten_func(node)
        values = list(items)
        keys = list(rest[0]) if rest and rest[0] is not None else list(range(len(values)))
        if not mapping:
            keys = [Index(key) if type(key) is int else key for key in keys]
        return dict(zip(keys, values, strict=True))

    def close_registered(node: Any, children: dict[Key, Any]) -> Any:
        metadata = entry.flatten_func(node)[1]
        return entry.unflatten_func(metadata, tuple(children.values()))

    return Branch(open_registered, close_registered, mapping=mapping)


add_finder(_find_registered)

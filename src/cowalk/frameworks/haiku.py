"""Haiku: parameters are plain dicts; the immutable mapping of older versions and old checkpoints opens by its keys.

That mapping is registered with JAX as the flat list of all leaves below it, which has no keys to match.
"""

from __future__ import annotations

from typing import Any

import haiku as hk

from cowalk.tree.kinds import Branch, set_kind

_FlatMap: Any = type(hk.data_structures.to_immutable_dict({}))

set_kind(
    _FlatMap, Branch(open=lambda node: dict(node.items()), close=lambda _, children: _FlatMap(children), mapping=True)
)

"""Flax: frozen dicts, struct dataclasses (TrainState), boxes of partitioned parameters; Linen modules are configuration.

NNX has a file of its own: it is imported on its own, and its modules are graphs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import linen
from flax.core import FrozenDict
from flax.core.meta import AxisMetadata

from cowalk.frameworks import jax as jax  # before this file's finder is added: the one added last is asked first
from cowalk.tree.kinds import PLAIN_LEAF, Box, Branch, Kind, add_finder
from cowalk.tree.paths import Key
from cowalk.tree.records import blank, close_record, copy_state, read, record, write


def _close_frozen_dict(node: Any, children: dict[Key, Any]) -> Any:
    new = blank(type(node))
    copy_state(node, new)
    # A frozen dict keeps the nested ones as plain dicts, and wraps each of them when it is asked for.
    inner = {key: read(child, "_dict") if isinstance(child, FrozenDict) else child for key, child in children.items()}
    write(new, "_dict", inner)
    write(new, "_hash", None)
    return new


# Opened through `items`, so that a nested dict is seen frozen too and fmap_ will not write into it.
_FROZEN_DICT = Branch(open=lambda node: dict(node.items()), close=_close_frozen_dict, mapping=True)

# What `nn.with_partitioning` puts around a parameter. The names of its axes are no part of its path.
_PARTITIONED = Box(
    open=lambda box: read(box, "value"),
    close=lambda box, content: close_record(box, {"value": content}),
)


def _find_flax(cls: type) -> Kind | None:
    if issubclass(cls, FrozenDict):
        return _FROZEN_DICT
    if issubclass(cls, linen.Module):  # what JAX thinks too: hyperparameters, whose arrays are elsewhere
        return PLAIN_LEAF
    if issubclass(cls, AxisMetadata) and "value" in getattr(cls, "__dataclass_fields__", ()):
        return _PARTITIONED
    if "_flax_dataclass" in cls.__dict__:
        struct: Any = cls
        names = tuple(field.name for field in dataclasses.fields(struct) if field.metadata.get("pytree_node", True))
        return record(cls, names, frozen=struct.__dataclass_params__.frozen)
    return None


add_finder(_find_flax)

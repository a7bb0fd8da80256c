"""JAX: arrays and tracers are leaves, a registered type opens as it is registered, and losses are differentiated.

A type registered with JAX keeps what its registration says: which children it has, under which keys, and how it closes
around new ones. Only for Python's own containers and for named tuples cowalk's kinds stay in charge, because JAX sorts dicts
and calls the constructors of named tuples.

`jax.grad` gives zeros both for a gradient that is zero and for a parameter that the loss never saw. Here the two are told
apart: the loss is linearised once, and dead code elimination on the linear program shows which tangents reach the loss,
through jit, scan, cond, remat and stop_gradient. It errs on the side of a zero in two places: a `custom_vjp` function counts
as depending on all its arguments, also on those for which its rule gives None, and the first value of a loop's carry counts
as reaching the loss if any later value of that carry does. The cost over `jax.grad` is tracing the linear program (never the
loss) twice more: about a third of the time of an eager call on small arrays, and paid once, at compilation, inside jit.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import ad, partial_eval

from cowalk.frameworks.framework import Differentiated, Framework, add_framework
from cowalk.frameworks.numpy import is_inexact
from cowalk.tree.kinds import (
    NOTHING,
    PLAIN_LEAF,
    Branch,
    Kind,
    Leaf,
    add_finder,
    istrainable,
    set_kind,
    set_subclass_kind,
)
from cowalk.tree.paths import Index, Key, Path
from cowalk.tree.records import close_record, write
from cowalk.tree.walk import fmap, fmapstructure, walk

# --- leaves ---


@functools.lru_cache(maxsize=256)
def _is_inexact(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and is_inexact(dtype)  # the dtype of a typed key is none of NumPy's


def is_numeric(array: Any) -> bool:
    """Whether a JAX array or tracer holds floating or complex numbers: not integers, bools, keys, float0."""
    return _is_inexact(getattr(array, "dtype", None))


def is_traced(value: Any) -> bool:
    return isinstance(value, Tracer)


_MISSING_KINDS: tuple[Any, ...] = (ad.Zero, jax.custom_derivatives.SymbolicZero)

set_subclass_kind(jax.Array, Leaf(numeric=is_numeric, traced=is_traced))
set_subclass_kind(
    Tracer, Leaf(numeric=is_numeric, missing=lambda tracer: getattr(tracer, "dtype", None) == float0, traced=is_traced)
)
set_kind(jax.ShapeDtypeStruct, PLAIN_LEAF)
for _cls in _MISSING_KINDS:
    set_subclass_kind(_cls, NOTHING)


# --- registered types ---

_is_tree_node: Callable[[type], bool] | None = getattr(tree_util, "is_tree_node", None)
_one_level: Callable[[Any], tuple[Any, Any]] | None = getattr(tree_util, "flatten_one_level_with_keys", None)


def _registration(cls: type) -> Any:
    """JAX's own entry for a type that somebody registered, or None.

    JAX has no public way to see it. It is asked for two things only, both of which have a safe answer without it: whether a
    named tuple was registered explicitly, and whether a type was registered by `register_dataclass`.
    """
    registry: Any = getattr(sys.modules.get("jax._src.tree_util"), "_registry", None)
    return registry.get(cls) if isinstance(registry, dict) else None


def _is_registered(cls: type) -> bool:
    if _is_tree_node is None or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return _registration(cls) is not None
    return bool(_is_tree_node(cls))


def _key(entry: Any) -> Key:
    match entry:
        case tree_util.GetAttrKey():
            return entry.name
        case tree_util.SequenceKey():
            return Index(entry.idx)
        case tree_util.FlattenedIndexKey():
            return Index(entry.key)
        case tree_util.DictKey():
            return entry.key
        case _:  # a registration may use keys of its own
            return getattr(entry, "name", getattr(entry, "key", entry))


def _open_registered(node: Any) -> dict[Key, Any]:
    if _one_level is not None:
        pairs = list(_one_level(node)[0])
    else:
        found, _ = tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
        pairs = [(path[0], child) for path, child in found]
    children = {_key(entry): child for entry, child in pairs}
    if len(children) < len(pairs):  # keys that are not unique name nothing
        return {Index(i): child for i, (_, child) in enumerate(pairs)}
    return children


def _close_registered(node: Any, children: dict[Key, Any]) -> Any:
    # True for all but the first node asked about, which is `node` itself: opens one level, also where a node holds itself.
    first = iter((False,))
    return tree_util.tree_structure(node, is_leaf=lambda _: next(first, True)).unflatten(list(children.values()))


def _put_item(node: Any, key: Key, value: Any) -> None:
    node[key] = value


def _put_attribute(node: Any, key: Key, value: Any) -> None:
    write(node, str(key), value)


def _find_registered(cls: type) -> Kind | None:
    if not _is_registered(cls):
        return None
    flatten: Any = getattr(_registration(cls), "to_iter", None)
    if getattr(flatten, "__qualname__", "").startswith("register_dataclass."):
        # JAX itself closes these by calling the class, with all its checks.
        frozen = getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)
        return Branch(_open_registered, close_record, put=None if frozen else _put_attribute)
    return Branch(
        _open_registered,
        _close_registered,
        mapping=issubclass(cls, Mapping),
        put=_put_item if issubclass(cls, MutableMapping) else None,
    )


add_finder(_find_registered)
# JAX registers it without names for its two children.
set_kind(tree_util.Partial, Branch(lambda node: {"args": node.args, "keywords": node.keywords}, _close_registered))


# --- differentiation ---


def owns(model: Any) -> bool:
    """Whether a tree holds a JAX array, and no torch tensor."""
    torch: Any = sys.modules.get("torch")
    found = False
    for _, (leaf,) in walk(model):
        found = found or isinstance(leaf, jax.Array)
        if torch is not None and isinstance(leaf, torch.Tensor):
            return False
    return found


def differentiate(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> Differentiated:
    """The gradients of a loss in the floating and complex arrays of a tree, NumPy's among them."""
    return differentiate_run(lambda traced: outcome(loss(traced, *args, **kwargs), has_aux), model)


def differentiate_run(run: Callable[[Any], tuple[Any, Any]], model: Any) -> Differentiated:
    """The gradients of `run(model) -> (value, aux)`, which gets the model with a tracer in the place of each trained array."""
    places = [(path, leaf) for path, (leaf,) in walk(model, where=istrainable)]
    _check_places(places, model)
    paths = [path for path, _ in places]

    def traced_run(arrays: list[Any]) -> tuple[Any, Any]:
        at = dict(zip(paths, arrays, strict=True))
        value, aux = run(fmap(lambda path, _: at[path], model, where=istrainable, with_path=True))
        return _scalar(value), aux

    arrays = [jnp.asarray(leaf) for _, leaf in places]
    value, push, aux = jax.linearize(traced_run, arrays, has_aux=True)
    found = {paths[i]: gradient for i, gradient in _pull(push, arrays, value)}
    # Path by path: a tied parameter has one gradient, under its first path.
    gradients = fmapstructure(lambda path, _: found.get(path), model, ties="each", with_path=True)
    return Differentiated(value, aux, gradients)


def _pull(push: Callable[[list[Any]], Any], arrays: list[Any], value: Any) -> list[tuple[int, Any]]:
    """The gradient in each array that the linear function `push` depends on, with the array's position."""
    program = jax.make_jaxpr(push)(arrays)
    needed, used = partial_eval.dce_jaxpr(program.jaxpr, [True])
    positions = [i for i, is_used in enumerate(used) if is_used]
    if not positions:
        return []
    linear = jaxpr_as_fun(ClosedJaxpr(needed, program.consts))
    pull = jax.linear_transpose(lambda *tangents: linear(*tangents)[0], *(arrays[i] for i in positions))
    return list(zip(positions, pull(jnp.ones_like(value)), strict=True))


def outcome(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """What a loss returned, as (value, aux)."""
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"with has_aux=True the loss returns a pair (loss, aux), but it returned {_described(result)}")
    return result


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, tuple | list | dict):
        raise ValueError(
            f"the loss must be a scalar, but it returned {_described(value)}; if it returns (loss, aux), "
            "use value_and_gradient(…, has_aux=True)"
        )
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the loss must be a scalar, but it returned {_described(value)}") from error
    if array.shape != ():
        raise ValueError(f"the loss must be a scalar, but it has shape {array.shape}; return its mean or its sum")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        hint = "return its real part or its modulus" if jnp.iscomplexobj(array) else "convert it to a floating type"
        raise ValueError(f"the loss must be a real floating-point number, but it is {array.dtype}; {hint}")
    return array


def _described(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list | dict) else "")


def _check_places(places: Sequence[tuple[Path, Any]], model: Any) -> None:
    """Refuse a model with nothing to differentiate, and one whose arrays are gone."""
    deleted = [path for path, leaf in places if is_deleted(leaf)]
    if deleted:
        raise ValueError(
            f"{_named(deleted)} deleted (donated to a jitted function); use the arrays that this function returned"
        )
    if not places:
        others = [(path, leaf) for path, (leaf,) in walk(model) if isinstance(leaf, jax.Array | np.ndarray)]
        found = ", ".join(f"{path or 'the model'} is {leaf.dtype}" for path, leaf in others[:5])
        raise ValueError(
            "this model has no trainable array of floating or complex numbers to differentiate in"
            + (f" ({found})" if found else "")
        )


def is_deleted(array: Any) -> bool:
    """Whether the memory of a JAX array is gone: it was donated to a jitted function, or deleted."""
    return isinstance(array, jax.Array) and not is_traced(array) and array.is_deleted()


def _named(paths: Sequence[Path]) -> str:
    names = ", ".join(str(path) or "the root" for path in paths[:5]) + (
        f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    )
    return f"{names} {'was' if len(paths) == 1 else 'were'}"


add_framework(Framework("JAX", owns, differentiate, is_pure_jax=True))

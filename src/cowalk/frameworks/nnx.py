"""Flax NNX: modules are nodes that may be shared, Variables are boxes whose identity makes a tie.

A rebuilt module shares nothing that changes with the old one: its Variables, also those that a walk left alone, and its own
bookkeeping are new. No hook of a Variable runs, neither when it is opened nor when it is closed: a walk sees the raw values.

Differentiation is in the Param Variables, and in arrays that stand outside of any module. What the loss does to the model's
other Variables (batch statistics, counts of random streams) is done to the model, as `nnx.value_and_grad` does it; Variables
that the loss adds to a module (`sow`) are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import variablelib

from cowalk.frameworks import flax as flax  # before this file's finder is added: the one added last is asked first
from cowalk.frameworks.framework import Differentiated, Framework, add_framework
from cowalk.frameworks.jax import differentiate_run, outcome
from cowalk.tree.kinds import Box, Branch, Kind, add_finder, kind_of
from cowalk.tree.paths import Index, Key
from cowalk.tree.records import blank, close_record, copy_state, read, slot_names, write
from cowalk.tree.walk import fmap, walk

Variable: Any = nnx.Variable
Node: Any = getattr(nnx, "Pytree", None) or nnx.Object  # the base of modules is called Pytree since Flax 0.12
State: Any = nnx.State
_KINDS: tuple[Any, ...] = (Variable, Node, State)


def _is_nnx(node: Any) -> bool:
    return isinstance(node, _KINDS)


def _is_variable(node: Any) -> bool:
    return isinstance(node, Variable)


# --- Variables ---

_RAW = "_raw_value" if "_raw_value" in getattr(Variable, "__slots__", ()) else "raw_value"
_is_array_ref: Callable[[Any], bool] | None = getattr(variablelib, "is_array_ref", None)


def _raw(variable: Any) -> Any:
    return object.__getattribute__(variable, _RAW)  # getattr falls back to the attributes of the value


def _is_ref(variable: Any, raw: Any) -> bool:
    """Whether a Variable keeps its value in a mutable array (`ref=True`)."""
    return _is_array_ref is not None and bool(variable.get_metadata("ref", None)) and _is_array_ref(raw)


def _open_variable(variable: Any) -> Any:
    raw = _raw(variable)
    return raw[...] if _is_ref(variable, raw) else raw


def _close_variable(variable: Any, content: Any) -> Any:
    new = object.__new__(type(variable))
    for name, value in _stored(variable).items():
        match name:
            case "_raw_value" | "raw_value":
                made = jax.new_ref(content) if _is_ref(variable, value) else content
            case "_trace_state":
                made = type(value)()  # where it is made is where it may be changed
            case _:
                made = dict(value) if isinstance(value, dict) else value
        object.__setattr__(new, name, made)
    return new


def _stored(variable: Any) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    for name in [*slot_names(type(variable)), "__dict__"]:
        try:
            stored[name] = object.__getattribute__(variable, name)
        except AttributeError:
            continue
    return stored | stored.pop("__dict__", {})


def _put_variable(variable: Any, content: Any) -> None:
    raw = _raw(variable)
    if _is_ref(variable, raw):
        raw[...] = content
    elif hasattr(type(variable), "set_raw_value"):
        variable.set_raw_value(content)
    else:
        variable.raw_value = content


_VARIABLE = Box(
    open=_open_variable,
    close=_close_variable,
    put=_put_variable,
    ties=True,
    trainable=lambda variable: isinstance(variable, nnx.Param),
)

# Flax before 0.12 has these in the place of Variables in a state.
_VariableState: Any = vars(variablelib).get("VariableState", Variable)
_VARIABLE_STATE = Box(
    open=lambda state: read(state, "value"),
    close=lambda state, content: close_record(state, {"value": content}),
    put=lambda state, content: write(state, "value", content),
    trainable=lambda state: issubclass(state.type, nnx.Param),
)

# --- modules ---

_BOOKKEEPING = ("_pytree__", "_object__")


def _open_node(node: Any) -> dict[Key, Any]:
    """The attributes that Flax calls data, in Flax's order: by name.

    Not in the order in which they were set: nnx.jit, nnx.grad and nnx.merge put a module's attributes in order of name, and
    the first path of a tied Variable, under which its gradient and its row in a table stand, must not change with that.
    """
    cls = type(node)
    is_data: Mapping[str, bool] | None = None
    if getattr(cls, "_pytree__is_pytree", False):
        is_data = node._pytree__nodes  # noqa: SLF001  (Flax has no public way to ask for it)
    children: dict[Key, Any] = {
        name: value
        for name, value in sorted(vars(node).items())
        if not name.startswith(_BOOKKEEPING)
        and (_holds(value, (*_KINDS, jax.Array, np.ndarray)) if is_data is None else name in is_data and is_data[name])
    }
    if getattr(cls, "_pytree__has_int_keys", False):  # nnx.List
        return {Index(position): children[str(position)] for position in sorted(int(str(name)) for name in children)}
    return children


def _holds(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a value is of one of these types, or a plain container with such a value in it."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, types):
            return True
        if isinstance(value, list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return False


def _close_node(node: Any, children: dict[Key, Any]) -> Any:
    new = blank(type(node))
    copy_state(node, new)
    attributes = vars(new)
    for name in ("_pytree__state", "_object__state"):
        state = attributes.get(name)
        if state is not None:
            attributes[name] = close_record(state, {"_trace_state": type(state.trace_state)()})
    for key, child in children.items():
        attributes[str(key)] = child
    return new


def _put_node(node: Any, key: Key, value: Any) -> None:
    vars(node)[str(key)] = value


def _trained(node: Any) -> set[Key]:
    """The children in which there may be a Param. A bare array in a module is state that training does not change."""
    return {key for key, value in _open_node(node).items() if _holds(value, _KINDS)}


def _renew(pairs: Sequence[tuple[Any, Any]], _: Mapping[int, Any]) -> None:
    """Give new modules new Variables also where a walk left the old ones alone."""
    copies: dict[int, Any] = {}

    def fresh(variable: Any) -> Any:
        if id(variable) not in copies:
            copies[id(variable)] = _close_variable(variable, _open_variable(variable))
        return copies[id(variable)]

    for old, new in pairs:
        kind = kind_of(type(new))
        if not isinstance(kind, Branch) or kind.put is None:
            continue
        before = kind.open(old)
        for key, value in kind.open(new).items():
            if _is_variable(value):
                if value is before.get(key):
                    kind.put(new, key, fresh(value))
            elif not _is_nnx(value) and _holds(value, (Variable,)):
                # A plain container in a module: its own Variables, not those of modules in it, which are pairs here too.
                mine = {id(node) for _, (node,) in walk(before[key], where=_is_nnx) if _is_variable(node)}
                renewed_value = fmap(
                    lambda node, mine=mine: fresh(node) if id(node) in mine else node, value, where=_is_nnx
                )
                kind.put(new, key, renewed_value)


_NODE = Branch(open=_open_node, close=_close_node, put=_put_node, trainable=_trained, shared=True, finish=_renew)

# --- states ---


def _close_state(node: Any, children: dict[Key, Any]) -> Any:
    new = blank(type(node))
    vars(new).update(vars(node))
    vars(new)["_mapping"] = dict(children)
    return new


def _put_state(node: Any, key: Key, value: Any) -> None:
    vars(node)["_mapping"][key] = value


_STATE = Branch(
    open=lambda node: dict(vars(node)["_mapping"]), close=_close_state, put=_put_state, mapping=True, finish=_renew
)


def _find_nnx(cls: type) -> Kind | None:
    if issubclass(cls, Variable):
        return _VARIABLE
    if issubclass(cls, _VariableState):
        return _VARIABLE_STATE
    if issubclass(cls, Node):
        return _NODE
    if issubclass(cls, State):
        return _STATE
    return None


add_finder(_find_nnx)

# --- differentiation ---


def owns(model: Any) -> bool:
    """Whether there is an NNX module, state or Variable in a tree."""
    return any(True for _ in walk(model, where=_is_nnx))


def _differentiate(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> Differentiated:
    variables = [variable for _, (variable,) in walk(model, where=_is_variable)]

    def run(traced: Any) -> tuple[Any, Any]:
        copies = [copy for _, (copy,) in walk(traced, where=_is_variable)]
        before = [_raw(copy) for copy in copies]
        value, aux = outcome(loss(traced, *args, **kwargs), has_aux)
        changed = {
            i: _open_variable(copy)
            for i, (copy, raw) in enumerate(zip(copies, before, strict=True))
            if _raw(copy) is not raw or _is_ref(copy, raw)
        }
        return value, (aux, changed)

    found = differentiate_run(run, model)
    aux, changed = found.aux
    for i, content in changed.items():
        _put_variable(variables[i], content)
    return found._replace(aux=aux)


add_framework(Framework("Flax NNX", owns, _differentiate, is_pure_jax=True))

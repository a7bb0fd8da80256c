"""Torch modules: how they open into parameters, buffers and child modules, and how they close without their constructor.

A module's state is copied, its members are put in, and its other references are turned to the new parts (`torch_rewiring`).
Where a Parameter stood, a Parameter stands: a tensor that f returns for it is detached and wrapped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import Buffer, Module, Parameter
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from cowalk.frameworks.framework import keeps_history
from cowalk.frameworks.torch_rewiring import GROUPS, Rewiring
from cowalk.frameworks.torch_tensors import is_numeric, is_wrapped
from cowalk.tree.errors import KindError
from cowalk.tree.kinds import Box, Branch, Kind
from cowalk.tree.paths import Key
from cowalk.tree.records import blank, copy_state, slot_names

# Modules that stand around another one. Each by its exact class, so that a user's own child called `module` is a child.
_WRAPPERS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"): "_checkpoint_wrapped_module",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "OffloadWrapper"): "_checkpoint_wrapped_module",
}


def _open_module(module: Module) -> dict[Key, Any]:
    groups = (module.__dict__.get(group, {}) for group in GROUPS)
    return {name: member for group in groups for name, member in group.items() if member is not None}


def _close_module(module: Module, children: dict[Key, Any]) -> Module:
    new = blank(type(module))
    new.__dict__.update(module.__dict__)
    return _filled(new, children)


def _close_slotted(module: Module, children: dict[Key, Any]) -> Module:
    new = blank(type(module))
    copy_state(module, new)
    return _filled(new, children)


def _filled(new: Module, children: dict[Key, Any]) -> Module:
    state = new.__dict__
    state["_compiled_call_impl"] = None  # compiled for the old module
    for group in GROUPS:
        if group in state:
            members = state[group] = state[group].copy()
            members.update({name: children[name] for name, member in members.items() if member is not None})
    return new


def _finish_modules(pairs: Sequence[tuple[Module, Module]], renewed: Mapping[int, Any]) -> None:
    """Make parameters of the tensors that stand for some, and turn every other reference to the new parts."""
    parts: dict[int, Any] = {id(old): new for old, new in reversed(pairs)}
    # By the ids of the old member and the result. Results are held, so that no id comes to mean two objects.
    made: dict[tuple[int, int], tuple[Any, Any]] = {}
    for old, new in pairs:
        for group in GROUPS[:2]:
            members = new.__dict__.get(group, {})
            for name, before in old.__dict__.get(group, {}).items():
                value = members.get(name)
                if before is not None and value is not None:
                    tie = (id(before), id(value))
                    if tie not in made:
                        made[tie] = value, _as_member(before, value)
                    members[name] = made[tie][1]
                    parts.setdefault(id(before), members[name])
    Rewiring({**renewed, **parts}).mend(pairs, [new for value, new in made.values() if new is not value])


def _as_member(before: Any, value: Any) -> Any:
    """A value as the kind of member that it takes the place of: a parameter, a buffer, or just what it is."""
    if not isinstance(value, torch.Tensor) or is_wrapped(value):  # inside of torch.func its gradient is still wanted
        return value
    if keeps_history(value):
        return value
    if isinstance(before, Parameter) and not isinstance(value, Parameter):
        cls: Any = type(before)  # a tensor of another class may be marked as a parameter
        if not issubclass(cls, Parameter) or issubclass(cls, UninitializedTensorMixin):
            cls = Parameter
        made = Parameter.__new__(cls, value.detach(), requires_grad=before.requires_grad and is_numeric(value))
        vars(made).update(vars(before))  # marks that users set on parameters
        return made
    if isinstance(before, Buffer) and not isinstance(value, Buffer):
        return Buffer(value, persistent=before.persistent)
    return value


def _trainable_members(module: Module) -> Collection[Key]:
    parameters = module.__dict__.get("_parameters", {})
    trained = [name for name, parameter in parameters.items() if parameter is not None and parameter.requires_grad]
    return [*trained, *module.__dict__.get("_modules", {})]


def _put_member(module: Module, name: Any, value: Any) -> None:
    for group in GROUPS:
        members = module.__dict__.get(group, {})
        if name in members:
            members[name] = _as_member(members[name], value)


_MODULE = Branch(
    _open_module,
    _close_module,
    put=_put_member,
    trainable=_trainable_members,
    shared=True,
    finish=_finish_modules,
    layout="groups",
    names=GROUPS,
)
_SLOTTED = replace(_MODULE, close=_close_slotted)


# --- modules that stand around another one, or are compiled code ---


def _open_script(module: Any) -> dict[Key, Any]:
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
        **dict(module.named_children()),
    }


def _close_script(module: Any, _: dict[Key, Any]) -> Any:
    raise KindError(
        f"a {type(module).__name__} is compiled code and cannot be rebuilt; use fmapstructure, or fmap_ in place"
    )


def _held_module(name: str, wrapper: Module) -> Any:
    return wrapper.__dict__["_modules"][name]


def find_module(cls: type) -> Kind:
    """The kind of a class of modules."""
    for base in cls.__mro__:
        held = _WRAPPERS.get((base.__module__, base.__qualname__))
        if held is not None:
            return Box(partial(_held_module, held), lambda _, content: content)
    if issubclass(cls, torch.jit.ScriptModule):
        return Branch(_open_script, _close_script, shared=True)
    return _SLOTTED if slot_names(cls) else _MODULE

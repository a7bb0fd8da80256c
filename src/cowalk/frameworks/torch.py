"""PyTorch: tensors are leaves with identity, modules open into parameters, buffers and child modules, losses are differentiated.

A module closes without its constructor: its state is copied, its parameters, buffers and children are put in, and references
of its own that are no children (an LSTM's flat weights, a plain list of its blocks, hooks that are its methods) are turned
to the new ones. Where a Parameter stood, a Parameter stands: a tensor that f returns for it is detached and wrapped.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Buffer, Module, Parameter
from torch.nn.modules.module import _WrappedHook
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from cowalk.frameworks.framework import Differentiated, Framework, add_framework
from cowalk.frameworks.numpy import overlap
from cowalk.tree.engine import add_tracing_test
from cowalk.tree.errors import CowalkError, KindError
from cowalk.tree.kinds import (
    PLAIN_LEAF,
    Box,
    Branch,
    Kind,
    Leaf,
    add_finder,
    isnumeric,
    istrainable,
    set_kind,
    set_subclass_kind,
)
from cowalk.tree.matching import unbox
from cowalk.tree.paths import Index, Key, Path
from cowalk.tree.records import UNSET, blank, copy_state, read, slot_names, write
from cowalk.tree.walk import fmap, fmapstructure, walk

add_tracing_test(torch.compiler.is_dynamo_compiling)

# --- tensors ---


def _is_numeric(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _no_memory(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no memory that could be read or written, or None."""
    if isinstance(tensor, UninitializedTensorMixin):
        return "the parameter is lazy and has no shape yet; run the model once"
    if tensor.device.type == "meta":
        return "the tensor is on the meta device and has no values"
    return None


def _unwritable(tensor: torch.Tensor) -> str | None:
    reason = _no_memory(tensor)
    if reason is not None:
        return reason
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode, outside of which it cannot be written"
    if tensor.layout is torch.strided and not _is_wrapped(tensor):
        return overlap(tuple(tensor.shape), tensor.stride())
    return None


def _misfit(tensor: torch.Tensor, value: Any) -> str | None:
    try:
        made = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return f"the result is a {type(value).__name__}, of which no tensor can be made"
    reason = _no_memory(made)
    if reason is not None:
        return f"the result has no values: {reason}"
    if made.layout != tensor.layout:
        return f"the result is {made.layout}, the tensor {tensor.layout}"
    if made.shape != tensor.shape:
        return f"the result has shape {tuple(made.shape)}, the tensor {tuple(tensor.shape)}"
    if not torch.can_cast(made.dtype, tensor.dtype):
        return f"the result is {made.dtype}, which a tensor of {tensor.dtype} cannot hold"
    return None


def _write(tensor: torch.Tensor, value: Any) -> None:
    with torch.no_grad():
        tensor.copy_(torch.as_tensor(value))


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor exists only inside of torch.func (vmap, grad)."""
    functorch: Any = torch._C._functorch  # noqa: SLF001  # pyright: ignore  (there is no public way)
    return functorch.is_functorch_wrapped_tensor(tensor)


def _memory(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a tensor's values and the one past the last, or None if there is no such thing."""
    if isinstance(tensor, UninitializedTensorMixin) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # tensors that wrap others, fake ones
        return None
    if start == 0:
        return None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    memory = _memory(one)
    return (
        memory is not None
        and memory == _memory(other)
        and (one.shape, one.stride(), one.dtype, one.device) == (other.shape, other.stride(), other.dtype, other.device)
    )


def _span(tensor: torch.Tensor) -> tuple[Hashable, int, int] | None:
    memory = _memory(tensor)
    return None if memory is None else (str(tensor.device), *memory)


_TENSOR = Leaf(
    ties=True,
    numeric=_is_numeric,
    same=_same,
    unwritable=_unwritable,
    write=_write,
    check=_misfit,
    traced=_is_wrapped,
    span=_span,
)
set_subclass_kind(torch.Tensor, _TENSOR)
for _cls in (torch.Tensor, Parameter):  # by themselves too: torch.compile cannot trace a search through their bases
    set_kind(_cls, _TENSOR)
set_kind(torch.Size, PLAIN_LEAF)


# --- modules ---

_GROUPS = ("_parameters", "_buffers", "_modules")
# What torch itself keeps in dicts and sets of every module: its members, hooks and the like.
_BOOKKEEPING = frozenset(name for name, value in Module().__dict__.items() if isinstance(value, dict | set))
_PLAIN = frozenset({list, set, dict, OrderedDict, defaultdict, deque})
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
    groups = (module.__dict__.get(group, {}) for group in _GROUPS)
    return {name: member for group in groups for name, member in group.items() if member is not None}


def _close_module(module: Module, children: dict[Key, Any]) -> Module:
    new = blank(type(module))
    copy_state(module, new)
    new.__dict__["_compiled_call_impl"] = None  # compiled for the old module
    for group in _GROUPS:
        if group in new.__dict__:
            members = new.__dict__[group] = new.__dict__[group].copy()
            members.update({name: children[name] for name, member in members.items() if member is not None})
    return new


def _finish_modules(pairs: Sequence[tuple[Module, Module]], renewed: Mapping[int, Any]) -> None:
    """Make parameters of the tensors that stand for some, and turn every other reference to the new parts."""
    parts: dict[int, Any] = {id(old): new for old, new in reversed(pairs)}
    # By the ids of the old member and the result. Results are held, so that no id comes to mean two objects.
    made: dict[tuple[int, int], tuple[Any, Any]] = {}
    for old, new in pairs:
        for group in _GROUPS[:2]:
            members = new.__dict__.get(group, {})
            for name, before in old.__dict__.get(group, {}).items():
                value = members.get(name)
                if before is not None and value is not None:
                    tie = (id(before), id(value))
                    if tie not in made:
                        made[tie] = value, _as_member(before, value)
                    members[name] = made[tie][1]
                    parts.setdefault(id(before), members[name])
    _Turning({**renewed, **parts}).mend(pairs, [new for value, new in made.values() if new is not value])


def _as_member(before: Any, value: Any) -> Any:
    """A value as the kind of member that it takes the place of: a parameter, a buffer, or just what it is."""
    if not isinstance(value, torch.Tensor) or _is_wrapped(value):  # inside of torch.func its gradient is still wanted
        return value
    if isinstance(before, Parameter) and not isinstance(value, Parameter):
        cls: Any = type(before)  # a tensor of another class may be marked as a parameter
        if not issubclass(cls, Parameter) or issubclass(cls, UninitializedTensorMixin):
            cls = Parameter
        made = Parameter.__new__(cls, value.detach(), requires_grad=before.requires_grad and _is_numeric(value))
        vars(made).update(vars(before))  # marks that users set on parameters
        return made
    if isinstance(before, Buffer) and not isinstance(value, Buffer):
        return Buffer(value, persistent=before.persistent)
    return value


class _Turning:
    """Turns what modules hold beside their members to the new parts: references, also inside of plain containers.

    Plain containers become new ones, so that a new module shares none with the old one. What stands in one place of the old
    modules stands in one place of the new ones.
    """

    def __init__(self, parts: dict[int, Any]) -> None:
        self.parts = parts
        self.unfilled: list[tuple[Any, Any]] = []

    def mend(self, pairs: Sequence[tuple[Module, Module]], parameters: Sequence[Any]) -> None:
        for old, new in pairs:
            for name in _BOOKKEEPING & old.__dict__.keys():
                if name in _GROUPS:
                    self.parts.setdefault(id(old.__dict__[name]), new.__dict__[name])
                else:
                    self.shell(old.__dict__[name])
        slots: dict[type, list[str]] = {}
        for _, new in pairs:
            for name, value in new.__dict__.items():
                if name not in _GROUPS:
                    new.__dict__[name] = self.turn(value)
            for name in slots.setdefault(type(new), slot_names(type(new))):
                value = read(new, name)
                if value is not UNSET:
                    write(new, name, self.turn(value))
        for parameter in parameters:
            for name, value in parameter.__dict__.items():
                parameter.__dict__[name] = self.turn(value)
        while self.unfilled:
            self.fill(*self.unfilled.pop())

    def turn(self, value: Any) -> Any:
        if id(value) in self.parts:
            return self.parts[id(value)]
        cls = type(value)
        if cls in _PLAIN:
            return self.shell(value)
        if isinstance(value, Module):
            inner, _ = unbox(value)  # a wrapper's place is taken by what it held
            return self.parts.get(id(inner), value)
        turned = _TURNED.get(cls)
        return value if turned is None else turned(self, value)

    def shell(self, container: Any) -> Any:
        """A new container to be filled later: containers may hold each other, and may be nested deeply."""
        new = container.copy()
        self.parts[id(container)] = new
        if container:
            self.unfilled.append((container, new))
        return new

    def fill(self, container: Any, new: Any) -> None:
        items = list(container.items() if isinstance(container, dict) else container)
        new.clear()
        if isinstance(container, dict):
            new.update((self.turn(key), self.turn(value)) for key, value in items)
        elif isinstance(container, set):
            new.update(map(self.turn, items))
        else:
            new.extend(map(self.turn, items))

    def turn_tuple(self, value: Any) -> Any:
        items = tuple(map(self.turn, value))
        return value if all(one is other for one, other in zip(items, value, strict=True)) else items

    def turn_method(self, value: Any) -> Any:
        owner = self.turn(value.__self__) if isinstance(value.__self__, Module) else value.__self__
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)

    def turn_partial(self, value: Any) -> Any:
        return partial(
            self.turn(value.func), *map(self.turn, value.args), **{k: self.turn(v) for k, v in value.keywords.items()}
        )

    def turn_reference(self, value: Any) -> Any:
        """A weak reference; what it refers to is turned only if it is a part, never made anew."""
        target = value()
        return weakref.ref(self.parts[id(target)]) if target is not None and id(target) in self.parts else value

    def turn_state(self, value: Any) -> Any:
        """A hook of torch's, or the handle that removes one: an object that is all in its attributes."""
        new = blank(type(value))
        new.__dict__.update({name: self.turn(attribute) for name, attribute in value.__dict__.items()})
        return new


_TURNED: dict[type, Callable[[_Turning, Any], Any]] = {
    tuple: _Turning.turn_tuple,
    types.MethodType: _Turning.turn_method,
    partial: _Turning.turn_partial,
    weakref.ref: _Turning.turn_reference,
    RemovableHandle: _Turning.turn_state,
    _WrappedHook: _Turning.turn_state,
}


def _trainable_members(module: Module) -> Collection[Key]:
    parameters = module.__dict__.get("_parameters", {})
    trained = [name for name, parameter in parameters.items() if parameter is not None and parameter.requires_grad]
    return [*trained, *module.__dict__.get("_modules", {})]


def _put_member(module: Module, name: Any, value: Any) -> None:
    for group in _GROUPS:
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
    names=_GROUPS,
)


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


def _find_module(cls: type) -> Kind:
    for base in cls.__mro__:
        held = _WRAPPERS.get((base.__module__, base.__qualname__))
        if held is not None:
            return Box(partial(_held_module, held), lambda _, content: content)
    if issubclass(cls, torch.jit.ScriptModule):
        return Branch(_open_script, _close_script, shared=True)
    return _MODULE


set_subclass_kind(Module, _find_module)


# --- types registered with torch's pytree ---


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


def _find_registered(cls: type) -> Kind | None:
    registration: Any = pytree.SUPPORTED_NODES.get(cls)
    if registration is None or hasattr(cls, "n_sequence_fields"):  # struct sequences open by their fields' names
        return None

    def open_registered(node: Any) -> dict[Key, Any]:
        if registration.flatten_with_keys_fn is None:
            return {Index(i): child for i, child in enumerate(registration.flatten_fn(node)[0])}
        return {_key(entry): child for entry, child in registration.flatten_with_keys_fn(node)[0]}

    def close_registered(node: Any, children: dict[Key, Any]) -> Any:
        return registration.unflatten_fn(list(children.values()), registration.flatten_fn(node)[1])

    return Branch(open_registered, close_registered, mapping=issubclass(cls, Mapping))


add_finder(_find_registered)


# --- gradients ---


def owns(model: Any) -> bool:
    """Whether a model is a torch module, or a tree that holds a tensor."""
    return isinstance(model, Module) or any(True for _ in walk(model, where=torch.Tensor))


def differentiate(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> Differentiated:
    """The gradients of a loss in the tensors that require one.

    In a tree without modules where no tensor requires a gradient, all floating and complex ones count: the loss is then called
    with copies of them that do.
    """
    places = {path: tensor for path, (tensor,) in walk(model, where=istrainable) if tensor.requires_grad}
    if not places and not any(True for _ in walk(model, where=Module)):
        model = fmap(lambda tensor: tensor.detach().clone().requires_grad_(), model, where=_is_numeric_tensor)
        places = {path: tensor for path, (tensor,) in walk(model, where=_is_numeric_tensor)}
    with torch.enable_grad():
        result = loss(model, *args, **kwargs)
    value, aux = _outcome(result, has_aux)
    grads: Sequence[Any] = (None,) * len(places)
    if places and value.requires_grad:
        grads = torch.autograd.grad(value, list(places.values()), allow_unused=True)
    found = dict(zip(places, grads, strict=True))
    return Differentiated(value.detach(), aux, _under_paths(model, found))


def _is_numeric_tensor(node: Any) -> bool:
    return isinstance(node, torch.Tensor) and isnumeric(node)


def _under_paths(model: Any, found: Mapping[Path, Any]) -> Any:
    """Plain containers in the model's shape with what was found at each path; a tie's other paths hold None."""
    return fmapstructure(lambda path, _: found.get(path), model, ties="each", with_path=True)


def _outcome(result: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            f"with has_aux=True the loss returns a pair (loss, aux), but it returned a {type(result).__name__}"
        )
    value, aux = result if has_aux else (result, None)
    if not isinstance(value, torch.Tensor):
        raise ValueError(  # noqa: TRY004  (one error for every loss that is no scalar)
            f"the loss must be a scalar tensor, but it is a {type(value).__name__}"
            + (
                "; if it returns (loss, aux), use value_and_gradient(…, has_aux=True)"
                if isinstance(value, tuple)
                else ""
            )
        )
    if value.numel() != 1:
        raise ValueError(
            f"the loss must be a scalar, but it has shape {tuple(value.shape)}; return its mean or its sum"
        )
    if value.dtype.is_complex:
        raise ValueError("the loss must be real, but it is complex; return its real part or its modulus")
    return value, aux


def stored_gradients(model: Any) -> Any:
    """The `.grad` of every leaf tensor of a model."""
    found: dict[Path, Any] = {}
    for path, (tensor,) in walk(model, where=torch.Tensor):
        if tensor.is_leaf and tensor.grad is not None:
            found[path] = tensor.grad
    return _under_paths(model, found)


def optimizer_state(model: Any, optimizer: Any) -> Any:
    """An optimizer's state of each parameter, found by the parameter's identity.

    Raises:
        CowalkError: `optimizer` is no optimizer (a state dict names parameters by position, which says nothing), or it has
            state but none of it belongs to this model.
    """
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        raise CowalkError(
            f"expected a torch optimizer, got {type(optimizer).__name__}. The state_dict of an optimizer knows its parameters by "
            "position only; load it into an optimizer over this model's parameters first."
        )
    found = {path: dict(state[tensor]) for path, (tensor,) in walk(model, where=torch.Tensor) if state.get(tensor)}
    if state and not found:
        raise CowalkError(
            f"this {type(optimizer).__name__} has state of {len(state)} parameters, but none of them belongs to this model: it "
            "was made for other parameters (before the model was copied, moved or rebuilt?)"
        )
    return _under_paths(model, found)


add_framework(Framework("PyTorch", owns, differentiate, stored_gradients, optimizer_state))

"""PyTorch: what cowalk learns of it when it is there, how a loss is differentiated, and where gradients and states are found.

Tensors: torch_tensors. Modules: torch_modules, torch_rewiring. What torch's own pytree knows: torch_pytree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from cowalk.frameworks.framework import (
    Differentiated,
    Framework,
    Hyperparameters,
    ParameterState,
    add_framework,
    with_history,
)
from cowalk.frameworks.torch_modules import find_module
from cowalk.frameworks.torch_pytree import find_registered
from cowalk.frameworks.torch_tensors import TENSOR
from cowalk.tree.engine import add_tracing_test
from cowalk.tree.errors import CowalkError
from cowalk.tree.kinds import PLAIN_LEAF, add_finder, isnumeric, istrainable, set_kind, set_subclass_kind
from cowalk.tree.paths import Path
from cowalk.tree.walk import fmap, fmapstructure, walk

add_tracing_test(torch.compiler.is_dynamo_compiling)
set_subclass_kind(torch.Tensor, TENSOR)
for _cls in (torch.Tensor, Parameter):  # by themselves too: torch.compile cannot trace a search through their bases
    set_kind(_cls, TENSOR)
set_kind(torch.Size, PLAIN_LEAF)
set_subclass_kind(Module, find_module)
add_finder(find_registered)


# --- gradients ---


def owns(model: Any) -> bool:
    """Whether a model is a torch module, or a tree that holds a tensor."""
    return isinstance(model, Module) or any(True for _ in walk(model, where=torch.Tensor))


def differentiate(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> Differentiated:
    """The gradients of a loss in the tensors that require one.

    In a tree without modules and parameters where no tensor requires a gradient, all floating and complex ones count: the loss
    is then called with copies of them that do. A model that is distributed over processes (DDP) gives the gradients of this one.

    Raises:
        CowalkError: a module is sharded (FSDP): the tensors that it computes with are not its parameters.
        ValueError: the loss is no real scalar.
    """
    _refuse_sharded(model)
    with torch.inference_mode(mode=False), torch.enable_grad():  # switched off, they would make all gradients missing
        return _differentiate(loss, model, args, kwargs, has_aux)


def _differentiate(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> Differentiated:
    places = {path: tensor for path, (tensor,) in walk(model, where=istrainable) if tensor.requires_grad}
    if not places and not any(True for _ in walk(model, where=(Module, Parameter))):
        model = fmap(lambda tensor: tensor.detach().clone().requires_grad_(), model, where=_is_numeric_tensor)
        places = {path: tensor for path, (tensor,) in walk(model, where=_is_numeric_tensor)}
    value, aux = _outcome(loss(model, *args, **kwargs), has_aux)
    grads: Sequence[Any] = (None,) * len(places)
    if places and value.requires_grad:
        grads = torch.autograd.grad(value, list(places.values()), allow_unused=True)
    found = dict(zip(places, grads, strict=True))
    return Differentiated(value.detach(), aux, _under_paths(model, found))


def _refuse_sharded(model: Any) -> None:
    sharded: Any = sys.modules.get("torch.distributed.fsdp")
    if sharded is None:
        return
    classes = tuple(
        getattr(sharded, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(sharded, name)
    )
    if any(isinstance(each, classes) for _, (module,) in walk(model, where=Module) for each in module.modules()):
        raise CowalkError(
            "the gradients of a sharded model (FSDP) come into being by its own hooks: call loss.backward(), and then "
            "cowalk.gradients_of(model)"
        )


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
    state = _state_of(optimizer)
    if not isinstance(state, Mapping):
        raise CowalkError(
            f"expected a torch optimizer, got {type(optimizer).__name__}. The state_dict of an optimizer knows its parameters by "
            "position only; load it into an optimizer over this model's parameters first."
        )
    found = {
        path: ParameterState(state[tensor]) for path, (tensor,) in walk(model, where=torch.Tensor) if state.get(tensor)
    }
    if state and not found:
        raise CowalkError(
            f"this {type(optimizer).__name__} has state of {len(state)} parameters, but none of them belongs to this model: it "
            "was made for other parameters (before the model was copied, moved or rebuilt?)"
        )
    return _under_paths(model, found)


def hyperparameters(model: Any, optimizer: Any) -> dict[Path, Hyperparameters] | None:
    """The settings of each parameter that an optimizer owns, found by the parameter's identity."""
    while not isinstance(groups := getattr(optimizer, "param_groups", None), list):
        optimizer = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None)
        if optimizer is None:
            return None
    owned: dict[int, Hyperparameters] = {}
    for group in groups:
        settings = Hyperparameters(_number(group.get("lr")), group.get("betas"), group.get("eps"))
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            owned[id(parameter)] = settings._replace(step=None if step is None else _number(step))
    tensors = walk(model, where=torch.Tensor, ties="each")
    return {path: owned[id(tensor)] for path, (tensor,) in tensors if id(tensor) in owned}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)  # a learning rate may be a tensor


def _state_of(optimizer: Any) -> Any:
    """An optimizer's own state, or that of the optimizer it stands around (ZeRO's, a scheduler's, a user's wrapper)."""
    state = getattr(optimizer, "state", None)
    for name in ("optim", "optimizer"):
        inner = getattr(optimizer, name, None)
        if not state and inner is not None and inner is not optimizer:
            state = _state_of(inner)
    return state


add_framework(
    Framework("PyTorch", owns, differentiate, stored_gradients, optimizer_state, hyperparameters, with_history)
)

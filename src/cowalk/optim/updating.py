"""`update` and `update_`: one walk over a model, its gradients and the state of its optimizer, and one step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from cowalk.frameworks.framework import TiedGradients, joins_ties
from cowalk.optim import in_place
from cowalk.optim.applying import Work, apply, groups_of
from cowalk.optim.arrays import as_like, copied, is_jax, is_parameter, is_tensor
from cowalk.optim.rules.composing import NotTrained
from cowalk.optim.rules.rule import Rule
from cowalk.optim.state import LeafState, OptimizerState, without_history
from cowalk.tree import (
    MISSING,
    CowalkError,
    Path,
    StructureError,
    aliases,
    diff,
    fmap,
    fmap_,
    istrainable,
    kind_of,
    walk,
)
from cowalk.tree.inplace import WriteError
from cowalk.tree.kinds import Leaf


class UpdateError(CowalkError, TypeError):
    """What was given to `update` is not a state, a model and its gradients. `paths` are the places that it is about."""

    def __init__(self, message: str, paths: tuple[Path, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.paths = paths

    def __reduce__(self) -> tuple[type[UpdateError], tuple[str, tuple[Path, ...]]]:
        return UpdateError, (self.message, self.paths)


_FORGOTTEN: Any = object()


def update(
    state: OptimizerState,
    model: Any,
    gradients: Any = _FORGOTTEN,
    *,
    grads: TiedGradients | None = None,
    strict: bool = True,
) -> tuple[OptimizerState, Any]:
    """One step of an optimizer: a new state and a new model. Nothing that was given is changed.

    A parameter whose gradient is missing is left alone, and so is what its rule keeps of it; one whose gradient is zero is
    not. Frozen parameters are passed by. Parameters keep their dtype.

    Args:
        state: from `setup`, or from the last `update`.
        model: the model that it was made for.
        gradients: a tree of gradients, matched to the model by key; those of `cowalk.gradient` or of any framework.
        grads: what stands at the paths of a tied parameter: "total", the whole gradient at each of them that has one, or
            "per_position", parts that are added up. By default total for torch, Keras and NNX, whose gradients are, and per
            position for trees of NumPy arrays.
        strict: absent and extra keys in `gradients` are errors; if False, absent means missing and extras are ignored.

    Returns:
        (state, model): with the same types as what was given.

    Raises:
        UpdateError: no state, no gradients, or gradients of another shape than their parameters.
        StructureError, TieError: the gradients do not fit the model, or differ within a tie.

    >>> import jax.numpy as jnp, cowalk
    >>> model = {"w": jnp.array([1.0, 2.0]), "unused": jnp.array([3.0])}
    >>> state = cowalk.setup(cowalk.optim.Descent(0.5), model)
    >>> state, model = cowalk.update(state, model, {"w": jnp.array([2.0, 2.0]), "unused": None})
    >>> model["w"].tolist(), model["unused"].tolist()
    ([0.0, 1.0], [3.0])
    """
    _check(state, model, gradients)
    found = _collected(state, model, gradients, grads, strict)
    if _is_functional(found):
        new_state, new = _updated(state, found)
        return new_state, fmap(lambda path, x: new.get(path, x), model, where=istrainable, with_path=True)
    state = state.copy()
    with without_history():
        model = fmap(_copied, model, where=istrainable)
    return state, update_(state, model, gradients, grads=grads, strict=strict)


def update_(
    state: OptimizerState,
    model: Any,
    gradients: Any = _FORGOTTEN,
    *,
    grads: TiedGradients | None = None,
    strict: bool = True,
) -> Any:
    """One step of an optimizer, in place: into the model's arrays (its Parameters stay the same objects) and into the state.

    JAX arrays, which cannot change, are replaced in the containers that hold them.

    Returns:
        The model, the same object. Otherwise as `update`.

    Raises:
        WriteError: arrays that cannot be written (read-only, or overlapping in memory), or JAX arrays in containers that cannot.
        Whatever `update` raises. All is checked before anything is written.

    >>> import torch, cowalk
    >>> model = torch.nn.Linear(2, 1)
    >>> state = cowalk.setup(cowalk.optim.AdamW(1e-3), model)
    >>> grads = cowalk.gradient(lambda m, x: m(x).square().mean(), model, torch.ones(4, 2))
    >>> cowalk.update_(state, model, grads) is model
    True
    """
    _check(state, model, gradients)
    found = _collected(state, model, gradients, grads, strict)
    if _is_functional(found):
        new_state, new = _updated(state, found)
        try:
            fmap_(lambda path, x: new.get(path, x), model, where=istrainable, with_path=True)
        except WriteError as error:
            error.add_note(
                "JAX arrays cannot change, nor can what holds these: state, model = cowalk.update(state, model, …)"
            )
            raise
        fresh = dict(new_state.all_leaves())
        for path, leaf in state.all_leaves():
            leaf.update(fresh[path])
        state.shared.update(new_state.shared)
        state.step = new_state.step
        return model
    _check_writable(found, model)
    parameters = {id(x) for _, x, _, _ in found}
    present = [
        (path, x, copied(gradient) if id(gradient) in parameters and gradient is not x else gradient, leaf)
        for path, x, gradient, leaf in found
        if gradient is not None  # one that is another parameter must not change with it
    ]
    works = [Work(path, leaf, x, gradient) for path, x, gradient, leaf in present]
    with without_history():
        apply(groups_of([leaf.rule for *_, leaf in present], works, state.step), _over_arrays, in_place.run)
    state.step += 1
    return model


def _copied(x: Any) -> Any:
    new = copied(x)
    return new.requires_grad_(x.requires_grad) if is_tensor(x) else new


Found = list[tuple[Path, Any, Any, LeafState]]
"""Path, parameter, gradient (None: missing, or frozen), and what is kept."""


def _over_arrays(rule: Rule, works: dict[str, Work]) -> Mapping[str, Any]:
    over: Any = rule
    return over.apply_tree(None, {}, {path: work.gradient for path, work in works.items()})[1]


def _check(state: Any, model: Any, gradients: Any) -> None:
    if isinstance(state, Rule):
        raise UpdateError(
            f"update begins with the state of {type(state).__name__}, not with the rule: state = cowalk.setup(rule, model)"
        )
    if not isinstance(state, OptimizerState):
        raise UpdateError(f"update begins with a state from cowalk.setup, not with a {type(state).__name__}")
    if isinstance(model, OptimizerState):
        raise UpdateError("update takes the state first, then the model, then its gradients")
    if gradients is _FORGOTTEN or gradients is None:
        raise UpdateError(
            "update takes the gradients too: cowalk.update(state, model, gradients). After loss.backward() they are "
            "cowalk.gradients_of(model); cowalk.gradient(loss, model, …) makes them in any framework"
        )


def _is_functional(found: Found) -> bool:
    """Whether a model's parameters are JAX arrays."""
    return any(is_jax(x) for _, x, _, _ in found)


_OTHER_MODEL = "This is about the state, which is of another model: cowalk.setup(rule, model) makes one for this."


def _collected(state: OptimizerState, model: Any, gradients: Any, grads: TiedGradients | None, strict: bool) -> Found:
    """The trained parameters with their gradients and states."""
    trees = model, gradients, state
    found: Found = []
    misfits: list[tuple[Path, str]] = []
    try:
        walked = walk(*trees, where=istrainable, missing="pass", strict=strict, ties=joins_ties(model, grads))
    except StructureError as error:
        of_state = [difference for difference in error.differences if difference.tree == 2]
        raise StructureError(of_state, _OTHER_MODEL) if of_state else error from None
    for path, (x, gradient, leaf) in walked:
        if leaf is MISSING:
            if gradient is not MISSING:
                raise UpdateError(
                    f"{path} has a gradient, and the state nothing of it: it was not trained, or not there, when the state was "
                    "made. Call cowalk.setup(rule, model) again",
                    (path,),
                )
            continue
        if not isinstance(leaf, LeafState):
            raise UpdateError(f"{path}: the state has a {type(leaf).__name__} here; it is not of this model", (path,))
        if gradient is MISSING or leaf.frozen or isinstance(leaf.rule, NotTrained):
            found.append((path, x, None, leaf))
            continue
        _check_of_model(path, x, gradient, leaf)
        gradient = as_like(gradient, x)
        if gradient.shape != x.shape:
            misfits.append((path, f"the gradient has shape {tuple(gradient.shape)}, the parameter {tuple(x.shape)}"))
        found.append((path, x, gradient, leaf))
    if len(found) < state.count or not strict:  # a state is never missing a part by accident
        differences = diff(model, state, where=istrainable) if len(found) == state.count else diff(model, state)
        if differences:
            raise StructureError(differences, _OTHER_MODEL)
    if found and not any(gradient is not None or leaf.frozen for _, _, gradient, leaf in found):
        warnings.warn(
            "cowalk.update: there is no gradient at all, so nothing is updated. Was backward() called, and no zero_grad() since?",
            stacklevel=3,
        )
    if misfits:
        shown = "".join(f"\n  {path}: {text}" for path, text in misfits[:6])
        more = f"\n  … and {len(misfits) - 6} more (all in .paths)" if len(misfits) > 6 else ""
        raise UpdateError(
            f"{len(misfits)} gradient{'s' * (len(misfits) > 1)} of another shape than the parameter:{shown}{more}",
            tuple(path for path, _ in misfits),
        )
    return found


def _check_of_model(path: Path, x: Any, gradient: Any, leaf: LeafState) -> None:
    """Refuse a parameter in the place of its gradient, and a state that was made for another parameter."""
    if getattr(gradient, "requires_grad", False) and is_parameter(gradient):
        raise UpdateError(
            f"{path}: what stands for a gradient is a Parameter. update takes the model before its gradients: "
            "cowalk.update(state, model, gradients)",
            (path,),
        )
    if leaf.shape is not None and leaf.shape != x.shape:
        raise UpdateError(
            f"{path}: the state was made for a parameter of shape {leaf.shape}, and this one has {tuple(x.shape)}: it is of "
            "another model. cowalk.setup(rule, model) makes one for this",
            (path,),
        )
    if leaf.dtype is not None and leaf.dtype != x.dtype:
        raise UpdateError(
            f"{path}: the state was made for a parameter of {leaf.dtype}, and this one is of {x.dtype}. "
            "cowalk.setup(rule, model) makes one for this",
            (path,),
        )


def _check_writable(found: Found, model: Any) -> None:
    """Refuse arrays that cannot be written, and such as share memory with others."""
    problems: list[tuple[Path, str]] = []
    new = False
    for path, x, gradient, leaf in found:
        is_known = leaf.checked_for(x)
        new = new or not is_known
        if gradient is None or (is_known and is_tensor(x)):  # NumPy's arrays may become read-only
            continue
        kind = kind_of(type(x))
        reason = kind.unwritable(x) if isinstance(kind, Leaf) and kind.unwritable is not None else None
        if reason is not None:
            problems.append((path, reason))
    if new:
        own = {str(path) for path, *_ in found}
        for alias in aliases(model):
            names = [path for path in alias.paths if str(path) in own]
            if len(names) > 1:
                problems.append((names[1], f"it lies in the memory of {names[0]}, so that both would be updated twice"))
    if problems:
        raise WriteError(problems)
    if new:
        for _, x, _, leaf in found:
            leaf.mark_checked(x)


def _updated(state: OptimizerState, found: Found) -> tuple[OptimizerState, dict[Path, Any]]:
    """The state after one update, and the new parameters, of JAX arrays."""
    from cowalk.optim import functional

    present = [(path, x, gradient, leaf) for path, x, gradient, leaf in found if gradient is not None]
    rules = tuple(state.shared)
    members = tuple(tuple(str(path) for path, _, _, leaf in found if rule in leaf.rule.stages) for rule in rules)
    concerned = {name for each in members for name in each}
    static = functional.Static(
        tuple(str(path) for path, *_ in present), tuple(leaf.rule for *_, leaf in present), rules, members
    )
    arrays = functional.Arrays(
        [dict(leaf) for *_, leaf in present],
        [x for _, x, _, _ in present],
        [gradient for _, _, gradient, _ in present],
        {str(path): x for path, x, gradient, _ in found if gradient is None and str(path) in concerned},
        list(state.shared.values()),
        state.step,
    )
    kept, xs, shared = functional.update(static, arrays)
    fresh = {path: after for (path, *_), after in zip(present, kept, strict=True)}
    new = state.with_leaves(lambda path, leaf: leaf.like(fresh.get(path)))
    new.shared = dict(zip(rules, shared, strict=True))
    new.step = state.step + 1
    return new, {path: x for (path, *_), x in zip(present, xs, strict=True)}

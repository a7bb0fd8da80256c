"""Segments of rules run on JAX arrays: new arrays for old ones, in one compiled call for the whole tree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cowalk.optim.applying import Group, Segment, Work, apply, groups_of
from cowalk.optim.arrays import cast, is_traced
from cowalk.optim.rules.composing import MixedPrecision
from cowalk.optim.rules.rule import Rule


class Arrays(NamedTuple):
    """What an update of JAX arrays begins with.

    Attributes:
        kept: what the rule of each parameter keeps of it.
        xs, gradients: of the parameters that have a gradient.
        others: the parameters without one, that rules over the tree look at, by path.
        shared: the states of those rules.
        step: how many updates there were.
    """

    kept: list[Any]
    xs: list[Any]
    gradients: list[Any]
    others: dict[str, Any]
    shared: list[Any]
    step: Any


class Static(NamedTuple):
    """What a compiled update is compiled for: the paths and rules of the parameters, and the rules that share a state."""

    paths: tuple[str, ...]
    rules: tuple[Rule, ...]
    shared: tuple[Rule, ...]
    members: tuple[tuple[str, ...], ...]


def update(static: Static, arrays: Arrays) -> tuple[list[Any], list[Any], list[Any]]:
    """What is kept after an update, the new parameters, and the states of the rules over the tree."""
    if any(is_traced(leaf) for leaf in jax.tree.leaves(arrays)):
        return _update(static, arrays)
    return _compiled(static, arrays)


def _update(static: Static, arrays: Arrays) -> tuple[list[Any], list[Any], list[Any]]:
    works = [
        Work(path, _copy(kept), x, gradient)
        for path, kept, x, gradient in zip(static.paths, arrays.kept, arrays.xs, arrays.gradients, strict=True)
    ]
    xs = dict(arrays.others) | dict(zip(static.paths, arrays.xs, strict=True))
    shared = list(arrays.shared)

    def apply_tree(rule: Rule, works: dict[str, Work]) -> Mapping[str, Any]:
        over: Any = rule
        gradients = {path: _if_ready(work.is_ready, work.gradient) for path, work in works.items()}
        if rule not in static.shared:
            return over.apply_tree(None, xs, gradients)[1]
        i = static.shared.index(rule)
        before = shared[i]
        shared[i], steps = over.apply_tree(before, {path: xs[path] for path in static.members[i]}, gradients)
        waits = [work.is_ready for work in works.values() if work.is_ready is not True]
        if len(waits) == len(works):  # all of them may have to wait, and then so does the rule's state
            is_ready = functools.reduce(jnp.logical_or, waits)
            shared[i] = jax.tree.map(functools.partial(jnp.where, is_ready), shared[i], before)
        return steps

    apply(groups_of(static.rules, works, arrays.step), apply_tree, _run)
    return [work.kept for work in works], [work.x for work in works], shared


_compiled: Callable[[Static, Arrays], tuple[list[Any], list[Any], list[Any]]] = functools.partial(
    jax.jit, static_argnums=0
)(_update)


def _if_ready(is_ready: Any, gradient: Any) -> Any:
    """A gradient, or zeros for one that waits: inside of a trace it cannot be left out."""
    return gradient if is_ready is True else jnp.where(is_ready, gradient, jnp.zeros_like(gradient))


def _copy(kept: Any) -> Any:
    return {name: _copy(value) for name, value in kept.items()} if isinstance(kept, dict) else kept


def _run(group: Group, segment: Segment) -> None:
    now = group.now[segment.begin : segment.end]
    for work in group.works:
        _run_one(group, work, segment, now)


def _run_one(group: Group, work: Work, segment: Segment, now: Sequence[Rule]) -> None:
    x = group.subject(work)
    for rule, state in zip(now, group.states(work, segment), strict=True):
        new, step = rule.checked(rule.apply(dict(state), x, cast(work.gradient, x.dtype)), state, x)
        for name, value in new.items():
            before = state[name]
            if (
                hasattr(before, "dtype") and value.dtype != before.dtype
            ):  # a strong number would make a count's type strong
                value = value.astype(before.dtype)
            state[name] = value if work.is_ready is True else jnp.where(work.is_ready, value, before)
        work.gradient = step
        is_ready = rule.is_ready(new)
        if is_ready is not True:
            work.is_ready = is_ready if work.is_ready is True else jnp.logical_and(work.is_ready, is_ready)
    if segment.is_last:
        new = (x - cast(work.gradient, x.dtype)).astype(x.dtype)
        new = new if work.is_ready is True else jnp.where(work.is_ready, new, x)
        if isinstance(group.rule, MixedPrecision):
            work.kept["copy"] = new
        work.x = cast(new, work.x.dtype)

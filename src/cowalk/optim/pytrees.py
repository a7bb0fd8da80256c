"""States as pytrees of JAX, so that they go through `jax.jit`. Rules are static: a changed learning rate compiles anew."""

from __future__ import annotations

from typing import Any

from jax import tree_util

from cowalk.optim.state import LeafState, OptimizerState


def _flatten_leaf(leaf: LeafState) -> tuple[Any, Any]:
    names = tuple(leaf)
    return tuple(leaf[name] for name in names), (names, leaf.rule, leaf.frozen, leaf.shape, leaf.dtype)


def _unflatten_leaf(static: Any, values: Any) -> LeafState:
    names, rule, frozen, shape, dtype = static
    return LeafState(rule, dict(zip(names, values, strict=True)), frozen, shape, dtype)


def _flatten_state(state: OptimizerState) -> tuple[Any, Any]:
    return (state.leaves, state.step, tuple(state.shared.values())), tuple(state.shared)


def _unflatten_state(rules: Any, parts: Any) -> OptimizerState:
    leaves, step, shared = parts
    return OptimizerState(leaves, step, dict(zip(rules, shared, strict=True)))


tree_util.register_pytree_node(LeafState, _flatten_leaf, _unflatten_leaf)
tree_util.register_pytree_node(OptimizerState, _flatten_state, _unflatten_state)

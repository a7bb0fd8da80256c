"""Optax states in a walk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cowalk

PARAMS = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
GRADS = {"w": jnp.full((2, 2), 0.5), "b": jnp.ones(2)}


def test_a_masked_node_is_missing():
    masked = optax.masked(optax.trace(0.9), {"w": True, "b": False}).init(PARAMS)
    trace = masked.inner_state.trace
    assert isinstance(trace["b"], optax.MaskedNode)
    assert [str(path) for path, _ in cowalk.walk(PARAMS, trace)] == ["w"]
    assert cowalk.fmapstructure(lambda p, t: 1, PARAMS, trace) == {"w": 1, "b": None}
    assert isinstance(cowalk.fmap(lambda t: t, trace)["b"], optax.MaskedNode)


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2), optax.ema(0.9)),
    "multi steps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(1e-2, 0.0, 10), momentum=0.9),
    "masked": optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "partitioned": optax.partition({"x": optax.adam(1e-2), "y": optax.sgd(1e-2)}, {"w": "x", "b": "y"}),
    "lbfgs": optax.lbfgs(),
    "stateless": optax.sgd(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_walked_state_is_equal_and_goes_on_working(name):
    optimizer = OPTIMIZERS[name]
    state = optimizer.init(PARAMS)
    copy = cowalk.fmap(lambda x: x, state)
    assert jax.tree.structure(copy) == jax.tree.structure(state)
    assert type(copy) is type(state)
    extra = {"value": 0.0, "grad": GRADS, "value_fn": lambda p: p["w"].sum()} if name == "lbfgs" else {}
    expected, _ = optimizer.update(GRADS, state, PARAMS, **extra)
    actual, _ = optimizer.update(GRADS, copy, PARAMS, **extra)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))


def test_parameters_walk_with_their_moments():
    state = optax.adam(1e-2).init(PARAMS)
    _, state = optax.adam(1e-2).update(GRADS, state, PARAMS)
    moments = cowalk.get(state, "0.mu")
    assert cowalk.fmapstructure(lambda p, m: m.shape, PARAMS, moments) == {"w": (2, 2), "b": (2,)}


def test_an_empty_state_has_no_leaves():
    assert list(cowalk.walk(optax.EmptyState())) == []
    assert cowalk.fmap(lambda x: x, optax.EmptyState()) == optax.EmptyState()

"""Gradients of losses over Equinox models."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import cowalk

X = jnp.arange(6.0).reshape(3, 2)


def test_the_gradient_is_equinox_s_where_the_loss_depends_and_none_elsewhere():
    class Net(eqx.Module):
        used: eqx.nn.MLP
        unused: eqx.nn.Linear
        frozen: Any
        count: Any
        name: str = eqx.field(static=True)

        def __init__(self):
            self.used = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.PRNGKey(0))
            self.unused = eqx.nn.Linear(2, 2, key=jax.random.PRNGKey(1))
            self.frozen, self.count, self.name = jnp.ones(1), jnp.array(0), "net"

        def __call__(self, x):
            return self.used(x) * jax.lax.stop_gradient(self.frozen) + self.count

    model = Net()

    def loss(model, x):
        return (jax.vmap(model)(x) ** 2).mean()

    theirs = eqx.filter_grad(loss)(model, X)
    value, grads = cowalk.value_and_gradient(loss, model, X)
    assert float(value) == float(loss(model, X))
    assert grads["unused"] == {"weight": None, "bias": None}
    assert (grads["frozen"], grads["count"]) == (None, None)
    assert grads["used"]["activation"] is None
    compared = list(cowalk.walk(model, theirs, grads))
    assert len(compared) == 4
    for _, (_, a, b) in compared:
        np.testing.assert_allclose(a, b, rtol=1e-6)
    jitted = eqx.filter_jit(lambda m: cowalk.gradient(loss, m, X))(model)
    for _, (_, a, b) in cowalk.walk(model, jitted, grads):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_model_with_state_hands_its_state_back_as_auxiliary_output():
    model, state = eqx.nn.make_with_state(lambda: eqx.nn.BatchNorm(2, axis_name="batch", mode="ema"))()

    def loss(model, state):
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)
        return (out**2).mean(), state

    (_, new_state), grads = cowalk.value_and_gradient(loss, model, state, has_aux=True)
    assert isinstance(new_state, eqx.nn.State)
    assert grads["weight"].shape == (2,)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(new_state))


def test_shared_layers_have_one_gradient():
    shared = eqx.nn.Shared((jnp.ones(2), jnp.ones(2)), where=lambda pair: pair[1], get=lambda pair: pair[0])
    grads = cowalk.gradient(lambda s: (2 * s()[0] + 5 * s()[1]).sum(), shared)
    assert [leaf.tolist() for _, (leaf,) in cowalk.walk(grads)] == [[7.0, 7.0]]

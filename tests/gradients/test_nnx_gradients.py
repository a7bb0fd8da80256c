"""Gradients of losses over Flax NNX models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx

import cowalk

X = jnp.arange(8.0).reshape(4, 2) / 8


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(2, 2, rngs=rngs)
        self.again = self.first
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.unused = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        return self.again(self.drop(self.norm(self.first(x))))


def net() -> Net:
    return Net(nnx.Rngs(0))


def loss(model, x):
    return (model(x) ** 2).mean()


def test_the_gradient_is_nnx_s_where_the_loss_depends_and_none_elsewhere():
    value, grads = cowalk.value_and_gradient(loss, net(), X)
    their_value, theirs = nnx.value_and_grad(loss)(net(), X)
    assert float(value) == pytest.approx(float(their_value))
    assert grads["unused"] == {"bias": None, "kernel": None}
    assert (grads["norm"]["mean"], grads["norm"]["var"]) == (None, None)
    assert grads["drop"] == {"rngs": {"count": None, "key": None}}
    compared = list(cowalk.walk(net(), theirs, grads, where=cowalk.istrainable))
    assert [str(path) for path, _ in compared] == ["again.bias", "again.kernel", "norm.bias", "norm.scale"]
    for _, (_, a, b) in compared:
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_tied_variable_has_its_whole_gradient_under_its_first_path():
    grads = cowalk.gradient(loss, net(), X)
    assert grads["again"]["kernel"] is not None
    assert grads["first"] == {"bias": None, "kernel": None}


def test_what_the_loss_does_to_other_variables_is_done_to_the_model_as_nnx_does_it():
    ours, theirs = net(), net()
    kernel = ours.first.kernel[...]
    cowalk.gradient(loss, ours, X)
    nnx.grad(loss)(theirs, X)
    np.testing.assert_allclose(ours.norm.mean[...], theirs.norm.mean[...])
    assert ours.norm.mean[...].any()
    assert int(ours.drop.rngs.count[...]) == int(theirs.drop.rngs.count[...]) == 1
    assert ours.first.kernel[...] is kernel
    assert not any(isinstance(leaf, jax.core.Tracer) for _, (leaf,) in cowalk.walk(ours))
    assert ours(X).shape == (4, 2)


def test_gradients_work_inside_nnx_jit_and_train():
    model = net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = cowalk.value_and_gradient(loss, model, x)
        assert grads["unused"]["kernel"] is None
        filled = cowalk.fmap(lambda p, g: g, nnx.state(model, nnx.Param), grads, missing=jnp.zeros_like)
        optimizer.update(model, filled)
        return value

    model.drop.deterministic = True
    values = [float(step(model, optimizer, X)) for _ in range(5)]
    assert values[-1] < values[0]
    assert model.norm.mean[...].any()


def test_gradients_of_a_pure_model_work_inside_jax_jit_and_vmap():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    eager = cowalk.gradient(loss, model, X)
    np.testing.assert_allclose(
        jax.jit(lambda x: cowalk.gradient(loss, model, x))(X)["kernel"], eager["kernel"], rtol=1e-6
    )
    batched = jax.vmap(lambda x: cowalk.gradient(loss, model, x))(jnp.stack([X, X]))
    np.testing.assert_allclose(batched["kernel"][1], eager["kernel"], rtol=1e-6)


def test_a_loss_that_changes_a_model_outside_of_jax_jit_is_refused_by_flax():
    model = net()
    with pytest.raises(errors.TraceContextError):
        jax.jit(lambda x: cowalk.gradient(loss, model, x))(X)
    assert not any(isinstance(leaf, jax.core.Tracer) for _, (leaf,) in cowalk.walk(model))


def test_a_state_is_a_model_too():
    graph, state = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    grads = cowalk.gradient(lambda s: loss(nnx.merge(graph, s), X), state)
    expected = cowalk.gradient(loss, nnx.merge(graph, state), X)
    np.testing.assert_allclose(grads["kernel"], expected["kernel"], rtol=1e-6)


def test_modules_in_a_dict_beside_arrays_are_a_model():
    model = {"net": nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "scale": jnp.array(2.0)}
    grads = cowalk.gradient(lambda m: (m["net"](X) * m["scale"]).sum(), model)
    np.testing.assert_allclose(grads["scale"], model["net"](X).sum(), rtol=1e-5)
    np.testing.assert_allclose(grads["net"]["kernel"][:, 0], 2 * X.sum(0), rtol=1e-5)


def test_a_mutable_variable_is_differentiated_and_written():
    class Counting(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(2), ref=True)
            self.calls = nnx.Variable(jnp.array(0), ref=True)

        def __call__(self, x):
            self.calls[...] += 1
            return self.weight[...] * x

    model = Counting()
    grads = cowalk.gradient(lambda m: m(3.0).sum(), model)
    assert grads == {"calls": None, "weight": grads["weight"]}
    assert grads["weight"].tolist() == [3.0, 3.0]
    assert int(model.calls[...]) == 1


def test_auxiliary_output_comes_back():
    (_, seen), _ = cowalk.value_and_gradient(lambda m: (loss(m, X), m.norm.mean[...]), net(), has_aux=True)
    assert not isinstance(seen, jax.core.Tracer)
    assert seen.any()

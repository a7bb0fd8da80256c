"""Haiku parameters in a walk."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np

import cowalk

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Haiku's own imports warn, depending on the version of JAX
    import haiku as hk

MODEL = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([3, 1])(x)))
X = jnp.ones((2, 4))


def test_module_names_with_separators_make_paths_that_can_be_read_back():
    params = MODEL.init(jax.random.PRNGKey(0), X)
    flat = cowalk.flatten(params)
    assert list(flat) == [
        "['mlp/~/linear_0'].w",
        "['mlp/~/linear_0'].b",
        "['mlp/~/linear_1'].w",
        "['mlp/~/linear_1'].b",
    ] or sorted(flat) == sorted(f"['mlp/~/linear_{i}'].{name}" for i in (0, 1) for name in ("w", "b"))
    for path, (leaf,) in cowalk.walk(params):
        assert cowalk.Path.parse(str(path)) == path
        assert cowalk.get(params, str(path)) is leaf
    assert cowalk.diff(params, cowalk.unflatten(flat)) == []


def test_parameters_walk_with_their_gradients():
    params = MODEL.init(jax.random.PRNGKey(0), X)
    grads = cowalk.gradient(lambda p: (MODEL.apply(p, X) ** 2).sum(), params)
    theirs = jax.grad(lambda p: (MODEL.apply(p, X) ** 2).sum())(params)
    assert all(np.allclose(a, b, atol=1e-6) for _, (_, a, b) in cowalk.walk(params, theirs, grads, missing="error"))
    same = cowalk.fmap(lambda x: x, params)
    np.testing.assert_array_equal(MODEL.apply(same, X), MODEL.apply(params, X))


def test_the_immutable_mapping_of_old_checkpoints_opens_by_its_keys():
    params = hk.data_structures.to_immutable_dict({"net": {"w": jnp.ones(2), "b": jnp.zeros(2)}})
    grads = {"net": {"b": jnp.full(2, 3.0), "w": jnp.full(2, 2.0)}}
    out = cowalk.fmap(lambda p, g: p + g, params, grads)
    assert type(out) is type(params)
    assert type(out["net"]) is type(params["net"])
    assert (out["net"]["w"].tolist(), out["net"]["b"].tolist()) == ([3.0, 3.0], [3.0, 3.0])
    assert list(cowalk.flatten(params)) == ["net.w", "net.b"]
    assert jax.tree.structure(out) == jax.tree.structure(params)
    assert cowalk.fmap(lambda g, p: p, grads, params) == {"net": {"w": params["net"]["w"], "b": params["net"]["b"]}}

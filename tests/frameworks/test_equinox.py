"""Equinox modules in a walk."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cowalk


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(in_size=2, out_size=1, width_size=3, depth=1, key=jax.random.PRNGKey(0))


def test_the_fields_of_a_module_are_its_paths():
    names = [str(path) for path, _ in cowalk.walk(mlp(), where=cowalk.isnumeric)]
    assert names == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]


def test_activations_are_leaves_and_stay_when_a_filtered_gradient_lacks_them():
    model, x = mlp(), jnp.array([1.0, 2.0])
    grads = eqx.filter_grad(lambda m: m(x)[0])(model)
    stepped = cowalk.fmap(lambda p, g: p - 0.1 * g, model, grads)
    assert stepped.activation is model.activation
    assert cowalk.isleaf(cowalk.get(model, "activation"))
    expected = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    np.testing.assert_allclose(stepped(x), expected(x), rtol=1e-6)


def test_an_identity_gives_an_equal_working_model_with_the_same_tree_structure():
    model, x = mlp(), jnp.array([1.0, 2.0])
    same = cowalk.fmap(lambda leaf: leaf, model)
    assert eqx.tree_equal(model, same)
    assert same is not model
    assert eqx.filter_jit(same)(x) == model(x)


def test_closing_runs_no_constructor_check_or_converter():
    class Strict(eqx.Module):
        weight: Any = eqx.field(converter=jnp.asarray)
        name: str = eqx.field(static=True)

        def __init__(self, weight):
            self.weight, self.name = weight, "n"

        def __check_init__(self):
            if not isinstance(self.weight, jax.Array):
                raise TypeError("weight must be an array")

    out = cowalk.fmap(lambda _: "any", Strict([1.0]))
    assert (out.weight, out.name) == ("any", "n")


def test_a_field_that_is_not_set_is_no_child():
    class Late(eqx.Module):
        weight: Any
        cache: Any

        def __init__(self):
            self.weight = jnp.ones(2)
            self.cache = None

    model = Late()
    object.__delattr__(model, "cache")
    assert list(cowalk.children(model)) == ["weight"]
    assert not hasattr(cowalk.fmap(lambda x: x, model), "cache")


def test_a_frozen_module_is_not_written_in_place():
    with pytest.raises(cowalk.WriteError, match="immutable") as caught:
        cowalk.fmap_(lambda x: x * 2, mlp(), where=cowalk.isnumeric)
    assert len(caught.value.problems) == 4


def test_shared_layers_are_walked_once_and_stay_shared():
    class Language(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self):
            k1, k2 = jax.random.split(jax.random.PRNGKey(0))
            layers = (eqx.nn.Embedding(3, 4, key=k1), eqx.nn.Linear(4, 3, key=k2))
            self.shared = eqx.nn.Shared(layers, where=lambda l: l[1].weight, get=lambda l: l[0].weight)

        def __call__(self, token):
            embedding, linear = self.shared()
            assert embedding.weight is linear.weight
            return linear(embedding(token))

    model = Language()
    doubled = cowalk.fmap(lambda x: 2 * x, model, where=cowalk.isnumeric)
    assert len(cowalk.trainables(model)) == 2  # the embedding, and the bias of the head
    embedding, linear = doubled.shared()
    assert embedding.weight is linear.weight
    assert doubled(jnp.array(1)).shape == (3,)


def test_batch_norm_its_state_and_dropout_survive_a_walk():
    def make():
        norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
        return eqx.nn.Sequential([eqx.nn.Linear(3, 4, key=jax.random.PRNGKey(0)), norm, eqx.nn.Dropout(0.5)])

    def run(model, state):
        batched = jax.vmap(
            lambda x, state, key: model(x, state, key=key), axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None)
        )
        return batched(jnp.arange(6.0).reshape(2, 3), state, jax.random.split(jax.random.key(0)))

    model, state = eqx.nn.make_with_state(make)()
    walked, walked_state = cowalk.fmap(lambda x: x, model), cowalk.fmap(lambda x: x, state)
    assert eqx.tree_equal(walked, model)
    expected, actual = run(model, state), run(walked, walked_state)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    # Both states are used up only where they were used: the old one does not know of the new one.
    doubled = cowalk.fmap(lambda a, b: a + b, actual[1], expected[1], where=cowalk.isnumeric)
    assert jax.tree.structure(doubled) == jax.tree.structure(expected[1])


def test_a_partial_opens_its_arguments():
    partial = eqx.Partial(jnp.add, jnp.ones(2))
    assert cowalk.fmap(lambda x: 3 * x, partial, where=cowalk.isnumeric)(jnp.zeros(2)).tolist() == [3.0, 3.0]


def test_a_module_and_a_dict_walk_together():
    model = eqx.nn.Linear(2, 1, key=jax.random.PRNGKey(0))
    grads = {"bias": jnp.ones(1), "weight": jnp.ones((1, 2))}
    assert cowalk.fmapstructure(lambda p, g: g.shape, model, grads) == {"weight": (1, 2), "bias": (1,)}


def test_a_bound_method_opens_the_module_that_it_is_bound_to():
    class Scale(eqx.Module):
        weight: Any

        def apply(self, x):
            return self.weight * x

    doubled = cowalk.fmap(lambda x: 2 * x, Scale(jnp.ones(2)).apply, where=cowalk.isnumeric)
    assert doubled(jnp.ones(2)).tolist() == [2.0, 2.0]

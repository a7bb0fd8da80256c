"""Flax NNX in a walk: modules, Variables, states, optimizers."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cowalk
from cowalk.tree import engine


@pytest.fixture(params=["native", "reference"], autouse=True)
def walk_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "native" and engine.NATIVE is None:
        pytest.skip("the native walk is not built")
    if request.param == "reference":
        monkeypatch.setattr(engine, "NATIVE", None)


class Net(nnx.Module):
    """A tied layer, a tied kernel, batch statistics, random streams, a list, a function."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(2, 2, rngs=rngs)
        self.again = self.first
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.relu, nnx.Linear(2, 2, rngs=rngs)])
        self.layers[2].kernel = self.layers[0].kernel
        self.activation = nnx.tanh

    def __call__(self, x):
        x = self.again(self.drop(self.norm(self.first(x))))
        for layer in self.layers:
            x = layer(x)
        return self.activation(x)


def net() -> Net:
    return Net(nnx.Rngs(0))


X = jnp.arange(8.0).reshape(4, 2) / 8


def same_state(one: Any, other: Any) -> bool:
    (graph, state), (other_graph, other_state) = nnx.split(one), nnx.split(other)
    return graph == other_graph and all(
        np.array_equal(jax.random.key_data(a), jax.random.key_data(b))
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        else np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other_state), strict=True)
    )


PARAMS = ["again.bias", "again.kernel", "layers.0.bias", "layers.0.kernel", "layers.2.bias", "norm.bias", "norm.scale"]


def test_the_paths_of_a_module_are_its_attributes_and_a_tie_has_one():
    assert [str(path) for path, _ in cowalk.walk(net(), where=cowalk.istrainable)] == PARAMS
    everything = [str(path) for path, _ in cowalk.walk(net())]
    assert [name for name in everything if name not in PARAMS] == [
        "drop.rngs.count",
        "drop.rngs.key",
        "norm.mean",
        "norm.var",
    ]


def test_paths_and_their_order_stay_when_a_transformation_reorders_a_module():
    model = net()
    before = list(vars(model))
    nnx.jit(lambda m: m(X))(model)
    assert list(vars(model)) != before
    assert [str(path) for path, _ in cowalk.walk(model, where=cowalk.istrainable)] == PARAMS


def test_the_items_of_a_long_list_stand_in_order_of_position():
    items = nnx.List([nnx.Param(jnp.full(1, i)) for i in range(12)])
    assert [str(path) for path, _ in cowalk.walk(items)] == [str(i) for i in range(12)]


def test_an_identity_gives_an_equal_working_model_with_the_same_ties():
    model = net()
    same = cowalk.fmap(lambda x: x, model)
    assert same_state(model, same)
    assert same.first is same.again
    assert same.layers[0].kernel is same.layers[2].kernel
    assert same.activation is nnx.tanh
    assert type(same.layers[0].kernel) is nnx.Param
    np.testing.assert_array_equal(same(X), model(X))
    assert (int(same.drop.rngs.count[...]), int(model.drop.rngs.count[...])) == (1, 1)


@pytest.mark.parametrize("where", [cowalk.isleaf, cowalk.istrainable, "norm.*", "nothing"])
def test_a_rebuilt_module_shares_nothing_that_changes_with_the_old_one(where):
    model = net()
    before = jax.tree.map(lambda x: x, nnx.state(model, nnx.Not(nnx.RngState)))
    new = cowalk.fmap(lambda x: x, model, where=where)
    old_ids = {id(node) for _, node in nnx.iter_graph(model) if isinstance(node, (nnx.Variable, nnx.Module))}
    new_ids = {id(node) for _, node in nnx.iter_graph(new) if isinstance(node, (nnx.Variable, nnx.Module))}
    assert not old_ids & new_ids
    assert len(old_ids) == len(new_ids)
    assert model._pytree__state is not new._pytree__state
    new(X)
    new.first.kernel[...] += 1
    new.extra = nnx.Param(jnp.ones(1))
    after = nnx.state(model, nnx.Not(nnx.RngState))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    assert int(model.drop.rngs.count[...]) == 0


def test_a_skipped_variable_is_new_in_the_result_too():
    model = net()
    new = cowalk.fmap(
        lambda p, g: p - g, model, {"first": {"bias": jnp.ones(2)}}, where=cowalk.istrainable, strict=False
    )
    assert new.first.kernel is not model.first.kernel
    assert new.layers[0].kernel is new.layers[2].kernel
    np.testing.assert_array_equal(new.first.kernel[...], model.first.kernel[...])
    np.testing.assert_array_equal(new.first.bias[...], model.first.bias[...] - 1)


def test_a_rebuilt_module_can_be_split_jitted_and_optimised():
    model = cowalk.fmap(lambda x: x, net())
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: (m(X) ** 2).mean())(model)
        optimizer.update(model, grads)

    before = model.first.kernel[...]
    step(model, optimizer)
    assert not np.array_equal(before, model.first.kernel[...])
    graph, state = nnx.split(model)
    assert nnx.merge(graph, state)(X).shape == (4, 2)


def test_a_module_made_inside_jit_can_be_changed_there():
    model = net()

    @jax.jit
    def run(x):
        inner = cowalk.fmap(lambda p: p * x, model, where=cowalk.istrainable)
        inner.norm.mean[...] += 1
        return inner.first.bias[...], inner(X)

    assert run(2.0)[1].shape == (4, 2)
    assert model.norm.mean[...].tolist() == [0.0, 0.0]


def test_a_module_that_holds_itself_is_a_cycle():
    model = net()
    model.layers[0].parent = model
    with pytest.raises(cowalk.CycleError) as caught:
        cowalk.fmap(lambda x: x, model)
    assert (str(caught.value.first), str(caught.value.path)) == ("", "layers.0.parent")


def test_a_module_walks_with_its_state_its_gradient_and_a_dict():
    model = net()
    grads = nnx.grad(lambda m: (m(X) ** 2).mean())(model)
    state = nnx.state(model, nnx.Param)
    pairs = list(cowalk.walk(model, grads, state, where=cowalk.istrainable, missing="error"))
    assert [str(path) for path, _ in pairs] == PARAMS
    assert all(p is s.get_raw_value() if isinstance(s, nnx.Variable) else p is s for _, (p, _, s) in pairs)
    plain = cowalk.fmapstructure(lambda g: g, grads)
    assert type(plain) is dict
    assert all(g is h for _, (_, g, h) in cowalk.walk(model, grads, plain, where=cowalk.istrainable, missing="error"))


def test_a_state_leads_and_keeps_its_types():
    state = nnx.state(net(), nnx.Param)
    out = cowalk.fmap(lambda p: 2 * p, state)
    assert type(out) is nnx.State
    assert type(out["layers"][0]["kernel"]) is nnx.Param
    assert jax.tree.structure(out) == jax.tree.structure(state)
    assert [str(path) for path, _ in cowalk.walk(state["layers"])][:2] == ["[0].bias", "[0].kernel"]
    kept = cowalk.fmap(lambda p: p, state, where="nothing")
    assert kept["again"]["kernel"] is not state["again"]["kernel"]


def test_only_params_are_trainable():
    model = net()
    assert cowalk.istrainable(model.first.kernel)
    assert not cowalk.istrainable(model.norm.mean)
    assert cowalk.isnumeric(model.norm.mean)
    assert not cowalk.isnumeric(model.drop.rngs.count)
    assert not cowalk.isnumeric(model.drop.rngs.key)


def test_a_bare_array_in_a_module_is_a_leaf_that_is_not_trained():
    class Masked(nnx.Module):
        def __init__(self):
            self.mask = jnp.ones(2)
            self.masks = nnx.data([jnp.ones(1)])
            self.weight = nnx.Param(jnp.ones(2))
            self.size = 2

    model = Masked()
    assert [str(path) for path, _ in cowalk.walk(model)] == ["mask", "masks.0", "weight"]
    assert [str(path) for path, _ in cowalk.walk(model, where=cowalk.istrainable)] == ["weight"]
    cowalk.fmap_(lambda x: 3 * x, model)
    assert (model.mask.tolist(), model.weight[...].tolist(), model.size) == ([3.0, 3.0], [3.0, 3.0], 2)


def test_in_place_writing_keeps_modules_and_variables():
    model = net()
    kernel = model.first.kernel
    cowalk.fmap_(lambda p: 0 * p, model, where=cowalk.istrainable)
    assert model.first.kernel is kernel
    assert not kernel[...].any()
    assert not model.layers[2].kernel[...].any()


def test_a_tracer_is_not_written_into_a_model_outside():
    model = net()
    with pytest.raises(cowalk.WriteError, match="tracer"):
        jax.jit(lambda x: cowalk.fmap_(lambda p: p * x, model, where=cowalk.istrainable) and x)(1.0)
    assert not any(isinstance(leaf, jax.core.Tracer) for _, (leaf,) in cowalk.walk(model))


def test_a_closed_variable_keeps_its_metadata_and_runs_no_hook():
    calls = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flax deprecates hooks, but models have them
        weight = nnx.Param(jnp.ones(2), on_get_value=lambda v, x: calls.append("get") or x + 1, role="embedding")
        weight.set_metadata("on_set_value", lambda v, x: calls.append("set") or x)
    (out,) = cowalk.fmap(lambda x: x * 2, [weight])
    cowalk.fmap_(lambda x: x * 5, [weight])
    assert calls == []
    assert out.get_raw_value().tolist() == [2.0, 2.0]
    assert weight.get_raw_value().tolist() == [5.0, 5.0]
    assert out.role == "embedding"
    out.set_metadata("role", "head")
    assert weight.role == "embedding"
    assert out.get_value().tolist() == [3.0, 3.0]
    assert calls == ["get"]


def test_two_variables_with_one_array_are_no_tie_and_one_variable_at_two_places_is():
    array = jnp.ones(2)
    one = nnx.Param(array)
    assert len(list(cowalk.walk([one, nnx.Param(array)]))) == 2
    assert len(list(cowalk.walk([one, one]))) == 1
    out = cowalk.fmap(lambda x: x + 1, [one, one])
    assert out[0] is out[1]


def test_a_module_that_is_no_pytree_opens_by_what_holds_data():
    class Free(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.parts = [nnx.Linear(1, 1, rngs=rngs), nnx.Param(jnp.ones(2)), {"size": 3}]
            self.sizes = [1, 2]
            self.name = "free"

    model = Free(nnx.Rngs(0))
    assert [str(path) for path, _ in cowalk.walk(model, where=cowalk.isnumeric)] == [
        "parts.0.bias",
        "parts.0.kernel",
        "parts.1",
    ]
    new = cowalk.fmap(lambda x: x, model, where="nothing")
    assert new.sizes is model.sizes
    assert new.parts[1] is not model.parts[1]
    assert new.parts[0] is not model.parts[0]
    assert new.parts[0].kernel is not model.parts[0].kernel


def test_a_variable_with_a_mutable_array_is_seen_through():
    weight = nnx.Param(jnp.ones(2), ref=True)
    (out,) = cowalk.fmap(lambda x: x + 1, [weight])
    assert out[...].tolist() == [2.0, 2.0]
    assert weight[...].tolist() == [1.0, 1.0]
    cowalk.fmap_(lambda x: x * 7, [weight])
    assert weight[...].tolist() == [7.0, 7.0]


def test_an_optimizer_walks_and_goes_on_working():
    model = net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    copy = cowalk.fmap(lambda x: x, optimizer)
    names = [str(path) for path, _ in cowalk.walk(optimizer)]
    assert "opt_state.0.mu.again.kernel" in names
    assert names[-1] == "step"
    grads = nnx.grad(lambda m: (m(X) ** 2).mean())(model)
    copy.update(model, grads)
    assert (int(copy.step[...]), int(optimizer.step[...])) == (1, 0)
    assert not any(leaf.any() for path, (leaf,) in cowalk.walk(optimizer, where="*.mu.*"))


def test_an_nnx_dict_and_a_graph_definition_walk():
    class Parts(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.Dict({"b": nnx.Linear(1, 1, rngs=rngs), "a": nnx.Param(jnp.ones(1)), "f": nnx.relu})

    model = Parts(nnx.Rngs(0))
    assert [str(path) for path, _ in cowalk.walk(model)] == ["parts.a", "parts.b.bias", "parts.b.kernel"]
    assert cowalk.fmap(lambda x: x, model).parts["f"] is nnx.relu
    graph, state = nnx.split(model)
    assert len(list(cowalk.walk((graph, state)))) == 3
    assert cowalk.fmap(lambda x: x, (graph, state))[0] == graph

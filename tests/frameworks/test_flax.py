"""Flax without NNX in a walk: frozen dicts, train states, Linen."""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, struct
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState

import cowalk


class Net(linen.Module):
    features: int = 3

    @linen.compact
    def __call__(self, x, train: bool = True):
        x = linen.Dense(self.features)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        return linen.Dense(1)(linen.relu(x))


def variables() -> Any:
    return Net().init(jax.random.key(0), jnp.ones((2, 4)))


def test_a_frozen_dict_leads_a_dict_and_keeps_its_type_and_order():
    params = freeze({"b": {"kernel": jnp.ones(2), "bias": jnp.zeros(2)}, "a": jnp.full(2, 4.0)})
    grads = {"a": jnp.full(2, 8.0), "b": {"bias": jnp.ones(2), "kernel": jnp.full(2, 0.5)}}
    out = cowalk.fmap(lambda p, g: p - 0.5 * g, params, grads)
    assert isinstance(out, FrozenDict)
    assert isinstance(out["b"], FrozenDict)
    assert type(out._dict["b"]) is dict
    assert (list(out), list(out["b"])) == (["b", "a"], ["kernel", "bias"])
    assert (out["a"].tolist(), out["b"]["kernel"].tolist()) == ([0.0, 0.0], [0.75, 0.75])
    assert params["a"].tolist() == [4.0, 4.0]


def test_a_dict_leads_a_frozen_dict():
    out = cowalk.fmap(lambda p, g: p + g, {"b": {"x": 1.0}, "a": 2.0}, freeze({"a": 20.0, "b": {"x": 10.0}}))
    assert out == {"b": {"x": 11.0}, "a": 22.0}
    assert type(out["b"]) is dict


def test_a_walked_frozen_dict_equals_and_hashes_like_one_that_flax_made():
    params = freeze({"b": {"x": 1, "z": None}, "a": 2})
    out = cowalk.fmap(lambda x: x + 1, params)
    assert out == freeze({"b": {"x": 2, "z": None}, "a": 3})
    assert hash(out) == hash(freeze({"b": {"x": 2, "z": None}, "a": 3}))
    assert hash(params) != hash(out)
    assert jax.tree.structure(out) == jax.tree.structure(params)
    assert flax.core.unfreeze(out) == {"b": {"x": 2, "z": None}, "a": 3}


def test_no_level_of_a_frozen_dict_is_written_in_place():
    params = freeze({"a": {"x": jnp.ones(2)}, "b": jnp.ones(2)})
    with pytest.raises(cowalk.WriteError, match="immutable") as caught:
        cowalk.fmap_(lambda x: 0 * x, params)
    assert [str(path) for path, _ in caught.value.problems] == ["a.x", "b"]
    assert params["a"]["x"].tolist() == [1.0, 1.0]


def test_arrays_in_a_frozen_dict_can_be_written_in_place():
    params = freeze({"a": {"x": np.ones(2)}})
    cowalk.fmap_(lambda x: x + 1, params)
    assert params["a"]["x"].tolist() == [2.0, 2.0]


def test_linen_variables_walk_with_their_gradients():
    model, all_variables = Net(), variables()
    params, stats = all_variables["params"], all_variables["batch_stats"]
    x = jnp.arange(8.0).reshape(2, 4)

    def loss(params):
        return model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])[0].sum()

    theirs = jax.grad(loss)(params)
    ours = cowalk.gradient(loss, params)
    pairs = list(cowalk.walk(params, theirs, ours, missing="error"))
    assert [str(path) for path, _ in pairs][:2] == ["Dense_0.kernel", "Dense_0.bias"]
    assert all(np.allclose(a, b, atol=1e-6) for _, (_, a, b) in pairs)
    stepped = cowalk.fmap(lambda p, g: p - 0.1 * g, freeze(params), ours)
    assert loss(stepped) < loss(params)


def test_a_linen_module_is_a_leaf():
    assert cowalk.isleaf(Net())
    assert not cowalk.isnumeric(Net())


def test_a_train_state_keeps_its_static_fields_and_steps():
    model = Net()
    state = TrainState.create(apply_fn=model.apply, params=variables()["params"], tx=optax.adam(1e-3))
    out = cowalk.fmap(lambda x: x, state)
    assert (out.apply_fn, out.tx) == (state.apply_fn, state.tx)
    assert jax.tree.structure(out) == jax.tree.structure(state)
    grads = jax.tree.map(jnp.ones_like, state.params)
    assert out.apply_gradients(grads=grads).step == 1
    names = [str(path) for path, _ in cowalk.walk(state)]
    assert names[:2] == ["step", "params.Dense_0.kernel"]
    assert "opt_state.0.mu.Dense_0.kernel" in names


def test_a_struct_dataclass_is_closed_without_its_constructor():
    @struct.dataclass
    class Pair:
        left: Any
        right: Any
        name: str = struct.field(pytree_node=False, default="n")

        def __post_init__(self):
            if not isinstance(self.left, jax.Array):
                raise TypeError("an array is needed")

    pair = Pair(jnp.ones(2), None, "other")
    out = cowalk.fmap(lambda _: "any", pair)
    assert (out.left, out.right, out.name) == ("any", None, "other")
    assert [str(path) for path, _ in cowalk.walk(pair)] == ["left"]


def test_a_partitioned_parameter_has_the_path_of_its_array():
    params = {"kernel": linen.Partitioned(jnp.ones((2, 2)), names=("in", "out")), "bias": jnp.ones(2)}
    assert [str(path) for path, _ in cowalk.walk(params)] == ["kernel", "bias"]
    plain = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.ones(2)}
    out = cowalk.fmap(lambda p, g: p - g, params, plain)
    assert out["kernel"].names == ("in", "out")
    assert out["kernel"].value.tolist() == [[-1.0, -1.0]] * 2
    assert cowalk.fmap(lambda p, g: p - g, plain, params)["kernel"].tolist() == [[1.0, 1.0]] * 2

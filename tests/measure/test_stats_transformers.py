"""Norms of whole models, of transformers and in JAX, against sums in float64 in which a tied array counts once.

Keras models are in keras_stats_checks.py, for Keras runs in a process of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.frameworks.test_transformers import MODELS

import cowalk
from cowalk import Table, stats

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum((np.abs(np.asarray(each, np.float64)) ** 2).sum() for each in arrays)))


def assert_norms(table: Table, parameters: Any, gradients: Any) -> None:
    total = table.total
    assert total.parameter is not None
    assert total.gradient is not None
    assert total.parameter.norm == pytest.approx(norm(parameters), rel=1e-6)
    assert total.gradient.norm == pytest.approx(norm(gradients), rel=1e-6)
    assert total.n == sum(np.size(each) for each in parameters)
    assert total.parameter.n == total.n


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made, inputs = request.param()
    made.eval()(**inputs).logits.square().mean().backward()
    return made


def values_of(model: Any) -> list[Any]:
    return [p.detach().numpy() for p in model.parameters()]  # a tied one once


def gradients_in(model: Any) -> list[Any]:
    return [p.grad.numpy() for p in model.parameters() if p.grad is not None]


def test_norms_of_a_model_s_own_gradients(model: Any) -> None:
    table = stats(model, cowalk.gradients_of(model))
    assert_norms(table, values_of(model), gradients_in(model))
    assert [str(row.path) for row in table] == [name for name, _ in model.named_parameters()]
    assert table.state_counts.get("unused", 0) == sum(p.grad is None and p.requires_grad for p in model.parameters())


def test_norms_of_gradients_listed_under_every_name(model: Any) -> None:
    by_name = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    assert_norms(stats(model, cowalk.unflatten(by_name)), values_of(model), gradients_in(model))


def test_every_row_is_that_of_its_parameter(model: Any) -> None:
    table = stats(model, cowalk.gradients_of(model))
    for name, p in model.named_parameters():
        row = table[name]
        assert row.value("parameter.norm") == pytest.approx(norm([p.detach()]), rel=1e-6)
        assert row.value("gradient.norm") == (None if p.grad is None else pytest.approx(norm([p.grad]), rel=1e-6))


def test_layers_fold_into_the_same_total(model: Any) -> None:
    table = stats(model, cowalk.gradients_of(model))
    for depth in (None, 1, 2):
        layers = table.layers(depth)
        assert layers.total.value("gradient.norm") == pytest.approx(norm(gradients_in(model)), rel=1e-6)
        assert sum(row.count for row in layers) == len(table)


def test_norms_of_an_equinox_model() -> None:
    equinox = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    layers = (
        equinox.nn.Embedding(7, 4, key=keys[0]),
        equinox.nn.MLP(4, 4, 8, 2, key=keys[1]),
        equinox.nn.Linear(4, 7, use_bias=False, key=keys[2]),
    )
    tied = equinox.nn.Shared(layers, where=lambda each: each[2].weight, get=lambda each: each[0].weight)

    def loss(model: Any) -> Any:
        embedding, mlp, head = model()
        return (head(mlp(embedding(jnp.int32(3)))) ** 2).sum()

    grads = equinox.filter_grad(loss)(tied)
    values, slopes, parts = (
        jax.tree.leaves(equinox.filter(tree, equinox.is_array)) for tree in (tied, grads, layers[:2])
    )
    assert [value.shape for value in values] == [value.shape for value in parts]
    assert_norms(stats(tied, grads), values, slopes)
    assert_norms(stats(tied, cowalk.gradient(loss, tied)), values, slopes)


def test_one_jax_array_at_two_places_counts_at_each_for_nothing_can_change_it() -> None:
    array = jnp.array([3.0, 4.0])
    table = stats({"a": array, "b": array}, {"a": array, "b": 2 * array})
    assert_norms(table, [array, array], [array, 2 * array])
    assert table.ties == []


def test_norms_of_an_nnx_model() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embedding = nnx.Embed(7, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.head = nnx.Linear(4, 7, use_bias=False, rngs=rngs)
            self.again = self.head

        def __call__(self, tokens: Any) -> Any:
            x = self.norm(self.embedding(tokens), use_running_average=True)
            return self.head(x) + self.again(x)

    model = Model(nnx.Rngs(0))
    grads = nnx.grad(lambda model: (model(jnp.arange(3)) ** 2).sum())(model)
    values = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert_norms(stats(model, grads), values, jax.tree.leaves(grads))

"""One step of an optimizer: which parameters it moves, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from tests.optim.models import Tied
from torch import nn

import cowalk
from cowalk import optim

KERAS_CHECKS = Path(__file__).with_name("keras_update_checks.py")


def host(x: Any) -> np.ndarray:
    """The values of any array, in an array of their own."""
    return x.detach().to_dense().float().numpy().copy() if isinstance(x, torch.Tensor) else np.array(x)


def contents(tree: Any) -> dict[str, Any]:
    """All values of a tree by path, arrays as bytes with dtype and shape; a state's counts too."""
    if isinstance(tree, optim.OptimizerState):
        leaves = {str(path): (leaf.rule, leaf.frozen, repr_of(dict(leaf))) for path, leaf in tree.all_leaves()}
        return {"leaves": leaves, "step": tree.step, "shared": [repr_of(each) for each in tree.shared.values()]}
    return {str(path): repr_of(x) for path, (x,) in cowalk.walk(tree)}


def repr_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: repr_of(each) for name, each in value.items()}
    if hasattr(value, "dtype"):
        array = host(value)
        return str(array.dtype), array.shape, array.tobytes()
    if isinstance(value, tuple) and value:
        return tuple(map(repr_of, value))
    return value


def ones_like(model: Any) -> Any:
    """A gradient of ones for every trained parameter."""
    return cowalk.fmapstructure(lambda x: np.ones(x.shape, "float32"), model, where=cowalk.istrainable)


# --- missing is not zero ---


@pytest.mark.parametrize("make", [np.array, torch.tensor, jnp.array], ids=["numpy", "torch", "jax"])
def test_a_missing_gradient_leaves_parameter_and_state_and_a_zero_gradient_moves_both(make):
    model = {"w": make([1.0, 2.0]), "b": make([3.0])}
    state = cowalk.setup(optim.Adam(0.1), model)
    first = {"w": make([1.0, -1.0]), "b": make([1.0])}
    state, model = cowalk.update(state, model, first)
    before, m, v = host(model["w"]), host(state["w"]["m"]), host(state["w"]["v"])

    missing, kept = cowalk.update(state, model, {"w": None, "b": make([1.0])})
    assert host(kept["w"]).tolist() == before.tolist()
    assert repr_of(dict(missing["w"])) == repr_of(dict(state["w"]))
    assert int(missing["b"]["step"]) == 2

    zero, moved = cowalk.update(state, model, {"w": make([0.0, 0.0]), "b": make([1.0])})
    assert (host(moved["w"]) != before).all()
    assert int(zero["w"]["step"]) == 2
    np.testing.assert_allclose(host(zero["w"]["m"]), 0.9 * m, rtol=1e-6)
    np.testing.assert_allclose(host(zero["w"]["v"]), 0.999 * v, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:cowalk.update. there is no gradient")
def test_momentum_goes_on_where_the_gradient_is_zero_and_waits_where_it_is_missing():
    model = {"w": np.array([1.0])}
    state = cowalk.setup(optim.Momentum(lr=1.0, momentum=0.5), model)
    cowalk.update_(state, model, {"w": np.array([1.0])})
    cowalk.update_(state, model, {"w": None})
    assert (model["w"].tolist(), state["w"]["momentum"].tolist()) == ([0.0], [1.0])
    cowalk.update_(state, model, {"w": np.array([0.0])})
    assert (model["w"].tolist(), state["w"]["momentum"].tolist()) == ([-0.5], [0.5])


@pytest.mark.parametrize("missing", [None, cowalk.MISSING, optax.MaskedNode()], ids=["None", "MISSING", "MaskedNode"])
def test_a_missing_branch_is_missing_at_every_parameter_below(missing):
    model = {"encoder": {"a": np.ones(2), "deep": [np.ones(1), np.ones(1)]}, "head": np.ones(2)}
    state = cowalk.setup(optim.Momentum(1.0), model)
    before = contents(model["encoder"])
    cowalk.update_(state, model, {"encoder": missing, "head": np.ones(2)})
    assert contents(model["encoder"]) == before
    assert all(not leaf["momentum"].any() for path, leaf in state.all_leaves() if str(path) != "head")
    assert model["head"].tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:cowalk.update. there is no gradient")
def test_gradients_that_are_all_missing_below_the_root_change_nothing():
    model = {"w": np.ones(2)}
    state = cowalk.setup(optim.Adam(), model)
    cowalk.update_(state, model, {"w": None})
    assert model["w"].tolist() == [1.0, 1.0]
    assert state["w"]["step"] == 0


@pytest.mark.parametrize("update", [cowalk.update, cowalk.update_])
def test_absent_and_extra_keys_are_errors_unless_strict_is_false(update):
    model = {"a": np.ones(1), "b": np.ones(1)}
    state = cowalk.setup(optim.Descent(1.0), model)
    grads = {"a": np.ones(1), "c": np.ones(1)}
    with pytest.raises(cowalk.StructureError) as caught:
        update(state, model, grads)
    assert {(difference.kind, difference.key) for difference in caught.value.differences} == {
        ("absent", "b"),
        ("extra", "c"),
    }
    assert (model["a"].tolist(), state.step) == ([1.0], 0)
    result = update(state, model, grads, strict=False)
    after = result[1] if update is cowalk.update else result
    assert (after["a"].tolist(), after["b"].tolist()) == ([0.0], [1.0])


# --- ties ---


TOKENS = torch.tensor([0, 2])


def tied_loss(model, tokens):
    return model(tokens).square().sum()


def stored_gradient(model):
    model.zero_grad()
    tied_loss(model, TOKENS).backward()
    return model.emb.weight.grad


@pytest.mark.parametrize("source", ["gradient", "gradients_of", "listed twice", "listed under one path"])
def test_the_total_gradient_of_a_tied_torch_parameter_counts_once(source):
    torch.manual_seed(0)
    model = Tied()
    start, total = model.emb.weight.detach().clone(), stored_gradient(model).clone()
    grads = {
        "gradient": lambda: cowalk.gradient(tied_loss, model, TOKENS),
        "gradients_of": lambda: cowalk.gradients_of(model),
        "listed twice": lambda: {"emb": {"weight": model.emb.weight.grad}, "head": {"weight": model.head.weight.grad}},
        "listed under one path": lambda: {"emb": {"weight": None}, "head": {"weight": model.head.weight.grad}},
    }[source]()
    state = cowalk.setup(optim.Descent(1.0), model)
    cowalk.update_(state, model, grads)
    torch.testing.assert_close(model.emb.weight.detach(), start - total)
    assert model.emb.weight is model.head.weight
    assert len(list(state.all_leaves())) == 1


def test_parts_of_a_tied_gradient_are_added_up_where_they_are_said_to_be_parts():
    model = Tied()
    start = model.emb.weight.detach().clone()
    grads = {"emb": {"weight": torch.full((4, 3), 1.0)}, "head": {"weight": torch.full((4, 3), 2.0)}}
    state = cowalk.setup(optim.Descent(1.0), model)
    cowalk.update_(state, model, grads, grads="per_position")
    torch.testing.assert_close(model.head.weight.detach(), start - 3)
    assert grads["emb"]["weight"].unique().tolist() == [1.0]


@pytest.mark.parametrize("grads", ["total", None])
def test_two_different_total_gradients_of_one_torch_parameter_are_a_tie_error(grads):
    model = Tied()
    state = cowalk.setup(optim.Descent(1.0), model)
    before = contents(model)
    different = {"emb": {"weight": torch.ones(4, 3)}, "head": {"weight": torch.zeros(4, 3)}}
    with pytest.raises(cowalk.TieError, match=r"emb\.weight.*head\.weight"):
        cowalk.update_(state, model, different, grads=grads)
    assert contents(model) == before


def test_the_parts_of_a_numpy_tie_are_added_up_unless_they_are_said_to_be_totals():
    shared = np.array([1.0])
    model = {"a": shared, "b": shared}
    part = np.array([0.25])
    grads = {"a": part, "b": part}
    state = cowalk.setup(optim.Descent(1.0), model)
    _, summed = cowalk.update(state, model, grads)
    assert summed["a"].tolist() == [0.5]
    assert summed["a"] is summed["b"]
    _, total = cowalk.update(state, model, grads, grads="total")
    assert total["a"].tolist() == [0.75]
    assert part.tolist() == [0.25]
    cowalk.update_(state, model, {"a": part, "b": np.array([0.5])})
    assert shared.tolist() == [0.25]


def test_a_numpy_tie_with_one_part_missing_has_the_other():
    shared = np.array([1.0])
    model = {"a": shared, "b": shared}
    state = cowalk.setup(optim.Descent(1.0), model)
    cowalk.update_(state, model, {"a": None, "b": np.array([0.25])})
    assert shared.tolist() == [0.75]


def test_a_shared_nnx_parameter_is_updated_once():
    class Shared(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(jnp.array([1.0, 2.0]))
            self.b = self.a

    model = Shared()
    grads = cowalk.gradient(lambda m: (m.a[...] * 2 * m.b[...]).sum(), model)
    state = cowalk.setup(optim.Descent(0.125), model)
    assert len(list(state.all_leaves())) == 1
    new_state, new = cowalk.update(state, model, grads)
    assert new.a is new.b
    assert new.a[...].tolist() == [0.5, 1.0]  # the whole gradient is 4x
    assert model.a[...].tolist() == [1.0, 2.0]
    variable = model.a
    assert cowalk.update_(state, model, grads) is model
    assert model.a is model.b is variable
    assert model.a[...].tolist() == [0.5, 1.0]
    assert new_state.step == state.step == 1


@pytest.mark.parametrize("make", [np.array, torch.tensor, jnp.array], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("rule", [optim.Momentum(0.5), optim.Adam(0.5), optim.AccumGrad(2)], ids=repr)
def test_two_parameters_may_have_one_object_for_a_gradient(make, rule):
    model = {"a": make([1.0]), "b": make([2.0])}
    gradient = make([1.0])
    chain = optim.Chain(rule, optim.Descent(1.0))
    together, apart = cowalk.setup(chain, model), cowalk.setup(chain, model)
    both = model
    for _ in range(3):
        together, both = cowalk.update(together, both, {"a": gradient, "b": gradient})
        apart, model = cowalk.update(apart, model, {"a": make([1.0]), "b": make([1.0])})
    assert contents(both) == contents(model)
    assert contents(together) == contents(apart)
    assert gradient.tolist() == [1.0]
    assert float(both["a"][0]) != float(both["b"][0])


# --- what is not trained ---


def test_frozen_parameters_keep_their_values_and_states():
    model = {"a": np.ones(1), "b": np.ones(1)}
    state = cowalk.freeze(cowalk.setup(optim.Adam(0.5), model), "a")
    cowalk.update_(state, model, {"a": np.ones(1), "b": np.ones(1)})
    assert (model["a"].tolist(), state["a"]["step"], state["b"]["step"]) == ([1.0], 0, 1)
    assert model["b"][0] < 1


def test_buffers_integers_texts_and_functions_are_left_alone():
    norm = nn.BatchNorm1d(2)
    names = {name: x.clone() for name, x in norm.named_buffers()}
    state = cowalk.setup(optim.Descent(1.0), norm)
    assert [str(path) for path, _ in state.all_leaves()] == ["weight", "bias"]
    cowalk.update_(state, norm, {"weight": torch.ones(2), "bias": torch.ones(2)}, strict=False)
    assert norm.weight.tolist() == [0.0, 0.0]
    for name, x in norm.named_buffers():
        assert x.equal(names[name])

    model = {"w": np.ones(1), "ids": np.arange(3), "flags": np.array([True]), "n": 3, "name": "fc", "f": np.tanh}
    state = cowalk.setup(optim.Descent(1.0), model)
    others = {"ids": np.ones(3), "flags": np.ones(1), "n": 1.0, "name": None, "f": None}
    _, new = cowalk.update(state, model, {"w": np.ones(1), **others})
    assert new["w"].tolist() == [0.0]
    assert (new["ids"].tolist(), new["flags"].tolist()) == ([0, 1, 2], [True])
    assert (new["n"], new["name"], new["f"]) == (3, "fc", np.tanh)


def test_a_torch_parameter_that_requires_no_gradient_is_left_alone():
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    state = cowalk.setup(optim.Descent(1.0), model)
    bias = model.bias.item()
    cowalk.update_(state, model, {"weight": torch.ones(1, 1), "bias": torch.ones(1)})
    assert model.bias.item() == bias


# --- models of many kinds ---


@dataclass(frozen=True)
class Layer:
    w: Any
    name: str = "fc"


class Pair(NamedTuple):
    w: Any
    b: Any


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2)(x)


class NNX(nnx.Module):
    def __init__(self):
        self.fc = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


MODELS = {
    "dict": lambda: {"w": np.ones(2, "float32"), 1: np.ones(1, "float32")},
    "OrderedDict": lambda: OrderedDict(z=np.ones(2, "float32"), a=np.ones(1, "float32")),
    "list and tuple": lambda: [np.ones(1, "float32"), (np.ones(2, "float32"),)],
    "frozen dataclass": lambda: Layer(np.ones(2, "float32")),
    "named tuple": lambda: Pair(np.ones(2, "float32"), np.ones(1, "float32")),
    "dataclass of torch": lambda: Layer(torch.ones(2)),
    "dataclass of JAX": lambda: Layer(jnp.ones(2)),
    "Equinox": lambda: eqx.nn.Linear(2, 1, key=jax.random.key(0)),
    "Flax": lambda: Linen().init(jax.random.key(0), jnp.ones((1, 2))),
    "NNX": NNX,
    "torch": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LSTM(3, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_any_kind_is_updated_and_what_was_given_stays_as_it_was(name):
    model = MODELS[name]()
    grads = ones_like(model)
    state = cowalk.setup(optim.Momentum(0.25), model)
    given = contents(model), contents(state), contents(grads)
    new_state, new = cowalk.update(state, model, grads)
    assert (contents(model), contents(state), contents(grads)) == given
    assert type(new) is type(model)
    assert new_state.step == 1
    moved = 0
    for path, (x, y) in cowalk.walk(model, new, where=cowalk.istrainable):
        assert type(x) is type(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(host(y), host(x) - np.float32(0.25))
        assert (host(new_state[path]["momentum"]) == 0.25).all()
        moved += 1
    assert moved == len(list(state.all_leaves())) > 0
    if isinstance(new, dict):
        assert list(new) == list(model)
    # And what comes out goes in again.
    again, newer = cowalk.update(new_state, new, grads)
    assert again.step == 2
    assert contents(newer) != contents(new)


IN_PLACE = [name for name in MODELS if name not in ("dataclass of JAX", "Equinox")]


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_the_model_is_the_same_object_with_the_values_of_a_functional_update(name):
    model = MODELS[name]()
    state = cowalk.setup(optim.Adam(0.25), model)
    grads = ones_like(model)
    expected_state, expected = cowalk.update(state, model, grads)
    arrays = [x for _, (x,) in cowalk.walk(model, where=cowalk.istrainable)]
    assert cowalk.update_(state, model, grads) is model
    assert contents(model) == contents(expected)
    assert contents(state) == contents(expected_state)
    if name not in ("Flax", "NNX"):
        after = [x for _, (x,) in cowalk.walk(model, where=cowalk.istrainable)]
        assert all(x is y for x, y in zip(arrays, after, strict=True))


def test_an_updated_torch_model_has_parameters_of_its_own_and_works():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.LSTM(3, 2))
    x = torch.ones(1, 2)

    def loss(m):
        return m(x)[0].square().sum()

    before = loss(model).item()
    _, new = cowalk.update(cowalk.setup(optim.Descent(0.1), model), model, cowalk.gradient(loss, model))
    assert loss(model).item() == before
    assert loss(new).item() < before
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in new.parameters())
    assert not {p.data_ptr() for p in new.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_an_update_leaves_no_history_and_keeps_stored_gradients():
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    stored = model.weight.grad
    state = cowalk.setup(optim.AdamW(0.1, weight_decay=0.1), model)
    cowalk.update_(state, model, cowalk.gradients_of(model))
    assert model.weight.is_leaf
    assert model.weight.requires_grad
    assert model.weight.grad is stored
    assert stored.tolist() == [[1.0, 1.0]]
    assert not state["weight"]["m"].requires_grad


def test_gradients_of_torch_that_have_a_history_are_taken_without_it():
    model = nn.Linear(2, 1)
    grads = torch.autograd.grad(model(torch.ones(1, 2)).square().sum(), list(model.parameters()), create_graph=True)
    assert all(gradient.requires_grad for gradient in grads)
    state = cowalk.setup(optim.Momentum(0.1), model)
    cowalk.update_(state, model, {"weight": grads[0], "bias": grads[1]})
    assert not any(leaf["momentum"].requires_grad for _, leaf in state.all_leaves())


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_models_are_updated_on(backend):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(KERAS_CHECKS)]
    environment = os.environ | {"KERAS_BACKEND": backend}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=KERAS_CHECKS.parents[2]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


# --- gradients of many kinds ---


def read_only(values):
    values.flags.writeable = False
    return values


NUMPY_GRADIENTS = {
    "read-only": lambda: read_only(np.full((2, 3), 2.0)),
    "expanded": lambda: np.broadcast_to(np.array(2.0), (2, 3)),
    "transposed": lambda: np.full((3, 2), 2.0).T,
    "every other element": lambda: np.full((4, 6), 2.0)[::2, ::2],
    "half": lambda: np.full((2, 3), 2.0, "float16"),
    "integer": lambda: np.full((2, 3), 2),
    "bool": lambda: np.full((2, 3), True) * 2,
    "lists": lambda: [[2.0] * 3] * 2,
    "JAX": lambda: jnp.full((2, 3), 2.0),
    "torch": lambda: torch.full((2, 3), 2.0),
}


@pytest.mark.parametrize("kind", [name for name in NUMPY_GRADIENTS if name != "lists"])
@pytest.mark.parametrize("rule", [optim.Descent(0.5), optim.Chain(optim.WeightDecay(0.0), optim.Adam(1.0))], ids=repr)
def test_a_numpy_parameter_takes_gradients_that_are(kind, rule):
    model = {"w": np.ones((2, 3), "float32")}
    gradient = NUMPY_GRADIENTS[kind]()
    before = host(gradient).tobytes()
    cowalk.update_(cowalk.setup(rule, model), model, {"w": gradient})
    np.testing.assert_allclose(model["w"], np.zeros((2, 3)), atol=1e-6)
    assert model["w"].dtype == np.float32
    assert host(gradient).tobytes() == before


TORCH_GRADIENTS = {
    "expanded": lambda: torch.tensor(2.0).expand(2, 3),
    "transposed": lambda: torch.full((3, 2), 2.0).T,
    "sparse": lambda: torch.full((2, 3), 2.0).to_sparse(),
    "bfloat16": lambda: torch.full((2, 3), 2.0, dtype=torch.bfloat16),
    "float64": lambda: torch.full((2, 3), 2.0, dtype=torch.float64),
    "integer": lambda: torch.full((2, 3), 2),
    "NumPy": lambda: np.full((2, 3), 2.0),
    "JAX": lambda: jnp.full((2, 3), 2.0),
    "inference": lambda: inference_tensor(),
}


def inference_tensor():
    with torch.inference_mode():
        return torch.full((2, 3), 2.0)


@pytest.mark.parametrize("kind", TORCH_GRADIENTS)
@pytest.mark.parametrize("rule", [optim.Descent(0.5), optim.Chain(optim.WeightDecay(0.0), optim.Adam(1.0))], ids=repr)
def test_a_torch_parameter_takes_gradients_that_are(kind, rule):
    model = {"w": nn.Parameter(torch.ones(2, 3))}
    cowalk.update_(cowalk.setup(rule, model), model, {"w": TORCH_GRADIENTS[kind]()})
    torch.testing.assert_close(model["w"].detach(), torch.zeros(2, 3), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "gradient",
    [
        lambda: jnp.full((2, 3), 2.0, jnp.bfloat16),
        lambda: jnp.full((2, 3), 2),
        lambda: np.broadcast_to(np.float32(2), (2, 3)),
        lambda: torch.full((2, 3), 2.0),
    ],
    ids=["bfloat16", "integer", "NumPy expanded", "torch"],
)
def test_a_jax_parameter_takes_gradients_of_other_types(gradient):
    model = {"w": jnp.ones((2, 3))}
    state = cowalk.setup(optim.Adam(1.0), model)
    _, new = cowalk.update(state, model, {"w": gradient()})
    np.testing.assert_allclose(new["w"], 0, atol=1e-5)  # 1 − 0.999 in float32 is 0.001 to 5 digits
    assert new["w"].dtype == jnp.float32


def test_the_sparse_gradient_of_an_embedding_is_a_gradient_with_zeros_in_the_other_rows():
    torch.manual_seed(0)
    sparse = nn.Embedding(5, 2, sparse=True)
    dense = nn.Embedding(5, 2)
    dense.load_state_dict(sparse.state_dict())
    states = [cowalk.setup(optim.Adam(0.1), each) for each in (sparse, dense)]
    for tokens in ([1, 3, 3], [0, 3]):
        for model, state in zip((sparse, dense), states, strict=True):
            model.zero_grad()
            model(torch.tensor(tokens)).square().sum().backward()
            cowalk.update_(state, model, cowalk.gradients_of(model))
    assert sparse.weight.grad.layout is torch.sparse_coo
    torch.testing.assert_close(sparse.weight, dense.weight)


def test_zero_dimensional_and_empty_parameters_are_updated():
    model = {"scale": np.array(2.0), "none": np.zeros((0, 3)), "t": torch.tensor(2.0), "e": torch.zeros(0)}
    grads = {"scale": np.array(1.0), "none": np.zeros((0, 3)), "t": torch.tensor(1.0), "e": torch.zeros(0)}
    state = cowalk.setup(optim.Adam(1.0), model)
    cowalk.update_(state, model, grads)
    assert float(model["scale"]) == pytest.approx(1.0)
    assert float(model["t"]) == pytest.approx(1.0)
    assert model["none"].shape == (0, 3)


# --- what cannot be written ---


def test_read_only_arrays_are_refused_before_anything_is_written():
    model = {"a": np.ones(2), "b": read_only(np.ones(2)), "c": read_only(np.ones(1))}
    state = cowalk.setup(optim.Momentum(1.0), model)
    before = contents(model), contents(state)
    with pytest.raises(cowalk.WriteError) as caught:
        cowalk.update_(state, model, ones_like(model))
    assert [str(path) for path, _ in caught.value.problems] == ["b", "c"]
    assert (contents(model), contents(state)) == before
    _, new = cowalk.update(state, model, ones_like(model))
    assert new["b"].tolist() == [0.0, 0.0]


def test_a_read_only_array_may_stand_where_the_gradient_is_missing():
    model = {"a": np.ones(1), "b": read_only(np.ones(1))}
    state = cowalk.setup(optim.Descent(1.0), model)
    cowalk.update_(state, model, {"a": np.ones(1), "b": None})
    assert model["a"].tolist() == [0.0]


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
def test_overlapping_views_are_refused_before_anything_is_written(make):
    base = make(4)
    model = {"own": make(2), "all": base, "part": base[1:3]}
    state = cowalk.setup(optim.Descent(1.0), model)
    with pytest.raises(cowalk.WriteError, match="part"):
        cowalk.update_(state, model, {"own": make(2), "all": make(4), "part": make(2)})
    assert base.tolist() == [1.0] * 4
    assert model["own"].tolist() == [1.0] * 2


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
def test_views_side_by_side_of_one_array_are_updated(make):
    base = make(4)
    model = {"left": base[:2], "right": base[2:]}
    cowalk.update_(cowalk.setup(optim.Descent(1.0), model), model, {"left": make(2), "right": make(2) * 3})
    assert base.tolist() == [0.0, 0.0, -2.0, -2.0]


@pytest.mark.parametrize(
    "expanded",
    [lambda: np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,)), lambda: torch.ones(1).expand(3)],
    ids=["numpy", "torch"],
)
def test_expanded_parameters_are_refused(expanded):
    model = {"w": expanded()}
    state = cowalk.setup(optim.Descent(1.0), model)
    with pytest.raises(cowalk.WriteError, match="w"):
        cowalk.update_(state, model, {"w": np.ones(3)})
    assert model["w"].tolist() == [1.0] * 3


def test_an_array_that_becomes_read_only_between_two_updates_is_refused():
    model = {"a": np.ones(1), "b": np.ones(1)}
    state = cowalk.setup(optim.Descent(1.0), model)
    cowalk.update_(state, model, ones_like(model))
    read_only(model["b"])
    with pytest.raises(cowalk.WriteError, match="b"):
        cowalk.update_(state, model, ones_like(model))
    assert model["a"].tolist() == [0.0]


@pytest.mark.parametrize("name", ["Equinox", "dataclass of JAX"])
def test_in_place_a_frozen_module_of_jax_arrays_is_refused_with_a_word_for_update(name):
    model = MODELS[name]()
    state = cowalk.setup(optim.Momentum(1.0), model)
    before = contents(model), contents(state)
    with pytest.raises(cowalk.WriteError, match=r"cowalk\.update\b"):
        cowalk.update_(state, model, ones_like(model))
    assert (contents(model), contents(state)) == before


def test_an_infinite_norm_leaves_every_parameter_as_it_was():
    model = {"a": torch.ones(1), "b": torch.ones(1)}
    state = cowalk.setup(optim.Chain(optim.ClipNorm(1.0), optim.Momentum(1.0)), model)
    before = contents(model), contents(state)
    with pytest.raises(optim.RuleError, match="NaN"):
        cowalk.update_(state, model, {"a": torch.ones(1), "b": torch.tensor([float("nan")])})
    assert (contents(model), contents(state)) == before


# --- wrong use ---


@pytest.mark.parametrize("update", [cowalk.update, cowalk.update_])
def test_wrong_arguments_are_told_what_to_give(update):
    model = {"w": np.ones(2)}
    grads = {"w": np.ones(2)}
    state = cowalk.setup(optim.Descent(1.0), model)
    with pytest.raises(optim.UpdateError, match=r"gradients too.*gradients_of\(model\).*cowalk\.gradient"):
        update(state, model)
    with pytest.raises(optim.UpdateError, match="gradients too"):
        update(state, model, None)
    with pytest.raises(optim.UpdateError, match=r"not with the rule: state = cowalk\.setup\(rule, model\)"):
        update(optim.Descent(1.0), model, grads)
    with pytest.raises(optim.UpdateError, match=r"cowalk\.setup, not with a dict"):
        update(model, state, grads)
    with pytest.raises(optim.UpdateError, match="the state first, then the model"):
        update(state, state, grads)
    with pytest.raises(ValueError, match="'total' or 'per_position', not 'sum'"):
        update(state, model, grads, grads="sum")
    assert (model["w"].tolist(), state.step) == ([1.0, 1.0], 0)


@pytest.mark.parametrize("update", [cowalk.update, cowalk.update_])
@pytest.mark.parametrize("make", [np.ones, torch.ones, jnp.ones], ids=["numpy", "torch", "jax"])
def test_gradients_of_another_shape_are_all_named(update, make):
    model = {f"w{i}": make(2) for i in range(9)} | {"good": make(2)}
    grads = {f"w{i}": make((1, 2)) for i in range(9)} | {"good": make(2)}
    state = cowalk.setup(optim.Descent(1.0), model)
    with pytest.raises(optim.UpdateError, match=r"9 gradients.*w0: .*\(1, 2\), the parameter \(2,\)") as caught:
        with_dotall(update, state, model, grads)
    assert [str(path) for path in caught.value.paths] == [f"w{i}" for i in range(9)]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.paths, str(again)) == (caught.value.paths, str(caught.value))
    assert np.asarray(model["good"]).tolist() == [1.0, 1.0]


def with_dotall(update, *arguments):
    """Calls update, and puts its message on one line for `match`."""
    try:
        return update(*arguments)
    except optim.UpdateError as error:
        raise optim.UpdateError(error.message.replace("\n", " "), error.paths) from error


@pytest.mark.parametrize("update", [cowalk.update, cowalk.update_])
def test_a_state_that_lacks_a_parameter_or_has_one_too_many_is_a_structure_error(update):
    small, large = {"w": np.ones(1)}, {"w": np.ones(1), "b": np.ones(1)}
    for made_for, model, key in ((small, large, "b"), (large, small, "b")):
        state = cowalk.setup(optim.Descent(1.0), made_for)
        with pytest.raises(cowalk.StructureError) as caught:
            update(state, model, ones_like(model))
        assert [difference.key for difference in caught.value.differences] == [key]
        assert model["w"].tolist() == [1.0]


def test_a_parameter_that_the_state_leaves_out_is_left_alone():
    model = {"w": np.ones(1), "b": np.ones(1)}
    state = cowalk.setup({"w": optim.Descent(1.0), "*": None}, model)
    cowalk.update_(state, model, ones_like(model))
    assert (model["w"].tolist(), model["b"].tolist()) == ([0.0], [1.0])


# --- states ---


@pytest.mark.parametrize("again", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("make", [np.array, torch.tensor, jnp.array], ids=["numpy", "torch", "jax"])
def test_a_state_goes_on_after(again, make):
    rule = {"a": optim.Chain(optim.ClipNorm(1.0, over="tree"), optim.Adam(0.1)), "*": optim.Momentum(0.1)}
    model = {"a": make([1.0, 2.0]), "b": make([3.0])}
    grads = {"a": make([1.0, -2.0]), "b": make([1.0])}
    state, model = cowalk.update(cowalk.setup(rule, model), model, grads)
    other = again(cowalk.freeze(state, "b"))
    assert contents(other) == contents(cowalk.freeze(state, "b"))
    expected_state, expected = cowalk.update(state, model, grads)
    other_state, found = cowalk.update(cowalk.thaw(other), model, grads)
    assert contents(found) == contents(expected)
    assert contents(other_state) == contents(expected_state)


def test_a_copied_state_has_arrays_of_its_own():
    model = {"w": np.ones(1)}
    state = cowalk.setup(optim.Momentum(1.0), model)
    other = copy.deepcopy(state)
    cowalk.update_(other, {"w": np.ones(1)}, {"w": np.ones(1)})
    assert (state["w"]["momentum"].tolist(), state.step, other.step) == ([0.0], 0, 1)


def test_states_and_updates_go_through_jit():
    model = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
    rule = optim.Chain(optim.ClipNorm(1.0, over="tree"), optim.Adam(lambda step: 0.1 / (step + 1)))
    grads = {"w": jnp.array([1.0, -1.0]), "b": None}
    inside = outside = (cowalk.setup(rule, model), model)

    @jax.jit
    def step(state, model):
        return cowalk.update(state, model, grads)

    for _ in range(3):
        inside = step(*inside)
        outside = cowalk.update(*outside, grads)
    assert int(inside[0].step) == outside[0].step == 3
    assert inside[0]["w"].rule == outside[0]["w"].rule
    assert int(inside[0]["b"][1]["step"]) == 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), inside[1], outside[1])
    assert step._cache_size() <= 2  # a step that is a Python number at first, and an array from then on


def test_update_in_place_inside_jit_changes_a_container_made_there():
    @jax.jit
    def step(w, state):
        model = {"w": w}
        cowalk.update_(state, model, {"w": jnp.ones(2)})
        return model["w"], state

    w, state = step(jnp.ones(2), cowalk.setup(optim.Momentum(0.5), {"w": jnp.ones(2)}))
    assert w.tolist() == [0.5, 0.5]
    assert state["w"]["momentum"].tolist() == [0.5, 0.5]


def test_a_walk_has_the_state_of_each_parameter_beside_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = cowalk.setup(optim.Adam(), model)
    grads = ones_like(model)
    found = {}
    for path, (x, gradient, leaf) in cowalk.walk(model, grads, state, where=cowalk.istrainable):
        assert isinstance(leaf, optim.LeafState)
        assert leaf["m"].shape == x.shape == gradient.shape
        found[str(path)] = leaf
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert state["0"]["weight"] is found["0.weight"]
    assert repr(state) == f"OptimizerState(4 parameters, after step 0: {optim.Adam()!r})"


def test_stats_show_the_rms_of_adam_from_a_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01)
    state = cowalk.setup(optim.Adam(0.01), model)
    x = torch.randn(5, 3)
    for _ in range(3):
        for each in (model, theirs):
            each.zero_grad()
            each(x).square().mean().backward()
        table, expected = (
            cowalk.stats(each, cowalk.gradients_of(each), opt_state=kept)
            for each, kept in ((model, state), (theirs, optimizer))
        )
        cowalk.update_(state, model, cowalk.gradients_of(model))
        optimizer.step()
    assert len(table.rows) == 4
    for row, other in zip(table.rows, expected.rows, strict=True):
        assert row.adam is not None
        assert row.adam.rms == pytest.approx(other.adam.rms, rel=1e-5)
        assert row.adam.rms > 0


def test_without_any_gradient_a_warning_says_that_nothing_is_updated():
    model = {"w": np.ones(1)}
    state = cowalk.setup(optim.Descent(1.0), model)
    with pytest.warns(UserWarning, match="no gradient at all"):
        cowalk.update_(state, model, {"w": None})
    assert model["w"].tolist() == [1.0]


def test_a_parameter_that_was_not_there_when_the_state_was_made_is_not_passed_over():
    net = torch.nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    state = cowalk.setup(optim.Descent(1.0), net)
    net.bias.requires_grad_(True)
    with pytest.raises(optim.UpdateError, match="bias has a gradient, and the state nothing of it"):
        cowalk.update_(state, net, cowalk.gradient(lambda m: m(torch.ones(1, 2)).sum(), net))


def test_a_state_of_other_shapes_and_parameters_for_gradients_are_refused():
    small, large = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    state = cowalk.setup(optim.Descent(1.0), small)
    with pytest.raises(optim.UpdateError, match=r"weight: the state was made for a parameter of shape \(1, 2\)"):
        cowalk.update_(state, large, cowalk.gradient(lambda m: m(torch.ones(1, 3)).sum(), large))
    grads = cowalk.gradient(lambda m: m(torch.ones(1, 2)).sum(), small)
    with pytest.raises(optim.UpdateError, match="the model before its gradients"):
        cowalk.update_(state, grads, small)


def test_a_parameter_of_another_dtype_than_its_state_is_refused_before_anything_is_written():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    state = cowalk.setup(optim.Adam(0.1), net)
    net[1].half()
    before = net[0].weight.detach().clone()
    with pytest.raises(optim.UpdateError, match=r"1\.weight: the state was made for a parameter of torch.float32"):
        cowalk.update_(state, net, cowalk.fmapstructure(torch.ones_like, net, where=cowalk.istrainable))
    assert torch.equal(net[0].weight, before)


def test_a_schedule_that_fails_fails_before_anything_is_written():
    model = {"a": np.ones(1), "b": np.ones(1)}
    state = cowalk.setup({"a": optim.Descent(0.5), "b": optim.Descent(lambda step: 1 / 0)}, model)
    with pytest.raises(ZeroDivisionError) as caught:
        cowalk.update_(state, model, ones_like(model))
    assert "in the schedule Descent(lr=" in caught.value.__notes__[0]
    assert model["a"].tolist() == [1.0]


def test_memory_that_is_shared_later_is_seen():
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1, bias=False), "b": torch.nn.Linear(1, 1, bias=False)})
    state = cowalk.setup(optim.Descent(1.0), net)
    grads = cowalk.fmapstructure(torch.ones_like, net, where=cowalk.istrainable)
    cowalk.update_(state, net, grads)
    net["b"].weight.data = net["a"].weight.data
    with pytest.raises(cowalk.WriteError, match="lies in the memory of"):
        cowalk.update_(state, net, grads)


def test_a_gradient_that_is_another_parameter_is_read_as_it_was():
    model = {"a": np.full(300_000, 1.0), "b": np.full(300_000, 10.0)}
    state = cowalk.setup(optim.Descent(1.0), model)
    cowalk.update_(state, model, {"a": model["b"], "b": model["a"]})
    assert (model["a"][0], model["b"][0]) == (-9.0, 9.0)


def test_tensors_of_an_updated_tree_require_a_gradient_as_before():
    model = {"w": torch.ones(2, requires_grad=True), "v": torch.ones(2)}
    _, new = cowalk.update(cowalk.setup(optim.Descent(1.0), model), model, {"w": torch.ones(2), "v": torch.ones(2)})
    assert (new["w"].requires_grad, new["v"].requires_grad) == (True, False)
    assert new["w"].is_leaf


def test_accumulation_goes_on_where_n_has_become_less():
    model = {"w": np.zeros(1)}
    state = cowalk.setup(optim.Chain(optim.AccumGrad(4), optim.Descent(1.0)), model)
    for _ in range(3):
        cowalk.update_(state, model, ones_like(model))
    cowalk.update_(cowalk.adjust(state, n=2), model, ones_like(model))
    assert model["w"].tolist() == [-1.0]


@pytest.mark.parametrize("make", [np.array, jnp.array], ids=["numpy", "jax"])
def test_a_norm_that_half_precision_cannot_tell_clips_right(make):
    model = {"w": make(np.zeros(10_000, np.float16))}
    state = cowalk.setup(optim.Chain(optim.ClipNorm(1.0), optim.Descent(1.0)), model)
    model = cowalk.update(state, model, {"w": make(np.full(10_000, 60_000, np.float16))})[1]
    assert np.linalg.norm(np.asarray(model["w"], np.float64)) == pytest.approx(1.0, rel=1e-3)


class Wrong(optim.Rule):
    """Returns what it is told to."""

    def __init__(self, result):
        object.__setattr__(self, "result", result)

    def init(self, x):
        return {"m": np.zeros_like(x)}

    def apply(self, state, x, gradient):
        return self.result


@pytest.mark.parametrize("result", [np.ones(2), (np.ones(2), {}), ({"m": np.ones(2)}, 1.0), ({}, np.ones(2))])
def test_a_rule_that_returns_something_else_is_named(result):
    model = {"w": np.ones(2)}
    with pytest.raises(optim.RuleError, match=r"Wrong\.apply return"):
        cowalk.update_(cowalk.setup(Wrong(result), model), model, ones_like(model))
    assert model["w"].tolist() == [1.0, 1.0]

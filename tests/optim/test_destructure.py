"""All parameters as one flat vector, and back."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.optim.models import Tied
from torch import nn

import cowalk
from cowalk.optim import DestructureError

MAKE = {"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}
each_framework = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


class Pair(NamedTuple):
    w: Any
    name: str


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 3, num_layers=2)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


X = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.0, 3.0]])
TORCH_MODELS = {"mlp": (mlp, X), "tied": (Tied, torch.tensor([0, 2, 2])), "LSTM": (Recurrent, X)}
each_torch_model = pytest.mark.parametrize("name", TORCH_MODELS)


def torch_model(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, x = TORCH_MODELS[name]
    return make(), x


# --- values ---


@each_framework
def test_the_vector_holds_the_parameters_in_the_model_s_order_row_by_row(make):
    model = {
        "z": make([[1.0, 2.0], [3.0, 4.0]]),
        "a": [make([5.0]), {"deep": make(6.0)}],
        "last": Pair(make([7.0]), "fc"),
    }
    vector, rebuild = cowalk.destructure(model)
    assert vector.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert type(vector) is type(model["z"])
    new = rebuild(vector * 2)
    assert new["z"].tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert (new["a"][0].tolist(), new["a"][1]["deep"].tolist()) == ([10.0], 12.0)
    assert new["a"][1]["deep"].shape == ()
    assert isinstance(new["last"], Pair)
    assert (list(new), new["last"].name) == (["z", "a", "last"], "fc")
    assert model["z"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_transposed_parameters_are_read_by_rows_as_they_appear():
    columns = np.array([[1.0, 2.0], [3.0, 4.0]]).T
    vector, rebuild = cowalk.destructure({"w": columns, "t": np.zeros(0)})
    assert vector.tolist() == [1.0, 3.0, 2.0, 4.0]
    np.testing.assert_array_equal(rebuild(vector)["w"], columns)
    tensors = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T}
    vector, rebuild = cowalk.destructure(tensors)
    assert vector.tolist() == [1.0, 3.0, 2.0, 4.0]
    assert rebuild(vector)["w"].equal(tensors["w"])


@each_framework
def test_empty_parameters_take_no_place(make):
    model = {"w": make([1.0]), "none": make([[], []]), "b": make([2.0])}
    vector, rebuild = cowalk.destructure(model)
    assert vector.tolist() == [1.0, 2.0]
    assert tuple(rebuild(vector)["none"].shape) == (2, 0)


@each_framework
def test_a_model_of_only_empty_parameters_has_an_empty_vector(make):
    vector, rebuild = cowalk.destructure({"none": make([[], []])})
    assert tuple(vector.shape) == (0,)
    assert tuple(rebuild(vector)["none"].shape) == (2, 0)


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("parameter", [[1.0, 2.0], 1.0], ids=["1-d", "0-d"])
def test_the_vector_never_shares_memory_with_a_parameter_nor_a_rebuilt_model_with_the_vector(make, parameter):
    model = {"w": make(parameter)}
    vector, rebuild = cowalk.destructure(model)
    before = model["w"].tolist()
    vector[:] = 5
    assert model["w"].tolist() == before
    new = rebuild(vector)
    new["w"][...] = 7
    assert set(vector.tolist()) == {5.0}
    vector[:] = 9
    assert np.unique(np.asarray(new["w"])).tolist() == [7.0]


def test_a_tied_parameter_has_one_place_and_is_tied_again():
    shared = np.array([1.0, 2.0])
    model = {"a": shared, "b": np.array([3.0]), "c": shared}
    vector, rebuild = cowalk.destructure(model)
    assert vector.tolist() == [1.0, 2.0, 3.0]
    new = rebuild(vector + 1)
    assert new["a"] is new["c"]
    assert new["c"].tolist() == [2.0, 3.0]

    module, _ = torch_model("tied")
    vector, rebuild = cowalk.destructure(module)
    assert vector.shape == (12,)
    new = rebuild(vector.detach() + 1)
    assert new.emb.weight is new.head.weight
    torch.testing.assert_close(new.head.weight.detach(), module.head.weight.detach() + 1)


def test_equal_arrays_of_jax_in_two_places_are_two_parameters():
    shared = jnp.ones(2)
    vector, rebuild = cowalk.destructure({"a": shared, "b": shared})
    assert vector.shape == (4,)
    assert rebuild(jnp.arange(4.0))["b"].tolist() == [2.0, 3.0]


# --- dtypes ---


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (lambda: {"a": np.ones(1, "float16"), "b": np.ones(1, "float32")}, "float32"),
        (lambda: {"a": np.ones(1, "float32"), "b": np.ones(1, "float64")}, "float64"),
        (lambda: {"a": np.ones(1, "float64"), "b": np.ones(1, "complex64")}, "complex128"),
        (lambda: {"a": np.ones(1, "float16")}, "float16"),
        (lambda: {"a": torch.ones(1, dtype=torch.float16), "b": torch.ones(1, dtype=torch.bfloat16)}, "torch.float32"),
        (lambda: {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex64)}, "torch.complex64"),
        (lambda: {"a": jnp.ones(1, jnp.float16), "b": jnp.ones(1, jnp.bfloat16)}, "float32"),
        (lambda: {"a": jnp.ones(1), "b": jnp.ones(1, "complex64")}, "complex64"),
    ],
)
def test_the_vector_has_a_dtype_that_holds_all_and_parameters_get_their_own_back(model, dtype):
    model = model()
    vector, rebuild = cowalk.destructure(model)
    assert str(vector.dtype) == dtype
    for _, (old, new) in cowalk.walk(model, rebuild(vector * 3)):
        assert new.dtype == old.dtype
        assert new.tolist() == [3.0]


@each_framework
def test_complex_parameters_keep_both_parts_and_real_ones_their_real_part(make):
    model = {"c": make([1.0 + 2.0j]), "r": make([3.0])}
    vector, rebuild = cowalk.destructure(model)
    assert vector.tolist() == [1 + 2j, 3 + 0j]
    new = rebuild(vector * 1j)
    assert (new["c"].tolist(), new["r"].tolist()) == ([-2 + 1j], [0.0])


def test_a_wider_vector_is_rounded_to_the_parameters_dtypes():
    _, rebuild = cowalk.destructure({"w": np.ones(2, "float32")})
    new = rebuild(np.array([0.1, 1.0]))
    assert new["w"].dtype == np.float32
    assert new["w"].tolist() == [np.float32(0.1), 1.0]


# --- what is no parameter ---


def test_a_model_without_parameters_is_given_back_itself():
    for model in ({"n": 3, "ids": np.arange(3), "f": np.tanh}, nn.ReLU(), []):
        vector, rebuild = cowalk.destructure(model)
        assert vector.shape == (0,)
        assert rebuild(vector) is model
        with pytest.raises(DestructureError, match=r"no parameters, but the vector has shape \(2,\)"):
            rebuild(np.zeros(2))


def test_what_is_not_trained_is_left_alone():
    model = {"w": np.ones(1), "ids": np.arange(3), "n": 3, "none": None, "f": np.tanh}
    vector, rebuild = cowalk.destructure(model)
    assert vector.shape == (1,)
    new = rebuild(vector * 2)
    assert new["ids"].tolist() == [0, 1, 2]
    assert (new["n"], new["none"], new["f"]) == (3, None, np.tanh)

    module = mlp()
    module[0].bias.requires_grad_(False)
    module[1].running_mean.fill_(5.0)
    vector, rebuild = cowalk.destructure(module)
    assert vector.shape == (6 + 6 + 4,)
    new = rebuild(torch.zeros(16))
    assert new[0].bias.equal(module[0].bias)
    assert new[0].weight.abs().max() == 0
    assert new[1].running_mean.tolist() == [5.0] * 3
    assert new[1].num_batches_tracked.dtype == torch.int64


@each_framework
@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), (0,), ()])
def test_a_vector_of_another_shape_is_an_error_that_says_which_is_needed(make, shape):
    model = {"w": make([1.0, 2.0]), "b": make([3.0])}
    _, rebuild = cowalk.destructure(model)
    with pytest.raises(DestructureError, match=r"2 parameters of this model need \(3,\)") as caught:
        rebuild(make(np.zeros(shape).tolist()))
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# --- gradients, torch ---


def pieces(model: nn.Module, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters by name as pieces of a vector, for functional_call."""
    parts = vector.split([p.numel() for p in model.parameters()])
    return {name: part.view_as(p) for (name, p), part in zip(model.named_parameters(), parts, strict=True)}


@each_torch_model
@pytest.mark.parametrize("training", [True, False])
def test_torch_s_backward_goes_through_a_rebuilt_module_as_through_functional_call(name, training):
    model, x = torch_model(name)
    model.train(training)
    other = copy.deepcopy(model)  # a call moves BatchNorm's running mean
    vector, rebuild = cowalk.destructure(model)
    ours = vector.detach().mul(1.5).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    out = rebuild(ours)(x)
    expected = torch.func.functional_call(other, pieces(other, theirs), (x,))
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert ours.grad.abs().max() > 0
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert all(p.grad is None for p in model.parameters())


@each_torch_model
def test_torch_s_backward_goes_through_the_vector_to_the_parameters(name):
    model, _ = torch_model(name)
    vector, _ = cowalk.destructure(model)
    weights = torch.arange(vector.numel(), dtype=vector.dtype)
    (vector * weights).sum().backward()
    for parameter, piece in zip(model.parameters(), pieces(model, weights).values(), strict=True):
        assert parameter.grad.equal(piece)


@each_torch_model
def test_a_module_rebuilt_of_its_own_vector_reaches_the_parameters(name):
    model, x = torch_model(name)
    model.eval()
    vector, rebuild = cowalk.destructure(model)
    rebuild(vector)(x).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_a_narrow_parameter_passes_a_gradient_in_the_vector_s_dtype():
    model = {"a": torch.ones(1, dtype=torch.bfloat16), "b": torch.ones(2)}
    vector, rebuild = cowalk.destructure(model)
    vector.requires_grad_()
    new = rebuild(vector)
    (new["a"].float().sum() * 2 + (new["b"] * 3).sum()).backward()
    assert vector.grad.tolist() == [2.0, 3.0, 3.0]


def test_second_derivatives_go_through_a_rebuilt_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    vector, rebuild = cowalk.destructure(model)
    start = vector.detach()
    x = X.double()

    def ours(vector):
        return rebuild(vector)(x).square().sum()

    def theirs(vector):
        return torch.func.functional_call(model, pieces(model, vector), (x,)).square().sum()

    found, expected = (torch.autograd.functional.hessian(f, start) for f in (ours, theirs))
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected)


def test_a_module_rebuilt_of_a_plain_vector_has_parameters_and_trains_apart_from_it():
    model, x = torch_model("mlp")
    vector, rebuild = cowalk.destructure(model)
    vector = vector.detach().clone()
    kept = vector.clone()
    new = rebuild(vector)
    assert [name for name, _ in new.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in new.parameters())
    optimizer = torch.optim.SGD(new.parameters(), lr=0.5)
    new(x).square().sum().backward()
    optimizer.step()
    assert vector.equal(kept)
    trained, _ = cowalk.destructure(new)
    assert not trained.equal(kept)
    theirs, _ = cowalk.destructure(model)
    assert theirs.equal(kept)


def test_a_rebuilt_module_s_parameters_are_trained_by_cowalk_too():
    model, x = torch_model("LSTM")
    vector, rebuild = cowalk.destructure(model)
    new = rebuild(vector.detach())
    state = cowalk.setup(cowalk.optim.Descent(0.1), new)

    def loss(m):
        return m(x).square().sum()

    before = loss(new).item()
    cowalk.update_(state, new, cowalk.gradient(loss, new))
    assert loss(new).item() < before
    assert loss(model).item() == pytest.approx(before)


# --- gradients, JAX ---


def equinox_model() -> Any:
    return eqx.nn.MLP(2, "scalar", 3, 1, jax.nn.tanh, key=jax.random.key(0))


def equinox_loss(model: Any) -> Any:
    return (jax.vmap(model)(jnp.array(X.numpy())) ** 2).sum()


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "no jit"])
def test_jax_differentiates_through_a_rebuilt_model(jit):
    model = equinox_model()
    vector, rebuild = cowalk.destructure(model)
    found = jit(jax.grad(lambda v: equinox_loss(rebuild(v))))(vector)
    expected = eqx.filter_grad(equinox_loss)(model)
    np.testing.assert_allclose(found, cowalk.destructure(expected)[0], rtol=1e-5)
    assert jnp.abs(found).max() > 0
    new = rebuild(vector)
    assert type(new) is type(model)
    assert new.activation is model.activation
    assert float(equinox_loss(new)) == float(equinox_loss(model))


@pytest.mark.parametrize("jit", [eqx.filter_jit, lambda f: f], ids=["jit", "no jit"])
def test_jax_differentiates_through_the_vector(jit):
    model = equinox_model()

    @jit
    @eqx.filter_grad
    def gradient(model):
        vector, _ = cowalk.destructure(model)
        return (vector * jnp.arange(vector.size)).sum()

    parts, _ = cowalk.destructure(gradient(model))
    assert parts.tolist() == list(range(parts.size))


def test_jax_s_hessian_and_vmap_go_through_a_rebuilt_model():
    vector, rebuild = cowalk.destructure({"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0, jnp.bfloat16)})

    def loss(v):
        model = rebuild(v)
        return (model["w"] ** 3).sum() + model["b"].astype("float32") * model["w"][0]

    np.testing.assert_allclose(jax.hessian(loss)(vector), [[6, 0, 1], [0, 12, 0], [1, 0, 0]])
    assert jax.vmap(loss)(jnp.stack([vector, vector * 0])).tolist() == [12.0, 0.0]


def test_complex_parameters_are_differentiated_in_both_frameworks():
    values = {"c": [1.0 + 2.0j], "r": [3.0]}
    jax_vector, jax_rebuild = cowalk.destructure({name: jnp.array(value) for name, value in values.items()})
    vector, rebuild = cowalk.destructure({name: torch.tensor(value) for name, value in values.items()})

    def loss(model):
        return (abs(model["c"]) ** 2).sum() + (model["r"] ** 2).sum()

    vector.requires_grad_()
    loss(rebuild(vector)).backward()
    assert vector.grad.tolist() == pytest.approx([2 + 4j, 6])
    found = jax.grad(lambda v: loss(jax_rebuild(v)))(jax_vector)
    assert found.tolist() == pytest.approx([2 - 4j, 6])  # JAX's gradients are the conjugates of torch's

"""Training with cowalk's AdamW is training with torch's, and with Optax's: the same losses, step by step."""

from __future__ import annotations

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import cowalk
from cowalk import optim

STEPS = 30
LR, BETAS, DECAY = 1e-2, (0.9, 0.99), 0.1
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))


class Language(nn.Module):
    """A transformer of two layers, whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.encoder(self.emb(tokens)))


def batches(name: str, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if name == "transformer":
        tokens = torch.randint(0, 11, (STEPS, 4, 7))
        return [(each[:, :-1], each[:, 1:]) for each in tokens]
    x = torch.randn(STEPS, 16, 4, dtype=dtype)
    return [(each, each.sum(1, keepdim=True)) for each in x]


def loss(model, x, y):
    out = model(x)
    if y.is_floating_point():
        return (out - y).square().mean()
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("name", "make"), [("mlp", mlp), ("transformer", Language)], ids=["mlp", "transformer"])
def test_a_torch_model_is_trained_as_by_torch_s_adamw(name, make, dtype):
    torch.manual_seed(0)
    theirs = make().to(dtype)
    ours = copy.deepcopy(theirs)
    data = batches(name, dtype)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    state = cowalk.setup(optim.AdamW(LR, betas=BETAS, weight_decay=DECAY), ours)
    expected, found = [], []
    for x, y in data:
        optimizer.zero_grad()
        value = loss(theirs, x, y)
        value.backward()
        optimizer.step()
        expected.append(value.item())
        value, grads = cowalk.value_and_gradient(loss, ours, x, y)
        cowalk.update_(state, ours, grads)
        found.append(value.item())
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE[dtype])
    assert np.mean(expected[-3:]) < 0.9 * np.mean(expected[:3])  # they learned something
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.dtype == dtype
        if dtype == torch.float64:  # in float32 the keys' biases, whose gradients are but rounding errors, go astray
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_stored_gradients_and_new_models_train_as_well():
    torch.manual_seed(0)
    theirs = mlp().double()
    ours, new = copy.deepcopy(theirs), copy.deepcopy(theirs)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    state = new_state = cowalk.setup(optim.AdamW(LR, betas=BETAS, weight_decay=DECAY), ours)
    for x, y in batches("mlp", torch.float64):
        values = []
        for model in (theirs, ours, new):
            model.zero_grad()
            values.append(loss(model, x, y))
            values[-1].backward()
        optimizer.step()
        new_state, new = cowalk.update(new_state, new, cowalk.gradients_of(new))
        cowalk.update_(state, ours, cowalk.gradients_of(ours))
        assert [value.item() for value in values[1:]] == pytest.approx([values[0].item()] * 2, rel=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
@pytest.mark.parametrize("given", ["rule", "transformation"])
def test_an_equinox_model_is_trained_as_by_optax_s_adamw_under_jit(dtype, tolerance, given):
    with jax.enable_x64(dtype == "float64"):
        start = eqx.nn.MLP(4, "scalar", 8, 1, jax.nn.tanh, key=jax.random.key(0), dtype=jnp.dtype(dtype))
        x = np.random.default_rng(1).normal(size=(STEPS, 16, 4)).astype(dtype)
        y = x.sum(-1)
        arrays, rest = eqx.partition(start, eqx.is_array)

        def loss(model, x, y):
            return ((jax.vmap(model)(x) - y) ** 2).mean()

        transformation = optax.adamw(LR, *BETAS, weight_decay=DECAY)
        rule = optim.AdamW(LR, betas=BETAS, weight_decay=DECAY) if given == "rule" else transformation

        @jax.jit
        def their_step(arrays, kept, x, y):
            value, grads = jax.value_and_grad(lambda arrays: loss(eqx.combine(arrays, rest), x, y))(arrays)
            updates, kept = transformation.update(grads, kept, arrays)
            return optax.apply_updates(arrays, updates), kept, value

        @jax.jit
        def our_step(arrays, state, x, y):
            model = eqx.combine(arrays, rest)
            value, grads = cowalk.value_and_gradient(loss, model, x, y)
            state, model = cowalk.update(state, model, grads)
            return eqx.filter(model, eqx.is_array), state, value

        def train(step, kept):
            now, values = arrays, []
            for each, target in zip(x, y, strict=True):
                now, kept, value = step(now, kept, each, target)
                values.append(float(value))
            return now, values

        theirs, expected = train(their_step, transformation.init(arrays))
        ours, found = train(our_step, cowalk.setup(rule, start))
        np.testing.assert_allclose(found, expected, rtol=tolerance)
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert one.dtype == dtype
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)
        assert np.mean(expected[-3:]) < 0.9 * np.mean(expected[:3])


def test_under_equinox_s_filter_jit_a_step_is_compiled_at_most_twice():
    model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    state = cowalk.setup(optim.Adam(0.1), model)
    traced = []

    @eqx.filter_jit
    def step(state, model):
        traced.append(True)
        return cowalk.update(state, model, cowalk.gradient(lambda m: m(jnp.ones(2)).sum(), model))

    for _ in range(4):
        state, model = step(state, model)
    assert len(traced) <= 2
    assert int(state.step) == 4

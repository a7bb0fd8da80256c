"""The loss scale that gradients still hold: `scale=` takes it out of what was measured."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cowalk import Table, stats

SCALE = 2.0**10
RNG = np.random.default_rng(0)
MODEL = {"w": RNG.normal(size=(6, 5)), "b": RNG.normal(size=4)}
GRADS = {"w": RNG.normal(size=(6, 5)) * (np.arange(6)[:, None] > 1), "b": RNG.normal(size=4)}
UPDATES = {key: 0.01 * grad for key, grad in GRADS.items()}
STATE = {key: {"m": 0.1 * grad, "v": 0.01 * grad**2, "step": 7} for key, grad in GRADS.items()}


def times(factor: float, tree: dict[str, Any]) -> dict[str, Any]:
    return {key: factor * value for key, value in tree.items()}


def measured(grads: Any, **options: Any) -> Table:
    return stats(MODEL, grads, UPDATES, STATE, adam={"lr": 0.1}, **options)


def assert_same(found: Table, right: Table) -> None:
    np.testing.assert_allclose(found.matrix, right.matrix, rtol=1e-12)
    assert list(found.states) == list(right.states)
    assert [row.histograms for row in found] == [row.histograms for row in right]


class Scaler:
    """As torch's GradScaler."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def get_scale(self) -> Any:
        return self.scale


SCALES = {
    "float": SCALE,
    "int": 1024,
    "NumPy": np.float32(SCALE),
    "tensor": torch.tensor(SCALE),
    "JAX": jnp.float32(SCALE),
    "scaler": Scaler(SCALE),
    "scaler of a tensor": Scaler(torch.tensor(SCALE)),
    "GradScaler": torch.amp.GradScaler("cpu", init_scale=SCALE),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_the_table_is_that_of_gradients_without_the_scale(scale: Any) -> None:
    assert_same(measured(times(SCALE, GRADS), scale=scale, histograms=True), measured(GRADS, histograms=True))


@given(st.floats(1e-6, 1e6))
@settings(max_examples=30, deadline=None)
def test_any_positive_factor_will_do(factor: float) -> None:
    assert_same(measured(times(factor, GRADS), scale=factor), measured(GRADS))


def test_a_scale_of_one_changes_nothing() -> None:
    assert measured(GRADS, scale=1.0).matrix.tobytes() == measured(GRADS).matrix.tobytes()


def test_what_overflowed_is_counted_as_it_stands() -> None:
    grads = [np.array([np.inf, -np.inf, np.nan, 0.0, 3.0 * SCALE])]
    row = stats([np.ones(5)], grads, scale=SCALE)[0]
    assert row.gradient is not None
    counts = row.gradient.posinf, row.gradient.neginf, row.gradient.nan, row.gradient.zeros
    assert counts == (1, 1, 1, 1)
    assert (row.gradient.min, row.gradient.max, row.value("ratio.nonfinite")) == (0.0, 3.0, 3)


def test_half_precision_gradients_are_measured_below_their_own_range() -> None:
    grads = [torch.full((3,), 2.0**-20 * SCALE, dtype=torch.float16)]
    row = stats([torch.ones(3)], grads, scale=SCALE)[0]
    assert (row.value("gradient.max"), row.value("gradient.subnormals")) == (2.0**-20, 0)


def test_histograms_move_by_the_power_of_the_scale() -> None:
    for scale, low in ((8.0, -3), (0.5, 1), (1.0, 0)):
        found = stats([np.ones(2)], [np.array([1.0, 2.0])], scale=scale, histograms=True)[0].histograms
        assert found is not None
        parameter, gradient, update = found
        assert parameter is not None
        assert gradient is not None
        assert (gradient.low, gradient.counts, parameter.low, update) == (low, (1, 1), 0, None)


def test_histograms_of_a_scale_that_is_no_power_of_two_are_an_error() -> None:
    with pytest.raises(ValueError, match="powers of two"):
        measured(GRADS, scale=1000.0, histograms=True)
    with pytest.raises(ValueError, match="powers of two"):
        measured(GRADS, scale=3.0, histograms=True)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, Scaler(0.0), torch.tensor(-2.0)])
def test_a_scale_that_is_not_positive_and_finite_is_an_error(scale: Any) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        measured(GRADS, scale=scale)


@pytest.mark.parametrize("scale", ["big", [2.0], torch.ones(2), 2j, object(), Scaler("big"), MODEL])
def test_a_scale_that_is_no_number_is_an_error(scale: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        measured(GRADS, scale=scale)


def test_a_scale_without_gradients_does_nothing() -> None:
    assert stats(MODEL, scale=8.0).matrix.tobytes() == stats(MODEL).matrix.tobytes()


def test_a_grad_scaler_s_own_scale_is_taken_out() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    loss = model(torch.ones(2, 3)).square().sum()
    plain = torch.autograd.grad(loss, model.weight, retain_graph=True)[0].norm().item()
    scaler.scale(loss).backward()
    row = stats(model, {"weight": model.weight.grad, "bias": model.bias.grad}, scale=scaler)["weight"]
    assert row.value("gradient.norm") == pytest.approx(plain, rel=1e-6)

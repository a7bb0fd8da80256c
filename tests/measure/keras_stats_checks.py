"""What holds for `stats` of Keras models on the back end that KERAS_BACKEND names; run by test_stats_frameworks.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import cowalk
from cowalk import stats

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
X = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
LR, BETAS, EPSILON = 0.02, (0.8, 0.95), 1e-6


def net() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Dense(3, name="one"), layers.BatchNormalization(), layers.Dense(1, name="two")])
    model.build((None, 2))
    return model


def loss(model: Any, x: Any) -> Any:
    return ops.sum(model(x) ** 2)


def array(value: Any) -> Any:
    return np.asarray(ops.convert_to_numpy(value), np.float64)


def trained(model: Any, optimizer: Any, steps: int = 2) -> Any:
    """The gradients of the last step."""
    grads: Any = None
    for _ in range(steps):
        grads = cowalk.gradient(loss, model, X)
        pairs = [(g, cowalk.get(model, path)) for path, (g,) in cowalk.walk(grads) if g is not None]
        optimizer.apply([g for g, _ in pairs], [variable for _, variable in pairs])
    return grads


def test_a_row_for_every_trained_variable() -> None:
    model = net()
    grads = cowalk.gradient(loss, model, X)
    table = stats(model, grads)
    assert len(table) == len(model.trainable_variables)
    assert {row.shape for row in table} == {tuple(v.shape) for v in model.trainable_variables}
    kernel, gradient = array(model.get_layer("one").kernel), array(grads["one"]["kernel"])
    row = table["one.kernel"]
    assert row.value("parameter.norm") == pytest.approx(np.linalg.norm(kernel), rel=1e-6)
    assert row.value("ratio.mean") == pytest.approx((kernel / gradient).mean(), rel=1e-5)


def test_rows_hold_what_the_variables_hold() -> None:
    model = net()
    grads = cowalk.gradient(loss, model, X)
    table = stats(model, grads)
    for path, (g,) in cowalk.walk(grads):
        kernel = array(cowalk.get(model, path))
        assert table[path].value("parameter.norm") == pytest.approx(np.linalg.norm(kernel), rel=1e-6)
        assert table[path].value("gradient.norm") == pytest.approx(np.linalg.norm(array(g)), rel=1e-6)


def test_total_norms_are_those_of_all_values() -> None:
    model = net()
    grads = cowalk.gradient(loss, model, X)
    total = stats(model, grads).total
    values = np.concatenate([array(v).ravel() for v in model.trainable_variables])
    gradients = np.concatenate([array(g).ravel() for _, (g,) in cowalk.walk(grads)])
    assert total.value("parameter.norm") == pytest.approx(np.sqrt((values**2).sum()), rel=1e-6)
    assert total.value("gradient.norm") == pytest.approx(np.sqrt((gradients**2).sum()), rel=1e-6)


def test_a_tied_variable_counts_once() -> None:
    shared = layers.Dense(2, name="shared")
    one, two, outer = keras.Input((2,)), keras.Input((2,)), keras.Input((2,))
    left, right = keras.Model(one, shared(one), name="left"), keras.Model(two, ops.tanh(shared(two)), name="right")
    model = keras.Model(outer, left(outer) + right(outer))
    table = stats(model, cowalk.gradient(loss, model, X))
    assert table.total.n == 6
    assert [str(path) for path in table["left.shared.kernel"].aliases] == ["right.shared.kernel"]


def test_an_unused_layer_is_told() -> None:
    class Two(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = layers.Dense(1, name="used"), layers.Dense(1, name="idle")
            self.used.build((None, 2))
            self.idle.build((None, 2))

        def call(self, x: Any) -> Any:
            return self.used(x)

    model = Two()
    model(X)
    table = stats(model, cowalk.gradient(loss, model, X))
    assert (table["used.kernel"].state, table["idle.kernel"].state) == ("ok", "unused")


@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_is_found_in_the_optimizer(kind: Any, amsgrad: bool) -> None:
    model = net()
    optimizer = kind(LR, beta_1=BETAS[0], beta_2=BETAS[1], epsilon=EPSILON, amsgrad=amsgrad)
    grads = trained(model, optimizer)
    table = stats(model, grads, opt_state=optimizer)
    state = cowalk.optimizer_state(model, optimizer)
    for path, (g,) in cowalk.walk(grads):
        of = cowalk.get(state, path)
        first, second = array(of["momentum"]), array(of["velocity_hat" if amsgrad else "velocity"])
        m, v = first / (1 - BETAS[0] ** 2), second / (1 - BETAS[1] ** 2)
        row = table[path]
        g = array(g)
        assert row.state == "ok"
        assert row.value("adam.rms") == pytest.approx(np.sqrt((g**2 / np.maximum(v, EPSILON**2)).mean()), rel=1e-5)
        step = LR * np.sqrt(((m / (np.sqrt(v) + EPSILON)) ** 2).mean())
        assert row.value("adam.step") == pytest.approx(step, rel=1e-5)


def test_after_the_first_step_v_is_the_square_of_the_gradient() -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3, name="one"), layers.Dense(1, name="two")])
    optimizer = keras.optimizers.Adam(LR, epsilon=1e-20)
    table = stats(model, trained(model, optimizer, 1), opt_state=optimizer)
    assert table.column("adam.rms") == pytest.approx([1.0] * 4, abs=1e-5)
    assert table.column("adam.step") == pytest.approx([LR] * 4, rel=1e-5)


def test_a_loss_scale_optimizer_is_looked_into() -> None:
    model = net()
    inner = keras.optimizers.Adam(LR)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    optimizer.build(model.trainable_variables)
    grads = cowalk.gradient(loss, model, X)
    assert set(stats(model, grads, opt_state=optimizer).column("state")) == set(stats(model, grads).column("state"))


def test_variables_that_the_optimizer_was_not_built_for_are_told() -> None:
    model = net()
    optimizer = keras.optimizers.SGD(LR)
    optimizer.build(model.get_layer("one").trainable_variables)
    table = stats(model, cowalk.gradient(loss, model, X), opt_state=optimizer)
    assert table["one.kernel"].state == "ok"
    assert table["two.kernel"].state == "no optimizer"
    assert set(table.column("adam.rms")) == {None}


def test_what_is_no_optimizer_is_an_error() -> None:
    for junk in (3, object(), keras.optimizers.Adam):
        with pytest.raises(cowalk.CowalkError, match="opt_state= is an optimizer"):
            stats(net(), opt_state=junk)


def test_an_optimizer_that_is_not_built_yet_owns_nothing() -> None:
    model = net()
    table = stats(model, cowalk.gradient(loss, model, X), opt_state=keras.optimizers.Adam(LR))
    assert set(table.column("adam.rms")) == {None}
    assert "no optimizer" in table["one.kernel"].states

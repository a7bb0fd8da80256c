"""What holds for Keras models on the back end that KERAS_BACKEND names; run by test_keras.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import cowalk

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def functional() -> Any:
    """Normalisation, dropout, and one layer used twice."""
    inputs = keras.Input((4,))
    hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(3, name="first")(inputs))
    shared = keras.layers.Dense(3, name="shared")
    hidden = shared(shared(keras.layers.Dropout(0.1)(hidden)))
    return keras.Model(inputs, keras.layers.Dense(2, name="last")(hidden))


def nested() -> Any:
    """Two inputs, and a model inside of a model."""
    inner_input = keras.Input((4,))
    inner = keras.Model(inner_input, keras.layers.Dense(3, name="dense")(inner_input), name="inner")
    one, two = keras.Input((4,)), keras.Input((4,))
    joined = keras.layers.Concatenate()([inner(one), ops.tanh(inner(two))])
    return keras.Model([one, two], keras.layers.Dense(1, name="head")(joined))


class Subclassed(keras.Model):
    """Weights of its own with one name, layers in a list, a layer that is not used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = keras.layers.Dense(width, name="dense")
        self.blocks = [keras.layers.Dense(width, name="dense"), keras.layers.Dense(2, name="out")]
        self.unused = keras.layers.Dense(2, name="unused")
        self.unused.build((None, width))
        self.scale = self.add_weight(shape=(2,), name="w", initializer="ones")
        self.offset = self.add_weight(shape=(2,), name="w", initializer="zeros")

    def call(self, inputs: Any) -> Any:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * self.scale + self.offset


def subclassed() -> Any:
    model = Subclassed(3)
    model(X)
    return model


def sequential() -> Any:
    model = keras.Sequential([keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")])
    model.build((None, 4))
    return model


MODELS = {"functional": functional, "nested": nested, "subclassed": subclassed, "sequential": sequential}


def inputs_of(model: Any) -> Any:
    return [X, X[::-1].copy()] if len(getattr(model, "inputs", None) or [1]) == 2 else X


def output(model: Any) -> Any:
    return ops.convert_to_numpy(model(inputs_of(model)))


def loss(model: Any, x: Any) -> Any:
    return ops.mean(model(x, training=True) ** 2)


def copied(value: Any) -> Any:
    return value * 1


def names(model: Any, **options: Any) -> list[str]:
    return [str(path) for path, _ in cowalk.walk(model, **options)]


def test_layers_open_by_name_and_a_shared_one_is_one() -> None:
    assert names(functional()) == [
        *("first.kernel", "first.bias", "norm.gamma", "norm.beta", "norm.moving_mean", "norm.moving_variance"),
        *("shared.kernel", "shared.bias", "last.kernel", "last.bias"),
    ]
    assert names(nested()) == ["inner.dense.kernel", "inner.dense.bias", "head.kernel", "head.bias"]


def test_equal_names_are_kept_apart() -> None:
    assert names(subclassed()) == [
        *("w", "w_1", "dense.kernel", "dense.bias", "dense_1.kernel", "dense_1.bias"),
        *("out.kernel", "out.bias", "unused.kernel", "unused.bias"),
    ]


def test_leaves_are_the_back_ends_arrays_and_only_trainable_ones_are_trained() -> None:
    model = functional()
    model.get_layer("first").trainable = False
    assert all(cowalk.isnumeric(leaf) for _, (leaf,) in cowalk.walk(model))
    assert [str(path) for path in cowalk.trainables(model)] == [
        *("norm.gamma", "norm.beta", "shared.kernel", "shared.bias", "last.kernel", "last.bias")
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_walks_beside_its_gradients(name: str) -> None:
    model = MODELS[name]()
    grads = cowalk.gradient(loss, model, inputs_of(model))
    trained = [str(path) for path in cowalk.trainables(model) if "unused" not in str(path)]
    assert list(cowalk.flatten(grads)) == trained
    assert all(p.shape == g.shape for _, (p, g) in cowalk.walk(model, grads))
    assert cowalk.diff(model, grads) == []


def test_a_layer_that_the_loss_does_not_depend_on_has_no_gradient() -> None:
    grads = cowalk.gradient(loss, subclassed(), X)
    assert grads["unused"] == {"kernel": None, "bias": None}


def test_a_gradient_is_the_slope_of_the_loss() -> None:
    model = sequential()
    value, grads = cowalk.value_and_gradient(loss, model, X)
    step = 1e-3
    direction = cowalk.fmap(lambda p, g: p + step * g, model, grads)
    slope = (float(loss(direction, X)) - float(value)) / step
    squares = sum(float(ops.sum(g**2)) for _, (g,) in cowalk.walk(grads))
    assert slope == pytest.approx(squares, rel=0.05)
    (pair, aux), _ = cowalk.value_and_gradient(lambda m, x: (loss(m, x), "more"), model, X, has_aux=True)
    assert float(pair) == pytest.approx(float(value))
    assert aux == "more"


def test_batch_statistics_move_as_they_do_without_cowalk() -> None:
    model, twin = functional(), functional()
    twin.set_weights(model.get_weights())
    cowalk.gradient(loss, model, X)
    loss(twin, X)
    mean = [ops.convert_to_numpy(each.get_layer("norm").moving_mean) for each in (model, twin)]
    assert np.allclose(mean[0], mean[1])
    assert np.abs(mean[0]).max() > 0


@pytest.mark.parametrize("f", [lambda value: value, copied], ids=["identity", "copy"])
@pytest.mark.parametrize("name", MODELS)
def test_a_new_model_is_equal_and_apart(name: str, f: Any) -> None:
    model = MODELS[name]()
    before = output(model)
    new = cowalk.fmap(f, model)
    assert type(new) is type(model)
    assert np.array_equal(output(new), before)
    assert {id(variable) for variable in new.variables}.isdisjoint(id(variable) for variable in model.variables)
    assert {id(layer) for layer in new._flatten_layers()}.isdisjoint(id(layer) for layer in model._flatten_layers())
    assert names(new) == names(model)
    assert np.allclose(new.predict(inputs_of(new), verbose=0), before, atol=1e-5)
    assert np.allclose(model.predict(inputs_of(model), verbose=0), before, atol=1e-5)
    if f is copied:
        for variable in new.trainable_variables:
            variable.assign(variable * 0)
        assert np.array_equal(output(new), np.zeros_like(before))
        assert np.array_equal(output(model), before)


def test_a_new_model_can_be_trained_and_saved(tmp_path: Any) -> None:
    model = functional()
    before = output(model)
    new = cowalk.fmap(copied, model)
    new.compile("adam", "mse")
    new.fit(X, np.zeros((8, 2)), epochs=2, verbose=0)
    assert np.array_equal(output(model), before)
    assert not np.allclose(output(new), before)
    new.save(tmp_path / "model.keras")
    assert np.allclose(output(keras.models.load_model(tmp_path / "model.keras")), output(new), atol=1e-5)
    again = cowalk.fmap(copied, new)
    assert not again.compiled
    assert np.allclose(output(again), output(new))


def test_a_gradient_step_makes_the_loss_smaller() -> None:
    model = sequential()
    value, grads = cowalk.value_and_gradient(loss, model, X)
    assert float(loss(cowalk.fmap(lambda p, g: p - 0.05 * g, model, grads), X)) < float(value)


def test_in_place_results_go_into_the_variables() -> None:
    model = sequential()
    kernel = model.get_layer("a").kernel
    assert cowalk.fmap_(lambda value: value * 0, model) is model
    assert model.get_layer("a").kernel is kernel
    assert not ops.convert_to_numpy(kernel).any()


def test_optimizer_state_is_found_by_the_variable() -> None:
    model = functional()
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(list(reversed(model.trainable_variables)))
    state = cowalk.optimizer_state(model, optimizer)
    assert set(state["first"]["kernel"]) >= {"momentums", "velocities"}
    assert tuple(state["first"]["kernel"]["momentums"].shape) == (4, 3)
    assert state["norm"]["moving_mean"] is None
    with pytest.raises(cowalk.CowalkError, match="other variables"):
        cowalk.optimizer_state(sequential(), optimizer)
    with pytest.raises(cowalk.CowalkError, match="Keras optimizer"):
        cowalk.optimizer_state(model, {})


def test_a_model_that_is_not_built_says_so() -> None:
    with pytest.raises(cowalk.CowalkError, match="not built"):
        cowalk.gradient(loss, keras.Sequential([keras.layers.Dense(2)]), X)


def test_the_ratio_table_of_a_keras_model() -> None:
    model = sequential()
    table = cowalk.ratio(model, cowalk.gradient(loss, model, X))
    assert [str(row.path) for row in table.rows] == ["a.kernel", "a.bias", "b.kernel", "b.bias"]

"""What holds for updates of Keras models on the back end that KERAS_BACKEND names; run by test_update.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import cowalk
from cowalk import optim

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def net() -> Any:
    """Normalisation, and a layer used twice."""
    shared = layers.Dense(3, name="shared")
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, name="first"),
            layers.BatchNormalization(name="norm"),
            shared,
            layers.Activation("tanh", name="act"),
            shared,
        ]
    )


def loss(model: Any, x: Any) -> Any:
    return ops.mean(model(x, training=False) ** 2)


def values(model: Any) -> dict[str, Any]:
    return {variable.path: ops.convert_to_numpy(variable.value).copy() for variable in model.variables}


def test_update_in_place_moves_the_trained_variables_and_lessens_the_loss():
    model = net()
    variables = [id(variable) for variable in model.variables]
    before, first = values(model), float(loss(model, X))
    state = cowalk.setup(optim.Adam(0.01), model)
    assert len(list(state.all_leaves())) == len(model.trainable_variables)
    for _ in range(5):
        assert cowalk.update_(state, model, cowalk.gradient(loss, model, X)) is model
    assert [id(variable) for variable in model.variables] == variables
    after = values(model)
    trained = {variable.path for variable in model.trainable_variables}
    for name, value in after.items():
        assert (value != before[name]).any() == (name in trained), name
    assert float(loss(model, X)) < first


def test_update_gives_a_new_model_and_leaves_the_old_one():
    model = net()
    before = values(model)
    state = cowalk.setup(optim.Descent(0.5), model)
    grads = cowalk.gradient(loss, model, X)
    new_state, new = cowalk.update(state, model, grads)
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, before[name])
    assert (state.step, new_state.step) == (0, 1)
    assert float(loss(new, X)) < float(loss(model, X))
    cowalk.update_(state, model, grads)
    for one, other in zip(model.variables, new.variables, strict=True):
        np.testing.assert_allclose(ops.convert_to_numpy(one), ops.convert_to_numpy(other), rtol=1e-6)


def test_the_steps_are_those_of_keras():
    model, theirs = net(), net()
    theirs.set_weights(model.get_weights())
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(theirs.trainable_variables)
    state = cowalk.setup(optim.Descent(0.5), model)
    for _ in range(2):
        grads = cowalk.gradient(loss, theirs, X)
        found = {str(path): gradient for path, (_, gradient) in cowalk.walk(theirs, grads)}
        pairs = [(found[str(path)], variable) for path, variable in by_path(theirs) if str(path) in found]
        optimizer.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        cowalk.update_(state, model, cowalk.gradient(loss, model, X))
    for one, other in zip(model.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(ops.convert_to_numpy(one), ops.convert_to_numpy(other), rtol=1e-5, atol=1e-6)


def by_path(model: Any) -> list[tuple[Any, Any]]:
    """The variables of a model under their paths, found by their values' identity."""
    values = {id(variable.value): variable for variable in model.trainable_variables}
    return [(path, values[id(x)]) for path, (x,) in cowalk.walk(model) if id(x) in values]

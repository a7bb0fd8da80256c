"""What holds for gradients over data sets of Keras models on the back end that KERAS_BACKEND names; run by
test_dataset_gradient.py.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import cowalk

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(69, 4)).astype("float32"), RNG.normal(size=(69, 1)).astype("float32")
BATCHES = list(zip(np.split(X, [32, 64]), np.split(Y, [32, 64]), strict=True))


def net() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh", name="first"), layers.Dense(1, name="second")])


def loss(model: Any, x: Any, y: Any) -> Any:
    return ops.mean(ops.subtract(model(x), y) ** 2)


def summed(model: Any, x: Any, y: Any) -> Any:
    return ops.sum(ops.subtract(model(x), y) ** 2)


def test_batches_of_32_32_and_5_give_the_gradient_of_all_69() -> None:
    model = net()
    value, expected = cowalk.value_and_gradient(loss, model, X, Y)
    found = cowalk.dataset_gradient(summed, model, BATCHES, loss_reduction="sum", progress=False)
    ours, theirs = cowalk.flatten(found), cowalk.flatten(expected)
    assert list(ours) == list(theirs)
    assert len(ours) == 4
    for name, gradient in theirs.items():
        total = ops.convert_to_numpy(ours[name])
        np.testing.assert_allclose(total, ops.convert_to_numpy(gradient), rtol=2e-5, atol=1e-6)
        assert type(ours[name]) is type(gradient)
    assert found.loss == pytest.approx(float(value), rel=1e-5)
    assert (found.weight, found.batches) == (69.0, 3)
    assert found.noise["first.kernel"].noise.trace > 0


def test_frozen_layers_stay_none() -> None:
    model = net()
    model.get_layer("first").trainable = False
    found = cowalk.dataset_gradient(loss, model, BATCHES[2:] * 2, progress=False)
    assert found["first"] == {"kernel": None, "bias": None}
    assert found["second"]["kernel"] is not None
    assert set(found.counts.values()) == {2}

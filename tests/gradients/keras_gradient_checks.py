"""What holds for gradients of Keras models on the back end that KERAS_BACKEND names; run by test_keras_gradients.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import cowalk

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def net(**dense: Any) -> Any:
    """Normalisation, dropout, and a layer used twice."""
    shared = layers.Dense(3, name="shared")
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, name="first", **dense),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, seed=1, name="drop"),
            shared,
            layers.Activation("tanh", name="act"),
            shared,
        ]
    )


class Partly(keras.Model):
    """A layer that is not used, one whose gradient is stopped, one that is multiplied by zero."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("used", "unused", "stopped", "zero"):
            layer = layers.Dense(1, use_bias=False, name=name)
            layer.build((None, 4))
            setattr(self, name, layer)

    def call(self, x: Any) -> Any:
        return self.used(x) + ops.stop_gradient(self.stopped(x)) + 0.0 * self.zero(x)


def loss(model: Any, x: Any) -> Any:
    return ops.mean(model(x, training=True) ** 2)


def array(value: Any) -> Any:
    return ops.convert_to_numpy(value)


def slope(f: Any, variable: Any, step: float = 1e-2) -> Any:
    """The gradient of `f()` in a variable, by differences."""
    start = array(variable.value).copy()
    found = np.zeros_like(start)
    for place in np.ndindex(start.shape):
        ends = []
        for sign in (1, -1):
            moved = start.copy()
            moved[place] += sign * step
            variable.assign(moved)
            ends.append(float(array(f())))
        found[place] = (ends[0] - ends[1]) / (2 * step)
    variable.assign(start)
    return found


def test_a_model_walks_beside_its_gradient() -> None:
    model = net()
    grads = cowalk.gradient(loss, model, X)
    assert list(cowalk.flatten(grads)) == [str(path) for path in cowalk.trainables(model)]
    assert all(p.shape == g.shape for _, (p, g) in cowalk.walk(model, grads))
    assert cowalk.diff(model, grads) == []
    assert grads["drop"] == {"seed_generator_state": None}
    table = cowalk.ratio(model, grads)
    assert [str(row.path) for row in table.rows] == [str(path) for path in cowalk.trainables(model)]
    quotient = array(model.get_layer("first").kernel.value) / array(grads["first"]["kernel"])
    assert table.structure["first"]["kernel"].ratio.mean == pytest.approx(quotient.mean(), rel=1e-4)


def test_a_gradient_is_the_slope_of_the_loss() -> None:
    model = net()

    def smooth(model: Any, x: Any) -> Any:
        return ops.mean(model(x) ** 2)

    value, grads = cowalk.value_and_gradient(smooth, model, X)
    assert float(array(value)) == pytest.approx(float(array(smooth(model, X))))
    for path in ("first.kernel", "norm.gamma", "shared.kernel", "shared.bias"):
        expected = slope(lambda: smooth(model, X), cowalk.get(model, path))
        np.testing.assert_allclose(array(cowalk.get(grads, path)), expected, rtol=2e-2, atol=2e-3)


def test_losses_of_regularizers_and_of_layers_count() -> None:
    model = net(kernel_regularizer=keras.regularizers.L2(0.3), activity_regularizer=keras.regularizers.L2(0.2))

    def regular(model: Any, x: Any) -> Any:
        return ops.mean(model(x) ** 2) + sum(model.losses)

    grads = cowalk.gradient(regular, model, X)
    expected = slope(lambda: regular(model, X), model.get_layer("first").kernel)
    np.testing.assert_allclose(array(grads["first"]["kernel"]), expected, rtol=2e-2, atol=2e-3)


def test_missing_is_told_from_zero() -> None:
    model = Partly()
    model(X)
    grads = cowalk.gradient(lambda model, x: ops.mean(model(x)), model, X)
    assert grads["unused"] == {"kernel": None}
    assert grads["stopped"] == {"kernel": None}
    assert not array(grads["zero"]["kernel"]).any()
    assert array(grads["used"]["kernel"]).any()


def test_frozen_layers_have_no_gradient() -> None:
    model = net()
    model.get_layer("first").trainable = False
    grads = cowalk.gradient(loss, model, X)
    assert grads["first"] == {"kernel": None, "bias": None}
    assert grads["shared"]["kernel"] is not None


def test_a_tied_variable_has_its_whole_gradient_under_its_first_path() -> None:
    shared = layers.Dense(4, name="shared")
    one, two, outer = keras.Input((4,)), keras.Input((4,)), keras.Input((4,))
    left, right = keras.Model(one, shared(one), name="left"), keras.Model(two, ops.tanh(shared(two)), name="right")
    model = keras.Model(outer, left(outer) + right(outer))
    grads = cowalk.gradient(loss_without_training, model, X)
    assert grads["right"] == {"shared": {"kernel": None, "bias": None}}
    expected = slope(lambda: loss_without_training(model, X), shared.bias)
    np.testing.assert_allclose(array(grads["left"]["shared"]["bias"]), expected, rtol=2e-2, atol=2e-3)


def loss_without_training(model: Any, x: Any) -> Any:
    return ops.mean(model(x) ** 2)


def test_what_the_loss_assigns_is_assigned_as_without_cowalk() -> None:
    model = net()
    twin = cowalk.fmap(ops.copy, model)
    seen, twins = keras.metrics.Mean(), keras.metrics.Mean()

    def counted(model: Any, x: Any, metric: Any) -> Any:
        value = loss(model, x)
        metric.update_state(ops.stop_gradient(value))
        return value

    trained = [array(leaf).copy() for leaf in cowalk.trainables(model).values()]
    cowalk.gradient(counted, model, X, seen)
    counted(twin, X, twins)
    for ours, theirs in zip([*model.variables, *seen.variables], [*twin.variables, *twins.variables], strict=True):
        np.testing.assert_allclose(array(ours.value), array(theirs.value), rtol=1e-5)
    assert array(model.get_layer("norm").moving_mean).any()
    assert array(model.get_layer("drop").seed_generator.state)[1] == 1
    assert float(array(seen.result())) > 0
    for before, leaf in zip(trained, cowalk.trainables(model).values(), strict=True):
        assert np.array_equal(before, array(leaf))


def test_aux_comes_back_and_can_be_used() -> None:
    model = net()

    def with_output(model: Any, x: Any) -> Any:
        out = model(x)
        return ops.mean(out), {"out": out, "note": "text"}

    (value, aux), grads = cowalk.value_and_gradient(with_output, model, X, has_aux=True)
    assert aux["note"] == "text"
    assert float(array(value)) == pytest.approx(array(ops.stop_gradient(aux["out"])).mean(), rel=1e-5)
    assert grads["first"]["kernel"] is not None


def test_a_gradient_step_makes_the_loss_smaller() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])
    value, grads = cowalk.value_and_gradient(loss, model, X)
    new = cowalk.fmap(lambda p, g: p - 0.05 * g, model, grads)
    assert float(array(loss(new, X))) < float(array(value))
    cowalk.fmap_(lambda p, g: p - 0.05 * g, model, grads)
    assert float(array(loss(model, X))) == pytest.approx(float(array(loss(new, X))), rel=1e-5)


def test_trees_of_models_and_variables_are_differentiated() -> None:
    scale = keras.Variable(2.0, name="scale")
    tree = {"one": net(), "two": [keras.Sequential([keras.Input((3,)), layers.Dense(1, name="d")])], "scale": scale}
    grads = cowalk.gradient(lambda m, x: ops.mean(m["two"][0](m["one"](x, training=True))) * m["scale"], tree, X)
    assert grads["two"][0]["d"]["kernel"] is not None
    assert grads["scale"] is not None
    assert array(tree["one"].get_layer("norm").moving_mean).any()


def test_half_precision_models_have_gradients_of_their_variables_type() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, dtype="mixed_bfloat16", name="d")])
    grads = cowalk.gradient(lambda m, x: ops.mean(ops.cast(m(x), "float32")), model, X)
    assert keras.backend.standardize_dtype(grads["d"]["kernel"].dtype) == "float32"


def test_a_model_that_is_not_built_says_so() -> None:
    with pytest.raises(cowalk.CowalkError, match="not built"):
        cowalk.gradient(loss, keras.Sequential([layers.Dense(2)]), X)


def test_a_layer_that_the_loss_builds_says_so_and_the_second_time_it_works() -> None:
    class Growing(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = layers.Dense(4, name="one"), layers.Dense(2, name="two")

        def call(self, x: Any, both: bool = False) -> Any:
            return self.two(self.one(x)) if both else self.one(x)

    model = Growing()
    model(X)

    def both(model: Any, x: Any) -> Any:
        return ops.mean(model(x, both=True) ** 2)

    with pytest.raises(cowalk.CowalkError, match=r"two\.kernel"):
        cowalk.gradient(both, model, X)
    assert cowalk.gradient(both, model, X)["two"]["kernel"] is not None


def test_a_model_that_only_holds_built_layers_needs_no_build() -> None:
    class Holder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers.Dense(2, name="inner")
            self.inner.build((None, 4))

    assert cowalk.gradient(lambda m, x: ops.mean(m.inner(x)), Holder(), X)["inner"]["kernel"] is not None


def test_a_loss_that_is_no_scalar_says_so() -> None:
    with pytest.raises(ValueError, match="scalar"):
        cowalk.gradient(lambda m, x: m(x), net(), X)
    with pytest.raises(ValueError, match="has_aux"):
        cowalk.value_and_gradient(lambda m, x: ops.mean(m(x)), net(), X, has_aux=True)


def test_stored_gradients_are_torch_s() -> None:
    model = net()
    if BACKEND == "torch":
        loss(model, X).backward()
        stored = cowalk.gradients_of(model)
        assert stored["first"]["kernel"] is model.get_layer("first").kernel.value.grad
        assert stored["norm"]["moving_mean"] is None
    else:
        with pytest.raises(cowalk.FrameworkError, match="apart from parameters"):
            cowalk.gradients_of(model)


@pytest.mark.skipif(BACKEND != "jax", reason="jax.jit traces JAX")
def test_inside_of_jit_nothing_leaks() -> None:
    import jax

    model = net()
    before = [array(variable.value) for variable in model.variables]
    grads = jax.jit(lambda x: cowalk.gradient(loss, model, x))(X)
    assert all(np.array_equal(one, array(v.value)) for one, v in zip(before, model.variables, strict=True))
    eager = cowalk.gradient(loss, model, X)
    np.testing.assert_allclose(grads["first"]["kernel"], eager["first"]["kernel"], rtol=1e-4, atol=1e-6)
    scaled = jax.jit(lambda scale, x: cowalk.fmap(lambda p: p * scale, model, where=cowalk.istrainable)(x))
    np.testing.assert_allclose(scaled(1.0, X), array(model(X)), rtol=1e-4, atol=1e-6)
    with pytest.raises(cowalk.WriteError, match="tracer"):
        jax.jit(lambda scale: cowalk.fmap_(lambda p: p * scale, model, where=cowalk.istrainable) and scale)(1.0)

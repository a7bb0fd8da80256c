"""What holds for Keras models on the back end that KERAS_BACKEND names; run by test_keras.py."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import cowalk

# Keras itself warns, of NumPy's __array__ and of masks and builds.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :1] * 0.5


def functional() -> Any:
    """Normalisation, dropout, and one layer used twice."""
    inputs = keras.Input((4,))
    hidden = layers.BatchNormalization(name="norm")(layers.Dense(3, name="first")(inputs))
    shared = layers.Dense(3, name="shared")
    hidden = shared(shared(layers.Dropout(0.1, seed=1, name="drop")(hidden)))
    return keras.Model(inputs, layers.Dense(1, name="last")(hidden))


def nested() -> Any:
    """Two inputs, operations that are no layers, and a model inside of a model that is called twice."""
    inner_input = keras.Input((4,))
    inner = keras.Model(inner_input, layers.Dense(3, name="dense")(inner_input), name="inner")
    one, two = keras.Input((4,)), keras.Input((4,))
    joined = layers.Concatenate(name="join")([inner(one), ops.tanh(inner(two)) + 1])
    return keras.Model([one, two], layers.Dense(1, name="head")(joined))


class Subclassed(keras.Model):
    """Weights of its own with one name, layers in a list, a layer that is not used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = layers.Dense(width, name="dense")
        self.blocks = [layers.Dense(width, name="dense"), layers.Dense(1, name="out")]
        self.unused = layers.Dense(2, name="unused")
        self.unused.build((None, width))
        self.scale = self.add_weight(shape=(1,), name="w", initializer="ones")
        self.offset = self.add_weight(shape=(1,), name="w", initializer="zeros")

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
    model = keras.Sequential([layers.Dense(3, name="a"), layers.Dense(1, name="b")])
    model.build((None, 4))
    return model


class Branches(keras.Model):
    """Two models over one graph, one of which begins in its middle."""

    def __init__(self) -> None:
        super().__init__()
        inputs = keras.Input((4,))
        hidden = layers.Dense(3, name="hidden")(inputs)
        outputs = layers.Dense(1, name="out")(hidden)
        self.trunk = keras.Model(inputs, hidden, name="trunk")
        self.whole = keras.Model(inputs, outputs, name="whole")
        self.head = keras.Model(hidden, outputs, name="head")

    def call(self, inputs: Any) -> Any:
        return self.whole(inputs) + self.head(self.trunk(inputs))


def branches() -> Any:
    model = Branches()
    model(X)
    return model


def recurrent() -> Any:
    """Layers that Keras builds of others: recurrent cells, wrappers, attention."""
    inputs = keras.Input((2, 2))
    one = layers.Bidirectional(layers.LSTM(2), name="both")(inputs)
    two = layers.Flatten()(layers.MultiHeadAttention(2, 2, name="attention")(inputs, inputs))
    folded = keras.Model(inputs, layers.Dense(1, name="out")(layers.Concatenate()([one, two])))
    outer = keras.Input((4,))
    return keras.Model(outer, folded(layers.Reshape((2, 2))(outer)))


class Held(layers.Layer):
    """References to itself in a closure, a bound method and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = self.add_weight(shape=(), name="gain", initializer="ones")
        self.by_closure = lambda x: x * self.gain
        self.by_method = {"scale": self.scaled}

    def scaled(self, x: Any) -> Any:
        return x * self.gain

    def call(self, x: Any) -> Any:
        return ops.sum(self.by_closure(self.by_method["scale"](x)), axis=-1, keepdims=True)


def held() -> Any:
    model = keras.Sequential([keras.Input((4,)), Held()])
    model(X)
    return model


MODELS = {each.__name__: each for each in (functional, nested, subclassed, sequential, branches, recurrent, held)}


def inputs_of(model: Any) -> Any:
    return [X, X[::-1].copy()] if len(getattr(model, "inputs", None) or [1]) == 2 else X


def output(model: Any) -> Any:
    return ops.convert_to_numpy(model(inputs_of(model)))


def values(model: Any) -> list[Any]:
    return [ops.convert_to_numpy(variable.value).copy() for variable in model.variables]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def copy(value: Any) -> Any:
    return ops.copy(value)


def names(model: Any, **options: Any) -> list[str]:
    return [str(path) for path, _ in cowalk.walk(model, **options)]


# --- opening ---


def test_layers_open_by_name_and_a_shared_one_is_one() -> None:
    assert names(functional()) == [
        *("first.kernel", "first.bias", "norm.gamma", "norm.beta", "norm.moving_mean", "norm.moving_variance"),
        *("drop.seed_generator_state", "shared.kernel", "shared.bias", "last.kernel", "last.bias"),
    ]
    assert names(nested()) == ["inner.dense.kernel", "inner.dense.bias", "head.kernel", "head.bias"]
    assert list(cowalk.children(nested())) == ["inner", "join", "head"]


def test_equal_names_are_kept_apart() -> None:
    assert names(subclassed()) == [
        *("w", "w_1", "dense.kernel", "dense.bias", "dense_1.kernel", "dense_1.bias"),
        *("out.kernel", "out.bias", "unused.kernel", "unused.bias"),
    ]


def test_a_name_with_a_number_keeps_it() -> None:
    layer = layers.Layer()
    for name in ("w", "w", "w_1"):
        layer.add_weight(shape=(), name=name)
    assert list(cowalk.children(layer)) == ["w", "w_2", "w_1"]
    assert cowalk.children(layer)["w_1"] is layer.weights[2]


def test_a_layer_that_stands_twice_in_a_sequence_is_one_child() -> None:
    layer = layers.Dense(4, name="d")
    model = keras.Sequential([keras.Input((4,)), layer, layer])
    assert list(cowalk.children(model)) == ["d"]
    assert np.array_equal(output(cowalk.fmap(copy, model)), output(model))


def test_leaves_are_the_back_ends_arrays_and_only_trainable_ones_are_trained() -> None:
    model = functional()
    model.get_layer("first").trainable = False
    numeric = dict.fromkeys(names(model, where=cowalk.isnumeric))
    assert set(names(model)) - set(numeric) == {"drop.seed_generator_state"}
    assert [str(path) for path in cowalk.trainables(model)] == [
        *("norm.gamma", "norm.beta", "shared.kernel", "shared.bias", "last.kernel", "last.bias")
    ]
    (leaf,) = next(leaves for _, leaves in cowalk.walk(model))
    assert leaf is model.get_layer("first").kernel.value


def test_what_is_thawed_below_a_frozen_model_is_trained_as_keras_trains_it() -> None:
    base = sequential()
    base.trainable = False
    base.get_layer("b").trainable = True
    model = keras.Sequential([keras.Input((4,)), base])
    assert len(cowalk.trainables(model)) == len(model.trainable_variables) == 2


def test_keras_layers_are_no_torch_modules_to_cowalk() -> None:
    torch = pytest.importorskip("torch")

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

    Mixed()
    assert names(sequential()) == ["a.kernel", "a.bias", "b.kernel", "b.bias"]
    assert set(cowalk.children(sequential())) == {"a", "b"}


# --- new models ---


@pytest.mark.parametrize("name", MODELS)
def test_the_identity_gives_an_equal_model_that_is_trained_apart(name: str) -> None:
    model = MODELS[name]()
    new = cowalk.fmap(lambda value: value, model)
    assert type(new) is type(model)
    assert np.array_equal(output(new), output(model))
    assert names(new) == names(model)
    assert {id(variable) for variable in new.variables}.isdisjoint(id(variable) for variable in model.variables)
    assert {id(layer) for layer in new._flatten_layers()}.isdisjoint(id(layer) for layer in model._flatten_layers())
    kept = values(model)
    new.compile(keras.optimizers.SGD(0.1), "mse")
    new.fit(inputs_of(model), Y, verbose=0)
    assert not equal(values(new), kept)
    assert equal(values(model), kept)
    kept = values(new)
    for variable in model.variables:
        variable.assign(variable * 0 + 3)
    assert equal(values(new), kept)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_in_a_new_model_leads_back_to_the_old_one(name: str) -> None:
    model = MODELS[name]()
    new = cowalk.fmap(copy, model)
    old = {id(part) for part in [*model._flatten_layers(), *model.variables]}
    seen: set[int] = set()
    waiting = [new]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        assert id(part) not in old, part
        if isinstance(part, dict):
            waiting.extend([*part, *part.values()])
        elif isinstance(part, list | tuple | set):
            waiting.extend(part)
        elif type(part).__module__.startswith("keras.") or isinstance(part, keras.Layer):
            waiting.extend(vars(part).values() if hasattr(part, "__dict__") else ())
        elif hasattr(part, "__closure__"):
            waiting.extend(cell.cell_contents for cell in part.__closure__ or ())
        elif hasattr(part, "__self__"):
            waiting.append(part.__self__)
    assert len(seen) > 20


def test_results_take_the_place_of_the_values_and_the_new_model_computes_with_them() -> None:
    model = functional()
    before = output(model)
    new = cowalk.fmap(lambda value: value * 0, model, where=cowalk.istrainable)
    assert not output(new).any()
    assert np.array_equal(output(model), before)
    assert not np.any(output(cowalk.fmap(lambda value: value * 0, held())))


def test_variables_that_a_walk_leaves_alone_are_not_shared() -> None:
    model = functional()
    new = cowalk.fmap(copy, model, where="first.kernel")
    kept = values(model)
    for variable in new.variables:
        variable.assign(variable * 0 + 3)
    assert equal(values(model), kept)


def test_a_value_over_the_old_ones_memory_is_copied() -> None:
    model = sequential()

    def again(value: Any) -> Any:
        return value.detach() if BACKEND == "torch" else value.addressable_shards[0].data

    new = cowalk.fmap(again, model)
    kept = values(model)
    new.compile("sgd", "mse")
    new.fit(X, Y, verbose=0)  # on JAX this gives the arrays' memory away
    assert equal(values(model), kept)


def test_ties_stay_ties() -> None:
    embedding = layers.Embedding(5, 4, name="embedding")
    embedding.build((None,))

    class Unembedding(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="unembedding")
            self.table = embedding._embeddings

        def call(self, x: Any) -> Any:
            return ops.matmul(x, ops.transpose(self.table))

    model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding, Unembedding()])
    new = cowalk.fmap(copy, model)
    assert new.layers[1].table is new.layers[0]._embeddings is not embedding._embeddings
    assert [str(alias) for alias in cowalk.aliases(new)] == ["embedding.embeddings = unembedding.embeddings"]
    trunk = cowalk.fmap(copy, branches())
    assert trunk.trunk.get_layer("hidden") is trunk.whole.get_layer("hidden")


def test_a_shared_layer_cannot_come_apart() -> None:
    with pytest.raises(cowalk.KindError, match="cannot come apart"):
        cowalk.fmap(copy, branches(), ties="each")


def test_the_graph_of_a_new_model_can_be_built_upon() -> None:
    new = cowalk.fmap(copy, functional())
    features = keras.Model(new.input, new.get_layer("norm").output)
    assert features(X).shape == (8, 3)
    assert features.get_layer("first") is new.get_layer("first")
    assert np.array_equal(output(keras.models.clone_model(new).__class__.from_config(new.get_config())).shape, (8, 1))
    stack = cowalk.fmap(copy, sequential())
    stack.add(layers.Dense(2, name="more"))
    assert names(stack)[-1] == "more.bias"
    stack.trainable = False
    assert not cowalk.trainables(stack)


def test_a_layer_taken_out_of_a_model_does_not_bring_the_model_along() -> None:
    model = functional()
    new = cowalk.fmap(copy, model.get_layer("shared"))
    assert (new._inbound_nodes, new._outbound_nodes) == ([], [])
    inputs = keras.Input((3,))
    assert keras.Model(inputs, new(inputs))(X[:, :3]).shape == (8, 3)
    assert len(model.get_layer("shared")._inbound_nodes) == 2


def test_a_deep_graph_is_copied_without_recursion() -> None:
    inputs = outputs = keras.Input((4,))
    for _ in range(600):
        outputs = outputs * 1.001
    model = keras.Model(inputs, layers.Dense(1)(outputs))
    assert np.array_equal(output(cowalk.fmap(copy, model)), output(model))


def test_a_new_model_is_not_compiled_and_can_be_saved(tmp_path: Any) -> None:
    model = functional()
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(X, Y, verbose=0)
    state = values(model.optimizer)
    new = cowalk.fmap(copy, model)
    assert not new.compiled
    new.compile("adam", "mse")
    new.fit(X, Y, epochs=2, verbose=0)
    assert equal(values(model.optimizer), state)
    model.fit(X, Y, verbose=0)
    new.save(tmp_path / "model.keras")
    assert np.allclose(output(keras.models.load_model(tmp_path / "model.keras")), output(new), atol=1e-5)
    assert np.allclose(output(pickle.loads(pickle.dumps(new))), output(new), atol=1e-5)


def test_hidden_state_is_copied_too() -> None:
    model = keras.Sequential([keras.Input((3, 4), batch_size=2), layers.LSTM(2, stateful=True), layers.Dense(1)])
    steps = np.ones((2, 3, 4), "float32")
    model(steps)
    new = cowalk.fmap(copy, model)
    new(steps)
    again = cowalk.fmap(copy, model)
    assert np.array_equal(ops.convert_to_numpy(again(steps)), ops.convert_to_numpy(model(steps)))


def test_metrics_of_a_model_are_copied_too() -> None:
    class Counted(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.calls = keras.metrics.Sum(name="calls")

        def call(self, x: Any) -> Any:
            self.calls.update_state(1.0)
            return x

    model = Counted()
    model(X)
    new = cowalk.fmap(copy, model)
    new(X)
    assert new.metrics == [new.calls]
    assert (float(new.calls.result()), float(model.calls.result())) == (2.0, 1.0)


def test_no_code_of_the_users_class_runs() -> None:
    ran: list[str] = []

    class Noisy(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.gain = self.add_weight(shape=(), name="gain", initializer=self.start)

        def start(self, shape: Any, dtype: Any = None) -> Any:
            ran.append("initializer")
            return ops.ones(shape, dtype)

        def build(self, input_shape: Any) -> None:
            ran.append("build")

        def __setattr__(self, name: str, value: Any) -> None:
            ran.append(name)
            super().__setattr__(name, value)

        def call(self, x: Any) -> Any:
            return x * self.gain

    layer = Noisy()
    layer(X)
    ran.clear()
    new = cowalk.fmap(copy, layer)
    assert ran == []
    new.build((None, 4))  # `build` was wrapped around the old layer
    assert "build" in ran
    assert new.built


def test_a_new_model_goes_when_nobody_needs_it() -> None:
    model = functional()
    new = weakref.ref(cowalk.fmap(copy, model))
    gc.collect()
    assert new() is None


def test_results_may_be_anything_and_layers_may_be_replaced() -> None:
    model = sequential()
    shapes = cowalk.fmap(lambda value: str(tuple(value.shape)), model)
    assert cowalk.flatten(shapes) == {"a.kernel": "(4, 3)", "a.bias": "(3,)", "b.kernel": "(3, 1)", "b.bias": "(1,)"}
    half = cowalk.fmap(lambda value: ops.cast(value, "float16"), model)
    assert half.get_layer("a").kernel.dtype == "float16"
    assert model.get_layer("a").kernel.dtype == "float32"
    arrays = cowalk.fmap(ops.convert_to_numpy, model)
    assert np.array_equal(output(arrays), output(model))
    wider = cowalk.fmap(lambda layer: layers.Dense(2, name="b"), model, where=lambda node: node is model.layers[1])
    assert wider.layers[1] is not model.layers[1]
    assert cowalk.children(wider)["b"].units == 2


@pytest.mark.skipif(BACKEND != "torch", reason="torch modules are layers on the torch back end only")
def test_torch_modules_and_keras_layers_hold_each_other() -> None:
    import torch

    inner = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model = keras.Sequential(
        [keras.Input((4,)), layers.TorchModuleWrapper(inner, output_shape=(None, 3)), layers.Dense(1)]
    )
    new = cowalk.fmap(copy, model)
    module = new.layers[0].module
    assert module is not inner
    assert module[0].weight is new.layers[0].trainable_variables[0].value
    assert {id(parameter) for parameter in new.parameters()} == {id(v.value) for v in new.trainable_variables}

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keras = sequential()
            self.last = torch.nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            return self.last(self.keras(x))

    around = Around()
    assert names(around) == [
        "keras.a.kernel",
        "keras.a.bias",
        "keras.b.kernel",
        "keras.b.bias",
        "last.weight",
        "last.bias",
    ]
    again = cowalk.fmap(copy, around)
    assert torch.equal(again(torch.tensor(X)), around(torch.tensor(X)))
    assert again.keras is not around.keras


# --- in place ---


def test_in_place_results_go_into_the_variables() -> None:
    model = sequential()
    kernel = model.get_layer("a").kernel
    assert cowalk.fmap_(lambda value: value * 0, model) is model
    assert model.get_layer("a").kernel is kernel
    assert not ops.convert_to_numpy(kernel).any()


def test_in_place_all_or_nothing_is_written() -> None:
    model = sequential()
    before = values(model)
    for wrong in (ops.ones((9,)), "text"):
        with pytest.raises(cowalk.WriteError, match=r"b\.bias: the result"):
            cowalk.fmap_(
                lambda path, value, wrong=wrong: wrong if path == ("b", "bias") else value + 1, model, with_path=True
            )
        assert equal(values(model), before)


# --- optimizers ---


def test_optimizer_state_is_found_by_the_variable() -> None:
    model = functional()
    optimizer = keras.optimizers.Adam(0.1, amsgrad=True, use_ema=True)
    optimizer.build(list(reversed(model.trainable_variables)))
    optimizer.apply([ops.ones(v.shape) * i for i, v in enumerate(reversed(model.trainable_variables))])
    state = cowalk.optimizer_state(model, optimizer)
    assert set(state["first"]["kernel"]) == {"momentum", "velocity", "velocity_hat", "average"}
    place = len(model.trainable_variables) - 1
    assert np.allclose(ops.convert_to_numpy(state["first"]["kernel"]["momentum"]), 0.1 * place)
    assert tuple(state["first"]["kernel"]["momentum"].shape) == (4, 3)
    assert state["norm"]["moving_mean"] is None
    assert cowalk.diff(model, state, where="*.moving_mean") == []


def test_optimizers_that_keep_little_or_other_things_for_a_variable() -> None:
    model = sequential()
    kept = {}
    optimizers = keras.optimizers
    for name in ("SGD", "Adafactor", "Muon", "Ftrl"):
        optimizer = getattr(optimizers, name)()
        assert cowalk.optimizer_state(model, optimizer)["a"] == {"kernel": None, "bias": None}  # not built yet
        optimizer.build(model.trainable_variables)
        kept[name] = cowalk.optimizer_state(model, optimizer)["a"]
    assert kept["SGD"] == {"kernel": None, "bias": None}
    assert {"r", "c"} <= set(kept["Adafactor"]["kernel"])
    assert list(kept["Muon"]["kernel"]) == ["momentum"]
    assert list(kept["Muon"]["bias"]) == ["momentum", "velocity"]
    scaled = optimizers.LossScaleOptimizer(optimizers.SGD(momentum=0.9))
    scaled.build(model.trainable_variables)
    assert list(cowalk.optimizer_state(model, scaled)["b"]["bias"]) == ["momentum"]


def test_an_optimizer_of_another_model_says_so() -> None:
    model = functional()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    with pytest.raises(cowalk.CowalkError, match="other variables"):
        cowalk.optimizer_state(cowalk.fmap(copy, model), optimizer)
    with pytest.raises(cowalk.CowalkError, match="expected a Keras optimizer, got dict"):
        cowalk.optimizer_state(model, {})


def test_an_optimizer_copied_with_its_model_trains_the_copy() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, name="d")], name="net")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    assert list(cowalk.children(optimizer)) == [
        *("iteration", "learning_rate", "net_d_kernel_momentum", "net_d_bias_momentum")
    ]
    new = cowalk.fmap(copy, {"model": model, "optimizer": optimizer})
    kept, state = values(model), values(optimizer)
    new["optimizer"].apply([ops.ones(v.shape) for v in new["model"].trainable_variables])
    assert equal(values(model), kept)
    assert equal(values(optimizer), state)
    assert not equal(values(new["model"]), kept)
    alone = cowalk.fmap(copy, optimizer)
    alone.apply([ops.ones(v.shape) for v in model.trainable_variables])
    assert not equal(values(model), kept)
    assert equal(values(optimizer), state)

"""JAX: arrays, tracers and registered types in a walk."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cowalk
from cowalk.tree import Index, engine


@pytest.fixture(params=["native", "reference"], autouse=True)
def walk_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "native" and engine.NATIVE is None:
        pytest.skip("the native walk is not built")
    if request.param == "reference":
        monkeypatch.setattr(engine, "NATIVE", None)


def paths(tree: Any, **options: Any) -> list[str]:
    return [str(path) for path, _ in cowalk.walk(tree, **options)]


# --- leaves ---


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "complex64"])
def test_arrays_of_floating_and_complex_numbers_are_numeric(dtype):
    assert cowalk.isnumeric(jnp.ones(2).astype(dtype))
    assert cowalk.istrainable(jnp.ones(2).astype(dtype))


@pytest.mark.parametrize(
    "array",
    [jnp.arange(3), jnp.array([True]), jax.random.key(0), jax.random.PRNGKey(0), jax.random.split(jax.random.key(0))],
)
def test_integers_bools_and_random_keys_are_leaves_but_not_numeric(array):
    assert cowalk.isleaf(array)
    assert not cowalk.isnumeric(array)


def test_one_array_at_two_places_is_no_tie_because_nothing_can_change_it():
    shared = jnp.ones(2)
    calls = []
    cowalk.fmap(lambda x: calls.append(x) or x, {"a": shared, "b": shared})
    assert len(calls) == 2
    assert cowalk.aliases({"a": shared, "b": shared}) == []


def test_an_abstract_array_is_a_leaf():
    tree = jax.eval_shape(lambda: {"w": jnp.ones((2, 3))})
    assert cowalk.fmap(lambda leaf: leaf.shape, tree) == {"w": (2, 3)}


def test_the_gradient_of_an_integer_is_missing():
    tree = {"w": jnp.ones(2), "n": jnp.arange(2)}
    grads = jax.grad(lambda tree: tree["w"].sum(), allow_int=True)(tree)
    assert grads["n"].dtype == jax.dtypes.float0
    assert [str(path) for path, _ in cowalk.walk(tree, grads)] == ["w"]
    assert cowalk.fmap(lambda p, g: g, tree, grads)["n"] is tree["n"]
    with pytest.raises(cowalk.StructureError):
        cowalk.fmap(lambda p, g: g, tree, grads, missing="error")


def test_a_symbolic_zero_is_missing():
    seen = []

    @jax.custom_vjp
    def layer(params):
        return params["w"], params["b"]

    def backward(_, cotangents):
        seen.append(
            [str(path) for path, _ in cowalk.walk({"w": 1.0, "b": 1.0}, dict(zip("wb", cotangents, strict=True)))]
        )
        return ({"w": cotangents[0], "b": jnp.zeros(2)},)

    layer.defvjp(lambda params: ((params["w"].value, params["b"].value), None), backward, symbolic_zeros=True)
    jax.grad(lambda params: layer(params)[0].sum())({"w": jnp.ones(2), "b": jnp.ones(2)})
    assert seen == [["w"]]


def test_touching_a_donated_array_is_an_error_that_names_the_leaf():
    step = jax.jit(lambda tree: cowalk.fmap(lambda x: x + 1, tree), donate_argnums=0)
    tree = {"layers": [{"w": jnp.ones(3)}]}
    step(tree)
    assert cowalk.isnumeric(tree["layers"][0]["w"])  # asking what it is does not touch its memory
    with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:  # JAX raises the one or the other
        cowalk.fmap(lambda x: x + 1, tree)
    assert any("layers.0.w" in note for note in caught.value.__notes__)


# --- inside transformations ---


def test_a_walk_inside_jit_vmap_and_grad_sees_tracers_as_leaves():
    tree = {"w": jnp.ones((3, 2)), "b": (jnp.zeros(3), None)}

    def doubled(tree):
        assert sorted(paths(tree, where=cowalk.isnumeric)) == ["b.0", "w"]  # jit hands its dicts over sorted
        return cowalk.fmap(lambda x: 2 * x, tree)

    for transformed in (jax.jit(doubled), jax.vmap(doubled)):
        out = transformed(tree)
        assert out["w"].sum() == 12
        assert out["b"][1] is None
    grads = jax.grad(lambda tree: doubled(tree)["w"].sum())(tree)
    assert grads["w"].tolist() == [[2.0, 2.0]] * 3


def test_writing_a_tracer_into_a_container_outside_is_an_error_and_writes_nothing():
    outside = {"a": jnp.ones(2), "b": jnp.ones(2)}

    @jax.jit
    def leak(x):
        cowalk.fmap_(lambda old: old + x, outside)
        return x

    with pytest.raises(cowalk.WriteError, match="tracer") as caught:
        leak(jnp.ones(2))
    assert [str(path) for path, _ in caught.value.problems] == ["a", "b"]
    assert outside["a"].tolist() == [1.0, 1.0]


def test_writing_a_tracer_into_a_numpy_array_is_an_error():
    outside = {"a": np.ones(2)}
    with pytest.raises(cowalk.WriteError, match="tracer"):
        jax.jit(lambda x: cowalk.fmap_(lambda old: old + x, outside) and x)(jnp.ones(2))


def test_writing_in_place_inside_a_trace_is_fine_for_what_was_made_there():
    @jax.jit
    def double(tree):
        return cowalk.fmap_(lambda x: 2 * x, tree)

    assert double({"w": jnp.ones(2)})["w"].tolist() == [2.0, 2.0]


def test_arrays_are_replaced_in_their_mutable_container():
    tree = {"w": jnp.ones(2), "layers": [jnp.zeros(1)]}
    assert cowalk.fmap_(lambda x: x + 1, tree) is tree
    assert (tree["w"].tolist(), tree["layers"][0].tolist()) == ([2.0, 2.0], [1.0])
    with pytest.raises(cowalk.WriteError, match="immutable"):
        cowalk.fmap_(lambda x: x + 1, {"w": (jnp.ones(2),)})


# --- registered types ---


@jax.tree_util.register_pytree_with_keys_class
class Layer:
    """With keys of every sort that JAX has, and auxiliary data."""

    def __init__(self, weight, bias, name):
        raise AssertionError("no constructor runs")

    @classmethod
    def make(cls, weight, bias, extra, name):
        self = object.__new__(cls)
        self.weight, self.bias, self.extra, self.name = weight, bias, extra, name
        return self

    def tree_flatten_with_keys(self):
        keys = jax.tree_util
        children = (
            (keys.GetAttrKey("weight"), self.weight),
            (keys.SequenceKey(0), self.bias),
            (keys.DictKey("a b"), self.extra),
        )
        return children, self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls.make(*children, name)


def test_a_registered_class_opens_by_its_keys_and_closes_with_its_auxiliary_data():
    layer = Layer.make(jnp.ones(2), jnp.zeros(2), 5.0, "first")
    assert list(cowalk.children(layer)) == ["weight", 0, "a b"]
    assert isinstance(list(cowalk.children(layer))[1], Index)
    assert paths({"layer": layer}) == ["layer.weight", "layer.0", "layer['a b']"]
    out = cowalk.fmap(lambda x: x + 1, layer)
    assert type(out) is Layer
    assert (out.weight.tolist(), out.bias.tolist(), out.extra, out.name) == ([2.0, 2.0], [1.0, 1.0], 6.0, "first")


def test_none_in_a_registered_node_is_an_empty_place():
    out = cowalk.fmap(lambda x: x + 1, Layer.make(1.0, None, 2.0, "n"))
    assert (out.weight, out.bias, out.extra) == (2.0, None, 3.0)
    grads = Layer.make(10.0, None, None, "other")
    assert [values for _, values in cowalk.walk(Layer.make(1.0, 2.0, 3.0, "n"), grads)] == [(1.0, 10.0)]


def test_a_registered_node_without_keys_opens_by_position():
    class Pair:
        def __init__(self, left, right):
            self.left, self.right = left, right

    jax.tree_util.register_pytree_node(Pair, lambda p: ((p.left, p.right), None), lambda _, items: Pair(*items))
    pair = Pair(1.0, [2.0])
    assert cowalk.flatten(pair) == {"0": 1.0, "1.0": 2.0}
    assert cowalk.fmap(lambda x: -x, pair).right == [-2.0]
    assert [values for _, values in cowalk.walk(pair, (10.0, [20.0]))] == [(1.0, 10.0), (2.0, 20.0)]


def test_keys_that_are_not_unique_fall_back_to_positions():
    class Odd:
        def __init__(self, items):
            self.items = items

    same = jax.tree_util.GetAttrKey("x")
    jax.tree_util.register_pytree_with_keys(
        Odd, lambda o: ([(same, x) for x in o.items], None), lambda _, items: Odd(list(items))
    )
    assert cowalk.fmap(lambda x: x + 1, Odd([1, 2])).items == [2, 3]


def test_a_registered_node_that_holds_itself_is_a_cycle():
    node = Layer.make(1.0, None, None, "n")
    node.extra = {"again": node}
    with pytest.raises(cowalk.CycleError) as caught:
        cowalk.fmap(lambda x: x, node)
    assert (str(caught.value.first), str(caught.value.path)) == ("", "['a b'].again")


def test_a_registered_node_in_itself_can_be_replaced_there():
    node = Layer.make(1.0, None, None, "n")
    node.bias = node
    asked = []
    out = cowalk.fmap(lambda _: 0, node, where=lambda inner: bool(asked) or asked.append(inner))  # true below the root
    assert (out.weight, out.bias, out.extra) == (0, 0, 0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["scale"])
@dataclasses.dataclass
class Settings:
    """JAX closes this by calling the class."""

    weight: Any
    scale: float
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        self.made += 1


def test_a_registered_dataclass_keeps_its_static_fields_and_is_closed_without_its_constructor():
    settings = Settings(jnp.ones(2), 3.0)
    settings.made = 7
    out = cowalk.fmap(lambda x: x * 2, settings)
    assert (out.weight.tolist(), out.scale, out.made) == ([2.0, 2.0], 3.0, 7)
    assert settings.weight.tolist() == [1.0, 1.0]
    cowalk.fmap_(lambda x: x * 5, settings)
    assert (settings.weight.tolist(), settings.made) == ([5.0, 5.0], 7)


def test_a_partial_opens_its_arguments_and_keeps_its_function():
    partial = jax.tree_util.Partial(jnp.add, jnp.ones(2), where=None)
    out = cowalk.fmap(lambda x: x * 3, partial)
    assert paths(partial) == ["args.0"]
    assert out(jnp.zeros(2)).tolist() == [3.0, 3.0]


def test_a_static_registration_has_nothing_to_visit():
    @jax.tree_util.register_static
    class Name(str):
        pass

    assert paths({"name": Name("x"), "w": 1.0}) == ["w"]


def test_python_containers_keep_their_order_and_named_tuples_their_kind():
    Point = namedtuple("Point", "y x")
    tree = {"b": 1, "a": OrderedDict(z=2, c=3), "p": Point(4, 5)}
    out = cowalk.fmap(lambda x: x, tree)
    assert (list(out), list(out["a"]), type(out["a"]), out["p"]) == (
        ["b", "a", "p"],
        ["z", "c"],
        OrderedDict,
        Point(4, 5),
    )
    assert paths(tree) == ["b", "a.z", "a.c", "p.y", "p.x"]


def test_a_named_tuple_that_was_registered_itself_opens_as_registered():
    Tagged = namedtuple("Tagged", "value tag")
    jax.tree_util.register_pytree_node(Tagged, lambda t: ((t.value,), t.tag), lambda tag, items: Tagged(items[0], tag))
    assert cowalk.fmap(lambda x: x + 1, Tagged(1, 10)) == Tagged(2, 10)


def test_a_subclass_of_dict_that_was_registered_opens_as_registered():
    class Frozen(dict):
        pass

    jax.tree_util.register_pytree_node(
        Frozen, lambda d: ((d["kept"],), d["aux"]), lambda aux, items: Frozen(kept=items[0], aux=aux)
    )
    out = cowalk.fmap(lambda x: x + 1, Frozen(kept=1, aux=5))
    assert (type(out), out) == (Frozen, {"kept": 2, "aux": 5})


def test_what_cowalk_was_taught_goes_before_what_jax_was():
    @jax.tree_util.register_pytree_node_class
    class Both:
        def __init__(self, a, b):
            self.a, self.b = a, b

        def tree_flatten(self):
            return (self.a,), self.b

        @classmethod
        def tree_unflatten(cls, aux, items):
            return cls(items[0], aux)

    assert paths(Both(1, 2)) == ["0"]
    cowalk.functor("b")(Both)
    assert paths(Both(1, 2)) == ["b"]

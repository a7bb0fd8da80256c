"""Gradients of losses over trees of JAX arrays."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cowalk

W, B, U = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.5, 0.5]), jnp.array([4.0, 5.0, 6.0])
MODEL = {"w": W, "b": B, "u": U}


def depends(grads: dict[str, Any]) -> set[str]:
    return {name for name, gradient in grads.items() if gradient is not None}


def check(loss: Any, expected: str) -> None:
    """The gradient is JAX's at the parameters that the loss depends on, and None at the others."""
    grads = cowalk.gradient(loss, MODEL)
    theirs = jax.grad(loss)(MODEL)
    assert depends(grads) == set(expected)
    for name in expected:
        np.testing.assert_allclose(grads[name], theirs[name], rtol=1e-6)
    for name in set(MODEL) - set(expected):
        assert not theirs[name].any()


# --- values and shapes ---


def test_a_gradient_has_plain_containers_under_the_model_s_paths():
    Layer = namedtuple("Layer", "weight bias")
    model = {"layers": [Layer(W, B), Layer(U, None)], "steps": jnp.array(3), "name": "net", "key": jax.random.key(0)}
    grads = cowalk.gradient(lambda m: (m["layers"][0].weight * m["layers"][1].weight).sum(), model)
    assert grads["layers"][0] == {"weight": grads["layers"][0]["weight"], "bias": None}
    assert grads["layers"][0]["weight"].tolist() == U.tolist()
    assert grads["layers"][1]["weight"].tolist() == W.tolist()
    assert (grads["steps"], grads["name"], grads["key"]) == (None, None, None)
    assert list(cowalk.walk(model, grads))


def test_the_value_comes_with_the_gradient_and_with_anything_else_that_the_loss_returns():
    value, grads = cowalk.value_and_gradient(lambda m, x, scale: scale * (m["w"] * x).sum(), MODEL, 2.0, scale=3.0)
    assert float(value) == 36.0
    assert grads["w"].tolist() == [6.0] * 3
    aux = {"logits": W, "count": 3, "text": "seen", "none": None, "step": jnp.array(1)}
    (value, given), grads = cowalk.value_and_gradient(
        lambda m: ((m["w"] ** 2).sum(), {**aux, "w": m["w"]}), MODEL, has_aux=True
    )
    assert float(value) == 14.0
    assert given["text"] == "seen"
    assert not isinstance(given["w"], jax.core.Tracer)
    assert given["w"].tolist() == W.tolist()
    assert depends(grads) == {"w"}


def test_the_loss_runs_once():
    calls = []
    cowalk.gradient(lambda m: calls.append(1) or m["w"].sum(), MODEL)
    assert calls == [1]


def test_numpy_arrays_beside_jax_arrays_are_differentiated_and_a_tied_one_has_one_gradient():
    table = np.ones(3, np.float32)
    model = {"emb": table, "head": table, "w": W, "ids": np.arange(3)}
    grads = cowalk.gradient(lambda m: (m["emb"] * 2 + m["head"] * m["w"]).sum(), model)
    assert grads["emb"].tolist() == (2 + W).tolist()
    assert grads["head"] is None
    assert grads["ids"] is None
    assert depends(grads) == {"emb", "w"}


def test_one_jax_array_at_two_places_has_two_gradients():
    grads = cowalk.gradient(lambda m: (2 * m["a"] + 3 * m["b"]).sum(), {"a": W, "b": W})
    assert (grads["a"].tolist(), grads["b"].tolist()) == ([2.0] * 3, [3.0] * 3)


def test_a_bare_array_is_a_model():
    assert cowalk.gradient(lambda w: (w**2).sum(), W).tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_other_types_have_the_gradient_that_jax_gives(dtype):
    w = (W + (1j * B if dtype == "complex64" else 0)).astype(dtype)

    def loss(w):
        return jnp.abs(w * w).sum().astype(jnp.float32)

    gradient = cowalk.gradient(loss, w)
    assert gradient.dtype == w.dtype
    np.testing.assert_allclose(
        np.asarray(gradient, np.complex64), np.asarray(jax.grad(loss)(w), np.complex64), rtol=1e-2
    )


# --- dependence ---


def test_a_parameter_that_the_loss_never_sees_has_no_gradient():
    check(lambda m: (m["w"] ** 2).sum(), "w")
    check(lambda m: jnp.array(1.0), "")
    check(lambda m: 1.0, "")


def test_a_gradient_that_happens_to_be_zero_is_one():
    check(lambda m: (m["w"] * 0).sum() + jax.nn.relu(m["b"] - 100).sum(), "wb")


def test_what_is_stopped_or_cannot_be_differentiated_is_not_depended_on():
    check(lambda m: (m["w"] * lax.stop_gradient(m["b"])).sum(), "w")
    check(lambda m: (m["w"] * jnp.sign(m["b"]) * jnp.floor(m["u"])).sum() + (m["b"] > 0).sum(), "w")
    check(lambda m: m["w"][jnp.argmax(m["u"])], "w")


def test_a_value_that_is_computed_and_thrown_away_is_not_depended_on():
    check(lambda m: (m["w"].sum(), (m["b"] * m["u"]).sum())[0], "w")
    check(
        lambda m: jnp.stack([m["w"].sum(), m["b"].sum()])[0], "wb"
    )  # both go into one array: its cells are not told apart


def test_dependence_is_seen_through_jit_and_checkpoint():
    pair = jax.jit(lambda w, b: (jnp.sin(w), b * b))
    check(lambda m: pair(m["w"], m["b"])[0].sum(), "w")
    check(lambda m: jax.checkpoint(lambda w, b: (w * w, b * b))(m["w"], m["b"])[1].sum(), "b")
    check(lambda m: jax.checkpoint(pair)(m["w"], m["u"])[0].sum(), "w")


def test_dependence_is_seen_through_loops():
    def two_carries(m, which):
        def body(carry, x):
            one, other = carry
            return (one * m["w"] + x, other * m["b"]), one

        return lax.scan(body, (jnp.ones(3), jnp.ones(3)), m["u"])[0][which].sum()

    check(functools.partial(two_carries, which=0), "wu")
    check(functools.partial(two_carries, which=1), "b")

    def mixing(m):  # w reaches the first carry only after two rounds
        return lax.fori_loop(0, 3, lambda _, c: (c[1], c[2], c[2] * m["w"]), (m["b"], jnp.ones(3), jnp.ones(3)))[
            0
        ].sum()

    check(mixing, "wb")  # b is the first value of a carry that reaches the loss, though not itself
    check(
        lambda m: (lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, 1.0))[1] * m["w"]).sum(), "w"
    )


def test_both_branches_of_a_condition_count_whichever_is_taken():
    def loss(m):
        return lax.cond(m["u"][0] > 0, lambda: m["w"].sum(), lambda: m["b"].sum())

    check(loss, "wb")


def test_a_custom_rule_counts_all_arguments_of_the_function():
    @jax.custom_vjp
    def product(x, y, unused):
        return x * y

    product.defvjp(lambda x, y, unused: (x * y, y), lambda y, g: (g * y, None, None))
    grads = cowalk.gradient(lambda m: product(m["w"], m["b"], 1.0).sum(), MODEL)
    assert grads["w"].tolist() == B.tolist()
    assert grads["b"].tolist() == [0.0] * 3  # the rule's None is a zero
    assert grads["u"] is None

    @jax.custom_jvp
    def half(x):
        return x

    half.defjvp(lambda p, t: (p[0], t[0] / 2))
    check(lambda m: half(m["w"]).sum(), "w")


# --- inside transformations ---


def test_gradients_work_inside_jit_vmap_and_scan():
    def loss(m, x):
        return ((m["w"] * x - lax.stop_gradient(m["b"])) ** 2).mean()

    eager = cowalk.gradient(loss, MODEL, 2.0)
    jitted = jax.jit(lambda m, x: cowalk.gradient(loss, m, x))(MODEL, 2.0)
    assert depends(jitted) == {"w"}
    np.testing.assert_allclose(jitted["w"], eager["w"], rtol=1e-6)
    batched = jax.vmap(lambda x: cowalk.gradient(loss, MODEL, x))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(batched["w"][1], eager["w"], rtol=1e-6)
    assert batched["b"] is None
    per_model = jax.vmap(lambda m: cowalk.gradient(loss, m, 2.0))(cowalk.fmap(lambda x: jnp.stack([x, x]), MODEL))
    np.testing.assert_allclose(per_model["w"][0], eager["w"], rtol=1e-6)

    def step(m, x):
        return cowalk.fmap(lambda p, g: p - 0.1 * g, m, cowalk.gradient(loss, m, x)), loss(m, x)

    _, losses = lax.scan(step, MODEL, jnp.ones(5))
    assert losses[-1] < losses[0]


def test_a_custom_rule_works_inside_vmap_and_jit():
    @jax.custom_vjp
    def triple(x):
        return x

    triple.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))

    def run(x):
        return cowalk.gradient(lambda m: (triple(m["w"]) * x).sum(), MODEL)

    for found in (
        jax.vmap(run)(jnp.array([2.0]))["w"][0],
        jax.jit(run)(2.0)["w"],
        jax.jit(jax.vmap(run))(jnp.array([2.0]))["w"][0],
    ):
        assert found.tolist() == [6.0] * 3


def test_a_gradient_can_be_differentiated_again():
    def slope(w):
        return cowalk.gradient(lambda v: (v**3).sum(), w).sum()

    assert jax.grad(slope)(W).tolist() == (6 * W).tolist()
    assert cowalk.gradient(slope, W).tolist() == (6 * W).tolist()


# --- errors ---


def test_a_loss_that_is_no_scalar_is_an_error_that_says_its_shape():
    with pytest.raises(ValueError, match=r"must be a scalar.*shape \(3,\).*mean"):
        cowalk.gradient(lambda m: m["w"], MODEL)
    with pytest.raises(ValueError, match=r"must be a scalar.*has_aux=True"):
        cowalk.gradient(lambda m: (m["w"].sum(), 1), MODEL)
    with pytest.raises(ValueError, match=r"must be a scalar.*NoneType"):
        cowalk.gradient(lambda m: None, MODEL)
    with pytest.raises(ValueError, match=r"pair \(loss, aux\)"):
        cowalk.value_and_gradient(lambda m: m["w"].sum(), MODEL, has_aux=True)


def test_a_complex_or_integer_loss_is_an_error():
    with pytest.raises(ValueError, match=r"real.*complex64.*modulus"):
        cowalk.gradient(lambda w: w.sum(), W * 1j)
    with pytest.raises(ValueError, match=r"floating.*int32"):
        cowalk.gradient(lambda m: m["w"].astype(int).sum(), MODEL)


def test_a_model_without_floating_arrays_is_an_error_that_names_the_types():
    with pytest.raises(ValueError, match="a is int32"):
        cowalk.gradient(lambda m: m["a"].sum() * 1.0, {"a": jnp.arange(3)})


def test_a_donated_parameter_is_an_error_that_names_its_path():
    model = {"layers": [{"w": jnp.ones(3)}], "b": jnp.ones(3)}
    jax.jit(lambda w: w + 1, donate_argnums=0)(model["layers"][0]["w"])
    with pytest.raises(ValueError, match=r"layers\.0\.w was deleted"):
        cowalk.gradient(lambda m: m["b"].sum(), model)


def test_gradients_that_arrays_carry_are_refused_with_the_way_to_go():
    with pytest.raises(cowalk.FrameworkError, match=r"JAX.*cowalk.gradient"):
        cowalk.gradients_of(MODEL)


def test_an_exception_of_the_loss_comes_through():
    with pytest.raises(ZeroDivisionError):
        cowalk.gradient(lambda m: 1 / 0, MODEL)

"""The statistics of JAX arrays agree with the reference, wherever they are measured, and leave jax.jit as one array."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cowalk.jax
from cowalk.measure import jax_arrays, reference
from cowalk.measure.backend import SECTIONS, SPANS, AdamSettings, Operands
from cowalk.measure.moments import Moments

SETTINGS = AdamSettings(epsilon=1e-8, m_scale=10.0, v_scale=1000.0, lr=1e-3)
EXACT = {"n", "nan", "posinf", "neginf", "zeros", "subnormals", "zero_rows", "finite", "defined", "x_by_zero"}
EXACT |= {"zero_by_zero", "nonfinite", "equal_signs", "signed", "below_epsilon"}


def check(leaves: list[Operands], in_parts: bool = True, exact_extremes: bool = True) -> None:
    """Compare with the reference: sums to 1e-6 of the sum of magnitudes."""
    matrix = jax_arrays.decode(jax.jit(jax_arrays.lines, static_argnums=1)(leaves, in_parts))
    expected, _ = reference.measure(leaves)
    for found_line, line in zip(matrix, expected, strict=True):
        for name, section in SECTIONS.items():
            found = dict(zip(section.names(), found_line[SPANS[name]], strict=True))
            wanted = dict(zip(section.names(), line[SPANS[name]], strict=True))
            for column, value in wanted.items():
                slack = {"mean": 1e-6 * wanted.get("mean_abs", np.nan), "cosine": 1e-6}.get(column, 1e-6 * abs(value))
                exact = column in EXACT or (exact_extremes and section is Moments and column in ("min", "max"))
                same = found[column] == value or (np.isnan(found[column]) and np.isnan(value))
                assert same or (not exact and abs(found[column] - value) <= slack), (name, column, found[column], value)


def values(shape: tuple[int, ...], dtype: Any, seed: int, wild: bool) -> jax.Array:
    random = np.random.default_rng(seed)
    drawn = np.asarray(random.standard_normal(shape))
    if np.dtype(dtype).kind == "c":
        drawn = drawn + 1j * random.standard_normal(shape)
    if wild:  # down to subnormal and zero, up to infinite
        drawn = drawn * np.exp2(random.integers(-160, 140, shape).astype(float))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return jnp.asarray(np.asarray(drawn).astype(dtype if np.dtype(dtype).kind == "c" else np.float32).astype(dtype))


DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu, jnp.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_and_shape_agrees_with_the_reference(dtype):
    leaves = []
    for shape, wild in [((), True), ((3, 0), True), ((9, 7), True), ((2, 3, 4), False)]:
        p, g, u, m = (values(shape, dtype, seed, wild) for seed in range(4))
        leaves.append(Operands(p, g, u, m, abs(values(shape, jnp.float32, 4, wild)), SETTINGS))
    check(leaves, exact_extremes=dtype != jnp.complex64)  # a modulus is a root, which is rounded


def test_a_leaf_read_as_a_whole_agrees_too():
    p, g, u, m = (values((5, 7), jnp.float32, seed, True) for seed in range(4))
    check([Operands(p, g, u, m, abs(m), SETTINGS), Operands(jnp.float32(2.0), jnp.float32(-0.0))], in_parts=False)


def test_leaves_longer_than_a_part_and_no_multiple_of_one_agree(monkeypatch):
    monkeypatch.setattr(jax_arrays, "_PART", 16)
    jax.clear_caches()
    check(
        [
            Operands(values(shape, jnp.float32, 0, True), values(shape, jnp.float32, 1, True))
            for shape in [(7, 13), (16,), (17,), (3,)]
        ]
    )
    jax.clear_caches()


def test_more_elements_than_an_integer_counts_are_counted_in_pairs_of_floats(monkeypatch):
    monkeypatch.setattr(jax_arrays, "_MOST_COUNTED", 10)
    jax.clear_caches()
    check([Operands(values((5, 7), jnp.float32, 0, True), values((5, 7), jnp.float32, 1, True))])
    jax.clear_caches()


def test_the_ends_of_float32_neither_overflow_nor_vanish():
    ends = np.array([1e30, -1e-30, 0, -0.0, 1e-45, np.nan, np.inf, -np.inf, 3, -1e-40, 2**-126], np.float32)
    tiny = jnp.full(5, -1e-45, jnp.float32)
    huge = jnp.full(5, 3e38, jnp.float32)
    check([Operands(jnp.asarray(ends), jnp.asarray(ends[::-1].copy())), Operands(tiny, huge), Operands(huge, tiny)])


def test_the_quotient_of_the_largest_and_the_least_number_is_defined():
    matrix, _ = jax_arrays.measure([Operands(jnp.array([3e38], jnp.float32), jnp.array([1e-45], jnp.float32))])
    assert matrix[0, SPANS["ratio"]][1] == 1
    assert matrix[0, SPANS["ratio"]][6] == pytest.approx(float(np.float32(3e38)) / float(np.float32(1e-45)), rel=1e-6)


def test_a_spread_of_one_around_a_million_is_not_lost():
    check([Operands(jnp.asarray((1e6 + np.random.default_rng(0).standard_normal(100_000)).astype(np.float32)))])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_long_sum_of_equal_numbers_loses_no_digit_and_their_spread_is_zero(dtype):
    array = jnp.full(20_000_000, 0.1, dtype)
    matrix, _ = jax_arrays.measure([Operands(array)])
    mean, std, least, greatest, mean_abs = matrix[0, SPANS["parameter"]][7:]
    assert mean == least == greatest == float(array[0])
    assert std == 0
    assert mean_abs == pytest.approx(mean, rel=1e-7)


def test_rows_of_zeros_are_counted():
    array = jnp.ones((5, 2, 3)).at[jnp.array([1, 3])].set(-0.0).at[4, 0, 0].set(0)
    matrix, _ = jax_arrays.measure([Operands(array)])
    assert matrix[0, SPANS["parameter"]][6] == 2


def test_adam_without_epsilon_before_anything_happened_takes_no_step_and_a_gradient_without_a_second_moment_is_infinite():
    zero, one = jnp.zeros(3), jnp.ones(3)
    check(
        [
            Operands(one, zero, None, zero, zero, AdamSettings(0.0)),
            Operands(one, one, None, one, zero, AdamSettings(0.0)),
        ]
    )


def test_histograms_count_powers_of_two_as_the_reference_does():
    leaves = [Operands(values((50,), dtype, 0, True), values((50,), dtype, 1, False)) for dtype in DTYPES]
    leaves.append(Operands(jnp.zeros(3)))
    assert jax_arrays.measure(leaves, True)[1] == reference.measure(leaves, True)[1]


def test_measuring_the_same_shapes_again_compiles_nothing(caplog):
    first, second = (Operands(values((6, 5), jnp.float32, seed, False)) for seed in range(2))
    jax_arrays.measure([first])
    with jax.log_compiles():
        jax_arrays.measure([second])
    assert not caplog.records


def test_no_leaves_make_an_empty_matrix():
    assert jax_arrays.decode(jax_arrays.lines([])).shape == (0, reference.empty_matrix(0).shape[1])


def run(code: str, **environment: str) -> None:
    import os

    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True, env=os.environ | environment
    )


def test_float64_is_measured_in_float64():
    run(
        """
        import numpy as np, jax.numpy as jnp
        from cowalk.measure import jax_arrays, reference
        from cowalk.measure.backend import AdamSettings, Operands
        random = np.random.default_rng(0)
        wild = lambda: random.standard_normal(40) * np.exp2(random.integers(-1000, 1000, 40))
        p, g, m = (jnp.asarray(wild()) for _ in range(3))
        adam = AdamSettings(1e-8, 10.0, 1000.0, 1e-3)
        leaves = [
            Operands(p, g, m),
            Operands(p * (1 + 2j), g * 1j),
            Operands(p, g.astype(jnp.float32)),
            Operands(*(jnp.asarray(random.standard_normal(40)) for _ in range(4)), jnp.asarray(random.random(40)), adam),
        ]
        found, histograms = jax_arrays.measure(leaves, True)
        expected, expected_histograms = reference.measure(leaves, True)
        assert histograms == expected_histograms
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        """,
        JAX_ENABLE_X64="1",
    )


def test_a_sharded_array_gives_the_same_numbers_and_stays_where_it_is():
    run(
        """
        import re
        import jax, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec
        from cowalk.measure import jax_arrays, reference
        from cowalk.measure.backend import Operands
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        random = np.random.default_rng(0)
        plain = [Operands(*random.standard_normal((2, 16, 4096)).astype(np.float32)),
                 Operands(random.standard_normal(8192).astype(np.float32))]
        place = lambda array, *axes: jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))
        leaves = [Operands(place(plain[0].parameter, None, "x"), place(plain[0].gradient, "x")),
                  Operands(place(plain[1].parameter, "x"))]
        found, _ = jax_arrays.measure(leaves)
        np.testing.assert_allclose(found, reference.measure(plain)[0], rtol=1e-6, atol=1e-9)
        leaves = [Operands(place(plain[0].parameter, None, "x"), place(plain[0].gradient, None, "x")), leaves[1]]
        text = jax.jit(jax_arrays.lines).lower(leaves).compile().as_text()
        gathered = re.findall(r"= (.*?) all-gather(?:-start)?\\(", text)
        shapes = re.findall(r"\\[([\\d,]*)\\]", " ".join(gathered))
        sizes = [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in shapes]
        assert max(sizes, default=0) <= 64, gathered
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        JAX_PLATFORMS="cpu",
    )


# --- cowalk.jax ---

# jax.jit sorts the keys of dicts, so what comes out of it is in this order.
PARAMS = {"bias": jnp.ones(3), "steps": jnp.arange(3), "weight": jnp.arange(12.0).reshape(4, 3) / 7}


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.square(x @ params["weight"] + params["bias"]).mean()


def gradients(params: Any, x: jax.Array) -> Any:
    trainable = {name: params[name] for name in ("bias", "weight")}
    return jax.grad(loss)(trainable, x)


def column(section: str, name: str) -> int:
    return SPANS[section].start + SECTIONS[section].names().index(name)


X = jnp.linspace(-1, 1, 8).reshape(2, 4)


def test_stats_add_one_array_to_what_a_jitted_step_returns():
    def step(params):
        return cowalk.jax.stats(params, gradients(params, X))

    traced = jax.make_jaxpr(step)(PARAMS)
    assert len(traced.out_avals) == 1
    found = jax.jit(step)(PARAMS)
    assert [str(path) for path in found.paths] == ["bias", "weight"]
    assert found.shapes == ((3,), (4, 3))
    assert found.dtypes == (np.float32, np.float32)
    assert found.missing == ((), ())
    expected, _ = reference.measure([Operands(PARAMS[name], gradients(PARAMS, X)[name]) for name in ("bias", "weight")])
    np.testing.assert_allclose(found.matrix(), expected, rtol=1e-5, atol=1e-6)


def test_a_missing_gradient_is_named_and_unknown():
    found = jax.jit(lambda params: cowalk.jax.stats(params, {"bias": None, "weight": params["weight"]}))(PARAMS)
    assert found.missing == (("gradient",), ())
    assert np.isnan(found.matrix()[0, SPANS["gradient"]]).all()
    assert np.isnan(found.matrix()[0, SPANS["ratio"]]).all()


def test_the_moments_of_an_adam_anywhere_in_an_optax_state_are_measured():
    params = {name: PARAMS[name] for name in ("bias", "weight")}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, b1=0.8))
    options = {"lr": 1e-2, "betas": (0.8, 0.999)}

    @jax.jit
    def step(params, state):
        grads = gradients(params, X)
        updates, state = optimizer.update(grads, state, params)
        return cowalk.jax.stats(params, grads, updates, state, adam=options), updates

    found, updates = step(params, optimizer.init(params))
    sizes = [np.sqrt(np.square(updates[name]).mean()) for name in ("bias", "weight")]
    np.testing.assert_allclose(found.matrix()[:, column("adam", "step")], sizes, rtol=1e-5)
    assert (found.matrix()[:, column("adam", "defined")] == [3, 12]).all()


def test_each_parameter_is_measured_against_the_state_that_has_it():
    params = {name: PARAMS[name] for name in ("bias", "weight")}
    optimizer = optax.partition({"x": optax.adam(1e-2), "y": optax.sgd(1e-2)}, {"bias": "y", "weight": "x"})
    found = jax.jit(lambda params, state: cowalk.jax.stats(params, params, opt_state=state))(
        params, optimizer.init(params)
    )
    assert found.missing == (("adam",), ())
    assert found.matrix()[1, column("adam", "defined")] == 12


def test_a_state_without_such_moments_leaves_adam_unknown():
    params = {"weight": PARAMS["weight"]}
    found = cowalk.jax.stats(params, params, opt_state=optax.sgd(1e-2, momentum=0.9).init(params))
    assert np.isnan(found.matrix()[:, SPANS["adam"]]).all()
    assert found.missing == ((),)


def test_a_scan_stacks_the_statistics_of_its_steps():
    def step(params, _):
        grads = gradients(params, X)
        return {**params, "bias": params["bias"] - grads["bias"]}, cowalk.jax.stats(params, grads)

    _, found = jax.jit(lambda params: jax.lax.scan(step, params, length=3))(PARAMS)
    assert found.matrix().shape == (3, 2, sum(len(section.names()) for section in SECTIONS.values()))
    first = cowalk.jax.stats(PARAMS, gradients(PARAMS, X)).matrix()
    np.testing.assert_allclose(found.matrix()[0], first, rtol=1e-5, atol=1e-6)


def test_vmap_measures_each_model_of_many():
    many = jnp.stack([PARAMS["weight"], 2 * PARAMS["weight"]])
    found = jax.vmap(lambda weight: cowalk.jax.stats({"weight": weight}))(many)
    means = found.matrix()[:, 0, column("parameter", "mean")]
    assert means[1] == 2 * means[0] == pytest.approx(2 * np.mean(PARAMS["weight"]))
    assert found.shapes == ((4, 3),)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_parameters_are_measured_before_they_are_overwritten():
    def step(params):
        return jax.tree.map(lambda p: p + 1, params), cowalk.jax.stats(params)

    _, found = jax.jit(step, donate_argnums=0)({"weight": jnp.full(4, 2.0)})
    assert found.matrix()[0, column("parameter", "mean")] == 2


def test_statistics_may_be_taken_inside_of_a_differentiated_function():
    def with_statistics(params):
        return jnp.square(params["weight"]).sum(), cowalk.jax.stats(params)

    grads, found = jax.grad(with_statistics, has_aux=True)({"weight": PARAMS["weight"]})
    np.testing.assert_allclose(grads["weight"], 2 * PARAMS["weight"])
    assert found.matrix()[0, column("parameter", "n")] == 12


def test_arrays_of_other_shapes_than_their_parameters_are_an_error_that_names_them():
    with pytest.raises(cowalk.MeasureError, match=r"weight: the parameter has shape \(4, 3\), its gradient \(3,\)"):
        cowalk.jax.stats({"weight": PARAMS["weight"]}, {"weight": jnp.ones(3)})


def test_a_matrix_cannot_be_had_while_tracing():
    with pytest.raises(TypeError, match="ask outside"):
        jax.jit(lambda params: cowalk.jax.stats(params).matrix())(PARAMS)

"""The native back end against the reference, on every instruction set that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.arrays_under_test import (
    CASES,
    FORMS,
    LAYOUTS,
    SETTINGS,
    Expected,
    assert_agrees,
    draws,
    expectation,
    leaf_of,
    leaves,
    make,
)

from cowalk.measure import dispatch, native
from cowalk.measure.backend import Matrix, Operands
from cowalk.tree import engine

pytestmark = pytest.mark.skipif(engine.NATIVE is None, reason="the native extension is not built")


@pytest.fixture(scope="module", params=native.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    native.set_level(request.param)
    yield request.param
    native.set_level(os.environ.get("COWALK_SIMD") or None)


@cache
def case(name: str) -> tuple[list[Operands], Expected]:
    """Made once for all instruction sets."""
    made = CASES[name]()
    return made, expectation(made)


def measure(made: list[Operands], histograms: bool, threads: int | None = None) -> Any:
    """By the native back end, but for the dtypes that only NumPy knows."""
    return dispatch.measure(made, histograms, threads)


def assert_same_bits(one: Matrix, other: Matrix) -> None:
    np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
    np.testing.assert_array_equal(np.nan_to_num(one).view(np.uint64), np.nan_to_num(other).view(np.uint64))


def bytes_of(array: Any) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_the_reference_on_the_fixed_list(level: str, name: str) -> None:
    made, expected = case(name)
    found, histograms = measure(made, True)
    assert histograms is not None
    assert_agrees(found, made, histograms, expected)
    without, none = measure(made, False)
    assert none is None
    assert_agrees(without, made, None, expected)


@given(st.lists(leaves(), max_size=3))
@settings(max_examples=40, deadline=None)
def test_it_agrees_with_the_reference_on_generated_leaves(level: str, made: list[Operands]) -> None:
    found, histograms = measure(made, True)
    assert histograms is not None
    assert_agrees(found, made, histograms)


THREADED = ["large torch float32", "layouts of torch float32", "layouts of numpy bfloat16", "rows of zeros", "Adam"]


@pytest.mark.parametrize("name", THREADED)
def test_the_number_of_threads_changes_no_bit(level: str, name: str) -> None:
    made, _ = case(name)
    one, histograms = measure(made, True, threads=1)
    for threads in (2, 3, 16, None):
        other, others = measure(made, True, threads=threads)
        assert_same_bits(one, other)
        assert others == histograms


@pytest.mark.parametrize("name", THREADED)
def test_the_neighbours_of_a_leaf_change_no_bit(level: str, name: str) -> None:
    made, _ = case(name)
    together, _ = measure(made, True)
    for i, leaf in enumerate(made[:: max(1, len(made) // 20)]):
        assert_same_bits(measure([leaf], False)[0], together[[i * max(1, len(made) // 20)]])


def test_several_python_threads_measure_at_once(level: str) -> None:
    made, _ = case("large torch float32")
    alone, _ = measure(made, True)
    found: list[Matrix] = []

    def work() -> None:
        found.extend(measure(made, True)[0] for _ in range(3))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 12
    for each in found:
        assert_same_bits(each, alone)


@pytest.mark.parametrize("form", FORMS)
def test_it_leaves_arrays_as_they_are_and_holds_none_of_them(form: str) -> None:
    for layout in LAYOUTS[FORMS[form][0]]:
        arrays = [make(form, draws("edges", (5, 6), seed), layout) for seed in range(5)]
        before = [bytes_of(array) for array in arrays]
        held = [sys.getrefcount(array) for array in arrays]
        leaf = Operands(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], SETTINGS[1])
        measure([leaf], True)
        del leaf
        assert [bytes_of(array) for array in arrays] == before
        assert [sys.getrefcount(array) for array in arrays] == held


def test_a_parameter_stays_one_that_requires_a_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    hidden = parameter * 2
    measure([Operands(parameter, hidden)], False)
    assert parameter.requires_grad
    assert hidden.grad_fn is not None
    assert parameter.grad is None
    assert parameter._version == 0


def test_implicit_zeros_of_a_sparse_tensor_are_zeros(level: str) -> None:
    indices, values = torch.tensor([[0, 2, 2], [1, 0, 0]]), torch.tensor([3.0, 1.0, 4.0])
    sparse = torch.sparse_coo_tensor(indices, values, (4, 5), check_invariants=True)  # one place twice: it adds up
    dense = torch.zeros(4, 5)
    dense[0, 1], dense[2, 0] = 3.0, 5.0
    leaf = [Operands(torch.ones(4, 5), sparse)]
    found, histograms = measure(leaf, True)
    assert histograms is not None
    assert_agrees(found, leaf, histograms, expectation([Operands(torch.ones(4, 5), dense)]))


def test_parts_of_a_model_at_different_places_are_one_call_of_many_leaves(level: str) -> None:
    made = [
        leaf_of(form, size, ["normal"], seed=size) for size in range(70) for form in ("torch float32", "numpy bfloat16")
    ]
    found, histograms = measure(made, True)
    assert histograms is not None
    assert_agrees(found, made, histograms)


# --- the floating-point mode ---


def subnormals_survive() -> bool:
    one = np.ones(4)
    small = np.full(4, 5e-324), np.full(4, 1e-45, np.float32)
    return all(bool((each / one.astype(each.dtype) != 0).all()) for each in small)


def test_measuring_leaves_the_floating_point_mode_alone(level: str) -> None:
    assert subnormals_survive()
    made, _ = case("large torch float32")
    measure(made, True, threads=2)
    assert subnormals_survive()


@pytest.mark.parametrize("name", ["values in torch float32", "values in numpy float64", "values in torch bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_subnormals_are_measured_where_the_process_flushes_them_to_zero(level: str, name: str, threads: int) -> None:
    made, expected = case(name)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        found, histograms = measure(made, True, threads=threads)
        flushed = not subnormals_survive()
    finally:
        torch.set_flush_denormal(False)
    assert flushed, "measuring changed the mode"
    assert subnormals_survive()
    assert histograms is not None
    assert_agrees(found, made, histograms, expected)


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loading_it_leaves_the_floating_point_mode_alone(level: str) -> None:
    found = run(
        """
        import numpy as np
        small, small32 = np.full(4, 5e-324), np.full(4, 1e-45, np.float32)
        one, one32 = np.ones(4), np.ones(4, np.float32)
        print((small / one != 0).all(), (small32 * one32 != 0).all())
        import cowalk.measure.native as native
        from cowalk.measure.backend import Operands
        print((small / one != 0).all(), (small32 * one32 != 0).all())
        native.measure([Operands(np.ones(300_000), np.ones(300_000))], True, threads=2)
        print((small / one != 0).all(), (small32 * one32 != 0).all())
        """,
        COWALK_SIMD=level,
    )
    assert found.split() == ["True"] * 6


# --- memory ---

MEASURED = {
    "numpy float32": "filled(np.float32, 1 << 25), filled(np.float32, 1 << 25)",
    "a gradient in another layout": """
        filled(np.float32, 1 << 25).reshape(4096, 8192), filled(np.float32, 1 << 25).reshape(8192, 4096).T""",
    "unaligned": "unaligned(), unaligned()",
    "torch bfloat16": "torch.ones(1 << 26, dtype=torch.bfloat16), torch.ones(1 << 26, dtype=torch.bfloat16)",
}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
@pytest.mark.parametrize("pair", MEASURED)
def test_a_pair_of_256_mb_is_measured_in_less_than_16_mb(pair: str) -> None:
    program = f"""
        import numpy as np
        import cowalk.measure.native as native
        from cowalk.measure.backend import Operands
        {"import torch" if "torch" in pair else ""}

        def peak():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

        def filled(dtype, n):
            array = np.empty(n, dtype)
            array[:] = 1.5
            return array

        def unaligned():
            array = np.ndarray(1 << 25, np.float32, bytearray((1 << 27) + 1), offset=1)
            for start in range(0, 1 << 25, 1 << 20):
                array[start : start + (1 << 20)] = 1.5
            return array

        native.measure([Operands(np.ones(99999), np.ones(99999))], True)
        x, y = {MEASURED[pair].strip()}
        before = peak()
        native.measure([Operands(x, y)], True)
        print(peak() - before)
        """
    assert int(run(program)) < 16 * 1024

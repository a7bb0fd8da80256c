"""Adding gradients into sums: right to the rounding of the sum's dtype, measured on the way, and nothing else is touched."""

from __future__ import annotations

import math
import threading
import tracemalloc
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from cowalk.measure import native
from cowalk.measure.adding import Addend, add
from cowalk.measure.arrays import plain
from cowalk.tree import engine

SIZES = (0, 1, 2, 7, 31, 33, 255, 257, 2047, 2048, 2049, 65_535, 65_537, 150_001)
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32")
HELD = {
    "float32": NARROW,
    "float64": (*NARROW, "float64"),
    "complex64": (*NARROW, "complex64"),
    "complex128": (*NARROW, "float64", "complex64", "complex128"),
}
WAYS = (*native.levels(), "NumPy")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every instruction set of the extension, and NumPy in its place."""
    if request.param == "NumPy":
        monkeypatch.setattr(engine, "NATIVE", None)
        yield request.param
    else:
        native.set_level(request.param)
        yield request.param
        native.set_level(None)


def drawn(shape: Any, dtype: str, seed: int = 0) -> Any:
    """Numbers of any dtype, as NumPy has them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype.startswith("complex") else 0)
    return np.asarray(values).astype(getattr(ml_dtypes, dtype, dtype))


def exact(array: Any) -> Any:
    values = plain(array).values
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def check(total: Any, gradient: Any, factor: float = 0.7, lost: Any = None, threads: int | None = None) -> None:
    """Adds, and compares with the same in double precision."""
    before, expected = exact(gradient), exact(total) + factor * exact(gradient)
    rounding = np.finfo(exact(total).real.dtype if exact(total).itemsize == total.itemsize else np.float32).eps
    [norm] = add([Addend(total, lost, gradient)], factor, threads)
    allowed = 2 * rounding * (abs(expected) + abs(factor * before) + 1)
    assert (abs(exact(total) - expected) <= allowed).all()
    np.testing.assert_array_equal(exact(gradient), before)
    assert norm == pytest.approx(float(np.linalg.norm(before.ravel())), rel=1e-6, abs=1e-322)


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize(("total", "gradient"), [(total, each) for total, held in HELD.items() for each in held])
def test_every_dtype_is_added_to_every_sum_that_holds_it(
    way: str, total: str, gradient: str, compensated: bool
) -> None:
    for n in SIZES:
        lost = np.zeros(n, total) if compensated else None
        check(drawn(n, total, 1), drawn(n, gradient), lost=lost, threads=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"])
def test_tensors_of_torch_are_added_where_they_lie(way: str, dtype: str) -> None:
    gradient = torch.from_numpy(drawn((5, 700), "float32")).to(getattr(torch, dtype)).requires_grad_()
    check(torch.zeros(5, 700), gradient, lost=torch.zeros(5, 700))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_arrays_of_jax_are_added(way: str, dtype: str) -> None:
    check(np.zeros((3, 50), "complex64"), jnp.asarray(drawn((3, 50), dtype)))


LAYOUTS: dict[str, Any] = {
    "transposed": lambda make: make((40, 30, 70)).transpose(2, 1, 0),
    "permuted": lambda make: make((40, 30, 70)).transpose(1, 0, 2),
    "every other": lambda make: make((70, 60, 80))[:, ::2, ::2],
    "backwards": lambda make: make((70, 30, 40))[::-1, :, ::-1],
    "one row": lambda make: np.broadcast_to(make(40), (70, 30, 40)),
    "one column": lambda make: np.broadcast_to(make((70, 30, 1)), (70, 30, 40)),
    "one number": lambda make: np.broadcast_to(make(()), (70, 30, 40)),
    "short rows": lambda make: make((1000, 3, 5)).transpose(2, 0, 1)[:, :, :2],
    "misaligned": lambda make: np.frombuffer(b"." + make(84_000).tobytes(), make(0).dtype, offset=1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("total", "dtype"), [("float32", "float32"), ("float64", "bfloat16"), ("complex64", "complex64")]
)
def test_a_gradient_may_have_any_strides(way: str, layout: str, total: str, dtype: str) -> None:
    gradient = LAYOUTS[layout](lambda shape: drawn(shape, dtype))
    gradient.flags.writeable = False
    check(drawn(gradient.shape, total, 1), gradient, lost=np.zeros(gradient.shape, total))


def test_a_tensor_may_have_any_strides(way: str) -> None:
    for gradient in (
        torch.randn(5, 1).expand(5, 70_000),
        torch.randn(()).expand(300, 300).to(torch.bfloat16),
        torch.randn(6, 7, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(9, 8, dtype=torch.complex64).t().conj(),
        torch.randn(9, 8, dtype=torch.complex64).conj().imag,
    ):
        total = torch.zeros(gradient.shape, dtype=torch.complex64 if gradient.is_complex() else torch.float32)
        check(total, gradient)


def test_a_sparse_gradient_is_added_with_its_repeated_entries(way: str) -> None:
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 0]]), torch.tensor([1.0, 2.0, 2.0]), (4,), check_invariants=True
    )
    total = torch.ones(4)
    assert add([Addend(total, None, gradient)], 2.0) == pytest.approx(math.sqrt(13))
    assert total.tolist() == [7.0, 1.0, 5.0, 1.0]


def test_arrays_without_axes_and_without_elements_are_added(way: str) -> None:
    total, empty = np.array(1.0, "float32"), np.zeros((0, 3), "float32")
    norms = add(
        [
            Addend(total, np.zeros_like(total), np.float32(2)),
            Addend(empty, None, empty),
        ],
        1.0,
    )
    assert (total, *norms) == (3.0, 2.0, 0.0)
    assert add([], 1.0).shape == (0,)


# --- compensation ---


@pytest.mark.parametrize("n", [1, 100])
def test_a_compensated_sum_stays_right_where_a_plain_one_does_not(way: str, n: int) -> None:
    plain_sum, total, lost = (np.full(n, start, "float32") for start in (1000, 1000, 0))
    gradient = np.full(n, 1e-3).astype(ml_dtypes.bfloat16)
    for _ in range(10_000):
        add([Addend(plain_sum, None, gradient), Addend(total, lost, gradient)], 1.0)
    expected = 1000 + 10_000 * float(gradient[0])
    assert total == pytest.approx(expected, rel=1e-7)
    assert exact(total) + exact(lost) == pytest.approx(expected, rel=1e-12)
    assert plain_sum != pytest.approx(expected, rel=1e-6)


def test_a_gradient_larger_than_the_sum_does_not_wipe_it_out(way: str) -> None:
    total, lost = np.ones(40, "float32"), np.zeros(40, "float32")
    for value in (1e10, 1.0, -1e10):
        add([Addend(total, lost, np.full(40, value, "float32"))], 1.0)
    assert (exact(total) + exact(lost) == 2).all()


@pytest.mark.parametrize("n", [1, 64])
def test_a_sum_that_overflowed_stays_infinite_and_nan_stays_nan(way: str, n: int) -> None:
    limit = float(np.finfo(np.float32).max)
    numbers = {
        (limit, 1.0): math.inf,
        (-math.inf, 1.0): -math.inf,
        (math.inf, -math.inf): math.nan,
        (0.0, math.nan): math.nan,
    }
    for (start, step), end in numbers.items():
        total, lost = np.full(n, start, "float32"), np.zeros(n, "float32")
        gradient = np.full(n, limit if start == limit else step, "float32")
        for _ in range(2):
            add([Addend(total, lost, gradient)], 1.0)
            np.testing.assert_array_equal(total, np.full(n, end, "float32"))
            assert not lost.any()
        add([Addend(total, lost, np.ones(n, "float32"))], 1.0)
        np.testing.assert_array_equal(total, np.full(n, end, "float32"))


def test_an_infinite_part_of_a_complex_number_leaves_the_other_alone(way: str) -> None:
    for dtype in ("complex64", "complex128"):
        total = np.zeros(40, dtype)
        [norm] = add([Addend(total, np.zeros(40, dtype), np.full(40, complex(math.inf, 1), dtype))], 2.0)
        assert norm == math.inf
        assert (total.imag == 2).all()


# --- norms ---


@pytest.mark.parametrize("n", [1, 3, 5000, 70_000])
@pytest.mark.parametrize("size", [1e200, 1e-200, 1e300, 1e-310, 5e-324, 1e30, 1e-30, 1e-42, 1e38, 0.0])
def test_a_norm_is_right_whatever_the_magnitude(way: str, size: float, n: int) -> None:
    numbers = np.random.default_rng(0).choice([-size, size], n)
    for dtype in ("float64", "complex128") if not 1e-45 < size < 2e38 else ("float32", "float64", "complex64"):
        gradient = numbers.astype(dtype)
        [norm] = add([Addend(np.zeros(n, dtype), None, gradient)], 0.0)
        assert norm == pytest.approx(abs(exact(gradient[0])) * math.sqrt(n), rel=1e-6, abs=1e-322)


def test_a_norm_counts_large_numbers_beside_small_ones(way: str) -> None:
    for dtype, large in (("float32", 1e30), ("float64", 1e250)):
        gradient = np.ones(200_000, dtype)
        gradient[[70_000, 199_999]] = large
        assert add([Addend(np.zeros_like(gradient), None, gradient)], 0.0) == pytest.approx(large * math.sqrt(2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("at", [0, 100, 69_999])
def test_nan_and_infinity_show_in_the_norm(way: str, dtype: str, at: int) -> None:
    total = dtype if dtype in HELD else "float32"
    for value in (math.nan, math.inf, -math.inf):
        gradient = drawn(70_000, dtype)
        gradient[at] = value
        [norm] = add([Addend(np.zeros(70_000, total), None, gradient)], 1.0)
        np.testing.assert_equal(norm, abs(value))
    gradient[at - 7] = math.nan
    assert np.isnan(add([Addend(np.zeros(70_000, total), None, gradient)], 1.0))


@pytest.mark.skipif(not native.available(), reason="the native extension is not built")
def test_sums_and_norms_do_not_depend_on_the_number_of_threads() -> None:
    gradients = [drawn(n, dtype, n) for n in (1, 3000, 65_536, 300_000) for dtype in ("float32", "bfloat16", "float16")]
    found: list[Any] = []
    for threads in (1, 2, 3):
        addends = [Addend(np.zeros(len(each), "float32"), np.zeros(len(each), "float32"), each) for each in gradients]
        norms = add(addends, 0.3, threads)
        found.append((norms.tolist(), [(each.sum.tobytes(), each.compensation.tobytes()) for each in addends]))
    assert found[0] == found[1] == found[2]


def test_numbers_below_the_smallest_normal_one_are_kept(way: str) -> None:
    gradient = np.full(100, 1e-44, "float32")
    total = np.zeros(100, "float32")
    torch.set_flush_denormal(True)
    try:
        [norm] = add([Addend(total, None, gradient)], 1.0)
    finally:
        torch.set_flush_denormal(False)
    if way != "NumPy":  # which has the mode that it is given
        np.testing.assert_array_equal(total, gradient)
        assert norm == pytest.approx(10 * float(gradient[0]), rel=1e-6, abs=1e-322)


# --- what is refused ---


def refused(addend: Addend, message: str) -> None:
    """Refuses it, before anything was added to the addend in front of it."""
    first = np.zeros(3, "float32")
    with pytest.raises(ValueError, match=message):
        add([Addend(first, None, np.ones(3, "float32")), addend], 1.0)
    assert not first.any()


def test_gradients_that_the_sum_does_not_hold_are_refused(way: str) -> None:
    ones = np.ones(3, "float32")
    refused(Addend(ones, None, np.ones(3)), "addend 1: its gradient is of float64, which is wider")
    refused(Addend(ones.astype("complex64"), None, np.ones(3)), "wider")
    refused(
        Addend(ones, None, torch.ones(3, dtype=torch.complex64)), "addend 1: its gradient is of complex64.* is real"
    )
    refused(Addend(ones.astype("float64"), None, np.ones(3, "complex64")), "real")
    refused(Addend(ones, None, np.ones(3, "int64")), "addend 1: .*int64")
    refused(Addend(ones, None, torch.ones(3, dtype=torch.bool)), "addend 1: .*bool")
    refused(Addend(ones, None, np.ones(3, np.longdouble)), "addend 1: .*float")
    refused(Addend(ones, None, [1.0, 1.0, 1.0]), "addend 1: .*list")


def test_sums_that_cannot_be_written_are_refused(way: str) -> None:
    ones = np.ones(3, "float32")
    read_only = np.zeros(3, "float32")
    read_only.flags.writeable = False
    refused(Addend(read_only, None, ones), "addend 1: its sum is read-only")
    refused(Addend(ones.copy(), read_only, ones), "addend 1: its compensation is read-only")
    refused(Addend(np.zeros(6, "float32")[::2], None, ones), "C order")
    refused(Addend(np.zeros((2, 3), "float32").T, None, np.ones((3, 2), "float32")), "C order")
    refused(Addend(torch.zeros(6)[::2], None, ones), "C order")
    refused(Addend(np.frombuffer(bytearray(13), "float32", offset=1), None, ones), "multiple")
    refused(Addend(np.zeros(3, "float16"), None, ones), "addend 1: its sum is")
    refused(Addend(torch.zeros(3, dtype=torch.bfloat16), None, ones), "addend 1: its sum is")
    refused(Addend(np.zeros(3, ">f4"), None, ones), "addend 1: its sum is")
    refused(Addend(jnp.zeros(3), None, ones), "addend 1: its sum is a jax")
    refused(Addend(torch.zeros(3, device="meta"), None, ones), "addend 1: its sum is")
    refused(Addend(torch.zeros(3, dtype=torch.complex64).conj(), None, ones), "addend 1: its sum is")


def test_arrays_of_several_shapes_are_refused(way: str) -> None:
    zeros = np.zeros(3, "float32")
    refused(Addend(zeros, None, np.ones(4, "float32")), "addend 1: .*shapes")
    refused(Addend(zeros, None, np.ones((1, 3), "float32")), "addend 1: .*shapes")
    refused(Addend(zeros, np.zeros(4, "float32"), np.ones(3, "float32")), "addend 1: its compensation")
    refused(Addend(zeros, np.zeros(3), np.ones(3, "float32")), "addend 1: its compensation")


def test_memory_that_is_written_overlaps_nothing(way: str) -> None:
    memory = np.zeros(30, "float32")
    refused(Addend(memory, None, memory), "overlap")
    refused(Addend(memory[:20], None, memory[10:]), "overlap")
    refused(Addend(memory[:15], None, memory[24:4:-1][:15]), "overlap")
    refused(Addend(memory[10:20], None, np.broadcast_to(memory[15:16], 10)), "overlap")
    refused(Addend(memory[:20], memory[10:], np.ones(20, "float32")), "overlap")
    refused(Addend(memory, memory, np.ones(30, "float32")), "overlap")
    tensor = torch.zeros(20)
    refused(Addend(tensor[:10], None, tensor.view(torch.bfloat16)[15:25]), "overlap")
    ones = np.ones(30, "float32")
    with pytest.raises(ValueError, match="addends 0 and 1"):
        add([Addend(memory, None, ones), Addend(memory, None, ones)], 1.0)
    with pytest.raises(ValueError, match="overlap"):
        add([Addend(memory, None, ones), Addend(np.zeros(10, "float32"), None, memory[3:13])], 1.0)
    assert not memory.any()


def test_neighbours_in_memory_are_no_overlap_and_a_gradient_may_be_added_twice(way: str) -> None:
    memory = np.zeros(40, "float32")
    memory[10:20] = 1
    gradient = memory[10:20]
    add([Addend(memory[20:30], memory[30:], gradient), Addend(memory[:10], None, gradient)], 2.0)
    assert memory.tolist() == [2.0] * 10 + [1.0] * 10 + [2.0] * 10 + [0.0] * 10


# --- memory ---


@pytest.mark.skipif(not native.available(), reason="the native extension is not built")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"])
def test_contiguous_and_expanded_gradients_are_added_without_a_copy(dtype: str) -> None:
    total = dtype if dtype in HELD else "float32"
    of_torch = torch.ones(100_000, dtype=getattr(torch, dtype))
    addends = [
        Addend(np.zeros(100_000, total), np.zeros(100_000, total), gradient)
        for gradient in (drawn(100_000, dtype), np.broadcast_to(drawn((), dtype), 100_000), of_torch)
    ]
    add(addends, 1.0)
    domain = np.lib.tracemalloc_domain if hasattr(np.lib, "tracemalloc_domain") else 389047
    tracemalloc.start()
    try:
        norms = add(addends, 1.0)
        made = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, domain)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in made.traces) <= norms.nbytes
    assert peak < 50_000


def test_an_expanded_gradient_is_never_written_out(way: str) -> None:
    total = np.zeros((1000, 1000), "float32")
    gradient = torch.ones(()).to(torch.bfloat16).expand(1000, 1000)
    addends = [Addend(total, np.zeros_like(total), gradient)]
    add(addends, 1.0)
    tracemalloc.start()
    try:
        add(addends, 1.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < total.nbytes
    assert (total == 2).all()


def test_other_threads_of_python_may_run_meanwhile(way: str) -> None:
    totals = [torch.zeros(50_000) for _ in range(4)]
    gradient = torch.ones(50_000)
    threads = [
        threading.Thread(target=lambda each=each: [add([Addend(each, None, gradient)], 1.0) for _ in range(20)])
        for each in totals
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((each == 20).all() for each in totals)

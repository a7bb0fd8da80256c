"""The accumulator: its sums and means are those of all batches at once, in place, and what is given to it stays as it is."""

from __future__ import annotations

import contextlib
import math
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import cowalk
from cowalk import Accumulator, AccumulatorError, Batch
from cowalk.gradients import ShapeError, jax_sums, sums
from cowalk.gradients.saving import SaveError
from cowalk.measure import native
from cowalk.measure.arrays import plain
from cowalk.tree import engine

NAN, INF = math.nan, math.inf
MAKERS = {"NumPy": np.asarray, "torch": torch.tensor, "JAX": jnp.asarray}
PLACES = ("memory", "NumPy only", "torch device", "JAX device")


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Arrays of each framework, from NumPy's."""
    return MAKERS[request.param]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways to add: the extension's, NumPy's in its place, and those of accelerators, here for arrays of the CPU."""
    if request.param == "NumPy only":
        monkeypatch.setattr(engine, "NATIVE", None)
    elif request.param == "torch device":
        monkeypatch.setattr(sums, "_home", lambda gradient: "torch device")
    elif request.param == "JAX device":
        monkeypatch.setattr(native, "is_local_jax", lambda array: False)
    return request.param


def made_at(place: str) -> Callable[[Any], Any]:
    return {"torch device": torch.tensor, "JAX device": jnp.asarray}.get(place, np.asarray)


def drawn(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def numpy_of(array: Any) -> Any:
    return np.asarray(array.detach() if isinstance(array, torch.Tensor) else array)


def close(found: Any, expected: Any, rtol: float = 1e-6) -> None:
    np.testing.assert_allclose(numpy_of(found), expected, rtol=rtol, atol=rtol * 1e-3)


def total_of(*gradients: Any, **options: Any) -> Accumulator:
    total = Accumulator(**options)
    for each in gradients:
        total.add(each)
    return total


# --- sums and means ---


def test_short_batches_count_by_their_weight(make: Callable[[Any], Any]) -> None:
    x = drawn(69, 3)
    means, summed = Accumulator(), Accumulator()
    for part in np.split(x, [32, 64]):
        means.add({"w": make(part.mean(0)), "c": [None]}, weight=len(part))
        summed.add({"w": make(part.sum(0)), "c": [None]}, weight=len(part), loss_reduction="sum")
    for total in (means, summed):
        close(total.mean()["w"], x.astype(np.float64).mean(0), 2e-6)
        close(total.sum()["w"], x.astype(np.float64).sum(0), 2e-6)
        assert total.mean()["c"] == [None]
        assert type(total.mean()["w"]) is type(make(x))
        assert numpy_of(total.mean()["w"]).dtype == np.float32
        assert (total.weight, total.batches) == (69.0, 3)


def test_it_adds_wherever_the_arrays_are(place: str) -> None:
    make, total = made_at(place), Accumulator()
    for part in np.split(drawn(69, 3), [32, 64]):
        total.add([make(part.mean(0)), make(part[0, 0])], weight=len(part))
    close(total.mean()[0], drawn(69, 3).astype(np.float64).mean(0), 2e-6)
    assert total.worst[0].norm == pytest.approx(
        max(math.hypot(*part.mean(0), part[0, 0]) for part in np.split(drawn(69, 3), [32, 64])), rel=1e-6
    )


def test_a_result_is_a_new_array_and_adding_goes_on_after_it(make: Callable[[Any], Any]) -> None:
    total = total_of({"w": make(np.ones(2, np.float32))})
    before = total.sum()["w"]
    total.add({"w": make(np.ones(2, np.float32))})
    assert before.tolist() == [1.0, 1.0]
    assert total.sum()["w"].tolist() == [2.0, 2.0]


def test_plain_numbers_and_scalar_arrays_are_gradients(make: Callable[[Any], Any]) -> None:
    total = total_of([2.5, make(np.float32(3.0).reshape(())), 1j], [1.5, make(np.float32(1.0).reshape(())), 1.0])
    found = total.sum()
    assert [complex(numpy_of(each)) for each in found] == [4.0, 4.0, 1 + 1j]
    assert found[1].shape == ()


def test_complex_gradients_are_added(place: str) -> None:
    values = (drawn(5) + 1j * drawn(5, seed=1)).astype(np.complex64)
    total = total_of([made_at(place)(values)], [made_at(place)(values)])
    close(total.mean()[0], values)
    assert total.worst[0].norm == pytest.approx(float(np.linalg.norm(values)), rel=1e-6)


def test_with_a_model_the_result_has_its_shape_and_tied_parameters_their_gradient_once() -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "frozen": torch.nn.Linear(2, 2)})
    model["two"] = model["one"]
    model["frozen"].requires_grad_(False)
    model["two"](model["one"](model["frozen"](torch.ones(3, 2)))).sum().backward()
    total = Accumulator(model)
    for _ in range(2):
        total.add(cowalk.gradients_of(model))
    found = total.mean()
    assert found["one"]["weight"].equal(model["one"].weight.grad)
    assert found["two"] == found["frozen"] == {"weight": None, "bias": None}
    assert {str(path): count for path, count in total.counts.items()} == {"one.weight": 2, "one.bias": 2}


def test_gradients_of_another_model_are_refused_and_nothing_is_added() -> None:
    total = Accumulator({"w": np.ones(2)})
    total.add({"w": np.ones(2)})
    with pytest.raises(cowalk.StructureError, match="v"):
        total.add({"w": np.ones(2), "v": np.ones(2)})
    assert (total.batches, total.sum()["w"].tolist()) == (1, [1.0, 1.0])


# --- branches that come and go ---


def test_a_branch_that_comes_later_counts_as_zero_before() -> None:
    a, b = np.array([1.0, 3.0]), np.array([6.0])
    for model in (None, {"a": a, "b": b, "c": [np.ones(1)]}):
        total = Accumulator(model)
        total.add({"a": a, "b": None, "c": [None]}, weight=2)
        total.add({"a": None, "b": b, "c": [None]}, weight=1)
        total.add({"a": a, "b": b, "c": [None]}, weight=1)
        assert total.mean()["a"].tolist() == [0.75, 2.25]
        assert total.mean()["b"].tolist() == [3.0]
        assert total.mean()["c"] == [None]
        counts = {str(path): count for path, count in total.counts.items()}
        assert counts == {"a": 2, "b": 2} | ({} if model is None else {"c.0": 0})


def test_a_whole_branch_may_be_none_or_away() -> None:
    full = {"a": {"w": np.ones(1), "v": np.ones(1)}, "b": [np.ones(1)]}
    total = total_of({"b": [np.ones(1)]}, {"a": None, "b": None}, full, {"a": {"v": np.ones(1)}})
    assert cowalk.fmap(lambda x: x.tolist(), total.sum()) == {"b": [[2.0]], "a": {"w": [1.0], "v": [2.0]}}


def test_what_is_no_gradient_is_left_out(make: Callable[[Any], Any]) -> None:
    tree = {"w": make(np.ones(2, np.float32)), "steps": make(np.arange(3)), "f": len, "n": 3, "s": "text", "b": True}
    total = total_of(tree, tree)
    found = total.sum()
    assert found.pop("w").tolist() == [2.0, 2.0]
    assert found == dict.fromkeys(("steps", "f", "n", "s", "b"))
    assert list(map(str, total.counts)) == ["w"]


# --- in place ---


def dense(seed: int, scale: int = 1) -> Any:
    """Gradients of three dense layers, 250 → 200 → 150 → 100."""
    sizes = [250, 200, 150, 100]
    return [{"weight": drawn(n * scale, m, seed=seed), "bias": drawn(n * scale, seed=seed)} for m, n in pairwise(sizes)]


def peak_of(step: Callable[[], Any]) -> int:
    """The most memory that is there at once while a step runs."""
    tracemalloc.start()
    try:
        step()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def array_bytes_during(step: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes of arrays that are seen at any call or return within a step, and those that stay."""
    arrays = [tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)]
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(arrays).traces))

    before = sys.getprofile()
    tracemalloc.start()
    try:
        sys.setprofile(look)
        try:
            step()
        finally:
            sys.setprofile(before)
        look()
    finally:
        tracemalloc.stop()
    return max(seen), seen[-1]


@pytest.mark.skipif(not native.available(), reason="NumPy alone adds in blocks, which it makes")
@pytest.mark.parametrize("with_model", [False, True])
def test_after_the_first_batch_no_array_is_made(with_model: bool) -> None:
    total = Accumulator(dense(9) if with_model else None)
    first, second = dense(0), dense(1)
    total.add(first, 32)
    memory = [each.total.ctypes.data for each in total.sums().values()]
    total.add(second, 32)
    most, left = array_bytes_during(lambda: total.add(second, 5))
    assert (most, left) == (0, 0)
    assert [each.total.ctypes.data for each in total.sums().values()] == memory
    np.testing.assert_allclose(total.sum()[0]["bias"], 32 * first[0]["bias"] + 37 * second[0]["bias"], atol=2e-5)


@pytest.mark.skipif(not native.available(), reason="NumPy alone adds in blocks, which it makes")
def test_the_memory_of_a_step_does_not_grow_with_the_arrays() -> None:
    peaks: list[int] = []
    for scale in (1, 8):
        gradients, total = dense(0, scale), Accumulator()
        for _ in range(3):
            total.add(gradients, 32)
        peaks.append(peak_of(lambda total=total, gradients=gradients: total.add(gradients, 32)))
    size = sum(leaf.nbytes for _, (leaf,) in cowalk.walk(dense(0)))
    assert size == 381_800
    assert max(peaks) < 20_000  # the walk's own notes
    assert abs(peaks[1] - peaks[0]) < 1_000


class Operations(TorchDispatchMode):
    """Takes down what torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(not native.available(), reason="NumPy alone widens bfloat16 with torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_torch_makes_no_tensor_and_does_nothing_at_all(dtype: Any) -> None:
    gradients = {"w": torch.randn(5, 6).T.to(dtype), "b": torch.ones((), dtype=dtype).expand(3)}
    model = torch.nn.Linear(5, 6)
    mine = {"weight": torch.randn(6, 5).to(dtype), "bias": torch.randn(6).to(dtype)}
    for total, each in ((Accumulator(), gradients), (Accumulator(model), mine)):
        total.add(each)
        with Operations() as first:
            torch.zeros(1)
        assert first.names  # it looks
        with Operations() as seen:
            total.add(each, 3)
        # Beside other threads (of pytest-xdist) the memory is held by a second handle, which is no tensor of its own.
        assert set(seen.names) <= {"aten.detach.default"}
        assert total.batches == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_on_jax_devices_are_given_away_to_the_new_ones(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_local_jax", lambda array: False)
    gradient = jnp.asarray(drawn(50, 40)).astype(dtype)
    total = total_of({"w": gradient})
    (kept,) = total.sums().values()
    old = [array for array in (kept.total, kept.lost) if array is not None]
    assert len(old) == (1 if dtype == "float32" else 2)
    places = [array.unsafe_buffer_pointer() for array in old]
    total.add({"w": gradient})
    assert all(array.is_deleted() for array in old)
    assert [array.unsafe_buffer_pointer() for array in (kept.total, kept.lost) if array is not None] == places
    assert not gradient.is_deleted()


def test_compiled_for_jax_devices_an_addition_needs_no_room_for_arrays() -> None:
    many = [jnp.zeros((300, 200)), jnp.zeros(100_000)]
    size = sum(array.nbytes for array in many)
    memory = jax_sums._add.lower(many, [None, None], many, jnp.asarray(1.0)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 50


# --- what is given stays as it is ---


def lent() -> dict[str, Any]:
    """Gradients that must not be written: those of two parameters in one, constants, views, empty and sparse ones."""
    shared = drawn(6, 4)
    one = torch.tensor(shared)
    frozen = drawn(3)
    frozen.setflags(write=False)
    return {
        "one": shared,
        "same": shared,
        "row": shared[1],
        "broadcast": np.broadcast_to(np.float32(2.0), (3, 2)),
        "readonly": frozen,
        "backwards": shared[::-2, ::-1],
        "transposed": shared.T,
        "torch": one,
        "torch again": one,
        "expanded": torch.tensor(3.0).expand(2, 3),
        "sparse": torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.ones(3, 2), (4, 2), check_invariants=True),
        "column": one.T[:, ::2],
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "JAX": (x := jnp.asarray(shared)),
        "JAX again": x,
        "empty": np.zeros((0, 3), np.float32),
    }


def as_bytes(array: Any) -> bytes:
    return plain(array).values.tobytes()


def test_gradients_stay_bit_by_bit_and_may_share_memory() -> None:
    given_, total = lent(), Accumulator()
    before = {name: as_bytes(array) for name, array in given_.items()}
    for weight in (2, 3, 0.5):
        total.add(given_, weight)
    found = total.sum()
    assert {name: as_bytes(array) for name, array in given_.items()} == before
    for name, array in given_.items():
        close(found[name], 5.5 * plain(array).values)
    kept = [each.total for each in total.sums().values() if math.prod(each.total.shape)]
    places = {array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data for array in kept}
    assert len(places) == len(kept) == len(given_) - 1


@pytest.mark.parametrize("make_room", [np.array, torch.tensor])
def test_a_gradient_buffer_may_be_used_again(make_room: Any) -> None:
    buffer, total = make_room([1.0, 2.0]), Accumulator()
    total.add({"w": buffer, "v": buffer})
    buffer[:] = 10.0
    assert total.sum()["w"].tolist() == [1.0, 2.0]
    total.add({"w": buffer, "v": None})
    buffer[:] = 0.0
    assert (total.sum()["w"].tolist(), total.sum()["v"].tolist()) == ([11.0, 12.0], [1.0, 2.0])


def test_results_do_not_share_memory_with_the_sums(make: Callable[[Any], Any]) -> None:
    total = total_of({"w": make(np.ones(2, np.float32))})
    if make is not jnp.asarray:
        total.sum()["w"][:] = 7.0
        total.mean()["w"][:] = 7.0
    assert total.sum()["w"].tolist() == [1.0, 1.0]


def test_gradients_on_torch_devices_may_be_of_any_layout_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_home", lambda gradient: "torch device")
    given_ = {name: array for name, array in lent().items() if isinstance(array, torch.Tensor)}
    before, total = {name: as_bytes(array) for name, array in given_.items()}, Accumulator()
    for _ in range(2):
        total.add(given_, 2)
    assert {name: as_bytes(array) for name, array in given_.items()} == before
    for name, array in total.sum().items():
        assert as_bytes(array / 4) == before[name]


def test_norms_on_torch_devices_neither_overflow_nor_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_home", lambda gradient: "torch device")
    total = Accumulator()
    for size in (1e30, 1e-30, 0.0, INF, NAN):
        total.add({"w": torch.full((4,), size)})
    norms = {batch.index: batch.norm for batch in total.worst}
    assert [norms[i] for i in range(4)] == pytest.approx([2e30, 2e-30, 0.0, INF], rel=1e-6)
    assert math.isnan(norms[4])


# --- precision ---


def tiny_gradients(count: int, dtype: str) -> Any:
    """Gradients around 1e-3 of many magnitudes, whose sum in float32 is rounded at each step."""
    values = 1e-3 * np.exp(2 * np.random.default_rng(0).normal(size=(count, 3)))
    return values.astype(getattr(ml_dtypes, dtype, dtype))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("NumPy", "float16"), ("torch", "bfloat16"), ("torch", "float16"), ("JAX", "bfloat16")]
)
def test_thousands_of_narrow_gradients_add_up_right(kind: str, dtype: str) -> None:
    values = tiny_gradients(5000, dtype)
    parts: Any = values
    if kind == "torch":
        parts = torch.tensor(values.astype(np.float32)).to(getattr(torch, dtype)).unbind()
    elif kind == "JAX":
        parts = jax.device_put(list(values))
    found = numpy_of(total_of(*([each] for each in parts)).sum()[0])
    assert found.dtype == np.float32
    exact = values.astype(np.float64).sum(0)
    np.testing.assert_allclose(found, exact, rtol=1.2e-7)
    naive = np.zeros(3, np.float32)
    for each in values:
        naive += each.astype(np.float32)
    assert np.abs(naive / exact - 1).max() > 5e-7  # float32 alone is worse


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_gradients_add_up_right_wherever_they_are(dtype: str, place: str) -> None:
    values = tiny_gradients(400, dtype)
    parts: Any = values
    if place == "torch device":
        parts = torch.tensor(values.astype(np.float32)).to(getattr(torch, dtype)).unbind()
    elif place == "JAX device":
        parts = jax.device_put(list(values))
    total = total_of(*([each] for each in parts))
    (kept,) = total.sums().values()
    exact = values.astype(np.float64).sum(0)
    np.testing.assert_allclose(numpy_of(total.sum()[0]), exact, rtol=1.2e-7)
    both = numpy_of(kept.total).astype(np.float64) + numpy_of(kept.lost)
    np.testing.assert_allclose(both, exact, rtol=1e-8)


@pytest.mark.parametrize("kind", ["NumPy", "torch"])
def test_gradients_may_become_wider_and_narrower(kind: str) -> None:
    third, total = 1 / 3, Accumulator()
    exact, widths = 0.0, []
    for dtype in ("float16", "float32", "float64", "float16", "float32"):
        value = np.full(2, third).astype(dtype)
        exact += float(value[0])
        total.add({"w": value if kind == "NumPy" else torch.tensor(value)})
        widths.append(str(numpy_of(total.sum()["w"]).dtype))
    assert widths == ["float32", "float32", "float64", "float64", "float64"]
    np.testing.assert_allclose(numpy_of(total.sum()["w"]), exact, rtol=1e-7)
    assert list(total.counts.values()) == [5]


def test_gradients_may_come_from_another_framework_later() -> None:
    total = Accumulator()
    for make_one in MAKERS.values():
        total.add({"w": make_one(np.ones(2, np.float32))})
    assert total.sum()["w"].tolist() == [3.0, 3.0]


def test_a_sum_that_overflows_is_infinite_and_stays_so(place: str) -> None:
    total, make_one = Accumulator(), made_at(place)
    for value in (3e38, 3e38, 1.0):
        total.add({"w": make_one(np.float32([value, 1.0]))})
    assert numpy_of(total.sum()["w"]).tolist() == [INF, 3.0]


# --- shapes ---


@pytest.mark.parametrize("with_model", [False, True])
def test_a_gradient_of_another_shape_is_named_with_both_shapes(with_model: bool, make: Callable[[Any], Any]) -> None:
    first = {"fc": {"w": make(np.ones((2, 3), np.float32)), "b": make(np.ones(1, np.float32))}}
    total = Accumulator(first if with_model else None)
    total.add(first)
    with pytest.raises(ShapeError, match=r"fc\.w.*\(3, 2\).*\(2, 3\)") as caught:
        total.add({"fc": {"w": make(np.ones((3, 2), np.float32)), "b": make(np.ones(1, np.float32))}})
    assert str(caught.value.path) == "fc.w"
    assert total.batches == 1
    assert total.sum()["fc"]["b"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"a": {"x": 1.0}}, {"a": [2.0]}, "a: .*dict of 1.*list of 1"),
        ({"a": {"x": 1.0}}, {"a": 2.0}, "a: .*dict of 1.*an array"),
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.0, 3.0]}, "a: .*list of 2.*list of 3"),
        ([1.0], {"a": 1.0}, "the root"),
    ],
)
def test_other_containers_at_one_place_are_refused(one: Any, other: Any, where: str) -> None:
    total = total_of(one)
    with pytest.raises(ShapeError, match=where):
        total.add(other)
    assert total.batches == 1
    assert total.mean() == one


# --- merging ---


WEIGHTS = st.sampled_from([0.0, 1.0, 2.0, 5.0, 32.0])
VALUES = st.one_of(st.none(), st.integers(-8, 8))
BATCHES = st.lists(st.tuples(WEIGHTS, VALUES, VALUES), min_size=1, max_size=12)


def tree_of(a: int | None, b: int | None) -> Any:
    return {
        "a": None if a is None else np.full(3, float(a), np.float32),
        "in": [None if b is None else np.float16([b])],
    }


def shard(batches: list[Any]) -> Accumulator:
    total = Accumulator(worst=4)
    for weight, a, b in batches:
        total.add(tree_of(a, b), weight, loss=weight + 1)
    return total


def state_of(total: Accumulator) -> Any:
    """All that can be seen of an accumulator; small whole numbers, so that no sum is rounded."""
    values = {str(path): each.total.tolist() for path, each in total.sums().items()}
    squares = {str(path): (each.count, pytest.approx(each.square)) for path, each in total.sums().items()}
    return dict(sorted(values.items())), dict(sorted(squares.items())), total.weight, total.batches, total.worst


@given(BATCHES, st.data())
@settings(max_examples=60, deadline=None)
def test_merged_shards_are_all_batches_in_one(batches: list[Any], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batches)), max_size=3)))
    parts = [batches[i:j] for i, j in zip([0, *cuts], [*cuts, len(batches)], strict=True)]
    merged = Accumulator(worst=4)
    for part in parts:
        merged.merge(shard(part))
    assert state_of(merged) == state_of(shard(batches))
    right = shard(parts[-1])
    for part in reversed(parts[:-1]):
        left = shard(part)
        left.merge(right)
        right = left
    assert state_of(right) == state_of(shard(batches))


def test_merging_leaves_the_other_as_it_is_and_shares_no_memory() -> None:
    one, other = shard([(1.0, None, 2)]), shard([(2.0, 3, 4)])
    before = state_of(other)
    one.merge(other)
    one.add(tree_of(1, 1), 1.0)
    assert state_of(other) == before
    other.add(tree_of(5, 5), 1.0)
    assert one.sum()["a"].tolist() == [7.0, 7.0, 7.0]


def test_merging_keeps_what_roundings_lost() -> None:
    halves = [Accumulator(), Accumulator()]
    values = (1e-3 * (1 + 0.5 * np.random.default_rng(0).random(4000))).astype(np.float16)
    for i, value in enumerate(values):
        halves[i // 2000].add([np.full(1, value)])
    halves[0].merge(halves[1])
    np.testing.assert_allclose(halves[0].sum()[0], values.astype(np.float64).sum(), rtol=1e-7)


def test_merging_checks_shapes_and_itself() -> None:
    one = total_of({"a": np.ones(2)})
    with pytest.raises(ShapeError, match=r"a: .*\(2,\).*\(3,\)"):
        one.merge(total_of({"a": np.ones(3)}))
    with pytest.raises(ShapeError, match=r"a: "):
        one.merge(total_of({"a": [np.ones(3)]}))
    with pytest.raises(AccumulatorError, match="itself"):
        one.merge(one)
    assert (one.batches, one.sum()["a"].tolist()) == (1, [1.0, 1.0])


def test_merged_sums_are_of_the_gradients_framework(make: Callable[[Any], Any]) -> None:
    gradient = make(np.ones(2, np.float32))
    for total in (Accumulator(), total_of({"w": gradient})):
        total.merge(total_of({"w": gradient}))
        assert type(total.sum()["w"]) is type(gradient)


# --- the worst batches ---


def test_the_worst_batches_come_first_and_nan_before_all() -> None:
    total = Accumulator(worst=3)
    for i, size in enumerate((1.0, 5.0, NAN, 2.0, INF, 3.0)):
        total.add({"w": np.array([size, 0.0]), "v": np.array([0.0])}, weight=i + 1, loss=10.0 * i)
    assert [(batch.index, batch.weight, batch.loss) for batch in total.worst] == [
        (2, 3, 20.0),
        (4, 5, 40.0),
        (1, 2, 10.0),
    ]
    assert math.isnan(total.worst[0].norm)
    assert [batch.norm for batch in total.worst[1:]] == [INF, 5.0]


def test_the_norm_of_a_batch_is_of_its_mean_gradient_over_the_whole_model() -> None:
    total = Accumulator()
    total.add({"a": np.array([30.0]), "b": [np.array([40.0])]}, weight=10, loss_reduction="sum")
    total.add({"a": np.array([3.0]), "b": [np.array([4.0])]}, weight=10)
    assert [batch.norm for batch in total.worst] == pytest.approx([5.0, 5.0])
    assert total.worst[0] == Batch(0, total.worst[0].norm, 10.0, None)


def test_merged_batches_are_numbered_after_those_before() -> None:
    one, other = total_of({"w": 1.0}, {"w": 2.0}, worst=2), total_of({"w": 3.0}, {"w": 0.5}, worst=2)
    one.merge(other)
    assert [(batch.index, batch.norm) for batch in one.worst] == [(2, 3.0), (1, 2.0)]


# --- weights ---


def test_a_batch_of_weight_0_adds_nothing_even_if_it_is_nan() -> None:
    total = total_of({"w": np.array([2.0])})
    total.add({"w": np.array([NAN])}, weight=0)
    assert (total.mean()["w"].tolist(), total.batches, total.weight) == ([2.0], 2, 1.0)
    assert [batch.index for batch in total.worst] == [0]


@pytest.mark.parametrize("weight", [-1, NAN, INF, "many", None, np.ones(2), torch.ones(2)])
def test_a_weight_is_a_number_that_is_not_negative(weight: Any) -> None:
    total = Accumulator()
    with pytest.raises(AccumulatorError, match="weight"):
        total.add({"w": np.ones(1)}, weight=weight)
    assert total.batches == 0


@pytest.mark.parametrize("weight", [3, np.int64(3), torch.tensor(3), jnp.asarray(3.0)])
def test_weights_may_be_numbers_of_any_library(weight: Any) -> None:
    total = Accumulator()
    total.add({"w": np.ones(1)}, weight=weight)
    assert total.weight == 3.0


def test_nothing_to_average_says_so() -> None:
    with pytest.raises(AccumulatorError, match="no batch"):
        Accumulator().mean()
    with pytest.raises(AccumulatorError, match="no batch"):
        Accumulator().sum()
    total = Accumulator()
    total.add({"w": np.ones(1)}, weight=0)
    with pytest.raises(AccumulatorError, match="weight 0"):
        total.mean()
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        total.add({"w": np.ones(1)}, loss_reduction="max")


def test_traced_gradients_are_refused() -> None:
    total = Accumulator()

    @jax.jit
    def step(x: Any) -> Any:
        total.add({"w": x})
        return x

    with pytest.raises(AccumulatorError, match="traced"):
        step(jnp.ones(2))
    assert total.batches == 0


def test_generators_of_batches_need_no_list() -> None:
    def gradients() -> Iterator[Any]:
        buffer = np.empty(1)
        for value in range(5):
            buffer[0] = value
            yield {"w": buffer}

    assert total_of(*[]).batches == 0
    total = Accumulator()
    for each in gradients():
        total.add(each)
    assert total.mean()["w"].tolist() == [2.0]


# --- what is refused, is refused as a whole ---


def test_a_refused_gradient_leaves_no_trace() -> None:
    total = Accumulator()
    total.add({"a": np.ones(2)})
    for bad in (torch.ones(2, device="meta"), np.ones((2, 2))):
        with pytest.raises((cowalk.AccumulatorError, cowalk.ShapeError)):
            total.add({"new": np.ones(3), "a": bad})
    assert (total.batches, total.sum()["a"].tolist(), list(total.sum())) == (1, [1.0, 1.0], ["a"])


def test_a_tensor_without_memory_is_an_error() -> None:
    gradient = torch.ones(1000)
    gradient.untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError)):
        Accumulator().add({"w": gradient})
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(cowalk.AccumulatorError, match="is a fake one"):
        Accumulator().add({"w": fake})


def test_sums_of_a_model_and_sums_of_trees_merge_where_they_fit() -> None:
    of_model = Accumulator({"w": np.ones(2)})
    of_model.add({"w": np.ones(2)})
    of_tree = Accumulator()
    of_tree.merge(of_model)
    assert of_tree.sum()["w"].tolist() == [1.0, 1.0]
    for strange in ({"other": np.ones(2)}, {"w": np.ones(3)}):
        other = Accumulator()
        other.add(strange)
        with pytest.raises(cowalk.ShapeError):
            of_model.merge(other)
    assert (of_model.batches, of_model.sum()["w"].tolist()) == (1, [1.0, 1.0])


@pytest.mark.parametrize("number", [np.float32(3), np.float16(3), np.float64(3), 3.0, np.longdouble(3)])
def test_numbers_are_gradients_too(number: Any) -> None:
    total = Accumulator()
    total.add({"w": number}, weight=2)
    assert float(total.sum()["w"]) == 6.0


# --- files ---


def test_a_saved_accumulator_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "sums.npz"
    total, both = Accumulator(), Accumulator()
    trees = [
        {"a": [np.ones(2, np.float16), None], 3: (np.float64(1),)},
        {"a": [np.ones(2, np.float16), np.ones(1)], 3: (2.0,)},
    ]
    for each in (total, both):
        each.add(trees[0], weight=3, loss=0.5)
    total.save(file)
    again = Accumulator.load(file)
    for each in (again, both):
        each.add(trees[1], weight=5)
    assert repr(again.mean()) == repr(both.mean())
    assert (again.weight, again.batches, again.worst, again.counts) == (8.0, 2, both.worst, both.counts)
    assert again.noise().to_dict() == both.noise().to_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["sums.npz"]


def test_a_file_that_holds_no_accumulator_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sums.npz"
    total = Accumulator()
    total.add({"w": np.ones(3)})
    total.save(file)
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        file.write_bytes(bytes(damaged[: rng.integers(1, len(whole) + 1)] if rng.random() < 0.5 else damaged))
        # A name or a count may be another one; but nothing else than these errors comes.
        with contextlib.suppress(SaveError, cowalk.AccumulatorError):
            Accumulator.load(file).sum()
    np.savez(file, w=np.ones(2))
    with pytest.raises(SaveError, match=r"sums\.npz holds no accumulator"):
        Accumulator.load(file)
    with pytest.raises(FileNotFoundError):
        Accumulator.load(tmp_path / "absent.npz")
    with pytest.raises(SaveError, match="is no file"):
        total.save(tmp_path)


def test_an_accumulator_saved_with_a_model_is_loaded_with_one_like_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    total = Accumulator(model)
    total.add(cowalk.gradient(lambda m: m(torch.ones(1, 2)).sum(), model), weight=2)
    total.save(tmp_path / "a.npz")
    again = Accumulator.load(tmp_path / "a.npz", torch.nn.Linear(2, 1))
    again.add(cowalk.gradient(lambda m: m(torch.ones(1, 2)).sum(), model), weight=2)
    assert again.mean()["weight"].tolist() == [[1.0, 1.0]]
    assert isinstance(again.mean()["weight"], torch.Tensor)
    with pytest.raises(SaveError, match="load it with one"):
        Accumulator.load(tmp_path / "a.npz")
    with pytest.raises(SaveError, match="another model"):
        Accumulator.load(tmp_path / "a.npz", torch.nn.Linear(3, 1))

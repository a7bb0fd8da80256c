"""Odd arrays: each has the right numbers, or one clear error that names where it is and what is the matter; no crash."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import cowalk
from cowalk import MeasureError, Row, isleaf, stats
from cowalk.measure import reference
from cowalk.measure.backend import Operands

ONES = np.ones(2)


def measured(parameter: Any, gradient: Any = None, **options: Any) -> Row:
    return stats({"w": parameter}, None if gradient is None else {"w": gradient}, **options)["w"]


def assert_norms(row: Row, parameter: float, gradient: float | None = None) -> None:
    assert row.value("parameter.norm") == pytest.approx(parameter)
    assert row.value("gradient.norm") == (None if gradient is None else pytest.approx(gradient))


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


class TestNumPy:
    def test_subclasses_of_arrays(self) -> None:
        class Mine(np.ndarray):
            def __array_finalize__(self, obj: Any) -> None:
                self.note = "mine"

        array = np.array([3.0, 4.0]).view(Mine)
        assert_norms(measured(array, array), 5.0, 5.0)
        assert_norms(measured(np.ones((2, 2)), np.ones((2, 2)).view(np.matrix)), 2.0, 2.0)

    def test_a_subclass_whose_arithmetic_is_different_is_measured_by_its_values(self) -> None:
        class Odd(np.ndarray):
            def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
                raise AssertionError("no arithmetic")

        array = np.array([3.0, 4.0]).view(Odd)
        assert_norms(measured(array, np.ones(2)), 5.0, 2**0.5)

    def test_masked_elements_do_not_count_or_are_an_error(self) -> None:
        array = np.ma.array([3.0, 100.0, 4.0], mask=[False, True, False])
        try:
            found = measured(array).value("parameter.norm")
        except MeasureError as error:
            assert "w: the parameter" in str(error)  # noqa: PT017
        else:
            assert found == pytest.approx(5.0)

    def test_memory_mapped_files(self, tmp_path: Path) -> None:
        file = tmp_path / "weights"
        np.array([3.0, 4.0], np.float32).tofile(file)
        mapped = np.memmap(file, np.float32, "r")
        assert_norms(measured(mapped, mapped), 5.0, 5.0)
        np.save(tmp_path / "w.npy", np.array([[3.0, 4.0]]))
        assert_norms(measured(np.load(tmp_path / "w.npy", mmap_mode="r")), 5.0)

    @pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", ">c8", ">c16"])
    def test_foreign_byte_orders(self, dtype: str) -> None:
        array = np.array([3.0, 0.0, 4.0], dtype)
        row = measured(array, array.astype(array.dtype.newbyteorder("=")))
        assert_norms(row, 5.0, 5.0)
        assert row.value("ratio.mean") == 1.0

    def test_extended_precision(self) -> None:
        long = np.array([3, 4], np.longdouble)
        assert_norms(measured(long, np.ones(2)), 5.0, 2**0.5)
        assert_norms(measured(np.ones(2), long), 2**0.5, 5.0)
        assert_norms(measured(torch.ones(2), long), 2**0.5, 5.0)
        assert_norms(measured(np.array([3 + 4j], np.clongdouble)), 5.0)

    @pytest.mark.skipif(np.finfo(np.longdouble).max == np.finfo(float).max, reason="no extended precision here")
    def test_what_does_not_fit_into_float64_is_infinite(self) -> None:
        row = measured(np.array([np.finfo(np.longdouble).max, 4]), np.ones(2))
        assert (row.value("parameter.posinf"), row.value("ratio.nonfinite")) == (1, 1)
        assert_norms(row, 4.0, 2**0.5)

    def test_a_complex_number_whose_modulus_overflows_has_no_quotient(self) -> None:
        row = measured(np.array([1.7e308 + 1.7e308j, 1.0]), np.ones(2))
        assert (row.value("ratio.nonfinite"), row.value("ratio.defined"), row.value("ratio.mean")) == (1, 1, 1.0)

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64", "bool"])
    def test_whole_numbers_where_they_are_asked_for(self, dtype: str) -> None:
        array = np.array([1, 0, 1], dtype)
        row = measured(array, array, where=isleaf)
        assert_norms(row, 2**0.5, 2**0.5)
        assert (row.dtype, row.value("parameter.zeros"), row.value("ratio.mean")) == (dtype, 1, 1.0)
        with pytest.raises(MeasureError, match="nothing to measure"):
            measured(array, array)

    def test_numbers_that_are_no_arrays(self) -> None:
        class Mine(float):
            pass

        for number in (3.0, 3, np.float64(3.0), np.float32(3.0), Mine(3.0), np.array(3.0)):
            row = measured(number, 2.0, where=isleaf)
            assert (row.shape, row.value("ratio.mean")) == ((), 1.5)

    @pytest.mark.parametrize(
        "array",
        [
            np.array([3, 4], "m8[s]"),
            np.array(["2020", "2021"], "M8[s]"),
            np.array([3, 4], object),
            np.array(["a", "b"]),
            np.zeros(2, [("a", "f4")]),
            np.array([1, 2], ml_dtypes.int4),
        ],
        ids=["durations", "dates", "objects", "texts", "records", "int4"],
    )
    def test_what_are_no_floating_numbers_are_named(self, array: Any) -> None:
        with pytest.raises(MeasureError, match=r"w: the gradient is an array of"):
            measured(ONES, array)
        with pytest.raises(MeasureError, match=r"w: the parameter is an array of"):
            measured(array, where=isleaf)

    def test_strange_layouts(self) -> None:
        base = np.arange(24.0).reshape(4, 6)
        views = [base.T, base[::-1, ::2], np.broadcast_to(base[:1], base.shape), base[1:1], base[0, 0], base[:, 3]]
        for view in views:
            norm = np.sqrt((view**2).sum())
            assert_norms(measured(view, np.array(view), where=isleaf), norm, norm)

    def test_the_fields_of_a_record_lie_unaligned(self) -> None:
        records = np.zeros(5, [("skip", "u1"), ("x", "<f4")])
        records["x"] = [1, 2, 0, 4, 5]
        row = measured(records["x"], np.array([2, 0, 0, 4, np.inf], ">f8"))
        found = [row.value(f"ratio.{name}") for name in ("defined", "x_by_zero", "zero_by_zero", "nonfinite", "mean")]
        assert found == [2, 1, 1, 1, 0.75]

    def test_read_only_arrays_are_read(self) -> None:
        array = np.array([3.0, 4.0])
        array.flags.writeable = False
        assert_norms(measured(array, array), 5.0, 5.0)

    def test_of_a_large_leaf_the_reference_makes_no_large_array(self) -> None:
        p, g = np.ones(4_000_000, np.float32), np.ones((2000, 2000), np.float32).T.reshape(-1)
        tracemalloc.start()
        try:
            reference.measure([Operands(p, g)])
            assert tracemalloc.get_traced_memory()[1] < 16 * 8 * reference.BLOCK
        finally:
            tracemalloc.stop()


@pytest.fixture
def prototypes() -> Iterator[None]:
    """torch warns of what it calls a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class TestTorch:
    def test_a_sparse_gradient_of_an_embedding(self) -> None:
        table = torch.nn.Embedding(5, 2, sparse=True)
        table(torch.tensor([1, 1, 3])).sum().backward()
        own = table.weight.grad
        assert own is not None
        for gradient in (own, own.coalesce()):
            (row,) = stats(table, {"weight": gradient})
            assert row.state == "partly zero"
            assert (row.value("gradient.n"), row.value("gradient.zeros"), row.value("gradient.zero_rows")) == (10, 6, 3)
            assert (row.value("ratio.defined"), row.value("ratio.x_by_zero")) == (4, 6)
            assert row.value("gradient.norm") == pytest.approx(10**0.5)  # row 1 twice: 2, 2; row 3: 1, 1
        assert not own.is_coalesced()

    def test_adam_beside_a_sparse_gradient(self) -> None:
        table = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1, eps=1e-20)
        table(torch.tensor([1, 1, 3])).sum().backward()
        optimizer.step()
        (row,) = stats(table, cowalk.gradients_of(table), opt_state=optimizer)
        assert row.value("adam.rms") == pytest.approx((4 / 10) ** 0.5, rel=1e-5)
        assert row.value("adam.below_epsilon") == 6

    @pytest.mark.usefixtures("prototypes")
    def test_compressed_layouts(self) -> None:
        dense = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        for sparse in (dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((1, 1)), dense.to_mkldnn()):
            assert_norms(measured(torch.ones(2, 2), sparse), 2.0, 5.0)

    @pytest.mark.usefixtures("prototypes")
    def test_quantised_tensors_are_measured_by_the_numbers_they_stand_for(self) -> None:
        one = torch.quantize_per_tensor(torch.tensor([3.0, 4.0]), 0.5, 7, torch.qint8)
        scales, zeros = torch.tensor([0.5, 1.0]), torch.tensor([0, 3])
        each = torch.quantize_per_channel(torch.tensor([[3.0], [4.0]]), scales, zeros, 0, torch.quint8)
        assert_norms(measured(one, torch.ones(2), where=isleaf), 5.0, 2**0.5)
        assert_norms(measured(torch.ones(2, 1), each), 2**0.5, 5.0)

    def test_meta_tensors_have_a_state_and_no_values(self) -> None:
        meta = torch.ones(2, device="meta")
        for parameter, gradient in ((meta, torch.ones(2)), (torch.ones(2), meta), (meta, meta)):
            row = measured(parameter, gradient)
            assert (row.state, row.shape, row.parameter, row.gradient) == ("meta", (2,), None, None)
        with pytest.raises(MeasureError, match="shape"):
            measured(meta, torch.ones(3))

    def test_uninitialised_parameters_have_a_state_whatever_stands_beside_them(self) -> None:
        row = measured(torch.nn.LazyLinear(4).weight, torch.ones(3))
        assert (row.state, row.shape, row.gradient) == ("uninitialised", None, None)

    def test_an_uninitialised_gradient_is_an_error_or_a_state(self) -> None:
        try:
            row = measured(torch.ones(3), torch.nn.LazyLinear(4).weight)
        except MeasureError as error:
            assert "w: the gradient" in str(error)  # noqa: PT017
        else:
            assert row.state == "uninitialised"

    def test_fake_tensors_have_no_values(self) -> None:
        fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
        with fake_tensor.FakeTensorMode():
            fake = torch.ones(2)
            with pytest.raises(MeasureError, match="w: the parameter is a tracer, which has no values"):
                measured(fake, fake)
        with pytest.raises(MeasureError, match="w: the gradient is a tracer, which has no values"):
            measured(torch.ones(2), fake)

    def test_tensors_inside_of_a_transformation_have_no_values(self) -> None:
        def loss(w: Any) -> Any:
            measured(w, w)
            return w.sum()

        for transformed in (torch.func.grad(loss), torch.func.vmap(loss), torch.func.functionalize(loss)):
            with pytest.raises(MeasureError, match="w: the parameter is a tracer, which has no values"):
                transformed(torch.ones(2, 2))

    def test_what_torch_traces_is_not_sent_to_jax(self) -> None:
        def loss(w: Any) -> Any:
            measured(w)
            return w.sum()

        with pytest.raises(MeasureError) as caught:
            torch.func.grad(loss)(torch.ones(2))
        assert "jax" not in str(caught.value)

    @pytest.mark.usefixtures("prototypes")
    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
    def test_nested_tensors_are_named(self, layout: Any) -> None:
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        with pytest.raises(MeasureError, match="w: the parameter is a nested tensor"):
            measured(nested)
        with pytest.raises(MeasureError, match="w: the gradient is a nested tensor"):
            measured(torch.ones(2), nested)

    def test_subclasses_that_hold_their_own_values(self) -> None:
        class Mine(torch.Tensor):
            pass

        mine = torch.tensor([3.0, 4.0]).as_subclass(Mine)
        assert_norms(measured(mine, mine), 5.0, 5.0)
        assert_norms(measured(torch.nn.Parameter(mine), mine), 5.0, 5.0)
        assert_norms(measured(torch.nn.Buffer(torch.tensor([3.0, 4.0]))), 5.0)

    def test_subclasses_that_wrap_another_tensor_are_never_read_as_empty(self) -> None:
        try:
            row = measured(Wrapper(torch.tensor([3.0, 4.0])), torch.ones(2))
        except MeasureError as error:
            assert "w: the parameter" in str(error)  # noqa: PT017
        else:
            assert_norms(row, 5.0, 2**0.5)

    def test_a_tensor_whose_storage_was_freed_is_an_error(self) -> None:
        freed = torch.ones(2)
        freed.untyped_storage().resize_(0)  # as FSDP does
        with pytest.raises(MeasureError, match="w: the parameter"):
            measured(freed, torch.ones(2))

    def test_conjugated_and_negated_views(self) -> None:
        z = torch.tensor([3 + 4j, 1j], dtype=torch.complex64)
        negative = z.conj().imag
        assert negative.is_neg()
        assert_norms(measured(z.conj(), z.conj()), 26**0.5, 26**0.5)
        row = measured(negative, negative)
        assert_norms(row, 17**0.5, 17**0.5)
        assert (row.value("parameter.min"), row.value("parameter.max")) == (-4.0, -1.0)

    def test_layouts_and_history(self) -> None:
        p = torch.randn(6, 8, requires_grad=True)
        norm = p.norm().item()
        assert_norms(measured(p * 2, p.T.contiguous().T), 2 * norm, norm)
        assert_norms(measured(p.expand(3, 6, 8)), 3**0.5 * norm)
        assert_norms(measured(torch.tensor(3.0), torch.tensor(2.0)), 3.0, 2.0)
        assert_norms(measured(torch.empty(0, 4), torch.empty(0, 4)), 0.0, 0.0)
        with torch.inference_mode():
            inference = torch.tensor([3.0, 4.0])
            assert_norms(measured(inference, inference), 5.0, 5.0)
        assert_norms(measured(inference), 5.0)

    @pytest.mark.usefixtures("prototypes")
    def test_half_precision_complex_numbers(self) -> None:
        z = torch.tensor([3 + 4j]).to(torch.complex32)
        assert_norms(measured(z, z), 5.0, 5.0)

    @pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "uint16"])
    def test_whole_numbers_where_they_are_asked_for(self, dtype: str) -> None:
        whole = torch.tensor([1, 0, 1]).to(getattr(torch, dtype))
        try:
            row = measured(whole, torch.ones(3), where=isleaf)
        except MeasureError as error:
            assert "w: the parameter" in str(error)  # noqa: PT017
        else:
            assert_norms(row, 2**0.5, 3**0.5)

    @pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has no packed float4")
    def test_packed_numbers_are_named(self) -> None:
        packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        with pytest.raises(MeasureError, match="w: the gradient"):
            measured(torch.ones(2), packed)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, which does everything by another one."""

    inner: Any

    @staticmethod
    def __new__(cls: Any, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*(each.inner if isinstance(each, Wrapper) else each for each in args), **(kwargs or {}))
        return Wrapper(out) if isinstance(out, torch.Tensor) else out


DTENSORS = """
    import warnings
    import torch, torch.distributed as dist
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
    from cowalk import MeasureError, stats

    def placed(*values, placement):
        return DTensor.from_local(torch.tensor(values), mesh, [placement], run_check=False)

    def show(parameter, gradient):
        try:
            row = stats({"w": parameter}, {"w": gradient})["w"]
        except MeasureError as error:
            print(error.problems[0][0], error.problems[0][1])
        else:
            print(row.shape, round(row.value("parameter.norm"), 6), round(row.value("gradient.norm"), 6))
"""


class TestDTensor:
    def test_partial_sums_are_named(self) -> None:
        found = run(
            f"""{DTENSORS}
    show(torch.ones(2), placed(3.0, 4.0, placement=Partial()))
    dist.destroy_process_group()
            """
        )
        assert found.startswith("w the gradient is a DTensor with partial sums")

    def test_replicated_and_sharded_ones_are_measured_or_named(self) -> None:
        found = run(
            f"""{DTENSORS}
    for placement in (Replicate(), Shard(0)):
        show(placed(3.0, 4.0, placement=placement), placed(0.0, 1.0, placement=placement))
        show(torch.nn.Parameter(placed(3.0, 4.0, placement=placement)), torch.tensor([0.0, 1.0]))
    dist.destroy_process_group()
            """
        ).splitlines()
        assert len(found) == 4
        assert all(line == "(2,) 5.0 1.0" or line.startswith("w the parameter is a DTensor") for line in found)


SHARDED = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from cowalk import stats

    mesh = Mesh(jax.devices(), "x")
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["x"], []))
    values = jnp.arange(8.0).reshape(4, 2)
    cut, copied, elsewhere = (jax.device_put(values, place) for place in (rows, everywhere, jax.devices()[2]))

    def show(parameter, gradient):
        row = stats({"w": parameter}, {"w": gradient}, histograms=True)["w"]
        print(row.n, round(row.value("parameter.norm") ** 2, 2), round(row.value("gradient.norm") ** 2, 2),
              row.value("ratio.mean"), row.value("ratio.zero_by_zero"))
"""


class TestJaxOnFourDevices:
    def run(self, lines: str) -> list[str]:
        program = textwrap.dedent(SHARDED) + textwrap.dedent(lines)
        return run(program, XLA_FLAGS="--xla_force_host_platform_device_count=4").splitlines()

    def test_an_array_cut_into_shards_is_one_array(self) -> None:
        found = self.run(
            """
            show(cut, cut)
            show(cut, copied)
            show(copied, elsewhere)
            show(elsewhere, cut)
            show(values, cut)
            show(cut, np.asarray(values))
            """
        )
        assert found == ["8 140.0 140.0 1.0 1"] * 6

    def test_beside_arrays_of_numpy_and_torch(self) -> None:
        found = self.run(
            """
            import torch
            plain = np.array(values)
            for other in (plain, torch.tensor(plain)):
                show(cut, other)
                show(other, cut)
            """
        )
        assert found == ["8 140.0 140.0 1.0 1"] * 4


PURE = """
    import jax.numpy as jnp, numpy as np, torch
    import cowalk
    from cowalk.tree import engine

    assert engine.NATIVE is None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 2, dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1, 2, 1])).square().sum().backward()
    tree = {
        "torch": model,
        "jax": jnp.arange(3.0),
        "numpy": [np.array([1.0, np.nan]), np.ones(300_000, np.float16), np.array([2.0, 1.0], ">f4")],
    }
    grads = cowalk.fmapstructure(lambda x: 2 * x, tree["numpy"])
    table = cowalk.stats(
        tree,
        {"torch": cowalk.gradients_of(model), "jax": None, "numpy": grads},
        cowalk.fmapstructure(lambda x: 0 * x.detach() if isinstance(x, torch.Tensor) else 0 * x, tree),
        histograms=True,
    )
    print(table.state_counts)
    for row in table:
        print(row.path, row.state, *(f"{row.value(c) or 0:.4g}" for c in ("parameter.norm", "gradient.norm", "ratio.mean")))
    print(f"{table.total.value('parameter.norm'):.4g}", table.total.n)
"""


def test_without_the_extension_the_reference_measures_the_same() -> None:
    native = run(PURE.replace("assert engine.NATIVE is None", ""))
    assert run(PURE, COWALK_PURE="1") == native
    assert "numpy.1 " in native


def test_a_jax_array_of_another_layout_is_read_as_it_means() -> None:
    jax = pytest.importorskip("jax")
    layout = pytest.importorskip("jax.experimental.layout")
    plain = jax.numpy.arange(6.0).reshape(2, 3)
    other = jax.device_put(plain, layout.Format(layout.Layout(major_to_minor=(1, 0)), plain.sharding))
    assert measured(other, plain).value("ratio.cosine") == pytest.approx(1.0)


def test_a_tensor_that_gets_new_memory_in_another_thread_is_read_in_its_old_one() -> None:
    found = run(
        """
        import threading, torch, cowalk
        p = torch.nn.Parameter(torch.ones(3_000_000))
        done = threading.Event()

        def renew():
            while not done.is_set():
                p.data = torch.ones(3_000_000)

        thread = threading.Thread(target=renew)
        thread.start()
        print({cowalk.stats({"p": p})["p"].parameter.mean for _ in range(100)})
        done.set()
        thread.join()
        """
    )
    assert found == "{1.0}\n"

"""Tensors measured where they are: the same numbers as the reference, in few operations, in little memory."""

import math
import sys
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from cowalk.measure import reference, torch_device  # noqa: E402
from cowalk.measure.backend import SECTIONS, SPANS, AdamSettings, Operands  # noqa: E402
from cowalk.measure.moments import Adam, Moments, Pair  # noqa: E402

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.uint8, torch.bool),
]
ADAM = AdamSettings(1e-8, 2.0, 3.0, lr=1e-3)


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class Operations(TorchDispatchMode):
    """Counts the operations that are no views, and the bytes that they have alive at once."""

    def __init__(self):
        super().__init__()
        self.count = self.alive = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.count += not func.is_view
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.known:
                    self.known[storage._cdata] = storage.nbytes()
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self.freed, storage._cdata)
        return found

    def freed(self, key):
        self.alive -= self.known.pop(key)


def numbers(shape, dtype, seed, spread=3.0):
    """Numbers of many magnitudes, with zeros and all that is not finite."""
    source = torch.Generator().manual_seed(seed)
    x, y, chosen = (torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(3))
    x = x * torch.exp(spread * y)
    for low, value in ((1.0, 0.0), (1.5, math.nan), (2.0, math.inf), (2.5, -math.inf)):
        x = torch.where(chosen > low, value, x)
    if dtype.is_complex:
        return torch.complex(x, x.flip(0) if x.ndim else x).to(dtype)
    if not dtype.is_floating_point:
        x = x.nan_to_num(0.0, 0.0, 0.0).clamp(0, 100)
    return (x.float() if dtype.itemsize == 1 else x).to(dtype)


def leaves(dtypes, shapes, spread=3.0):
    return [
        Operands(*(numbers(shape, dtype, 10 * line + i, spread) for i, dtype in enumerate(dtypes)), ADAM)
        for line, shape in enumerate(shapes)
    ]


def assert_same(given, histograms=True):
    expected, powers = reference.measure(given, histograms)
    found, found_powers = torch_device.measure(given, histograms)
    assert found_powers == powers
    for line, other in zip(found, expected, strict=True):
        for name, section in SECTIONS.items():
            if np.isnan(other[SPANS[name]]).all():
                assert np.isnan(line[SPANS[name]]).all(), name
                continue
            one, right = section.of_columns(line[SPANS[name]]), section.of_columns(other[SPANS[name]])
            for field in section.names():
                value, wanted = getattr(one, field), getattr(right, field)
                if isinstance(wanted, int) or wanted is None:
                    assert value == wanted, (name, field)
                else:
                    scale = right.mean_abs if field == "mean" else 1.0 if field == "cosine" else abs(wanted)
                    assert value == pytest.approx(wanted, rel=1e-9, abs=1e-9 * scale), (name, field)


def moments(tensor):
    return Moments.of_columns(torch_device.measure([Operands(tensor)])[0][0, SPANS["parameter"]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_measured_as_the_reference_does(dtype):
    assert_same(leaves([dtype] * 5, [(30, 7), (5, 4, 3), (17,), (), (1,)]))


@pytest.mark.parametrize("seed", range(len(DTYPES)))
def test_the_arrays_of_a_leaf_may_have_different_dtypes(seed):
    mixed = [DTYPES[(seed + 5 * i) % len(DTYPES)] for i in range(5)]
    assert_same(leaves(mixed, [(30, 7), (17,), ()]))


def test_leaves_of_any_length_are_measured_together():
    assert_same(leaves([torch.float32] * 5, [(length,) for length in (0, 1, 2, 3, 5, 300, 1000, 7)]))


@pytest.mark.parametrize("absent", [(1,), (2,), (3,), (4,), (1, 2), (1, 2, 3, 4)])
def test_what_is_absent_leaves_its_sections_unknown(absent):
    for leaf in (leaves([torch.float32] * 5, [(5, 3)]), leaves([torch.float32] * 5, [(0,)])):
        assert_same([leaf[0]._replace(**{Operands._fields[i]: None for i in absent})])
        assert_same([leaf[0]._replace(adam=None)])


def test_no_leaves_give_no_lines():
    assert torch_device.measure([], histograms=True)[0].shape[0] == 0


def test_empty_leaves_have_counts_and_no_values():
    assert_same(leaves([torch.float32] * 5, [(0,), (3, 0), (0, 3)]))


@pytest.mark.parametrize("volume", [1, 7, 64])
def test_leaves_that_are_cut_are_measured_whole(monkeypatch, volume):
    monkeypatch.setattr(torch_device, "VOLUME", volume)
    assert_same(leaves([torch.float32] * 5, [(9, 11), (1,), (5, 2, 3), (64,)]), histograms=volume > 1)


def test_layouts_do_not_matter():
    x = numbers((12, 10), torch.float32, 1)
    z = numbers((12, 10), torch.complex64, 2)
    given = [
        Operands(x.t(), x.t().clone()),
        Operands(x[:, ::2], x[:, 1::2]),
        Operands(x[:1].expand(12, 10), x),
        Operands(x.as_strided((8, 8), (1, 2)), x[:8, :8]),
        Operands(z.conj().t(), z.t()),
        Operands(z.conj().imag, z.real),
    ]
    assert_same(given)
    assert_same([Operands(x.to_sparse(), x)])


def test_gradients_are_not_recorded_and_parameters_not_changed():
    x = torch.randn(4, 5, requires_grad=True)
    before = x.detach().clone()
    assert_same([Operands(x, x * 2)])
    assert x.grad is None
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_huge_offset_does_not_hide_the_spread(dtype):
    x = (1e4 + torch.tensor([0.0, 1.0, 2.0] * 700, dtype=torch.float64)).to(dtype)
    found = moments(x * 1000)
    assert found.std == pytest.approx(1000 * math.sqrt(2 / 3), rel=1e-9)
    assert found.mean == pytest.approx(10_001_000, rel=1e-15)


def test_equal_values_have_their_value_as_mean_and_no_spread(monkeypatch):
    monkeypatch.setattr(torch_device, "VOLUME", 1000)
    found = moments(torch.full((12345,), 0.1, dtype=torch.float64))
    assert (found.mean, found.std, found.mean_abs) == (0.1, 0.0, 0.1)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-44])
def test_float32_neither_overflows_nor_vanishes(scale):
    x = torch.tensor([3.0, -4.0]) * scale
    assert moments(x).norm == pytest.approx(5 * scale, rel=0.1 if scale < 1e-40 else 1e-6)
    assert_same([Operands(x, x.flip(0), x * 2, x, abs(x), AdamSettings(0.0, lr=1.0))])


@pytest.mark.parametrize("scale", [1e300, 1e-300, 1e-323, 4e307])
def test_float64_neither_overflows_nor_vanishes(scale):
    x = torch.tensor([3.0, -4.0, 1.0, 0.5], dtype=torch.float64) * scale
    assert_same([Operands(x, x.flip(0), torch.ones_like(x))])


def test_numbers_of_both_ends_of_float64_stand_side_by_side():
    x = torch.tensor([1e200, 1e-200, 1e-200], dtype=torch.float64)
    y = torch.tensor([math.nan, 1.0, 1e300], dtype=torch.float64)
    assert_same([Operands(x, y), Operands(y, x)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_subnormal_numbers_are_counted_even_where_they_are_flushed_to_zero(dtype):
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor([tiny, -tiny, tiny / 2, -tiny / 4, 0.0, -0.0]).to(dtype)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    try:
        found = moments(x)
    finally:
        torch.set_flush_denormal(False)
    assert (found.subnormals, found.zeros) == (2, 2)


def test_rows_of_zeros_are_counted(monkeypatch):
    x = torch.ones(6, 4, 5)
    x[1] = 0
    x[4] = 0
    x[5, 1:] = 0
    for volume in (1 << 20, 40, 7):
        monkeypatch.setattr(torch_device, "VOLUME", volume)
        assert moments(x).zero_rows == 2
        assert moments(x.to(torch.float8_e5m2)).zero_rows == 2
        assert moments(x.transpose(1, 2)).zero_rows == 2
        assert moments(torch.zeros(6, 4)).zero_rows == 6
        assert moments(torch.zeros(6)).zero_rows == 0


def test_what_was_never_updated_has_a_quotient_of_nothing_in_adam():
    zero, one = torch.zeros(3), torch.tensor([0.0, 1.0, 2.0])
    assert_same([Operands(one, zero, None, zero, zero, AdamSettings(0.0, lr=0.1))])
    found = torch_device.measure([Operands(one, one, None, one, zero, AdamSettings(0.0, lr=0.1))])[0]
    assert Adam.of_columns(found[0, SPANS["adam"]]).rms == math.inf


def test_each_leaf_has_its_own_settings():
    x = [torch.randn(5) for _ in range(3)]
    assert_same(
        [
            Operands(each, each, each, each, each**2, AdamSettings(1e-3, 1.0 + i, 2.0 + i, 10.0**-i))
            for i, each in enumerate(x)
        ]
    )


def test_means_of_quotients_do_not_overflow():
    x, y = (
        torch.full((4,), 1e200, dtype=torch.float64),
        torch.tensor([1e-108, 1e-108, 1.0, 1e-200], dtype=torch.float64),
    )
    found = Pair.of_columns(torch_device.measure([Operands(x, y)])[0][0, SPANS["ratio"]])
    assert (found.defined, found.nonfinite) == (3, 1)
    assert found.mean == pytest.approx(1e308 / 3 * 2)


def test_the_number_of_operations_does_not_grow_with_the_number_of_leaves():
    given = leaves([torch.float32] * 5, [(20 + line % 5,) for line in range(20)])
    counts: list[int] = []
    for many in (1, 20):
        with Operations() as operations:
            torch_device.measure(given * many)
        counts.append(operations.count)
    assert counts[0] == counts[1] < 400


def test_nothing_is_read_before_the_end():
    class Reads(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    given = leaves([torch.float32, torch.bfloat16] + [torch.float32] * 3, [(20, 3), (7,)])
    with Reads() as reads:
        torch_device.measure(given)
    waiting = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::item"}
    assert not waiting & set(reads.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_large_leaf_takes_little_memory(dtype, transposed):
    x = torch.ones(1024, 1024, dtype=dtype)
    x = x.t() if transposed else x
    with Operations() as operations:
        torch_device.measure([Operands(x, x, x, x, x, ADAM)])
    assert operations.peak <= 64 * 2**20


@pytest.mark.gpu
@pytest.mark.skipif(sys.platform == "darwin" or not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_cuda_the_numbers_are_the_same(dtype):
    given = leaves([dtype] * 5, [(30, 7), (5, 4, 3), (17,), (), (0,), (1500, 1000)])
    there = [Operands(*(each.cuda() for each in leaf[:5]), leaf.adam) for leaf in given]
    here, powers = torch_device.measure(given, histograms=True)  # with histograms, torch's operations serve on both
    found, found_powers = torch_device.measure(there, histograms=True)
    assert found_powers == powers
    np.testing.assert_allclose(found, here, rtol=1e-9, atol=1e-12)
    assert_same(there)

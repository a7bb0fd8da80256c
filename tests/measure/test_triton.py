"""Triton's kernel gives the numbers of the reference: on CUDA, or without a GPU under Triton's interpreter."""

import math
import os
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip(
    "triton", reason="Triton is not installed (it comes with torch's CUDA builds, or by `pip install triton`)"
)

from cowalk.measure import reference, torch_device, triton_kernel  # noqa: E402
from cowalk.measure.backend import SECTIONS, SPANS, AdamSettings, Operands  # noqa: E402
from cowalk.measure.moments import Moments  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to interpret the kernel")
    ),
]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    monkeypatch.setattr(torch_device, "_fails", False)
    if request.param == "cpu":
        monkeypatch.setattr(triton_kernel, "TILE", 64)  # several tiles in small arrays
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy
        yield request.param


def numbers(shape, dtype, seed):
    """Numbers of many magnitudes, with zeros, subnormals and all that is not finite."""
    source = torch.Generator().manual_seed(seed)
    x, y, chosen = (torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(3))
    x = x * torch.exp(3 * y)
    for low, value in ((1.0, 0.0), (1.5, math.nan), (2.0, math.inf), (2.5, -math.inf)):
        x = torch.where(chosen > low, value, x)
    return torch.where(chosen < -2.0, torch.finfo(dtype).smallest_normal / 4, x).to(dtype)


def assert_same(given, device):
    there = [Operands(*(None if each is None else each.to(device) for each in leaf[:5]), leaf.adam) for leaf in given]
    assert all(triton_kernel.serves([each for each in leaf[:5] if each is not None]) for leaf in there)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it does not run
        found = torch_device.measure(there)[0]
    for line, other in zip(found, reference.measure(given)[0], strict=True):
        for name, section in SECTIONS.items():
            if np.isnan(other[SPANS[name]]).all():
                assert np.isnan(line[SPANS[name]]).all(), name
                continue
            one, right = section.of_columns(line[SPANS[name]]), section.of_columns(other[SPANS[name]])
            for field in section.names():
                value, wanted = getattr(one, field), getattr(right, field)
                if isinstance(wanted, int) or wanted is None or field in ("min", "max"):
                    assert value == wanted, (name, field)
                else:
                    scale = right.mean_abs if field == "mean" else 1.0 if field == "cosine" else abs(wanted)
                    assert value == pytest.approx(wanted, rel=1e-9, abs=1e-9 * scale), (name, field)


@pytest.mark.parametrize("first", TYPES, ids=str)
@pytest.mark.parametrize("second", TYPES, ids=str)
def test_all_sections_are_the_same(device, first, second):
    shapes = [(20, 30), (), (0,), (1,), (7,), (64,)]
    given = [
        Operands(
            *(numbers(shape, (first, second)[i % 2], 9 * line + i) for i in range(5)), AdamSettings(1e-8, 2, 3, 0.1)
        )
        for line, shape in enumerate(shapes)
    ]
    assert_same(given, device)


@pytest.mark.parametrize("absent", [(1,), (2,), (3,), (4,), (1, 2, 3, 4)])
def test_what_is_absent_leaves_its_sections_unknown(device, absent):
    leaf = Operands(*(numbers((100,), torch.float32, i) for i in range(5)), AdamSettings(0.0, lr=0.1))
    assert_same([leaf._replace(**{Operands._fields[i]: None for i in absent})], device)


def test_large_leaves_are_shared_out_among_programs(device, monkeypatch):
    monkeypatch.setattr(triton_kernel, "PROGRAMS", 3)
    monkeypatch.setattr(triton_kernel, "TILE", 64)
    assert_same(
        [Operands(numbers((999,), torch.float32, i), numbers((999,), torch.float32, 7)) for i in range(2)], device
    )


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-44])
def test_it_neither_overflows_nor_vanishes(device, scale):
    x = torch.tensor([3.0, -4.0] * 50) * scale
    assert_same([Operands(x, x.flip(0))], device)


def test_a_huge_offset_does_not_hide_the_spread_and_equal_values_have_none(device):
    x = torch.tensor([1e6, 1e6 + 1, 1e6 + 2] * 70)
    found = torch_device.measure([Operands(x.to(device)), Operands(torch.full((999,), 0.1).to(device))])[0]
    offset, equal = (Moments.of_columns(line[SPANS["parameter"]]) for line in found)
    assert offset.std == pytest.approx(math.sqrt(2 / 3), rel=1e-9)
    assert (equal.mean, equal.std) == (float(torch.tensor(0.1)), 0.0)


def test_where_it_does_not_run_torch_serves(device, monkeypatch):
    def broken(*arguments):
        raise triton_kernel.UnavailableError("no compiler")

    monkeypatch.setattr(triton_kernel, "_launch", broken)
    x = torch.tensor([3.0, 4.0]).to(device)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        found = torch_device.measure([Operands(x)])[0]
    assert Moments.of_columns(found[0, SPANS["parameter"]]).mean == 3.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        torch_device.measure([Operands(x)])


def test_other_layouts_and_dtypes_are_left_to_torch(device):
    x = torch.ones(3, 4, device=device)
    assert triton_kernel.serves([x, x.half()])
    assert not triton_kernel.serves([x.t()])
    assert not triton_kernel.serves([x, x.double()])

"""The quotients of two arrays, against loops in Python numbers."""

import math
import tracemalloc
from fractions import Fraction

import hypothesis.extra.numpy as npst
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowalk.measure import Ratio, blocks
from cowalk.measure.quotients import ratio_of

REAL = [
    np.float16,
    np.float32,
    np.float64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    np.int32,
]
COMPLEX = [np.complex64, np.complex128]
EDGES = [0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e-45, 1e-30, 1e30, 1.7e308, -1.7e308, 448.0]

numbers = st.sampled_from(EDGES) | st.floats(width=64)


@st.composite
def arrays(draw, shape, dtype):
    values = draw(npst.arrays(np.float64, shape, elements=numbers))
    if np.dtype(dtype).kind == "c":
        parts = values, draw(npst.arrays(np.float64, shape, elements=numbers))
        values = np.stack(parts, axis=-1).view(np.complex128)[..., 0]
    with np.errstate(all="ignore"):
        if np.dtype(dtype).kind == "i":
            values = np.nan_to_num(values, posinf=3, neginf=-3).clip(-99, 99)
        return values.astype(dtype)


@st.composite
def pairs(draw, dtypes):
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    return tuple(draw(arrays(shape, draw(st.sampled_from(dtypes)))) for _ in range(2))


def oracle(p, g):
    """The same, one element after the other, sums exact."""
    kind = complex if "c" in (np.asarray(p).dtype.kind, np.asarray(g).dtype.kind) else float
    found, counts = [], dict.fromkeys(("x_by_zero", "zero_by_zero", "nonfinite"), 0)
    for x, y in zip(np.ravel(p), np.ravel(g), strict=True):
        x, y = kind(x), kind(y)
        if kind is complex:
            x, y = math.hypot(x.real, x.imag), math.hypot(y.real, y.imag)
        if not (math.isfinite(x) and math.isfinite(y)):
            counts["nonfinite"] += 1
        elif y == 0:
            counts["zero_by_zero" if x == 0 else "x_by_zero"] += 1
        elif abs(Fraction(x) / Fraction(y)) > Fraction(1.7976931348623157e308) * (1 + Fraction(1, 2**54)):
            counts["nonfinite"] += 1
        else:
            found.append(x / y)
    return found, counts


def check(ratio, p, g):
    found, counts = oracle(p, g)
    assert {name: getattr(ratio, name) for name in counts} == counts
    assert (ratio.n, ratio.defined) == (np.size(p), len(found))
    if not found:
        assert (ratio.mean, ratio.min, ratio.max, ratio.mean_abs) == (None, None, None, None)
        return
    loose = np.asarray(p).dtype.kind == "c" or np.asarray(g).dtype.kind == "c"  # two hypots may differ in the last bit
    for name, exact in (("min", min(found)), ("max", max(found))):
        assert getattr(ratio, name) == (pytest.approx(exact, rel=1e-14) if loose else exact)
    magnitude = sum(abs(Fraction(q)) for q in found) / len(found)
    slack = magnitude * Fraction(1e-12) + Fraction(1e-322)
    assert abs(Fraction(ratio.mean) - sum(map(Fraction, found)) / len(found)) <= slack
    assert abs(Fraction(ratio.mean_abs) - magnitude) <= slack


@pytest.fixture(params=[3, blocks.BLOCK])
def block(request, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", request.param)


class TestNumPy:
    @given(pairs(REAL))
    def test_real_numbers_of_every_kind(self, pair):
        check(ratio_of(*pair), *pair)

    @given(pairs(COMPLEX + REAL))
    def test_complex_numbers_count_by_modulus(self, pair):
        check(ratio_of(*pair), *pair)

    @given(pairs([np.float32, np.float64]))
    @settings(max_examples=50)
    def test_cut_into_small_blocks_it_is_the_same(self, pair):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "BLOCK", 3)
            check(ratio_of(*pair), *pair)

    @pytest.mark.usefixtures("block")
    @pytest.mark.parametrize(
        "view",
        [
            lambda a: a.T,
            lambda a: a[::-1, ::2],
            lambda a: np.broadcast_to(a[:1], a.shape),
            lambda a: np.lib.stride_tricks.sliding_window_view(a.ravel(), 4),
            lambda a: np.asfortranarray(a),
            lambda a: a[1:1],
            lambda a: a[0, 0],
        ],
        ids=["transposed", "reversed", "broadcast", "overlapping", "fortran", "empty", "scalar"],
    )
    def test_layouts(self, view):
        rng = np.random.default_rng(0)
        p, g = view(rng.normal(size=(6, 8))), view(rng.normal(size=(6, 8)))
        check(ratio_of(p, np.array(g)), p, g)

    def test_unaligned_and_byte_swapped_arrays(self):
        records = np.zeros(5, dtype=[("skip", "u1"), ("x", "<f4")])
        records["x"] = [1, 2, 0, 4, 5]
        swapped = np.array([2, 0, 0, 4, np.inf], dtype=">f8")
        check(ratio_of(records["x"], swapped), records["x"], swapped.astype(float))

    def test_means_of_numbers_whose_sum_overflows(self):
        p = np.full(7, np.finfo(float).max)
        ratio = ratio_of(p, np.ones(7))
        assert ratio.mean == ratio.mean_abs == np.finfo(float).max

    def test_what_does_not_fit_into_float64_is_not_finite(self):
        huge = np.array([1.7e308 + 1.7e308j, 1.0])
        assert ratio_of(huge, np.ones(2)) == Ratio(
            n=2, defined=1, nonfinite=1, mean=1.0, min=1.0, max=1.0, mean_abs=1.0
        )
        assert ratio_of(np.array([np.finfo(np.longdouble).max]), np.ones(1)).nonfinite == 1
        assert ratio_of(np.array([1e300]), np.array([1e-300])).nonfinite == 1

    def test_plain_numbers(self):
        assert ratio_of(3.0, 2).mean == 1.5

    def test_a_large_leaf_makes_no_large_array(self):
        p, g = np.ones(4_000_000, np.float32), np.ones((2000, 2000), np.float32).T.reshape(-1)
        tracemalloc.start()
        try:
            ratio_of(p, g)
            assert tracemalloc.get_traced_memory()[1] < 12 * 8 * blocks.BLOCK
        finally:
            tracemalloc.stop()

    def test_the_arrays_are_left_as_they_are(self):
        p, g = np.array([1.0, np.nan]), np.array([0.0, 2.0])
        p.flags.writeable = g.flags.writeable = False
        ratio_of(p, g)


@pytest.mark.usefixtures("block")
class TestTorch:
    @pytest.fixture(autouse=True, params=["cpu", "device"])
    def place(self, request, monkeypatch):
        """What runs on a device runs here on the CPU."""
        if request.param == "device":
            monkeypatch.setattr(blocks, "_on_device", blocks.is_tensor)

    DTYPES = (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "int32",
    )

    @pytest.mark.parametrize("gradient", DTYPES)
    @pytest.mark.parametrize("parameter", DTYPES)
    def test_every_pair_of_dtypes(self, parameter, gradient):
        torch = pytest.importorskip("torch")
        values = torch.tensor([[0.0, 1, -2, 3, 0], [5, 0, 1.5, -1, 2]], dtype=torch.float64)
        p = values.to(getattr(torch, parameter))
        g = values.flip(0).T.contiguous().T.to(getattr(torch, gradient))
        wide = [x.to(torch.complex128 if x.is_complex() else torch.float64).numpy() for x in (p, g)]
        check(ratio_of(p, g), *wide)

    @pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
    def test_edges(self, dtype):
        torch = pytest.importorskip("torch")
        edges = torch.tensor(EDGES, dtype=torch.float64).to(getattr(torch, dtype))
        p, g = edges[:, None].expand(-1, len(edges)), edges[None].expand(len(edges), -1)
        wide = [x.to(torch.complex128 if x.is_complex() else torch.float64).numpy() for x in (p, g)]
        check(ratio_of(p, g), *wide)

    def test_layouts_and_history(self):
        torch = pytest.importorskip("torch")
        p = torch.randn(6, 8, requires_grad=True)
        p.expand(3, 6, 8).sum().backward()
        check(ratio_of(p, p.grad), p.detach().numpy(), p.grad.numpy())
        check(ratio_of(p.T, p.grad.T), p.detach().numpy().T, p.grad.numpy().T)
        z = torch.randn(5, dtype=torch.complex64)
        check(ratio_of(z.conj(), z.conj()), z.numpy(), z.numpy())
        negative = z.to(torch.complex128).conj().imag
        assert negative.is_neg()
        check(ratio_of(negative, negative), negative.resolve_neg().numpy(), negative.resolve_neg().numpy())
        check(ratio_of(torch.tensor(3.0), torch.tensor(2.0)), np.float64(3), np.float64(2))
        check(ratio_of(torch.empty(0, 4), torch.empty(0, 4)), np.empty(0), np.empty(0))

    def test_a_sparse_gradient_has_zeros_where_it_has_no_values(self):
        torch = pytest.importorskip("torch")
        table = torch.nn.Embedding(5, 2, sparse=True)
        table(torch.tensor([1, 1, 3])).sum().backward()
        ratio = ratio_of(table.weight, table.weight.grad)
        assert (ratio.n, ratio.defined, ratio.x_by_zero) == (10, 4, 6)

    def test_beside_a_numpy_gradient(self):
        torch = pytest.importorskip("torch")
        p = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
        check(ratio_of(p, np.array([2.0, 1.0])), np.array([1.0, 2.0]), np.array([2.0, 1.0]))


class TestJax:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
    def test_arrays(self, dtype):
        jnp = pytest.importorskip("jax.numpy")
        p, g = jnp.array([0, 1, 2, -3, jnp.inf], dtype), jnp.array([0, 0, 4, 2, 1], dtype)
        wide = complex if dtype == "complex64" else float
        check(ratio_of(p, g), np.asarray(p).astype(wide), np.asarray(g).astype(wide))


class TestMerging:
    @given(pairs([np.float64, np.float32]), st.integers(0, 99))
    def test_two_parts_make_the_whole(self, pair, at):
        p, g = map(np.ravel, pair)
        check(ratio_of(p[:at], g[:at]).merge(ratio_of(p[at:], g[at:])), p, g)

    def test_nothing_is_neutral(self):
        some = ratio_of(np.array([1.0, 2.0]), np.array([0.0, 4.0]))
        assert some.merge(Ratio()) == Ratio().merge(some) == some

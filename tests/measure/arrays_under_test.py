"""Arrays of every dtype, container, layout, size and value for the tests of back ends, and when a matrix is right.

`CASES` is a fixed list, `leaves()` generates more. A back end's test measures them and hands the matrix to `assert_agrees`.
`converted` moves a leaf to where the back end's arrays live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.extra.numpy as npst
import jax
import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cowalk.measure import reference
from cowalk.measure.arrays import plain
from cowalk.measure.backend import SECTIONS, SPANS, WIDTH, AdamSettings, Histogram, Histograms, Matrix, Operands
from cowalk.measure.moments import Adam, Moments

Values = NDArray[Any]

# --- dtypes: each form makes an array of one container and dtype ---

NARROW = sorted(name for name in dir(ml_dtypes) if name.startswith(("bfloat", "float")))
TORCH_NARROW = sorted(name for name in dir(torch) if name.startswith("float8"))
JAX_NARROW = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
WIDE = ["float16", "float32", "float64", "complex64", "complex128"]
FORMS: dict[str, tuple[str, Any]] = {
    **{f"numpy {name}": ("numpy", np.dtype(name)) for name in (*WIDE, ">f2", ">f4", ">f8", ">c8", "longdouble")},
    **{f"numpy {name}": ("numpy", np.dtype(getattr(ml_dtypes, name))) for name in NARROW},
    **{f"torch {name}": ("torch", getattr(torch, name)) for name in (*WIDE, "bfloat16", *TORCH_NARROW)},
    **{f"jax {name}": ("jax", np.dtype(name)) for name in WIDE},
    **{f"jax {name}": ("jax", np.dtype(getattr(ml_dtypes, name))) for name in JAX_NARROW},
}
"""What an array is made of, by name: the container and the dtype."""


def make(form: str, values: Values, layout: str = "contiguous") -> Any:
    """An array of a form, of these values as far as the dtype has them; some layouts repeat a part of them."""
    container, dtype = FORMS[form]
    values = np.asarray(values)
    is_complex = dtype.is_complex if container == "torch" else dtype.kind == "c"
    if is_complex and not np.iscomplexobj(values):
        both = np.empty(values.shape, np.complex128)
        both.real, both.imag = values, np.roll(values, 1)
        values = both
    if container == "torch":
        array = torch.from_numpy(values.copy()).to(dtype)
    else:
        with np.errstate(all="ignore"):
            array = values.astype(dtype)
    if container == "jax":
        with jax.enable_x64(True):
            return jax.numpy.asarray(array)
    return LAYOUTS[container][layout](array)


# --- layouts: the same shape in other strides ---


def _axes(array: Any) -> tuple[slice, ...]:
    return (slice(None, None, 2),) * array.ndim


def _stepped(array: Values) -> Values:
    wide = np.ones([2 * length for length in array.shape], array.dtype)
    wide[(*_axes(array), ...)] = array
    return wide[(*_axes(array), ...)]


def _unaligned(array: Values) -> Values:
    made = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes + 1), offset=1)
    made[...] = array
    return made


def _windows(array: Values) -> Values:
    cells = array.ravel().view(np.dtype(f"V{array.itemsize}"))  # NumPy does not stride all of ml_dtypes' floats itself
    return as_strided(cells, array.shape, (array.itemsize,) * array.ndim).view(array.dtype)


def _read_only(array: Values) -> Values:
    array.setflags(write=False)
    return array


def _torch_stepped(tensor: Any) -> Any:
    wide = torch.ones([2 * length for length in tensor.shape]).to(tensor.dtype)
    wide[(*_axes(tensor), ...)] = tensor
    return wide[(*_axes(tensor), ...)]


def _torch_unaligned(tensor: Any) -> Any:
    if not tensor.numel():
        return tensor
    memory = bytearray(tensor.numel() * tensor.element_size() + 1)
    made = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=1).reshape(tensor.shape)
    return made.copy_(tensor)


def _moved(tensor: Any) -> Any:
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1) if tensor.ndim > 1 else tensor


def _negated(tensor: Any) -> Any:
    if tensor.is_complex() or tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    negative = torch.complex(torch.zeros_like(tensor), tensor).conj().imag
    assert negative.is_neg()
    return negative


LAYOUTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "numpy": {
        "contiguous": lambda array: array,
        "read-only": _read_only,
        "transposed": lambda array: array.T.copy().T,
        "stepped": _stepped,
        "reversed": lambda array: np.flip(np.flip(array).copy()),
        "partly reversed": lambda array: array[::-1] if array.ndim else array,
        "expanded": lambda array: np.broadcast_to(array[:1], array.shape) if array.ndim and array.size else array,
        "expanded within": lambda array: (
            np.broadcast_to(array[..., :1], array.shape) if array.ndim and array.size else array
        ),
        "one value": lambda array: np.broadcast_to(array.ravel()[0], array.shape) if array.size else array,
        "windows": _windows,
        "unaligned": _unaligned,
    },
    "torch": {
        "contiguous": lambda tensor: tensor,
        "transposed": lambda tensor: (
            tensor.permute(list(range(tensor.ndim)[::-1])).contiguous().permute(list(range(tensor.ndim)[::-1]))
        ),
        "moved": _moved,
        "stepped": _torch_stepped,
        "expanded": lambda tensor: tensor[:1].expand(tensor.shape) if tensor.ndim and tensor.numel() else tensor,
        "windows": lambda tensor: tensor.as_strided(tensor.shape, (1,) * tensor.ndim),
        "offset": lambda tensor: torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[-tensor.numel() or 1 :].view(
            tensor.shape
        ),
        "unaligned": _torch_unaligned,
        "channels last": lambda tensor: (
            tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
        ),
        "conjugated": lambda tensor: tensor.conj(),
        "negated": _negated,
        "trainable": lambda tensor: torch.nn.Parameter(tensor),
    },
    "jax": {"contiguous": lambda array: array},
}
"""The layouts of each container, by name."""

# --- values ---

EDGES = [0.0, -0.0, 1.0, -1.0, 3.0, 0.1, 448.0, 6e-8, 1e-45, 5e-324, 1e-30, -1e30, 1e300, 1e-300]
NOT_FINITE = [math.nan, math.inf, -math.inf]
Rng = np.random.Generator


def _powers_of_two(rng: Rng, n: int) -> Values:
    """And their neighbours below in float32 and in float64: the borders of a histogram."""
    powers = rng.choice([-1.0, 1.0], n) * 2.0 ** rng.integers(-140, 120, n)
    return powers * rng.choice([1.0, 1 - 2.0**-24, 1 - 2.0**-53], n)


def _subnormals(rng: Rng, n: int) -> Values:
    """Of every dtype, on both sides of its smallest normal number."""
    exponents = rng.choice([-1074, -1023, -1022, -149, -127, -126, -133, -24, -15, -14, -9, -7, -6], n)
    return rng.choice([-1.0, 1.0], n) * rng.uniform(1, 2, n) * 2.0**exponents


VALUES: dict[str, Callable[[Rng, int], Values]] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "positive": lambda rng, n: rng.uniform(1, 100, n),
    "negative": lambda rng, n: -rng.uniform(1, 100, n),
    "NaN": lambda rng, n: np.full(n, np.nan),
    "zero": lambda rng, n: np.zeros(n),
    "-0.0": lambda rng, n: np.full(n, -0.0),
    "∞": lambda rng, n: rng.choice([np.inf, -np.inf], n),
    "not finite": lambda rng, n: rng.choice(NOT_FINITE, n),
    "partly not finite": lambda rng, n: np.where(rng.random(n) < 0.2, rng.choice(NOT_FINITE, n), rng.normal(size=n)),
    "half zeros": lambda rng, n: np.where(rng.random(n) < 0.5, rng.choice([0.0, -0.0], n), rng.normal(size=n)),
    "one finite": lambda rng, n: np.where(np.arange(n) == n // 2, -2.5, np.nan),
    "subnormal": _subnormals,
    "powers of two": _powers_of_two,
    "1e30": lambda rng, n: rng.normal(size=n) * 1e30,
    "1e-30": lambda rng, n: rng.normal(size=n) * 1e-30,
    "1e±30": lambda rng, n: rng.normal(size=n) * 10.0 ** rng.integers(-30, 31, n),
    "1e300": lambda rng, n: rng.normal(size=n) * 1e300,
    "1e-300": lambda rng, n: rng.normal(size=n) * 1e-300,
    "1e±300": lambda rng, n: rng.normal(size=n) * 10.0 ** rng.integers(-300, 301, n),
    "edges": lambda rng, n: rng.choice([*EDGES, *NOT_FINITE], n),
    "offset": lambda rng, n: 1e6 + rng.normal(size=n),
    "offset after NaN": lambda rng, n: np.where(np.arange(n) < 3, np.nan, rng.normal(size=n) - 1e6),
    "offset after zero": lambda rng, n: np.where(np.arange(n) < 1, 0.0, rng.normal(size=n) + 1e6),
    "all 0.1": lambda rng, n: np.full(n, 0.1),
    "all 3": lambda rng, n: np.full(n, 3.0),
    "cancelling": lambda rng, n: np.where(np.arange(n) % 2, -1e8, 1e8) + rng.normal(size=n),
    "growing": lambda rng, n: np.arange(n) * 0.25,
}
"""Kinds of values, by name."""

SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 1023, 1024, 1025, 4095, 4096]
LARGE_SIZES = [4097, 65537, 200003]
SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (1,),
    (0, 3),
    (3, 0),
    (1, 1),
    (5, 7),
    (33, 17),
    (2, 3, 5),
    (2, 3, 4, 5),
    (1, 300),
    (300, 1),
    (3, 97, 31),
    (2, 1, 3, 1, 2),
]
SETTINGS = [
    AdamSettings(1e-8),
    AdamSettings(1e-8, lr=1e-3),
    AdamSettings(1e-3, m_scale=10.0, v_scale=1000.0, lr=0.1),
    AdamSettings(0.0, lr=1.0),
]


def draws(kind: str, shape: tuple[int, ...] | int, seed: int = 0) -> Values:
    """Values of a kind as float64; the same for the same seed."""
    rng = np.random.default_rng([seed, *kind.encode()])
    with np.errstate(over="ignore"):
        return np.reshape(VALUES[kind](rng, np.prod(shape, dtype=int)), shape)


def leaf_of(forms: str | Sequence[str], shape: tuple[int, ...] | int, kinds: Sequence[str], seed: int = 0) -> Operands:
    """A leaf with all operands, of forms and kinds of values in turn."""
    forms = [forms] if isinstance(forms, str) else forms
    arrays = [make(forms[i % len(forms)], draws(kinds[i % len(kinds)], shape, seed + i)) for i in range(4)]
    squares = np.square(np.clip(draws(kinds[1 % len(kinds)], shape, seed + 1), -1e150, 1e150))
    return Operands(*arrays[:3], m=arrays[3], v=make(forms[-1], squares), adam=SETTINGS[seed % len(SETTINGS)])


# --- the fixed list ---


def _of_form(form: str) -> list[Operands]:
    """Every kind of values beside itself or another."""
    kinds = list(VALUES)
    return [leaf_of(form, (9, 37), [kind, kinds[i * 4 % len(kinds)]], seed=i) for i, kind in enumerate(kinds)]


def _of_all_values(form: str) -> list[Operands]:
    made = [[make(form, draws(kind, 70, seed)) for kind in VALUES] for seed in (0, 1)]
    return [Operands(one, other) for one in made[0] for other in made[1]]


def _of_sizes(form: str, sizes: Sequence[int]) -> list[Operands]:
    kinds = ["partly not finite", "half zeros", "normal"]
    return [leaf_of(form, size, ["normal"], seed=1) for size in sizes] + [
        leaf_of(form, size, kinds, seed=size) for size in sizes
    ]


def _of_shapes(form: str) -> list[Operands]:
    return [leaf_of(form, shape, ["half zeros", "normal"]) for shape in SHAPES]


def _of_layouts(form: str) -> list[Operands]:
    """Every layout beside every other, in shapes that blocks do and do not divide."""
    layouts = LAYOUTS[FORMS[form][0]]
    found: list[Operands] = []
    for i, one in enumerate(layouts):
        for other in layouts:
            for shape in SHAPES if one == other else [(2, 3, 4, 5)]:
                arrays = [
                    make(form, draws("half zeros", shape, seed), layout) for seed, layout in enumerate((one, other))
                ]
                m, v = (make(form, abs(draws("normal", shape, seed)), other) for seed in (2, 3))
                found.append(Operands(arrays[0], arrays[1], arrays[1], m, v, SETTINGS[i % len(SETTINGS)]))
    return found


def _of_zero_rows() -> list[Operands]:
    found: list[Operands] = []
    for shape in [(1, 1), (40, 3), (3, 40), (7, 1000), (5, 300, 2), (600, 500), (2, 150_000)]:
        values = draws("normal", shape)
        values[::2] = 0.0
        values[:, 0] = -0.0
        gradient = draws("half zeros", shape)
        gradient[-1] = 0.0
        gradient[0, -1, ...] = np.nan
        found += [
            Operands(make(form, values), make(form, gradient), make(form, values, "transposed"))
            for form in ("numpy float32", "torch bfloat16")
        ]
    return found


def _of_offsets() -> list[Operands]:
    found: list[Operands] = []
    for size in (100, 4097, 200003):
        kinds = ["offset", "offset after NaN", "offset after zero", "all 0.1", "cancelling"]
        found += [leaf_of(form, size, kinds) for form in ("numpy float32", "torch float64")]
        found += [leaf_of("torch bfloat16", size, ["all 3", "growing", "all 0.1"])]
    return found


def _of_mixed_forms() -> list[Operands]:
    names = ["torch float32", "numpy bfloat16", "jax float16", "numpy >f4", "torch float64", "jax float8_e4m3fn"]
    names += ["torch complex64", "numpy float32", "numpy longdouble", "torch bfloat16", "numpy complex128"]
    return [
        leaf_of([one, other], (11, 13), ["partly not finite", "half zeros", "normal"])
        for one in names
        for other in names
    ]


def _of_absent_operands() -> list[Operands]:
    full = leaf_of("torch float32", (5, 7), ["normal"], seed=1)
    names = ["gradient", "update", "m", "v", "adam"]
    return [
        full._replace(**{name: None for i, name in enumerate(names) if mask >> i & 1})
        for mask in range(2 ** len(names))
    ]


def _of_adam() -> list[Operands]:
    """Where v stands against ε²; v that no Adam has; moments wider than the parameter; steps of every size."""
    found: list[Operands] = []
    border = 2.0**-20 * np.array([0.0, 1.0, 1 - 2.0**-20, 1 + 2.0**-20, 4.0, 0.25, np.nan, -1.0, np.inf, -0.0])
    # Beside ε = 1e-8, on both sides of what ε rounds to in float32.
    tenths = np.tile([float(np.float32(1e-16)), 1.00001e-16, 0.99999e-16, 0.99999999e-16, 0.0], 2)
    gradient = np.array([0.0, 1.0, -2.0, 1e-3, np.nan, 1e-8, 3.0, 1.0, 1.0, 5.0])
    for form in ("numpy float32", "torch float64", "jax float32"):
        for v in (border, tenths):
            for settings in (AdamSettings(2.0**-10, lr=0.5), AdamSettings(1e-8, 2.0, 4.0), *SETTINGS):
                arrays = [make(form, each) for each in (gradient, gradient, gradient[::-1].copy(), v)]
                found.append(Operands(arrays[0], arrays[1], None, arrays[2], arrays[3], settings))
                found.append(Operands(arrays[0], arrays[1], None, None, arrays[3], settings))
    for kind in ("normal", "1e30", "1e-30", "1e300", "1e-300", "zero", "edges", "subnormal"):
        found += [leaf_of("torch float64", 300, [kind, other], seed=1) for other in ("normal", kind, "half zeros")]
        found.append(leaf_of(["torch bfloat16", "torch bfloat16", "torch float32"], 5000, [kind, "normal"], seed=1))
    return found


def _of_limits() -> list[Operands]:
    """The largest numbers of float64: their norm may not fit, their mean and spread do."""
    top = float(np.finfo(np.float64).max)
    rows = [
        [top],
        [top, -top],
        [top, top, top],
        [top, 1.0, 5e-324],
        [5e-324, -5e-324],
        [5e-324] * 3,
        [top / 2, -top / 2],
    ]
    return [Operands(np.array(row), np.array(row)[::-1]) for row in rows]


CASES: dict[str, Callable[[], list[Operands]]] = {
    **{f"values in {form}": lambda form=form: _of_form(form) for form in FORMS},
    **{
        f"all pairs of values in {form}": lambda form=form: _of_all_values(form)
        for form in ("torch float32", "numpy float64")
    },
    **{
        f"sizes of {form}": lambda form=form: _of_sizes(form, SIZES)
        for form in (
            "torch float32",
            "numpy float64",
            "torch bfloat16",
            "numpy float16",
            "jax float8_e5m2",
            "torch complex64",
        )
    },
    **{f"large {form}": lambda form=form: _of_sizes(form, LARGE_SIZES) for form in ("torch float32", "jax bfloat16")},
    **{
        f"shapes of {form}": lambda form=form: _of_shapes(form)
        for form in ("torch float32", "numpy float16", "jax float32")
    },
    **{
        f"layouts of {form}": lambda form=form: _of_layouts(form)
        for form in (
            "torch float32",
            "torch bfloat16",
            "torch complex64",
            "numpy float32",
            "numpy float64",
            "numpy bfloat16",
        )
    },
    "rows of zeros": _of_zero_rows,
    "spreads beside an offset": _of_offsets,
    "mixed containers and dtypes": _of_mixed_forms,
    "absent operands": _of_absent_operands,
    "Adam": _of_adam,
    "limits of float64": _of_limits,
    "no leaves": list,
}
"""Lists of leaves to measure in one go, by name, made when they are called."""


def converted(leaf: Operands, function: Callable[[Any], Any]) -> Operands:
    """The leaf with a function applied to each of its arrays."""
    p, g, u, m, v = (None if array is None else function(array) for array in leaf[:5])
    return Operands(p, g, u, m, v, leaf.adam)


# --- generated ---

numbers = st.sampled_from([*EDGES, *NOT_FINITE]) | st.floats(-1e304, 1e304) | st.floats(-4, 4, width=16)
shapes = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...], forms: Sequence[str] = tuple(FORMS)) -> Any:
    """An array of a form and a layout, its elements from a few numbers in random order."""
    form = draw(st.sampled_from(forms))
    pool = draw(st.lists(numbers, min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    layout = draw(st.sampled_from(list(LAYOUTS[FORMS[form][0]])))
    return make(form, rng.choice(pool, shape), layout)


@st.composite
def leaves(draw: st.DrawFn, forms: Sequence[str] = tuple(FORMS)) -> Operands:
    """A leaf of any shape whose operands may differ in form and layout, or be absent."""
    shape = draw(shapes)
    operand = arrays(shape, forms)
    gradient, update, m, v = (draw(st.none() | operand) for _ in range(4))
    return Operands(draw(operand), gradient, update, m, v, draw(st.none() | st.sampled_from(SETTINGS)))


# --- agreement ---


NAMES = ("parameter", "gradient", "update")
Expected = tuple[Matrix, Histograms]


def expectation(leaves: Sequence[Operands]) -> Expected:
    """What the reference finds."""
    with np.errstate(all="ignore"):
        matrix, histograms = reference.measure(leaves, True)
    assert histograms is not None
    return matrix, histograms


def assert_agrees(
    found: Matrix, leaves: Sequence[Operands], histograms: Histograms | None = None, expected: Expected | None = None
) -> None:
    """Fails unless a matrix (and histograms) is what the reference finds: counts alike, the rest within `allowance`."""
    right, powers = expected or expectation(leaves)
    assert found.dtype == np.float64
    assert found.shape == (len(leaves), WIDTH)
    wrong = list(_differences(found, right, leaves))
    if histograms is not None:
        assert len(histograms) == len(leaves)
        for i, (one, other, leaf) in enumerate(zip(histograms, powers, leaves, strict=True)):
            for name, mine, theirs, array in zip(NAMES, one, other, leaf[:3], strict=True):
                if mine != theirs and not _within_rounding(mine, array):
                    wrong.append(f"leaf {i}, histogram of the {name}: {mine}, expected {theirs}")
    if wrong:
        raise AssertionError("\n".join([f"{len(wrong)} statistics are wrong:", *wrong[:20]]))


def _differences(found: Matrix, expected: Matrix, leaves: Sequence[Operands]) -> Iterator[str]:
    for i, leaf in enumerate(leaves):
        is_complex = any(_is_complex(array) for array in leaf[:5] if array is not None)
        for section, kind in SECTIONS.items():
            right = dict(zip(kind.names(), expected[i, SPANS[section]].tolist(), strict=True))
            for name, value in zip(right, found[i, SPANS[section]].tolist(), strict=True):
                if not agrees(value, right[name], allowance(kind, name, right, is_complex)):
                    arrays = "; ".join(described(array) for array in leaf[:5] if array is not None)
                    yield f"leaf {i}, {section}.{name}: {value!r}, expected {right[name]!r} ({arrays})"


def _is_complex(array: Any) -> bool:
    return array.dtype.is_complex if isinstance(array, torch.Tensor) else array.dtype.kind == "c"


def _within_rounding(found: Histogram | None, array: Any) -> bool:
    """Whether moduli that are rounded, up or down, have such a histogram."""
    if found is None or not _is_complex(array):
        return False
    moduli = reference.modulus(plain(array).values.astype(np.complex128))
    moduli = moduli[np.isfinite(moduli) & (moduli != 0)]
    powers = np.repeat(np.arange(len(found.counts)) + found.low, found.counts)
    least, most = (np.frexp(np.sort(moduli) * factor)[1] - 1 for factor in (1 - 1e-15, 1 + 1e-15))
    return len(powers) == len(moduli) and bool(((least <= powers) & (powers <= most)).all())


def described(array: Any) -> str:
    """What an array is, without its elements."""
    return f"{type(array).__module__.split('.')[0]} {array.dtype} {tuple(array.shape)}"


def agrees(value: float, right: float, allowed: float) -> bool:
    """Whether a value is right; NaN stands for what does not exist."""
    if math.isnan(value) or math.isnan(right):
        return math.isnan(value) and math.isnan(right)
    return value == right or abs(value - right) <= allowed


def allowance(kind: Any, name: str, right: dict[str, float], is_complex: bool = False) -> float:
    """How far a statistic may lie from the right one: this is the promise of the measuring room."""
    value = abs(right[name])
    if math.isnan(value):
        return 0.0
    if kind is Adam:
        if name not in ("rms", "step"):
            return 0.0
        # The squares of what lies beyond 1e±150 do not fit into float64.
        return math.inf if value > 1e150 else max(1e-6 * value, 1e-150)
    if name in ("mean", "mean_abs"):
        return 1e-6 * right["mean_abs"] + 1e-322
    if name == "std":
        return 1e-6 * value + 1e-14 * right["mean_abs"] + 1e-322  # right beside an offset of 1e6, too
    if name in ("min", "max"):
        if kind is Moments:
            return 1e-15 * value + 1e-323 if is_complex else 0.0  # a modulus is rounded
        return 1e-6 * value + 1e-322
    if name in ("norm_x", "norm_y"):
        return 1e-6 * value + 1e-322
    if name == "cosine":
        # A subnormal modulus is rounded as coarsely as by its half.
        return 2.0 if is_complex and min(right["norm_x"], right["norm_y"]) < 1e-300 else 1e-6
    return 0.0

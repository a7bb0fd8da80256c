"""What is measured, of JAX arrays: traceable, in float32 where float64 is off, and as one array whatever the number of leaves.

Numbers are taken apart into mantissa and exponent by their bits, because a float32 holds neither the quotient 1e30/1e-30 nor
a square of it, and because XLA may flush subnormal numbers to zero. Mantissas and exponents are then combined freely; sums
are of values divided by the power of two of the largest, and carry their rounding error along in a second float. That error
grows with the number of elements n as n·2⁻⁴⁸ of the sum of magnitudes at worst, and a quotient, a product or a square is
rounded once, to 2⁻²⁴. Arrays of float64 (where JAX has it) are computed in float64.

A leaf is read in up to three rounds: what counts and exponents say, sums, and squares of distances from the mean. One round
is one reduction over all axes of the arrays as they are, so nothing is reshaped, and of a sharded array only partial results
travel. (XLA runs many separate reductions of one array on a CPU a hundred times slower than one reduction of many.)

A value leaves the device as (high, low, exponent): (high + low)·2^exponent. So counts are exact up to 2⁴⁰, and the smallest
subnormal number survives. What needs no array, as dividing a sum by a count, is done by `decode` in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from math import frexp, prod
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cowalk.measure.arrays import tiny
from cowalk.measure.backend import (
    SECTIONS,
    SPANS,
    WIDTH,
    AdamSettings,
    Histogram,
    Histograms,
    Matrix,
    Operands,
    empty_matrix,
)
from cowalk.measure.moments import Adam, Moments, Pair

Array = jax.Array
Encoded = tuple[Any, Any, Any]
"""(high, low, exponent)."""
Columns = dict[str, Encoded]

PARTS = 3
"""How many numbers encode one column."""
_MOST_COUNTED = 2**31 - 1
"""More elements than that are counted in pairs of floats, which hold integers up to 2⁴⁸."""
_NOTHING = -(1 << 14)
"""The exponent of zero: lower than that of any number, quotient or square."""
_OFFSET = 1 << 13
"""Added to an exponent, it makes it positive."""


class _Format(NamedTuple):
    """The format computed in: its words, and where the exponent is in them."""

    float_type: Any
    word_type: Any
    digits: int
    bias: int

    @property
    def fraction(self) -> int:
        return (1 << self.digits) - 1

    @property
    def field(self) -> int:
        return 2 * self.bias + 1

    def words(self, values: Array) -> Array:
        return lax.bitcast_convert_type(values, self.word_type)

    def floats(self, words: Array) -> Array:
        return lax.bitcast_convert_type(words, self.float_type)

    def exponents(self, words: Array) -> Array:
        return ((words >> self.digits) & self.field).astype(jnp.int32)

    def mantissas(self, words: Array) -> Array:
        """The numbers with their exponents set to zero."""
        sign_and_fraction = words & ~jnp.asarray(self.field << self.digits, self.word_type)
        return self.floats(sign_and_fraction | jnp.asarray(self.bias << self.digits, self.word_type))

    def power(self, exponents: Array) -> Array:
        """2^exponent, for exponents up to the bias; 0 instead of a subnormal number."""
        field = jnp.maximum(exponents + self.bias, 0).astype(self.word_type)
        return self.floats(field << self.digits)

    def array(self, value: Any) -> Array:
        return jnp.asarray(value, self.float_type)


_SINGLE = _Format(jnp.float32, jnp.uint32, 23, 127)
_DOUBLE = _Format(jnp.float64, jnp.uint64, 52, 1023)


class _Numbers(NamedTuple):
    """Numbers mantissa·2^exponent, with 1 <= |mantissa| < 2; zero is 0·2^_NOTHING, and so is what is NaN or infinite."""

    mantissa: Array
    exponent: Array
    nan: Array
    infinite: Array
    """+1 and −1 where the number is +∞ and −∞, else 0."""
    format: _Format

    @property
    def finite(self) -> Array:
        return ~self.nan & (self.infinite == 0)

    @property
    def zero(self) -> Array:
        return self.finite & (self.mantissa == 0)

    def __abs__(self) -> _Numbers:
        return self._replace(mantissa=abs(self.mantissa), infinite=abs(self.infinite))

    def over(self, exponent: Array) -> Array:
        """The numbers divided by 2^exponent, where that is no less than theirs."""
        return self.mantissa * self.format.power(self.exponent - exponent)

    def where(self, mask: Array) -> _Numbers:
        """Zero elsewhere."""
        return self._replace(
            mantissa=jnp.where(mask, self.mantissa, 0), exponent=jnp.where(mask, self.exponent, _NOTHING)
        )


class _Operand(NamedTuple):
    """One array: its numbers, as they are or as real and imaginary part, and the exponent of its smallest normal number."""

    real: _Numbers
    imaginary: _Numbers | None
    least_exponent: int | None

    @property
    def numbers(self) -> _Numbers:
        """The numbers themselves; of complex ones the moduli."""
        return self.real if self.imaginary is None else _modulus(self.real, self.imaginary)

    @property
    def finite(self) -> Array:
        return self.real.finite if self.imaginary is None else self.real.finite & self.imaginary.finite


def _format_of(arrays: Iterable[Any]) -> _Format:
    wide = any(each is not None and each.dtype in (jnp.float64, jnp.complex128) for each in arrays)
    return _DOUBLE if wide else _SINGLE


def _operand(array: Array, form: _Format) -> _Operand:
    dtype = np.dtype(array.dtype)
    smallest = tiny(dtype)
    least = frexp(smallest)[1] - 1 if smallest else None
    if dtype.kind == "c":
        return _Operand(_numbers(array.real, form), _numbers(array.imag, form), least)
    return _Operand(_numbers(array, form), None, least)


def _numbers(array: Array, form: _Format) -> _Numbers:
    single = array if array.dtype == jnp.float64 else lax.bitcast_convert_type(_single_words(array), jnp.float32)
    own = _DOUBLE if array.dtype == jnp.float64 else _SINGLE
    words = own.words(single)
    fraction, field = words & own.fraction, own.exponents(words)
    sign = words & ~jnp.asarray((1 << (own.digits + own.bias.bit_length() + 1)) - 1, own.word_type)
    # A subnormal number is an integer of that many least numbers. As a float, the integer is a normal number.
    integers = own.words(fraction.astype(own.float_type))
    normal = jnp.where(field == 0, sign | integers, words)
    exponent = own.exponents(normal) - own.bias
    exponent = jnp.where(field == 0, exponent + (1 - own.bias - own.digits), exponent)
    special, zero = field == own.field, (field | fraction.astype(jnp.int32)) == 0
    if own is _DOUBLE:
        zero = (field == 0) & (fraction == 0)
    infinite = jnp.where(special & (fraction == 0), jnp.where(sign == 0, 1, -1), 0)
    none = special | zero
    return _Numbers(
        mantissa=jnp.where(none, 0, own.mantissas(normal)).astype(form.float_type),
        exponent=jnp.where(none, _NOTHING, exponent),
        nan=special & (fraction != 0),
        infinite=infinite,
        format=form,
    )


def _single_words(array: Array) -> Array:
    """The words of float32 numbers, and of narrower ones widened; where those may be subnormal in float32, without a cast."""
    if array.dtype == jnp.float32:
        return lax.bitcast_convert_type(array, jnp.uint32)
    if array.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.uint32) << 16
    if array.dtype.name == "float8_e8m0fnu":  # 2^(byte − 127), and 255 for NaN
        byte = lax.bitcast_convert_type(array, jnp.uint8).astype(jnp.uint32)
        return jnp.where(byte == 255, 0x7FC00000, jnp.where(byte == 0, 0x00400000, byte << 23)).astype(jnp.uint32)
    return lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)


def _normal(mantissa: Array, exponent: Array, like: _Numbers) -> _Numbers:
    """Numbers whose mantissa may be any normal number, or zero."""
    form = like.format
    words = form.words(mantissa)
    zero = mantissa == 0
    return like._replace(
        mantissa=jnp.where(zero, 0, form.mantissas(words)),
        exponent=jnp.where(zero, _NOTHING, exponent + form.exponents(words) - form.bias),
    )


def _modulus(real: _Numbers, imaginary: _Numbers) -> _Numbers:
    larger = jnp.maximum(real.exponent, imaginary.exponent)
    root = jnp.sqrt(jnp.square(real.over(larger)) + jnp.square(imaginary.over(larger)))
    infinite = abs(real.infinite) | abs(imaginary.infinite)
    found = real._replace(nan=(real.nan | imaginary.nan) & (infinite == 0), infinite=infinite)
    found = _normal(root, larger, found).where(found.finite)
    beyond = found.exponent > _DOUBLE.bias  # of float64 parts: what the modulus overflows to is infinite
    return found._replace(infinite=jnp.where(beyond, 1, found.infinite)).where(~beyond)


def _quotient(x: _Numbers, y: _Numbers) -> _Numbers:
    """x/y, where y is not zero."""
    return _normal(x.mantissa / jnp.where(y.mantissa == 0, 1, y.mantissa), x.exponent - y.exponent, x).where(
        (x.mantissa != 0) & (y.mantissa != 0)
    )


def _sum(x: _Numbers, y: _Numbers) -> _Numbers:
    larger = jnp.maximum(x.exponent, y.exponent)
    return _normal(x.over(larger) + y.over(larger), larger, x)


def _less(x: _Numbers, y: _Numbers) -> Array:
    """Whether x < y, of numbers that are not negative."""
    return (x.exponent < y.exponent) | ((x.exponent == y.exponent) & (x.mantissa < y.mantissa))


def _root(x: _Numbers) -> _Numbers:
    odd = x.exponent & 1
    half = (x.exponent - odd) >> 1
    return _normal(jnp.sqrt(jnp.where(odd == 1, 2 * x.mantissa, x.mantissa)), half, x)


# --- reductions ---


class _Count(NamedTuple):
    """How many are true."""

    mask: Array


class _Least(NamedTuple):
    values: Array


class _Greatest(NamedTuple):
    values: Array


class _Sum(NamedTuple):
    """The sum of values, each of which may come with a correction, as a sum and its correction."""

    values: Array
    corrections: Array | None = None


_Wanted = _Count | _Least | _Greatest | _Sum
Rounds = Generator[dict[str, _Wanted], dict[str, Any], Columns]
"""A section's statistics: yields the reductions that it wants next, is sent their results, and returns its columns."""


def _add_exactly(x: Array, y: Array) -> tuple[Array, Array]:
    """x + y, and what is rounded off of it (Knuth)."""
    total = x + y
    share = total - x
    return total, (x - (total - share)) + (y - share)


def _add_pairs(x: Sequence[Array], y: Sequence[Array]) -> tuple[Array, Array]:
    total, error = _add_exactly(x[0], y[0])
    error = error + (x[1] + y[1])
    high = total + error
    return high, error - (high - total)


def _multiply_exactly(x: Array, y: Array, form: _Format) -> tuple[Array, Array]:
    """x·y, and what is rounded off of it (Dekker), by halves of the digits."""
    product = x * y
    mask = ~jnp.asarray((1 << (form.digits // 2 + 1)) - 1, form.word_type)
    a, b = (form.floats(form.words(each) & mask) for each in (x, y))
    return product, (((a * b - product) + a * (y - b)) + (x - a) * b) + (x - a) * (y - b)


Flat = tuple[Array, ...]


class _Reduction:
    """All reductions of a round as one, of a tuple of arrays.

    `present` says which elements there are, if not all.
    """

    def __init__(self, wanted: Mapping[str, _Wanted], shape: tuple[int, ...], present: Array | None = None) -> None:
        self.names = tuple(wanted)
        self._operands: list[Array] = []
        self._starts: list[Array] = []
        self._steps: list[tuple[Callable[[Any, Any], Flat], int]] = []
        self._shape = shape
        self._present = present
        for each in wanted.values():
            match each:
                case _Count(mask) if prod(shape) <= _MOST_COUNTED:
                    self._add(lambda x, y: (x[0] + y[0],), 0, mask.astype(jnp.int32))
                case _Count(mask):
                    self._add(_add_pairs, 0, mask.astype(jnp.float32), jnp.zeros_like(mask, jnp.float32))
                case _Least(values):
                    self._add(lambda x, y: (jnp.minimum(x[0], y[0]),), _limit(values.dtype), values)
                case _Greatest(values):
                    self._add(lambda x, y: (jnp.maximum(x[0], y[0]),), -_limit(values.dtype), values)
                case _Sum(values, corrections):
                    self._add(_add_pairs, 0, values, jnp.zeros_like(values) if corrections is None else corrections)

    def _add(self, step: Callable[[Any, Any], Flat], start: Any, *operands: Array) -> None:
        self._steps.append((step, len(operands)))
        for each in operands:
            first = jnp.asarray(start, each.dtype)
            whole = jnp.broadcast_to(each, self._shape)
            self._operands.append(whole if self._present is None else jnp.where(self._present, whole, first))
            self._starts.append(first)

    @property
    def start(self) -> Flat:
        """The result over no elements."""
        return tuple(self._starts)

    def combine(self, x: Flat, y: Flat) -> Flat:
        """The result over the elements of both."""
        made: list[Array] = []
        for step, width in self._steps:
            at = len(made)
            made += step(x[at : at + width], y[at : at + width])
        return tuple(made)

    def run(self) -> Flat:
        axes = tuple(range(len(self._shape)))
        return cast("Flat", tuple(lax.reduce(tuple(self._operands), self.start, self.combine, axes)))

    def named(self, result: Flat) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for name, (_, width) in zip(self.names, self._steps, strict=True):
            results[name] = result[0] if width == 1 else result[:2]
            result = result[width:]
        return results


_PART = 1 << 13
"""How many elements are measured at once where a leaf is read in parts."""


def _limit(dtype: Any) -> Any:
    return 2**31 - 1 if dtype == jnp.int32 else np.inf


# --- the statistics ---


def _moments(operand: _Operand, zero_rows: Any) -> Rounds:
    x = operand.numbers
    form, finite = x.format, x.finite
    small = (
        jnp.zeros_like(finite)
        if operand.least_exponent is None
        else (x.mantissa != 0) & (x.exponent < operand.least_exponent)
    )
    found = yield {
        "n": _Count(jnp.ones_like(finite)),
        "nan": _Count(x.nan),
        "posinf": _Count(x.infinite == 1),
        "neginf": _Count(x.infinite == -1),
        "zeros": _Count(x.zero),
        "subnormals": _Count(small),
        "finite": _Count(finite),
        "largest": _Greatest(x.exponent),
        **_extreme_keys(x, finite),
    }
    unit, number = _unit(found["largest"]), found["finite"]
    scaled = x.over(unit)
    sums = yield {"sum": _Sum(scaled), "magnitude": _Sum(abs(scaled)), **_extreme_mantissas(x, finite, found)}
    # Distances from a number near the mean, the mean rounded: for equal values the value, which makes their spread zero.
    near, count = _share(sums["sum"], number, form)
    distance, correction = (jnp.where(finite, each, 0) for each in _add_exactly(scaled, -near))
    spread = yield {"distance": _Sum(distance, correction), "square": _Sum(jnp.square(distance + correction))}
    return {
        **{name: _encoded_count(found[name], form) for name in ("n", "nan", "posinf", "neginf", "zeros", "subnormals")},
        "zero_rows": _encoded_count(zero_rows, form),
        "mean": (near, (spread["distance"][0] + spread["distance"][1]) / count, unit),
        "std": (*spread["square"], unit),
        **_extremes(found, sums, form),
        "mean_abs": (*sums["magnitude"], unit),
    }


def _zero_rows(array: Array | None) -> Array:
    if array is None or array.ndim < 2 or not array.size:
        return jnp.int32(0)
    x = _operand(array, _format_of([array]))
    zero = x.real.zero if x.imaginary is None else x.real.zero & x.imaginary.zero
    return zero.all(axis=tuple(range(1, array.ndim))).sum(dtype=jnp.int32)


def _pair(one: _Operand, other: _Operand) -> Rounds:
    both = one.finite & other.finite
    is_complex = one.imaginary is not None or other.imaginary is not None
    x, y = (abs(each.numbers) if is_complex else each.numbers for each in (one, other))
    x, y = x.where(both), y.where(both)
    form = x.format
    zero = both & (y.mantissa == 0)
    quotient = _quotient(x, y)
    defined = both & ~zero & (quotient.exponent <= _DOUBLE.bias)
    quotient = quotient.where(defined)
    signed = (x.mantissa != 0) & (y.mantissa != 0) if not is_complex else jnp.zeros_like(both)
    found = yield {
        "n": _Count(jnp.ones_like(both)),
        "defined": _Count(defined),
        "x_by_zero": _Count(zero & (x.mantissa != 0)),
        "zero_by_zero": _Count(zero & (x.mantissa == 0)),
        "nonfinite": _Count(~defined & ~zero),
        "equal_signs": _Count(signed & ((x.mantissa > 0) == (y.mantissa > 0))),
        "signed": _Count(signed),
        "largest_x": _Greatest(x.exponent),
        "largest_y": _Greatest(y.exponent),
        "largest": _Greatest(quotient.exponent),
        **_extreme_keys(quotient, defined),
    }
    unit, unit_x, unit_y = (_unit(found[name]) for name in ("largest", "largest_x", "largest_y"))
    q, u, w = quotient.over(unit), x.over(unit_x), y.over(unit_y)
    sums = yield {
        "mean": _Sum(q),
        "mean_abs": _Sum(abs(q)),
        "norm_x": _Sum(jnp.square(u)),
        "norm_y": _Sum(jnp.square(w)),
        "cosine": _Sum(_products(one, other, both, unit_x, unit_y) if is_complex else u * w),
        **_extreme_mantissas(quotient, defined, found),
    }
    counts = ("n", "defined", "x_by_zero", "zero_by_zero", "nonfinite", "equal_signs", "signed")
    return {
        **{name: _encoded_count(found[name], form) for name in counts},
        "mean": (*sums["mean"], unit),
        "mean_abs": (*sums["mean_abs"], unit),
        **_extremes(found, sums, form),
        "norm_x": (*sums["norm_x"], unit_x),
        "norm_y": (*sums["norm_y"], unit_y),
        "cosine": (*sums["cosine"], jnp.int32(0)),
    }


def _products(one: _Operand, other: _Operand, both: Array, unit_x: Array, unit_y: Array) -> Array:
    """The real parts of conj(x)·y, divided by both units."""
    products = one.real.where(both).over(unit_x) * other.real.where(both).over(unit_y)
    if one.imaginary is not None and other.imaginary is not None:
        products += one.imaginary.where(both).over(unit_x) * other.imaginary.where(both).over(unit_y)
    return products


def _adam(g: _Operand, m: _Operand | None, v: _Operand, settings: AdamSettings) -> Rounds:
    form = v.real.format
    epsilon, m_scale, v_scale, lr = (_scalar(each, form) for each in settings)
    defined = g.finite & v.real.finite & (v.real.mantissa >= 0)
    if m is not None:
        defined &= m.finite
    root = _root(_product(v.real.where(defined), v_scale))
    below = _less(root, epsilon)
    divisor = root._replace(
        mantissa=jnp.where(below, epsilon.mantissa, root.mantissa),
        exponent=jnp.where(below, epsilon.exponent, root.exponent),
    )
    gradient = abs(g.numbers).where(defined)
    quotient = _quotient(gradient, divisor)
    moment = gradient.where(jnp.zeros_like(defined)) if m is None else _product(abs(m.numbers).where(defined), m_scale)
    divisor_of_step = _sum(root, epsilon)
    step = _quotient(moment, divisor_of_step)
    found = yield {
        "n": _Count(jnp.ones_like(defined)),
        "defined": _Count(defined),
        "below_epsilon": _Count(defined & below),
        "largest": _Greatest(quotient.exponent),
        "largest_step": _Greatest(step.exponent),
        "infinite": _Greatest(_by_zero(gradient, divisor)),
        "infinite_step": _Greatest(_by_zero(moment, divisor_of_step)),
    }
    unit, unit_step = _unit(found["largest"]), _unit(found["largest_step"])
    sums = yield {
        "rms": _Sum(jnp.square(quotient.over(unit))),
        "step": _Sum(jnp.square(step.over(unit_step))),
    }
    high, low = (jnp.where(found["infinite"] > 0, form.array(np.inf), each) for each in sums["rms"])
    low = jnp.where(found["infinite"] > 0, 0, low)
    rate = jnp.where(lr.finite & (m is not None), lr.mantissa, np.nan)
    step_high = jnp.where(found["infinite_step"] > 0, form.array(np.inf), sums["step"][0]) * jnp.square(rate)
    step_low = jnp.where(found["infinite_step"] > 0, 0, sums["step"][1]) * jnp.square(rate)
    return {
        **{name: _encoded_count(found[name], form) for name in ("n", "defined", "below_epsilon")},
        "rms": (high, low, unit),
        "step": (step_high, step_low, unit_step + jnp.where(lr.mantissa == 0, 0, lr.exponent)),
    }


def _by_zero(x: _Numbers, y: _Numbers) -> Array:
    return ((x.mantissa != 0) & (y.mantissa == 0)).astype(jnp.int32)


def _product(x: _Numbers, y: _Numbers) -> _Numbers:
    return _normal(x.mantissa * y.mantissa, x.exponent + y.exponent, x)


def _scalar(value: Any, form: _Format) -> _Numbers:
    array = _scalar_array(value)
    return _numbers(array if form is _DOUBLE or array.dtype == jnp.float32 else array.astype(jnp.float32), form)


def _unit(largest: Array) -> Array:
    """The exponent to divide by: that of the largest number."""
    return jnp.where(largest == _NOTHING, 0, largest)


def _share(total: tuple[Array, Array], number: Any, form: _Format) -> tuple[Array, Array]:
    """A total divided by a number, correctly rounded but for rare cases; and that number, at least 1, as a float."""
    if isinstance(number, tuple):
        whole, rest = (form.array(each) for each in number)
    else:
        whole = number.astype(form.float_type)
        rest = (number - whole.astype(jnp.int32)).astype(form.float_type)
    whole = jnp.maximum(whole, 1)
    guess = total[0] / whole
    product, error = _multiply_exactly(guess, whole, form)
    left = (total[0] - product) + (total[1] - error - guess * rest)
    return guess + left / whole, whole


def _extreme_keys(x: _Numbers, mask: Array) -> dict[str, Any]:
    """The least and the greatest number are found by their signs and exponents first, and then by mantissa."""
    keys = _keys(x)
    return {
        "least": _Least(jnp.where(mask, keys, 2**31 - 1)),
        "greatest": _Greatest(jnp.where(mask, keys, -(2**31 - 1))),
    }


def _extreme_mantissas(x: _Numbers, mask: Array, found: Mapping[str, Any]) -> dict[str, Any]:
    keys = _keys(x)
    return {
        "min": _Least(jnp.where(mask & (keys == found["least"]), x.mantissa, np.inf)),
        "max": _Greatest(jnp.where(mask & (keys == found["greatest"]), x.mantissa, -np.inf)),
    }


def _extremes(found: Mapping[str, Any], sums: Mapping[str, Any], form: _Format) -> Columns:
    none = form.array(0)
    return {
        name: (sums[name], none, jnp.where(found[key] == 0, 0, abs(found[key]) - _OFFSET))
        for name, key in (("min", "least"), ("max", "greatest"))
    }


def _keys(x: _Numbers) -> Array:
    return jnp.sign(x.mantissa).astype(jnp.int32) * (x.exponent + _OFFSET)


# --- encoding ---


def _encoded_count(count: Any, form: _Format) -> Encoded:
    if isinstance(count, tuple):
        return form.array(count[0]), form.array(count[1]), jnp.int32(0)
    low = count & 4095
    return (count - low).astype(form.float_type), low.astype(form.float_type), jnp.int32(0)


def _sections(
    arrays: Sequence[Array | None], settings: AdamSettings | None, zero_rows: Any, form: _Format
) -> dict[str, Rounds]:
    """The sections of a leaf, of which `arrays` may be a part."""
    p, g, u, m, v = (None if each is None else _operand(each, form) for each in arrays)
    moments = (("parameter", p), ("gradient", g), ("update", u))
    sections = {name: _moments(each, zero_rows[i]) for i, (name, each) in enumerate(moments) if each is not None}
    if p is not None and g is not None:
        sections["ratio"] = _pair(p, g)
    if u is not None and p is not None:
        sections["update_ratio"] = _pair(u, p)
    if settings is not None and g is not None and v is not None:
        sections["adam"] = _adam(g, m, v, settings)
    return sections


Answers = Mapping[str, Sequence[dict[str, Any]]]
"""For each section what its rounds so far have found."""


def _next(sections: Mapping[str, Rounds], answers: Answers) -> tuple[dict[str, dict[str, _Wanted]], dict[str, Columns]]:
    """What fresh sections want in their next rounds, given the answers to those before; and the columns of those at their end."""
    wanted: dict[str, dict[str, _Wanted]] = {}
    columns: dict[str, Columns] = {}
    for name, section in sections.items():
        reply = next(section)
        try:
            for answer in answers.get(name, ()):
                reply = section.send(answer)
            wanted[name] = reply
        except StopIteration as stopped:
            columns[name] = stopped.value
    return wanted, columns


_MOST_ROUNDS = 3


def _encoded(columns: Mapping[str, Columns], form: _Format) -> Array:
    nothing: Encoded = (form.array(np.nan), form.array(0), jnp.int32(0))
    line = [
        columns[name][column] if name in columns else nothing
        for name, section in SECTIONS.items()
        for column in section.names()
    ]
    return jnp.stack([each.astype(form.float_type) for column in line for each in column]).reshape(WIDTH, PARTS)


@jax.jit
def _line(leaf: Operands) -> Array:
    """The columns of one leaf, read as it is. Traced once for each combination of shapes and dtypes."""
    arrays: list[Any] = list(leaf[:5])
    form = _format_of(arrays)
    zero_rows = [_zero_rows(each) for each in arrays[:3]]
    if not arrays[0].shape:  # a reduction needs an axis
        arrays = [None if each is None else each.reshape(1) for each in arrays]
    answers: dict[str, list[dict[str, Any]]] = {}
    for _ in range(_MOST_ROUNDS):
        for name, wanted in _next(_sections(arrays, leaf.adam, zero_rows, form), answers)[0].items():
            reduction = _Reduction(wanted, arrays[0].shape)
            answers.setdefault(name, []).append(reduction.named(reduction.run()))
    return _encoded(_next(_sections(arrays, leaf.adam, zero_rows, form), answers)[1], form)


@jax.jit
def _lines_in_parts(leaves: Sequence[Operands]) -> Array:
    """The columns of leaves with the same dtypes, read part by part in one loop over them all.

    XLA for CPUs writes every operand of a reduction to memory, and takes seconds to compile a leaf. In small parts the
    operands stay in the cache, and one loop is compiled once.
    """
    form = _format_of(leaves[0][:5])
    sizes = np.array([leaf.parameter.size for leaf in leaves], np.int32)
    part = min(_PART, max(int(sizes.max()), 1))
    present = [i for i, each in enumerate(leaves[0][:5]) if each is not None]
    flat = [[cast("Array", leaf[i]).reshape(-1) for i in present] for leaf in leaves]

    def cut(arrays: Sequence[Array], start: Array) -> list[Array]:
        if arrays[0].size < part:
            return [jnp.pad(each, (0, part - each.size)) for each in arrays]
        return [lax.dynamic_slice(each, (start,), (part,)) for each in arrays]

    def sections_of(arrays: Sequence[Array], settings: Any, zero_rows: Any) -> dict[str, Rounds]:
        placed: list[Array | None] = [None] * 5
        for i, each in zip(present, arrays, strict=True):
            placed[i] = each
        return _sections(placed, settings, zero_rows, form)

    branches = [functools.partial(cut, arrays) for arrays in flat]
    nothing = [jnp.zeros(part, each.dtype) for each in flat[0]]

    def line(_: None, leaf: Any) -> tuple[None, Array]:
        which, size, settings, zero_rows = leaf
        answers: dict[str, list[dict[str, Any]]] = {}

        def reductions_of(arrays: Sequence[Array], there: Array | None) -> dict[str, _Reduction]:
            wanted, _ = _next(sections_of(arrays, settings, zero_rows), answers)
            return {name: _Reduction(each, (part,), there) for name, each in wanted.items()}

        def step(i: Array, found: dict[str, Flat]) -> dict[str, Flat]:
            start = jnp.maximum(jnp.minimum(i * part, size - part), 0)
            position = start + lax.iota(jnp.int32, part)
            there = (position >= i * part) & (position < size)
            reductions = reductions_of(lax.switch(which, branches, start), there)
            return {name: each.combine(found[name], each.run()) for name, each in reductions.items()}

        for _round in range(_MOST_ROUNDS):
            reductions = reductions_of(nothing, None)
            starts = {name: each.start for name, each in reductions.items()}
            found = lax.fori_loop(0, (size + part - 1) // part, step, starts)
            for name, each in reductions.items():
                answers.setdefault(name, []).append(each.named(found[name]))
        return None, _encoded(_next(sections_of(nothing, settings, zero_rows), answers)[1], form)

    zero_rows = jnp.stack([jnp.stack([_zero_rows(each) for each in leaf[:3]]) for leaf in leaves])
    settings = None
    if leaves[0].adam is not None:
        columns = zip(*(leaf.adam for leaf in leaves if leaf.adam is not None), strict=True)
        settings = AdamSettings(
            *cast("Any", [jnp.stack([_scalar_array(each) for each in column]) for column in columns])
        )
    return lax.scan(line, None, (np.arange(len(leaves)), sizes, settings, zero_rows))[1]


def _scalar_array(value: Any) -> Array:
    array = jnp.asarray(value)
    return array if array.dtype in (jnp.float32, jnp.float64) else array.astype(jnp.float32)


def lines(leaves: Sequence[Operands], in_parts: bool | None = None) -> Array:
    """The matrix, still encoded: (leaves × WIDTH × 3), for `decode`. To be traced; works outside of tracing too.

    The array is float32, or float64 if an array of a leaf is.

    Args:
        leaves: their arrays may be tracers, and so may what stands in `adam`.
        in_parts: whether leaves are read part by part, which is right for a CPU and wrong for sharded arrays. While a
            function is traced nobody knows where its arrays will live; by default it is done if there is but one CPU device.
    """
    if in_parts is None:
        in_parts = jax.default_backend() == "cpu" and jax.device_count() == 1
    leaves = [Operands(*map(_plain, leaf[:5]), adam=leaf.adam) for leaf in leaves]
    alike: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        signature = tuple(None if each is None else each.dtype for each in leaf[:5]), leaf.adam is None
        alone = not in_parts or leaf.parameter.size > _MOST_COUNTED - _PART
        alike.setdefault(i if alone else signature, []).append(i)
    found: dict[int, Array] = {}
    for signature, members in alike.items():
        group = [leaves[i] for i in members]
        made = [_line(group[0])] if signature == members[0] else _lines_in_parts(group)
        found.update(zip(members, made, strict=True))
    if not found:
        return jnp.zeros((0, WIDTH, PARTS), jnp.float32)
    widest = jnp.result_type(*found.values())
    return jnp.stack([found[i].astype(widest) for i in range(len(leaves))])


def _plain(array: Any) -> Array | None:
    return None if array is None else lax.stop_gradient(jnp.asarray(array))


def decode(array: Any) -> Matrix:
    """The matrix, (… × leaves × WIDTH), that `lines` encoded. Leading axes stay."""
    encoded = np.asarray(array).astype(np.float64)
    high, low, exponent = np.moveaxis(encoded, -1, 0)
    exponent = exponent.astype(np.int64)
    total = high + low
    matrix = np.ldexp(total, exponent)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for name, section in SECTIONS.items():
            span = SPANS[name]
            raw = _Raw(section, total[..., span], low[..., span], exponent[..., span], matrix[..., span])
            raw.finish()
    return matrix


class _Raw(NamedTuple):
    """A section's columns as they come from the device; `values` is a view of the matrix, which becomes right."""

    section: type[Moments | Pair | Adam]
    total: np.ndarray[Any, Any]
    low: np.ndarray[Any, Any]
    exponent: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]

    def at(self, name: str) -> Any:
        return (..., self.section.names().index(name))

    def finish(self) -> None:
        if self.section is Moments:
            self._finish_moments()
        elif self.section is Pair:
            self._finish_pair()
        else:
            self._finish_adam()

    def _divide(self, names: Sequence[str], number: np.ndarray[Any, Any]) -> None:
        for name in names:
            at = self.at(name)
            self.values[at] = np.ldexp(self.total[at] / number, self.exponent[at])

    def _roots(self, names: Sequence[str], number: np.ndarray[Any, Any] | float) -> None:
        for name in names:
            at = self.at(name)
            self.values[at] = np.ldexp(np.sqrt(self.total[at] / number), self.exponent[at])

    def _absent(self, names: Sequence[str], absent: np.ndarray[Any, Any]) -> None:
        for name in names:
            self.values[self.at(name)] = np.where(absent, np.nan, self.values[self.at(name)])

    def _finish_moments(self) -> None:
        n, *nonfinite = (self.values[self.at(name)] for name in ("n", "nan", "posinf", "neginf"))
        finite = n - sum(nonfinite)
        self._divide(("mean_abs",), finite)
        at, mean = self.at("std"), self.at("mean")
        # The squares are of distances from a number near the mean, and the mean's low part is how far that is off.
        variance = np.maximum(self.total[at] / finite - np.square(self.low[mean]), 0)
        self.values[at] = np.ldexp(np.sqrt(variance), self.exponent[at])
        self._absent(("mean", "std", "min", "max", "mean_abs"), ~(finite > 0))

    def _finish_pair(self) -> None:
        defined = self.values[self.at("defined")]
        self._divide(("mean", "mean_abs"), defined)
        norms = np.sqrt(self.total[self.at("norm_x")]) * np.sqrt(self.total[self.at("norm_y")])
        self.values[self.at("cosine")] = self.total[self.at("cosine")] / norms
        self._absent(("cosine",), ~(norms > 0))
        self._roots(("norm_x", "norm_y"), 1.0)
        self._absent(("mean", "min", "max", "mean_abs"), ~(defined > 0))

    def _finish_adam(self) -> None:
        defined = self.values[self.at("defined")]
        self._roots(("rms", "step"), defined)
        self._absent(("rms", "step"), ~(defined > 0))


# --- histograms ---


def _powers(array: Array) -> Array:
    """How many numbers have which power of two, from `_lowest` on."""
    array = jnp.asarray(array)
    x = _operand(array, _format_of([array])).numbers
    low, high = _range(x.format)
    counts = jnp.zeros(high - low + 1, jnp.int32)
    return counts.at[jnp.clip(x.exponent - low, 0, high - low)].add((x.mantissa != 0).astype(jnp.int32))


def _range(form: _Format) -> tuple[int, int]:
    """The exponents that a number of this format, or a modulus of two, can have."""
    return 1 - form.bias - form.digits, form.bias + 1


def _histogram(counts: np.ndarray[Any, Any], low: int) -> Histogram:
    present = np.flatnonzero(counts)
    if not present.size:
        return Histogram(0, ())
    first, last = int(present[0]), int(present[-1])
    return Histogram(low + first, tuple(counts[first : last + 1].tolist()))


# --- as a back end ---


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _measured(arrays: Any, settings: Any, which: tuple[int | None, ...], histograms: bool, in_parts: bool) -> Any:
    leaves = [
        Operands(*each, adam=None if row is None else AdamSettings(*settings[row]))
        for each, row in zip(arrays, which, strict=True)
    ]
    powers = [[None if each is None else _powers(each) for each in leaf[:3]] for leaf in leaves] if histograms else []
    return lines(leaves, in_parts), powers


def measure(leaves: Sequence[Operands], histograms: bool = False) -> tuple[Matrix, Histograms | None]:
    """See `Backend.measure`. Compiled once for each combination of shapes and dtypes; one copy to the host a set of devices."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(_devices(leaf.parameter), []).append(i)
    matrix = empty_matrix(len(leaves))
    found: Histograms = [(None, None, None)] * len(leaves)
    for devices, group in groups.items():
        in_parts = len(devices) == 1 and next(iter(devices)).platform == "cpu"
        settings: dict[AdamSettings, int] = {}
        which = tuple(
            None if (adam := leaves[i].adam) is None else settings.setdefault(adam, len(settings)) for i in group
        )
        table = np.array(list(settings), np.float64).reshape(len(settings), len(AdamSettings._fields))
        arrays = [_together(leaves[i]) for i in group]
        encoded, powers = jax.device_get(_measured(arrays, table, which, histograms, in_parts))
        matrix[group] = decode(encoded)
        for i, counts in zip(group, powers, strict=bool(powers)):
            found[i] = cast("Any", tuple(map(_optional_histogram, counts)))
    return matrix, found if histograms else None


def _optional_histogram(counts: np.ndarray[Any, Any] | None) -> Histogram | None:
    if counts is None:
        return None
    low, high = _range(_SINGLE)
    return _histogram(counts, low if len(counts) == high - low + 1 else _range(_DOUBLE)[0])


def _devices(array: Any) -> Any:
    """Where an array is; of NumPy's, where JAX would put it."""
    return frozenset(array.sharding.device_set if isinstance(array, jax.Array) else jax.devices()[:1])


def _together(leaf: Operands) -> tuple[Any, ...]:
    """The arrays of a leaf where its parameter is."""
    home = _devices(leaf.parameter)
    return tuple(
        jax.device_put(each, leaf.parameter.sharding)
        if isinstance(each, jax.Array) and _devices(each) != home
        else each
        for each in leaf[:5]
    )

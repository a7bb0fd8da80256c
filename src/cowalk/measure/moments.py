"""The statistics of one array, of a pair of arrays, of Adam's state, and of gradients over batches: what two parts merge
into those of the whole.

Of arrays everything is kept as means, never as sums: a mean of values that fit into float64 fits too, where their sum or
the sum of their squares may not. Each class is also a run of columns in a table's matrix, in the order of its fields; in a
matrix, NaN stands for a value that does not exist, in a field None does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import hypot, inf, isnan, log10, sqrt
from typing import Any, Self

from cowalk.tree import leaf


class _Columns:
    """Made from, and laid out as, a run of a matrix's columns."""

    __slots__ = ()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))  # pyright: ignore[reportArgumentType]

    @classmethod
    def of_columns(cls, values: Sequence[float]) -> Self:
        """The counts become ints, a NaN becomes None."""
        kinds = (field.type for field in fields(cls))  # pyright: ignore[reportArgumentType]
        return cls(
            *(
                int(value) if kind == "int" else None if isnan(value) else float(value)
                for kind, value in zip(kinds, values, strict=True)
            )
        )


@leaf
@dataclass(frozen=True, slots=True)
class Moments(_Columns):
    """The statistics of one array. Counts are over all elements, the others over the finite ones; None if there is none.

    Of complex numbers the modulus is taken. A walk sees `Moments` as a leaf.

    Attributes:
        n: how many elements there are. A sparse array's implicit zeros count.
        nan, posinf, neginf: how many of them are NaN, +∞, −∞.
        zeros: how many are zero, of either sign.
        subnormals: how many are not zero but smaller than the dtype's smallest normal number.
        zero_rows: how many slices along the first axis hold zeros only, of an array with two axes or more.
        mean, std, min, max: of the finite elements; `std` divides by their number.
        mean_abs: the mean of their absolute values.

    >>> a, b = Moments(n=1, mean=2.0, std=0.0, min=2.0, max=2.0, mean_abs=2.0), Moments(n=2, nan=2)
    >>> both = a.merge(b)
    >>> both.n, both.nan, both.finite, both.norm
    (3, 2, 1, 2.0)
    """

    n: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    subnormals: int = 0
    zero_rows: int = 0
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    mean_abs: float | None = None

    @property
    def finite(self) -> int:
        """How many elements are neither NaN nor infinite."""
        return self.n - self.nan - self.posinf - self.neginf

    @property
    def nonfinite(self) -> int:
        """How many elements are NaN or infinite."""
        return self.nan + self.posinf + self.neginf

    @property
    def max_abs(self) -> float | None:
        """The largest absolute value."""
        return None if self.min is None or self.max is None else max(-self.min, self.max)

    @property
    def rms(self) -> float | None:
        """The root of the mean square."""
        return None if self.mean is None or self.std is None else hypot(self.mean, self.std)

    @property
    def norm(self) -> float:
        """The 2-norm; 0.0 of no elements."""
        return 0.0 if self.rms is None else self.rms * sqrt(self.finite)

    def merge(self, other: Moments) -> Moments:
        """The moments of the elements of both together; the order does not matter, but for rounding."""
        mean, std = _merged_spread((self.mean, other.mean), (self.std, other.std), (self.finite, other.finite))
        return Moments(
            n=self.n + other.n,
            nan=self.nan + other.nan,
            posinf=self.posinf + other.posinf,
            neginf=self.neginf + other.neginf,
            zeros=self.zeros + other.zeros,
            subnormals=self.subnormals + other.subnormals,
            zero_rows=self.zero_rows + other.zero_rows,
            mean=mean,
            std=std,
            min=_least(self.min, other.min),
            max=_greatest(self.max, other.max),
            mean_abs=_mean((self.mean_abs, other.mean_abs), (self.finite, other.finite)),
        )

    def scaled(self, factor: float) -> Moments:
        """The moments of the elements times a positive factor, as if it lost and gained no zero, subnormal or infinity."""
        return _scaled(self, factor, ("mean", "std", "min", "max", "mean_abs"))


@leaf
@dataclass(frozen=True, slots=True)
class Pair(_Columns):
    """How two arrays x and y of one shape relate: the quotients x/y, element by element, and the two as vectors.

    A quotient is defined where x and y are finite, y is not zero, and x/y fits into float64. Of complex numbers the moduli are
    divided. `n` is the sum of the four counts after it. A walk sees a `Pair` as a leaf.

    Attributes:
        n: how many elements each of the two has.
        defined: how many of them have a quotient.
        x_by_zero: elements where y is zero and x is not.
        zero_by_zero: elements where both are zero.
        nonfinite: elements where x or y is NaN or infinite, or where x/y overflows.
        mean, min, max: of the defined quotients; None if there is none.
        mean_abs: the mean of their absolute values; None if there is none.
        norm_x, norm_y: the 2-norms of x and of y over the elements where both are finite.
        cosine: of the angle between the two, over those elements; None if one of the norms is zero.
        equal_signs: in how many elements x and y, both finite and not zero, have one sign; complex numbers have none.
        signed: in how many elements both are real, finite and not zero.
    """

    n: int = 0
    defined: int = 0
    x_by_zero: int = 0
    zero_by_zero: int = 0
    nonfinite: int = 0
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    mean_abs: float | None = None
    norm_x: float = 0.0
    norm_y: float = 0.0
    cosine: float | None = None
    equal_signs: int = 0
    signed: int = 0

    @property
    def ratio_of_norms(self) -> float | None:
        """|x| / |y|, which is the ratio of their rms too: inf if only y is zero, None if both are."""
        if self.norm_y:
            return self.norm_x / self.norm_y
        return float("inf") if self.norm_x else None

    @property
    def log10(self) -> float | None:
        """The decimal logarithm of `ratio_of_norms`; None where that is none, 0 or inf."""
        ratio = self.ratio_of_norms
        return log10(ratio) if ratio and ratio != float("inf") else None

    @property
    def dot(self) -> float:
        """The (real) inner product of x and y, over the elements where both are finite."""
        return 0.0 if self.cosine is None else self.cosine * self.norm_x * self.norm_y

    @property
    def sign_agreement(self) -> float | None:
        """The share of equal signs among the elements that have one on both sides."""
        return self.equal_signs / self.signed if self.signed else None

    def merge(self, other: Pair) -> Pair:
        """The pair of the elements of both together; the order does not matter, but for rounding."""
        if not self.n or not other.n:
            return other if not self.n else self
        weights = self.defined, other.defined
        norm_x, norm_y = hypot(self.norm_x, other.norm_x), hypot(self.norm_y, other.norm_y)
        cosine = None
        if norm_x and norm_y:  # each share is at most 1: nothing overflows
            parts = [part for part in (self, other) if part.cosine is not None]
            shares = [(part.cosine or 0.0) * (part.norm_x / norm_x) * (part.norm_y / norm_y) for part in parts]
            cosine = sum(shares, start=0.0)
        return Pair(
            n=self.n + other.n,
            defined=self.defined + other.defined,
            x_by_zero=self.x_by_zero + other.x_by_zero,
            zero_by_zero=self.zero_by_zero + other.zero_by_zero,
            nonfinite=self.nonfinite + other.nonfinite,
            mean=_mean((self.mean, other.mean), weights),
            min=_least(self.min, other.min),
            max=_greatest(self.max, other.max),
            mean_abs=_mean((self.mean_abs, other.mean_abs), weights),
            norm_x=norm_x,
            norm_y=norm_y,
            cosine=cosine,
            equal_signs=self.equal_signs + other.equal_signs,
            signed=self.signed + other.signed,
        )

    def scaled(self, x: float, y: float) -> Pair:
        """The pair of x and y times a positive factor each."""
        pair = _scaled(self, x / y, ("mean", "min", "max", "mean_abs"))
        return _scaled(_scaled(pair, x, ("norm_x",)), y, ("norm_y",))


@leaf
@dataclass(frozen=True, slots=True)
class Adam(_Columns):
    """How a gradient g stands to Adam's moments m and v of it, both debiased (divided by 1 − βᵗ) where t and β are known.

    Attributes:
        n: how many elements the parameter has.
        defined: in how many of them g and v (and m, where there is one) are finite, and v is not negative.
        below_epsilon: in how many of those √v < ε, so that ε rules the step.
        rms: sqrt(mean(g² / max(v, ε²))), over the defined ones: near 1 while v keeps up with the gradients; a value well
            above 1 precedes spikes of the loss (Wortsman et al. 2023, arXiv 2304.13013).
        step: the root of the mean square of lr · m / (√v + ε), the step that Adam makes; None where m or lr is not known.
    """

    n: int = 0
    defined: int = 0
    below_epsilon: int = 0
    rms: float | None = None
    step: float | None = None

    @property
    def share_below_epsilon(self) -> float | None:
        """The share of the defined elements where √v < ε."""
        return self.below_epsilon / self.defined if self.defined else None

    def merge(self, other: Adam) -> Adam:
        """The same of the elements of both together."""
        weights = self.defined, other.defined
        unknown = any(part.defined and part.step is None for part in (self, other))
        return Adam(
            n=self.n + other.n,
            defined=self.defined + other.defined,
            below_epsilon=self.below_epsilon + other.below_epsilon,
            rms=_root_mean_square((self.rms, other.rms), weights),
            step=None if unknown else _root_mean_square((self.step, other.step), weights),
        )


@leaf
@dataclass(frozen=True, slots=True)
class Noise(_Columns):
    """The noise of a gradient over the batches of a data set: how the batches' gradients scatter around their true mean.

    The gradient of one example has the mean G and the covariance Σ, so that of a batch of b examples has the mean G and the
    covariance Σ/b: E|g|² = |G|² + tr Σ / b. Both unknowns are sums over the elements, so they add up over the parameters of
    a layer. A walk sees `Noise` as a leaf.

    Attributes:
        n: how many elements the parameter has.
        batches: in how many batches there was a gradient; of a layer the most of any of its parameters.
        batch: the mean weight of one batch, in examples; of a layer, where its parameters differ, the greatest.
        trace: an estimate of tr Σ, the variance of one example's gradient summed over the elements; None of fewer than two
            batches, and of a layer if that of a parameter with batches is not known.
        square: an unbiased estimate of |G|², which may be negative by chance; None where `trace` would be.

    >>> weight = Noise(n=4, batches=10, batch=16.0, trace=64.0, square=0.25)
    >>> weight.noise_scale, weight.signal_to_noise
    (256.0, 0.25)
    >>> layer = weight.merge(Noise(n=2, batches=10, batch=16.0, trace=16.0, square=0.25))
    >>> layer.n, layer.trace, layer.noise_scale
    (6, 80.0, 160.0)
    """

    n: int = 0
    batches: int = 0
    batch: float | None = None
    trace: float | None = None
    square: float | None = None

    @property
    def noise_scale(self) -> float | None:
        """tr Σ / |G|², in examples: the simple noise scale of McCandlish et al. 2018 (arXiv 1812.06162).

        A batch of this size has noise as large as the gradient itself; larger batches hardly make better steps. inf if no
        gradient stands out from the noise (`square` is not positive), None if both are zero or one is not known.
        """
        if self.trace is None or self.square is None:
            return None
        noise, signal = max(self.trace, 0.0), max(self.square, 0.0)  # by rounding or chance below zero
        return _quotient(noise, signal)

    @property
    def signal_to_noise(self) -> float | None:
        """|G| / sqrt(tr Σ / b), for b = `batch`: |G| over the standard deviation of one batch's gradient.

        0 if no gradient stands out from the noise, inf if there is a gradient and no noise, None if there is neither or one
        is not known.
        """
        if self.trace is None or self.square is None or self.batch is None:
            return None
        noise, signal = max(self.trace, 0.0), max(self.square, 0.0)
        return _quotient(sqrt(signal) * sqrt(self.batch), sqrt(noise))  # root by root: no quotient under them vanishes

    def merge(self, other: Noise) -> Noise:
        """The noise of the elements of both together, over the batches of one data set."""
        batches = self.batches, other.batches
        return Noise(
            n=self.n + other.n,
            batches=max(batches),
            batch=_greatest(self.batch, other.batch),
            trace=_sum_if_known((self.trace, other.trace), batches),
            square=_sum_if_known((self.square, other.square), batches),
        )


Values = tuple[float | None, float | None]


def _scaled(part: Any, factor: float, names: Sequence[str]) -> Any:
    values = {name: getattr(part, name) for name in part.names()}
    values |= {name: values[name] * factor for name in names if values[name] is not None}
    return type(part)(**values)


def _mean(means: Values, weights: tuple[int, int]) -> float | None:
    one, other = means
    if one is None or other is None:
        return other if one is None else one
    total = sum(weights)
    return one * (weights[0] / total) + other * (weights[1] / total)


def _merged_spread(means: Values, stds: Values, weights: tuple[int, int]) -> Values:
    """Mean and standard deviation of both parts together (Chan, Golub, LeVeque 1979), with roots in place of squares."""
    mean = _mean(means, weights)
    (one, other), (s, t) = means, stds
    if one is None or other is None or s is None or t is None:
        return mean, t if s is None else s
    p, q = (weight / sum(weights) for weight in weights)
    root = sqrt(p) * sqrt(q)
    return mean, hypot(sqrt(p) * s, sqrt(q) * t, root * one - root * other)


def _quotient(x: float, y: float) -> float | None:
    """x/y of numbers that are not negative; None where it is 0/0 or inf/inf."""
    if not y:
        return inf if x else None
    quotient = x / y
    return None if isnan(quotient) else quotient


def _sum_if_known(values: Values, counts: tuple[int, int]) -> float | None:
    """None if a value is lacking that a part with a count should have, or if there is no value."""
    if any(value is None and count for value, count in zip(values, counts, strict=True)):
        return None
    known = [value for value in values if value is not None]
    return None if not known or isnan(sum(known)) else sum(known)


def _root_mean_square(values: Values, weights: tuple[int, int]) -> float | None:
    one, other = values
    if one is None or other is None:
        return other if one is None else one
    p, q = (weight / sum(weights) for weight in weights)
    return hypot(sqrt(p) * one, sqrt(q) * other)


def _least(one: float | None, other: float | None) -> float | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _greatest(one: float | None, other: float | None) -> float | None:
    return max((each for each in (one, other) if each is not None), default=None)

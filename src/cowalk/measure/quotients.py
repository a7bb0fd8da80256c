"""The quotients parameter / gradient of one leaf, element by element: over the defined ones only, the others counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import numpy as np

from cowalk.measure.blocks import blocks
from cowalk.tree import leaf


@leaf
@dataclass(frozen=True, slots=True)
class Ratio:
    """What the quotients p/g of a parameter and its gradient are like, over the elements where one is defined.

    A quotient is defined where p and g are finite, g is not zero, and p/g fits into float64. Of complex numbers the modulus
    is taken: |p|/|g|. `n` is the sum of the four counts after it. A walk sees a `Ratio` as a leaf.

    Attributes:
        n: how many elements the leaf has.
        defined: how many of them have a quotient.
        x_by_zero: elements whose gradient is zero and whose parameter is not.
        zero_by_zero: elements where both are zero.
        nonfinite: elements where p or g is NaN or infinite, or where p/g overflows.
        mean, min, max: of the defined quotients; None if there is none.
        mean_abs: the mean of their absolute values; None if there is none.
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

    def merge(self, other: Ratio) -> Ratio:
        """The ratio of the elements of both together.

        >>> Ratio(n=1, defined=1, mean=3.0, min=3.0, max=3.0, mean_abs=3.0).merge(Ratio(n=2, x_by_zero=2)).n
        3
        """
        weight = self.defined, other.defined
        return Ratio(
            n=self.n + other.n,
            defined=self.defined + other.defined,
            x_by_zero=self.x_by_zero + other.x_by_zero,
            zero_by_zero=self.zero_by_zero + other.zero_by_zero,
            nonfinite=self.nonfinite + other.nonfinite,
            mean=_weighted((self.mean, other.mean), weight),
            min=min((each for each in (self.min, other.min) if each is not None), default=None),
            max=max((each for each in (self.max, other.max) if each is not None), default=None),
            mean_abs=_weighted((self.mean_abs, other.mean_abs), weight),
        )


def ratio_of(parameter: Any, gradient: Any) -> Ratio:
    """The `Ratio` of two arrays of one shape, of any framework and dtype."""
    found = Ratio()
    for p, g in blocks(parameter, gradient):
        found = found.merge(_ratio_of_block(p, g))
    return found


def _ratio_of_block(p: Any, g: Any) -> Ratio:
    # Written with operators and methods that NumPy arrays and torch tensors share.
    finite = (abs(p) < inf) & (abs(g) < inf)
    zero = finite & (g == 0)
    by_zero = int(zero.sum())
    zero_by_zero = int((zero & (p == 0)).sum())
    usable = finite & (g != 0)
    with np.errstate(over="ignore"):
        quotients = p[usable] / g[usable]
    quotients = quotients[abs(quotients) < inf]
    counts = Ratio(
        n=len(p),
        defined=len(quotients),
        x_by_zero=by_zero - zero_by_zero,
        zero_by_zero=zero_by_zero,
        nonfinite=len(p) - len(quotients) - by_zero,
    )
    if not counts.defined:
        return counts
    least, greatest = float(quotients.min()), float(quotients.max())
    return replace(counts, mean=_mean(quotients), min=least, max=greatest, mean_abs=_mean(abs(quotients)))


def _mean(quotients: Any) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(quotients.mean())
    if isfinite(mean):
        return mean
    # The sum overflowed. A mean lies between the least and the greatest value, which rounding may not leave either.
    shares = float((quotients / len(quotients)).sum())
    return min(max(shares, float(quotients.min())), float(quotients.max()))


def _weighted(means: tuple[float | None, float | None], weights: tuple[int, int]) -> float | None:
    one, other = means
    if one is None or other is None:
        return other if one is None else one
    total = sum(weights)
    return one * (weights[0] / total) + other * (weights[1] / total)

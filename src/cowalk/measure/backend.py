"""The seam between what is measured and how: a back end fills a matrix, one line a leaf, one column a statistic.

The columns are the fields of `Moments` for the parameter, the gradient and the update, those of `Pair` for
(parameter, gradient) and (update, parameter), and those of `Adam`. A section whose arrays are absent is NaN throughout.
A table may hold more sections behind these (see `cowalk.measure.rows`), of which no back end knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cowalk.measure.moments import Adam, Moments, Noise, Pair

Matrix = NDArray[np.float64]

SECTIONS: dict[str, type[Moments | Pair | Adam]] = {
    "parameter": Moments,
    "gradient": Moments,
    "update": Moments,
    "ratio": Pair,
    "update_ratio": Pair,
    "adam": Adam,
}
"""The sections that a back end fills, in their order: `ratio` is parameter / gradient, `update_ratio` is update / parameter."""


def spans_of(sections: Mapping[str, type[Moments | Pair | Adam | Noise]]) -> dict[str, slice]:
    """Which columns of a line belong to each section, where they follow one another."""
    spans: dict[str, slice] = {}
    start = 0
    for name, section in sections.items():
        spans[name] = slice(start, start + len(section.names()))
        start = spans[name].stop
    return spans


SPANS = spans_of(SECTIONS)
"""Which columns of a line belong to a section."""
WIDTH = max(span.stop for span in SPANS.values())


class AdamSettings(NamedTuple):
    """What is needed besides g, m and v: `m_scale` and `v_scale` debias (1 / (1 − βᵗ), or 1); lr may be NaN: not known."""

    epsilon: float
    m_scale: float = 1.0
    v_scale: float = 1.0
    lr: float = float("nan")


class Operands(NamedTuple):
    """The arrays of one leaf, all of one shape; None where there is none. `m` and `v` are Adam's moments of the gradient."""

    parameter: Any
    gradient: Any = None
    update: Any = None
    m: Any = None
    v: Any = None
    adam: AdamSettings | None = None


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many elements, finite and not zero, have ⌊log₂|x|⌋ = low, low + 1, …: one count for each."""

    low: int
    counts: tuple[int, ...]

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of the elements of both together."""
        if not self.counts or not other.counts:
            return self if self.counts else other
        low = min(self.low, other.low)
        high = max(self.low + len(self.counts), other.low + len(other.counts))
        counts = [0] * (high - low)
        for part in (self, other):
            for i, count in enumerate(part.counts, part.low - low):
                counts[i] += count
        return Histogram(low, tuple(counts))


Histograms = list[tuple[Histogram | None, Histogram | None, Histogram | None]]
"""For each leaf, those of the parameter, the gradient and the update."""


class Backend(Protocol):
    """A way to measure arrays of some kind."""

    def measure(self, leaves: Sequence[Operands], histograms: bool) -> tuple[Matrix, Histograms | None]:
        """The matrix, (leaves × WIDTH), and the histograms if they are asked for."""
        ...


def empty_matrix(leaves: int) -> Matrix:
    """A matrix in which nothing is known yet."""
    return np.full((leaves, WIDTH), np.nan)

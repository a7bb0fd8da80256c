"""How the gradients of batches scatter around their mean: the gradient noise, as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cowalk.measure import Row, Table, stats
from cowalk.tree import Path


class Scatter(NamedTuple):
    """How gradients scatter around their mean.

    Attributes:
        squares: for each parameter the number of its gradients, and the sum of weight · |g|² over them.
        weight: of all batches.
        batches: how many have a weight.
        model: that the gradients are of, if it is known.
    """

    squares: Mapping[Path, tuple[int, float]]
    weight: float
    batches: int
    model: Any

    def table(self, gradient: Any, factor: float) -> Table:
        """The table of a gradient; `factor` times it is the mean."""
        table = stats(gradient if self.model is None else self.model, gradient, strict=False)
        lines = [self._line(row, factor) for row in table]
        return table.with_noise(np.array(lines, np.float64).reshape(len(lines), 5))

    def _line(self, row: Row, factor: float) -> list[float]:
        count, square = self.squares.get(row.path, (0, 0.0))
        if count == 0 or row.gradient is None or self.weight == 0:
            return [math.nan] * 5
        n, batch = row.gradient.n, self.weight / self.batches
        norm = row.gradient.norm * factor
        if self.batches < 2 or row.gradient.nonfinite or not math.isfinite(square):
            return [n, count, batch, math.nan, math.nan]
        trace = max(0.0, (square - self.weight * norm * norm) / (self.batches - 1))  # below zero by rounding only
        return [n, count, batch, trace, norm * norm - trace / self.weight]

"""The states of a gradient, told apart: frozen, not run, unused, zero, partly zero, in no optimizer, or without an effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cowalk.measure.backend import SPANS, Matrix
from cowalk.measure.moments import Moments
from cowalk.measure.rows import State

_N, _ZEROS, _ZERO_ROWS = (Moments.names().index(name) for name in ("n", "zeros", "zero_rows"))
_NONFINITE = [Moments.names().index(name) for name in ("nan", "posinf", "neginf")]
_NOTHING: tuple[State, ...] = ()


def states_of(
    matrix: Matrix,
    gradients: Sequence[bool] | None,
    *,
    frozen: Collection[int] = (),
    unowned: Collection[int] = (),
    without_values: Mapping[int, State] | None = None,
) -> list[tuple[State, ...]]:
    """What is odd about each parameter, the likeliest cause of the others first.

    Args:
        matrix: what was measured, a line each.
        gradients: whether each has a gradient; None if none were given.
        frozen, unowned: the positions of those that require no gradient, and of those that no optimizer owns.
        without_values: "uninitialised" or "meta", by position.
    """
    found: dict[int, list[State]] = {i: [state] for i, state in (without_values or {}).items()}

    def add(state: State, positions: Iterable[int]) -> None:
        for i in positions:
            found.setdefault(i, []).append(state)

    has = list(gradients) if gradients is not None else [False] * len(matrix)
    gradient, update = (matrix[:, SPANS[section]] for section in ("gradient", "update"))
    add("non-finite", _where(_nonfinite(matrix)))
    add("frozen", sorted(frozen))
    if gradients is not None:
        lacking = [i for i in range(len(has)) if not has[i] and i not in frozen and i not in (without_values or {})]
        add("unused" if any(has) else "not run", lacking)
    add("no optimizer", [i for i in sorted(unowned) if has[i]])
    add("zero", _where((gradient[:, _N] > 0) & (gradient[:, _ZEROS] == gradient[:, _N])))
    add("unmoved", [i for i in _where((update[:, _N] > 0) & (update[:, _ZEROS] == update[:, _N])) if has[i]])
    add("partly zero", _where((gradient[:, _ZERO_ROWS] > 0) & (gradient[:, _ZEROS] < gradient[:, _N])))
    return [tuple(found[i]) if i in found else _NOTHING for i in range(len(matrix))]


def _nonfinite(matrix: Matrix) -> Any:
    """Which lines hold NaN or infinities; in Adam's state, beyond those of the gradient."""
    held: Any = False
    for section in ("parameter", "gradient", "update"):
        held = held | (matrix[:, SPANS[section]][:, _NONFINITE] > 0).any(axis=1)
    adam = matrix[:, SPANS["adam"]]
    return held | (adam[:, 0] > adam[:, 1])  # more elements than defined ones


def _where(condition: Any) -> list[int]:
    return np.flatnonzero(condition).tolist()

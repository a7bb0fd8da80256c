"""`ratio`: how the parameters of a model relate to their gradients, leaf by leaf."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cowalk.measure.blocks import is_numbers, is_tensor
from cowalk.measure.quotients import ratio_of
from cowalk.measure.table import RatioRow, RatioTable, State
from cowalk.tree import MISSING, CowalkError, Leaf, Path, fmapstructure, is_missing, isleaf, istrainable, kind_of, walk
from cowalk.tree.matching import holds_value
from cowalk.tree.paths import brief
from cowalk.tree.walk import Ties
from cowalk.tree.where import Where

_NOTHING = "a class of your own opens with cowalk.functor, and arrays have to be of floating or complex numbers"


class MeasureError(CowalkError, ValueError):
    """Leaves that cannot be measured. `problems` holds (path, reason) of all of them; nothing was measured."""

    _SHOWN = 6

    def __init__(self, problems: Sequence[tuple[Path, str]]) -> None:
        count = len(problems)
        lines = [f"{count} {'leaf' if count == 1 else 'leaves'} cannot be measured:"]
        lines += [f"  {brief(path)}: {reason}" for path, reason in problems[: self._SHOWN]]
        if count > self._SHOWN:
            lines.append(f"  … and {count - self._SHOWN} more (all in .problems)")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[MeasureError], tuple[tuple[tuple[Path, str], ...]]]:
        return MeasureError, (self.problems,)


def ratio(model: Any, grads: Any, *, ties: Ties = "share", where: Where = istrainable) -> RatioTable:
    """The quotients parameter / gradient of every trainable array of a model: mean, min and max, and what has no quotient.

    Args:
        model: any model, or tree of arrays; its order and shape are the table's.
        grads: its gradients, in containers of any kind, matched by key. Where one is missing (None), the row says so.
        ties: how gradients at the paths of one tied parameter are joined: "share" (they must be one array), "sum" (each
            path has a contribution of its own; torch's `.grad` is the sum already), "first", or "each" (every path is a
            row of its own).
        where: which leaves to measure, as in every walk; `isleaf` takes plain numbers too.

    Returns:
        A table with a row for each leaf, the same as a tree in the model's shape (`structure`), and the total.

    Raises:
        StructureError: model and gradients do not fit together; all differences are on it.
        MeasureError: a parameter and its gradient have different shapes, or one of them is no array of numbers.
        TieError: different gradients for one tied parameter, with ties="share".

    >>> import numpy as np, cowalk
    >>> model = {"w": np.array([1.0, 2.0]), "b": np.array([0.0, 3.0]), "head": np.ones(2)}
    >>> table = cowalk.ratio(model, {"w": np.array([2.0, 1.0]), "b": np.array([0.5, 0.0]), "head": None})
    >>> table.structure["w"].mean, table.structure["b"].x_by_zero, table.structure["head"]
    (1.25, 1, None)
    >>> table
    parameter    n  mean p/g  min  max  mean |p/g|  undefined
    w            2      1.25  0.5    2        1.25
    b            2         0    0    0           0  1 x/0
    head         2         -    -    -           -  no gradient
    2 of 3 rows  4    0.8333    0    2      0.8333  1 x/0
    |p/g| is the learning rate at which one plain gradient step would be as large as
    the parameter itself.
    """
    leaves = list(walk(model, grads, where=where, missing="pass", ties=ties))
    problems = [(path, reason) for path, values in leaves if (reason := _obstacle(*values)) is not None]
    if not leaves and holds_value(model, numeric=False):
        problems = [(Path(), f"where= finds nothing to measure in this {type(model).__name__}; {_NOTHING}")]
    if problems:
        raise MeasureError(problems)
    measured = fmapstructure(_row, model, grads, where=where, missing="pass", ties=ties, with_path=True)
    found: dict[int, tuple[RatioRow, list[Path]]] = {}
    for path, (row,) in walk(measured, where=RatioRow):
        found.setdefault(id(row), (row, []))[1].append(path)
    return RatioTable(
        rows=tuple(replace(row, aliases=tuple(paths[1:])) for row, paths in found.values()),
        structure=fmapstructure(
            lambda node: node.ratio if isinstance(node, RatioRow) else None,
            measured,
            where=lambda node: isleaf(node) or is_missing(node),
        ),
    )


def _row(path: Path, parameter: Any, gradient: Any) -> RatioRow:
    state = _state(parameter, gradient)
    dtype = getattr(parameter, "dtype", type(parameter).__name__)
    return RatioRow(
        path=path,
        state=state,
        shape=None if state == "uninitialised" else tuple(np.shape(parameter)),
        dtype=getattr(dtype, "name", str(dtype).removeprefix("torch.")),
        ratio=ratio_of(parameter, gradient) if state == "measured" else None,
    )


def _state(parameter: Any, gradient: Any) -> State:
    if is_tensor(parameter):
        if sys.modules["torch"].nn.parameter.is_lazy(parameter):
            return "uninitialised"
        if parameter.is_meta or (is_tensor(gradient) and gradient.is_meta):
            return "meta"
    return "no gradient" if gradient is MISSING else "measured"


def _obstacle(parameter: Any, gradient: Any) -> str | None:
    """Why a parameter and its gradient cannot be measured."""
    if _state(parameter, gradient) == "uninitialised":
        return None
    for what, value in (("parameter", parameter), ("gradient", gradient)):
        kind = kind_of(type(value))
        if isinstance(kind, Leaf) and kind.traced is not None and kind.traced(value):
            return (
                f"the {what} is a tracer, which has no values yet: call cowalk.ratio outside of jit, on what it returns"
            )
        if value is not MISSING and not (isleaf(value) and is_numbers(value)):
            return f"the {what} is no array of numbers but a {type(value).__name__}"
    if gradient is not MISSING and np.shape(parameter) != np.shape(gradient):
        return f"the parameter has shape {tuple(np.shape(parameter))}, its gradient {tuple(np.shape(gradient))}"
    return None

"""cowalk: walk a model, its gradients, its updates and its optimizer state together, and say how they relate.

Importing cowalk imports no framework, and no NumPy: what needs them is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cowalk import frameworks as frameworks  # tells the tree room which file to load when a framework's types arrive
from cowalk.tree import (
    MISSING,
    Alias,
    CowalkError,
    CycleError,
    Difference,
    KindError,
    Path,
    PathError,
    StructureError,
    TieError,
    WriteError,
    aliases,
    children,
    diff,
    flatten,
    fmap,
    fmap_,
    fmapstructure,
    functor,
    get,
    isleaf,
    isnumeric,
    istrainable,
    leaf,
    register,
    replace,
    unflatten,
    walk,
)

if TYPE_CHECKING:
    from cowalk.gradients import (
        Accumulator,
        AccumulatorError,
        Batch,
        DatasetGradient,
        FrameworkError,
        ShapeError,
        dataset_gradient,
        gradient,
        gradients_of,
        optimizer_state,
        trainables,
        value_and_gradient,
    )
    from cowalk.measure import (
        Adam,
        MeasureError,
        Moments,
        Pair,
        Row,
        Table,
        ratio,
        stats,
    )
    from cowalk.optim import adjust, destructure, freeze, setup, thaw, update, update_

    __version__: str

__all__ = [
    "MISSING",
    "Accumulator",
    "AccumulatorError",
    "Adam",
    "Alias",
    "Batch",
    "CowalkError",
    "CycleError",
    "DatasetGradient",
    "Difference",
    "FrameworkError",
    "KindError",
    "MeasureError",
    "Moments",
    "Pair",
    "Path",
    "PathError",
    "Row",
    "ShapeError",
    "StructureError",
    "Table",
    "TieError",
    "WriteError",
    "adjust",
    "aliases",
    "children",
    "dataset_gradient",
    "destructure",
    "diff",
    "flatten",
    "fmap",
    "fmap_",
    "fmapstructure",
    "freeze",
    "functor",
    "get",
    "gradient",
    "gradients_of",
    "isleaf",
    "isnumeric",
    "istrainable",
    "leaf",
    "optimizer_state",
    "ratio",
    "register",
    "replace",
    "setup",
    "stats",
    "thaw",
    "trainables",
    "unflatten",
    "update",
    "update_",
    "value_and_gradient",
    "walk",
]

_LATER = {
    "ShapeError": "cowalk.gradients",
    "dataset_gradient": "cowalk.gradients",
    "DatasetGradient": "cowalk.gradients",
    "Batch": "cowalk.gradients",
    "AccumulatorError": "cowalk.gradients",
    "Accumulator": "cowalk.gradients",
    "update_": "cowalk.optim",
    "update": "cowalk.optim",
    "thaw": "cowalk.optim",
    "setup": "cowalk.optim",
    "freeze": "cowalk.optim",
    "destructure": "cowalk.optim",
    "adjust": "cowalk.optim",
    "FrameworkError": "cowalk.gradients",
    "gradient": "cowalk.gradients",
    "gradients_of": "cowalk.gradients",
    "optimizer_state": "cowalk.gradients",
    "trainables": "cowalk.gradients",
    "value_and_gradient": "cowalk.gradients",
    "Adam": "cowalk.measure",
    "MeasureError": "cowalk.measure",
    "Moments": "cowalk.measure",
    "Pair": "cowalk.measure",
    "Row": "cowalk.measure",
    "Table": "cowalk.measure",
    "ratio": "cowalk.measure",
    "stats": "cowalk.measure",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cowalk")
    if name in ("jax", "optim"):  # cowalk.jax, which imports JAX, and the room of the rules
        return importlib.import_module(f"cowalk.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'cowalk' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

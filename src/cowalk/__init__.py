"""cowalk: walk a model, its gradients, its updates and its optimizer state together, and say how they relate.

The public names are imported when they are first used; importing cowalk imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cowalk import frameworks as frameworks

if TYPE_CHECKING:
    from cowalk.gradients import FrameworkError as FrameworkError
    from cowalk.gradients import gradient as gradient
    from cowalk.gradients import gradients_of as gradients_of
    from cowalk.gradients import optimizer_state as optimizer_state
    from cowalk.gradients import trainables as trainables
    from cowalk.gradients import value_and_gradient as value_and_gradient
    from cowalk.measure import MeasureError as MeasureError
    from cowalk.measure import Ratio as Ratio
    from cowalk.measure import RatioTable as RatioTable
    from cowalk.measure import ratio as ratio
    from cowalk.tree import MISSING as MISSING
    from cowalk.tree import Alias as Alias
    from cowalk.tree import CowalkError as CowalkError
    from cowalk.tree import CycleError as CycleError
    from cowalk.tree import Difference as Difference
    from cowalk.tree import KindError as KindError
    from cowalk.tree import Path as Path
    from cowalk.tree import PathError as PathError
    from cowalk.tree import StructureError as StructureError
    from cowalk.tree import TieError as TieError
    from cowalk.tree import WriteError as WriteError
    from cowalk.tree import aliases as aliases
    from cowalk.tree import children as children
    from cowalk.tree import diff as diff
    from cowalk.tree import flatten as flatten
    from cowalk.tree import fmap as fmap
    from cowalk.tree import fmap_ as fmap_
    from cowalk.tree import fmapstructure as fmapstructure
    from cowalk.tree import functor as functor
    from cowalk.tree import get as get
    from cowalk.tree import isleaf as isleaf
    from cowalk.tree import isnumeric as isnumeric
    from cowalk.tree import istrainable as istrainable
    from cowalk.tree import leaf as leaf
    from cowalk.tree import register as register
    from cowalk.tree import replace as replace
    from cowalk.tree import unflatten as unflatten
    from cowalk.tree import walk as walk

_HOMES = {
    "cowalk.tree": (
        "MISSING Alias CowalkError CycleError Difference KindError Path PathError StructureError TieError WriteError aliases "
        "children diff flatten fmap fmap_ fmapstructure functor get isleaf isnumeric istrainable leaf register replace "
        "unflatten walk"
    ),
    "cowalk.measure": "MeasureError Ratio RatioTable ratio",
    "cowalk.gradients": "FrameworkError gradient gradients_of optimizer_state trainables value_and_gradient",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [*sorted(_HOME_OF), "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cowalk")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'cowalk' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

"""cowalk: walk a model, its gradients, its updates and its optimizer state together, and say how they relate.

The public names are imported when they are first used; importing cowalk imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cowalk import frameworks as frameworks

if TYPE_CHECKING:
    from cowalk.gradients import gradient as gradient
    from cowalk.gradients import gradients_of as gradients_of
    from cowalk.gradients import optimizer_state as optimizer_state
    from cowalk.gradients import trainables as trainables
    from cowalk.gradients import value_and_gradient as value_and_gradient
    from cowalk.measure import ratio as ratio
    from cowalk.tree import (
        MISSING as MISSING,
    )

_HOMES = {
    "cowalk.tree": (
        "MISSING Alias CowalkError CycleError Difference KindError Path PathError StructureError TieError WriteError aliases "
        "children diff flatten fmap fmap_ fmapstructure functor get isleaf isnumeric istrainable leaf register replace "
        "unflatten walk"
    ),
    "cowalk.measure": "ratio Ratio RatioTable",
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

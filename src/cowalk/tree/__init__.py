"""Trees of any kind, walked together.

What lives here: kinds (how a type opens and closes), paths, the walks and their laws, errors about trees. What may not:
anything that knows of arrays, gradients or a framework.
"""

from cowalk.tree import containers as containers
from cowalk.tree.errors import (
    CowalkError,
    CycleError,
    Difference,
    KindError,
    PathError,
    StructureError,
    TieError,
)
from cowalk.tree.inplace import WriteError, fmap_
from cowalk.tree.kinds import (
    Box,
    Branch,
    Leaf,
    Nothing,
    children,
    is_missing,
    isleaf,
    isnumeric,
    istrainable,
    kind_of,
    leaf,
    register,
)
from cowalk.tree.lookup import Alias, aliases, flatten, get, replace, unflatten
from cowalk.tree.missing import MISSING
from cowalk.tree.paths import Index, Path
from cowalk.tree.records import functor
from cowalk.tree.walk import diff, fmap, fmapstructure, walk

__all__ = [
    "MISSING",
    "Alias",
    "Box",
    "Branch",
    "CowalkError",
    "CycleError",
    "Difference",
    "Index",
    "KindError",
    "Leaf",
    "Nothing",
    "Path",
    "PathError",
    "StructureError",
    "TieError",
    "WriteError",
    "aliases",
    "children",
    "diff",
    "flatten",
    "fmap",
    "fmap_",
    "fmapstructure",
    "functor",
    "get",
    "is_missing",
    "isleaf",
    "isnumeric",
    "istrainable",
    "kind_of",
    "leaf",
    "register",
    "replace",
    "unflatten",
    "walk",
]

"""The walks: `walk`, `fmap`, `fmapstructure`, `fmap_`, and `diff`. What they share is their arguments.

trees     the lead, then its followers, matched to it by key
where     which nodes are handed to f, asked from the root down: a predicate, a type (or several), or a path pattern
missing   what happens at a leaf where a follower has no value: "skip", "pass" (f gets MISSING), "error", or a function
          that makes the value from the lead's leaf
strict    absent and extra keys are errors; if False, absent means missing and extras are ignored
ties      how the followers' values at the paths of one tied leaf are joined: "share" (they must agree), "sum", "first",
          or "each" (every path is a leaf of its own)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from cowalk.tree import engine
from cowalk.tree.errors import CycleError, Difference
from cowalk.tree.kinds import isleaf
from cowalk.tree.matching import tell
from cowalk.tree.paths import Path
from cowalk.tree.where import Where, predicate

_MOST_OUTPUTS = 1000
Ties = Literal["share", "sum", "first", "each"]
MissingPolicy = Literal["skip", "pass", "error"] | Callable[[Any], Any]


def check_options(missing: Any, ties: Any) -> None:
    """Raise ValueError for a policy that does not exist."""
    if missing not in ("skip", "pass", "error") and not callable(missing):
        raise ValueError(f"missing= is 'skip', 'pass', 'error' or a function of the lead's leaf, not {missing!r:.60}")
    if ties not in ("share", "sum", "first", "each"):
        raise ValueError(f"ties= is 'share', 'sum', 'first' or 'each', not {ties!r:.60}")


def walk(
    *trees: Any,
    where: Where = isleaf,
    missing: MissingPolicy = "skip",
    strict: bool = True,
    ties: Ties = "share",
) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    """Iterate over the leaves of the trees, side by side, in the lead's order.

    The trees are compared at once, before the first leaf comes.

    Args:
        trees: the lead, then its followers, which are matched to it by key.
        where: which nodes to visit, asked from the root down: a predicate, a type (or several), or a path pattern such as
            "encoder.*.weight". The leaves by default.
        missing: at a leaf where a follower has no value: "skip" it, "pass" MISSING, raise an "error", or a function that
            makes the value from the lead's leaf.
        strict: absent and extra keys are errors; if False, absent means missing and extras are ignored.
        ties: how the followers' values at the paths of one tied leaf are joined: "share" (they must agree), "sum", "first",
            or "each" (every path is a leaf of its own).

    Yields:
        (path, leaves): where the leaf is in the lead, and its value in each tree.

    Raises:
        StructureError: the trees do not fit together; all differences are on it.
        TieError: a follower has different values for one tied leaf.
        CycleError: the lead holds itself.

    >>> import cowalk
    >>> model = {"w": 3.0, "b": [1.0, 2.0]}
    >>> grads = {"b": None, "w": 6.0}
    >>> [(str(path), p / g) for path, (p, g) in cowalk.walk(model, grads)]
    [('w', 0.5)]
    >>> [str(path) for path, _ in cowalk.walk(model, where="b.*")]
    ['b.0', 'b.1']
    """
    if not (trees and where is isleaf and missing == "skip" and ties == "share"):
        where = _checked(trees, where, missing, ties)
    return engine.current().walk(trees, where, missing, strict, ties, False)


def fmap(
    f: Callable[..., Any],
    *trees: Any,
    where: Where = isleaf,
    missing: MissingPolicy = "skip",
    strict: bool = True,
    ties: Ties = "share",
    with_path: bool = False,
    outputs: int = 1,
) -> Any:
    """Apply f to the leaves of the trees, side by side; the result has the lead's types and shape.

    f gets one leaf of each tree (after the path, with `with_path`). Places that are not visited stand in the result as they
    stand in the lead. Nothing is changed in place, and no constructor of a user's class runs.

    Args:
        f: makes a new leaf; with `outputs=n`, a tuple of n leaves.
        trees: the lead and its followers (the other arguments are those of `walk`).
        with_path: give f the leaf's `Path` first.
        outputs: how many trees to make.

    Returns:
        A tree like the lead, or a tuple of them if `outputs` is not 1.

    Raises:
        StructureError, TieError, CycleError: as `walk`.
        TypeError: f did not return `outputs` values.
        Whatever f raises, with a note that names the leaf.

    >>> import cowalk
    >>> cowalk.fmap(lambda p, g: p - 0.5 * g, {"w": 3.0, "b": (1.0, 2.0)}, {"w": 2.0, "b": None})
    {'w': 2.0, 'b': (1.0, 2.0)}
    """
    if not (trees and where is isleaf and missing == "skip" and ties == "share" and outputs == 1):
        where = _checked(trees, where, missing, ties, outputs)
    return engine.current().fmap(f, trees, where, missing, strict, ties, with_path, outputs, False)


def fmapstructure(
    f: Callable[..., Any],
    *trees: Any,
    where: Where = isleaf,
    missing: MissingPolicy = "skip",
    strict: bool = True,
    ties: Ties = "share",
    with_path: bool = False,
    outputs: int = 1,
) -> Any:
    """As `fmap`, but the result is made of plain containers: records (modules, dataclasses, named tuples) and mappings
    become dicts, sequences lists or tuples. A leaf that is skipped because a value is missing becomes None.

    >>> import collections, cowalk
    >>> Layer = collections.namedtuple("Layer", "weight bias")
    >>> cowalk.fmapstructure(lambda p, g: p / g, Layer(4.0, [1.0]), {"weight": 2.0, "bias": None})
    {'weight': 2.0, 'bias': [None]}
    """
    if not (trees and where is isleaf and missing == "skip" and ties == "share" and outputs == 1):
        where = _checked(trees, where, missing, ties, outputs)
    return engine.current().fmap(f, trees, where, missing, strict, ties, with_path, outputs, True)


def diff(*trees: Any, where: Where = isleaf) -> list[Difference]:
    """All places where the followers do not fit the lead, as data; an empty list if they fit. Raises nothing about trees.

    >>> import cowalk
    >>> for difference in cowalk.diff({"weight": 1.0, "bias": 2.0}, {"wieght": 1.0, "bias": 2.0}):
    ...     print(difference)
    weight: tree 1 has no 'weight' here; did you mean its 'wieght'?
    wieght: only tree 1 has 'wieght'; did you mean 'weight'?
    """
    where = _checked(trees, where)
    try:
        raw, ties = engine.current().differences(trees, where)
    except CycleError as error:
        return [Difference("cycle", 0, error.path, error.first)]
    tied = [Difference("tie", error.tree, error.paths[-1], error.paths[0]) for error in ties]
    return tell(raw, trees) + tied


def _checked(trees: tuple[Any, ...], where: Where, missing: Any = "skip", ties: Any = "share", outputs: Any = 1) -> Any:
    """Check the arguments that every walk shares; returns `where` as a predicate."""
    if not trees:
        raise TypeError("a walk needs at least one tree")
    if missing != "skip" or ties != "share":
        check_options(missing, ties)
    if outputs != 1 and not (isinstance(outputs, int) and 1 <= outputs <= _MOST_OUTPUTS):
        raise ValueError(f"outputs= is the number of trees to make, 1 to {_MOST_OUTPUTS}, not {outputs!r:.60}")
    return where if where is isleaf else predicate(where)

"""`where`: which nodes a walk hands to f. A predicate, a type (or several), or a path pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from cowalk.tree.kinds import isleaf
from cowalk.tree.paths import Path, compile_pattern

Where = Callable[[Any], Any] | str | type | tuple[type, ...]


class PathWhere:
    """A predicate that also looks at the path: `(path, node) -> bool`."""

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[Path, Any], bool]) -> None:
        self._ask = ask

    def __call__(self, path: Path, node: Any) -> bool:
        return self._ask(path, node)


def takes_path(where: Any) -> bool:
    return isinstance(where, PathWhere)


def predicate(where: Where) -> Callable[..., Any]:
    """A `where` argument as the predicate that the walk asks.

    Raises:
        TypeError: it is none of the forms a `where` can have.
    """
    if isinstance(where, str):
        pattern = compile_pattern(where)
        return PathWhere(lambda path, node: isleaf(node) and pattern.fullmatch(str(path)) is not None)
    if isinstance(where, type):
        return lambda node: isinstance(node, where)
    if isinstance(where, tuple) and all(isinstance(each, type) for each in where):
        return lambda node: isinstance(node, cast("tuple[type, ...]", where))
    if callable(where):
        return where
    raise TypeError(
        f"where= takes a predicate, a type, a tuple of types or a path pattern, not {type(where).__name__} {where!r:.60}"
    )

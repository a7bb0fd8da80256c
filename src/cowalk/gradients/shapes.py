"""The shape of trees of gradients whose branches come and go: plain containers with paths for leaves, that can be joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cowalk.tree import CowalkError, Index, Path, fmapstructure
from cowalk.tree.paths import brief


class ShapeError(CowalkError, ValueError):
    """Trees of gradients that are not of one model. `path` is where they differ."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.message = message
        self.path = path

    def __reduce__(self) -> tuple[type[ShapeError], tuple[str, Path]]:
        return ShapeError, (self.message, self.path)


@dataclass(frozen=True, slots=True)
class At:
    """Stands where a leaf is."""

    path: Path


def shape_of(tree: Any, has: Callable[[Any], bool]) -> Any:
    """The containers of a tree, an `At` for each leaf for which `has` is true, and None for the others."""
    return fmapstructure(lambda path, leaf: At(path) if has(leaf) else None, tree, ties="each", with_path=True)


def shape_of_paths(paths: Iterable[Path]) -> Any:
    """Containers for leaves at paths: lists where the keys are positions, else dicts."""
    root: Any = None
    for path in paths:
        one: Any = At(path)
        for key in reversed(path):
            one = {key: one}
        root = _joined(root, one, ())
    return _with_lists(root)


def _with_lists(shape: Any) -> Any:
    if not isinstance(shape, dict):
        return shape
    inner = {key: _with_lists(value) for key, value in shape.items()}
    if inner and all(isinstance(key, Index) for key in inner):
        return [inner.get(Index(i)) for i in range(max(inner) + 1)]
    return inner


def joined(one: Any, other: Any) -> Any:
    """A shape with all branches of both.

    Raises:
        ShapeError: there is a leaf in the one where the other has a branch, or lists of several lengths.
    """
    return _joined(one, other, ())


def _joined(one: Any, other: Any, path: tuple[Any, ...]) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, At) and isinstance(other, At):
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*one, *other])
        return {key: _joined(one.get(key), other.get(key), (*path, key)) for key in keys}
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        parts = (_joined(*pair, (*path, Index(i))) for i, pair in enumerate(zip(one, other, strict=True)))
        return type(one)(parts)
    raise ShapeError(
        f"{brief(Path(path)) or 'the root'}: earlier gradients have {_described(one)} here, and these {_described(other)}. "
        "Gradients that are added up are of one model",
        Path(path),
    )


def _described(shape: Any) -> str:
    if isinstance(shape, At):
        return "an array"
    return f"a {type(shape).__name__} of {len(shape)}"


def filled(shape: Any, values: Mapping[Path, Any]) -> Any:
    """A shape with values for its paths, and None where there is none."""
    if isinstance(shape, At):
        return values.get(shape.path)
    if isinstance(shape, dict):
        return {key: filled(value, values) for key, value in shape.items()}
    if isinstance(shape, list | tuple):
        return type(shape)(filled(value, values) for value in shape)
    return None

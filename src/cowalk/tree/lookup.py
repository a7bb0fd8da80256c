"""Places in one tree: `get`, `replace`, `flatten`, `unflatten`, `aliases`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cowalk.tree import engine
from cowalk.tree.errors import PathError, nearest
from cowalk.tree.kinds import Box, Branch, Leaf, isleaf, kind_of
from cowalk.tree.matching import follow, unbox
from cowalk.tree.paths import Key, Path, brief
from cowalk.tree.where import PathWhere


def as_path(path: str | Iterable[Key]) -> Path:
    """A path given as text or as keys."""
    return Path.parse(path) if isinstance(path, str) else Path(path)


def get(tree: Any, path: str | Iterable[Key]) -> Any:
    """The node at a path, given as text ("layers.0.weight") or as keys.

    Raises:
        PathError: the path leads nowhere; the message says how far it led and which key is near.
        ValueError: the text is no path.

    >>> import cowalk
    >>> cowalk.get({"layers": [{"weight": 5.0}]}, "layers.0.weight")
    5.0
    """
    node, _ = _find(tree, as_path(path))
    return node


def _find(tree: Any, path: Path) -> tuple[Any, Path]:
    node, own, whole = follow(tree, path)
    if not whole:
        raise _nowhere(node, own, path)
    return node, own


def _nowhere(node: Any, at: Path, path: Path) -> PathError:
    inner, kind = unbox(node)
    key = path[len(at)]
    if not isinstance(kind, Branch):
        return PathError(f"no {brief(path)} in this tree: {brief(at)} is a leaf ({type(inner).__name__})", path, at)
    keys = list(kind.open(inner))
    guess = nearest(key, keys)
    if guess is not None:
        more = f"; did you mean {guess!r}?"
    elif keys:
        more = f"; it has {', '.join(map(repr, keys[:8]))}{', …' if len(keys) > 8 else ''}"
    else:
        more = "; it has no children"
    return PathError(
        f"no {brief(path)} in this tree: {brief(at)} ({type(inner).__name__}) has no {key!r}{more}", path, at
    )


def replace(tree: Any, path: str | Iterable[Key], value: Any) -> Any:
    """A new tree with another value at a path; the tree itself is not changed. A tied leaf is replaced at all its paths.

    Raises:
        PathError: the path leads nowhere.

    >>> import cowalk
    >>> cowalk.replace({"layers": [1.0, 2.0]}, "layers.1", 7.0)
    {'layers': [1.0, 7.0]}
    """
    _, own = _find(tree, as_path(path))
    where: Any = PathWhere(lambda at, _: at == own)
    return engine.current().fmap(lambda _: value, (tree,), where, "pass", True, "share", False, 1, False)


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves by the text of their path. A tied leaf stands under all its paths, an empty place (None) under none.

    >>> import cowalk
    >>> cowalk.flatten({"layers": [{"weight": 5.0, "bias": None}]})
    {'layers.0.weight': 5.0}
    """
    leaves = engine.current().walk((tree,), isleaf, "skip", True, "each", False)
    flat: dict[str, Any] = {}
    for path, (leaf,) in leaves:
        if str(path) in flat:
            raise PathError(f"two leaves have the path {str(path)!r}: their keys print alike", path, path)
        flat[str(path)] = leaf
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[Key, Any]:
    """The nested dict of a flat one, such as a state dict: `{"fc.weight": w}` becomes `{"fc": {"weight": w}}`.

    Raises:
        ValueError: a name is no path.
        PathError: one name leads through a value that stands under another ("a" and "a.b").

    >>> import cowalk
    >>> cowalk.unflatten({"fc.weight": 1.0, "fc.bias": 2.0})
    {'fc': {'weight': 1.0, 'bias': 2.0}}
    """
    tree: dict[Key, Any] = {}
    branches: dict[Path, dict[Key, Any]] = {Path(): tree}
    values: dict[Path, str] = {}
    for text, value in flat.items():
        path = Path.parse(text)
        if path in branches:
            raise PathError(f"{text!r} holds a value, but other names lead through it", path, path)
        if path in values:
            raise PathError(f"{text!r} is the same path as {values[path]!r}", path, path)
        values[path] = text
        holder = tree
        for depth in range(1, len(path)):
            here = path[:depth]
            if here not in branches:
                if path[depth - 1] in holder:
                    raise PathError(f"{text!r} leads through {str(here)!r}, which holds a value", path, here)
                holder[path[depth - 1]] = branches[here] = {}
            holder = branches[here]
        holder[path[-1]] = value
    return tree


@dataclass(frozen=True, slots=True)
class Alias:
    """Paths whose arrays share memory: `kind` "tie" for one array object, "overlap" for arrays over common cells."""

    paths: tuple[Path, ...]
    kind: Literal["tie", "overlap"]

    def __str__(self) -> str:
        return f"{' = ' if self.kind == 'tie' else ' ~ '}".join(map(str, self.paths))


def aliases(tree: Any) -> list[Alias]:
    """The groups of leaves of one tree that share memory: ties, and distinct arrays that overlap (views, transposes).

    Ties are walked as one leaf; overlapping arrays are only reported here, each is still a leaf of its own.

    >>> import numpy, cowalk
    >>> table = numpy.ones((4, 2))
    >>> for alias in cowalk.aliases({"emb": table, "head": table, "top": table[:2]}):
    ...     print(alias.kind, alias)
    tie emb = head
    overlap emb ~ top
    """
    objects: dict[int, tuple[Any, list[Path]]] = {}
    for path, (leaf,), holder, key in engine.current().walk((tree,), isleaf, "skip", True, "each", True):
        box = holder if key is None and isinstance(kind_of(type(holder)), Box) else None
        kind = kind_of(type(leaf))
        if (isinstance(box_kind := kind_of(type(box)), Box) and box_kind.ties) or (
            isinstance(kind, Leaf) and kind.ties
        ):
            objects.setdefault(id(leaf if box is None else box), (leaf, []))[1].append(path)
    ties = [Alias(tuple(paths), "tie") for _, paths in objects.values() if len(paths) > 1]
    return ties + [Alias(paths, "overlap") for paths in _overlaps(list(objects.values()))]


def _overlaps(arrays: list[tuple[Any, list[Path]]]) -> list[tuple[Path, ...]]:
    """Groups of the first paths of distinct arrays whose address ranges meet, in the order of the tree."""
    spans: list[tuple[Any, int, int, int]] = []
    for number, (leaf, _) in enumerate(arrays):
        kind = kind_of(type(leaf))
        span = kind.span(leaf) if isinstance(kind, Leaf) and kind.span is not None else None
        if span is not None:
            device, start, stop = span
            spans.append((device, start, stop, number))
    groups: list[list[int]] = []
    last: tuple[Any, int] | None = None
    for device, start, stop, number in sorted(spans, key=lambda span: (str(span[0]), *span[1:])):
        if last is not None and last[0] == device and start < last[1]:
            groups[-1].append(number)
            last = (device, max(stop, last[1]))
        else:
            groups.append([number])
            last = (device, stop)
    found = sorted(sorted(group) for group in groups if len(group) > 1)
    return [tuple(arrays[number][1][0] for number in group) for group in found]

"""The matching rule: which child of one node belongs to a key of another (law 1), and how differences are told (law 6).

A key finds the equal key. Failing that, a number finds its other spelling, 0 for "0" and "0" for 0, unless both nodes are
mappings: there a key 1 and a key "1" are two different things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cowalk.tree.errors import Difference, DifferenceKind, StructureError, nearest
from cowalk.tree.kinds import Box, Branch, Kind, Leaf, is_missing, isnumeric, kind_of
from cowalk.tree.paths import Index, Key, Path, twin

NO_KEY = object()
_GUESSES = 20  # a guess looks at all keys of a node, so only the first differences get one
RawDifference = tuple[DifferenceKind, int, Sequence[Key], Key]


def unbox(node: Any) -> tuple[Any, Kind]:
    """What a node is behind all boxes around it, and that thing's kind."""
    kind = kind_of(type(node))
    while isinstance(kind, Box):
        node = kind.open(node)
        kind = kind_of(type(node))
    return node, kind


def is_sequence(kind: Branch) -> bool:
    """Whether a kind's keys are positions."""
    return kind.plain is not dict


def partner(key: Key, mapping: bool, taken: Mapping[Key, Any], opened: Mapping[Key, Any], opened_mapping: bool) -> Key:
    """The key in `opened` that belongs to `key`, or `NO_KEY`. `taken` are the children that `key` comes from."""
    if key in opened:
        return key
    if not (mapping and opened_mapping):
        other = twin(key)
        if other is not None and other in opened and other not in taken:
            return other
    return NO_KEY


def child_at(node: Any, key: Key) -> tuple[Any, Key]:
    """The child of a node that belongs to a key, and its own key there; `(None, NO_KEY)` if there is none.

    A key that was written in a path's text ("0") finds a position, and a position finds a name.
    """
    node, kind = unbox(node)
    if not isinstance(kind, Branch):
        return None, NO_KEY
    opened = kind.open(node)
    found = partner(key, False, {}, opened, kind.mapping)
    if found is NO_KEY:
        return None, NO_KEY
    # `found` may be an int that only equals the position.
    return opened[found], Index(found) if isinstance(found, int) and not kind.mapping else found


def follow(tree: Any, path: Iterable[Key]) -> tuple[Any, Path, bool]:
    """Go down a path as far as it leads: the node reached, its path in this tree, and whether that is the whole path."""
    node, own = tree, list[Key]()
    for key in path:
        child, found = child_at(node, key)
        if found is NO_KEY:
            return node, Path(own), False
        node = child
        own.append(found)
    return node, Path(own), True


def holds_value(node: Any, numeric: bool) -> bool:
    """Whether there is any value at or below a node (with `numeric`, any numeric array)."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        node, kind = unbox(waiting.pop())
        if isinstance(kind, Branch):
            if id(node) not in seen:
                seen.add(id(node))
                waiting.extend(kind.open(node).values())
        elif isinstance(kind, Leaf) and not is_missing(node) and (not numeric or isnumeric(node)):
            return True
    return False


def tell(raw: Iterable[RawDifference], trees: Sequence[Any]) -> list[Difference]:
    """Differences as found by a walk (kind, tree, path in the lead, key) with all that a reader needs to mend them."""
    return [
        _TELL.get(kind, _tell_node)(kind, tree, Path(path), key, trees, number < _GUESSES)
        for number, (kind, tree, path, key) in enumerate(raw)
    ]


def structure_error(raw: Sequence[RawDifference], trees: Sequence[Any]) -> StructureError:
    """The error that tells of differences, with advice that fits them."""
    return StructureError(tell(raw, trees), _advice(raw, trees))


def _advice(raw: Sequence[RawDifference], trees: Sequence[Any]) -> str:
    """What to do about differences of a well-known sort; empty for all others."""
    if all(kind == "missing" for kind, *_ in raw):
        return "Give the values, or choose another policy: missing='skip', 'pass' or a function."
    for kind, tree, path, key in raw:
        if kind == "extra" and not path and isinstance(key, str) and "." in key and _leads_somewhere(trees[0], key):
            return f"The keys of tree {tree} are paths: pass cowalk.unflatten(…) of it."
    if all(kind in ("leaf", "branch") for kind, *_ in raw):
        return "A leaf never fits a branch: open its type with cowalk.functor or register, or pass the part that fits."
    if all(kind == "absent" and not _holds_trainable(trees[0], (*path, key)) for kind, _, path, key in raw):
        return "Nothing of this is trained: where=cowalk.istrainable walks the trained parameters only."
    return ""


def _leads_somewhere(tree: Any, text: str) -> bool:
    try:
        return follow(tree, Path.parse(text))[2]
    except ValueError:
        return False


def _holds_trainable(tree: Any, path: Sequence[Key]) -> bool:
    """Whether anything that is trained stands at or below a path, going down as a walk of the trained parameters does."""
    node = tree
    for key in path:
        inner, kind = unbox(node)
        if not isinstance(kind, Branch) or (kind.trainable is not None and key not in kind.trainable(inner)):
            return False
        node = kind.open(inner).get(key)
    return holds_value(node, numeric=True)


def _keys(node: Any) -> list[Key]:
    node, kind = unbox(node)
    return list(kind.open(node)) if isinstance(kind, Branch) else []


def _guess(key: Key, node: Any, other: Any) -> Key | None:
    """The key of one node that may have been meant by a key of the other, among those that the other lacks."""
    taken = {str(each) for each in _keys(other)}
    return nearest(key, [each for each in _keys(node) if str(each) not in taken])


def _tell_node(kind: DifferenceKind, tree: int, path: Path, key: Key, trees: Sequence[Any], _: bool) -> Difference:
    lead = follow(trees[0], path)[0]
    follower, follower_path = follow(trees[tree], path)[:2]
    lead, follower = unbox(lead)[0], unbox(follower)[0]
    lengths = (len(_keys(lead)), len(_keys(follower))) if kind == "length" else None
    return Difference(kind, tree, path, follower_path, key, None, type(lead).__name__, type(follower).__name__, lengths)


def _tell_absent(
    kind: DifferenceKind, tree: int, path: Path, key: Key, trees: Sequence[Any], guessed: bool
) -> Difference:
    lead, _, _ = follow(trees[0], path)
    follower, follower_path, _ = follow(trees[tree], path)
    guess = _guess(key, follower, lead) if guessed else None
    return Difference(
        kind, tree, Path((*path, key)), follower_path, key, guess, type(lead).__name__, type(follower).__name__
    )


def _tell_extra(
    kind: DifferenceKind, tree: int, path: Path, key: Key, trees: Sequence[Any], guessed: bool
) -> Difference:
    lead, _, _ = follow(trees[0], path)
    follower, follower_path, _ = follow(trees[tree], path)
    guess = _guess(key, lead, follower) if guessed else None
    return Difference(
        kind, tree, path, Path((*follower_path, key)), key, guess, type(lead).__name__, type(follower).__name__
    )


_TELL: dict[str, Callable[[DifferenceKind, int, Path, Key, Sequence[Any], bool], Difference]] = {
    "absent": _tell_absent,
    "extra": _tell_extra,
}

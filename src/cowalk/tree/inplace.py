"""`fmap_`: f's results written into the lead. Everything is checked first, then written: all or nothing (law 10)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cowalk.tree import engine
from cowalk.tree.errors import CowalkError
from cowalk.tree.kinds import Box, Branch, Leaf, isleaf, kind_of
from cowalk.tree.paths import Path, brief
from cowalk.tree.reference import note, same
from cowalk.tree.walk import MissingPolicy, Ties, check_options
from cowalk.tree.where import Where, predicate


class WriteError(CowalkError, TypeError):
    """Places that cannot be written in place. `problems` holds (path, reason) of all of them; nothing was written."""

    def __init__(self, problems: list[tuple[Path, str]]) -> None:
        lines = [f"{len(problems)} place{'s' if len(problems) != 1 else ''} cannot be written (nothing was):"]
        lines += [f"  {brief(path)}: {reason}" for path, reason in problems[:6]]
        if len(problems) > 6:
            lines.append(f"  … and {len(problems) - 6} more (all in .problems)")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[WriteError], tuple[list[tuple[Path, str]]]]:
        return WriteError, (list(self.problems),)


@dataclass(slots=True)
class _Place:
    path: Path
    values: tuple[Any, ...]
    put: Callable[[Any], None] | None
    kind: Leaf | None
    check: Callable[[Any], str | None] | None = None
    holder: Any = None
    key: Any = None


def fmap_(
    f: Callable[..., Any],
    *trees: Any,
    where: Where = isleaf,
    missing: MissingPolicy = "skip",
    strict: bool = True,
    ties: Ties = "share",
    with_path: bool = False,
) -> Any:
    """Apply f to the leaves of the trees, side by side, and write its results into the lead.

    f may return the new value, which is copied into the lead's array, or change its first argument and return it, which
    needs no new array. Immutable leaves (JAX arrays, numbers) are replaced in the container that holds them. All places are
    checked before f runs and all results before the first is written; what f itself changes is its own affair.

    Args:
        f: makes a new value of a leaf, or changes its first argument and returns it.
        trees: the lead and its followers (the other arguments are those of `cowalk.walk`).
        with_path: give f the leaf's `Path` first.

    Returns:
        The lead, the same object.

    Raises:
        WriteError: leaves or containers that cannot be written, overlapping memory, results of another shape: all of them.
        StructureError, TieError, CycleError: as `walk`.

    >>> import numpy, cowalk
    >>> total, grads = {"w": numpy.zeros(2)}, {"w": numpy.array([1.0, 2.0])}
    >>> def add(sum, g):
    ...     sum += g
    ...     return sum
    >>> for _ in range(3):
    ...     _ = cowalk.fmap_(add, total, grads)
    >>> total["w"].tolist()
    [3.0, 6.0]
    """
    if not trees:
        raise TypeError("a walk needs at least one tree")
    check_options(missing, ties)
    asked = where if where is isleaf else predicate(where)
    walked = engine.current().walk(trees, asked, missing, strict, ties, True)
    places = [_place(*leaf) for leaf in walked]
    _refuse((place.path, _obstacle(place)) for place in places)
    _refuse(_twice(places))
    results = [_call(f, place, with_path) for place in places]
    _refuse((place.path, _misfit(place, result)) for place, result in zip(places, results, strict=True))
    _refuse(_crossing(places, results))
    for place, result in zip(places, results, strict=True):
        if result is place.values[0]:
            continue
        if place.put is not None:
            place.put(result)
        elif place.kind is not None and place.kind.write is not None:
            place.kind.write(place.values[0], result)
    return trees[0]


def _place(path: Path, values: tuple[Any, ...], holder: Any, key: Any) -> _Place:
    """A leaf and how to write it: into its own memory if it has any that can be written, else into what holds it."""
    kind = kind_of(type(values[0]))
    if isinstance(kind, Leaf) and kind.write is not None:
        return _Place(path, values, None, kind)
    return _Place(
        path, values, _putter(holder, key), kind if isinstance(kind, Leaf) else None, _checker(holder), holder, key
    )


def _checker(holder: Any) -> Callable[[Any], str | None] | None:
    kind = kind_of(type(holder))
    if isinstance(kind, Box) and kind.check is not None:
        check = kind.check
        return lambda value: check(holder, value)
    return None


def _putter(holder: Any, key: Any) -> Callable[[Any], None] | None:
    kind = kind_of(type(holder))
    if isinstance(kind, Box) and kind.put is not None:
        put_box = kind.put
        return lambda value: put_box(holder, value)
    if isinstance(kind, Branch) and kind.put is not None:
        put_child = kind.put
        return lambda value: put_child(holder, key, value)
    return None


def _obstacle(place: _Place) -> str | None:
    """Why a place cannot be written at all."""
    leaf = place.values[0]
    if place.put is None and (place.kind is None or place.kind.write is None):
        what = f"a {type(leaf).__name__} is immutable and "
        return what + ("stands at the root" if not place.path else "so is the container that holds it")
    if place.put is None and place.kind is not None and place.kind.unwritable is not None:
        return place.kind.unwritable(leaf)
    return None


def _misfit(place: _Place, result: Any) -> str | None:
    """Why a result cannot be written into its place."""
    leaf = place.values[0]
    if result is leaf:
        return None
    made = kind_of(type(result))
    if isinstance(made, Leaf) and made.traced is not None and made.traced(result):
        here = place.kind is not None and place.kind.traced is not None and place.kind.traced(leaf)
        if not here:
            return "the result is a tracer, which would leak out of the transformation; use fmap and return its result"
    if place.put is None and place.kind is not None and place.kind.check is not None:
        return place.kind.check(leaf, result)
    return place.check(result) if place.check is not None else None


def _crossing(places: list[_Place], results: list[Any]) -> Iterator[tuple[Path, str | None]]:
    """Results that lie in the memory of other leaves: writing those would change them before they are read."""
    written = [(span, i) for i, place in enumerate(places) if place.put is None and (span := _span(place.values[0]))]
    written.sort(key=lambda entry: (str(entry[0][0]), *entry[0][1:]))
    starts = [(str(device), start) for (device, start, _), _ in written]
    reach = list(accumulate((stop for (_, _, stop), _ in written), max))  # how far the leaves up to here go at most
    for i, result in enumerate(results):
        span = None if result is places[i].values[0] else _span(result)
        if span is None:
            continue
        device, start, stop = span
        for at in range(bisect_left(starts, (str(device), stop)) - 1, -1, -1):
            (other_device, _, other_stop), owner = written[at]
            if other_device != device or reach[at] <= start:
                break
            if owner != i and other_stop > start:
                yield (
                    places[i].path,
                    f"the result lies in the memory of {brief(places[owner].path)}, also written; copy it",
                )
                break


def _twice(places: list[_Place]) -> Iterator[tuple[Path, str | None]]:
    """Places that are one place of one container at two paths, where the followers differ: the last would win."""
    seen: dict[tuple[int, Any], _Place] = {}
    for place in places:
        first = seen.setdefault((id(place.holder), place.key), place) if place.put is not None else place
        if not all(same(one, other) for one, other in zip(first.values[1:], place.values[1:], strict=True)):
            yield (
                place.path,
                f"it is {brief(first.path)} again (one container at two paths), and the followers differ there",
            )


def _span(value: Any) -> tuple[Any, int, int] | None:
    kind = kind_of(type(value))
    return kind.span(value) if isinstance(kind, Leaf) and kind.span is not None else None


def _refuse(found: Iterable[tuple[Path, str | None]]) -> None:
    problems = [(path, reason) for path, reason in found if reason is not None]
    if problems:
        raise WriteError(problems)


def _call(f: Callable[..., Any], place: _Place, with_path: bool) -> Any:
    try:
        return f(place.path, *place.values) if with_path else f(*place.values)
    except Exception as error:
        note(error, place.path)
        raise

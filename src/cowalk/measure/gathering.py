"""From trees to leaves side by side: each parameter with its gradient, its update and Adam's moments, in the model's order."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cowalk.measure.arrays import is_tensor
from cowalk.measure.backend import Operands
from cowalk.measure.optimizer_states import AdamSource
from cowalk.measure.rows import Row
from cowalk.tree import (
    MISSING,
    Box,
    Path,
    PathError,
    fmapstructure,
    get,
    is_missing,
    isleaf,
    istrainable,
    kind_of,
    leaf,
    walk,
)
from cowalk.tree.walk import Ties
from cowalk.tree.where import Where


@leaf
class Place(int):
    """A row's number, standing in the model's shape."""

    __slots__ = ()


@dataclass(slots=True)
class Gathered:
    """The leaves of one measurement, side by side.

    Attributes:
        paths: where each leaf is in the model; of a tied one the first path.
        leaves: its arrays.
        structure: the model's shape, a `Place` at each leaf.
        aliases: the other paths of tied leaves, by position.
        frozen: the positions of parameters that require no gradient.
    """

    paths: list[Path] = field(default_factory=list[Path])
    leaves: list[Operands] = field(default_factory=list[Operands])
    structure: Any = None
    aliases: dict[int, tuple[Path, ...]] = field(default_factory=dict[int, tuple[Path, ...]])
    frozen: set[int] = field(default_factory=set[int])

    def names(self, i: int) -> tuple[Path, ...]:
        """All paths of a leaf."""
        return (self.paths[i], *self.aliases.get(i, ()))


def gather(
    params: Any, grads: Any, updates: Any, source: AdamSource, where: Where, ties: Ties, strict: bool
) -> Gathered:
    """Walk the trees together. A tree that is None is not given; what is missing in one is None in a leaf's arrays.

    Raises:
        StructureError, TieError, CycleError: as `walk`.
    """
    found = Gathered()
    paths, leaves = found.paths, found.leaves
    trees = [tree for tree in (grads, updates) if tree is not None]
    has_grads, has_updates = grads is not None, updates is not None
    given = len(trees)

    def note(path: Path, parameter: Any, *values: Any) -> Place:
        place = Place(len(paths))
        paths.append(path)
        gradient = values[0] if has_grads and values[0] is not MISSING else None
        update = values[has_grads] if has_updates and values[has_grads] is not MISSING else None
        adam = source.adam(path, values[given:]) if source.followers else (None, None, None)
        leaves.append(Operands(parameter, gradient, update, *adam))
        return place

    found.structure = fmapstructure(
        note, params, *trees, *source.followers, where=where, missing="pass", strict=strict, ties=ties, with_path=True
    )
    if where is istrainable:
        _add_frozen(found, params)
    visited = list(walk(found.structure))
    if not all(isinstance(place, Place) for _, (place,) in visited):
        # The table holds on to nothing that it did not measure.
        found.structure = fmapstructure(
            lambda node: node if isinstance(node, Place) else None,
            found.structure,
            where=lambda node: isleaf(node) or is_missing(node),
        )
    if len(visited) > len(found.paths):
        for path, (place,) in visited:
            if isinstance(place, Place) and path != found.paths[place]:
                found.aliases[place] = (*found.aliases.get(place, ()), path)
    if ties == "sum":
        _join_tied(found, grads, updates)
    return found


def in_shape(structure: Any, paths: Sequence[Path], rows: Mapping[Path, Row]) -> Any:
    """Rows in the shape of the model, where a `Place` holds the number of a path; None at all that is no place."""
    return fmapstructure(
        lambda node: rows[paths[node]] if isinstance(node, Place) else None,
        structure,
        where=lambda node: isleaf(node) or is_missing(node),
    )


def _join_tied(found: Gathered, grads: Any, updates: Any) -> None:
    """What a sum over the paths of a tied parameter would count twice.

    An update is of the parameter itself, so the first one counts. torch's autograd gives sums over all uses of a parameter: one
    tensor that is listed under several of its names counts once.
    """
    for i in found.aliases:
        operands = found.leaves[i]
        if updates is not None and operands.update is not None:
            operands = operands._replace(update=next(iter(_listed(updates, found.names(i))), operands.update))
        if grads is not None and is_tensor(operands.parameter):
            listed = _listed(grads, found.names(i))
            once = list({id(each): each for each in listed}.values())
            if len(once) < len(listed):
                operands = operands._replace(gradient=sum(once[1:], start=once[0].detach()))
        found.leaves[i] = operands


def _listed(tree: Any, paths: Sequence[Path]) -> list[Any]:
    """The values at the paths, without those that are missing."""
    values = (_value_at(tree, path) for path in paths)
    return [value for value in values if not is_missing(value)]


def _value_at(tree: Any, path: Path) -> Any:
    try:
        return get(tree, path)
    except PathError:  # with strict=False, or below a missing branch
        return None


def _is_box(node: Any) -> bool:
    return isinstance(kind_of(type(node)), Box)


def _add_frozen(found: Gathered, params: Any) -> None:
    """Put the frozen parameters of torch modules where they stand in the model, between the trained ones."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return

    frozen = {
        id(leaf): (path, leaf)
        for path, (leaf,) in walk(params)
        if type(leaf) is not torch.Tensor and isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad
    }
    for operands in found.leaves:
        frozen.pop(id(operands.parameter), None)
    if frozen:  # but not what is in a box: those are other frameworks' variables, whose kinds know what is trained
        for _, (box,) in walk(params, where=_is_box):
            kind = kind_of(type(box))
            if isinstance(kind, Box):
                frozen.pop(id(kind.open(box)), None)
    if not frozen:
        return
    lines: list[tuple[Path, Operands]] = []
    numbers: dict[int, int] = {}  # of the lines, by the identity of a frozen parameter or of a place

    def number(node: Any) -> Place:
        if id(node) not in numbers:
            numbers[id(node)] = len(lines)
            path, operands = (
                (found.paths[node], found.leaves[node])
                if isinstance(node, Place)
                else (frozen[id(node)][0], Operands(node))
            )
            lines.append((path, operands))
        return Place(numbers[id(node)])

    found.structure = fmapstructure(
        number, found.structure, where=lambda node: isinstance(node, Place) or id(node) in frozen, ties="each"
    )
    found.paths, found.leaves = [path for path, _ in lines], [operands for _, operands in lines]
    found.frozen = {i for i, (_, operands) in enumerate(lines) if id(operands.parameter) in frozen}

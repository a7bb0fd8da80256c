"""Segments of rules run in place, for NumPy and torch, block by block.

A block is a piece of a large array, or many small arrays joined into one: what a rule computes stays in the cache, and there
are as many calls as blocks, not as arrays. On an accelerator blocks are large: there a launch costs more than memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cowalk.optim.applying import Group, Segment, Work
from cowalk.optim.arrays import cast, functions, is_tensor
from cowalk.optim.rules.composing import MixedPrecision
from cowalk.optim.rules.rule import Rule, State

BLOCK = 1 << 17
"""Elements of a block on a CPU: large enough for torch to share them among threads, small enough for the last cache."""
DEVICE_BLOCK = 1 << 25
COUNTS = frozenset((int, float, bool, str, list, dict, tuple, type(None)))
"""What a rule may keep beside arrays. (To ask a tensor whether it has a shape would cost as much as an operation.)"""


@dataclass(slots=True, eq=False)
class Parts:
    """The arrays of a work that a segment needs: the array to update, the gradient, and what each stage keeps."""

    work: Work
    subject: Any
    states: list[State]
    output: Any = None

    def arrays(self) -> list[Any]:
        """All of them."""
        kept = [value for state in self.states for value in state.values() if type(value) not in COUNTS]
        return [self.work.x, self.subject, self.work.gradient, *kept]


class Piece(NamedTuple):
    """A part of the flat arrays of one work; without an end, the arrays as they are."""

    parts: Parts
    begin: int
    end: int | None

    def of(self, array: Any) -> Any:
        """That part of one of the arrays: a view."""
        if self.end is None:
            return array
        flat = array if array.ndim == 1 else array.reshape(-1)
        return flat if self.end - self.begin == flat.shape[0] else flat[self.begin : self.end]


Block = list[Piece]


def run(group: Group, segment: Segment) -> None:
    """Run a segment of the works of a rule, and write into what they keep, and in the end into the parameters."""
    now = group.now[segment.begin : segment.end]
    with np.errstate(all="ignore"):  # a NaN is the gradient's, and `stats` tells of it
        for alike in _alike(group, segment):
            _run_alike(alike, group.rule, segment, now)


def _alike(group: Group, segment: Segment) -> list[list[Parts]]:
    """Works whose arrays may be joined: of one kind, dtype and device, with equal counts."""
    found: dict[Any, list[Parts]] = {}
    for work in group.works:
        if not work.is_ready:
            continue
        parts = Parts(work, group.subject(work), group.states(work, segment))
        counts = [value for state in parts.states for value in state.values() if type(value) in COUNTS]
        x = parts.subject
        found.setdefault((x.dtype, work.gradient.dtype, getattr(x, "device", None), tuple(counts)), []).append(parts)
    return list(found.values())


def _run_alike(alike: list[Parts], rule: Rule, segment: Segment, now: Sequence[Rule]) -> None:
    if not segment.is_last:
        for parts in alike:
            parts.output = functions(parts.subject).empty_like(parts.subject)
    counts = [{name: value for name, value in each.items() if type(value) in COUNTS} for each in alike[0].states]
    after, is_ready = counts, True
    for block in _blocks(alike, segment):
        after, is_ready = _run_block(block, rule, segment, now, counts)
    for parts in alike:
        for state, new in zip(parts.states, after, strict=True):
            state.update(new)
        parts.work.is_ready = is_ready
        parts.work.gradient = parts.output


def _blocks(alike: list[Parts], segment: Segment) -> Iterator[Block]:
    """The pieces of some works, so many together as make a block."""
    first = alike[0].subject
    is_torch = is_tensor(first)
    most = DEVICE_BLOCK if is_torch and first.device.type != "cpu" else BLOCK
    is_dense = _is_dense_tensor if is_torch else _is_dense_array
    waiting, size = Block(), 0
    for parts in alike:
        if segment.kind != "elementwise" or not all(map(is_dense, parts.arrays())):
            yield [Piece(parts, 0, None)]
            continue
        n = parts.subject.numel() if is_torch else parts.subject.size
        if n > most:
            yield from ([Piece(parts, begin, min(begin + most, n))] for begin in range(0, n, most))
            continue
        if size + n > most:
            yield waiting
            waiting, size = [], 0
        waiting.append(Piece(parts, 0, n))
        size += n
    if waiting:
        yield waiting


def _is_dense_tensor(array: Any) -> bool:
    return array.is_contiguous()


def _is_dense_array(array: Any) -> bool:
    return array.flags.c_contiguous


def _run_block(
    block: Block, rule: Rule, segment: Segment, now: Sequence[Rule], counts: Sequence[State]
) -> tuple[list[State], bool]:
    """Run a segment of one block. Returns the new counts of its stages, and whether there is a step."""
    subjects = [piece.of(piece.parts.subject) for piece in block]
    x = _joined(subjects)
    step = cast(_joined([piece.of(piece.parts.work.gradient) for piece in block]), x.dtype)
    after: list[State] = []
    for i, stage in enumerate(now):
        names = [name for name, value in block[0].parts.states[i].items() if type(value) not in COUNTS]
        places = {name: [piece.of(piece.parts.states[i][name]) for piece in block] for name in names}
        state = {**{name: _joined(each) for name, each in places.items()}, **counts[i]}
        new, step = stage.checked(stage.apply(state, x, step), state, x)
        for name, each in places.items():
            _write(each, new[name])
        after.append({name: value for name, value in new.items() if name not in places})
        if not stage.is_ready(new):
            return [*after, *counts[i + 1 :]], False
    if not segment.is_last:
        _write([piece.of(piece.parts.output) for piece in block], step)
        return after, True
    if is_tensor(x):
        x.sub_(step)
    else:
        np.subtract(x, step, out=x, casting="same_kind")
    if len(block) > 1:
        _write(subjects, x)
    if isinstance(rule, MixedPrecision):
        _write([piece.of(piece.parts.work.x) for piece in block], x)
    return after, True


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else functions(parts[0]).concatenate(parts)


def _write(places: list[Any], values: Any) -> None:
    """Write the values of a block into the parts that it was joined of."""
    if len(places) == 1:
        parts = [values]
    elif is_tensor(values):
        parts = values.split([place.shape[0] for place in places])
        functions(values)._foreach_copy_(places, list(parts))
        return
    else:
        parts = np.split(values, np.cumsum([place.shape[0] for place in places[:-1]]))
    for place, part in zip(places, parts, strict=True):
        if is_tensor(place):
            place.copy_(part)
        else:
            np.copyto(place, part, casting="same_kind")

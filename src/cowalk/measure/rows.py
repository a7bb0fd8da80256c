"""A row: what is known of one parameter, or of a layer of them; and how rows fold into layers.

Rows are kept by columns, and the statistics as a matrix, whose first columns a back end filled: a `Row` is made only when
one is asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from cowalk.measure.backend import SECTIONS, Histogram, Matrix, spans_of
from cowalk.measure.moments import Adam, Moments, Noise, Pair
from cowalk.tree import Path, leaf

State = Literal[
    "non-finite",
    "uninitialised",
    "meta",
    "frozen",
    "not run",
    "unused",
    "no optimizer",
    "zero",
    "unmoved",
    "partly zero",
]
"""What is special about a parameter:

- "non-finite": its values, its gradient, its update or Adam's state of it hold NaN or infinities
- "uninitialised": lazy, without a shape yet
- "meta": a shape without values
- "frozen": it asks for no gradient; that is no problem
- "not run": no parameter of the model has a gradient: backward was not called
- "unused": it has no gradient where others have one: no path leads from it to the loss
- "no optimizer": it has a gradient, and no optimizer owns it
- "zero": its gradient is zero throughout
- "unmoved": it has a gradient and an optimizer, and did not move
- "partly zero": some rows of its gradient are zero throughout
"""
BY_WRONG = (
    *("ok", "frozen", "meta", "uninitialised", "partly zero"),
    *("unmoved", "zero", "no optimizer", "unused", "not run", "non-finite"),
)
"""All states, by how much is wrong."""

Floats = NDArray[np.float64]
Section = Moments | Pair | Adam | Noise
ThreeHistograms = tuple[Histogram | None, Histogram | None, Histogram | None]
T = TypeVar("T")


TABLE_SECTIONS: dict[str, type[Section]] = {**SECTIONS, "noise": Noise}
"""The sections of a table's line, in their order: those that a back end fills, and what is known of many batches only."""
TABLE_SPANS = spans_of(TABLE_SECTIONS)
"""Which columns of a table's line belong to a section."""
TABLE_WIDTH = max(span.stop for span in TABLE_SPANS.values())


def widened(matrix: Matrix) -> Matrix:
    """A back end's matrix with the columns of a table: nothing is known yet of the sections that it does not fill."""
    lines, filled = matrix.shape
    if filled == TABLE_WIDTH:
        return matrix
    wide = np.full((lines, TABLE_WIDTH), np.nan)
    wide[:, :filled] = matrix
    return wide


def columns_of(section: type[Section]) -> tuple[str, ...]:
    """The names of a section's statistics: those that are kept, and those that follow from them."""
    derived = (name for name, member in vars(section).items() if isinstance(member, property))
    return (*section.names(), *derived)


PLAIN_COLUMNS = ("path", "n", "count", "state", "shape", "dtype")
COLUMNS = PLAIN_COLUMNS + tuple(
    f"{name}.{each}" for name, section in TABLE_SECTIONS.items() for each in columns_of(section)
)
"""The names of all columns of a table."""


@leaf
@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one parameter, or of several that were folded into a layer. A walk sees a `Row` as a leaf.

    Attributes:
        path: where it is in the model; of a tied parameter the first path.
        aliases: the other paths of a tied parameter.
        states: what is special about it, the most telling first; nothing is if there are none.
        shape: None if it is not initialised, or a layer.
        dtype: the parameter's; of a layer all there are, separated by commas.
        parameter, gradient, update: the moments of each; None where there is no such array, or no values.
        ratio: how the parameter relates to the gradient.
        update_ratio: how the update relates to the parameter.
        adam: how the gradient relates to Adam's moments of it.
        noise: how the gradient scatters over the batches of a data set, if the table is of one.
        histograms: those of parameter, gradient and update, if they were asked for.
        count: how many parameters the row stands for.
        n: how many elements it has; None if that is not known.
        state_counts: how many of the parameters each of the states is true of.

    >>> row = Row(Path(("fc", "bias")), states=("zero",), shape=(4,), gradient=Moments(n=4, zeros=4, mean=0.0, std=0.0))
    >>> str(row.path), row.state, row.value("gradient.rms")
    ('fc.bias', 'zero', 0.0)
    """

    path: Path
    aliases: tuple[Path, ...] = ()
    states: tuple[State, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    parameter: Moments | None = None
    gradient: Moments | None = None
    update: Moments | None = None
    ratio: Pair | None = None
    update_ratio: Pair | None = None
    adam: Adam | None = None
    noise: Noise | None = None
    histograms: ThreeHistograms | None = None
    count: int = 1
    n: int | None = None
    state_counts: tuple[int, ...] = ()

    @property
    def state(self) -> State | Literal["ok"]:
        """The most telling state, or "ok"."""
        return self.states[0] if self.states else "ok"

    def value(self, column: str) -> Any:
        """The value under a column's name, such as "gradient.norm"; None where there is none."""
        section, _, name = column.partition(".")
        held = getattr(self, section)
        return held if not name or held is None else getattr(held, name)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data; paths are texts."""
        data: dict[str, Any] = {
            "path": str(self.path),
            "aliases": [str(alias) for alias in self.aliases],
            "state": self.state,
            "states": dict(zip(self.states, self.state_counts or (1,) * len(self.states), strict=True)),
            "count": self.count,
            "n": self.n,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": self.dtype,
        }
        for name, section in TABLE_SECTIONS.items():
            held = getattr(self, name)
            data[name] = None if held is None else {each: getattr(held, each) for each in columns_of(section)}
        if self.histograms is not None:
            data["histograms"] = {
                name: None if each is None else {"low": each.low, "counts": list(each.counts)}
                for name, each in zip(SECTIONS, self.histograms, strict=False)
            }
        return data


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows, by columns: as many entries in each as there are rows. `sizes`, `counts` and `state_counts` are for layers.

    Attributes:
        aliases: the other paths of tied parameters, by position.
        sizes: how many elements each row has; None if they follow from the shapes.
        counts: how many parameters each row stands for; None if one.
        state_counts: how many of them each of the row's states is true of; None if of that one.
    """

    paths: Sequence[Path]
    matrix: Matrix
    aliases: Mapping[int, tuple[Path, ...]]
    states: Sequence[tuple[State, ...]]
    shapes: Sequence[tuple[int, ...] | None]
    dtypes: Sequence[str]
    histograms: Sequence[ThreeHistograms] | None = None
    sizes: Sequence[int | None] | None = None
    counts: Sequence[int] | None = None
    state_counts: Sequence[tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def size(self, i: int) -> int | None:
        """How many elements a row has."""
        if self.sizes is not None:
            return self.sizes[i]
        shape = self.shapes[i]
        return None if shape is None else math.prod(shape)

    def count(self, i: int) -> int:
        """How many parameters a row stands for."""
        return 1 if self.counts is None else self.counts[i]

    def tally(self, i: int) -> dict[State, int]:
        """A row's states, and how many of its parameters each is true of."""
        counts = (1,) * len(self.states[i]) if self.state_counts is None else self.state_counts[i]
        return dict(zip(self.states[i], counts, strict=True))

    def row(self, i: int) -> Row:
        """One row as an object."""
        line: list[float] = self.matrix[i].tolist()
        shape = self.shapes[i]
        tally = self.tally(i)
        sections: dict[str, Any] = {
            name: TABLE_SECTIONS[name].of_columns(line[span])
            for name, span in TABLE_SPANS.items()
            if not math.isnan(line[span.start])
        }
        return Row(
            path=self.paths[i],
            aliases=tuple(self.aliases.get(i, ())),
            states=tuple(tally),
            shape=None if shape is None else tuple(shape),
            dtype=self.dtypes[i],
            histograms=None if self.histograms is None else self.histograms[i],
            count=self.count(i),
            n=self.size(i),
            state_counts=tuple(tally.values()),
            **sections,
        )

    def values(self, column: str) -> list[Any]:
        """One column's values; None where there is none."""
        name, _, statistic = column.partition(".")
        if statistic:
            return self._statistic(name, statistic)
        rows = range(len(self))
        match column:
            case "path":
                return list(self.paths)
            case "n":
                return [self.size(i) for i in rows]
            case "count":
                return [self.count(i) for i in rows]
            case "state":
                return [states[0] if states else "ok" for states in self.states]
            case "shape":
                return [None if shape is None else tuple(shape) for shape in self.shapes]
            case _:
                return list(self.dtypes)

    def _statistic(self, name: str, statistic: str) -> list[Any]:
        section, span = TABLE_SECTIONS[name], TABLE_SPANS[name]
        kinds = {field.name: field.type for field in fields(section)}
        if statistic not in kinds:
            lines: list[list[float]] = self.matrix[:, span].tolist()
            return [None if math.isnan(line[0]) else getattr(section.of_columns(line), statistic) for line in lines]
        values: list[float] = self.matrix[:, span.start + list(kinds).index(statistic)].tolist()
        is_count = kinds[statistic] == "int"
        return [None if math.isnan(value) else int(value) if is_count else value for value in values]

    def measured(self, sections: Sequence[str] = tuple(TABLE_SECTIONS)) -> NDArray[np.bool_]:
        """Which rows have values in at least one of the sections."""
        starts = [TABLE_SPANS[name].start for name in sections]
        return np.asarray((~np.isnan(self.matrix[:, starts])).any(axis=1))

    def take(self, rows: Sequence[int]) -> Columns:
        """Some of the rows, in the order given."""
        return Columns(
            paths=_take(self.paths, rows),
            matrix=self.matrix[np.array(rows, dtype=np.intp)],
            aliases={new: self.aliases[old] for new, old in enumerate(rows) if old in self.aliases},
            states=_take(self.states, rows),
            shapes=_take(self.shapes, rows),
            dtypes=_take(self.dtypes, rows),
            histograms=None if self.histograms is None else _take(self.histograms, rows),
            sizes=None if self.sizes is None else _take(self.sizes, rows),
            counts=None if self.counts is None else _take(self.counts, rows),
            state_counts=None if self.state_counts is None else _take(self.state_counts, rows),
        )

    def fold(self, paths: Sequence[Path]) -> Columns:
        """The rows merged that are given one path; the merged ones are in the order in which their first rows are."""
        members: dict[Path, list[int]] = {}
        for i, path in enumerate(paths):
            members.setdefault(path, []).append(i)
        labels = np.empty(len(paths), dtype=np.intp)
        for label, group in enumerate(members.values()):
            labels[group] = label
        # A leaf that is alone under its own path stays what it is.
        kept = {
            path: group[0]
            for path, group in members.items()
            if len(group) == 1 and len(path) == len(self.paths[group[0]])
        }
        tallies = [sum_of_tallies([self.tally(i) for i in group]) for group in members.values()]
        return Columns(
            paths=list(members),
            matrix=fold_matrix(self.matrix, labels, len(members)),
            aliases={
                new: self.aliases[kept[path]]
                for new, path in enumerate(members)
                if path in kept and kept[path] in self.aliases
            },
            states=[tuple(tally) for tally in tallies],
            shapes=[self.shapes[kept[path]] if path in kept else None for path in members],
            dtypes=[", ".join(dict.fromkeys(self.dtypes[i] for i in group)) for group in members.values()],
            histograms=None
            if self.histograms is None
            else [_merged_histograms([self.histograms[i] for i in group]) for group in members.values()],
            sizes=[_sum_of_known([self.size(i) for i in group]) for group in members.values()],
            counts=[sum(map(self.count, group)) for group in members.values()],
            state_counts=[tuple(tally.values()) for tally in tallies],
        )


def _take(values: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [values[i] for i in rows]


def _sum_of_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def sum_of_tallies(tallies: Iterable[Mapping[State, int]]) -> dict[State, int]:
    """How many parameters are in each state, all together."""
    total: dict[State, int] = {}
    for tally in tallies:
        for state, count in tally.items():
            total[state] = total.get(state, 0) + count
    return total


def _merged_histograms(parts: Sequence[ThreeHistograms]) -> ThreeHistograms:
    merged = [
        functools.reduce(Histogram.merge, present) if (present := [each for each in same if each is not None]) else None
        for same in zip(*parts, strict=True)
    ]
    return cast("ThreeHistograms", tuple(merged))


# --- merging the lines of a matrix ---


def fold_matrix(matrix: Matrix, labels: NDArray[np.intp], groups: int) -> Matrix:
    """One line for each group of lines, as `merge` of the sections makes it; `labels` says which group a line belongs to."""
    folded = np.full((groups, TABLE_WIDTH), np.nan)
    for name, section in TABLE_SECTIONS.items():
        part = matrix[:, TABLE_SPANS[name]]
        present = ~np.isnan(part[:, 0])
        if not present.any():
            continue
        parts = dict(zip(section.names(), part[present].T, strict=True))
        within = _Groups(labels[present], groups)
        with np.errstate(all="ignore"):
            merged = _MERGES[section](parts, within)
            merged = {
                field: merged[field] if field in merged else within.sum(values) for field, values in parts.items()
            }
        lines = np.stack(list(merged.values()), axis=1)
        lines[within.sum(np.ones(len(within.labels))) == 0] = np.nan
        folded[:, TABLE_SPANS[name]] = lines
    return folded


@dataclass(frozen=True, slots=True)
class _Groups:
    """Which group each value belongs to. A NaN is a value that does not exist."""

    labels: NDArray[np.intp]
    number: int

    def sum(self, values: Floats) -> Floats:
        return np.bincount(self.labels, np.where(np.isnan(values), 0.0, values), self.number).astype(np.float64)

    def sum_if_known(self, values: Floats, counts: Floats) -> Floats:
        """NaN for the groups that hold no value, or lack one that has a count."""
        lacking = self.sum(np.where(np.isnan(values) & (counts > 0), 1.0, 0.0)) > 0
        return np.where(lacking, np.nan, self.sum(values) + self._gaps(values))

    def least(self, values: Floats) -> Floats:
        least = np.full(self.number, np.nan)
        np.fmin.at(least, self.labels, values)
        return least

    def greatest(self, values: Floats) -> Floats:
        return -self.least(-values)

    def shares(self, values: Floats, weights: Floats) -> Floats:
        """What part of its group's weight each value has; NaN for a NaN."""
        known = np.where(np.isnan(values), np.nan, weights)
        return known / self.sum(known)[self.labels]

    def mean(self, values: Floats, weights: Floats) -> Floats:
        return self.sum(values * self.shares(values, weights)) + self._gaps(values)

    def norm(self, values: Floats) -> Floats:
        """The root of the sum of squares, in units of the group's largest: squares neither overflow nor vanish."""
        unit = self.greatest(abs(values))
        unit[~(np.isfinite(unit) & (unit > 0))] = 1.0
        return np.sqrt(self.sum(np.square(values / unit[self.labels]))) * unit

    def root_mean_square(self, values: Floats, weights: Floats) -> Floats:
        return self.norm(values * np.sqrt(self.shares(values, weights))) + self._gaps(values)

    def _gaps(self, values: Floats) -> Floats:
        """NaN for the groups that hold no value, and 0 for the others."""
        return np.where(self.sum(np.where(np.isnan(values), 0.0, 1.0)) > 0, 0.0, np.nan)


def _merge_moments(parts: Mapping[str, Floats], within: _Groups) -> dict[str, Floats]:
    finite = parts["n"] - parts["nan"] - parts["posinf"] - parts["neginf"]
    mean = within.mean(parts["mean"], finite)
    shares = np.sqrt(within.shares(parts["mean"], finite))
    apart = parts["mean"] - mean[within.labels]
    both = _Groups(np.concatenate([within.labels, within.labels]), within.number)
    std = both.norm(np.concatenate([shares * parts["std"], shares * apart]))
    return {
        "mean": mean,
        "std": np.where(np.isnan(mean), np.nan, std),
        "min": within.least(parts["min"]),
        "max": within.greatest(parts["max"]),
        "mean_abs": within.mean(parts["mean_abs"], finite),
    }


def _merge_pairs(parts: Mapping[str, Floats], within: _Groups) -> dict[str, Floats]:
    norm_x, norm_y = within.norm(parts["norm_x"]), within.norm(parts["norm_y"])
    # Each share is at most 1: nothing overflows.
    x, y = (parts[name] / norm[within.labels] for name, norm in (("norm_x", norm_x), ("norm_y", norm_y)))
    return {
        "mean": within.mean(parts["mean"], parts["defined"]),
        "min": within.least(parts["min"]),
        "max": within.greatest(parts["max"]),
        "mean_abs": within.mean(parts["mean_abs"], parts["defined"]),
        "norm_x": norm_x,
        "norm_y": norm_y,
        "cosine": np.where((norm_x != 0) & (norm_y != 0), within.sum(parts["cosine"] * x * y), np.nan),
    }


def _merge_adams(parts: Mapping[str, Floats], within: _Groups) -> dict[str, Floats]:
    step = within.root_mean_square(parts["step"], parts["defined"])
    unknown = within.sum(np.where((parts["defined"] > 0) & np.isnan(parts["step"]), 1.0, 0.0)) > 0
    return {
        "rms": within.root_mean_square(parts["rms"], parts["defined"]),
        "step": np.where(unknown, np.nan, step),
    }


def _merge_noises(parts: Mapping[str, Floats], within: _Groups) -> dict[str, Floats]:
    return {
        "batches": within.greatest(parts["batches"]),
        "batch": within.greatest(parts["batch"]),
        "trace": within.sum_if_known(parts["trace"], parts["batches"]),
        "square": within.sum_if_known(parts["square"], parts["batches"]),
    }


_MERGES: Mapping[type[Section], Any] = {
    Moments: _merge_moments,
    Pair: _merge_pairs,
    Adam: _merge_adams,
    Noise: _merge_noises,
}

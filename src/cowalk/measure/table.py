"""The table: the measured rows of one moment in training. Looked up, sorted, folded into layers, and handed on as data."""

from __future__ import annotations

import difflib
import importlib.util
import io
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cowalk.measure.backend import Matrix
from cowalk.measure.rows import (
    BY_WRONG,
    COLUMNS,
    PLAIN_COLUMNS,
    TABLE_SECTIONS,
    TABLE_SPANS,
    Columns,
    Row,
    State,
    ThreeHistograms,
    columns_of,
    sum_of_tallies,
    widened,
)
from cowalk.tree import CowalkError, Path
from cowalk.tree.paths import brief, compile_pattern, twin

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console, ConsoleOptions, RenderResult

FrameBackend = Literal["pandas", "polars", "pyarrow"]
FRAME_BACKENDS: tuple[FrameBackend, ...] = ("pandas", "polars", "pyarrow")

Locate = Callable[[Any], Sequence[Path] | None]
"""The paths at which an object, such as a torch module, stands in the model; None if it is no part of it."""


class TableKeyError(CowalkError, KeyError):
    """A table has no such row or column. `key` is what was asked for, `nearest` holds the names that are close to it."""

    def __init__(self, message: str, key: Any, nearest: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.nearest = tuple(nearest)

    def __str__(self) -> str:
        return self.message  # KeyError would show its repr

    def __reduce__(self) -> tuple[type[TableKeyError], tuple[str, Any, tuple[str, ...]]]:
        return TableKeyError, (self.message, self.key, self.nearest)


class FrameError(CowalkError, ImportError):
    """A package is not installed that `Table.to_frame` needs; the message says which."""


class Table:
    """One row for each parameter of a model, in the model's order; or, folded, one for each layer.

    A row is found by its path, as text or as keys (any of the paths of a tied parameter will do), by its position, and by
    a module of the model; a pattern or a slice gives the table of the rows that it matches.

    Args:
        paths: where each parameter is.
        matrix: their statistics, a line each, as a back end fills it.
        aliases: the other paths of tied parameters, by position.
        states: what is special about each.
        shapes, dtypes: of each; a shape is None if it is not initialised.
        histograms: of parameter, gradient and update of each.
        structure: puts the rows, by path, into the shape of the model.
        columns: the columns to print; None chooses those that suit what was measured.
        locate: finds the paths of a module of the model.

    >>> import numpy as np
    >>> from cowalk.measure.reference import Operands, measure
    >>> weights = {Path(("fc", "weight")): np.ones((2, 2)), Path(("fc", "bias")): np.zeros(2)}
    >>> matrix, _ = measure([Operands(p, np.full_like(p, 0.5)) for p in weights.values()])
    >>> table = Table(list(weights), matrix, aliases={}, states=[(), ()], shapes=[(2, 2), (2,)], dtypes=["float64"] * 2)
    >>> table["fc.weight"].gradient.norm, len(table["*.bias"]), table.total.parameter.mean
    (1.0, 1, 0.6666666666666666)
    >>> table
    parameter   n   rms p  rms g  |p|/|g|
    fc.weight   4       1    0.5        2
    fc.bias     2       0    0.5        0
    all 2 rows  6  0.8165    0.5    1.633
    p, g: parameter, gradient; rms: root mean square; |p|: 2-norm
    """

    def __init__(
        self,
        paths: Sequence[Path],
        matrix: Matrix,
        *,
        aliases: Mapping[int, tuple[Path, ...]],
        states: Sequence[tuple[State, ...]],
        shapes: Sequence[tuple[int, ...] | None],
        dtypes: Sequence[str],
        histograms: Sequence[ThreeHistograms] | None = None,
        structure: Callable[[Mapping[Path, Row]], Any] | None = None,
        columns: tuple[str, ...] | None = None,
        locate: Locate | None = None,
    ) -> None:
        self._columns = Columns(paths, widened(matrix), aliases, states, shapes, dtypes, histograms)
        self._locate = locate
        self._structure = structure
        self.columns = columns
        self.is_sorted = False

    def _with(self, rows: Columns, /, **changes: Any) -> Table:
        """A table like this one, of other rows."""
        table = Table.__new__(Table)
        kept = {**self.__getstate__(), "_locate": self._locate, "_structure": None}
        vars(table).update(kept | {"_columns": rows} | changes)
        return table

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: not what finds modules, for it holds on to the model."""
        kept = ("_columns", "_structure", "columns", "is_sorted")
        return {"_locate": None, **{name: self.__dict__[name] for name in kept}}

    # --- rows ---

    @cached_property
    def structure(self) -> Any:
        """The rows in the shape of the model, in plain containers: a `Row` at each parameter, None at all that is none.

        None where the rows are no longer those of the model: layers, or a part of it.
        """
        return None if self._structure is None else self._structure({row.path: row for row in self.rows})

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return tuple(map(self._columns.row, range(len(self))))

    @cached_property
    def total(self) -> Row:
        """All measured rows as one, at the root. Where none is measured, all rows: `n` is then the size of the model."""
        measured = np.flatnonzero(self._columns.measured()).tolist()
        columns = self._columns.take(measured) if measured else self._columns
        return columns.fold([Path()] * len(columns)).row(0) if len(columns) else Row(Path(), count=0, n=0)

    @property
    def is_folded(self) -> bool:
        """Whether the rows are layers."""
        return self._columns.counts is not None

    @property
    def matrix(self) -> Matrix:
        """The statistics of all rows, a line each; see `cowalk.measure.rows.TABLE_SPANS`."""
        return self._columns.matrix

    @property
    def states(self) -> Sequence[tuple[State, ...]]:
        """What is special about each row."""
        return self._columns.states

    @property
    def state_counts(self) -> dict[State, int]:
        """How many parameters are in each state."""
        return sum_of_tallies(map(self._columns.tally, range(len(self))))

    @property
    def ties(self) -> list[tuple[Path, ...]]:
        """The paths of each tied parameter."""
        return [self._names(i) for i in sorted(self._columns.aliases)]

    def measured(self, *sections: str) -> NDArray[np.bool_]:
        """Which rows have values in at least one of the sections, such as "gradient"."""
        return self._columns.measured(sections)

    def __len__(self) -> int:
        return len(self._columns)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __contains__(self, key: Any) -> bool:
        if isinstance(key, Row):
            return key in self.rows
        try:
            self[key]
        except (TableKeyError, IndexError):
            return False
        return True

    @overload
    def __getitem__(self, key: int | Path) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> Table: ...
    @overload
    def __getitem__(self, key: Any) -> Any: ...
    def __getitem__(self, key: Any) -> Any:
        """A row by path or position; a table of rows by pattern, slice or module.

        Raises:
            TableKeyError: there is no such row; the message names those that are near.
            IndexError: there are not so many rows.
        """
        if isinstance(key, str):
            place = self._place(key)
            if place is None and ("*" in key or "?" in key):
                return self._matching(key)
        elif isinstance(key, tuple):
            key = Path(key)
            place = self._place(key)
        elif isinstance(key, slice):
            return self._with(self._columns.take(range(len(self))[key]))
        elif isinstance(key, (int, np.integer)):  # not all that has __index__: tensors have it
            return self._columns.row(range(len(self))[operator.index(key)])
        else:
            return self._below(key)
        if place is None:
            raise self._no_row(key)
        return self._columns.row(place)

    @cached_property
    def _places(self) -> dict[Any, int]:
        """Positions by text, by path, and by the path's keys as texts: "0" finds position 0. The first row wins."""
        places: dict[Any, int] = {}
        for spelling in (str, Path, _loose):
            for i, path in enumerate(self._columns.paths):
                places.setdefault(spelling(path), i)
            for i, others in self._columns.aliases.items():
                for path in others:
                    places.setdefault(spelling(path), i)
        return places

    def _place(self, key: str | Path) -> int | None:
        place = self._places.get(key)
        if place is not None:
            return place
        if isinstance(key, str):
            try:
                key = Path.parse(key)
            except ValueError:
                return None
        return self._places.get(key, self._places.get(_loose(key)))

    def _names(self, i: int) -> tuple[Path, ...]:
        return (self._columns.paths[i], *self._columns.aliases.get(i, ()))

    def _matching(self, pattern: str) -> Table:
        fits = compile_pattern(pattern).fullmatch
        rows = [i for i in range(len(self)) if any(fits(str(path)) for path in self._names(i))]
        if not rows:
            raise TableKeyError(
                f"the pattern {pattern!r} matches none of the {len(self)} rows. `*` stands for any characters, dots too, "
                f"`?` for one, and the whole path has to match{self._example()}",
                pattern,
            )
        return self._with(self._columns.take(rows))

    def _below(self, module: Any) -> Table:
        name = type(module).__name__
        if self._locate is None:
            raise TableKeyError(
                f"this table does not know the model that it came from, so it cannot find a {name} in it: give a path, "
                "as text or as keys, a pattern or a position",
                module,
            )
        heads = self._locate(module)
        if heads is None:
            raise TableKeyError(f"this {name} is no part of the model that the table came from", module)
        keys = {_loose(head) for head in heads}
        lengths = {len(head) for head in keys}
        rows = [
            i
            for i in range(len(self))
            if any(loose[:length] in keys for loose in map(_loose, self._names(i)) for length in lengths)
        ]
        if not rows:
            places = ", ".join(brief(head) for head in heads) or "no path"
            raise TableKeyError(f"the {name} at {places} has no rows in this table", module)
        return self._with(self._columns.take(rows))

    def _no_row(self, key: str | Path) -> TableKeyError:
        text = key if isinstance(key, str) else str(key)
        heads = (f"{text}.", f"{text}[") if text else ("",)
        below = {head: sum(str(path).startswith(head) for path in self._columns.paths) for head in heads}
        head = max(heads, key=lambda head: below[head])
        shown = repr(text) if len(text) <= 200 else f"{text[:100]!r} …"
        if below[head]:
            near: list[str] = []
            more = (
                f"it is a layer of {sum(below.values())} rows. table.layers() folds layers into rows, "
                f"and table[{f'{head}*'!r}] gives the rows of this one"
            )
        else:
            names = (path for i in range(len(self)) for path in self._names(i))
            near = _near(text, names)
            more = (
                f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {len(self)} rows{self._example()}"
            )
        return TableKeyError(f"no row {shown} in this table; {more}", key, near)

    def _example(self) -> str:
        return f"; the first is {brief(self._columns.paths[0])!r}" if len(self) else ""

    # --- other tables ---

    def layers(self, depth: int | None = None) -> Table:
        """The rows folded into layers: those whose paths begin with the same `depth` keys; without a depth, each
        parameter into the module that holds it.

        Raises:
            ValueError: the depth is negative.
        """
        if depth is not None and depth < 0:
            raise ValueError(f"depth= is how many keys of a path make a layer: 0 or more, not {depth}")
        heads = [path.parent if depth is None else path[:depth] for path in self._columns.paths]
        return self._with(self._columns.fold(heads))

    def sort(self, column: str, *, descending: bool = False) -> Table:
        """The rows in the order of a column, such as "gradient.norm"; those that have no value there come last.

        In paths numbers compare as numbers: layer 2 stands before layer 10. States are sorted by how much is wrong.

        Raises:
            TableKeyError: there is no such column.
        """
        values = self.column(column)
        key = {"path": _natural, "state": BY_WRONG.index}.get(column)
        known = [i for i, value in enumerate(values) if value is not None and value == value]
        known.sort(key=lambda i: values[i] if key is None else key(values[i]), reverse=descending)
        last = sorted(set(range(len(values))).difference(known))
        rows = self._columns.take([*known, *last])
        return self._with(rows, _structure=self._structure, is_sorted=True)

    def select(self, *columns: str) -> Table:
        """The same table, which prints these columns beside the path and the notes; without any, those that suit it.

        Raises:
            TableKeyError: there is no such column.
        """
        for column in columns:
            _check_column(column)
        return self._with(self._columns, _structure=self._structure, columns=columns or None)

    def with_noise(self, lines: NDArray[np.float64]) -> Table:
        """The same table with the gradient noise of each row, as `noise`.

        Args:
            lines: of shape (rows, 5), a line for each row: n, batches, batch, trace and square, as `Noise` names them.
                What is not known of a line is NaN; where there is no noise, n is NaN.

        Raises:
            ValueError: the lines are of another shape.
        """
        span = TABLE_SPANS["noise"]
        shape = len(self), span.stop - span.start
        if np.shape(lines) != shape:
            raise ValueError(f"the noise of this table is of shape {shape}, a line for each row, not {np.shape(lines)}")
        matrix = self.matrix.copy()
        matrix[:, span] = lines
        return self._with(replace(self._columns, matrix=matrix), _structure=self._structure)

    # --- data ---

    def column(self, name: str) -> list[Any]:
        """The values of one column, such as "path", "n" or "gradient.norm"; None where there is none.

        Raises:
            TableKeyError: there is no such column.
        """
        _check_column(name)
        return self._columns.values(name)

    def to_dict(self) -> dict[str, Any]:
        """Rows and total as plain data. Paths are texts."""
        return {"rows": [row.to_dict() for row in self.rows], "total": self.total.to_dict()}

    def to_json(self, indent: int | None = None) -> str:
        """Rows and total as JSON, which has no infinite numbers: they are the texts "inf" and "-inf", NaN is "nan"."""
        return json.dumps(_finite(self.to_dict()), indent=indent, allow_nan=False)

    def to_frame(self, backend: FrameBackend | None = None) -> Any:
        """A data frame of all columns that hold something: of pandas, Polars or PyArrow, whichever is installed.

        Raises:
            FrameError: neither is, or narwhals is not; the message says what to install.
            ValueError: the back end is none of the three.
        """
        backend = _frame_backend(backend)
        import narwhals

        measured = [name for name in TABLE_SECTIONS if self.measured(name).any()]
        names = [*PLAIN_COLUMNS, *(f"{name}.{each}" for name in measured for each in columns_of(TABLE_SECTIONS[name]))]
        data: dict[str, list[Any]] = {name: [row.value(name) for row in self.rows] for name in names}
        for name in ("path", "shape"):  # texts, for not every format that a frame is written to holds lists
            data[name] = [None if value is None else str(value) for value in data[name]]
        frame = narwhals.from_dict(data, backend=backend)
        # Without a value, a column would have no type either.
        texts = {"path", "state", "shape", "dtype"}
        empty = [name for name, values in data.items() if all(value is None for value in values)]
        casts = [narwhals.col(name).cast(narwhals.String if name in texts else narwhals.Float64) for name in empty]
        return (frame.with_columns(*casts) if casts else frame).to_native()

    # --- looks ---

    def print(self, console: Console | None = None, *, wide: bool = False, rows: int | None = 40) -> None:
        """Print the table, to the terminal or to a rich console.

        Args:
            console: where to; the standard output if None.
            wide: print all columns that hold something, and whole paths, however wide the table becomes.
            rows: at most so many: those where something is off, of a sorted table the first. None prints all.
        """
        from cowalk.measure import printing

        printing.print_table(self, console, wide, rows)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=80, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from cowalk.measure import printing

        yield from printing.View(self).__rich_console__(console, options)

    def _repr_html_(self) -> str:
        from cowalk.measure import printing

        return printing.html_of(self)


def _loose(path: Path) -> tuple[Any, ...]:
    """A path's keys, numbers as texts, so that "0" and position 0 are one."""
    return tuple(twin(key) if isinstance(key, int) and twin(key) is not None else key for key in path)


_DIGITS = re.compile(r"([0-9]+)")


def _natural(path: Path) -> list[list[Any]]:
    """By which paths sort: numbers as numbers, which are compared by their length first, for they may be of any."""
    parts = (_DIGITS.split(str(key)) for key in path)
    return [
        [(len(part.lstrip("0")), part.lstrip("0")) if i % 2 else part for i, part in enumerate(split)]
        for split in parts
    ]


_COMPARED = 2_000
_LONGEST = 400


def _near(text: str, names: Iterable[Path]) -> list[str]:
    """The names that are close to a text; those with the same end are looked at first, for comparing is slow."""
    end = text.rpartition(".")[2]
    texts = sorted((str(path) for path in names), key=lambda name: not name.endswith(end))
    candidates = [name for name in texts[:_COMPARED] if len(name) <= _LONGEST]
    return difflib.get_close_matches(text[:_LONGEST], candidates, n=3, cutoff=0.6)


def _check_column(name: str) -> None:
    if name in COLUMNS:
        return
    # As written, and as the statistic of any section: "norm" is "parameter.norm".
    near = [column for column in COLUMNS if column.endswith(f".{name}")][:3]
    near = near or difflib.get_close_matches(name, COLUMNS, n=3, cutoff=0.6)
    more = (
        f"did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"there are {', '.join(PLAIN_COLUMNS)}, parameter.mean, gradient.norm, …"
    )
    raise TableKeyError(f"no column {name!r} in a table; {more}", name, near)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _frame_backend(backend: FrameBackend | None) -> FrameBackend:
    if backend is not None and backend not in FRAME_BACKENDS:
        raise ValueError(f"backend= is one of {', '.join(map(repr, FRAME_BACKENDS))}, not {backend!r}")
    wanted: tuple[FrameBackend, ...] = FRAME_BACKENDS if backend is None else (backend,)
    installed: list[FrameBackend] = [name for name in wanted if importlib.util.find_spec(name) is not None]
    has_narwhals = importlib.util.find_spec("narwhals") is not None
    if installed and has_narwhals:
        return installed[0]
    lacking = [*([] if has_narwhals else ["narwhals"]), *([] if installed else [wanted[0]])]
    choice = "" if installed or backend is not None else f" ({' or '.join(FRAME_BACKENDS[1:])} will do too)"
    raise FrameError(f"a data frame needs {' and '.join(lacking)}{choice}: pip install {' '.join(lacking)}")

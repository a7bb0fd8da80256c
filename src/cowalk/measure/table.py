"""The table of ratios: its rows, the same as a tree, the total; and how it is printed."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from cowalk.measure.quotients import Ratio
from cowalk.tree import Path, leaf

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

State = Literal["measured", "no gradient", "uninitialised", "meta"]
MEANING = "|p/g| is the learning rate at which one plain gradient step would be as large as the parameter itself."


@leaf
@dataclass(frozen=True, slots=True)
class RatioRow:
    """One parameter of the table.

    Attributes:
        path: where it is in the model; of a tied one the first path.
        state: "measured", or why there are no values: "no gradient", "uninitialised" (a lazy parameter without a shape),
            "meta" (a shape without values).
        shape: None if the parameter is not initialised.
        dtype: the parameter's.
        ratio: None if there are no values.
        aliases: the other paths of a tied parameter.
    """

    path: Path
    state: State
    shape: tuple[int, ...] | None
    dtype: str
    ratio: Ratio | None
    aliases: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class RatioTable:
    """What `cowalk.ratio` found: one row a parameter, in the model's order.

    Attributes:
        rows: the rows; a tied parameter has one.
        structure: the same in the shape of the model, made of plain containers: a `Ratio` at each parameter, None where there
            are no values and at all that is not a parameter.
    """

    rows: tuple[RatioRow, ...]
    structure: Any

    @property
    def total(self) -> Ratio:
        """The ratio over the elements of all rows together."""
        return functools.reduce(Ratio.merge, (row.ratio for row in self.rows if row.ratio is not None), Ratio())

    def to_dict(self) -> dict[str, Any]:
        """Rows and total as plain data, ready for JSON. Paths are texts."""
        rows = [
            {
                "path": str(row.path),
                "aliases": [str(alias) for alias in row.aliases],
                "state": row.state,
                "shape": None if row.shape is None else list(row.shape),
                "dtype": row.dtype,
                "ratio": None if row.ratio is None else asdict(row.ratio),
            }
            for row in self.rows
        ]
        return {"rows": rows, "total": asdict(self.total)}

    def print(self, console: Console | None = None) -> None:
        """Print the table, to the terminal or to a rich console."""
        if console is None:
            from rich.console import Console

            console = Console()
        console.print(self)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=80, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield _grid(self, options.max_width)
        for row in self.rows:
            if row.aliases:
                yield _plain(f"tied: {' = '.join(map(str, (row.path, *row.aliases)))}")
        yield _plain(MEANING)


_NUMBERS = ("n", "mean p/g", "min", "max", "mean |p/g|")
_REMARKS = "undefined"


def _grid(table: RatioTable, width: int) -> RenderableType:
    """The rows in columns. All but the paths have the width they need; the paths share what is left."""
    from rich.table import Table

    lines = [(str(row.path) or "the root", _numbers(row.shape, row.ratio), _remark(row)) for row in table.rows]
    total = table.total
    measured = sum(row.ratio is not None for row in table.rows)
    label = f"all {measured} rows" if measured == len(table.rows) else f"{measured} of {len(table.rows)} rows"
    lines.append((label, _numbers((total.n,), total), _undefined(total)))

    cells = zip(_NUMBERS, *(numbers for _, numbers, _ in lines), strict=True)
    taken = sum(max(map(len, column)) for column in cells)
    remarked = any(remark for _, _, remark in lines)
    if remarked:
        taken += max(len(_REMARKS), *(len(line) for _, _, remark in lines for line in remark.plain.split("\n")))
    columns = len(_NUMBERS) + remarked
    longest = max(len(path) for path, _, _ in lines)
    gap = 2 if taken + longest + 2 * columns <= width else 1
    room = max(_LEAST_PATH, width - taken - gap * columns)

    grid = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("parameter", no_wrap=True)
    for name in _NUMBERS:
        grid.add_column(name, justify="right", no_wrap=True)
    if remarked:
        grid.add_column(_REMARKS, no_wrap=True)
    for path, numbers, remark in lines:
        grid.add_row(_plain(shorten(path, room)), *map(_plain, numbers), *([remark] if remarked else []))
    return grid


_LEAST_PATH = 12
_LONGEST_PATH = 400


def shorten(text: str, width: int) -> str:
    """A path's text in at most `width` characters: its longest names lose their ends, but numbers and the last name stay.

    >>> shorten("transformer.layers.10.attention.weight", 28)
    'tran….laye….10.atten….weight'
    >>> shorten("a_name_that_is_long", 10)
    'a_na…_long'
    """
    if len(text) > _LONGEST_PATH:
        text = _without_middle(text, _LONGEST_PATH)
    *names, last = text.split(".")
    while len(".".join((*names, last))) > width:
        longest = max(range(len(names)), key=lambda i: 0 if names[i].isdigit() else len(names[i]), default=-1)
        if longest < 0 or names[longest].isdigit() or len(names[longest]) <= 2:
            return _without_middle(".".join((*names, last)), width)
        names[longest] = names[longest][:-2] + "…"
    return ".".join((*names, last))


def _without_middle(text: str, width: int) -> str:
    head = (width - 1) // 2
    return f"{text[:head].rstrip('…')}…{text[len(text) - (width - 1 - head) :]}"


def _numbers(shape: tuple[int, ...] | None, ratio: Ratio | None) -> tuple[str, ...]:
    values = (None,) * 4 if ratio is None else (ratio.mean, ratio.min, ratio.max, ratio.mean_abs)
    return ("?" if shape is None else _count(math.prod(shape)), *map(_number, values))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    value += 0.0  # no minus before a zero
    if value and not 1e-2 <= abs(value) < 9999.5:  # no more than four digits
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.4g}"


def _count(n: int) -> str:
    for unit, size, least in (
        ("T", 10**12, 0.9995e12),
        ("G", 10**9, 0.9995e9),
        ("M", 10**6, 0.9995e6),
        ("k", 10**3, 1e4),
    ):
        if n >= least:
            return f"{n / size:.3g}{unit}"
    return f"{n:,}"


def _remark(row: RatioRow) -> Text:
    return _undefined(row.ratio) if row.ratio is not None else _plain(row.state, "yellow")


def _undefined(ratio: Ratio) -> Text:
    """How many elements have no quotient, and why; one reason a line."""
    reasons = (
        ("x/0", ratio.x_by_zero, "yellow"),
        ("0/0", ratio.zero_by_zero, "yellow"),
        ("NaN/Inf", ratio.nonfinite, "red"),
    )
    return _plain("\n").join(_plain(f"{_count(count)} {name}", style) for name, count, style in reasons if count)


def _plain(text: str, style: str = "") -> Text:
    """A text that rich takes as it is: `[1]` in a path is no markup."""
    from rich.text import Text

    return Text(text, style)

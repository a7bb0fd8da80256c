"""How a table looks: in a terminal, as plain text, and in a notebook. Coloured is only what is off.

Both looks are made from one `Sheet` of texts.
"""

from __future__ import annotations

import html
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from cowalk.measure.moments import Moments, Pair
from cowalk.measure.rows import COLUMNS, TABLE_SECTIONS, TABLE_SPANS, Row, State
from cowalk.measure.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tone = Literal["", "red", "yellow", "dim"]


class Note(NamedTuple):
    """A remark on a row."""

    text: str
    tone: Tone


class Line(NamedTuple):
    """One row as texts."""

    label: str
    cells: tuple[str, ...]
    notes: tuple[Note, ...]
    dim: bool = False


class Sheet(NamedTuple):
    """A table as texts: the headers are those of the label and the cells, `below` is what stands under the rows."""

    headers: tuple[str, ...]
    lines: tuple[Line, ...]
    total: Line
    below: tuple[str, ...]


# --- which columns, which rows ---

_QUOTIENTS = ("mean", "min", "max", "mean_abs")
"""Statistics over the elements' quotients, which not every element has."""


_WITH_NOISE = (
    *("n", "parameter.rms", "gradient.rms"),
    *("noise.noise_scale", "noise.signal_to_noise", "noise.batches"),
)
"""What is printed of a table over many batches, where it was measured."""


def _printed_columns(table: Table, wide: bool) -> tuple[str, ...]:
    if wide:
        return tuple(name for name in COLUMNS if name not in ("path", "state") and _says_something(table, name))
    if table.columns is not None:
        return tuple(name for name in table.columns if name != "path")
    has = {name: bool(table.measured(name).any()) for name in TABLE_SECTIONS}
    if has["noise"]:
        return tuple(name for name in _WITH_NOISE if has.get(name.partition(".")[0], True))
    if not has["parameter"] and not has["gradient"]:
        return ("n",)
    if not has["gradient"] and not has["update"]:
        return ("n", "parameter.mean", "parameter.std", "parameter.min", "parameter.max")
    chosen = {
        "n": True,
        "parameter.rms": True,
        "gradient.rms": has["gradient"],
        "ratio.ratio_of_norms": has["ratio"],
        "update_ratio.log10": has["update_ratio"],
        "adam.rms": has["adam"],
    }
    return tuple(name for name, is_chosen in chosen.items() if is_chosen)


def _says_something(table: Table, column: str) -> bool:
    """Whether a column has a value other than 0, and does not just repeat how many elements there are."""
    if column == "count":
        return table.is_folded
    values = [row.value(column) for row in table]
    return any(values) and (column == "n" or any(map(operator.ne, values, table.column("n"))))


_WEIGHT: dict[State, int] = {
    "uninitialised": 2,
    "meta": 2,
    "not run": 1,
    "unused": 1,
    "no optimizer": 1,
    "zero": 1,
    "unmoved": 1,
    "non-finite": 0,
}
"""How early a row with a problem is shown, where not all rows can be: 0 is for NaN and Inf, 3 for no problem."""


def _concern(table: Table, quotients: Sequence[str]) -> NDArray[np.intp]:
    """0 for rows with NaN or Inf, then those with states that are problems, to 3 for rows with none."""
    states = [min((_WEIGHT.get(state, 3) for state in row), default=3) for row in table.states]
    counts = dict.fromkeys(("parameter", "gradient", "update"), ("nan", "posinf", "neginf"))
    counts |= dict.fromkeys(quotients, ("nonfinite",))
    columns = [
        TABLE_SPANS[name].start + TABLE_SECTIONS[name].names().index(field)
        for name, fields in counts.items()
        for field in fields
    ]
    is_nonfinite = (table.matrix[:, columns] > 0).any(axis=1)
    return np.where(is_nonfinite, 0, np.array(states, dtype=np.intp))


def _extremeness(table: Table) -> NDArray[np.float64]:
    """How large the update is beside the parameter; without updates, how far |p|/|g| is from the usual one, in decades."""
    fields = Pair.names()
    section = "update_ratio" if table.measured("update_ratio").any() else "ratio"
    x, y = (table.matrix[:, TABLE_SPANS[section].start + fields.index(name)] for name in ("norm_x", "norm_y"))
    with np.errstate(all="ignore"):
        decades = np.log10(x) - np.log10(y)
    if section == "ratio":
        usual = decades[np.isfinite(decades)]
        decades = abs(decades - (np.median(usual) if usual.size else 0.0))
    return np.nan_to_num(decades, nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def _shown_rows(table: Table, limit: int | None, concern: NDArray[np.intp]) -> list[int]:
    """The rows to show, in the table's order."""
    if limit is None or len(table) <= limit:
        return list(range(len(table)))
    if table.is_sorted:
        return list(range(limit))
    # Of NaN and Inf the ends are shown: where they begin in the model, and where they stop.
    nonfinite = np.flatnonzero(concern == 0)
    order = -_extremeness(table)
    order[nonfinite] = np.minimum(np.arange(len(nonfinite)), np.arange(len(nonfinite))[::-1])
    worst = np.lexsort((order, concern))
    return sorted(worst[:limit].tolist())


# --- texts ---

_LETTERS = {
    "parameter": "p",
    "gradient": "g",
    "update": "u",
    "ratio": "p/g",
    "update_ratio": "u/p",
    "adam": "adam",
    "noise": "noise",
}
QUOTIENT_MEANING = (
    "|p/g| is the learning rate at which one plain gradient step would be as large as the parameter itself."
)


_NOISE: dict[str, tuple[str, str]] = {
    "trace": ("tr Σ", "tr Σ: the variance of one example's gradient, summed over the elements"),
    "square": ("|G|²", "|G|²: the square of the true mean gradient's 2-norm, an unbiased estimate"),
    "noise_scale": ("noise\nscale", "noise scale: tr Σ / |G|², the examples of a batch that is half noise, half G"),
    "signal_to_noise": (
        "signal/\nnoise",
        "signal/noise: |G|, of the mean gradient, over one batch's standard deviation",
    ),
    "batches": ("batches", "batches: how many had a gradient"),
    "batch": ("batch", "batch: the mean weight of one, in examples"),
}
"""Of the statistics of noise, the headers and what they mean."""


def sheet_of(table: Table, wide: bool, limit: int | None) -> Sheet:
    """The texts of a table."""
    columns = _printed_columns(table, wide)
    quotients = [name for name in ("ratio", "update_ratio") if any(f"{name}.{each}" in columns for each in _QUOTIENTS)]
    concern = _concern(table, quotients)
    shown = _shown_rows(table, limit, concern)
    lines: list[Line] = []
    for row in (table[i] for i in shown):
        notes = (*_counts_of(row, quotients), *_states_of(row))
        frozen = row.states[:1] == ("frozen",) and row.state_counts[:1] == (row.count,)
        lines.append(Line(str(row.path) or "the root", _cells(row, columns), notes, frozen))
    return Sheet(
        ("layer" if table.is_folded else "parameter", *map(_header, columns)),
        tuple(lines),
        _total_line(table, columns, quotients),
        tuple(_below(table, columns, quotients, shown, concern)),
    )


def _header(column: str) -> str:
    section, _, name = column.partition(".")
    if not name:
        return section
    if section == "noise" and name in _NOISE:
        return _NOISE[name][0]
    letter = _LETTERS[section]
    if TABLE_SECTIONS[section] is Moments:
        return {"mean_abs": f"mean |{letter}|", "max_abs": f"max |{letter}|", "norm": f"|{letter}|"}.get(
            name, f"{name} {letter}"
        )
    of_norms = f"|{letter[0]}|/|{letter[-1]}|"
    headers = {"mean_abs": f"mean |{letter}|", "ratio_of_norms": of_norms, "log10": f"log10\n{of_norms}"}
    if section != "adam" and name in ("mean", "min", "max"):
        return f"{name} {letter}"
    return headers.get(name, f"{letter}\n{name}")


def _total_line(table: Table, columns: Sequence[str], quotients: Sequence[str]) -> Line:
    total = table.total
    sections = {column.partition(".")[0] for column in columns}.intersection(TABLE_SECTIONS) or set(TABLE_SECTIONS)
    measured = int(table.measured(*sections).sum())
    rows = "row" if len(table) == 1 else "rows"
    label = f"all {len(table):,} {rows}" if measured in (0, len(table)) else f"{measured:,} of {len(table):,} {rows}"
    return Line(label, _cells(total, columns), _counts_of(total, quotients))


def _cells(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(_cell(column, row.value(column)) for column in columns)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "?" if column in ("n", "shape") else "-"
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    if isinstance(value, int):
        return count_text(value)
    return number_text(value) if isinstance(value, float) else str(value)


def number_text(value: float) -> str:
    """A number in few characters, with three significant digits or more.

    >>> number_text(0.25), number_text(12345.6), number_text(-0.00123), number_text(float("inf"))
    ('0.25', '1.23e4', '-1.23e-3', 'inf')
    """
    value += 0.0  # no minus before a zero
    if value and np.isfinite(value) and not 1e-2 <= abs(value) < 9999.5:  # no more than four digits
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.4g}"


def count_text(n: int) -> str:
    """A count in few characters.

    >>> count_text(9_999), count_text(12_345), count_text(7_000_000_000)
    ('9,999', '12.3k', '7G')
    """
    for unit, size, least in (
        ("T", 10**12, 0.9995e12),
        ("G", 10**9, 0.9995e9),
        ("M", 10**6, 0.9995e6),
        ("k", 10**3, 1e4),
    ):
        if n >= least:
            return f"{n / size:.3g}{unit}"
    return f"{n:,}"


# --- notes ---

_MANY = 0.5
"""From which share on it is said that elements have a gradient and did not move (rounded away in a narrow dtype)."""


def _counts_of(row: Row, quotients: Sequence[str]) -> tuple[Note, ...]:
    """What is not finite and where, and which elements have no quotient and why."""
    notes: list[Note] = []
    held = {"parameter": row.parameter, "gradient": row.gradient, "update": row.update}
    for name, moments in held.items():
        if moments is not None and moments.nonfinite:
            counts = ((moments.nan, "NaN"), (moments.posinf + moments.neginf, "Inf"))
            notes.append(Note(f"{name}: {', '.join(f'{count_text(n)} {what}' for n, what in counts if n)}", "red"))
    if row.adam is not None:
        undefined = row.adam.n - row.adam.defined - (row.gradient.nonfinite if row.gradient is not None else 0)
        if undefined > 0:
            notes.append(Note(f"Adam's state: {count_text(undefined)} undefined", "red"))
    if row.update is not None and row.gradient is not None and "unmoved" not in row.states:
        unmoved = row.update.zeros - row.gradient.zeros
        if unmoved >= row.update.n * _MANY > 0:
            notes.append(Note(f"{row.update.zeros / row.update.n:.0%} did not move", "yellow"))
    for name in quotients:
        pair, one, other = {
            "ratio": (row.ratio, row.parameter, row.gradient),
            "update_ratio": (row.update_ratio, row.update, row.parameter),
        }[name]
        if pair is not None:
            prefix = "" if len(quotients) == 1 else f"{_LETTERS[name]}: "
            notes += [note._replace(text=prefix + note.text) for note in _undefined(pair, one, other)]
    return tuple(notes)


def _undefined(pair: Pair, x: Moments | None, y: Moments | None) -> Iterator[Note]:
    for count, name in ((pair.x_by_zero, "x/0"), (pair.zero_by_zero, "0/0")):
        if count:
            yield Note(f"{count_text(count)} {name}", "yellow")
    if x is None or y is None:
        if pair.nonfinite:
            yield Note(f"{count_text(pair.nonfinite)} NaN/Inf", "red")
    # The NaN and Inf in x and y have notes already; the quotients beyond those are of finite elements.
    elif (overflow := pair.nonfinite - x.nonfinite - y.nonfinite) > 0:
        yield Note(f"{count_text(overflow)} overflow", "red")


_SAID: dict[State, tuple[str, str, Tone]] = {
    "uninitialised": ("uninitialised", "uninitialised", "yellow"),
    "meta": ("meta: no values", "meta", "yellow"),
    "frozen": ("frozen", "frozen", "dim"),
    "not run": ("no gradient", "without gradient", "yellow"),
    "unused": ("no gradient: unused", "unused", "yellow"),
    "no optimizer": ("in no optimizer", "in no optimizer", "yellow"),
    "zero": ("gradient is zero", "of gradient zero", "yellow"),
    "unmoved": ("did not move", "unmoved", "yellow"),
}
"""How a state is said of a row, how it is said of some of a layer's parameters, and its colour."""


def _states_of(row: Row) -> Iterator[Note]:
    for state, count in zip(row.states, row.state_counts, strict=True):
        if state == "partly zero":
            zero = 0 if row.gradient is None else row.gradient.zero_rows
            of = f" of {count_text(row.shape[0])}" if row.shape else ""
            yield Note(f"{count_text(zero)}{of} {'row' if zero == 1 and not of else 'rows'} zero", "")
        elif state != "non-finite":  # which has notes of its own
            of_all, of_some, tone = _SAID[state]
            yield Note(of_all if count == row.count else f"{count:,} {of_some}", tone)


# --- below the rows ---

_TIES = 6


def _below(
    table: Table, columns: Sequence[str], quotients: Sequence[str], shown: Sequence[int], concern: NDArray[np.intp]
) -> Iterator[str]:
    if left := len(table) - len(shown):
        wrong = int((concern < 3).sum() - (concern[list(shown)] < 3).sum())
        problems = f", {wrong:,} of them with problems" if wrong else ""
        yield f"… {left:,} more {'row' if left == 1 else 'rows'}{problems}; table.print(rows=None) shows all"
    nonfinite = np.flatnonzero(concern == 0)
    if len(nonfinite) > 1:
        first, last = (table[int(i)].path for i in (nonfinite[0], nonfinite[-1]))
        yield f"NaN or Inf in {len(nonfinite):,} rows, the first of the model {first}, the last {last}"
    for names in table.ties[:_TIES]:
        yield f"tied: {' = '.join(map(str, names))}"
    if (more := len(table.ties) - _TIES) > 0:
        yield f"… {more:,} more {'tie' if more == 1 else 'ties'}"
    states = table.state_counts
    if frozen := states.get("frozen", 0):
        yield f"{frozen:,} frozen {'parameter' if frozen == 1 else 'parameters'}"
    trainable = sum(table.column("count")) - sum(states.get(each, 0) for each in ("frozen", "meta", "uninitialised"))
    if trainable and states.get("not run", 0) >= trainable:
        yield "no parameter has a gradient: was backward() called?"
    if legend := _legend(columns, quotients):
        yield legend
    yield from (meaning for name, (_, meaning) in _NOISE.items() if f"noise.{name}" in columns)


def _legend(columns: Sequence[str], quotients: Sequence[str]) -> str:
    """What the headers mean."""
    if "ratio" in quotients:
        return QUOTIENT_MEANING
    letters = "".join(
        _LETTERS[name]
        for name in TABLE_SECTIONS
        if name not in ("adam", "noise") and any(c.startswith(f"{name}.") for c in columns)
    )
    names = {
        letter: word for letter, word in (("p", "parameter"), ("g", "gradient"), ("u", "update")) if letter in letters
    }
    statistics = {column.partition(".")[2] for column in columns}
    parts = [f"{', '.join(names)}: {', '.join(names.values())}"] if names else []
    parts += ["rms: root mean square"] if "rms" in statistics else []
    parts += ["|p|: 2-norm"] if statistics & {"norm", "ratio_of_norms", "log10"} else []
    return "; ".join(parts)


# --- in a terminal ---


@dataclass(frozen=True, slots=True)
class View:
    """A table as rich renders it. `whole` gives it the width it needs, and no path is shortened."""

    table: Table
    wide: bool = False
    rows: int | None = 40
    whole: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sheet = sheet_of(self.table, self.wide, self.rows)
        if not self.whole:
            yield _grid(sheet, options.max_width)
            yield from map(Text, sheet.below)
            return
        grid = _grid(sheet, None)
        width = max(console.measure(grid, options=options.update(width=_UNLIMITED)).maximum, options.max_width)
        yield from console.render(grid, options.update(width=width))
        yield from map(Text, sheet.below)


_UNLIMITED = 100_000


def print_table(table: Table, console: Console | None, wide: bool, rows: int | None) -> None:
    """See `Table.print`."""
    console = Console() if console is None else console
    # A file has no width, and programs read it: names are kept whole.
    whole = wide or not (console.is_terminal or console.is_jupyter)
    console.print(View(table, wide, rows, whole), crop=not whole)


_LEAST_PATH = 14
_LEAST_NOTES = 14


def _grid(sheet: Sheet, width: int | None) -> Grid:
    """The rows in columns. All but paths and notes have the width that they need; these two share what is left."""
    lines = [*sheet.lines, sheet.total]
    label, *headers = sheet.headers
    has_notes = any(line.notes for line in lines)
    numbers = [
        max(map(cell_len, (*header.split("\n"), *(line.cells[i] for line in lines))))
        for i, header in enumerate(headers)
    ]
    names = max(cell_len(text) for text in (label, *(line.label for line in lines)))
    notes = max((cell_len(note.text) for line in lines for note in line.notes), default=0)
    gap, room = 2, names
    if width is not None:
        gap = 2 if sum(numbers) + names + notes + 2 * (len(numbers) + has_notes) <= width else 1
        left = width - sum(numbers) - gap * (len(numbers) + has_notes)
        notes = min(notes, max(_LEAST_NOTES, left - names))
        room = max(_LEAST_PATH, left - notes)
    labels = [*shorten_all([line.label for line in sheet.lines], room), sheet.total.label]

    grid = Grid(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column(Text(label), overflow="fold")
    for header in headers:
        grid.add_column(Text(header), justify="right", no_wrap=True)
    if has_notes:
        grid.add_column("notes", max_width=max(notes, len("notes")), overflow="fold")
    for name, line in zip(labels, lines, strict=True):
        remarks = Text("\n").join(Text(note.text, note.tone) for note in line.notes)
        style = "dim" if line.dim else ""
        grid.add_row(Text(name, style), *(Text(cell, style) for cell in line.cells), *([remarks] if has_notes else []))
    return grid


def shorten_all(texts: Sequence[str], width: int) -> list[str]:
    """Paths' texts in at most `width` characters each; but whole wherever two would look alike."""
    short = [shorten(text, width) for text in texts]
    owners: dict[str, set[str]] = {}
    for text, each in zip(texts, short, strict=True):
        owners.setdefault(each, set()).add(text)
    return [each if len(owners[each]) == 1 else text for text, each in zip(texts, short, strict=True)]


_LONGEST_PATH = 400


def shorten(text: str, width: int) -> str:
    """A path's text in at most `width` characters: its longest names lose their ends, but numbers and the last name stay.

    >>> shorten("transformer.layers.10.attention.weight", 28)
    'tran….laye….10.atten….weight'
    >>> shorten("transformer.layers.10.attention.weight", 16)
    't…l…10.a…weight'
    >>> shorten("a_name_that_is_long", 10)
    'a_na…_long'
    """
    if cell_len(text) <= width:
        return text
    if len(text) > _LONGEST_PATH:
        text = _without_middle(text, _LONGEST_PATH)
    *names, last = text.split(".")
    while cell_len(".".join((*names, last))) > width:
        longest = max(range(len(names)), key=lambda i: 0 if names[i].isdigit() else len(names[i]), default=-1)
        if longest < 0 or names[longest].isdigit() or len(names[longest]) <= 2:
            return _without_middle(".".join((*names, last)).replace("….", "…"), width)
        names[longest] = names[longest][:-2] + "…"
    return ".".join((*names, last))


def _without_middle(text: str, width: int) -> str:
    if cell_len(text) <= width:
        return text
    head = (width - 1) // 2
    tail = set_cell_size(text[::-1], width - 1 - head)[::-1]
    return f"{set_cell_size(text, head).rstrip('… ')}…{tail.lstrip()}"


# --- in a notebook ---

_STYLES: dict[Tone, str] = {"red": "color:#c62828", "yellow": "color:#9a6700", "dim": "opacity:0.6", "": ""}


def html_of(table: Table) -> str:
    """The table as HTML, with whole paths."""
    sheet = sheet_of(table, wide=False, limit=40)
    has_notes = any(line.notes for line in (*sheet.lines, sheet.total))
    headers = (*sheet.headers, *(["notes"] if has_notes else []))
    head = "".join(
        _element("th", header, "text-align:left" if i == 0 or header == "notes" else "text-align:right")
        for i, header in enumerate(headers)
    )
    body = "".join(
        f"<tr{_style(_STYLES['dim' if line.dim else ''])}>{_html_cells(line, has_notes)}</tr>" for line in sheet.lines
    )
    total = f"<tr>{_html_cells(sheet.total, has_notes)}</tr>"
    below = "".join(_element("div", text) for text in sheet.below)
    return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody><tfoot>{total}</tfoot></table>{below}</div>"


def _html_cells(line: Line, has_notes: bool) -> str:
    cells = [_element("td", line.label, "text-align:left")]
    cells += [_element("td", cell, "text-align:right") for cell in line.cells]
    if has_notes:
        notes = "<br>".join(_element("span", note.text, _STYLES[note.tone]) for note in line.notes)
        cells.append(f'<td style="text-align:left">{notes}</td>')
    return "".join(cells)


def _element(tag: str, text: str, style: str = "") -> str:
    return f"<{tag}{_style(style)}>{html.escape(text).replace(chr(10), '<br>')}</{tag}>"


def _style(style: str) -> str:
    return f' style="{style}"' if style else ""

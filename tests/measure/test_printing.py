"""The table as people read it."""

import html.parser
import io

import numpy as np
import pytest
from rich.console import Console
from rich.panel import Panel

from cowalk import Path
from cowalk.measure.backend import SPANS, AdamSettings, Operands
from cowalk.measure.printing import count_text, number_text, shorten, shorten_all
from cowalk.measure.reference import measure
from cowalk.measure.table import Table
from cowalk.tree import Index


def table_of(leaves, states=(), aliases=None, **options):
    """A table of {keys or dotted text: operands}; a state for the first rows each."""
    paths = [Path(key.split(".")) if isinstance(key, str) else Path(key) for key in leaves]
    matrix, _ = measure([leaf if isinstance(leaf, Operands) else Operands(*leaf) for leaf in leaves.values()])
    shapes = [np.shape(leaf[0]) for leaf in leaves.values()]
    every = [*states, *[()] * (len(paths) - len(states))]
    dtypes = ["float64"] * len(paths)
    return Table(paths, matrix, aliases=aliases or {}, states=every, shapes=shapes, dtypes=dtypes, **options)


def leaf(n=4, p=1.0, g=0.5):
    return np.full(n, p), np.full(n, g)


def encoder(layers=12):
    """What a real model's paths look like, with something off in the first layer."""
    rng = np.random.default_rng(0)
    leaves, states = {}, []
    for i in range(layers):
        for name in ("attention.self.query", "attention.self.key", "attention.output.dense", "output.dense"):
            for kind, shape in (("weight", (6, 4)), ("bias", (4,))):
                p, g, m = rng.normal(size=(3, *shape)) * 1e-2
                state = ()
                match len(leaves):
                    case 0:
                        g[0, :3] = np.nan, np.inf, -np.inf
                    case 1:
                        g, state = None, ("frozen",)
                    case 2:
                        g, state = None, ("unused",)
                    case 3:
                        g, state = g * 0, ("zero",)
                    case 4:
                        g[:2], state = 0, ("partly zero",)
                adam = (m, np.square(m), AdamSettings(1e-8, lr=1e-3))
                leaves["bert", "encoder", "layer", Index(i), *name.split("."), kind] = Operands(p, g, m * 1e-3, *adam)
                states.append(state)
    return table_of(leaves, states, {5: (Path(("head", "bias")),)})


def printed(table, how=None, **options):
    file = io.StringIO()
    table.print(Console(file=file, **options), **(how or {}))
    return file.getvalue()


def on_terminal(table, how=None, width=80, **options):
    return printed(table, how, force_terminal=True, color_system=None, width=width, **options)


# --- what is shown ---


def test_the_columns_are_those_that_were_measured():
    p, g, u = np.ones(3), np.full(3, 0.5), np.full(3, 0.01)
    first = str(table_of({"w": (p,)})).splitlines()[0].split()
    assert first == ["parameter", "n", "mean", "p", "std", "p", "min", "p", "max", "p"]
    assert "rms p  rms g  |p|/|g|" in str(table_of({"w": (p, g)}))
    assert "log10" not in str(table_of({"w": (p, g)}))
    text = str(table_of({"w": (p, g, u)}))
    assert "log10" in text
    assert " -2" in text
    assert "adam" not in text
    assert "adam" in str(table_of({"w": Operands(p, g, u, g, g * g, AdamSettings(1e-8))}))


def test_the_legend_says_what_the_headers_mean():
    assert "p, g, u: parameter, gradient, update; rms: root mean square; |p|: 2-norm" in str(encoder())
    assert str(table_of({"w": leaf()}).select("gradient.max")).endswith("g: gradient")
    quotients = table_of({"w": leaf()}, columns=("n", "ratio.mean"))
    assert "|p/g| is the learning rate" in str(quotients)


def test_chosen_columns_are_printed_beside_the_path():
    table = table_of({"w": leaf(), "b": leaf(2)}).select("dtype", "shape", "gradient.max_abs", "path")
    header, first, *_ = str(table).splitlines()
    assert header.split() == ["parameter", "dtype", "shape", "max", "|g|"]
    assert first.split() == ["w", "float64", "4", "0.5"]
    assert "rms" not in str(table)


def test_what_is_not_finite_is_told_with_its_place():
    rows = {
        "fc.weight": (np.array([np.nan, 1.0]), np.array([np.inf, -np.inf])),
        "fc.bias": (np.ones(1), np.ones(1), np.array([np.nan])),
    }
    text = printed(table_of(rows))
    assert "parameter: 1 NaN\n" in text.replace(" \n", "\n").replace("  ", "")
    assert "gradient: 2 Inf" in text
    assert "update: 1 NaN" in text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("frozen", "frozen"),
        ("unused", "no gradient: unused"),
        ("no optimizer", "in no optimizer"),
        ("zero", "gradient is zero"),
        ("unmoved", "did not move"),
        ("meta", "meta: no values"),
        ("uninitialised", "uninitialised"),
    ],
)
def test_states_are_told_in_words(state, words):
    assert words in str(table_of({"w": leaf(), "b": leaf()}, [(state,)]))


def test_a_partly_zero_gradient_says_how_many_rows():
    g = np.ones((50, 2))
    g[:12] = 0
    table = table_of({"emb.weight": (np.ones((50, 2)), g), "emb.bias": leaf()}, [("partly zero",)])
    assert "12 of 50 rows zero" in str(table)
    assert "12 rows zero" in str(table.layers())


def test_layers_say_how_many_of_their_parameters():
    table = table_of({f"m.{x}": leaf() for x in "abc"}, [("zero",), ("frozen",), ("zero",)]).layers()
    text = str(table)
    assert text.startswith("layer ")
    assert "2 of gradient zero" in text
    assert "1 frozen" in text
    both = table_of({"m.a": leaf(), "m.b": leaf()}, [("zero",), ("zero",)]).layers()
    assert "gradient is zero" in str(both)


def test_quotients_that_do_not_exist_are_told_where_quotients_are_shown():
    p = np.array([1.0, 0.0, 1e300, np.nan, 2.0])
    g = np.array([0.0, 0.0, 1e-300, 1.0, 1.0])
    table = table_of({"w": (p, g)})
    assert "x/0" not in str(table)
    text = printed(table.select("ratio.mean", "ratio.mean_abs"))
    for words in ("parameter: 1 NaN", "1 x/0", "1 0/0", "1 overflow"):
        assert words in text
    alone = table_of({"w": (p, g)}, columns=("ratio.mean",))
    alone.matrix[:, : SPANS["ratio"].start] = np.nan  # the pair was measured, its arrays were not
    assert "2 NaN/Inf" in str(alone)


def test_below_stand_ties_and_the_frozen():
    text = printed(encoder())
    assert "tied: bert.encoder.layer.0.attention.output.dense.bias = head.bias" in text
    assert "1 frozen parameter\n" in text
    ties = {i: (Path(("head", str(i))),) for i in range(8)}
    many = str(table_of({f"w{i}": leaf() for i in range(8)}, [("frozen",)] * 8, ties))
    assert "8 frozen parameters" in many
    assert "… 2 more ties" in many


def test_a_model_without_any_gradient_asks_for_backward():
    question = "no parameter has a gradient: was backward() called?"
    rows = {x: (np.ones(2),) for x in "abc"}
    not_run = [("not run",), ("frozen",), ("not run",)]
    assert question in str(table_of(rows, not_run))
    assert question in str(table_of(rows, not_run).layers(0))
    assert question not in str(table_of(rows, not_run[:2]))
    assert question not in str(table_of(rows, [("frozen",)] * 3))


def test_the_total_counts_the_rows_that_have_values():
    assert "all 2 rows" in str(table_of({"a": leaf(), "b": leaf()}))
    partly = table_of({"a": leaf(), "b": (np.ones(2),)}, columns=("n", "ratio.mean"))
    assert "1 of 2 rows" in str(partly)


def test_tables_without_rows_or_values():
    assert "all 0 rows" in str(table_of({}))
    assert "all 0 rows" in str(table_of({}).layers())
    assert "all 0 rows" in printed(table_of({}), {"wide": True, "rows": 0})
    assert "<table>" in table_of({})._repr_html_()
    assert "w" in str(table_of({"w": (np.ones(0), np.ones(0))}))
    assert "the root" in str(table_of({(): leaf()}))


def test_a_model_without_values_shows_its_size():
    lines = np.full_like(table_of({"a": leaf(), "b": leaf()}).matrix, np.nan)
    table = Table(
        [Path("a"), Path("b")],
        lines,
        aliases={},
        states=[("meta",), ("uninitialised",)],
        shapes=[(30, 40), None],
        dtypes=["float32", "float32"],
    )
    text = str(table)
    assert "1,200" in text
    assert " ? " in text


# --- how it fits ---


def test_it_fits_80_columns_and_keeps_layers_apart():
    text = str(encoder())
    assert max(map(len, text.splitlines())) <= 80
    names = [line.split()[0] for line in text.splitlines() if "…" in line.split(" ")[0] and "more" not in line]
    assert len(names) == len(set(names)) == 40


def test_names_are_whole_where_no_terminal_sets_the_width():
    text = printed(encoder(), width=80)
    assert "bert.encoder.layer.0.attention.output.dense.weight" in text
    assert "NaN, 2 Inf" in text
    assert "…" in on_terminal(encoder()).split("\n", 2)[2]
    assert "bert.encoder.layer.0.attention.output.dense.weight" in on_terminal(encoder(), {"wide": True})


def test_wide_shows_every_column_that_says_something():
    header = " ".join(printed(encoder(), {"wide": True}).splitlines()[:2])
    for name in ("shape", "dtype", "mean p", "zero_rows g", "|u|", "cosine", "sign_agreement", "rms"):
        assert name in header
    assert "neginf p" not in header


def test_a_narrow_terminal_does_not_fail():
    assert on_terminal(encoder(), width=20)


def test_it_fits_inside_other_things():
    file = io.StringIO()
    Console(file=file, width=70).print(Panel(encoder()))
    assert {len(line) for line in file.getvalue().splitlines()} == {70}


def test_wide_characters_are_measured_as_they_are_shown():
    from rich.cells import cell_len

    table = table_of({("符号化器" * 8, str(i), "重み" * 8): leaf() for i in range(12)}, [("unused",)])
    lines = str(table).splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert len({line.split()[0] for line in lines[1:13]}) == 12


def test_numbers_stand_below_their_header():
    header, *lines = str(table_of({"first": leaf(), "second": leaf(3000, 1e-9, -1e12)})).splitlines()
    for name in ("rms p", "rms g", "|p|/|g|"):
        end = header.index(name) + len(name)
        for line in lines[:2]:
            assert line[end - 1] != " "
            assert line[end : end + 1] in ("", " ")


def test_brackets_in_paths_are_no_markup():
    text = str(table_of({("[bold]",): leaf(), ("scores", 1): leaf()}))
    assert "['[bold]']" in text
    assert "scores[1]" in text


def test_it_shows_itself_in_a_session():
    table = table_of({"w": leaf()})
    assert repr(table) == str(table)


# --- which rows ---


def large():
    rng = np.random.default_rng(0)
    leaves = {f"w{i}": (rng.normal(size=3), rng.normal(size=3), rng.normal(size=3) * 1e-3) for i in range(200)}
    leaves["w150"] = (np.ones(3), np.array([np.nan, 1, 1]), np.ones(3) * 1e-3)
    leaves["w120"] = (np.ones(3), np.ones(3), np.ones(3) * 50)
    states = [()] * 200
    states[180] = ("zero",)
    states[190] = ("frozen",)
    return table_of(leaves, states)


def shown(table, rows):
    lines = printed(table, {"rows": rows}).splitlines()
    return [line.split()[0] for line in lines if line.startswith("w")]


def test_of_many_rows_the_worst_are_shown_in_the_models_order():
    assert shown(large(), 1) == ["w150"]
    assert shown(large(), 2) == ["w150", "w180"]
    assert shown(large(), 3) == ["w120", "w150", "w180"]
    assert len(shown(large(), 40)) == 40
    assert len(shown(large(), None)) == len(shown(large(), 200)) == 200


def test_and_what_is_left_out_is_said():
    assert "… 160 more rows; table.print(rows=None) shows all" in str(large())
    text = printed(large(), {"rows": 1})
    assert "… 199 more rows, 1 of them with problems; table.print(rows=None) shows all" in text
    assert "all 200 rows" in text
    assert "… 1 more row;" in printed(large(), {"rows": 199})


def test_without_updates_what_is_far_from_the_rest_is_shown():
    leaves = {f"w{i}": leaf(g=0.5 + i / 100) for i in range(9)} | {"w9": leaf(g=1e4), "w10": leaf(g=1e-4)}
    assert shown(table_of(leaves), 2) == ["w9", "w10"]


def test_of_a_sorted_table_the_first_are_shown():
    table = large().sort("gradient.norm", descending=True)
    assert shown(table, 5) == [str(row.path) for row in table[:5]]


# --- colours ---


def coloured(table):
    return printed(table, force_terminal=True, color_system="standard", width=200)


def test_only_what_is_off_is_coloured():
    assert "\x1b[3" not in coloured(table_of({"w": leaf()}))
    text = coloured(encoder())
    assert "\x1b[31mgradient: 1 NaN, 2 Inf" in text
    assert "\x1b[33mno gradient: unused" in text


def test_a_frozen_parameter_is_dim_and_no_problem():
    text = coloured(table_of({"w": (np.ones(2),), "b": leaf()}, [("frozen",)]))
    assert "\x1b[2mw" in text
    assert "\x1b[3" not in text
    assert "\x1b[2mb" not in text


# --- in a notebook ---


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.texts, self.cells = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.cells += tag in ("td", "th")
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_is_whole_and_escaped():
    table = table_of({("<script>",): leaf(), "b": leaf()}, [("zero",)])
    text = table._repr_html_()
    assert "<script>" not in text
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert "['<script>']" in reader.texts
    assert "gradient is zero" in reader.texts
    assert reader.cells == 4 * 6


def test_html_is_coloured_only_where_something_is_off():
    assert "color" not in table_of({"w": leaf()})._repr_html_()
    assert "notes" not in table_of({"w": leaf()})._repr_html_()
    text = encoder()._repr_html_()
    assert 'color:#c62828">gradient: 1 NaN' in text
    assert 'color:#9a6700">no gradient' in text
    assert '<tr style="opacity' in encoder(layers=1)._repr_html_()
    assert "bert.encoder.layer.0.attention.output.dense.weight" in text


# --- texts ---


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("a.b", 10, "a.b"),
        ("transformer.layers.10.attention.weight", 28, "tran….laye….10.atten….weight"),
        ("transformer.layers.10.attention.weight", 15, "t…l…10.a…weight"),
        ("123456789.123456789", 9, "1234…6789"),
    ],
)
def test_long_paths_are_cut_inside(text, width, short):
    assert len(shorten(text, width)) <= width
    assert shorten(text, width) == short


def test_paths_that_would_look_alike_are_whole():
    alike = ["a_long_name_1_of_a_layer.weight", "a_long_name_2_of_a_layer.weight"]
    assert shorten_all([*alike, "another_layer_name.bias"], 12) == [*alike, shorten("another_layer_name.bias", 12)]
    text = str(table_of({f"{'x' * 60}{i}{'y' * 60}": leaf() for i in range(3)})).replace("\n", "")
    assert "…" not in text


def test_a_path_of_great_depth_is_cut_quickly():
    assert len(shorten(".".join(["key"] * 100_000), 30)) <= 30


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (12345.6, "1.23e4"),
        (0.00123, "1.23e-3"),
        (-9999.9, "-1.00e4"),
        (0.5, "0.5"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (5e-324, "4.94e-324"),
    ],
)
def test_numbers(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("n", "text"), [(9_999, "9,999"), (10_000, "10k"), (999_600, "1M"), (0, "0"), (7 * 10**12, "7T")]
)
def test_counts(n, text):
    assert count_text(n) == text

"""The table as people and programs read it."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from cowalk import ratio
from cowalk.measure.table import shorten


def large():
    rng = np.random.default_rng(0)
    name = "attention_with_a_long_name"
    model = {
        "encoder": {"layers": [{name: {"weight": rng.normal(size=(40, 40)), "bias": np.zeros(40)}} for _ in range(12)]},
        "scores[1]": np.ones(3) * 1e300,
        "[bold]": np.ones(2),
        "unused": np.ones(2),
    }
    grads = {
        "encoder": {"layers": [{name: {"weight": rng.normal(size=(40, 40)), "bias": np.zeros(40)}} for _ in range(12)]},
        "scores[1]": np.array([1e-300, 1.0, np.nan]),
        "[bold]": np.array([0.0, 1e-200]),
        "unused": None,
    }
    return ratio(model, grads)


def printed(table, **options):
    file = io.StringIO()
    table.print(Console(file=file, **options))
    return file.getvalue()


def test_it_fits_80_columns_and_keeps_layers_apart():
    lines = str(large()).splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if "…" in line]
    assert len(names) == len(set(names)) == 24
    assert next(i for i, n in enumerate(names) if ".2." in n) < next(i for i, n in enumerate(names) if ".10." in n)


def test_the_widest_numbers_still_fit():
    p = np.array([-1.11e-300, -1.22e-200, 1.33e-300, 0.0] * 3000)
    name = "a_very_long_name_of_a_layer"
    lines = str(
        ratio(
            {name: [{name: p}] * 12}, {name: [{name: np.ones(12000) * np.tile([1, 1, 1, 0.0], 3000)}] * 12}, ties="each"
        )
    )
    assert max(map(len, lines.splitlines())) <= 80
    assert "-1.22e-200" in lines
    assert "3,000 0/0" in lines


def test_columns_are_aligned():
    header, *lines = str(large()).splitlines()
    ends = [header.index(name) + len(name) for name in ("n", "mean p/g", " min", " max", "mean |p/g|") if name != "n"]
    for line in lines[:24]:
        for end in ends:
            assert line[end - 1] != " "
            assert line[end : end + 1] in ("", " ")


def test_what_has_no_quotient_is_told():
    text = str(large())
    for words in ("40 0/0", "1 x/0", "NaN/Inf", "no gradient", "26 of 27 rows", "['scores[1]']", "['[bold]']"):
        assert words in text
    assert "|p/g| is the learning rate" in text.replace("\n", " ")


def test_a_wide_terminal_shows_whole_paths():
    text = printed(large(), width=160)
    assert "encoder.layers.10.attention_with_a_long_name.weight" in text
    assert "…" not in text


def test_a_narrow_one_does_not_fail():
    assert printed(large(), width=20)


def test_only_what_is_off_is_coloured():
    fine = ratio({"w": np.ones(2)}, {"w": np.ones(2)})
    assert "\x1b[3" not in printed(fine, force_terminal=True, color_system="standard", width=80)
    off = printed(large(), force_terminal=True, color_system="standard", width=80)
    assert "\x1b[33mno gradient" in off
    assert "\x1b[31m2 NaN/Inf" in off


def test_tied_names_are_all_printed():
    shared = np.ones(2)
    text = str(ratio({"emb": shared, "head": shared}, {"emb": shared, "head": None}))
    assert "tied: emb = head" in text


def test_it_shows_itself_in_a_session():
    table = ratio({"w": np.ones(2)}, {"w": np.ones(2)})
    assert repr(table) == str(table)
    assert "all 1 rows" in str(table)


def test_tables_without_rows_or_values():
    assert "all 0 rows" in str(ratio({}, {}))
    assert "w" in str(ratio({"w": np.ones(0)}, {"w": np.ones(0)}))
    assert "the root" in str(ratio(np.ones(1), np.ones(1)))


def test_plain_data_for_programs():
    data = large().to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["rows"][0]["path"] == "encoder.layers.0.attention_with_a_long_name.weight"
    assert data["rows"][-1] == {
        "path": "unused",
        "aliases": [],
        "state": "no gradient",
        "shape": [2],
        "dtype": "float64",
        "ratio": None,
    }
    assert data["total"]["n"] == 12 * 1640 + 5


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("a.b", 10, "a.b"),
        ("transformer.layers.10.attention.weight", 28, "tran….laye….10.atten….weight"),
        ("transformer.layers.10.attention.weight", 12, "t….l…weight"),
        ("123456789.123456789", 9, "1234…6789"),
    ],
)
def test_long_paths_are_cut_inside(text, width, short):
    assert len(shorten(text, width)) <= width
    assert shorten(text, width) == short


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
    ],
)
def test_numbers(value, text):
    assert f" {text} " in str(ratio([np.array([value])], [np.ones(1)]))


@pytest.mark.parametrize(("n", "text"), [(9_999, "9,999"), (10_000, "10k"), (999_600, "1M"), (0, "0")])
def test_counts(n, text):
    assert f" {text} " in str(ratio([np.ones(n)], [np.ones(n)]))

"""No walk keeps or loses a reference, whatever happens in it."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from typing import Any

import pytest

import cowalk
from cowalk.tree import Branch, kind_of
from tests.tree import strategies
from tests.tree.kinds_under_test import Cell
from tests.tree.test_agreement import WHERES, Calls, arguments, grown


def everything(trees: list[Any]) -> list[Any]:
    """All nodes, leaves and keys of some trees."""
    found: dict[int, Any] = {}
    waiting = list(trees)
    while waiting:
        node = waiting.pop()
        if id(node) in found:
            continue
        found[id(node)] = node
        kind = kind_of(type(node))
        if isinstance(kind, Branch):
            waiting.extend(kind.open(node).values())
        waiting.extend(getattr(node, "__dict__", {}).values())
    return list(found.values())


def one_of_each_walk(rng: random.Random, trees: list[Any]) -> None:
    chosen = {
        "where": rng.choice([*WHERES, "asked", "whole"]),
        "missing": rng.choice(["skip", "pass", "error", "make"]),
    }
    calls = Calls()
    where, missing = arguments(chosen, calls)
    options: Any = {
        "strict": rng.random() < 0.5,
        "ties": rng.choice(["share", "sum", "first", "each"]),
        "missing": missing,
    }
    walks: list[Any] = [
        lambda: cowalk.fmap(calls.f, *trees, where=where, **options),
        lambda: cowalk.fmap(calls.pair, *trees, where=where, outputs=2, **options),
        lambda: cowalk.fmapstructure(calls.f, *trees, where=where, with_path=True, **options),
        lambda: list(cowalk.walk(*trees, where=where, **options)),
        lambda: next(cowalk.walk(*trees, where=where, **options), None),
        lambda: cowalk.diff(*trees),
    ]
    for walk in walks:
        try:
            walk()
        except (cowalk.CowalkError, ZeroDivisionError, TypeError):
            calls.log.clear()


@pytest.mark.parametrize("seed", range(40))
def test_reference_counts_come_back_to_what_they_were(seed: int) -> None:
    rng = random.Random(seed)
    trees = grown(rng, rng.choice([0.0, 0.2]))
    one_of_each_walk(random.Random(seed), trees)  # caches fill
    objects = everything(trees)
    gc.collect()
    before = [sys.getrefcount(each) for each in objects]
    for _ in range(3):
        one_of_each_walk(random.Random(seed), trees)
    gc.collect()
    after = [sys.getrefcount(each) for each in objects]
    changed = [(each, b, a) for each, b, a in zip(objects, before, after, strict=True) if b != a and is_counted(each)]
    assert not changed


def is_counted(value: Any) -> bool:
    """Numbers, texts, classes and functions have references from all over the interpreter."""
    return not isinstance(
        value, int | float | complex | str | bytes | type | type(max) | type(None) | type(cowalk.MISSING)
    )


def test_a_walk_that_is_not_finished_can_be_collected_with_its_trees() -> None:
    cell = Cell(1.0)
    tree: dict[str, Any] = {"a": [cell, Cell(2.0)]}
    walking = cowalk.walk(tree, tree)
    next(walking)
    tree["walk"] = walking  # a cycle: the walk holds the tree, the tree holds the walk
    gone = weakref.ref(cell)
    del cell, tree, walking
    gc.collect()
    assert gone() is None


def test_a_walk_reuses_no_tuple_that_somebody_still_holds() -> None:
    tree = [[float(i)] for i in range(50)]
    kept = list(cowalk.walk(tree, tree))
    assert [values for _, values in kept] == [(float(i), float(i)) for i in range(50)]
    values = [values for _, values in cowalk.walk(tree)]
    assert values == [(float(i),) for i in range(50)]
    assert [str(path) for path, _ in kept] == [f"{i}.0" for i in range(50)]


def test_strategies_make_trees_that_are_worth_walking() -> None:
    sizes = []
    for seed in range(200):
        try:
            sizes.append(sum(1 for _ in cowalk.walk(strategies.tree(random.Random(seed), 4, [Cell(1.0)], []))))
        except cowalk.CowalkError:
            sizes.append(0)
    assert max(sizes) > 10
    assert sum(size > 1 for size in sizes) > 50


def test_a_tree_that_holds_its_own_walk_is_collected() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.params = {"w": 1.0, "owner": self}
            self.walking = cowalk.walk(self.params)
            next(self.walking)

    gone = weakref.ref(Trainer())
    gc.collect()
    assert gone() is None

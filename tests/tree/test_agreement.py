"""The native walk and the reference agree on result, calls, order and errors, on generated trees of every kind."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cowalk
from cowalk.tree import Branch, engine, kind_of, reference
from cowalk.tree.kinds import isleaf, isnumeric, istrainable
from cowalk.tree.where import predicate
from tests.tree import strategies
from tests.tree.kinds_under_test import Cell, Module, Wrapper

pytestmark = pytest.mark.skipif(engine.NATIVE is None, reason="the native walk is not built")
NATIVE = engine.NATIVE


@pytest.fixture(autouse=True)
def walk_implementation() -> None:
    """These tests compare the two; they need not run twice."""


class Calls:
    """What a walk did with user code, by identity of the objects it handed over."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def f(self, *values: Any) -> Any:
        self.log.append(("f", *map(self.name, values)))
        if values and isinstance(values[-1], Cell) and values[-1].value == 9.0:
            raise ZeroDivisionError("f failed")
        return ("made", len(self.log), *values)

    def pair(self, *values: Any) -> Any:
        self.log.append(("f", *map(self.name, values)))
        return values[0], len(self.log)

    def where(self, node: Any) -> bool:
        self.log.append(("where", self.name(node)))
        return isleaf(node) and not isinstance(node, str)

    def make(self, value: Any) -> Any:
        self.log.append(("make", self.name(value)))
        return ("zero", value)

    @staticmethod
    def name(value: Any) -> Any:
        return (
            str(value)
            if isinstance(value, cowalk.Path)
            else (type(value).__name__, id(value) if is_kept(value) else repr(value))
        )


def is_kept(value: Any) -> bool:
    """Whether a value is one object on both sides (sums of ties are made anew)."""
    return not isinstance(value, Cell | tuple | float | int | complex)


def outcome(walk: Any, trees: list[Any], calls: Calls) -> Any:
    try:
        return describe(walk(trees, calls)), calls.log
    except (cowalk.CowalkError, ZeroDivisionError, TypeError) as error:
        told = getattr(error, "differences", None) or getattr(error, "paths", None) or getattr(error, "path", None)
        return type(error), str(error), told, getattr(error, "__notes__", None), calls.log


def describe(made: Any, seen: dict[int, int] | None = None) -> Any:
    """A result as comparable data: types, keys, order, leaves, and which objects are one object."""
    seen = {} if seen is None else seen
    number = seen.setdefault(id(made), len(seen)) if isinstance(made, Module | Wrapper) else None
    kind = kind_of(type(made))
    if isinstance(made, Wrapper):
        return ("wrapper", number, describe(made.content, seen))
    if isinstance(kind, Branch):
        more = (
            describe(made.favourite, seen)
            if isinstance(made, Module) and not isinstance(made.favourite, Module)
            else None
        )
        return type(made).__name__, number, [(type(k), k, describe(v, seen)) for k, v in kind.open(made).items()], more
    return type(made).__name__, repr(made)


def both(walk: Any, trees: list[Any]) -> None:
    one = outcome(lambda t, c: walk(NATIVE, t, c), trees, Calls())
    two = outcome(lambda t, c: walk(reference, t, c), trees, Calls())
    assert one == two


def grown(rng: random.Random, faults: float) -> list[Any]:
    cells = [Cell(float(i)) for i in range(3)]
    modules: list[Any] = []
    lead = strategies.tree(rng, rng.randrange(1, 5), cells, modules)
    followers = [strategies.follower(rng, lead, faults) for _ in range(rng.randrange(3))]
    return [lead, *followers]


WHERES = {
    "leaf": isleaf,
    "numeric": isnumeric,
    "trainable": istrainable,
    "pattern": predicate("*weight*"),
    "type": predicate(Cell),
}
options = st.fixed_dictionaries(
    {
        "faults": st.sampled_from([0.0, 0.0, 0.1, 0.3]),
        "where": st.sampled_from([*WHERES, "asked", "whole"]),
        "missing": st.sampled_from(["skip", "pass", "error", "make"]),
        "strict": st.booleans(),
        "ties": st.sampled_from(["share", "sum", "first", "each"]),
        "structure": st.booleans(),
        "with_path": st.booleans(),
        "outputs": st.sampled_from([1, 1, 2]),
    }
)


def arguments(chosen: dict[str, Any], calls: Calls) -> tuple[Any, Any]:
    where = chosen["where"]
    whole = predicate(list)
    asked = calls.where if where == "asked" else whole if where == "whole" else WHERES[where]
    return asked, calls.make if chosen["missing"] == "make" else chosen["missing"]


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), chosen=options)
def test_fmap_is_the_same(rng: random.Random, chosen: dict[str, Any]) -> None:
    def walk(walker: Any, trees: list[Any], calls: Calls) -> Any:
        where, missing = arguments(chosen, calls)
        f = calls.f if chosen["outputs"] == 1 else calls.pair
        rest = (chosen["strict"], chosen["ties"], chosen["with_path"], chosen["outputs"], chosen["structure"])
        return walker.fmap(f, tuple(trees), where, missing, *rest)

    both(walk, grown(rng, chosen["faults"]))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), chosen=options)
def test_walk_is_the_same(rng: random.Random, chosen: dict[str, Any]) -> None:
    def walk(walker: Any, trees: list[Any], calls: Calls) -> Any:
        where, missing = arguments(chosen, calls)
        holders = chosen["with_path"]
        found = list(walker.walk(tuple(trees), where, missing, chosen["strict"], chosen["ties"], holders))
        return [
            (
                str(path),
                [type(k) for k in path],
                list(map(Calls.name, values)),
                [id(rest[0]), type(rest[1]), rest[1]] if rest else 0,
            )
            for path, values, *rest in found
        ]

    both(walk, grown(rng, chosen["faults"]))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), where=st.sampled_from(list(WHERES)))
def test_differences_are_the_same(rng: random.Random, where: str) -> None:
    def walk(walker: Any, trees: list[Any], calls: Calls) -> Any:
        raw, ties = walker.differences(tuple(trees), WHERES[where])
        return [(kind, tree, str(path), repr(key)) for kind, tree, path, key in raw], [
            (e.tree, list(map(str, e.paths))) for e in ties
        ]

    both(walk, grown(rng, 0.4))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_cycles_are_found_at_the_same_place(rng: random.Random) -> None:
    (lead, *_) = grown(rng, 0.0)
    knot: list[Any] = [lead]
    holder: Any = knot
    for _ in range(rng.randrange(60)):
        holder = [holder] if rng.random() < 0.5 else {"k": holder}
    knot.append(holder)
    both(
        lambda walker, trees, calls: walker.fmap(calls.f, tuple(trees), isleaf, "skip", True, "share", False, 1, False),
        [holder],
    )

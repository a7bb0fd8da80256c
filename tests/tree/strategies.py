"""Generated trees: a lead of every kind of node, and followers that fit it more or less."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from cowalk import MISSING, children
from cowalk.tree import Branch, kind_of
from tests.tree.kinds_under_test import MAPPINGS, RECORDS, SEQUENCES, Cell, Module, PartlyOpened, Void, Wrapper

KEYS = ["a", "b", "weight", "bias", "0", "1", 0, 1, 2, "a.b", (1, 2), True, "left", "right"]


def trees(seed_strategy: Any = None) -> st.SearchStrategy[random.Random]:
    """A source of random trees. Hypothesis chooses (and shrinks) the seed; the trees are made by the functions below."""
    return st.randoms(use_true_random=False) if seed_strategy is None else seed_strategy


def leaf(rng: random.Random, cells: list[Any]) -> Any:
    choice = rng.randrange(10)
    if choice < 3:
        return rng.choice(cells)  # may stand at several places: a tie
    if choice < 5:
        return Wrapper(rng.choice([*cells, 1.5, None]))
    if choice == 5:
        return None
    if choice == 6:
        return Void()
    return rng.choice([1, 2.5, "text", max, float("nan"), Cell(-1.0), Cell(3.0), b"x", 1 + 2j])


def tree(rng: random.Random, depth: int, cells: list[Any], modules: list[Any]) -> Any:
    if depth == 0 or rng.random() < 0.15:
        return leaf(rng, cells)
    parts = [tree(rng, depth - 1, cells, modules) for _ in range(rng.randrange(4))]
    choice = rng.randrange(10)
    if choice < 2:
        return rng.choice(SEQUENCES)(parts)
    if choice < 5:
        keys = rng.sample(KEYS, len(parts))
        return rng.choice(MAPPINGS)(dict(zip(keys, parts, strict=True)))
    if choice < 7:
        record = rng.choice(RECORDS)
        one, two = (*parts, 1.0, 2.0)[:2]
        return record(one, two)
    if choice == 7:
        names = [f"p{i}" for i in range(len(parts))]
        inner = {"sub": tree(rng, depth - 1, cells, modules)} if rng.random() < 0.5 else {"running": None}
        made = Module(dict(zip(names, parts, strict=True)), inner)
        made.favourite = rng.choice([*cells, *modules, None])
        modules.append(made)
        return made
    if choice == 8:
        return Wrapper(parts[0] if parts else [])
    return rng.choice(modules) if modules and rng.random() < 0.5 else PartlyOpened(parts, max)


def follower(rng: random.Random, lead: Any, faults: float) -> Any:
    """Something like the lead in other containers, now and then with a fault."""
    if isinstance(lead, Wrapper):
        return (
            follower(rng, lead.content, faults) if rng.random() < 0.8 else Wrapper(follower(rng, lead.content, faults))
        )
    if rng.random() < faults:
        return rng.choice([None, MISSING, 7.5, [1.0, 2.0], {"odd": 1.0}, {}, Void(), Cell(9.0), Wrapper(Cell(1.0))])
    kind = kind_of(type(lead))
    if not isinstance(kind, Branch):
        return rng.choice([float(rng.randrange(9)), None if rng.random() < faults else 1.0, lead])
    items = {key: follower(rng, child, faults) for key, child in children(lead).items()}
    return contain(rng, kind, fault_keys(rng, items, faults))


def fault_keys(rng: random.Random, items: dict[Any, Any], faults: float) -> dict[Any, Any]:
    found = {}
    for key, child in items.items():
        if rng.random() < faults / 2:
            continue
        spelled = int(key) if isinstance(key, str) and key.isdigit() and rng.random() < 0.3 else key
        spelled = str(int(key)) if type(key) is int and rng.random() < 0.2 else spelled
        found[f"{key}x" if rng.random() < faults / 4 else spelled] = child
    if rng.random() < faults / 2:
        found[rng.choice(["more", 5, "c"])] = rng.choice([1.0, None, [], [None], {"d": 2.0}, Cell(2.0)])
    return found


def contain(rng: random.Random, kind: Branch, items: dict[Any, Any]) -> Any:
    keys = list(items)
    if kind.plain is not dict:
        return rng.choice([list, tuple])(items.values()) if rng.random() < 0.8 else dict(items)
    if rng.random() < 0.2:
        rng.shuffle(keys)
    shuffled = {key: items[key] for key in keys}
    if set(shuffled) == {"weight", "bias"} and rng.random() < 0.3:
        return rng.choice(RECORDS[2:])(shuffled["weight"], shuffled["bias"])
    if all(isinstance(key, str) for key in shuffled) and rng.random() < 0.1:
        return Module(shuffled, {})
    return rng.choice(MAPPINGS)(shuffled)

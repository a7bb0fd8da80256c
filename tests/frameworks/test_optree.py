"""Classes registered with optree in a walk."""

from __future__ import annotations

from collections import namedtuple

import optree

import cowalk


def test_a_class_registered_globally_opens_and_closes_as_registered():
    class Pair:
        def __init__(self, left, right, name):
            self.left, self.right, self.name = left, right, name

    optree.register_pytree_node(
        Pair,
        lambda p: ((p.left, p.right), p.name, ("left", "right")),
        lambda name, items: Pair(*items, name),
        path_entry_type=optree.GetAttrEntry,
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )
    out = cowalk.fmap(lambda x, g: x + g, Pair(1, [2, None], "n"), {"left": 10, "right": [20, None]})
    assert (out.left, out.right, out.name) == (11, [22, None], "n")
    assert list(cowalk.flatten(Pair(1, [2, None], "n"))) == ["left", "right.0"]


def test_a_class_registered_without_entries_opens_by_position():
    class Bag:
        def __init__(self, *items):
            self.items = items

    optree.register_pytree_node(
        Bag, lambda b: (b.items, None), lambda _, items: Bag(*items), namespace=optree.registry.__GLOBAL_NAMESPACE
    )
    assert cowalk.fmap(lambda x, y: x + y, Bag(1, 2), [10, 20]).items == (11, 22)
    assert list(cowalk.flatten({"bag": Bag(1, 2)})) == ["bag.0", "bag.1"]


def test_integer_keys_of_a_mapping_stay_keys():
    class Table:
        def __init__(self, rows):
            self.rows = rows

    optree.register_pytree_node(
        Table,
        lambda t: (tuple(t.rows.values()), tuple(t.rows), tuple(t.rows)),
        lambda keys, items: Table(dict(zip(keys, items, strict=True))),
        path_entry_type=optree.MappingEntry,
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )
    assert cowalk.flatten(Table({7: 1, "x": 2})) == {"[7]": 1, "x": 2}
    assert cowalk.fmap(lambda x: -x, Table({7: 1})).rows == {7: -1}


def test_a_class_registered_in_a_namespace_stays_a_leaf():
    class Private:
        pass

    optree.register_pytree_node(Private, lambda p: ((), None), lambda _, __: Private(), namespace="cowalk-test")
    assert cowalk.isleaf(Private())


def test_named_tuples_stay_cowalk_s_own():
    Point = namedtuple("Point", "y x")
    assert list(cowalk.flatten(Point(1, 2))) == ["y", "x"]

"""The walk beside optree, jax.tree, dm-tree and a hand loop over a torch module."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optree
import torch
import tree as dm_tree

import cowalk
from benchmarks.timing import Case


def nested(leaves: int, width: int = 4) -> dict[str, dict[str, float]]:
    """A dict of layers, each a dict of `width` numbers: the shape of parameters, with names made afresh as loaders make them."""
    return {f"layer_{i}": {f"parameter_{j}": float(i + j) for j in range(width)} for i in range(leaves // width)}


def first_of_three(_path: Any, p: Any, _g: Any) -> Any:
    return p


def go_through(a: Any, b: Any) -> None:
    """A walk hands path and leaves to a loop where its peer hands them to a function; neither does anything with them."""
    for _path, (_p, _g) in cowalk.walk(a, b):
        pass


def module_and_gradients(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A torch module with four parameters a layer, and a nested dict of arrays as its gradients."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)) for _ in range(layers)]
    model = torch.nn.Sequential(*blocks)
    return model, cowalk.unflatten({name: torch.zeros_like(p) for name, p in model.named_parameters()})


def by_hand(model: torch.nn.Module, grads: dict[str, Any]) -> int:
    count = 0
    for name, p in model.named_parameters():
        node: Any = grads
        for key in name.split("."):
            node = node[key]
        count += p is not node
    return count


def by_walk(model: torch.nn.Module, grads: dict[str, Any]) -> int:
    count = 0
    for _, (p, g) in cowalk.walk(model, grads):
        count += p is not g
    return count


def cases(quick: bool) -> Iterator[Case]:
    """The rows of the design's speed table that concern walking. f is a builtin, so that the walk is timed and not f."""
    add = operator.add
    peers: list[tuple[str, Callable[..., Any]]] = [
        ("optree.tree_map", optree.tree_map),
        ("jax.tree.map", jax.tree.map),
        ("tree.map_structure (dm-tree)", dm_tree.map_structure),
    ]
    for leaves in (1024, 16):
        a, b = nested(leaves), nested(leaves)
        for peer, fmap in peers:
            ours: Callable[[], Any] = lambda a=a, b=b: cowalk.fmap(add, a, b)  # noqa: E731
            yield Case(
                f"fmap of two dict trees, {leaves} leaves", peer, ours, lambda a=a, b=b, fmap=fmap: fmap(add, a, b)
            )
    for leaves in (1024, 16):
        a, b = nested(leaves), nested(leaves)
        yield Case(
            f"walk with paths, {leaves} leaves",
            "jax.tree_util.tree_map_with_path",
            lambda a=a, b=b: go_through(a, b),
            lambda a=a, b=b: jax.tree_util.tree_map_with_path(first_of_three, a, b),
        )
    model, grads = module_and_gradients(16 if quick else 256)
    yield Case(
        f"torch module beside a nested dict, {len(list(model.parameters()))} parameters",
        "a loop over named_parameters()",
        lambda: by_walk(model, grads),
        lambda: by_hand(model, grads),
    )
    small, large = nested(1_000), nested(10_000 if quick else 100_000)
    yield Case(
        f"fmap, cost a leaf, {10_000 if quick else 100_000} leaves",
        "itself with 1,000 leaves",
        lambda: cowalk.fmap(add, large, large),
        lambda: cowalk.fmap(add, small, small),
        unit=10_000 if quick else 100_000,
        peer_unit=1_000,
    )

"""Walks inside of torch.func and torch.compile see tracers as leaves and work (law 12)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cowalk
from cowalk.tree.kinds import load_imported

TREE = {"a": torch.ones(2), "b": [torch.full((2,), 2.0), (torch.full((1,), 3.0), None)]}


@pytest.fixture(autouse=True)
def warm():
    """cowalk knows torch, and all else that is imported, before something is traced."""
    import torch._dynamo

    cowalk.flatten(TREE)
    load_imported()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f):
    return torch.compile(f, fullgraph=True, backend="eager")


def test_leaves_inside_of_vmap_are_batched_tensors():
    tree = {"a": torch.arange(6.0).reshape(3, 2), "b": [torch.ones(3)]}
    out = torch.func.vmap(lambda t: cowalk.fmap(lambda leaf: leaf.sum(), t))(tree)
    assert out["a"].tolist() == [1.0, 5.0, 9.0]


def test_gradients_flow_through_a_walk_inside_of_torch_func_grad():
    def loss(tree):
        return sum((leaf**2).sum() for _, (leaf,) in cowalk.walk(tree))

    grads = torch.func.grad(loss)({"a": torch.tensor([3.0]), "b": [torch.tensor([4.0])]})
    assert (grads["a"].item(), grads["b"][0].item()) == (6.0, 8.0)


def test_a_module_filled_with_tracers_computes_inside_of_torch_func_grad():
    module = nn.Linear(2, 1, bias=False)

    def loss(weights):
        return cowalk.fmap(lambda _, w: w, module, weights)(torch.ones(1, 2)).sum()

    grads = torch.func.grad(loss)({"weight": torch.zeros(1, 2)})
    assert grads["weight"].tolist() == [[1.0, 1.0]]


def test_a_module_filled_with_batched_tensors_computes_inside_of_vmap():
    module = nn.Linear(2, 1, bias=False)
    ensemble = {"weight": torch.stack([torch.zeros(1, 2), torch.ones(1, 2)])}
    out = torch.func.vmap(lambda w: cowalk.fmap(lambda _, w: w, module, w)(torch.ones(2)))(ensemble)
    assert out.tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize("where", [cowalk.isleaf, cowalk.isnumeric, cowalk.istrainable, torch.Tensor])
def test_fmap_is_traced_whole(where):
    out = compiled(lambda tree: cowalk.fmap(lambda t: t * 2, tree, where=where))(TREE)
    assert cowalk.fmapstructure(lambda t: t.tolist(), out) == {"a": [2.0, 2.0], "b": [[4.0, 4.0], ([6.0], None)]}
    assert type(out["b"][1]) is tuple


def test_fmap_of_two_trees_and_paths_is_traced_whole():
    out = compiled(lambda one, two: cowalk.fmap(lambda p, t, u: t * u * len(p), one, two, with_path=True))(TREE, TREE)
    assert out["b"][1][0].tolist() == [27.0]


def test_fmapstructure_is_traced_whole():
    out = compiled(lambda tree: cowalk.fmapstructure(lambda t: t.sum(), tree))(TREE)
    assert (out["a"].item(), out["b"][0].item(), out["b"][1][0].item()) == (2.0, 4.0, 3.0)


def test_walk_is_traced_whole():
    out = compiled(lambda tree: sum(t.sum() * len(path) for path, (t,) in cowalk.walk(tree)))(TREE)
    assert out.item() == 2 + 2 * 4 + 3 * 3


def test_the_parameters_of_a_module_are_walked_inside_of_torch_compile():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    traced = compiled(lambda m: sum((p**2).sum() for _, (p,) in cowalk.walk(m, where=cowalk.istrainable)))
    from cowalk.tree.kinds import kind_of

    kind_of(nn.Sequential), kind_of(nn.Linear)
    assert traced(model).item() == pytest.approx(sum(p.square().sum().item() for p in model.parameters()), rel=1e-5)

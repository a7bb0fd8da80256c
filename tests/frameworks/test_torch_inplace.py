"""Writing into torch tensors: all or nothing, the same objects, and a reason for everything that cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cowalk


def refused(reason: str, f: Callable[..., Any], tree: Any, *more: Any) -> list[str]:
    with pytest.raises(cowalk.WriteError, match=reason) as caught:
        cowalk.fmap_(f, tree, *more)
    return [str(path) for path, _ in caught.value.problems]


def test_parameters_stay_the_same_objects_and_an_optimizer_goes_on():
    module = nn.Linear(2, 2)
    weight, address = module.weight, module.weight.data_ptr()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    assert cowalk.fmap_(torch.ones_like, module) is module
    assert module.weight is weight
    assert (weight.data_ptr(), weight.requires_grad, weight.grad_fn) == (address, True, None)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert module.weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_results_with_a_graph_are_written_without_it():
    module = nn.Linear(2, 2)
    with torch.enable_grad():
        cowalk.fmap_(lambda p: p * 2, module)
    assert module.weight.is_leaf
    assert torch.is_grad_enabled()


def test_a_function_may_change_its_argument_itself():
    total, grads = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    for _ in range(3):
        cowalk.fmap_(lambda t, g: t.add_(g), total, grads)
    assert total["w"].tolist() == [3.0, 3.0]


def test_changing_a_parameter_itself_needs_no_grad_as_ever():
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad") as caught:
        cowalk.fmap_(lambda p: p.mul_(2), nn.Linear(2, 2))
    assert "weight" in caught.value.__notes__[0]
    module = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        cowalk.fmap_(lambda p: p.zero_(), module)
    assert not module.weight.any()


def test_a_tie_is_written_once():
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    before = module["a"].weight.detach().clone()
    calls: list[Any] = []
    cowalk.fmap_(lambda p: (calls.append(p), p + 1)[1], module)
    assert len(calls) == 1
    assert torch.equal(module["b"].weight, before + 1)


def test_expanded_tensors_are_refused_before_anything_is_written():
    tree = {"good": torch.zeros(2), "bad": torch.zeros(1).expand(3)}
    assert refused("overlap", lambda t: t + 1, tree) == ["bad"]
    assert tree["good"].tolist() == [0.0, 0.0]


def test_strided_tensors_that_do_not_overlap_are_written():
    base = torch.zeros(4, 4)
    cowalk.fmap_(lambda t: t + 1, [base.T[::2]])
    assert base.sum() == 8


def test_lazy_and_meta_tensors_are_refused_by_name():
    tree = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    before = tree[2].weight.detach().clone()
    assert refused("lazy", lambda t: 0.0, tree) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(tree[2].weight, before)


def test_inference_tensors_are_written_only_in_inference_mode():
    with torch.inference_mode():
        tensor = torch.zeros(2)
        cowalk.fmap_(lambda t: t + 1, [tensor])
    assert refused("inference mode", lambda t: t + 1, [tensor]) == ["0"]
    assert tensor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("reason", "result"),
    [
        (r"shape \(3,\), the tensor \(2,\)", torch.zeros(3)),
        ("complex64, which a tensor of torch.float32", torch.zeros(2, dtype=torch.complex64)),
        ("is a str, of which no tensor", "text"),
        ("is a NoneType, of which no tensor", None),
        ("no values", torch.zeros(2, device="meta")),
        ("sparse_coo", torch.zeros(2).to_sparse()),
    ],
    ids=["shape", "complex", "text", "none", "meta", "sparse"],
)
def test_results_that_do_not_fit_are_refused_before_anything_is_written(reason, result):
    tree = [torch.ones(2), torch.ones(2)]
    assert refused(reason, lambda t: t * 5 if t is tree[0] else result, tree) == ["1"]
    assert tree[0].tolist() == [1.0, 1.0]


def test_a_broadcastable_result_is_no_result():
    refused("shape", lambda t: torch.zeros(()), [torch.ones(2)])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_result_with_other_entries_is_refused_before_anything_is_written():
    tree = [torch.zeros(2), torch.eye(2).to_sparse_csr()]
    full = torch.ones(2, 2).to_sparse_csr()
    assert refused("4 elements, the tensor 2", lambda t: full if t is tree[1] else t + 1, tree) == ["1"]
    assert tree[0].tolist() == [0.0, 0.0]
    cowalk.fmap_(lambda t: t * 3, tree)
    assert tree[1].to_dense().tolist() == [[3.0, 0.0], [0.0, 3.0]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_written_if_they_are_jagged():
    parts = [torch.ones(2), torch.ones(3)]
    assert refused("nested", lambda t: t * 2, [torch.nested.nested_tensor(parts)]) == ["0"]
    assert refused("nested", lambda _: torch.nested.nested_tensor(parts), [torch.ones(2)]) == ["0"]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    cowalk.fmap_(lambda t: t * 2, [jagged])
    assert jagged.values().tolist() == [2.0] * 5


def test_a_result_that_is_a_view_of_its_own_leaf_is_read_before_it_is_written():
    square, row = torch.arange(9.0).reshape(3, 3), torch.arange(5.0)
    cowalk.fmap_(lambda t: t.T, [square])
    cowalk.fmap_(lambda _: row[1:], [row[:4]])
    assert square.tolist() == [[0.0, 3.0, 6.0], [1.0, 4.0, 7.0], [2.0, 5.0, 8.0]]
    assert row.tolist() == [1.0, 2.0, 3.0, 4.0, 4.0]


def test_a_fake_tensor_does_not_leak_out_of_its_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    tree = [torch.zeros(2), torch.zeros(2)]
    assert refused("leak", lambda t: fake if t is tree[1] else t + 1, tree) == ["1"]
    assert refused("fake", lambda t: torch.ones(2), [fake]) == ["0"]
    assert tree[0].tolist() == [0.0, 0.0]
    with FakeTensorMode():
        module = nn.Linear(2, 2)
        assert cowalk.fmap_(lambda p: p * 2, module) is module


def test_numbers_and_other_floats_are_cast():
    tree = [torch.zeros(()), torch.zeros(2, dtype=torch.bfloat16)]
    cowalk.fmap_(lambda t: 1.5 if t.ndim == 0 else torch.full((2,), 2.5, dtype=torch.float64), tree)
    assert (tree[0].item(), tree[1].tolist()) == (1.5, [2.5, 2.5])


def test_a_float_is_not_written_into_integers():
    refused("int64", lambda t: t + 0.5, {"steps": torch.zeros(2, dtype=torch.int64)})


def test_a_batched_tensor_does_not_leak_out_of_vmap():
    total = {"sum": torch.zeros(2)}

    def add(x):
        cowalk.fmap_(lambda t: t + x, total)
        return x

    with pytest.raises(cowalk.WriteError, match="leak"):
        torch.func.vmap(add)(torch.ones(3, 2))
    assert total["sum"].tolist() == [0.0, 0.0]


def test_a_batched_tensor_is_written_inside_of_vmap():
    def double(row):
        tree = {"row": row.clone()}
        return cowalk.fmap_(lambda t: t * 2, tree)["row"]

    assert torch.func.vmap(double)(torch.ones(3, 2)).sum() == 12


def test_a_member_that_is_no_tensor_is_replaced_in_the_module():
    module = cowalk.fmap(lambda _: 1.0, nn.Linear(1, 1))
    cowalk.fmap_(lambda number: number + 1, module)
    assert (module.weight, module.bias) == (2.0, 2.0)

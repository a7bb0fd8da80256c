"""Torch tensors and modules in a walk: how modules open, what closes around new tensors, and that the old stays as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import cowalk


def clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def names(tree: Any, where: Any = cowalk.isleaf) -> list[str]:
    return [str(path) for path, _ in cowalk.walk(tree, where=where)]


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# --- leaves ---

FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"]
OTHERS = ["int8", "int32", "int64", "uint8", "uint16", "uint64", "bool"]


@pytest.mark.parametrize("name", FLOATS)
def test_floating_and_complex_tensors_are_numeric(name):
    assert cowalk.isnumeric(torch.zeros(2).to(getattr(torch, name)))


@pytest.mark.parametrize("name", OTHERS)
def test_integers_and_bools_are_not_numeric(name):
    assert not cowalk.isnumeric(torch.zeros(2, dtype=getattr(torch, name)))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_not_numeric():
    assert not cowalk.isnumeric(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_tensors_in_containers_are_leaves_and_a_size_is_one_too():
    tree = {"a": torch.ones(2), "size": torch.Size([2, 3]), "b": [torch.ones(1)]}
    assert names(tree) == ["a", "size", "b.0"]
    assert cowalk.children(torch.Size([2, 3])) == {}


def test_a_struct_sequence_opens_by_its_names_and_closes_as_itself():
    found = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)
    doubled = cowalk.fmap(lambda t: t * 2, found)
    assert names(found) == ["values", "indices"]
    assert type(doubled) is type(found)
    assert (doubled.values.item(), doubled.indices.item()) == (6.0, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_numeric_leaves(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    assert cowalk.isnumeric(nested)
    (doubled,) = cowalk.fmap(lambda t: t * 2, [nested])
    assert [part.sum().item() for part in doubled.unbind()] == [4.0, 6.0]
    assert [alias.kind for alias in cowalk.aliases([nested, nested])] == ["tie"]
    assert cowalk.aliases([nested, torch.ones(2)]) == []


def test_a_packed_sequence_opens_as_a_named_tuple():
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    assert names(packed, cowalk.isnumeric) == ["data"]
    doubled = cowalk.fmap(lambda t: t * 2, packed, where=cowalk.isnumeric)
    assert type(doubled) is type(packed)
    assert doubled.data.sum() == 6


def test_a_class_registered_with_torch_s_pytree_opens_as_registered():
    class Pair:
        def __init__(self, left, right):
            self.left, self.right = left, right

    torch.utils._pytree.register_pytree_node(
        Pair,
        lambda pair: ([pair.left, pair.right], "context"),
        lambda children, context: Pair(*children),
        flatten_with_keys_fn=lambda pair: (
            [
                (torch.utils._pytree.GetAttrKey("left"), pair.left),
                (torch.utils._pytree.GetAttrKey("right"), pair.right),
            ],
            "context",
        ),
    )
    pair = Pair(torch.ones(1), torch.ones(2))
    assert names(pair) == ["left", "right"]
    assert cowalk.fmap(lambda t: t * 3, pair).right.tolist() == [3.0, 3.0]


def test_a_class_registered_without_keys_opens_by_position():
    class Bag:
        def __init__(self, *things):
            self.things = things

    torch.utils._pytree.register_pytree_node(Bag, lambda bag: (list(bag.things), None), lambda things, _: Bag(*things))
    assert names(Bag(torch.ones(1), torch.ones(2))) == ["0", "1"]
    assert cowalk.fmap(clone, Bag(torch.ones(1))).things[0].tolist() == [1.0]


# --- opening ---


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_parameter("nothing", None)
        self.register_buffer("running", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.list = nn.ParameterList([torch.ones(1), torch.ones(2)])
        self.dict = nn.ParameterDict({"p": torch.ones(3)})
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False)])
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 1)})
        self.absent = None


def test_parameters_buffers_and_children_are_the_children():
    assert names(Holder()) == [
        "weight",
        "running",
        "scratch",
        "list.0",
        "list.1",
        "dict.p",
        "layers.0.weight",
        "heads.a.weight",
        "heads.a.bias",
    ]


def test_a_walk_visits_what_named_parameters_and_buffers_name():
    module = nn.TransformerDecoderLayer(4, 2, 8)
    assert set(names(module, cowalk.istrainable)) == {name for name, _ in module.named_parameters()}


def test_trainables_leaves_out_buffers_and_frozen_parameters():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    module[1].weight.requires_grad_(False)
    assert list(map(str, cowalk.trainables(module))) == ["0.weight", "0.bias", "1.bias"]


def test_a_parameter_list_is_matched_with_a_plain_list():
    plist = nn.ParameterList([torch.ones(1), torch.ones(2)])
    grads = [torch.full((1,), 2.0), None]
    stepped = cowalk.fmap(lambda p, g: p - g, plist, grads)
    assert type(stepped) is nn.ParameterList
    assert [p.tolist() for p in stepped] == [[-1.0], [1.0, 1.0]]


def test_deleted_and_unset_parameters_are_no_children():
    module = nn.Linear(2, 2)
    del module.bias
    assert names(module) == ["weight"]
    assert not hasattr(cowalk.fmap(clone, module), "bias")
    module.register_parameter("bias", None)
    assert names(module) == ["weight"]
    assert cowalk.fmap(clone, module).bias is None


def test_a_module_whose_constructor_never_ran_is_an_empty_branch():
    module = nn.Linear.__new__(nn.Linear)
    assert cowalk.fmapstructure(clone, module) == {}
    assert type(cowalk.fmap(clone, module)) is nn.Linear


def test_lazy_parameters_are_named_and_stay_uninitialised():
    lazy = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(4))
    assert names(lazy) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    new = cowalk.fmap(copy.deepcopy, lazy)
    assert nn.parameter.is_lazy(new[1].weight)
    new(torch.ones(1, 3))
    assert new[1].weight.shape == (4, 2)
    assert type(new[1]) is nn.Linear
    assert nn.parameter.is_lazy(lazy[1].weight)
    assert lazy(torch.ones(1, 3)).shape == (1, 4)  # its hooks are still there


def test_a_meta_module_is_given_memory():
    module = nn.Linear(2, 3, device="meta")
    filled = cowalk.fmap(lambda p: torch.ones(p.shape), module)
    assert filled(torch.ones(1, 2)).tolist() == [[3.0, 3.0, 3.0]]
    assert module.weight.is_meta
    assert cowalk.aliases(module) == []


# --- closing ---


def test_an_identity_gives_a_new_module_with_the_same_parameters():
    module = Holder()
    new = cowalk.fmap(lambda t: t, module)
    assert new is not module
    assert [id(p) for p in new.parameters()] == [id(p) for p in module.parameters()]
    assert same_state(state(new), state(module))


def test_the_state_dict_and_its_rules_survive():
    module = Holder()
    new = cowalk.fmap(lambda t: clone(t) + 1, module)
    assert list(new.state_dict()) == list(module.state_dict())
    assert "scratch" not in new.state_dict()
    new.load_state_dict(module.state_dict())
    assert same_state(state(new), state(module))


def test_parameters_stay_parameters_with_their_marks():
    module = nn.Linear(2, 2)
    module.weight.no_decay = True
    module.bias.requires_grad_(False)
    new = cowalk.fmap(lambda t: t * 2, module)
    assert type(new.weight) is nn.Parameter
    assert new.weight.is_leaf
    assert new.weight.no_decay
    assert (new.weight.requires_grad, new.bias.requires_grad) == (True, False)


def test_a_subclass_of_parameter_stays_itself():
    class Marked(nn.Parameter):
        pass

    module = nn.Linear(2, 2, bias=False)
    module.weight = Marked(torch.ones(2, 2))
    assert type(cowalk.fmap(clone, module).weight) is Marked


def test_an_integer_in_the_place_of_a_parameter_does_not_require_a_gradient():
    new = cowalk.fmap(lambda t: (t * 100).to(torch.int8), nn.Linear(2, 2))
    assert (new.weight.dtype, new.weight.requires_grad) == (torch.int8, False)


def test_buffers_stay_buffers():
    module = nn.Module()
    module.plain = nn.Buffer(torch.ones(2), persistent=False)
    new = cowalk.fmap(lambda t: t * 2, module)
    assert isinstance(new.plain, nn.Buffer)
    assert next(iter(new.buffers())).tolist() == [2.0, 2.0]
    assert new.state_dict() == {}


def test_a_result_that_is_no_tensor_stands_where_the_tensor_stood():
    shapes = cowalk.fmap(lambda t: tuple(t.shape), nn.Linear(2, 3))
    assert (shapes.weight, shapes.bias) == ((3, 2), (3,))


def test_the_original_is_unchanged_and_shares_nothing_that_can_change():
    module = Holder()
    module.history = [1, {"inner": [2]}]
    before, attributes = state(module), dict(module.__dict__)
    new = cowalk.fmap(clone, module)
    new.add_module("extra", nn.Linear(1, 1))
    new.register_buffer("more", torch.ones(1))
    new.register_forward_hook(lambda *_: None)
    new.history.append(3)
    new.history[1]["inner"].append(4)
    with torch.no_grad():
        for tensor in new.state_dict().values():
            tensor.fill_(7)
    assert same_state(state(module), before)
    assert all(module.__dict__[name] is value for name, value in attributes.items())
    assert module.history == [1, {"inner": [2]}]
    assert not module._forward_hooks
    assert "extra" not in module._modules


def test_an_optimizer_step_trains_only_the_new_module():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    new = cowalk.fmap(clone, module)
    before = state(module)
    optimizer = torch.optim.Adam(new.parameters(), lr=0.1)
    new(torch.ones(3, 2)).square().sum().backward()
    optimizer.step()
    assert same_state(state(module), before)
    assert not same_state(state(new), before)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(2, 3), lambda: nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0)], ids=["lstm", "encoder"]
)
def test_the_new_module_can_be_copied_and_pickled(make, again):
    module = make()
    new = again(cowalk.fmap(clone, module))
    expected, actual = module(torch.ones(4, 1, 2)), new(torch.ones(4, 1, 2))
    assert cowalk.fmapstructure(torch.equal, [expected], [actual]) == cowalk.fmapstructure(lambda _: True, [expected])


class Slotted(nn.Module):
    __slots__ = ("layer_again", "note")

    def __init__(self, width: int, *, note: str):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.note = note
        object.__setattr__(self, "layer_again", None)
        Slotted.layer_again.__set__(self, self.layer)


def test_slots_and_constructor_arguments_are_carried_over():
    module = Slotted(2, note="n")
    new = cowalk.fmap(clone, module)
    assert new.note == "n"
    assert new.layer_again is new.layer
    assert module.layer_again is module.layer


class Guarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.closed = True

    def __setattr__(self, name, value):
        if getattr(self, "closed", False):
            raise TypeError("closed")
        super().__setattr__(name, value)

    def __getattr__(self, name):
        if name == "twice":
            return self.inner.weight * 2
        return super().__getattr__(name)


def test_custom_attribute_access_is_not_asked():
    module = Guarded()
    new = cowalk.fmap(lambda t: t * 3, module)
    assert torch.equal(new.twice, module.twice * 3)


# --- parametrizations ---


def test_weight_norm_is_a_parametrization_of_the_new_module():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    assert names(module) == ["bias", "parametrizations.weight.original0", "parametrizations.weight.original1"]
    new = cowalk.fmap(lambda t: t * 2, module)
    torch.testing.assert_close(new.weight, module.weight * 2)
    new.load_state_dict(module.state_dict())
    torch.testing.assert_close(new.weight, module.weight)
    new(torch.ones(1, 2)).sum().backward()
    assert all(p.grad is not None for p in new.parameters())
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_the_old_weight_norm_computes_with_the_new_tensors():
    module, x = nn.utils.weight_norm(nn.Linear(2, 3)), torch.ones(1, 2)
    new = cowalk.fmap(lambda t: t * 2, module)
    torch.testing.assert_close(new(x), module(x) * 2)
    new(x).sum().backward()
    assert new.weight_g.grad is not None
    assert module.weight_g.grad is None


def test_spectral_norm_keeps_its_vectors_apart():
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3))
    new = cowalk.fmap(clone, module)
    before = module.parametrizations.weight[0]._u.clone()
    for _ in range(3):
        new(torch.ones(1, 2))
    assert torch.equal(module.parametrizations.weight[0]._u, before)


def test_a_user_s_own_parametrization_survives():
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).mT

    module = nn.Linear(2, 2)
    nn.utils.parametrize.register_parametrization(module, "weight", Symmetric())
    new = cowalk.fmap(lambda t: t + 1, module)
    assert torch.equal(new.weight, new.weight.mT)
    assert not torch.equal(new.weight, module.weight)


# --- ties ---


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.emb(tokens))


def test_a_tied_parameter_is_visited_once_and_tied_again():
    seen: list[Any] = []
    new = cowalk.fmap(lambda p: (seen.append(p), p * 2)[1], Language())
    assert len(seen) == 1
    assert new.head.weight is new.emb.weight
    assert len(list(new.parameters())) == 1


def test_paths_of_a_tie_may_be_told_apart():
    model = Language()
    new = cowalk.fmap(lambda path, p: p + len(path[0]), model, with_path=True, ties="each")
    assert torch.equal(new.emb.weight, model.emb.weight + 3)
    assert torch.equal(new.head.weight, model.head.weight + 4)


def test_a_shared_module_is_shared_again_unless_its_paths_are_told_apart():
    layer = nn.Linear(1, 1)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    new = cowalk.fmap(clone, model)
    assert new[0] is new[2]
    assert new[0] is not layer
    apart = cowalk.fmap(lambda path, p: p + float(str(path[0])), model, with_path=True, ties="each")
    assert torch.equal(apart[0].weight, layer.weight)
    assert torch.equal(apart[2].weight, layer.weight + 2)


def test_a_shared_module_that_comes_apart_has_hooks_and_containers_of_its_own():
    layer = nn.Linear(1, 1)
    layer.notes = []
    model = nn.Sequential(layer, layer)
    layer.register_forward_hook(lambda *_: None)
    apart = cowalk.fmap(lambda path, p: p + float(str(path[0])), model, with_path=True, ties="each")
    apart[0].register_forward_hook(lambda *_: None)
    apart[0].register_forward_pre_hook(lambda *_: None)
    apart[0].notes.append(1)
    assert [len(each._forward_hooks) for each in (*apart, layer)] == [2, 1, 1]
    assert [len(each._forward_pre_hooks) for each in (*apart, layer)] == [1, 0, 0]
    assert [each.notes for each in (*apart, layer)] == [[1], [], []]


def test_gradients_of_a_tie_given_twice_are_summed_only_if_asked():
    model = Language()
    grads = {"emb": {"weight": torch.ones(5, 2)}, "head": {"weight": torch.ones(5, 2)}}
    with pytest.raises(cowalk.TieError) as caught:
        cowalk.fmapstructure(lambda p, g: g, model, grads)
    assert [str(path) for path in caught.value.paths] == ["emb.weight", "head.weight"]
    assert cowalk.fmapstructure(lambda p, g: g.sum().item(), model, grads, ties="sum")["emb"] == {"weight": 20.0}


def test_two_views_of_one_gradient_are_one_gradient():
    model, grad = Language(), torch.ones(5, 2)
    grads = {"emb": {"weight": grad[:]}, "head": {"weight": grad[:]}}
    assert cowalk.fmapstructure(lambda p, g: g.sum().item(), model, grads)["emb"] == {"weight": 10.0}


def test_a_conjugate_or_negative_view_of_a_gradient_is_another_gradient():
    grad = torch.tensor([1.0 + 2.0j])
    weights = [torch.zeros(1, dtype=torch.complex64)] * 2
    with pytest.raises(cowalk.TieError):
        cowalk.fmapstructure(lambda p, g: g, weights, [grad, grad.conj()])
    negative = grad.conj().imag
    assert negative.is_neg()
    assert (negative.data_ptr(), negative.stride()) == (grad.imag.data_ptr(), grad.imag.stride())
    with pytest.raises(cowalk.TieError):
        cowalk.fmapstructure(lambda p, g: g, [torch.zeros(1)] * 2, [grad.imag, negative])


def test_a_transposed_view_is_an_overlap_and_no_tie():
    weight = torch.ones(2, 3)
    (alias,) = cowalk.aliases({"weight": weight, "transposed": weight.T, "apart": torch.ones(2)})
    assert (alias.kind, list(map(str, alias.paths))) == ("overlap", ["weight", "transposed"])
    assert len(names({"weight": weight, "transposed": weight.T})) == 2


def test_empty_tensors_and_meta_tensors_are_no_ties():
    tree = [torch.empty(0), torch.empty(0), torch.ones(2, device="meta"), torch.ones(2, device="meta")]
    assert len(names(tree)) == 4
    assert cowalk.aliases(tree) == []


# --- code that cannot be rebuilt ---


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_module_is_read_and_written_but_not_rebuilt():
    script = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    shapes = cowalk.fmapstructure(lambda t: tuple(t.shape), script)
    assert shapes["0"] == {"weight": (2, 2), "bias": (2,)}
    assert list(shapes["1"]) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    with pytest.raises(cowalk.KindError, match="RecursiveScriptModule"):
        cowalk.fmap(clone, script)
    cowalk.fmap_(torch.zeros_like, script)
    assert not script(torch.ones(3, 2)).any()


def test_a_traced_graph_module_computes_with_its_new_parameters():
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    new = cowalk.fmap(torch.zeros_like, graph)
    assert not new(torch.ones(1, 2)).any()
    assert graph(torch.ones(1, 2)).shape == (1, 2)

"""Gradients of losses over torch models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cowalk

X = torch.tensor([[1.0, 2.0]])


class Heads(nn.Module):
    """Case M01: one head takes part in the loss, the other does not."""

    def __init__(self):
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.5)

    def forward(self, x):
        return self.used(self.body(x))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.norm(self.emb(tokens)))


def loss(model, x):
    return model(x).square().sum()


def by_backward(model: nn.Module, *args: Any) -> dict[str, torch.Tensor | None]:
    model = copy.deepcopy(model)
    loss(model, *args).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_the_gradient_is_that_of_backward_and_none_where_the_loss_does_not_depend():
    model = Heads()
    value, grads = cowalk.value_and_gradient(loss, model, X)
    theirs = by_backward(model, X)
    assert value.item() == pytest.approx(loss(model, X).item())
    assert not value.requires_grad
    assert grads["unused"] == {"weight": None, "bias": None}
    found = cowalk.flatten(grads)
    assert found.keys() == {name for name, grad in theirs.items() if grad is not None}
    for name, grad in found.items():
        torch.testing.assert_close(grad, theirs[name])


def test_an_unused_head_is_missing_beside_the_model():
    grads = cowalk.gradient(lambda m, x: m(x).sum(), Heads(), X)
    pairs = {str(path): [p.sum().item(), g.sum().item()] for path, (p, g) in cowalk.walk(Heads(), grads)}
    assert pairs == {
        "body.weight": [2.0, 3.0],
        "body.bias": [1.0, 1.0],
        "used.weight": [1.0, 4.0],
        "used.bias": [0.5, 1.0],
    }
    with pytest.raises(cowalk.StructureError) as caught:
        list(cowalk.walk(Heads(), grads, missing="error"))
    assert {str(difference.path) for difference in caught.value.differences} == {"unused.weight", "unused.bias"}


def test_stored_gradients_and_the_model_are_left_alone():
    model = Heads()
    loss(model, X).backward()
    stored = {name: (p.grad, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()}
    before = {name: p.clone() for name, p in model.named_parameters()}
    cowalk.gradient(loss, model, X)
    for name, p in model.named_parameters():
        grad, values = stored[name]
        assert p.grad is grad
        assert grad is None or torch.equal(grad, values)
        assert torch.equal(p, before[name])


def test_a_tied_parameter_has_its_whole_gradient_under_its_first_path():
    model, tokens = Language(), torch.tensor([1, 2, 3])
    grads = cowalk.gradient(loss, model, tokens)
    torch.testing.assert_close(grads["emb"]["weight"], by_backward(model, tokens)["emb.weight"])
    assert grads["head"] == {"weight": None}
    assert grads["norm"]["running_mean"] is None
    stepped = cowalk.fmap(lambda p, g: p - g, model, grads)
    assert stepped.head.weight is stepped.emb.weight


def test_frozen_parameters_have_none():
    model = Heads()
    model.body.requires_grad_(False)
    grads = cowalk.gradient(loss, model, X)
    assert grads["body"] == {"weight": None, "bias": None}
    assert grads["used"]["weight"] is not None


def test_a_model_that_is_all_frozen_has_none():
    model = Heads().requires_grad_(False)
    value, grads = cowalk.value_and_gradient(loss, model, X)
    assert cowalk.flatten(grads) == {}
    assert value.item() == loss(model, X).item()


def test_a_loss_that_depends_on_nothing_gives_none():
    value, grads = cowalk.value_and_gradient(lambda _: torch.tensor(3.0), Heads())
    assert value == 3
    assert cowalk.flatten(grads) == {}
    assert list(grads) == ["body", "used", "unused"]


def test_gradients_are_found_although_gradients_are_switched_off_outside():
    with torch.no_grad():
        grads = cowalk.gradient(loss, Heads(), X)
    assert grads["used"]["weight"] is not None


def test_gradients_are_found_in_inference_mode():
    model = Heads()
    with torch.inference_mode():
        grads = cowalk.gradient(lambda m: m(X).sum(), model)
        by_copy = cowalk.gradient(lambda t: (t["w"] ** 2).sum(), {"w": torch.tensor([3.0])})
    assert grads["used"]["weight"].tolist() == [[2.0, 2.0]]
    assert by_copy["w"].tolist() == [6.0]


def test_a_dict_of_frozen_parameters_has_none():
    named = dict(nn.Linear(2, 1).requires_grad_(False).named_parameters())
    assert cowalk.gradient(lambda p: (p["weight"] ** 2).sum(), named) == {"weight": None, "bias": None}


def test_a_lazy_model_gets_its_shapes_from_the_loss():
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    grads = cowalk.gradient(lambda m: m(X).sum(), model)
    assert grads["0"]["weight"].shape == (2, 2)
    assert cowalk.diff(model, grads) == []


def test_a_dict_of_tensors_needs_no_requires_grad():
    tree = {"w": torch.tensor([3.0]), "steps": torch.tensor(3), "more": [torch.tensor([1.0]), "text", None]}
    grads = cowalk.gradient(lambda t: (t["w"] ** 2).sum(), tree)
    assert grads == {"w": torch.tensor([6.0]), "steps": None, "more": [None, None, None]}
    assert not tree["w"].requires_grad


def test_a_dict_where_some_tensors_require_gradients_gives_those():
    tree = {"w": torch.tensor([3.0], requires_grad=True), "fixed": torch.tensor([2.0])}
    grads = cowalk.gradient(lambda t: (t["w"] * t["fixed"]).sum(), tree)
    assert grads == {"w": torch.tensor([2.0]), "fixed": None}
    assert tree["w"].grad is None


def test_a_tensor_alone_is_a_model():
    assert cowalk.gradient(lambda w: (w**2).sum(), torch.tensor([3.0])).tolist() == [6.0]


def test_a_tied_tensor_in_a_dict_is_one():
    w = torch.tensor([3.0])
    grads = cowalk.gradient(lambda t: (t["a"] * t["b"]).sum(), {"a": w, "b": w})
    assert grads == {"a": torch.tensor([6.0]), "b": None}


def test_complex_parameters_have_the_gradient_of_backward():
    w = torch.tensor([1.0 + 2.0j], requires_grad=True)
    grads = cowalk.gradient(lambda t: t["w"].abs().square().sum(), {"w": w})
    assert grads["w"].tolist() == [2.0 + 4.0j]


def test_the_auxiliary_output_is_handed_back():
    (value, aux), grads = cowalk.value_and_gradient(lambda m, x: (loss(m, x), {"x": x}), Heads(), X, has_aux=True)
    assert (value.ndim, aux["x"] is X, grads["used"]["weight"] is None) == (0, True, False)


def test_arguments_by_name_reach_the_loss():
    grads = cowalk.gradient(lambda m, x, *, scale: m(x).sum() * scale, Heads(), X, scale=2.0)
    assert grads["used"]["bias"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("reason", "result"),
    [
        (r"shape \(2,\)", torch.ones(2)),
        ("it is a float", 1.0),
        ("it is a tuple; if it returns", (torch.ones(()), None)),
        ("complex", torch.ones((), dtype=torch.complex64)),
    ],
)
def test_a_loss_that_is_no_real_scalar_is_an_error(reason, result):
    with pytest.raises(ValueError, match=reason):
        cowalk.gradient(lambda _: result, Heads())


def test_a_missing_auxiliary_output_is_an_error():
    with pytest.raises(ValueError, match="pair"):
        cowalk.value_and_gradient(loss, Heads(), X, has_aux=True)


# --- gradients that the model carries ---


def test_gradients_of_a_model_are_its_own_and_missing_ones_none():
    model = Heads()
    assert cowalk.flatten(cowalk.gradients_of(model)) == {}
    loss(model, X).backward()
    grads = cowalk.gradients_of(model)
    assert grads["used"]["weight"] is model.used.weight.grad
    assert grads["unused"] == {"weight": None, "bias": None}
    assert cowalk.diff(model, grads) == []


def test_gradients_of_a_tied_model_stand_under_the_first_path():
    model = Language()
    loss(model, torch.tensor([1, 2])).backward()
    grads = cowalk.gradients_of(model)
    assert grads["emb"]["weight"] is model.emb.weight.grad
    assert grads["head"]["weight"] is None


def test_results_of_other_tensors_are_no_stored_gradients():
    w = torch.ones(2, requires_grad=True)
    tree = {"w": w, "double": w * 2}
    tree["double"].sum().backward()
    assert cowalk.gradients_of(tree) == {"w": w.grad, "double": None}


def test_a_lazy_model_has_no_gradients():
    assert cowalk.gradients_of(nn.LazyLinear(2)) == {"weight": None, "bias": None}


# --- optimizer states ---


def stepped(model: nn.Module, groups: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(groups, lr=0.1)
    loss(model, X).backward()
    optimizer.step()
    return optimizer


def test_states_are_found_by_identity_in_any_order_of_groups():
    model = Heads()
    groups = [{"params": [model.used.bias, model.body.weight]}, {"params": [model.used.weight, model.unused.bias]}]
    optimizer = stepped(model, groups)
    states = cowalk.optimizer_state(model, optimizer)
    assert states["used"]["weight"]["exp_avg"] is optimizer.state[model.used.weight]["exp_avg"]
    assert states["body"]["weight"]["exp_avg"] is optimizer.state[model.body.weight]["exp_avg"]
    assert (states["body"]["bias"], states["unused"]) == (None, {"weight": None, "bias": None})


def test_states_of_a_tied_parameter_stand_under_its_first_path():
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss(model, torch.tensor([1, 2])).backward()
    optimizer.step()
    states = cowalk.optimizer_state(model, optimizer)
    assert list(states["emb"]["weight"]) == ["momentum_buffer"]
    assert states["head"]["weight"] is None


def test_states_are_found_through_what_stands_around_an_optimizer():
    class Around:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = Heads()
    optimizer = stepped(model, model.parameters())
    states = cowalk.optimizer_state(model, Around(Around(optimizer)))
    assert states["used"]["bias"]["exp_avg"] is optimizer.state[model.used.bias]["exp_avg"]
    with pytest.raises(cowalk.CowalkError, match="expected a torch optimizer, got Around"):
        cowalk.optimizer_state(model, Around(optimizer.state_dict()))


def test_an_optimizer_that_has_not_stepped_gives_none_everywhere():
    model = Heads()
    optimizer = torch.optim.Adam(model.parameters())
    assert cowalk.flatten(cowalk.optimizer_state(model, optimizer)) == {}
    assert not optimizer.state


def test_an_optimizer_over_other_parameters_is_an_error():
    model = Heads()
    optimizer = stepped(model, model.parameters())
    with pytest.raises(cowalk.CowalkError, match="none of them belongs to this model"):
        cowalk.optimizer_state(copy.deepcopy(model), optimizer)


def test_a_state_dict_is_refused():
    model = Heads()
    optimizer = stepped(model, model.parameters())
    with pytest.raises(cowalk.CowalkError, match="by position only"):
        cowalk.optimizer_state(model, optimizer.state_dict())

"""What is special about a parameter: the states of its gradient, on real torch models and optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cowalk
from cowalk import Table, stats

torch = pytest.importorskip("torch")


class Model(torch.nn.Module):
    """A parameter in each state after one step with `optimizer_of`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(6, 4)
        self.frozen = torch.nn.Linear(4, 4)
        self.dead = torch.nn.Linear(4, 4)
        self.forgotten = torch.nn.Linear(4, 4)
        self.still = torch.nn.Linear(4, 4)
        self.unused = torch.nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Any) -> Any:
        x = self.frozen(self.words(tokens))
        return self.still(self.forgotten(x)) + 0.0 * self.dead(x)


TOKENS = torch.tensor([[1, 4, 1]])
BY_LAYER = {
    "words": "partly zero",
    "frozen": "frozen",
    "dead": "zero",
    "forgotten": "no optimizer",
    "still": "unmoved",
    "unused": "unused",
}


def optimizer_of(model: Any, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    moving = [*model.words.parameters(), *model.dead.parameters(), *model.unused.parameters()]
    return kind([{"params": moving}, {"params": list(model.still.parameters()), "lr": 0.0}], lr=0.1, **options)


def backward(model: Any) -> Any:
    model(TOKENS).square().sum().backward()
    return cowalk.gradients_of(model)


def step(model: Any, optimizer: Any) -> Any:
    """The update that a step makes."""
    before = cowalk.fmapstructure(lambda p: p.detach().clone(), model, where=torch.nn.Parameter)
    optimizer.step()
    return cowalk.fmapstructure(lambda old, p: p.detach() - old, before, model)


def states(table: Table) -> dict[str, str]:
    return {str(row.path): row.state for row in table}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_all_states_of_one_model_are_told_apart(kind: Any) -> None:
    model = Model()
    optimizer = optimizer_of(model, kind, weight_decay=0.0)
    grads = backward(model)
    updates = step(model, optimizer)
    table = stats(model, grads, updates, optimizer)
    assert states(table) == {name: BY_LAYER[name.partition(".")[0]] for name, _ in model.named_parameters()}
    assert table.state_counts["frozen"] == table.state_counts["unused"] == table.state_counts["no optimizer"] == 2
    assert table.total.count == len(table) == 11


def test_the_rows_stand_in_the_order_of_the_model_with_the_frozen_ones_among_them() -> None:
    model = Model()
    table = stats(model, backward(model))
    assert [str(row.path) for row in table] == [name for name, _ in model.named_parameters()]


def test_a_frozen_parameter_has_its_row_in_the_structure() -> None:
    model = Model()
    table = stats(model, backward(model))
    assert table.structure["frozen"]["weight"] == table["frozen.weight"]


def test_a_frozen_parameter_is_measured_and_lacks_nothing() -> None:
    model = Model()
    row = stats(model, backward(model))["frozen.weight"]
    assert row.states == ("frozen",)
    assert row.gradient is row.ratio is None
    assert row.value("parameter.norm") == pytest.approx(model.frozen.weight.norm().item(), rel=1e-6)


def test_before_backward_nothing_has_run_but_the_frozen_stay_frozen() -> None:
    model = Model()
    found = set(states(stats(model, cowalk.gradients_of(model))).values())
    assert found == {"not run", "frozen"}


def test_a_model_that_is_all_frozen_is_no_error() -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    assert states(stats(model, None)) == {"weight": "frozen", "bias": "frozen"}
    assert states(stats(model, cowalk.gradients_of(model))) == {"weight": "frozen", "bias": "frozen"}


def test_rows_of_an_embedding_without_a_token_are_zero() -> None:
    model = Model()
    row = stats(model, backward(model))["words.weight"]
    assert row.states == ("partly zero",)
    assert row.value("gradient.zero_rows") == 4
    every = torch.nn.Embedding(3, 2)
    every(torch.tensor([0, 1, 2])).sum().backward()
    assert stats(every, cowalk.gradients_of(every))["weight"].state == "ok"


def test_without_an_optimizer_or_updates_nothing_is_said_of_them() -> None:
    model = Model()
    found = states(stats(model, backward(model)))
    assert found["forgotten.weight"] == found["still.weight"] == "ok"
    assert found["dead.weight"] == "zero"


def test_a_parameter_in_several_states_has_them_all_the_likeliest_cause_first() -> None:
    model = Model()
    optimizer = torch.optim.SGD([model.still.weight], lr=0.1)
    grads = backward(model)
    updates = step(model, optimizer)
    rows = stats(model, grads, updates, optimizer)
    assert rows["dead.weight"].states[:2] == ("no optimizer", "zero")
    assert rows["words.weight"].states[0] == "no optimizer"
    assert "partly zero" in rows["words.weight"].states
    assert rows["still.weight"].states == ()


def test_a_parameter_without_a_gradient_is_unused_whether_it_is_owned_or_not() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.words.parameters(), lr=0.1)
    rows = stats(model, backward(model), opt_state=optimizer)
    assert rows["unused.weight"].states == ("unused",)


def test_a_small_update_is_a_move() -> None:
    update = np.array([0.0, 5e-324])
    assert stats([np.ones(2)], [np.ones(2)], [update])[0].state == "ok"
    assert stats([np.ones(2)], [np.ones(2)], [update * 0])[0].state == "unmoved"


def test_an_update_of_nan_is_no_lack_of_a_move() -> None:
    assert stats([np.ones(1)], [np.ones(1)], [np.full(1, np.nan)])[0].states == ("non-finite",)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["parameter", "gradient", "update", "v"])
def test_nan_and_infinity_are_found_wherever_they_are(place: str, value: float) -> None:
    arrays = {name: np.full(3, 0.5) for name in ("parameter", "gradient", "update", "v")}
    arrays[place][1] = value
    state = {"w": {"exp_avg_sq": arrays["v"]}}
    table = stats({"w": arrays["parameter"]}, {"w": arrays["gradient"]}, {"w": arrays["update"]}, state)
    assert table["w"].state == "non-finite"
    assert ("Adam's state: 1 undefined" if place == "v" else f"{place}: 1") in str(table)


def test_where_nan_spreads_through_a_large_model_both_ends_are_shown() -> None:
    model = {f"layer{i}": np.ones(2) for i in range(300)}
    grads = {f"layer{i}": np.full(2, np.nan if i <= 177 else 0.1) for i in range(300)}
    text = str(stats(model, grads))
    assert "NaN or Inf in 178 rows, the first of the model layer0, the last layer177" in text
    assert all(f"layer{i} " in text for i in (0, 1, 176, 177))


def test_what_hardly_moves_is_told() -> None:
    update = np.zeros(100)
    update[:3] = 1e-3
    assert "97% did not move" in str(stats([np.ones(100)], [np.ones(100)], [update]))
    assert "did not move" not in str(stats([np.ones(100)], [update], [update]))


def test_a_gradient_of_nan_is_not_zero() -> None:
    assert stats([np.ones((2, 1))], [np.array([[0.0], [np.nan]])])[0].states == ("non-finite", "partly zero")


def test_an_empty_parameter_is_fine() -> None:
    assert stats([np.ones((0, 3))], [np.ones((0, 3))], [np.ones((0, 3))])[0].state == "ok"


def test_lazy_and_meta_parameters_are_named_without_values() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, device="meta"), torch.nn.LazyLinear(4), torch.nn.Linear(4, 1))
    model[2](torch.ones(1, 4)).sum().backward()
    for grads in (None, cowalk.gradients_of(model)):
        rows = stats(model, grads)
        assert {str(row.path): (row.state, row.shape) for row in rows} == {
            "0.weight": ("meta", (2, 3)),
            "0.bias": ("meta", (2,)),
            "1.weight": ("uninitialised", None),
            "1.bias": ("uninitialised", None),
            "2.weight": ("ok", (1, 4)),
            "2.bias": ("ok", (1,)),
        }
        assert [row.parameter is None for row in rows] == [True] * 4 + [False] * 2
        assert rows.total.n == 5


class Tied(torch.nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(5, 2)
        self.mid = torch.nn.Linear(2, 2)
        self.head = torch.nn.Linear(2, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.mid(self.words(tokens)))


class TestTiedParameters:
    def test_one_that_is_owned_under_its_other_name_is_owned(self) -> None:
        model = Tied()
        optimizer = torch.optim.Adam([*model.mid.parameters(), model.head.weight], lr=0.1)
        grads = backward(model)
        updates = step(model, optimizer)
        rows = stats(model, grads, updates, optimizer)
        assert states(rows) == dict.fromkeys(["words.weight", "mid.weight", "mid.bias"], "ok")
        assert [str(path) for path in rows["words.weight"].aliases] == ["head.weight"]
        assert rows["words.weight"].value("adam.rms") == pytest.approx(1.0, abs=1e-4)
        assert rows["head.weight"] == rows["words.weight"]

    def test_each_of_its_paths_is_owned_where_each_is_a_row(self) -> None:
        model = Tied()
        optimizer = torch.optim.SGD([*model.mid.parameters(), model.head.weight], lr=0.1)
        backward(model)
        grads = cowalk.unflatten({name: p.grad for name, p in model.named_parameters(remove_duplicate=False)})
        rows = stats(model, grads, opt_state=optimizer, ties="each")
        names = ["words.weight", "mid.weight", "mid.bias", "head.weight"]
        assert states(rows) == dict.fromkeys(names, "ok")

    def test_one_that_no_optimizer_owns_is_told_once(self) -> None:
        model = Tied()
        optimizer = torch.optim.SGD(model.mid.parameters(), lr=0.1)
        rows = stats(model, backward(model), opt_state=optimizer)
        assert [str(row.path) for row in rows if row.state == "no optimizer"] == ["words.weight"]

    def test_one_that_did_not_move_is_told(self) -> None:
        model = Tied()
        optimizer = torch.optim.SGD(
            [{"params": model.mid.parameters()}, {"params": [model.head.weight], "lr": 0.0}], 0.1
        )
        grads = backward(model)
        updates = step(model, optimizer)
        assert states(stats(model, grads, updates, optimizer)) == {
            "words.weight": "unmoved",
            "mid.weight": "ok",
            "mid.bias": "ok",
        }

    def test_one_that_is_frozen_is_one_row(self) -> None:
        model = Tied()
        model.head.weight.requires_grad_(False)
        rows = stats(model, backward(model))
        assert states(rows) == {"words.weight": "frozen", "mid.weight": "ok", "mid.bias": "ok"}

    def test_one_that_is_frozen_has_all_its_names(self) -> None:
        model = Tied()
        model.head.weight.requires_grad_(False)
        rows = stats(model, backward(model))
        assert [str(path) for path in rows["words.weight"].aliases] == ["head.weight"]

    def test_its_own_grad_counts_once_under_however_many_names(self) -> None:
        model = Tied()
        backward(model)
        total = model.head.weight.grad.norm().item()
        by_name = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
        only_last = {**by_name, "words.weight": None}
        for flat in (by_name, only_last):
            row = stats(model, cowalk.unflatten(flat))["words.weight"]
            assert row.value("gradient.norm") == pytest.approx(total, rel=1e-6)

    def test_what_stands_beside_its_own_grad_is_a_contribution(self) -> None:
        model = Tied()
        backward(model)
        before = model.head.weight.grad.clone()
        grads = {"words": {"weight": model.head.weight.grad}, "mid": None, "head": {"weight": torch.ones(5, 2)}}
        row = stats(model, grads)["words.weight"]
        assert row.value("gradient.norm") == pytest.approx((before + 1).norm().item(), rel=1e-6)
        assert torch.equal(model.head.weight.grad, before)

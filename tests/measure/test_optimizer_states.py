"""Adam's moments in torch's optimizers, in cowalk's and Optax's trees, in NNX's optimizer; against a float64 formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.training.train_state import TrainState

import cowalk
from cowalk import Adam, CowalkError, Row, stats

LR, BETAS, EPSILON = 0.02, (0.8, 0.95), 1e-6


def adam_of(g: Any, m: Any, v: Any, step: int, lr: float | None = LR, betas: Any = BETAS, eps: float = EPSILON) -> Adam:
    """What is measured, by the formula, in float64."""
    g, m, v = (np.asarray(each, np.float64) for each in (g, m, v))
    if step:
        m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    root = np.sqrt(v)
    return Adam(
        n=g.size,
        defined=g.size,
        below_epsilon=int((root < eps).sum()),
        rms=float(np.sqrt((g**2 / np.maximum(v, eps**2)).mean())),
        step=None if lr is None else float(lr * np.sqrt(((m / (root + eps)) ** 2).mean())),
    )


def assert_is(row: Row, right: Adam) -> None:
    found = row.adam
    assert found is not None
    assert (found.n, found.defined, found.below_epsilon) == (right.n, right.defined, right.below_epsilon)
    assert found.rms == pytest.approx(right.rms, rel=1e-6)
    assert found.step == (None if right.step is None else pytest.approx(right.step, rel=1e-6))


# --- torch ---


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def trained(model: Any, optimizer: Any, steps: int = 1) -> Any:
    """The gradients of the last step."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return cowalk.gradients_of(model)


def adams() -> dict[str, Callable[..., Any]]:
    options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPSILON}
    return {
        "Adam": lambda p: torch.optim.Adam(p, **options),
        "AdamW": lambda p: torch.optim.AdamW(p, **options, weight_decay=0.1),
        "AMSGrad": lambda p: torch.optim.Adam(p, **options, amsgrad=True),
        "with a learning rate in a tensor": lambda p: torch.optim.Adam(p, torch.tensor(LR), BETAS, EPSILON),
        "for all parameters at once": lambda p: torch.optim.Adam(p, **options, foreach=True),
    }


@pytest.mark.parametrize("make", adams().values(), ids=adams())
@pytest.mark.parametrize("steps", [1, 4])
def test_a_torch_optimizer_s_moments_and_settings_are_found(make: Any, steps: int) -> None:
    model = network()
    optimizer = make(model.parameters())
    grads = trained(model, optimizer, steps)
    table = stats(model, grads, opt_state=optimizer)
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        v = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        assert_is(table[name], adam_of(p.grad, state["exp_avg"], v, steps))


def test_amsgrad_s_largest_v_is_the_one_that_counts() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), LR, BETAS, EPSILON, amsgrad=True)
    for size in (10.0, 0.1, 0.1):
        model.weight.grad = torch.full((1, 1), size)
        optimizer.step()
    found = stats(model, cowalk.gradients_of(model), opt_state=optimizer)["weight"]
    state = optimizer.state[model.weight]
    assert state["max_exp_avg_sq"] > state["exp_avg_sq"]
    assert_is(found, adam_of(model.weight.grad, state["exp_avg"], state["max_exp_avg_sq"], 3))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_after_the_first_step_v_is_the_square_of_the_gradient_and_the_step_the_learning_rate(kind: Any) -> None:
    model = network()
    optimizer = kind(model.parameters(), lr=LR, eps=1e-30)
    table = stats(model, trained(model, optimizer), opt_state=optimizer)
    for row in table:
        assert row.value("adam.rms") == pytest.approx(1.0, abs=1e-6)
        assert row.value("adam.step") == pytest.approx(LR, rel=1e-6)
        assert row.value("adam.below_epsilon") == 0
    assert table.total.value("adam.rms") == pytest.approx(1.0, abs=1e-6)


def test_the_step_is_the_update_that_adam_makes() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), LR)
    trained(model, optimizer, 3)
    before = cowalk.fmapstructure(lambda p: p.detach().clone(), model, where=torch.nn.Parameter)
    grads = trained(model, optimizer)
    updates = cowalk.fmapstructure(lambda old, p: p.detach() - old, before, model)
    for row in stats(model, grads, updates, optimizer):
        assert row.value("adam.step") == pytest.approx(row.value("update.rms"), rel=1e-4)


def test_what_is_below_epsilon_is_counted() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), LR, eps=1e-3)
    model.weight.grad = torch.tensor([[1.0, 1e-5, 0.0, -1.0]])
    optimizer.step()
    row = stats(model, cowalk.gradients_of(model), opt_state=optimizer)["weight"]
    assert row.adam is not None
    assert (row.adam.below_epsilon, row.adam.share_below_epsilon) == (2, 0.5)


def test_groups_have_settings_of_their_own() -> None:
    model = network()
    groups = [
        {"params": model[0].parameters(), "lr": 1.0, "betas": (0.5, 0.5), "eps": 1e-2},
        {"params": model[2].parameters()},
    ]
    optimizer = torch.optim.Adam(groups, LR, BETAS, EPSILON)
    table = stats(model, trained(model, optimizer, 2), opt_state=optimizer)
    p, q = model[0].weight, model[2].weight
    state = optimizer.state
    first = adam_of(p.grad, state[p]["exp_avg"], state[p]["exp_avg_sq"], 2, 1.0, (0.5, 0.5), 1e-2)
    assert_is(table["0.weight"], first)
    assert_is(table["2.weight"], adam_of(q.grad, state[q]["exp_avg"], state[q]["exp_avg_sq"], 2))


def test_adam_says_what_the_optimizer_does_not_and_overrules_what_it_does() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), LR, BETAS, EPSILON)
    grads = trained(model, optimizer, 2)
    table = stats(model, grads, opt_state=optimizer, adam={"lr": 3.0, "epsilon": 1e-1})
    p = model[0].weight
    state = optimizer.state[p]
    assert_is(table["0.weight"], adam_of(p.grad, state["exp_avg"], state["exp_avg_sq"], 2, 3.0, BETAS, 1e-1))


def test_the_state_under_the_model_s_paths_serves_with_the_settings_beside_it() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), LR, BETAS, EPSILON)
    grads = trained(model, optimizer, 2)
    tree = cowalk.optimizer_state(model, optimizer)
    settings = {"lr": LR, "betas": BETAS, "epsilon": EPSILON}
    table = stats(model, grads, opt_state=tree, adam=settings)
    np.testing.assert_allclose(table.matrix, stats(model, grads, opt_state=optimizer).matrix, rtol=1e-12)
    by_default = stats(model, grads, opt_state=tree)["0.weight"]
    p, state = model[0].weight, optimizer.state[model[0].weight]
    assert_is(by_default, adam_of(p.grad, state["exp_avg"], state["exp_avg_sq"], 2, None, (0.9, 0.999), 1e-8))


def test_a_tree_of_one_s_own_serves_under_the_common_names() -> None:
    g = np.array([1.0, -2.0])
    for first, second in (("exp_avg", "exp_avg_sq"), ("mu", "nu"), ("m", "v"), ("momentum", "velocity")):
        state = {"w": {first: 0.2 * g, second: 0.05 * g**2, "step": 3}}
        row = stats({"w": g}, {"w": g}, opt_state=state, adam={"lr": LR, "betas": BETAS, "epsilon": EPSILON})["w"]
        assert_is(row, adam_of(g, 0.2 * g, 0.05 * g**2, 3))


def test_without_a_step_the_moments_are_taken_as_they_are() -> None:
    g = np.array([1.0, -2.0])
    row = stats([g], [g], opt_state=[{"m": 0.2 * g, "v": 0.05 * g**2}], adam={"lr": LR, "epsilon": EPSILON})[0]
    assert_is(row, adam_of(g, 0.2 * g, 0.05 * g**2, 0))


def test_without_a_first_moment_there_is_no_step() -> None:
    g = np.array([1.0, -2.0])
    row = stats([g], [g], opt_state=[{"v": g**2}], adam={"lr": LR})[0]
    assert (row.value("adam.rms"), row.value("adam.step")) == (pytest.approx(1.0), None)


def test_without_a_gradient_adam_has_nothing_to_stand_beside() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    assert {row.adam for row in stats(model, opt_state=optimizer)} == {None}


def test_other_optimizers_have_no_adam_but_own_their_parameters() -> None:
    for kind in (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad):
        model = network()
        optimizer = kind(model[0].parameters(), lr=LR)
        table = stats(model, trained(model, optimizer), opt_state=optimizer)
        assert table.column("adam.rms") == [None] * 4
        assert table.column("state") == ["ok", "ok", "no optimizer", "no optimizer"]


def test_an_optimizer_that_made_no_step_has_no_moments_yet() -> None:
    model = network()
    model(torch.ones(1, 3)).sum().backward()
    table = stats(model, cowalk.gradients_of(model), opt_state=torch.optim.Adam(model.parameters()))
    assert table.column("adam.rms") == [None] * 4
    assert table.column("state") == ["ok"] * 4


def test_an_optimizer_inside_of_another_is_found() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = network()
    optimizer = torch.optim.Adam(model[0].parameters(), LR)
    grads = trained(model, optimizer)
    found = stats(model, grads, opt_state=Wrapper(optimizer))
    assert found.rows == stats(model, grads, opt_state=optimizer).rows


# --- Optax ---

PARAMS = {"w": jnp.array([1.0, 2.0, -3.0]), "b": jnp.array([0.5])}
GRADS = {"w": jnp.array([0.1, -0.2, 3.0]), "b": jnp.array([-4.0])}
ADAM: dict[str, Any] = {"lr": LR, "betas": BETAS, "epsilon": EPSILON}


def optax_adam(kind: Any = optax.adam) -> Any:
    return kind(LR, *BETAS, EPSILON)


def after(transformation: Any, steps: int = 2) -> Any:
    state = transformation.init(PARAMS)
    for i in range(steps):
        grads = jax.tree.map(lambda g, i=i: g * (i + 1) / steps, GRADS)  # the last are GRADS
        _, state = transformation.update(grads, state, PARAMS)
    return state


def moments(name: str, steps: int = 2) -> tuple[Any, Any]:
    m = v = 0.0
    for i in range(steps):
        g = np.asarray(GRADS[name], np.float64) * (i + 1) / steps
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
    return m, v


def labels(second: Any) -> Any:
    return optax.multi_transform({"one": optax_adam(), "two": second}, {"w": "one", "b": "two"})


TRANSFORMATIONS = {
    "adam": optax_adam(),
    "adamw": optax_adam(optax.adamw),
    "a chain": optax.chain(optax.clip_by_global_norm(1e9), optax_adam(), optax.add_decayed_weights(0.1)),
    "a chain in a chain": optax.chain(optax.chain(optax.identity(), optax_adam())),
    "two parts": labels(optax_adam()),
    "apply_if_finite": optax.apply_if_finite(optax_adam(), 3),
    "masked everywhere": optax.masked(optax_adam(), {"w": True, "b": True}),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_adam_is_found_in_a_state_of_optax_s(transformation: Any) -> None:
    table = stats(PARAMS, GRADS, opt_state=after(transformation), adam=ADAM)
    for name in PARAMS:
        assert_is(table[name], adam_of(GRADS[name], *moments(name), 2))
    assert table.column("state") == ["ok", "ok"]


PARTIAL = {
    "masked": optax.masked(optax_adam(), {"w": True, "b": False}),
    "a part for SGD": labels(optax.sgd(0.1)),
    "a part that is frozen": labels(optax.set_to_zero()),
}


@pytest.mark.parametrize("transformation", PARTIAL.values(), ids=PARTIAL)
def test_a_parameter_that_is_not_adam_s_has_none(transformation: Any) -> None:
    table = stats(PARAMS, GRADS, opt_state=after(transformation), adam=ADAM)
    assert_is(table["w"], adam_of(GRADS["w"], *moments("w"), 2))
    assert table["b"].adam is None


def test_two_adams_have_counts_of_their_own() -> None:
    late = optax.multi_transform({"one": optax_adam(), "two": optax_adam()}, {"w": "one", "b": "two"})
    state = after(late)
    inner = state.inner_states["two"].inner_state
    inner = (inner[0]._replace(count=jnp.int32(9)), *inner[1:])
    parts = {**state.inner_states, "two": state.inner_states["two"]._replace(inner_state=inner)}
    table = stats(PARAMS, GRADS, opt_state=state._replace(inner_states=parts), adam=ADAM)
    assert_is(table["w"], adam_of(GRADS["w"], *moments("w"), 2))
    assert_is(table["b"], adam_of(GRADS["b"], *moments("b"), 9))


def test_optax_keeps_no_learning_rate_so_the_step_is_unknown_until_it_is_said() -> None:
    (w, b) = stats(PARAMS, GRADS, opt_state=after(optax_adam()))
    assert w.value("adam.step") is b.value("adam.step") is None
    assert w.value("adam.rms") is not None


def test_optax_s_first_step_is_debiased() -> None:
    table = stats(PARAMS, GRADS, opt_state=after(optax.adam(LR), 1), adam={"lr": LR})
    assert table.column("adam.rms") == pytest.approx([1.0, 1.0], abs=1e-6)
    assert table.column("adam.step") == pytest.approx([LR, LR], rel=1e-6)


def test_optax_s_amsgrad_steps_by_its_largest_v() -> None:
    transformation: Any = optax.amsgrad(LR, *BETAS, EPSILON)
    state = transformation.init({"w": jnp.ones(1)})
    updates: Any = None
    for size in (10.0, 0.1, 0.1):
        updates, state = transformation.update({"w": jnp.full(1, size)}, state)
    row = stats({"w": jnp.ones(1)}, {"w": jnp.full(1, 0.1)}, opt_state=state, adam=ADAM)["w"]
    assert row.value("adam.step") == pytest.approx(abs(float(updates["w"][0])), rel=1e-4)


@pytest.mark.parametrize(
    "transformation",
    [
        optax.sgd(LR),
        optax.sgd(LR, momentum=0.9),
        optax.rmsprop(LR),
        optax.lion(LR),
    ],
    ids=["SGD", "momentum", "RMSprop", "Lion"],
)
def test_other_states_of_optax_s_have_no_adam(transformation: Any) -> None:
    table = stats(PARAMS, GRADS, opt_state=after(transformation))
    assert table.column("adam.rms") == [None, None]


def test_a_train_state_of_flax_s() -> None:
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax_adam())
    state = state.apply_gradients(grads=jax.tree.map(lambda g: g / 2, GRADS)).apply_gradients(grads=GRADS)
    table = stats(PARAMS, GRADS, opt_state=state, adam=ADAM)
    assert_is(table["w"], adam_of(GRADS["w"], *moments("w"), 2))


def test_an_optimizer_of_nnx_s() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax_adam(), wrt=nnx.Param)
    grads = nnx.grad(lambda model, x: (model(x) ** 2).sum())(model, jnp.ones((4, 2)))
    optimizer.update(model, grads)
    for opt_state in (optimizer, optimizer.opt_state):
        table = stats(model, grads, opt_state=opt_state, adam=ADAM)
        for name in ("kernel", "bias"):
            g = np.asarray(grads[name][...], np.float64)
            right = adam_of(g, (1 - BETAS[0]) * g, (1 - BETAS[1]) * g**2, 1)
            assert_is(table[name], right)


def test_an_equinox_model_beside_its_optax_state() -> None:
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(2, 1, 4, 1, key=jax.random.key(0), activation=jnp.tanh)
    grads = equinox.filter_grad(lambda model: jax.vmap(model)(jnp.ones((3, 2))).sum())(model)
    transformation = optax.adam(LR)
    _, state = transformation.update(grads, transformation.init(equinox.filter(model, equinox.is_array)))
    table = stats(model, grads, opt_state=state, adam={"lr": LR})
    assert table.column("adam.rms") == pytest.approx([1.0] * 4, abs=1e-6)
    assert table.column("adam.step") == pytest.approx([LR] * 4, rel=1e-5)


# --- what is no optimizer ---


@pytest.mark.parametrize(
    "junk", [3, "adam", object(), torch.optim.Adam, optax_adam, np.ones(3)], ids=lambda junk: type(junk).__name__
)
def test_what_is_no_optimizer_is_an_error_that_says_what_is_one(junk: Any) -> None:
    for model, grads in ((network(), None), (PARAMS, GRADS)):
        with pytest.raises(CowalkError, match="opt_state= is an optimizer"):
            stats(model, grads, opt_state=junk)


@pytest.mark.parametrize("junk", [{}, [], {"a": 1}, optax_adam()], ids=["{}", "[]", "a dict", "a transformation"])
def test_trees_of_something_else_do_not_fit(junk: Any) -> None:
    for model in (network(), PARAMS):
        with pytest.raises(CowalkError):
            stats(model, opt_state=junk)


def test_a_torch_optimizer_of_another_model_is_an_error() -> None:
    model, other = network(), network()
    optimizer = torch.optim.Adam(other.parameters())
    trained(other, optimizer)
    with pytest.raises(CowalkError, match="none of them belongs to this model"):
        stats(model, cowalk.gradients_of(model), opt_state=optimizer)


def test_a_state_dict_is_no_tree_under_the_model_s_paths() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    grads = trained(model, optimizer)
    for junk in (optimizer.state_dict(), optimizer.state):
        with pytest.raises(CowalkError):
            stats(model, grads, opt_state=junk)


def test_an_optimizer_of_another_framework_is_an_error() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    grads = trained(model, optimizer)
    with pytest.raises(CowalkError, match="not a Adam"):
        stats(PARAMS, GRADS, opt_state=optimizer)
    with pytest.raises(CowalkError):
        stats(model, grads, opt_state=after(optax_adam()))


def test_a_state_for_parameters_of_other_names_or_shapes_is_an_error() -> None:
    state = optax_adam().init({"W": jnp.ones(3)})
    with pytest.raises(cowalk.StructureError):
        stats(PARAMS, GRADS, opt_state=state)
    state = optax_adam().init({"w": jnp.ones(2), "b": jnp.ones(1)})
    with pytest.raises(cowalk.MeasureError, match=r"w: the parameter has shape \(3,\), its first moment \(2,\)"):
        stats(PARAMS, GRADS, opt_state=state)


def test_swapped_arguments_are_errors() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    grads = trained(model, optimizer)
    with pytest.raises(CowalkError):
        stats(model, optimizer, None, grads)
    with pytest.raises(CowalkError):
        stats(optimizer, grads)
    with pytest.raises(CowalkError):
        stats(model, grads, optimizer)
    with pytest.raises(CowalkError):
        stats(PARAMS, after(optax_adam()))


@pytest.mark.parametrize("which", ["model", "gradients"])
def test_a_model_or_gradients_in_the_place_of_the_optimizer_are_errors(which: str) -> None:
    model = network()
    grads = trained(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(CowalkError):
        stats(model, grads, opt_state=model if which == "model" else grads)


@pytest.mark.parametrize("betas", [0.9, (0.9,), (1.0, 0.9), (0.9, 1.0), ("a", "b"), (-0.1, 0.9)], ids=str)
def test_betas_that_are_none_are_errors_that_say_so(betas: Any) -> None:
    state = [{"m": np.ones(1), "v": np.ones(1), "step": 1}]
    with pytest.raises((ValueError, TypeError), match="betas"):
        stats([np.ones(1)], [np.ones(1)], opt_state=state, adam={"betas": betas})

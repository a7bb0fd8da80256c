"""Rules made of rules, schedules, rules by path, rules of a user's own and of Optax's; and arrays of every kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch

import cowalk
from cowalk import optim
from cowalk.optim import in_place

MAKERS = {"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}


def host(x: Any) -> np.ndarray:
    """The values of any array in float64 (complex ones as they are), in an array of their own."""
    if isinstance(x, torch.Tensor):
        x = x.detach().to(torch.complex128 if x.is_complex() else torch.float64).numpy()
    x = np.array(x)
    return x if x.dtype.kind == "c" else x.astype(np.float64)


pytestmark = pytest.mark.usefixtures("quick_compiling")


def run(rule: Any, model: Any, gradients: list[Any]) -> tuple[Any, Any]:
    """State and model after an update for each of the gradients, in place."""
    state = cowalk.setup(rule, model)
    for grads in gradients:
        cowalk.update_(state, model, grads)
    return state, model


# --- chains ---


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_chain_gives_each_rule_the_step_of_the_one_before(make):
    decay, clip, descent = optim.WeightDecay(1.0), optim.ClipGrad(2.0), optim.Descent(0.5)
    first, last = ({"w": make([3.0, -1.0])} for _ in range(2))
    run(optim.Chain(decay, clip, descent), first, [{"w": make([1.0, 0.5])}])
    run(optim.Chain(clip, decay, descent), last, [{"w": make([1.0, 0.5])}])
    assert host(first["w"]).tolist() == [2.0, -0.75]
    assert host(last["w"]).tolist() == [1.0, -0.75]


def test_chains_in_chains_are_one_chain():
    parts = optim.ClipGrad(1.0), optim.WeightDecay(0.1), optim.Momentum(0.5), optim.Descent(2.0)
    nested = optim.Chain(optim.Chain(parts[0], optim.Chain(parts[1])), optim.Chain(), optim.Chain(*parts[2:]))
    assert nested.stages == parts
    models = [{"w": np.array([1.0, -2.0])} for _ in range(2)]
    states = [
        run(rule, model, [{"w": np.array([3.0, 0.5])}] * 3)[0]
        for rule, model in zip((nested, optim.Chain(*parts)), models, strict=True)
    ]
    assert models[0]["w"].tolist() == models[1]["w"].tolist()
    assert list(states[0]["w"]) == list(states[1]["w"]) == [0, 1, 2, 3]
    assert states[0]["w"][2]["momentum"].tolist() == states[1]["w"][2]["momentum"].tolist()


def test_a_chain_of_one_is_that_rule():
    alone, chained = ({"w": np.array([1.0, -2.0])} for _ in range(2))
    run(optim.Adam(0.1), alone, [{"w": np.array([3.0, 0.5])}] * 3)
    run(optim.Chain(optim.Adam(0.1)), chained, [{"w": np.array([3.0, 0.5])}] * 3)
    assert alone["w"].tolist() == chained["w"].tolist()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_norm_over_the_tree_after_other_rules_is_that_of_their_steps(make):
    chain = optim.Chain(optim.Momentum(1.0, 0.5), optim.ClipNorm(1.0, over="tree"), optim.Descent(1.0))
    model = {"a": make([0.0]), "b": make([0.0])}
    run(chain, model, [{"a": make([0.75]), "b": make([1.0])}] * 2)
    # momenta (0.75, 1), then (1.125, 1.5): each of norm 1 when clipped
    np.testing.assert_allclose([float(model["a"][0]), float(model["b"][0])], [-1.2, -1.6], rtol=1e-6)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.filterwarnings("ignore:cowalk.update. there is no gradient")
@pytest.mark.parametrize("over", ["array", "tree"])
def test_the_norm_of_zeros_and_of_nothing_clips_nothing(make, over):
    model = {"zero": make([1.0, 2.0]), "empty": make(np.zeros(0, "float32")), "late": make([1.0])}
    rule = optim.Chain(optim.ClipNorm(1.0, over=over), optim.Descent(1.0))
    zeros = {"zero": make([0.0, 0.0]), "empty": make(np.zeros(0, "float32")), "late": None}
    run(rule, model, [zeros, dict.fromkeys(model)])
    assert host(model["zero"]).tolist() == [1.0, 2.0]
    assert tuple(model["empty"].shape) == (0,)


@pytest.mark.parametrize("over", ["array", "tree"])
def test_a_norm_that_is_not_finite_is_an_error_unless_it_may_pass(over):
    model = {"a": np.ones(1), "b": np.ones(2)}
    grads = {"a": np.ones(1), "b": np.array([np.nan, 1.0])}
    with pytest.raises(optim.RuleError, match="the 2-norm of the gradient"):
        run(optim.Chain(optim.ClipNorm(1.0, over=over), optim.Descent(1.0)), model, [grads])
    assert (model["a"].tolist(), model["b"].tolist()) == ([1.0], [1.0, 1.0])
    run(optim.Chain(optim.ClipNorm(1.0, over=over, error_if_nonfinite=False), optim.Descent(1.0)), model, [grads])
    assert np.isnan(model["b"]).all()
    assert np.isnan(model["a"]).all() == (over == "tree")


# --- AccumGrad ---


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_accumulation_waits_for_n_gradients_and_hands_their_mean_on(make):
    model = {"w": make([1.0, 1.0])}
    state = cowalk.setup(optim.Chain(optim.AccumGrad(3), optim.Momentum(1.0, 0.5)), model)
    seen = []
    for g in ([3.0, 0.0], [0.0, 6.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]):
        cowalk.update_(state, model, {"w": make(g)})
        seen.append((host(model["w"]).tolist(), int(state["w"][0]["count"]), host(state["w"][1]["momentum"]).tolist()))
    start, after, last = [1.0, 1.0], [0.0, -1.0], [-1.5, -3.0]
    assert seen == [
        (start, 1, [0.0, 0.0]),
        (start, 2, [0.0, 0.0]),
        (after, 0, [1.0, 2.0]),
        (after, 1, [1.0, 2.0]),
        (after, 2, [1.0, 2.0]),
        (last, 0, [1.5, 2.0]),
    ]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_accumulation_counts_the_gradients_of_each_parameter(make):
    model = {"a": make([0.0]), "b": make([0.0])}
    one, none = make([1.0]), None
    run(optim.Chain(optim.AccumGrad(2), optim.Descent(1.0)), model, [{"a": one, "b": none}, {"a": one, "b": one}])
    assert (float(model["a"][0]), float(model["b"][0])) == (-1.0, 0.0)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_norm_over_the_tree_may_follow_accumulation(make):
    rule = optim.Chain(optim.AccumGrad(2), optim.ClipNorm(1.0, over="tree"), optim.Descent(1.0))
    model = {"a": make([0.0]), "b": make([0.0])}
    state = cowalk.setup(rule, model)
    cowalk.update_(state, model, {"a": make([6.0]), "b": make([0.0])})
    assert (float(model["a"][0]), float(model["b"][0])) == (0.0, 0.0)
    cowalk.update_(state, model, {"a": make([0.0]), "b": make([8.0])})
    np.testing.assert_allclose([float(model["a"][0]), float(model["b"][0])], [-0.6, -0.8], rtol=1e-6)


def test_in_jit_nothing_compiles_again_while_gradients_accumulate():
    rule = optim.Chain(optim.AccumGrad(2), optim.Adam(optax.linear_schedule(0.5, 0.1, 3)))
    model, grads = {"w": jnp.array([1.0, -2.0])}, {"w": jnp.array([0.5, 3.0])}
    outside_state, outside = cowalk.setup(rule, model), model
    state = cowalk.setup(rule, model)
    step = jax.jit(lambda state, model, grads: cowalk.update(state, model, grads))
    sizes = []
    for _ in range(6):
        state, model = step(state, model, grads)
        outside_state, outside = cowalk.update(outside_state, outside, grads)
        sizes.append(step._cache_size())
        np.testing.assert_allclose(model["w"], outside["w"], rtol=1e-6)
    assert sizes[1:] == [sizes[1]] * 5
    assert int(state.step) == outside_state.step == 6


# --- MixedPrecision ---

HALVES = {
    "numpy float16": lambda values: np.array(values, np.float16),
    "numpy bfloat16": lambda values: np.array(values, ml_dtypes.bfloat16),
    "torch float16": lambda values: torch.tensor(values, dtype=torch.float16),
    "torch bfloat16": lambda values: torch.tensor(values, dtype=torch.bfloat16),
    "jax float16": lambda values: jnp.array(values, jnp.float16),
    "jax bfloat16": lambda values: jnp.array(values, jnp.bfloat16),
}


@pytest.mark.parametrize("make", HALVES.values(), ids=HALVES)
def test_steps_too_small_for_a_half_add_up_in_its_copy(make):
    model = {"w": make([1.0, -1.0])}
    dtype = model["w"].dtype
    plain, mixed = optim.Descent(1e-4), optim.MixedPrecision(optim.Chain(optim.ClipGrad(1.0), optim.Descent(1e-4)))
    _, stuck = run(plain, {"w": make([1.0, -1.0])}, [{"w": make([1.0, 1.0])}] * 50)
    state, _ = run(mixed, model, [{"w": make([1.0, 1.0])}] * 50)
    assert host(stuck["w"]).tolist()[0] == 1.0
    copy = state["w"]["copy"]
    assert str(copy.dtype).removeprefix("torch.") == "float32"
    np.testing.assert_allclose(host(copy), [0.995, -1.005], rtol=1e-5)
    assert model["w"].dtype == dtype
    assert host(model["w"]).tolist() == host(make(host(copy).tolist())).tolist()


@pytest.mark.parametrize("make", HALVES.values(), ids=HALVES)
def test_the_copy_of_a_half_makes_the_steps_of_a_float32(make):
    starts = {"w": [[1.0, -2.0], [0.5, 4.0]], "b": [0.25]}
    grads = {"w": [[0.5, -0.25], [0.0, 2.0]], "b": [-1.0]}
    half, single = ({name: kind(x) for name, x in starts.items()} for kind in (make, lambda x: np.array(x, "float32")))
    rule = optim.Chain(optim.ClipNorm(1.0, over="tree"), optim.AdamW(0.01, weight_decay=0.1))
    state, _ = run(optim.MixedPrecision(rule), half, [{name: make(g) for name, g in grads.items()}] * 3)
    run(rule, single, [{name: np.array(g, "float32") for name, g in grads.items()}] * 3)
    for name in starts:
        np.testing.assert_allclose(host(state[name]["copy"]), single[name], rtol=2e-6)


@pytest.mark.parametrize("make", HALVES.values(), ids=HALVES)
def test_adam_in_halves_is_finite_and_leaves_zeros_where_they_are(make):
    model = {"w": make([1.0, 0.0, -2.0])}
    dtype = model["w"].dtype
    for betas in ((0.9, 0.999), (0.9, 0.9)):
        state, _ = run(optim.Adam(0.01, betas), model, [{"w": make([1e-3, 0.0, 1e-4])}] * 3)
        assert np.isfinite(host(model["w"])).all()
        assert host(model["w"])[1] == 0.0
        assert host(model["w"])[0] < 1.0
        assert model["w"].dtype == dtype == state["w"]["m"].dtype


@pytest.mark.parametrize(
    "rule", [optim.RMSProp(), optim.AdaGrad(), optim.AdaDelta(), optim.AMSGrad(), optim.AdaBelief()]
)
@pytest.mark.parametrize("make", [HALVES["numpy float16"], HALVES["torch float16"]], ids=["numpy", "torch"])
def test_a_zero_gradient_in_float16_makes_no_nan(make, rule):
    _, model = run(rule, {"w": make([1.0, 1.0])}, [{"w": make([0.0, 0.5])}] * 3)
    assert np.isfinite(host(model["w"])).all()
    # AMSGrad's first moment begins at ε
    assert host(model["w"])[0] == pytest.approx(1.0, abs=1e-2 if isinstance(rule, optim.AMSGrad) else 0)
    assert host(model["w"])[1] < 1.0


# --- schedules ---


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_schedule_gets_the_count_of_updates_from_zero(make):
    rule = optim.Descent(lambda count: 2.0 ** (count * -1.0))
    model = {"w": make([0.0]), "late": make([0.0])}
    one = make([1.0])
    run(rule, model, [{"w": one, "late": None}, {"w": one, "late": one}, {"w": one, "late": None}])
    assert host(model["w"]).tolist() == [-1.75]
    assert host(model["late"]).tolist() == [-0.5]  # updates of the model are counted, not those of a parameter


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_schedules_of_optax_are_schedules(make):
    schedule = optax.piecewise_constant_schedule(0.5, {2: 0.5})
    _, model = run(optim.Momentum(schedule, 0.0), {"w": make([0.0])}, [{"w": make([1.0])}] * 4)
    assert host(model["w"]).tolist() == [-1.5]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_after_accumulation_schedules_count_means(make):
    counted = optim.Chain(optim.AccumGrad(2), optim.Descent(lambda count: 2.0 ** (count * -1.0)))
    _, model = run(counted, {"w": make([0.0])}, [{"w": make([1.0])}] * 6)
    assert host(model["w"]).tolist() == [-1.75]
    before = optim.Chain(optim.WeightDecay(lambda count: 1.0 * count), optim.AccumGrad(2), optim.Descent(1.0))
    _, model = run(before, {"w": make([1.0])}, [{"w": make([0.0])}] * 4)
    assert host(model["w"]).tolist() == [0.5 - 0.5 * 2.5]


def test_momentum_decay_and_limits_may_be_schedules():
    seen: dict[str, list[Any]] = {}

    def schedule(name: str, value: float) -> Any:
        return lambda count: seen.setdefault(name, []).append(count) or value

    scheduled = optim.Chain(
        optim.ClipNorm(schedule("max_norm", 2.0)),
        optim.ClipGrad(schedule("limit", 1.0)),
        optim.WeightDecay(schedule("decay", 0.5)),
        optim.Momentum(0.1, schedule("momentum", 0.5)),
    )
    fixed = optim.Chain(optim.ClipNorm(2.0), optim.ClipGrad(1.0), optim.WeightDecay(0.5), optim.Momentum(0.1, 0.5))
    models = [run(rule, {"w": np.ones(3)}, [{"w": np.array([3.0, 1.0, -0.5])}] * 2)[1] for rule in (scheduled, fixed)]
    assert models[0]["w"].tolist() == models[1]["w"].tolist()
    assert seen == {name: [0, 1] for name in ("max_norm", "limit", "decay", "momentum")}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_muon_hands_schedules_to_its_fallback(make):
    rule = optim.Muon(lambda count: 0.1 + count, fallback=optim.Descent(lambda count: 1.0 + count))
    _, model = run(rule, {"b": make([0.0])}, [{"b": make([1.0])}] * 2)
    assert host(model["b"]).tolist() == [-3.0]


# --- rules by path ---


def layers(make: Any = np.array) -> Any:
    return {"fc": {"weight": make([1.0]), "bias": make([1.0])}, "head": {"weight": make([1.0]), "bias": make([1.0])}}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_first_pattern_that_matches_decides(make):
    rule = {"head.*": optim.Descent(0.5), "*.bias": None, "*.weight": {"fc.*": optim.Descent(0.25)}}
    state, model = run(rule, layers(make), [layers(make)])
    assert {str(path): float(x[0]) for path, (x,) in cowalk.walk(model)} == {
        "fc.weight": 0.75,
        "fc.bias": 1.0,
        "head.weight": 0.5,
        "head.bias": 0.5,
    }
    assert state["fc"]["bias"] == {}


def test_rules_by_path_may_stand_in_chains_and_in_mixed_precision():
    decay = optim.Chain({"*.bias": optim.Chain(), "*": optim.WeightDecay(1.0)}, optim.Descent(0.25))
    _, model = run(decay, layers(), [layers()])
    assert (model["fc"]["weight"].tolist(), model["fc"]["bias"].tolist()) == ([0.5], [0.75])
    mixed = optim.MixedPrecision({"*.bias": None, "*": optim.Descent(0.25)})
    state, model = run(mixed, layers(np.array), [layers()])
    assert (model["fc"]["weight"].tolist(), model["fc"]["bias"].tolist()) == ([0.75], [1.0])
    assert state["fc.weight"]["copy"].dtype == np.float32


def test_parameters_clipped_together_may_have_different_rules_after():
    clip = optim.ClipNorm(1.0, over="tree")
    rule = {"a": optim.Chain(clip, optim.Descent(1.0)), "b": optim.Chain(clip, optim.Descent(2.0)), "c": None}
    model = {"a": np.zeros(1), "b": np.zeros(1), "c": np.zeros(1)}
    run(rule, model, [{"a": np.array([3.0]), "b": np.array([4.0]), "c": np.array([100.0])}])
    np.testing.assert_allclose([model["a"][0], model["b"][0], model["c"][0]], [-0.6, -1.6, 0.0], rtol=1e-12)


def test_a_parameter_without_a_pattern_and_a_pattern_without_a_parameter_are_errors():
    with pytest.raises(optim.RuleError, match=r"no pattern matches the parameter 'fc\.weight': there are '\*\.bias'"):
        cowalk.setup({"*.bias": optim.Descent()}, layers())
    with pytest.raises(
        optim.RuleError, match=r"'\*\.gain' matches none of the 4 parameters; the first is 'fc\.weight'"
    ):
        cowalk.setup({"*.gain": optim.Descent(), "*": optim.Adam()}, layers())
    with pytest.raises(optim.RuleError, match=r"'\*\.gain' matches none"):
        cowalk.setup(optim.Chain({"*.gain": None, "*": optim.Adam()}), layers())


# --- a rule of the user's own ---


@dataclass(frozen=True)
class Averaged(optim.Rule):
    """The mean of all gradients so far."""

    lr: float = 1.0
    elementwise = True

    def init(self, x: Any) -> optim.rules.rule.State:
        return {"sum": optim.functions(x).zeros_like(x), "count": 0}

    def apply(self, state: Any, x: Any, gradient: Any) -> Any:
        total, count = state["sum"] + gradient, state["count"] + 1
        return {"sum": total, "count": count}, self.lr * total / count


@dataclass(frozen=True)
class Centred(optim.Rule):
    """Not elementwise: takes the mean out of a gradient, so that it has to get whole arrays."""

    def apply(self, state: Any, x: Any, gradient: Any) -> Any:
        assert gradient.shape == x.shape
        return state, gradient - gradient.mean()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_rule_of_one_s_own_stands_wherever_rules_do(make, monkeypatch):
    monkeypatch.setattr(in_place, "BLOCK", 2)
    rule = optim.Chain(Centred(), {"*": Averaged(0.5)}, optim.ClipGrad(10.0))
    model = {"w": make([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]), "b": make([1.0, 1.0])}
    first = {"w": make([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]]), "b": make([0.0, 4.0])}
    state, _ = run(rule, model, [first, {"w": make([[0.0] * 3] * 2), "b": None}])
    np.testing.assert_allclose(host(model["w"]), [[3.25, 2.5, 1.75], [1.0, 0.25, -2.75]], rtol=1e-6)
    assert host(model["b"]).tolist() == [2.0, 0.0]
    assert (int(state["w"][1]["count"]), int(state["b"][1]["count"])) == (2, 1)
    assert cowalk.adjust(state, lr=0.25)["b"].rule.stages[1] == Averaged(0.25)


def test_a_rule_without_apply_says_so():
    @dataclass(frozen=True)
    class Nothing(optim.Rule):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing has no apply\(state, x, gradient\)"):
        run(Nothing(), {"w": np.ones(1)}, [{"w": np.ones(1)}])


# --- Optax ---


def test_transformations_of_optax_are_rules():
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.2))
    model = {"a": jnp.array([1.0, -2.0]), "b": {"c": jnp.array([[3.0]])}}
    grads = [{"a": jnp.array([3.0, t - 1.0]), "b": {"c": jnp.array([[-4.0]])}} for t in range(3)]
    theirs, kept, update = model, transformation.init(model), jax.jit(transformation.update)
    state, mine = cowalk.setup(transformation, model), model
    for each in grads:
        updates, kept = update(each, kept, theirs)
        theirs = optax.apply_updates(theirs, updates)
        state, mine = cowalk.update(state, mine, each)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine, theirs)


def test_optax_after_a_rule_and_before_one():
    model = {"w": jnp.array([1.0, 2.0])}
    rule = optim.Chain(optim.ClipGrad(1.0), optax.sgd(0.5, momentum=0.5), optim.ClipGrad(0.6))
    run(rule, model, [{"w": jnp.array([3.0, 0.5])}] * 2)
    np.testing.assert_allclose(model["w"], [1.0 - 0.5 - 0.6, 2.0 - 0.25 - 0.375], rtol=1e-6)


def test_without_a_gradient_a_parameter_and_its_part_of_the_state_of_optax_wait():
    model = {"a": jnp.array([1.0]), "b": jnp.array([1.0]), "frozen": jnp.array([1.0])}
    state = cowalk.freeze(cowalk.setup(optax.adam(0.1), model), "frozen")
    one = {name: jnp.array([1.0]) for name in model}
    state, model = cowalk.update(state, model, one)
    (before,), b = state.shared.values(), float(model["b"][0])
    state, model = cowalk.update(state, model, one | {"b": None})
    (after,) = state.shared.values()
    assert float(model["b"][0]) == b
    assert float(model["frozen"][0]) == 1.0
    assert [float(each[0].mu["b"][0]) for each in (before, after)] == [pytest.approx(0.1)] * 2
    assert float(after[0].nu["b"][0]) == float(before[0].nu["b"][0])
    assert float(after[0].mu["frozen"][0]) == float(after[0].nu["frozen"][0]) == 0.0
    assert float(after[0].mu["a"][0]) == pytest.approx(0.19)
    assert int(after[0].count) == 2  # belongs to no parameter


def test_missing_gradients_count_as_zero_in_a_norm_of_optax():
    model = {"a": jnp.array([0.0]), "b": jnp.array([0.0])}
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    run(rule, model, [{"a": jnp.array([5.0]), "b": None}])
    assert (float(model["a"][0]), float(model["b"][0])) == (pytest.approx(-1.0), 0.0)


def test_optax_may_have_some_of_the_parameters():
    model = {"a": jnp.array([1.0]), "b": jnp.array([1.0])}
    state, _ = run({"a": optax.sgd(0.5), "b": optim.Descent(0.25)}, model, [{"a": jnp.ones(1), "b": jnp.ones(1)}])
    assert (float(model["a"][0]), float(model["b"][0])) == (0.5, 0.75)
    assert len(state.shared) == 1


def test_optax_waits_while_gradients_accumulate():
    rule = optim.Chain(optim.AccumGrad(2), optax.adam(0.1))
    by_hand = optim.Chain(optim.AccumGrad(2), optim.Adam(0.1))
    grads = [{"w": jnp.array(g)} for g in ([1.0, 0.5], [-3.0, 0.25], [1.0, 1.0], [0.5, -4.0])]
    (_, theirs), (_, mine) = (run(each, {"w": jnp.array([1.0, 2.0])}, grads) for each in (rule, by_hand))
    np.testing.assert_allclose(theirs["w"], mine["w"], rtol=1e-5)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_optax_is_for_jax(make):
    with pytest.raises(optim.RuleError, match="a transformation of Optax's is for JAX arrays, and w is a"):
        cowalk.setup(optax.adam(0.1), {"w": make([1.0])})


# --- arrays of every kind ---

ELEMENTWISE = [
    optim.Descent(0.1),
    optim.Momentum(),
    optim.Nesterov(),
    optim.RMSProp(centred=True),
    optim.Rprop(),
    optim.AdamW(weight_decay=0.1),
    optim.RAdam(),
    optim.AdaMax(),
    optim.OAdam(),
    optim.NAdam(),
    optim.AdaGrad(),
    optim.AdaDelta(),
    optim.AMSGrad(),
    optim.AdaBelief(),
    optim.Lion(0.1),
    optim.Chain(optim.AccumGrad(2), optim.WeightDecay(), optim.SignDecay(), optim.ClipGrad(), optim.Adam()),
    optim.Chain(optim.Momentum(), optim.ClipNorm(0.01, over="tree"), optim.ClipNorm(0.01), optim.Muon()),
]
DTYPES = ["float16", "float32", "float64"]


@pytest.mark.parametrize("rule", ELEMENTWISE, ids=repr)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_parameters_and_states_keep_their_dtype(kind, rule):
    values, gradient = [[1.0, 2.0], [0.5, -1.0]], [[0.5, 0.25], [1.0, -1.0]]
    makes: dict[str, Any] = {
        "numpy": lambda x, dtype: np.array(x, dtype),
        "torch": lambda x, dtype: torch.tensor(x, dtype=getattr(torch, dtype)),
    }
    make = makes[kind]
    model = {dtype: make(values, dtype) for dtype in DTYPES}
    dtypes = {name: x.dtype for name, x in model.items()}
    # gradients of another dtype than the parameter's are taken too
    state, _ = run(rule, model, [{name: make(gradient, "float32") for name in model}] * 2)
    assert {name: x.dtype for name, x in model.items()} == dtypes
    for name in model:
        kept = [
            value for part in [state[name], *state[name].values()] if isinstance(part, dict) for value in part.values()
        ]
        assert {value.dtype for value in kept if hasattr(value, "dtype")} <= {dtypes[name]}
        assert (host(model[name]) != host(make(values, name))).any()


def test_parameters_and_states_of_jax_keep_their_dtype():
    model = {dtype: jnp.array([1.0, 2.0], dtype) for dtype in ("float16", "bfloat16", "float32")}
    rule = optim.Chain(
        optim.ClipNorm(1.0, over="tree"), optim.Adam(0.1), optim.Momentum(optax.linear_schedule(0.5, 0.1, 9))
    )
    state, _ = run(rule, model, [{name: jnp.array([0.5, 0.25]) for name in model}] * 2)
    for name, x in model.items():
        assert str(x.dtype) == str(state[name][1]["v"].dtype) == str(state[name][2]["momentum"].dtype) == name
        assert (host(x) != [1.0, 2.0]).all()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_adam_of_complex_numbers_has_the_mean_of_their_squared_sizes(make):
    g = np.array([3 + 4j, 0j, -1j])
    state, model = run(optim.Adam(0.5), {"w": make([1 + 1j, 2j, 0j])}, [{"w": make(g.tolist())}])
    assert not np.iscomplexobj(host(state["w"]["v"]))
    np.testing.assert_allclose(host(state["w"]["v"]), 0.001 * np.abs(g) ** 2, rtol=1e-5)
    np.testing.assert_allclose(host(model["w"]), [0.7 + 0.6j, 2j, 0.5j], atol=1e-5)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    "rule",
    [
        optim.Momentum(0.1),
        optim.RMSProp(0.1),
        optim.RMSProp(0.1, centred=True),
        optim.AdamW(0.1, weight_decay=0.1),
        optim.RAdam(0.1),
        optim.AdaMax(0.1),
        optim.OAdam(0.1),
        optim.NAdam(0.1),
        optim.AMSGrad(0.1),
        optim.AdaBelief(0.1),
        optim.AdaGrad(0.1),
        optim.AdaDelta(),
        optim.Lion(0.1),
        optim.SignDecay(0.1),
        optim.ClipNorm(0.5),
        optim.Muon(0.1),
    ],
    ids=repr,
)
def test_rules_turn_with_complex_numbers(kind, rule):
    """Numbers and gradients turned by one angle have steps turned by it: nothing looks at parts."""
    random, turn = np.random.default_rng(0), np.exp(0.7j)
    x, g = (random.normal(size=(2, 3)) + 1j * random.normal(size=(2, 3)) for _ in range(2))
    make = torch.tensor if kind == "torch" else np.array
    _, plain = run(rule, {"w": make(x)}, [{"w": make(g)}] * 2)
    _, turned = run(rule, {"w": make(turn * x)}, [{"w": make(turn * g)}] * 2)
    epsilon = 1e-6 if isinstance(rule, optim.AMSGrad) else 1e-9  # its first moment begins at ε
    np.testing.assert_allclose(host(turned["w"]), turn * host(plain["w"]), rtol=epsilon, atol=epsilon)


@pytest.mark.parametrize("rule", ELEMENTWISE, ids=repr)
def test_arrays_without_axes_and_without_elements_are_updated(rule):
    for make in (np.array, torch.tensor):
        shapes = {"number": 2.0, "empty": np.zeros(0), "one": [2.0]}
        grads = {"number": make(0.5), "empty": make(np.zeros(0)), "one": make([0.5])}
        _, model = run(rule, {name: make(x) for name, x in shapes.items()}, [grads] * 2)
        assert (tuple(model["number"].shape), tuple(model["empty"].shape)) == ((), (0,))
        assert 2.0 != float(model["number"]) == pytest.approx(float(model["one"][0]), rel=1e-6)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_matrices_without_elements_are_updated(shape, make):
    model = {"empty": make(np.zeros(shape, "float32")), "w": make([1.0])}
    rule = optim.Chain(optim.ClipNorm(1.0, over="tree"), optim.ClipNorm(1.0), optim.Muon(), optim.Adam(1.0))
    run(rule, model, [{"empty": make(np.zeros(shape, "float32")), "w": make([1.0])}])
    assert tuple(model["empty"].shape) == shape
    assert float(model["w"][0]) == pytest.approx(0.0, abs=1e-3)


LAYOUTS = {
    "small": lambda x: [x],
    "Fortran": lambda x: [np.asfortranarray(x)],
    "transposed": lambda x: [np.ascontiguousarray(x.T).T],
    "every second": lambda x: [np.repeat(x, 2, axis=1)[:, ::2]],
    "backwards": lambda x: [np.ascontiguousarray(x[::-1])[::-1]],
}


@pytest.mark.parametrize("block", [1, 4, 7, 1 << 18])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, each) for kind in ("numpy", "torch") for each in LAYOUTS if (kind, each) != ("torch", "backwards")],
)
def test_layout_and_blocks_make_no_difference(kind, layout, block, monkeypatch):
    random = np.random.default_rng(0)
    starts = {
        "large": random.normal(size=(5, 6)),
        "small": random.normal(size=(1, 3)),
        "next": random.normal(size=(2, 2)),
    }
    grads = [{name: random.normal(size=x.shape) for name, x in starts.items()} for _ in range(3)]
    rule = optim.Chain(
        optim.AccumGrad(1), optim.WeightDecay(0.1), optim.ClipNorm(1.0, over="tree"), optim.NAdam(0.1), optim.Rprop(0.1)
    )
    _, plain = run(rule, {name: x.copy() for name, x in starts.items()}, grads)

    monkeypatch.setattr(in_place, "BLOCK", block)

    def made(x: np.ndarray) -> Any:
        (x,) = LAYOUTS[layout](x.copy())
        return torch.from_numpy(x) if kind == "torch" else x

    model = {name: made(x) for name, x in starts.items()}
    memory = {
        name: (x.data_ptr(), x.stride()) if kind == "torch" else (x.ctypes.data, x.strides) for name, x in model.items()
    }
    run(rule, model, [{name: made(g) if t else g for name, g in each.items()} for t, each in enumerate(grads)])
    for name, x in model.items():
        np.testing.assert_allclose(host(x), plain[name], rtol=1e-12, atol=1e-12)
        assert memory[name] == ((x.data_ptr(), x.stride()) if kind == "torch" else (x.ctypes.data, x.strides))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_array_of_many_blocks_has_the_steps_of_its_pieces(kind):
    n = 2 * in_place.BLOCK + 3
    make = torch.from_numpy if kind == "torch" else np.asarray
    x, g = np.linspace(-1, 1, n), np.sin(np.arange(n))
    pieces = slice(0, 5), slice(in_place.BLOCK - 2, in_place.BLOCK + 2), slice(n - 5, n)
    _, large = run(optim.Adam(0.1), {"w": make(x.copy())}, [{"w": make(g)}] * 2)
    for piece in pieces:
        _, small = run(optim.Adam(0.1), {"w": make(x[piece].copy())}, [{"w": make(g[piece].copy())}] * 2)
        np.testing.assert_allclose(host(large["w"])[piece], host(small["w"]), rtol=1e-12)
    assert math.isfinite(host(large["w"]).sum())


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_norm_of_a_tree_may_be_clipped_by_a_schedule(make):
    model = {"a": make([0.0]), "b": make([0.0])}
    rule = optim.Chain(optim.ClipNorm(lambda step: 5.0 + 5.0 * step, over="tree"), optim.Descent(1.0))
    _, model = run(rule, model, [{"a": make([6.0]), "b": make([8.0])}] * 2)
    assert [float(x[0]) for x in model.values()] == pytest.approx([-9.0, -12.0])

"""Other settings of rules, and parameters that are frozen and thawed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import cowalk
from cowalk import optim


def two() -> dict[str, Any]:
    return {"encoder": {"w": np.ones(2), "b": np.ones(1)}, "head": {"w": np.ones(2)}}


def grads() -> dict[str, Any]:
    return {"encoder": {"w": np.full(2, 0.5), "b": np.full(1, 0.5)}, "head": {"w": np.full(2, 0.5)}}


def rates(state: optim.OptimizerState) -> dict[str, Any]:
    return {str(path): leaf.rule.lr for path, leaf in state.all_leaves()}


# --- which parameters ---


def test_without_a_pattern_every_rule_is_adjusted_and_the_old_state_keeps_its_own():
    state = cowalk.setup(optim.Adam(0.5), two())
    new = cowalk.adjust(state, lr=0.25, betas=(0.5, 0.5))
    assert set(rates(new).values()) == {0.25}
    assert new["head.w"].rule == optim.Adam(0.25, betas=(0.5, 0.5))
    assert set(rates(state).values()) == {0.5}


@pytest.mark.parametrize(
    ("where", "adjusted"),
    [
        ("encoder.*", {"encoder.w", "encoder.b"}),
        ("*.w", {"encoder.w", "head.w"}),
        ("head.w", {"head.w"}),
        ("encoder.?", {"encoder.w", "encoder.b"}),
        (lambda path: path[-1] == "b", {"encoder.b"}),
        (lambda path: len(path) == 2, {"encoder.w", "encoder.b", "head.w"}),
    ],
)
def test_a_pattern_or_a_function_of_the_path_chooses(where, adjusted):
    state = cowalk.setup(optim.Descent(0.5), two())
    assert {name for name, lr in rates(cowalk.adjust(state, where, lr=0.25)).items() if lr == 0.25} == adjusted
    frozen = cowalk.freeze(state, where)
    assert {str(path) for path, leaf in frozen.all_leaves() if leaf.frozen} == adjusted
    thawed = cowalk.thaw(cowalk.freeze(state), where)
    assert {str(path) for path, leaf in thawed.all_leaves() if not leaf.frozen} == adjusted
    assert not any(leaf.frozen for _, leaf in state.all_leaves())


@pytest.mark.parametrize("act", [lambda state, where: cowalk.adjust(state, where, lr=1), cowalk.freeze, cowalk.thaw])
def test_a_pattern_that_matches_nothing_is_an_error(act):
    state = cowalk.setup(optim.Descent(0.5), two())
    with pytest.raises(
        optim.RuleError, match=r"'decoder\.\*' matches none of the 3 parameters; the first is 'encoder\.w'"
    ):
        act(state, "decoder.*")
    with pytest.raises(optim.RuleError, match="matches none of the 3 parameters"):
        act(state, lambda path: False)


# --- which settings ---


def test_an_unknown_setting_is_an_error_that_names_the_nearest():
    state = cowalk.setup(optim.AdamW(0.5), two())
    with pytest.raises(optim.RuleError, match="no rule here has a setting 'weight_decy'; did you mean 'weight_decay'"):
        cowalk.adjust(state, lr=0.1, weight_decy=0.1)
    with pytest.raises(optim.RuleError, match="no rule here has a setting 'zzz'; there are lr, betas"):
        cowalk.adjust(state, zzz=1)
    with pytest.raises(optim.RuleError, match="did you mean 'momentum'"):
        cowalk.adjust(optim.Momentum(0.5), momentun=0.1)


def test_without_a_setting_there_is_nothing_to_adjust():
    with pytest.raises(optim.RuleError, match=r"settings by name: cowalk\.adjust\(state, lr=1e-4\)"):
        cowalk.adjust(cowalk.setup(optim.Descent(), two()))


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"lr": "fast"}, {"betas": (0.9, 1.0)}, {"epsilon": float("nan")}])
def test_a_value_that_a_setting_cannot_have_is_an_error_and_changes_nothing(settings):
    state = cowalk.setup(optim.Adam(0.5), two())
    with pytest.raises(optim.RuleError, match=next(iter(settings))):
        cowalk.adjust(state, **settings)
    assert set(rates(state).values()) == {0.5}


def test_a_learning_rate_may_become_a_schedule():
    model = {"w": np.zeros(1)}
    state = cowalk.adjust(cowalk.setup(optim.Descent(1.0), model), lr=lambda step: 10.0**-step)
    for _ in range(3):
        cowalk.update_(state, model, {"w": np.ones(1)})
    assert model["w"].tolist() == pytest.approx([-1.11])


# --- which rules ---


def test_a_rule_by_itself_is_adjusted_into_a_new_one():
    rule = optim.Momentum(0.5, momentum=0.9)
    assert cowalk.adjust(rule, lr=0.25) == optim.Momentum(0.25, momentum=0.9)
    assert rule.lr == 0.5


def test_in_a_chain_every_rule_takes_the_settings_that_it_has():
    chain = optim.Chain(optim.ClipNorm(1.0), optim.WeightDecay(0.1), optim.AdamW(0.5, weight_decay=0.2))
    new = cowalk.adjust(chain, lr=0.25, max_norm=2.0)
    assert new == optim.Chain(optim.ClipNorm(2.0), optim.WeightDecay(0.1), optim.AdamW(0.25, weight_decay=0.2))
    assert cowalk.adjust(chain, weight_decay=0.0).stages[1:] == (optim.WeightDecay(0.0), optim.AdamW(0.5))
    state = cowalk.adjust(cowalk.setup(chain, two()), "head.*", lr=0.25, max_norm=2.0)
    assert state["head.w"].rule == new
    assert state["encoder.w"].rule == chain
    with pytest.raises(optim.RuleError, match="did you mean 'max_norm'"):
        cowalk.adjust(state, max_nrm=1.0)


def test_the_rule_inside_mixed_precision_is_adjusted():
    model = {"w": np.ones(1, "float16")}
    state = cowalk.setup(optim.MixedPrecision(optim.Chain(optim.ClipGrad(1.0), optim.Descent(1.0))), model)
    state = cowalk.adjust(state, lr=0.25)
    cowalk.update_(state, model, {"w": np.ones(1, "float16")})
    assert model["w"].tolist() == [0.75]


def test_rules_that_differ_by_path_take_those_that_they_have():
    model = two()
    state = cowalk.setup({"*.b": optim.Descent(0.5), "*": optim.Momentum(0.5, momentum=0.9)}, model)
    new = cowalk.adjust(state, momentum=0.0)
    assert new["encoder.b"].rule == optim.Descent(0.5)
    assert new["encoder.w"].rule == new["head.w"].rule == optim.Momentum(0.5, momentum=0.0)
    assert set(rates(cowalk.adjust(state, lr=0.1)).values()) == {0.1}
    with pytest.raises(optim.RuleError, match="no rule here has a setting 'momentum'"):
        cowalk.adjust(state, "*.b", momentum=0.0)  # some other rule has it, none of the chosen


def test_rules_by_path_are_adjusted_before_they_are_set_up():
    rules = {"*.b": optim.Descent(0.5), "*": optim.Momentum(0.5)}
    adjusted = cowalk.adjust(optim.Chain(rules), lr=0.25)
    assert set(rates_of_chains(cowalk.setup(adjusted, two()))) == {0.25}


def rates_of_chains(state):
    return [leaf.rule.rules[0].lr for _, leaf in state.all_leaves()]


def test_adjusted_parameters_with_one_rule_are_still_updated_together():
    state = cowalk.adjust(cowalk.setup(optim.Descent(0.5), two()), lr=0.25)
    assert len({id(leaf.rule) for _, leaf in state.all_leaves()}) == 1


# --- states ---


@pytest.mark.parametrize(
    "model",
    [
        lambda: two(),
        lambda: [np.ones(2), (np.ones(1),)],
        lambda: {0: np.ones(1), "a.b": {"c": np.ones(2)}},
        lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        lambda: {"w": jnp.ones(2)},
    ],
    ids=["dicts", "lists", "odd keys", "torch", "JAX"],
)
def test_the_arrays_of_a_state_stay_the_same_objects(model):
    model = model()
    state = cowalk.setup(optim.Adam(0.5), model)
    for new in (cowalk.adjust(state, lr=0.25), cowalk.freeze(state), cowalk.thaw(cowalk.freeze(state))):
        pairs = list(zip(state.all_leaves(), new.all_leaves(), strict=True))
        assert pairs
        for (path, old), (new_path, leaf) in pairs:
            assert path == new_path
            assert leaf is not old
            assert (leaf["m"] is old["m"], leaf["v"] is old["v"], leaf["step"]) == (True, True, old["step"])


def test_steps_and_moments_go_on_under_the_new_settings():
    model = {"w": np.zeros(1)}
    state = cowalk.setup(optim.Momentum(1.0, momentum=0.5), model)
    cowalk.update_(state, model, {"w": np.ones(1)})
    state = cowalk.adjust(state, lr=0.25)
    cowalk.update_(state, model, {"w": np.ones(1)})
    assert state.step == 2
    assert model["w"].tolist() == [-1.75]  # 1, and then 0.5 · 1 + 0.25


def test_a_frozen_parameter_stands_still_and_thawed_goes_on_where_it_was():
    model, other = two(), two()
    rule = optim.Adam(0.5)
    state, plain = cowalk.setup(rule, model), cowalk.setup(rule, other)
    cowalk.update_(state, model, grads())
    cowalk.update_(plain, other, grads())
    frozen = cowalk.freeze(state, "encoder.*")
    before = model["encoder"]["w"].copy()
    for _ in range(3):
        cowalk.update_(frozen, model, grads())
    assert model["encoder"]["w"].tolist() == before.tolist()
    assert (frozen["encoder.w"]["step"], frozen["head.w"]["step"]) == (1, 4)
    thawed = cowalk.thaw(frozen)
    cowalk.update_(thawed, model, grads())
    cowalk.update_(plain, other, grads())
    assert model["encoder"]["w"].tolist() == other["encoder"]["w"].tolist()


def test_adjusting_keeps_parameters_frozen_and_freezing_keeps_settings():
    state = cowalk.adjust(cowalk.freeze(cowalk.setup(optim.Descent(0.5), two()), "head.*"), lr=0.25)
    assert state["head.w"].frozen
    assert not state["encoder.w"].frozen
    assert cowalk.thaw(state)["head.w"].rule == optim.Descent(0.25)


def test_a_frozen_tied_parameter_is_frozen_under_all_its_paths():
    model = nn.ModuleDict({"emb": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["emb"].weight
    before = model["emb"].weight.detach().clone()
    state = cowalk.freeze(cowalk.setup(optim.Descent(1.0), model), "emb.weight")
    cowalk.update_(state, model, {"emb": {"weight": None}, "head": {"weight": torch.ones(3, 2)}})
    assert model["head"].weight.equal(before)


@pytest.mark.parametrize("model", [nn.Linear(1, 1), {"w": np.ones(1)}, np.ones(1), 3], ids=lambda x: type(x).__name__)
def test_a_model_is_no_state_to_freeze_or_adjust(model):
    name = type(model).__name__
    with pytest.raises(optim.RuleError, match=rf"freeze takes a state from cowalk\.setup, not a {name}"):
        cowalk.freeze(model)
    with pytest.raises(optim.RuleError, match=rf"thaw takes a state from cowalk\.setup, not a {name}"):
        cowalk.thaw(model)
    with pytest.raises(optim.RuleError, match=rf"adjust takes a state from cowalk\.setup, not a {name}"):
        cowalk.adjust(model, lr=0.1)


def test_a_rule_is_nothing_to_freeze():
    with pytest.raises(optim.RuleError, match="freeze takes a state"):
        cowalk.freeze(optim.Adam())


def test_a_rule_by_itself_takes_no_pattern():
    with pytest.raises(optim.RuleError, match="pattern"):
        cowalk.adjust(optim.Adam(), "encoder.*", lr=0.1)

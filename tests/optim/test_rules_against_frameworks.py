"""Rules beside the optimizers of torch and Optax, in float64, with the same settings and gradients.

What has no counterpart: torch and Optax debias AMSGrad, which its paper does not; Optax's rprop makes the step before; nobody
has the uncoupled AdamW and SignDecay, and torch no OAdam, Lion and AdaBelief. They are held against formulas in `test_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch

import cowalk
from cowalk import optim

STEPS = 7
SHAPES = {"w": (3, 2), "b": (4,)}
START = {name: np.random.default_rng(0).normal(size=shape) for name, shape in SHAPES.items()}
GRADIENTS = [{name: np.random.default_rng(t).normal(size=shape) for name, shape in SHAPES.items()} for t in range(1, 8)]


def host(x: Any) -> np.ndarray:
    """The values of any array, in an array of their own."""
    return np.array(x.numpy(force=True) if isinstance(x, torch.Tensor) else x)


pytestmark = pytest.mark.usefixtures("quick_compiling")


def ours(rule: Any, start: dict[str, np.ndarray] = START, kind: Any = np.array) -> list[dict[str, np.ndarray]]:
    """The parameters after each step."""
    model = {name: kind(x) for name, x in start.items()}
    state = cowalk.setup(rule, model)
    after = []
    for grads in GRADIENTS:
        cowalk.update_(state, model, {name: kind(grads[name]) for name in model})
        after.append({name: host(x) for name, x in model.items()})
    return after


def torch_s(optimizer: Any, start: dict[str, np.ndarray] = START, **settings: Any) -> list[dict[str, np.ndarray]]:
    """The parameters after each step of an optimizer of torch's."""
    model = {name: torch.tensor(x, requires_grad=True) for name, x in start.items()}
    stepping = optimizer(model.values(), **settings)
    after = []
    for grads in GRADIENTS:
        for name, x in model.items():
            x.grad = torch.tensor(grads[name])
        stepping.step()
        after.append({name: host(x) for name, x in model.items()})
    return after


def optax_s(transformation: Any) -> list[dict[str, np.ndarray]]:
    """The parameters after each step of a transformation of Optax's."""
    with jax.enable_x64(True):
        model = {name: jnp.array(x) for name, x in START.items()}
        state, update, after = transformation.init(model), jax.jit(transformation.update), []
        for grads in GRADIENTS:
            updates, state = update(jax.tree.map(jnp.array, grads), state, model)
            model = optax.apply_updates(model, updates)
            after.append({name: np.array(x) for name, x in model.items()})
    return after


def assert_alike(one: Sequence[Any], other: Sequence[Any], tolerance: float = 1e-9) -> None:
    assert len(one) == len(other) == STEPS
    for t, (a, b) in enumerate(zip(one, other, strict=True), 1):
        for name in a:
            assert a[name].dtype == b[name].dtype == np.float64
            np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance, err_msg=f"{name} after {t}")


# --- torch ---

BETAS = (0.8, 0.95)
BESIDE_TORCH = {
    "SGD": (optim.Descent(0.1), torch.optim.SGD, {"lr": 0.1}),
    "SGD with weight decay": (
        optim.Chain(optim.WeightDecay(0.3), optim.Descent(0.1)),
        torch.optim.SGD,
        {"lr": 0.1, "weight_decay": 0.3},
    ),
    "SGD with momentum": (optim.Momentum(0.1, 0.8), torch.optim.SGD, {"lr": 0.1, "momentum": 0.8}),
    "SGD with Nesterov's momentum": (
        optim.Nesterov(0.1, 0.8),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.8, "nesterov": True},
    ),
    "RMSprop": (optim.RMSProp(0.1, 0.8, 1e-4), torch.optim.RMSprop, {"lr": 0.1, "alpha": 0.8, "eps": 1e-4}),
    "RMSprop, centred": (
        optim.RMSProp(0.1, 0.8, 1e-4, centred=True),
        torch.optim.RMSprop,
        {"lr": 0.1, "alpha": 0.8, "eps": 1e-4, "centered": True},
    ),
    "Rprop": (
        optim.Rprop(0.1, (0.4, 1.5), (0.03, 0.2)),
        torch.optim.Rprop,
        {"lr": 0.1, "etas": (0.4, 1.5), "step_sizes": (0.03, 0.2)},
    ),
    "Adam": (optim.Adam(0.1, BETAS, 1e-3), torch.optim.Adam, {"lr": 0.1, "betas": BETAS, "eps": 1e-3}),
    "Adam with an L2 penalty": (
        optim.Chain(optim.WeightDecay(0.3), optim.Adam(0.1, BETAS)),
        torch.optim.Adam,
        {"lr": 0.1, "betas": BETAS, "weight_decay": 0.3},
    ),
    "AdamW": (
        optim.AdamW(0.1, BETAS, weight_decay=0.3),
        torch.optim.AdamW,
        {"lr": 0.1, "betas": BETAS, "weight_decay": 0.3},
    ),
    # torch adds its ε to |g| in the maximum, and not to u: it is too small to be seen here
    "Adamax": (optim.AdaMax(0.1, BETAS, 1e-12), torch.optim.Adamax, {"lr": 0.1, "betas": BETAS, "eps": 1e-12}),
    "Adagrad": (
        optim.AdaGrad(0.1, 1e-3),
        torch.optim.Adagrad,
        {"lr": 0.1, "eps": 1e-3, "initial_accumulator_value": 1e-3},
    ),
    "Adadelta": (optim.AdaDelta(0.8, 1e-3), torch.optim.Adadelta, {"lr": 1.0, "rho": 0.8, "eps": 1e-3}),
}


@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", BESIDE_TORCH)
def test_a_rule_makes_the_steps_of_torch(name, kind):
    rule, optimizer, settings = BESIDE_TORCH[name]
    assert_alike(ours(rule, kind=kind), torch_s(optimizer, **settings))


def test_nadam_makes_the_steps_of_torch_but_for_its_schedule_of_beta1():
    # ours has β₂ in v̂, which torch leaves out: √β₂ comes out of the root, into the learning rate and ε. The schedule is over
    # at once; torch keeps the product of its values in float32
    root = math.sqrt(BETAS[1])
    settings = {"lr": 0.1 / root, "betas": BETAS, "eps": 1e-3 / root, "momentum_decay": 1e9}
    assert_alike(ours(optim.NAdam(0.1, BETAS, 1e-3)), torch_s(torch.optim.NAdam, **settings), 1e-6)


def test_radam_makes_the_steps_of_torch_except_where_rho_is_from_4_to_5():
    mine, theirs = ours(optim.RAdam(0.1)), torch_s(torch.optim.RAdam, lr=0.1)
    for name, start in START.items():
        steps, others = (np.diff([start, *(each[name] for each in run)], axis=0) for run in (mine, theirs))
        alike = [bool(np.allclose(a, b, rtol=1e-9, atol=1e-9)) for a, b in zip(steps, others, strict=True)]
        assert alike == [True, True, True, True, False, True, True]  # ρ is 4.99… in the fifth


@pytest.mark.parametrize("is_nesterov", [True, False])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (4, 4)])
def test_muon_makes_the_steps_of_torch_which_iterates_in_bfloat16(shape, is_nesterov):
    random = np.random.default_rng(1)
    start, grads = random.normal(size=shape), [random.normal(size=shape) for _ in range(4)]
    model, theirs = {"w": start.copy()}, torch.tensor(start, requires_grad=True)
    state = cowalk.setup(optim.Muon(0.1, 0.9, 0.5, nesterov=is_nesterov), model)
    optimizer = torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.5, nesterov=is_nesterov)
    for g in grads:
        before = model["w"].copy()
        cowalk.update_(state, model, {"w": g})
        theirs.grad = torch.tensor(g)
        with torch.no_grad():
            theirs.copy_(torch.tensor(before))
        optimizer.step()
        # bfloat16 has eight bits; the iteration of steep slopes makes of its rounding up to some hundredths of the step
        np.testing.assert_allclose(model["w"] - before, host(theirs) - before, atol=0.1 * 0.05)


# --- Optax ---

BESIDE_OPTAX = {
    "sgd": (optim.Descent(0.1), optax.sgd(0.1)),
    "sgd with momentum": (optim.Momentum(0.1, 0.8), optax.sgd(0.1, 0.8)),
    "sgd with Nesterov's momentum": (optim.Nesterov(0.1, 0.8), optax.sgd(0.1, 0.8, nesterov=True)),
    "adam": (optim.Adam(0.1, BETAS, 1e-3), optax.adam(0.1, *BETAS, eps=1e-3)),
    "adamw": (optim.AdamW(0.1, BETAS, weight_decay=0.3), optax.adamw(0.1, *BETAS, weight_decay=0.3)),
    "rmsprop": (optim.RMSProp(0.1, 0.8, 1e-3), optax.rmsprop(0.1, 0.8, eps=1e-3, eps_in_sqrt=False)),
    "rmsprop, centred": (
        optim.RMSProp(0.1, 0.8, 1e-3, centred=True),
        optax.rmsprop(0.1, 0.8, eps=1e-3, eps_in_sqrt=False, centered=True),
    ),
    "radam": (optim.RAdam(0.1), optax.radam(0.1, threshold=4.0)),
    "adabelief": (optim.AdaBelief(0.1, BETAS, 1e-6), optax.adabelief(0.1, *BETAS, eps=1e-6, eps_root=1e-6)),
    "lion": (optim.Lion(0.1), optax.lion(0.1, weight_decay=0.0)),
    "adamax": (optim.AdaMax(0.1, BETAS, 1e-12), optax.adamax(0.1, *BETAS, eps=1e-12)),
    # Optax's ε is in the root here, and ours is beside it: it is too small to be seen
    "adagrad": (optim.AdaGrad(0.1, 1e-12), optax.adagrad(0.1, initial_accumulator_value=1e-12, eps=1e-12)),
    "adadelta": (optim.AdaDelta(0.8, 1e-3), optax.adadelta(1.0, 0.8, eps=1e-3)),
    # as for torch's: √β₂ is in the learning rate and in ε
    "nadam": (
        optim.NAdam(0.1, BETAS, 1e-3),
        optax.nadam(0.1 / math.sqrt(BETAS[1]), *BETAS, eps=1e-3 / math.sqrt(BETAS[1])),
    ),
    "clip": (optim.Chain(optim.ClipGrad(0.5), optim.Descent(0.1)), optax.chain(optax.clip(0.5), optax.sgd(0.1))),
    "clip_by_global_norm": (
        optim.Chain(optim.ClipNorm(0.5, over="tree"), optim.Adam(0.1)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    ),
}


@pytest.mark.parametrize("name", BESIDE_OPTAX)
def test_a_rule_makes_the_steps_of_optax(name):
    rule, transformation = BESIDE_OPTAX[name]
    assert_alike(ours(rule), optax_s(transformation))


def test_accumulated_gradients_make_the_steps_of_optax_which_averages_in_float32():
    rule = optim.Chain(optim.AccumGrad(3), optim.Adam(0.1))
    assert_alike(ours(rule), optax_s(optax.MultiSteps(optax.adam(0.1), 3)), 1e-6)


def test_optimistic_adam_makes_the_steps_of_optax_but_for_the_first():
    # the update before the first is zero, as in the paper, and in Optax the first itself
    mine = ours(optim.OAdam(0.1, BETAS))
    theirs = optax_s(optax.optimistic_adam_v2(0.1, b1=BETAS[0], b2=BETAS[1], nesterov=False))
    for name, start in START.items():
        steps, others = (np.diff([start, *(each[name] for each in run)], axis=0) for run in (mine, theirs))
        np.testing.assert_allclose(steps[0], 2 * others[0], rtol=1e-9)
        np.testing.assert_allclose(steps[1:], others[1:], rtol=1e-9, atol=1e-9)


def test_muon_makes_the_steps_of_optax_but_for_nesterov_s_momentum():
    # the parts of which Optax debiases apart; that of the one alone is lost in the iteration. Optax takes a matrix for
    # (inputs, outputs) unless it is told, and its ε is a tenth of ours
    rule = optim.Muon(0.1, 0.8, 0.3, nesterov=False, fallback=optim.AdamW(0.1, BETAS, weight_decay=0.2))
    theirs = optax.contrib.muon(
        0.1,
        beta=0.8,
        weight_decay=0.3,
        nesterov=False,
        adam_b1=BETAS[0],
        adam_b2=BETAS[1],
        adam_weight_decay=0.2,
        muon_weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers(1, 0), "b": None},
    )
    assert_alike(ours(rule), optax_s(theirs), 1e-6)

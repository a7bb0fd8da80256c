"""Every rule against its formula, written out here once more in NumPy and float64; and the settings that rules refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import cowalk
from cowalk import optim

Kept = dict[str, Any]


pytestmark = pytest.mark.usefixtures("quick_compiling")


def host(x: Any) -> np.ndarray:
    """The values of any array, in an array of their own."""
    return np.array(x.numpy(force=True) if isinstance(x, torch.Tensor) else x)


# --- the formulas: the step of an array x with gradient g at its t-th update, from 1; `kept` is empty before the first ---


def descent(lr):
    return lambda x, g, kept, t: lr * g


def momentum(lr, rho):
    def step(x, g, kept, t):
        kept["v"] = rho * kept.get("v", 0.0) + lr * g
        return kept["v"]

    return step


def nesterov(lr, rho):
    def step(x, g, kept, t):
        old = kept.get("v", 0.0)
        kept["v"] = rho * old - lr * g
        return -(rho**2) * old + (1 + rho) * lr * g

    return step


def rmsprop(lr, rho, epsilon, centred=False):
    def step(x, g, kept, t):
        q = kept["q"] = rho * kept.get("q", 0.0) + (1 - rho) * g**2
        m = kept["m"] = rho * kept.get("m", 0.0) + (1 - rho) * g
        return lr * g / (np.sqrt(q - m**2 if centred else q) + epsilon)

    return step


def rprop(lr, factors, sizes):
    def one(g, before, size):
        if g * before > 0:
            size = min(size * factors[1], sizes[1])
        elif g * before < 0:
            size, g = max(size * factors[0], sizes[0]), 0.0
        return g, size

    def step(x, g, kept, t):
        before, size = kept.get("g", np.zeros_like(x)), kept.get("size", np.full_like(x, lr))
        new = [one(*each) for each in zip(g.flat, before.flat, size.flat, strict=True)]
        kept["g"], kept["size"] = (np.reshape(each, x.shape) for each in zip(*new, strict=True))
        return kept["size"] * np.sign(kept["g"])

    return step


def means(g, kept, betas):
    """m and v, both from zero."""
    kept["m"] = betas[0] * kept.get("m", 0.0) + (1 - betas[0]) * g
    kept["v"] = betas[1] * kept.get("v", 0.0) + (1 - betas[1]) * g**2
    return kept["m"], kept["v"]


def adam(lr, betas, epsilon=1e-8):
    def step(x, g, kept, t):
        m, v = means(g, kept, betas)
        return lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + epsilon)

    return step


def adamw(lr, betas, decay, couple):
    plain = adam(1.0, betas)
    return lambda x, g, kept, t: lr * plain(x, g, kept, t) + (lr if couple else 1) * decay * x


def radam(lr, betas, epsilon=1e-8):
    beta1, beta2 = betas
    limit = 2 / (1 - beta2) - 1

    def step(x, g, kept, t):
        m, v = means(g, kept, betas)
        rho = limit - 2 * t * beta2**t / (1 - beta2**t)
        if rho <= 4:
            return lr * m / (1 - beta1**t)
        factor = math.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))
        return lr * factor * m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + epsilon)

    return step


def adamax(lr, betas, epsilon=1e-8):
    def step(x, g, kept, t):
        m, _ = means(g, kept, betas)
        u = kept["u"] = np.maximum(betas[1] * kept.get("u", 0.0), np.abs(g))
        return lr / (1 - betas[0] ** t) * m / (u + epsilon)

    return step


def oadam(lr, betas):
    plain = adam(lr, betas)

    def step(x, g, kept, t):
        before, kept["term"] = kept.get("term", 0.0), plain(x, g, kept, t)
        return 2 * kept["term"] - before

    return step


def nadam(lr, betas, epsilon=1e-8):
    beta1, beta2 = betas

    def step(x, g, kept, t):
        m, v = means(g, kept, betas)
        ahead = beta1 * m / (1 - beta1 * beta1**t) + (1 - beta1) * g / (1 - beta1**t)
        return lr * ahead / (np.sqrt(v * beta2 / (1 - beta2**t)) + epsilon)

    return step


def amsgrad(lr, betas, epsilon):
    def step(x, g, kept, t):
        kept["m"] = betas[0] * kept.get("m", epsilon) + (1 - betas[0]) * g
        kept["v"] = betas[1] * kept.get("v", epsilon) + (1 - betas[1]) * g**2
        kept["most"] = np.maximum(kept.get("most", epsilon), kept["v"])
        return lr * kept["m"] / (np.sqrt(kept["most"]) + epsilon)

    return step


def adabelief(lr, betas, epsilon):
    def step(x, g, kept, t):
        m = kept["m"] = betas[0] * kept.get("m", 0.0) + (1 - betas[0]) * g
        s = kept["s"] = betas[1] * kept.get("s", 0.0) + (1 - betas[1]) * (g - m) ** 2 + epsilon
        return lr * m / (1 - betas[0] ** t) / (np.sqrt(s / (1 - betas[1] ** t)) + epsilon)

    return step


def adagrad(lr, epsilon):
    def step(x, g, kept, t):
        q = kept["q"] = kept.get("q", epsilon) + g**2
        return lr * g / (np.sqrt(q) + epsilon)

    return step


def adadelta(rho, epsilon):
    def step(x, g, kept, t):
        q = kept["q"] = rho * kept.get("q", 0.0) + (1 - rho) * g**2
        s = g * np.sqrt(kept.get("d", 0.0) + epsilon) / np.sqrt(q + epsilon)
        kept["d"] = rho * kept.get("d", 0.0) + (1 - rho) * s**2
        return s

    return step


def lion(lr, betas):
    def step(x, g, kept, t):
        m = kept.get("m", 0.0)
        kept["m"] = betas[1] * m + (1 - betas[1]) * g
        return lr * np.sign(betas[0] * m + (1 - betas[0]) * g)

    return step


def scaled(g, size, limit):
    return g * min(limit / size, 1.0) if size else g


def clip_norm(limit, p=2.0):
    return lambda x, g, kept, t: scaled(g, np.linalg.norm(g.ravel(), p), limit)


def clip_tree(limit, p=2.0):
    """Of the gradients of all parameters together."""

    def clip(grads):
        size = np.linalg.norm(np.concatenate([g.ravel() for g in grads.values()]), p)
        return {name: scaled(g, size, limit) for name, g in grads.items()}

    return clip


def after_accumulating(n, inner):
    """The rule gets the mean of n gradients, and counts the means."""

    def step(x, g, kept, t):
        seen = kept.setdefault("seen", [])
        seen.append(g)
        if len(seen) < n:
            return np.zeros_like(x)
        mean, kept["seen"] = sum(seen) / n, []
        kept["count"] = kept.get("count", 0) + 1
        return inner(x, mean, kept, kept["count"])

    return step


def muon(lr, rho, decay, is_nesterov, fallback):
    """The iteration changes singular values only, so that it may be done on them alone."""

    def orthogonal(matrix):
        left, sizes, right = np.linalg.svd(matrix, full_matrices=False)
        sizes = sizes / (math.sqrt((sizes**2).sum()) + 1e-7)
        for _ in range(5):
            sizes = 3.4445 * sizes - 4.7750 * sizes**3 + 2.0315 * sizes**5
        return left @ np.diag(sizes) @ right

    def step(x, g, kept, t):
        if x.ndim < 2:
            return fallback(x, g, kept, t)
        m = kept["m"] = rho * kept.get("m", 0.0) + (1 - rho) * g
        matrix = (rho * m + (1 - rho) * g if is_nesterov else m).reshape(len(x), -1)
        rows, columns = matrix.shape
        return lr * (math.sqrt(max(1, rows / columns)) * orthogonal(matrix).reshape(x.shape) + decay * x)

    return step


# --- the model: a plain parameter, a tied one, one without a gradient in the second step, a frozen one ---

STARTS = {
    "plain": np.array([[0.5, -1.0], [2.0, 0.25], [-0.75, 1.5]]),
    "tied": np.array([[[1.0], [-2.0], [0.0]], [[3.0], [0.5], [-0.5]]]),
    "late": np.array([-1.0, 0.0, 2.0, 4.0]),
    "frozen": np.array([1.0, -3.0]),
}
FIRST_OF_TIED = 0.25
"""The part of a tied parameter's gradient that comes by its first position."""


def gradients_at(t: int) -> dict[str, np.ndarray]:
    """Gradients that turn their signs here and there; one element has none at all, one has none at the second update."""
    random = np.random.default_rng(t)
    grads = {name: random.normal(size=x.shape) * (0.05 if t == 1 else 1.0) for name, x in STARTS.items()}
    grads["plain"][0, 0] = 0.0
    grads["plain"][1, 1] *= t != 2
    if t == 2:
        del grads["late"]
    return grads


def expected(formula: Callable[..., Any], over_tree: Callable[..., Any] | None, steps: int) -> Iterator[dict[str, Any]]:
    """The parameters after each step."""
    xs, kept, counts = dict(STARTS), {name: Kept() for name in STARTS}, dict.fromkeys(STARTS, 0)
    for t in range(1, steps + 1):
        grads = {name: g for name, g in gradients_at(t).items() if name != "frozen"}
        for name, g in (over_tree(grads) if over_tree else grads).items():
            counts[name] += 1
            xs[name] = xs[name] - formula(xs[name], g, kept[name], counts[name])
        yield dict(xs)


def numpy_model() -> Any:
    tied = STARTS["tied"].copy()
    return {name: x.copy() for name, x in STARTS.items()} | {"tied": tied, "again": tied}


class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        for name, x in STARTS.items():
            setattr(self, name, nn.Parameter(torch.tensor(x)))
        self.again = self.tied


class NnxModel(nnx.Module):
    """Plain trees of JAX arrays have no ties, NNX has."""

    def __init__(self):
        for name, x in STARTS.items():
            setattr(self, name, nnx.Param(jnp.array(x)))
        self.again = self.tied


def numpy_gradients(t: int) -> Any:
    """With a part of the tied gradient at each position."""
    grads = gradients_at(t)
    parts = {"tied": FIRST_OF_TIED * grads["tied"], "again": (1 - FIRST_OF_TIED) * grads["tied"]}
    return {"late": None} | grads | parts


def whole_gradients(make: Callable[[Any], Any]) -> Callable[[int], Any]:
    """With the whole of the tied gradient at each position."""

    def at(t: int) -> Any:
        grads = {name: make(g) for name, g in gradients_at(t).items()}
        return {"late": None, "again": grads["tied"]} | grads

    return at


class Framework(NamedTuple):
    model: Callable[[], Any]
    gradients: Callable[[int], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def float64_in_jax() -> AbstractContextManager[Any]:
    return jax.enable_x64(True)


FRAMEWORKS = {
    "numpy": Framework(numpy_model, numpy_gradients),
    "torch": Framework(TorchModel, whole_gradients(torch.tensor)),
    "jax": Framework(NnxModel, whole_gradients(jnp.array), float64_in_jax),
}


def functional_update(state: Any, model: Any, gradients: Any) -> tuple[Any, Any]:
    return cowalk.update(state, model, gradients)


def update_in_place(state: Any, model: Any, gradients: Any) -> tuple[Any, Any]:
    return state, cowalk.update_(state, model, gradients)


# --- every rule ---


class Case(NamedTuple):
    rule: Any
    formula: Callable[..., Any]
    over_tree: Callable[..., Any] | None = None
    steps: int = 3


BETAS = (0.8, 0.95)
CASES = {
    "Descent": Case(optim.Descent(0.3), descent(0.3)),
    "Momentum": Case(optim.Momentum(0.2, 0.7), momentum(0.2, 0.7)),
    "Nesterov": Case(optim.Nesterov(0.2, 0.7), nesterov(0.2, 0.7)),
    "RMSProp": Case(optim.RMSProp(0.1, 0.8, 1e-6), rmsprop(0.1, 0.8, 1e-6)),
    "RMSProp centred": Case(optim.RMSProp(0.1, 0.8, 1e-3, centred=True), rmsprop(0.1, 0.8, 1e-3, centred=True)),
    "Rprop": Case(optim.Rprop(0.1), rprop(0.1, (0.5, 1.2), (1e-6, 50.0)), steps=4),
    "Rprop at its limits": Case(
        optim.Rprop(0.1, (0.25, 3.0), (0.04, 0.2)), rprop(0.1, (0.25, 3.0), (0.04, 0.2)), steps=5
    ),
    "Adam": Case(optim.Adam(0.1, BETAS), adam(0.1, BETAS)),
    "Adam with a large epsilon": Case(optim.Adam(0.1, BETAS, 0.1), adam(0.1, BETAS, 0.1)),
    "AdamW": Case(optim.AdamW(0.1, BETAS, weight_decay=0.2), adamw(0.1, BETAS, 0.2, couple=True)),
    "AdamW not coupled": Case(
        optim.AdamW(0.1, BETAS, weight_decay=0.2, couple=False), adamw(0.1, BETAS, 0.2, couple=False)
    ),
    "RAdam": Case(optim.RAdam(0.1), radam(0.1, (0.9, 0.999)), steps=8),
    "AdaMax": Case(optim.AdaMax(0.1, BETAS), adamax(0.1, BETAS)),
    "OAdam": Case(optim.OAdam(0.1), oadam(0.1, (0.5, 0.9))),
    "NAdam": Case(optim.NAdam(0.1, BETAS), nadam(0.1, BETAS)),
    "AdaGrad": Case(optim.AdaGrad(0.1, 0.01), adagrad(0.1, 0.01)),
    "AdaDelta": Case(optim.AdaDelta(0.8, 1e-3), adadelta(0.8, 1e-3)),
    "AMSGrad": Case(optim.AMSGrad(0.1, BETAS, 1e-3), amsgrad(0.1, BETAS, 1e-3)),
    "AdaBelief": Case(optim.AdaBelief(0.1, BETAS, 1e-3), adabelief(0.1, BETAS, 1e-3)),
    "Lion": Case(optim.Lion(0.1), lion(0.1, (0.9, 0.99))),
    "WeightDecay": Case(optim.WeightDecay(0.1), lambda x, g, kept, t: g + 0.1 * x),
    "SignDecay": Case(optim.SignDecay(0.1), lambda x, g, kept, t: g + 0.1 * np.sign(x)),
    "ClipGrad": Case(optim.ClipGrad(0.5), lambda x, g, kept, t: np.minimum(np.maximum(g, -0.5), 0.5)),
    "ClipNorm": Case(optim.ClipNorm(0.5), clip_norm(0.5)),
    "ClipNorm of absolute values": Case(optim.ClipNorm(0.5, p=1), clip_norm(0.5, 1)),
    "ClipNorm of the largest": Case(optim.ClipNorm(0.5, p=math.inf), clip_norm(0.5, math.inf)),
    "ClipNorm over the tree": Case(optim.ClipNorm(1.0, over="tree"), descent(1.0), clip_tree(1.0)),
    "ClipNorm over the tree, p = 3": Case(optim.ClipNorm(1.0, 3.0, "tree"), descent(1.0), clip_tree(1.0, 3.0)),
    "Chain": Case(
        optim.Chain(optim.ClipNorm(1.0, over="tree"), optim.WeightDecay(0.1), optim.Momentum(0.2, 0.7)),
        lambda x, g, kept, t: momentum(0.2, 0.7)(x, g + 0.1 * x, kept, t),
        clip_tree(1.0),
    ),
    "Chain of nothing": Case(optim.Chain(), descent(1.0)),
    "AccumGrad": Case(
        optim.Chain(optim.AccumGrad(2), optim.Adam(0.1, BETAS)), after_accumulating(2, adam(0.1, BETAS)), steps=5
    ),
    "MixedPrecision": Case(optim.MixedPrecision(optim.Adam(0.1, BETAS), "float64"), adam(0.1, BETAS)),
    "Muon": Case(
        optim.Muon(0.1, 0.8, 0.2, fallback=optim.Adam(0.1, BETAS)), muon(0.1, 0.8, 0.2, True, adam(0.1, BETAS))
    ),
    "Muon without Nesterov": Case(
        optim.Muon(0.1, 0.8, nesterov=False), muon(0.1, 0.8, 0.0, False, adamw(3e-4, (0.9, 0.95), 0.01, couple=True))
    ),
}

NOT_AGAIN_IN_JAX = {
    "Adam with a large epsilon",
    "Rprop at its limits",
    "ClipNorm of absolute values",
    "ClipNorm of the largest",
    "ClipNorm over the tree, p = 3",
    "Chain of nothing",
}
"""Other settings of rules that are there already: each would be compiled twice."""


def kept_of(state: Any, name: str) -> dict[str, Any]:
    """What is kept of a parameter, by name, copied."""

    def copied(kept: Any) -> Any:
        return {key: copied(value) for key, value in kept.items()} if isinstance(kept, dict) else host(kept).tolist()

    return copied(dict(state[name]))


def values_of(model: Any) -> dict[str, np.ndarray]:
    return {name: host(model[name] if isinstance(model, dict) else cowalk.get(model, name)) for name in STARTS}


@pytest.mark.parametrize("update", [functional_update, update_in_place])
@pytest.mark.parametrize(
    ("name", "framework"),
    [(name, each) for name in CASES for each in FRAMEWORKS if each != "jax" or name not in NOT_AGAIN_IN_JAX],
)
def test_the_steps_of_a_rule_are_those_of_its_formula(name, framework, update):
    rule, formula, over_tree, steps = CASES[name]
    make, gradients, context = FRAMEWORKS[framework]
    with context():
        model = make()
        state = cowalk.freeze(cowalk.setup(rule, model), "frozen")
        frozen = kept_of(state, "frozen")
        for t, wanted in enumerate(expected(formula, over_tree, steps), 1):
            late = kept_of(state, "late")
            state, model = update(state, model, gradients(t))
            for key, value in values_of(model).items():
                assert value.dtype == np.float64
                np.testing.assert_allclose(value, wanted[key], rtol=1e-9, atol=1e-9, err_msg=f"{key} after {t}")
            assert (kept_of(state, "late") == late) == (t == 2 or not late)
            assert kept_of(state, "frozen") == frozen
        assert values_of(model)["frozen"].tolist() == STARTS["frozen"].tolist()
        assert int(state.step) == steps


def test_every_rule_has_a_case():
    rules = {getattr(optim, name) for name in optim.__all__ if isinstance(getattr(optim, name), type)}
    rules = {each for each in rules if issubclass(each, optim.Rule)} - {optim.Rule}
    assert {type(case.rule) for case in CASES.values()} | {optim.AccumGrad} == rules


DEFAULTS = {
    "Descent": {"lr": 0.1},
    "Momentum": {"lr": 0.01, "momentum": 0.9},
    "Nesterov": {"lr": 0.001, "momentum": 0.9},
    "RMSProp": {"lr": 0.001, "decay": 0.9, "epsilon": 1e-8, "centred": False},
    "Rprop": {"lr": 1e-3, "factors": (0.5, 1.2), "sizes": (1e-6, 50.0)},
    "Adam": {"lr": 0.001, "betas": (0.9, 0.999), "epsilon": 1e-8},
    "AdamW": {"lr": 0.001, "betas": (0.9, 0.999), "epsilon": 1e-8, "weight_decay": 0.0, "couple": True},
    "RAdam": {"lr": 0.001, "betas": (0.9, 0.999), "epsilon": 1e-8},
    "AdaMax": {"lr": 0.001, "betas": (0.9, 0.999), "epsilon": 1e-8},
    "OAdam": {"lr": 0.001, "betas": (0.5, 0.9), "epsilon": 1e-8},
    "NAdam": {"lr": 0.001, "betas": (0.9, 0.999), "epsilon": 1e-8},
    "AdaGrad": {"lr": 0.1, "epsilon": 1e-8},
    "AdaDelta": {"decay": 0.9, "epsilon": 1e-8},
    "AMSGrad": {"lr": 0.001, "betas": (0.9, 0.999), "epsilon": 1e-8},
    "AdaBelief": {"lr": 0.001, "betas": (0.9, 0.999), "epsilon": 1e-16},
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99)},
    "WeightDecay": {"weight_decay": 5e-4},
    "SignDecay": {"weight_decay": 1e-3},
    "ClipGrad": {"limit": 10.0},
    "ClipNorm": {"max_norm": 10.0, "p": 2.0, "over": "array", "error_if_nonfinite": True},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_rules_without_arguments_have_the_usual_settings_in_the_usual_order(name):
    settings = getattr(optim, name)().settings()
    assert list(settings.items()) == list(DEFAULTS[name].items())


def test_whole_numbers_become_floats_and_lists_pairs():
    assert optim.Adam(1, [0, 0.5]) == optim.Adam(1.0, (0.0, 0.5))
    assert isinstance(optim.Adam(1).lr, float)
    assert optim.AccumGrad(np.int64(3)).n == 3
    assert optim.Descent(np.float32(0.5)) == optim.Descent(0.5)


# --- settings that make no sense ---


@pytest.mark.parametrize(
    ("rule", "settings", "setting"),
    [
        ("Descent", {"lr": -0.1}, "lr"),
        ("Descent", {"lr": math.nan}, "lr"),
        ("Descent", {"lr": math.inf}, "lr"),
        ("Descent", {"lr": 1j}, "lr"),
        ("Descent", {"lr": "0.1"}, "lr"),
        ("Descent", {"lr": None}, "lr"),
        ("Descent", {"lr": True}, "lr"),
        ("Rprop", {"lr": abs}, "lr"),
        ("Momentum", {"momentum": 1.1}, "momentum"),
        ("Nesterov", {"momentum": -0.1}, "momentum"),
        ("RMSProp", {"decay": 2}, "decay"),
        ("RMSProp", {"epsilon": -1e-8}, "epsilon"),
        ("Adam", {"betas": 0.9}, "betas"),
        ("Adam", {"betas": (0.9,)}, "betas"),
        ("Adam", {"betas": (0.9, 0.99, 0.999)}, "betas"),
        ("Adam", {"betas": (0.9, 1.0)}, "betas"),
        ("Adam", {"betas": (-0.1, 0.9)}, "betas"),
        ("Adam", {"betas": (0.9, math.nan)}, "betas"),
        ("Adam", {"betas": ("0.9", 0.9)}, "betas"),
        ("AdamW", {"weight_decay": -1}, "weight_decay"),
        ("RAdam", {"betas": (0.9, 0.5)}, "betas"),
        ("RAdam", {"betas": (0.9, 0.6)}, "betas"),
        ("Rprop", {"factors": (1.2, 0.5)}, "factors"),
        ("Rprop", {"sizes": (0, 1)}, "sizes"),
        ("WeightDecay", {"weight_decay": -5e-4}, "weight_decay"),
        ("ClipGrad", {"limit": 0}, "limit"),
        ("ClipNorm", {"max_norm": -1}, "max_norm"),
        ("ClipNorm", {"p": 0}, "p"),
        ("ClipNorm", {"over": "everything"}, "over"),
        ("AccumGrad", {"n": 0}, "n"),
        ("AccumGrad", {"n": 2.5}, "n"),
        ("AccumGrad", {"n": math.inf}, "n"),
        ("MixedPrecision", {"rule": optim.Adam(), "dtype": "float99"}, "dtype"),
        ("MixedPrecision", {"rule": optim.Adam(), "dtype": "int32"}, "dtype"),
        ("MixedPrecision", {"rule": optim.Adam(), "dtype": np.dtype("float32")}, "dtype"),
        ("Muon", {"iterations": 0}, "iterations"),
        ("Muon", {"fallback": None}, "fallback"),
        ("Muon", {"fallback": optim.Chain(optim.Adam())}, "fallback"),
        ("Muon", {"fallback": optim.AccumGrad(2)}, "fallback"),
        ("Muon", {"fallback": optim.ClipNorm(over="tree")}, "fallback"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named_with_its_rule(rule, settings, setting):
    with pytest.raises(optim.RuleError, match=rf"^{rule}: .*\b{setting}=") as caught:
        getattr(optim, rule)(**settings)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, cowalk.CowalkError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.Chain(optim.Adam), r"not the class: Adam\(…\)"),
        (lambda: optim.Chain(0.1), "float 0.1"),
        (lambda: optim.Chain(None), "NoneType"),
        (lambda: optim.Chain(optim.MixedPrecision(optim.Adam())), r"MixedPrecision\(Chain\(…\)\)"),
        (lambda: optim.MixedPrecision(optim.MixedPrecision(optim.Adam())), "one is enough"),
        (lambda: optim.MixedPrecision("adam"), "str 'adam'"),
        (lambda: optim.Chain({1: optim.Adam()}), "texts for patterns"),
        (lambda: optim.Chain({"*": 0.1}), "float 0.1"),
    ],
)
def test_what_is_no_rule_is_refused_where_it_is_given(make, message):
    with pytest.raises(optim.RuleError, match=message):
        make()

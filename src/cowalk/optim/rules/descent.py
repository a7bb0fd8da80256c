"""Rules that follow the gradient itself, its running sum, or its sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cowalk.optim.arrays import average, functions, sign, zeros
from cowalk.optim.rules.rule import Number, Rule, RuleError, State


@dataclass(frozen=True)
class Descent(Rule):
    """Gradient descent: the step is lr · g.

    >>> import numpy as np, cowalk
    >>> model = {"w": np.array([1.0])}
    >>> state = cowalk.setup(cowalk.optim.Descent(0.1), model)
    >>> cowalk.update_(state, model, {"w": np.array([2.0])})["w"].tolist()
    [0.8]
    """

    lr: Number = 0.1
    elementwise = True

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:  # noqa: ARG002
        return state, self.lr * gradient


@dataclass(frozen=True)
class Momentum(Rule):
    """Gradient descent with momentum: v ← momentum · v + lr · g; the step is v."""

    lr: Number = 0.01
    momentum: Number = 0.9
    elementwise = True

    def init(self, x: Any) -> State:
        return {"momentum": zeros(x)}

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:  # noqa: ARG002
        v = self.momentum * state["momentum"] + self.lr * gradient
        return {"momentum": v}, v


@dataclass(frozen=True)
class Nesterov(Rule):
    """Nesterov's momentum: v ← momentum · v − lr · g; the step is lr · g − momentum · v with that new v.

    Which is −momentum² · v + (1 + momentum) · lr · g with the old one.
    """

    lr: Number = 0.001
    momentum: Number = 0.9
    elementwise = True

    def init(self, x: Any) -> State:
        return {"momentum": zeros(x)}

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:  # noqa: ARG002
        v = self.momentum * state["momentum"] - self.lr * gradient
        return {"momentum": v}, self.lr * gradient - self.momentum * v


@dataclass(frozen=True)
class Rprop(Rule):
    """Resilient propagation (Riedmiller & Braun 1993): every element has a step size of its own, and only signs count.

    Where the gradient keeps its sign, the size grows by the greater of the `factors`, at most to the greater of the `sizes`;
    where it turns, the size shrinks by the lesser, and no step is made. For gradients of the whole data set.

    Attributes:
        lr: the first size of every step; a number.
    """

    lr: float = 1e-3
    factors: tuple[float, float] = (0.5, 1.2)
    sizes: tuple[float, float] = (1e-6, 50.0)
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.lr):
            raise RuleError("Rprop: lr= is a number, not a schedule: sizes begin at it, and then change on their own")

    def init(self, x: Any) -> State:
        return {"gradient": zeros(x), "size": functions(x).full_like(x, self.lr)}

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        fs = functions(x)
        less, more = self.factors
        agreement = gradient * state["gradient"]
        size, (least, most) = state["size"], self.sizes
        grown, shrunk = fs.clip(size * more, least, most), fs.clip(size * less, least, most)
        size = fs.where(agreement > 0, grown, fs.where(agreement < 0, shrunk, size))
        gradient = fs.where(agreement < 0, fs.zeros_like(gradient), gradient)
        return {"gradient": gradient, "size": size}, size * fs.sign(gradient)


@dataclass(frozen=True)
class Lion(Rule):
    """Lion (Chen et al. 2023, arXiv 2302.06675), as in the paper: the step is lr · sign(β₁ m + (1 − β₁) g), and then
    m ← β₂ m + (1 − β₂) g.

    Its steps are larger than Adam's: take a learning rate 3 to 10 times smaller.
    """

    lr: Number = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    elementwise = True

    def init(self, x: Any) -> State:
        return {"m": zeros(x)}

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:  # noqa: ARG002
        beta1, beta2 = self.betas
        m = state["m"]
        step = self.lr * sign(average(m, gradient, beta1))
        return {"m": average(m, gradient, beta2)}, step

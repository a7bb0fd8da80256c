"""Rules that divide by a running size of the gradient: RMSProp, AdaGrad, AdaDelta. Those of Adam's family: `adam`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cowalk.optim.arrays import average, average_square, functions, raised, real_full, real_zeros, square, zeros
from cowalk.optim.rules.rule import Number, Rule, State


@dataclass(frozen=True)
class RMSProp(Rule):
    """RMSProp (Tieleman & Hinton 2012): q ← decay · q + (1 − decay) |g|²; the step is lr · g / (√q + ε).

    Attributes:
        centred: subtract from q the squared running mean of the gradient (Graves 2013).
    """

    lr: Number = 0.001
    decay: float = 0.9
    epsilon: float = 1e-8
    centred: bool = False
    elementwise = True

    def init(self, x: Any) -> State:
        return {"q": real_zeros(x)} | ({"m": zeros(x)} if self.centred else {})

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        q = spread = average_square(state["q"], gradient, self.decay)
        new: State = {"q": q}
        if self.centred:
            new["m"] = m = average(state["m"], gradient, self.decay)
            spread = functions(x).clip(q - square(m), 0.0, None)  # rounding may make it negative
        return new, self.lr * gradient / (functions(x).sqrt(spread) + raised(self.epsilon, x))


@dataclass(frozen=True)
class AdaGrad(Rule):
    """AdaGrad (Duchi et al. 2011): q ← q + |g|², which begins at ε; the step is lr · g / (√q + ε)."""

    lr: Number = 0.1
    epsilon: float = 1e-8
    elementwise = True

    def init(self, x: Any) -> State:
        return {"q": real_full(x, raised(self.epsilon, x))}

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        q = state["q"] + square(gradient)
        return {"q": q}, self.lr * gradient / (functions(x).sqrt(q) + raised(self.epsilon, x))


@dataclass(frozen=True)
class AdaDelta(Rule):
    """AdaDelta (Zeiler 2012): q ← decay · q + (1 − decay) |g|²; the step is s = g √(d + ε) / √(q + ε), and then
    d ← decay · d + (1 − decay) |s|². It has no learning rate.
    """

    decay: float = 0.9
    epsilon: float = 1e-8
    elementwise = True

    def init(self, x: Any) -> State:
        return {"q": real_zeros(x), "d": real_zeros(x)}

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        fs, epsilon = functions(x), raised(self.epsilon, x)
        q = average_square(state["q"], gradient, self.decay)
        step = gradient * fs.sqrt(state["d"] + epsilon) / fs.sqrt(q + epsilon)
        return {"q": q, "d": average_square(state["d"], step, self.decay)}, step

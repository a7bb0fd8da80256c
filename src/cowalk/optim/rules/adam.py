"""Adam and its kin. m and v are the running means of g and of |g|²; t counts the updates of one array, from 1.

m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) |g|²;  m̂ = m / (1 − β₁ᵗ);  v̂ = v / (1 − β₂ᵗ)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from cowalk.optim.arrays import average, average_square, functions, is_half, raised, real_full, real_zeros, zeros
from cowalk.optim.rules.rule import Number, Rule, RuleError, State


@dataclass(frozen=True)
class AdamLike(Rule):
    """What the rules of this family share."""

    lr: Number = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    elementwise = True

    def init(self, x: Any) -> State:
        return {"m": zeros(x), "v": real_zeros(x), "step": 0}

    def _moments(self, state: State, gradient: Any) -> tuple[Any, Any, Any]:
        beta1, beta2 = self.betas
        m = average(state["m"], gradient, beta1)
        v = average_square(state["v"], gradient, beta2)
        return m, v, state["step"] + 1


@dataclass(frozen=True)
class Adam(AdamLike):
    """Adam (Kingma & Ba 2015): the step is lr · m̂ / (√v̂ + ε).

    >>> import numpy as np, cowalk
    >>> model = {"w": np.array([1.0, 1.0])}
    >>> state = cowalk.setup(cowalk.optim.Adam(lr=0.5), model)
    >>> cowalk.update_(state, model, {"w": np.array([3.0, -4.0])})["w"].round(6).tolist()
    [0.5, 1.5]
    """

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        m, v, t = self._moments(state, gradient)
        new, epsilon, root = {"m": m, "v": v, "step": t}, raised(self.epsilon, x), functions(x).sqrt(v)
        scale, spread = self.lr / (1 - self.betas[0] ** t), (1 - self.betas[1] ** t) ** 0.5
        if is_half(x):  # where spread · ε may be zero
            return new, m * scale / (root / spread + epsilon)
        return new, m * (scale * spread) / (root + epsilon * spread)  # the same, with a pass over the array less


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019): the step is lr · (a + weight_decay · x), a = m̂ / (√v̂ + ε).

    Attributes:
        weight_decay: 0 unless it is given, which is Adam.
        couple: whether the learning rate multiplies the decay too, as in torch and Optax; otherwise, as in the paper, the step
            is lr · a + weight_decay · x.
    """

    weight_decay: Number = 0.0
    couple: bool = True

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        new, step = super().apply(state, x, gradient)
        lr: Any = self.lr
        decay = lr * self.weight_decay if self.couple else self.weight_decay
        return new, step + decay * x


@dataclass(frozen=True)
class Directed(AdamLike, ABC):
    """Those whose step is the learning rate times a direction."""

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        new, direction = self._direction(state, x, gradient)
        return new, self.lr * direction

    @abstractmethod
    def _direction(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        """The new state, and the step for lr = 1."""


@dataclass(frozen=True)
class RAdam(Directed):
    """Rectified Adam (Liu et al. 2020): Adam's step times a factor that grows from 0, and lr · m̂ while there is no such factor.

    With ρ∞ = 2/(1 − β₂) − 1 and ρ = ρ∞ − 2tβ₂ᵗ/(1 − β₂ᵗ), the factor is
    √((ρ − 4)(ρ − 2)ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)ρ)), from ρ > 4 on (torch and Optax: from ρ > 5).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.betas[1] <= 0.6:
            raise RuleError(
                f"RAdam: the second of betas= is more than 0.6, or there is no rectification, not {self.betas[1]}"
            )

    def _direction(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        fs = functions(x)
        m, v, t = self._moments(state, gradient)
        (beta1, beta2), new = self.betas, {"m": m, "v": v, "step": t}
        debias1, debias2 = 1 / (1 - beta1**t), 1 / (1 - beta2**t)
        largest = 2 / (1 - beta2) - 1
        rho = largest - 2 * t * beta2**t * debias2
        squared = (rho - 4) * (rho - 2) * largest / ((largest - 4) * (largest - 2) * rho)
        adapted = m * debias1 / (fs.sqrt(v * debias2) + raised(self.epsilon, x))
        if isinstance(t, int):
            return new, adapted * squared**0.5 if rho > 4 else m * debias1
        factor = fs.sqrt(fs.where(rho > 4, squared, 1.0))  # a tracer
        return new, fs.where(rho > 4, adapted * factor, m * debias1)


@dataclass(frozen=True)
class AdaMax(Directed):
    """AdaMax (Kingma & Ba 2015): u ← max(β₂ u, |g|) in the place of v; the step is lr · m̂ / (u + ε)."""

    def init(self, x: Any) -> State:
        return {"m": zeros(x), "u": real_zeros(x), "step": 0}

    def _direction(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        beta1, beta2 = self.betas
        fs, t = functions(x), state["step"] + 1
        m = average(state["m"], gradient, beta1)
        u = fs.maximum(beta2 * state["u"], fs.abs(gradient))
        return {"m": m, "u": u, "step": t}, m * (1 / (1 - beta1**t)) / (u + raised(self.epsilon, x))


@dataclass(frozen=True)
class OAdam(Adam):
    """Optimistic Adam (Daskalakis et al. 2018): the step is 2a − b, with Adam's step a and b the a of the update before."""

    lr: Number = 0.001
    betas: tuple[float, float] = (0.5, 0.9)
    epsilon: float = 1e-8

    def init(self, x: Any) -> State:
        return {**super().init(x), "term": zeros(x)}

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        new, step = super().apply(state, x, gradient)
        return {**new, "term": step}, 2 * step - state["term"]


@dataclass(frozen=True)
class NAdam(Directed):
    """Adam with Nesterov's momentum (Dozat 2016): the step is lr · (β₁ m / (1 − β₁ᵗ⁺¹) + (1 − β₁) g / (1 − β₁ᵗ)) / (√v̂ + ε).

    As in the paper, v̂ = β₂ v / (1 − β₂ᵗ) here. (Optax leaves β₂ out; torch has a schedule for β₁.)
    """

    def _direction(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        m, v, t = self._moments(state, gradient)
        beta1, beta2 = self.betas
        ahead = m * (beta1 / (1 - beta1 ** (t + 1))) + gradient * ((1 - beta1) / (1 - beta1**t))
        root = functions(x).sqrt(v * (beta2 / (1 - beta2**t)))
        return {"m": m, "v": v, "step": t}, ahead / (root + raised(self.epsilon, x))


@dataclass(frozen=True)
class AMSGrad(Directed):
    """AMSGrad (Reddi et al. 2018), as in the paper without debiasing: v̂ ← max(v̂, v); the step is lr · m / (√v̂ + ε).

    m, v and v̂ begin at ε. (torch and Optax debias.)
    """

    def init(self, x: Any) -> State:
        first = raised(self.epsilon, x)
        return {
            "m": functions(x).full_like(x, first),
            "v": real_full(x, first),
            "max_v": real_full(x, first),
        }

    def _direction(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        m, v, _ = self._moments({**state, "step": 0}, gradient)
        most = functions(x).maximum(state["max_v"], v)
        return {"m": m, "v": v, "max_v": most}, m / (functions(x).sqrt(most) + raised(self.epsilon, x))


@dataclass(frozen=True)
class AdaBelief(Directed):
    """AdaBelief (Zhuang et al. 2020): s ← β₂ s + (1 − β₂) |g − m|² + ε in the place of v; the step is lr · m̂ / (√ŝ + ε)."""

    lr: Number = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-16

    def init(self, x: Any) -> State:
        return {"m": zeros(x), "s": real_zeros(x), "step": 0}

    def _direction(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        beta1, beta2 = self.betas
        t, epsilon = state["step"] + 1, raised(self.epsilon, x)
        m = average(state["m"], gradient, beta1)
        s = average_square(state["s"], gradient - m, beta2) + epsilon
        root = functions(x).sqrt(s * (1 / (1 - beta2**t)))
        return {"m": m, "s": s, "step": t}, m * (1 / (1 - beta1**t)) / (root + epsilon)

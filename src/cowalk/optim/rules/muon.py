"""Muon: steps that are orthogonal matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cowalk.optim.arrays import average, cast, is_half, norm, zeros
from cowalk.optim.rules.adam import AdamW
from cowalk.optim.rules.composing import AccumGrad
from cowalk.optim.rules.rule import Number, Rule, RuleError, State

FALLBACK = AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial that takes singular values towards 1 (Jordan 2024)."""


@dataclass(frozen=True)
class Muon(Rule):
    """Muon (Jordan et al. 2024): momentum whose nearest (nearly) orthogonal matrix is the step.

    m ← momentum · m + (1 − momentum) · g; u = momentum · m + (1 − momentum) · g if `nesterov`, else m; the step is
    lr · (√max(1, rows / columns) · orthogonal(u) + weight_decay · x), where Newton and Schulz's iteration makes `orthogonal`.
    Arrays of more than two axes are taken as matrices of their first one; those of less have the rule `fallback`. Give
    embeddings and the last layer a rule of their own: `{"*embed*": AdamW(3e-4), "head.*": AdamW(3e-4), "*": Muon()}`.

    Attributes:
        iterations: of Newton and Schulz; five take singular values to between 0.7 and 1.2.
        fallback: one rule for one array, not a chain of them.
    """

    lr: Number = 0.02
    momentum: Number = 0.95
    weight_decay: Number = 0.0
    nesterov: bool = True
    iterations: int = 5
    fallback: Rule = FALLBACK

    def __post_init__(self) -> None:
        super().__post_init__()
        rule: Any = self.fallback
        is_plain = isinstance(rule, Rule) and rule.stages == (rule,) and not rule.over_tree
        if not is_plain or isinstance(rule, AccumGrad):
            raise RuleError(
                f"Muon: fallback= is one rule for one array, not {rule!r:.60}. Chains go around Muon, and rules by path give "
                "other arrays a chain of their own"
            )

    def init(self, x: Any) -> State:
        return {"momentum": zeros(x)} if len(x.shape) >= 2 else self.fallback.init(x)

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        if len(x.shape) < 2:
            return self.fallback.apply(state, x, gradient)
        new = average(state["momentum"], gradient, self.momentum)
        ahead = average(new, gradient, self.momentum) if self.nesterov else new
        rows, columns = x.shape[0], math.prod(x.shape[1:])
        matrix = ahead.reshape(rows, columns)
        direction = _orthogonal(matrix, self.iterations) * max(1.0, rows / max(1, columns)) ** 0.5
        return {"momentum": new}, self.lr * (direction.reshape(x.shape) + self.weight_decay * x)

    def at_step(self, step: Any) -> Muon:
        found = super().at_step(step)
        fallback = self.fallback.at_step(step)
        return found if fallback is self.fallback else _with_fallback(found, fallback)


def _with_fallback(rule: Muon, fallback: Rule) -> Muon:
    new = object.__new__(Muon)
    vars(new).update(vars(rule) | {"fallback": fallback})
    return new


def _orthogonal(matrix: Any, iterations: int) -> Any:
    """Newton and Schulz's iteration towards the nearest orthogonal matrix (U Vᵀ of a singular value decomposition)."""
    a, b, c = COEFFICIENTS
    matrix = cast(matrix, "float32") if is_half(matrix) else matrix
    size = norm(matrix, 2.0) + 1e-7
    x = matrix / (size.astype(matrix.dtype) if hasattr(size, "astype") else size)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    for _ in range(iterations):
        gram = x @ x.conj().T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if is_tall else x

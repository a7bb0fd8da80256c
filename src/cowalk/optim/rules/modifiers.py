"""Rules that change a gradient before another rule sees it: decay and clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from cowalk.optim.arrays import functions, is_complex, is_traced, norm, norm_of_norms, sign
from cowalk.optim.rules.rule import Number, Rule, RuleError, State


@dataclass(frozen=True)
class WeightDecay(Rule):
    """Adds weight_decay · x to the gradient: the gradient of an L2 penalty. For decay apart from the gradient, see AdamW."""

    weight_decay: Number = 5e-4
    elementwise = True

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        return state, gradient + self.weight_decay * x


@dataclass(frozen=True)
class SignDecay(Rule):
    """Adds weight_decay · sign(x) to the gradient: the gradient of an L1 penalty."""

    weight_decay: Number = 1e-3
    elementwise = True

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        return state, gradient + self.weight_decay * sign(x)


@dataclass(frozen=True)
class ClipGrad(Rule):
    """Limits each element of the gradient to ±limit; of complex numbers both parts."""

    limit: Number = 10.0
    elementwise = True

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:  # noqa: ARG002
        fs, limit = functions(gradient), cast("float", self.limit)
        if is_complex(gradient):
            return state, fs.clip(gradient.real, -limit, limit) + 1j * fs.clip(gradient.imag, -limit, limit)
        return state, fs.clip(gradient, -limit, limit)


@dataclass(frozen=True)
class ClipNorm(Rule):
    """Scales a gradient down to a norm of max_norm where it is larger: each array on its own, or all as one.

    With `over="tree"` the norm is of the gradients of all parameters whose rule has this ClipNorm, a missing one as zero.

    Attributes:
        p: which norm; `math.inf` is the largest absolute value.
        over: "array" or "tree".
        error_if_nonfinite: raise where the norm is NaN or infinite. Updates of JAX arrays are compiled and cannot: there a NaN
            goes on into the parameter, where `cowalk.stats` finds it. On a GPU this waits for the norm.

    Raises:
        RuleError: the norm of a gradient is NaN or infinite. Nothing is updated, if no rule before this one keeps a state.

    >>> import numpy as np, cowalk
    >>> rule = cowalk.optim.Chain(cowalk.optim.ClipNorm(1.0, over="tree"), cowalk.optim.Descent(1.0))
    >>> model = {"a": np.zeros(1), "b": np.zeros(1)}
    >>> state = cowalk.setup(rule, model)
    >>> cowalk.update_(state, model, {"a": np.array([3.0]), "b": np.array([4.0])})
    {'a': array([-0.6]), 'b': array([-0.8])}
    """

    max_norm: Number = 10.0
    p: float = 2.0
    over: Literal["array", "tree"] = "array"
    error_if_nonfinite: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over not in ("array", "tree"):
            raise RuleError(f"ClipNorm: over= is 'array' or 'tree', not {self.over!r:.60}")

    @property
    def over_tree(self) -> bool:
        return self.over == "tree"

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:  # noqa: ARG002
        size = norm(gradient, self.p)
        self._check(size, f"the gradient, of shape {tuple(gradient.shape)},")
        return state, self._scaled(gradient, size)

    def apply_tree(self, state: Any, xs: Mapping[str, Any], gradients: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        """The gradients of all arrays, by path, scaled alike."""
        if not gradients:  # all wait for AccumGrad
            return state, {}
        sizes = {path: norm(gradient, self.p) for path, gradient in gradients.items()}
        total = norm_of_norms(list(sizes.values()), self.p)
        if self.error_if_nonfinite and not is_traced(total) and not math.isfinite(float(total)):
            bad = next(path for path, size in sizes.items() if not math.isfinite(float(size)))
            self._check(total, f"the gradients, with that of {bad} the first to blame,")
        return state, {path: self._scaled(gradient, total) for path, gradient in gradients.items()}

    def _check(self, size: Any, what: str) -> None:
        if self.error_if_nonfinite and not is_traced(size) and not math.isfinite(float(size)):
            raise RuleError(
                f"ClipNorm: the {self.p:g}-norm of {what} is {float(size)}; cowalk.stats(model, gradients) says which "
                "elements are NaN or infinite, and error_if_nonfinite=False lets it pass"
            )

    def _scaled(self, gradient: Any, size: Any) -> Any:
        fs = functions(gradient)
        factor = 1 / fs.clip(size / self.max_norm, 1.0, None)  # size may be zero
        return gradient * factor  # of half precision in float32 here: the factor may be less than it can tell

"""What a rule is: a small frozen dataclass that turns the gradient of one array into the step of that array.

A rule knows no framework. It gets arrays of NumPy, torch or JAX, and computes with operators and with `functions(x)`. How
steps are taken out of parameters, in place or not, block by block or compiled, is the matter of `cowalk.optim.applying`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, ClassVar, Self, cast

from cowalk.tree import CowalkError

State = dict[str, Any]
"""What a rule keeps of one array: arrays of its shape, and counts."""

Number = float | Callable[[Any], Any]
"""A number, or a schedule: a function of the count of updates so far (0 at the first), such as those of Optax."""


class RuleError(CowalkError, ValueError):
    """A rule, or a setting of one, that makes no sense."""


@dataclass(frozen=True)
class Rule:
    """The base of all rules. One of your own is a frozen dataclass with `apply`, and with `init` if it keeps something.

    A learning rate, momentum, weight decay or limit may also be a schedule, a function of how many updates there were.

    Attributes:
        elementwise: the step of an element depends on that element alone (its gradient, state, value), so that the rule may
            be given any part of an array, or several arrays as one flat one.

    >>> import numpy as np, cowalk
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class SignDescent(cowalk.optim.Rule):
    ...     lr: float = 0.5
    ...     elementwise = True
    ...
    ...     def apply(self, state, x, gradient):
    ...         return state, self.lr * cowalk.optim.functions(x).sign(gradient)
    >>> model = {"w": np.array([1.0, 2.0])}
    >>> state = cowalk.setup(SignDescent(), model)
    >>> cowalk.update_(state, model, {"w": np.array([3.0, -0.1])})["w"].tolist()
    [0.5, 2.5]
    """

    elementwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            check = _CHECKS.get(field.name)
            value = getattr(self, field.name)
            if check is not None and not (callable(value) and field.name in _SCHEDULED):
                object.__setattr__(self, field.name, check(type(self).__name__, field.name, value))

    def init(self, x: Any) -> State:  # noqa: ARG002  (for the rules that keep something)
        """What is kept of an array x, before its first update."""
        return {}

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        """One update: the new state (never the old one changed), and the step, which will be subtracted from x.

        Args:
            state: what `init` or the last `apply` gave.
            x: the array, as it is.
            gradient: an array of x's shape and dtype.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply(state, x, gradient)")

    def checked(self, result: Any, state: State, x: Any) -> tuple[State, Any]:
        """What `apply` returned, if it is what it should be."""
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], dict)):
            raise RuleError(
                f"{type(self).__name__}.apply returns (state, step), a dict and an array, not "
                + (
                    f"{tuple(type(each).__name__ for each in result)}"
                    if isinstance(result, tuple)
                    else type(result).__name__
                )
            )
        if not result[0].keys() >= state.keys():
            gone = ", ".join(map(repr, sorted(map(str, state.keys() - result[0].keys()))))
            raise RuleError(f"{type(self).__name__}.apply returned a state without {gone}")
        if tuple(getattr(result[1], "shape", ())) != tuple(x.shape):
            shape = tuple(getattr(result[1], "shape", ()))
            raise RuleError(
                f"{type(self).__name__}.apply returned a step of shape {shape} for an array of {tuple(x.shape)}"
            )
        return cast("tuple[State, Any]", result)

    @property
    def stages(self) -> tuple[Rule, ...]:
        """The rules that are applied one after the other, each to the step of the one before."""
        return (self,)

    @property
    def over_tree(self) -> bool:
        """Whether the rule looks at the gradients of all arrays at once: it then has `apply_tree`."""
        return False

    def is_ready(self, state: State) -> Any:  # noqa: ARG002  (for AccumGrad)
        """Whether there is a step, by the state after `apply`; if not, the rules after this one and the parameter wait."""
        return True

    def at_path(self, path: str) -> Rule:  # noqa: ARG002  (for rules that choose by path)
        """The rule for the parameter at a path."""
        return self

    def at_step(self, step: Any) -> Self:
        """The rule with the values of its schedules after so many updates: floats, or tracers where the step is one."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SCHEDULED and callable(value):
                try:
                    found[field.name] = float(cast("Any", value(step))) if isinstance(step, int) else value(step)
                except Exception as error:
                    error.add_note(
                        f"(in the schedule {type(self).__name__}({field.name}=…). Of JAX models a schedule is compiled: it takes "
                        "a traced count, so jnp.where and jnp.minimum in the place of `if` and min, or one of Optax's)"
                    )
                    raise
        return self if not found else _with_values(self, found)

    def settings(self) -> Mapping[str, Any]:
        """The settings that `adjust` may change, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def adjusted(self, changes: Mapping[str, Any]) -> Rule:
        """The rule with those of the changed settings that it has."""
        own = {name: value for name, value in changes.items() if name in self.settings()}
        return replace(self, **own) if own else self


def _with_values(rule: Any, values: Mapping[str, Any]) -> Any:
    """A rule with other values, which may be tracers: nothing is checked."""
    new = object.__new__(type(rule))
    for field in fields(rule):
        object.__setattr__(new, field.name, values.get(field.name, getattr(rule, field.name)))
    return new


# --- what settings may be ---


def _number(rule: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RuleError(f"{rule}: {name}= is a number, not a {type(value).__name__}: {value!r:.60}")
    return float(value)


def _at_least_zero(rule: str, name: str, value: Any) -> float:
    number = _number(rule, name, value)
    if not number >= 0 or math.isinf(number):
        raise RuleError(f"{rule}: {name}= is 0 or more, and finite, not {value!r}")
    return number


def _positive(rule: str, name: str, value: Any) -> float:
    number = _number(rule, name, value)
    if not number > 0:
        raise RuleError(f"{rule}: {name}= is more than 0, not {value!r}")
    return number


def _decay(rule: str, name: str, value: Any) -> float:
    number = _number(rule, name, value)
    if not 0 <= number <= 1:
        raise RuleError(f"{rule}: {name}= is from 0 to 1, not {value!r}")
    return number


def _pair(rule: str, name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise RuleError(f"{rule}: {name}= is a pair of numbers, such as (0.9, 0.999), not {value!r:.60}")
    return _number(rule, name, value[0]), _number(rule, name, value[1])


def _betas(rule: str, name: str, value: Any) -> tuple[float, float]:
    one, other = _pair(rule, name, value)
    if not (0 <= one < 1 and 0 <= other < 1):
        raise RuleError(f"{rule}: {name}= are two numbers from 0 to below 1, not {value!r}")
    return one, other


def _sizes(rule: str, name: str, value: Any) -> tuple[float, float]:
    least, most = _pair(rule, name, value)
    if not 0 < least <= most:
        raise RuleError(f"{rule}: {name}= are two positive numbers, the lesser first, not {value!r}")
    return least, most


def _count(rule: str, name: str, value: Any) -> int:
    number = _number(rule, name, value)
    if not (number >= 1 and number.is_integer()):
        raise RuleError(f"{rule}: {name}= is a whole number, 1 or more, not {value!r:.60}")
    return int(number)


_CHECKS: dict[str, Callable[[str, str, Any], Any]] = {
    "lr": _at_least_zero,
    "momentum": _decay,
    "decay": _decay,
    "betas": _betas,
    "epsilon": _at_least_zero,
    "weight_decay": _at_least_zero,
    "factors": _sizes,
    "sizes": _sizes,
    "limit": _positive,
    "max_norm": _positive,
    "p": _positive,
    "n": _count,
    "iterations": _count,
}
_SCHEDULED = ("lr", "momentum", "weight_decay", "limit", "max_norm")
"""The settings that may be functions of the count of updates."""


def nearest_setting(name: str, known: Mapping[str, Any]) -> str:
    """What to say of a setting that nothing has: the nearest that there is, or which there are."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"

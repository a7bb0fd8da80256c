"""Rules made of rules: one after the other, by path, every n-th time, on a copy in another precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cowalk.optim.arrays import copied, functions, zeros
from cowalk.optim.rules.rule import Rule, RuleError, State
from cowalk.tree.paths import compile_pattern


def as_rule(given: Any) -> Rule:
    """A rule from what a user may give for one: a rule, a mapping from path patterns to rules, or a transformation of Optax's.

    Raises:
        RuleError: it is none of these.
    """
    if isinstance(given, Rule):
        return given
    if isinstance(given, Mapping):
        return ByPath(tuple((pattern, None if rule is None else as_rule(rule)) for pattern, rule in given.items()))
    if isinstance(given, tuple) and hasattr(given, "init") and hasattr(given, "update"):
        from cowalk.optim.rules.optax import Optax

        return Optax(given)
    if isinstance(given, type) and issubclass(given, Rule):
        raise RuleError(f"give an object, not the class: {given.__name__}(…)")
    raise RuleError(
        "a rule is one of cowalk.optim's, such as cowalk.optim.Adam(1e-3), a dict from path patterns to rules, or a "
        f"transformation of Optax's, not a {type(given).__name__} {given!r:.60}"
    )


@dataclass(frozen=True)
class ByPath(Rule):
    """Which rule a parameter has, by its path: the first pattern that matches decides. A dict is made into one of these.

    In a pattern `*` stands for any characters, `?` for one. None in the place of a rule leaves parameters as they are.
    """

    choices: tuple[tuple[str, Rule | None], ...] = ()

    def __post_init__(self) -> None:
        for pattern, _ in self.choices:
            if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RuleError(f"rules by path are {{pattern: rule}}, with texts for patterns, not {pattern!r:.60}")

    def at_path(self, path: str) -> Rule:
        for pattern, rule in self.choices:
            if compile_pattern(pattern).fullmatch(path):
                return NOT_TRAINED if rule is None else rule.at_path(path)
        raise RuleError(
            f"no pattern matches the parameter {path!r}: there are {', '.join(repr(each) for each, _ in self.choices)}. "
            "'*' matches all that is left"
        )

    def settings(self) -> Mapping[str, Any]:
        rules = [rule for _, rule in reversed(self.choices) if rule is not None]
        return {name: value for rule in rules for name, value in rule.settings().items()}

    def adjusted(self, changes: Mapping[str, Any]) -> Rule:
        changed = ((pattern, None if rule is None else rule.adjusted(changes)) for pattern, rule in self.choices)
        return ByPath(tuple(changed))

    def check_used(self, paths: list[str]) -> None:
        """Refuse a pattern that chooses nothing.

        Raises:
            RuleError: a pattern matches no path, or only such as an earlier one matches.
        """
        left = list(paths)
        for pattern, _ in self.choices:
            fits = compile_pattern(pattern).fullmatch
            before, left = left, [path for path in left if not fits(path)]
            if not paths or len(left) < len(before):
                continue
            if any(map(fits, paths)):
                raise RuleError(f"the pattern {pattern!r} matches only what earlier ones match: put it before them")
            raise RuleError(
                f"the pattern {pattern!r} matches none of the {len(paths)} parameters; the first is {paths[0]!r}"
                + ("" if len(paths) == 1 else f", the last {paths[-1]!r}")
            )


@dataclass(frozen=True)
class NotTrained(Rule):
    """Stands for no rule at all."""


NOT_TRAINED = NotTrained()


@dataclass(frozen=True, init=False)
class Chain(Rule):
    """Rules applied one after the other, each to the step of the one before; without any, the step is the gradient.

    >>> import cowalk
    >>> cowalk.optim.Chain(cowalk.optim.ClipNorm(1.0), cowalk.optim.Adam(1e-3)).stages[0]
    ClipNorm(max_norm=1.0, p=2.0, over='array', error_if_nonfinite=True)
    """

    rules: tuple[Rule, ...] = ()

    def __init__(self, *rules: Any) -> None:
        made = tuple(map(as_rule, rules))
        for rule in made:
            if isinstance(rule, MixedPrecision):
                raise RuleError("MixedPrecision stands around a chain, not in it: MixedPrecision(Chain(…))")
        object.__setattr__(self, "rules", made)

    def init(self, x: Any) -> State:
        return {i: stage.init(x) for i, stage in enumerate(self.stages)}  # pyright: ignore[reportReturnType]

    @property
    def stages(self) -> tuple[Rule, ...]:
        return tuple(stage for rule in self.rules for stage in rule.stages)

    def at_path(self, path: str) -> Rule:
        chosen = [rule.at_path(path) for rule in self.rules]
        if NOT_TRAINED in chosen:
            return NOT_TRAINED
        return self if all(map(_is, chosen, self.rules)) else Chain(*chosen)

    def settings(self) -> Mapping[str, Any]:
        return {name: value for rule in reversed(self.rules) for name, value in rule.settings().items()}

    def adjusted(self, changes: Mapping[str, Any]) -> Rule:
        return Chain(*(rule.adjusted(changes) for rule in self.rules))


def _is(one: Any, other: Any) -> bool:
    return one is other


@dataclass(frozen=True)
class AccumGrad(Rule):
    """Waits for n gradients of an array, and then hands their mean on; first in a chain. Schedules count the means.

    For the mean over unequal batches see `cowalk.Accumulator`.
    """

    n: int = 4
    elementwise = True

    def init(self, x: Any) -> State:
        return {"mean": zeros(x), "count": 0}

    def apply(self, state: State, x: Any, gradient: Any) -> tuple[State, Any]:
        count = state["count"] + 1
        mean = state["mean"] + (gradient - state["mean"]) / count
        if isinstance(count, int):  # n may have become less on the way
            return ({"mean": zeros(mean), "count": 0} if count >= self.n else {"mean": mean, "count": count}), mean
        is_full, where = count >= self.n, functions(x).where  # a tracer
        return {"mean": where(is_full, zeros(mean), mean), "count": where(is_full, 0, count)}, mean

    def is_ready(self, state: State) -> Any:
        return state["count"] == 0


FLOATING = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class MixedPrecision(Rule):
    """Keeps a copy of the parameter in another precision, updates that, and rounds it into the parameter.

    So that steps smaller than a half-precision parameter can tell add up.

    >>> import numpy as np, cowalk
    >>> model = {"w": np.ones(1, np.float16)}
    >>> state = cowalk.setup(cowalk.optim.MixedPrecision(cowalk.optim.Descent(1e-4)), model)
    >>> for _ in range(10):
    ...     _ = cowalk.update_(state, model, {"w": np.ones(1, np.float16)})
    >>> model["w"].dtype.name, float(model["w"][0]), round(float(state["w"]["copy"][0]), 4)
    ('float16', 0.9990234375, 0.999)
    """

    rule: Any
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", as_rule(self.rule))
        if isinstance(self.rule, MixedPrecision):
            raise RuleError("MixedPrecision of MixedPrecision: one is enough")
        dtype: Any = self.dtype
        if not isinstance(dtype, str) or dtype not in FLOATING:
            raise RuleError(f"MixedPrecision: dtype= is one of {', '.join(FLOATING)}, as a text, not {dtype!r:.60}")

    def init(self, x: Any) -> State:
        copy = copied(x, self.dtype)
        return {"copy": copy, "state": self.rule.init(copy)}

    @property
    def stages(self) -> tuple[Rule, ...]:
        return self.rule.stages

    def at_path(self, path: str) -> Rule:
        chosen = self.rule.at_path(path)
        return chosen if chosen is NOT_TRAINED else self if chosen is self.rule else replace(self, rule=chosen)

    def settings(self) -> Mapping[str, Any]:
        return self.rule.settings()

    def adjusted(self, changes: Mapping[str, Any]) -> Rule:
        return replace(self, rule=self.rule.adjusted(changes))

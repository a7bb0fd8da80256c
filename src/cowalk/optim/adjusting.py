"""`adjust`, `freeze`, `thaw`: other settings of rules, and parameters that updates pass by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from cowalk.optim.rules.rule import Rule, RuleError, nearest_setting
from cowalk.optim.state import LeafState, OptimizerState
from cowalk.tree import Path
from cowalk.tree.paths import brief, compile_pattern

T = TypeVar("T", OptimizerState, Rule)
Which = str | Iterable[str] | Callable[[Path], bool]


def adjust(state: T, where: Which = "*", **settings: Any) -> T:
    """The state with other settings of its rules; what the rules keep stays the same arrays.

    Args:
        state: a state, or a rule by itself.
        where: which parameters, by a pattern of paths (`*` for any characters, `?` for one), several, or a function of the path.
        settings: the new values, such as `lr=1e-4`. In a chain every rule takes those that it has.

    Raises:
        RuleError: a setting that none of the rules has, a value that it cannot have, or a pattern that matches nothing.

    >>> import numpy as np, cowalk
    >>> state = cowalk.setup(cowalk.optim.Adam(1e-3), {"w": np.ones(2)})
    >>> cowalk.adjust(state, lr=1e-4)["w"].rule
    Adam(lr=0.0001, betas=(0.9, 0.999), epsilon=1e-08)
    >>> cowalk.adjust(state, learning_rate=1e-4)
    Traceback (most recent call last):
    cowalk.optim.rules.rule.RuleError: no rule here has a setting 'learning_rate'; there are lr, betas, epsilon
    """
    if not settings:
        raise RuleError("adjust takes the settings by name: cowalk.adjust(state, lr=1e-4)")
    if isinstance(state, Rule):
        if where != "*":
            raise RuleError(
                "a pattern chooses parameters, which a rule by itself has none of: adjust the state from cowalk.setup"
            )
        _check_known([state], settings)
        return cast("T", state.adjusted(settings))
    chosen = _chosen(state, where, "adjust")
    rules = {id(leaf.rule): leaf.rule for leaf in chosen.values()}
    _check_known(list(rules.values()), settings)
    new = {key: rule.adjusted(settings) for key, rule in rules.items()}
    return cast(
        "T", state.with_leaves(lambda path, leaf: leaf.like(rule=new[id(leaf.rule)]) if path in chosen else leaf.like())
    )


def freeze(state: OptimizerState, where: Which = "*") -> OptimizerState:
    """The state with parameters frozen: updates leave them alone, and what their rules keep of them.

    Raises:
        RuleError: `state` is none, or the pattern matches no parameter.

    >>> import numpy as np, cowalk
    >>> model = {"encoder": {"w": np.ones(1)}, "head": {"w": np.ones(1)}}
    >>> state = cowalk.freeze(cowalk.setup(cowalk.optim.Descent(1.0), model), "encoder.*")
    >>> cowalk.update_(state, model, {"encoder": {"w": np.ones(1)}, "head": {"w": np.ones(1)}})
    {'encoder': {'w': array([1.])}, 'head': {'w': array([0.])}}
    """
    return _with_frozen(state, where, "freeze", True)


def thaw(state: OptimizerState, where: Which = "*") -> OptimizerState:
    """The state with parameters no longer frozen; as `freeze`."""
    return _with_frozen(state, where, "thaw", False)


def _with_frozen(state: Any, where: Which, what: str, frozen: bool) -> OptimizerState:
    chosen = _chosen(state, where, what)
    return state.with_leaves(lambda path, leaf: leaf.like(frozen=frozen if path in chosen else leaf.frozen))


def _chosen(state: Any, where: Which, what: str) -> dict[Path, LeafState]:
    if not isinstance(state, OptimizerState):
        raise RuleError(f"{what} takes a state from cowalk.setup, not a {type(state).__name__}")
    leaves = dict(state.all_leaves())
    if callable(where):
        chosen = {path: leaf for path, leaf in leaves.items() if where(path)}
    else:
        patterns = [compile_pattern(each) for each in ([where] if isinstance(where, str) else where)]
        chosen = {path: leaf for path, leaf in leaves.items() if any(each.fullmatch(str(path)) for each in patterns)}
    if leaves and not chosen:
        first = brief(next(iter(leaves)))
        raise RuleError(
            f"{what}: {where!r} matches none of the {len(leaves)} parameters; the first is {first!r}. A tied parameter goes by "
            f"its first path, and all of a layer by a pattern such as 'encoder.*'"
        )
    return chosen


def _check_known(rules: list[Rule], settings: dict[str, Any]) -> None:
    known = {name: value for rule in rules for name, value in rule.settings().items()}
    for name in settings:
        if name not in known:
            raise RuleError(f"no rule here has a setting {name!r}; {nearest_setting(name, known)}")

"""The state of an optimizer: what each parameter's rule keeps, in the shape of the model; and `setup`, which makes it."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from cowalk.frameworks.framework import Hyperparameters, ParameterState
from cowalk.optim.arrays import address, copied, is_jax
from cowalk.optim.rules.composing import ByPath, Chain, as_rule
from cowalk.optim.rules.optax import Optax
from cowalk.optim.rules.rule import Rule, RuleError
from cowalk.tree import Box, CowalkError, Path, fmapstructure, get, istrainable, leaf, walk
from cowalk.tree.kinds import load_imported, on_import, set_kind


@leaf
class LeafState(ParameterState):
    """What a rule keeps of one parameter, by name, such as `{"m": …, "v": …, "step": 3}`; of a chain by position.

    A walk takes it for a leaf, as the parameter is one.

    Attributes:
        rule: the rule of this parameter.
        frozen: whether updates pass it by.
        shape, dtype: of the parameter.
    """

    __slots__ = ("_checked", "dtype", "frozen", "rule", "shape")

    def __init__(
        self,
        rule: Rule,
        kept: Mapping[Any, Any],
        frozen: bool = False,
        shape: tuple[int, ...] | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(kept)
        self.rule = rule
        self.frozen = frozen
        self.shape = shape
        self.dtype = dtype
        self._checked: Any = None

    def like(self, kept: Mapping[Any, Any] | None = None, **changes: Any) -> LeafState:
        """Another one, with the same arrays or with others."""
        return LeafState(
            changes.get("rule", self.rule),
            dict(self if kept is None else kept),
            changes.get("frozen", self.frozen),
            self.shape,
            self.dtype,
        )

    def checked_for(self, x: Any) -> bool:
        """Whether it is known that this very array can be written."""
        return self._checked is not None and self._checked[0] is x and self._checked[1] == address(x)

    def mark_checked(self, x: Any) -> None:
        """Remember that this very array can be written."""
        self._checked = x, address(x)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Those of the first of the rule's stages that has betas."""
        for stage in self.rule.stages:
            settings = stage.settings()
            if "betas" in settings:
                lr = settings.get("lr")
                return Hyperparameters(None if callable(lr) else lr, settings["betas"], settings.get("epsilon"))
        return Hyperparameters()

    def __repr__(self) -> str:
        kept = ", ".join(f"{name}: {_shown(value)}" for name, value in self.items())
        return f"LeafState({self.rule!r}{', frozen' if self.frozen else ''}{', ' * bool(kept)}{kept})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LeafState, (self.rule, dict(self), self.frozen, self.shape, self.dtype)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(each)}" for name, each in value.items()) + "}"
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") and hasattr(value, "dtype") else repr(value)


@dataclass(eq=False)
class OptimizerState:
    """The state of an optimizer. `setup` makes one; `update` makes a new one, `update_` changes this one.

    A walk sees through it: `cowalk.walk(model, grads, state)` has a `LeafState` beside each parameter. It can be pickled (a
    schedule has to be a function with a name for that), and is a pytree for JAX, with the rules as static parts.

    Attributes:
        leaves: the `LeafState` of each trained parameter, in plain containers under the model's paths, and None elsewhere. A tied
            parameter has its own under its first path.
        step: how many updates there were.
        shared: the states of rules that look at all parameters at once, such as Optax's.
    """

    leaves: Any
    step: Any = 0
    shared: dict[Rule, Any] = field(default_factory=dict[Rule, Any])

    def __getitem__(self, path: Any) -> Any:
        """The state of the parameter at a path, or of a layer."""
        return get(self.leaves, path if isinstance(path, str | tuple) else (path,))

    def __repr__(self) -> str:
        rules = dict.fromkeys(repr(leaf.rule) for _, leaf in self.all_leaves())
        shown = ", ".join(list(rules)[:3]) + (f", … {len(rules) - 3} more" if len(rules) > 3 else "")
        return f"OptimizerState({self.count} parameters, after step {self.step}: {shown or 'nothing'})"

    @cached_property
    def count(self) -> int:
        """How many parameters have a state."""
        return sum(1 for _ in self.all_leaves())

    def all_leaves(self) -> Iterator[tuple[Path, LeafState]]:
        """The path and state of every parameter."""
        for path, (each,) in walk(self.leaves, where=LeafState):
            yield path, each

    def with_leaves(self, change: Callable[[Path, LeafState], LeafState]) -> OptimizerState:
        """Another state with other leaves."""
        leaves = fmapstructure(lambda path, each: change(path, each), self.leaves, where=LeafState, with_path=True)
        return OptimizerState(leaves, self.step, dict(self.shared))

    def copy(self) -> OptimizerState:
        """A state with arrays of its own."""
        return self.with_leaves(lambda _, each: each.like(copy_of(each)))


set_kind(
    OptimizerState,
    Box(open=lambda state: state.leaves, close=lambda state, leaves: OptimizerState(leaves, state.step, state.shared)),
)


def copy_of(kept: Any) -> Any:
    """What a rule keeps, with arrays of its own."""
    if isinstance(kept, Mapping):
        return {name: copy_of(value) for name, value in kept.items()}
    return copied(kept) if hasattr(kept, "dtype") else kept


def setup(rule: Any, model: Any) -> OptimizerState:
    """The state of a rule, before the first update, for every trained parameter of a model.

    Args:
        rule: one of `cowalk.optim`, a dict that gives one for each path pattern (the first that matches decides; None leaves
            parameters alone), or a transformation of Optax's for a model of JAX arrays.
        model: any tree. Trained are the arrays that `cowalk.trainables` lists.

    Raises:
        RuleError: `rule` is none, a parameter matches no pattern, or a pattern no parameter.

    >>> import numpy as np, cowalk
    >>> from cowalk import optim
    >>> model = {"fc": {"weight": np.ones((2, 2)), "bias": np.zeros(2)}, "steps": 3}
    >>> state = cowalk.setup({"*.bias": optim.Descent(0.1), "*": optim.AdamW(1e-3)}, model)
    >>> state["fc"]["bias"].rule
    Descent(lr=0.1)
    >>> sorted(state["fc.weight"])
    ['m', 'step', 'v']
    """
    if not isinstance(rule, Rule) and _is_model(rule) and (isinstance(model, Rule | type) or hasattr(model, "update")):
        raise RuleError("the rule comes first: cowalk.setup(rule, model)")
    chosen = as_rule(rule)
    found = {path: x for path, (x,) in walk(model, where=istrainable)}
    names = [str(path) for path in found]
    if not found:
        warnings.warn(
            "cowalk.setup: this model has no trained parameter: nothing will be updated. Open a class of your own with "
            "cowalk.functor",
            stacklevel=2,
        )
    for each in _by_path(chosen):
        each.check_used(names)
    states: dict[Path, LeafState] = {}
    with without_history():
        for (path, x), name in zip(found.items(), names, strict=True):
            own = chosen.at_path(name)
            kept: Any = own.init(x)
            if not isinstance(kept, dict):
                raise RuleError(
                    f"{type(own).__name__}.init returns a dict of what it keeps, not a {type(kept).__name__}"
                )
            states[path] = LeafState(
                own, _counted_by_jax(kept) if is_jax(x) else kept, shape=tuple(x.shape), dtype=x.dtype
            )
    leaves = fmapstructure(lambda path, _: states.get(path), model, ties="each", with_path=True)
    step = 0 if not any(map(is_jax, found.values())) else _counted_by_jax(0)
    return OptimizerState(leaves, step, _shared(states, found))


def _counted_by_jax(kept: Any) -> Any:
    """What a rule keeps, with counts as arrays: `jax.jit` must not take them for constants, and compile for each anew."""
    if isinstance(kept, Mapping):
        return {name: _counted_by_jax(value) for name, value in kept.items()}
    if not isinstance(kept, int):
        return kept
    import jax.numpy as jnp

    return jnp.asarray(kept, jnp.int32)


def _shared(states: Mapping[Path, LeafState], xs: Mapping[Path, Any]) -> dict[Rule, Any]:
    """The states of the rules that have one for all parameters at once."""
    members: dict[Rule, dict[str, Any]] = {}
    for path, state in states.items():
        for stage in state.rule.stages:
            if isinstance(stage, Optax):
                if not is_jax(xs[path]):
                    raise RuleError(
                        f"a transformation of Optax's is for JAX arrays, and {path} is a {type(xs[path]).__name__}"
                    )
                members.setdefault(stage, {})[str(path)] = xs[path]
    return {rule: rule.init_tree(arrays) for rule, arrays in members.items() if isinstance(rule, Optax)}


def _by_path(rule: Rule) -> list[ByPath]:
    """All rules by path in a rule."""
    if isinstance(rule, ByPath):
        return [rule, *(inner for _, each in rule.choices if each is not None for inner in _by_path(each))]
    parts = rule.rules if isinstance(rule, Chain) else (getattr(rule, "rule", None),)
    return [inner for part in parts if isinstance(part, Rule) for inner in _by_path(part)]


def _is_model(node: Any) -> bool:
    try:
        return any(True for _ in walk(node, where=istrainable))
    except CowalkError:
        return False


def without_history() -> Any:
    """A context in which torch, if it is there, records no history."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.no_grad()


on_import("jax", partial(importlib.import_module, "cowalk.optim.pytrees"))
load_imported()  # JAX may be there already

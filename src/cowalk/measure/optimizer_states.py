"""Adam's moments of the gradient, found in what an optimizer keeps: torch's and Keras's optimizers, Optax's states, own trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from cowalk.frameworks.framework import Hyperparameters, ParameterState, framework_of
from cowalk.measure.backend import AdamSettings
from cowalk.tree import MISSING, CowalkError, Path, fmap, isleaf, walk

FIRST_MOMENTS = ("exp_avg", "mu", "m", "momentum")
SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "nu", "max_v", "v", "velocity_hat", "velocity")
"""What frameworks call them. AMSGrad's largest v comes first: it is the one in its steps."""

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""What is taken where neither the state nor the caller says: the defaults of torch and of Optax."""

T = TypeVar("T")


def _first(*choices: T | None) -> T:
    return next(each for each in choices if each is not None)


class AdamMoments(NamedTuple):
    """Adam's moments of one parameter; v is None where there are none."""

    m: Any = None
    v: Any = None
    step: float | None = None
    v_is_debiased: bool = False


@dataclass(frozen=True, slots=True)
class AdamSource:
    """Trees to walk beside the parameters, and how a parameter's values in them become Adam's m and v.

    Attributes:
        followers: the trees.
        moments: finds them in the values of the followers at one leaf.
        owned: the settings of the parameters that belong to the optimizer, by path; None where that is not known.
        settings: what the caller said.
    """

    followers: tuple[Any, ...] = ()
    moments: Callable[[tuple[Any, ...]], AdamMoments] = field(default=lambda _: AdamMoments())
    owned: Mapping[Path, Hyperparameters] | None = None
    settings: Hyperparameters = field(default_factory=Hyperparameters)

    def adam(self, path: Path, values: tuple[Any, ...]) -> tuple[Any, Any, AdamSettings | None]:
        """m, v and the settings of one parameter; no settings where there is no v."""
        m, v, step, v_is_debiased = self.moments(values)
        if v is None:
            return None, None, None
        own = (self.owned or {}).get(path, Hyperparameters())
        lr = _first(self.settings.lr, own.lr, float("nan"))
        epsilon = _first(self.settings.epsilon, own.epsilon, EPSILON)
        betas = _first(self.settings.betas, own.betas, BETAS)
        step = _first(step, own.step, 0.0)
        m_scale, v_scale = (1.0 / (1.0 - float(beta) ** step) if step else 1.0 for beta in betas)
        return m, v, AdamSettings(epsilon, m_scale, 1.0 if v_is_debiased else v_scale, lr)


def adam_source(params: Any, opt_state: Any, settings: Hyperparameters) -> AdamSource:
    """Find Adam's moments in an optimizer, an optimizer's state under the parameters' paths, or a state of Optax's.

    Raises:
        CowalkError: `opt_state` is nothing of the kind.
    """
    framework = framework_of(params)
    if framework is not None and framework.hyperparameters is not None and framework.optimizer_state is not None:
        owned = framework.hyperparameters(params, opt_state)
        if owned is not None:
            return AdamSource((framework.optimizer_state(params, opt_state),), _of_state, owned, settings)
    if hasattr(opt_state, "opt_state"):  # NNX's Optimizer, Flax's TrainState
        opt_state = opt_state.opt_state
    if isinstance(opt_state, Mapping) and {"state", "param_groups"} <= set(opt_state):
        raise CowalkError(
            "opt_state= is a state_dict, which knows its parameters by position only; give the optimizer itself"
        )
    if opt_state is None or isleaf(opt_state):
        raise CowalkError(
            "opt_state= is an optimizer, its state under the model's paths, or a state of Optax's, not a "
            f"{type(opt_state).__name__}"
        )
    found = [node for _, (node,) in walk(opt_state, where=is_scale_by_adam) if is_scale_by_adam(node)]
    if found:
        trees = tuple(tree for node in found for tree in (node.mu, second_moment(node)))
        return AdamSource(trees, lambda values: _of_states(values, found), None, settings)
    if any(True for _ in walk(opt_state, where=_is_parameter_state)):
        states = fmap(_as_parameter_state, opt_state, where=_is_parameter_state)
        found = {path: state.hyperparameters for path, (state,) in walk(states, where=ParameterState)}
        is_known = any(own != Hyperparameters() for own in found.values())
        return AdamSource((states,), _of_state, found if is_known else None, settings)
    # Optax's states are tuples; this one has no moments of Adam's.
    if isinstance(opt_state, tuple) and not any(callable(leaf) for _, (leaf,) in walk(opt_state)):
        return AdamSource(settings=settings)
    raise CowalkError(
        "opt_state= is an optimizer, its state under the model's paths, or a state of Optax's; this "
        f"{type(opt_state).__name__} holds nothing that is called {', '.join(SECOND_MOMENTS)}"
    )


def is_scale_by_adam(node: Any) -> bool:
    """Whether a node is one of Optax's states that hold Adam's moments."""
    return all(hasattr(node, name) for name in ("mu", "nu", "count"))


def keeps_largest(state: Any) -> bool:
    """Whether one of Optax's states is AMSGrad's: the v of its steps is the largest so far, and debiased already."""
    return hasattr(state, "nu_max")


def second_moment(state: Any) -> Any:
    """The v that one of Optax's states steps by, for each parameter."""
    return state.nu_max if keeps_largest(state) else state.nu


def _is_parameter_state(node: Any) -> bool:
    """Whether a dict is an optimizer's state of one parameter: it is one, or holds an array under one of the names of v."""
    if isinstance(node, ParameterState):
        return True
    return isinstance(node, dict) and any(isleaf(node[name]) for name in SECOND_MOMENTS if name in node)


def _as_parameter_state(state: Any) -> ParameterState:
    return state if isinstance(state, ParameterState) else ParameterState(state)


def _entries(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What a state holds, and what the states in it do: those of the rules of a chain."""
    entries: dict[Any, Any] = {}
    for name, value in state.items():
        entries |= _entries(value) if isinstance(value, Mapping) else {name: value}
    return entries


def _of_state(values: tuple[Any, ...]) -> AdamMoments:
    (state,) = values
    if not isinstance(state, Mapping):
        return AdamMoments()
    state = _entries(state)
    v = next((state[name] for name in SECOND_MOMENTS if state.get(name) is not None), None)
    m = next((state[name] for name in FIRST_MOMENTS if state.get(name) is not None), None)
    step = state.get("step")
    if step is not None and _step(step) == 0:  # before the first step the moments say nothing
        return AdamMoments()
    return AdamMoments(m, v, None if step is None else _step(step))


def _of_states(values: tuple[Any, ...], states: Sequence[Any]) -> AdamMoments:
    for i, state in enumerate(states):  # under optax.partition each has the parameters of its own
        m, v = values[2 * i], values[2 * i + 1]
        if v is not MISSING:
            return AdamMoments(None if m is MISSING else m, v, _step(state.count), keeps_largest(state))
    return AdamMoments()


def _step(count: Any) -> float:
    while hasattr(count, "get_value"):  # a variable of NNX's
        count = count.get_value()
    return float(count)

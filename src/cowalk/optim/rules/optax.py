"""Transformations of Optax's as rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cowalk.optim.rules.rule import Rule, RuleError


@dataclass(frozen=True)
class Optax(Rule):
    """A transformation of Optax's, over all parameters that have this rule, as one tree `{path: array}`.

    A parameter without a gradient, or a frozen one, keeps its value and its part of the state; to the transformation its
    gradient is zero, so that norms over all parameters come out right. Counts go on.
    """

    transformation: Any

    @property
    def over_tree(self) -> bool:
        return True

    def init_tree(self, xs: Mapping[str, Any]) -> Any:
        """The state of all parameters."""
        return self.transformation.init(dict(xs))

    def apply_tree(self, state: Any, xs: Mapping[str, Any], gradients: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The new state, and the steps of the parameters that have a gradient."""
        import jax
        import jax.numpy as jnp
        import optax

        complete = {path: gradients[path] if path in gradients else jnp.zeros_like(x) for path, x in xs.items()}
        updates, new = self.transformation.update(complete, state, dict(xs))
        if len(gradients) < len(xs):
            owners = optax.tree_utils.tree_map_params(
                self.transformation,
                lambda _, path: _Owner(path),
                new,
                {path: path for path in xs},
                transform_non_params=lambda _: _Owner(None),
            )
            new = jax.tree.map(
                lambda owner, after, before: after if owner.path is None or owner.path in gradients else before,
                owners,
                new,
                state,
                is_leaf=lambda node: isinstance(node, _Owner),
            )
        return new, {path: -updates[path] for path in gradients}

    def settings(self) -> Mapping[str, Any]:
        return {}

    def apply(self, state: Any, x: Any, gradient: Any) -> Any:  # noqa: ARG002
        raise RuleError("a transformation of Optax's is applied to all arrays at once")


@dataclass(frozen=True)
class _Owner:
    """Whose part of a state an array is; None for what belongs to no parameter."""

    path: str | None

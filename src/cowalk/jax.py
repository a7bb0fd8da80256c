"""Measuring inside jax.jit: `stats` adds one small array to what a jitted step returns, and nothing else.

The array holds the statistics of all leaves together. On the host the `StackedStats` around it decodes it; under lax.scan or
jax.vmap it gets leading axes as any array does. Arrays may be sharded, donated, of any floating or complex dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, log
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.core import Tracer

from cowalk.frameworks.framework import Hyperparameters
from cowalk.measure.backend import SPANS, AdamSettings, Matrix, Operands
from cowalk.measure.jax_arrays import decode, lines
from cowalk.measure.obstacles import MeasureError
from cowalk.measure.optimizer_states import BETAS, EPSILON, is_scale_by_adam, keeps_largest, second_moment
from cowalk.measure.states import states_of
from cowalk.measure.stats import settings_of
from cowalk.measure.table import Table
from cowalk.tree import MISSING, CowalkError, Path, isleaf, istrainable, walk

__all__ = ["StackedStats", "stats"]


@tree_util.register_pytree_node_class
class StackedStats:
    """The statistics of all leaves in one array: a pytree with that array as its only leaf.

    Attributes:
        encoded: the array, (… × leaves × columns × 3); see `matrix`.
        paths: where each leaf is in the parameters.
        shapes, dtypes: of the parameter there.
        missing: for each leaf, which of "gradient", "update", "adam" were asked for and have no value there.
    """

    __slots__ = ("dtypes", "encoded", "missing", "paths", "shapes")

    def __init__(
        self,
        encoded: Any,
        paths: Iterable[Path],
        shapes: Iterable[tuple[int, ...]],
        dtypes: Iterable[np.dtype[Any]],
        missing: Iterable[tuple[str, ...]],
    ) -> None:
        self.encoded = encoded
        self.paths = tuple(paths)
        self.shapes = tuple(shapes)
        self.dtypes = tuple(dtypes)
        self.missing = tuple(missing)

    def __repr__(self) -> str:
        return f"StackedStats({len(self.paths)} leaves)"

    def matrix(self) -> Matrix:
        """The matrix in float64, (… × leaves × columns), the columns as `cowalk.measure.backend.SPANS` names them.

        It copies the array to the host, so it is not for use inside jax.jit.
        """
        if isinstance(self.encoded, Tracer):
            raise TypeError(
                "matrix() needs values, and inside jax.jit there are none: return the StackedStats, and ask outside"
            )
        return decode(jax.device_get(self.encoded))

    def table(self) -> Table:
        """The statistics as a `Table`, on the host.

        Raises:
            ValueError: there are several, one a step of lax.scan or a member of jax.vmap.
        """
        matrix = self.matrix()
        if matrix.ndim != len(("leaves", "columns")):
            raise ValueError(
                f"this holds {int(np.prod(matrix.shape[:-2]))} tables; take one: "
                "jax.tree.map(lambda array: array[0], found).table()"
            )
        has_grads = bool(np.isfinite(matrix[:, SPANS["gradient"].start]).any()) or any(
            "gradient" in names for names in self.missing
        )
        return Table(
            self.paths,
            matrix,
            aliases={},
            states=states_of(matrix, ["gradient" not in names for names in self.missing] if has_grads else None),
            shapes=self.shapes,
            dtypes=[dtype.name for dtype in self.dtypes],
        )

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        """What JAX sees: the array, and what does not change from step to step."""
        return (self.encoded,), (self.paths, self.shapes, self.dtypes, self.missing)

    @classmethod
    def tree_unflatten(cls, fixed: Any, children: Iterable[Any]) -> StackedStats:
        """The reverse."""
        return cls(*children, *fixed)


def stats(
    params: Any,
    grads: Any = None,
    updates: Any = None,
    opt_state: Any = None,
    *,
    adam: Mapping[str, Any] | None = None,
) -> StackedStats:
    """Measure every trainable array of a model inside jax.jit, beside its gradient, its update and Adam's moments.

    It is right outside of jit too, but there every operation is one of its own.

    Args:
        params: any model, or tree of arrays; its order is the result's. (jax.jit itself sorts the keys of dicts that pass it.)
        grads: its gradients, in containers of any kind, matched by key.
        updates: what is added to the parameters, likewise.
        opt_state: an Optax state. The states in it with the fields `mu`, `nu` and `count`, as that of `optax.adam`, are
            measured against `grads`; there may be none.
        adam: what `opt_state` does not hold: "lr", "betas" (default 0.9, 0.999), "epsilon" (1e-8), as numbers or tracers.
            Where the learning rate is not known, the size of the step is left out.

    Raises:
        StructureError: the trees do not fit together.
        MeasureError: arrays at one path have different shapes.

    >>> import jax, jax.numpy as jnp, cowalk.jax
    >>> params = {"bias": jnp.zeros(3), "weight": jnp.ones((2, 3))}
    >>> @jax.jit
    ... def step(params):
    ...     loss, grads = jax.value_and_grad(lambda params: params["weight"].sum())(params)
    ...     return loss, cowalk.jax.stats(params, grads)
    >>> loss, found = step(params)
    >>> [str(path) for path in found.paths], found.shapes, found.matrix().shape[0]
    (['bias', 'weight'], ((3,), (2, 3)), 2)
    >>> found.table()["bias"].state
    'zero'
    """
    trees = {name: tree for name, tree in (("gradient", grads), ("update", updates)) if tree is not None}
    if opt_state is not None and isleaf(opt_state):
        raise CowalkError(f"opt_state= is a state of Optax's, not a {type(opt_state).__name__}")
    states = [node for _, (node,) in walk(opt_state, where=is_scale_by_adam)]
    settings = [_adam_settings(state, settings_of(adam)) for state in states]
    moments = [tree for state in states for tree in (state.mu, second_moment(state))]
    paths: list[Path] = []
    leaves: list[Operands] = []
    missing: list[tuple[str, ...]] = []
    for path, values in walk(params, *trees.values(), *moments, where=istrainable, missing="pass", ties="sum"):
        parameter, *others = (None if each is MISSING else jnp.asarray(each) for each in values)
        found = dict(zip(trees, others, strict=False))
        of_adam = _adam_operands(others[len(trees) :], settings)
        absent = [name for name, each in found.items() if each is None]
        paths.append(path)
        missing.append((*absent, "adam") if states and not of_adam else tuple(absent))
        leaves.append(Operands(parameter, **found, **of_adam))
    _check_shapes(paths, leaves)
    return StackedStats(
        lines(leaves),
        paths,
        (leaf.parameter.shape for leaf in leaves),
        (np.dtype(leaf.parameter.dtype) for leaf in leaves),
        missing,
    )


def _adam_operands(moments: Sequence[Any], settings: Sequence[AdamSettings]) -> dict[str, Any]:
    """m, v and the settings, from the first state that has a parameter; under optax.partition each has its own."""
    for m, v, each in zip(moments[::2], moments[1::2], settings, strict=True):
        if v is not None:
            return {"m": m, "v": v, "adam": each}
    return {}


def _adam_settings(state: Any, known: Hyperparameters) -> AdamSettings:
    m_scale, v_scale = (_debiasing(beta, state.count) for beta in known.betas or BETAS)
    if keeps_largest(state):
        v_scale = 1.0
    epsilon = EPSILON if known.epsilon is None else known.epsilon
    return AdamSettings(epsilon, m_scale, v_scale, float("nan") if known.lr is None else known.lr)


def _debiasing(decay: Any, count: Any) -> Any:
    """1 / (1 − decay^count), and 1 before the first step."""
    traced = isinstance(decay, jax.Array)
    logarithm = jnp.log(decay) if traced else log(decay) if decay > 0 else -inf  # in float64 where it can be had
    taken = jnp.asarray(count) > 0
    return jnp.where(taken, -1 / jnp.expm1(jnp.where(taken, count, 1) * logarithm), 1.0)


def _check_shapes(paths: Iterable[Path], leaves: Iterable[Operands]) -> None:
    problems = [
        (path, f"the parameter has shape {leaf.parameter.shape}, {name} {array.shape}")
        for path, leaf in zip(paths, leaves, strict=True)
        for name, array in zip(_NAMES, leaf[1:5], strict=True)
        if array is not None and array.shape != leaf.parameter.shape
    ]
    if problems:
        raise MeasureError(problems)


_NAMES = ("its gradient", "its update", "Adam's mu", "Adam's nu")

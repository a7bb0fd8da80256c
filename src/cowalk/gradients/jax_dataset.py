"""A batch of JAX's: the loss, its gradient and the addition in one compiled function, in whose memory the sums stay.

The sums that go in are given away (donated) to those that come out, so that they are in memory once (but not those of a caller,
who would lose them to an error); of the gradients there are
some layers at a time, as long as it takes to add them. What the loss does to the model (batch statistics, counters of NNX) comes
out too, and is done to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cowalk.frameworks.framework import framework_of
from cowalk.gradients import jax_sums, sums
from cowalk.gradients.accumulator import Accumulator, Reduction, mean_norms
from cowalk.gradients.shapes import shape_of
from cowalk.measure.arrays import is_tensor
from cowalk.tree import Path, fmap, fmap_, walk

Sums = Mapping[str, tuple[Any, Any]]


class CompiledStep:
    """Adds the gradients of one loss in one model, compiled for each shape of batches."""

    def __init__(
        self, loss: Callable[..., Any], model: Any, loss_reduction: Reduction, *, donates: bool = True
    ) -> None:
        self._loss = loss
        self._model = model
        self._loss_reduction: Reduction = loss_reduction
        self._arrays = {str(path): leaf for path, (leaf,) in walk(model, where=_is_array)}
        self._paths: dict[str, Path] = {}
        self._run = jax.jit(self._traced, static_argnums=(3, 4), donate_argnums=0 if donates else ())
        self._shape: Any = None

    def prepare(self, batch: Any, weight: float) -> Callable[[Accumulator], float]:
        """A function that adds a batch to an accumulator, and gives the loss's value."""
        arguments = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        leaves, structure = jax.tree.flatten(arguments)
        leaves = [np.asarray(leaf) if is_tensor(leaf) else leaf for leaf in leaves]  # as torch's DataLoader gives them
        arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
        static = tuple(None if _is_array(leaf) else _Static(leaf) for leaf in leaves)
        factor = weight if self._loss_reduction == "mean" else 1.0

        def add(total: Accumulator) -> float:
            total.replace_sums(_as_jax)
            known = {str(path): (each.total, each.lost) for path, each in total.sums().items()}
            self._paths.update({str(path): path for path in total.sums()})
            value, new, sizes, changed = self._run(
                known, self._arrays, (arrays, jnp.asarray(factor)), structure, static
            )
            if changed:
                self._arrays.update(changed)
                fmap_(lambda path, x: changed.get(str(path), x), self._model, where=_is_array, with_path=True)
            in_order = [(name, path) for name, path in self._paths.items() if name in new]  # JAX sorts them
            value, sizes = float(value), jax.device_get(sizes)
            paths = [path for name, path in in_order if name in sizes]
            norms = [float(sizes[name]) for name, _ in in_order if name in sizes]
            total.absorb(
                {path: new[name] for name, path in in_order},
                dict(zip(paths, mean_norms(norms, weight, self._loss_reduction), strict=True)),
                weight,
                value,
                self._shape,
            )
            return value

        return add

    def _traced(
        self,
        known: Sums,
        arrays: Mapping[str, Any],
        dynamic: tuple[list[Any], Any],
        structure: Any,
        static: Sequence[Any],
    ) -> tuple[Any, dict[str, tuple[Any, Any]], dict[str, Any], dict[str, Any]]:
        leaves, factor = dynamic
        filled = [array if kept is None else kept.value for array, kept in zip(leaves, static, strict=True)]
        arguments = jax.tree.unflatten(structure, filled)
        model = fmap(lambda path, _: arrays[str(path)], self._model, where=_is_array, with_path=True)
        framework: Any = framework_of(model)
        found = framework.differentiate(self._loss, model, arguments, {}, False)
        self._shape = shape_of(found.gradients, lambda _: True)
        after = {str(path): leaf for path, (leaf,) in walk(model, where=_is_array)}
        changed = {name: leaf for name, leaf in after.items() if leaf is not arrays.get(name)}
        new, sizes = dict(known), dict[str, Any]()
        for path, (gradient,) in walk(found.gradients, ties="each"):
            name = str(path)
            self._paths[name] = path
            total, lost = known[name] if name in known else _zeros(gradient)
            total, lost, sizes[name] = jax_sums.added(total, lost, gradient, factor)
            new[name] = total, lost
        return found.value, new, sizes, changed


class _Static:
    """What is no array in a batch. Equal ones are compiled for once."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and type(self.value) is type(other.value) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _zeros(gradient: Any) -> tuple[Any, Any]:
    name, is_narrow = sums.wide_name(gradient), sums.dtype_name(gradient) not in sums.WIDE
    return jnp.zeros(gradient.shape, name), jnp.zeros(gradient.shape, name) if is_narrow else None


def _as_jax(each: sums.Sum) -> sums.Sum:
    """A sum whose memory a compiled function can take over."""
    if isinstance(each.total, jax.Array):
        return each
    lost = None if each.lost is None else jnp.array(each.lost)
    total = each.total.detach().cpu().numpy() if is_tensor(each.total) else each.total
    return sums.Sum(jnp.array(total), lost, each.count, each.square, is_jax=True)

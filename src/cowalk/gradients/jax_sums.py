"""Adding to sums of JAX arrays: one compiled call for all of them, in whose memory the new sums come to lie (donation)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def added(total: Any, lost: Any, gradient: Any, factor: Any) -> tuple[Any, Any, Any]:
    """One step of a sum, traced: the new sum, what roundings lost, and the 2-norm of the gradient."""
    gradient = gradient.astype(total.dtype)
    addend = gradient * factor.astype(total.real.dtype)
    if lost is None:
        return total + addend, None, norm(gradient)
    addend = addend + lost
    after = total + addend
    gained = after - total
    loss = (total - (after - gained)) + (addend - gained)
    return after, jnp.where(jnp.isfinite(loss), loss, jnp.zeros_like(loss)), norm(gradient)


def norm(array: Any) -> Any:
    """The 2-norm of an array, whose squares neither overflow nor vanish."""
    squares = _sum_of_squares(array)
    info = jnp.finfo(squares.dtype)
    is_usual = (squares > info.tiny / info.eps) & (squares < info.max)
    return jax.lax.cond(is_usual, lambda _: jnp.sqrt(squares), _scaled_norm, array)


def _sum_of_squares(array: Any) -> Any:
    if jnp.iscomplexobj(array):
        return jnp.square(array.real).sum() + jnp.square(array.imag).sum()
    return jnp.square(array).sum()


def _scaled_norm(array: Any) -> Any:
    largest = jnp.abs(array).max(initial=0)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, jnp.ones_like(largest))
    return jnp.sqrt(_sum_of_squares(array / unit)) * unit


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _add(totals: list[Any], losts: list[Any], gradients: list[Any], factor: Any) -> tuple[list[Any], list[Any], Any]:
    new = [added(*each, factor) for each in zip(totals, losts, gradients, strict=True)]
    return [total for total, _, _ in new], [lost for _, lost, _ in new], [size for _, _, size in new]


def add(
    totals: Sequence[Any], losts: Sequence[Any], gradients: Sequence[Any], factor: float
) -> tuple[list[Any], list[Any], list[float]]:
    """The new sums, what they lost, and the norms of the gradients. The old sums are gone."""
    new_totals, new_losts, norms = _add(list(totals), list(losts), list(gradients), jnp.asarray(factor))
    return new_totals, new_losts, [float(each) for each in jax.device_get(norms)]


_times: Callable[[Any, Any], Any] = lambda array, factor: array * factor.astype(array.real.dtype)  # noqa: E731
_scaled = jax.jit(_times)
_scaled_in_place = jax.jit(_times, donate_argnums=0)


def scaled(array: Any, factor: float, in_place: bool) -> Any:
    """An array times a factor; in place, the old array is gone."""
    return (_scaled_in_place if in_place else _scaled)(array, jnp.asarray(factor))

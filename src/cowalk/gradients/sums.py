"""Sums of gradients, one for each parameter, that gradients are added to in place.

A sum is an array of this room's own: never a gradient itself, which may be another parameter's too, an expanded scalar, or a
buffer that the next backward pass fills anew. It is of float32 for narrower gradients, with what its roundings lost beside it
(a sum of two numbers, about twice as exact as one), and else of the gradient's own dtype.

What lies in this process's CPU memory is added by `cowalk.measure.adding`, JAX's arrays too: their sums are NumPy's until they
are asked for. On accelerators torch adds, and JAX in one compiled call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cowalk.measure import adding, native
from cowalk.measure.arrays import is_tensor, written_out
from cowalk.measure.dispatch import is_jax

LEAST_NORM = 1e-15
"""Below it, squares that are added in float32 may have vanished."""
WIDE = ("float32", "float64", "complex64", "complex128")


@dataclass(slots=True, eq=False)
class Sum:
    """The sum of the gradients of one parameter, weighted.

    Attributes:
        total: the sum.
        lost: what roundings took from it; None where gradients are not narrower than the sum.
        count: how many gradients were added.
        square: the sum of weight · |g|² over the batches, g their mean gradients.
        is_jax: whether the gradients are JAX's, and the total shall be when it is asked for.
    """

    total: Any
    lost: Any = None
    count: int = 0
    square: float = 0.0
    is_jax: bool = False
    _likes: tuple[Any, ...] = ()

    def takes(self, gradient: Any) -> bool:
        """Whether a gradient is just like one that this sum could take."""
        return self._likes == _likes_of(gradient)

    def remember(self, gradient: Any) -> None:
        """Take note that this sum can take gradients like this one."""
        self._likes = _likes_of(gradient)


def _likes_of(gradient: Any) -> tuple[Any, ...]:
    dtype = getattr(gradient, "dtype", None)
    return type(gradient), dtype, getattr(gradient, "shape", None), getattr(gradient, "device", None)


def dtype_name(array: Any) -> str:
    """What NumPy calls an array's dtype."""
    return str(array.dtype).removeprefix("torch.") if is_tensor(array) else array.dtype.name


def wide_name(array: Any) -> str:
    """The dtype to add gradients like this one in."""
    name = dtype_name(array)
    return name if name in WIDE else "complex64" if name.startswith("complex") else "float32"


def new_sum(gradient: Any) -> Sum:
    """A sum of nothing yet, for gradients like this one."""
    name, is_narrow = wide_name(gradient), dtype_name(gradient) not in WIDE
    if is_tensor(gradient):
        torch = sys.modules["torch"]

        def zeros() -> Any:
            return torch.zeros(tuple(gradient.shape), dtype=getattr(torch, name), device=gradient.device)
    elif _is_remote_jax(gradient):
        import jax.numpy as jnp

        def zeros() -> Any:
            return jnp.zeros(gradient.shape, name, device=gradient.sharding)
    else:

        def zeros() -> Any:
            return np.zeros(gradient.shape, name)

    return Sum(zeros(), zeros() if is_narrow else None, is_jax=is_jax(gradient))


def _is_remote_jax(array: Any) -> bool:
    """Whether an array is JAX's and not in this process's CPU memory as one piece."""
    return is_jax(array) and not native.is_local_jax(array)


def fits(into: Sum, gradient: Any) -> bool:
    """Whether gradients like this one can be added to a sum as it is: of the same framework and device, no wider."""
    total = into.total
    if is_tensor(total) != is_tensor(gradient) or is_jax(total) != _is_remote_jax(gradient):
        return False
    if into.is_jax != is_jax(gradient):
        return False
    if is_tensor(total) and total.device != gradient.device:
        return False
    return np.result_type(wide_name(total), wide_name(gradient)) == np.dtype(wide_name(total)) and (
        into.lost is not None or dtype_name(gradient) in WIDE
    )


def converted(old: Sum, gradient: Any) -> Sum:
    """A sum of the same value that gradients like this one can be added to."""
    new = new_sum(gradient)
    wide = str(np.result_type(wide_name(old.total), wide_name(gradient)))
    keeps_lost = new.lost is not None or old.lost is not None

    def like(array: Any) -> Any:
        values = array.detach().cpu().numpy() if is_tensor(array) else np.asarray(array)
        values = np.array(values, wide)
        if is_tensor(new.total):
            return sys.modules["torch"].from_numpy(values).to(new.total.device)
        if is_jax(new.total):
            import jax

            return jax.device_put(values, new.total.sharding)
        return values

    lost = (like(old.lost) if old.lost is not None else like(np.zeros(np.shape(old.total)))) if keeps_lost else None
    return Sum(like(old.total), lost, old.count, old.square, new.is_jax)


def add(into: Sequence[Sum], gradients: Sequence[Any], factor: float) -> list[float]:
    """Add factor · gradient to each sum; the 2-norm of each gradient. Gradients fit their sums."""
    homes = [_home(gradient) for gradient in gradients]
    if len(set(homes)) == 1:
        return _ADD[homes[0]](into, gradients, factor)
    norms = [0.0] * len(gradients)
    for home in dict.fromkeys(homes):
        places = [i for i, each in enumerate(homes) if each == home]
        found = _ADD[home]([into[i] for i in places], [gradients[i] for i in places], factor)
        for i, norm in zip(places, found, strict=True):
            norms[i] = norm
    return norms


def _home(gradient: Any) -> str:
    if isinstance(gradient, np.ndarray):
        return "memory"
    if is_tensor(gradient):
        return "memory" if gradient.device.type == "cpu" else "torch device"
    return "jax" if _is_remote_jax(gradient) else "memory"


def _add_in_memory(into: Sequence[Sum], gradients: Sequence[Any], factor: float) -> list[float]:
    addends = [adding.Addend(each.total, each.lost, gradient) for each, gradient in zip(into, gradients, strict=True)]
    return adding.add(addends, factor).tolist()


def _add_on_device(into: Sequence[Sum], gradients: Sequence[Any], factor: float) -> list[float]:
    """A few launches for all tensors, and one copy to the host."""
    torch = sys.modules["torch"]
    with torch.no_grad():
        totals = [each.total for each in into]
        wide = [written_out(gradient).to(total.dtype) for gradient, total in zip(gradients, totals, strict=True)]
        norms = torch.stack([norm.to(totals[0].device, torch.float32) for norm in torch._foreach_norm(wide)])  # noqa: SLF001
        plain = [i for i, each in enumerate(into) if each.lost is None]
        if plain:
            torch._foreach_add_([totals[i] for i in plain], [wide[i] for i in plain], alpha=factor)
        for each, gradient in zip(into, wide, strict=True):
            if each.lost is not None:
                _add_with_lost(each.total, each.lost, gradient * factor)
        sizes = zip(norms.tolist(), wide, strict=True)
        return [_scaled_norm(gradient) if norm < LEAST_NORM or norm == math.inf else norm for norm, gradient in sizes]


def _scaled_norm(tensor: Any) -> float:
    """The 2-norm of a tensor, whose squares neither overflow nor vanish."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return largest * float((tensor / largest).norm()) if 0 < largest < math.inf else largest


def _add_with_lost(total: Any, lost: Any, addend: Any) -> None:
    """One addition to a compensated sum; what rounding takes from it is found by Knuth's TwoSum."""
    addend = addend + lost
    after = total + addend
    added = after - total
    loss = (total - (after - added)) + (addend - added)
    lost.copy_(loss.nan_to_num(0.0, 0.0, 0.0))
    total.copy_(after)


def _add_in_jax(into: Sequence[Sum], gradients: Sequence[Any], factor: float) -> list[float]:
    from cowalk.gradients import jax_sums

    totals, losts, norms = jax_sums.add(
        [each.total for each in into], [each.lost for each in into], list(gradients), factor
    )
    for each, total, lost in zip(into, totals, losts, strict=True):
        each.total, each.lost = total, lost
    return np.asarray(norms, np.float64).tolist()


_ADD = {"memory": _add_in_memory, "torch device": _add_on_device, "jax": _add_in_jax}


def merged(mine: Sum | None, theirs: Sum) -> Sum:
    """One sum with what another has; the other stays as it is."""
    if mine is None:
        mine = new_sum(theirs.total)
        mine.is_jax = theirs.is_jax
    there = _where(theirs.total, mine.total)
    if np.result_type(wide_name(mine.total), wide_name(there)) != np.dtype(wide_name(mine.total)):
        wide = converted(mine, there)
        wide.is_jax = mine.is_jax
        mine = wide
    for part in (there, None if theirs.lost is None else _where(theirs.lost, mine.total)):
        if part is not None:
            _ADD[_home(mine.total)]([mine], [part], 1.0)
    mine.count += theirs.count
    mine.square += theirs.square
    return mine


def _where(array: Any, lead: Any) -> Any:
    """An array as one of the lead's framework, on its device."""
    if is_tensor(lead):
        torch = sys.modules["torch"]
        return (array if is_tensor(array) else torch.from_numpy(np.array(array))).to(lead.device)
    values = array.detach().cpu().numpy() if is_tensor(array) else array
    if is_jax(lead):
        import jax

        return jax.device_put(values, lead.sharding)
    return np.asarray(values)


def result(of: Sum, factor: float, *, in_place: bool) -> Any:
    """A sum times a factor, as an array like the gradients: in the sum's own memory, which it gives up, or in new."""
    total = of.total
    if is_jax(total):
        from cowalk.gradients import jax_sums

        return jax_sums.scaled(total, factor, in_place)
    if in_place:
        total *= factor
    else:
        total = total * factor if np.ndim(total) or is_tensor(total) else np.asarray(total * factor, total.dtype)
    if not of.is_jax:
        return total
    import jax.numpy as jnp

    return jnp.asarray(total)

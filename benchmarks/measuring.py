"""`cowalk.stats` beside the same statistics in eager torch, torch.compile, jax.jit and NumPy, beside norms alone, and beside the
floor: one sum of each array, which reads the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import cowalk
from benchmarks.timing import Case

LARGE = 48_000_000
LEAVES, SMALL = 1000, 1000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def of_array(x: torch.Tensor, tiny: float) -> list[torch.Tensor]:
    """What `Moments` holds, as torch users write it."""
    x = x.float()
    finite = x.isfinite()
    size = x.abs()
    v = torch.where(finite, x, 0.0)
    count = finite.sum()
    mean = v.sum() / count
    return [
        x.isnan().sum(),
        (x == float("inf")).sum(),
        (x == float("-inf")).sum(),
        (x == 0).sum(),
        ((size < tiny) & (x != 0)).sum(),
        mean,
        (torch.where(finite, x - mean, 0.0).square().sum() / count).sqrt(),
        torch.where(finite, x, float("inf")).min(),
        torch.where(finite, x, float("-inf")).max(),
        torch.where(finite, size, 0.0).sum() / count,
        torch.where(finite, size, 0.0).max(),
        v.square().sum().sqrt(),
    ]


def of_pair(p: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    """What `Pair` holds."""
    p, g = p.float(), g.float()
    both = p.isfinite() & g.isfinite()
    defined = both & (g != 0)
    quotient = torch.where(defined, p / g, 0.0)
    count = defined.sum()
    signed = both & (p != 0) & (g != 0)
    x, y = torch.where(both, p, 0.0), torch.where(both, g, 0.0)
    return [
        count,
        (both & (g == 0) & (p != 0)).sum(),
        (both & (g == 0) & (p == 0)).sum(),
        both.logical_not().sum(),
        quotient.sum() / count,
        torch.where(defined, quotient, float("inf")).min(),
        torch.where(defined, quotient, float("-inf")).max(),
        quotient.abs().sum() / count,
        x.square().sum().sqrt(),
        y.square().sum().sqrt(),
        (x * y).sum(),
        (signed & (p.signbit() == g.signbit())).sum(),
        signed.sum(),
    ]


def eager(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    tiny = torch.finfo(p.dtype).smallest_normal
    found = [*of_array(p, tiny), *of_array(g, tiny), *of_pair(p, g)]
    return torch.stack([each.double() for each in found])


def of_pair_in_jax(p: jax.Array, g: jax.Array) -> jax.Array:
    """The same again, for jax.jit."""
    found: list[Any] = []
    for x in (p, g):
        tiny = jnp.finfo(x.dtype).smallest_normal
        v = x.astype(jnp.float32)
        finite, size = jnp.isfinite(v), jnp.abs(v)
        count = finite.sum()
        mean = jnp.where(finite, v, 0).sum() / count
        found += [jnp.isnan(v).sum(), jnp.isposinf(v).sum(), jnp.isneginf(v).sum(), (v == 0).sum()]
        found += [((size < tiny) & (v != 0)).sum(), mean, jnp.sqrt(jnp.where(finite, v - mean, 0) ** 2).sum() / count]
        found += [jnp.where(finite, v, jnp.inf).min(), jnp.where(finite, v, -jnp.inf).max()]
        found += [jnp.where(finite, size, 0).sum() / count, jnp.sqrt(jnp.where(finite, v, 0) ** 2).sum()]
    p, g = p.astype(jnp.float32), g.astype(jnp.float32)
    both = jnp.isfinite(p) & jnp.isfinite(g)
    defined, signed = both & (g != 0), both & (p != 0) & (g != 0)
    quotient, count = jnp.where(defined, p / g, 0), defined.sum()
    x, y = jnp.where(both, p, 0), jnp.where(both, g, 0)
    found += [count, (both & (g == 0) & (p != 0)).sum(), (both & (g == 0) & (p == 0)).sum(), (~both).sum()]
    found += [quotient.sum() / count, jnp.abs(quotient).sum() / count, jnp.sqrt((x * x).sum()), jnp.sqrt((y * y).sum())]
    found += [jnp.where(defined, quotient, jnp.inf).min(), jnp.where(defined, quotient, -jnp.inf).max(), (x * y).sum()]
    found += [(signed & (jnp.signbit(p) == jnp.signbit(g))).sum(), signed.sum()]
    return jnp.stack([each.astype(jnp.float32) for each in found])


def in_numpy(p: Any, g: Any) -> list[Any]:
    """The same again in NumPy, in the arrays' own float32."""
    found: list[Any] = []
    for x in (p, g):
        finite, size = np.isfinite(x), abs(x)
        v = x[finite]
        mean = v.mean()
        found += [np.isnan(x).sum(), np.isposinf(x).sum(), np.isneginf(x).sum(), (x == 0).sum()]
        found += [((size < np.finfo(x.dtype).smallest_normal) & (x != 0)).sum(), mean, v.std(), v.min(), v.max()]
        found += [size[finite].mean(), size[finite].max(), np.sqrt(np.square(v).sum())]
    both = np.isfinite(p) & np.isfinite(g)
    defined = both & (g != 0)
    quotient = p[defined] / g[defined]
    x, y = p[both], g[both]
    found += [(both & (g == 0) & (p != 0)).sum(), (both & (g == 0) & (p == 0)).sum(), (~both).sum(), quotient.mean()]
    found += [
        quotient.min(),
        quotient.max(),
        abs(quotient).mean(),
        np.sqrt(np.square(x).sum()),
        np.sqrt(np.square(y).sum()),
    ]
    signed = both & (p != 0) & (g != 0)
    return [*found, np.dot(x, y), (signed & (np.signbit(p) == np.signbit(g))).sum(), signed.sum()]


def floor(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """One sum of each: the same memory is read, and nothing else is done."""
    return p.sum() + g.sum()


def with_threads(f: Callable[[], Any], threads: int) -> Callable[[], Any]:
    def run() -> Any:
        torch.set_num_threads(threads)
        return f()

    return run


def cases(quick: bool) -> Iterator[Case]:
    large, leaves = (1_000_000, 50) if quick else (LARGE, LEAVES)
    compiled = torch.compile(eager, dynamic=False)
    for name, dtype in DTYPES.items():
        generator = torch.Generator().manual_seed(0)
        p = torch.randn(large, generator=generator).to(dtype)
        g = (torch.randn(large, generator=generator) * 1e-2).to(dtype)
        peers: dict[str, Callable[[], Any]] = {
            "eager torch": lambda p=p, g=g: eager(p, g),
            "torch.sum of both (the floor)": lambda p=p, g=g: floor(p, g),
            "torch._foreach_norm of both": lambda p=p, g=g: torch._foreach_norm([p, g]),  # noqa: SLF001
        }
        if not quick:
            peers["torch.compile"] = lambda p=p, g=g: compiled(p, g)
        for threads in (1, 2):
            what = f"{large / 1e6:g} M elements, {name}, {threads} thread{'s' * (threads > 1)}"
            ours: Callable[[], Any] = lambda p=p, g=g, threads=threads: cowalk.stats([p], [g], threads=threads)  # noqa: E731
            for peer, theirs in peers.items():
                yield Case(
                    what, peer, ours, with_threads(theirs, threads), most_rounds=3 if peer == "eager torch" else 7
                )
        both = [jnp.asarray(each.float().numpy(), name) for each in (p, g)]
        jitted = jax.jit(of_pair_in_jax)
        yield Case(what, "jax.jit", ours, lambda both=both, f=jitted: f(*both).block_until_ready(), most_rounds=5)
        if name == "float32":
            yield Case(what, "NumPy", ours, lambda p=p, g=g: in_numpy(p.numpy(), g.numpy()), most_rounds=2)
    ps, gs = ({f"layer{i}": torch.randn(SMALL) for i in range(leaves)} for _ in range(2))
    pairs = list(zip(ps.values(), gs.values(), strict=True))
    what = f"{leaves} pairs of {SMALL}, float32"
    small: Callable[[], Any] = lambda: cowalk.stats(ps, gs)  # noqa: E731
    yield Case(what, "eager torch", small, lambda: [eager(p, g) for p, g in pairs], most_rounds=5)
    if not quick:
        yield Case(what, "torch.compile of one pair", small, lambda: [compiled(p, g) for p, g in pairs], most_rounds=5)
    norms = list(ps.values()), list(gs.values())
    yield Case(what, "torch._foreach_norm", small, lambda: [torch._foreach_norm(each) for each in norms])  # noqa: SLF001
    arrays = [(p.numpy(), g.numpy()) for p, g in pairs]
    yield Case(what, "NumPy", small, lambda: [in_numpy(p, g) for p, g in arrays], most_rounds=5)

"""Adding a batch's gradients into the sum over a data set: beside torch's and JAX's own additions, and a walk that allocates."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import cowalk
from benchmarks.timing import Case

LEAVES, ELEMENTS = 64, 1 << 22  # 1 GB of float32
SMALL_LEAVES, SMALL = 1000, 1000


def bytes_of(step: Callable[[], Any]) -> int:
    """How much memory NumPy takes for arrays while a step runs, at the peak."""
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        step()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def cases(quick: bool) -> Iterator[Case]:
    yield from _of_size("1 GB" if not quick else "1 MB", 4 if quick else LEAVES, ELEMENTS >> 6 if quick else ELEMENTS)
    yield from _of_size(f"{SMALL_LEAVES} leaves of {SMALL}", 50 if quick else SMALL_LEAVES, SMALL)


def _of_size(what: str, leaves: int, elements: int) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    gradients = {f"layer{i}": rng.standard_normal(elements, np.float32) for i in range(leaves)}
    total = cowalk.Accumulator()
    total.add(gradients, weight=32)
    tensors = [torch.from_numpy(gradient) for gradient in gradients.values()]
    sums = [torch.zeros_like(tensor) for tensor in tensors]
    arrays = {name: np.zeros_like(gradient) for name, gradient in gradients.items()}
    ours: Callable[[], Any] = lambda: total.add(gradients, weight=32)  # noqa: E731
    allocating: Callable[[], Any] = lambda: cowalk.fmap(np.add, arrays, gradients)  # noqa: E731
    name = f"{what} of float32 gradients into a sum"
    yield Case(
        f"{name} ({bytes_of(ours):,} bytes taken)",
        "torch._foreach_add_",
        ours,
        lambda: torch._foreach_add_(sums, tensors, alpha=32.0),
        most_rounds=7,
    )
    taken = bytes_of(allocating)
    yield Case(name, f"a fmap that allocates ({taken:,} bytes taken)", ours, allocating, most_rounds=5)
    on_jax = {name: jnp.asarray(gradient) for name, gradient in gradients.items()}
    of_jax = cowalk.Accumulator()
    of_jax.add(on_jax, weight=32)
    state = {"mean": jax.tree.map(jnp.zeros_like, on_jax), "n": jnp.zeros((), jnp.int32)}
    average = jax.jit(_running_mean)

    def theirs() -> None:
        nonlocal state
        state = average(state, on_jax)
        jax.block_until_ready(state)

    yield Case(
        f"{name}, JAX arrays",
        "a running mean under jit, as optax.MultiSteps keeps it",
        lambda: of_jax.add(on_jax, weight=32),
        theirs,
        most_rounds=5,
    )
    if what != "1 GB":
        return
    halves = {name: torch.from_numpy(gradient).bfloat16() for name, gradient in gradients.items()}
    of_halves = cowalk.Accumulator()
    of_halves.add(halves, weight=32)
    wide = [torch.zeros_like(tensor) for tensor in tensors]
    yield Case(
        f"{LEAVES * ELEMENTS / 1e6:.0f} M bfloat16 gradients into a compensated float32 sum",
        "torch._foreach_add_ into float32",
        lambda: of_halves.add(halves, weight=32),
        lambda: torch._foreach_add_(wide, list(halves.values()), alpha=32.0),
        most_rounds=5,
    )


def _running_mean(state: dict[str, Any], gradients: Any) -> dict[str, Any]:
    n = state["n"] + 1
    return {"mean": jax.tree.map(lambda mean, g: mean + (g - mean) / n, state["mean"], gradients), "n": n}

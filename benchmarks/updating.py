"""A step of Adam in place, beside torch.optim.Adam and Optax under jit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch

import cowalk
from benchmarks.timing import Case
from cowalk import optim

LARGE = 48_000_000
LEAVES, SMALL = 1000, 1000


def cases(quick: bool) -> Iterator[Case]:
    yield from _of_size(f"{LARGE / 1e6:g} M elements in one leaf", 1, 1_000_000 if quick else LARGE)
    yield from _of_size(f"{LEAVES} leaves of {SMALL}", 50 if quick else LEAVES, SMALL)


def _of_size(what: str, leaves: int, elements: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def tensors() -> dict[str, torch.Tensor]:
        return {f"layer{i}": torch.randn(elements, generator=generator) for i in range(leaves)}

    model = {name: tensor.requires_grad_() for name, tensor in tensors().items()}
    gradients = tensors()
    state = cowalk.setup(optim.Adam(1e-3), model)
    ours: Callable[[], Any] = lambda: cowalk.update_(state, model, gradients)  # noqa: E731
    for name, options in (
        ("foreach=True", {"foreach": True}),
        ("foreach=False", {"foreach": False}),
        ("fused", {"fused": True}),
    ):
        theirs = [tensor.requires_grad_() for tensor in tensors().values()]
        for parameter, gradient in zip(theirs, gradients.values(), strict=True):
            parameter.grad = gradient
        yield Case(
            f"Adam, {what}", f"torch.optim.Adam({name})", ours, torch.optim.Adam(theirs, **options).step, most_rounds=7
        )
        del theirs
    parameters = {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in model.items()}
    on_jax = {name: jnp.asarray(gradient.numpy()) for name, gradient in gradients.items()}
    transformation = optax.adam(1e-3)
    held: dict[str, Any] = {"state": transformation.init(parameters), "parameters": parameters}

    @jax.jit
    def step(state: Any, parameters: Any, gradients: Any) -> Any:
        updates, state = transformation.update(gradients, state, parameters)
        return state, optax.apply_updates(parameters, updates)

    def by_optax() -> None:
        held["state"], held["parameters"] = step(held["state"], held["parameters"], on_jax)
        jax.block_until_ready(held["parameters"])

    yield Case(f"Adam, {what}, torch beside JAX", "Optax under jit", ours, by_optax, most_rounds=7)
    own = dict(parameters)
    own_state = cowalk.setup(optim.Adam(1e-3), own)

    def ours_on_jax() -> None:
        jax.block_until_ready(cowalk.update_(own_state, own, on_jax))

    yield Case(f"Adam, {what}, JAX arrays", "Optax under jit", ours_on_jax, by_optax, most_rounds=7)

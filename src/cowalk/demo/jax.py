"""A convolutional net in plain JAX: its parameters are a dict."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import cowalk
from cowalk.demo.digits import Array

NET = "A convolutional net in JAX"
IN_YOUR_LOOP = """\
grads = jax.grad(loss)(params, …)
cowalk.stats(params, grads).print()
params = …  # your update"""
LEARNING_RATE = 0.2

Params = dict[str, dict[str, jax.Array]]


def build() -> Params:
    """The net's parameters, the same in every run."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "conv1": _layer(keys[0], (16, 1, 3, 3)),
        "conv2": _layer(keys[1], (32, 16, 3, 3)),
        "head": _layer(keys[2], (10, 32 * 2 * 2)),
    }


def _layer(key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    fan_in = shape[1] * (shape[2] * shape[3] if len(shape) == 4 else 1)
    weight = jax.random.normal(key, shape) * (2 / fan_in) ** 0.5
    return {"weight": weight, "bias": jnp.zeros(shape[0])}


def _conv(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(x, layer["weight"], window_strides=(1, 1), padding="SAME")
    y = jax.nn.relu(y + layer["bias"][:, None, None])
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def scores(params: Params, images: jax.Array) -> jax.Array:
    """The scores (n, 10) of the ten digits for pictures (n, 1, 8, 8)."""
    x = _conv(params["conv2"], _conv(params["conv1"], images))
    return x.reshape(len(x), -1) @ params["head"]["weight"].T + params["head"]["bias"]


def loss_of(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy of a batch."""
    log_shares = jax.nn.log_softmax(scores(params, images))
    return -jnp.take_along_axis(log_shares, labels[:, None], axis=1).mean()


@jax.jit
def _step(params: Params, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    return cowalk.value_and_gradient(loss_of, params, images, labels)


def loss_and_gradients(model: Params, images: Array, labels: Array) -> tuple[float, Any]:
    """The loss of one batch, and its gradients under the model's paths."""
    loss, gradients = _step(model, images[:, None], labels.astype("int32"))
    return float(loss), gradients


def update(model: Params, gradients: Any) -> Params:
    """One step of gradient descent: new parameters."""
    return cowalk.fmap(lambda p, g: p - LEARNING_RATE * g, model, gradients)


def predict(model: Params, images: Array) -> Array:
    """The digit that the model sees in each picture."""
    return jax.device_get(scores(model, jnp.asarray(images[:, None])).argmax(1))

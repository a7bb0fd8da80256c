"""A net of three dense layers in NumPy alone, with a backward pass of its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import cowalk
from cowalk.demo.digits import Array

NET = "A net of three dense layers in NumPy"
IN_YOUR_LOOP = """\
grads = backward(model, …)  # in any containers with the model's keys
cowalk.stats(model, grads).print()"""
LEARNING_RATE = 0.3

Layer = dict[str, Array]


def build() -> list[Layer]:
    """The layers, the same in every run."""
    rng = np.random.default_rng(0)
    sizes = 64, 64, 32, 10
    return [
        {
            "weight": rng.normal(0, (2 / wide) ** 0.5, (narrow, wide)).astype(np.float32),
            "bias": np.zeros(narrow, np.float32),
        }
        for wide, narrow in pairwise(sizes)
    ]


def forward(model: list[Layer], images: Array) -> list[Array]:
    """What goes into each layer, and last the scores (n, 10) of the ten digits, for pictures (n, 8, 8)."""
    values = [images.reshape(len(images), -1)]
    for number, layer in enumerate(model, 1):
        out = values[-1] @ layer["weight"].T + layer["bias"]
        values.append(np.maximum(out, 0) if number < len(model) else out)
    return values


def loss_and_gradients(model: list[Layer], images: Array, labels: Array) -> tuple[float, Any]:
    """The mean cross-entropy of one batch, and its gradients: a list of dicts, like the model."""
    *inputs, scores = forward(model, images)
    scores = scores - scores.max(axis=1, keepdims=True)
    log_shares = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    correct = np.arange(len(labels)), labels
    loss = -log_shares[correct].mean()

    slope = np.exp(log_shares)
    slope[correct] -= 1
    slope /= len(labels)
    gradients: list[Layer] = []
    for layer, value in zip(reversed(model), reversed(inputs), strict=True):
        gradients.insert(0, {"weight": slope.T @ value, "bias": slope.sum(axis=0)})
        slope = (slope @ layer["weight"]) * (value > 0)
    return float(loss), gradients


def update(model: list[Layer], gradients: Any) -> list[Layer]:
    """One step of gradient descent: new layers."""
    return cowalk.fmap(lambda p, g: p - np.float32(LEARNING_RATE) * g, model, gradients)


def predict(model: list[Layer], images: Array) -> Array:
    """The digit that the model sees in each picture."""
    return forward(model, images)[-1].argmax(axis=1)

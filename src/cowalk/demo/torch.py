"""A convolutional net in PyTorch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

import cowalk
from cowalk.demo.digits import Array

NET = "A convolutional net in PyTorch"
IN_YOUR_LOOP = """\
loss.backward()
cowalk.stats(model, cowalk.gradients_of(model)).print()
optimizer.step()"""
LEARNING_RATE = 0.2


def build() -> nn.Module:
    """The net, with weights that are the same in every run."""
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            head=nn.Linear(32 * 2 * 2, 10),
        )
    )


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of a batch of pictures (n, 1, 8, 8)."""
    return nn.functional.cross_entropy(model(images), labels)


def loss_and_gradients(model: nn.Module, images: Array, labels: Array) -> tuple[float, Any]:
    """The loss of one batch, and its gradients under the model's paths."""
    batch = torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)
    loss, gradients = cowalk.value_and_gradient(loss_of, model, *batch)
    return loss.item(), gradients


def update(model: nn.Module, gradients: Any) -> nn.Module:
    """One step of gradient descent, in place."""
    with torch.no_grad():
        return cowalk.fmap_(lambda p, g: p.sub_(g, alpha=LEARNING_RATE), model, gradients, where=cowalk.istrainable)


def predict(model: nn.Module, images: Array) -> Array:
    """The digit that the model sees in each picture."""
    with torch.no_grad():
        return model(torch.from_numpy(images).unsqueeze(1)).argmax(1).numpy()

"""Gradients of any framework's model, under the model's paths. What may not live here: how one framework differentiates."""

from cowalk.gradients.accumulator import Accumulator, AccumulatorError, Batch
from cowalk.gradients.dataset import DatasetGradient, dataset_gradient
from cowalk.gradients.differentiate import (
    FrameworkError,
    gradient,
    gradients_of,
    optimizer_state,
    trainables,
    value_and_gradient,
)
from cowalk.gradients.shapes import ShapeError

__all__ = [
    "Accumulator",
    "AccumulatorError",
    "Batch",
    "DatasetGradient",
    "FrameworkError",
    "ShapeError",
    "dataset_gradient",
    "gradient",
    "gradients_of",
    "optimizer_state",
    "trainables",
    "value_and_gradient",
]

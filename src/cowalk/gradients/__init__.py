"""Gradients of any framework's model, under the model's paths. What may not live here: how one framework differentiates."""

from cowalk.gradients.differentiate import (
    FrameworkError,
    gradient,
    gradients_of,
    optimizer_state,
    trainables,
    value_and_gradient,
)

__all__ = ["FrameworkError", "gradient", "gradients_of", "optimizer_state", "trainables", "value_and_gradient"]

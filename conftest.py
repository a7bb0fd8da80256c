"""For all tests and examples: Keras looks for TensorFlow unless it is told which back end to take."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

"""Keras models on each back end. Keras chooses its back end when it is imported, so each runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(backend: str, *command: str) -> str:
    environment = os.environ | {"KERAS_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_models_walk_on(backend: str) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert " passed" in run(backend, "-m", "pytest", *options, str(HERE / "keras_checks.py"))


def test_a_back_end_without_gradients_walks_and_says_so() -> None:
    code = """
import cowalk, keras, numpy
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="a")])
same = cowalk.fmap(lambda value: value, model)
cowalk.fmap_(lambda value: value * 0, model)
print(numpy.abs(model.get_weights()[0]).max(), numpy.abs(same.get_weights()[0]).max() > 0)
try:
    cowalk.gradient(lambda model: 0.0, model)
except cowalk.CowalkError as error:
    print(error)
"""
    values, message = run("numpy", "-c", code).splitlines()
    assert values == "0.0 True"
    assert "torch and JAX back ends, not on numpy" in message

"""Gradients of losses over Keras models, on each back end in a process of its own (see tests/frameworks/test_keras.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("keras_gradient_checks.py")


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_losses_over_keras_models_are_differentiated_on(backend: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CHECKS)]
    environment = os.environ | {"KERAS_BACKEND": backend}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=CHECKS.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

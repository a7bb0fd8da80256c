"""Keras models on each back end. Keras chooses its back end when it is imported, so each runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("keras_checks.py")


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_models_walk_on(backend: str) -> None:
    environment = os.environ | {"KERAS_BACKEND": backend, "PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CHECKS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=CHECKS.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

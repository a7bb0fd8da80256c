from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def quick_compiling() -> Iterator[None]:
    """Compiling takes most of the time of these tests."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

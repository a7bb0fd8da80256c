"""Every test of this folder runs on the native walk and on the reference."""

from __future__ import annotations

import pytest

from cowalk.tree import engine


@pytest.fixture(params=["native", "reference"], autouse=True)
def walk_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and engine.NATIVE is None:
        pytest.skip("the native walk is not built")
    if request.param == "reference":
        monkeypatch.setattr(engine, "NATIVE", None)
    return request.param

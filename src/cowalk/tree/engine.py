"""Which walk runs: the native one, or the reference where the extension is not built and where torch.compile traces."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol, cast

from cowalk.tree import kinds, matching, reference
from cowalk.tree.errors import CycleError, TieError
from cowalk.tree.missing import MISSING
from cowalk.tree.paths import Index, Path
from cowalk.tree.where import PathWhere


class Engine(Protocol):
    """What a walk offers: `reference` is one, the native extension another."""

    def fmap(
        self,
        f: Callable[..., Any],
        trees: Sequence[Any],
        where: Any,
        missing: Any,
        strict: bool,
        ties: str,
        with_path: bool,
        outputs: int,
        structure: bool,
        /,
    ) -> Any: ...

    def walk(
        self, trees: Sequence[Any], where: Any, missing: Any, strict: bool, ties: str, holders: bool, /
    ) -> Iterator[tuple[Any, ...]]: ...

    def differences(
        self, trees: Sequence[Any], where: Any, /
    ) -> tuple[list[matching.RawDifference], list[TieError]]: ...


REFERENCE = cast("Engine", reference)


def _load_native() -> tuple[ModuleType | None, str]:
    if os.environ.get("COWALK_PURE"):
        return None, "switched off by COWALK_PURE"
    try:
        native = importlib.import_module("cowalk._native")
    except ImportError as error:
        warnings.warn(
            "cowalk runs on its pure-Python walk, which is right but slower: the native extension is not built "
            f"({error}). Install a C++17 compiler and reinstall cowalk to have it; COWALK_PURE=1 silences this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, f"not built ({error})"
    return native, "built"


_native, native_state = _load_native()
NATIVE: Engine | None = cast("Engine | None", _native)

if _native is not None:
    _native.setup(
        {
            "Leaf": kinds.Leaf,
            "Branch": kinds.Branch,
            "Box": kinds.Box,
            "Nothing": kinds.Nothing,
            "MISSING": MISSING,
            "Index": Index,
            "Path": Path,
            "PathWhere": PathWhere,
            "find_kind": kinds.find_kind,
            "isleaf": kinds.isleaf,
            "isnumeric": kinds.isnumeric,
            "istrainable": kinds.istrainable,
            "holds_value": matching.holds_value,
            "same": reference.same,
            "note": reference.note,
            "wrong_outputs": reference.wrong_outputs,
            "CycleError": CycleError,
            "structure_error": matching.structure_error,
            "TieError": TieError,
        }
    )
    kinds.on_change(_native.forget)

_tracing: list[Callable[[], bool]] = []


def add_tracing_test(test: Callable[[], bool]) -> None:
    """Add a test that says whether a tracer that cannot look into C++ runs right now (torch.compile)."""
    _tracing.append(test)


def current() -> Engine:
    """The walk to use right now."""
    for test in _tracing:
        if test():
            return REFERENCE
    return NATIVE or REFERENCE

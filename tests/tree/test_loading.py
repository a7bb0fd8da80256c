"""How the files of frameworks are found and loaded."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import cowalk
from cowalk.tree import kinds


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_cowalk_imports_no_framework_and_no_numpy() -> None:
    found = run(
        "import sys, cowalk\n"
        "tree = {'a': [1.0, 2.0]}; cowalk.fmap(max, tree, tree); list(cowalk.walk(tree)); cowalk.diff(tree, tree)\n"
        "print({'numpy', 'torch', 'jax', 'keras', 'tensorflow', 'flax', 'equinox', 'rich'} & set(sys.modules))"
    )
    assert found == "set()"


def test_every_public_name_is_there() -> None:
    assert all(hasattr(cowalk, name) for name in cowalk.__all__)
    assert set(cowalk.__all__) <= set(dir(cowalk))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cowalk.nothing  # type: ignore[attr-defined]


def test_a_framework_imported_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        pass

    framework = types.ModuleType("late_framework")
    loaded = []
    kinds.on_import(
        "late_framework", lambda: loaded.append(1) or kinds.set_kind(Late, kinds.Leaf(numeric=lambda _: True))
    )
    assert not cowalk.isnumeric(Late())
    monkeypatch.setitem(sys.modules, "late_framework", framework)
    assert cowalk.isnumeric(Late())
    assert loaded == [1]


def test_a_framework_that_cannot_be_loaded_warns_once_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        pass

    def fail() -> None:
        raise AttributeError("no such thing in this version")

    monkeypatch.setitem(sys.modules, "odd_framework", types.ModuleType("odd_framework"))
    kinds.on_import("odd_framework", fail)
    with pytest.warns(RuntimeWarning, match=r"odd_framework.*no such thing in this version"):
        assert [leaf for _, (leaf,) in cowalk.walk([Odd(), 2.0])][1] == 2.0
    assert cowalk.isleaf(Odd())


def test_the_pure_walk_says_so_once_and_can_be_asked_for() -> None:
    code = "import warnings; warnings.simplefilter('error'); import cowalk; print(cowalk.fmap(abs, [-1]))"
    assert run(f"import os; os.environ['COWALK_PURE'] = '1'; {code}") == "[1]"
    blocked = (
        "import sys; sys.modules['cowalk._native'] = None\n"
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    import cowalk\n"
        "    cowalk.fmap(abs, [-1]); cowalk.fmap(abs, [-1])\n"
        "print(len(told), 'pure-Python walk' in str(told[0].message))"
    )
    assert run(blocked) == "1 True"

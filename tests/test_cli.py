"""The command line: what it prints, its exit codes, and how little it imports."""

import subprocess
import sys

import pytest

from cowalk import cli
from cowalk.demo.run import STEPS
from cowalk.tree import engine


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    assert "demo" in capsys.readouterr().out


def test_the_help_of_the_demo_knows_its_default(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    assert f"(default: {STEPS})" in " ".join(capsys.readouterr().out.split())


def test_no_command_is_a_cry_for_help(capsys):
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("native", "state", "words"),
    [(object(), "built", "native walk"), (None, "not built (why)", "pure-Python walk: not built (why)")],
)
def test_the_version_tells_which_walk_is_in_use(monkeypatch, capsys, native, state, words):
    monkeypatch.setattr(engine, "NATIVE", native)
    monkeypatch.setattr(engine, "native_state", state)
    assert cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cowalk ")
    assert out.endswith(f"({words})\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--steps", "0"], "a whole number, 1 or more, not '0'"),
        (["demo", "--steps", "many"], "not 'many'"),
        (["demo", "--steps", "-3"], "not '-3'"),
        (["demo", "--steps", "1.5"], "not '1.5'"),
        (["demo", "--framework", "fortran"], "invalid choice: 'fortran'"),
        (["dance"], "invalid choice: 'dance'"),
    ],
)
def test_wrong_use_is_one_error_and_exit_code_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as done:
        cli.main(arguments)
    assert done.value.code == 2
    assert words in capsys.readouterr().err


def test_a_framework_that_is_not_installed_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr("cowalk.demo.run.find_spec", lambda _: None)
    assert cli.main(["demo", "--framework", "torch"]) == 2
    error = capsys.readouterr().err
    assert error == "cowalk demo: torch is not installed. Install it with: pip install 'cowalk[torch]'\n"


def test_ctrl_c_before_the_first_step_is_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cowalk.demo.run.demo", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_a_quick_command_imports_nothing_heavy(argument):
    code = (
        "import sys, contextlib; from cowalk.cli import main\n"
        f"with contextlib.suppress(SystemExit): main([{argument!r}])\n"
        "print({'numpy', 'rich', 'torch', 'jax', 'keras'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith("set()\n")


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "cowalk", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.startswith("cowalk ")) == (0, True)

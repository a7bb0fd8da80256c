"""The command line: `cowalk`. Each command imports what it needs when it runs, so `--help` is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 all well, 2 wrong use or wrong input, 130 interrupted (Ctrl-C).

    Raises:
        SystemExit: from argparse, after --help (0) and wrong use (2).
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.version:
            print(_version())
        elif arguments.command == "demo":
            return _demo(arguments)
        else:
            parser.print_help()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cowalk",
        description="Walk a model, its gradients, its updates and its optimizer state together, in any framework.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and which walk is in use")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="")
    demo = commands.add_parser(
        "demo",
        help="train a small net on handwritten digits and print its table",
        description="Train a small net on handwritten digits and print how its parameters relate to their gradients.",
    )
    demo.add_argument(
        "--framework",
        choices=("torch", "jax", "numpy"),
        help="what the net is written in (default: the first of these that is installed)",
    )
    demo.add_argument("--steps", type=_positive, metavar="N", help="how many batches to learn from (default: 300)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a whole number, 1 or more, not {text!r}")
    return int(text)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    from cowalk.tree import engine

    try:
        number = version("cowalk")
    except PackageNotFoundError:
        number = "not installed, run from its source"
    walk = "native walk" if engine.NATIVE is not None else f"pure-Python walk: {engine.native_state}"
    return f"cowalk {number} ({walk})"


def _demo(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from cowalk.demo.run import STEPS, DemoError, demo

    try:
        return demo(Console(), arguments.framework, arguments.steps or STEPS)
    except DemoError as error:
        print(f"cowalk demo: {error}", file=sys.stderr)
        return 2

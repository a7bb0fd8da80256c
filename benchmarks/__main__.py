"""`python -m benchmarks NAME [--json] [--quick]`: measure one group of cases and print its rows."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator

from benchmarks.timing import Case, Row


def _walk(quick: bool) -> Iterator[Case]:
    from benchmarks import walking

    return walking.cases(quick)


def _measure(quick: bool) -> Iterator[Case]:
    from benchmarks import measuring

    return measuring.cases(quick)


def _accumulate(quick: bool) -> Iterator[Case]:
    from benchmarks import accumulating

    return accumulating.cases(quick)


def _update(quick: bool) -> Iterator[Case]:
    from benchmarks import updating

    return updating.cases(quick)


GROUPS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "walk": _walk,
    "measure": _measure,
    "accumulate": _accumulate,
    "update": _update,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("group", choices=GROUPS, help="which cases to measure")
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="one short round a case: shows that it runs, not how fast")
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds in which the two take turns; the best of each counts"
    )
    options = parser.parse_args()
    rows: list[Row] = []
    for case in GROUPS[options.group](options.quick):
        row = case.measure(1 if options.quick else options.rounds, 0.001 if options.quick else 0.02)
        rows.append(row)
        if not options.json:
            print(
                f"{row['case']:<55} {row['peer']:<28} {row['ours_s']:.3g} s  {row['theirs_s']:.3g} s  {row['ratio']:.2f}x",
                flush=True,
            )
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

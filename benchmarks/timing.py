"""How two ways of doing one thing are timed: by turns, each round long enough to measure, the best round of each counts."""

from __future__ import annotations

import gc
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict


class Row(TypedDict):
    """One line of a benchmark: seconds a call, `ratio = theirs / ours`, and how many rounds were run."""

    case: str
    peer: str
    ours_s: float
    theirs_s: float
    ratio: float
    rounds: int


@dataclass(frozen=True)
class Case:
    """Our way and a peer's of the same work. `unit` divides our time and `peer_unit` the peer's (for costs a leaf)."""

    case: str
    peer: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    unit: int = 1
    peer_unit: int = 1
    most_rounds: int = 1000

    def measure(self, rounds: int, seconds: float) -> Row:
        """Run the two by turns, `rounds` times (or `most_rounds`, where one call takes seconds) at least `seconds` each."""
        rounds = min(rounds, self.most_rounds)
        counts = [_calls(f, seconds) for f in (self.ours, self.theirs)]
        best = [float("inf"), float("inf")]
        for _ in range(rounds):
            for i, f in enumerate((self.ours, self.theirs)):
                gc.collect()
                best[i] = min(best[i], timeit.timeit(f, number=counts[i]) / counts[i])
        ours, theirs = best[0] / self.unit, best[1] / self.peer_unit
        return Row(case=self.case, peer=self.peer, ours_s=ours, theirs_s=theirs, ratio=theirs / ours, rounds=rounds)


def _calls(f: Callable[[], Any], seconds: float) -> int:
    f()
    count = 1
    while (took := timeit.timeit(f, number=count)) < seconds:
        count = max(2 * count, int(count * seconds / max(took, 1e-9)) + 1)
    return count

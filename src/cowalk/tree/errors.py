"""What can be wrong with trees, as data: every error carries what it found, and its message says where and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cowalk.tree.paths import Key, Path, brief


class CowalkError(Exception):
    """The base of every error that cowalk raises on purpose."""


class PathError(CowalkError, LookupError):
    """A path leads nowhere in a tree. `path` is the path asked for, `at` the deepest node that exists on it."""

    def __init__(self, message: str, path: Path, at: Path) -> None:
        super().__init__(message)
        self.path = path
        self.at = at


class KindError(CowalkError, TypeError):
    """A type cannot be opened, closed, written or registered as asked."""


class CycleError(CowalkError, ValueError):
    """A tree holds itself: the node at `path` is the one at `first`, above it, in tree number `tree`."""

    def __init__(self, first: Path, path: Path, tree: int = 0) -> None:
        where = "" if tree == 0 else f" of tree {tree}"
        super().__init__(
            f"the node at {brief(path)}{where} is the one at {brief(first)} again: a tree cannot hold itself. "
            "Break the cycle, or make the type a leaf with cowalk.leaf."
        )
        self.first = first
        self.path = path
        self.tree = tree

    def __reduce__(self) -> tuple[type[CycleError], tuple[Path, Path, int]]:
        return CycleError, (self.first, self.path, self.tree)


class TieError(CowalkError, ValueError):
    """A follower has different values at the paths of one tied leaf. `paths` names them, `tree` the follower (from 1)."""

    def __init__(self, paths: Sequence[Path], tree: int) -> None:
        names = ", ".join(brief(path) for path in paths)
        super().__init__(
            f"tree {tree} has different values for one tied leaf, which stands at {names}. "
            "Say how to join them: ties='sum' adds them up, 'first' takes the first, 'each' treats the paths as separate leaves."
        )
        self.paths = tuple(paths)
        self.tree = tree

    def __reduce__(self) -> tuple[type[TieError], tuple[tuple[Path, ...], int]]:
        return TieError, (self.paths, self.tree)


DifferenceKind = Literal["absent", "extra", "length", "leaf", "branch", "missing", "cycle", "tie"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where a follower does not fit the lead.

    Attributes:
        kind: "absent" (the lead has a key that the follower lacks), "extra" (the other way round), "length" (sequences of
            other lengths), "leaf" (a leaf in the follower against a branch in the lead), "branch" (a branch against a
            leaf), "missing" (no value, with missing="error"), "cycle" and "tie" (reported by `diff`, raised as errors of
            their own elsewhere).
        tree: which tree, counted from 0 for the lead.
        path: where in the lead. For "extra" it is the node that lacks the key.
        follower_path: where in the follower. For "absent" it is the node that lacks the key.
        key: the key in question, for "absent" and "extra".
        nearest: the key the user may have meant, or None; looked for at the first 20 differences only.
        lead_type, follower_type: type names of the two nodes.
        lengths: lengths of the two sequences, for "length".
    """

    kind: DifferenceKind
    tree: int
    path: Path
    follower_path: Path
    key: Key = None
    nearest: Key = None
    lead_type: str = ""
    follower_type: str = ""
    lengths: tuple[int, int] | None = None

    def __str__(self) -> str:
        here = brief(self.path)
        there = (
            ""
            if tuple(map(str, self.path)) == tuple(map(str, self.follower_path))
            else f" ({brief(self.follower_path)} there)"
        )
        match self.kind:
            case "absent":
                guess = "" if self.nearest is None else f"; did you mean its {self.nearest!r}?"
                return f"{here}: tree {self.tree} has no {self.key!r} here{guess}"
            case "extra":
                guess = "" if self.nearest is None else f"; did you mean {self.nearest!r}?"
                return f"{brief(self.follower_path)}: only tree {self.tree} has {self.key!r}{guess}"
            case "length":
                mine, theirs = self.lengths or (0, 0)
                return f"{here}{there}: {mine} items in the lead, {theirs} in tree {self.tree}"
            case "leaf":
                return (
                    f"{here}{there}: a {self.lead_type} in the lead, a leaf ({self.follower_type}) in tree {self.tree}"
                )
            case "branch":
                return (
                    f"{here}{there}: a leaf ({self.lead_type}) in the lead, a {self.follower_type} in tree {self.tree}"
                )
            case "missing":
                return f"{here}{there}: tree {self.tree} has no value here"
            case "cycle":
                return f"{brief(self.path)}: the node at {brief(self.follower_path)} again, a cycle"
            case "tie":
                return f"{here}: tied to {brief(self.follower_path)}, but tree {self.tree} has another value there"


class StructureError(CowalkError, ValueError):
    """Trees do not fit together. `differences` holds all of them, in the order of the walk."""

    _SHOWN = 6

    def __init__(self, differences: Iterable[Difference], hint: str = "") -> None:
        self.differences = tuple(differences)
        self.hint = hint
        count = len(self.differences)
        lines = [f"the trees differ in {count} place{'s' if count != 1 else ''}:"]
        lines += [f"  {difference}" for difference in self.differences[: self._SHOWN]]
        if count > self._SHOWN:
            lines.append(f"  … and {count - self._SHOWN} more (all in .differences)")
        lines.append(
            hint
            or "Mend the tree, put None where a value is missing, or pass strict=False: absent means missing, extras are ignored."
        )
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[StructureError], tuple[tuple[Difference, ...], str]]:
        return StructureError, (self.differences, self.hint)


def nearest(key: Key, candidates: Iterable[Key]) -> Key | None:
    """The candidate whose text is closest to the key's, or None if none is close."""
    by_text = {str(candidate): candidate for candidate in candidates}
    close = difflib.get_close_matches(str(key), list(by_text), n=1, cutoff=0.6)
    return by_text[close[0]] if close else None

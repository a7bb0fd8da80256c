"""The walk in plain Python: the laws in code.

A walk has two halves. `align` goes down the lead, depth first and in its order, beside its followers, and writes down what
to do: a plan of leaves to visit and nodes to close. Nothing is visited before the whole plan stands, so a misfit anywhere is
an error before f has run. Then f runs once a leaf, and `build` closes the nodes from the bottom up.

The native walk (native/align.cpp, native/run.cpp) is this file in C++. Where the two disagree, this one is right.
No function here recurses into the tree, so depth is limited by memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from cowalk.tree.errors import CycleError, DifferenceKind, TieError
from cowalk.tree.kinds import Box, Branch, Kind, Leaf, is_missing, isleaf, isnumeric, istrainable, kind_of
from cowalk.tree.matching import NO_KEY, RawDifference, holds_value, is_sequence, partner, structure_error, unbox
from cowalk.tree.missing import MISSING
from cowalk.tree.paths import Key, Path, brief
from cowalk.tree.where import Where, takes_path

Link = tuple[Any, Key] | None
"""A path as a chain of (parent's link, key): cheap to extend, made into a `Path` only where someone asks."""


def path_of(link: Link) -> Path:
    keys: list[Key] = []
    while link is not None:
        link, key = link
        keys.append(key)
    return Path(reversed(keys))


@dataclass(frozen=True, slots=True)
class Absent:
    """A follower's value below a place where it does not fit. It is a difference only if a leaf asks for the value."""

    difference: int


@dataclass(slots=True)
class Visit:
    """A leaf to visit: its path(s), its value in every tree, the boxes around it, and the node that holds it."""

    link: Link
    values: list[Any]
    boxes: list[tuple[Any, Box]]
    holder: tuple[Any, Branch] | None
    tie: Any
    other_links: list[Link]
    skipped: bool = False

    @property
    def kept(self) -> Any:
        """What stands in this place if f is not called."""
        return self.boxes[0][0] if self.boxes else self.values[0]


@dataclass(frozen=True, slots=True)
class Keep:
    """A place that is carried along: `node` as it stands in the lead, `content` behind its boxes."""

    node: Any
    content: Any


@dataclass(frozen=True, slots=True)
class Close:
    """A node to build around the last `len(keys)` results."""

    node: Any
    kind: Branch
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class CloseBox:
    """A box to build around the last result."""

    node: Any
    kind: Box


Step = int | Keep | Close | CloseBox
"""One step of a plan; a number stands for the visit of that number."""


@dataclass(slots=True)
class Plan:
    steps: list[Step]
    visits: list[Visit]
    differences: list[RawDifference]
    ties: list[TieError]


_LEAF_PREDICATES: Final = (isleaf, isnumeric, istrainable)


class Alignment:
    """One descent of `align`: the lead, its followers beside it, and the plan as far as it stands."""

    def __init__(self, trees: Sequence[Any], where: Where, ties: str) -> None:
        self.trees = trees
        self.where = where
        self.ties = ties
        self.only_leaves = where in _LEAF_PREDICATES
        self.plan = Plan([], [], [], [])
        self.confirmed: list[bool] = []
        self.tied: dict[int, int] = {}
        self.open_nodes: dict[int, Link] = {}

    def run(self) -> Plan:
        waiting: list[Callable[[], list[Callable[[], Any]]]] = []
        waiting.append(lambda: self.visit(None, self.trees[0], list(self.trees[1:]), None))
        while waiting:
            waiting.extend(reversed(waiting.pop()()))
        plan = self.plan
        for visit in plan.visits:
            for j, value in enumerate(visit.values):
                if isinstance(value, Absent):
                    self.confirmed[value.difference] = True
                    visit.values[j] = MISSING
        if self.tied:  # a tied leaf that was asked for at one of its paths is the same leaf at all the others
            plan.steps = [self.revisit(step) if isinstance(step, Keep) else step for step in plan.steps]
        plan.differences = [raw for raw, sure in zip(plan.differences, self.confirmed, strict=True) if sure]
        return plan

    def revisit(self, kept: Keep) -> Step:
        number = self.tied.get(id(kept.node), self.tied.get(id(kept.content)))
        return kept if number is None else number

    # --- one node ---

    def visit(
        self, link: Link, node: Any, followers: list[Any], holder: tuple[Any, Branch] | None
    ) -> list[Callable[[], Any]]:
        """Look at one node of the lead; what is left to do below it is returned."""
        boxes: list[tuple[Any, Box]] = []
        outer = node
        while True:
            kind = kind_of(type(node))
            if not self.only_leaves and self.asked(link, node):
                self.add_visit(link, node, kind, followers, boxes, holder)
                return []
            if not isinstance(kind, Box):
                break
            if self.where is istrainable and kind.trainable is not None and not kind.trainable(node):
                self.plan.steps.append(Keep(outer, unbox(node)[0]))
                return []
            boxes.append((node, kind))
            node = kind.open(node)
        if isinstance(kind, Branch):
            return self.open(link, node, kind, followers, boxes)
        if self.only_leaves and isinstance(kind, Leaf) and self.where_leaf(node, kind):
            self.add_visit(link, node, kind, followers, boxes, holder)
        else:
            self.plan.steps.append(Keep(outer, node))
        return []

    def asked(self, link: Link, node: Any) -> bool:
        where = cast("Callable[..., Any]", self.where)
        return bool(where(path_of(link), node) if takes_path(where) else where(node))

    def where_leaf(self, node: Any, kind: Leaf) -> bool:
        if kind.missing is not None and kind.missing(node):
            return False
        return self.where is isleaf or (kind.numeric is not None and kind.numeric(node))

    # --- leaves ---

    def add_visit(
        self,
        link: Link,
        node: Any,
        kind: Kind,
        followers: list[Any],
        boxes: list[tuple[Any, Box]],
        holder: tuple[Any, Branch] | None,
    ) -> None:
        values = [node, *(self.follower_value(j, link, value, kind) for j, value in enumerate(followers, 1))]
        tie = self.tie_of(node, kind, boxes)
        if tie is not None:
            number = self.tied.setdefault(id(tie), len(self.plan.visits))
            if number < len(self.plan.visits):
                self.join(self.plan.visits[number], link, values)
                self.plan.steps.append(number)
                return
        self.plan.steps.append(len(self.plan.visits))
        self.plan.visits.append(Visit(link, values, boxes, holder, tie, []))

    def tie_of(self, node: Any, kind: Kind, boxes: list[tuple[Any, Box]]) -> Any:
        """The object whose identity makes this place a tie, or None."""
        if self.ties == "each":
            return None
        for box, box_kind in boxes:
            if box_kind.ties:
                return box
        return node if isinstance(kind, Leaf | Box) and kind.ties else None

    def follower_value(self, tree: int, link: Link, value: Any, lead_kind: Kind) -> Any:
        """What a follower has to say at a leaf of the lead."""
        if value is MISSING or isinstance(value, Absent):
            return value
        if not isinstance(lead_kind, Leaf):  # the whole node was asked for: the follower's whole node answers
            return MISSING if is_missing(value) else value
        value, kind = unbox(value)
        if isinstance(kind, Branch):
            return self.misfit("branch", tree, link)
        return MISSING if is_missing(value) else value

    def join(self, visit: Visit, link: Link, values: list[Any]) -> None:
        """Another path of a tied leaf: bring its followers' values together with those of the earlier paths."""
        visit.other_links.append(link)
        for j in range(1, len(values)):
            old, new = visit.values[j], values[j]
            if isinstance(new, Absent) or (new is MISSING and not isinstance(old, Absent)):
                continue
            if old is MISSING or isinstance(old, Absent):
                visit.values[j] = new
            elif self.ties == "sum":
                visit.values[j] = old + new
            elif self.ties == "share" and not same(old, new):
                paths = [path_of(each) for each in (visit.link, *visit.other_links)]
                self.plan.ties.append(TieError(paths, j))

    # --- branches ---

    def open(
        self, link: Link, node: Any, kind: Branch, followers: list[Any], boxes: list[tuple[Any, Box]]
    ) -> list[Callable[[], Any]]:
        if id(node) in self.open_nodes:
            raise CycleError(path_of(self.open_nodes[id(node)]), path_of(link))
        opened = dict(kind.open(node))
        allowed = kind.trainable(node) if self.where is istrainable and kind.trainable is not None else opened
        rows = [self.match(j, link, kind, opened, follower) for j, follower in enumerate(followers, 1)]
        self.open_nodes[id(node)] = link
        tasks: list[Callable[[], Any]] = []
        for key, child in opened.items():
            if key in allowed:
                beside = [row[key] for row in rows]
                tasks.append(
                    lambda key=key, child=child, beside=beside: self.visit((link, key), child, beside, (node, kind))
                )
            else:
                tasks.append(lambda child=child: self.keep(child))
        tasks.append(lambda: self.close(node, kind, tuple(opened), boxes))
        return tasks

    def keep(self, child: Any) -> list[Callable[[], Any]]:
        self.plan.steps.append(Keep(child, unbox(child)[0]))
        return []

    def close(
        self, node: Any, kind: Branch, keys: tuple[Key, ...], boxes: list[tuple[Any, Box]]
    ) -> list[Callable[[], Any]]:
        del self.open_nodes[id(node)]
        self.plan.steps.append(Close(node, kind, keys))
        self.plan.steps.extend(CloseBox(box, box_kind) for box, box_kind in reversed(boxes))
        return []

    def match(self, tree: int, link: Link, kind: Branch, opened: Mapping[Key, Any], follower: Any) -> dict[Key, Any]:
        """What one follower has beside each child of a node of the lead."""
        if follower is MISSING or isinstance(follower, Absent):
            return dict.fromkeys(opened, follower)
        follower, follower_kind = unbox(follower)
        if not isinstance(follower_kind, Branch):
            return dict.fromkeys(opened, MISSING if is_missing(follower) else self.misfit("leaf", tree, link))
        theirs = follower_kind.open(follower)
        sequences = is_sequence(kind) and is_sequence(follower_kind) and len(opened) != len(theirs)
        length = self.misfit("length", tree, link) if sequences else None
        row: dict[Key, Any] = {}
        matched: set[Key] = set()
        for key in opened:
            found = partner(key, kind.mapping, opened, theirs, follower_kind.mapping)
            if found is NO_KEY:
                row[key] = length or self.misfit("absent", tree, link, key)
            else:
                row[key] = theirs[found]
                matched.add(found)
        for key, value in theirs.items():
            if key not in matched and holds_value(value, self.where in (isnumeric, istrainable)):
                extra = length or self.misfit("extra", tree, link, key)
                self.confirmed[extra.difference] = True
        return row

    def misfit(self, kind: DifferenceKind, tree: int, link: Link, key: Key = None) -> Absent:
        self.plan.differences.append((kind, tree, path_of(link), key))
        self.confirmed.append(kind == "branch")
        return Absent(len(self.confirmed) - 1)


def same(one: Any, other: Any) -> bool:
    """Whether two values of a follower at the paths of one tied leaf are one value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in (int, float, complex, bool, str):
        return one == other
    kind = kind_of(type(one))
    return isinstance(kind, Leaf) and kind.same is not None and kind.same(one, other)


def align(trees: Sequence[Any], where: Where, missing: Any, strict: bool, ties: str) -> Plan:
    """The plan of a walk, or the error that says why the trees cannot be walked together."""
    plan = Alignment(trees, where, ties).run()
    fatal = [raw for raw in plan.differences if strict or raw[0] in ("leaf", "branch")]
    if fatal:
        raise structure_error(fatal, trees)
    if plan.ties:
        raise plan.ties[0]
    settle(plan, missing, trees)
    return plan


def settle(plan: Plan, missing: Any, trees: Sequence[Any]) -> None:
    """Apply the policy for missing values that needs no call: mark the leaves to skip, or say which values are missing."""
    if missing == "pass" or callable(missing):
        return
    absent: list[RawDifference] = []
    for visit in plan.visits:
        gone = [j for j, value in enumerate(visit.values) if j and value is MISSING]
        visit.skipped = bool(gone)
        absent.extend(("missing", j, path_of(visit.link), None) for j in gone)
    if missing == "error" and absent:
        raise structure_error(absent, trees)


def differences(trees: Sequence[Any], where: Where) -> tuple[list[RawDifference], list[TieError]]:
    """All places where followers do not fit the lead. Raises `CycleError` if the lead holds itself."""
    plan = Alignment(trees, where, "share").run()
    return plan.differences, plan.ties


def filled(visit: Visit, missing: Any) -> list[Any]:
    """The values of a visit with the missing ones made by a policy that is a function."""
    if not callable(missing):
        return visit.values
    return [missing(visit.values[0]) if j and value is MISSING else value for j, value in enumerate(visit.values)]


def walk(
    trees: Sequence[Any], where: Where, missing: Any, strict: bool, ties: str, holders: bool
) -> Iterator[tuple[Any, ...]]:
    """(path, values) of every leaf, with `holders` also the innermost box around it, or else the node and key that hold it."""
    plan = align(trees, where, missing, strict, ties)

    def iterate() -> Iterator[tuple[Any, ...]]:
        for visit in plan.visits:
            if visit.skipped:
                continue
            values = tuple(filled(visit, missing))
            if not holders:
                yield path_of(visit.link), values
            elif visit.boxes:
                yield path_of(visit.link), values, visit.boxes[-1][0], None
            else:
                yield (
                    path_of(visit.link),
                    values,
                    visit.holder[0] if visit.holder else None,
                    visit.link and visit.link[1],
                )

    return iterate()


def fmap(
    f: Callable[..., Any],
    trees: Sequence[Any],
    where: Where,
    missing: Any,
    strict: bool,
    ties: str,
    with_path: bool,
    outputs: int,
    structure: bool,
) -> Any:
    """The lead's shape around what f makes of its leaves: one tree, or a tuple of `outputs` trees."""
    plan = align(trees, where, missing, strict, ties)
    results: list[list[Any]] = [[] for _ in range(outputs)]
    for visit in plan.visits:
        made = (
            (None if structure else visit.kept,) * outputs
            if visit.skipped
            else call(f, visit, missing, with_path, outputs)
        )
        for tree, result in zip(results, made, strict=True):
            tree.append(result if structure or visit.skipped else rebox(visit, result))
    built = tuple(build(plan, tree, structure) for tree in results)
    return built[0] if outputs == 1 else built


def call(f: Callable[..., Any], visit: Visit, missing: Any, with_path: bool, outputs: int) -> tuple[Any, ...]:
    """f's results at one leaf. An exception of f gets a note that says where it happened."""
    try:
        values = filled(visit, missing)
        made = f(path_of(visit.link), *values) if with_path else f(*values)
    except Exception as error:
        note(error, path_of(visit.link))
        raise
    if outputs == 1:
        return (made,)
    if not isinstance(made, tuple) or len(cast("tuple[Any, ...]", made)) != outputs:
        raise wrong_outputs(made, outputs, path_of(visit.link))
    return cast("tuple[Any, ...]", made)


def note(error: BaseException, path: Path) -> None:
    """Tell the reader of an exception of f at which leaf it happened."""
    error.add_note(f"cowalk: while visiting the leaf at {brief(path)}")


def wrong_outputs(made: Any, outputs: int, path: Path) -> TypeError:
    got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
    return TypeError(
        f"with outputs={outputs}, f must return a tuple of {outputs} values; at {brief(path)} it returned {got}"
    )


def rebox(visit: Visit, result: Any) -> Any:
    for box, kind in reversed(visit.boxes):
        result = kind.close(box, result)
    return result


def build(plan: Plan, results: list[Any], structure: bool) -> Any:
    """Close the nodes of a plan around the results, from the bottom up."""
    stack: list[Any] = []
    shared: dict[int, tuple[list[Any], Any]] = {}
    closed: dict[Any, list[tuple[Any, Any]]] = {}
    for step in plan.steps:
        match step:
            case int():
                stack.append(results[step])
            case Keep():
                stack.append(step.content if structure else step.node)
            case CloseBox():
                if not structure:
                    stack.append(step.kind.close(step.node, stack.pop()))
            case Close():
                at = len(stack) - len(step.keys)
                parts = stack[at:]
                del stack[at:]
                stack.append(plain(step, parts) if structure else close(step, parts, shared, closed))
    if closed:
        renewed = {key: new for key, (_, new) in shared.items()}
        renewed |= {id(visit.tie): results[i] for i, visit in enumerate(plan.visits) if visit.tie is not None}
        for finish, pairs in closed.items():
            finish(pairs, renewed)
    return stack.pop()


def plain(step: Close, parts: list[Any]) -> Any:
    kind = step.kind.plain
    return dict(zip(step.keys, parts, strict=True)) if kind is dict else cast("Callable[[list[Any]], Any]", kind)(parts)


def close(
    step: Close,
    parts: list[Any],
    shared: dict[int, tuple[list[Any], Any]],
    closed: dict[Any, list[tuple[Any, Any]]],
) -> Any:
    if step.kind.shared:
        before = shared.get(id(step.node))
        if before is not None and all(one is other for one, other in zip(before[0], parts, strict=True)):
            return before[1]
    new = step.kind.close(step.node, dict(zip(step.keys, parts, strict=True)))
    if step.kind.shared:
        shared.setdefault(id(step.node), (parts, new))
    if step.kind.finish is not None:
        closed.setdefault(step.kind.finish, []).append((step.node, new))
    return new

"""In which order rules are applied to the gradients of many arrays.

The stages of a rule are cut into segments: runs of elementwise stages; a stage that looks at one array; a stage that looks at
the whole tree, and waits until all arrays that it concerns have come to it. The last segment takes the step out of the
parameter, and begins when all arrays have come to theirs: an error before leaves every parameter as it was.

How a segment is run is another matter: `in_place` for NumPy and torch, `functional` for JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cowalk.optim.rules.composing import AccumGrad, Chain, MixedPrecision
from cowalk.optim.rules.rule import Rule, State


class Segment(NamedTuple):
    """The stages from `begin` to before `end` of a rule, and how they are run."""

    kind: Literal["elementwise", "array", "tree"]
    begin: int
    end: int
    is_last: bool = False


def segments_of(rule: Rule) -> list[Segment]:
    """The segments of a rule. The last one is elementwise, maybe without a stage: it subtracts the step."""
    found: list[Segment] = []
    begin = 0
    for i, stage in enumerate(rule.stages):
        if stage.elementwise and not stage.over_tree:
            continue
        if begin < i:
            found.append(Segment("elementwise", begin, i))
        found.append(Segment("tree" if stage.over_tree else "array", i, i + 1))
        begin = i + 1
    return [*found, Segment("elementwise", begin, len(rule.stages), is_last=True)]


@dataclass(slots=True, eq=False)
class Work:
    """One parameter to update.

    Attributes:
        path: of the parameter.
        kept: what its rule keeps of it; written to.
        x: the parameter; written to, or for JAX at last the new one.
        gradient: what the next stage gets.
        is_ready: whether the stages from here on happen in this update; inside of a trace it may be traced.
    """

    path: Any
    kept: Any
    x: Any
    gradient: Any
    is_ready: Any = True


@dataclass(slots=True, eq=False)
class Group:
    """The works of one rule, and how far they are.

    Attributes:
        stages: of the rule.
        segments: those that are still to be run.
        now: the stages, with the values of their schedules.
    """

    rule: Rule
    works: list[Work]
    stages: tuple[Rule, ...]
    segments: list[Segment]
    now: list[Rule]

    def subject(self, work: Work) -> Any:
        """The array that the stages update: the parameter, or MixedPrecision's copy of it."""
        return work.kept["copy"] if isinstance(self.rule, MixedPrecision) else work.x

    def states(self, work: Work, segment: Segment) -> list[State]:
        """What the stages of a segment keep."""
        rule, kept = self.rule, work.kept
        if isinstance(rule, MixedPrecision):
            rule, kept = rule.rule, kept["state"]
        if isinstance(rule, Chain):
            return [kept[i] for i in range(segment.begin, segment.end)]
        return [kept] * (segment.end - segment.begin)

    @property
    def tree_rule(self) -> Rule | None:
        """The rule over the tree that the works wait for, if they do."""
        segment = self.segments[0]
        return self.stages[segment.begin] if segment.kind == "tree" else None


def _stages_now(stages: Sequence[Rule], step: Any) -> list[Rule]:
    """Stages with the values of their schedules after so many updates; after AccumGrad its means count."""
    now: list[Rule] = []
    for stage in stages:
        now.append(stage.at_step(step))
        if isinstance(stage, AccumGrad):
            step = step // stage.n
    return now


def groups_of(rules: Iterable[Rule], works: Iterable[Work], step: Any) -> list[Group]:
    """Works by their rules, which are the same object where parameters were set up together."""
    groups: dict[int, Group] = {}
    for rule, work in zip(rules, works, strict=True):
        group = groups.get(id(rule))
        if group is None:
            group = groups[id(rule)] = Group(rule, [], rule.stages, segments_of(rule), _stages_now(rule.stages, step))
        group.works.append(work)
    return list(groups.values())


ApplyTree = Callable[[Rule, dict[str, Work]], Mapping[str, Any]]
"""Applies a rule over the tree to the gradients of works by path; whoever gives it keeps that rule's state."""
Run = Callable[[Group, Segment], None]


def apply(groups: Sequence[Group], apply_tree: ApplyTree, run: Run) -> None:
    """Take all works through all segments of their rules."""
    while True:
        for group in groups:
            while group.tree_rule is None and not group.segments[0].is_last:
                run(group, group.segments.pop(0))
        waiting = [group for group in groups if group.tree_rule is not None]
        if not waiting:
            break
        rule = _first_complete(waiting)
        members = [group for group in waiting if group.tree_rule == rule]
        works = {str(work.path): work for group in members for work in group.works if work.is_ready is not False}
        now = members[0].now[members[0].segments[0].begin]
        for path, gradient in (apply_tree(now, works) if works else {}).items():
            works[path].gradient = gradient
        for group in members:
            group.segments.pop(0)
    for group in groups:
        run(group, group.segments[0])


def _first_complete(waiting: Sequence[Group]) -> Rule:
    """A rule over the tree that no work has still before it; where two wait for each other, the first."""
    here = [group.stages[group.segments[0].begin] for group in waiting]
    ahead = {stage for group in waiting for stage in group.stages[group.segments[0].end :] if stage.over_tree}
    return next((rule for rule in here if rule not in ahead), here[0])

"""How much a batch counts: by its examples, by its tokens, or as the caller says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from cowalk.gradients.accumulator import AccumulatorError
from cowalk.tree import walk

Weight = Literal["examples", "tokens"] | Callable[[Any], Any] | float
TARGETS = ("labels", "targets", "target", "y")
"""Under which names a batch that is a mapping may have its targets."""
IGNORED = -100
"""The target of a token that takes no part in a loss: torch's and transformers' convention."""


def weigher(weight: Weight) -> Callable[[Any], Any]:
    """A function from a batch to its weight.

    Raises:
        ValueError: `weight` is none of the forms that it can have.
    """
    if weight == "examples":
        return count_examples
    if weight == "tokens":
        return count_tokens
    if callable(weight):
        return weight
    if not isinstance(weight, str | bool):
        return lambda _: weight
    raise ValueError(
        f"weight= is 'examples', 'tokens', a function of the batch, or one number for all batches, not {weight!r:.60}"
    )


def count_examples(batch: Any) -> int:
    """The length of the arrays in a batch along their first axis.

    Raises:
        AccumulatorError: it has none, or they differ.
    """
    sizes = {
        str(path) or "the batch": int(leaf.shape[0]) for path, (leaf,) in walk(batch, ties="each") if _has_axes(leaf)
    }
    if not sizes:
        raise AccumulatorError(
            f"there is no array in this batch (a {type(batch).__name__}) to count examples in: give weight=, a function of the "
            "batch that says how many there are"
        )
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in list(sizes.items())[:6])
        raise AccumulatorError(
            f"the arrays of this batch have several lengths along their first axis ({shown}): give weight=, a function of the "
            "batch that says how many examples it has"
        )
    return next(iter(sizes.values()))


def count_tokens(batch: Any) -> int:
    """How many targets of a batch take part in its loss: the last array of a tuple, or what a mapping has under "labels",
    but for those that are −100.

    Raises:
        AccumulatorError: there are no such targets.
    """
    targets: Any = None
    if isinstance(batch, Mapping):
        targets = next((batch[name] for name in TARGETS if name in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        targets = batch[-1]
    if not hasattr(targets, "shape") or "float" in str(targets.dtype):
        raise AccumulatorError(
            "weight='tokens' counts the last array of a tuple, or a mapping's 'labels'; this batch has none that are whole "
            "numbers: give a function of the batch instead, such as lambda batch: batch['mask'].sum()"
        )
    return int((targets != IGNORED).sum())


def _has_axes(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and len(leaf.shape) > 0

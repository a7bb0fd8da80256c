"""`dataset_gradient`: the gradient over all batches of a data set."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from cowalk.frameworks.framework import framework_of
from cowalk.gradients.accumulator import Accumulator, AccumulatorError, Batch, Reduction, checked_weight
from cowalk.gradients.differentiate import FrameworkError, value_and_gradient
from cowalk.gradients.weights import Weight, weigher
from cowalk.measure import Table
from cowalk.tree import Box, Path, children, is_missing
from cowalk.tree.kinds import set_kind


@dataclass(eq=False)
class DatasetGradient:
    """The gradient over a data set, and what came with it. A walk sees the gradient: `cowalk.stats(model, found)` works.

    Attributes:
        gradient: plain containers under the model's paths; None where no batch had a gradient.
        reduce: whether it is the "mean" over all examples or their "sum".
        loss: the loss over the batches of this call, reduced likewise; None where it has no value (`gradient=` gave none).
        weight: of all batches together: how many examples, or tokens.
        batches: how many there were.
        counts: in how many of them each parameter had a gradient.
        worst: the batches with the largest gradients, or with NaN or infinite ones, the worst first.
        is_complete: whether all batches came; False after Ctrl-C.
        noise: a table: how the batches' gradients scatter, by parameter, layer and model; see `Accumulator.noise`.
    """

    gradient: Any
    reduce: Reduction
    loss: float | None
    weight: float
    batches: int
    counts: dict[Path, int]
    worst: tuple[Batch, ...]
    is_complete: bool
    _make_noise: Callable[[], Table] = field(repr=False)

    @cached_property
    def noise(self) -> Table:
        return self._make_noise()

    def __getitem__(self, key: Any) -> Any:
        """A part of the gradient."""
        return self.gradient[key]


set_kind(DatasetGradient, Box(open=lambda found: found.gradient, close=lambda _, content: content))


def dataset_gradient(
    loss: Callable[..., Any] | None,
    model: Any,
    batches: Iterable[Any],
    *,
    weight: Weight = "examples",
    loss_reduction: Reduction = "mean",
    reduce: Reduction = "mean",
    gradient: Callable[..., Any] | None = None,
    accumulator: Accumulator | None = None,
    worst: int = 10,
    compiled: bool = True,
    progress: bool | None = None,
) -> DatasetGradient:
    """The gradient of a loss over a whole data set, as one batch of all of it would give it; it is added up in place.

    Args:
        loss: `loss(model, *batch)` for a batch that is a tuple or a list, else `loss(model, batch)`: a scalar.
        model: of torch, Equinox, Flax NNX or Keras, or a tree of arrays. It stays as it is, but for what the loss itself does to
            it (set a torch model with dropout or batch norm to `eval()`).
        batches: what a data loader gives. Gone through once.
        weight: how much a batch counts: its "examples" (the length of its arrays along the first axis), its "tokens" (targets
            that are not −100), a function of the batch, or one number for all.
        loss_reduction: whether the loss is the mean over the examples (or tokens) of a batch, or their sum.
        reduce: whether to give the mean over all examples, or their sum.
        gradient: a function like `loss` that gives the gradients instead, or `(value, gradients)`: for NumPy and for models that
            are differentiated otherwise. `loss` may then be None.
        accumulator: go on with one that has batches already; it keeps its sums, whatever happens.
        worst: how many of the batches with the largest gradients to remember.
        compiled: for JAX: compile the loss and the addition into one function, anew for batches of another shape. What is no
            array in a batch is static then.
        progress: show a bar; by default where the terminal can show one.

    Returns:
        A `DatasetGradient`. Ctrl-C ends the loop; what there is then is returned, with `is_complete` False.

    Raises:
        AccumulatorError: no batch came, none had a weight, or the weight cannot be told.
        FrameworkError: the model belongs to no framework that differentiates.
        Whatever the loss raises, with a note of the batch.

    >>> import torch, cowalk
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> x = torch.arange(10.0).reshape(5, 2)
    >>> found = cowalk.dataset_gradient(lambda m, x: m(x).mean(), model, x.split(2), progress=False)
    >>> found.gradient["weight"], found.weight, found.batches
    (tensor([[4., 5.]]), 5.0, 3)
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce= is 'mean' or 'sum', not {reduce!r:.60}")
    weigh = weigher(weight)
    prepare = _preparer(loss, model, gradient, loss_reduction, compiled, accumulator is None)
    total = Accumulator(model, worst=worst) if accumulator is None else accumulator
    losses, stop, is_complete = _Losses(loss_reduction), _Stop(), False
    try:
        with stop, _bar(batches, progress) as advance:
            for index, batch in enumerate(batches):
                try:
                    count = checked_weight(weigh(batch))
                    if count == 0 and loss_reduction == "mean":
                        total.pass_by()
                        continue
                    add = prepare(batch, count)
                    with stop.adding():
                        losses.add(add(total), count)
                except Exception as error:
                    error.add_note(f"(in batch {index}; the {index} before it were added)")
                    raise
                advance(total)
                if stop.is_asked:
                    break
            else:
                is_complete = True
    except KeyboardInterrupt:
        if total.batches == 0:
            raise
    if total.batches == 0:
        raise AccumulatorError(
            "no batch came: the loader is empty, or batches is an iterator that has been used up"
            + ("" if not isinstance(batches, Iterator) else "; give the loader itself, or a new iterator")
        )
    if total.weight == 0 and loss_reduction == "mean":
        raise AccumulatorError(f"all {total.batches} batches have weight 0: there is nothing to add")
    return _finished(total, reduce, losses, is_complete, own=accumulator is None)


def _finished(total: Accumulator, reduce: Reduction, losses: _Losses, is_complete: bool, own: bool) -> DatasetGradient:
    counts, scatter = total.counts, total.scatter()
    take = total.mean if reduce == "mean" else total.sum
    found = total.take(reduce) if own else take()  # an accumulator of our own gives up its memory
    factor = 1.0 if reduce == "mean" or not total.weight else 1.0 / total.weight
    return DatasetGradient(
        found,
        reduce,
        losses.reduced(reduce),
        total.weight,
        total.batches,
        counts,
        total.worst,
        is_complete,
        lambda: scatter.table(found, factor),
    )


# --- one batch ---


def _arguments(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


Prepared = Callable[[Accumulator], float | None]
"""Adds a batch's gradient to an accumulator; gives the loss's value."""


def _preparer(
    loss: Callable[..., Any] | None,
    model: Any,
    gradient: Callable[..., Any] | None,
    loss_reduction: Reduction,
    compiled: bool,
    own: bool,
) -> Callable[[Any, float], Prepared]:
    """A function from a batch and its weight to what adds it. The long work may be in either."""
    if gradient is None and loss is None:
        raise ValueError("dataset_gradient needs a loss, or gradient=, a function that gives the gradients")
    if gradient is None:
        if not callable(loss):
            raise TypeError("the loss comes first: dataset_gradient(loss, model, batches)")
        framework = framework_of(model)
        if framework is None:
            raise FrameworkError(
                f"no framework differentiates a {type(model).__name__} like this: give the gradients by gradient=, a function "
                "gradient(model, *batch), or a model of torch, JAX or Keras"
            )
        if compiled and framework.is_pure_jax:
            from cowalk.gradients.jax_dataset import CompiledStep

            return CompiledStep(loss, model, loss_reduction, donates=own).prepare

    def prepare(batch: Any, weight: float) -> Prepared:
        arguments = _arguments(batch)
        if gradient is None:
            value, found = value_and_gradient(cast("Callable[..., Any]", loss), model, *arguments)
        else:
            value, found = _of_users(gradient(model, *arguments))
        value = None if value is None else float(value)

        def add(total: Accumulator) -> float | None:
            total.add(found, weight, loss_reduction=loss_reduction, loss=value)
            return value

        return add

    return prepare


def _of_users(found: Any) -> tuple[Any, Any]:
    """A value, if there is one, and gradients, from what a user's own function gave."""
    if type(found) is tuple and len(found) == 2:
        value, gradients = found
        is_number = isinstance(value, int | float) or getattr(value, "shape", None) == ()
        if is_number and not is_missing(gradients) and children(gradients):
            return value, gradients
    return None, found


@dataclass(slots=True)
class _Losses:
    """The loss over the data set, as far as it is known."""

    loss_reduction: Reduction
    total: float = 0.0
    weight: float = 0.0
    are_known: bool = True

    def add(self, value: float | None, weight: float) -> None:
        if value is None:
            self.are_known = False
            return
        self.total += value * weight if self.loss_reduction == "mean" else value
        self.weight += weight

    def reduced(self, reduce: Reduction) -> float | None:
        if not self.are_known or not self.weight:
            return None
        return self.total / self.weight if reduce == "mean" else self.total


# --- the loop ---


class _Stop:
    """Within it, Ctrl-C waits while a batch is added, so that no batch is half in the sums."""

    def __init__(self) -> None:
        self.is_asked = False
        self._is_adding = False
        self._before: Any = None

    def __enter__(self) -> None:
        ignored = signal.getsignal(signal.SIGINT) in (None, signal.SIG_IGN)
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: Any) -> None:
        self.is_asked = True
        if not self._is_adding:
            if callable(self._before):
                self._before(number, frame)
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def adding(self) -> Generator[None]:
        self._is_adding = True
        try:
            yield
        finally:
            self._is_adding = False


@contextlib.contextmanager
def _bar(batches: Any, progress: bool | None) -> Generator[Callable[[Accumulator], None]]:
    """A progress bar on the terminal, moved by what it yields."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    try:
        count: int | None = len(batches)
    except TypeError:
        count = None
    columns = (
        TextColumn("gradient of the data set"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[norm]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=count, norm="")

        def advance(total: Accumulator) -> None:
            worst = total.worst[0] if total.worst else None
            text = "" if worst is None else f"largest |g| {worst.norm:.3g} in batch {worst.index}"
            bar.update(task, advance=1, norm=text)

        yield advance

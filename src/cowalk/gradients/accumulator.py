"""`Accumulator`: the weighted sum and mean of many gradients, in place."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from cowalk.frameworks.framework import TiedGradients, joins_ties
from cowalk.gradients import saving, sums
from cowalk.gradients.scatter import Scatter
from cowalk.gradients.shapes import ShapeError, filled, joined, shape_of, shape_of_paths
from cowalk.gradients.sums import Sum
from cowalk.measure import Table
from cowalk.tree import MISSING, CowalkError, Path, fmapstructure, isnumeric, istrainable, walk
from cowalk.tree.kinds import Leaf, kind_of
from cowalk.tree.walk import Ties

Reduction = Literal["mean", "sum"]


class AccumulatorError(CowalkError, ValueError):
    """Nothing to average, or a weight that is none."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a data set.

    Attributes:
        index: its number, from 0.
        norm: the 2-norm of its mean gradient, over the whole model.
        weight: how many examples (or tokens) it has.
        loss: what the loss was, if that is known.
    """

    index: int
    norm: float
    weight: float
    loss: float | None = None


class Accumulator:
    """Adds up the gradients of batches, in place.

    Gradients are trees of any kind, of NumPy, torch or JAX arrays, with None where there is no gradient (without a model, a key
    may be absent too). What is None in every batch stays None; a branch that comes later comes with its first value, and counts
    as zero before. After the first batch no array is made. Nothing is ever written into the gradients given.

    The gradient of a mean loss counts by its batch's weight, so that a short last batch counts right; that of a summed loss as
    it is. Gradients narrower than float32 are added in float32, with what roundings lose kept beside, which
    makes the sum of any number of them right to float32's rounding.

    Args:
        model: the model that the gradients are of. The results have its shape, and the keys of gradients are checked. Without
            it, results have the containers of the gradients.
        grads: what stands at the paths of a parameter of the model that is tied; see `cowalk.update`.
        worst: how many of the batches with the largest gradients to remember.

    Attributes:
        weight: of all batches together.
        batches: how many there were.
        worst: those with the largest gradient norms, or with NaN or infinite ones, the worst first.

    >>> import numpy as np, cowalk
    >>> total = cowalk.Accumulator()
    >>> total.add({"w": np.array([1.0, 2.0]), "b": None}, weight=32)
    >>> total.add({"w": np.array([4.0, 2.0]), "b": None}, weight=16)
    >>> total.mean()
    {'w': array([2., 2.]), 'b': None}
    """

    def __init__(self, model: Any = None, *, grads: TiedGradients | None = None, worst: int = 10) -> None:
        self._model = model
        self._ties: Ties = "each" if model is None else joins_ties(model, grads)
        self._most_worst = worst
        self._sums: dict[Path, Sum] = {}
        self._shape: Any = None
        self.weight = 0.0
        self.batches = 0
        self._weighted = 0  # batches with a weight
        self.worst: tuple[Batch, ...] = ()

    def __repr__(self) -> str:
        return f"Accumulator({self.batches} batches of weight {self.weight:g}, {len(self._sums)} parameters)"

    # --- adding ---

    def add(
        self, gradients: Any, weight: float = 1.0, *, loss_reduction: Reduction = "mean", loss: float | None = None
    ) -> None:
        """Add the gradients of one batch.

        Args:
            gradients: a tree of gradients.
            weight: how many examples (or tokens) the batch has. A batch of weight 0 adds nothing.
            loss_reduction: whether the gradient is of the mean over these examples, or of the sum.
            loss: the loss's value, to be shown among the worst batches.

        Raises:
            AccumulatorError: the weight is negative or no finite number.
            ShapeError: gradients of another shape than those before; StructureError: they are not of this model.
        """
        weight = checked_weight(weight)
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction= is 'mean' or 'sum', not {loss_reduction!r:.60}")
        if weight == 0 and loss_reduction == "mean":  # a mean over nothing is NaN
            self.pass_by()
            return
        into, found, shape = self._places(gradients)
        norms = sums.add(list(into.values()), found, weight if loss_reduction == "mean" else 1.0)
        self._shape = shape
        self._sums.update(into)
        self._count(list(into.values()), mean_norms(norms, weight, loss_reduction), weight, loss)

    def pass_by(self) -> None:
        """Count a batch that has no weight."""
        self.batches += 1

    def absorb(
        self,
        new: Mapping[Path, tuple[Any, Any]],
        norms: Mapping[Path, float],
        weight: float,
        loss: float | None,
        shape: Any,
    ) -> None:
        """Take the sums (total and what it lost) to which a batch has been added elsewhere, with the norms of its mean gradients.

        All sums are new, also those of parameters without a gradient in this batch. `shape` is that of the gradients.
        """
        if self._model is None:
            self._shape = joined(self._shape, shape)
        for path, (total, lost) in new.items():
            known = self._sums.setdefault(path, Sum(total, lost, is_jax=True))
            known.total, known.lost = total, lost
        self._count([self._sums[path] for path in norms], list(norms.values()), weight, loss)

    def sums(self) -> Mapping[Path, Sum]:
        """The sums as they are, by path."""
        return self._sums

    def replace_sums(self, change: Callable[[Sum], Sum]) -> None:
        """Put other sums of the same values in the place of those that are here."""
        self._sums = {path: change(each) for path, each in self._sums.items()}

    def _places(self, gradients: Any) -> tuple[dict[Path, Sum], list[Any], Any]:
        """A sum for each gradient, the gradients, and the shape of the tree of all so far. Nothing here is changed yet."""
        expected: Mapping[Path, tuple[int, ...]] = {}
        if self._model is None:
            walked = (
                (path, leaf) for path, (leaf,) in walk(gradients, ties="each")
            )  # two parameters may have one gradient
        else:
            pairs = list(walk(self._model, gradients, where=istrainable, missing="pass", ties=self._ties))
            walked = ((path, leaf) for path, (_, leaf) in pairs if leaf is not MISSING)
            expected = {path: tuple(x.shape) for path, (x, _) in pairs}
        into: dict[Path, Sum] = {}
        found: list[Any] = []
        unusual: dict[Path, Any] = {}
        for path, gradient in walked:
            known = self._sums.get(path)
            if known is None or not known.takes(gradient):
                if not _is_gradient(gradient):
                    continue
                gradient = unusual[path] = _as_array(path, gradient)
            if known is not None:
                into[path] = known
            else:
                into[path] = _NO_SUM
            found.append(gradient)
        into.update(self._room_for(unusual, expected))
        shape = self._shape
        if self._model is None and (shape is None or any(path not in self._sums for path in unusual)):
            shape = joined(shape, shape_of(gradients, _is_gradient))
        return into, found, shape

    def _room_for(self, unusual: Mapping[Path, Any], expected: Mapping[Path, tuple[int, ...]]) -> dict[Path, Sum]:
        """Sums for gradients that there are none for yet, or that those that there are do not take."""
        known = {path: each for path in unusual if (each := self._sums.get(path)) is not None}
        shapes = {path: tuple(each.total.shape) for path, each in known.items()} | dict(expected)
        misfits = [
            path for path in unusual if shapes.get(path, tuple(unusual[path].shape)) != tuple(unusual[path].shape)
        ]
        if misfits:
            path, more = misfits[0], f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
            whose = "the parameter has" if expected else "those before have"
            raise ShapeError(
                f"{path}: the gradient has shape {tuple(unusual[path].shape)}, and {whose} {shapes[path]}{more}", path
            )
        room: dict[Path, Sum] = {}
        for path, gradient in unusual.items():
            each = known.get(path)
            if each is None:
                each = sums.new_sum(gradient)
            elif not sums.fits(each, gradient):
                each = sums.converted(each, gradient)
            each.remember(gradient)
            room[path] = each
        return room

    def _count(self, into: list[Sum], norms: list[float], weight: float, loss: float | None) -> None:
        """Take note of a batch whose gradients have been added; `norms` are those of its mean gradients."""
        for each, size in zip(into, norms, strict=True):
            each.count += 1
            each.square += weight * size * size
        batch = Batch(self.batches, _root_of_squares(norms), weight, loss)
        self.batches += 1
        self.weight += weight
        self._weighted += weight > 0
        self.worst = tuple(sorted((*self.worst, batch), key=_by_worst)[: self._most_worst])

    def merge(self, other: Accumulator) -> None:
        """Add all that another accumulator has added, of another part of the data set: as if all batches had come here.

        Its batches are numbered after those that are here.
        """
        if other is self:
            raise AccumulatorError("an accumulator cannot be merged with itself")
        shape = self._shape
        shapes = {path: tuple(each.total.shape) for path, each in self._sums.items()}
        if self._model is None:
            theirs = shape_of_paths(other._sums) if other._shape is None else other._shape
            shape = joined(shape, theirs)
        else:
            shapes |= {path: tuple(x.shape) for path, (x,) in walk(self._model, where=istrainable)}
            strange = [path for path in other._sums if path not in shapes]
            if strange:
                raise ShapeError(f"{strange[0]}: this accumulator's model has no such parameter", strange[0])
        for path, each in other._sums.items():
            if shapes.get(path, tuple(each.total.shape)) != tuple(each.total.shape):
                raise ShapeError(
                    f"{path}: there are gradients of shape {shapes[path]} and {tuple(each.total.shape)}", path
                )
        self._shape = shape
        for path, theirs in other._sums.items():
            self._sums[path] = sums.merged(self._sums.get(path), theirs)
        moved = (replace(batch, index=batch.index + self.batches) for batch in other.worst)
        self.worst = tuple(sorted((*self.worst, *moved), key=_by_worst)[: self._most_worst])
        self.batches += other.batches
        self.weight += other.weight
        self._weighted += other._weighted

    # --- files ---

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write all that was added into a file, an `.npz` of NumPy's, from which `load` goes on.

        The file is written aside and moved into its place: a stop on the way leaves an older one whole.

        Raises:
            SaveError: a path has keys that are neither texts nor whole numbers.
        """
        worst = [[each.index, each.norm, each.weight, each.loss] for each in self.worst]
        about = {"weight": self.weight, "batches": self.batches, "weighted": self._weighted, "worst": worst}
        saving.write(file, about, self._shape, self._sums)

    @classmethod
    def load(
        cls, file: str | os.PathLike[str], model: Any = None, *, grads: TiedGradients | None = None, worst: int = 10
    ) -> Accumulator:
        """What `save` wrote. The other arguments are those of a new accumulator; a model has to be like the one saved with.

        Sums are in CPU memory until gradients of the same path come, and then where those are.

        Raises:
            SaveError: the file holds no accumulator, or was saved with a model and none is given.

        >>> import tempfile, pathlib, numpy as np, cowalk
        >>> total = cowalk.Accumulator()
        >>> total.add([np.array([1.0])], weight=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     total.save(pathlib.Path(folder) / "sums.npz")
        ...     again = cowalk.Accumulator.load(pathlib.Path(folder) / "sums.npz")
        >>> again.sum(), again.weight
        ([array([3.])], 3.0)
        """
        about, shape, found = saving.read(file)
        new = cls(model, grads=grads, worst=worst)
        if model is None and shape is None and found:
            raise saving.SaveError(f"{os.fspath(file)} was saved with a model: load it with one", os.fspath(file))
        if model is not None:
            known = {path: tuple(x.shape) for path, (x,) in walk(model, where=istrainable)}
            other = [path for path, each in found.items() if known.get(path) != tuple(each.total.shape)]
            if other:
                raise saving.SaveError(
                    f"{os.fspath(file)} is of another model: this one has no parameter {other[0]} of shape "
                    f"{tuple(found[other[0]].total.shape)}",
                    os.fspath(file),
                )
        new._shape, new._sums = shape, found
        new.weight, new.batches, new._weighted = about["weight"], about["batches"], about["weighted"]
        new.worst = tuple(Batch(*each) for each in about["worst"])[:worst]
        return new

    # --- results ---

    def sum(self) -> Any:
        """The sum over all examples: for mean losses, of weight · gradient. New arrays, in plain containers.

        Raises:
            AccumulatorError: no batch was added.
        """
        return self._result(1.0, in_place=False)

    def mean(self) -> Any:
        """The mean over all examples: the sum divided by the weight of all batches.

        Raises:
            AccumulatorError: no batch was added, or none with a weight.
        """
        return self._result(self._mean_factor(), in_place=False)

    def take(self, reduce: Reduction) -> Any:
        """The sum or the mean in the memory of the sums, which are gone then: for models too large to have both."""
        result = self._result(self._mean_factor() if reduce == "mean" else 1.0, in_place=True)
        self._sums = {}
        return result

    def _mean_factor(self) -> float:
        self._check_any()
        if self.weight == 0:
            raise AccumulatorError(f"all {self.batches} batches have weight 0: there is no mean")
        return 1.0 / self.weight

    def _check_any(self) -> None:
        if self.batches == 0:
            raise AccumulatorError("no batch was added: an empty loader, or an iterator that has been used up?")

    def _result(self, factor: float, *, in_place: bool) -> Any:
        self._check_any()
        values = {path: sums.result(each, factor, in_place=in_place) for path, each in self._sums.items()}
        return self._in_shape(values)

    def _in_shape(self, values: Mapping[Path, Any]) -> Any:
        if self._model is None:
            return filled(self._shape, values)
        return fmapstructure(lambda path, _: values.get(path), self._model, ties="each", with_path=True)

    @property
    def counts(self) -> dict[Path, int]:
        """In how many batches each parameter had a gradient; those that never had one are left out without a model."""
        counts = {path: each.count for path, each in self._sums.items()}
        if self._model is None:
            return counts
        return {path: counts.get(path, 0) for path, _ in walk(self._model, where=istrainable)}

    def noise(self) -> Table:
        """How the gradients scatter: for each parameter, layer and the model, what `cowalk.measure.moments.Noise` says.

        With batches of weight b and mean gradients g, their weighted mean G and n batches of weight B together,
        tr Σ = (Σ b |g|² − B |G|²) / (n − 1) and |G|² − tr Σ / B are unbiased estimates of the trace of the covariance of one
        example's gradient and of the squared norm of the true gradient, if examples are drawn independently.

        Returns:
            A table of the mean gradients, beside the model's parameters if the model is known.

        >>> import numpy as np, cowalk
        >>> total = cowalk.Accumulator()
        >>> for g in (1.0, 3.0):
        ...     total.add({"w": np.array([g])}, weight=10)
        >>> row = total.noise()["w"].noise
        >>> row.trace, row.square, row.noise_scale
        (20.0, 3.0, 6.666666666666667)
        """
        return self.scatter().table(self.mean(), 1.0)

    def scatter(self) -> Scatter:
        """What is known of the scatter of the gradients at this moment, without the sums."""
        squares = {path: (each.count, each.square) for path, each in self._sums.items()}
        return Scatter(squares, self.weight, self._weighted, self._model)


def mean_norms(norms: list[float], weight: float, loss_reduction: Reduction) -> list[float]:
    """The norms of a batch's mean gradients, from those of the gradients of its loss."""
    if loss_reduction == "mean":
        return norms
    return [size / weight if weight else 0.0 for size in norms]


def checked_weight(weight: Any) -> float:
    """A batch's weight as a float.

    Raises:
        AccumulatorError: it is negative, or no finite number.
    """
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        raise AccumulatorError(f"a batch's weight is a number, not a {type(weight).__name__} {weight!r:.60}") from None
    if not (math.isfinite(number) and number >= 0):
        raise AccumulatorError(f"a batch's weight is 0 or more, and finite, not {number}")
    return number


def _is_gradient(leaf: Any) -> bool:
    return isnumeric(leaf) or isinstance(leaf, float | complex | np.inexact)


_NO_SUM = Sum(None)
"""Keeps the place of a sum that is still to be made."""


def _as_array(path: Path, gradient: Any) -> Any:
    kind = kind_of(type(gradient))
    if isinstance(kind, Leaf) and kind.traced is not None and kind.traced(gradient):
        raise AccumulatorError(
            f"{path}: a gradient that is being traced, or is a fake one, cannot be added: return it from there first"
        )
    if str(getattr(gradient, "device", "")) == "meta" or getattr(gradient, "is_deleted", bool)():
        raise AccumulatorError(f"{path}: the gradient has no values (it is on the meta device, or deleted)")
    if isinstance(gradient, float | complex | np.inexact):
        gradient = np.asarray(gradient)
    if isinstance(gradient, np.ndarray) and gradient.dtype.name in (
        "longdouble",
        "clongdouble",
        "float128",
        "complex256",
    ):
        return gradient.astype(np.complex128 if gradient.dtype.kind == "c" else np.float64)
    return gradient


def _root_of_squares(norms: list[float]) -> float:
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def _by_worst(batch: Batch) -> tuple[float, int]:
    return (-batch.norm if math.isfinite(batch.norm) else -math.inf), batch.index

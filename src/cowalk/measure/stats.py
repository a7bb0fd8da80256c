"""`stats`: everything about every parameter of a model, in one pass over memory; `ratio`: shown as parameter / gradient."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cowalk.frameworks.framework import Hyperparameters
from cowalk.measure import dispatch
from cowalk.measure.backend import SPANS, Histogram, Histograms, Matrix, empty_matrix
from cowalk.measure.gathering import Gathered, gather, in_shape
from cowalk.measure.moments import Adam, Moments, Pair
from cowalk.measure.obstacles import MeasureError, is_traced, is_uninitialised, obstacle, state_without_values
from cowalk.measure.optimizer_states import AdamSource, adam_source
from cowalk.measure.rows import State
from cowalk.measure.states import states_of
from cowalk.measure.table import Table
from cowalk.tree import MISSING, CowalkError, Path, isleaf, istrainable, walk
from cowalk.tree.matching import holds_value
from cowalk.tree.walk import Ties
from cowalk.tree.where import Where

_NOTHING = "a class of your own opens with cowalk.functor, and arrays have to be of floating or complex numbers"


def stats(
    params: Any,
    grads: Any = None,
    updates: Any = None,
    opt_state: Any = None,
    *,
    scale: Any = None,
    adam: Mapping[str, Any] | None = None,
    histograms: bool = False,
    ties: Ties = "sum",
    where: Where = istrainable,
    strict: bool = True,
    threads: int | None = None,
) -> Table:
    """Measure every parameter of a model, beside its gradient, its update and Adam's state of it.

    Every array is read once, where it lies: on the CPU without a copy, on an accelerator there. What is measured of one array
    is described at `Moments`, of two at `Pair` (the `ratio` parameter / gradient, the `update_ratio` update / parameter), of
    Adam's state at `Adam`.

    Args:
        params: any model, or tree of arrays; its order and paths are the table's.
        grads: its gradients, in containers of any kind, matched by key. Where one is missing (None), the row says why.
        updates: what the last step added to the parameters, likewise: `new - old`.
        opt_state: the optimizer itself (torch, Keras, NNX), its state under the model's paths, or a state of Optax's.
            Given an optimizer, the table also says which gradients belong to parameters that it does not own.
        scale: the loss scale that the gradients still hold (a number, or torch's GradScaler before its `unscale_` and `step`): it
            is taken out. What overflowed is counted as it stands.
        adam: what `opt_state` does not hold: "lr", "betas" (default 0.9, 0.999), "epsilon" (1e-8).
        histograms: count the powers of two in each array too.
        ties: how gradients (and the rest) at the paths of one tied parameter are joined before they are measured: "sum" (each
            path has a contribution of its own), "share" (they must be one array), "first", or "each" (every path is a row).
        where: which leaves to measure, as in every walk; `isleaf` takes plain numbers too.
        strict: absent and extra keys are errors; if False, absent means missing and extras are ignored.
        threads: how many to use on the CPU; by default one for each processor, or what OMP_NUM_THREADS says. The results do not
            depend on it.

    Returns:
        A table with a row for each parameter, the frozen ones of torch modules included, in the model's order.

    Raises:
        StructureError: the trees do not fit together; all differences are on it.
        MeasureError: a parameter and its gradient have different shapes, or one of them is no array of numbers.
        TieError: different gradients for one tied parameter, with ties="share".
        CowalkError: `opt_state` is nothing that holds an optimizer's state.

    >>> import numpy as np, cowalk
    >>> model = {"w": np.array([3.0, 4.0]), "b": np.array([0.0, 2.0]), "head": np.ones(2)}
    >>> table = cowalk.stats(model, {"w": np.array([0.3, 0.4]), "b": np.array([np.nan, 0.0]), "head": None})
    >>> table["w"].parameter.max, table["b"].gradient.nan, table["b"].ratio.x_by_zero, table["head"].state
    (4.0, 1, 1, 'unused')
    """
    settings = settings_of(adam)
    _check_threads(threads)
    factor = None if scale is None else _scale_of(scale)
    _check_places(grads, updates)
    source = AdamSource(settings=settings) if opt_state is None else adam_source(params, opt_state, settings)
    gathered = gather(params, grads, updates, source, where, ties, strict)
    if not gathered.leaves and holds_value(params, numeric=False):
        raise MeasureError([(Path(), f"where= finds nothing to measure in this {type(params).__name__}; {_NOTHING}")])
    matrix, powers = _measure(gathered, histograms, threads)
    if factor is not None:
        matrix, powers = _take_out_scale(matrix, powers, factor)
    return _table(params, gathered, matrix, powers, source, grads is not None)


RATIO_COLUMNS = ("n", "ratio.mean", "ratio.min", "ratio.max", "ratio.mean_abs")


def ratio(
    model: Any, grads: Any, *, scale: Any = None, ties: Ties = "sum", where: Where = istrainable, strict: bool = True
) -> Table:
    """The quotients parameter / gradient of every parameter of a model: mean, min and max, and what has no quotient.

    The table of `stats(model, grads)`, showing these columns; `table.structure` holds the same in the model's shape, a `Row`
    at each parameter.

    Raises:
        StructureError, MeasureError, TieError: as `stats`.

    >>> import numpy as np, cowalk
    >>> model = {"w": np.array([1.0, 2.0]), "b": np.array([0.0, 3.0]), "head": np.ones(2)}
    >>> table = cowalk.ratio(model, {"w": np.array([2.0, 1.0]), "b": np.array([0.5, 0.0]), "head": None})
    >>> table.structure["w"].ratio.mean, table.structure["b"].ratio.x_by_zero, table.structure["head"].ratio
    (1.25, 1, None)
    """
    table = stats(model, MISSING if grads is None else grads, scale=scale, ties=ties, where=where, strict=strict)
    return table.select(*RATIO_COLUMNS)


def _check_threads(threads: Any) -> None:
    if threads is not None and not (isinstance(threads, int) and threads >= 1):
        raise ValueError(f"threads= is a whole number, 1 or more, not {threads!r:.60}")


def _check_places(grads: Any, updates: Any) -> None:
    """Refuse what stands in another argument's place."""
    for name, tree in (("grads", grads), ("updates", updates)):
        if tree is None or tree is MISSING:
            continue
        if hasattr(tree, "param_groups") or hasattr(tree, "apply_gradients") or hasattr(tree, "opt_state"):
            raise CowalkError(f"{name}= is a {type(tree).__name__}, an optimizer: give it as opt_state=")
        if callable(tree) and isleaf(tree):
            raise CowalkError(
                f"{name}= is a function, {getattr(tree, '__name__', tree)!r:.60}: call it, and give what it returns"
            )


# --- measuring ---


def _measure(gathered: Gathered, histograms: bool, threads: int | None) -> tuple[Matrix, Histograms | None]:
    leaves = gathered.leaves
    quick = dispatch.measure_as_they_are(leaves, histograms, threads)
    if quick is not None:
        return quick
    problems = [
        (path, reason)
        for path, operands in zip(gathered.paths, leaves, strict=True)
        if (reason := obstacle(operands)) is not None
    ]
    if problems:
        raise MeasureError(problems)
    with_values = [i for i, operands in enumerate(leaves) if state_without_values(operands) is None]
    lines, found = dispatch.measure([leaves[i] for i in with_values], histograms, threads)
    matrix = empty_matrix(len(leaves))
    matrix[with_values] = lines
    if found is None:
        return matrix, None
    powers: Histograms = [(None, None, None) for _ in leaves]
    for i, three in zip(with_values, found, strict=True):
        powers[i] = three
    return matrix, powers


# --- the loss scale ---


def _scale_of(scale: Any) -> float:
    try:
        value = float(scale.get_scale()) if hasattr(scale, "get_scale") else float(scale)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not (value > 0 and math.isfinite(value) and math.isfinite(1 / value)):
        raise ValueError(
            f"scale= is the factor by which the loss was multiplied: positive and finite, not {scale!r:.60}"
        )
    return value


def _take_out_scale(matrix: Matrix, powers: Histograms | None, scale: float) -> tuple[Matrix, Histograms | None]:
    """What would have been measured of gradients that are divided by the scale."""
    _multiply(matrix, "gradient", Moments, ("mean", "std", "min", "max", "mean_abs"), 1 / scale)
    _multiply(matrix, "ratio", Pair, ("mean", "min", "max", "mean_abs"), scale)
    _multiply(matrix, "ratio", Pair, ("norm_y",), 1 / scale)
    _multiply(matrix, "adam", Adam, ("rms",), 1 / scale)  # v is of gradients without the scale
    if powers is None:
        return matrix, None
    fraction, exponent = math.frexp(scale)
    if fraction != 0.5:  # what frexp makes of a power of two
        raise ValueError(f"histograms are of powers of two, so scale= has to be one, not {scale}")
    shifted: Histograms = []
    for parameter, gradient, update in powers:
        moved = None if gradient is None else Histogram(gradient.low - (exponent - 1), gradient.counts)
        shifted.append((parameter, moved, update))
    return matrix, shifted


def _multiply(
    matrix: Matrix, section: str, kind: type[Moments | Pair | Adam], fields: Sequence[str], factor: float
) -> None:
    names = kind.names()
    columns = [SPANS[section].start + names.index(field) for field in fields]
    with np.errstate(all="ignore"):  # what does not fit becomes infinite or zero
        matrix[:, columns] *= factor


def settings_of(adam: Any) -> Hyperparameters:
    """The `adam=` of a call, checked."""
    if adam is not None and not isinstance(adam, Mapping):
        raise ValueError(f'adam= is a dict with "lr", "betas" or "epsilon", not {adam!r:.60}')
    unknown = [key for key in adam or () if key not in ("lr", "betas", "epsilon")]
    if unknown:
        raise ValueError(f'adam= may hold "lr", "betas" and "epsilon", not {", ".join(map(repr, unknown)):.60}')
    found = Hyperparameters(**(adam or {}))
    if found.betas is not None and not _are_betas(found.betas):
        raise ValueError(f"adam= holds betas=(β₁, β₂), two numbers from 0 to below 1, not {found.betas!r:.60}")
    for name, value in (("lr", found.lr), ("epsilon", found.epsilon)):
        if value is not None and not is_traced(value) and not _is_number(value):
            raise ValueError(f"adam= holds {name} as a number, 0 or more, not {value!r:.60}")
    return found


def _is_number(value: Any) -> bool:
    try:
        return float(value) >= 0
    except (TypeError, ValueError):
        return False


def _are_betas(betas: Any) -> bool:
    try:
        first, second = betas
        return all(is_traced(beta) or 0 <= float(beta) < 1 for beta in (first, second))
    except (TypeError, ValueError):
        return False


# --- the table ---


def _table(
    params: Any, gathered: Gathered, matrix: Matrix, powers: Histograms | None, source: AdamSource, has_grads: bool
) -> Table:
    leaves = gathered.leaves
    return Table(
        gathered.paths,
        matrix,
        aliases=gathered.aliases,
        states=_states(gathered, matrix, source, has_grads),
        shapes=_shapes([operands[0] for operands in leaves]),
        dtypes=_dtypes([operands[0] for operands in leaves]),
        histograms=powers,
        structure=partial(in_shape, gathered.structure, gathered.paths),
        locate=_locator(params),
    )


def _states(gathered: Gathered, matrix: Matrix, source: AdamSource, has_grads: bool) -> list[tuple[State, ...]]:
    leaves, names = gathered.leaves, gathered.names
    unmeasured = np.flatnonzero(np.isnan(matrix[:, SPANS["parameter"].start])).tolist()
    without_values: dict[int, State] = {}
    for i in unmeasured:
        state = state_without_values(leaves[i])
        if state is not None:
            without_values[i] = state
    owned = source.owned
    return states_of(
        matrix,
        [operands[1] is not None for operands in leaves] if has_grads else None,
        frozen=gathered.frozen,
        unowned=[] if owned is None else [i for i in range(len(leaves)) if not any(path in owned for path in names(i))],
        without_values=without_values,
    )


def _shapes(parameters: Sequence[Any]) -> list[tuple[int, ...] | None]:
    try:
        return [parameter.shape for parameter in parameters]
    except (AttributeError, RuntimeError):  # a number, or a lazy parameter, which has none
        return [None if is_uninitialised(each) else tuple(np.shape(each)) for each in parameters]


def _dtypes(parameters: Sequence[Any]) -> list[str]:
    names: dict[Any, str] = {}
    found: list[str] = []
    for parameter in parameters:
        dtype = getattr(parameter, "dtype", type(parameter))
        if dtype not in names:
            names[dtype] = getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype).removeprefix("torch."))
        found.append(names[dtype])
    return found


def _locator(params: Any) -> Callable[[Any], Sequence[Path] | None] | None:
    """Finds where an object stands in the model, without keeping the model alive."""
    try:
        model = weakref.ref(params)
    except TypeError:  # plain containers
        return None

    def locate(wanted: Any) -> Sequence[Path] | None:
        tree = model()
        if tree is None:
            raise CowalkError("the model of this table is gone; look rows up by their paths")
        if wanted is tree:
            return [Path()]
        places = [
            path for path, (node,) in walk(tree, where=lambda node: node is wanted or isleaf(node)) if node is wanted
        ]
        return places or None

    return locate

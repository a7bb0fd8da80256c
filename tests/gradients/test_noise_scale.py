"""The noise of gradients, measured where the covariance of one example's gradient is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import cowalk
from cowalk import Accumulator

MEAN = {"a": np.array([0.5, -0.2, 0.1, 0.0]), "in": {"b": np.array([0.3, 0.4, -0.1])}}
"""The true gradient."""
DEVIATION = {"a": np.array([1.0, 2.0, 0.5, 1.5]), "in": {"b": np.array([0.7, 0.1, 1.2])}}
"""The standard deviations of one example's gradient; its covariance Σ is diagonal."""
NAMES = ("a", "in.b")


def leaf(tree: Any, name: str) -> Any:
    return tree["a"] if name == "a" else tree["in"]["b"]


def sampled(sizes: Any, rng: Any, loss_reduction: Any = "mean") -> Accumulator:
    """An accumulator of batches of these sizes: each mean gradient is G, and noise of covariance Σ / b."""
    total = Accumulator()
    for size in sizes:
        factor = size if loss_reduction == "sum" else 1.0
        gradient = cowalk.fmap(
            lambda mean, spread, size=size, factor=factor: (
                factor * (mean + spread * rng.normal(size=mean.shape) / math.sqrt(size))
            ),
            MEAN,
            DEVIATION,
        )
        total.add(gradient, size, loss_reduction=loss_reduction)
    return total


def standard_errors(mean: Any, variances: Any, count: int, weight: float) -> tuple[float, float]:
    """The standard deviations of the estimates of tr Σ and |G|² for normal gradients, from `count` batches of this weight.

    Σ b (g − Ḡ)² of one element is σ² χ² of count − 1 degrees of freedom, so that tr Σ has the variance 2 Σ σ⁴ / (count − 1).
    |Ḡ|² has the variance Σ (4 G² σ²/B + 2 σ⁴/B²), and Ḡ is independent of the estimate of tr Σ.
    """
    trace = 2 * (variances**2).sum() / (count - 1)
    square = (4 * mean**2 * variances / weight + 2 * variances**2 / weight**2).sum() + trace / weight**2
    return math.sqrt(trace), math.sqrt(square)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_the_trace_and_the_squared_norm_come_out_within_their_sampling_errors(loss_reduction: str) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 65, size=2000)
    table = sampled(sizes, rng, loss_reduction).noise()
    for name in NAMES:
        mean, variances, noise = leaf(MEAN, name), leaf(DEVIATION, name) ** 2, table[name].noise
        of_trace, of_square = standard_errors(mean, variances, 2000, sizes.sum())
        assert abs(noise.trace - variances.sum()) < 4 * of_trace
        assert abs(noise.square - (mean**2).sum()) < 4 * of_square
        assert of_trace < 0.05 * variances.sum()  # an error of a few percent would be seen
        assert of_square < 0.05 * (mean**2).sum()
        assert noise.noise_scale == pytest.approx(noise.trace / noise.square)
        assert (noise.batches, noise.batch) == (2000, sizes.mean())


@pytest.mark.parametrize("sizes", [(8, 8, 8), (1, 2, 30, 3)])
def test_the_estimates_are_unbiased_for_few_batches_of_any_sizes(sizes: tuple[int, ...]) -> None:
    rng, repetitions = np.random.default_rng(1), 1500
    found: list[tuple[float, float]] = []
    for _ in range(repetitions):
        total = sampled(sizes, rng)
        mean, squares = total.mean(), [square for _, square in total.scatter().squares.values()]
        norms = [float((leaf(mean, name) ** 2).sum()) for name in NAMES]
        traces = [(square - sum(sizes) * norm) / (len(sizes) - 1) for square, norm in zip(squares, norms, strict=True)]
        found.append((sum(traces), sum(norms) - sum(traces) / sum(sizes)))
    last = total.noise().total.noise
    assert (last.trace, last.square) == pytest.approx(found[-1])  # what the table says
    exact = (
        sum(float((leaf(DEVIATION, name) ** 2).sum()) for name in NAMES),
        sum(float((leaf(MEAN, name) ** 2).sum()) for name in NAMES),
    )
    averages, errors = np.mean(found, 0), np.std(found, 0) / math.sqrt(repetitions)
    assert (abs(averages - exact) < 4 * errors).all()
    assert (errors < 0.2 * np.array(exact)).all()


def test_layers_and_the_model_are_the_sums_of_their_parameters() -> None:
    rng = np.random.default_rng(2)
    table = sampled((3, 5, 9, 2), rng).noise()
    parts = [table[name].noise for name in NAMES]
    assert table.total.noise.trace == pytest.approx(sum(part.trace for part in parts))
    assert table.total.noise.square == pytest.approx(sum(part.square for part in parts))
    assert table.total.noise.n == 7
    double = Accumulator()
    for size in (3, 5):
        gradient = cowalk.fmap(lambda mean, spread: mean + spread * rng.normal(size=mean.shape), MEAN, DEVIATION)
        double.add({"left": gradient, "right": [gradient]}, size)
    layers = double.noise().layers()
    for side in ("left", "right"):
        rows = [row for row in layers if str(row.path).startswith(side)]
        assert sum(row.noise.trace for row in rows) == pytest.approx(layers.total.noise.trace / 2)
        assert sum(row.noise.n for row in rows) == 7
    assert {row.noise.batches for row in layers} == {2}


def test_losses_that_are_summed_give_the_noise_of_means() -> None:
    means, summed = (sampled((3, 5, 9, 2), np.random.default_rng(3), how).noise() for how in ("mean", "sum"))
    for name in NAMES:
        ours, theirs = means[name].noise, summed[name].noise
        assert (ours.trace, ours.square, ours.batch) == pytest.approx((theirs.trace, theirs.square, theirs.batch))


def test_sums_over_a_data_set_have_the_noise_of_its_means() -> None:
    x = torch.tensor(np.random.default_rng(4).normal(size=(20, 3)))
    model = torch.nn.Linear(3, 1).double()
    tables = [
        cowalk.dataset_gradient(lambda m, x: (m(x) ** 2).mean(), model, x.split(6), reduce=reduce, progress=False).noise
        for reduce in ("mean", "sum")
    ]
    for one, other in zip(*tables, strict=True):
        assert (one.noise.trace, one.noise.square) == pytest.approx((other.noise.trace, other.noise.square))


def test_merged_accumulators_have_the_noise_of_all_batches() -> None:
    rng, both = np.random.default_rng(5), sampled((), None)
    sizes = rng.integers(1, 9, 40)
    alone = sampled(sizes, np.random.default_rng(6))
    rng = np.random.default_rng(6)
    for part in (sizes[:10], sizes[10:25], sizes[25:]):
        both.merge(sampled(part, rng))
    for one, other in zip(alone.noise(), both.noise(), strict=True):
        assert (one.noise.trace, one.noise.square) == pytest.approx((other.noise.trace, other.noise.square))


def test_one_batch_says_nothing_about_noise() -> None:
    total = sampled((4,), np.random.default_rng(7))
    total.add(MEAN, weight=0)
    noise = total.noise()["a"].noise
    assert (noise.trace, noise.square, noise.noise_scale, noise.batches) == (None, None, None, 1)
    assert total.noise().total.noise.trace is None


def test_a_branch_that_some_batches_lack_has_gradients_of_zero_there() -> None:
    ours, zeros = Accumulator(), Accumulator()
    for i, (size, value) in enumerate(((2, 1.0), (5, 2.0), (3, -1.0))):
        kept = np.array([value, 1.0])
        ours.add({"w": kept, "v": kept if i else None}, size)
        zeros.add({"w": kept, "v": kept if i else np.zeros(2)}, size)
    one, other = ours.noise()["v"].noise, zeros.noise()["v"].noise
    assert (one.trace, one.square, one.batch) == pytest.approx((other.trace, other.square, other.batch))
    assert (one.batches, other.batches) == (2, 3)


def test_nan_batches_leave_the_noise_unknown() -> None:
    total = sampled((4, 4), np.random.default_rng(8))
    total.add({"a": np.full(4, math.nan), "in": MEAN["in"]}, 4)
    assert total.noise()["a"].noise.trace is None
    assert total.noise()["in.b"].noise.trace is not None


def test_the_noise_of_a_linear_regression_is_that_of_its_examples() -> None:
    rng = np.random.default_rng(9)
    count, sizes = 6000, rng.integers(2, 13, size=5000)
    sizes = sizes[: int(np.searchsorted(np.cumsum(sizes), count))]
    x = torch.tensor(rng.normal(size=(int(sizes.sum()), 3)))
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + torch.tensor(rng.normal(size=(len(x), 1)))
    model = torch.nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight[:] = torch.tensor([[0.8, -1.5, 0.4]])
        model.bias[:] = 0.2
    batches = list(zip(x.split(sizes.tolist()), y.split(sizes.tolist()), strict=True))
    found = cowalk.dataset_gradient(lambda m, x, y: ((m(x) - y) ** 2).mean(), model, batches, progress=False)

    with torch.no_grad():
        errors = 2 * (model(x) - y)
        examples = {"weight": (errors * x).numpy(), "bias": errors.numpy()}
    # e = δ·x + 0.2 + ε is normal, and so is x: E and Cov of 2 e x and 2 e are polynomials of δ.
    delta, bias = np.array([-0.2, 0.5, -0.1]), 0.2
    variance = delta @ delta + 1.0
    exact = {
        "weight": (4 * (2 * delta @ delta + 3 * (variance + bias**2)) - 4 * delta @ delta, 4 * delta @ delta),
        "bias": (4 * variance, 4 * bias**2),
    }
    for name, each in examples.items():
        noise, mean = found.noise[name].noise, each.mean(0)
        np.testing.assert_allclose(np.ravel(found[name]), mean, rtol=1e-9)
        deviations = ((each - mean) ** 2).sum(1)
        known, square = exact[name]
        # batches are 7 examples on average: the estimate of tr Σ scatters as that of so many batches
        of_trace = math.sqrt(deviations.var() / len(each) + 2 * known**2 / (len(batches) - 1))
        assert abs(noise.trace - deviations.sum() / (len(each) - 1)) < 4 * of_trace
        assert abs(noise.trace - known) < 4 * of_trace
        of_square = math.sqrt(4 * square * known / len(each) + 2 * (known / len(each)) ** 2)
        assert abs(noise.square - square) < 4 * of_square
        assert of_trace < 0.1 * known
    assert found.noise.total.noise.trace == pytest.approx(sum(found.noise[n].noise.trace for n in examples))

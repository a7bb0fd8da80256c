"""The gradient over a data set: that of all examples at once, whatever the batches are, and what happens on the way."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import cowalk
from cowalk import Accumulator, AccumulatorError, dataset_gradient
from cowalk.gradients.jax_dataset import CompiledStep

CUTS = [32, 64]
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(69, 4)).astype(np.float32), RNG.normal(size=(69, 1)).astype(np.float32)
BATCHES = list(zip(np.split(X, CUTS), np.split(Y, CUTS), strict=True))
"""Of 32, 32 and 5 examples."""


class Case(NamedTuple):
    model: Any
    call: Callable[[Any, Any], Any]
    array: Callable[[Any], Any]
    pairs: Any = (("mean", "sum"), ("sum", "mean"))
    """Reductions of losses and of results to try; of JAX few, for each is compiled anew."""

    def mean_loss(self, model: Any, x: Any, y: Any) -> Any:
        return ((self.call(model, x) - y) ** 2).mean()

    def sum_loss(self, model: Any, x: Any, y: Any) -> Any:
        return ((self.call(model, x) - y) ** 2).sum()

    def batches(self) -> Iterator[Any]:
        return (tuple(map(self.array, batch)) for batch in BATCHES)

    def at_once(self, begin: int = 0, end: int = 69) -> Any:
        """The loss of all examples and its gradient."""
        run = lambda x, y: cowalk.value_and_gradient(self.mean_loss, self.model, x, y)  # noqa: E731
        run = run if self.array is torch.tensor else jax.jit(run)  # op by op takes longer to compile
        return run(self.array(X[begin:end]), self.array(Y[begin:end]))


class Torch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = torch.nn.Linear(4, 3), torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    unused: jax.Array
    activation: Any

    def __call__(self, x: Any) -> Any:
        return jax.vmap(lambda row: self.second(self.activation(self.first(row))))(x)


class Flax(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
        self.unused = nnx.Param(jnp.ones(2))

    def __call__(self, x: Any) -> Any:
        return self.second(jnp.tanh(self.first(x)))


def weights() -> Any:
    rng = np.random.default_rng(1)
    first = {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
    return {"first": first, "second": rng.normal(size=(3, 1)).astype(np.float32), "unused": np.ones(2, np.float32)}


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    keys = jax.random.split(jax.random.PRNGKey(0))
    call = lambda model, x: model(x)  # noqa: E731
    if name == "torch":
        return Case(Torch(), call, torch.tensor, itertools.product(("mean", "sum"), repeat=2))
    if name == "Equinox":
        layers = eqx.nn.Linear(4, 3, key=keys[0]), eqx.nn.Linear(3, 1, key=keys[1])
        return Case(Equinox(*layers, jnp.ones(2), jnp.tanh), call, jnp.asarray, (("mean", "mean"),))
    if name == "Flax NNX":
        return Case(Flax(), call, jnp.asarray, (("sum", "sum"),))
    in_tree = lambda m, x: jnp.tanh(x @ m["first"]["w"] + m["first"]["b"]) @ m["second"]  # noqa: E731
    return Case(cowalk.fmap(jnp.asarray, weights()), in_tree, jnp.asarray)


@pytest.fixture(params=["torch", "Equinox", "Flax NNX", "JAX"])
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


@pytest.fixture
def torch_case() -> Case:
    return case_of("torch")


@pytest.fixture(params=["torch", "JAX"])
def one_case(request: pytest.FixtureRequest) -> Case:
    """One that is compiled, and one that is not."""
    return case_of(request.param)


@pytest.fixture
def jax_case() -> Case:
    return case_of("JAX")


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal: where tests run in the background, SIGINT may be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def check_equal(found: Any, expected: Any, factor: float = 1.0, rtol: float = 2e-5) -> None:
    """That two trees have the same numbers, the one times a factor, and None in the same places."""
    ours, theirs = cowalk.flatten(found), cowalk.flatten(expected)
    assert set(ours) == set(theirs)  # jax.jit sorts them
    assert theirs
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], factor * np.asarray(value), rtol=rtol, atol=1e-6 * factor, err_msg=name)


def run(loss: Any, model: Any, batches: Any, **options: Any) -> Any:
    return dataset_gradient(loss, model, batches, progress=False, **options)


# --- as all at once ---


def test_batches_of_32_32_and_5_give_the_gradient_of_all_69(case: Case) -> None:
    value, expected = case.at_once()
    for losses, reduce in case.pairs:
        loss = case.mean_loss if losses == "mean" else case.sum_loss
        factor = 69.0 if reduce == "sum" else 1.0
        found = run(loss, case.model, case.batches(), loss_reduction=losses, reduce=reduce)
        check_equal(found.gradient, expected, factor)
        assert found.loss == pytest.approx(float(value) * factor, rel=1e-5)
        assert (found.weight, found.batches, found.is_complete, found.reduce) == (69.0, 3, True, reduce)
        assert sorted(batch.weight for batch in found.worst) == [5.0, 32.0, 32.0]
        assert not any("unused" in name or "frozen" in name for name in cowalk.flatten(found.gradient))


def test_numpy_has_its_gradients_by_hand() -> None:
    model = {"w": RNG.normal(size=(4, 1)), "b": np.zeros(1), "unused": [np.ones(2)]}

    def by_hand(m: Any, x: Any, y: Any) -> Any:
        error = 2 * (x @ m["w"] + m["b"] - y) / len(x)
        return {"w": x.T @ error, "b": error.sum(0), "unused": None}

    def with_value(m: Any, x: Any, y: Any) -> Any:
        return np.mean((x @ m["w"] + m["b"] - y) ** 2), by_hand(m, x, y)

    expected = by_hand(model, X.astype(np.float64), Y)
    found = run(None, model, BATCHES, gradient=by_hand)
    np.testing.assert_allclose(found.gradient["w"], expected["w"], rtol=1e-6)
    np.testing.assert_allclose(found["b"], expected["b"], rtol=1e-6)
    assert found["unused"] == [None]
    assert found.loss is None
    again = run(None, model, BATCHES, gradient=with_value)
    np.testing.assert_array_equal(again["w"], found["w"])
    assert again.loss == pytest.approx(with_value(model, X, Y)[0], rel=1e-6)
    assert isinstance(again["w"], np.ndarray)


def test_gradients_by_hand_may_be_a_pair_of_trees() -> None:
    model = ({"w": np.ones(2)}, {"v": np.ones(2)})
    found = run(None, model, [np.ones((3, 2))], gradient=lambda m, x: ({"w": x.mean(0)}, {"v": 2 * x.mean(0)}))
    assert (found[0]["w"].tolist(), found[1]["v"].tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_a_walk_and_a_table_see_the_gradient(torch_case: Case) -> None:
    found = run(torch_case.mean_loss, torch_case.model, torch_case.batches())
    assert cowalk.stats(torch_case.model, found)["first.weight"].gradient.n == 12
    assert list(cowalk.flatten(found)) == list(map(str, cowalk.trainables(torch_case.model)))[:4]
    assert "noise" not in repr(found)


def test_the_model_and_its_grad_fields_stay(torch_case: Case) -> None:
    model = torch_case.model
    model(torch_case.array(X)).sum().backward()
    before = {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    run(torch_case.mean_loss, model, torch_case.batches())
    for name, p in model.named_parameters():
        assert p.equal(before[name][0])
        assert p.grad is before[name][1]
        assert p.grad is None or p.grad.equal(kept[name])


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_gradients_of_keras_models_over_data_sets_on(backend: str) -> None:
    checks = Path(__file__).with_name("keras_dataset_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(checks)]
    environment = os.environ | {"KERAS_BACKEND": backend}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=checks.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


# --- weights ---


def token_batches() -> list[tuple[Any, Any]]:
    """Sequences padded with −100, in batches of several sizes; the last has no target at all."""
    rng = np.random.default_rng(3)
    batches: list[tuple[Any, Any]] = []
    for size, length in ((4, 6), (2, 9), (3, 2), (2, 3)):
        targets = rng.integers(0, 5, (size, length))
        targets[rng.random(targets.shape) < 0.4] = -100
        batches.append((torch.tensor(rng.normal(size=(size, length, 4)).astype(np.float32)), torch.tensor(targets)))
    batches[-1][1][:] = -100
    return batches


def test_tokens_that_are_ignored_do_not_count_and_a_batch_of_none_leaves_no_nan() -> None:
    torch.manual_seed(0)
    model, cross_entropy = torch.nn.Linear(4, 5), torch.nn.functional.cross_entropy

    def loss(model: Any, x: Any, targets: Any) -> Any:
        return cross_entropy(model(x).flatten(0, 1), targets.flatten())

    batches = token_batches()
    assert loss(model, *batches[-1]).isnan()
    x = torch.cat([x.flatten(0, 1) for x, _ in batches])
    targets = torch.cat([y.flatten() for _, y in batches])
    expected = cowalk.gradient(lambda m: cross_entropy(m(x), targets), model)
    found = run(loss, model, batches, weight="tokens")
    check_equal(found.gradient, expected)
    assert (found.weight, found.batches) == (float((targets != -100).sum()), 4)
    named = run(
        lambda m, b: loss(m, b["x"], b["labels"]), model, [{"x": x, "labels": y} for x, y in batches], weight="tokens"
    )
    check_equal(named.gradient, expected)


def test_the_weight_may_be_a_function_or_a_number(torch_case: Case) -> None:
    model, parts = (
        torch_case.model,
        [cowalk.gradient(torch_case.mean_loss, torch_case.model, *b) for b in torch_case.batches()],
    )
    plain = cowalk.fmap(lambda *g: sum(g) / 3, *parts)
    check_equal(run(torch_case.mean_loss, model, torch_case.batches(), weight=7).gradient, plain)
    by_size = run(torch_case.mean_loss, model, torch_case.batches(), weight=lambda batch: len(batch[0]))
    check_equal(by_size.gradient, torch_case.at_once()[1])
    from_tensors = run(
        torch_case.mean_loss, model, torch_case.batches(), weight=lambda batch: batch[0].new_tensor(len(batch[1]))
    )
    assert from_tensors.weight == 69.0


def test_a_batch_without_weight_is_not_even_computed_for_mean_losses(one_case: Case) -> None:
    empty = (one_case.array(X[:0]), one_case.array(Y[:0]))
    found = run(one_case.mean_loss, one_case.model, [empty, *one_case.batches(), empty])
    check_equal(found.gradient, one_case.at_once()[1])
    assert (found.batches, found.weight) == (5, 69.0)
    assert np.isfinite(found.loss)


@pytest.mark.parametrize(
    ("batches", "weight", "message"),
    [
        ([], "examples", "no batch came"),
        (iter(()), "examples", "new iterator"),
        ([torch.ones(3, 4)], 0, "weight 0"),
        ([torch.ones(3, 4)], -1, "0 or more"),
        ([torch.ones(3, 4)], float("nan"), "finite"),
        ([torch.ones(3, 4)], lambda batch: "many", "str"),
        ([{"a": 3}], "examples", "no array"),
        ([{"a": torch.ones(3, 4), "b": torch.ones(2)}], "examples", "several lengths.*a 3, b 2"),
        ([torch.ones(3, 4)], "tokens", "labels"),
    ],
)
def test_what_cannot_be_weighed_says_so(batches: Any, weight: Any, message: str) -> None:
    with pytest.raises(AccumulatorError, match=message):
        run(lambda m, x: m(x).mean(), torch.nn.Linear(4, 1), batches, weight=weight)


def test_arguments_are_checked_before_any_batch() -> None:
    model, batches = torch.nn.Linear(4, 1), iter([torch.ones(3, 4)])
    for options, message in (
        ({"weight": "words"}, "weight="),
        ({"weight": True}, "weight="),
        ({"reduce": "max"}, "reduce="),
    ):
        with pytest.raises(ValueError, match=message):
            run(lambda m, x: m(x).mean(), model, batches, **options)
    with pytest.raises(ValueError, match="needs a loss"):
        run(None, model, batches)
    assert next(batches).shape == (3, 4)


# --- branches ---


def switching(call: Any) -> Any:
    """A loss of a batch that uses one head or the other."""
    return lambda model, batch: (call(model[batch["head"]], batch["x"]) ** 2).mean()


@pytest.mark.parametrize("kind", ["torch", "JAX", "JAX, not compiled"])
def test_a_branch_that_only_some_batches_use_counts_as_zero_in_the_others(kind: str) -> None:
    rng = np.random.default_rng(5)
    numbers = {name: rng.normal(size=(4, 2)).astype(np.float32) for name in ("a", "b", "never")}
    array = torch.tensor if kind == "torch" else jnp.asarray
    model = {name: array(value) for name, value in numbers.items()}
    if kind == "torch":
        model = {name: torch.nn.Parameter(value) for name, value in model.items()}
    heads = ["a", "a", "b"]
    batches = [{"x": array(x), "head": head} for (x, _), head in zip(BATCHES, heads, strict=True)]
    found = run(switching(lambda w, x: x @ w), model, batches, compiled=kind == "JAX")

    def at_once(model: Any) -> Any:
        return sum(((b["x"] @ model[b["head"]]) ** 2).sum() for b in batches) / (69 * 2)

    check_equal(found.gradient, cowalk.gradient(at_once, model))
    assert {str(path): count for path, count in found.counts.items()} == {"a": 2, "b": 1, "never": 0}
    assert found["never"] is None


# --- Ctrl-C ---


def interrupted(case: Case, how: str) -> tuple[Any, Any]:
    """A loss and batches that are stopped in the third batch."""
    calls: list[None] = []

    def loss(model: Any, x: Any, y: Any) -> Any:
        calls.append(None)
        if how.endswith("loss") and len(calls) == 3:
            if how == "signal in the loss":
                os.kill(os.getpid(), signal.SIGINT)
            raise KeyboardInterrupt
        return case.mean_loss(model, x, y)

    def batches() -> Iterator[Any]:
        for i, batch in enumerate(case.batches()):
            if how.endswith("loader") and i == 2:
                if how == "signal in the loader":
                    os.kill(os.getpid(), signal.SIGINT)
                raise KeyboardInterrupt
            yield batch

    return loss, batches()


@pytest.mark.parametrize("how", ["loss", "loader", "signal in the loss", "signal in the loader"])
def test_ctrl_c_gives_what_there_is(torch_case: Case, how: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    loss, batches = interrupted(torch_case, how)
    found = run(loss, torch_case.model, batches)
    assert signal.getsignal(signal.SIGINT) is handler
    assert (found.batches, found.weight, found.is_complete) == (2, 64.0, False)
    check_equal(found.gradient, torch_case.at_once(0, 64)[1])


def test_ctrl_c_while_a_batch_is_added_lets_it_be_added_whole(
    torch_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Accumulator.add

    def interrupted_add(self: Any, *args: Any, **options: Any) -> None:
        if self.batches == 1:
            os.kill(os.getpid(), signal.SIGINT)
        add(self, *args, **options)

    monkeypatch.setattr(Accumulator, "add", interrupted_add)
    handler = signal.getsignal(signal.SIGINT)
    found = run(torch_case.mean_loss, torch_case.model, torch_case.batches())
    assert (found.batches, found.is_complete) == (2, False)
    assert set(found.counts.values()) == {2, 0}
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_in_a_compiled_loss_ends_after_its_batch(jax_case: Case) -> None:
    def loss(model: Any, x: Any, y: Any) -> Any:
        if len(x) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return jax_case.mean_loss(model, x, y)

    batches = [*jax_case.batches()]
    found = run(loss, jax_case.model, [batches[0], batches[2], batches[1]])
    assert (found.batches, found.weight, found.is_complete) == (2, 37.0, False)


def test_ctrl_c_before_the_first_batch_is_raised(torch_case: Case) -> None:
    def batches() -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGINT)
        yield from torch_case.batches()

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(torch_case.mean_loss, torch_case.model, batches())
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_exception_of_the_loss_names_the_batch_and_what_came_before_is_kept(one_case: Case) -> None:
    total, handler = Accumulator(one_case.model), signal.getsignal(signal.SIGINT)

    def loss(model: Any, x: Any, y: Any) -> Any:
        if len(x) == 5:
            raise RuntimeError("out of memory")
        return one_case.mean_loss(model, x, y)

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        run(loss, one_case.model, one_case.batches(), accumulator=total)
    assert any("batch 2" in note for note in caught.value.__notes__)
    assert signal.getsignal(signal.SIGINT) is handler
    assert (total.batches, total.weight) == (2, 64.0)
    found = run(one_case.mean_loss, one_case.model, [[*one_case.batches()][2]], accumulator=total)
    assert (found.batches, found.weight) == (3, 69.0)
    check_equal(found.gradient, one_case.at_once()[1])
    check_equal(total.mean(), found.gradient)  # which stays usable


def test_exceptions_of_the_loader_come_through(torch_case: Case) -> None:
    def batches() -> Iterator[Any]:
        yield next(torch_case.batches())
        raise OSError("no such shard")

    with pytest.raises(OSError, match="no such shard"):
        run(torch_case.mean_loss, torch_case.model, batches())


# --- JAX ---


def test_compiled_or_not_is_the_same(jax_case: Case) -> None:
    one = run(jax_case.mean_loss, jax_case.model, jax_case.batches())
    other = run(jax_case.mean_loss, jax_case.model, jax_case.batches(), compiled=False)
    check_equal(one.gradient, other.gradient)
    assert one.counts == other.counts
    assert one.loss == pytest.approx(other.loss)
    assert [batch.index for batch in one.worst] == [batch.index for batch in other.worst]
    assert [batch.norm for batch in one.worst] == pytest.approx([batch.norm for batch in other.worst])
    for ours, theirs in zip(one.noise, other.noise, strict=True):
        assert (ours.noise is None) == (theirs.noise is None)
        if ours.noise is not None and ours.noise.trace is not None:
            assert (ours.noise.trace, ours.noise.square) == pytest.approx(
                (theirs.noise.trace, theirs.noise.square), rel=1e-3
            )


def test_the_loss_is_compiled_once_for_batches_of_one_shape() -> None:
    traced: list[Any] = []

    def loss(model: Any, batch: Any) -> Any:
        traced.append((batch["x"].shape, batch["power"], batch["name"]))
        assert isinstance(batch["power"], int)  # no tracer
        return (model["w"] * batch["x"]).sum() ** batch["power"] / 100

    model = {"w": jnp.ones(3)}
    batches = [{"x": jnp.full((4, 3), float(i)), "power": 2, "name": "a"} for i in range(6)]
    batches += [batches[0] | {"power": 3}, batches[0] | {"name": "b"}]
    found = run(loss, model, batches)
    expected = [cowalk.gradient(loss, model, batch)["w"] for batch in batches]
    traced.clear()
    np.testing.assert_allclose(found["w"], sum(expected) / 8, rtol=1e-5)
    run(loss, model, batches)
    kinds = set(map(str, traced))
    assert len(kinds) == 3
    assert len(traced) <= 3 * (len(kinds) + 1)  # not once a batch; the first has no sums yet


def test_batches_of_a_torch_data_loader_are_taken_by_jax(jax_case: Case) -> None:
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    found = run(jax_case.mean_loss, jax_case.model, torch.utils.data.DataLoader(data, batch_size=32))
    check_equal(found.gradient, jax_case.at_once()[1])
    assert found.batches == 3


class Stateful(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.norm(self.linear(x)))


@pytest.mark.parametrize("compiled", [True, False])
def test_batch_statistics_and_dropout_leak_no_tracer(compiled: bool) -> None:
    model = Stateful()
    before = {str(path): np.asarray(leaf) for path, leaf in cowalk.trainables(model).items()}
    found = run(lambda m, x: (m(x) ** 2).mean(), model, [jnp.asarray(x) for x, _ in BATCHES[:2]], compiled=compiled)
    assert found["linear"]["kernel"].shape == (4, 3)
    assert not any(isinstance(leaf, jax.core.Tracer) for _, (leaf,) in cowalk.walk(model))
    assert model(jnp.asarray(X[:32])).shape == (32, 3)
    for path, leaf in cowalk.trainables(model).items():
        np.testing.assert_array_equal(before[str(path)], leaf)


def totals_after_each_batch(case: Case, made: list[Accumulator], **options: Any) -> list[list[Any]]:
    seen: list[list[Any]] = []

    def batches() -> Iterator[Any]:
        for batch in [*case.batches()] * 2:
            yield batch
            seen.append([each.total for each in made[0].sums().values()])

    run(case.mean_loss, case.model, batches(), **options)
    assert len(seen) == 6
    assert all(len(each) == 3 for each in seen)
    return seen


def test_the_sums_are_given_away_to_the_new_ones(jax_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Accumulator] = []

    class Seen(Accumulator):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("cowalk.gradients.dataset.Accumulator", Seen)
    seen = totals_after_each_batch(jax_case, made)
    assert all(array.is_deleted() for each in seen for array in each)  # the last ones to the mean
    assert not any(leaf.is_deleted() for _, (leaf,) in cowalk.walk(jax_case.model))


def test_the_sums_of_a_callers_accumulator_are_not_given_away(jax_case: Case) -> None:
    total = Accumulator(jax_case.model)
    seen = totals_after_each_batch(jax_case, [total], accumulator=total)
    assert not any(array.is_deleted() for each in seen for array in each)


def test_an_error_while_a_compiled_loss_runs_leaves_a_callers_sums() -> None:
    def fails(value: Any) -> Any:
        if float(value) > 100:
            raise ValueError("too much")
        return np.float32(0)

    def loss(m: Any, x: Any) -> Any:
        checked = jax.pure_callback(fails, jax.ShapeDtypeStruct((), jnp.float32), x[0])
        return (m["w"] * x).sum() + jax.lax.stop_gradient(checked)

    model = {"w": jnp.ones(3)}
    total = Accumulator(model)
    with pytest.raises(Exception, match="too much"):
        run(loss, model, [jnp.ones(3), jnp.full(3, 200.0)], weight=1, accumulator=total)
    assert total.sum()["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_callers_accumulator_need_not_know_the_model() -> None:
    model, total = {"w": jnp.ones(3), "unused": jnp.ones(1)}, Accumulator()
    found = run(lambda m, x: (m["w"] * x).sum(), model, [jnp.ones(3)] * 3, weight=1, accumulator=total)
    assert found.gradient["w"].tolist() == [1.0, 1.0, 1.0]
    assert total.sum()["w"].tolist() == [3.0, 3.0, 3.0]
    assert total.sum()["unused"] is None


def test_what_the_loss_does_to_a_module_of_nnx_is_done_to_it() -> None:
    from flax import nnx

    found: list[list[float]] = []
    for compiled in (True, False):
        norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        run(lambda m, x: (m(x) ** 2).mean(), norm, [jnp.arange(6.0).reshape(3, 2)] * 2, compiled=compiled)
        found.append(norm.mean[...].tolist())
    assert found[0] == pytest.approx(found[1])
    assert found[0] != [0.0, 0.0]


def test_ctrl_c_pressed_again_while_a_batch_is_added_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from cowalk.gradients import sums

    real, calls = sums.add, []

    def add(*arguments: Any) -> Any:
        added = real(*arguments)
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return added

    monkeypatch.setattr(sums, "add", add)
    model = {"w": torch.ones(3, requires_grad=True)}
    found = run(lambda m, x: (m["w"] * x).sum(), model, [torch.ones(3)] * 6, weight=1, reduce="sum")
    assert (found.batches, found.is_complete, found.gradient["w"].tolist()) == (3, False, [3.0, 3.0, 3.0])


def test_a_compiled_step_adds_in_the_memory_of_the_sums() -> None:
    model = [jnp.ones((200, 200)) for _ in range(8)]
    size = sum(leaf.nbytes for leaf in model)

    def loss(model: Any, x: Any) -> Any:
        for weight in model:
            x = jnp.tanh(x @ weight)
        return x.mean()

    step = CompiledStep(loss, model, "mean")
    sums = {name: (jnp.zeros_like(leaf), None) for name, leaf in step._arrays.items()}
    leaves, structure = jax.tree.flatten((jnp.ones((4, 200)),))
    compiled = step._run.lower(sums, step._arrays, (leaves, jnp.asarray(4.0)), structure, (None,)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2  # not all gradients are there at once


# --- the bar ---


def test_a_bar_is_drawn_on_the_terminal_only_if_asked_for(
    torch_case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    dataset_gradient(torch_case.mean_loss, torch_case.model, [*torch_case.batches()], progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "gradient of the data set" in shown.err
    assert "3/3" in shown.err
    dataset_gradient(torch_case.mean_loss, torch_case.model, torch_case.batches(), progress=True)  # of unknown length
    assert "gradient of the data set" in capsys.readouterr().err
    for progress in (False, None):  # what pytest captures is no terminal
        dataset_gradient(torch_case.mean_loss, torch_case.model, torch_case.batches(), progress=progress)
        assert capsys.readouterr() == ("", "")


def test_where_ctrl_c_is_ignored_it_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def loss(m: Any, x: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return (m["w"] * x).sum()

    found = run(loss, {"w": torch.ones(3, requires_grad=True)}, [torch.ones(3)] * 2, weight=1)
    assert (found.batches, found.is_complete) == (2, True)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

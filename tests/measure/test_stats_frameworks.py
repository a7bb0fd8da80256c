"""`stats` on models of every framework, beside the gradients that cowalk or the framework makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cowalk
from cowalk import Table, ratio, stats


def states(table: Table) -> dict[str, str]:
    return {str(row.path): row.state for row in table}


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    def test_a_module_beside_its_own_gradients(self, torch: Any) -> None:
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)
        )
        model(torch.randn(5, 3)).square().sum().backward()
        table = stats(model, cowalk.gradients_of(model))
        assert list(states(table)) == [name for name, _ in model.named_parameters()]
        for name, p in model.named_parameters():
            quotients = (p.double() / p.grad.double())[p.grad != 0]
            expected = pytest.approx(quotients.mean().item()) if len(quotients) else None
            assert table[name].value("ratio.mean") == expected
        assert table.structure["2"]["running_mean"] is None
        assert table.structure["2"]["weight"] == table["2.weight"]

    def test_gradient_in_one_call(self, torch: Any) -> None:
        model = torch.nn.Linear(2, 1)
        x = torch.ones(4, 2)
        table = ratio(model, cowalk.gradient(lambda m, x: m(x).sum(), model, x))
        assert table.structure["bias"].ratio.mean == pytest.approx(model.bias.item() / 4)
        assert model.weight.grad is None

    def test_gradients_by_name_in_a_flat_dict(self, torch: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        flat = {name: p.grad for name, p in model.named_parameters()}
        table = stats(model, cowalk.unflatten(flat))
        assert states(table) == dict.fromkeys(flat, "ok")

    def test_an_unused_head_is_told_from_a_frozen_layer(self, torch: Any) -> None:
        model = torch.nn.ModuleDict(
            {"used": torch.nn.Linear(2, 1), "unused": torch.nn.Linear(2, 1), "frozen": torch.nn.Linear(2, 2)}
        )
        model["frozen"].requires_grad_(False)
        model["used"](model["frozen"](torch.ones(1, 2))).sum().backward()
        assert states(stats(model, cowalk.gradients_of(model))) == {
            "used.weight": "ok",
            "used.bias": "ok",
            "unused.weight": "unused",
            "unused.bias": "unused",
            "frozen.weight": "frozen",
            "frozen.bias": "frozen",
        }

    def test_tied_weights_are_one_row(self, torch: Any) -> None:
        class LM(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.emb = torch.nn.Embedding(5, 2)
                self.head = torch.nn.Linear(2, 5, bias=False)
                self.head.weight = self.emb.weight

            def forward(self, x: Any) -> Any:
                return self.head(self.emb(x))

        model = LM()
        model(torch.tensor([1, 2])).sum().backward()
        by_name = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
        for grads in (
            cowalk.gradients_of(model),
            cowalk.unflatten(by_name),
            cowalk.gradient(lambda m: m(torch.tensor([1, 2])).sum(), model),
        ):
            (row,) = stats(model, grads)
            assert (str(row.path), list(map(str, row.aliases)), row.n) == ("emb.weight", ["head.weight"], 10)
            assert row.value("gradient.norm") == pytest.approx(model.emb.weight.grad.norm().item(), rel=1e-6)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64"])
    def test_dtypes(self, torch: Any, dtype: str) -> None:
        model = torch.nn.Linear(2, 1, dtype=getattr(torch, dtype))
        model(torch.ones(3, 2, dtype=model.weight.dtype)).sum().abs().backward()
        table = stats(model, cowalk.gradients_of(model))
        assert {row.dtype for row in table} == {dtype}
        wide = model.weight.detach().to(torch.complex128).abs()
        assert table["weight"].value("parameter.norm") == pytest.approx(wide.norm().item())

    def test_a_layer_is_found_by_its_module(self, torch: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        assert list(states(stats(model)[model[1]])) == ["1.weight", "1.bias"]

    @pytest.mark.gpu
    def test_on_a_device(self, torch: Any) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        model = torch.nn.Linear(600, 600)
        model(torch.ones(1, 600)).square().sum().backward()
        here = stats(model, cowalk.gradients_of(model))
        there = stats(model.cuda(), cowalk.gradients_of(model))
        np.testing.assert_allclose(there.matrix, here.matrix, rtol=1e-5, atol=1e-6)
        assert list(there.states) == list(here.states)


class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self) -> Any:
        return pytest.importorskip("jax")

    def test_a_dict_beside_jax_grad(self, jax: Any) -> None:
        params = {"w": jax.numpy.array([1.0, 2.0]), "unused": jax.numpy.array([3.0])}
        table = stats(params, jax.grad(lambda p: (p["w"] ** 2).sum())(params))
        assert table.structure["w"].ratio.mean == 0.5
        assert (table["unused"].state, table["unused"].value("ratio.x_by_zero")) == ("zero", 1)

    def test_cowalk_tells_missing_from_zero(self, jax: Any) -> None:
        params = {"w": jax.numpy.array([1.0, 2.0]), "unused": jax.numpy.array([3.0])}
        table = stats(params, cowalk.gradient(lambda p: (p["w"] ** 2).sum(), params))
        assert states(table) == {"w": "ok", "unused": "unused"}

    def test_inside_jit_it_says_where_to_go(self, jax: Any) -> None:
        params = {"w": jax.numpy.ones(2)}
        with pytest.raises(cowalk.MeasureError, match=r"call cowalk outside.*cowalk\.jax\.stats"):
            jax.jit(lambda p, g: stats(p, g).total.n)(params, params)

    def test_a_random_key_is_no_array_of_numbers(self, jax: Any) -> None:
        model = {"w": jax.numpy.ones(2), "key": jax.random.key(0)}
        grads = {"w": jax.numpy.ones(2), "key": None}
        assert states(stats(model, grads)) == {"w": "ok"}
        with pytest.raises(cowalk.MeasureError, match="key: the parameter is no array of numbers"):
            stats(model, grads, where=cowalk.isleaf)

    def test_a_donated_array_is_named(self, jax: Any) -> None:
        old = jax.numpy.ones(2)
        old.delete()
        kept = jax.numpy.ones(2)
        for trees, what in ((({"w": old}, {"w": kept}), "parameter"), (({"w": kept}, {"w": old}), "gradient")):
            with pytest.raises(cowalk.MeasureError, match=f"w: the {what} was deleted"):
                stats(*trees)

    def test_equinox(self, jax: Any) -> None:
        eqx = pytest.importorskip("equinox")
        model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
        grads = eqx.filter_grad(lambda m, x: jax.vmap(m)(x).sum())(model, jax.numpy.ones((3, 2)))
        table = stats(model, grads)
        assert list(states(table)) == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
        mean = table.structure["layers"][1]["bias"].ratio.mean
        assert mean == pytest.approx(model.layers[1].bias.item() / 3, rel=1e-5)
        assert table.structure["activation"] is None

    def test_nnx(self, jax: Any) -> None:
        nnx = pytest.importorskip("flax.nnx")
        model = nnx.Sequential(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.BatchNorm(1, rngs=nnx.Rngs(0)))
        grads = nnx.grad(lambda m: m.layers[0](jax.numpy.ones((3, 2))).sum())(model)
        table = stats(model, grads)
        first = "layers.0"
        assert set(states(table)) == {f"{first}.kernel", f"{first}.bias", "layers.1.scale", "layers.1.bias"}
        kernel = model.layers[0].kernel[...]
        assert table[f"{first}.kernel"].value("ratio.mean") == pytest.approx(float((kernel / 3).mean()), rel=1e-5)
        assert table["layers.1.scale"].state == "zero"


class TestMixtures:
    """Arrays of one framework beside those of another."""

    @pytest.mark.parametrize("other", ["numpy", "jax", "torch"])
    @pytest.mark.parametrize("lead", ["numpy", "jax", "torch"])
    def test_parameters_gradients_and_updates_of_any_framework(self, lead: str, other: str) -> None:
        torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
        makes: dict[str, Any] = {"numpy": np.float32, "jax": jnp.float32, "torch": torch.tensor}
        make, foreign = makes[lead], makes[other]
        (row,) = stats({"w": make([1.0, 2.0])}, {"w": foreign([2.0, 1.0])}, {"w": foreign([0.5, -1.0])})
        assert (row.value("ratio.mean"), row.value("update_ratio.min")) == (1.25, -0.5)
        assert row.value("gradient.norm") == pytest.approx(5**0.5)

    def test_a_tree_of_modules_of_several_frameworks(self) -> None:
        torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
        tree = {"torch": torch.nn.Linear(2, 1), "jax": jnp.ones(3), "numpy": [np.ones(2)]}
        table = stats(tree)
        assert list(states(table)) == ["torch.weight", "torch.bias", "jax", "numpy.0"]
        assert table.total.n == 8


KERAS_CHECKS = Path(__file__).with_name("keras_stats_checks.py")


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_models_are_measured_on(backend: str) -> None:
    pytest.importorskip("keras")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(KERAS_CHECKS)]
    done = subprocess.run(
        command,
        env=os.environ | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
        cwd=KERAS_CHECKS.parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

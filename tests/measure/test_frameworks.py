"""`ratio` on models of every framework, beside the gradients that cowalk or the framework makes."""

import os

import numpy as np
import pytest

import cowalk
from cowalk import ratio


def by_path(table):
    return {str(row.path): row for row in table.rows}


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch")

    def test_a_module_beside_its_own_gradients(self, torch):
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)
        )
        model(torch.randn(5, 3)).square().sum().backward()
        table = ratio(model, cowalk.gradients_of(model))
        assert list(by_path(table)) == [name for name, _ in model.named_parameters()]
        for name, p in model.named_parameters():
            quotients = (p.double() / p.grad.double())[p.grad != 0]
            expected = pytest.approx(quotients.mean().item()) if len(quotients) else None
            assert by_path(table)[name].ratio.mean == expected
        assert table.structure["2"]["running_mean"] is None
        assert table.structure["2"]["weight"] is by_path(table)["2.weight"].ratio

    @pytest.mark.gpu
    def test_on_a_device(self, torch):
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        model = torch.nn.Linear(600, 600)
        model(torch.ones(1, 600)).square().sum().backward()
        here = ratio(model, cowalk.gradients_of(model)).to_dict()
        there = ratio(model.cuda(), cowalk.gradients_of(model)).to_dict()
        for one, other in zip(here["rows"], there["rows"], strict=True):
            assert other["ratio"] == pytest.approx(one["ratio"])

    def test_gradient_in_one_call(self, torch):
        model = torch.nn.Linear(2, 1)
        x = torch.ones(4, 2)
        table = ratio(model, cowalk.gradient(lambda m, x: m(x).sum(), model, x))
        assert table.structure["bias"].mean == pytest.approx(model.bias.item() / 4)
        assert model.weight.grad is None

    def test_gradients_by_name_in_a_flat_dict(self, torch):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        flat = {name: p.grad for name, p in model.named_parameters()}
        assert len(ratio(model, cowalk.unflatten(flat)).rows) == 2

    def test_an_unused_head_has_no_gradient_and_a_frozen_layer_no_row(self, torch):
        model = torch.nn.ModuleDict(
            {"used": torch.nn.Linear(2, 1), "unused": torch.nn.Linear(2, 1), "frozen": torch.nn.Linear(2, 2)}
        )
        model["frozen"].requires_grad_(False)
        model["used"](model["frozen"](torch.ones(1, 2))).sum().backward()
        rows = by_path(ratio(model, cowalk.gradients_of(model)))
        assert {path: row.state for path, row in rows.items()} == {
            "used.weight": "measured",
            "used.bias": "measured",
            "unused.weight": "no gradient",
            "unused.bias": "no gradient",
        }

    def test_tied_weights_are_one_row(self, torch):
        class LM(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.emb = torch.nn.Embedding(5, 2)
                self.head = torch.nn.Linear(2, 5, bias=False)
                self.head.weight = self.emb.weight

            def forward(self, x):
                return self.head(self.emb(x))

        model = LM()
        model(torch.tensor([1, 2])).sum().backward()
        by_name = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
        for grads in (
            cowalk.gradients_of(model),
            cowalk.unflatten(by_name),
            cowalk.gradient(lambda m: m(torch.tensor([1, 2])).sum(), model),
        ):
            (row,) = ratio(model, grads).rows
            assert (str(row.path), list(map(str, row.aliases)), row.ratio.n) == ("emb.weight", ["head.weight"], 10)

    def test_lazy_and_meta_parameters_are_named_without_values(self, torch):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2, device="meta"), torch.nn.LazyLinear(4))
        rows = by_path(ratio(model, None))
        assert {path: (row.state, row.shape) for path, row in rows.items()} == {
            "0.weight": ("meta", (2, 3)),
            "0.bias": ("meta", (2,)),
            "1.weight": ("uninitialised", None),
            "1.bias": ("uninitialised", None),
        }

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64"])
    def test_dtypes(self, torch, dtype):
        model = torch.nn.Linear(2, 1, dtype=getattr(torch, dtype))
        model(torch.ones(3, 2, dtype=model.weight.dtype)).sum().abs().backward()
        assert {row.dtype for row in ratio(model, cowalk.gradients_of(model)).rows} == {dtype}


class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self):
        return pytest.importorskip("jax")

    def test_a_dict_beside_jax_grad(self, jax):
        params = {"w": jax.numpy.array([1.0, 2.0]), "unused": jax.numpy.array([3.0])}
        table = ratio(params, jax.grad(lambda p: (p["w"] ** 2).sum())(params))
        assert table.structure["w"].mean == 0.5
        assert table.structure["unused"].x_by_zero == 1

    def test_cowalk_tells_missing_from_zero(self, jax):
        params = {"w": jax.numpy.array([1.0, 2.0]), "unused": jax.numpy.array([3.0])}
        table = ratio(params, cowalk.gradient(lambda p: (p["w"] ** 2).sum(), params))
        assert [row.state for row in table.rows] == ["measured", "no gradient"]

    def test_inside_jit_it_says_to_go_outside(self, jax):
        params = {"w": jax.numpy.ones(2)}
        with pytest.raises(cowalk.MeasureError, match="outside of jit"):
            jax.jit(lambda p: ratio(p, p).total.n)(params)

    def test_a_random_key_is_no_array_of_numbers(self, jax):
        model = {"w": jax.numpy.ones(2), "key": jax.random.key(0)}
        assert [str(row.path) for row in ratio(model, {"w": jax.numpy.ones(2), "key": None}).rows] == ["w"]
        with pytest.raises(cowalk.MeasureError, match="key: the parameter is no array of numbers"):
            ratio(model, {"w": jax.numpy.ones(2), "key": None}, where=cowalk.isleaf)

    def test_a_donated_array_is_named(self, jax):
        w = jax.numpy.ones(2)
        w.delete()
        with pytest.raises(RuntimeError, match="deleted") as caught:
            ratio({"w": w}, {"w": jax.numpy.ones(2)})
        assert "the leaf at w" in "".join(caught.value.__notes__)

    def test_equinox(self, jax):
        eqx = pytest.importorskip("equinox")
        model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
        grads = eqx.filter_grad(lambda m, x: jax.vmap(m)(x).sum())(model, jax.numpy.ones((3, 2)))
        table = ratio(model, grads)
        assert [str(row.path) for row in table.rows] == [
            "layers.0.weight",
            "layers.0.bias",
            "layers.1.weight",
            "layers.1.bias",
        ]
        assert table.structure["layers"][1]["bias"].mean == pytest.approx(model.layers[1].bias.item() / 3, rel=1e-5)

    def test_nnx(self, jax):
        nnx = pytest.importorskip("flax.nnx")
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        grads = nnx.grad(lambda m: m(jax.numpy.ones((3, 2))).sum())(model)
        table = ratio(model, grads)
        assert {str(row.path) for row in table.rows} == {"kernel", "bias"}
        assert table.structure["kernel"].mean == pytest.approx(float((model.kernel[...] / 3).mean()), rel=1e-5)


def test_keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    model = keras.Sequential(
        [keras.layers.Dense(3, name="one"), keras.layers.BatchNormalization(), keras.layers.Dense(1, name="two")]
    )
    model.build((None, 2))
    grads = cowalk.gradient(lambda m, x: keras.ops.sum(m(x)), model, np.ones((4, 2), "float32"))
    table = ratio(model, grads)
    assert len(table.rows) == len(model.trainable_variables)
    assert {row.shape for row in table.rows} == {tuple(v.shape) for v in model.trainable_variables}

"""The example cases about walking, missing branches, ties and leaves, by their numbers. Inputs are made here."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

import cowalk


def test_w01_a_missing_branch_is_none_at_every_leaf_below():
    Model = namedtuple("Model", "a b")
    model = Model(a=np.array([1.0, 2.0]), b=(3.0, [np.array([4.0])]))
    grads = {"a": np.array([2.0, 1.0]), "b": None}

    def mean_ratio(p, g):
        return None if g is cowalk.MISSING else float(np.mean(np.asarray(p) / np.asarray(g)))

    out = cowalk.fmap(mean_ratio, model, grads, missing="pass")
    assert [out.a, [out.b[0], [out.b[1][0]]]] == [1.25, [None, [None]]]
    assert type(out) is Model
    plain = cowalk.fmapstructure(lambda p, g: float(np.mean(p / g)), model, grads)
    assert plain == {"a": 1.25, "b": (None, [None])}


def test_w08_a_frozen_dict_and_a_dict_are_walked_by_key_and_the_lead_s_type_stays():
    jnp = pytest.importorskip("jax.numpy")
    core = pytest.importorskip("flax.core")
    model = core.freeze({"Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "bias": jnp.full((2,), 4.0)})
    grads = {"bias": jnp.full((2,), 8.0), "Dense_0": {"bias": jnp.ones(3), "kernel": jnp.full((2, 3), 0.5)}}
    out = cowalk.fmap(lambda p, g: p - 0.5 * g, model, grads)
    assert isinstance(out, core.FrozenDict)
    assert float(out["Dense_0"]["kernel"].sum()) == 4.5
    assert out["Dense_0"]["bias"].tolist() == [-0.5, -0.5, -0.5]
    assert out["bias"].tolist() == [0.0, 0.0]
    back = cowalk.fmap(lambda g, p: p - 0.5 * g, grads, model)
    assert type(back) is dict
    assert float(back["Dense_0"]["kernel"].sum()) == 4.5


def test_m01_parameters_without_a_gradient_are_listed_as_missing():
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear
    net = torch.nn.ModuleDict({"body": linear(2, 2), "used": linear(2, 1), "unused": linear(2, 1)})
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.5)
    net["used"](net["body"](torch.tensor([[1.0, 2.0]]))).sum().backward()
    flat = {name: p.grad for name, p in net.named_parameters()}
    for grads in (cowalk.unflatten(flat), cowalk.gradients_of(net)):
        pairs, missing = {}, set()
        for path, (p, g) in cowalk.walk(net, grads, missing="pass"):
            if g is cowalk.MISSING:
                missing.add(str(path))
            else:
                pairs[str(path)] = [float(p.detach().sum()), float(g.sum())]
        assert pairs == {
            "body.weight": [2.0, 3.0],
            "body.bias": [1.0, 1.0],
            "used.weight": [1.0, 4.0],
            "used.bias": [0.5, 1.0],
        }
        assert missing == {"unused.weight", "unused.bias"}
        assert cowalk.diff(net, grads) == []


def test_m03_functions_of_an_equinox_model_stay_and_arrays_move():
    jax = pytest.importorskip("jax")
    eqx = pytest.importorskip("equinox")
    jnp = jax.numpy
    mlp = eqx.nn.MLP(in_size=2, out_size=1, width_size=3, depth=1, key=jax.random.PRNGKey(0))
    mlp = cowalk.fmap(lambda x: jnp.full_like(x, 0.5), mlp, where=cowalk.isnumeric)
    x = jnp.array([1.0, 2.0])
    grads = eqx.filter_grad(lambda m: m(x)[0])(mlp)
    out = cowalk.fmap(lambda p, g: p - 0.1 * g, mlp, grads)
    hidden = np.full(3, 2.0)
    w0, b0 = np.full((3, 2), 0.5) - 0.05 * np.outer(np.ones(3), [1.0, 2.0]), np.full(3, 0.45)
    w1, b1 = np.full((1, 3), 0.5) - 0.1 * hidden, np.full(1, 0.4)
    assert callable(out.activation)
    np.testing.assert_allclose([layer.weight.sum() for layer in out.layers], [w0.sum(), w1.sum()], rtol=1e-5)
    np.testing.assert_allclose([layer.bias.sum() for layer in out.layers], [b0.sum(), b1.sum()], rtol=1e-5)
    np.testing.assert_allclose(out(x), w1 @ (w0 @ [1.0, 2.0] + b0) + b1, rtol=1e-5)


def test_b02_uninitialised_parameters_are_named_not_counted_and_stay_so():
    torch = pytest.importorskip("torch")
    lazy = torch.nn.parameter.is_lazy
    tree = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LazyLinear(4))
    leaves = {str(path): leaf for path, (leaf,) in cowalk.walk(tree)}
    assert sum(leaf.numel() for leaf in leaves.values() if not lazy(leaf)) == 8
    assert {name for name, leaf in leaves.items() if lazy(leaf)} == {"1.weight", "1.bias"}
    assert lazy(tree[1].weight)


def test_t04_a_tied_embedding_is_counted_once_and_both_its_names_are_told():
    torch = pytest.importorskip("torch")

    class LM(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = torch.nn.Embedding(50, 8)
            self.mid = torch.nn.Linear(8, 8)
            self.lm_head = torch.nn.Linear(8, 50, bias=False)
            self.lm_head.weight = self.emb.weight

    model = LM()
    assert sum(leaf.numel() for _, (leaf,) in cowalk.walk(model)) == 50 * 8 + 8 * 8 + 8
    (alias,) = cowalk.aliases(model)
    assert (alias.kind, set(map(str, alias.paths))) == ("tie", {"emb.weight", "lm_head.weight"})


def test_n01_the_norm_of_half_precision_gradients_does_not_overflow():
    torch = pytest.importorskip("torch")
    half = torch.float16
    grads = {
        "one": torch.full((1,), 300.0, dtype=half),
        "w": torch.full((40, 50), 300.0, dtype=half),
        "b": torch.full((2,), 60000.0, dtype=half),
    }
    assert not torch.stack([g.square().sum() for g in grads.values()]).isfinite().all()
    table = cowalk.stats(grads, grads)
    exact = np.sqrt(2001 * 300.0**2 + 2 * 60000.0**2)
    assert table.total.value("gradient.norm") == pytest.approx(exact, rel=1e-6)
    assert table["one"].value("gradient.norm") == pytest.approx(300.0)
    assert table.total.value("gradient.nonfinite") == 0


def test_n06_nan_and_infinities_are_counted_and_the_rest_is_measured():
    torch = pytest.importorskip("torch")
    nan, inf = float("nan"), float("inf")
    tree = {"w": torch.tensor([[1, nan, inf], [0, -2, -inf], [0, -0.0, 4]]), "ok": torch.tensor([1.0, 3.0])}
    table = cowalk.stats(tree, tree)
    w, ok = table["w"].gradient, table["ok"].gradient
    assert (w.n, w.nan, w.posinf, w.neginf, w.nonfinite, w.zeros) == (9, 1, 1, 1, 3, 3)
    assert (w.min, w.max, w.mean) == (-2.0, 4.0, 0.5)
    assert (ok.n, ok.nonfinite, ok.zeros, ok.min, ok.max, ok.mean) == (2, 0, 0, 1.0, 3.0, 2.0)


def test_a01_the_last_sample_alone_in_its_batch_counts_once():
    torch = pytest.importorskip("torch")
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0], [8.0], [100.0]], dtype=torch.float64)
    w = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    exact = float((2 * x**2).mean())
    total, trees = cowalk.Accumulator(), []
    for part in x.split(4):
        trees.append({"w": torch.autograd.grad(((part * w) ** 2).mean(), w)[0]})
        total.add(trees[-1], weight=len(part))
    assert float(total.mean()["w"]) == pytest.approx(exact, rel=1e-12)
    found = cowalk.dataset_gradient(lambda m, x: ((x * m["w"]) ** 2).mean(), {"w": w}, x.split(4), progress=False)
    assert float(found["w"]) == pytest.approx(exact, rel=1e-12)
    assert float(sum(tree["w"] for tree in trees)) / 3 > 2 * exact  # the plain average of the batches

"""Modules that stand around another one are seen through, in any nesting; a user's own child called `module` is a child."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import cowalk

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
X = torch.ones(1, 2)


@pytest.fixture
def group(tmp_path):
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def paths(tree) -> list[str]:
    return [str(path) for path, _ in cowalk.walk(tree)]


def zeros(module):
    return cowalk.fmap(torch.zeros_like, module)


def test_a_compiled_module_is_seen_through():
    module = nn.Linear(2, 2)
    compiled = torch.compile(module, backend="eager")
    assert paths(compiled) == ["weight", "bias"]
    new = zeros(compiled)
    assert not new(X).any()
    assert module(X).any()
    cowalk.fmap_(torch.zeros_like, compiled)
    assert not module.weight.any()


def test_a_module_compiled_in_place_comes_back_uncompiled():
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    assert module(X).any()
    new = zeros(module)
    assert new._compiled_call_impl is None
    assert module._compiled_call_impl is not None
    assert not new(X).any()
    assert module(X).any()


def test_data_parallel_is_seen_through():
    module = nn.Linear(2, 2)
    wrapped = nn.DataParallel(module)
    assert paths(wrapped) == ["weight", "bias"]
    assert cowalk.get(wrapped, "weight") is module.weight
    assert not zeros(wrapped)(X).any()


def test_a_child_called_module_is_a_child():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

        def forward(self, x):
            return self.module(x)

    assert paths(Own()) == ["module.weight", "module.bias"]
    assert paths(nn.DataParallel(Own())) == ["module.weight", "module.bias"]
    assert not zeros(Own())(X).any()


def test_checkpoint_wrappers_are_seen_through_at_any_depth():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = checkpoint_wrapper(nn.Linear(2, 2))
            self.second = offload_wrapper(checkpoint_wrapper(nn.Linear(2, 2)))
            self.order = [self.first, self.second]

        def forward(self, x):
            for layer in self.order:
                x = layer(x)
            return x

    net = Net()
    assert paths(net) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    new = zeros(net)
    assert new.order == [new.first, new.second]
    assert type(new.order[0]) is nn.Linear
    assert not new(X).any()
    assert net(X).any()


@pytest.mark.usefixtures("group")
def test_distributed_data_parallel_is_seen_through_in_any_nesting():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 1))
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(module), backend="eager")
    assert paths(wrapped) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    wrapped(X).sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    by_path = cowalk.gradients_of(wrapped)
    assert by_path["1"]["bias"] is grads["1.bias"]
    assert by_path["0"]["weight"] is module[0].weight.grad
    new = zeros(wrapped)
    assert type(new) is nn.Sequential
    assert not new(X).any()
    assert module(X).any()


@pytest.mark.usefixtures("group")
def test_a_wrapper_may_follow_what_it_wraps():
    module = nn.Linear(2, 2)
    wrapped = nn.parallel.DistributedDataParallel(module)
    assert cowalk.diff(module, wrapped) == []
    assert cowalk.diff(wrapped, module) == []
    assert cowalk.diff(wrapped, {"weight": 1, "bias": 2}) == []


def test_fully_sharded_data_parallel_is_seen_through():
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # its constructor wants an accelerator
    nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = nn.Sequential(nn.Linear(2, 2))
    assert paths(nn.ModuleDict({"body": wrapped})) == ["body.0.weight", "body.0.bias"]
    assert type(zeros(wrapped)) is nn.Sequential


def test_an_averaged_model_has_a_state_of_its_own_and_is_no_wrapper():
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    assert paths(averaged) == ["n_averaged", "module.weight", "module.bias"]
    new = cowalk.fmap(lambda t: t.detach().clone(), averaged)
    new.update_parameters(nn.Linear(2, 2))
    assert (new.n_averaged, averaged.n_averaged) == (1, 0)


@pytest.mark.usefixtures("group")
def test_gradients_of_a_distributed_model_are_those_of_its_module_and_it_trains_on():
    module = nn.Linear(2, 2)
    wrapped = nn.parallel.DistributedDataParallel(module)
    expected = cowalk.gradient(lambda m: m(X).square().sum(), module)
    for _ in range(2):  # a first one must not leave the wrapper waiting for its own backward pass
        grads = cowalk.gradient(lambda m: m(X).square().sum(), wrapped)
        assert cowalk.fmapstructure(torch.equal, grads, expected) == {"weight": True, "bias": True}
    wrapped(X).square().sum().backward()
    assert torch.equal(module.bias.grad, grads["bias"])


@pytest.mark.usefixtures("group")
def test_a_sharded_model_says_how_to_get_its_gradients_and_has_them_then():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    sharded = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(cowalk.CowalkError, match=r"loss.backward\(\)"):
        cowalk.gradient(lambda m: m(X).sum(), sharded)
    sharded(X).sum().backward()
    expected = cowalk.gradient(lambda m: m(X).sum(), plain)
    found = cowalk.fmapstructure(lambda e, g: torch.equal(e, g.full_tensor()), expected, cowalk.gradients_of(sharded))
    assert set(cowalk.flatten(found).values()) == {True}


@pytest.mark.usefixtures("group")
def test_the_state_of_an_optimizer_inside_of_another_is_found():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.Linear(2, 2)
    outer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.1)
    assert cowalk.optimizer_state(module, outer) == {"weight": None, "bias": None}
    module(X).sum().backward()
    outer.step()
    states = cowalk.optimizer_state(module, outer)
    assert states["bias"]["exp_avg"] is outer.optim.state[module.bias]["exp_avg"]


def test_a_subclass_of_a_wrapper_is_a_wrapper():
    class MyParallel(nn.DataParallel):
        pass

    assert paths(MyParallel(nn.Linear(2, 2))) == ["weight", "bias"]

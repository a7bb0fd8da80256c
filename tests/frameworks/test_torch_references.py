"""References of torch modules that are no children: in the new module they lead to its own parts, and never to the old one."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import namedtuple
from typing import Any

import torch
from torch import nn

import cowalk

X = torch.ones(1, 2)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


# --- containers and other modules ---


class Block(nn.Module):
    def __init__(self, parent: nn.Module):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.parent = weakref.ref(parent)
        self.__dict__["owner"] = parent  # past registration, as people do to avoid a cycle

    def forward(self, x):
        return self.linear(x)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(self), Block(self)
        self.order = [self.b, self.a]
        self.by_name = {"first": (self.a, 1), "deep": [[self.b]]}
        self.rates = {self.a.linear.weight: 0.1}
        self.chosen = {self.a, self.b}
        self.order.append(self.order)
        self.calls = 0
        self.handle = self.a.register_forward_hook(self.count)
        self.b.register_forward_pre_hook(functools.partial(self.count_more, 10))
        self.register_load_state_dict_pre_hook(Stack.loading)
        self._register_load_state_dict_pre_hook(self.loading)
        self.call = self.count

    def count(self, *_):
        self.calls += 1

    def count_more(self, number, *_):
        self.calls += number

    def loading(self, *_):
        self.calls += 100

    def forward(self, x):
        for block in self.order[:2]:
            x = block.linear(x)
        return x


def test_plain_containers_of_registered_modules_follow():
    stack = Stack()
    new = cowalk.fmap(lambda t: clone(t) * 2, stack)
    assert (new.order[0], new.order[1]) == (new.b, new.a)
    assert new.order[2] is new.order
    assert new.by_name["first"] == (new.a, 1)
    assert new.by_name["deep"][0][0] is new.b
    assert next(iter(new.rates)) is new.a.linear.weight
    assert new.chosen == {new.a, new.b}
    assert stack.order[0] is stack.b
    assert stack.chosen == {stack.a, stack.b}
    x = torch.ones(1, 2)
    assert torch.equal(new(x), new.a.linear(new.b.linear(x)))


def test_references_to_the_parent_follow():
    new = cowalk.fmap(clone, Stack())
    assert new.a.parent() is new
    assert new.b.owner is new


def test_hooks_that_are_methods_follow():
    stack = Stack()
    new = cowalk.fmap(clone, stack)
    x = torch.ones(1, 2)
    new.a(x), new.b(x)
    new.call()
    assert (stack.calls, new.calls) == (0, 12)
    new.load_state_dict(stack.state_dict())
    assert (stack.calls, new.calls) == (0, 212)


def test_a_handle_removes_the_hook_of_its_own_module():
    stack = Stack()
    new = cowalk.fmap(clone, stack)
    new.handle.remove()
    assert (len(stack.a._forward_hooks), len(new.a._forward_hooks)) == (1, 0)


def test_a_deeply_nested_plain_container_is_no_danger():
    module = nn.Linear(1, 1)
    chain: list[Any] = [module]
    for _ in range(20_000):
        chain = [chain]
    module.chain = chain
    inner = cowalk.fmap(clone, module).chain
    for _ in range(20_000):
        inner = inner[0]
    assert inner[0] is not module
    assert type(inner[0]) is nn.Linear


def test_an_lstm_computes_with_its_new_weights():
    lstm, x = nn.LSTM(2, 3, num_layers=2), torch.ones(4, 1, 2)
    expected = lstm(x)[0]
    new = cowalk.fmap(lambda t: torch.zeros_like(t), lstm)
    assert all(one is other for one, other in zip(new._flat_weights, new.parameters(), strict=True))
    assert not new(x)[0].any()
    assert torch.equal(lstm(x)[0], expected)
    new.flatten_parameters()
    assert not new(x)[0].any()


def test_a_gru_trains_its_new_weights():
    gru, x = nn.GRU(2, 3, bidirectional=True), torch.ones(4, 1, 2)
    new = cowalk.fmap(clone, gru)
    new(x)[0].sum().backward()
    assert all(p.grad is not None for p in new.parameters())
    assert all(p.grad is None for p in gru.parameters())


def test_a_named_tuple_of_modules_follows():
    Pair = namedtuple("Pair", "first number")
    module = nn.Sequential(nn.Linear(2, 2))
    module.pair = Pair(module[0], 1)
    new = cowalk.fmap(clone, module)
    assert type(new.pair) is Pair
    assert new.pair == (new[0], 1)
    assert module.pair.first is module[0]


# --- functions over the model ---


class Watched(nn.Module):
    """Watches itself in the ways that libraries do: functions that hold the module, made where it is made."""

    def __init__(self, elsewhere: list[Any]):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[Any] = []
        seen = self.seen
        self.linear.register_forward_hook(lambda module, x, y: self.seen.append("closure"))
        self.linear.register_forward_hook(lambda module, x, y: seen.append("container"))
        self.linear.register_forward_hook(lambda module, x, y, own=self: own.seen.append("default"))
        self.linear.register_forward_hook(lambda module, x, y: elsewhere.append("elsewhere"))
        self.add = self.wrapped(self.add)

    def wrapped(self, method):
        @functools.wraps(method)
        def add(*arguments):
            self.seen.append("wrapper")
            return method(*arguments)

        return add

    def add(self, what: str) -> None:
        self.seen.append(what)

    def forward(self, x):
        return self.linear(x)


def test_hooks_that_close_over_the_model_write_into_the_new_one():
    elsewhere: list[Any] = []
    module = Watched(elsewhere)
    new = cowalk.fmap(clone, module)
    new(X)
    assert module.seen == []
    assert new.seen == ["closure", "container", "default"]
    assert elsewhere == ["elsewhere"]  # what a hook fills for somebody else is still theirs
    module(X)
    assert new.seen == module.seen


def test_a_method_in_a_decorator_is_that_of_the_new_module():
    module = Watched([])
    new = cowalk.fmap(clone, module)
    new.add("text")
    assert (module.seen, new.seen) == ([], ["wrapper", "text"])
    assert new.add.__name__ == "add"
    assert new.add.__wrapped__.__self__ is new
    assert inspect.signature(new.add) == inspect.signature(module.add)


def test_a_function_that_calls_itself_calls_the_new_one():
    module = nn.Linear(2, 2)

    def below(depth):
        return below(depth - 1) if depth else module

    module.below = below
    new = cowalk.fmap(clone, module)
    assert new.below(2) is new
    assert module.below(2) is module


def test_two_functions_that_share_a_variable_share_it_again():
    module = nn.Linear(2, 2)
    target = module

    def look():
        return target

    def turn_away():
        nonlocal target
        target = None

    module.look, module.turn_away = look, turn_away
    new = cowalk.fmap(clone, module)
    assert new.look() is new
    new.turn_away()
    assert (new.look(), module.look()) == (None, module)


def test_functions_that_hold_no_part_stay_the_same_objects():
    module, number = nn.Linear(2, 2), 3
    module.act = torch.nn.functional.relu
    module.scale = lambda x: x * number
    module.power = functools.partial(pow, 2)
    new = cowalk.fmap(clone, module)
    assert (new.act, new.scale, new.power) == (module.act, module.scale, module.power)


def test_a_forward_that_was_replaced_by_a_partial_runs_the_new_module_and_shows_its_arguments():
    module = nn.Linear(2, 2)

    def forward(own, *args, **kwargs):  # how libraries put a forward of theirs before a module's
        return own.old_forward(*args, **kwargs)

    module.old_forward = module.forward
    module.forward = functools.update_wrapper(functools.partial(forward, module), module.old_forward)
    new = cowalk.fmap(torch.zeros_like, module)
    assert not new(X).any()
    assert module(X).any()
    assert list(inspect.signature(new.forward).parameters) == ["input"]

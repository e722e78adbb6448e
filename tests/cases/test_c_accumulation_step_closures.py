"""C. Accumulation, `step`, closures."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dear
from tests.cases.harness import Twin, close, made, on_ranks, ones, raises_at_once, sgd


def loss(m: nn.Module, r: int) -> Tensor:
    return m(ones(r)).sum()


def weight(twin: Twin) -> Tensor:
    return twin.model.weight.detach().clone()


@on_ranks(2)
@pytest.mark.parametrize("how", ["no_sync", "accumulate", "plain"])
def test_case_025_horovod_2497_short_last_group(how: str, fusion: Any) -> None:
    """Also horovod/horovod#2466."""
    twin = Twin(nn.Linear(4, 3), fusion=fusion, **({"accumulate": 4} if how == "accumulate" else {}))
    for _ in range(2):  # epochs
        for group in (4, 4, 2):
            twin.zero_grad()
            for k in range(group):
                twin.backward(lambda m, r, k=k: m(ones(r) + k).sum(), local=how == "no_sync" and k < group - 1)
            twin.step()
        twin.check(exact=False)


@on_ranks(2)
def test_case_025_a_group_without_its_last_backward() -> None:
    """Neighbour: the epoch ends inside no_sync; step averages what was accumulated."""
    twin = Twin(nn.Linear(4, 3))
    for _ in range(2):
        twin.zero_grad()
        for _ in range(2):
            twin.backward(loss, local=True)
        twin.step()
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["plain", "no_sync", "accumulate"])
def test_case_026_deepspeed_1488_three_backwards(how: str, fusion: Any) -> None:
    twin = Twin(nn.Linear(4, 1), fusion=fusion, **({"accumulate": 3} if how == "accumulate" else {}))
    mean = (dear.size() + 1) / 2
    for _ in range(2):
        before = weight(twin)
        twin.zero_grad()
        for k in range(3):
            twin.backward(loss, local=how == "no_sync" and k < 2)
        close(twin.optimizer.full_grad(twin.model.weight), 3 * mean)
        twin.step()
        close(twin.model.weight, before - 0.1 * 3 * mean)
    twin.check(exact=False)


@on_ranks(2)
def test_case_026_all_ways_give_the_same_bits() -> None:
    results = []
    for how in ("plain", "no_sync", "accumulate"):
        torch.manual_seed(3)
        model = nn.Linear(4, 1)
        twin = Twin(model, **({"accumulate": 3} if how == "accumulate" else {}))
        for _ in range(3):
            twin.zero_grad()
            for k in range(3):
                twin.backward(loss, local=how == "no_sync" and k < 2)
            twin.step()
        results.append(weight(twin))
        twin.optimizer.close()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@on_ranks(2)
def test_case_026_no_sync_on_one_rank_only() -> None:
    """Neighbour: ranks divide their passes differently between no_sync and not; the mean of the sums is the same."""
    twin = Twin(nn.Linear(4, 1))
    for _ in range(3):
        twin.zero_grad()
        twin.backward(loss, local=dear.rank() == 0)
        twin.backward(loss)
        twin.step()
    twin.check(exact=False)


@on_ranks(2)
def test_case_027_transformers_45656_step_twice(fusion: Any) -> None:
    twin = Twin(nn.Linear(4, 1), fusion=fusion)
    before = weight(twin)
    twin.zero_grad()
    twin.backward(loss)
    twin.step()
    twin.step()
    close(twin.model.weight, before - 0.1 * (dear.size() + 1))  # -0.30 with two ranks: the same gradient twice
    twin.train(loss)
    twin.check()


@on_ranks(2)
def test_case_027_gradients_kept_over_steps() -> None:
    """Neighbour: no zero_grad at all; gradients grow as in plain PyTorch."""
    twin = Twin(nn.Linear(4, 1), sgd(momentum=0.9))
    for _ in range(4):
        twin.backward(loss)
        twin.step()
    twin.check(exact=False)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sgd", "adamw", "whole"])
def test_case_028_horovod_546_step_without_backward(kind: str, fusion: Any) -> None:
    make = {"sgd": sgd(momentum=0.9, weight_decay=0.5), "adamw": made(optim.AdamW, weight_decay=0.5), "whole": sgd()}
    twin = Twin(nn.Linear(4, 1), make[kind], fusion=fusion, **({"shard": False} if kind == "whole" else {}))
    start = weight(twin)
    twin.step()
    twin.step()
    assert torch.equal(weight(twin), start)
    twin.train(loss)
    twin.zero_grad()
    twin.step()
    twin.train(loss)
    twin.check()


@on_ranks(2)
def test_case_029_pytorch_30439_lbfgs() -> None:
    model = nn.Linear(4, 1)
    with raises_at_once(dear.ArgumentError, "LBFGS cannot be distributed: it evaluates the model several times"):
        dear.DistributedOptimizer(optim.LBFGS(model.parameters()), model)


class Line(optim.LBFGS):
    """A user's line search."""


@on_ranks(2)
def test_case_029_subclasses_of_lbfgs_and_closures() -> None:
    """Neighbours: a subclass is refused as well; a closure for another optimizer runs once."""
    model = nn.Linear(4, 1)
    with raises_at_once(dear.ArgumentError, "cannot be distributed"):
        dear.DistributedOptimizer(Line(model.parameters()), model)
    twin = Twin(nn.Linear(4, 1))
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        twin.optimizer.zero_grad()
        value = loss(twin.model, dear.rank())
        value.backward()
        return value

    for _ in range(3):
        with torch.no_grad():
            value = twin.optimizer.step(closure)
        assert value is not None and value.requires_grad
        twin.plain_optimizer.zero_grad()
        twin.backward_plain(loss)
        twin.plain_optimizer.step()
    assert calls == [True] * 3
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("when", ["first_step", "later"])
def test_case_030_fairscale_605_grad_set_to_none_before_step(when: str, fusion: Any) -> None:
    twin = Twin(nn.Linear(4, 3), sgd(momentum=0.9, weight_decay=0.5), fusion=fusion)
    if when == "later":
        twin.train(loss, 2)
    before = weight(twin)
    twin.zero_grad()
    twin.backward(loss)
    for m in (twin.model, twin.plain):
        m.weight.grad = None
    twin.step()
    assert torch.equal(weight(twin), before)
    twin.train(loss, 2)
    twin.check()


@on_ranks(2)
def test_case_030_grad_set_to_none_on_one_rank_only() -> None:
    """Averages that only some ranks forget cannot be told from mixtures: an error on all ranks, no hang."""
    twin = Twin(nn.Linear(4, 3))
    twin.train(loss, 2)
    twin.zero_grad()
    twin.backward(loss)
    if dear.rank() == 1:
        twin.model.weight.grad = None
    with raises_at_once(dear.ScheduleError, r"the gradient of 'weight' was set to None.*zero_grad\(\) on all ranks"):
        twin.optimizer.step()
        twin.optimizer.synchronize()


@on_ranks(2)
def test_case_030_grad_set_to_none_on_one_rank_in_the_first_step() -> None:
    """The first backward is not reduced before `step`, so the rank's gradient simply counts as none."""
    twin = Twin(nn.Linear(4, 3))
    before = weight(twin)
    twin.zero_grad()
    twin.backward(loss)
    if dear.rank() == 1:
        twin.model.weight.grad = None
    twin.optimizer.step()
    close(twin.model.weight, before - 0.1 * 0.5)


@on_ranks(2)
@pytest.mark.parametrize("of", ["optimizer", "model"])
def test_case_031_fairscale_354_zero_grad_both_ways(of: str, fusion: Any) -> None:
    twin = Twin(nn.Linear(4, 3), sgd(momentum=0.9), fusion=fusion)
    for set_to_none in (True, False, True, False):

        def zero(m: nn.Module, o: optim.Optimizer, flag: bool = set_to_none) -> None:
            (o if of == "optimizer" else m).zero_grad(set_to_none=flag)

        twin.both(zero)
        twin.backward(loss)
        twin.step()
    twin.both(lambda m, o: o.zero_grad(set_to_none=False))
    twin.step()  # zeros are applied: momentum goes on
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("at", ["after_step", "after_backward", "twice", "in_no_sync"])
def test_case_031_zero_grad_at_odd_moments(at: str) -> None:
    twin = Twin(nn.Linear(4, 3), sgd(momentum=0.9))
    for set_to_none in (True, False, False, True):
        if at == "after_backward":
            twin.backward(loss)
        if at == "in_no_sync":
            with twin.optimizer.no_sync():
                twin.backward(loss)
                twin.zero_grad(set_to_none)
        else:
            twin.zero_grad(set_to_none)
        if at == "twice":
            twin.zero_grad(not set_to_none)
        twin.backward(loss)
        twin.step()
        if at == "after_step":
            twin.zero_grad(set_to_none)
    twin.check(exact=False)


@on_ranks(2)
def test_case_031_an_exception_in_backward_leaves_nothing_after_zero_grad() -> None:
    """Neighbour: recovery on all ranks after an exception in forward or backward."""

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("bomb")

    twin = Twin(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), sgd(momentum=0.9), fusion=None)
    for _ in range(3):
        twin.train(loss)
        with contextlib.suppress(ValueError):
            twin.model[1](Bomb.apply(twin.model[0](ones(5)))).sum().backward()
        twin.zero_grad()
    twin.train(loss)
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("name", ["no_sync", "no_grad", "enable_grad"])
def test_case_026_step_inside_contexts(name: str) -> None:
    """Neighbour: `step` inside no_sync, no_grad or enable_grad."""
    twin = Twin(nn.Linear(4, 1))
    for _ in range(2):
        twin.zero_grad()
        twin.backward(loss)
        with getattr(twin.optimizer if name == "no_sync" else torch, name)():
            twin.step()
    twin.check()

"""J. The same numbers in every setting: bucket sizes, overlap, BatchNorm, compiled models."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dear
from tests.cases.harness import Twin, assert_same_everywhere, close, made, on_ranks, raises_at_once, sgd
from tests.support.reference import assert_bit_equal

MIB = 1024 * 1024


class Net(nn.Sequential):
    """Tensors of 21, 7, 35 and 5 elements: 84, 28, 140 and 20 bytes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))


def loss(m: nn.Module, r: int) -> Tensor:
    return m(torch.linspace(-1, 1, 6).view(2, 3) * (r + 1)).square().mean()


@on_ranks(2)
@pytest.mark.parametrize("value", [0, -1, -0.5, float("nan"), float("inf"), True, "25", "auto ", [25.0]], ids=str)
def test_case_079_deepspeed_6351_bad_bucket_sizes(value: Any) -> None:
    model = Net()
    with raises_at_once(dear.ArgumentError, r"fusion=.*expected"):
        dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, fusion=value)


@on_ranks(2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_case_079_all_bucket_sizes_give_the_same_bits(deterministic: bool) -> None:
    """Also DeepSpeed#8260, #7653, #7415: 1 byte, smaller than one tensor, exact fit of one and of two, huge."""
    results = []
    fusions = [None, 1 / MIB, 4 / MIB, 50 / MIB, 84 / MIB, 112 / MIB, 272 / MIB, 1.0, 25.0, 1e6]
    for fusion in (*fusions, dear.NearbyLayers(1), dear.NearbyLayers(2), dear.NearbyLayers(99)):
        torch.manual_seed(0)
        twin = Twin(Net(), sgd(momentum=0.9, weight_decay=0.1), fusion=fusion)
        for _ in range(4):
            twin.zero_grad()
            twin.backward(loss)
            twin.optimizer.clip_grad_value_(0.2)
            nn.utils.clip_grad_value_(twin.plain.parameters(), 0.2)
            twin.step()
        twin.check()
        results.append(dict(twin.model.state_dict()))
        covered = sum(slot.numel for bucket in twin.optimizer.plan.buckets for slot in bucket.slots)
        assert covered == sum(p.numel() for p in twin.model.parameters())
        twin.optimizer.close()
    for other in results[1:]:
        assert_bit_equal(other, results[0])


@on_ranks(3, deterministic=True)
def test_case_079_deterministic_mode_gives_the_same_bits_on_three_ranks() -> None:
    results = []
    for fusion, schedule in [(None, "dear"), (60 / MIB, "dear"), (25.0, "dear"), ("sized", "wfbp"), ("sized", "ddp")]:
        torch.manual_seed(0)
        twin = Twin(Net(), sgd(momentum=0.9), fusion=fusion, schedule=schedule)
        twin.train(loss, 4)
        assert_same_everywhere(twin.model)
        results.append(dict(twin.model.state_dict()))
        twin.optimizer.close()
    for other in results[1:]:
        assert_bit_equal(other, results[0])


def _run(overlapped: bool, sleeps: int | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(60, 60) for _ in range(3)), nn.Linear(60, 1))
    optimizer = dear.DistributedOptimizer(optim.Adam(model.parameters(), lr=0.01), model, fusion=4e-3)
    engine = optimizer._engine
    delays = random.Random(sleeps)
    if sleeps is not None:
        for param in model.parameters():
            param.register_hook(lambda _: time.sleep(delays.random() * 5e-4))
        for stream in (engine.streams.communication, engine.streams.step):
            run = stream.run
            stream.run = lambda label, work, run=run: run(
                label, lambda: (time.sleep(delays.random() * 5e-4), work())[1]
            )
    for step in range(20):
        optimizer.zero_grad()
        x = torch.sin(torch.arange(120.0).view(2, 60) * (step + dear.rank() + 1))
        model(x).square().mean().backward()
        if not overlapped:
            optimizer.full_grad(model[0].bias)
        optimizer.step()
        if not overlapped:
            optimizer.synchronize()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    assert all(value.isfinite().all() for value in state.values())
    return state


@on_ranks(2)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
def test_case_080_deepspeed_5545_overlap_has_no_races(seed: int) -> None:
    """Also DeepSpeed#5523, #7188, #8061."""
    sequential = _run(overlapped=False, sleeps=None)
    for attempt in range(2):
        assert_bit_equal(_run(overlapped=True, sleeps=10 * seed + attempt + 100 * dear.rank()), sequential)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))


@on_ranks(2)
@pytest.mark.parametrize("synced", [False, True])
def test_case_081_pytorch_63916_batch_norm(synced: bool) -> None:
    """Also pytorch/pytorch#22095, #175024: two forwards before one backward; statistics local unless asked for."""
    torch.manual_seed(0)
    model = Normed()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, broadcast_buffers=synced)
    a, b = torch.randn(5, 3) * (dear.rank() + 1), torch.randn(5, 3) + dear.rank()
    for _ in range(3):
        optimizer.zero_grad()
        (model(a).square().mean() + model(b).abs().mean()).backward()
        optimizer.step()
    assert_same_everywhere(model)
    local = dear.allgather(model.norm.running_mean.view(1, -1))
    assert not torch.equal(local[0], local[1]), "the last forward's statistics are each rank's own"
    if synced:  # before the next training forward every rank gets rank 0's
        before = dear.broadcast(model.norm.running_mean)
        model(torch.zeros(5, 3))
        expected = 0.9 * before + 0.1 * model.fc.bias.detach()
        close(model.norm.running_mean, expected)
    rank_0s = dear.broadcast_object({k: v.clone() for k, v in model.state_dict().items()})
    Normed().load_state_dict(rank_0s)
    model.load_state_dict(rank_0s)
    assert torch.equal(model.norm.running_mean, rank_0s["norm.running_mean"])


@on_ranks(2)
@pytest.mark.parametrize("synced", [False, True])
def test_case_081_reassigned_buffers(synced: bool) -> None:
    model = Normed()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, broadcast_buffers=synced)
    for step in range(3):
        model.norm.running_mean = torch.full((4,), float(10 * dear.rank() + step))
        optimizer.zero_grad()
        model.norm.momentum = 0.0
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        expected = step if synced else 10 * dear.rank() + step
        assert model.norm.running_mean.tolist() == [expected] * 4
    optimizer.synchronize()


@on_ranks(2)
def test_case_081_forwards_of_different_number_with_synchronised_buffers() -> None:
    """Neighbour: evaluation on rank 0 only starts no broadcast."""
    model = Normed()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, broadcast_buffers=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        if dear.rank() == 0:
            model.eval()
            with torch.no_grad():
                model(torch.randn(5, 3))
            model.train()
            with torch.no_grad():
                model(torch.randn(5, 3))
    assert_same_everywhere(model)


@on_ranks(2)
@pytest.mark.parametrize(("compiled", "how"), [*itertools.product([False, True], ["no_sync", "accumulate", "plain"])])
def test_case_082_pytorch_187448_compiled_with_accumulation_and_clipping(compiled: bool, how: str) -> None:
    torch._dynamo.reset()
    twin = Twin(Net(), made(optim.Adam, lr=0.01, eps=1e-3), **({"accumulate": 4} if how == "accumulate" else {}))
    forward: Any = torch.compile(twin.model, backend="eager") if compiled else twin.model

    def of(m: nn.Module, r: int, k: int) -> Tensor:
        x = torch.linspace(-1, 1, 6).view(2, 3) * (r + 1) + k
        return (forward if m is twin.model else m)(x).square().mean()

    for _ in range(3):
        twin.zero_grad()
        for k in range(4):
            twin.backward(lambda m, r, k=k: of(m, r, k), local=how == "no_sync" and k < 3)
        norms = twin.optimizer.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.5)
        close(*norms)
        twin.step()
    twin.check(exact=False)


@on_ranks(2)
def test_case_079_a_tensor_larger_than_its_bucket() -> None:
    """Neighbour: it is split; options, clipping and checkpoints see one tensor."""
    model = nn.ParameterList([nn.Parameter(torch.arange(1000.0)), nn.Parameter(torch.ones(3))])
    twin = Twin(model, made(optim.Adam, lr=0.1), fusion=1000 / MIB)
    assert len(twin.optimizer.plan.buckets) > 2
    twin.train(lambda m, r: (m[0].square().mean() + m[1].sum()) * (r + 1), 3)
    close(twin.optimizer.state_dict()["state"][0]["exp_avg"], twin.plain_optimizer.state_dict()["state"][0]["exp_avg"])
    twin.check()


@on_ranks(1)
def test_case_079_one_rank_runs_the_same_path() -> None:
    for fusion in (None, 4 / MIB, 25.0):
        twin = Twin(Net(), sgd(momentum=0.9), fusion=fusion)
        twin.train(loss, 3)
        twin.check()
        twin.optimizer.close()

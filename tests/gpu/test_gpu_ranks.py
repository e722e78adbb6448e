"""Two to four ranks on one GPU: over gloo, staged through pinned memory, and over NCCL where it allows that.

Correctness only: ranks that share a GPU say nothing about bandwidth.
"""

import os

import pytest
import torch
from torch import nn

import dear
from dearcore.backend import SHARED_GPU_VARIABLE, SHARED_GPU_VERSION
from dearcore.nccl import library_problem, library_version, load_library

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEPS = 3


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 65), nn.ReLU(), nn.Linear(65, 3)).cuda()


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 33, generator=generator).cuda()


def make_optimizer(kind, model):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def train(backend, kind, schedule, deterministic):
    """On a rank: trains, and returns the weights, the backend in use and what dear.allreduce says."""
    if backend is not None:
        dear.init(backend=backend, deterministic=deterministic)
    model = make_model()
    more = {"fusion": 0.01} if schedule == "dear" else {}
    optimizer = dear.DistributedOptimizer(make_optimizer(kind, model), model, schedule=schedule, **more)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(dear.rank(), step)).square().mean().backward()
        optimizer.step()
    weights = [p.detach().cpu() for p in model.parameters()]
    total = dear.allreduce(torch.full((3,), float(dear.rank()), device="cuda"), dear.Sum).cpu()
    optimizer.close()
    used = dear.context.current().world.decision.backend
    return weights, used, total


def expected(kind, size):
    model = make_model()
    optimizer = make_optimizer(kind, model)
    for step in range(STEPS):
        grads = []
        for rank in range(size):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for index, param in enumerate(model.parameters()):
            param.grad = sum(g[index] for g in grads) / size
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def check(results, kind, size, backend):
    for weights, used, total in results:
        assert used == backend
        assert total.tolist() == [size * (size - 1) / 2] * 3
        for mine, want in zip(weights, expected(kind, size), strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=5e-5)
    for weights, *_ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][0], strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", ["dear", "ddp"])
def test_over_gloo_with_staged_tensors(pool, size, kind, schedule):
    check(pool.run(train, None, kind, schedule, False, size=size, timeout_s=110), kind, size, "gloo")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_over_nccl_on_one_gpu(pool, monkeypatch, size, kind, deterministic):
    problem = library_problem()
    if problem:
        pytest.skip(f"NCCL cannot be used: {problem}")
    version = library_version(load_library())
    if tuple(int(part) for part in version.split(".")[:2]) < SHARED_GPU_VERSION:
        pytest.skip(f"ranks share a GPU from NCCL 2.30 on; this is {version}")
    monkeypatch.setenv(SHARED_GPU_VARIABLE, "1")
    assert os.environ[SHARED_GPU_VARIABLE] == "1"
    results = pool.run(train, "nccl", kind, "dear", deterministic, size=size, init=False, timeout_s=110)
    check(results, kind, size, "nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_over_nccl_on_two_gpus(pool, kind):
    check(pool.run(train, "nccl", kind, "dear", False, size=2, init=False, timeout_s=110), kind, 2, "nccl")


def synchronised_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 3)).cuda()


def train_synchronised():
    """SyncBatchNorm's collectives are on torch's own NCCL communicator."""
    torch.cuda.set_device(int(os.environ["RANK"]))
    torch.distributed.init_process_group("nccl")
    dear.init(backend="nccl")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(synchronised_model())
    optimizer = dear.DistributedOptimizer(make_optimizer("sgd", model), model, fusion=0.001)
    for step in range(20):
        optimizer.zero_grad()
        model(batch(dear.rank(), step)).square().mean().backward()
        optimizer.step()
    weights = [p.detach().cpu() for p in model.parameters()]
    optimizer.close()
    return weights


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_synchronised_batch_norm_beside_our_collectives(pool):
    model = synchronised_model()
    optimizer = make_optimizer("sgd", model)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.cat([batch(0, step), batch(1, step)])).square().mean().backward()
        optimizer.step()
    for weights in pool.run(train_synchronised, size=2, init=False, timeout_s=110):
        for mine, want in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(mine, want.detach().cpu(), rtol=1e-3, atol=1e-4)

"""World size 1 over real NCCL: the weights of plain PyTorch, no wait of the host, and collectives beside compute."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dear
from dearcore.nccl import library_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def world():
    problem = library_problem()
    if problem:
        pytest.skip(f"NCCL cannot be used: {problem}")
    dear.init(backend="nccl")
    yield
    dear.shutdown()


class Net(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(65, 65), nn.Tanh()) for _ in range(4))
        self.norm, self.head = nn.BatchNorm1d(65), nn.Linear(65, 3)
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.body:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


def make(**kwargs):
    torch.manual_seed(0)
    return Net(**kwargs).cuda()


def batches():
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(16, 65, device="cuda", generator=generator) for _ in range(STEPS)]


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, foreach=False),  # no kernel of ours
}


def train(model, optimizer, forward=None, autocast=False, clip=None, scaler=None):
    for x in batches():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = (forward or model)(x).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            clip(optimizer, model)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return [p.detach().clone() for p in model.parameters()]


def clip_plain(_, model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_ours(optimizer, _):
    optimizer.clip_grad_norm_(0.1)


CASES = {
    "plain": {},
    "autocast": {"autocast": True},
    "checkpointed": {"checkpointed": True},
    "clipped": {"clip": (clip_plain, clip_ours)},
    "scaled": {"scaler": True},
    "compiled": {"compiled": "whole"},
    "compiled by region": {"compiled": "regions"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["dear", "ddp"])
def test_weights_are_those_of_plain_pytorch(kind, case, schedule):
    if case.startswith("compiled") and (kind != "adamw" or schedule != "dear"):
        pytest.skip("compiling once is enough")
    options = dict(CASES[case])
    checkpointed, compiled = options.pop("checkpointed", False), options.pop("compiled", "")
    clip, scaled = options.pop("clip", (None, None)), options.pop("scaler", False)
    results = []
    for is_ours in (False, True):
        model = make(checkpointed=checkpointed)
        optimizer = OPTIMIZERS[kind](model.parameters())
        if compiled == "regions":
            for layer in model.body:
                layer.compile()
        forward = torch.compile(model) if compiled == "whole" else model
        if is_ours:
            more = {"fusion": 0.02} if schedule == "dear" else {}
            optimizer = dear.DistributedOptimizer(optimizer, model, schedule=schedule, **more)
        scaler = torch.amp.GradScaler("cuda", init_scale=64.0) if scaled else None
        results.append(train(model, optimizer, forward, clip=clip[is_ours], scaler=scaler, **options))
        if is_ours:
            optimizer.close()
    for mine, plain in zip(results[1], results[0], strict=True):
        # adaptive steps divide by the gradient's size: where it is near zero, the last bit of it moves a weight by more
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_steady_iteration_never_waits_for_the_device(kind, dtype):
    from bench.gpu.training import count_syncs

    model = make().to(dtype)
    optimizer = dear.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model, fusion=0.02)
    x = torch.randn(16, 65, device="cuda", dtype=dtype)

    def step():
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    assert count_syncs(step) == 0
    optimizer.close()


def test_the_sync_counter_sees_a_sync():
    from bench.gpu.training import count_syncs

    value = torch.ones(3, device="cuda")
    assert count_syncs(lambda: value.sum().item()) >= 1


def test_reduce_scatters_run_under_the_backward_and_all_gathers_under_the_forward():
    from bench.gpu.overlap import hidden
    from bench.gpu.training import iterate, new_model, trace

    model = new_model(torch.device("cuda"), width=1024, depth=8)
    optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model, fusion=4.0)
    num_buckets, x = len(optimizer.plan.buckets), torch.randn(4096, 1024, device="cuda")
    events = trace(lambda: iterate(model, optimizer, x), num_iterations=3)
    for kind, under in (("reduce_scatter", "backward"), ("all_gather", "forward")):
        found = hidden(events, kind, under)
        print(kind, found)
        # a collective of one rank may launch nothing at all, such as an all-gather in place
        assert found.num_collectives in (0, 3 * num_buckets)
    assert hidden(events, "reduce_scatter", "backward").hidden_us > 0
    optimizer.close()


def test_collectives_of_tensors():
    value = torch.arange(5.0, device="cuda")
    assert torch.equal(dear.allreduce(value), value)
    assert torch.equal(dear.allgather(value), value)
    assert torch.equal(dear.broadcast(value), value)
    assert dear.allreduce(torch.ones(2)).tolist() == [1, 1]
    dear.barrier()

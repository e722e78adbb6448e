"""What one rank does without the network: pack, unpack, step, norm, schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear_kernels
from bench.micro.gate import Pair, time_in_turn
from bench.workload import load_shapes, scaled
from dear.scheduler import Scheduler
from dearcore.kernel_step import make_stepper
from dearcore.layout import Bucket, ParamSpec, plan_threshold
from dearcore.schedule import Op, plan_dear
from dearcore.shard import OwnedSegment

Against = Callable[[Callable[[], Pair]], float]

ROUNDS = 30
NUM_SHARDS = 4
SHARD_NUMEL = 1_000_000
NUM_SEGMENTS = 40
WHOLE = 1e12  # bytes a bucket: everything in one


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    return str(request.param)


def timed(
    device: str, ours: Callable[[], Any], reference: Callable[[], Any], rounds: int = ROUNDS
) -> Callable[[], Pair]:
    """On CUDA a call lasts until the device has done its work."""
    if device == "cpu":
        return lambda: time_in_turn(ours, reference, rounds)

    def whole(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            call()
            torch.cuda.synchronize()

        return run

    return lambda: time_in_turn(whole(ours), whole(reference), rounds)


class Packed:
    """One bucket of ResNet-50's 161 tensors at a tenth of their size, and gradients for it."""

    def __init__(self, device: str) -> None:
        shapes = scaled(load_shapes("resnet50"), 0.1)
        specs = [ParamSpec(i, name, shape, torch.float32) for i, (name, shape) in enumerate(shapes)]
        self.bucket: Bucket = plan_threshold(specs, NUM_SHARDS, WHOLE).buckets[0]
        region_numel, shard_numel = self.bucket.region_numel, self.bucket.shard_numel
        segments = [
            dear_kernels.Segment(
                tensor=s.slot,
                start=s.start,
                offset=s.shard * region_numel + s.offset,
                numel=s.numel,
                flag=s.shard * region_numel + shard_numel + s.flag,
            )
            for s in self.bucket.segments()
        ]
        self.table = dear_kernels.SegmentTable(segments, len(self.bucket.slots))
        self.flat = torch.zeros(region_numel * NUM_SHARDS, device=device)
        self.grads = [torch.randn(shape, device=device) for _, shape in shapes]
        flat_grads = [grad.reshape(-1) for grad in self.grads]
        self.views = [self.flat[s.offset : s.offset + s.numel] for s in segments]
        self.parts = [flat_grads[s.tensor][s.start : s.start + s.numel] for s in segments]


def test_pack_against_foreach_copy(device: str, against: Against) -> None:
    packed = Packed(device)
    ours = lambda: dear_kernels.pack_(packed.flat, packed.grads, packed.table)  # noqa: E731
    against(timed(device, ours, lambda: torch._foreach_copy_(packed.views, packed.parts)))


def test_unpack_against_foreach_copy(device: str, against: Against) -> None:
    packed = Packed(device)
    ours = lambda: dear_kernels.unpack_(packed.grads, packed.flat, packed.table)  # noqa: E731
    against(timed(device, ours, lambda: torch._foreach_copy_(packed.parts, packed.views)))


def test_pack_of_one_tensor_against_memcpy(device: str, against: Against) -> None:
    source = torch.randn(SHARD_NUMEL * NUM_SHARDS, device=device)
    flat, other = torch.zeros_like(source), torch.zeros_like(source)
    table = dear_kernels.SegmentTable([dear_kernels.Segment(0, 0, 0, source.numel())], 1)
    against(timed(device, lambda: dear_kernels.pack_(flat, [source], table), lambda: other.copy_(source)))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_step_against_torch(name: str, device: str, against: Against) -> None:
    """A shard of forty segments, stepped by us; one tensor as large, stepped by torch."""
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        "adam": lambda params: torch.optim.Adam(params, lr=0.01),
        "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    }[name]
    param, grad = torch.randn(SHARD_NUMEL, device=device), torch.randn(SHARD_NUMEL, device=device)
    whole = torch.nn.Parameter(param.clone())
    whole.grad = grad.clone()
    reference = make([whole])
    numel = SHARD_NUMEL // NUM_SEGMENTS
    owned = [OwnedSegment(i, 0, i * numel, numel, i, 0) for i in range(NUM_SEGMENTS)]
    stepper = make_stepper(make([torch.nn.Parameter(param.clone())]), owned, param, grad, None)
    used = torch.ones(NUM_SEGMENTS, device=device)
    hyper = [{key: value for key, value in reference.param_groups[0].items() if key != "params"}]
    against(timed(device, lambda: stepper.step(used, hyper), reference.step))


def test_norm_against_torch(device: str, against: Against) -> None:
    shard = torch.randn(SHARD_NUMEL, device=device)
    reference = lambda: torch.linalg.vector_norm(shard, 2.0, dtype=torch.float64)  # noqa: E731
    against(timed(device, lambda: dear_kernels.sum_of_squares(shard), reference))


class _Counter:
    """The least that a launcher may do."""

    def __init__(self) -> None:
        self.num_ops = 0

    def launch(self, op: Op) -> None:
        self.num_ops += 1

    def launch_late(self, late: Any) -> None:
        pass

    def touch(self, number: int) -> None:
        self.num_ops += number & 1


@pytest.mark.parametrize(("num_tensors", "num_buckets"), [(2000, 1), (2000, 500)])
def test_scheduler_against_method_calls(num_tensors: int, num_buckets: int, against: Against) -> None:
    """An iteration of the scheduler: per tensor with one bucket, per bucket with many. Reference: a call a tensor."""
    specs = [ParamSpec(i, f"layer{i}.weight", (64,), torch.float32) for i in range(num_tensors)]
    plan = plan_threshold(specs, NUM_SHARDS, 256.0 * num_tensors / num_buckets)
    assert len(plan.buckets) == num_buckets
    counter = _Counter()
    scheduler = Scheduler(plan, plan_dear(plan), counter)
    order = list(range(num_tensors))[::-1]

    def iterate() -> None:
        for param in order:
            scheduler.grad_ready(param)
        scheduler.finish_gradients()
        scheduler.finish_step()

    def call() -> None:
        for param in order:
            counter.touch(param)

    against(timed("cpu", iterate, call))
    assert counter.num_ops

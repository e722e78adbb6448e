"""L. Kernels: offsets beyond 32 bits, empty grids, grids that are too large.

Compiled kernels on a GPU: tests/gpu. Here: the plain-PyTorch twins, and the kernels themselves in Triton's interpreter,
in one process of its own, because TRITON_INTERPRET must be set before they are decorated.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import dear
from dear.planning import make_plan
from dear_kernels import Segment, SegmentTable, SGDHyper, StepSegment, StepTable, norm_stats, pack_, sgd_step_, unpack_
from dearcore.layout import NearbyLayers, ParamSpec
from dearcore.streams import Streams
from dearcore.trace import Trace

REPO = Path(__file__).resolve().parents[2]
MANY = 2**31 + 4096  # elements

INTERPRETED = """
import json, torch
from dear_kernels import AdamHyper, Segment, SegmentTable, SGDHyper, StepSegment, StepTable
from dear_kernels import adam, norm, pack, sgd, unpack
results = {}

offset = 2**31 + 5
flat = torch.empty(2**31 + 4096, dtype=torch.bfloat16)  # address space: only what is touched exists
table = SegmentTable([Segment(0, 0, offset, 3, flag=offset + 7)], 1)
pack.pack_(flat, [torch.tensor([1.0, 2.0, 3.0])], table)
out = torch.zeros(3)
unpack.unpack_([out], flat, table)
results["tail"] = [flat[offset : offset + 3].tolist(), float(flat[offset + 7]), out.tolist()]

launches = []
class Recorder:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        launches.append(grid)
        return self.kernel[grid]
for module in (pack, unpack, sgd, adam, norm):
    for name in [n for n in vars(module) if n.endswith("_kernel")]:
        setattr(module, name, Recorder(getattr(module, name)))
empty = torch.zeros(0)
pack.pack_(empty, [], SegmentTable([], 0))
pack.pack_(empty, [torch.zeros(0, 8)], SegmentTable([Segment(0, 0, 0, 0)], 1))
unpack.unpack_([None], torch.zeros(4), SegmentTable([Segment(0, 0, 0, 4)], 1))
sgd.sgd_step_(empty, empty, None, StepTable([], 0), [SGDHyper(0.1)], torch.zeros(0), None)
adam.adam_step_(empty, empty, empty, empty, None, StepTable([], 0), [AdamHyper(0.1)], torch.zeros(0), None)
norm.norm_stats(empty)
results["empty"] = [list(grid) for grid in launches]

for module in (pack, unpack, sgd):
    module.BLOCK_NUMEL = module.EDGE_NUMEL = 16
    module.MAX_PROGRAMS = 4
launches.clear()
source = torch.arange(1000.0)
flat, out = torch.zeros(1000), torch.zeros(1000)
table = SegmentTable([Segment(0, 0, 0, 1000)], 1)
pack.pack_(flat, [source], table)
unpack.unpack_([out], flat, table)
param = torch.zeros(1000)
sgd.sgd_step_(param, source, None, StepTable([StepSegment(0, 1000)], 1000), [SGDHyper(1.0)], torch.zeros(1), None)
results["capped"] = [max(grid[0] for grid in launches), torch.equal(flat, source), torch.equal(out, source)]
results["capped"].append(torch.equal(param, -source))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[object]]:
    pytest.importorskip("triton", reason="Triton is not installed")
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "kernels")]),
    }
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    results: dict[str, list[object]] = json.loads(done.stdout.splitlines()[-1])
    return results


# Reports of 91: triton-lang/triton#1058, #5022, fla-org/flash-linear-attention#1080, databricks/megablocks PR#185,
# TransformerEngine PR#3136.


def test_case_091_triton_1058_pack_and_unpack_the_tail() -> None:
    offset = 2**31 + 5
    flat = torch.empty(MANY, dtype=torch.bfloat16)  # 4 GiB of address space, of which two pages exist
    table = SegmentTable([Segment(0, 0, offset, 3, flag=MANY - 1)], 1)
    pack_(flat, [torch.tensor([1.0, 2.0, 3.0])], table)
    out = torch.zeros(3)
    unpack_([out], flat, table)
    assert out.tolist() == [1, 2, 3] and flat[MANY - 1] == 1


def test_case_091_the_tail_in_the_interpreter(interpreted: dict[str, list[object]]) -> None:
    assert interpreted["tail"] == [[1, 2, 3], 1, [1, 2, 3]]


@pytest.mark.parametrize("fusion", [None, 25.0, 1e6, NearbyLayers(2)], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_case_091_offsets_of_plans_with_fake_sizes(fusion: float | NearbyLayers | None, num_ranks: int) -> None:
    """Shapes only: a tensor of 2^31 + 4096 elements between small ones, and one larger than 2^32."""
    shapes = [(5,), (MANY,), (3, 7), (2**16 + 1, 2**16), (1,)]
    specs = [ParamSpec(i, f"p{i}", shape, torch.bfloat16) for i, shape in enumerate(shapes)]
    plan = make_plan(fusion, specs, num_ranks)
    covered = dict.fromkeys(range(len(specs)), 0)
    for bucket in plan.buckets:
        spans = sorted((slot.offset, slot.numel, slot.param) for slot in bucket.slots)
        for (start, numel, _), (after, _, _) in itertools.pairwise(spans):
            assert start + numel <= after
        assert spans[-1][0] + spans[-1][1] <= bucket.padded_numel
        segments = bucket.segments()
        assert sum(s.numel for s in segments) == sum(slot.numel for slot in bucket.slots)
        for slot in bucket.slots:
            covered[slot.param] += slot.numel
    assert covered == {spec.index: spec.numel for spec in specs}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="case 91 on compiled kernels needs a CUDA device with 9 GB")
def test_case_091_the_tail_on_a_gpu() -> None:
    offset = 2**31 + 5
    flat = torch.zeros(MANY, dtype=torch.bfloat16, device="cuda")
    table = SegmentTable([Segment(0, 0, offset, 3, flag=MANY - 1)], 1)
    pack_(flat, [torch.tensor([1.0, 2.0, 3.0], device="cuda")], table)
    out = torch.zeros(3, device="cuda")
    unpack_([out], flat, table)
    assert out.tolist() == [1, 2, 3] and flat[MANY - 1] == 1 and flat[:4096].count_nonzero() == 0


def test_case_092_triton_ascend_984_empty_tensors_and_lists() -> None:
    """Also triton PR#10464."""
    empty = torch.zeros(0)
    pack_(empty, [], SegmentTable([], 0))
    pack_(empty, [torch.zeros(0, 8)], SegmentTable([Segment(0, 0, 0, 0)], 1))
    unpack_([], empty, SegmentTable([], 0))
    sgd_step_(empty, empty, None, StepTable([], 0), [SGDHyper(0.1)], torch.zeros(0))
    assert norm_stats(empty).tolist() == [0, 0]


def test_case_092_no_launch_in_the_interpreter(interpreted: dict[str, list[object]]) -> None:
    assert interpreted["empty"] == []


def test_case_092_a_model_of_empty_parameters() -> None:
    """Neighbour: the whole way of an optimizer whose every bucket is empty."""
    dear.init(backend="local")
    try:
        model = nn.ModuleList([nn.Linear(8, 0, bias=False), nn.Linear(8, 0, bias=False)])
        for fusion in (None, 25.0):
            optimizer = dear.DistributedOptimizer(optim.Adam(model.parameters()), model, fusion=fusion)
            for _ in range(2):
                sum(layer(torch.ones(1, 8)).sum() for layer in model).backward()
                assert optimizer.clip_grad_norm_(1.0) == 0
                optimizer.step()
                optimizer.zero_grad()
            optimizer.close()
    finally:
        dear.shutdown()


def test_case_093_triton_7260_too_large_a_grid(interpreted: dict[str, list[object]]) -> None:
    """1000 elements in blocks of 16, and no more than 4 programs: the grid is capped, everything is written."""
    assert interpreted["capped"] == [4, True, True, True]


def test_case_093_grids_stay_below_the_hardwares_limit() -> None:
    """The largest grid of any launch, from the sources; CUDA takes 2^31 - 1 in the first dimension, 65535 in others."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    assert triton
    from dear_kernels import adam, norm, pack, sgd, unpack

    assert all(module.MAX_PROGRAMS <= 65536 for module in (adam, norm, pack, sgd, unpack))


def test_case_093_steps_of_many_segments_on_the_twin() -> None:
    segments = [StepSegment(2 * i, 2) for i in range(1000)]
    param, grad = torch.zeros(2000), torch.arange(2000.0)
    sgd_step_(param, grad, None, StepTable(segments, 2000), [SGDHyper(1.0)], torch.zeros(1000))
    assert torch.equal(param, -grad)


def test_case_094_nccl_549_a_stuck_collective_is_given_up_in_time() -> None:
    """Here on CPU streams; NCCL's own abort, with a fake library: tests/dearcore/test_nccl.py."""
    streams = Streams(torch.device("cpu"), Trace())
    release, passed = threading.Event(), streams.new_event()
    streams.communication.run("stuck", lambda: release.wait(60) and None)
    streams.communication.record(passed)
    start_s = time.monotonic()
    streams.hurry(0.2)
    with pytest.raises(dear.CommunicatorError, match="ending after an error"):
        passed.wait_host()
    streams.close()
    assert time.monotonic() - start_s < 20
    release.set()


def test_case_094_pytorch_18465_gradients_outlive_their_reads() -> None:
    """What is still to be packed is not handed out again, whatever is allocated meanwhile."""
    dear.init(backend="local")
    try:
        model = nn.ParameterList([nn.Parameter(torch.zeros(4096)) for _ in range(4)])
        optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=1.0), model, fusion=None)
        for step in range(3):
            release = threading.Event()
            optimizer._engine.streams.pack.run("hold", lambda release=release: release.wait(60) and None)
            sum((p * (step + 1.0)).sum() for p in model).backward()
            garbage = [torch.full((4096,), 1e6) for _ in range(64)]
            timer = threading.Timer(0.05, release.set)
            timer.start()
            optimizer.step()
            optimizer.zero_grad()
            timer.join()
            del garbage
        for p in model:
            assert p.tolist() == [-6.0] * 4096
    finally:
        dear.shutdown()

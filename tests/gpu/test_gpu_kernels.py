"""Kernels on a GPU against their twins on the same GPU: random data, odd places, outputs poisoned beforehand."""

import pytest
import torch

import dear_kernels
from dear_kernels import AdamHyper, Segment, SegmentTable, SGDHyper, StepSegment, StepTable, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
POISON = float("nan")
NUMELS = (4096, 1, 33, 0, 70_001, 4095, 12_288)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def tensors_of(dtype, generator, missing=(2,)):
    found = []
    for index, numel in enumerate(NUMELS):
        values = torch.randn(2 * numel, device="cuda", generator=generator).to(dtype)
        strided = values.view(2, numel).t()[:, 0] if index == 4 else values[:numel]  # every second, then dense
        found.append(None if index in missing else strided)
    return found


def table_of(gap):
    segments, at = [], gap
    for index, numel in enumerate(NUMELS):
        half = numel // 2
        for start, part in ((0, half), (half, numel - half)):
            segments.append(Segment(index, start, at, part, flag=at + part))
            at += part + 1 + gap
    return SegmentTable(segments, len(NUMELS)), at


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("gap", [0, 1, 7, 16])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_pack_and_unpack(source, target, gap, scale):
    generator = torch.Generator("cuda").manual_seed(gap)
    (table, numel), tensors = table_of(gap), tensors_of(source, generator)
    mine = torch.full((numel,), POISON, device="cuda").to(target)
    twin = mine.clone()
    dear_kernels.pack_(mine, tensors, table, scale=scale)
    reference.pack_(twin, tensors, table_of(gap)[0], scale=scale)
    assert torch.equal(bits(mine), bits(twin))
    flat = torch.randn(numel, device="cuda", generator=generator).to(target)
    back = [None if t is None else torch.full_like(t, POISON) for t in tensors]
    again = [None if t is None else torch.full_like(t, POISON) for t in tensors]
    dear_kernels.unpack_(back, flat, table, scale=scale)
    reference.unpack_(again, flat, table_of(gap)[0], scale=scale)
    for got, want in zip(back, again, strict=True):
        assert got is None or torch.equal(bits(got), bits(want))


def test_values_that_are_not_finite_pass():
    source = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0] * 2000, device="cuda")
    flat = torch.zeros_like(source)
    dear_kernels.pack_(flat, [source], SegmentTable([Segment(0, 0, 0, 8000)], 1))
    assert torch.equal(bits(flat), bits(source))


def test_beyond_32_bits():
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    offset = 2**31 + 5
    flat = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device="cuda")
    table = SegmentTable([Segment(0, 0, offset, 3, flag=offset + 7)], 1)
    dear_kernels.pack_(flat, [torch.tensor([1.0, 2.0, 3.0], device="cuda")], table)
    assert flat[offset : offset + 3].tolist() == [1, 2, 3] and flat[offset + 7] == 1


SEGMENTS = [
    StepSegment(0, 5000, 0),
    StepSegment(5000, 8192, 1),
    StepSegment(13_200, 33, 0),
    StepSegment(13_248, 4096, 1),
]
SHARD = 17_400


@pytest.mark.parametrize("optimizer", ["sgd", "sgd nesterov", "adam", "adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_are_torchs(optimizer, dtype):
    """Every segment is a parameter of torch's own optimizer, in two groups; one of them is unused in each step."""
    torch.manual_seed(0)
    table = StepTable(SEGMENTS, SHARD)
    shard = torch.randn(SHARD, device="cuda", dtype=dtype)
    start = shard.clone()
    theirs = [torch.nn.Parameter(shard[s.offset : s.offset + s.numel].clone()) for s in SEGMENTS]
    groups = [{"params": [p for p, s in zip(theirs, SEGMENTS, strict=True) if s.group == g]} for g in (0, 1)]
    groups[1]["lr"] = 0.03
    low = torch.full((SHARD,), POISON, device="cuda", dtype=torch.bfloat16)
    steps = torch.zeros(len(SEGMENTS), device="cuda")
    states = [torch.zeros(SHARD, device="cuda", dtype=dtype) for _ in range(3)]
    if optimizer.startswith("sgd"):
        options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": optimizer != "sgd"}
        plain = torch.optim.SGD(groups, lr=0.01, **options, foreach=False)
        hyper = [SGDHyper(lr, 0.9, 0.0, 0.1, optimizer != "sgd") for lr in (0.01, 0.03)]
    else:
        decoupled = optimizer == "adamw"
        cls = torch.optim.AdamW if decoupled else torch.optim.Adam
        plain = cls(groups, lr=0.01, weight_decay=0.1, amsgrad=optimizer == "amsgrad", foreach=False)
        hyper = [
            AdamHyper(lr, 0.9, 0.999, 1e-8, 0.1, optimizer == "amsgrad", decoupled_weight_decay=decoupled)
            for lr in (0.01, 0.03)
        ]
    for step in range(4):
        grad = torch.randn(SHARD, device="cuda", dtype=dtype)
        used = torch.ones(len(SEGMENTS), device="cuda")
        used[step % len(SEGMENTS)] = 0
        for index, (param, s) in enumerate(zip(theirs, SEGMENTS, strict=True)):
            param.grad = grad[s.offset : s.offset + s.numel].clone() if used[index] else None
        plain.step()
        if optimizer.startswith("sgd"):
            dear_kernels.sgd_step_(shard, grad, states[0], table, hyper, steps, used, low_precision_param=low)
        else:
            largest = states[2] if optimizer == "amsgrad" else None
            dear_kernels.adam_step_(
                shard, grad, *states[:2], largest, table, hyper, steps, used, low_precision_param=low
            )
    for param, s in zip(theirs, SEGMENTS, strict=True):
        mine = shard[s.offset : s.offset + s.numel]
        torch.testing.assert_close(mine, param.detach(), rtol=2e-6, atol=1e-7)
        assert torch.equal(low[s.offset : s.offset + s.numel], mine.to(torch.bfloat16))
    outside = torch.ones(SHARD, dtype=torch.bool, device="cuda")
    for s in SEGMENTS:
        outside[s.offset : s.offset + s.numel] = False
    assert torch.equal(shard[outside], start[outside])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 2047, 2048, 300_001])
def test_norms(dtype, numel):
    shard = torch.randn(numel, device="cuda").to(dtype)
    total, bad = dear_kernels.norm_stats(shard)
    torch.testing.assert_close(total, shard.double().square().sum(), rtol=1e-12, atol=0)
    assert bad.item() == 0.0
    shard[numel // 2] = float("inf")
    assert dear_kernels.found_nonfinite(shard).item() == 1.0


@pytest.mark.parametrize(("row", "output"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("numel", [1, 16, 1024, 1025, 70_000])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_rows_are_summed_in_their_order(row, output, numel, num_rows):
    exponents = torch.randint(-6, 6, (num_rows, numel), device="cuda")
    rows = (torch.randn(num_rows, numel, device="cuda") * 10.0**exponents).to(row)
    mine = torch.full((numel,), POISON, device="cuda", dtype=output)
    twin = torch.empty_like(mine)
    dear_kernels.sum_rows_(mine, rows, num_rows)
    reference.sum_rows_(twin, rows, num_rows)
    assert torch.equal(bits(mine), bits(twin))

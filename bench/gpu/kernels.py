"""Bandwidth of every kernel, beside torch's own and beside a device-to-device copy, in one run.

A fraction is the bytes that the kernel has to move (`dear_kernels.traffic`) over its time, over the same of a copy of
the flat buffer. Results are compared with the plain-PyTorch twin in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import dear_kernels
from dear_kernels import reference, traffic

from ..record import percentiles
from .timing import Timer

__all__ = ["SIZES_MIB", "Measurement", "measure", "summary"]

SIZES_MIB = (0.25, 1.0, 4.0, 25.0, 64.0, 256.0)
LARGE_MIB = 25.0  # from here on the fractions count
NUM_TENSORS = 50  # of one bucket
SLOT_BYTES = 64  # slots begin at multiples of it
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Measurement:
    """`baselines`: torch's way to do the same, by name. `correct` compares with the twin."""

    kernel: str
    dtypes: str
    mib: float
    moved: traffic.Traffic
    run: Callable[[], object]
    baselines: dict[str, Callable[[], object]]
    correct: Callable[[], bool]


def measure(device: torch.device, sizes_mib: Sequence[float] = SIZES_MIB) -> list[dict[str, Any]]:
    """One row a kernel, dtype and size."""
    timer = Timer(device)
    rows = []
    for mib in sizes_mib:
        copy_gbps = _copy_gbps(timer, mib, device)
        for case in _cases(mib, device):
            correct = case.correct()  # before the timed calls: steps go on from where they are
            times_s = timer.times_s(case.run)
            gbps = case.moved.total_bytes / median(times_s) / 1e9
            row: dict[str, Any] = {"kernel": case.kernel, "dtypes": case.dtypes, "mib": mib}
            row |= percentiles(times_s, "us")
            row |= {"gbps": round(gbps, 1), "copy_gbps": round(copy_gbps, 1), "fraction": round(gbps / copy_gbps, 3)}
            for name, baseline in case.baselines.items():
                row[f"{name}_ratio"] = round(median(times_s) / median(timer.times_s(baseline)), 3)
            row["correct"] = correct
            rows.append(row)
        torch.cuda.empty_cache()
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The numbers that have targets."""
    found: dict[str, float] = {}
    for kernel in ("pack", "unpack", "sgd", "adam"):
        mine = [row for row in rows if row["kernel"] == kernel]
        large = [row["fraction"] for row in mine if row["mib"] >= LARGE_MIB]
        if large:
            found[f"{kernel}_fraction"] = min(large)
        ratios = [row["fused_ratio"] for row in mine if "fused_ratio" in row]
        if ratios:
            found[f"{kernel}_ratio"] = max(ratios)
    return found


def _copy_gbps(timer: Timer, mib: float, device: torch.device) -> float:
    numel = int(mib * 2**20) // 4
    source, target = torch.ones(numel, device=device), torch.empty(numel, device=device)
    seconds = median(timer.times_s(lambda: target.copy_(source)))
    return traffic.copy_traffic(numel, torch.float32).total_bytes / seconds / 1e9


def _cases(mib: float, device: torch.device) -> Iterator[Measurement]:
    for source, target in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2):
        yield from _copies(mib, source, target, device)
    yield _sgd(mib, device)
    for copy in (None, torch.bfloat16):
        yield _adam(mib, copy, device)
    yield _norm(mib, device)
    yield _sum_rows(mib, device)


def _copies(mib: float, source: torch.dtype, target: torch.dtype, device: torch.device) -> Iterator[Measurement]:
    """Pack of tensors of `source` into a buffer of `target`, and unpack the other way round."""
    total = int(mib * 2**20) // 4
    tensors, segments, offset = [], [], 0
    for index in range(NUM_TENSORS):  # sizes from one to three times the smallest
        numel = max(1, total * (NUM_TENSORS + 2 * index) // (NUM_TENSORS * (2 * NUM_TENSORS - 1)))
        tensors.append(torch.randint(-8, 8, (numel,), device=device).to(source))
        segments.append(dear_kernels.Segment(index, 0, offset, numel))
        step = SLOT_BYTES // min(source.itemsize, target.itemsize)
        offset += -(-numel // step) * step
    table = dear_kernels.SegmentTable(segments, NUM_TENSORS)
    flat = torch.full((offset,), float("nan"), device=device).to(target)
    views = [flat[s.offset : s.offset + s.numel] for s in segments]
    moved = traffic.pack_traffic(sum(s.numel for s in segments), source, target, NUM_TENSORS)
    name = f"{DTYPES[source]} to {DTYPES[target]}"

    def packed() -> bool:
        expected = torch.full_like(flat, 7.0)
        flat.fill_(7.0)
        dear_kernels.pack_(flat, tensors, table)
        reference.pack_(expected, tensors, dear_kernels.SegmentTable(segments, NUM_TENSORS))
        return torch.equal(flat, expected)

    baselines: dict[str, Callable[[], object]] = {"foreach": lambda: torch._foreach_copy_(views, tensors)}
    if source == target:
        dense = torch.empty(sum(t.numel() for t in tensors), dtype=target, device=device)
        baselines["cat"] = lambda: torch.cat(tensors, out=dense)
    yield Measurement("pack", name, mib, moved, lambda: dear_kernels.pack_(flat, tensors, table), baselines, packed)
    back = [torch.full_like(tensor, float("nan")) for tensor in tensors]

    def unpacked() -> bool:
        dear_kernels.unpack_(back, flat, table)
        return all(torch.equal(got, view.to(source)) for got, view in zip(back, views, strict=True))

    yield Measurement(
        "unpack",
        f"{DTYPES[target]} to {DTYPES[source]}",
        mib,
        moved,
        lambda: dear_kernels.unpack_(back, flat, table),
        {"foreach": lambda: torch._foreach_copy_(back, views)},
        unpacked,
    )


def _step_table(numel: int) -> dear_kernels.StepTable:
    part = -(-numel // 10 // 16) * 16
    segments = [dear_kernels.StepSegment(at, min(part, numel - at)) for at in range(0, numel, part)]
    return dear_kernels.StepTable(segments, numel)


def _sgd(mib: float, device: torch.device) -> Measurement:
    numel = int(mib * 2**20) // 4
    table = _step_table(numel)
    param, grad, buffer = (torch.randn(numel, device=device) for _ in range(3))
    steps = torch.ones(table.num_segments, device=device)
    hyper = [dear_kernels.SGDHyper(1e-4, 0.9)]

    def correct() -> bool:
        mine, twin = [t.clone() for t in (param, buffer, steps)], [t.clone() for t in (param, buffer, steps)]
        dear_kernels.sgd_step_(mine[0], grad, mine[1], table, hyper, mine[2])
        reference.sgd_step_(twin[0], grad, twin[1], table, hyper, twin[2])
        return all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(mine, twin, strict=True))

    theirs = torch.nn.Parameter(param.clone())
    theirs.grad = grad
    fused = torch.optim.SGD([theirs], lr=1e-4, momentum=0.9, fused=True)
    moved = traffic.sgd_traffic(numel, torch.float32, torch.float32)
    run = lambda: dear_kernels.sgd_step_(param, grad, buffer, table, hyper, steps)  # noqa: E731
    return Measurement("sgd", "fp32", mib, moved, run, {"fused": fused.step}, correct)


def _adam(mib: float, copy: torch.dtype | None, device: torch.device) -> Measurement:
    numel = int(mib * 2**20) // 4
    table = _step_table(numel)
    param, grad = torch.randn(numel, device=device), torch.randn(numel, device=device)
    averages = [torch.zeros(numel, device=device) for _ in range(2)]
    steps = torch.zeros(table.num_segments, device=device)
    low = None if copy is None else torch.empty(numel, dtype=copy, device=device)
    hyper = [dear_kernels.AdamHyper(1e-4, weight_decay=0.01, decoupled_weight_decay=True)]

    def correct() -> bool:
        mine = [t.clone() for t in (param, *averages, steps)]
        twin = [t.clone() for t in mine]
        for _ in range(2):
            dear_kernels.adam_step_(mine[0], grad, *mine[1:3], None, table, hyper, mine[3], low_precision_param=low)
            reference.adam_step_(twin[0], grad, *twin[1:3], None, table, hyper, twin[3])
        narrow = low is None or torch.equal(low, mine[0].to(low.dtype))
        return narrow and all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(mine, twin, strict=True))

    def run() -> None:
        dear_kernels.adam_step_(param, grad, *averages, None, table, hyper, steps, low_precision_param=low)

    theirs = torch.nn.Parameter(param.clone())
    theirs.grad = grad
    fused = torch.optim.AdamW([theirs], lr=1e-4, fused=True)
    moved = traffic.adam_traffic(numel, torch.float32, torch.float32, copy=copy)
    # torch has nothing that writes a narrow copy too
    baselines: dict[str, Callable[[], object]] = {} if copy else {"fused": fused.step}
    return Measurement("adam", "fp32" + (", copy bf16" if copy else ""), mib, moved, run, baselines, correct)


def _norm(mib: float, device: torch.device) -> Measurement:
    numel = int(mib * 2**20) // 4
    shard = torch.randn(numel, device=device)

    def correct() -> bool:
        found = dear_kernels.norm_stats(shard)
        return torch.allclose(found[0], shard.double().square().sum(), rtol=1e-12) and found[1].item() == 0.0

    return Measurement(
        "norm",
        "fp32",
        mib,
        traffic.norm_traffic(numel, torch.float32),
        lambda: dear_kernels.norm_stats(shard),
        {"vector_norm": lambda: torch.linalg.vector_norm(shard)},
        correct,
    )


def _sum_rows(mib: float, device: torch.device) -> Measurement:
    numel = max(1, int(mib * 2**20) // 4 // 8)
    rows, output = torch.randn(8, numel, device=device), torch.full((numel,), float("nan"), device=device)

    def correct() -> bool:
        expected = torch.empty_like(output)
        dear_kernels.sum_rows_(output, rows, 8)
        reference.sum_rows_(expected, rows, 8)
        return torch.equal(output, expected)

    return Measurement(
        "sum_rows",
        "fp32, 8 rows",
        mib,
        traffic.sum_rows_traffic(numel, 8, torch.float32, torch.float32),
        lambda: dear_kernels.sum_rows_(output, rows, 8),
        {"sum": lambda: torch.sum(rows, 0, out=output)},
        correct,
    )

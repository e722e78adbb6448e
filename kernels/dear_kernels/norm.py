"""Sum of squares of a shard and whether it holds an inf or NaN, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dear_kernels.addresses import device_guard, mark_written
from dear_kernels.checks import check_norm

__all__ = ["found_nonfinite", "norm_stats", "sum_of_squares"]

# Launch settings. Origin: not yet swept on a GPU; to be set by make gpu.
BLOCK_NUMEL = 2048  # elements per step of a program
NUM_WARPS = 4
# Partial sums. A function of the number of elements alone, never of the GPU: the order of summation must not vary.
MAX_PROGRAMS = 1024


@triton.jit(do_not_specialize=["numel"])
def _norm_kernel(
    shard_ptr,  # [numel]
    partial_ptr,  # fp64 [2, PARTIALS], the first num_programs of each written: sums of squares, non-finite lanes
    numel,
    COUNT: tl.constexpr,  # whether to look at each element; else the sum tells
    PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([BLOCK], tl.float64)
    bad = tl.zeros([BLOCK], tl.int32)
    index = tl.arange(0, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    block = program
    while block * BLOCK < numel:
        begin = block * BLOCK
        if begin + BLOCK <= numel:
            value = tl.load(shard_ptr + begin + index).to(tl.float64)
        else:
            value = tl.load(shard_ptr + begin + index, mask=index < numel - begin, other=0.0).to(tl.float64)
        total += value * value
        if COUNT:
            bad = bad | tl.where(tl.abs(value) < float("inf"), 0, 1)
        block += tl.num_programs(0)
    tl.store(partial_ptr + program, tl.sum(total, axis=0))
    if COUNT:
        tl.store(partial_ptr + PARTIALS + program, tl.sum(bad, axis=0).to(tl.float64))


@triton.jit(do_not_specialize=["num_partials"])
def _norm_finish_kernel(
    out_ptr,  # fp64 [2], written
    partial_ptr,  # fp64 [2, PARTIALS]
    num_partials,
    COUNT: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    index = tl.arange(0, PARTIALS)
    mask = index < num_partials
    total = tl.sum(tl.load(partial_ptr + index, mask=mask, other=0.0), axis=0)
    tl.store(out_ptr, total)
    if COUNT:
        is_bad = tl.sum(tl.load(partial_ptr + PARTIALS + index, mask=mask, other=0.0), axis=0) > 0
    else:
        # The squares of finite values of the narrower dtypes cannot overflow in fp64.
        is_bad = tl.abs(total) < float("inf")
        is_bad = is_bad == 0
    tl.store(out_ptr + 1, tl.where(is_bad, 1.0, 0.0).to(tl.float64))


@torch.no_grad()
def norm_stats(shard: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Launches the two kernels of a norm; the contract is that of `dear_kernels.norm_stats`.

    Up to `MAX_PROGRAMS` partial sums in fp64, then one program adds them; the same bits on every run.

    Worked example, the first test: [3, 4] gives [25, 0]; [3, inf] gives [inf, 1]; [] gives [0, 0].
    """
    check_norm(shard, out)
    if out is None:
        out = torch.empty(2, dtype=torch.float64, device=shard.device)
    numel = shard.numel()
    if numel == 0:
        return out.zero_()
    num_partials = min(triton.cdiv(numel, BLOCK_NUMEL), MAX_PROGRAMS)
    count = shard.dtype == torch.float64
    with device_guard(shard):
        partials = torch.empty(2, MAX_PROGRAMS, dtype=torch.float64, device=shard.device)
        _norm_kernel[(num_partials,)](
            shard, partials, numel, COUNT=count, PARTIALS=MAX_PROGRAMS, BLOCK=BLOCK_NUMEL, num_warps=NUM_WARPS
        )
        _norm_finish_kernel[(1,)](out, partials, num_partials, COUNT=count, PARTIALS=MAX_PROGRAMS, num_warps=NUM_WARPS)
    mark_written((out,))
    return out


def sum_of_squares(shard: Tensor) -> Tensor:
    """The contract is that of `dear_kernels.sum_of_squares`."""
    return norm_stats(shard)[0]


def found_nonfinite(shard: Tensor) -> Tensor:
    """The contract is that of `dear_kernels.found_nonfinite`."""
    return norm_stats(shard)[1].to(torch.float32)

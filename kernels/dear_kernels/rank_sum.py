"""Sum of the rows that ranks have sent, in their order: the same bits on every run and for every plan."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dear_kernels.addresses import device_guard, mark_written
from dear_kernels.checks import check_sum_rows

__all__ = ["sum_rows_"]

# Launch settings. Origin: not yet swept on a GPU; `python -m bench gpu --sweep` does it.
BLOCK_NUMEL = 1024  # elements per program
NUM_WARPS = 4


@triton.jit(do_not_specialize=["numel", "num_rows", "divisor"])
def _sum_rows_kernel(
    output_ptr,  # fp32 or fp64 [numel], written
    rows_ptr,  # [num_rows, numel]
    numel,
    num_rows,
    divisor: tl.float64,
    BLOCK: tl.constexpr,
):
    COMPUTE: tl.constexpr = output_ptr.dtype.element_ty
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    by = tl.full([], divisor, COMPUTE)
    row = num_rows * 0 + 1
    if (numel % 16 == 0) & (begin + BLOCK <= numel):
        step = (numel // 16).to(tl.int64) * 16  # says to the compiler: aligned
        total = tl.load(rows_ptr + begin + index).to(COMPUTE)
        while row < num_rows:
            total += tl.load(rows_ptr + row * step + begin + index).to(COMPUTE)
            row += 1
        tl.store(output_ptr + begin + index, _divided(total, by))
    else:
        mask = index < numel - begin
        total = tl.load(rows_ptr + begin + index, mask=mask, other=0.0).to(COMPUTE)
        while row < num_rows:
            total += tl.load(rows_ptr + row * numel.to(tl.int64) + begin + index, mask=mask, other=0.0).to(COMPUTE)
            row += 1
        tl.store(output_ptr + begin + index, _divided(total, by), mask=mask)


@triton.jit
def _divided(total, by):
    if total.dtype == tl.float64:
        total = total / by
    else:  # the plain operator of fp32 is approximate
        total = tl.div_rn(total, by)
    return total


@torch.no_grad()
def sum_rows_(output: Tensor, rows: Tensor, divisor: int) -> None:
    """Launches `_sum_rows_kernel`; the contract is that of `dear_kernels.sum_rows_`.

    Streams the rows once: reads num_rows values and writes one per element.

    Worked example, the first test: rows [[1, 2, 3], [5, 6, 8]] divided by 2 give [3, 4, 5.5].
    """
    check_sum_rows(output, rows, divisor)
    numel = output.numel()
    if numel == 0:
        return
    with device_guard(output):
        _sum_rows_kernel[(triton.cdiv(numel, BLOCK_NUMEL),)](
            output, rows, numel, rows.shape[0], float(divisor), BLOCK=BLOCK_NUMEL, num_warps=NUM_WARPS
        )
    mark_written((output,))

"""SGD on a flat shard, hyper-parameters looked up per segment."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dear_kernels.addresses import aligned_numel, device_flags, device_guard, mark_written, send
from dear_kernels.checks import check_sgd
from dear_kernels.hyper import SGDHyper
from dear_kernels.segments import StepTable
from dear_kernels.strided import rounded

__all__ = ["sgd_step_"]

# Launch settings. Origin: not yet swept on a GPU; to be set by make gpu.
BLOCK_NUMEL = 1024  # elements per tile
EDGE_NUMEL = 512  # elements per step through a tile that is short or unaligned
NUM_WARPS = 4
MAX_PROGRAMS = 65536  # programs walk over the tiles beyond that
SEGMENTS_PER_PROGRAM = 128
# One warp: with more, a warp that holds a copy of an element could read a step count that another has already raised.
COEFFICIENT_WARPS = 1

HYPER_COLUMNS = 6  # -lr, momentum, 1 - dampening, weight_decay, nesterov, sign of the gradient
COEFFICIENT_COLUMNS = 8  # is used, is first update, then the six of the group


@triton.jit(do_not_specialize=["num_segments"])
def _sgd_coefficients_kernel(
    coefficient_ptr,  # fp64 [num_segments, 8], written
    hyper_ptr,  # fp64 [num_groups, 6]
    group_ptr,  # int32 [num_segments]
    steps_ptr,  # [num_segments], incremented
    used_ptr,  # [num_segments], read if HAS_USED
    num_segments,
    HAS_USED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per segment. A launch of its own: the tiles of a segment could not agree on who counts the step."""
    segment = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = segment < num_segments
    hyper = hyper_ptr + tl.load(group_ptr + segment, mask=mask, other=0).to(tl.int64) * 6
    steps = tl.load(steps_ptr + segment, mask=mask, other=0.0)
    used = mask
    if HAS_USED:
        used = mask & (tl.load(used_ptr + segment, mask=mask, other=0) != 0)
    momentum = tl.load(hyper + 1, mask=mask, other=0.0)
    row = coefficient_ptr + segment * 8
    tl.store(row, tl.where(used, 1.0, 0.0).to(tl.float64), mask=mask)
    tl.store(row + 1, tl.where(steps == 0, 1.0, 0.0).to(tl.float64), mask=mask)
    for column in tl.static_range(6):
        tl.store(row + 2 + column, tl.load(hyper + column, mask=mask, other=0.0), mask=mask)
    tl.store(steps_ptr + segment, steps + 1, mask=used & (momentum != 0))


@triton.jit
def _sgd_elements(
    param_ptr,
    grad_ptr,
    buffer_ptr,
    low_ptr,
    row,
    at,
    mask,
    HAS_MOMENTUM: tl.constexpr,
    HAS_LOW: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    negative_lr = tl.load(row + 2).to(COMPUTE)
    momentum = tl.load(row + 3).to(COMPUTE)
    weight_decay = tl.load(row + 5).to(COMPUTE)
    param = tl.load(param_ptr + at, mask=mask).to(COMPUTE)
    grad = tl.load(grad_ptr + at, mask=mask).to(COMPUTE) * tl.load(row + 7).to(COMPUTE)
    grad = tl.where(weight_decay != 0, grad + weight_decay * param, grad)
    if HAS_MOMENTUM:
        undampened = tl.load(row + 4).to(COMPUTE)
        buffer = tl.load(buffer_ptr + at, mask=mask).to(COMPUTE)
        moved = tl.where(tl.load(row + 1) != 0, grad, momentum * buffer + undampened * grad)
        buffer = tl.where(momentum != 0, moved, buffer)
        tl.store(buffer_ptr + at, buffer.to(buffer_ptr.dtype.element_ty), mask=mask)
        direction = tl.where(tl.load(row + 6) != 0, grad + momentum * buffer, buffer)
        grad = tl.where(momentum != 0, direction, grad)
    param = param + negative_lr * grad
    tl.store(param_ptr + at, param.to(param_ptr.dtype.element_ty), mask=mask)
    if HAS_LOW:
        stored = rounded(param, param_ptr.dtype.element_ty)
        tl.store(low_ptr + at, rounded(stored.to(COMPUTE), low_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tiles"])
def _sgd_kernel(
    param_ptr,  # [shard_numel], written
    grad_ptr,  # [shard_numel]
    buffer_ptr,  # [shard_numel], written if HAS_MOMENTUM
    low_ptr,  # [shard_numel], written if HAS_LOW
    coefficient_ptr,  # fp64 [num_segments, 8]
    tile_ptr,  # int64 [num_tiles, 3]: see segments.plan_step_tiles
    num_tiles,
    HAS_MOMENTUM: tl.constexpr,
    HAS_LOW: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements of the narrowest stream in 16 bytes: where shards and slots begin
):
    tile = tl.program_id(0).to(tl.int64)
    while tile < num_tiles:
        offset = tl.load(tile_ptr + tile * 3)
        numel = tl.load(tile_ptr + tile * 3 + 1)
        row = coefficient_ptr + tl.load(tile_ptr + tile * 3 + 2) * 8
        if tl.load(row) != 0:
            if (numel == BLOCK) & (offset % ALIGN == 0):
                at = (offset // ALIGN) * ALIGN + tl.arange(0, BLOCK)  # says to the compiler: aligned
                _sgd_elements(param_ptr, grad_ptr, buffer_ptr, low_ptr, row, at, None, HAS_MOMENTUM, HAS_LOW, COMPUTE)
            else:
                done = numel * 0
                while done < numel:
                    inside = done + tl.arange(0, EDGE)
                    at = offset + inside
                    mask = inside < numel
                    _sgd_elements(
                        param_ptr, grad_ptr, buffer_ptr, low_ptr, row, at, mask, HAS_MOMENTUM, HAS_LOW, COMPUTE
                    )
                    done += EDGE
        tile += tl.num_programs(0)


def hyper_rows(hyper: Sequence[SGDHyper]) -> list[list[float]]:
    """The fp64 table of `_sgd_coefficients_kernel`, one row per group."""
    return [
        [-h.lr, h.momentum, 1 - h.dampening, h.weight_decay, float(h.nesterov), -1.0 if h.maximize else 1.0]
        for h in hyper
    ]


@torch.no_grad()
def sgd_step_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    table: StepTable,
    hyper: Sequence[SGDHyper],
    steps: Tensor,
    used: Tensor | None = None,
    *,
    low_precision_param: Tensor | None = None,
) -> None:
    """Launches the two kernels of an SGD step; the contract is that of `dear_kernels.sgd_step_`.

    A small one counts the steps and spreads each group's numbers over its segments; the second streams the shard once:
    reads 3 and writes 2 values per element with momentum, 2 and 1 without.

    Worked example, the first test, lr 0.5, momentum 0.5, the second of two segments unused::

        param [1 2 | 3]  grad [2 4 | 6]  buffer [0 0 | 0]  steps [0 | 0]
              [0 0 | 3]                         [2 4 | 0]        [1 | 0]   first update: buffer = grad
              [-1.5 -3 | 3]                     [3 6 | 0]        [2 | 0]   buffer = 0.5 buffer + grad
    """
    check_sgd(param, grad, momentum_buffer, table, hyper, steps, used, low_precision_param)
    tiles = table.tiles(BLOCK_NUMEL, param.device)
    num_tiles = tiles.shape[0]
    if table.num_segments == 0:
        return
    has_momentum = momentum_buffer is not None and any(h.momentum != 0 for h in hyper)
    compute = tl.float64 if param.dtype == torch.float64 else tl.float32
    with device_guard(param):
        coefficients = torch.empty(table.num_segments, COEFFICIENT_COLUMNS, dtype=torch.float64, device=param.device)
        _sgd_coefficients_kernel[(triton.cdiv(table.num_segments, SEGMENTS_PER_PROGRAM),)](
            coefficients,
            send(table.uploads, "hyper", hyper_rows(hyper), torch.float64, param.device),
            table.groups(param.device),
            steps,
            steps if used is None else device_flags(used),
            table.num_segments,
            HAS_USED=used is not None,
            BLOCK=SEGMENTS_PER_PROGRAM,
            num_warps=COEFFICIENT_WARPS,
        )
        if num_tiles:
            _sgd_kernel[(min(num_tiles, MAX_PROGRAMS),)](
                param,
                grad,
                momentum_buffer if has_momentum else param,
                param if low_precision_param is None else low_precision_param,
                coefficients,
                tiles,
                num_tiles,
                HAS_MOMENTUM=has_momentum,
                HAS_LOW=low_precision_param is not None,
                COMPUTE=compute,
                BLOCK=BLOCK_NUMEL,
                EDGE=EDGE_NUMEL,
                ALIGN=aligned_numel(param, grad, low_precision_param),
                num_warps=NUM_WARPS,
            )
    mark_written(
        [t for t in (param, momentum_buffer if has_momentum else None, steps, low_precision_param) if t is not None]
    )

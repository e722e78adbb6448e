"""Adam and AdamW on a flat shard, hyper-parameters looked up per segment."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dear_kernels.addresses import aligned_numel, device_flags, device_guard, mark_written, send
from dear_kernels.checks import check_adam
from dear_kernels.hyper import AdamHyper
from dear_kernels.segments import StepTable
from dear_kernels.strided import rounded

__all__ = ["adam_step_"]

# Launch settings. Origin: not yet swept on a GPU; to be set by make gpu.
BLOCK_NUMEL = 1024  # elements per tile
EDGE_NUMEL = 512  # elements per step through a tile that is short or unaligned
NUM_WARPS = 4
MAX_PROGRAMS = 65536  # programs walk over the tiles beyond that
SEGMENTS_PER_PROGRAM = 128
# One warp: with more, a warp that holds a copy of an element could read a step count that another has already raised.
COEFFICIENT_WARPS = 1

# lr, ln beta1, ln beta2, then eight that go to the segments as they are: sign of the gradient, weight decay added to
# the gradient, factor of the parameter, 1 - beta1, beta2, 1 - beta2, eps, amsgrad
HYPER_COLUMNS = 11
COEFFICIENT_COLUMNS = 12  # is used, square root of the second bias correction, -step size, then those eight; one spare


@triton.jit(do_not_specialize=["num_segments"])
def _adam_coefficients_kernel(
    coefficient_ptr,  # fp64 [num_segments, 12], written
    hyper_ptr,  # fp64 [num_groups, 11]
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
    hyper = hyper_ptr + tl.load(group_ptr + segment, mask=mask, other=0).to(tl.int64) * 11
    used = mask
    if HAS_USED:
        used = mask & (tl.load(used_ptr + segment, mask=mask, other=0) != 0)
    steps = tl.load(steps_ptr + segment, mask=mask, other=0.0) + 1
    tl.store(steps_ptr + segment, steps, mask=used)
    count = steps.to(tl.float64)
    # beta ** step = exp(step * ln beta), in fp64 as on the host
    correction1 = 1.0 - tl.exp(count * tl.load(hyper + 1, mask=mask, other=0.0))
    correction2 = 1.0 - tl.exp(count * tl.load(hyper + 2, mask=mask, other=0.0))
    row = coefficient_ptr + segment * 12
    tl.store(row, tl.where(used, 1.0, 0.0).to(tl.float64), mask=mask)
    tl.store(row + 1, tl.sqrt(correction2), mask=mask)
    tl.store(row + 2, -tl.load(hyper, mask=mask, other=0.0) / correction1, mask=mask)
    for column in tl.static_range(8):
        tl.store(row + 3 + column, tl.load(hyper + 3 + column, mask=mask, other=0.0), mask=mask)


@triton.jit
def _adam_elements(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    max_ptr,
    low_ptr,
    row,
    at,
    mask,
    HAS_MAX: tl.constexpr,
    HAS_LOW: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    correction2_sqrt = tl.load(row + 1).to(COMPUTE)
    negative_step_size = tl.load(row + 2).to(COMPUTE)
    coupled_decay = tl.load(row + 4).to(COMPUTE)
    weight1 = tl.load(row + 6).to(COMPUTE)
    beta2 = tl.load(row + 7).to(COMPUTE)
    weight2 = tl.load(row + 8).to(COMPUTE)
    eps = tl.load(row + 9).to(COMPUTE)
    param = tl.load(param_ptr + at, mask=mask).to(COMPUTE)
    grad = tl.load(grad_ptr + at, mask=mask).to(COMPUTE) * tl.load(row + 3).to(COMPUTE)
    exp_avg = tl.load(exp_avg_ptr + at, mask=mask).to(COMPUTE)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=mask).to(COMPUTE)
    param = param * tl.load(row + 5).to(COMPUTE)
    grad = tl.where(coupled_decay != 0, grad + coupled_decay * param, grad)
    # torch.lerp's two forms
    difference = grad - exp_avg
    exp_avg = tl.where(weight1 < 0.5, exp_avg + weight1 * difference, grad - (1 - weight1) * difference)
    exp_avg_sq = beta2 * exp_avg_sq + weight2 * grad * grad
    tl.store(exp_avg_ptr + at, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
    second = exp_avg_sq
    if HAS_MAX:
        before = tl.load(max_ptr + at, mask=mask).to(COMPUTE)
        amsgrad = tl.load(row + 10) != 0
        largest = tl.maximum(before, exp_avg_sq, propagate_nan=tl.PropagateNan.ALL)
        tl.store(max_ptr + at, tl.where(amsgrad, largest, before).to(max_ptr.dtype.element_ty), mask=mask)
        second = tl.where(amsgrad, largest, exp_avg_sq)
    if second.dtype == tl.float64:
        denominator = tl.sqrt(second) / correction2_sqrt + eps
        param = param + negative_step_size * exp_avg / denominator
    else:  # the plain operators of fp32 are approximate
        denominator = tl.div_rn(tl.sqrt_rn(second), correction2_sqrt) + eps
        param = param + tl.div_rn(negative_step_size * exp_avg, denominator)
    tl.store(param_ptr + at, param.to(param_ptr.dtype.element_ty), mask=mask)
    if HAS_LOW:
        stored = rounded(param, param_ptr.dtype.element_ty)
        tl.store(low_ptr + at, rounded(stored.to(COMPUTE), low_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tiles"])
def _adam_kernel(
    param_ptr,  # [shard_numel], written
    grad_ptr,  # [shard_numel]
    exp_avg_ptr,  # [shard_numel], written
    exp_avg_sq_ptr,  # [shard_numel], written
    max_ptr,  # [shard_numel], written if HAS_MAX
    low_ptr,  # [shard_numel], written if HAS_LOW
    coefficient_ptr,  # fp64 [num_segments, 12]
    tile_ptr,  # int64 [num_tiles, 3]: see segments.plan_step_tiles
    num_tiles,
    HAS_MAX: tl.constexpr,
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
        row = coefficient_ptr + tl.load(tile_ptr + tile * 3 + 2) * 12
        if tl.load(row) != 0:
            if (numel == BLOCK) & (offset % ALIGN == 0):
                at = (offset // ALIGN) * ALIGN + tl.arange(0, BLOCK)  # says to the compiler: aligned
                _adam_elements(
                    param_ptr,
                    grad_ptr,
                    exp_avg_ptr,
                    exp_avg_sq_ptr,
                    max_ptr,
                    low_ptr,
                    row,
                    at,
                    None,
                    HAS_MAX,
                    HAS_LOW,
                    COMPUTE,
                )
            else:
                done = numel * 0
                while done < numel:
                    inside = done + tl.arange(0, EDGE)
                    at = offset + inside
                    mask = inside < numel
                    _adam_elements(
                        param_ptr,
                        grad_ptr,
                        exp_avg_ptr,
                        exp_avg_sq_ptr,
                        max_ptr,
                        low_ptr,
                        row,
                        at,
                        mask,
                        HAS_MAX,
                        HAS_LOW,
                        COMPUTE,
                    )
                    done += EDGE
        tile += tl.num_programs(0)


def hyper_rows(hyper: Sequence[AdamHyper]) -> list[list[float]]:
    """The fp64 table of `_adam_coefficients_kernel`, one row per group."""
    return [_hyper_row(h) for h in hyper]


def _hyper_row(h: AdamHyper) -> list[float]:
    coupled = 0.0 if h.decoupled_weight_decay else h.weight_decay
    factor = 1 - h.lr * h.weight_decay if h.decoupled_weight_decay else 1.0
    sign = -1.0 if h.maximize else 1.0
    carried = [sign, coupled, factor, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, float(h.amsgrad)]
    return [h.lr, _log(h.beta1), _log(h.beta2), *carried]


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


@torch.no_grad()
def adam_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    table: StepTable,
    hyper: Sequence[AdamHyper],
    steps: Tensor,
    used: Tensor | None = None,
    *,
    low_precision_param: Tensor | None = None,
) -> None:
    """Launches the two kernels of an Adam step; the contract is that of `dear_kernels.adam_step_`.

    A tiny launch counts the steps and turns them into bias corrections in fp64, so the host never waits and the second,
    which streams the shard once (reads 4 and writes 3 values per element), has no fp64 work for fp32 parameters.

    Worked example, the first test, lr, beta1 and beta2 0.5, eps 0, the second of two segments unused::

        param [1 2 | 3]  grad [2 -4 | 6]  exp_avg [0 0 | 0]  exp_avg_sq [0 0 | 0]  steps [0 | 0]
              [0.5 2.5 | 3]                       [1 -2 | 0]            [2 8 | 0]        [1 | 0]
    """
    check_adam(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, table, hyper, steps, used, low_precision_param)
    tiles = table.tiles(BLOCK_NUMEL, param.device)
    num_tiles = tiles.shape[0]
    if table.num_segments == 0:
        return
    has_max = max_exp_avg_sq is not None and any(h.amsgrad for h in hyper)
    with device_guard(param):
        coefficients = torch.empty(table.num_segments, COEFFICIENT_COLUMNS, dtype=torch.float64, device=param.device)
        _adam_coefficients_kernel[(triton.cdiv(table.num_segments, SEGMENTS_PER_PROGRAM),)](
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
            _adam_kernel[(min(num_tiles, MAX_PROGRAMS),)](
                param,
                grad,
                exp_avg,
                exp_avg_sq,
                max_exp_avg_sq if has_max else param,
                param if low_precision_param is None else low_precision_param,
                coefficients,
                tiles,
                num_tiles,
                HAS_MAX=has_max,
                HAS_LOW=low_precision_param is not None,
                COMPUTE=tl.float64 if param.dtype == torch.float64 else tl.float32,
                BLOCK=BLOCK_NUMEL,
                EDGE=EDGE_NUMEL,
                ALIGN=aligned_numel(param, grad, low_precision_param),
                num_warps=NUM_WARPS,
            )
    written = (param, exp_avg, exp_avg_sq, max_exp_avg_sq if has_max else None, steps, low_precision_param)
    mark_written([t for t in written if t is not None])

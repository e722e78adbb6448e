"""Unpack: one flat buffer's segments into many tensors, cast and scaled, in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dear_kernels.addresses import SKIP, collapse, device_guard, mark_written, plan_launches
from dear_kernels.pack import TRITON_DTYPES
from dear_kernels.segments import SegmentTable, compute_dtype
from dear_kernels.strided import memory_position, rounded

__all__ = ["unpack_"]

# Launch settings. Origin: not yet swept on a GPU; to be set by make gpu.
BLOCK_NUMEL = 4096  # elements per tile; pack's tiles serve if equal
EDGE_NUMEL = 2048  # elements per step through a tile that is short or unaligned
NUM_WARPS = 8
MAX_PROGRAMS = 65536  # programs walk over the tiles beyond that


@triton.jit(do_not_specialize=["num_tiles", "layout_columns", "scale"])
def _unpack_kernel(
    flat_ptr,  # [flat_numel]
    address_ptr,  # int64 [num_tensors]: an address, or SKIP -1
    layout_ptr,  # int64 [num_tensors, layout_columns], read if STRIDED
    tile_ptr,  # int64 [num_tiles, 5]: see segments.plan_tiles
    num_tiles,
    layout_columns,
    scale: tl.float64,
    TARGET: tl.constexpr,  # dtype of the tensors
    COMPUTE: tl.constexpr,  # dtype of the multiplication
    SCALED: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
):
    factor = tl.full([], scale, COMPUTE)
    tile = tl.program_id(0).to(tl.int64)
    while tile < num_tiles:
        row = tile_ptr + tile * 5
        start = tl.load(row)
        offset = tl.load(row + 1)
        numel = tl.load(row + 2)
        tensor = tl.load(row + 3)
        address = tl.load(address_ptr + tensor)
        if address != -1:
            source = flat_ptr + offset
            target = address.to(tl.pointer_type(TARGET)) + start
            vector = (numel == BLOCK) & (((source.to(tl.int64) | target.to(tl.int64)) & 15) == 0)
            if STRIDED:
                vector = vector & (tl.load(layout_ptr + tensor * layout_columns) == 0)
            if vector:
                # Made anew for multiple_of: see pack.
                aligned_source = tl.multiple_of(flat_ptr + offset, 16)
                aligned_target = tl.multiple_of(address.to(tl.pointer_type(TARGET)) + start, 16)
                index = tl.arange(0, BLOCK)
                value = tl.load(aligned_source + index).to(COMPUTE)
                if SCALED:
                    value = value * factor
                tl.store(aligned_target + index, rounded(value, TARGET))
            else:
                done = numel * 0
                while done < numel:
                    at = done + tl.arange(0, EDGE)
                    position = at
                    if STRIDED:
                        position = memory_position(start + at, layout_ptr + tensor * layout_columns) - start
                    value = tl.load(source + at, mask=at < numel, other=0.0).to(COMPUTE)
                    if SCALED:
                        value = value * factor
                    tl.store(target + position, rounded(value, TARGET), mask=at < numel)
                    done += EDGE
        tile += tl.num_programs(0)


@torch.no_grad()
def unpack_(tensors: Sequence[Tensor | None], flat: Tensor, table: SegmentTable, *, scale: float = 1.0) -> None:
    """Launches `_unpack_kernel`; the contract is that of `dear_kernels.unpack_`. Tiles as in `pack_`.

    Worked example, the first test: flat [0.5, 1.0, 1.5, 1, 2.0, 9, 1, 0], scale 2, the segments of pack's example, the
    second tensor None::

        a  [[1, 2], [3, 4]]
    """
    table.check_length(tensors)
    table.check_flat(flat)
    tiles = table.tiles(BLOCK_NUMEL, flat.device)
    num_tiles = tiles.shape[0]
    written = [tensor for tensor in tensors if tensor is not None]
    if num_tiles == 0 or not written:
        return
    _check_targets(tensors)
    with device_guard(flat):
        for launch in plan_launches(tensors, table, flat, absent=SKIP):
            layouts = launch.layouts
            _unpack_kernel[(min(num_tiles, MAX_PROGRAMS),)](
                flat,
                launch.addresses,
                launch.addresses if layouts is None else layouts,
                tiles,
                num_tiles,
                0 if layouts is None else layouts.shape[1],
                scale,
                TARGET=TRITON_DTYPES[launch.dtype],
                COMPUTE=TRITON_DTYPES[compute_dtype(launch.dtype, flat.dtype)],
                SCALED=scale != 1.0,
                STRIDED=layouts is not None,
                BLOCK=BLOCK_NUMEL,
                EDGE=EDGE_NUMEL,
                num_warps=NUM_WARPS,
            )
    mark_written(written)


def _check_targets(tensors: Sequence[Tensor | None]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor is None or tensor.is_contiguous():
            continue
        if any(stride == 0 and size > 1 for size, stride in collapse(tensor.shape, tensor.stride())):
            raise ValueError(
                f"tensor {index} is expanded (a stride is 0); several elements share memory. Clone it first."
            )

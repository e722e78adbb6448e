"""Pack: many tensors into one flat buffer, cast, scaled and flagged, in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dear_kernels.addresses import MISSING, device_guard, mark_written, plan_launches
from dear_kernels.segments import SegmentTable, compute_dtype
from dear_kernels.strided import memory_position, rounded

__all__ = ["pack_"]

# Launch settings. Origin: not yet swept on a GPU; to be set by make gpu.
BLOCK_NUMEL = 4096  # elements per tile: 4 128-bit loads of fp32 per thread
EDGE_NUMEL = 2048  # elements per step through a tile that is short or unaligned
NUM_WARPS = 8
MAX_PROGRAMS = 65536  # programs walk over the tiles beyond that

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}


@triton.jit(do_not_specialize=["num_tiles", "layout_columns", "scale"])
def _pack_kernel(
    flat_ptr,  # [flat_numel]
    address_ptr,  # int64 [num_tensors]: an address, or MISSING 0, or SKIP -1
    layout_ptr,  # int64 [num_tensors, layout_columns], read if STRIDED
    tile_ptr,  # int64 [num_tiles, 5]: see segments.plan_tiles
    num_tiles,
    layout_columns,
    scale: tl.float64,
    SOURCE: tl.constexpr,  # dtype of the tensors
    COMPUTE: tl.constexpr,  # dtype of the multiplication
    SCALED: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
):
    TARGET: tl.constexpr = flat_ptr.dtype.element_ty
    factor = tl.full([], scale, COMPUTE)
    tile = tl.program_id(0).to(tl.int64)
    while tile < num_tiles:
        row = tile_ptr + tile * 5
        start = tl.load(row)
        offset = tl.load(row + 1)
        numel = tl.load(row + 2)
        tensor = tl.load(row + 3)
        flag = tl.load(row + 4)
        address = tl.load(address_ptr + tensor)
        if address != -1:
            present = address != 0
            if flag >= 0:
                tl.store(flat_ptr + flag, tl.where(present, 1.0, 0.0).to(TARGET))
            source = address.to(tl.pointer_type(SOURCE)) + start
            target = flat_ptr + offset
            vector = present & (numel == BLOCK) & (((source.to(tl.int64) | target.to(tl.int64)) & 15) == 0)
            if STRIDED:
                vector = vector & (tl.load(layout_ptr + tensor * layout_columns) == 0)
            if vector:
                # multiple_of marks the operation that made a value, for all its uses. So both pointers are made anew
                # here; marking `source` and `target` would promise alignment to the other branch too.
                aligned_source = tl.multiple_of(address.to(tl.pointer_type(SOURCE)) + start, 16)
                aligned_target = tl.multiple_of(flat_ptr + offset, 16)
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
                    value = tl.load(source + position, mask=(at < numel) & present, other=0.0).to(COMPUTE)
                    if SCALED:
                        value = value * factor
                    tl.store(target + at, rounded(value, TARGET), mask=at < numel)
                    done += EDGE
        tile += tl.num_programs(0)


@torch.no_grad()
def pack_(flat: Tensor, tensors: Sequence[Tensor | None], table: SegmentTable, *, scale: float = 1.0) -> None:
    """Launches `_pack_kernel`; the contract is that of `dear_kernels.pack_`.

    One program per tile of `BLOCK_NUMEL` elements of one segment. A full tile whose source and target both begin at a
    16-byte boundary moves in 128-bit accesses without masks; any other goes element by element, coalesced.

    Worked example, the first test: tensors a = [[1, 2], [3, 4]] (cut in two) and a missing b, scale 0.5, segments
    (tensor 0, start 0, offset 0, numel 3, flag 3), (0, 3, 4, 1, flag 6), (1, 0, 5, 0, flag 7); flat held nines::

        flat  0.5 1.0 1.5 | 1 | 2.0 | 9 | 1 | 0
    """
    table.check_length(tensors)
    table.check_flat(flat)
    tiles = table.tiles(BLOCK_NUMEL, flat.device)
    num_tiles = tiles.shape[0]
    if num_tiles == 0:
        return
    with device_guard(flat):
        for launch in plan_launches(tensors, table, flat, absent=MISSING):
            layouts = launch.layouts
            _pack_kernel[(min(num_tiles, MAX_PROGRAMS),)](
                flat,
                launch.addresses,
                launch.addresses if layouts is None else layouts,
                tiles,
                num_tiles,
                0 if layouts is None else layouts.shape[1],
                scale,
                SOURCE=TRITON_DTYPES[launch.dtype],
                COMPUTE=TRITON_DTYPES[compute_dtype(launch.dtype, flat.dtype)],
                SCALED=scale != 1.0,
                STRIDED=layouts is not None,
                BLOCK=BLOCK_NUMEL,
                EDGE=EDGE_NUMEL,
                num_warps=NUM_WARPS,
            )
    mark_written((flat,))

"""What a pack or unpack launch must be told anew on each call: where the tensors are, and how they are strided.

Host code only. What has changed since the last call is uploaded: one pinned tensor, copied asynchronously on the
current stream. PyTorch's caching host allocator is the ring of pinned blocks: it records an event behind each copy and
hands a block out again only when that event is true, so the host never waits and no copy is overwritten.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear_kernels.segments import SegmentTable

__all__ = [
    "EMPTY",
    "MISSING",
    "SKIP",
    "Launch",
    "aligned_numel",
    "collapse",
    "device_flags",
    "device_guard",
    "mark_written",
    "plan_launches",
    "send",
    "upload",
]

# Values of the address table that are not addresses.
MISSING = 0  # pack: write zeros, flag 0
SKIP = -1  # leave this tensor to another launch, or out
EMPTY = 16  # present without elements: never dereferenced, but its flag is 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: the tensors of one dtype.

    `addresses` is int64 [num_tensors] on the device. `layouts`, int64 [num_tensors, 1 + 2 * depth], is None if all
    tensors are contiguous; a row holds the number of dimensions (0: contiguous), then (size, stride) pairs, innermost
    first.
    """

    dtype: torch.dtype
    addresses: Tensor
    layouts: Tensor | None


def upload(
    values: Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[float]],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Returns `values` on `device`, for what the current stream is given after this. The host does not wait."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def send(
    memory: dict[str, tuple[object, Tensor]],
    name: str,
    values: Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[float]],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """`upload`, unless `memory` (a table's `uploads`) says that these very values have been sent under this name."""
    last = memory.get(name)
    if last is not None and last[0] == values and last[1].device == device:
        return last[1]
    sent = upload(values, dtype, device)
    memory[name] = (values, sent)
    return sent


def device_guard(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device; this makes it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def aligned_numel(*streams: Tensor | None) -> int:
    """Elements of the narrowest of these tensors in one 128-bit access."""
    return 16 // min(stream.dtype.itemsize for stream in streams if stream is not None)


def device_flags(used: Tensor) -> Tensor:
    """Used-flags as a kernel can read them: contiguous, bool as bytes."""
    used = used.contiguous()
    return used.view(torch.uint8) if used.dtype == torch.bool else used


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Bumps version counters, as PyTorch's own in-place operators do: a late backward must raise, not be wrong."""
    torch.autograd.graph.increment_version(tensors)


def plan_launches(tensors: Sequence[Tensor | None], table: SegmentTable, flat: Tensor, *, absent: int) -> list[Launch]:
    """One launch per dtype among `tensors`, in order of appearance. `absent` is MISSING or SKIP, for None entries.

    Raises:
        ValueError: a tensor on another device than `flat`, too short, or of an unsupported dtype.
    """
    dtypes: list[torch.dtype] = []
    addresses: list[int] = []
    strided: list[tuple[int, torch.Size, tuple[int, ...]]] = []
    for index, tensor in enumerate(tensors):
        if tensor is None:
            addresses.append(absent)
            continue
        if tensor.device != flat.device:
            raise ValueError(f"tensor {index} is on {tensor.device}; expected flat's device {flat.device}.")
        table.check_tensor(index, tensor)
        if tensor.dtype not in dtypes:
            dtypes.append(tensor.dtype)
        addresses.append(tensor.data_ptr() or EMPTY)
        if not tensor.is_contiguous():
            strided.append((index, tensor.shape, tensor.stride()))
    if not dtypes:  # nothing to read, but pack still has zeros to write
        dtypes.append(flat.dtype)
    layouts = _layouts(strided, table, flat.device) if strided else None
    filler = [SKIP] * (len(addresses) % 2)  # every row begins at a 16-byte boundary: one compilation serves all
    by_turn = [
        [
            address if (tensor.dtype == dtype if tensor is not None else turn == 0) else SKIP
            for address, tensor in zip(addresses, tensors, strict=True)
        ]
        + filler
        for turn, dtype in enumerate(dtypes)
    ]
    sent = send(table.uploads, "addresses", by_turn, torch.int64, flat.device)
    return [Launch(dtype, sent[turn], layouts) for turn, dtype in enumerate(dtypes)]


def _layouts(
    strided: list[tuple[int, torch.Size, tuple[int, ...]]], table: SegmentTable, device: torch.device
) -> Tensor:
    """The layout table, made once per combination of shapes and strides (a blocking copy: any stream may read it)."""

    def build() -> Tensor:
        dims = {index: collapse(shape, stride) for index, shape, stride in strided}
        depth = max(len(d) for d in dims.values())
        layouts = torch.zeros(table.num_tensors, 1 + 2 * depth, dtype=torch.int64)
        for index, pairs in dims.items():
            row = [len(pairs), *(number for pair in pairs for number in pair)]
            layouts[index, : len(row)] = torch.tensor(row)
        return layouts.to(device)

    return table.device_tables.get(("layouts", device, tuple(strided)), build)


def collapse(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """Dimensions as (size, stride), innermost first, without those of size 1, neighbours merged where memory allows.

    A channels-last (2, 3, 4, 5) needs three: `collapse((2, 3, 4, 5), (60, 1, 15, 3))` is `[(20, 3), (3, 1), (2, 60)]`.
    """
    dims: list[tuple[int, int]] = []
    for size, step in reversed(list(zip(shape, stride, strict=True))):
        if size == 1:
            continue
        if dims and step == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, step))
    return dims or [(1, 1)]

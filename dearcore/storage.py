"""Memory that tensors share: storage objects over a part of a buffer, who overlaps whom, writing where many stand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

__all__ = ["overlap", "own_storage", "overlaps_itself", "put_values", "span_bytes"]


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides as a tensor whose storage object is its own: exactly as long as `view`.

    Whatever compares, saves, moves or resizes storages (safetensors, `torch.save`, finders of tied weights,
    `share_memory_`, multiprocessing) then sees a tensor like any other, and not one buffer under all of them. `view` is
    dense (in any order of dimensions) and has no graph. The storage keeps the buffer alive, and cannot be resized.

    A DLPack capsule does it, on the CPU and on CUDA alike. Exporting holds a reference to the view; importing wraps its
    address in a storage that gives the reference back when it dies. The capsule is made and taken by the functions
    beneath `Tensor.__dlpack__`, which read and write metadata only: no memory is touched, no stream is asked to wait
    (both tensors are this process's own; whoever orders accesses to the buffer orders those to the parameter), and the
    current device need not be the tensor's. `Tensor.__dlpack__` would add just these two things.

    What it costs on CUDA, by reading torch: the caching allocator knows the start of a block only. So `record_stream`
    on the result does nothing (the buffer is freed when nobody refers to it, in the order of the stream that it was
    made on), and sending it to another process (CUDA IPC) is torch's error "invalid device pointer"; send a clone.
    `tests/gpu/test_gpu_storage.py` looks at all of this where there is a GPU.
    """
    shape, strides = view.shape, view.stride()
    if view.numel() == 0:  # has no address that could be wrapped
        return torch.empty_strided(shape, strides, dtype=view.dtype, device=view.device)
    own = from_dlpack(to_dlpack(view))
    # DLPack may give dimensions of one element another stride
    return own if own.stride() == strides else own.as_strided(shape, strides)


def span_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """[start, end) of the addresses that a strided tensor with elements stands in, gaps between them included."""
    start = tensor.data_ptr()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + extent * tensor.itemsize


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if writing to one strided tensor with elements may change the other.

    Exact for tensors of one dtype (columns of one matrix do not overlap), else by the span of their addresses.
    """
    (start, end), (other_start, other_end) = span_bytes(one), span_bytes(other)
    if one.device != other.device or end <= other_start or other_end <= start:
        return False
    itemsize, distance = one.itemsize, other_start - start
    if other.itemsize != itemsize or distance % itemsize:
        return True
    first = min(start, other_start)
    touched = torch.zeros((max(end, other_end) - first) // itemsize, dtype=torch.bool)
    touched.as_strided(one.shape, one.stride(), (start - first) // itemsize).fill_(True)
    return bool(touched.as_strided(other.shape, other.stride(), (other_start - first) // itemsize).any())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True unless the strides show that every element has memory of its own: expanded tensors, sliding windows."""
    return _strides_overlap(tensor.shape, tensor.stride()) and tensor.numel() > 1


def put_values(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """`tensor.copy_(values)`, also where elements of `tensor` share memory. `values`: dense, of the same shape.

    Returns False, with some of the values written, if elements that share memory were to differ.
    """
    if tensor.layout != torch.strided or not overlaps_itself(tensor):
        tensor.copy_(values)
        return True
    for dim, stride in enumerate(tensor.stride()):  # what is expanded is written once
        if stride == 0:
            tensor, first = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            if not _equal(first.expand_as(values), values):
                return False
            values = first
    if not overlaps_itself(tensor):
        tensor.copy_(values)
        return True
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((extent,), (1,))
    places = torch.arange(extent, device=tensor.device).as_strided(tensor.shape, tensor.stride())
    memory[places.reshape(-1)] = values.to(tensor.dtype).reshape(-1)
    return _equal(tensor, values)


def _strides_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    reach = 0  # of the faster dimensions, in elements
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())

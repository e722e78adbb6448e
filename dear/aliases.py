"""Tensors of the model that stand in the memory of a trained parameter, and go on doing so wherever it is moved.

    self.register_buffer("view", emb.weight.data)      decoder.weight.data = encoder.weight.data  # and frozen

Plain PyTorch updates them with the parameter. Here parameters are moved into flat buffers and out of them, and their
aliases follow: they stay the same Python objects, and have the parameter's storage. They also wait as it does.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dearcore.errors import ArgumentError
from dearcore.storage import overlap, span_bytes

from .claims import is_claimed
from .parameters import without_waiting
from .tracked import TrackedParameter

__all__ = ["Alias", "check_layouts", "find_aliases"]


@dataclass(slots=True)
class Alias:
    """`tensor` begins `offset_bytes` after the parameter's first element.

    is_whole: it has the parameter's shape, dtype and strides, so it can follow into any other strides.
    """

    name: str
    tensor: torch.Tensor
    offset_bytes: int
    is_whole: bool

    def stands_in(self, memory: torch.Tensor) -> bool:
        """True unless somebody has given the tensor other memory than that of `memory`, where the parameter stands."""
        with without_waiting():
            return self.tensor.data_ptr() - memory.data_ptr() == self.offset_bytes

    def follow(self, memory: torch.Tensor) -> None:
        """Into `memory`, where the parameter stands now; its storage begins with it."""
        with without_waiting():
            tensor = self.tensor
            if self.is_whole:
                tensor.data = memory
                return
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            offset = self.offset_bytes // tensor.itemsize
            tensor.data = view.set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())

    def leave(self) -> None:
        """Into memory of its own, with the values of now."""
        with without_waiting():
            self.tensor.data = self.tensor.data.clone()


def find_aliases(model: nn.Module, tracked: Sequence[TrackedParameter]) -> None:
    """Gives every tracked parameter the `aliases` that the model has of it.

    Looked at are the parameters that are not trained here, buffers, and tensors that modules hold as attributes (also
    in lists, tuples and dicts). Raises ArgumentError, which names both, for what cannot stay an alias.
    """
    with without_waiting():
        spans = sorted((*span_bytes(t.param.data), t.spec.index) for t in tracked if t.spec.numel)
        starts = [start for start, _, _ in spans]
        longest = max((end - start for start, end, _ in spans), default=0)
        trained = {id(t.param) for t in tracked}
        for name, tensor in _tensors_of(model):
            if id(tensor) in trained or not _has_memory(tensor):
                continue
            trained.add(id(tensor))  # looked at
            start, end = span_bytes(tensor)
            near = spans[bisect.bisect_left(starts, start - longest) : bisect.bisect_left(starts, end)]
            over = [tracked[i] for _, param_end, i in near if param_end > start and overlap(tracked[i].param, tensor)]
            if over:
                over[0].aliases.append(_alias(name, tensor, over))


def check_layouts(strides: Sequence[Sequence[tuple[tuple[int, ...], tuple[str, ...]]]], names: Sequence[str]) -> None:
    """Raises the same ArgumentError on every rank where an alias could not follow into the first rank's strides.

    Args:
        strides: by rank and parameter, the strides and the names of the aliases that need them.
        names: of the parameters.
    """
    for rank, theirs in enumerate(strides):
        for index, (needed, aliases) in enumerate(theirs):
            if aliases and needed != strides[0][index][0]:
                raise ArgumentError(
                    f"'{aliases[0]}' is a part of the memory of parameter '{names[index]}', whose strides are {needed} "
                    f"on rank {rank} and {strides[0][index][0]} on rank 0. Use one memory format on all ranks."
                )


def _alias(name: str, tensor: torch.Tensor, over: Sequence[TrackedParameter]) -> Alias:
    tracked = over[0]
    param = tracked.param
    if len(over) > 1:
        raise _refusal(name, tracked, f"and with '{over[1].spec.fqn}'")
    if is_claimed(tensor):
        raise _refusal(name, tracked, "and is trained by another DistributedOptimizer")
    offset_bytes = tensor.data_ptr() - param.data_ptr()
    is_whole = (tensor.shape, tensor.dtype) == (param.shape, param.dtype) and offset_bytes == 0
    if is_whole and tensor.stride() == param.stride():
        return Alias(name, tensor, 0, True)
    (start, end), (first, last) = span_bytes(tensor), span_bytes(param)
    if start < first or end > last or param.stride() != tracked.strides or offset_bytes % tensor.itemsize:
        raise _refusal(name, tracked, "but is no part of it that could be moved along")
    return Alias(name, tensor, offset_bytes, False)


def _refusal(name: str, tracked: TrackedParameter, why: str) -> ArgumentError:
    return ArgumentError(
        f"'{name}' shares memory with the trained parameter '{tracked.spec.fqn}', {why}: it would be cut off, since "
        "trained parameters are moved into buckets. Register a view of one parameter, the Parameter itself, or a clone."
    )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            members = value.values() if isinstance(value, dict) else value
            for member in members if isinstance(value, (dict, list, tuple)) else (value,):
                if isinstance(member, torch.Tensor):
                    yield f"{path}.{key}".lstrip("."), member


def _has_memory(tensor: torch.Tensor) -> bool:
    """Not so: tensors of no elements, sparse ones, and what only looks like a tensor (DTensor, fake, meta)."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and tensor.numel() > 0
        and tensor.data_ptr() != 0
    )

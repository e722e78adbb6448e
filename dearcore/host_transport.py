"""Collectives between the ranks of one host, through memory.

A rank reads what it needs from where its peers have it: nothing is sent, nothing travels around a ring. Reductions add
in rank order, so that they are deterministic at no cost. Only gradients' flat buffers and a staging area are shared;
parameters are not, because a forked process must keep its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .communicator import pieces_of
from .host_memory import HostMemory
from .rings import RingTransport
from .transport import BLOCK_NUMEL, add_parts

__all__ = ["HostTransport"]

STAGING_BYTES = 8 * 1024 * 1024  # that an all-gather shows its peers at a time


class HostTransport:
    """See `Transport`. Tensors that are not in shared memory are reduced by `rings`."""

    peers_read = True

    def __init__(self, memory: HostMemory, rings: RingTransport) -> None:
        self.rank, self.size = memory.rank, memory.size
        self._memory, self._rings = memory, rings
        # used in turn: when one is written again, all ranks have met at the other since, and left this one
        self._staging = [memory.new_tensor(0, torch.uint8) for _ in range(2)]
        self._averages: dict[torch.dtype, torch.Tensor] = {}

    def new_flat(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return self._rings.new_flat(numel, dtype, device)
        return self._memory.new_tensor(numel, dtype)

    def reduce_scatter(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, tag: int) -> None:
        if not self._memory.owns(flat):
            self._memory.meet(tag)
            self._rings.reduce_scatter(output, flat, divisor, tag)
            return
        shards = [theirs.view(self.size, -1)[self.rank] for theirs in self._memory.meet(tag, flat)]
        add_parts(shards, output, divisor)

    def all_gather(self, flat: torch.Tensor, tag: int) -> None:
        if flat.is_cuda:
            self._memory.meet(tag)
            self._rings.all_gather(flat, tag)
            return
        shards = flat.view(self.size, -1)
        for piece in pieces_of(shards.shape[1], STAGING_BYTES // flat.itemsize):
            staged = self._stage(shards[self.rank][piece])
            for rank, theirs in enumerate(self._memory.meet(tag, staged)):
                if rank != self.rank:
                    shards[rank][piece].copy_(theirs)

    def all_reduce(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, tag: int) -> None:
        if not self._memory.owns(flat):
            self._memory.meet(tag)
            self._rings.all_reduce(output, flat, divisor, tag)
            return
        shards = [theirs.view(self.size, -1) for theirs in self._memory.meet(tag, flat)]
        shard = shards[self.rank][self.rank]  # of this rank's buffer, which no peer reads before all meet again
        average = self._average_for(output.dtype, min(BLOCK_NUMEL, shard.numel()))
        for block in pieces_of(shard.numel(), BLOCK_NUMEL):
            total = average[: block.stop - block.start]
            add_parts([theirs[self.rank][block] for theirs in shards], total, divisor)
            shard[block].copy_(total)
        self._memory.meet(tag, flat)
        for rank, theirs in enumerate(shards):
            start = rank * shard.numel()
            part = output[start : start + shard.numel()]
            part.copy_(theirs[rank][: part.numel()])

    def combine(self, tensor: torch.Tensor, op: str, tag: int) -> None:
        if not self._memory.fits_message(tensor):
            self._memory.meet(tag)
            self._rings.combine(tensor, op, tag)
            return
        total, *others = self._memory.exchange(tag, tensor)
        for other in others:
            if op == "sum":
                total.add_(other)
            else:
                (torch.maximum if op == "max" else torch.minimum)(total, other, out=total)
        tensor.copy_(total)

    def begin_combine(self, tensor: torch.Tensor, op: str, tag: int) -> Callable[[], None]:
        return lambda: self.combine(tensor, op, tag)

    def broadcast(self, tensor: torch.Tensor, root: int, tag: int) -> None:
        self._memory.meet(tag)
        self._rings.broadcast(tensor, root, tag)

    def gather_objects(self, mine: Any, tag: int) -> list[Any]:
        self._memory.meet(tag)
        return self._rings.gather_objects(mine, tag)

    def close(self) -> None:
        self._memory.close()

    def _stage(self, shard: torch.Tensor) -> torch.Tensor:
        """A copy of `shard` that peers can read until they meet for the collective after the next."""
        self._staging.reverse()
        if self._staging[0].numel() < shard.nbytes:
            self._staging[0] = self._memory.new_tensor(shard.nbytes, torch.uint8)
        staged = self._staging[0][: shard.nbytes].view(shard.dtype)
        return staged.copy_(shard)

    def _average_for(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        buffer = self._averages.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._averages[dtype] = torch.empty(numel, dtype=dtype)
        return buffer

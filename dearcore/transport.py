"""What carries a collective between ranks, and the sum that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .communicator import pieces_of

__all__ = ["Transport", "add_parts"]

BLOCK_NUMEL = 128 * 1024  # of a sum: a block of fp32 stays in a core's second-level cache


class Transport(Protocol):
    """The collectives of `Communicator`, at once in the caller's thread.

    `tag` is equal for the same collective on all ranks and differs from those around it. RuntimeError for a rank that
    is gone, or late by the timeout.
    """

    peers_read: bool

    def new_flat(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def reduce_scatter(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, tag: int) -> None: ...

    def all_gather(self, flat: torch.Tensor, tag: int) -> None: ...

    def all_reduce(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, tag: int) -> None: ...

    def combine(self, tensor: torch.Tensor, op: str, tag: int) -> None: ...

    def begin_combine(self, tensor: torch.Tensor, op: str, tag: int) -> Callable[[], None]:
        """Sends what it can, in any thread; the function returned does the rest, in the thread of the others."""

    def broadcast(self, tensor: torch.Tensor, root: int, tag: int) -> None: ...

    def gather_objects(self, mine: Any, tag: int) -> list[Any]: ...

    def close(self) -> None:
        """Wakes whoever waits in a collective, here or at a peer."""


def add_parts(parts: Sequence[torch.Tensor], output: torch.Tensor, divisor: int) -> None:
    """`output` = the sum of two or more `parts` in their order, in the dtype of `output`, divided by `divisor`.

    Block by block, so that each addition finds the sum in the cache.
    """
    for block in pieces_of(output.numel(), BLOCK_NUMEL):
        total = output[block]
        if output.dtype == parts[0].dtype:
            torch.add(parts[0][block], parts[1][block], out=total)
        else:  # the wire was narrower
            total.copy_(parts[0][block]).add_(parts[1][block])
        for part in parts[2:]:
            total.add_(part[block])
        if divisor & (divisor - 1):
            total.div_(divisor)
        elif divisor != 1:  # a power of two: the product is the same, and several times cheaper
            total.mul_(1.0 / divisor)

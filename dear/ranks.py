"""Small exchanges between the ranks of an optimizer, for which the host waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dearcore.communicator import Communicator
from dearcore.storage import put_values
from dearcore.streams import Streams

__all__ = ["broadcast_values", "gather_objects", "wait_communication"]


def broadcast_values(tensors: Sequence[torch.Tensor], root: int, communicator: Communicator, streams: Streams) -> None:
    """Gives every rank the root's values, in place (else, where elements share memory and must not, in new memory)."""
    with torch.no_grad():
        copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        streams.wait_values()
        for copy in copies:
            communicator.start_broadcast(copy, root, streams.communication, f"broadcast of rank {root}'s values")
        wait_communication(streams)
        for tensor, copy in zip(tensors, copies, strict=True):
            # through .data: not a change that a graph of an earlier forward should see
            if not put_values(tensor.data, copy):
                tensor.data = copy


def gather_objects(mine: Any, communicator: Communicator, streams: Streams, label: str) -> list[Any]:
    """Every rank's picklable object, by rank."""
    gathered: list[Any] = []
    communicator.start_gather_objects(mine, gathered, streams.communication, label)
    wait_communication(streams)
    return gathered


def wait_communication(streams: Streams) -> None:
    """Blocks the host until all that was enqueued on the communication stream has ended."""
    passed = streams.new_event()
    streams.communication.record(passed)
    passed.wait_host()

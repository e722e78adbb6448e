"""The NCCL groups of one process, made when they are first asked for."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from .communicator import Communicator, LocalCommunicator
from .gloo import GlooCommunicator
from .heartbeat import Heartbeat, Peers
from .nccl import NcclCommunicator, load_library
from .nccl_group import NcclGroup
from .streams import CudaWorkerStream
from .trace import Trace

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["NcclWorld"]


class NcclWorld:
    """One group for each set of ranks, all on one stream: two NCCL communicators on one GPU may block each other.

    Sub-groups get a unique id of their own: NCCL's split is a call for all ranks, and only a group's members build an
    optimizer on it.
    """

    def __init__(self, device: torch.device, rank: int, timeout: timedelta, deterministic: bool) -> None:
        self.device = device
        self._rank, self._timeout, self._deterministic = rank, timeout, deterministic
        self._groups: dict[tuple[int, ...], NcclGroup] = {}
        self._stream = CudaWorkerStream("communication", Trace(), device)

    def communicator(
        self, ranks: tuple[int, ...], store: Store, heartbeat: Heartbeat | None, key: str
    ) -> NcclCommunicator:
        """Collective over `ranks` the first time. `store` is of this group alone, `key` names it to the heartbeat."""
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = self._connect(ranks, store, Peers(heartbeat, key, ranks, self._rank))
        return NcclCommunicator(group)

    def stream(self, ranks: tuple[int, ...]) -> CudaWorkerStream | None:
        """What all collectives over `ranks` are enqueued on; None if there were none yet."""
        group = self._groups.get(ranks)
        return group.stream if group is not None and isinstance(group.stream, CudaWorkerStream) else None

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._stream.close()

    def _connect(self, ranks: tuple[int, ...], store: Store, peers: Peers) -> NcclGroup:
        rank, size = ranks.index(self._rank), len(ranks)
        control: Communicator = LocalCommunicator(self._deterministic)
        if size > 1:
            control = GlooCommunicator(store, rank, size, self._timeout, self._deterministic, explain=peers.blame)
        stream = self._stream.under("communication", Trace())
        group = NcclGroup(
            load_library(),
            store,
            rank,
            size,
            self.device,
            stream,
            control,
            self._timeout,
            self._deterministic,
            explain=peers.blame,
        )
        peers.watch(group.activity)
        return group

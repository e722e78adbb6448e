"""Ranks as threads of one process, with an engine each, over `fake_nccl` and `fake_cuda`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore

from dear.gradients import InFlightGradient
from dearcore.gloo import GlooCommunicator
from dearcore.heartbeat import Peers
from dearcore.nccl import NcclCommunicator
from dearcore.nccl_group import NcclGroup
from dearcore.streams import CudaWorkerStream
from dearcore.trace import Trace
from tests.support import fake_cuda
from tests.support.fake_nccl import FakeNccl

LIMIT_S = 60
CPU = torch.device("cpu")


class FakeWorld:
    """As much of `dearcore.rendezvous.World` as an engine asks for; one for each rank."""

    moves_nothing = False

    def __init__(
        self, rank: int, size: int, library: FakeNccl, store: HashStore, deterministic: bool, timeout_s: float
    ) -> None:
        self.rank, self.size, self.device = rank, size, CPU
        self.timeout = limit = timedelta(seconds=timeout_s)
        control = GlooCommunicator(PrefixStore("control", store), rank, size, limit, deterministic)
        stream = CudaWorkerStream("communication", Trace(), CPU)
        args = (library, PrefixStore("nccl", store), rank, size, CPU, stream, control, limit, deterministic)
        self.group = NcclGroup(*args)

    def new_communicator(self, ranks: object, device: object = None) -> tuple[NcclCommunicator, Peers]:
        return NcclCommunicator(self.group), Peers(None, "", tuple(range(self.size)), self.rank)

    def shared_stream(self, ranks: object, device: object) -> CudaWorkerStream:
        assert isinstance(self.group.stream, CudaWorkerStream)
        return self.group.stream

    def on_shutdown(self, closeable: object) -> None:
        pass


@contextmanager
def gpu_ranks(
    monkeypatch: Any, size: int, deterministic: bool = False, timeout_s: float = 20.0
) -> Iterator[tuple[fake_cuda.Detector, FakeNccl, Callable[[Callable[[FakeWorld], Any]], list[Any]]]]:
    """Yields the detector, the library, and `run(work)`, which calls work(world) on a thread for each rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("dearcore.nccl_group.current_handle", lambda device: fake_cuda.current().cuda_stream)
    library, store = FakeNccl(), HashStore()
    worlds: dict[int, FakeWorld] = {}

    def run(work: Callable[[FakeWorld], Any]) -> list[Any]:
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                if rank not in worlds:
                    worlds[rank] = FakeWorld(rank, size, library, store, deterministic, timeout_s)
                results[rank] = work(worlds[rank])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise errors[0]
        return results

    with fake_cuda.fake_cuda(monkeypatch) as detector:
        library.access = detector.nccl
        _watch_accumulation(monkeypatch, detector)
        try:
            yield detector, library, run
        finally:
            run(lambda world: world.group.close())


def _watch_accumulation(monkeypatch: Any, detector: fake_cuda.Detector) -> None:
    """In-flight gradients are a tensor subclass, and what happens inside of its dispatch escapes the detector's."""
    accumulate = InFlightGradient.accumulate

    def watched(self: InFlightGradient, grad: torch.Tensor) -> None:
        accumulate(self, grad)
        assert self.local is not None
        detector.tensor("accumulate", self.local, True)

    monkeypatch.setattr(InFlightGradient, "accumulate", watched)

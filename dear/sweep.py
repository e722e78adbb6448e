"""A short sweep over message sizes on the real communicator: what latency and bandwidth its collectives have."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dearcore.bucket import accumulate_dtype
from dearcore.communicator import Communicator
from dearcore.profile import Link, fit_link
from dearcore.streams import Streams

__all__ = ["Links", "measure_links"]

KIB = 1024
SIZES_KIB = (16, 128, 1024, 8192)
BATCH_BYTES = 16 * 1024 * KIB  # collectives are started one after the other, as training does, and timed together:
MAX_BATCH = 16  # networks let bursts pass, and what they let pass for a moment says little of what they carry
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Links:
    reduce_scatter: Link
    all_gather: Link
    all_reduce: Link


def measure_links(
    communicator: Communicator, streams: Streams, dtype: torch.dtype, wire_dtype: torch.dtype, num_bytes: int
) -> Links:
    """Times each collective at several sizes and fits latency and bandwidth. Collective; blocks the host.

    Sizes are bytes of parameters of `dtype`; gradients cross the wire in `wire_dtype`. No message is larger than
    `num_bytes`, which is what the model has.
    """
    sent = communicator.bytes_sent
    largest = max(num_bytes // KIB, SIZES_KIB[1])
    sizes = [size for size in SIZES_KIB if size <= largest]
    probes = [_Probe(communicator, streams, dtype, wire_dtype, size * KIB) for size in sizes]
    starts = (_Probe.start_reduce_scatter, _Probe.start_all_gather, _Probe.start_all_reduce)
    times: list[list[list[float]]] = [[[] for _ in probes] for _ in starts]
    for start in starts:  # wakes connections that were idle
        probes[0].time_s(start)
    for _ in range(ROUNDS):
        for kind, start in enumerate(starts):
            for number, probe in enumerate(probes):
                times[kind][number].append(probe.time_s(start))
    everyone: list[list[list[list[float]]]] = []
    communicator.start_gather_objects(times, everyone, streams.communication, "times of the sweep over sizes")
    _wait(streams)
    communicator.bytes_sent = sent  # training has not sent it
    fits = []
    for kind in range(len(starts)):
        samples = []
        for number, size in enumerate(sizes):
            rounds = [statistics.mean(rank[kind][number][i] for rank in everyone) for i in range(ROUNDS)]
            samples.append((float(size * KIB), min(rounds)))  # what disturbs a network makes it slower, never faster
        fits.append(fit_link(samples))
    return Links(*fits)


class _Probe:
    """Messages of one size."""

    def __init__(
        self,
        communicator: Communicator,
        streams: Streams,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        num_bytes: int,
    ) -> None:
        self._communicator, self._streams = communicator, streams
        shard_numel = max(1, num_bytes // dtype.itemsize // communicator.size)
        numel = shard_numel * communicator.size
        self._num = max(1, min(MAX_BATCH, BATCH_BYTES // num_bytes))
        self._params = torch.zeros(numel, dtype=dtype, device=streams.device)
        self._grads = torch.zeros(numel, dtype=wire_dtype, device=streams.device)
        self._shard = torch.zeros(shard_numel, dtype=accumulate_dtype(dtype), device=streams.device)
        self._whole = torch.zeros(numel, dtype=accumulate_dtype(dtype), device=streams.device)

    def time_s(self, start: Callable[[_Probe], None]) -> float:
        """Of one collective, from when all ranks are here."""
        here = torch.zeros(1)
        stream = self._streams.communication
        self._communicator.start_combine(here, "max", stream, "start of a timing")
        _wait(self._streams)
        start_s = time.perf_counter()
        for _ in range(self._num):
            start(self)
        _wait(self._streams)
        return (time.perf_counter() - start_s) / self._num

    def start_reduce_scatter(self) -> None:
        stream = self._streams.communication
        self._communicator.start_reduce_scatter(self._shard, self._grads, 1, stream, "timed reduce_scatter")

    def start_all_gather(self) -> None:
        self._communicator.start_all_gather(self._params, self._streams.communication, "timed all_gather")

    def start_all_reduce(self) -> None:
        stream = self._streams.communication
        self._communicator.start_all_reduce(self._whole, self._grads, 1, stream, "timed all_reduce")


def _wait(streams: Streams) -> None:
    passed = streams.new_event()
    streams.communication.record(passed)
    passed.wait_host()

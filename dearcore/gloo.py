"""Collectives over gloo's point-to-point messages.

gloo's own reduce_scatter costs more than its all_reduce, so both halves are rings here: shard k travels through the
ranks k+1, k+2, ..., k and each adds its part (reduce-scatter), or keeps a copy (all-gather). Each rank sends
(P-1)/P of the buffer in each half. Messages are cut into pieces, so that adding one overlaps with receiving the next.

In deterministic mode the reduce-scatter is a direct exchange: everyone sends shard k to rank k, which adds them in
rank order. The same bytes travel; the result depends neither on the plan nor on the schedule.

Every message carries number, name and size of its collective in its tag, so that ranks that started different
collectives
wait for each other until the timeout instead of mixing sums. Messages of one collective between two ranks match in the
order in which they were sent.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .communicator import pieces_of
from .errors import CommunicatorError
from .streams import Stream

__all__ = ["GlooCommunicator"]

# 4 MiB: `python -m bench collectives --piece-mib 0.25 0.5 1 2 4`, 4 ranks, 32 MB, 2 cores, loopback.
PIECE_BYTES = 4 * 1024 * 1024
HINT = "Every rank calls the collective methods (step, state_dict, clip, ...) alike, on as many batches as the others."
WINDOW = 2  # receives posted ahead of the one that is added: few, so that they stay in the cache
BLOCK_NUMEL = 128 * 1024  # of the last addition: a block of fp32 stays in a core's second-level cache
_SEQUENCE_BITS, _NAME_BITS = 15, 16  # of the 31 bits of a tag


class GlooCommunicator:
    """One set of connections between `size` ranks; see `Communicator` for the contract of each method.

    Used by one stream at a time. CUDA tensors are staged through pinned host memory.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        deterministic: bool,
        piece_bytes: int = 0,
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self.rank, self.size, self.deterministic, self.bytes_sent = rank, size, deterministic, 0
        self._timeout = timeout
        self._piece_bytes = piece_bytes or PIECE_BYTES
        self._explain = explain  # who is to blame when a collective fails
        self.doing = self.failed = ""
        self._sequence = 0
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._staging: dict[torch.dtype, torch.Tensor] = {}
        self._averages: dict[torch.dtype, torch.Tensor] = {}
        try:
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        except (RuntimeError, ValueError) as error:
            raise CommunicatorError(
                f"rank {rank} of {size}: gloo could not connect: {error}. Check that every rank was started, and that "
                "GLOO_SOCKET_IFNAME, if set, names an interface of this host (see `ip link`)."
            ) from error

    def start_reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        exchange = self._exchange if self.deterministic else self._ring_reduce

        def work(tag: int) -> None:
            with _Staged(self, flat, copy_back=False) as host_flat:
                host_output = output if not output.is_cuda else torch.empty(output.shape, dtype=output.dtype)
                exchange(host_output, host_flat, divisor, tag)
                self._count(host_flat)
                if host_output is not output:
                    output.copy_(host_output)

        self._start(work, stream, label, flat)

    def start_all_gather(self, flat: torch.Tensor, stream: Stream, label: str) -> None:
        def work(tag: int) -> None:
            with _Staged(self, flat, copy_back=True) as host_flat:
                self._ring_gather(host_flat, tag)
                self._count(host_flat)

        self._start(work, stream, label, flat)

    def start_all_reduce(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        exchange = self._exchange if self.deterministic else self._ring_reduce

        def work(tag: int) -> None:
            with _Staged(self, flat, copy_back=False) as host_flat:
                shard = host_flat.view(self.size, -1)[self.rank]
                average = _grown(self._averages, output.dtype, shard.numel(), pinned=False)
                exchange(average, host_flat, divisor, tag)
                shard.copy_(average)
                self._ring_gather(host_flat, tag)
                self._count(host_flat)
                self._count(host_flat)
                output.copy_(host_flat[: output.numel()])

        self._start(work, stream, label, flat)

    def start_combine(self, tensor: torch.Tensor, op: str, stream: Stream, label: str) -> None:
        def work(tag: int) -> None:
            if op != "sum":
                self._disseminate(tensor, torch.maximum if op == "max" else torch.minimum, tag)
                return
            flat = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype)
            flat[self.rank].copy_(tensor)
            self._ring_gather(flat.view(-1), tag)
            total = flat[0]
            for other in flat[1:]:
                total.add_(other)
            tensor.copy_(total)

        self._start(work, stream, label, tensor)

    def start_broadcast(self, tensor: torch.Tensor, root: int, stream: Stream, label: str) -> None:
        def work(tag: int) -> None:
            with _Staged(self, tensor, copy_back=True) as host:
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = root, 0
                if host.numel():
                    self._group.broadcast([host.contiguous().view(-1).view(torch.uint8)], options).wait()

        assert tensor.is_contiguous()
        self._start(work, stream, label, tensor)

    def start_gather_objects(self, mine: Any, into: list[Any], stream: Stream, label: str) -> None:
        message = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)

        def work(tag: int) -> None:
            lengths = torch.zeros(self.size, dtype=torch.int64)
            lengths[self.rank] = message.numel()
            self._ring_gather(lengths, tag)
            longest = int(lengths.max())
            messages = torch.zeros(self.size, longest, dtype=torch.uint8)
            messages[self.rank, : message.numel()] = message
            self._ring_gather(messages.view(-1), tag)
            into.extend(pickle.loads(m[:n].numpy().tobytes()) for m, n in zip(messages, lengths.tolist(), strict=True))

        self._start(work, stream, label)

    def start_exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], stream: Stream, label: str
    ) -> None:
        peers = [(self.rank + distance) % self.size for distance in range(1, self.size)]

        def work(tag: int) -> None:
            received = {r: torch.empty(incoming[r].shape, dtype=torch.uint8) for r in peers if incoming[r].numel()}
            receives = [self._group.recv([host], r, tag) for r, host in received.items()]
            sends = [self._group.send([outgoing[r].cpu()], r, tag) for r in peers if outgoing[r].numel()]
            for message in [*receives, *sends]:
                message.wait()
            for r, host in received.items():
                incoming[r].copy_(host)

        self._start(work, stream, label)

    def close(self) -> None:
        self._group.abort()

    def _start(
        self, work: Callable[[int], None], stream: Stream, label: str, tensor: torch.Tensor | None = None
    ) -> None:
        what = label.partition(" in step ")[0]
        if tensor is not None:  # of different sizes nothing may match either
            what += f", {tensor.numel()} of {tensor.dtype}"
        name = zlib.crc32(what.encode()) % (1 << _NAME_BITS)

        def checked() -> None:
            self.doing = label
            tag = (self._sequence % (1 << _SEQUENCE_BITS)) << _NAME_BITS | name
            self._sequence += 1  # counted when it runs: a collective may start others of its own
            try:
                work(tag)
            except RuntimeError as error:
                self.failed = label
                reason = str(error).strip().splitlines()[0].partition(" This is typically")[0]
                text = f"rank {self.rank} of {self.size}: {label} failed. {self._explain()} {HINT} ({reason})"
                raise CommunicatorError(text) from error
            self.doing = ""

        stream.run(label, checked)

    def _count(self, flat: torch.Tensor) -> None:
        """One half of an all-reduce of `flat` has been sent."""
        self.bytes_sent += (self.size - 1) * (flat.numel() // self.size) * flat.itemsize

    def _ring_reduce(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, tag: int) -> None:
        """Step s: pass on what was summed of shard rank-s-1, receive and add to shard rank-s-2.

        Pieces are received into a few small buffers that are used in turn, so that they are still in the cache when
        they are added.
        """
        rank, size, group = self.rank, self.size, self._group
        left, right = (rank - 1) % size, (rank + 1) % size
        shards = flat.view(size, -1)
        pieces = self._pieces(shards)
        hops = [(step, piece) for step in range(size - 1) for piece in pieces]
        window = min(WINDOW, len(hops))
        scratch = self._scratch_for(flat.dtype, window * (pieces[0].stop - pieces[0].start)).view(window, -1)

        def post(hop: int) -> Any:
            piece = hops[hop][1]
            return group.recv([scratch[hop % window, : piece.stop - piece.start]], left, tag)

        receives = [post(hop) for hop in range(window)]
        sends = [group.send([shards[(rank - 1) % size][piece]], right, tag) for piece in pieces]
        for hop, (step, piece) in enumerate(hops):
            receives[hop].wait()
            mine = shards[(rank - step - 2) % size][piece]
            theirs = scratch[hop % window, : piece.stop - piece.start]
            if step == size - 2:
                _finish(mine, theirs, output[piece], divisor)
            else:
                mine.add_(theirs)
                sends.append(group.send([mine], right, tag))
            if hop + window < len(hops):
                receives.append(post(hop + window))
        for send in sends:
            send.wait()

    def _ring_gather(self, flat: torch.Tensor, tag: int) -> None:
        """Step s: pass on shard rank-s, receive shard rank-s-1, straight into its place."""
        rank, size, group = self.rank, self.size, self._group
        left, right = (rank - 1) % size, (rank + 1) % size
        shards = flat.view(size, -1)
        pieces = self._pieces(shards)
        receives = [
            [group.recv([shards[(rank - step - 1) % size][p]], left, tag) for p in pieces] for step in range(size - 1)
        ]
        sends = [group.send([shards[rank][p]], right, tag) for p in pieces]
        for step in range(size - 1):
            got = shards[(rank - step - 1) % size]
            for i, piece in enumerate(pieces):
                receives[step][i].wait()
                if step < size - 2:
                    sends.append(group.send([got[piece]], right, tag))
        for send in sends:
            send.wait()

    def _disseminate(self, tensor: torch.Tensor, combine: Callable[..., torch.Tensor], tag: int) -> None:
        """In round k each rank hears from the one 2^k before it: all have heard of all after log2(size) rounds."""
        heard, distance = torch.empty_like(tensor), 1
        while distance < self.size:
            receive = self._group.recv([heard], (self.rank - distance) % self.size, tag)
            send = self._group.send([tensor], (self.rank + distance) % self.size, tag)
            receive.wait()
            send.wait()
            combine(tensor, heard, out=tensor)
            distance *= 2

    def _exchange(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, tag: int) -> None:
        """Everyone's shard `rank` comes here and is added in rank order, in the dtype of `output`."""
        rank, size, group = self.rank, self.size, self._group
        shards = flat.view(size, -1)
        pieces = self._pieces(shards)
        received = self._scratch_for(flat.dtype, size * shards.shape[1]).view(size, -1)
        others = [(rank + distance) % size for distance in range(1, size)]
        receives = {peer: [group.recv([received[peer][p]], peer, tag) for p in pieces] for peer in others}
        sends = [group.send([shards[peer][p]], peer, tag) for p in pieces for peer in others]
        for peer in range(size):
            part = shards[rank] if peer == rank else received[peer]
            for i, piece in enumerate(pieces):
                if peer != rank:
                    receives[peer][i].wait()
                if peer == 0:
                    output[piece].copy_(part[piece])
                elif peer < size - 1:
                    output[piece].add_(part[piece])
                else:
                    _finish(output[piece], part[piece], output[piece], divisor)
        for send in sends:
            send.wait()

    def _pieces(self, shards: torch.Tensor) -> Any:
        """Slices of one shard."""
        return pieces_of(shards.shape[1], max(1, self._piece_bytes // shards.itemsize))

    def _scratch_for(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return _grown(self._scratch, dtype, numel, pinned=False)

    def _staging_for(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return _grown(self._staging, dtype, numel, pinned=True)


class _Staged:
    """The tensor itself on CPU; on CUDA a pinned copy of it, written back at the end if asked."""

    def __init__(self, communicator: GlooCommunicator, tensor: torch.Tensor, copy_back: bool) -> None:
        self._tensor, self._copy_back = tensor, copy_back
        self._host = tensor
        if tensor.is_cuda:
            self._host = communicator._staging_for(tensor.dtype, tensor.numel()).view(tensor.shape)

    def __enter__(self) -> torch.Tensor:
        if self._host is not self._tensor:
            self._host.copy_(self._tensor)
        return self._host

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._copy_back and self._host is not self._tensor:
            self._tensor.copy_(self._host)


def _finish(mine: torch.Tensor, theirs: torch.Tensor, output: torch.Tensor, divisor: int) -> None:
    """`output` = (`mine` + `theirs`) / `divisor`, block by block, so that the division finds the sum in the cache."""
    for block in pieces_of(output.numel(), BLOCK_NUMEL):
        total = output[block]
        if output.dtype == mine.dtype:
            torch.add(mine[block], theirs[block], out=total)
        else:  # the wire was narrower: the last addition happens in the accumulator's dtype
            total.copy_(mine[block]).add_(theirs[block])
        if divisor & (divisor - 1):
            total.div_(divisor)
        elif divisor != 1:  # a power of two: the product is the same, and several times cheaper
            total.mul_(1.0 / divisor)


def _grown(cache: dict[torch.dtype, torch.Tensor], dtype: torch.dtype, numel: int, pinned: bool) -> torch.Tensor:
    """A buffer that lives as long as the communicator and grows to the largest request."""
    buffer = cache.get(dtype)
    if buffer is None or buffer.numel() < numel:
        buffer = cache[dtype] = torch.empty(numel, dtype=dtype, pin_memory=pinned)
    return buffer[:numel]

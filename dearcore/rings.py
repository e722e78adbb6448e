"""Collectives over gloo's point-to-point messages.

gloo's own reduce_scatter costs more than its all_reduce, so both halves are rings here: shard k travels through the
ranks k+1, k+2, ..., k and each adds its part (reduce-scatter), or keeps a copy (all-gather). Each rank sends
(P-1)/P of the buffer in each half. Messages are cut into pieces, so that adding one overlaps with receiving the next.

In deterministic mode the reduce-scatter is a direct exchange: everyone sends shard k to rank k, which adds them in
rank order. The same bytes travel; the result depends neither on the plan nor on the schedule.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from .communicator import PlainFlats, pieces_of
from .transport import add_parts

__all__ = ["PIECE_BYTES", "RingTransport"]

# 4 MiB: `python -m bench collectives --sockets --piece-mib 0.25 0.5 1 2 4`, 4 ranks, 32 MB, 2 cores, loopback.
PIECE_BYTES = 4 * 1024 * 1024
RADIX = 4  # ranks that know as much in a round of a combination: fewer rounds for more messages
WINDOW = 2  # receives posted ahead of the one that is added: few, so that they stay in the cache


class RingTransport(PlainFlats):
    """See `Transport`. CUDA tensors are staged through pinned host memory.

    Args:
        group: a gloo process group, used by nobody else.
        broadcast: its broadcast of bytes from a root, in place; blocks.
    """

    def __init__(
        self,
        group: Any,
        broadcast: Callable[[torch.Tensor, int], None],
        rank: int,
        size: int,
        deterministic: bool,
        piece_bytes: int,
    ) -> None:
        self.rank, self.size = rank, size
        self._group, self._broadcast_bytes = group, broadcast
        self._deterministic, self._piece_bytes = deterministic, piece_bytes
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._staging: dict[torch.dtype, torch.Tensor] = {}
        self._averages: dict[torch.dtype, torch.Tensor] = {}

    def close(self) -> None:
        pass  # the group belongs to the communicator

    def reduce_scatter(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, tag: int) -> None:
        reduce = self._exchange if self._deterministic else self._ring_reduce
        with _Staged(self, flat, copy_back=False) as host_flat:
            host_output = output if not output.is_cuda else torch.empty(output.shape, dtype=output.dtype)
            reduce(host_output, host_flat, divisor, tag)
            if host_output is not output:
                output.copy_(host_output)

    def all_gather(self, flat: torch.Tensor, tag: int) -> None:
        with _Staged(self, flat, copy_back=True) as host_flat:
            self._ring_gather(host_flat, tag)

    def all_reduce(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, tag: int) -> None:
        reduce = self._exchange if self._deterministic else self._ring_reduce
        with _Staged(self, flat, copy_back=False) as host_flat:
            shard = host_flat.view(self.size, -1)[self.rank]
            average = _grown(self._averages, output.dtype, shard.numel(), pinned=False)
            reduce(average, host_flat, divisor, tag)
            shard.copy_(average)
            self._ring_gather(host_flat, tag)
            output.copy_(host_flat[: output.numel()])

    def combine(self, tensor: torch.Tensor, op: str, tag: int) -> None:
        self.begin_combine(tensor, op, tag)()

    def begin_combine(self, tensor: torch.Tensor, op: str, tag: int) -> Callable[[], None]:
        """Maxima and minima are spread in rounds, of which the first leaves now.

        In a round of distance d each rank hears from those d, 2d and 3d before it, so that it then knows of the 4d
        ranks that end with itself: all have heard of all after log4(size) rounds, some of them twice.
        """
        if op == "sum":
            return lambda: self._sum(tensor, tag)
        combine = torch.maximum if op == "max" else torch.minimum
        telling = self._tell(tensor, 1, tag)

        def finish() -> None:
            told, distance = telling, 1
            while told:
                for _, message in told:
                    message.wait()
                for heard, _ in told:
                    combine(tensor, heard, out=tensor)
                distance *= RADIX
                told = self._tell(tensor, distance, tag)

        return finish

    def _tell(self, tensor: torch.Tensor, distance: int, tag: int) -> list[tuple[torch.Tensor, Any]]:
        """Of one round: tensors to receive into, or `tensor` itself, and the message under way."""
        messages: list[tuple[torch.Tensor, Any]] = []
        for step in range(distance, min(RADIX * distance, self.size), distance):
            heard = torch.empty_like(tensor)
            messages.append((heard, self._group.recv([heard], (self.rank - step) % self.size, tag)))
            messages.append((tensor, self._group.send([tensor], (self.rank + step) % self.size, tag)))
        return messages

    def _sum(self, tensor: torch.Tensor, tag: int) -> None:
        flat = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype)
        flat[self.rank].copy_(tensor)
        self._ring_gather(flat.view(-1), tag)
        total = flat[0]
        for other in flat[1:]:
            total.add_(other)
        tensor.copy_(total)

    def gather_objects(self, mine: Any, tag: int) -> list[Any]:
        message = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = message.numel()
        self._ring_gather(lengths, tag)
        longest = int(lengths.max())
        messages = torch.zeros(self.size, longest, dtype=torch.uint8)
        messages[self.rank, : message.numel()] = message
        self._ring_gather(messages.view(-1), tag)
        return [pickle.loads(m[:n].numpy().tobytes()) for m, n in zip(messages, lengths.tolist(), strict=True)]

    def broadcast(self, tensor: torch.Tensor, root: int, tag: int) -> None:
        with _Staged(self, tensor, copy_back=True) as host:
            if host.numel():
                self._broadcast_bytes(host.contiguous().view(-1).view(torch.uint8), root)

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
                add_parts([mine, theirs], output[piece], divisor)
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

    def _exchange(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, tag: int) -> None:
        """Everyone's shard `rank` comes here and is added in rank order, in the dtype of `output`."""
        rank, size, group = self.rank, self.size, self._group
        shards = flat.view(size, -1)
        pieces = self._pieces(shards)
        received = self._scratch_for(flat.dtype, size * shards.shape[1]).view(size, -1)
        others = [(rank + distance) % size for distance in range(1, size)]
        receives = {peer: [group.recv([received[peer][p]], peer, tag) for p in pieces] for peer in others}
        sends = [group.send([shards[peer][p]], peer, tag) for p in pieces for peer in others]
        parts = [shards[rank] if peer == rank else received[peer] for peer in range(size)]
        for i, piece in enumerate(pieces):
            for receive in receives.values():
                receive[i].wait()
            add_parts([part[piece] for part in parts], output[piece], divisor)
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

    def __init__(self, transport: RingTransport, tensor: torch.Tensor, copy_back: bool) -> None:
        self._tensor, self._copy_back = tensor, copy_back
        self._host = tensor
        if tensor.is_cuda:
            self._host = transport._staging_for(tensor.dtype, tensor.numel()).view(tensor.shape)

    def __enter__(self) -> torch.Tensor:
        if self._host is not self._tensor:
            self._host.copy_(self._tensor)
        return self._host

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._copy_back and self._host is not self._tensor:
            self._tensor.copy_(self._host)


def _grown(cache: dict[torch.dtype, torch.Tensor], dtype: torch.dtype, numel: int, pinned: bool) -> torch.Tensor:
    """A buffer that lives as long as the communicator and grows to the largest request."""
    buffer = cache.get(dtype)
    if buffer is None or buffer.numel() < numel:
        buffer = cache[dtype] = torch.empty(numel, dtype=dtype, pin_memory=pinned)
    return buffer[:numel]

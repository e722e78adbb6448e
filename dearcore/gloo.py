"""The communicator of CPU tensors, and of CUDA tensors where there is no NCCL: gloo connects the ranks.

Every collective has a tag made of its number, name and size, so that ranks that started different collectives wait for
each other until the timeout, or fail at once, instead of mixing sums.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .errors import CommunicatorError
from .forks import is_inherited, keep_in_children, this_process
from .host_memory import Door
from .host_transport import HostTransport
from .rings import PIECE_BYTES, RingTransport
from .streams import Stream
from .transport import Transport

__all__ = ["GlooCommunicator"]

HINT = "Every rank calls the collective methods (step, state_dict, clip, ...) alike, on as many batches as the others."
_SEQUENCE_BITS, _NAME_BITS = 15, 15  # of the 31 bits of a tag; the highest is that of what has begun early
_EARLY = 1 << (_SEQUENCE_BITS + _NAME_BITS)


class GlooCommunicator:
    """One set of connections between `size` ranks; see `Communicator` for the contract of each method.

    Used by one stream at a time.

    Args:
        use_host_memory: ranks that are all on one host read each other's memory; else, or if False, all goes through
            the network.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        deterministic: bool,
        piece_bytes: int = PIECE_BYTES,
        explain: Callable[[], str] = lambda: "",
        use_host_memory: bool = True,
    ) -> None:
        self.rank, self.size, self.deterministic, self.bytes_sent = rank, size, deterministic, 0
        self._explain = explain  # who is to blame when a collective fails
        self.doing = self.failed = ""
        self._sequence = self._num_early = 0
        self._process = this_process()
        try:
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        except (RuntimeError, ValueError) as error:
            raise CommunicatorError(
                f"rank {rank} of {size}: gloo could not connect: {error}. Check that every rank was started, and that "
                "GLOO_SOCKET_IFNAME, if set, names an interface of this host (see `ip link`)."
            ) from error
        keep_in_children(self)
        rings = RingTransport(self._group, self._broadcast, rank, size, deterministic, piece_bytes)
        self._transport: Transport = rings
        if use_host_memory:
            self._transport = self._on_one_host(rings, timeout)
        self.peers_read = self._transport.peers_read

    def new_flat(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._transport.new_flat(numel, dtype, device)

    def start_reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        def work(tag: int) -> None:
            self._transport.reduce_scatter(output, flat, divisor, tag)
            self._count(flat)

        self._start(work, stream, label, flat)

    def start_all_gather(self, flat: torch.Tensor, stream: Stream, label: str) -> None:
        def work(tag: int) -> None:
            self._transport.all_gather(flat, tag)
            self._count(flat)

        self._start(work, stream, label, flat)

    def start_all_reduce(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        def work(tag: int) -> None:
            self._transport.all_reduce(output, flat, divisor, tag)
            self._count(flat)
            self._count(flat)

        self._start(work, stream, label, flat)

    def start_combine(self, tensor: torch.Tensor, op: str, stream: Stream, label: str) -> None:
        self._start(lambda tag: self._transport.combine(tensor, op, tag), stream, label, tensor)

    def begin_combine(self, tensor: torch.Tensor, op: str, label: str) -> Callable[[], None]:
        tag = _EARLY | _tag(self._num_early, label, tensor)
        self._num_early += 1
        try:
            finish = self._transport.begin_combine(tensor, op, tag)
        except RuntimeError as error:
            finish = functools.partial(_raise, error)
        return lambda: self._checked(finish, label)

    def start_broadcast(self, tensor: torch.Tensor, root: int, stream: Stream, label: str) -> None:
        assert tensor.is_contiguous()
        self._start(lambda tag: self._transport.broadcast(tensor, root, tag), stream, label, tensor)

    def start_gather_objects(self, mine: Any, into: list[Any], stream: Stream, label: str) -> None:
        self._start(lambda tag: into.extend(self._transport.gather_objects(mine, tag)), stream, label)

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
        if not is_inherited(self._process):
            self._transport.close()
            self._group.abort()

    def _on_one_host(self, rings: RingTransport, timeout: timedelta) -> Transport:
        door = Door()
        try:
            memory = door.meet(self.rank, rings.gather_objects(door.address, 0), timeout)
        except RuntimeError as error:
            reason = f"the ranks could not tell each other where they are. {self._explain()}"
            raise CommunicatorError(f"rank {self.rank} of {self.size}: {reason} ({error})") from error
        finally:
            door.close()
        return rings if memory is None else HostTransport(memory, rings)

    def _broadcast(self, payload: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._group.broadcast([payload], options).wait()

    def _start(
        self, work: Callable[[int], None], stream: Stream, label: str, tensor: torch.Tensor | None = None
    ) -> None:
        def numbered() -> None:
            tag = _tag(self._sequence, label, tensor)
            self._sequence += 1  # counted when it runs: a collective may start others of its own
            self._checked(lambda: work(tag), label)

        stream.run(label, numbered)

    def _checked(self, work: Callable[[], None], label: str) -> None:
        self.doing = label
        try:
            work()
        except RuntimeError as error:
            self.failed = label
            reason = str(error).strip().splitlines()[0].partition(" This is typically")[0]
            text = f"rank {self.rank} of {self.size}: {label} failed. {self._explain()} {HINT} ({reason})"
            raise CommunicatorError(text) from error
        self.doing = ""

    def _count(self, flat: torch.Tensor) -> None:
        """One half of an all-reduce of `flat` has been sent."""
        self.bytes_sent += (self.size - 1) * (flat.numel() // self.size) * flat.itemsize


def _tag(number: int, label: str, tensor: torch.Tensor | None) -> int:
    what = label.partition(" in step ")[0]
    if tensor is not None:  # of different sizes nothing may match either
        what += f", {tensor.numel()} of {tensor.dtype}"
    return (number % (1 << _SEQUENCE_BITS)) << _NAME_BITS | zlib.crc32(what.encode()) % (1 << _NAME_BITS)


def _raise(error: Exception) -> NoReturn:
    raise error

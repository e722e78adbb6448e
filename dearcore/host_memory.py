"""Memory that the ranks of one host read from each other, and the sockets over which they tell what is ready.

A *slab* is memory of this rank that its peers map: an anonymous file (memfd), so nothing is left behind however a rank
ends. Every pair of ranks is joined by a unix socket in the abstract namespace, which belongs to a network namespace:
ranks in different containers or emulated hosts never meet here and keep to the network.

Ranks *meet* at a collective: each tells every other its tag and where its tensor lies, handing over the descriptor of
a slab that the other has not seen. A rank says the tag of a collective when it has ended the one before; so whoever has
met its peers for the next collective knows that they no longer read what it gave to the last.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import secrets
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from .errors import CommunicatorError

__all__ = ["Address", "Door", "HostMemory"]

_HEADER = struct.Struct("<qqqqi")  # tag, slab, offset in bytes, bytes of the slab if it is new, bytes of the payload
_MAX_MESSAGE_BYTES = 96 * 1024  # below the kernel's default socket buffer
_NO_SLAB = -1


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank can be met: equal `host` means that its socket `name` can be reached. "" where it cannot."""

    host: str
    name: str


class Door:
    """A listening socket, made before the ranks tell each other their addresses."""

    def __init__(self) -> None:
        self.address = Address("", "")
        self._listener: socket.socket | None = None
        if sys.platform != "linux":
            return
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            network = os.stat("/proc/self/ns/net").st_ino
            name = f"dear-{secrets.token_hex(16)}"
            os.close(os.memfd_create("dear"))
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind("\0" + name)
            self._listener.listen(128)
        except OSError:  # a sandbox without one of them: the network serves
            self.close()
            return
        self.address = Address(f"{boot}/{network}/{os.getuid()}", name)

    def meet(self, rank: int, addresses: list[Address], timeout: timedelta) -> HostMemory | None:
        """Connects every pair of ranks, if all are on this host (collective; the same answer on all)."""
        try:
            if self._listener is None or any(not a.host or a.host != self.address.host for a in addresses):
                return None
            return HostMemory(rank, self._connect(self._listener, rank, addresses, timeout))
        except OSError as error:
            raise CommunicatorError(
                f"rank {rank} of {len(addresses)}: the ranks of this host could not connect to each other: {error}."
            ) from error
        finally:
            self.close()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @staticmethod
    def _connect(
        listener: socket.socket, rank: int, addresses: list[Address], timeout: timedelta
    ) -> dict[int, socket.socket]:
        peers = {}
        for peer in range(rank):
            peers[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peers[peer].settimeout(timeout.total_seconds())
            peers[peer].connect("\0" + addresses[peer].name)
            peers[peer].send(rank.to_bytes(4, "little"))
        listener.settimeout(timeout.total_seconds())
        while len(peers) < len(addresses) - 1:
            connection, _ = listener.accept()
            connection.settimeout(timeout.total_seconds())
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] == os.getuid():
                peers[int.from_bytes(connection.recv(4), "little")] = connection
            else:
                connection.close()
        return peers


class _Memory(mmap.mmap):
    """Tells when nobody refers to it, while its address is still its own."""

    before_unmap: Callable[[], None]

    def __del__(self) -> None:
        self.before_unmap()


@dataclass(slots=True)
class _Slab:
    number: int
    base: int  # address of its first byte
    nbytes: int
    descriptor: int
    known_to: set[int]


class HostMemory:
    """This rank's slabs and its view of its peers'. Used by one thread at a time, except for `new_tensor`.

    Args:
        peers: a connected packet socket for each other rank, its timeout set.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self.rank, self.size = rank, len(peers) + 1
        self._sockets = dict(sorted(peers.items()))
        self._slabs: dict[int, _Slab] = {}  # by the address of the first byte
        self._num_slabs = 0
        self._freed: dict[int, deque[int]] = {peer: deque() for peer in peers}  # slabs that a peer shall forget
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}  # by peer and slab, as bytes

    def new_tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros that peers can read once they have met here. Freed, here and there, when nobody refers to it."""
        nbytes = max(1, numel * dtype.itemsize)
        descriptor = os.memfd_create("dear", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, nbytes)  # out of memory is an error here, not a signal at the first write
        memory = _Memory(descriptor, nbytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._num_slabs += 1
        slab = _Slab(self._num_slabs, tensor.data_ptr(), nbytes, descriptor, set())
        self._slabs[slab.base] = slab
        memory.before_unmap = functools.partial(_forget, self._slabs, self._freed, slab)
        return tensor[: numel * dtype.itemsize].view(dtype)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._slabs

    def meet(self, tag: int, tensor: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Waits until all ranks are at `tag`; returns everyone's `tensor` (of a slab; same size everywhere), by rank.

        Raises RuntimeError for a rank that is gone, late by the timeout, or at another collective.
        """
        slab, offset = None, 0
        if tensor is not None:
            slab = self._slabs[tensor.untyped_storage().data_ptr()]
            offset = tensor.data_ptr() - slab.base
        for peer in self._sockets:
            self._send(peer, tag, slab, offset)
        found = []
        for rank in range(self.size):
            if rank != self.rank:
                number, offset, _ = self._receive(rank, tag)
                if tensor is not None:
                    whole = self._mapped[rank, number]
                    found.append(whole[offset : offset + tensor.nbytes].view(tensor.dtype))
            elif tensor is not None:
                found.append(tensor)
        return found

    def fits_message(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes <= _MAX_MESSAGE_BYTES

    def exchange(self, tag: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's small `tensor` (a copy on the CPU; same shape everywhere), by rank. Raises as `meet`."""
        mine = tensor.detach().to("cpu", copy=True).contiguous()
        payload = mine.view(-1).view(torch.uint8).numpy().tobytes()
        for peer in self._sockets:
            self._send(peer, tag, None, 0, payload)
        found = []
        for rank in range(self.size):
            found.append(mine)
            if rank != self.rank:
                found[rank] = torch.empty_like(mine)
                received = self._receive(rank, tag)[2]
                if received:
                    bytes_of = torch.frombuffer(bytearray(received), dtype=torch.uint8)
                    found[rank].view(-1).view(torch.uint8).copy_(bytes_of)
        return found

    def close(self) -> None:
        """Wakes whoever waits here or at a peer. Tensors stay valid."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # the peer has closed first
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._mapped.clear()

    def _send(self, peer: int, tag: int, slab: _Slab | None, offset: int, payload: bytes = b"") -> None:
        is_new = slab is not None and peer not in slab.known_to
        freed = self._freed[peer]
        forgotten: list[int] = []
        while freed and len(forgotten) < 100:
            forgotten.append(freed.popleft())
        header = _HEADER.pack(
            tag, slab.number if slab else _NO_SLAB, offset, slab.nbytes if slab and is_new else 0, len(payload)
        )
        message = header + payload + struct.pack(f"<{len(forgotten)}q", *forgotten)
        try:
            if slab is not None and is_new:
                socket.send_fds(self._sockets[peer], [message], [slab.descriptor])
                self._know(slab, peer)
            else:
                self._sockets[peer].send(message)
        except OSError as error:
            raise RuntimeError(f"rank {peer} cannot be told: {error}") from error

    def _know(self, slab: _Slab, peer: int) -> None:
        slab.known_to.add(peer)
        if len(slab.known_to) == len(self._sockets):
            os.close(slab.descriptor)
            slab.descriptor = -1

    def _receive(self, peer: int, tag: int) -> tuple[int, int, bytes]:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._sockets[peer], _MAX_MESSAGE_BYTES + 4096, 1)
        except OSError as error:
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            raise RuntimeError(f"waiting for rank {peer}: {reason}") from error
        if not message:
            raise RuntimeError(f"rank {peer} has closed its connection")
        their_tag, number, offset, new_nbytes, payload_bytes = _HEADER.unpack_from(message)
        if new_nbytes:
            mapped = mmap.mmap(descriptors[0], new_nbytes)
            os.close(descriptors[0])
            self._mapped[peer, number] = torch.frombuffer(mapped, dtype=torch.uint8)
        end = _HEADER.size + payload_bytes
        for (forgotten,) in struct.iter_unpack("<q", message[end:]):
            self._mapped.pop((peer, forgotten), None)
        if their_tag != tag:
            raise RuntimeError(f"rank {peer} has started another collective")
        return number, offset, message[_HEADER.size : end]


def _forget(slabs: dict[int, _Slab], freed: dict[int, deque[int]], slab: _Slab) -> None:
    """A slab has no tensor any more: peers hear of it with the next message."""
    del slabs[slab.base]
    for peer in slab.known_to:
        freed[peer].append(slab.number)
    if slab.descriptor >= 0:
        os.close(slab.descriptor)

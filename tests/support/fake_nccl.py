"""NCCL without GPUs: `cupy.cuda.nccl`'s interface, whose ranks are threads and whose device memory is the host's.

Every call is recorded with its arguments, and carried out when all ranks have made it. Pointers, counts and dtypes are
taken at their word, as NCCL does, so what is wrong with them shows in the data; where memory was registered with
`allow`, an access outside of it is an error instead of a crash. Signatures are CuPy's (`test_nccl.py` compares).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

WAIT_S = 20.0


class NcclError(RuntimeError):
    pass


@dataclass(frozen=True)
class Call:
    """One call on one rank. `group` counts the group calls around it."""

    rank: int
    name: str
    args: dict[str, int]
    group: int


@dataclass
class Room:
    """Where the ranks of one communicator meet."""

    size: int
    condition: threading.Condition = field(default_factory=threading.Condition)
    posted: dict[int, list[Any]] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    members: int = 0
    broken: str = ""
    mail: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict)


class FakeNccl:
    """One "library": constants, module functions, and the class `NcclCommunicator`."""

    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = 0, 1, 2, 3, 4, 5
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 6, 7, 8, 9
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = 0, 1, 2, 3, 4
    NcclError = NcclError
    DTYPES: ClassVar[dict[int, torch.dtype]] = {
        0: torch.int8,
        1: torch.uint8,
        2: torch.int32,
        4: torch.int64,
        6: torch.float16,
        7: torch.float32,
        8: torch.float64,
        9: torch.bfloat16,
    }

    def __init__(self, version: int = 23007) -> None:
        self.version = version
        self.calls: list[Call] = []
        self.rooms: dict[bytes, Room] = {}
        self.allowed: list[tuple[int, int]] = []
        self.stuck: set[str] = set()  # names of calls that never end, until aborted
        self.access: Callable[[int, int, int, bool], None] = lambda pointer, num_bytes, stream, writes: None
        self._local = threading.local()
        library = self

        class NcclCommunicator(_Communicator):
            def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
                super().__init__(library, ndev, commId, rank)

        self.NcclCommunicator = NcclCommunicator

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        unique_id = len(self.rooms).to_bytes(128, "little")
        self.rooms[unique_id] = Room(0)
        return unique_id

    def groupStart(self) -> None:
        self._local.depth = self.depth + 1
        self._local.queued = getattr(self._local, "queued", [])

    def groupEnd(self) -> None:
        self._local.depth = self.depth - 1
        if self.depth == 0:
            queued, self._local.queued = self._local.queued, []
            # messages leave before anyone waits for one: that is what a group is for
            for communicator, call in sorted(queued, key=lambda entry: entry[1].name != "send"):
                communicator._point_to_point(call)

    @property
    def depth(self) -> int:
        return getattr(self._local, "depth", 0)

    def allow(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            start = tensor.untyped_storage().data_ptr()
            self.allowed.append((start, start + tensor.untyped_storage().nbytes()))

    def memory(self, pointer: int, count: int, code: int) -> torch.Tensor:
        """[count] elements at `pointer`."""
        dtype = self.DTYPES[code]
        num_bytes = count * dtype.itemsize
        if self.allowed and not any(a <= pointer and pointer + num_bytes <= b for a, b in self.allowed):
            raise NcclError(f"invalid argument: {num_bytes} bytes at {pointer:#x} lie outside of every buffer")
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(pointer), dtype=dtype)


class _Communicator:
    def __init__(self, library: FakeNccl, size: int, unique_id: bytes, rank: int) -> None:
        self.library, self._rank, self._size = library, rank, size
        self.room = library.rooms[unique_id]
        self.room.size = size
        self.number = 0
        self.ended = ""  # "destroyed" or "aborted"
        self.async_error = ""

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._meet("allReduce", locals(), sends=count, receives=count)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        self._meet("reduceScatter", locals(), sends=recvcount * self._size, receives=recvcount)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._meet("allGather", locals(), sends=count, receives=count * self._size)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._meet("broadcast", locals(), sends=count, receives=count)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._queue("send", locals())

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._queue("recv", locals())

    def check_async_error(self) -> None:
        if self.async_error:
            raise NcclError(self.async_error)

    def abort(self) -> None:
        self.ended = "aborted"
        with self.room.condition:
            self.room.broken = "aborted"
            self.room.condition.notify_all()

    def destroy(self) -> None:
        self.ended = "destroyed"

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _record(self, name: str, arguments: dict[str, Any]) -> Call:
        args = {key: value for key, value in arguments.items() if key != "self"}
        call = Call(self._rank, name, args, self.library.depth)
        self.library.calls.append(call)
        return call

    def _queue(self, name: str, arguments: dict[str, Any]) -> None:
        call = self._record(name, arguments)
        if call.group == 0:
            raise NcclError("send and recv outside of a group block each other")
        self.library._local.queued.append((self, call))

    def _meet(self, name: str, arguments: dict[str, Any], sends: int, receives: int) -> None:
        """Leaves its arguments, waits for the other ranks', and lets the last one move the data."""
        call = self._record(name, arguments)
        args = call.args
        source = args.get("sendbuf", args.get("sendbuff"))
        target = args.get("recvbuf", args.get("recvbuff"))
        width = FakeNccl.DTYPES[args["datatype"]].itemsize
        self.library.access(source, sends * width, args["stream"], False)
        self.library.access(target, receives * width, args["stream"], True)
        sent = self.library.memory(source, sends, args["datatype"])
        received = self.library.memory(target, receives, args["datatype"])
        what = (name, sends, args["datatype"], args.get("op"), args.get("root"))
        room, number = self.room, self.number
        self.number += 1
        with room.condition:
            entries = room.posted.setdefault(number, [])
            entries.append((self._rank, what, sent, received))
            if name in self.library.stuck:
                room.condition.wait_for(lambda: room.broken, WAIT_S)
                room.broken = room.broken or f"nobody has aborted {what}"
            elif len(entries) == room.size:
                if any(entry[1] != what for entry in entries):
                    room.broken = f"ranks differ: {sorted((entry[0], entry[1]) for entry in entries)}"
                else:
                    with _disable_current_modes():  # what NCCL does is no operator of this rank
                        self._move(name, [entry[2:] for entry in sorted(entries, key=lambda e: e[0])], args)
                room.finished[number] = 1
                del room.posted[number]
                room.condition.notify_all()
            elif not room.condition.wait_for(lambda: number in room.finished or room.broken, WAIT_S):
                room.broken = f"rank {self._rank} waits alone in {what}"
            if room.broken:
                raise NcclError(room.broken)

    def _move(self, name: str, buffers: list[tuple[torch.Tensor, torch.Tensor]], args: dict[str, int]) -> None:
        sent = [source.clone() for source, _ in buffers]
        if name == "broadcast":
            results = [sent[args["root"]]] * len(sent)
        elif name == "allGather":
            results = [torch.cat(sent)] * len(sent)
        else:
            averages = args["op"] == FakeNccl.NCCL_AVG
            total = sum(s / len(sent) if averages else s for s in sent)  # NCCL scales first
            assert isinstance(total, torch.Tensor)
            shards = total.view(len(sent), -1) if name == "reduceScatter" else [total] * len(sent)
            results = list(shards)
        for (_, target), result in zip(buffers, results, strict=True):
            target.copy_(result)

    def _point_to_point(self, call: Call) -> None:
        args, room = call.args, self.room
        is_send = call.name == "send"
        pointer = args["sendbuf" if is_send else "recvbuf"]
        buffer = self.library.memory(pointer, args["count"], args["datatype"])
        num_bytes = buffer.numel() * buffer.itemsize
        self.library.access(pointer, num_bytes, args["stream"], not is_send)
        with room.condition:
            if is_send:
                room.mail.setdefault((self._rank, args["peer"]), []).append(_cloned(buffer))  # type: ignore[arg-type]
                room.condition.notify_all()
                return
            box = room.mail.setdefault((args["peer"], self._rank), [])
            if not room.condition.wait_for(lambda: box or room.broken, WAIT_S) or room.broken:
                raise NcclError(room.broken or f"rank {self._rank} waits alone for rank {args['peer']}")
            message: Any = box.pop(0)
        if message.dtype != buffer.dtype or message.numel() != buffer.numel():
            raise NcclError("send and recv differ in count or dtype")
        with _disable_current_modes():
            buffer.copy_(message)


def _cloned(buffer: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return buffer.clone()

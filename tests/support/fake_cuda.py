"""CUDA's streams and events without a GPU, and a detector of races between what runs on them.

Work runs at once, on the host, so it would be right even where an event is missing. Hence the detector: each stream has
a vector clock, events carry it from stream to stream, and every operator that runs notes which memory it reads and
writes. Two accesses to the same memory, one of them a write, that no chain of events orders are a race, whatever the
timing of this run was.

What this cannot see: races inside kernels, the caching allocator, and what CUDA itself does wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dearcore.streams import CudaWorkerStream

Clock = dict[int, int]


class FakeStream:
    _handles = itertools.count(1)

    def __init__(self, device: object = None, priority: int = 0, name: str = "") -> None:
        self.cuda_stream = next(self._handles)
        self.priority, self.name = priority, name
        self.clock: Clock = {}

    def wait_event(self, event: FakeEvent) -> None:
        merge(event.clock, self.clock)


class FakeEvent:
    def __init__(self, *_: object, **__: object) -> None:
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        self.clock = dict((stream or current()).clock)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """The host waits; what it enqueues afterwards is later, on every stream."""
        _host_wait(self.clock)


_streams = threading.local()
_all: list[FakeStream] = []
_lock = threading.Lock()


def current(device: object = None) -> FakeStream:
    """Of this thread; its compute stream where nothing else was set."""
    if not hasattr(_streams, "stack"):
        _streams.stack = [FakeStream(name="compute")]
        _streams.host = {}  # what this thread has waited for: all that it enqueues from then on is later
        _all.append(_streams.stack[0])
    stack: list[FakeStream] = _streams.stack
    return stack[-1]


def enter_stream(stream: FakeStream) -> None:
    current()
    _streams.stack.append(stream)


def leave_stream() -> None:
    _streams.stack.pop()


@contextlib.contextmanager
def stream_context(stream: FakeStream) -> Iterator[None]:
    enter_stream(stream)
    try:
        yield
    finally:
        leave_stream()


def _host_wait(clock: Clock) -> None:
    current()
    merge(clock, _streams.host)
    merge(clock, current().clock)


def merge(source: Clock, into: Clock) -> None:
    for handle, tick in source.items():
        into[handle] = max(into.get(handle, 0), tick)


def new_stream(device: object = None, priority: int = 0) -> FakeStream:
    stream = FakeStream(device, priority)
    _all.append(stream)
    return stream


@dataclass(frozen=True)
class Access:
    where: str  # operator, and the work that it belongs to
    stream: int
    tick: int
    clock: Clock  # of the stream, at this access
    start: int
    end: int
    writes: bool

    def before(self, other: Access) -> bool:
        return other.clock.get(self.stream, 0) >= self.tick


class Detector:
    """Collects accesses from all threads while it is `recording`. Tensors of host-only dtypes are left out."""

    DEVICE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self.work: list[tuple[str, FakeStream, Clock, int]] = []  # what ran through streams, in order
        self._alive: list[Any] = []  # memory that is never freed is never somebody else's
        self._lock = threading.Lock()
        self._local = threading.local()

    @contextlib.contextmanager
    def working(self, name: str) -> Iterator[None]:
        stream = current()
        with self._lock:
            tick = self._tick(stream)
            self.work.append((name, stream, dict(stream.clock), tick))
        before = getattr(self._local, "name", "")
        self._local.name = name
        try:
            with self.mode():
                yield
        finally:
            self._local.name = before

    def mode(self) -> TorchDispatchMode:
        return _Mode(self)

    def touch(self, what: str, stream: FakeStream, start: int, num_bytes: int, writes: bool) -> None:
        if num_bytes:
            where = f"{what} in {getattr(self._local, 'name', 'compute')}"
            with self._lock:
                tick = self._tick(stream)
                self.accesses.append(
                    Access(where, stream.cuda_stream, tick, dict(stream.clock), start, start + num_bytes, writes)
                )

    def tensor(self, what: str, tensor: torch.Tensor, writes: bool) -> None:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype in self.DEVICE_DTYPES and tensor.numel():
            extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            self._alive.append(tensor.untyped_storage())
            self.touch(what, current(), tensor.data_ptr(), extent * tensor.itemsize, writes)

    def nccl(self, pointer: int, num_bytes: int, handle: int, writes: bool) -> None:
        """For `FakeNccl.access`: on the stream that NCCL was told."""
        stream = next(s for s in _all if s.cuda_stream == handle)
        self.touch("NCCL", stream, pointer, num_bytes, writes)

    def races(self) -> list[str]:
        """Pairs of accesses that nothing orders, in words."""
        found: dict[str, None] = {}
        by_page: dict[int, list[Access]] = {}
        for access in self.accesses:
            for page in range(access.start >> 12, (access.end - 1 >> 12) + 1):
                by_page.setdefault(page, []).append(access)
        for page in by_page.values():
            for first, second in itertools.combinations(page, 2):
                if (
                    first.stream != second.stream
                    and (first.writes or second.writes)
                    and first.start < second.end
                    and second.start < first.end
                    and not first.before(second)
                    and not second.before(first)
                ):
                    found[f"{first.where} | {second.where}"] = None
        return list(found)

    def _tick(self, stream: FakeStream) -> int:
        stream.clock[stream.cuda_stream] = tick = stream.clock.get(stream.cuda_stream, 0) + 1
        return tick


class _Mode(TorchDispatchMode):
    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        name = func.overloadpacket._qualified_op_name
        for argument, value in itertools.chain(
            zip(func._schema.arguments, args, strict=False),
            ((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
        ):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    self._detector.tensor(name, tensor, writes)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._detector.tensor(name, tensor, True)
        return result


@contextlib.contextmanager
def fake_cuda(monkeypatch: Any) -> Iterator[Detector]:
    """Streams and events are fake; what runs on a CudaWorkerStream is watched."""
    detector = Detector()
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", stream_context)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    run = CudaWorkerStream.run

    def watched(self: CudaWorkerStream, name: str, work: Any) -> None:
        current()
        known = dict(_streams.host)

        def watched_work() -> None:
            merge(known, current().clock)
            with detector.working(name):
                work()

        run(self, name, watched_work)

    monkeypatch.setattr(CudaWorkerStream, "run", watched)
    yield detector

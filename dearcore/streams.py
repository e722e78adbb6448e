"""Streams and events, one interface for both devices.

On CUDA they are CUDA's. On CPU a stream is one worker thread with a queue, and an event is a flag that it sets. In
both worlds `run`, `record` and `wait` return at once and take effect in the order of the calls; recording an event
again gives it a new meaning for later waits only.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .cpu_streams import ALREADY_TRUE, CpuEvent, CpuStream, Event, Flag, InlineStream, Stream
from .errors import CommunicatorError
from .trace import Trace

__all__ = [
    "BlockingStream",
    "CpuEvent",
    "CpuStream",
    "CudaWorkerStream",
    "Event",
    "InlineStream",
    "Stamp",
    "Stream",
    "Streams",
    "current_handle",
    "on_device",
    "record_mark",
]


class _CudaEvent:
    """A CUDA event that is recorded by a worker thread: the flag says that it was recorded, CUDA that it is true.

    An error of its stream that comes later (a collective that a watchdog aborted) is raised by waits too.
    """

    __slots__ = ("_cuda", "_flag", "_worker")

    def __init__(self) -> None:
        self._flag = ALREADY_TRUE
        self._cuda: Any = None
        self._worker: CpuStream | None = None

    def wait_host(self) -> None:
        flag, recorded = self._flag, self._cuda
        flag.wait()
        if recorded is not None:
            recorded.synchronize()
        self._check()

    def wait_compute(self) -> None:
        """The host waits until the event is enqueued, never until it is true."""
        flag, cuda = self._flag, self._cuda
        flag.wait()
        if cuda is not None:
            torch.cuda.current_stream().wait_event(cuda)
        self._check()

    def wait_launched(self) -> None:
        self._flag.wait()
        self._check()

    def is_done(self) -> bool:
        flag, cuda = self._flag, self._cuda
        return flag.is_set() and (cuda is None or bool(cuda.query()))

    def fail(self, error: BaseException) -> None:
        if not self._flag.is_set():
            self._flag.set(error)

    def as_of_now(self) -> _CudaEvent:
        copy = _CudaEvent()
        copy._flag, copy._cuda, copy._worker = self._flag, self._cuda, self._worker
        return copy

    def _check(self) -> None:
        if self._worker is not None and self._worker.error is not None:
            raise self._worker.error


# The streams of an optimizer go before the backward's kernels, which fill the GPU: a collective needs a few of its
# multiprocessors at once, and a pack that waits for the end of a long kernel delays a whole network.
HIGH_PRIORITY = -1


class CudaWorkerStream:
    """A CUDA stream, and a worker thread that launches on it.

    The worker blocks where a communicator has to (gloo's messages, the agreement on late gradients), so that the
    caller never does. Streams may share a worker (`beside`), and the CUDA stream with it (`under`).
    """

    def __init__(
        self, name: str, trace: Trace, device: torch.device, beside: CudaWorkerStream | None = None, cuda: Any = None
    ) -> None:
        self.name = name
        self._worker: CpuStream = CpuStream(name, trace, None if beside is None else beside._worker)
        self._owns_worker = beside is None
        self._device = device
        self.cuda: Any = torch.cuda.Stream(device, priority=HIGH_PRIORITY) if cuda is None else cuda  # type: ignore[no-untyped-call]

    def under(self, name: str, trace: Trace) -> CudaWorkerStream:
        """The same stream, with spans of its own."""
        return CudaWorkerStream(name, trace, self._device, beside=self, cuda=self.cuda)

    def run(self, name: str, work: Callable[[], None]) -> None:
        def on_stream() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self.cuda):
                work()

        self._worker.run(name, on_stream)

    def record(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        flag = event._flag = Flag()
        cuda = event._cuda = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event._worker = self._worker
        self._worker.run("", lambda: cuda.record(self.cuda))
        self._worker.set_when_reached(flag)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        flag, cuda = event._flag, event._cuda
        if flag is not ALREADY_TRUE:
            self._worker.wait_flag(flag)
            self._worker.run("", lambda: self.cuda.wait_event(cuda))

    def wait_for_stream(self, stream: Any) -> None:
        """Waits for what a CUDA stream that is not ours has been given so far."""
        cuda = torch.cuda.Event()  # type: ignore[no-untyped-call]
        cuda.record(stream)
        self._worker.run("", lambda: self.cuda.wait_event(cuda))

    def wait_current(self) -> None:
        """Waits for what the caller's current stream has been given so far."""
        self.wait_for_stream(torch.cuda.current_stream(self._device))

    def fail(self, error: BaseException) -> None:
        self._worker.fail(error)

    def drain(self, timeout_s: float) -> bool:
        return self._worker.drain(timeout_s)

    def close(self) -> None:
        """Lets what was enqueued leave the host, with a deadline."""
        if self._owns_worker:
            self._worker.close()
        else:
            self._worker.drain(timeout_s=5.0)


class BlockingStream:
    """Runs work on a stream that others use too, in its order; the caller's compute stream waits for it."""

    name = "blocking"

    def __init__(self, stream: CudaWorkerStream) -> None:
        self._stream = stream

    def run(self, name: str, work: Callable[[], None]) -> None:
        passed = _CudaEvent()
        self._stream.wait_current()
        self._stream.run(name, work)
        self._stream.record(passed)
        passed.wait_compute()

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        event.wait_host()

    def close(self) -> None:
        pass


def current_handle(device: torch.device) -> int:
    """The raw handle of the current stream, for libraries that are told where to enqueue; 0 on CPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


class Stamp:
    """A moment of the compute stream: the host's clock on CPU, a CUDA event on CUDA."""

    __slots__ = ("_event", "_time_s")

    def __init__(self, time_s: float = 0.0, event: torch.cuda.Event | None = None) -> None:
        self._time_s, self._event = time_s, event

    def seconds_since(self, start: Stamp) -> float:
        """On CUDA the host waits until the device has passed both."""
        if self._event is None or start._event is None:
            return self._time_s - start._time_s
        self._event.synchronize()
        start._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1e3


def record_mark(device: torch.device) -> Callable[[], bool]:
    """Marks the present end of the current stream; the function returned says whether it has been reached."""
    if device.type != "cuda":
        return lambda: True
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    query: Callable[[], bool] = mark.query
    return query


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Streams:
    """The streams of one optimizer; nobody else makes any.

    communication  reduce-scatters under the backward, all-gathers under the next forward: one total order
    pack           gathers gradients while the reduce-scatter before it is still on the wire
    step           steps a shard while the buckets after it are still on the wire

    With `one_worker` all three share a thread: for models so small that handing over costs more than it hides. On CUDA
    all share the thread of `shared`, where the ranks have one communication stream for all optimizers.
    """

    def __init__(
        self, device: torch.device, trace: Trace, one_worker: bool = False, shared: CudaWorkerStream | None = None
    ) -> None:
        self.device = device
        self.trace = trace
        self._shared = shared
        self.on_cuda = device.type == "cuda" or shared is not None
        self.communication: CpuStream | CudaWorkerStream = (
            self._new("communication") if shared is None else shared.under("communication", trace)
        )
        beside = self.communication if one_worker or shared is not None else None
        self.pack = self._new("pack", beside)
        self.step = self._new("step", beside)
        self._producers: dict[int, Any] = {}  # streams that produced gradients in this iteration, by handle
        self._kept: deque[tuple[_CudaEvent, Sequence[Any]]] = deque()

    def new_event(self) -> Event:
        return _CudaEvent() if self.on_cuda else CpuEvent()

    def new_stamp(self) -> Stamp:
        """This moment of the compute stream; neither host nor device waits."""
        if self.device.type != "cuda":
            return Stamp(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Stamp(event=event)

    def note_gradient(self) -> None:
        """The caller's current stream has just been given the work that produces a gradient."""
        if self.on_cuda:
            stream = torch.cuda.current_stream(self.device)
            self._producers[stream.cuda_stream] = stream

    def wait_gradients(self, stream: Stream | None = None) -> None:
        """Makes `stream` (None: pack) wait for every stream that produced a gradient in this iteration, and for the
        caller's. On CPU gradients are there already."""
        waiting = self.pack if stream is None else stream
        if isinstance(waiting, CudaWorkerStream):
            self.note_gradient()
            for producer in self._producers.values():
                waiting.wait_for_stream(producer)

    def wait_values(self) -> None:
        """Makes the communication stream wait for the compute stream, which has just made what is to be sent."""
        if isinstance(self.communication, CudaWorkerStream):
            self.communication.wait_current()

    def wait_collectives(self) -> None:
        """Makes the caller's compute stream wait for every collective enqueued so far."""
        passed = self.new_event()
        self.communication.record(passed)
        passed.wait_compute()

    def record_all(self) -> list[Event]:
        """Events that say when everything enqueued so far is done."""
        events = []
        for stream in (self.pack, self.communication, self.step):
            event = self.new_event()
            stream.record(event)
            events.append(event)
        return events

    def wait_compute(self) -> None:
        """Makes the step stream wait for the compute stream, which may still read the weights. On CPU it has ended."""
        if isinstance(self.step, CudaWorkerStream):
            self.step.wait_current()

    def keep_until(self, event: Event, tensors: Sequence[Any]) -> None:
        """Keeps tensors of other streams alive until `event`, as it was recorded last, has come true.

        Their memory goes back to the stream that they were made on, which would hand it out again while ours still
        reads it. On CPU the work itself holds them.
        """
        if isinstance(event, _CudaEvent):
            self.drop_kept()
            self._kept.append((event.as_of_now(), tensors))

    def drop_kept(self) -> None:
        while self._kept and self._kept[0][0].is_done():
            self._kept.popleft()

    def iteration_ended(self) -> None:
        self._producers.clear()
        self.drop_kept()

    def hurry(self, patience_s: float) -> None:
        """What has not ended within `patience_s` is given up: whoever waits for it is told, now and later."""
        deadline_s = time.monotonic() + patience_s
        for stream in (self.pack, self.communication, self.step):
            if not stream.drain(max(0.0, deadline_s - time.monotonic())):
                stream.fail(
                    CommunicatorError("this process is ending after an error and waits for its peers no longer.")
                )

    def close(self) -> None:
        for stream in (self.pack, self.communication, self.step):
            stream.close()

    def _new(self, name: str, beside: CpuStream | CudaWorkerStream | None = None) -> CpuStream | CudaWorkerStream:
        if not self.on_cuda:
            return CpuStream(name, self.trace, beside if isinstance(beside, CpuStream) else None)
        worker = beside if isinstance(beside, CudaWorkerStream) else None
        return CudaWorkerStream(name, self.trace, self.device, worker)

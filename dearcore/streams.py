"""Streams and events, one interface for both devices.

On CUDA they are CUDA's. On CPU a stream is one worker thread with a queue, and an event is a flag that it sets. In
both worlds `run`, `record` and `wait` return at once and take effect in the order of the calls; recording an event
again gives it a new meaning for later waits only.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from .errors import ScheduleError
from .trace import Trace

__all__ = ["CpuEvent", "CpuStream", "Event", "InlineStream", "Stamp", "Stream", "Streams"]


class Event(Protocol):
    def wait_host(self) -> None:
        """Blocks the host until the event has come true; raises what its stream failed with."""

    def wait_compute(self) -> None:
        """Makes the caller's compute stream wait. On CPU the compute stream is the caller."""

    def is_done(self) -> bool: ...


class Stream(Protocol):
    def run(self, name: str, work: Callable[[], None]) -> None:
        """Enqueues `work`; `name` labels it in traces, as in `reduce_scatter[3]`."""

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None: ...

    def close(self) -> None: ...


class _Flag:
    """One recording of an event. Set once, with the error of its stream if that had failed by then."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        if not self._done.is_set():  # a watchdog may have been first
            self.error = error
            self._done.set()

    def is_set(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error


_ALREADY_TRUE = _Flag()
_ALREADY_TRUE.set()


class CpuEvent:
    """True until recorded, then true again when its stream has got there."""

    __slots__ = ("_flag",)

    def __init__(self) -> None:
        self._flag = _ALREADY_TRUE

    def wait_host(self) -> None:
        flag = self._flag
        if not flag.is_set() or flag.error is not None:
            flag.wait()

    wait_compute = wait_host

    def is_done(self) -> bool:
        return self._flag.is_set()

    def fail(self, error: BaseException) -> None:
        """Wakes every waiter with `error`: for watchdogs, when the stream itself is stuck."""
        flag = self._flag
        if not flag.is_set():
            flag.set(error)

    def _renew(self) -> _Flag:
        self._flag = _Flag()
        return self._flag

    def _current(self) -> _Flag:
        return self._flag


class _Worker:
    """A thread that runs closures in order, until the first that fails."""

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self.closed = False
        self.queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"dear-{name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self.closed = True
        self.queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (work := self.queue.get()) is not None:
            work()
            del work  # a closure must not keep tensors alive while the queue is empty


class CpuStream:
    """Closures in order on a worker thread. After a failure it runs nothing more and fails later events.

    Streams that share a worker (`beside`) are one queue under several names.
    """

    def __init__(self, name: str, trace: Trace, beside: CpuStream | None = None) -> None:
        self.name = name
        self._trace = trace
        self._worker: _Worker = _Worker(name) if beside is None else beside._worker

    def run(self, name: str, work: Callable[[], None]) -> None:
        self._worker.queue.put(lambda: self._guarded(name, work))

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        self.set_when_reached(event._renew())

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        self.wait_flag(event._current())

    def set_when_reached(self, flag: _Flag) -> None:
        worker = self._worker
        if worker.closed:
            flag.set(worker.error or ScheduleError(f"the {self.name} stream is closed."))
        worker.queue.put(lambda: flag.set(worker.error))

    def wait_flag(self, flag: _Flag) -> None:
        if not flag.is_set() or flag.error is not None:
            self._worker.queue.put(lambda: self._wait(flag))

    def close(self, timeout_s: float = 5.0) -> None:
        """Lets the queue drain, at most `timeout_s`; a stuck worker is a daemon and dies with the process."""
        self._worker.close(timeout_s)

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        if self._worker.error is None:
            try:
                with self._trace.span(self.name, name), torch.no_grad():
                    work()
            except BaseException as error:  # handed to whoever waits for it
                self._worker.error = error

    def _wait(self, flag: _Flag) -> None:
        if self._worker.error is None:
            try:
                flag.wait()
            except BaseException as error:
                self._worker.error = error


class InlineStream:
    """Runs everything at once, in the caller's thread: for collectives that the caller waits for anyway."""

    name = "inline"

    def run(self, name: str, work: Callable[[], None]) -> None:
        with torch.no_grad():
            work()

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        event.wait_host()

    def close(self) -> None:
        pass


class _CudaEvent:
    """A CUDA event that is recorded by a worker thread: the flag says that it was recorded, CUDA that it is true."""

    __slots__ = ("_cuda", "_flag")

    def __init__(self) -> None:
        self._flag = _ALREADY_TRUE
        self._cuda = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait_host(self) -> None:
        self._flag.wait()
        self._cuda.synchronize()

    def wait_compute(self) -> None:
        self._flag.wait()
        torch.cuda.current_stream().wait_event(self._cuda)

    def is_done(self) -> bool:
        return self._flag.is_set() and bool(self._cuda.query())  # type: ignore[no-untyped-call]

    def fail(self, error: BaseException) -> None:
        if not self._flag.is_set():
            self._flag.set(error)


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


class CudaWorkerStream:
    """A worker thread that launches on a CUDA stream of its own, for communicators that block the host (gloo).

    Not verified on a GPU yet; tests/gpu does it where there is one.
    """

    def __init__(self, name: str, trace: Trace, device: torch.device) -> None:
        self.name = name
        self._worker = CpuStream(name, trace)
        self._device = device
        self.cuda = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, name: str, work: Callable[[], None]) -> None:
        def on_stream() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self.cuda):
                work()

        self._worker.run(name, on_stream)

    def record(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        flag = event._flag = _Flag()
        cuda = event._cuda = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._worker.run("record", lambda: cuda.record(self.cuda))
        self._worker.set_when_reached(flag)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        flag, cuda = event._flag, event._cuda
        if flag is not _ALREADY_TRUE:
            self._worker.wait_flag(flag)
            self._worker.run("wait", lambda: self.cuda.wait_event(cuda))

    def wait_current(self) -> None:
        """Makes this stream wait for what the caller's current stream has been given so far."""
        cuda = torch.cuda.Event()  # type: ignore[no-untyped-call]
        cuda.record()
        self._worker.run("wait", lambda: self.cuda.wait_event(cuda))

    def close(self) -> None:
        self._worker.close()


class Streams:
    """The streams of one optimizer; nobody else makes any.

    communication  reduce-scatters under the backward, all-gathers under the next forward: one total order
    pack           gathers gradients while the reduce-scatter before it is still on the wire
    step           steps a shard while the buckets after it are still on the wire

    With `one_worker` all three share a thread: for models so small that handing over costs more than it hides.
    """

    def __init__(self, device: torch.device, trace: Trace, one_worker: bool = False) -> None:
        self.device = device
        self.trace = trace
        self.communication = self._new("communication")
        beside = self.communication if one_worker else None
        self.pack = self._new("pack", beside)
        self.step = self._new("step", beside)

    def new_event(self) -> Event:
        return _CudaEvent() if self.device.type == "cuda" else CpuEvent()

    def new_stamp(self) -> Stamp:
        """This moment of the compute stream; neither host nor device waits."""
        if self.device.type != "cuda":
            return Stamp(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Stamp(event=event)

    def wait_gradients(self) -> None:
        """Makes the pack stream wait for the stream that just produced gradients. On CPU they are there already."""
        if isinstance(self.pack, CudaWorkerStream):
            self.pack.wait_current()

    def wait_compute(self) -> None:
        """Makes the step stream wait for the compute stream, which may still read the weights. On CPU it has ended."""
        if isinstance(self.step, CudaWorkerStream):
            self.step.wait_current()

    def close(self) -> None:
        for stream in (self.pack, self.communication, self.step):
            stream.close()

    def _new(self, name: str, beside: CpuStream | CudaWorkerStream | None = None) -> CpuStream | CudaWorkerStream:
        if self.device.type == "cuda":
            return CudaWorkerStream(name, self.trace, self.device)
        return CpuStream(name, self.trace, beside if isinstance(beside, CpuStream) else None)

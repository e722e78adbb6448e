"""Streams and events of the CPU: a stream is a worker thread with a queue, an event is a flag that it sets."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from .errors import ScheduleError
from .forks import is_inherited, this_process
from .trace import Trace

__all__ = ["ALREADY_TRUE", "CpuEvent", "CpuStream", "Event", "Flag", "InlineStream", "Stream"]


STUCK_S = 0.5  # for the thread of a stream that has failed: there is nothing left to drain


class Event(Protocol):
    def wait_host(self) -> None:
        """Blocks the host until the event has come true; raises what its stream failed with."""

    def wait_compute(self) -> None:
        """Makes the caller's compute stream wait. On CPU the compute stream is the caller."""

    def wait_launched(self) -> None:
        """Blocks the host until everything before it has been launched: on CPU, until it has come true."""

    def is_done(self) -> bool: ...

    def as_of_now(self) -> Event:
        """This recording, whatever is recorded later."""


class Stream(Protocol):
    def run(self, name: str, work: Callable[[], None]) -> None:
        """Enqueues `work`; `name` labels it in traces, as in `reduce_scatter[3]`. "" leaves it out of them."""

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Flag:
    """One recording of an event. Set once, with the error of its stream if that had failed by then.

    A child of `os.fork` has not the thread that would set it: there, waiting for what was not set yet is an error.
    """

    __slots__ = ("_done", "_process", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._process = this_process()
        self.error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        if not self._done.is_set():  # a watchdog may have been first
            self.error = error
            self._done.set()

    def is_set(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        if not self._done.is_set() and is_inherited(self._process):
            raise ScheduleError(
                "this value was on its way to the process that this one was forked from, and never arrives here. Call "
                "opt.synchronize() before forking."
            )
        self._done.wait()
        if self.error is not None:
            raise self.error

    def wait_at_most(self, timeout_s: float) -> bool:
        return self._done.is_set() or (not is_inherited(self._process) and self._done.wait(timeout_s))


ALREADY_TRUE = Flag()
ALREADY_TRUE.set()


class CpuEvent:
    """True until recorded, then true again when its stream has got there."""

    __slots__ = ("_flag",)

    def __init__(self) -> None:
        self._flag = ALREADY_TRUE

    def wait_host(self) -> None:
        flag = self._flag
        if not flag.is_set() or flag.error is not None:
            flag.wait()

    wait_compute = wait_launched = wait_host

    def is_done(self) -> bool:
        return self._flag.is_set()

    def as_of_now(self) -> CpuEvent:
        recording = CpuEvent()
        recording._flag = self._flag
        return recording

    def fail(self, error: BaseException) -> None:
        """Wakes every waiter with `error`: for watchdogs, when the stream itself is stuck."""
        flag = self._flag
        if not flag.is_set():
            flag.set(error)

    def _renew(self) -> Flag:
        self._flag = Flag()
        return self._flag

    def _current(self) -> Flag:
        return self._flag


class _Worker:
    """A thread that runs closures in order, until the first that fails."""

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self.closed = False
        self.queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.unset: deque[Flag] = deque()  # recordings that are still in the queue, oldest first
        self._thread = threading.Thread(target=self._work, name=f"dear-{name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self.closed = True
        self.queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s if self.error is None else STUCK_S)

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

    def set_when_reached(self, flag: Flag) -> None:
        worker = self._worker
        if worker.closed:
            flag.set(worker.error or ScheduleError(f"the {self.name} stream is closed."))
        worker.unset.append(flag)
        worker.queue.put(self._set_oldest)

    def _set_oldest(self) -> None:
        self._worker.unset.popleft().set(self._worker.error)

    def wait_flag(self, flag: Flag) -> None:
        if not flag.is_set() or flag.error is not None:
            self._worker.queue.put(lambda: self._wait(flag))

    @property
    def error(self) -> BaseException | None:
        """What the stream failed with."""
        return self._worker.error

    def fail(self, error: BaseException) -> None:
        """Ends the stream from outside: it runs nothing more, and whoever waits for it is woken with `error`.

        For watchdogs: works while the worker is stuck in a call that does not return.
        """
        worker = self._worker
        worker.error = worker.error or error
        for flag in list(worker.unset):
            flag.set(worker.error)

    def close(self, timeout_s: float = 5.0) -> None:
        """Lets the queue drain, at most `timeout_s`; a stuck worker is a daemon and dies with the process."""
        self._worker.close(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Blocks the host until all that was enqueued so far has run, at most `timeout_s`. False if it has not."""
        flag = Flag()
        self.set_when_reached(flag)
        return flag.wait_at_most(timeout_s)

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        if self._worker.error is None:
            try:
                with self._trace.span(self.name, name) if name else contextlib.nullcontext(), torch.no_grad():
                    work()
            except BaseException as error:  # handed to whoever waits for it
                self._worker.error = error

    def _wait(self, flag: Flag) -> None:
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

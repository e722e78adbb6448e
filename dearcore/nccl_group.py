"""What all optimizers of a process share that communicate over the same ranks: NCCL's communicator and its stream.

NCCL wants every rank to start the same collectives in the same order, and two communicators on one GPU may block each
other: hence one of them, one stream, one order. Calls only enqueue. A watchdog notices what does not end, aborts it,
and turns it into a CommunicatorError.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .communicator import Communicator
from .cpu_streams import CpuStream
from .errors import CommunicatorError
from .forks import is_inherited, keep_in_children, this_process
from .heartbeat import Activity
from .streams import CudaWorkerStream, Stream, current_handle, on_device, record_mark
from .watchdog import Watchdog

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["NcclGroup"]

CLOSE_S = 5.0  # to let what is under way end, and again to see that it has on all ranks
# Digits of the order of collectives that ride along with an agreement: any dtype holds 0 to 127.
_NUM_DIGITS, _DIGIT = 4, 127


class NcclGroup:
    """One NCCL communicator of `size` ranks, on `device`, with the stream that all its collectives are enqueued on.

    Construction is collective and comes after an agreement of all ranks, since NCCL's own cannot be interrupted.

    Args:
        library: `cupy.cuda.nccl`.
        store: of this group alone.
        control: a communicator of the same ranks for what is small and on the host.
        explain: who is to blame when a collective fails.

    Raises: CommunicatorError naming rank and reason if the ranks cannot be connected within `timeout`.
    """

    def __init__(
        self,
        library: Any,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        stream: CudaWorkerStream | CpuStream,
        control: Communicator,
        timeout: timedelta,
        deterministic: bool,
        explain: Callable[[], str] = lambda: "",
        interval_s: float = 0.5,
    ) -> None:
        self.library, self.rank, self.size, self.device = library, rank, size, device
        self.stream, self.control, self.deterministic = stream, control, deterministic
        self._store, self._explain, self._timeout_s = store, explain, timeout.total_seconds()
        self.order = 0  # checksum of all collectives started so far
        self.failed = ""
        self._error: CommunicatorError | None = None
        self._closed = False
        self._process = this_process()
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._last_step = 0
        self.comm = self._connect(self._exchange_id())
        keep_in_children(self)
        self._watchdog = Watchdog(self._timeout_s, self._check_library, self._abort, interval_s)

    @property
    def doing(self) -> str:
        return self._watchdog.oldest

    def activity(self) -> Activity:
        """What the heartbeat tells the other ranks."""
        return Activity(self._last_step, self.doing, 0.0, self.failed)

    def start(self, stream: Stream, label: str, work: Callable[[int], None]) -> None:
        """Enqueues on `stream` what `work` gives NCCL, with the raw handle of the stream."""

        def launch() -> None:
            if self._error is not None:
                raise self._error
            self.order = zlib.crc32(label.encode(), self.order)
            step = re.search(r" in step (\d+)", label)
            if step:
                self._last_step = int(step[1])
            ticket = self._watchdog.start(label)
            try:
                work(current_handle(self.device))
            except Exception as error:  # CuPy's NcclError, mostly
                self._abort(label, str(error))
                raise self._error or error from error
            ticket.launched(record_mark(self.device))

        stream.run(label, launch)

    def check_order(self, digits: list[int], label: str) -> None:
        """`digits` are the maxima over all ranks of `order_digits`. Raises unless all ranks have the same order."""
        if any(a + b != _DIGIT for a, b in zip(digits[:_NUM_DIGITS], digits[_NUM_DIGITS:], strict=True)):
            raise CommunicatorError(
                f"rank {self.rank} of {self.size}: before {label} the ranks have started different collectives, or the "
                "same ones in another order, so sums are mixed. Where several optimizers are trained by one backward, "
                "call backward for each of them by itself, in one order on all ranks."
            )

    def order_digits(self) -> list[int]:
        """The order of collectives so far in small numbers, and their complements."""
        digits = [self.order >> (7 * i) & _DIGIT for i in range(_NUM_DIGITS)]
        return [*digits, *(_DIGIT - digit for digit in digits)]

    def scratch(self, what: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Grows to the largest request; used on the group's stream only."""
        found = self._scratch.get((what, dtype))
        if found is None or found.numel() < numel:
            found = self._scratch[what, dtype] = torch.empty(numel, dtype=dtype, device=self.device)
        return found[:numel]

    def close(self) -> None:
        """Lets what is under way end, here and on the other ranks, within a deadline; else aborts. Returns in time."""
        if self._closed or is_inherited(self._process):
            return
        self._closed = True
        drained = self._error is None and self.stream.drain(CLOSE_S) and self._watchdog.drain(CLOSE_S)
        together = drained and self._all_have_drained()
        self._watchdog.close()
        if self._error is None:  # else the watchdog has aborted it
            _in_time(self.comm.destroy if together else self.comm.abort, CLOSE_S)
        self.stream.close()
        self.control.close()

    def _all_have_drained(self) -> bool:
        """A rank that has its data may still owe some to others; NCCL's destroy would wait for them without end."""
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(RuntimeError):
            self._store.add("drained", 1)
            while self._store.add("drained", 0) < self.size:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.005)
            return True
        return False

    def _exchange_id(self) -> bytes:
        """The first rank's unique id, once every rank is here."""
        try:
            if self.rank == 0:
                self._store.set("id", self.library.get_unique_id())
            self._store.set(f"here/{self.rank}", "")
            limit = timedelta(seconds=self._timeout_s)
            for rank in range(self.size):
                self._store.wait([f"here/{rank}"], limit)
            return bytes(self._store.get("id"))
        except RuntimeError as error:
            raise CommunicatorError(
                f"rank {self.rank} of {self.size}: not all ranks came to build the NCCL communicator within "
                f"{self._timeout_s:g} s. {self._explain()} ({str(error).splitlines()[0]})"
            ) from error

    def _connect(self, unique_id: bytes) -> Any:
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def connect() -> None:
            try:
                with on_device(self.device):
                    outcome.put(self.library.NcclCommunicator(self.size, unique_id, self.rank))
            except BaseException as error:
                outcome.put(error)

        threading.Thread(target=connect, name="dear-nccl-init", daemon=True).start()
        try:
            found = outcome.get(timeout=self._timeout_s)
        except queue.Empty:
            found = TimeoutError(f"no answer within {self._timeout_s:g} s")
        if isinstance(found, BaseException):
            raise CommunicatorError(
                f"rank {self.rank} of {self.size}: NCCL could not connect on {self.device}: {found}. {self._explain()} "
                "Run with NCCL_DEBUG=INFO to see why; NCCL_SOCKET_IFNAME, if set, names an interface of this host. "
                "backend='gloo' does without NCCL."
            ) from found
        return found

    def _check_library(self) -> None:
        self.comm.check_async_error()

    def _abort(self, label: str, reason: str) -> None:
        """Ends NCCL's kernels, which would wait for ever, and wakes whoever waits for the stream."""
        if self._error is not None:
            return
        self.failed = label or "NCCL"
        self._error = CommunicatorError(
            f"rank {self.rank} of {self.size}: {self.failed} failed. {self._explain()} Every rank calls the collective "
            f"methods (step, state_dict, clip, ...) alike, on as many batches as the others. ({reason})"
        )
        _in_time(self.comm.abort, CLOSE_S)
        self.stream.fail(self._error)


def _in_time(call: Callable[[], None], timeout_s: float) -> None:
    """Calls on a thread of its own, so that a call that never returns cannot hold up the caller, nor the exit."""

    def guarded() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=guarded, name="dear-nccl-end", daemon=True)
    thread.start()
    thread.join(timeout_s)

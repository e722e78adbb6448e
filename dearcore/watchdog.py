"""Notices a collective that does not end. For communicators whose calls only enqueue: nobody else is waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Ticket", "Watchdog"]

INTERVAL_S = 0.5


class Ticket:
    """One collective, from before its launch until it has ended on the device."""

    __slots__ = ("_is_done", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        self._is_done: Callable[[], bool] = lambda: False

    def launched(self, is_done: Callable[[], bool]) -> None:
        self._is_done = is_done

    def is_done(self) -> bool:
        return self._is_done()


class Watchdog:
    """One thread. Collectives end in the order in which they were started.

    Args:
        timeout_s: the longest time without progress: none has ended and none has begun an empty list.
        check: raises for an error that the library has found by itself.
        on_failure: told (label, reason) once, on the watchdog's thread.
    """

    def __init__(
        self,
        timeout_s: float,
        check: Callable[[], None],
        on_failure: Callable[[str, str], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._timeout_s, self._check, self._on_failure, self._interval_s = timeout_s, check, on_failure, interval_s
        self._pending: deque[Ticket] = deque()
        self._lock = threading.Lock()
        self._progress_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dear-watchdog", daemon=True)
        self._thread.start()

    def start(self, label: str) -> Ticket:
        """Call it before the launch, which may block too."""
        ticket = Ticket(label)
        with self._lock:
            self._drop_done()
            if not self._pending:
                self._progress_s = time.monotonic()
            self._pending.append(ticket)
        return ticket

    @property
    def oldest(self) -> str:
        """Label of the collective under way, "" for none."""
        with self._lock:
            self._drop_done()
            return self._pending[0].label if self._pending else ""

    def drain(self, timeout_s: float) -> bool:
        """Blocks the host until every collective has ended, at most `timeout_s`. False if one has not."""
        deadline = time.monotonic() + timeout_s
        while self.oldest:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        self._stop.set()

    def _drop_done(self) -> None:
        while self._pending and self._pending[0].is_done():
            self._pending.popleft()
            self._progress_s = time.monotonic()

    def _work(self) -> None:
        while not self._stop.wait(self._interval_s):
            label = self.oldest
            reason = self._reason(label)
            if reason and not self._stop.is_set():
                self._on_failure(label, reason)
                return

    def _reason(self, label: str) -> str:
        try:
            self._check()
        except Exception as error:
            return str(error) or type(error).__name__
        stuck_s = time.monotonic() - self._progress_s
        return f"no progress for {stuck_s:.0f} s" if label and stuck_s >= self._timeout_s else ""

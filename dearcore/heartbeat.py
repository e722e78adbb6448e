"""What every rank is doing, told through the store once a second: to name a culprit, and the slowest rank.

A collective that fails says little about why: the neighbour in the ring is rarely the rank that is to blame. So each
rank publishes its step and the collective that it is in, and whoever fails reads what the others last said. The thread
that publishes depends on nothing else, so a rank whose heartbeat stops is stopped itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from .errors import CommunicatorError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["Activity", "Heartbeat", "Peers", "Status"]

INTERVAL_S = 1.0
KEPT_NOTES = 8  # answers that slower ranks may still read
PATIENCE_S = 2.5 * INTERVAL_S  # for an answer, and for the heartbeat of whoever gives none


@dataclass(frozen=True, slots=True)
class Activity:
    """What one rank says of one communicator."""

    step: int
    doing: str  # the collective it is in, "" for none
    waited_ms: float  # mean time that an iteration waits for parameters
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    rank: int
    activity: Activity | None  # None: it has said nothing yet
    age_s: float  # since this rank last saw it change

    def is_in_collective_of(self, step: int) -> bool:
        """In one of this step, or of a later one (its host may have gone ahead)."""
        return self.activity is not None and self.activity.step >= step and bool(self.activity.doing)


class Heartbeat:
    """One thread a process; `watch` adds a communicator's activity under a name that all its ranks use."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store.clone(), rank
        self._reader = store.clone()
        self.notes = store.clone()  # for the main thread
        self._watched: dict[str, Callable[[], Activity]] = {}
        self._beat = 0
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="dear-heartbeat", daemon=True)
        self._thread.start()

    def watch(self, name: str, activity: Callable[[], Activity]) -> None:
        self._watched[name] = activity

    def forget(self, name: str) -> None:
        self._watched.pop(name, None)

    def publish(self, name: str) -> None:
        """Tells the others now. Errors of the store are silent here: a reader will notice."""
        activity = self._watched.get(name)
        if activity is None:
            return
        with self._lock:
            self._beat += 1
            record = {"beat": self._beat, **asdict(activity())}
            try:
                self._store.set(f"{name}/{self._rank}", json.dumps(record))
            except RuntimeError:
                self._stop.set()

    def read(self, name: str, ranks: Sequence[int]) -> list[Status]:
        """Raises RuntimeError if the store is gone."""
        statuses = []
        for rank in ranks:
            key = f"{name}/{rank}"
            if not self._reader.check([key]):
                statuses.append(Status(rank, None, 0.0))
                continue
            record = json.loads(self._reader.get(key))
            beat, now = record.pop("beat"), time.monotonic()
            last = self._seen.get((name, rank))
            if last is None or last[0] != beat:
                last = self._seen[name, rank] = (beat, now)
            statuses.append(Status(rank, Activity(**record), now - last[1]))
        return statuses

    def close(self) -> None:
        self._stop.set()

    def _work(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            for name in list(self._watched):
                self.publish(name)


class Peers:
    """The ranks of one communicator, as their heartbeats show them. Without a store (one rank) all is silence."""

    def __init__(self, heartbeat: Heartbeat | None, name: str, ranks: Sequence[int], me: int) -> None:
        self._heartbeat, self._name, self._ranks, self._me = heartbeat, name, ranks, me
        self._posted: deque[str] = deque()

    def watch(self, activity: Callable[[], Activity]) -> None:
        """From now on the others hear what `activity` returns."""
        if self._heartbeat is not None:
            self._heartbeat.watch(self._name, activity)

    def forget(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.forget(self._name)

    def read(self) -> list[Status]:
        """What each rank said last; [] if nobody can be heard."""
        if self._heartbeat is None:
            return []
        try:
            return self._heartbeat.read(self._name, self._ranks)
        except RuntimeError:
            return []

    def post(self, question: str, value: bool) -> None:
        """Answers a question, for whoever asks. Errors of the store are silent: whoever asks will notice."""
        if self._heartbeat is not None:
            with contextlib.suppress(RuntimeError):
                self._heartbeat.notes.set(f"{self._name}/{question}/{self._me}", str(int(value)))
                self._posted.append(question)
                if len(self._posted) > KEPT_NOTES:
                    self._heartbeat.notes.delete_key(f"{self._name}/{self._posted.popleft()}/{self._me}")

    def collect(self, question: str, step: int, timeout: timedelta) -> list[bool]:
        """The ranks' answers. Blocks until each has answered, or shows that it will not: by a collective of `step`.

        Raises CommunicatorError at the timeout.
        """
        if self._heartbeat is None:
            return []
        notes, answers = self._heartbeat.notes, {rank: f"{self._name}/{question}/{rank}" for rank in self._ranks}
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            self._heartbeat.publish(self._name)
            while True:
                with contextlib.suppress(RuntimeError):
                    notes.wait(list(answers.values()), timedelta(seconds=min(timeout.total_seconds(), PATIENCE_S)))
                missing = {rank for rank, key in answers.items() if not notes.check([key])}
                if missing <= {status.rank for status in self.read() if status.is_in_collective_of(step)}:
                    return [rank not in missing and notes.get(key) == b"1" for rank, key in answers.items()]
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"no answer of ranks {sorted(missing)} within {timeout.total_seconds():g} s")
        except RuntimeError as error:
            raise CommunicatorError(
                f"rank {self._me}: zero_grad() without a step since the last one begins the iteration anew on all "
                f"ranks, but not all have come to it. {self.blame()}"
            ) from error

    def blame(self, wait_s: float = 2.5 * INTERVAL_S) -> str:
        """A sentence on who is to blame for a collective that failed here, from what is heard within `wait_s`.

        A rank that says nothing in all that time is stopped or gone; else the one furthest behind is named.
        """
        if self._heartbeat is None:
            return ""
        deadline = time.monotonic() + wait_s
        self._heartbeat.publish(self._name)
        statuses = first = self.read()
        while statuses and time.monotonic() < deadline:
            time.sleep(INTERVAL_S / 4)
            statuses = self.read()
        if not statuses:
            return "The store cannot be reached: the process that hosts it (rank 0, or the launcher's agent) is gone."
        others = [status for status in statuses if status.rank != self._me]
        silent = [s for s in others if s.activity is None or (s.age_s >= wait_s * 0.8 and not s.activity.failed)]
        if silent:
            return " ".join(_silence_of(status) for status in silent)
        mine = next((s.activity for s in first if s.rank == self._me), None)
        running = [s for s in others if s.activity is not None and not s.activity.failed]
        if mine is not None and running:
            return _laggard_of(running)
        return " ".join(f"Rank {s.rank} failed too: {s.activity.failed}." for s in others if s.activity)


def _silence_of(status: Status) -> str:
    last = f"last seen in step {status.activity.step}" if status.activity else "it has reported nothing yet"
    return f"Rank {status.rank} is silent: killed, stopped, exited, or its host is gone ({last})."


def _laggard_of(running: Sequence[Status]) -> str:
    def progress(status: Status) -> tuple[int, bool]:
        assert status.activity is not None
        return status.activity.step, bool(status.activity.doing)

    laggard = min(running, key=progress)
    assert laggard.activity is not None
    where = f"in {laggard.activity.doing}" if laggard.activity.doing else "in no collective of this optimizer"
    return f"Rank {laggard.rank} has not joined: it is in step {laggard.activity.step}, {where}."

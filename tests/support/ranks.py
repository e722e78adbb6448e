"""A pool of rank processes that stay alive between tests.

    def average(value):                      # at module level: ranks import it by name
        return dear.allreduce(torch.full((3,), value + dear.rank()))

    def test_average(pool):
        assert [t.tolist() for t in pool.run(average, 1.0, size=2)] == [[1.5] * 3] * 2

Linux only. Use a pool from the main thread: its processes die with the thread that started them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import TCPStore

from tests.support.processes import RANK_ENV, Nursery, RankProcess, import_path
from tests.support.worker import Idle, Report, Request, dumps, loads

TICK_S = 0.25  # between looks at processes whose pipe says nothing
GRACE_S = 0.5  # for the others to report once one rank has died (their errors often say why), and for the dying to die
# TCPStore asks for the name of every peer, ::ffff:127.0.0.1, which no hosts file has; where the name server drops such
# questions, 1 connection in 25 takes 5 s (seen). No test needs names, so ranks do not ask.
_NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}
# And gloo on loopback: a container's own host name may resolve to anything.
_DEFAULT_ENV = {"GLOO_SOCKET_IFNAME": "lo", **_NO_NAME_SERVER}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank raised, by name and text: the exception itself may not be picklable, nor its class importable."""

    error_type_name: str
    message: str
    traceback: str
    rank: int = -1
    bases: tuple[str, ...] = ()  # names of the error's class and of everything it derives from

    def is_a(self, name: str) -> bool:
        return name in self.bases


class RankFailure(Exception):
    """`ranks` names the culprits; `outcomes[r]` is rank r's result, or an `Outcome`, or None if it had not reported."""

    def __init__(self, message: str, ranks: Sequence[int], outcomes: Sequence[Any]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.outcomes = list(outcomes)


class RankError(RankFailure):
    """A function, or the teardown after it, raised on `ranks`."""


class RankHang(RankFailure):
    """`ranks` were still busy at the time limit."""


class RankDied(RankFailure):
    """The processes of `ranks` ended during the run."""


def rank() -> int:
    """This rank, in a function that a pool runs (also without `dear` or a process group)."""
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def assert_raised(outcomes: Sequence[Any], error: str, match: str = "", ranks: Collection[int] | None = None) -> None:
    """Every rank (of `ranks`) raised `error`, a class name or a base's, with a message that `match` is found in."""
    for r, outcome in enumerate(outcomes):
        if ranks is not None and r not in ranks:
            continue
        assert isinstance(outcome, Outcome), f"rank {r} raised nothing, expected {error}; it returned {outcome!r}"
        assert outcome.is_a(error), f"rank {r}: expected {error}\n{outcome.traceback}"
        assert re.search(match, outcome.message), f"rank {r}: {match!r} is not in the message\n{outcome.traceback}"


class RankPool:
    """Up to `max_ranks` processes, started when first needed and kept; `run` is the only way to use them."""

    def __init__(self, max_ranks: int = 4) -> None:
        self.max_ranks = max_ranks
        self._workers: list[RankProcess] = []
        self._nursery: Nursery | None = None
        self._num_runs = 0
        self._folder = tempfile.mkdtemp(prefix="rank-pool-")
        atexit.register(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks alive now, by rank."""
        return [worker.pid for worker in self._workers]

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        size: int = 2,
        timeout_s: float = 60,
        deterministic: bool | None = None,
        group_timeout_s: float = 20,
        init: bool = True,
        ddp: bool = False,
        expect_errors: bool = False,
        expect_lost: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on ranks 0 to `size - 1` and return their results by rank.

        `fn` is a module-level function, arguments and results are pickled, tensors by value. `ddp` starts torch's
        default process group (gloo) and `init` calls `dear.init(backend="gloo")`; both are shut down afterwards.
        Ranks see this process's environment, working directory and `sys.path` of now. On every rank, at the start of
        every run, random, numpy and torch are seeded with this process's `torch.initial_seed()`. What ranks print is
        printed here when the run ends.

        `expect_errors`: a rank that raises yields an `Outcome` in its place. `expect_lost`: ranks that are meant to
        die or hang; the run ends when all others have reported, and a lost rank yields an `Outcome` with the error
        type name "RankDied" or "RankHang". Other ranks still must not hang or die, in shutdown neither.

        Raises:
            RankError: `fn` or the shutdown raised. The message holds every rank's traceback.
            RankHang: ranks had not finished after `timeout_s` (or, in shutdown, after `group_timeout_s + 5`).
            RankDied: a rank's process ended.
            ValueError: `fn` cannot be imported by ranks, or `size` is not in 1 to `max_ranks`.
        After each of the first three, and after a run with lost ranks, the next run gets new processes.
        """
        if not 1 <= size <= self.max_ranks:
            raise ValueError(f"size={size}: this pool has 1 to {self.max_ranks} ranks")
        unknown = set(expect_lost) - set(range(size))
        if unknown:
            raise ValueError(f"expect_lost={sorted(unknown)}: ranks are 0 to {size - 1}")
        _check_importable(fn)
        self._num_runs += 1
        workers: list[RankProcess] = []
        try:
            self._grow(size)
            workers = self._workers[:size]
            # A store of its own for each run: keys of an earlier run would send ranks to sockets long closed. (Some
            # versions of torch prefix keys with the restart count, 2.14 does not.)
            store = _start_store()
            requests = [
                Request(
                    module=fn.__module__,
                    qualname=fn.__qualname__,
                    file=getattr(sys.modules.get(fn.__module__), "__file__", None),
                    payload=dumps((args, kwargs)),
                    env=_environment(r, size, store.port, self._num_runs),
                    sys_path=import_path(),
                    cwd=os.getcwd(),
                    seed=torch.initial_seed() % 2**32,
                    init=init,
                    ddp=ddp,
                    deterministic=deterministic,
                    group_timeout_s=group_timeout_s,
                )
                for r in range(size)
            ]
            run = _Run(workers, f"{fn.__module__}.{fn.__qualname__}", frozenset(expect_lost))
            run.start(requests)
            run.collect(timeout_s)
            run.release(group_timeout_s + 5)
            results = run.results(expect_errors)
        except RankFailure as failure:
            self._discard_workers()
            if isinstance(failure, RankError) and all(_is_skip(failure.outcomes[r]) for r in failure.ranks):
                pytest.skip(failure.outcomes[failure.ranks[0]].message)
            raise
        except BaseException:  # Ctrl-C, a test's time limit: nobody knows what the processes were doing
            self._discard_nursery()
            raise
        finally:
            for worker in workers:
                worker.replay_output()
        if run.lost:
            self._discard_workers()
        return results

    def close(self) -> None:
        """End every process and remove the temporary folder. A second call does nothing; a later `run` raises."""
        atexit.unregister(self.close)
        self.max_ranks = 0
        self._discard_nursery()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _grow(self, num_ranks: int) -> None:
        if any(worker.exit_code() is not None for worker in self._workers):
            self._discard_workers()  # killed between two runs
        if self._nursery is None or not self._nursery.is_alive:
            self._discard_nursery()
            self._nursery = Nursery()
        while len(self._workers) < num_ranks:
            self._workers.append(RankProcess(self._nursery, len(self._workers), self._folder))

    def _discard_nursery(self) -> None:
        nursery, self._nursery = self._nursery, None
        self._workers.clear()
        if nursery is not None:
            nursery.close()  # which kills its ranks

    def _discard_workers(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()


def _check_importable(fn: Callable[..., Any]) -> None:
    name = getattr(fn, "__qualname__", None)
    if name is None or "<" in name or getattr(fn, "__module__", "__main__") == "__main__":
        raise ValueError(f"{fn!r} is not a module-level function: ranks import it by name, so move it out")


def _start_store() -> TCPStore:
    """On a free port. Its threads read the resolver's options when they start; other users of ours keep theirs."""
    previous = os.environ.get("RES_OPTIONS")
    os.environ.update(_NO_NAME_SERVER)
    try:
        return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    finally:
        del os.environ["RES_OPTIONS"]
        if previous is not None:
            os.environ["RES_OPTIONS"] = previous


def _environment(rank: int, size: int, port: int, run_number: int) -> dict[str, str]:
    return {
        **_DEFAULT_ENV,
        **os.environ,
        **RANK_ENV,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(run_number),
    }


class _Run:
    """One call of `RankPool.run`: who has reported, who has shut down, who was lost."""

    def __init__(self, workers: list[RankProcess], name: str, expect_lost: frozenset[int]) -> None:
        self.workers = workers
        self.name = name
        self.expect_lost = expect_lost
        self.reports: dict[int, Report] = {}
        self.idle: dict[int, Idle] = {}
        self.lost: dict[int, Outcome] = {}
        self._released: set[int] = set()

    def start(self, requests: list[Request]) -> None:
        for worker, request in zip(self.workers, requests, strict=True):
            worker.log_offset = worker.log_bytes()
            try:
                worker.pipe.send(request)
            except OSError:
                self._on_death(worker.rank)

    def collect(self, timeout_s: float) -> None:
        """Return when every rank that is not expected to be lost has reported."""
        deadline = time.monotonic() + timeout_s
        needed = set(range(len(self.workers))) - self.expect_lost or set(range(len(self.workers)))
        while not needed <= self.reports.keys() | self.lost.keys():
            if time.monotonic() > deadline:
                self._raise_hang(sorted(needed - self.reports.keys() - self.lost.keys()), f"within {timeout_s:g} s")
            self._listen(deadline)
            self._check_deaths()
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and not self.expect_lost <= self.reports.keys() | self.lost.keys():
            self._listen(end)
        for r in self.expect_lost - self.reports.keys() - self.lost.keys():
            self.lost[r] = Outcome("RankHang", "still busy", self.workers[r].stack(), r, ("RankHang", "RankFailure"))

    def release(self, timeout_s: float) -> None:
        """Let every rank shut its groups down; return when all have."""
        deadline = time.monotonic() + timeout_s
        for r in self.reports:
            self._release(r)
        while not self.reports.keys() <= self.idle.keys() | self.lost.keys():
            if time.monotonic() > deadline:
                late = sorted(self.reports.keys() - self.idle.keys() - self.lost.keys())
                self._raise_hang(late, f"its shutdown within {timeout_s:g} s")
            self._listen(deadline)
            self._check_deaths()

    def results(self, expect_errors: bool) -> list[Any]:
        outcomes = self._outcomes()
        failed = [r for r, outcome in enumerate(outcomes) if isinstance(outcome, Outcome) and r not in self.lost]
        failed_shutdown = [r for r, idle in self.idle.items() if idle.error and r not in failed]
        if failed and not expect_errors:
            raise RankError(f"{self._who(failed)} raised in {self.name}{self._describe()}", failed, outcomes)
        if failed_shutdown:
            raise RankError(
                f"{self._who(failed_shutdown)} raised in shutdown after {self.name}{self._describe()}",
                failed_shutdown,
                outcomes,
            )
        return outcomes

    def _listen(self, deadline: float) -> None:
        """Take what has arrived, for at most one tick."""
        gone = self.lost.keys() | self.idle.keys()
        by_pipe = {worker.pipe: worker.rank for worker in self.workers if worker.rank not in gone}
        timeout_s = max(0.0, min(TICK_S, deadline - time.monotonic()))
        ready = wait(list(by_pipe), timeout_s)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            self._receive(by_pipe[pipe])
        if not ready:  # a pipe stays open while a rank's own children hold it
            for r in by_pipe.values():
                if self.workers[r].exit_code() is not None:
                    self._on_death(r)

    def _receive(self, rank: int) -> None:
        try:
            message = self.workers[rank].pipe.recv()
        except (EOFError, OSError):
            self._on_death(rank)
            return
        if isinstance(message, Idle):
            self.idle[rank] = message
            return
        self.reports[rank] = message
        if message.payload is None:
            self._release(rank)  # as in real life: a rank that raised closes its sockets while others wait for it

    def _release(self, rank: int) -> None:
        if rank not in self._released:
            self._released.add(rank)
            with contextlib.suppress(OSError):  # its death is noticed when listening
                self.workers[rank].pipe.send("release")

    def _on_death(self, rank: int) -> None:
        worker = self.workers[rank]
        how = worker.describe_exit()
        self.lost[rank] = Outcome("RankDied", how, worker.output()[-4000:], rank, ("RankDied", "RankFailure"))

    def _check_deaths(self) -> None:
        if self.lost.keys() <= self.expect_lost:
            return
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and len(self.reports.keys() | self.lost.keys()) < len(self.workers):
            self._listen(end)
        dead = sorted(self.lost.keys() - self.expect_lost)
        how = ", ".join(self.lost[r].message for r in dead)
        raise RankDied(f"{self._who(dead)} died in {self.name}: {how}{self._describe()}", dead, self._outcomes())

    def _raise_hang(self, ranks: list[int], limit: str) -> NoReturn:
        stacks = {r: self.workers[r].stack() for r in ranks}
        text = "".join(f"\n--- rank {r}, stack{_output_note(self.workers[r])}:\n{stack}" for r, stack in stacks.items())
        raise RankHang(
            f"{self._who(ranks)} did not finish {self.name} {limit}{self._describe()}{text}", ranks, self._outcomes()
        )

    def _outcomes(self) -> list[Any]:
        return [self._outcome(r) for r in range(len(self.workers))]

    def _outcome(self, rank: int) -> Any:
        if rank in self.lost:
            return self.lost[rank]
        report = self.reports.get(rank)
        if report is None:
            return None
        if report.payload is not None:
            return loads(report.payload)
        return Outcome(report.error_type_name, report.message, report.traceback, rank, report.bases)

    def _who(self, ranks: list[int]) -> str:
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} of {len(self.workers)}"

    def _describe(self) -> str:
        """One paragraph per rank, so that the rank that caused the trouble is not hidden behind the one that waited."""
        parts = []
        for r, _ in enumerate(self.workers):
            report, idle, lost = self.reports.get(r), self.idle.get(r), self.lost.get(r)
            if lost is not None:
                parts.append(f"--- rank {r}: {lost.message}\n{lost.traceback}")
            elif report is None:
                parts.append(f"--- rank {r}: had not reported")
            elif report.payload is None:
                parts.append(f"--- rank {r} raised:\n{report.traceback}")
            else:
                parts.append(f"--- rank {r}: returned")
            if idle is not None and idle.error:
                parts.append(f"--- rank {r} raised in shutdown:\n{idle.error}")
        return "".join("\n" + part.rstrip() for part in parts)


def _is_skip(outcome: Any) -> bool:
    return isinstance(outcome, Outcome) and outcome.is_a("Skipped")


def _output_note(worker: RankProcess) -> str:
    output = worker.output()[-2000:].strip()
    return f" (it printed: {output})" if output else ""

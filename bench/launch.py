"""Local ranks as processes: started together, their results collected, always torn down.

def measure(world: World, mb: int) -> list[float]: ...      # at module level: ranks import it by name

by_rank = run_ranks(measure, 4, timeout_s=300, mb=32)
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

__all__ = ["RankError", "World", "die_with", "free_port", "run_processes", "run_ranks"]

HOST = "127.0.0.1"
# Below the ports that Linux gives to connections: one of those may be taken before the job that it is for has begun.
FIRST_PORT, NUM_PORTS = 10_000, 19_000
_offsets = itertools.count(random.SystemRandom().randrange(NUM_PORTS))  # processes begin at different ones
# Ranks share the cores, so one thread each. A container's own host name may resolve to anything, so gloo gets loopback.
# TCPStore asks for the names of its peers, which loopback addresses rarely have: no name server, no warning.
RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RES_OPTIONS": "attempts:0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


class RankError(Exception):
    """A rank raised, died, or was still busy at the time limit."""


@dataclass(frozen=True, slots=True)
class World:
    """What a rank is told: who it is, and the store that the launcher hosts."""

    rank: int
    size: int
    store: dist.Store
    timeout: timedelta


def free_port() -> int:
    """A port that nobody on this host uses, and that this process has not named lately."""
    while True:
        port = FIRST_PORT + next(_offsets) % NUM_PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def run_ranks(fn: Callable[..., Any], size: int, /, *, timeout_s: float, **kwargs: Any) -> list[Any]:
    """Runs `fn(world, **kwargs)` on ranks 0 to `size - 1` and returns what they return, by rank.

    Raises:
        RankError: a rank failed or `timeout_s` has passed. No process is left behind, here or after an interrupt.
    """
    os.environ.update(RANK_ENV)  # spawned processes inherit it, and the store in this one asks for names as well
    store = dist.TCPStore(HOST, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    return run_processes(
        _rank_main,
        [
            lambda pipe, rank=rank: (fn, rank, size, store.port, timeout_s, kwargs, pipe, os.getpid())  # type: ignore[misc]
            for rank in range(size)
        ],
        timeout_s,
    )


def run_processes(
    target: Callable[..., None], arguments: Sequence[Callable[[Connection], tuple[Any, ...]]], timeout_s: float
) -> list[Any]:
    """Runs `target(*arguments[r](pipe))` in process r for each r and returns what they send, by rank.

    Raises:
        RankError: a process failed or `timeout_s` has passed. None is left behind.
    """
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[Any, Connection]] = []
    try:
        for of_pipe in arguments:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=target, args=of_pipe(theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        return _collect(ranks, time.monotonic() + timeout_s, timeout_s)
    finally:
        for process, _ in ranks:
            if process.is_alive():
                process.kill()
        for process, pipe in ranks:
            process.join(10)
            pipe.close()


def _collect(ranks: list[tuple[Any, Connection]], deadline_s: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(pending.values())} were still busy after {timeout_s:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                error, result = pipe.recv()
            except EOFError:
                process = ranks[rank][0]
                process.join(5)
                raise RankError(f"rank {rank} died with exit code {process.exitcode}") from None
            if error is not None:
                raise RankError(f"rank {rank} failed:\n{error}")
            results[rank] = result
    for process, _ in ranks:  # an orderly end: peers may still read from each other's connections
        process.join(max(0.0, deadline_s - time.monotonic()))
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    timeout_s: float,
    kwargs: dict[str, Any],
    pipe: Connection,
    launcher_pid: int,
) -> None:
    die_with(launcher_pid)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    warnings.simplefilter("ignore", FutureWarning)  # new names of torch's collectives, which its older versions lack
    try:
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(HOST, port, None, False, timeout)
        result = fn(World(rank, size, store, timeout), **kwargs)
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise SystemExit(1) from None
    pipe.send((None, result))
    pipe.close()


def die_with(launcher_pid: int) -> None:
    """The kernel ends this process when the launcher ends, however that comes about."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        raise SystemExit("the launcher has ended")

"""The world of this process: `init`, `shutdown`, who and where we are."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch

from dearcore.communicator import Communicator
from dearcore.errors import ArgumentError, ScheduleError
from dearcore.rendezvous import World, read_launch
from dearcore.streams import Stream

__all__ = ["device", "init", "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size"]

PATIENCE_S = 2.0  # with peers, at the end of a process that failed
BACKENDS = ("auto", "nccl", "gloo", "local")


class _Context:
    def __init__(self, world: World) -> None:
        self.world, self.device = world, world.device
        self.communicator: Communicator = world.new_communicator(tuple(range(world.size)), world.device)[0]
        self.inline: Stream = world.inline_stream()


_context: _Context | None = None
_forked = ""  # in a process that was forked from a rank: says so
_left_behind: list[Callable[[], None]] = []  # takes off what still refers to the parent's optimizers
_hears_forks = False


def init(
    *, backend: str = "auto", timeout: timedelta = timedelta(minutes=10), deterministic: bool | None = None
) -> None:
    """Joins the other ranks. Call it once, before anything else of this module; a second call does nothing.

    Finds them by torchrun's variables, Open MPI's or Slurm's; without any of these the world is this one process.
    If `torch.distributed` is initialised already, its ranks and its store are used and its groups left alone.

    Args:
        backend: "auto" takes NCCL where every rank has a GPU of its own and CuPy, else gloo; "nccl"; "gloo" (CPU, or
            CUDA tensors staged through the host); "local" (one rank, no network).
        timeout: after which a collective that a peer does not join is an error on every rank.
        deterministic: gradients are summed in rank order, so that the result depends neither on the plan nor on the
            schedule; None follows `torch.are_deterministic_algorithms_enabled()`.

    Raises:
        ArgumentError: a bad argument, a launcher variable that is missing or wrong (it is named), or a backend that
            cannot be used here, with the command that mends it.
        CommunicatorError: the other ranks cannot be reached; address and port are named.
    """
    global _context, _forked
    if _context is not None:
        return
    if backend not in BACKENDS:
        raise ArgumentError(f"backend={backend!r}; expected one of {', '.join(BACKENDS)}.")
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ArgumentError(f"timeout={timeout!r}; expected a positive datetime.timedelta.")
    launch = read_launch()
    if backend == "local" and launch.size > 1:
        raise ArgumentError(f"backend='local' is for one rank, but {launch.source} started {launch.size}. Use 'auto'.")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    _hear_forks()
    _context = _Context(World(launch, timeout, deterministic, "gloo" if backend == "local" else backend))
    _forked = ""
    while _left_behind:
        _left_behind.pop()()


def shutdown() -> None:
    """Closes all optimizers and connections, after what is under way has ended. `init` may be called again."""
    _shut_down(None)


def _shut_down(patience_s: float | None) -> None:
    global _context
    if _context is not None:
        context, _context = _context, None
        context.world.close(patience_s)
        context.communicator.close()


@contextlib.contextmanager
def moving_nothing() -> Iterator[None]:
    """Optimizers built inside send nothing (and train wrong weights): to measure an iteration without communication."""
    world = current().world
    world.moves_nothing = True
    try:
        yield
    finally:
        world.moves_nothing = False


@contextlib.contextmanager
def over_the_network() -> Iterator[None]:
    """Optimizers built inside use sockets even between ranks of one host: to measure and test what hosts do."""
    world = current().world
    world.use_host_memory = False
    try:
        yield
    finally:
        world.use_host_memory = True


def is_initialized() -> bool:
    return _context is not None


def current() -> _Context:
    if _context is None:
        raise ScheduleError(_forked or "dear is not initialised. Call dear.init() first, once in each process.")
    return _context


def device() -> torch.device:
    """Where this rank's model belongs: a GPU of its own where there is one, else the CPU."""
    return current().device


def rank() -> int:
    """This process among all ranks, from 0."""
    return current().world.rank


def size() -> int:
    """How many ranks there are."""
    return current().world.size


def local_rank() -> int:
    """This process among the ranks on its host, from 0."""
    return current().world.launch.local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return current().world.launch.local_size


def _hear_forks() -> None:
    """From the first `init` on: after all modules are there, so that what they do at a fork comes after our wait."""
    global _hears_forks
    if not _hears_forks:
        _hears_forks = True
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def _before_fork() -> None:
    """Parameters are fresh in the child. `subprocess` does not come here, unless it runs Python in between."""
    if _context is not None and not threading.current_thread().name.startswith("dear-"):
        _context.world.prepare_fork()


def _after_fork_in_child() -> None:
    global _context, _forked
    if _context is not None:
        world, _context = _context.world, None
        _forked = (
            f"this process was forked from rank {world.rank} of {world.size} (process {os.getppid()}), whose "
            "connections, threads and optimizers are not its own: only the parent trains and communicates. Call "
            "dear.init() in this process first, to communicate or train on its own."
        )
        _left_behind.extend(world.leave_behind(_forked))


def _at_exit() -> None:
    """A process that ends by an error, or by Ctrl-C, has nothing to wait for; its peers hear of its end sooner."""
    _shut_down(PATIENCE_S if getattr(sys, "last_value", None) is not None else None)


atexit.register(_at_exit)

"""How ranks find each other: torchrun's variables, Open MPI's, Slurm's, or none (then the world is one rank)."""

from __future__ import annotations

import os
import queue
import re
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from .backend import Decision, agree_on_backend, local_device
from .communicator import Communicator, LocalCommunicator, NullCommunicator
from .errors import ArgumentError, CommunicatorError, ScheduleError
from .forks import keep_in_children
from .gloo import GlooCommunicator
from .heartbeat import Heartbeat, Peers
from .nccl_world import NcclWorld
from .streams import BlockingStream, CudaWorkerStream, InlineStream, Stream

__all__ = ["Launch", "World", "read_launch"]

DEFAULT_PORT = 29500
SETTLE_S = 2.0  # for the store's own timeout, with its own message, to come first


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher said, or world size 1."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int
    source: str  # "torchrun", "Open MPI", "Slurm", "torch.distributed" or "none"


def read_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """Reads the launcher's variables. Raises ArgumentError naming the variable that is missing or wrong."""
    if "RANK" in env or "WORLD_SIZE" in env:
        return _launch(env, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", need_addr=True)
    if "OMPI_COMM_WORLD_SIZE" in env:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        return _launch(env, "Open MPI", *names, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if env.get("SLURM_NTASKS", "1") not in ("", "1") and "SLURM_PROCID" in env:
        return _launch(env, "Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    return Launch(0, 1, 0, 1, "127.0.0.1", 0, "none")


def _launch(
    env: Mapping[str, str], source: str, rank: str, size: str, local_rank: str, local_size: str, need_addr: bool = False
) -> Launch:
    world_size = _number(env, size, source, least=1)
    this_rank = _number(env, rank, source, least=0)
    if this_rank >= world_size:
        raise ArgumentError(f"{rank}={this_rank} but {size}={world_size}; ranks count from 0 to {size} - 1.")
    here = _number(env, local_rank, source, least=0, default=this_rank)
    num_here = _number(env, local_size, source, least=1, default=max(world_size, here + 1))
    if here >= num_here:
        raise ArgumentError(f"{local_rank}={here} but {local_size}={num_here}; local ranks count from 0.")
    addr, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if world_size > 1 and need_addr:
        for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)):
            if not value:
                raise ArgumentError(f"{name} is not set, but {size}={world_size}. Start with torchrun, or set {name}.")
    first_host = addr or _slurm_first_host(env)
    if not first_host and num_here < world_size:
        raise ArgumentError(
            f"MASTER_ADDR is not set, but {source} has started {num_here} of {world_size} ranks on this host "
            f"({local_size}={num_here}). Set it to the host of rank 0 (mpirun: -x MASTER_ADDR=...)."
        )
    return Launch(
        this_rank,
        world_size,
        here,
        num_here,
        first_host or "127.0.0.1",
        _number(env, "MASTER_PORT", source, least=1, default=DEFAULT_PORT, most=65535),
        source,
    )


def _number(
    env: Mapping[str, str], name: str, source: str, least: int, default: int | None = None, most: int = 10**9
) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    # Slurm writes 4(x2) for "4 tasks on each of 2 nodes"
    match = re.fullmatch(r"(\d+)(\(x\d+\))?" if name == "SLURM_NTASKS_PER_NODE" else r"(\d+)", text)
    if not match or not least <= int(match[1]) <= most:
        raise ArgumentError(
            f"{name}={text!r} is not a whole number from {least} to {most}, but {source} variables are set. "
            f"Start all ranks with "
            f"one launcher, or set {name}."
        )
    return int(match[1])


def _slurm_first_host(env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_JOB_NODELIST", "") if "SLURM_PROCID" in env else ""
    if "[" in nodes:
        try:
            command = ["scontrol", "show", "hostnames", nodes]
            shown = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ArgumentError(
                f"cannot find the first host of SLURM_JOB_NODELIST={nodes!r} ({error}). Set MASTER_ADDR to it."
            ) from error
        return shown.stdout.split("\n")[0].strip()
    return nodes.partition(",")[0]


class Closeable(Protocol):
    def close(self, patience_s: float | None = None) -> None:
        """Ends what is under way; what has not ended within `patience_s` (None: the timeout) is given up."""

    def prepare_fork(self) -> None:
        """This process is about to be forked: the child shall need nothing that is under way. Raises nothing."""

    def leave_behind(self, why: str) -> Callable[[], None]:
        """In a forked child: ends nothing, and from now on every use is a ScheduleError that says `why`.

        The function returned takes that off again what the child shares with its parent's copy: parameters, modules.
        """


class World:
    """The ranks of this job and the store that they meet at. Makes communicators; one for each optimizer.

    Reuses torch.distributed's default store where the user has initialised it, and leaves the user's process groups
    alone: every communicator has connections of its own.
    """

    def __init__(self, launch: Launch, timeout: timedelta, deterministic: bool, backend: str = "gloo") -> None:
        self.timeout = timeout
        self.deterministic = deterministic
        self.store: Store | None = None
        self._launched = launch
        _check_not_inherited(launch)
        if dist.is_initialized():
            self.launch = Launch(
                dist.get_rank(),
                dist.get_world_size(),
                launch.local_rank if launch.source != "none" else dist.get_rank(),
                launch.local_size if launch.source != "none" else dist.get_world_size(),
                launch.master_addr,
                launch.master_port,
                "torch.distributed",
            )
            self.store = _get_default_store()
        else:
            self.launch = launch
            if launch.size > 1:
                _check_interface(os.environ.get("GLOO_SOCKET_IFNAME", ""))
                self.store = _connect(launch, timeout)
        self.rank, self.size = self.launch.rank, self.launch.size
        self.heartbeat = Heartbeat(self.store, self.rank) if self.store is not None else None
        self.moves_nothing = False  # new communicators only pretend: to measure what an iteration costs without them
        self.use_host_memory = True  # new communicators between ranks of one host; False: over the network, to compare
        self._num_communicators: dict[tuple[int, ...], int] = {}
        self._closeables: weakref.WeakSet[Closeable] = weakref.WeakSet()
        # init, shutdown, init again must not meet the keys of the first time
        time = self.store.add(f"dear/init/{self.rank}", 1) if self.store is not None else 0
        self._key = f"dear/{time}"
        self.device = local_device(self.launch.local_rank)
        self.decision = self._decide(backend)
        keep_in_children(self)
        self._nccl = (
            NcclWorld(self.device, self.rank, timeout, deterministic) if self.decision.backend == "nccl" else None
        )

    def on_shutdown(self, closeable: Closeable) -> None:
        """`closeable.close()` is called by `close`, unless it has died before."""
        self._closeables.add(closeable)

    def close(self, patience_s: float | None = None) -> None:
        for closeable in list(self._closeables):
            closeable.close(patience_s)
        if self._nccl is not None:
            self._nccl.close()
        if self.heartbeat is not None:
            self.heartbeat.close()

    def prepare_fork(self) -> None:
        """Before a fork, in the process that is forked. Waits for what is under way to the parameters."""
        for closeable in list(self._closeables):
            closeable.prepare_fork()

    def leave_behind(self, why: str) -> list[Callable[[], None]]:
        """After a fork, in the child. See `Closeable`."""
        global _parent
        _parent = _Parent(self._launched, _get_default_store() if dist.is_initialized() else None)
        return [closeable.leave_behind(why) for closeable in list(self._closeables)]

    @property
    def has_process_group(self) -> bool:
        """Programs that use torch.distributed's default group see the ranks of this world."""
        return self.size == 1 or dist.is_initialized()

    def ranks_of(self, group: object) -> tuple[int, ...]:
        """The world ranks of a torch process group, of a sequence of ranks, or (None) of everyone."""
        if group is None:
            return tuple(range(self.size))
        if isinstance(group, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
        elif isinstance(group, Sequence) and all(isinstance(rank, int) for rank in group):
            ranks = sorted(group)
        else:
            raise ArgumentError(f"group expects a torch ProcessGroup, a list of ranks or None, got {group!r}.")
        if self.rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < self.size for r in ranks):
            raise ArgumentError(
                f"group has the ranks {list(ranks)}; expected different ranks below {self.size}, rank {self.rank} "
                "(this one) among them. Build the optimizer only on the members of its group."
            )
        return tuple(ranks)

    def shared_stream(self, ranks: tuple[int, ...], device: torch.device) -> CudaWorkerStream | None:
        """The stream of all collectives over `ranks` on `device`; None: every optimizer has one of its own."""
        if self._nccl is None or self.moves_nothing or device.type == "cpu":
            return None
        return self._nccl.stream(ranks)

    def inline_stream(self) -> Stream:
        """For collectives that the caller waits for."""
        stream = self.shared_stream(tuple(range(self.size)), self.device)
        return InlineStream() if stream is None else BlockingStream(stream)

    def new_communicator(
        self, ranks: tuple[int, ...], device: torch.device | None = None
    ) -> tuple[Communicator, Peers]:
        """Connects `ranks` (collective over them), for tensors on `device`. The peers tell what each is doing."""
        if self.moves_nothing:
            return NullCommunicator(ranks.index(self.rank), len(ranks)), Peers(None, "", ranks, self.rank)
        if self._nccl is not None and device is not None and device.type == "cuda":
            return self._new_nccl(ranks)
        if len(ranks) == 1:
            return LocalCommunicator(self.deterministic), Peers(None, "", ranks, self.rank)
        assert self.store is not None
        number = self._num_communicators[ranks] = self._num_communicators.get(ranks, 0) + 1
        key = f"{self._key}/{'-'.join(map(str, ranks))}/{number}"
        peers = Peers(self.heartbeat, f"{key}/heartbeat", ranks, self.rank)
        communicator = GlooCommunicator(
            PrefixStore(key, self.store),
            ranks.index(self.rank),
            len(ranks),
            self.timeout,
            self.deterministic,
            explain=peers.blame,
            use_host_memory=self.use_host_memory,
        )
        return communicator, peers

    def _decide(self, backend: str) -> Decision:
        if backend == "gloo" or (backend == "auto" and self.size == 1):  # nothing to agree on
            return Decision("gloo", "asked for" if backend == "gloo" else "one rank sends nothing")
        return agree_on_backend(
            backend, self.store, self.rank, self.size, self.device, self.timeout, f"{self._key}/backend"
        )

    def _new_nccl(self, ranks: tuple[int, ...]) -> tuple[Communicator, Peers]:
        assert self._nccl is not None
        number = self._num_communicators[ranks] = self._num_communicators.get(ranks, 0) + 1
        key = f"{self._key}/nccl/{'-'.join(map(str, ranks))}"
        store = HashStore() if self.store is None else self.store
        communicator = self._nccl.communicator(ranks, PrefixStore(key, store), self.heartbeat, f"{key}/heartbeat")
        return communicator, Peers(self.heartbeat, f"{key}/{number}/heartbeat", ranks, self.rank)


@dataclass(frozen=True, slots=True)
class _Parent:
    """The rank that this process was forked from."""

    launch: Launch
    default_store: Store | None  # of torch.distributed


_parent: _Parent | None = None


def _check_not_inherited(launch: Launch) -> None:
    """A child of a rank must not speak over its parent's connections, nor in its name."""
    if _parent is None:
        return
    if dist.is_initialized() and _get_default_store() is _parent.default_store:
        raise ScheduleError(
            "torch.distributed was initialised before this process was forked: its connections are the parent's. Use "
            "the start method 'spawn' for processes that communicate, or fork them before init_process_group()."
        )
    if launch.size > 1 and launch == _parent.launch:
        raise ArgumentError(
            f"this process was forked from rank {launch.rank} and still has its launcher's variables, so it would join "
            f"as another rank {launch.rank} of {launch.size}. Remove RANK and WORLD_SIZE (or your launcher's) from its "
            "environment to train alone, or set them to those of a job of its own."
        )


def _check_interface(names: str) -> None:
    have = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in have:
            raise ArgumentError(
                f"GLOO_SOCKET_IFNAME={names!r}, but this host's interfaces are {', '.join(have)}. Set it to the one "
                "that reaches the other hosts (see `ip link`), or unset it."
            )


def _connect(launch: Launch, timeout: timedelta) -> Store:
    where = f"{launch.master_addr}:{launch.master_port}"
    try:
        socket.getaddrinfo(launch.master_addr, launch.master_port)
    except OSError as error:
        raise CommunicatorError(
            f"rank {launch.rank}: cannot resolve MASTER_ADDR={launch.master_addr!r}: {error}. Set MASTER_ADDR to an "
            "address of rank 0's host that every host can reach."
        ) from error
    try:
        return PrefixStore("dear", _within(timeout, lambda: _open_store(launch, timeout)))
    except (dist.DistError, RuntimeError, ValueError) as error:
        role = "cannot listen on" if launch.rank == 0 else "cannot reach rank 0 at"
        raise CommunicatorError(
            f"rank {launch.rank}: {role} MASTER_ADDR:MASTER_PORT = {where}: {error}. If another job uses the port, set "
            "MASTER_PORT to a free one (torchrun: --rdzv-endpoint or --master-port)."
        ) from error


def _open_store(launch: Launch, timeout: timedelta) -> Store:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: Store = next(iter(rendezvous("env://", launch.rank, launch.size, timeout=timeout)))[0]
        return store
    return TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.size,
        launch.rank == 0,
        timeout,
        multi_tenant=True,
        wait_for_workers=False,
    )


def _within(timeout: timedelta, open_store: Callable[[], Store]) -> Store:
    """A server that accepts the connection and then says nothing would keep TCPStore waiting for ever."""
    answers: queue.SimpleQueue[Store | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(open_store())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=work, name="dear-store", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout.total_seconds() + SETTLE_S)
    except queue.Empty:
        raise RuntimeError("what listens there accepts connections but does not answer as this job's store") from None
    if isinstance(answer, Exception):
        raise answer
    return answer

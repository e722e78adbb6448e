"""An emulated cluster: hosts as network namespaces behind one switch, every link shaped both ways.

    with Cluster(4, "1gbit") as cluster:
        print(cluster.describe())
        by_rank = cluster.run_ranks(measure, timeout_s=300, mb=32)  # as bench.launch.run_ranks, one rank a host

`python -m bench cluster --hosts 4 --rate 1gbit -- python train.py` starts a command on every host, with torchrun's
variables. Without root, iproute2 or the tbf queue, ranks run over loopback instead, and `describe()` says so.

All devices are created inside namespaces of ours, the bridge too, so the machine's own network is not touched.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from .launch import LAUNCHER_VARIABLES, RANK_ENV, World, die_with, free_port, run_processes, run_ranks

__all__ = [
    "Cluster",
    "ClusterError",
    "SUMMARY",
    "add_arguments",
    "add_cluster_arguments",
    "cluster_of",
    "remove_leftovers",
    "run",
    "why_not",
]

SUMMARY = "run a command on every host of an emulated cluster"

# A short queue (20 ms) halves TCP's throughput. The burst is 2 ms of the rate: more would let small messages pass at
# once on a slow link. But it holds a whole packet as TCP hands it over (64 KiB): tbf would cut that into frames, and
# the cores would have to move each.
SHAPE = "tbf rate {rate} burst {burst_kb}kb latency 400ms"
BURST_KB_PER_GBIT, MIN_BURST_KB, MAX_BURST_KB = 256, 68, 256
INTERFACE = "eth0"  # of every host, in its own namespace
PORT = 29500  # nobody else is there
NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
# dear-<PID namespace>-<PID of the owner>-<its start, in clock ticks>-<number>-<role>: a PID alone may be used again
_NAME = re.compile(r"dear-(\d+)-(\d+)-(\d+)-\d+-\w+")
_RATE = re.compile(r"\d+(\.\d+)?[kmgt]?bit")
_numbers = itertools.count()

# Enters a namespace and becomes a command that ends with its launcher.
_ENTER = """
import ctypes, os, signal, sys
namespace, launcher, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if namespace and libc.setns(os.open(namespace, os.O_RDONLY | os.O_CLOEXEC), 0x40000000):
    raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
if os.getppid() != int(launcher):
    raise SystemExit("the launcher has ended")
try:
    os.execvp(command[0], command)
except OSError as error:
    raise SystemExit(f"{command[0]}: {error.strerror}")
"""


class ClusterError(Exception):
    """The emulated cluster cannot be set up here; says what is missing."""


class Cluster:
    """`num_hosts` hosts on one switch, each by a link of `rate` in both directions; rank i runs on host i.

    Args:
        rate: of a host's link, as tc writes it: "1gbit", "500mbit".
        hosts_per_node: a second level: so many hosts share a switch of their own (ranks of one node) ...
        uplink_rate: ... and each such switch is connected to the others by a link of this rate.
        required: raise ClusterError where emulation is not possible, instead of using loopback.

    Namespaces exist between `__enter__` and `__exit__`, which also runs after Ctrl-C and SIGTERM. What a killed process
    has left behind is removed by the next one to enter.
    """

    def __init__(
        self,
        num_hosts: int,
        rate: str = "1gbit",
        *,
        hosts_per_node: int | None = None,
        uplink_rate: str | None = None,
        required: bool = False,
    ) -> None:
        if not 1 <= num_hosts <= 250:
            raise ValueError(f"num_hosts={num_hosts}; expected 1 to 250.")
        for name, value in (("rate", rate), ("uplink_rate", uplink_rate)):
            if value is not None and not _RATE.fullmatch(value):
                raise ValueError(f"{name}={value!r}; expected a rate as tc writes it, '1gbit' or '500mbit'.")
        if (hosts_per_node is None) != (uplink_rate is None):
            raise ValueError("hosts_per_node and uplink_rate make the second level together: give both or none.")
        if hosts_per_node is not None and (hosts_per_node < 1 or num_hosts % hosts_per_node):
            raise ValueError(f"hosts_per_node={hosts_per_node}; expected a divisor of num_hosts={num_hosts}.")
        self.num_hosts, self.rate = num_hosts, rate
        self.hosts_per_node, self.uplink_rate = hosts_per_node, uplink_rate
        self._required = required
        self._why_not = ""
        self._namespaces: list[str] = []  # hosts in order, then the switch
        self._owner_pid = 0
        self._handlers: dict[int, Any] = {}

    @property
    def is_emulated(self) -> bool:
        """True inside `with`, unless loopback has to do."""
        return bool(self._namespaces)

    @property
    def namespaces(self) -> Sequence[str]:
        """Names, as `ip netns` lists them: one a host, then the switch's. Empty on loopback."""
        return tuple(self._namespaces)

    def address(self, host: int) -> str:
        return f"198.18.0.{host + 1}" if self.is_emulated else "127.0.0.1"  # RFC 2544: set aside for benchmarks

    def describe(self) -> str:
        """What the ranks run on, for records and titles."""
        if not self.is_emulated:
            reason = f" (no emulated links: {self._why_not})" if self._why_not else ""
            return f"{self.num_hosts} ranks over loopback{reason}"
        text = f"{self.num_hosts} emulated hosts, links of {self.rate} both ways"
        if self.hosts_per_node is not None:
            num_nodes = self.num_hosts // self.hosts_per_node
            text += f" inside {num_nodes} nodes of {self.hosts_per_node}, {self.uplink_rate} between nodes"
        return f"{text} ({_shape(self.rate)})"

    def __enter__(self) -> Self:
        remove_leftovers()
        self._why_not = why_not() or ""
        if self._why_not:
            if self._required:
                raise ClusterError(self._why_not)
            return self
        self._owner_pid = os.getpid()
        self._catch_signals()
        atexit.register(self._close)
        try:
            self._build()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def run_ranks(self, fn: Callable[..., Any], /, *, timeout_s: float, **kwargs: Any) -> list[Any]:
        """Runs `fn(world, **kwargs)`, one rank on each host, and returns what they return, by rank.

        Raises:
            RankError: a rank failed or `timeout_s` has passed. No process is left behind.
        """
        if not self.is_emulated:
            return run_ranks(fn, self.num_hosts, timeout_s=timeout_s, **kwargs)
        os.environ.update(RANK_ENV)  # spawned processes inherit it
        limit = timedelta(seconds=timeout_s)
        store = _inside(
            self._namespaces[0], lambda: dist.TCPStore(self.address(0), 0, None, True, limit, wait_for_workers=False)
        )
        wheres = [(namespace, self.address(0), store.port) for namespace in self._namespaces[: self.num_hosts]]
        return run_processes(
            _rank_on_host,
            [
                lambda pipe, rank=rank, where=where: (  # type: ignore[misc]
                    where,
                    fn,
                    rank,
                    self.num_hosts,
                    timeout_s,
                    kwargs,
                    pipe,
                    os.getpid(),
                )
                for rank, where in enumerate(wheres)
            ],
            timeout_s,
        )

    def run_command(self, command: Sequence[str], timeout_s: float) -> int:
        """Starts `command` on every host with torchrun's variables; returns the first status that is not 0.

        When one fails the others are killed. Raises TimeoutError, after killing all.
        """
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        env |= {**RANK_ENV, "WORLD_SIZE": str(self.num_hosts), "MASTER_ADDR": self.address(0)}
        env["MASTER_PORT"] = str(PORT if self.is_emulated else free_port())
        if self.is_emulated:
            env["GLOO_SOCKET_IFNAME"] = INTERFACE
        local_size = self.hosts_per_node or (1 if self.is_emulated else self.num_hosts)
        processes: list[subprocess.Popen[bytes]] = []
        deadline_s = time.monotonic() + timeout_s
        try:
            for rank in range(self.num_hosts):
                namespace = str(NAMESPACES / self._namespaces[rank]) if self.is_emulated else ""
                mine = {"RANK": rank, "LOCAL_RANK": rank % local_size, "LOCAL_WORLD_SIZE": local_size}
                argv = [sys.executable, "-c", _ENTER, namespace, str(os.getpid()), *command]
                processes.append(subprocess.Popen(argv, env=env | {k: str(v) for k, v in mine.items()}))
            while True:
                states = [process.poll() for process in processes]
                failed = [state for state in states if state]
                if failed or all(state == 0 for state in states):
                    return failed[0] if failed else 0
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{command[0]} was still busy after {timeout_s:.0f} s")
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()

    # -- building and removing ---------------------------------------------------------------------------------------

    def _build(self) -> None:
        prefix = f"{_owner_prefix()}-{next(_numbers)}"
        names = [f"{prefix}-host{i}" for i in range(self.num_hosts)] + [f"{prefix}-switch"]
        for name in names:
            self._namespaces.append(name)  # before it is there: an interrupt may come in between
            _call("ip", "netns", "add", name)
        switch = names[-1]
        links = _Links()
        links.add_bridge("core")
        for host, name in enumerate(names[:-1]):
            bridge = "core"
            if self.hosts_per_node is not None and self.uplink_rate is not None:
                node, place = divmod(host, self.hosts_per_node)
                bridge = f"node{node}"
                if place == 0:
                    links.add_bridge(bridge)
                    links.add_cable(bridge, f"up{node}", "core", f"down{node}", self.uplink_rate)
            links.add_port(bridge, f"port{host}", name, self.rate)
        _call("ip", "-n", switch, "-batch", "-", lines=links.ip)
        _call("tc", "-n", switch, "-batch", "-", lines=links.tc)
        for host, name in enumerate(names[:-1]):
            address = f"address add {self.address(host)}/24 dev {INTERFACE}"
            lines = ["link set lo up", f"link set {INTERFACE} addrgenmode none up", address]
            _call("ip", "-n", name, "-batch", "-", lines=lines)
            _call("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *_shape(self.rate).split())

    def _close(self) -> None:
        """Removes the namespaces. A process that was forked from the owner leaves them alone."""
        if self._owner_pid != os.getpid():
            return
        while self._namespaces:
            _delete(self._namespaces[-1])
            self._namespaces.pop()
        atexit.unregister(self._close)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _catch_signals(self) -> None:
        """Signals that would end this process at once end it by an exception, so that `__exit__` runs."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, _exit_on_signal)


class _Links:
    """Lines for `ip -batch` and `tc -batch` that set up the switch's namespace."""

    def __init__(self) -> None:
        self.ip: list[str] = []
        self.tc: list[str] = []

    def add_bridge(self, bridge: str) -> None:
        self.ip += [f"link add {bridge} type bridge stp_state 0 forward_delay 0", f"link set {bridge} up"]

    def add_port(self, bridge: str, port: str, host: str, rate: str) -> None:
        self.ip.append(f"link add {port} type veth peer name {INTERFACE} netns {host}")
        self._plug(bridge, port, rate)

    def add_cable(self, bridge: str, end: str, other_bridge: str, other_end: str, rate: str) -> None:
        self.ip.append(f"link add {end} type veth peer name {other_end}")
        self._plug(bridge, end, rate)
        self._plug(other_bridge, other_end, rate)

    def _plug(self, bridge: str, port: str, rate: str) -> None:
        self.ip.append(f"link set {port} master {bridge} addrgenmode none up")
        self.tc.append(f"qdisc add dev {port} root {_shape(rate)}")


def _shape(rate: str) -> str:
    number = rate.rstrip("kmgtbi")
    gbit = float(number) * {"": 1e-9, "k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}[rate[len(number) :].removesuffix("bit")]
    burst_kb = min(MAX_BURST_KB, max(MIN_BURST_KB, round(BURST_KB_PER_GBIT * gbit)))
    return SHAPE.format(rate=rate, burst_kb=burst_kb)


def why_not() -> str | None:
    """What is missing for an emulated cluster on this machine, and how to get it; None if nothing is."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root (in a container: CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command `{tool}` is missing; install iproute2"
    return _try_shaping()


@functools.cache
def _try_shaping() -> str | None:
    probe = f"{_owner_prefix()}-{next(_numbers)}-probe"
    try:
        _call("ip", "netns", "add", probe)
        _call("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", *_shape("1gbit").split())
    except ClusterError as error:
        if "qdisc" in str(error):
            return f"this kernel cannot shape links with tbf (CONFIG_NET_SCH_TBF): {error}"
        return f"no network namespace can be made (in a container: CAP_SYS_ADMIN and CAP_NET_ADMIN): {error}"
    finally:
        _delete(probe)
    return None


def remove_leftovers() -> list[str]:
    """Removes namespaces of this module whose owner has ended, and returns their names. Others are left alone."""
    if sys.platform != "linux" or os.geteuid() != 0 or not NAMESPACES.is_dir():
        return []
    removed = []
    for path in sorted(NAMESPACES.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[1]) != _pid_namespace():
            continue
        if _start_ticks(int(match[2])) != int(match[3]):
            _delete(path.name)
            removed.append(path.name)
    return removed


def _owner_prefix() -> str:
    return f"dear-{_pid_namespace()}-{os.getpid()}-{_start_ticks(os.getpid())}"


def _pid_namespace() -> int:
    """PIDs mean something only inside it, and containers may share /run/netns."""
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if it is no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # after the command's name, which may contain anything
    return None if state in "ZX" else int(fields[18])


def _call(*argv: str, lines: Sequence[str] = ()) -> None:
    """Raises ClusterError with what the command said."""
    done = subprocess.run(
        argv,
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,  # Ctrl-C is for us alone
    )
    if done.returncode:
        raise ClusterError(f"`{' '.join(argv)}` failed: {(done.stderr or done.stdout).strip()}")


def _delete(name: str) -> None:
    if (NAMESPACES / name).exists():
        with contextlib.suppress(ClusterError):  # somebody else may have been faster
            _call("ip", "netns", "delete", name)


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


# ------------------------------------------------------------------------------------------------- inside a namespace


def _enter(namespace: str) -> None:
    """Moves the calling thread, and the threads it will start, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(handle)


def _inside(namespace: str, make: Callable[[], Any]) -> Any:
    """What `make` returns when a thread inside the namespace calls it; sockets and threads it makes stay there."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            _enter(namespace)
            results.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _rank_on_host(
    where: tuple[str, str, int],
    fn: Callable[..., Any],
    rank: int,
    size: int,
    timeout_s: float,
    kwargs: dict[str, Any],
    pipe: Connection,
    launcher_pid: int,
) -> None:
    die_with(launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears it and ends its ranks
    namespace, address, port = where
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    warnings.simplefilter("ignore", FutureWarning)  # new names of torch's collectives, which its older versions lack
    try:
        _enter(namespace)
        timeout = timedelta(seconds=timeout_s)
        result = fn(World(rank, size, dist.TCPStore(address, port, None, False, timeout), timeout), **kwargs)
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise SystemExit(1) from None
    pipe.send((None, result))
    pipe.close()


# ---------------------------------------------------------------------------------------------------- the command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("argv", nargs="*", metavar="COMMAND", help="after `--`; none: says what would be emulated")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Options from which `cluster_of` makes a cluster, for other subcommands."""
    parser.add_argument("--hosts", type=int, default=4, help="emulated hosts, one rank each (4)")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways (1gbit)")
    parser.add_argument("--hosts-per-node", type=int, help="second level: so many hosts share a node's switch")
    parser.add_argument("--uplink-rate", help="second level: of the links between nodes")


def cluster_of(args: argparse.Namespace) -> Cluster:
    try:
        return Cluster(args.hosts, args.rate, hosts_per_node=args.hosts_per_node, uplink_rate=args.uplink_rate)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def run(args: argparse.Namespace) -> int:
    if args.json or args.check:
        raise SystemExit("error: this subcommand measures nothing, so that --json and --check have no meaning here")
    with cluster_of(args) as cluster:
        print(cluster.describe(), file=sys.stderr)
        return cluster.run_command(args.argv, args.timeout_s) if args.argv else 0

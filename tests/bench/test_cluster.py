"""The emulated cluster leaves nothing behind, whatever ends its owner, and never touches what is not its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench import cluster
from bench.cluster import Cluster, ClusterError, remove_leftovers, why_not
from bench.launch import World

REPO = Path(__file__).resolve().parents[2]
REASON = why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no emulated cluster here: {REASON}")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OWNER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs us may ignore them
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from bench.cluster import Cluster
with Cluster(2) as cluster:
    print(*cluster.namespaces, flush=True)
    cluster.run_command(["sleep", "1000"], 1000)
"""


def namespaces() -> set[str]:
    return {path.name for path in cluster.NAMESPACES.iterdir()} if cluster.NAMESPACES.is_dir() else set()


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@contextlib.contextmanager
def owners(count: int) -> Iterator[list[tuple[subprocess.Popen[str], list[str]]]]:
    """Other processes, each with a cluster of two hosts, and the names of its namespaces."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "kernels")])}
    argv = [sys.executable, "-c", _OWNER]
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            processes.append(subprocess.Popen(argv, env=env, text=True, **pipes))
        yield [(process, process.stdout.readline().split()) for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        remove_leftovers()


def eventually(condition: Callable[[], bool], timeout_s: float = 10) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()


def _exchange(world: World) -> tuple[int, set[str], float]:
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    total = torch.full((1000,), float(world.rank + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    devices = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return world.rank, {line.partition(":")[0].strip() for line in devices}, total[0].item()


@needs_namespaces
def test_ranks_meet_inside_and_nothing_is_left() -> None:
    before, devices_before = namespaces(), interfaces()
    with Cluster(2, "500mbit") as two:
        assert two.is_emulated and len(two.namespaces) == 3
        assert namespaces() - before == set(two.namespaces)
        assert "2 emulated hosts" in two.describe() and "500mbit" in two.describe()
        assert interfaces() == devices_before  # the machine's own network has not changed
        by_rank = two.run_ranks(_exchange, timeout_s=60)
        for number in (0, 1):
            for where in (two.namespaces[number], two.namespaces[-1]):
                shown = subprocess.run(["tc", "-n", where, "qdisc"], capture_output=True, text=True, check=True).stdout
                assert "tbf" in shown and "rate 500Mbit" in shown
    assert by_rank == [(rank, {"lo", cluster.INTERFACE}, 3.0) for rank in range(2)]
    assert namespaces() == before


@needs_namespaces
def test_command_has_the_variables_of_a_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    script = 'echo "$RANK $LOCAL_RANK of $WORLD_SIZE at $MASTER_ADDR"; exit $((RANK * 3))'
    with Cluster(2, "1gbit", hosts_per_node=2, uplink_rate="100mbit") as two:
        assert "100mbit between nodes" in two.describe()
        assert two.run_command(["sh", "-c", script.replace("exit", ": ")], 30) == 0
        assert two.run_command(["sh", "-c", script], 30) == 3
        with pytest.raises(TimeoutError):
            two.run_command(["sleep", "60"], 0.2)
    lines = capfd.readouterr().out.splitlines()
    assert {"0 0 of 2 at 198.18.0.1", "1 1 of 2 at 198.18.0.1"} <= set(lines)


@needs_namespaces
def test_signals_tear_down() -> None:
    with owners(len(SIGNALS)) as started:
        for (process, names), number in zip(started, SIGNALS, strict=True):
            assert len(names) == 3 and set(names) <= namespaces()
            process.send_signal(number)
            assert process.wait(20) != 0
            assert not set(names) & namespaces()


@needs_namespaces
def test_next_start_removes_what_a_killed_owner_left_and_nothing_else() -> None:
    foreign = f"not-dear-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        with owners(2) as ((killed, left), (_, running)):
            assert not set(left) & set(running)
            children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children")
            assert eventually(lambda: len(children.read_text().split()) == 2)
            ranks = children.read_text().split()
            killed.kill()
            killed.wait()
            assert eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in ranks))
            assert set(left) <= namespaces()
            with Cluster(2) as two:  # beside the one that is running
                assert not set(left) & namespaces()
                assert {foreign, *running, *two.namespaces} <= namespaces()
            assert {foreign, *running} <= namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", foreign], check=True)


@needs_namespaces
def test_a_failure_while_building_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    monkeypatch.setattr(cluster, "SHAPE", "tbf rate {rate} burst nonsense")
    with pytest.raises(ClusterError, match="nonsense"):
        Cluster(2).__enter__()
    assert namespaces() == before


@needs_namespaces
def test_a_process_forked_from_the_owner_removes_nothing() -> None:
    with Cluster(2) as two:
        child = os.fork()
        if child == 0:
            two.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        assert set(two.namespaces) <= namespaces()


def test_loopback_is_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (why_not() or "")
    with Cluster(2) as two:
        assert not two.is_emulated and two.address(0) == "127.0.0.1"
        assert "loopback" in two.describe() and "root" in two.describe()
        assert two.run_command([sys.executable, "-c", "import os; os.environ['MASTER_PORT']"], 30) == 0
    with pytest.raises(ClusterError, match="root"):
        Cluster(2, required=True).__enter__()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cluster.shutil, "which", lambda name: None if name == "tc" else f"/usr/sbin/{name}")
    assert "`tc` is missing; install iproute2" in (why_not() or "")


@pytest.mark.parametrize(
    ("num_hosts", "options", "match"),
    [
        (0, {}, "num_hosts"),
        (2, {"rate": "fast"}, "rate='fast'"),
        (2, {"hosts_per_node": 2}, "together"),
        (4, {"hosts_per_node": 3, "uplink_rate": "1gbit"}, "divisor"),
    ],
)
def test_bad_arguments(num_hosts: int, options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Cluster(num_hosts, **options)  # type: ignore[arg-type]

"""What launchers say, read and checked, without starting anything.

Cannot see: whether the ranks find each other (every test with the pool of ranks does).
"""

from __future__ import annotations

import socket
import subprocess
import time
from datetime import timedelta

import pytest

from bench.launch import free_port
from dearcore.communicator import LocalCommunicator
from dearcore.errors import ArgumentError, CommunicatorError
from dearcore.rendezvous import Launch, World, read_launch

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29511",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "node7,node9",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_no_launcher_is_one_rank() -> None:
    assert read_launch({}) == Launch(0, 1, 0, 1, "127.0.0.1", 0, "none")


def test_torchrun() -> None:
    assert read_launch(TORCHRUN) == Launch(3, 4, 1, 2, "10.0.0.7", 29511, "torchrun")


def test_open_mpi() -> None:
    on_one_host = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert read_launch(on_one_host) == Launch(3, 4, 3, 4, "127.0.0.1", 29500, "Open MPI")
    with pytest.raises(ArgumentError, match=r"MASTER_ADDR is not set.*2 of 4 ranks"):
        read_launch(OPEN_MPI)
    named = read_launch({**OPEN_MPI, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (named.master_addr, named.master_port) == ("head", 1234)


def test_slurm() -> None:
    assert read_launch(SLURM) == Launch(3, 4, 1, 2, "node7", 29500, "Slurm")
    assert read_launch({**SLURM, "MASTER_ADDR": "head"}).master_addr == "head"


def test_slurm_writes_tasks_per_node_with_repeats() -> None:
    assert read_launch({**SLURM, "SLURM_NTASKS_PER_NODE": "2(x2)"}).local_size == 2


@pytest.mark.parametrize("scontrol", ["prints", "is missing"])
def test_a_compressed_list_of_nodes_is_expanded(monkeypatch: pytest.MonkeyPatch, scontrol: str) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command == ["scontrol", "show", "hostnames", "node[7-9]"]
        if scontrol == "is missing":
            raise FileNotFoundError("scontrol")
        return subprocess.CompletedProcess(command, 0, "node7\nnode8\nnode9\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    env = {**SLURM, "SLURM_JOB_NODELIST": "node[7-9]"}
    if scontrol == "prints":
        assert read_launch(env).master_addr == "node7"
    else:
        with pytest.raises(ArgumentError, match="MASTER_ADDR"):
            read_launch(env)


def test_an_interactive_slurm_shell_is_one_rank() -> None:
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).size == 1
    assert read_launch({"SLURM_NTASKS": "8"}).size == 1  # the batch script itself: srun has not started anything
    assert read_launch({"SLURM_JOB_ID": "17"}).source == "none"


def test_torchrun_wins_over_slurm_and_open_mpi() -> None:
    assert read_launch({**SLURM, **OPEN_MPI, **TORCHRUN}).source == "torchrun"
    assert read_launch({**SLURM, **OPEN_MPI, "MASTER_ADDR": "head"}).source == "Open MPI"


def test_what_may_be_missing_is_taken_from_the_rest() -> None:
    launch = read_launch(without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    assert (launch.local_rank, launch.local_size) == (3, 4)
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}).size == 1  # one rank meets nobody: no address needed


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_of_torchruns_variables_are_an_error_that_names_the_other_half(missing: str) -> None:
    with pytest.raises(ArgumentError, match=rf"\b{missing}\b"):
        read_launch(without(TORCHRUN, missing))


@pytest.mark.parametrize(
    ("env", "missing"), [(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), (SLURM, "SLURM_PROCID")], ids=["Open MPI", "Slurm"]
)
def test_a_missing_rank_is_named(env: dict[str, str], missing: str) -> None:
    if missing == "SLURM_PROCID":  # without it nobody was started by srun
        assert read_launch(without(env, missing)).size == 1
        return
    with pytest.raises(ArgumentError, match=missing):
        read_launch(without(env, missing))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "one"}, "RANK='one'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"RANK": ""}, "RANK=''"),
        ({"RANK": "4"}, "RANK=4 but WORLD_SIZE=4"),
        ({"RANK": "1.5"}, "RANK='1.5'"),
        ({"RANK": "1x"}, "RANK='1x'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
    ],
)
def test_wrong_values_are_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(ArgumentError, match=named.replace("(", r"\(")):
        read_launch({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 but OMPI_COMM_WORLD_SIZE=4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "x"}, "OMPI_COMM_WORLD_LOCAL_RANK='x'"),
        ({**SLURM, "SLURM_PROCID": "9"}, "SLURM_PROCID=9 but SLURM_NTASKS=4"),
        ({**SLURM, "SLURM_LOCALID": "x"}, "SLURM_LOCALID='x'"),
        ({**SLURM, "SLURM_NTASKS": "four"}, "SLURM_NTASKS"),
    ],
)
def test_wrong_values_of_other_launchers_are_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        read_launch(env)


# Worlds of one process


def one_rank() -> World:
    return World(read_launch({}), timedelta(seconds=5), deterministic=False)


def test_one_rank_needs_no_store() -> None:
    world = one_rank()
    assert (world.rank, world.size, world.store) == (0, 1, None)
    communicator, _ = world.new_communicator((0,))
    assert isinstance(communicator, LocalCommunicator)
    world.close()


def test_groups_are_checked() -> None:
    world = one_rank()
    assert world.ranks_of(None) == (0,)
    assert world.ranks_of([0]) == (0,)
    for group in ([1], [0, 0], [0, 1], []):
        with pytest.raises(ArgumentError, match="group has the ranks"):
            world.ranks_of(group)
    for group in ("0", 3, object()):
        with pytest.raises(ArgumentError, match="group"):
            world.ranks_of(group)


def test_shutdown_closes_what_is_still_alive() -> None:
    world, closed = one_rank(), []

    class Thing:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self, patience_s: float | None = None) -> None:
            closed.append(self.name)

    kept, dropped = Thing("kept"), Thing("dropped")
    world.on_shutdown(kept)
    world.on_shutdown(dropped)
    del dropped
    world.close()
    assert closed == ["kept"]


def test_a_port_in_use_is_a_quick_error_with_address_and_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start_s = time.monotonic()
        with pytest.raises(CommunicatorError, match=rf"cannot listen on.*127\.0\.0\.1:{port}"):
            World(Launch(0, 2, 0, 2, "127.0.0.1", port, "torchrun"), timedelta(seconds=2), deterministic=False)
        assert time.monotonic() - start_s < 10


def test_nobody_listening_is_an_error_with_address_and_port() -> None:
    port = free_port()
    with pytest.raises(CommunicatorError, match=rf"cannot reach rank 0 at.*127\.0\.0\.1:{port}"):
        World(Launch(1, 2, 1, 2, "127.0.0.1", port, "torchrun"), timedelta(seconds=1), deterministic=False)


def test_a_name_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(CommunicatorError, match=r"MASTER_ADDR='nosuch\.invalid'"):
        World(Launch(1, 2, 1, 2, "nosuch.invalid", 29500, "torchrun"), timedelta(seconds=1), deterministic=False)

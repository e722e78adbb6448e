"""Variables, addresses and ports that are wrong: an error in seconds, on the rank that has them, that names them.

In ranks of the pool, which set their own environment before `dear.init()`.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import pytest

import dear
from tests.support.ranks import RankPool, assert_raised, rank

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SECONDS = 8.0
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def init_with(changes: dict[str, str | None], launcher: bool = True) -> float:
    """Must fail, and soon."""
    if not launcher:
        for name in (*LAUNCHER, "TORCHELASTIC_USE_AGENT_STORE"):
            os.environ.pop(name, None)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    start_s = time.monotonic()
    try:
        dear.init(backend="gloo", timeout=timedelta(seconds=30))
    finally:
        assert time.monotonic() - start_s < SECONDS
    return time.monotonic() - start_s


ALONE = {"TORCHELASTIC_USE_AGENT_STORE": None}


@pytest.mark.parametrize(
    ("changes", "launcher", "error", "text"),
    [
        ({"RANK": None}, True, "ArgumentError", "RANK=''"),
        ({"WORLD_SIZE": None}, True, "ArgumentError", "WORLD_SIZE=''"),
        ({"MASTER_ADDR": None}, True, "ArgumentError", "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "many"}, True, "ArgumentError", "MASTER_PORT='many'"),
        ({"RANK": "7"}, True, "ArgumentError", "RANK=7 but WORLD_SIZE=2"),
        ({"MASTER_ADDR": "no.such.invalid", **ALONE}, True, "CommunicatorError", "MASTER_ADDR='no.such.invalid'"),
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, True, "ArgumentError", "GLOO_SOCKET_IFNAME='nosuch0'.*lo"),
        (OPEN_MPI, False, "ArgumentError", "MASTER_ADDR is not set.*Open MPI"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": None}, False, "ArgumentError", "OMPI_COMM_WORLD_RANK"),
        ({"SLURM_PROCID": "9", "SLURM_NTASKS": "4"}, False, "ArgumentError", "SLURM_PROCID=9 but SLURM_NTASKS=4"),
    ],
)  # fmt: skip
def test_wrong_variables_are_named(
    pool: RankPool, changes: dict[str, str | None], launcher: bool, error: str, text: str
) -> None:
    assert_raised(pool.run(init_with, changes, launcher, size=2, init=False, expect_errors=True), error, text)


def test_a_wrong_interface_on_one_host(pool: RankPool) -> None:
    """The other ranks wait for it until their timeout; here the launcher's, which ends the job at once."""
    outcomes = pool.run(interface_of_one, size=2, init=False, expect_errors=True, group_timeout_s=5)
    assert_raised(outcomes, "ArgumentError", "GLOO_SOCKET_IFNAME='nosuch0'", ranks=[1])
    assert_raised(outcomes, "CommunicatorError", "every rank was started", ranks=[0])


def interface_of_one() -> None:
    if rank() == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    dear.init(backend="gloo", timeout=timedelta(seconds=3))


def test_a_taken_port_is_named(pool: RankPool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        changes = {"MASTER_PORT": str(port), "RANK": "0", **ALONE}
        outcomes = pool.run(init_with, changes, size=2, init=False, expect_errors=True, timeout_s=30)
    assert_raised(outcomes, "CommunicatorError", rf"cannot listen on MASTER_ADDR:MASTER_PORT = 127\.0\.0\.1:{port}")

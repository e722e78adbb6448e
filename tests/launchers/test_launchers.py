"""Every way to start ranks, in fresh processes, and every way to end them.

Cannot see: real hosts, Slurm itself (its variables are set by hand).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

import pytest

from bench.cluster import Cluster, why_not
from bench.launch import free_port
from tests.launchers.commands import Job, start, torchrun

PROGRAM = "tests/launchers/program.py"
END_S = 10.0  # for a job that was told to end


def check_hellos(job: Job, size: int, local_size: int) -> None:
    output = job.wait(100)
    assert job.status == 0, output
    total = size * (size + 1) // 2
    for rank in range(size):
        hello = f"rank {rank} of {size}, {rank % local_size} of {local_size} here: sum {total}"
        assert hello in output, output
    assert job.survivors() == [], output


def test_plain_python_is_one_rank() -> None:
    check_hellos(start(sys.executable, PROGRAM, "train"), 1, 1)


def test_mpirun() -> None:
    """Open MPI's own variables are enough on one host; nothing of MPI is loaded into the ranks."""
    if shutil.which("mpirun") is None:
        pytest.skip("needs Open MPI: apt-get install openmpi-bin")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "MASTER_PORT"]
    check_hellos(start(*command, sys.executable, PROGRAM, "train", MASTER_PORT=str(free_port())), 2, 2)


def test_slurms_variables() -> None:
    port = str(free_port())
    jobs = [
        start(
            sys.executable,
            PROGRAM,
            "train",
            SLURM_PROCID=str(rank),
            SLURM_NTASKS="2",
            SLURM_LOCALID=str(rank),
            SLURM_NTASKS_PER_NODE="2(x1)",
            SLURM_JOB_NODELIST="localhost",
            MASTER_PORT=port,
        )
        for rank in range(2)
    ]
    for rank, job in enumerate(jobs):
        output = job.wait(100)
        assert job.status == 0, output
        assert f"rank {rank} of 2, {rank} of 2 here: sum 3" in output


def test_torchrun_on_two_hosts() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"needs network namespaces: {reason}")
    torch_run = f"{sys.executable} -m torch.distributed.run --nnodes 2 --node-rank $RANK --nproc-per-node 1"
    script = (
        f"cd {os.getcwd()}; {torch_run} --master-addr $MASTER_ADDR --master-port $MASTER_PORT {PROGRAM} train "
        "| grep 'sum 3'"
    )
    with Cluster(2, required=True) as cluster:
        assert cluster.run_command(["bash", "-o", "pipefail", "-c", script], timeout_s=90) == 0


# ------------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_torchrun_is_told_to_end(how: str) -> None:
    """While one rank waits in a collective for another that never comes."""
    job = torchrun(PROGRAM, "1 sleeps", ranks=2)
    job.wait_for("waiting", 2, 60)
    assert all(f"rank {rank} of 2, {rank} of 2 here: sum 3" in job.output() for rank in range(2)), job.output()
    time.sleep(0.3)
    told_s = time.monotonic()
    if how == "Ctrl-C":
        job.interrupt()
    else:
        job.process.send_signal(signal.SIGTERM)
    output = job.wait(END_S)
    assert job.status != 0, output
    assert job.survivors() == [], output
    assert time.monotonic() - told_s < END_S


def pair(what: str, **env: str) -> list[Job]:
    """Two ranks without a launcher; rank 0 is the store's host."""
    port = str(free_port())
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
    return [start(sys.executable, PROGRAM, what, RANK=str(rank), **common) for rank in range(2)]


def test_ranks_are_told_to_end_one_by_one() -> None:
    """Ctrl-C reaches the rank that waits, SIGTERM the one that sleeps."""
    jobs = pair("1 sleeps")
    for job in jobs:
        job.wait_for("waiting", 1, 60)
    time.sleep(0.3)
    jobs[0].interrupt()
    jobs[1].process.send_signal(signal.SIGTERM)
    outputs = [job.wait(END_S) for job in jobs]
    assert "KeyboardInterrupt" in outputs[0]
    assert [job.status for job in jobs] == [1, -signal.SIGTERM] or jobs[0].status == -signal.SIGINT
    assert all(job.survivors() == [] for job in jobs)


def test_the_host_of_the_store_is_killed() -> None:
    """Without a launcher's agent that is rank 0; rank 1 waits for it in a collective."""
    jobs = pair("0 sleeps", PROGRAM_TIMEOUT_S="30")
    for job in jobs:
        job.wait_for("waiting", 1, 60)
    time.sleep(0.3)
    jobs[0].process.kill()
    output = jobs[1].wait(END_S)
    assert jobs[1].status == 1, output
    assert "CommunicatorError" in output and "rank 0" in output.lower(), output
    print(output.splitlines()[-1])
    assert all(job.survivors() == [] for job in jobs)

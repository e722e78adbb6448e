"""K. Launch, environment, exit: what is wrong is said in seconds and by name; nobody stays behind.

Launchers, restarts and killed ranks: tests/faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import dear
from bench.launch import free_port
from tests.cases.harness import Twin, on_ranks, ones, raises_at_once
from tests.support.ranks import RankPool, rank

REPO = Path(__file__).resolve().parents[2]


def plain_environment(**values: str | None) -> None:
    """This rank as if started by hand: no agent's store; `values` set, None removes."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """Another job, which is no store and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def store_of_another_job() -> Iterator[int]:
    """In another process: within one, torch would share it."""
    port, (ready, ready_there) = free_port(), os.pipe()
    pid = os.fork()
    if not pid:
        store = dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
        os.write(ready_there, b"up")
        time.sleep(60)
        os._exit(0 if store else 1)
    try:
        os.read(ready, 2)
        yield port
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(ready_there)


# ---------------------------------------------------------------------------------------------------- start


@on_ranks(1, init=False)
@pytest.mark.parametrize("other", ["a_socket", "a_store"])
def test_case_083_torchtune_392_port_taken(other: str) -> None:
    """Also facebookresearch/detectron2#91: rank 0 cannot listen where another job does."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(listening()) if other == "a_socket" else stack.enter_context(store_of_another_job())
        plain_environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        says = rf"cannot listen on MASTER_ADDR:MASTER_PORT = 127\.0\.0\.1:{port}.*free"
        with raises_at_once(dear.CommunicatorError, says):
            dear.init(timeout=timedelta(seconds=20))
        assert not dear.is_initialized()


@on_ranks(1, init=False)
@pytest.mark.parametrize("at", ["nobody", "a_mute_listener"])
def test_case_083_rank_1_does_not_join_another_job(at: str) -> None:
    with listening() as port:
        port = port if at == "a_mute_listener" else free_port()
        plain_environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        start_s = time.monotonic()
        with pytest.raises(dear.CommunicatorError, match=rf"rank 1: cannot reach rank 0 at .* = 127\.0\.0\.1:{port}"):
            dear.init(timeout=timedelta(seconds=1))
        assert time.monotonic() - start_s < 10


@on_ranks(2, init=False, ddp=True)
def test_case_084_megatron_521_process_group_initialised_first() -> None:
    """Also huggingface/accelerate#536: the user's group is used and left alone; init twice is a no-op."""
    with pytest.raises(dear.ScheduleError, match=r"Call dear\.init\(\) first"):
        dear.DistributedOptimizer(optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), nn.Linear(2, 2))
    dear.init(timeout=timedelta(seconds=8))
    dear.init()
    dear.init(backend="local")  # still a no-op
    assert (dear.rank(), dear.size()) == (dist.get_rank(), dist.get_world_size()) == (rank(), 2)
    twin = Twin(nn.Linear(4, 1))
    twin.train(lambda m, r: m(ones(r)).sum(), 2)
    twin.check()
    dear.shutdown()
    dear.shutdown()
    assert dist.is_initialized()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    dear.init(timeout=timedelta(seconds=8))  # and again
    assert dear.allreduce(torch.full((2,), dear.rank() + 1.0)).tolist() == [1.5, 1.5]


@on_ranks(2)
def test_case_084_process_group_initialised_afterwards() -> None:
    """Neighbour: the other order."""
    twin = Twin(nn.Linear(4, 1))
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    twin.train(lambda m, r: m(ones(r)).sum(), 2)
    dist.destroy_process_group()
    twin.train(lambda m, r: m(ones(r)).sum(), 2)
    twin.check()


CALLS_BEFORE_INIT = {
    "rank": lambda: dear.rank(),
    "size": lambda: dear.size(),
    "device": lambda: dear.device(),
    "local_rank": lambda: dear.local_rank(),
    "allreduce": lambda: dear.allreduce(torch.ones(2)),
    "barrier": lambda: dear.barrier(),
    "broadcast_parameters": lambda: dear.broadcast_parameters(nn.Linear(2, 2).state_dict()),
    "broadcast_optimizer_state": lambda: dear.broadcast_optimizer_state(optim.SGD([torch.ones(1)], lr=0.1)),
}


@pytest.mark.parametrize("call", CALLS_BEFORE_INIT)
def test_case_084_calls_without_init(call: str) -> None:
    assert not dear.is_initialized()
    with pytest.raises(dear.ScheduleError, match=r"dear is not initialised\. Call dear\.init\(\) first"):
        CALLS_BEFORE_INIT[call]()


@on_ranks(2, init=False)
@pytest.mark.parametrize("what", ["interface", "host_name", "empty_addr", "no_port", "bad_port", "half_set"])
def test_case_085_pytorch_26166_wrong_addresses(what: str) -> None:
    """Also pytorch/gloo#70, aws-samples/aws-do-eks PR#51, #69: an error in seconds that names the variable."""
    if what == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch"
        error, says = dear.ArgumentError, r"GLOO_SOCKET_IFNAME='nosuch'"
    elif what == "host_name":
        plain_environment(MASTER_ADDR="nosuch.invalid", MASTER_PORT="29500")
        error, says = dear.CommunicatorError, r"cannot resolve MASTER_ADDR='nosuch\.invalid'"
    elif what == "empty_addr":
        plain_environment(MASTER_ADDR="")
        error, says = dear.ArgumentError, r"MASTER_ADDR is not set, but WORLD_SIZE=2"
    elif what == "no_port":
        plain_environment(MASTER_PORT=None)
        error, says = dear.ArgumentError, r"MASTER_PORT is not set, but WORLD_SIZE=2"
    elif what == "bad_port":
        plain_environment(MASTER_PORT="http")
        error, says = dear.ArgumentError, r"MASTER_PORT='http' is not a whole number from 1 to 65535"
    else:
        plain_environment(WORLD_SIZE=None)
        error, says = dear.ArgumentError, r"WORLD_SIZE='' is not a whole number"
    with raises_at_once(error, says):
        dear.init(timeout=timedelta(seconds=8))
    assert not dear.is_initialized()


# ---------------------------------------------------------------------------------------------------- exit


ZYGOTE = """
import json, os, sys
import torch, torch._dynamo, torch.distributed  # imported once; it forks every rank before it has threads
pids = {}
for name, arguments, env, out in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        os.environ.update(env)
        for fd, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(out + "." + kind, os.O_WRONLY | os.O_CREAT, 0o600), fd)
        sys.argv = ["script", *arguments]
        break  # and runs the script as its own main program, to the interpreter's own end
    pids[pid] = name
else:
    print(json.dumps(pids), flush=True)
    codes = {}
    while pids:
        pid, status = os.wait()
        codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(codes), flush=True)
    os._exit(0)
"""
TRAIN = """
import os, sys, time
import torch, dear
from datetime import timedelta
if sys.argv[1] == "destroy":
    torch.distributed.init_process_group("gloo")
dear.init(timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = dear.DistributedOptimizer(torch.optim.Adam(model.parameters()), model, fusion=0.01)
for step in range(3):
    if sys.argv[1] == "wait" and step == 2:
        print("waiting", flush=True)
        if dear.rank() == 1:
            dear.barrier()  # which rank 0 never joins
    optimizer.zero_grad()
    model(torch.full((2, 64), dear.rank() + 1.0)).square().mean().backward()
    optimizer.step()
    if sys.argv[1] == "wait":
        optimizer.synchronize()
if sys.argv[1] == "save" and dear.rank() == 0:
    torch.save(model.state_dict(), sys.argv[2])
if sys.argv[1] == "destroy":
    torch.distributed.destroy_process_group()
"""
JOBS = ("wait", "save", "destroy")


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    errors: str


@dataclass(frozen=True, slots=True)
class Jobs:
    ended: dict[str, list[Ended]]  # by job, then by rank
    folder: Path
    signalled_s: float  # from the signals to the end of both ranks


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Two ranks for each of JOBS, all at once; those of "wait" get SIGINT (rank 0) and SIGTERM (rank 1)."""
    folder = tmp_path_factory.mktemp("jobs")
    ranks: list[tuple[str, list[str], dict[str, str], str]] = []
    for job in JOBS:
        address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for r in range(2):
            env = address | {"RANK": str(r), "LOCAL_RANK": str(r)}
            ranks.append((f"{job} {r}", [job, str(folder / "saved.pt")], env, str(folder / f"{job}{r}")))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "kernels")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "attempts:0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", ZYGOTE + TRAIN, json.dumps(ranks)]
    zygote = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert zygote.stdout is not None
    try:
        pids = {name: int(pid) for pid, name in json.loads(zygote.stdout.readline()).items()}
        waiting = [folder / f"wait{r}.out" for r in range(2)]
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not all(p.exists() and p.read_text() == "waiting\n" for p in waiting):
            time.sleep(0.1)
        time.sleep(0.5)  # each is in its wait by now
        sent_s = time.monotonic()
        for r, number in enumerate((signal.SIGINT, signal.SIGTERM)):
            os.kill(pids[f"wait {r}"], number)
        while time.monotonic() < deadline and any(_is_alive(pids[f"wait {r}"]) for r in range(2)):
            time.sleep(0.1)
        signalled_s = time.monotonic() - sent_s
        output, _ = zygote.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(zygote.pid, signal.SIGKILL)
        zygote.wait()
    codes = json.loads(output)
    ended = {
        job: [Ended(codes[f"{job} {r}"], (folder / f"{job}{r}.err").read_text()) for r in range(2)] for job in JOBS
    }
    return Jobs(ended, folder, signalled_s)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(300)  # on a busy machine
def test_case_086_byteps_7_ctrl_c_and_sigterm_during_a_wait(jobs: Jobs) -> None:
    """Also ultralytics/ultralytics#8232: all ranks are gone within seconds."""
    interrupted, terminated = jobs.ended["wait"]
    assert "KeyboardInterrupt" in interrupted.errors and interrupted.code in (-signal.SIGINT, 1, 130)
    assert terminated.code == -signal.SIGTERM
    assert jobs.signalled_s < 25, "not the timeout of 60 s"


@pytest.mark.timeout(300)
def test_case_087_pytorch_179291_exit_with_work_pending(jobs: Jobs) -> None:
    """Also pytorch/pytorch#75097: exit code 0, no abort; what was saved is the last step's."""
    for job in ("save", "destroy"):
        for r, ended in enumerate(jobs.ended[job]):
            assert ended.code == 0, f"{job}, rank {r}: {ended.errors}"
            assert "Traceback" not in ended.errors and "terminate called" not in ended.errors, ended.errors
    saved = torch.load(jobs.folder / "saved.pt")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.stack([model(torch.full((2, 64), r + 1.0)).square().mean() / 2 for r in range(2)]).sum()
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-5)


@on_ranks(2)
@pytest.mark.parametrize("end", ["shutdown", "close", "drop", "shutdown_with_gradients_in_flight"])
def test_case_087_ending_inside_a_process(end: str) -> None:
    """Neighbours: every other way to stop with work pending; the parameters are complete afterwards."""
    twin = Twin(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), fusion=None)
    twin.train(lambda m, r: m(ones(r)).sum(), 3)
    model, plain = twin.model, twin.plain
    if end == "shutdown_with_gradients_in_flight":
        twin.backward(lambda m, r: m(ones(r)).sum())
    if end == "close":
        twin.optimizer.close()
    elif end == "drop":
        del twin
    else:
        dear.shutdown()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.detach(), theirs.detach())
    model(ones(0)).sum().backward()


IMPORT = """
import sys
for name in ("triton", "cupy", "nvidia.nccl", "matplotlib", "bayes_opt"):
    sys.modules[name] = None  # as if not installed
import torch
torch.cuda.is_available = lambda: False
import dear
dear.init()
model = torch.nn.Linear(3, 2)
optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
model(torch.ones(1, 3)).sum().backward()
optimizer.clip_grad_norm_(1.0)
optimizer.step()
optimizer.synchronize()
assert dear.device().type == "cpu"
dear.shutdown()
try:
    dear.init(backend="nccl")
except dear.DearError as error:
    print(error)
"""


def test_case_088_pytorch_139990_machine_without_cuda_triton_cupy_nccl() -> None:
    """Also pytorch/gloo#365: gloo's own reduce_scatter is not used (case 89)."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "kernels")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"nccl", done.stdout, re.IGNORECASE), f"the missing part is named: {done.stdout}"


class SendReceiveOnly:
    """A gloo as old as one likes: anything but messages and broadcasts is missing."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name not in ("send", "recv", "broadcast", "abort", "shutdown"):
            raise RuntimeError(f"this gloo has no {name}")
        return getattr(self._group, name)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_089_insightface_1813_no_reduce_scatter_avg_or_bf16_in_gloo(dtype: torch.dtype) -> None:
    """Also pytorch/pytorch#111131, PR#149869, PR#149781: nothing of gloo but send, recv and broadcast is needed."""
    twin = Twin(nn.Linear(4, 2).to(dtype), master_dtype=None)
    communicator = twin.optimizer._engine.communicator
    communicator._group = SendReceiveOnly(communicator._group)
    twin.train(lambda m, r: m(ones(r).to(dtype)).sum(), 3)
    twin.optimizer.clip_grad_norm_(1.0)
    twin.optimizer.state_dict()
    twin.check()


def test_case_089_the_minimum_version_is_stated() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    (requirement,) = [d for d in project["dependencies"] if d.startswith("torch")]
    least = re.fullmatch(r"torch>=(\d+)\.(\d+)", requirement)
    assert least is not None
    have = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert have >= (int(least[1]), int(least[2]))
    assert f"torch >= {least[1]}.{least[2]}" in (REPO / "README.md").read_text()


@on_ranks(2)
def test_case_090_pytorch_22260_threads() -> None:
    """Ranks of these tests compute on one thread; an optimizer adds at most four, and none a step."""
    assert os.environ["OMP_NUM_THREADS"] == "1" and torch.get_num_threads() == 1
    before = threading.active_count()
    twin = Twin(nn.Linear(4, 1))
    twin.train(lambda m, r: m(ones(r)).sum())
    during = threading.active_count()
    assert during - before <= 4
    twin.train(lambda m, r: m(ones(r)).sum(), 20)
    assert threading.active_count() == during
    twin.optimizer.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before


def test_case_090_one_thread_everywhere(pool: RankPool) -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert pool.run(torch.get_num_threads, size=2, init=False) == [1, 1]

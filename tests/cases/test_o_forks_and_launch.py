"""O. Forks, launches and calls that not all ranks make: a child touches nothing of its parent's; errors name the rank.

Cannot see: children of ranks that have used a GPU, which CUDA forbids; NCCL.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

import dear
from bench.launch import free_port
from dear.context import over_the_network
from dear.parameters import PendingParameter
from tests.cases.harness import Twin, made, on_ranks, ones

CHILD_S = 30.0  # for a child to end, on a busy machine
NETWORKS = ("memory", "sockets")


class Net(nn.Sequential):
    """Odd sizes, several buckets."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def loss(model: nn.Module, rank: int) -> Tensor:
    return model(ones(rank, 2, 5) / 5).square().mean()


def twin_over(network: str, **options: Any) -> Twin:
    with over_the_network() if network == "sockets" else contextlib.nullcontext():
        return Twin(Net(), made(optim.Adam, lr=0.01, eps=1e-3), fusion=None, **options)


def in_child(act: Callable[[], Any]) -> str:
    """What `act` returned or raised in a forked process, as text. Of the child nothing is run but `act` itself."""
    return wait_for(start_child(act))


def start_child(act: Callable[[], Any]) -> tuple[int, int]:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writable)
        return pid, readable
    code = 1
    try:
        try:
            said = str(act())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writable, said.encode())
        code = 0
    finally:
        os._exit(code)


def wait_for(child: tuple[int, int]) -> str:
    pid, readable = child
    deadline = time.monotonic() + CHILD_S
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(readable)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    with os.fdopen(readable, "rb") as pipe:
        return pipe.read().decode()


@contextlib.contextmanager
def held_back(twin: Twin) -> Iterator[threading.Event]:
    """Nothing is communicated before the event is set: parameters stay on their way."""
    go = threading.Event()
    twin.optimizer._engine.streams.communication.run("", lambda: go.wait(CHILD_S) or None)
    try:
        yield go
    finally:
        go.set()


def check_said(said: str, expected: str) -> None:
    assert said == expected, f"the child said: {said}"


def pending(model: nn.Module) -> int:
    return sum(issubclass(type(param), PendingParameter) for param in model.parameters())


def values(model: nn.Module) -> list[Any]:
    return [param.detach().tolist() for param in model.parameters()]


# ---------------------------------------------------------------------------------------------------- S7


def _end_of_interpreter(twin: Twin) -> None:
    """As after `sys.exit()`: exit handlers, the end of every module and object, destructors of C++."""
    ctypes.pythonapi.Py_Exit(0)


def _exit_handlers(twin: Twin) -> None:
    atexit._run_exitfuncs()


def _close(twin: Twin) -> None:
    twin.optimizer.close()
    dear.shutdown()


def _collect(twin: Twin) -> None:
    twin.__dict__.clear()
    gc.collect()


ENDS = {"end_of_interpreter": _end_of_interpreter, "exit_handlers": _exit_handlers, "close": _close, "drop": _collect}


@on_ranks(2)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("end", ENDS)
def test_field_s7_forked_child_ends(end: str, network: str) -> None:
    """However a child ends, the parent's next collectives go on."""
    twin = twin_over(network)
    for _ in range(1 if end == "end_of_interpreter" else 2):
        twin.train(loss, 2)
        check_said(in_child(lambda: ENDS[end](twin)), "" if end == "end_of_interpreter" else "None")
    dear.barrier()
    twin.train(loss, 2)
    twin.optimizer.state_dict()
    twin.check()


def work(number: int) -> int:
    return number * 2


def exits(number: int) -> None:
    sys.exit(number)


def put_sum(queue: Any, tensor: Tensor) -> None:
    queue.put(float(tensor.sum()))


@on_ranks(2)
@pytest.mark.parametrize("network", NETWORKS)
def test_field_s7_multiprocessing_in_a_training_loop(network: str) -> None:
    twin = twin_over(network)
    context = multiprocessing.get_context("fork")
    twin.train(loss, 2)
    for target, code in ((work, 0), (exits, 3)):
        process = context.Process(target=target, args=(3,))
        process.start()
        twin.train(loss)
        process.join(CHILD_S)
        assert process.exitcode == code
        twin.train(loss)
    with context.Pool(2) as pool:
        twin.train(loss)
        assert pool.map(work, [1, 2, 3]) == [2, 4, 6]
        twin.train(loss)
    twin.train(loss)
    torch_context = torch.multiprocessing.get_context("fork")
    queue = torch_context.SimpleQueue()
    torch_process = torch_context.Process(target=put_sum, args=(queue, twin.model[0].weight))
    expected = float(twin.plain[0].weight.sum())
    torch_process.start()
    twin.train(loss)
    assert queue.get() == pytest.approx(expected)
    torch_process.join(CHILD_S)
    twin.train(loss)
    twin.check()


CALLS: dict[str, Callable[[Twin], Any]] = {
    "step": lambda t: t.optimizer.step(),
    "zero_grad": lambda t: t.optimizer.zero_grad(),
    "state_dict": lambda t: t.optimizer.state_dict(),
    "clip": lambda t: t.optimizer.clip_grad_norm_(1.0),
    "synchronize": lambda t: t.optimizer.synchronize(),
    "join": lambda t: t.optimizer.join(),
    "backward": lambda t: loss(t.model, 0).backward(),
    "rank": lambda t: dear.rank(),
    "barrier": lambda t: dear.barrier(),
    "allreduce": lambda t: dear.allreduce(torch.ones(3)),
    "wrap": lambda t: dear.DistributedOptimizer(t.wrapped, t.model),
}


@on_ranks(2)
def test_field_s7_calls_in_a_child_say_that_it_was_forked() -> None:
    twin = twin_over("memory")
    twin.train(loss, 2)
    twin.zero_grad()
    twin.backward(loss)

    def all_calls() -> str:
        assert not dear.is_initialized()
        for look in (twin.optimizer.stats(), twin.optimizer.plan, twin.optimizer):  # these are local
            str(look)
        twin.model(torch.ones(1, 5))  # evaluation is as ever
        wrong = []
        for name, call in CALLS.items():
            try:
                call(twin)
            except dear.ScheduleError as error:
                if f"forked from rank {rank} of 2" in str(error) and "only the parent trains" in str(error):
                    continue
                wrong.append(f"{name}: {error}")
            else:
                wrong.append(f"{name}: nothing")
        return "; ".join(wrong) or "all right"

    rank = dear.rank()
    check_said(in_child(all_calls), "all right")
    twin.step()
    twin.check()


@on_ranks(2)
def test_field_s7_a_child_that_calls_init_trains_on_its_own() -> None:
    twin = twin_over("memory")
    twin.train(loss, 2)

    def same_variables() -> None:
        dear.init()

    def alone() -> str:
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name)
        plain = copy.deepcopy(twin.model)
        dear.init()
        child = dear.DistributedOptimizer(optim.SGD(twin.model.parameters(), lr=0.1), twin.model)
        torch_optimizer = optim.SGD(plain.parameters(), lr=0.1)
        for model, optimizer in ((twin.model, child), (plain, torch_optimizer)):
            for _ in range(3):
                optimizer.zero_grad()
                loss(model, 5).backward()
                optimizer.step()
        assert values(twin.model) == values(plain)
        dear.shutdown()
        return "trained"

    assert in_child(same_variables).startswith(f"ArgumentError: this process was forked from rank {dear.rank()} and")
    twin.train(loss)
    twin.backward(loss)  # gradients of the parent are on their way when the child begins
    check_said(in_child(alone), "trained")
    twin.step()
    twin.check()


@on_ranks(2)
def test_field_s7_children_are_a_job_of_their_own() -> None:
    twin = twin_over("memory")
    twin.train(loss, 2)
    port = dear.broadcast_object(free_port())

    def join() -> str:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ["MASTER_PORT"] = str(port)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dear.init(backend="gloo")
        theirs = dear.allreduce(torch.tensor([rank + 1.0]), dear.Sum).item()
        assert dear.size() == size
        dear.barrier()
        return str(theirs)

    child = start_child(join)
    twin.train(loss)
    check_said(wait_for(child), "3.0")
    twin.train(loss)
    twin.check()


@on_ranks(2, init=False, ddp=True)
def test_field_s7_a_child_does_not_use_its_parents_process_group() -> None:
    dear.init(backend="gloo")
    twin = Twin(Net())
    twin.train(loss)
    said = in_child(dear.init)
    assert said.startswith("ScheduleError: torch.distributed was initialised before this process was forked"), said
    twin.train(loss)
    twin.check()


@on_ranks(2)
def test_field_s7_locks_that_other_threads_held() -> None:
    """A child inherits them locked, and must not wait for any."""
    twin = twin_over("memory")
    twin.train(loss, 2)
    engine = twin.optimizer._engine
    heartbeat = engine.peers._heartbeat
    assert heartbeat is not None

    def everything() -> str:
        values(twin.model)
        twin.optimizer.stats()
        with contextlib.suppress(dear.ScheduleError):
            twin.optimizer.step()
        twin.optimizer.close()
        dear.shutdown()
        twin.__dict__.clear()
        gc.collect()
        atexit._run_exitfuncs()
        return "ended"

    with held_back(twin) as go:
        locks = [heartbeat._lock, engine.trace._lock]
        for lock in locks:
            lock.acquire()
        threading.Timer(0.2, go.set).start()
        try:
            child = start_child(everything)
        finally:
            for lock in locks:
                lock.release()
    check_said(wait_for(child), "ended")
    twin.train(loss)
    twin.check()


# ---------------------------------------------------------------------------------------------------- H1


@on_ranks(2)
@pytest.mark.parametrize("network", NETWORKS)
def test_field_h1_fork_right_after_step(network: str) -> None:
    """Parameters are fresh before the fork, and the child keeps them as they were then."""
    twin = twin_over(network)
    twin.train(loss, 2)
    twin.zero_grad()
    twin.backward(loss)
    with held_back(twin) as go:
        twin.step()
        assert pending(twin.model) == 4
        threading.Timer(0.2, go.set).start()
        trained, goes_on = os.pipe()

        def reads() -> str:
            at_once = values(twin.model)
            os.read(trained, 1)
            assert values(twin.model) == at_once, "what the parent gathers later is not seen"
            return str(at_once)

        child = start_child(reads)
    expected = str(values(twin.model))
    twin.train(loss, 2)
    twin.optimizer.synchronize()
    os.write(goes_on, b"x")
    check_said(wait_for(child), expected)
    twin.check()


@on_ranks(2)
def test_field_h1_subprocess_does_not_wait() -> None:
    """What runs another program needs no parameters."""
    twin = twin_over("memory")
    twin.train(loss, 2)
    twin.zero_grad()
    twin.backward(loss)
    with held_back(twin):
        twin.step()
        subprocess.run(["true"], check=True)
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        assert pending(twin.model) == 4
    twin.train(loss)
    twin.check()


@on_ranks(2)
def test_field_h1_a_thread_that_cannot_wait() -> None:
    """Neighbour: where the fork could not wait, the child is told at the touch; it does not hang."""
    twin = twin_over("memory")
    twin.train(loss, 2)
    twin.zero_grad()
    twin.backward(loss)
    said: list[str] = []
    with held_back(twin) as go:
        twin.step()
        thread = threading.Thread(
            target=lambda: said.append(in_child(lambda: values(twin.model))), name="dear-communication"
        )
        thread.start()
        thread.join()
        go.set()
    assert "ScheduleError: this value was on its way to the process that this one was forked from" in said[0]
    twin.train(loss)
    twin.check()


@on_ranks(2, group_timeout_s=2.0, timeout_s=40)
def test_field_h1_fork_when_communication_has_failed() -> None:
    """The fork itself raises nothing; whoever touches a parameter is told, here and in the child."""
    twin = twin_over("memory")
    twin.train(loss, 2)
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    if dear.rank() == 0:  # the other rank never steps
        loss(twin.model, 0).backward()
        twin.optimizer.step()
        said = in_child(lambda: values(twin.model))
        assert "CommunicatorError: rank 0 of 2: " in said and "Rank 1 has not joined" in said, said
        with pytest.raises(dear.CommunicatorError, match="Rank 1 has not joined"):
            values(twin.model)
    sys.unraisablehook = sys.__unraisablehook__
    assert not ignored


class UsesModel(Dataset[Tensor]):
    """Inputs that depend on the model's weights, as hard-example mining would have them."""

    def __init__(self, model: nn.Module, length: int = 2) -> None:
        self.model, self.length = model, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.model(torch.full((5,), index + 1.0)).mean().expand(5) + index


class Plain(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((5,), index + 1.0)


LOADERS: dict[str, dict[str, Any]] = {
    "fork": {"multiprocessing_context": "fork"},
    "fork_persistent": {"multiprocessing_context": "fork", "persistent_workers": True},
    "forkserver_persistent": {"multiprocessing_context": "forkserver", "persistent_workers": True},
    "spawn": {"multiprocessing_context": "spawn", "persistent_workers": True},
}


@on_ranks(2, timeout_s=120)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", LOADERS)
def test_field_h1_data_loader_workers(kind: str) -> None:
    """Batches that workers make, in a training loop: weights equal those of a run that makes them itself."""
    twin = twin_over("memory")
    twin.train(loss)
    loader = DataLoader(Plain(), num_workers=1, timeout=60, **LOADERS[kind])
    for _ in range(3):
        for batch in loader:
            twin.train(lambda m, r, x=batch: m(x * (r + 1) / 5).square().mean())
    del loader
    twin.train(loss)
    twin.check()


@on_ranks(2, timeout_s=60)
def test_field_h1_data_loader_whose_dataset_uses_the_model() -> None:
    """New workers each epoch, forked right after a step: they see that step's weights."""
    twin = twin_over("memory")
    twin.train(loss)
    loader = DataLoader(UsesModel(twin.model), num_workers=1, multiprocessing_context="fork", timeout=20)
    for _ in range(3):
        expected = [UsesModel(twin.plain)[i] for i in range(2)]
        batches = list(loader)
        for batch, same in zip(batches, expected, strict=True):
            assert torch.equal(batch[0], same)
        twin.train(lambda m, r, x=batches[0]: m(x * (r + 1) / 5).square().mean())
    twin.check()


# ---------------------------------------------------------------------------------------------------- H5


def _ddp_of_a_part(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.parallel.DistributedDataParallel(model[0]), model[1], model[2])


def _compressed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


DDP: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "bucket_views": lambda m: nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True),
    "static_graph": lambda m: nn.parallel.DistributedDataParallel(m, static_graph=True),
    "unused": lambda m: nn.parallel.DistributedDataParallel(m, find_unused_parameters=True),
    "compressed": _compressed,
    "part": _ddp_of_a_part,
}


@on_ranks(2, ddp=True)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("how", DDP)
def test_field_h5_wrapped_in_ddp_as_well(how: str, steps_before: int) -> None:
    """Accelerator.prepare(model) and Lightning's DDP strategy do the same: the first backward says so."""
    twin = Twin(Net())
    twin.train(loss, steps_before)
    with pytest.raises(dear.ScheduleError, match=r"averaged twice: .*DistributedDataParallel.*`model\.module`"):
        wrapped = DDP[how](twin.model)  # "bucket_views" fails here already
        loss(wrapped, dear.rank()).backward()


@on_ranks(2, ddp=True)
@pytest.mark.parametrize("part", [False, True])
def test_field_h5_fully_sharded_as_well(part: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    twin = Twin(Net())
    twin.train(loss)
    fully_shard(twin.model[0] if part else twin.model)
    loss(twin.model, dear.rank()).backward()
    with pytest.raises(dear.ScheduleError, match=r"'0\.weight' has become a DTensor .*fully_shard"):
        twin.optimizer.step()

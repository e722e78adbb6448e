"""The far side of `RankPool`: the nursery that forks ranks, and the loop each rank serves.

    pytest --socketpair--> nursery (has imported torch, one thread) --fork--> rank 0, rank 1, ...
    pytest <------------------------ one pipe per rank --------------------------------^

The nursery is a process of its own because pytest has threads, open files and perhaps CUDA, none of which survive a
fork. It pays for `import torch` once, so that replacing ranks after a hang costs milliseconds. It imports nothing that
might touch a device and never runs an operator.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import io
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# Imported once by the nursery. `torch._dynamo` is what the first `torch.optim.X(...)` would import (1 s per rank).
PRELOAD = ("numpy", "pytest", "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class Request:
    """One run, as one rank sees it. `payload` is `dumps((args, kwargs))`: it may need `function`'s module to load."""

    module: str
    qualname: str
    file: str | None
    payload: bytes
    env: dict[str, str]
    sys_path: list[str]
    cwd: str
    seed: int
    init: bool
    ddp: bool
    deterministic: bool | None
    group_timeout_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank's function did: its pickled result as `payload`, or None and in the other fields what it raised."""

    payload: bytes | None = None
    error_type_name: str = ""
    message: str = ""
    traceback: str = ""
    bases: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Idle:
    """Teardown is over; `error` is the traceback of what failed in it."""

    error: str | None = None


def dumps(obj: object) -> bytes:
    """Pickle by value: tensors travel in the bytes, not as shared memory that dies with its rank."""
    import torch

    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def loads(payload: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(payload), weights_only=False)


# ---------------------------------------------------------------------------------------------------- the nursery


def nursery_main(control_fd: int, parent_pid: int) -> None:
    """Serve fork, poll, signal and kill requests until the control socket closes; then kill every rank and return.

    The nursery alone signals and reaps ranks, so a pid is never signalled after it may have been reused.
    """
    _die_with_parent(parent_pid)
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the ranks' own collections then skip what the imports made (100 ms each otherwise)
    exit_codes: dict[int, int | None] = {}
    control.send(pickle.dumps(len(os.listdir("/proc/self/task"))))
    while True:
        message, fds = _receive_with_fds(control)
        if not message:
            break
        verb, *details = pickle.loads(message)
        if verb == "fork":
            pid = _fork_rank(control, fds[0], *details)
            exit_codes[pid] = None
            answer: Any = pid
        elif verb == "poll":
            answer = _reap(exit_codes, details[0], os.WNOHANG)
        elif verb == "signal":
            answer = _signal(exit_codes, details[0], details[1])
        elif verb == "kill":
            answer = _kill(exit_codes, details[0])
        else:
            raise AssertionError(f"unknown request {verb!r}")
        control.send(pickle.dumps(answer))
    for pid in exit_codes:
        _kill(exit_codes, pid)


def _receive_with_fds(control: socket.socket) -> tuple[bytes, list[int]]:
    message, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
    for fd in fds:
        os.set_inheritable(fd, False)
    return message, list(array.array("i", fds))


def _fork_rank(control: socket.socket, pipe_fd: int, log_path: str, stack_path: str) -> int:
    nursery_pid = os.getpid()
    pid = os.fork()
    if pid:
        os.close(pipe_fd)
        return pid
    exit_code = 1
    try:
        os.setsid()  # Ctrl-C is the parent's business, and one killpg also reaches a rank's own children
        _die_with_parent(nursery_pid)
        control.close()
        rank_main(Connection(pipe_fd), log_path, stack_path)
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _reap(exit_codes: dict[int, int | None], pid: int, flags: int) -> int | None:
    if exit_codes[pid] is None:
        reaped, status = os.waitpid(pid, flags)
        if reaped:
            exit_codes[pid] = os.waitstatus_to_exitcode(status)
    return exit_codes[pid]


def _signal(exit_codes: dict[int, int | None], pid: int, signum: int) -> bool:
    if _reap(exit_codes, pid, os.WNOHANG) is not None:
        return False
    os.kill(pid, signum)
    return True


def _kill(exit_codes: dict[int, int | None], pid: int) -> int | None:
    if _reap(exit_codes, pid, os.WNOHANG) is None:
        with contextlib.suppress(ProcessLookupError):  # it may not have reached setsid yet
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    return _reap(exit_codes, pid, 0)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even in the middle of a hang."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


# ---------------------------------------------------------------------------------------------------- a rank


def rank_main(pipe: Connection, log_path: str, stack_path: str) -> None:
    """Run requests until the pipe closes. Everything printed goes to `log_path`; STACK_SIGNAL writes `stack_path`."""
    import torch

    _redirect_output(log_path)
    faulthandler.enable()
    stack_file = open(stack_path, "a")  # noqa: SIM115  (faulthandler writes to it for as long as this process lives)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True, chain=False)
    torch.set_num_threads(1)
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        with restored_process_state(request.seed):
            report = _run(request)
            pipe.send(report)
            del report
            try:
                pipe.recv()  # ranks that succeeded keep their groups open until every rank has reported
            except (EOFError, OSError):
                return
            error = _teardown()
        pipe.send(Idle(error))


def _redirect_output(log_path: str) -> None:
    null_fd = os.open(os.devnull, os.O_RDONLY)
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null_fd, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(null_fd)
    os.close(log_fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _run(request: Request) -> Report:
    try:
        os.environ.clear()
        os.environ.update(request.env)
        os.chdir(request.cwd)
        sys.path[:] = request.sys_path
        function = find_function(request.module, request.qualname, request.file)
        args, kwargs = loads(request.payload)
        _start_groups(request)
        report = Report(payload=dumps(function(*args, **kwargs)))
    except BaseException as error:  # a test function may raise anything, pytest.skip and SystemExit included
        report = Report(
            error_type_name=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            bases=tuple(cls.__name__ for cls in type(error).__mro__),
        )
    return report


def _start_groups(request: Request) -> None:
    timeout = timedelta(seconds=request.group_timeout_s)
    if request.ddp:
        import torch.distributed

        torch.distributed.init_process_group("gloo", timeout=timeout)
    if request.init:
        import dear

        dear.init(backend="gloo", timeout=timeout, deterministic=request.deterministic)


def _teardown() -> str | None:
    """Shut everything down, whatever the run left behind; every part is tried."""
    errors = []
    gc.collect()  # optimizers in reference cycles go before the groups they use
    for part in (_shut_down_dear, _destroy_process_group):
        try:
            part()
        except BaseException:
            errors.append(traceback.format_exc())
    gc.collect()
    return "\n".join(errors) or None


def _shut_down_dear() -> None:
    dear = sys.modules.get("dear")
    if dear is not None and dear.is_initialized():
        dear.shutdown()


def _destroy_process_group() -> None:
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def find_function(module_name: str, qualname: str, file: str | None) -> Callable[..., Any]:
    """Import by name; a test module that pytest imported from outside `sys.path` is loaded from its file."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        if file is None:
            raise
        module = _load_file(module_name, file)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _load_file(module_name: str, file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"cannot load {module_name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def restored_process_state(seed: int) -> Iterator[None]:
    """Seed on entry; on exit put back what test functions like to change: one run must not colour the next."""
    import numpy as np
    import torch

    env, cwd, path = dict(os.environ), os.getcwd(), list(sys.path)
    dtype = torch.get_default_dtype()
    num_threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    algorithms = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.path[:] = path
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])

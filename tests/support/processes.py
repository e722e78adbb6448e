"""The near side of `RankPool`: the nursery and its ranks as processes that are started, watched and killed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.worker import STACK_SIGNAL

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0  # imports on a busy machine
STACK_WAIT_S = 1.0

RANK_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_NURSERY = "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from tests.support.worker import nursery_main; "
_NURSERY += "nursery_main(int(sys.argv[1]), int(sys.argv[2]))"


def import_path() -> list[str]:
    """`sys.path` for ranks: ours, as pytest has set it up, after the checkout."""
    return [str(ROOT), *(entry for entry in sys.path if entry != str(ROOT))]


class Nursery:
    """The process that forks ranks, seen from here: one request, one answer."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", _NURSERY, str(theirs.fileno()), str(os.getpid()), json.dumps(import_path())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **RANK_ENV},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for us alone
        )
        theirs.close()
        self._control.settimeout(START_TIMEOUT_S)
        num_threads = self._answer()
        if num_threads != 1:
            raise RuntimeError(f"the nursery has {num_threads} threads after its imports, so its forks may deadlock")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, pipe_fd: int, log_path: str, stack_path: str) -> int:
        socket.send_fds(self._control, [pickle.dumps(("fork", log_path, stack_path))], [pipe_fd])
        pid: int = self._answer()
        return pid

    def ask(self, verb: str, *details: Any) -> Any:
        """None when the nursery is gone: its ranks are gone with it."""
        try:
            self._control.send(pickle.dumps((verb, *details)))
            return self._answer()
        except (OSError, EOFError):
            return None

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Any:
        message = self._control.recv(1 << 16)
        if not message:
            raise EOFError("the nursery of ranks has ended; its error is on stderr")
        return pickle.loads(message)


@dataclass(slots=True)
class RankProcess:
    """One rank's process, seen from here."""

    nursery: Nursery
    rank: int
    folder: str
    pid: int = field(init=False)
    pipe: Connection = field(init=False)
    log_offset: int = field(init=False, default=0)  # bytes of output that belong to earlier runs
    log_path: Path = field(init=False)
    stack_path: Path = field(init=False)

    def __post_init__(self) -> None:
        handle, log = tempfile.mkstemp(prefix=f"rank{self.rank}-", suffix=".log", dir=self.folder)
        os.close(handle)
        self.log_path = Path(log)
        self.stack_path = self.log_path.with_suffix(".stack")
        self.pipe, theirs = Pipe()
        self.pid = self.nursery.fork(theirs.fileno(), str(self.log_path), str(self.stack_path))
        theirs.close()

    def exit_code(self) -> int | None:
        if not self.nursery.is_alive:
            return -signal.SIGKILL
        code: int | None = self.nursery.ask("poll", self.pid)
        return code

    def describe_exit(self) -> str:
        deadline = time.monotonic() + 5  # a pipe closes a moment before its process can be reaped
        while (code := self.exit_code()) is None:
            if time.monotonic() > deadline:
                return "its pipe closed, but the process is still there"
            time.sleep(0.01)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        self.nursery.ask("kill", self.pid)
        self.pipe.close()

    def stack(self) -> str:
        """Python stacks of all its threads; what the system says of it when it does not answer."""
        with contextlib.suppress(OSError):
            os.truncate(self.stack_path, 0)
        if self.nursery.ask("signal", self.pid, int(STACK_SIGNAL)):
            deadline = time.monotonic() + STACK_WAIT_S
            text = ""
            while time.monotonic() < deadline:
                time.sleep(0.05)
                previous, text = text, self._read(self.stack_path)
                if text and text == previous:
                    return text
        return f"no answer to {STACK_SIGNAL.name}; process state: {self._state()}"

    def log_bytes(self) -> int:
        return self.log_path.stat().st_size

    def output(self) -> str:
        """What it printed in this run."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(self.log_offset)
            return log.read().decode(errors="replace")
        return ""

    def replay_output(self) -> None:
        for line in self.output().splitlines():
            print(f"[rank {self.rank}] {line}")

    def _state(self) -> str:
        for line in self._read(Path(f"/proc/{self.pid}/status")).splitlines():
            if line.startswith("State:"):
                return line.removeprefix("State:").strip()
        return "gone"

    @staticmethod
    def _read(path: Path) -> str:
        try:
            return path.read_text()
        except OSError:
            return ""

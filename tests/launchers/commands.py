"""Jobs in fresh processes, as a user's shell would start them: watched, timed, and never left behind.

A job's processes are found by a variable that all of them inherit, so that none can hide from its job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import ROOT, import_path

__all__ = ["Job", "clean_environment", "start", "torchrun"]

_MARK = "DEAR_TEST_JOB"
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMIX_", "SLURM_", "GROUP_")


class Job:
    """One command and all that it starts."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self._mark = uuid.uuid4().hex
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the job)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, _MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C goes to a whole group; ours must not reach pytest
        )
        self.start_s = time.monotonic()
        self.took_s = 0.0

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def wait(self, timeout_s: float) -> str:
        """Waits for the end of the command, kills what is left after that time; returns what was printed."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            stacks = self.output()
            self.kill()
            raise AssertionError(f"the command was still busy after {timeout_s} s:\n{stacks}") from None
        self.took_s = time.monotonic() - self.start_s
        return self.output()

    def wait_for(self, text: str, times: int, timeout_s: float) -> None:
        """Until `text` was printed so many times."""
        deadline = time.monotonic() + timeout_s
        while self.output().count(text) < times:
            if time.monotonic() > deadline or self.status is not None:
                output = self.output()
                self.kill()
                raise AssertionError(f"{text!r} was not printed {times} times:\n{output}")
            time.sleep(0.05)

    def interrupt(self) -> None:
        """As a terminal does on Ctrl-C: to all processes of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def pids(self) -> list[int]:
        """Of all living processes that inherited the job's mark."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def survivors(self, grace_s: float = 3.0) -> list[int]:
        """Who is left some time after the end; they are killed."""
        deadline = time.monotonic() + grace_s
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        return pids

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def clean_environment(**more: str) -> dict[str, str]:
    """Ours without what launchers set, on loopback."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(import_path()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "attempts:0",
        **more,
    }


def start(*command: str, **env: str) -> Job:
    return Job(command, clean_environment(**env))


def torchrun(script: str, *arguments: str, ranks: int, max_restarts: int = 0, **env: str) -> Job:
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    options += ["--monitor-interval", "0.1"]
    return start(sys.executable, "-m", "torch.distributed.run", *options, script, *arguments, **env)

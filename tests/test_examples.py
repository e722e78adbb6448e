"""The examples run as their users start them, and say what they promise."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPO = Path(__file__).resolve().parents[1]
DIGITS = str(REPO / "examples" / "digits.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

for package in ("sklearn", "rich", "tqdm", "matplotlib"):
    pytest.importorskip(package, reason=f"the examples need {package}: pip install dear-pytorch[demo]")


def run(*arguments: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    """Runs Python; at the time limit everything that it has started is killed."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "kernels")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "attempts:0",  # no name server is asked for loopback addresses
        "COLUMNS": "80",
    }
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def check_report(done: subprocess.CompletedProcess[str], folder: Path, least_accuracy: float) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    (accuracy,) = re.findall(r"^accuracy (\d\.\d{3})$", done.stdout, re.MULTILINE)
    assert float(accuracy) >= least_accuracy
    for row in ("iteration", "compute", "exposed communication"):
        assert re.search(rf"{row} +│ +-?\d+\.\d\d ms", done.stdout), row
    assert re.search(r"sent per rank and step +│ +\d+\.\d\d MB", done.stdout)
    assert re.search(r"buckets +│ +[2-9]", done.stdout)
    assert "longest waits" in done.stdout
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {"forward", "backward", "reduce-scatter[0]", "all-gather[0]"} <= {event["name"] for event in events}
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_two_ranks_learn_the_digits(tmp_path: Path) -> None:
    done = run(*TORCHRUN, DIGITS, "--epochs", "6", "--batch-size", "32", "--out", str(tmp_path))
    check_report(done, tmp_path, least_accuracy=0.9)
    assert "2 ranks" in done.stdout
    # (P - 1) / P of 263,498 fp32 parameters, once in each half; padding and flags are less than 0.1 %
    assert "1.05 MB" in done.stdout


def test_one_process_reads_mnist(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    write_mnist(tmp_path / "MNIST" / "raw")
    done = run(
        DIGITS,
        "--mnist",
        str(tmp_path),
        "--epochs",
        "1",
        "--batch-size",
        "4",
        "--optimizer",
        "adamw",
        "--out",
        str(tmp_path),
    )
    check_report(done, tmp_path, least_accuracy=0.0)
    assert "1 rank," in done.stdout


def test_missing_mnist_is_said(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    done = run(DIGITS, "--mnist", str(tmp_path))
    assert done.returncode == 1
    assert f"--mnist {tmp_path}: no MNIST there" in done.stderr
    assert "Traceback" not in done.stderr


def write_mnist(folder: Path) -> None:
    """A few random images in MNIST's format."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", 16), ("t10k", 5)):
        for name, shape in ((f"{part}-images-idx3-ubyte", (count, 28, 28)), (f"{part}-labels-idx1-ubyte", (count,))):
            highest = 256 if len(shape) == 3 else 10
            header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
            (folder / name).write_bytes(header + random.integers(0, highest, shape, np.uint8).tobytes())

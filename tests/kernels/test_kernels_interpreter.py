"""Runs interpreted_kernels.py, all of it, in one process of its own that has TRITON_INTERPRET set from the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.timeout(300)
def test_kernels_equal_their_twins_in_the_interpreter():
    here = Path(__file__).parent
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(here.parents[1] / "kernels"), os.environ.get("PYTHONPATH")])),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::RuntimeWarning",
    ]
    result = subprocess.run(
        [*command, str(here / "interpreted_kernels.py")], capture_output=True, text=True, env=environment, timeout=280
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr

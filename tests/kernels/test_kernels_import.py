"""Importing needs only torch; the CPU path never imports Triton (cases 88 and 92)."""

import os
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"

SCRIPT = """
import sys
sys.modules["triton"] = None  # any import of it fails from here on
import torch
import dear_kernels as dk
table = dk.SegmentTable([dk.Segment(0, 0, 0, 4, 4)], 1)
flat = torch.zeros(5)
dk.pack_(flat, [torch.ones(2, 2)], table)
dk.unpack_([torch.ones(2, 2)], flat, table)
steps = dk.StepTable([dk.StepSegment(0, 5)], 5)
dk.sgd_step_(flat, flat.clone(), None, steps, [dk.SGDHyper(0.1)], torch.zeros(1))
dk.adam_step_(flat, *[torch.ones(5) for _ in range(3)], None, steps, [dk.AdamHyper(0.1)], torch.zeros(1))
dk.norm_stats(flat)
try:
    from dear_kernels.dispatch import _kernel
    _kernel("pack")
except ImportError as error:
    print(error)
"""


def test_the_cpu_path_needs_no_triton():
    environment = os.environ | {"PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr
    assert "dear_kernels.pack needs Triton for CUDA tensors" in result.stdout

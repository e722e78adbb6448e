"""Kernels of dear: tensors in, tensors out.

Importing needs only torch. On CPU tensors the functions run their plain-PyTorch twins (`reference.py`); on CUDA tensors
they launch Triton kernels, and import Triton then.
"""

from dear_kernels.dispatch import (
    adam_step_,
    found_nonfinite,
    norm_stats,
    pack_,
    sgd_step_,
    sum_of_squares,
    sum_rows_,
    unpack_,
)
from dear_kernels.hyper import AdamHyper, SGDHyper
from dear_kernels.segments import Segment, SegmentTable, StepSegment, StepTable

__all__ = [
    "AdamHyper",
    "SGDHyper",
    "Segment",
    "SegmentTable",
    "StepSegment",
    "StepTable",
    "adam_step_",
    "found_nonfinite",
    "norm_stats",
    "pack_",
    "sgd_step_",
    "sum_of_squares",
    "sum_rows_",
    "unpack_",
]

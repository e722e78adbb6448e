"""Launch settings by trial: every block size and number of warps, for each kernel, at the size of a default bucket.

Prints the fastest; the constants of the kernel files are then set by hand, with this command as their origin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch

from dear_kernels import adam, norm, pack, rank_sum, sgd, unpack

from . import kernels
from .timing import Timer

__all__ = ["sweep"]

MODULES = {"pack": pack, "unpack": unpack, "sgd": sgd, "adam": adam, "norm": norm, "sum_rows": rank_sum}
BLOCKS = (512, 1024, 2048, 4096, 8192)
WARPS = (2, 4, 8)


def sweep(device: torch.device, mib: float = 25.0) -> list[dict[str, Any]]:
    """One row a kernel, dtype and setting, the fastest of each kernel and dtype first."""
    timer = Timer(device, num_calls=10)
    rows: list[dict[str, Any]] = []
    for settings in itertools.product(BLOCKS, WARPS):
        with _all_set(*settings):
            for case in kernels._cases(mib, device):
                seconds = median(timer.times_s(case.run))
                gbps = round(case.moved.total_bytes / seconds / 1e9, 1)
                row = {"kernel": case.kernel, "dtypes": case.dtypes, "block": settings[0], "warps": settings[1]}
                rows.append({**row, "median_us": round(seconds * 1e6, 2), "gbps": gbps})
    return sorted(rows, key=lambda row: (row["kernel"], row["dtypes"], row["median_us"]))


class _all_set:
    """Every kernel module with these settings, for as long as the context lasts."""

    def __init__(self, block: int, warps: int) -> None:
        self._patches = list(_patches(block, warps))

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def _patches(block: int, warps: int) -> Iterator[Any]:
    for module in MODULES.values():
        yield mock.patch.object(module, "BLOCK_NUMEL", block)
        yield mock.patch.object(module, "NUM_WARPS", warps)
        if hasattr(module, "EDGE_NUMEL"):
            yield mock.patch.object(module, "EDGE_NUMEL", max(block // 2, 32 * warps))

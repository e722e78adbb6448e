"""A benchmark is a record: one JSON line that says what ran, on what, and what came out.

    {"benchmark": "collectives", "utc": ..., "argv": [...], "commit": ..., "versions": {...}, "machine": {...},
     "settings": {"ranks": 4, ...}, "rows": [{"op": "all_reduce", "median_ms": ..., "correct": true}, ...],
     "targets": [{"name": ..., "value": 0.49, "limit": 0.55, "passed": true}]}

Keys of rows carry their unit: `_ms`, `_us`, `_mb` (10^6 bytes), `_mib`, `_ratio`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["Record", "Target", "append_json", "format_table", "percentiles", "print_record"]

REPO = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = ("torch", "numpy", "dear-pytorch")


@dataclass(frozen=True, slots=True)
class Target:
    """A number that must not be larger than its limit."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}: {self.name} = {self.value:.3f} (limit {self.limit:.2f})"


@dataclass(slots=True)
class Record:
    """`settings` are what was asked for, `rows` what was measured, `details` what else is worth keeping."""

    benchmark: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    targets: Sequence[Target] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        targets = [
            {"name": t.name, "value": round(t.value, 4), "limit": t.limit, "passed": t.passed} for t in self.targets
        ]
        return {
            "benchmark": self.benchmark,
            "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "argv": ["python", "-m", "bench", *sys.argv[1:]],
            "commit": _commit(),
            "versions": {"python": platform.python_version(), **{name: _version(name) for name in DISTRIBUTIONS}},
            "machine": {
                "cpu_model": _cpu_model(),
                "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            },
            "settings": dict(self.settings),
            "rows": [dict(row) for row in self.rows],
            "targets": targets,
            **self.details,
        }


def percentiles(times_s: Iterable[float], unit: str = "ms") -> dict[str, float]:
    """{"median_ms": ..., "p20_ms": ..., "p80_ms": ...} of times in seconds."""
    factor = {"ms": 1e3, "us": 1e6}[unit]
    p20, median, p80 = np.percentile(np.asarray(list(times_s)), [20, 50, 80])
    named = ((f"median_{unit}", median), (f"p20_{unit}", p20), (f"p80_{unit}", p80))
    return {name: round(float(value) * factor, 4) for name, value in named}


def append_json(path: str | Path, record: Record) -> None:
    """Appends one line."""
    line = json.dumps(record.to_dict())
    with Path(path).open("a") as file:
        file.write(line + "\n")


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plain text: a column for each key of any row, numbers to the right; `-` where a row has no such key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    is_text = [any(isinstance(row.get(name), str) for row in rows) for name in names]
    return "\n".join(
        "  ".join(c.ljust(w) if text else c.rjust(w) for c, w, text in zip(line, widths, is_text, strict=True)).rstrip()
        for line in cells
    )


def print_record(record: Record, title: str) -> None:
    print(title)
    print(format_table(record.rows))
    for target in record.targets:
        print(target)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit, with `-dirty` if files differ from it; None outside a checkout."""
    try:
        shown = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=REPO,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

"""What the GPU path has to reach, beside what was measured, or "not yet measured"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TARGETS", "GpuTarget", "missed", "table"]

NOT_MEASURED = "not yet measured"


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """`key` is what the measurement is called in a record's `measured`."""

    key: str
    what: str
    limit: float
    at_least: bool

    @property
    def wanted(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:.2f}"

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


TARGETS: Sequence[GpuTarget] = (
    GpuTarget("pack_fraction", "pack, 25 MiB and more: part of the copy bandwidth, worst size", 0.90, True),
    GpuTarget("unpack_fraction", "unpack, 25 MiB and more: part of the copy bandwidth, worst size", 0.90, True),
    GpuTarget("sgd_fraction", "SGD step, 25 MiB and more: part of the copy bandwidth, worst size", 0.90, True),
    GpuTarget("adam_fraction", "Adam step, 25 MiB and more: part of the copy bandwidth, worst size", 0.90, True),
    GpuTarget("sgd_ratio", "SGD step, any size: time over torch's fused SGD, worst size", 1.00, False),
    GpuTarget("adam_ratio", "AdamW step, any size: time over torch's fused AdamW, worst size", 1.00, False),
    GpuTarget("num_syncs", "host synchronisations of a steady iteration", 0.0, False),
)


def missed(measured: Mapping[str, float]) -> list[str]:
    """The targets that were measured and not met, in words."""
    return [
        f"{target.what}: {measured[target.key]:.3f}, wanted {target.wanted}"
        for target in TARGETS
        if target.key in measured and not target.is_met(measured[target.key])
    ]


def table(measured: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row a target, for `bench.record.format_table`."""
    rows = []
    for target in TARGETS:
        value = measured.get(target.key)
        verdict = "" if value is None else ("pass" if target.is_met(value) else "FAIL")
        shown = NOT_MEASURED if value is None else f"{value:.3f}"
        rows.append({"target": target.what, "wanted": target.wanted, "measured": shown, "verdict": verdict})
    return rows

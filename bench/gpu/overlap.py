"""How much of the communication of a profiled run was hidden, from the trace that torch's profiler exports.

On the GPU's side of a trace every range that launched something appears on the stream that it ran on, as a
`gpu_user_annotation`. So `dear::reduce_scatter[3] ...` says when that collective ran; the kernels of the stream that
ran the range `forward` are compute. Ranges of our launching threads are there only where the profiler was told to
record all threads (`profile_all_threads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Hidden", "hidden"]

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Hidden:
    """`hidden_us` of `total_us` ran beside compute."""

    num_collectives: int
    total_us: float
    hidden_us: float

    @property
    def fraction(self) -> float:
        return self.hidden_us / self.total_us if self.total_us else 0.0


def hidden(events: Sequence[dict[str, Any]], kind: str, under: str) -> Hidden:
    """Of all collectives of `kind` ("reduce_scatter", "all_gather"): what ran beside kernels of `under`.

    `under` is "forward" (kernels of the compute stream inside a range of that name) or "backward" (all its others).
    """
    ranges = [e for e in events if e.get("cat") == "gpu_user_annotation"]
    forward = [e for e in ranges if e["name"] == "forward"]
    compute_streams = {e["tid"] for e in forward}
    windows = [_interval(e) for e in forward]
    compute = []
    for event in events:
        if event.get("cat") == "kernel" and event["tid"] in compute_streams:
            start, end = _interval(event)
            inside = any(a <= start and end <= b for a, b in windows)
            if inside == (under == "forward"):
                compute.append((start, end))
    collectives = [_interval(e) for e in ranges if e["name"].startswith(f"dear::{kind}[")]
    merged = _merged(compute)
    return Hidden(
        len(collectives),
        sum(end - start for start, end in collectives),
        sum(max(0.0, min(b, d) - max(a, c)) for a, b in collectives for c, d in merged),
    )


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged

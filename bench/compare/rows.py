"""From what ranks measured to JSON lines, and from JSON lines to a table and targets. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bench.methods import NONE, Method
from bench.record import Record, Target
from dearcore.profile import Bounds, Profile, plan_bounds

from .measure import Measurement, RankResult

__all__ = ["LINE_KEYS", "best_of", "line_header", "lines_of", "median_ms", "peers_of", "table_rows", "targets_of"]

MB = 1_000_000
LINE_KEYS = (
    "method",
    "model",
    "testbed",
    "hosts",
    "iteration_ms",
    "compute_ms",
    "bound_ms",
    "exposed_ms",
    "sent_mb_per_rank",
    "live_mb_per_rank",
    "params_equal",
)
# Targets of the faster of dear and dear-fill: docs/benchmarks.md.
WITHIN_BEST_PEER, OVER_DDP, OVER_BEST_DDP, OVER_FSDP2, OF_COMPUTE, OF_BOUND = 1.02, 1.20, 1.10, 1.5, 0.95, 0.92
PART_THAT_COUNTS = 0.5  # "wherever communication is at least half of compute"
MAX_SPANS = 400  # a method
NO_PEERS = (NONE, "dear-none", "dear-rs", "dear-ag", "dear", "dear-fill")


def lines_of(
    base: Mapping[str, Any],
    methods: Sequence[Method],
    results: Sequence[RankResult],
    rate_mb: float,
) -> list[dict[str, Any]]:
    """One line for each method. `base`: model, testbed, hosts and what else they share."""
    num_ranks = len(results)
    all_reduce_s = float(np.median(np.max([result.all_reduce_s for result in results], axis=0)))
    s_per_byte = all_reduce_s / (rate_mb * MB)
    none = methods.index(Method(NONE))
    compute_s, forward_s, backward_s = (
        float(np.median(_mean_s(results, none, key))) for key in ("iteration_s", "forward_s", "backward_s")
    )
    profile = results[0].profile
    bounds = plan_bounds(_with_times(profile, forward_s, backward_s), s_per_byte)
    shared = {
        **base,
        "compute_ms": _ms(compute_s),
        "forward_ms": _ms(forward_s),
        "backward_ms": _ms(backward_s),
        "all_reduce_ms": _ms(s_per_byte * profile.num_bytes),
        "bus_gbps": round(2 * (num_ranks - 1) / num_ranks / s_per_byte * 8 / 1e9, 4),
    }
    return [
        {"method": method.name, **shared, **_measured(method, i, results, compute_s, bounds)}
        for i, method in enumerate(methods)
    ]


def _with_times(profile: Profile, forward_s: float, backward_s: float) -> Profile:
    forward, backward = forward_s / profile.tf_s, backward_s / profile.tb_s
    layers = (
        replace(layer, forward_s=layer.forward_s * forward, backward_s=layer.backward_s * backward)
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def _measured(
    method: Method, index: int, results: Sequence[RankResult], compute_s: float, bounds: Bounds
) -> dict[str, Any]:
    mine: list[Measurement] = [result.measurements[index] for result in results]
    row: dict[str, Any] = {
        "iteration_ms": None,
        "bound_ms": _ms(_bound_s(method, bounds)),
        "exposed_ms": None,
        "sent_mb_per_rank": None,
        "live_mb_per_rank": None,
        "params_equal": None,
        "max_difference": mine[0].max_difference,
        "num_buckets": mine[0].num_buckets,
        "note": mine[0].note,
        "absent": mine[0].absent,
    }
    if mine[0].absent:
        return row
    times_s = _mean_s(results, index, "iteration_s")
    p20, median, p80 = (float(value) for value in np.percentile(times_s, [20, 50, 80]))
    row["iteration_ms"] = {"median": _ms(median), "p20": _ms(p20), "p80": _ms(p80), "num": len(times_s)}
    row["exposed_ms"] = _ms(median - compute_s)
    if all(m.sent_bytes for m in mine):
        row["sent_mb_per_rank"] = round(float(np.mean([np.median(m.sent_bytes) for m in mine])) / MB, 4)
    row["live_mb_per_rank"] = round(max(m.live_bytes for m in mine) / MB, 3)
    if method.is_right:
        row["params_equal"] = all(m.params_equal for m in mine)
    spans = _joined(mine[0].spans)[:MAX_SPANS]
    row["spans_ms"] = [[lane, name, _ms(start), _ms(end)] for lane, name, start, end in spans]
    return row


def _bound_s(method: Method, bounds: Bounds) -> float:
    """Of DESIGN 5; all-reduces that may run in any order, and parameters gathered in the forward, count as such."""
    if not method.communicates:
        return bounds.compute_s
    if method.kind in ("dear-fill", "bytescheduler"):
        return bounds.dear_fill_s
    return bounds.dear_s if method.kind in ("dear", "dear-rs", "dear-ag", "fsdp2") else bounds.wfbp_s


def _mean_s(results: Sequence[RankResult], index: int, key: str) -> np.ndarray:
    """Averaged over ranks: they wait for each other, so the slowest of each iteration would count jitter twice."""
    return np.mean([getattr(result.measurements[index], key) for result in results], axis=0)


def _joined(spans: Sequence[tuple[str, str, float, float]]) -> list[tuple[str, str, float, float]]:
    """Layers that follow each other at once become one span; what is too short to be seen is left out."""
    joined: list[tuple[str, str, float, float]] = []
    open_at: dict[str, int] = {}
    for lane, name, start, end in spans:
        at = open_at.get(lane)
        if lane == "compute" and at is not None and joined[at][1] == name and start - joined[at][3] < 5e-4:
            joined[at] = (lane, name, joined[at][2], end)
        elif end - start > 1e-4 or lane == "compute":
            open_at[lane] = len(joined)
            joined.append((lane, name, start, end))
    return joined


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


# ------------------------------------------------------------------------------------------------------ reading lines


def median_ms(line: Mapping[str, Any]) -> float:
    return float(line["iteration_ms"]["median"])


def peers_of(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What a user would otherwise pick, as far as it ran."""
    return [line for line in lines if line["method"].partition(":")[0] not in NO_PEERS and not line["absent"]]


def best_of(lines: Sequence[Mapping[str, Any]], *kinds: str) -> Mapping[str, Any] | None:
    """The fastest that ran, of methods of these kinds (any bucket size)."""
    ran = [line for line in lines if line["method"].partition(":")[0] in kinds and not line["absent"]]
    return min(ran, key=median_ms, default=None)


def table_rows(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each line of one model and testbed."""
    ddp = best_of([line for line in lines if line["method"] == "ddp"], "ddp")
    peer = min(peers_of(lines), key=median_ms, default=None)
    rows = []
    for line in lines:
        row: dict[str, Any] = {"method": line["method"]}
        if line["absent"]:
            rows.append(row | {"note": f"absent: {line['absent']}"})
            continue
        ms = line["iteration_ms"]
        row |= {"median_ms": ms["median"], "p20_ms": ms["p20"], "p80_ms": ms["p80"]}
        if ddp is not None:
            row["over_ddp"] = round(median_ms(ddp) / ms["median"], 3)
        if peer is not None:
            row["over_best_peer"] = round(median_ms(peer) / ms["median"], 3)
        row |= {
            "exposed_ms": line["exposed_ms"],
            "of_bound": round(line["bound_ms"] / ms["median"], 3),
            "sent_mb": line["sent_mb_per_rank"],
            "live_mb": line["live_mb_per_rank"],
            "params_equal": line["params_equal"],
            "note": line["note"],
        }
        rows.append(row)
    return rows


def targets_of(lines: Sequence[Mapping[str, Any]]) -> list[Target]:
    """For the faster of dear and dear-fill on one model and testbed. Ratios of times: not larger than the limit."""
    ours, first = best_of(lines, "dear", "dear-fill"), lines[0]
    if ours is None:
        return []
    who, where = f"{ours['method']}", f"{first['model']}, {first['testbed']}"
    targets = []

    def ask(peer: Mapping[str, Any] | None, what: str, limit: float) -> None:
        if peer is not None:
            targets.append(Target(f"{who} / {what}, {where}", median_ms(ours) / median_ms(peer), round(limit, 4)))

    peer = min(peers_of(lines), key=median_ms, default=None)
    ask(peer, f"best peer ({peer['method'] if peer else ''})", WITHIN_BEST_PEER)
    if first["testbed"] == "balanced":
        ask(best_of([line for line in lines if line["method"] == "ddp"], "ddp"), "ddp", 1 / OVER_DDP)
        ask(best_of(lines, "ddp"), "ddp's best bucket", 1 / OVER_BEST_DDP)
    counts = first["all_reduce_ms"] >= PART_THAT_COUNTS * first["compute_ms"]
    if counts:
        ask(best_of(lines, "fsdp2"), "fsdp2", 1 / OVER_FSDP2)
        targets.append(Target(f"1 - bound / {who}, {where}", 1 - ours["bound_ms"] / median_ms(ours), 1 - OF_BOUND))
    else:
        ask(best_of(lines, NONE), "no communication", 1 / OF_COMPUTE)
    return targets


def line_header(benchmark: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What ran where: a record without its rows."""
    header = Record(benchmark, settings, ()).to_dict()
    del header["rows"], header["targets"]
    return header

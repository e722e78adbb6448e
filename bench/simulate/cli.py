"""Predicted iteration times of training methods on networks and clusters that are not at hand.

    python -m bench simulate --model bert-base --ranks 64 --network 10gbe --gantt gantt.png
    python -m bench simulate --model resnet50 --sweep ranks --plot ranks.png
    python -m bench simulate --calibrate --check --document docs/simulator.md

`--model`: a network of bench/shapes/ or a profile that was written by Profile.to_json(). See docs/simulator.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from bench.record import Record, Target, append_json, print_record
from dearcore.profile import Profile

from .calibrate import ROWS, Calibration, calibrate, order_of
from .cluster import CLUSTERS, Cluster, on_cluster
from .document import update_document
from .figures import draw_gantt, draw_sweep
from .methods import BUCKETED, HOST_S_PER_TENSOR, METHODS, Outcome, simulate
from .networks import NETWORKS, load_profile

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "predicted iteration times of every method, for networks and clusters that are not at hand"

GBPS = 1e9 / 8  # bytes per second
SWEEPS: dict[str, list[float]] = {
    "ranks": [2.0**i for i in range(1, 15)],
    "gbps": [2.0**i for i in range(10)],
    "bucket-mib": [2.0**i for i in range(-3, 9)],
}
DEFAULT_METHODS = ("at-end", "wfbp", "ddp", "horovod", "mg-wfbp", "bytescheduler", "dear", "dear-fill", "dear-merge")
PUBLISHED = "published"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="resnet50", help=f"{', '.join(NETWORKS)}, or the FILE.json of a profile")
    add("--methods", nargs="+", choices=METHODS, default=list(DEFAULT_METHODS), metavar="METHOD")
    add("--ranks", type=int, default=64)
    add("--network", choices=CLUSTERS, help="a calibrated network (default: 10gbe; for a profile: its own links)")
    add(
        "--gbps",
        type=float,
        help="rate of a rank's (or with --ranks-per-node a node's) link, in place of the network's",
    )
    add("--latency-us", type=float, help="of one step of the ring, in place of the network's")
    add("--ranks-per-node", type=int, default=1)
    add("--inner-gbps", type=float, help="rate inside a node; needs --ranks-per-node")
    add("--inner-latency-us", type=float, default=0.0)
    add("--compute-ms", type=float, help="compute of one iteration, in place of the published (measured) one")
    add("--step-ns-per-byte", type=float, help="optimizer step of the bytes that a rank steps")
    add(
        "--host-us-per-tensor",
        type=_host_us,
        default=0.0,
        metavar="US",
        help="what a method costs the backward for each tensor, or 'published': the calibrated costs",
    )
    add("--host-us-per-op", type=float, help="what the host spends to launch an op of the schedule")
    add("--gantt", metavar="FILE.png", help="draw two iterations of each method")
    add("--sweep", choices=SWEEPS, help="predict along an axis, everything else as given")
    add("--points", nargs="+", type=float, help="of the sweep")
    add("--plot", metavar="FILE.png", help="draw the sweep")
    add("--calibrate", action="store_true", help="fit latencies and host costs to published rows, and show the errors")
    add("--document", metavar="FILE.md", help="with --calibrate: write the table between its markers in this file")


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.calibrate:
        return _calibrate(args)
    settings = {"model": args.model, "ranks": args.ranks, "network": args.network, "gbps": args.gbps}
    host_us = PUBLISHED if args.host_us_per_tensor is None else args.host_us_per_tensor
    settings |= {"latency_us": args.latency_us, "host_us_per_tensor": host_us}
    rows = _sweep(args) if args.sweep else _compare(args)
    record = Record("simulate", settings, rows)
    print_record(record, f"predicted: {args.model}, {args.ranks} ranks")
    if args.json:
        append_json(args.json, record)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Ends the program if an option would have no effect."""
    for option, given, needs, has in (
        ("--plot", args.plot, "--sweep", args.sweep),
        ("--points", args.points, "--sweep", args.sweep),
        ("--document", args.document, "--calibrate", args.calibrate),
        ("--inner-gbps", args.inner_gbps, "--ranks-per-node", args.ranks_per_node > 1),
        ("--ranks-per-node", args.ranks_per_node > 1, "--inner-gbps", args.inner_gbps),
        ("--inner-latency-us", args.inner_latency_us, "--inner-gbps", args.inner_gbps),
    ):
        if given and not has:
            raise SystemExit(f"simulate: {option} has no effect without {needs}")
    if args.sweep and args.gantt:
        raise SystemExit("simulate: --gantt has no effect with --sweep; take one of them")
    if args.model not in NETWORKS and not args.model.endswith(".json"):
        raise SystemExit(f"simulate: no network '{args.model}'; expected {', '.join(NETWORKS)}, or FILE.json")


def _host_us(text: str) -> float | None:
    """None: the published costs."""
    return None if text == PUBLISHED else float(text)


def _profile(args: argparse.Namespace) -> Profile:
    profile = load_profile(args.model, None if args.compute_ms is None else args.compute_ms / 1e3)
    if args.step_ns_per_byte is not None:
        profile = replace(profile, step_s_per_byte=args.step_ns_per_byte / 1e9)
    if args.host_us_per_op is not None:
        profile = replace(profile, host_s_per_op=args.host_us_per_op / 1e6)
    is_own = args.model.endswith(".json") and not (args.network or args.gbps or args.sweep in ("ranks", "gbps"))
    return profile if is_own else on_cluster(profile, _cluster(args), args.ranks)


def _cluster(args: argparse.Namespace) -> Cluster:
    cluster = CLUSTERS[args.network or "10gbe"]
    if args.gbps is not None:
        cluster = replace(cluster, bytes_per_s=args.gbps * GBPS)
    if args.latency_us is not None:
        cluster = replace(cluster, step_latency_s=args.latency_us / 1e6)
    if args.inner_gbps is not None:
        cluster = replace(
            cluster,
            ranks_per_node=args.ranks_per_node,
            inner_bytes_per_s=args.inner_gbps * GBPS,
            inner_step_latency_s=args.inner_latency_us / 1e6,
        )
    return cluster


def _host_s(args: argparse.Namespace, method: str) -> float:
    """Nobody has published a host cost of dear or of DDP: they are given that of the merging method."""
    if args.host_us_per_tensor is None:
        return HOST_S_PER_TENSOR.get(method, HOST_S_PER_TENSOR["mg-wfbp"])
    return float(args.host_us_per_tensor / 1e6)


def _compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    profile = _profile(args)
    outcomes = [simulate(profile, method, _host_s(args, method), num_spanned=2) for method in args.methods]
    if args.gantt:
        draw_gantt(outcomes, f"{args.model}, {args.ranks} ranks", args.gantt)
    return [_row(outcome, profile) for outcome in outcomes]


def _row(outcome: Outcome, profile: Profile) -> dict[str, Any]:
    prediction = outcome.prediction
    return {
        "method": outcome.method,
        "buckets": len(outcome.plan.buckets),
        "iteration_ms": round(prediction.iteration_s * 1e3, 2),
        "exposed_ms": round(prediction.exposed_s * 1e3, 2),
        "bound_ms": round(outcome.bound_s * 1e3, 2),
        "compute_ms": round((profile.tf_s + profile.tb_s) * 1e3, 2),
    }


def _sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    points: Sequence[float] = args.points or SWEEPS[args.sweep]
    methods = [m for m in args.methods if args.sweep != "bucket-mib" or m in BUCKETED]
    rows: list[dict[str, Any]] = []
    for point in _with_progress(points, f"sweep over {args.sweep}"):
        at_point = argparse.Namespace(**vars(args))
        bucket_mib = None
        if args.sweep == "ranks":
            at_point.ranks = int(point)
        elif args.sweep == "gbps":
            at_point.gbps = point
        else:
            bucket_mib = point
        profile = _profile(at_point)
        row: dict[str, Any] = {args.sweep.replace("-", "_"): point}
        for method in methods:
            outcome = simulate(profile, method, _host_s(args, method), bucket_mib=bucket_mib)
            row[f"{method}_ms"] = round(outcome.prediction.iteration_s * 1e3, 2)
        rows.append(row | {"compute_ms": round((profile.tf_s + profile.tb_s) * 1e3, 2)})
    if args.plot:
        columns = {name: [row[f"{name}_ms"] for row in rows] for name in (*methods, "compute")}
        draw_sweep(args.sweep, points, columns, f"{args.model}: predicted iteration", args.plot)
    return rows


def _calibrate(args: argparse.Namespace) -> int:
    result = calibrate(_with_progress(ROWS, "rows"))
    fit = {"step_latency_s": dict(result.fit.latency_s), "host_s_per_tensor": dict(result.fit.host_s)}
    record = Record("simulate-calibrate", {}, result.table(), _targets(result), {"fit": fit})
    print_record(record, "published rows against the simulator")
    if args.json:
        append_json(args.json, record)
    if args.document:
        update_document(args.document, result)
    return int(args.check and not all(target.passed for target in record.targets))


def _targets(result: Calibration) -> list[Target]:
    targets = [
        Target(f"error of {row.method}, {row.model}", abs(predicted_s / row.published_s - 1), 0.15)
        for row, predicted_s in zip(ROWS, result.predicted_s, strict=True)
        if row.method == "horovod"
    ]
    published_s = [row.published_s for row in ROWS]
    for network in CLUSTERS:
        pairs = zip(order_of(network, published_s), order_of(network, result.predicted_s), strict=True)
        misplaced = sum(a != b for a, b in pairs)
        targets.append(Target(f"misplaced methods of 32 ranks on {network}", float(misplaced), 0.0))
    return targets


def _with_progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """A progress bar where somebody watches."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return items
    return tqdm(items, desc=what, disable=None, leave=False)  # type: ignore[no-any-return,unused-ignore]

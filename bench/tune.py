"""Does fusion='auto' find a good bucket size? Its choice against the best of a grid, on emulated hosts.

For each pair of a model and a network, in one run: the tuner as a user meets it; then every size of a grid over the
same range; then the tuner's choice and the grid's winner once more, block by block in turn. What counts is the ratio of
these last two medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dear.adaptation import tuned_range
from dear.planning import sized_mib
from dear.stats import Tuning
from dearcore.layout import plan_threshold
from dearcore.schedule import plan_dear

from .cluster import Cluster
from .launch import World
from .record import Record, Target, append_json, format_table, print_record
from .replanned import Planned, Replanned, interleaved_s
from .replay import LayerProfile, grown_layers
from .simulate.networks import load_profile

__all__ = ["PAIRS", "SUMMARY", "Pair", "add_arguments", "run"]

SUMMARY = "the tuner's choice against the best of a grid of bucket sizes, over emulated hosts"

MIB = 1024 * 1024
LIMIT = 1.03
MOST_ITERATIONS = 120  # 4 before the first trial, 15 trials of 6


@dataclass(frozen=True, slots=True)
class Pair:
    """A model, and the rate of each host's link."""

    layers: Callable[[], list[LayerProfile]]
    rate: str


def _network(name: str, compute_s: float) -> list[LayerProfile]:
    """A network of bench/shapes/, one layer for each module."""
    modules: dict[str, list[Any]] = {}
    for layer in load_profile(name, compute_s).layers:
        modules.setdefault(layer.fqn.rpartition(".")[0], []).append(layer)
    return [
        LayerProfile(
            tuple(layer.shape for layer in layers),
            sum(layer.forward_s for layer in layers),
            sum(layer.backward_s for layer in layers),
        )
        for layers in modules.values()
    ]


PAIRS = {
    "grown": Pair(lambda: grown_layers(50, 40, 0.15, 0.30, 1.06), "1gbit"),
    "small": Pair(lambda: grown_layers(40, 8, 0.08, 0.16, 1.0), "500mbit"),
    "resnet50": Pair(lambda: _network("resnet50", 0.6), "2gbit"),
}


@dataclass(slots=True)
class _Result:
    """Of one pair, as the first rank tells it."""

    tuning: Tuning
    grid: list[tuple[float, int, float]]  # MiB, buckets, median in seconds
    winner_mib: float
    chosen_s: float
    winner_s: float
    default_s: float


def _rank(
    world: World, layers: Sequence[LayerProfile], points: int, iterations: int, blocks: int, final: int
) -> _Result:
    with Replanned(world, layers, fusion="auto") as replanned:
        tuning = replanned.tune(MOST_ITERATIONS)
        chosen = replanned.optimizer.plan, replanned.optimizer.schedule
        params = replanned.params()

        def planned(mib: float) -> Planned:
            plan = plan_threshold(params, world.size, mib * MIB)
            return plan, plan_dear(plan)

        searched = tuned_range(sum(spec.num_bytes for spec in params))
        low, high = searched.low_mib, searched.high_mib
        sizes = [low * (high / low) ** (i / max(points - 1, 1)) for i in range(points)]
        known: dict[Any, list[float]] = {}
        for mib in sizes:  # sizes that come to one plan are measured once
            plan = planned(mib)
            if plan[0].buckets not in known:
                known[plan[0].buckets] = replanned.times_s(plan, iterations)
        medians = {mib: statistics.median(known[planned(mib)[0].buckets]) for mib in sizes}
        winner_mib = min(medians, key=lambda mib: medians[mib])
        finalists = [chosen, planned(winner_mib), planned(sized_mib(sum(spec.num_bytes for spec in params)))]
        chosen_s, winner_s, default_s = interleaved_s(replanned, finalists, blocks, final)
        grid = [(mib, len(planned(mib)[0].buckets), medians[mib]) for mib in sizes]
        return _Result(tuning, grid, winner_mib, chosen_s, winner_s, default_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", default=",".join(PAIRS), help=f"comma-separated, of {', '.join(PAIRS)} (all)")
    parser.add_argument("--hosts", type=int, default=4, help="emulated hosts, one rank each (4)")
    parser.add_argument("--points", type=int, default=25, help="of the grid (25)")
    parser.add_argument("--iterations", type=int, default=5, help="timed iterations of a point of the grid (5)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of each finalist, in turn with the others' (4)")
    parser.add_argument("--final", type=int, default=6, help="timed iterations of such a block (6)")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for each pair (900)")


def run(args: argparse.Namespace) -> int:
    unknown = [name for name in args.pairs.split(",") if name not in PAIRS]
    if unknown:
        raise SystemExit(f"error: pair {unknown[0]!r} is not known; expected some of {', '.join(PAIRS)}")
    rows, details, described = [], {}, ""
    for name in args.pairs.split(","):
        layers = PAIRS[name].layers()
        with Cluster(args.hosts, PAIRS[name].rate) as cluster:
            described = cluster.describe()
            results: list[_Result] = cluster.run_ranks(
                _rank,
                timeout_s=args.timeout_s,
                layers=layers,
                points=args.points,
                iterations=args.iterations,
                blocks=args.blocks,
                final=args.final,
            )
        rows.append(_row(name, PAIRS[name].rate, layers, results[0]))
        details[name] = _details(results[0])
        print(f"{name}, {described}: {results[0].tuning}\n{format_table(rows[-1:])}", flush=True)
    targets = [Target(f"{row['pair']}: chosen / best of the grid", row["over_grid"], LIMIT) for row in rows]
    settings = {"hosts": args.hosts, "points": args.points, "iterations": args.iterations, "blocks": args.blocks}
    settings["final"] = args.final
    record = Record("tune", settings, rows, targets, {"pairs": details})
    print_record(record, f"fusion='auto' against the best of {args.points} bucket sizes")
    if args.json:
        append_json(args.json, record)
    return int(args.check and not all(target.passed for target in record.targets))


def _row(name: str, rate: str, layers: Sequence[LayerProfile], result: _Result) -> dict[str, Any]:
    tuning = result.tuning
    return {
        "pair": name,
        "rate": rate,
        "mb": round(sum(layer.num_bytes for layer in layers) / 1e6, 1),
        "compute_ms": round(1e3 * sum(layer.forward_s + layer.backward_s for layer in layers), 1),
        "chosen": tuning.chosen,
        "chosen_ms": round(1e3 * result.chosen_s, 1),
        "grid_mib": round(result.winner_mib, 2),
        "grid_ms": round(1e3 * result.winner_s, 1),
        "over_grid": round(result.chosen_s / result.winner_s, 4),
        "default_ms": round(1e3 * result.default_s, 1),
        "trials": len(tuning.trials),
        "iterations": tuning.num_iterations,
        "cost_s": round(tuning.lost_s, 2),
        "replanning_s": round(tuning.replanning_s, 2),
        "moved_mb": round(tuning.moved_mb, 1),
    }


def _details(result: _Result) -> dict[str, Any]:
    return {
        "trials": [
            {"fusion": t.fusion, "buckets": t.num_buckets, "median_ms": round(t.iteration_ms, 2)}
            for t in result.tuning.trials
        ],
        "grid": [
            {"mib": round(mib, 3), "buckets": buckets, "median_ms": round(1e3 * median_s, 2)}
            for mib, buckets, median_s in result.grid
        ],
    }

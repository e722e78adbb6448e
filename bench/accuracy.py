"""What the simulator predicts beside what is measured: network, layers and methods in one run, over emulated hosts.

A replayed model (see `replay`) is profiled as `DistributedOptimizer.measure()` does it. Every method's plan and
schedule follow from that profile; they are predicted by the simulator and run by the one executor, in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dearcore.layout import ParamSpec
from dearcore.planners import MERGE, PLANNERS, ddp, dear, dear_fill
from dearcore.predict import predict
from dearcore.profile import LayerTime, Link, Profile

from .cluster import add_cluster_arguments, cluster_of
from .launch import World
from .record import Record, Target, append_json, print_record
from .replanned import Planned, Replanned, interleaved_s
from .replay import LayerProfile, add_model_arguments, layers_of
from .simulate.methods import bound_s

__all__ = ["SUMMARY", "add_arguments", "planned", "run"]

SUMMARY = "the simulator's predictions beside measurements, over emulated hosts"

LIMIT = 0.07
METHODS = "ddp,wfbp,mg-wfbp,dear,dear:4,dear:merge,dear-fill:4"
MIB = 1024 * 1024
EXAMPLE = Profile((LayerTime("w", (2,), torch.float32, 1.0, 1.0),), 2, Link(1.0, 1.0), Link(1.0, 1.0), Link(1.0, 1.0))


def planned(method: str, profile: Profile, params: Sequence[ParamSpec]) -> Planned:
    """Of a planner's name, or `ddp:MIB`, `dear:MIB`, `dear:merge`, `dear-fill:MIB`, `dear-fill:merge`.

    Raises ValueError naming what it does not know.
    """
    name, _, fusion = method.partition(":")
    if name in PLANNERS and not fusion:
        return PLANNERS[name](profile, params)
    try:
        if name == "ddp":
            return ddp(profile, params, bucket_bytes=float(fusion) * MIB)
        if name in ("dear", "dear-fill"):
            plan = dear if name == "dear" else dear_fill
            return plan(profile, params, fusion=MERGE if fusion == MERGE else float(fusion))
    except ValueError as error:
        raise ValueError(f"method {method!r}: expected a bucket size in MiB after the colon ({error})") from error
    raise ValueError(
        f"method {method!r} is not known; expected {', '.join(PLANNERS)}, or ddp:MIB, dear:MIB, dear:merge"
    )


def _rank(
    world: World, layers: Sequence[LayerProfile], methods: Sequence[str], blocks: int, iterations: int
) -> tuple[Profile, list[Planned], list[float]]:
    with Replanned(world, layers) as replanned:
        profile = replanned.measured()
        plans = [planned(method, profile, replanned.params()) for method in methods]
        return profile, plans, interleaved_s(replanned, plans, blocks, iterations)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--methods", default=METHODS, help=f"comma-separated ({METHODS})")
    parser.add_argument("--iterations", type=int, default=5, help="timed iterations a block (5)")
    parser.add_argument("--blocks", type=int, default=3, help="blocks a method, in turn with the others' (3)")
    parser.add_argument("--save-profile", metavar="FILE.json", help="keep the profile, for `simulate --model`")
    parser.add_argument("--timeout-s", type=float, default=900.0)


def run(args: argparse.Namespace) -> int:
    methods = args.methods.split(",")
    try:
        layers = layers_of(args)
        for method in methods:  # bad names end the program here and not in the ranks
            planned(method, EXAMPLE, EXAMPLE.specs())
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    with cluster_of(args) as cluster:
        described = cluster.describe()
        profile, plans, measured_s = cluster.run_ranks(
            _rank,
            timeout_s=args.timeout_s,
            layers=layers,
            methods=methods,
            blocks=args.blocks,
            iterations=args.iterations,
        )[0]
    rows = [_row(*of, profile) for of in zip(methods, plans, measured_s, strict=True)]
    targets = [Target(f"|error| of {row['method']}", abs(row["error_percent"]) / 100, LIMIT) for row in rows]
    settings = {"cluster": described, "layers": len(layers), "blocks": args.blocks, "iterations": args.iterations}
    links = {
        name: {
            "alpha_us": round(link.alpha_s * 1e6, 1),
            "beta_ns_per_byte": round(link.beta_s_per_byte * 1e9, 4),
            "residual_percent": round(100 * link.residual, 2),
        }
        for name, link in (
            ("reduce_scatter", profile.reduce_scatter),
            ("all_gather", profile.all_gather),
            ("all_reduce", profile.all_reduce),
        )
    }
    record = Record("accuracy", settings, rows, targets, {"links": links})
    print_record(record, f"{described}\n" + "\n".join(str(profile).splitlines()[:4]))
    if args.save_profile:
        profile.save(Path(args.save_profile))
    if args.json:
        append_json(args.json, record)
    return int(args.check and not all(target.passed for target in targets))


def _row(method: str, plan: Planned, measured_s: float, profile: Profile) -> dict[str, Any]:
    prediction = predict(profile, *plan)
    return {
        "method": method,
        "buckets": len(plan[0].buckets),
        "measured_ms": round(1e3 * measured_s, 2),
        "predicted_ms": round(1e3 * prediction.iteration_s, 2),
        "error_percent": round(100 * (prediction.iteration_s / measured_s - 1), 2),
        "exposed_ms": round(1e3 * prediction.exposed_s, 2),
        "bound_ms": round(1e3 * bound_s(profile, method.partition(":")[0]), 2),
    }

"""Memory of one rank: a model of true size trained by each method, every one in processes of its own.

    python -m bench memory --ranks 4 --model resnet50

`live_mb`: what the C library has given out since before the model was built, when `step()` has ended and gradients are
still there: parameters, gradients, optimizer state, buffers, and the buckets of methods. Python's small objects are not
among it. `peak_rss_mb`: highest resident memory minus that before the model was built. Of the rank that has most.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dear

from .compare.measure import heap_bytes, with_progress
from .compare.rows import line_header
from .launch import World, run_ranks
from .methods import Method, Setting, build, parse_methods
from .record import Target, format_table
from .workload import LayerNet, gradient_sources, load_shapes, scaled

__all__ = ["SUMMARY", "add_arguments", "measure", "run"]

SUMMARY = "memory of one rank under AdamW, against DistributedDataParallel"

MB = 1_000_000
METHODS = "none,ddp,ddp-view,zero,fsdp2:25,wfbp,dear,dear:25,dear:5"
WARMUP_ITERATIONS = 3
OF_DDP, OF_DDP_VIEW = 0.60, 0.65  # at most, of live storage
OPTIONS: Mapping[str, Any] = {"lr": 1e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", default="bert-base", help="of bench/shapes (bert-base)")
    parser.add_argument("--scale", type=float, default=1.0, help="of every tensor and every bucket (1)")
    parser.add_argument("--methods", default=METHODS, help="comma-separated; see bench/methods.py")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one method (600)")


def run(args: argparse.Namespace) -> int:
    try:
        asked = [name.strip() for name in args.methods.split(",")]
        methods = [method for method in parse_methods(args.methods) if method.name in asked]
        shapes = load_shapes(args.model)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    if heap_bytes() == 0:
        raise SystemExit("error: this C library does not tell how much it has given out (mallinfo2 of glibc >= 2.33)")
    rows = []
    for method in with_progress(methods, "methods"):
        by_rank = run_ranks(
            _rank, args.ranks, timeout_s=args.timeout_s, method=method, model=args.model, scale=args.scale
        )
        rows.append(_row(method, by_rank))
    num_mb = args.scale * sum(4 * math.prod(shape) for _, shape in shapes) / MB
    for row in rows:
        row["live_over_params"] = round(row["live_mb"] / num_mb, 3)
    targets = _targets(rows)
    settings = {
        "model": args.model,
        "ranks": args.ranks,
        "scale": args.scale,
        "params_mb": round(num_mb, 3),
        "optimizer": f"AdamW(lr={OPTIONS['lr']:g})",
    }
    print(f"memory: {args.model}, {num_mb:.1f} MB of parameters, {args.ranks} ranks, AdamW")
    print(format_table(rows))
    for target in targets:
        print(target)
    if args.json:
        told = [{"name": t.name, "value": round(t.value, 4), "limit": t.limit, "passed": t.passed} for t in targets]
        line = {**line_header("memory", settings), "rows": rows, "targets": told}
        with Path(args.json).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return int(args.check and not all(target.passed for target in targets))


def _row(method: Method, by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method.name}
    for key in ("live", "peak_rss"):
        row[f"{key}_mb"] = round(max(result[key] for result in by_rank) / MB, 2)
    row["num_buckets"] = by_rank[0]["num_buckets"]
    return row


def _targets(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    """For dear's default; where the run lacks a method there is nothing to ask."""
    live = {row["method"]: row["live_mb"] for row in rows}
    pairs = (("ddp", OF_DDP), ("ddp-view", OF_DDP_VIEW))
    return [
        Target(f"live memory of {ours} / {peer}", live[ours] / live[peer], limit)
        for peer, limit in pairs
        for ours in live
        if peer in live and ours.partition(":")[0] == "dear"
    ]


def _rank(world: World, method: Method, model: str, scale: float) -> dict[str, Any]:
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    dear.init(backend="gloo", timeout=world.timeout)
    try:
        return measure(method, model, scale)
    finally:
        dear.shutdown()
        dist.destroy_process_group()


def measure(method: Method, model: str, scale: float) -> dict[str, Any]:
    """Of this rank, in bytes. Collective; torch.distributed and dear are initialised."""
    shapes = scaled(load_shapes(model), scale)
    sources = gradient_sources(shapes, dist.get_rank(), dist.get_world_size())
    _train_a_little()  # what a process allocates once, whatever it trains
    gc.collect()
    _reset_peak()
    live, rss = heap_bytes(), _status_bytes("VmRSS")
    net = LayerNet(shapes, sources)
    trainee = build(method, net, _layers(net), 0.0, Setting(torch.optim.AdamW, OPTIONS, size_scale=scale))
    for _ in range(WARMUP_ITERATIONS):
        trainee.optimizer.zero_grad()
        trainee.forward(torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        trainee.optimizer.step()
    trainee.settle()
    gc.collect()
    peak_rss = _status_bytes("VmHWM") - rss
    found = {"live": heap_bytes() - live, "peak_rss": peak_rss, "num_buckets": trainee.num_buckets}
    trainee.close()
    return found


def _layers(net: LayerNet) -> list[nn.Module]:
    return [module for module in net.modules() if next(module.parameters(recurse=False), None) is not None]


def _train_a_little() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = dear.DistributedOptimizer(optimizer, model)
    for _ in range(2):
        model(torch.zeros(2, 4)).sum().backward()
        wrapped.step()
    wrapped.close()
    dist.all_reduce(torch.zeros(4))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"error: /proc/self/status has no {name}")


def _reset_peak() -> None:
    """From here on VmHWM counts anew."""
    Path("/proc/self/clear_refs").write_text("5")

"""How cost grows: iteration time with the number of hosts, host overhead with the number of tensors.

    python -m bench scaling --hosts 2 4 8 --model resnet50 --testbed balanced --json scaling.jsonl

Hosts: `compare` at each number, the ratio of communication to compute kept, so that an ideal method takes equally long.
Tensors: a model of as many elements cut into 100 to 5,000 tensors, a trivial backward, ranks over loopback. What counts
is CPU time of a rank, of all its threads, over that of plain training of the same tensors; the growth exponent is the
slope of a straight line through log(added time) against log(tensors).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import dear
from dear import DistributedOptimizer

from .compare import cli as compare
from .compare.measure import with_progress
from .compare.rows import line_header
from .launch import World, run_ranks
from .methods import parse_methods
from .overhead import DDP, DEAR, LOCAL, Method, build_trainee
from .record import Target, format_table, percentiles
from .workload import ParamShape, gradient_sources

__all__ = ["SUMMARY", "add_arguments", "growth_exponent", "measure_tensors", "run"]

SUMMARY = "iteration time against hosts, host overhead against tensors"

METHODS = "ddp,ddp:10,fsdp2:25,mg-wfbp,dear,dear:merge"
LINEAR = 1.0  # at most, the exponent of what dear adds
TOTAL_NUMEL = 200_000
LAYER_TENSORS = 2  # a module has a weight and a bias


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hosts", type=int, nargs="*", default=[2, 4, 8], help="emulated hosts (2 4 8); none: leave this part out")
    add("--model", default="resnet50")
    add("--testbed", choices=compare.TESTBEDS, default="balanced")
    add("--methods", default=METHODS, help="comma-separated; see bench/methods.py")
    add("--iterations", type=int, default=5, help="timed iterations a block (5)")
    add("--blocks", type=int, default=2, help="blocks a method (2)")
    add("--tensors", type=int, nargs="*", default=[100, 200, 500, 1000, 2000, 5000], help="none: leave this part out")
    add("--ranks", type=int, default=2, help="of the part about tensors (2)")
    add("--timeout-s", type=float, default=900.0)


def run(args: argparse.Namespace) -> int:
    if min([*args.hosts, *args.tensors, 2]) < 2:
        raise SystemExit("error: --hosts and --tensors expect numbers of at least 2")
    status = 0
    if args.hosts:
        status |= _scale_hosts(args)
    if args.tensors:
        status |= _scale_tensors(args)
    return status


def _scale_hosts(args: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    wrong = False
    rows = []
    for num_hosts in args.hosts:
        argv = ["--hosts", str(num_hosts), "--model", args.model, "--testbed", args.testbed]
        argv += ["--iterations", str(args.iterations), "--blocks", str(args.blocks)]
        options = parser.parse_args([*argv, "--timeout-s", str(args.timeout_s)])
        try:
            lines = compare.replayed_lines(options, args.model, parse_methods(args.methods))
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
        for line in lines:
            line["benchmark"] = "scaling"
            if line["absent"]:
                continue
            ms = line["iteration_ms"]
            rows.append({"hosts": num_hosts, "method": line["method"], "median_ms": ms["median"]})
            rows[-1] |= {"exposed_ms": line["exposed_ms"], "of_bound": round(line["bound_ms"] / ms["median"], 3)}
            rows[-1] |= {"sent_mb": line["sent_mb_per_rank"], "params_equal": line["params_equal"]}
        wrong |= any(line["params_equal"] is False for line in lines)
        _append(args.json, lines)
    print(f"scaling: {args.model}, {args.testbed}, emulated hosts; tensors and links keep the testbed's ratio")
    print(format_table(rows))
    return int(wrong)


def _append(path: str | None, lines: Sequence[Mapping[str, Any]]) -> None:
    if path:
        with Path(path).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


# --------------------------------------------------------------------------------------------------------- the tensors


def _scale_tensors(args: argparse.Namespace) -> int:
    by_rank = run_ranks(
        _rank,
        args.ranks,
        timeout_s=args.timeout_s,
        counts=args.tensors,
        blocks=args.blocks * 5,
        iterations=args.iterations,
    )
    rows: list[dict[str, Any]] = []
    for count in args.tensors:
        base = _cpu_ms(by_rank, count, LOCAL)
        for method in (LOCAL, DDP, DEAR):
            wall = percentiles(np.max([result[count][method]["block_s"] for result in by_rank], axis=0))
            cpu_ms = _cpu_ms(by_rank, count, method)
            row = {"method": method, "tensors": count, **wall, "cpu_ms": round(cpu_ms, 4)}
            row["main_thread_ms"] = round(_cpu_ms(by_rank, count, method, "thread_s"), 4)
            row["added_ms"] = round(cpu_ms - base, 4)
            row["added_us_per_tensor"] = round((cpu_ms - base) * 1e3 / count, 3)
            rows.append(row)
    exponents = {
        method: round(growth_exponent([(r["tensors"], r["added_ms"]) for r in rows if r["method"] == method]), 4)
        for method in (DDP, DEAR)
    }
    targets = [Target("growth exponent of dear's overhead in tensors", exponents[DEAR], LINEAR)]
    print(f"overhead: {TOTAL_NUMEL} elements in more and more tensors, {args.ranks} ranks, SGD with momentum")
    print(format_table(rows))
    print("growth exponents: " + ", ".join(f"{method} {value:.3f}" for method, value in exponents.items()))
    for target in targets:
        print(target)
    settings = {"ranks": args.ranks, "elements": TOTAL_NUMEL, "optimizer": "SGD(lr=2**-10, momentum=0.5)"}
    told = [{"name": t.name, "value": t.value, "limit": t.limit, "passed": t.passed} for t in targets]
    line = {**line_header("tensors", settings), "rows": rows, "exponents": exponents, "targets": told}
    _append(args.json, [line])
    return int(args.check and not all(target.passed for target in targets))


def growth_exponent(points: Sequence[tuple[float, float]]) -> float:
    """y grows as x to this power: the slope of log y over log x. Points at or below zero say nothing and are left out.

    Example: (1, 3), (10, 30), (100, 300) -> 1.
    """
    usable = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    if len(usable) < 2:
        return 0.0
    slope, _ = np.polyfit([x for x, _ in usable], [y for _, y in usable], 1)
    return float(slope)


def _cpu_ms(by_rank: Sequence[Mapping[int, Any]], count: int, method: str, key: str = "process_s") -> float:
    """The median block of the slowest rank."""
    return 1e3 * float(np.max([np.median(result[count][method][key]) for result in by_rank]))


ByMethod = dict[str, dict[str, list[float]]]  # method -> what -> an entry for each block


def _rank(world: World, counts: Sequence[int], blocks: int, iterations: int) -> dict[int, ByMethod]:
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    dear.init(backend="gloo", timeout=world.timeout)
    try:
        return measure_tensors(counts, blocks, iterations)
    finally:
        dear.shutdown()
        dist.destroy_process_group()


def measure_tensors(counts: Sequence[int], blocks: int, iterations: int) -> dict[int, ByMethod]:
    """Of this rank, for each number of tensors. Collective; torch.distributed and dear are initialised."""
    shown = with_progress(list(counts), "tensors", dist.get_rank() == 0)
    return {count: _measure(count, blocks, iterations) for count in shown}


def _measure(count: int, blocks: int, iterations: int) -> ByMethod:
    shapes = _shapes(count)
    sources = gradient_sources(shapes, dist.get_rank(), dist.get_world_size())
    trainees = [build_trainee(Method(name), shapes, sources) for name in (LOCAL, DDP, DEAR)]
    for trainee in trainees:
        for _ in range(3):  # DDP and dear settle their buckets in the first
            trainee.iterate()
        trainee.settle()
    gc.collect()
    gc.disable()  # a collection would hit whichever method is running
    for block in range(blocks):
        for position in range(len(trainees)):
            trainees[(block + position) % len(trainees)].measure(iterations)
    gc.enable()
    for trainee in trainees:
        if isinstance(trainee.optimizer, DistributedOptimizer):
            trainee.optimizer.close()
    return {
        t.method.name: {"block_s": t.block_s, "thread_s": t.block_thread_s, "process_s": t.block_process_s}
        for t in trainees
    }


def _shapes(count: int) -> list[ParamShape]:
    """Weights and biases of layers; all elements together are about as many, whatever the count."""
    numel = max(1, TOTAL_NUMEL // count)
    return [(f"layer{i // LAYER_TENSORS}.{'bias' if i % LAYER_TENSORS else 'weight'}", (numel,)) for i in range(count)]

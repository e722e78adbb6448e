"""Host cost of an iteration: dear against DistributedDataParallel, DenseNet-201's 604 tensors, a trivial backward.

All methods run in the same processes, block by block in turn. At sizes / 100 only host cost shows; at full size memory
traffic and communication come in. Ratios are taken block by block against the faster of DDP's two modes. Parameters are
compared bit for bit at the end.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dear
from dear import DistributedOptimizer

from .launch import World, run_ranks
from .record import Record, Target, append_json, percentiles, print_record
from .workload import LayerNet, ParamShape, gradient_sources, load_shapes, scaled

__all__ = ["DDP", "DEAR", "LOCAL", "SUMMARY", "Method", "Trainee", "add_arguments", "build_trainee", "run"]

SUMMARY = "host cost of an iteration against DistributedDataParallel"

NETWORK = "densenet201"
LIMITS = {0.01: 1.00, 1.0: 1.05}  # scale -> largest ratio of dear to the faster mode of DDP
LOCAL, DDP, DDP_VIEW, DEAR = "local", "ddp", "ddp bucket views", "dear"
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train. `fusion_mib` and `num_tensors` vary dear's number of buckets and tensors for the fit."""

    name: str
    fusion_mib: float = 25.0
    num_tensors: int | None = None  # the last ones of the network; None: all


FITTED = {"block_s": "iteration", "block_thread_s": "host_thread"}  # what ranks report -> name in the record
METHODS = (Method(LOCAL), Method(DDP), Method(DDP_VIEW), Method(DEAR))


@dataclass(frozen=True, slots=True)
class Experiment:
    """Methods that are measured in turn."""

    methods: Sequence[Method]
    scale: float
    num_tensors: int | None
    num_blocks: int
    num_iterations: int

    @property
    def is_fit(self) -> bool:
        return all(method.name in (LOCAL, DEAR) for method in self.methods)


@dataclass(slots=True)
class Trainee:
    """One method under measurement in one rank. `block_s` is the time of an iteration, block by block."""

    method: Method
    model: LayerNet
    forward: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    num_buckets: int = 0
    iteration: int = 0
    block_s: list[float] = field(default_factory=list)
    block_thread_s: list[float] = field(default_factory=list)
    block_process_s: list[float] = field(default_factory=list)  # CPU time of all threads, what settling takes included

    def iterate(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        x = self.forward(torch.zeros(()))
        loss = x * (1 + self.iteration % 3)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.iteration += 1
        return loss

    def settle(self) -> None:
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.synchronize()
            self.num_buckets = len(self.optimizer.plan.buckets)

    def measure(self, num_iterations: int) -> None:
        self.iterate()  # brings this model back into the caches
        self.settle()
        dist.barrier()
        start_s, thread_start_s, process_start_s = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(num_iterations):
            self.iterate()
        thread_s = time.thread_time() - thread_start_s
        self.settle()
        self.block_s.append((time.perf_counter() - start_s) / num_iterations)
        self.block_thread_s.append(thread_s / num_iterations)
        self.block_process_s.append((time.process_time() - process_start_s) / num_iterations)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--scale", type=float, nargs="+", default=[0.01, 1.0], help="factors on every tensor's size (0.01 1.0)"
    )
    parser.add_argument("--tensors", type=int, default=None, help="only the last so many tensors (all 604)")
    parser.add_argument("--fusion-mib", type=float, default=25.0, help="dear's bucket size (25)")
    parser.add_argument("--blocks", type=int, default=15, help="blocks a method (15)")
    parser.add_argument("--iterations", type=int, default=8, help="timed iterations a block (8; half at full size)")
    parser.add_argument("--no-fit", action="store_true", help="leave out the cost per tensor and per bucket")
    parser.add_argument("--timeout-s", type=float, default=600.0)


def run(args: argparse.Namespace) -> int:
    experiments = []
    for scale in args.scale:
        iterations = args.iterations if scale < 1 else max(1, args.iterations // 2)
        methods = [Method(m.name, args.fusion_mib) for m in METHODS]
        experiments.append(Experiment(methods, scale, args.tensors, args.blocks, iterations))
        if scale < 1 and not args.no_fit:
            experiments.append(
                Experiment(_fit_methods(experiments[-1]), scale, args.tensors, min(args.blocks, 8), iterations)
            )
    by_rank = run_ranks(_rank, args.ranks, timeout_s=args.timeout_s, experiments=experiments)
    status = 0
    for index, experiment in enumerate(experiments):
        if experiment.is_fit:
            continue
        record = _record(args, experiment, [results[index] for results in by_rank])
        print_record(record, _title(record))
        if index + 1 < len(experiments) and experiments[index + 1].is_fit:
            cost = _fit(experiments[index + 1].methods, [results[index + 1] for results in by_rank])
            record.details = {**record.details, "host_cost": cost}
            _print_fit(cost)
        print()
        if args.json:
            append_json(args.json, record)
        if not all(row.get("params_equal", True) for row in record.rows):
            print("WRONG: parameters differ between methods or between ranks")
            status = 1
        if args.check and not all(target.passed for target in record.targets):
            status = 1
    return status


def _record(args: argparse.Namespace, experiment: Experiment, by_rank: Sequence[dict[str, Any]]) -> Record:
    scale, methods = experiment.scale, experiment.methods
    rows = [_row(method, by_rank, methods) for method in methods]
    limit = LIMITS.get(scale)
    value = next(row["ddp_ratio"] for row in rows if row["method"] == DEAR)
    targets = [Target(f"dear / faster DDP at scale {scale:g}", value, limit)] if limit else []
    settings = {
        "ranks": args.ranks,
        "network": NETWORK,
        "optimizer": "SGD(lr=2**-10, momentum=0.5)",
        "dtype": "float32",
        "fusion_mib": args.fusion_mib,
        "blocks": args.blocks,
        "iterations": experiment.num_iterations,
        "scale": scale,
    }
    details = {name: by_rank[0][name] for name in ("num_tensors", "num_elements")}
    return Record("overhead", settings, rows, targets, details)


def _title(record: Record) -> str:
    s = record.settings
    return (
        f"overhead: {s['ranks']} ranks, {record.details['num_tensors']} tensors, {record.details['num_elements']} "
        f"elements (sizes x {s['scale']:g}), {s['blocks']} blocks of {s['iterations']} iterations, the slowest rank's"
    )


# ------------------------------------------------------------------------------------------------------- in each rank


def _rank(world: World, experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    dear.init(backend="gloo", timeout=world.timeout)
    try:
        return [_run_experiment(world, experiment) for experiment in experiments]
    finally:
        dear.shutdown()
        dist.destroy_process_group()


def _run_experiment(world: World, experiment: Experiment) -> dict[str, Any]:
    shapes = scaled(load_shapes(NETWORK), experiment.scale)[-(experiment.num_tensors or 0) :]
    sources = gradient_sources(shapes, world.rank, world.size)
    trainees = [build_trainee(method, shapes, sources) for method in experiment.methods]
    for trainee in trainees:
        for _ in range(3):  # DDP and dear settle their buckets in the first
            trainee.iterate()
        trainee.settle()
    gc.collect()
    gc.disable()  # a collection would hit whichever method is running
    for block in range(experiment.num_blocks):
        for position in range(len(trainees)):
            trainees[(block + position) % len(trainees)].measure(experiment.num_iterations)
    gc.enable()
    result = {
        "block_s": [t.block_s for t in trainees],
        "block_thread_s": [t.block_thread_s for t in trainees],
        "num_buckets": [t.num_buckets for t in trainees],
        "params_equal": _params_equal(trainees),
        "num_tensors": len(shapes),
        "num_elements": sum(source.numel() for source in sources),
    }
    for trainee in trainees:
        if isinstance(trainee.optimizer, DistributedOptimizer):
            trainee.optimizer.close()
    return result


def build_trainee(method: Method, shapes: Sequence[ParamShape], sources: Sequence[torch.Tensor]) -> Trainee:
    """Wraps a LayerNet of `shapes`. Collective."""
    if method.num_tensors is not None:
        shapes, sources = shapes[-method.num_tensors :], sources[-method.num_tensors :]
    model = LayerNet(shapes, sources)
    # powers of two: the first iterations are exact, whatever a method fuses
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10, momentum=0.5)
    if method.name in (DDP, DDP_VIEW):
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=method.name == DDP_VIEW)
        return Trainee(method, model, wrapped, optimizer)
    if method.name == DEAR:
        optimizer = DistributedOptimizer(optimizer, model, fusion=method.fusion_mib)
    return Trainee(method, model, model, optimizer)


def _params_equal(trainees: Sequence[Trainee]) -> list[bool]:
    """Whether each method has DDP's parameters, bit for bit, and the same on every rank; False without a DDP."""
    wholes = [torch.cat([p.detach().reshape(-1) for p in t.model.parameters()]) for t in trainees]
    reference = next((whole for t, whole in zip(trainees, wholes, strict=True) if t.method.name == DDP), None)
    equal = []
    for whole in wholes:
        first = whole.clone()
        dist.broadcast(first, 0)
        same = torch.tensor(int(reference is not None and torch.equal(whole, reference) and torch.equal(whole, first)))
        dist.all_reduce(same, dist.ReduceOp.MIN)
        equal.append(bool(same))
    return equal


# --------------------------------------------------------------------------------------------------------- the record


def _slowest(by_rank: Sequence[dict[str, Any]], key: str, index: int) -> np.ndarray:
    return np.max([rank[key][index] for rank in by_rank], axis=0)


def _row(method: Method, by_rank: Sequence[dict[str, Any]], methods: Sequence[Method]) -> dict[str, Any]:
    names = [m.name for m in methods]
    index = names.index(method.name)
    block_s = _slowest(by_rank, "block_s", index)
    ddp_s = [_slowest(by_rank, "block_s", names.index(name)) for name in (DDP, DDP_VIEW)]
    faster_ddp_s = min(ddp_s, key=np.median)
    row: dict[str, Any] = {
        "method": method.name,
        **percentiles(block_s),
        "host_thread_ms": percentiles(_slowest(by_rank, "block_thread_s", index))["median_ms"],
        "ddp_ratio": round(float(np.median(block_s / faster_ddp_s)), 4),
    }
    if method.name == DEAR:
        row["num_buckets"] = by_rank[0]["num_buckets"][index]
    if method.name != LOCAL:
        row["params_equal"] = all(rank["params_equal"][index] for rank in by_rank)
    return row


def _fit_methods(experiment: Experiment) -> list[Method]:
    """Local and dear over all tensors and over a quarter of them, in 1, 8 and 32 buckets."""
    shapes = scaled(load_shapes(NETWORK), experiment.scale)[-(experiment.num_tensors or 0) :]
    methods = []
    for num_tensors in (len(shapes), max(1, len(shapes) // 4)):
        total_mib = sum(4 * math.prod(shape) for _, shape in shapes[-num_tensors:]) / MIB
        methods.append(Method(LOCAL, num_tensors=num_tensors))
        methods += [Method(DEAR, 1.02 * total_mib / buckets, num_tensors) for buckets in (1, 8, 32)]
    return methods


def _fit(methods: Sequence[Method], by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What dear adds to local training of the same tensors = base + per_tensor x tensors + per_bucket x buckets."""
    local = {m.num_tensors: i for i, m in enumerate(methods) if m.name == LOCAL}
    grid: list[dict[str, Any]] = []
    for index, method in enumerate(methods):
        if method.name == DEAR:
            point = {"tensors": method.num_tensors, "buckets": by_rank[0]["num_buckets"][index]}
            for key, name in FITTED.items():
                ours, base = (_slowest(by_rank, key, i) for i in (index, local[method.num_tensors]))
                point[f"{name}_added_us"] = round(float(np.median(ours - base)) * 1e6, 1)
            grid.append(point)
    equations = np.array([(1.0, point["tensors"], point["buckets"]) for point in grid])
    result: dict[str, Any] = {}
    for name in FITTED.values():
        solution, *_ = np.linalg.lstsq(equations, np.array([point[f"{name}_added_us"] for point in grid]), rcond=None)
        for what, value in zip(("base", "per_tensor", "per_bucket"), solution, strict=True):
            result[f"{name}_{what}_us"] = round(float(value), 2)
    return {**result, "grid": grid}


def _print_fit(cost: dict[str, Any]) -> None:
    """CPU time alone: the fit to the time of an iteration (in the record) needs a machine with nothing else to do."""
    base, tensor, bucket = (cost[f"host_thread_{part}_us"] for part in ("base", "per_tensor", "per_bucket"))
    print(
        f"dear adds {base:.0f} us + {tensor:.2f} us a tensor + {bucket:.0f} us a bucket of CPU time of the main thread"
    )

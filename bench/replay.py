"""Replays a model over an emulated cluster: its true parameters in their order, its compute as timed waits.

So two cores can stand for several accelerators, while hooks, packing, scheduling, sockets and updates stay real. All
methods run in the same processes, block by block in turn, from the same weights and with the same gradients; their
parameters are compared bit for bit at the end.

The wait for a layer ends at max(now, end of the wait before it) + the layer's duration. What the host does between two
layers is thus never hidden, as an accelerator that runs behind its host would hide it: methods pay for their hooks in
full, and for waking up late. What it does within a layer's time (here: writing the gradients) is hidden.

Bounds are those of an ideal network: every byte at the bus bandwidth of a 160 MB gloo all_reduce of the same run, no
latency, no fusion, no host work, and the compute time of the same run without communication.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import dear
from dearcore.profile import LayerTime, Link, Profile, dear_fill_bound_s

from .cluster import add_cluster_arguments, cluster_of
from .launch import World
from .methods import NONE, Method, Trainee, build, parse_methods
from .record import Record, Target, append_json, percentiles, print_record

__all__ = [
    "SUMMARY",
    "LayerProfile",
    "add_arguments",
    "add_model_arguments",
    "bound_s",
    "grown_layers",
    "layers_of",
    "load_layers",
    "run",
    "time_all_reduce",
]

SUMMARY = "a model's communication with compute replaced by timed waits, over emulated hosts"

LEARNING_RATE = 2.0**-10
RATE_MB = 160
NUM_SETTLING = 6  # iterations, in which schedules that plan with measured times measure
OTHERS = "all-reduces"
MB = 1_000_000
STALLED_S = 2e-4  # touching parameters that are there takes a tenth of it


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer: shapes of its parameters, and how long it computes."""

    shapes: tuple[tuple[int, ...], ...]
    forward_s: float
    backward_s: float

    @property
    def num_bytes(self) -> int:
        return 4 * sum(torch.Size(shape).numel() for shape in self.shapes)


def grown_layers(
    num_layers: int, total_mb: float, forward_s: float, backward_s: float, growth: float
) -> list[LayerProfile]:
    """One matrix a layer, each `growth` times as large as the one before; all layers compute equally long."""
    weights = np.power(growth, np.arange(num_layers))
    rows = np.maximum(1, np.rint(weights / weights.sum() * total_mb * MB / 4 / 64)).astype(int)
    return [LayerProfile(((int(r), 64),), forward_s / num_layers, backward_s / num_layers) for r in rows]


def load_layers(path: str | Path) -> list[LayerProfile]:
    """Reads {"layers": [{"shapes": [[64, 3, 7, 7], [64]], "forward_ms": 1.0, "backward_ms": 2.0}, ...]}."""
    stored = json.loads(Path(path).read_text())
    try:
        return [
            LayerProfile(
                tuple(tuple(int(n) for n in shape) for shape in layer["shapes"]),
                layer["forward_ms"] / 1e3,
                layer["backward_ms"] / 1e3,
            )
            for layer in stored["layers"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a list 'layers' of shapes, forward_ms, backward_ms ({error!r})") from error


def bound_s(
    layers: Sequence[LayerProfile], forward_s: float, backward_s: float, s_per_byte: float, halves: bool
) -> float:
    """Least time of an iteration on an ideal network, on which an all-reduce takes `s_per_byte`.

    With `halves` the first half of each all-reduce runs under the backward and the second under the next forward, else
    all of it under the backward. `forward_s` and `backward_s` are spread over the layers as their profile says.
    """
    forward_scale = forward_s / sum(layer.forward_s for layer in layers)
    backward_scale = backward_s / sum(layer.backward_s for layer in layers)
    s_per_byte = s_per_byte / 2 if halves else s_per_byte
    computed = reduced = 0.0
    for layer in reversed(layers):
        computed += layer.backward_s * backward_scale
        reduced = max(reduced, computed) + layer.num_bytes * s_per_byte
    if not halves:
        return reduced + forward_s
    gathered = computed = reduced
    for layer in layers:
        gathered += layer.num_bytes * s_per_byte
        computed = max(computed, gathered) + layer.forward_s * forward_scale
    return computed


def _fill_bound_s(layers: Sequence[LayerProfile], forward_s: float, backward_s: float, s_per_byte: float) -> float:
    """The same where all-gathers may run inside the backward, too."""
    forward_scale = forward_s / sum(layer.forward_s for layer in layers)
    backward_scale = backward_s / sum(layer.backward_s for layer in layers)
    times = [
        LayerTime(
            str(i),
            (layer.num_bytes // 4,),
            torch.float32,
            layer.forward_s * forward_scale,
            layer.backward_s * backward_scale,
        )
        for i, layer in enumerate(layers)
    ]
    nothing = Link(0.0, 0.0)
    return dear_fill_bound_s(Profile(tuple(times), 2, nothing, nothing, nothing), s_per_byte)


# ---------------------------------------------------------------------------------------------------------- the model


class DeviceClock:
    """The device of one process, as far as time goes: layers occupy it one after the other.

    slack_s: a host that is late by less does not let the device idle, as one that runs ahead of its accelerator would
    not. Waiting for a parameter (`stalled`) and whatever takes longer always does.
    """

    def __init__(self, slack_s: float = 0.0) -> None:
        self._slack_s = slack_s
        self._end_s = 0.0
        self.spans: list[tuple[str, float, float]] | None = None  # name, start, end of each layer, while somebody asks

    def start(self, name: str, duration_s: float, stalled: bool = False) -> None:
        now_s = time.monotonic()
        start_s = self._end_s
        if stalled or now_s - start_s > self._slack_s:
            start_s = max(now_s, start_s)
        self._end_s = start_s + duration_s
        if self.spans is not None:
            self.spans.append((name, start_s, self._end_s))

    def wait(self) -> None:
        """Sleeps until what was started has ended; holds neither the interpreter lock nor a core."""
        left_s = self._end_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class GradientSource:
    """Gradients of one layer in this rank: integers times the number of ranks, so that sums and averages are exact.

    Models of one process share it: their backward passes do not overlap.
    """

    def __init__(self, layer: LayerProfile, seed: int, num_ranks: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._values = [torch.randint(-8, 9, s, generator=generator).float().mul_(num_ranks) for s in layer.shapes]
        self._buffers = [torch.zeros_like(values) for values in self._values]
        self.in_own_memory = True

    def write(self, factor: torch.Tensor) -> list[torch.Tensor]:
        """Gradients in memory of our own, new tensors each time, so that autograd takes them as they are.

        They are good until the next backward: gradients of several passes cannot be added up. Unless `in_own_memory`,
        each has memory of its own, as autograd's have.
        """
        if not self.in_own_memory:
            return [values * factor for values in self._values]
        return [
            torch.mul(values, factor, out=buffer).view_as(buffer)
            for values, buffer in zip(self._values, self._buffers, strict=True)
        ]


class ReplayNet(nn.Module):
    """Layers that touch their parameters, wait, and in the backward wait and give them gradients of full size.

    `model(x)` with a number x; `backward(c)` of the result gives each parameter c times its source.
    """

    def __init__(self, layers: Sequence[LayerProfile], sources: Sequence[GradientSource], clock: DeviceClock) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(
            _Layer(layer, source, clock, generator) for layer, source in zip(layers, sources, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(
        self, profile: LayerProfile, source: GradientSource, clock: DeviceClock, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.profile, self.source, self.clock = profile, source, clock
        self.names = [f"param{i}" for i in range(len(profile.shapes))]
        for name, shape in zip(self.names, profile.shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.randint(-64, 65, shape, generator=generator) / 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _TimedOp.apply(x, self, *(getattr(self, name) for name in self.names))  # type: ignore[no-any-return]


class _TimedOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: _Layer, *params: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        start_s = time.monotonic()
        for param in params:  # a layer computes when its parameters are there
            x = x + torch.as_strided(param, (), ())
        stalled = time.monotonic() - start_s > STALLED_S
        layer.clock.start("forward", layer.profile.forward_s, stalled)
        layer.clock.wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        layer = ctx.layer
        layer.clock.start("backward", layer.profile.backward_s)
        grads = layer.source.write(grad)
        layer.clock.wait()
        return (grad, None, *grads)


# ------------------------------------------------------------------------------------------------------- in each rank


@dataclass(slots=True)
class Measurement:
    """Of one method in one rank, an entry for each iteration. forward_s and backward_s are the host's."""

    iteration_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    num_buckets: int | None = None
    params_equal: bool = False


@dataclass(slots=True)
class RankResult:
    measurements: list[Measurement]
    rate_s: list[float]  # of an all_reduce of RATE_MB
    num_bytes: int


def _rank(
    world: World,
    layers: Sequence[LayerProfile],
    methods: Sequence[Method],
    blocks: int,
    iterations: int,
    rate_mb: float,
) -> RankResult:
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    dear.init(backend="gloo", timeout=world.timeout)
    try:
        rate_s = time_all_reduce(rate_mb)
        clock = DeviceClock()
        sources = [GradientSource(layer, 1000 * world.rank + i, world.size) for i, layer in enumerate(layers)]
        trainees = []
        for method in methods:
            model = ReplayNet(layers, sources, clock)
            trainees.append(build(method, model, list(model.layers), LEARNING_RATE))
        measurements = [Measurement() for _ in trainees]
        for trainee in trainees:  # DDP and dear settle their buckets in the first
            _iterate(trainee, NUM_SETTLING, None)
        gc.collect()
        gc.disable()  # a collection would hit whichever method is running
        for block in range(blocks):
            for position in range(len(trainees)):
                index = (block + position) % len(trainees)
                _iterate(trainees[index], iterations, measurements[index])
        gc.enable()
        for measurement, trainee, equal in zip(measurements, trainees, _params_equal(trainees), strict=True):
            measurement.num_buckets, measurement.params_equal = trainee.num_buckets, equal
        for trainee in trainees:
            trainee.close()
        return RankResult(measurements, rate_s, sum(layer.num_bytes for layer in layers))
    finally:
        dear.shutdown()
        dist.destroy_process_group()


def _iterate(trainee: Trainee, num_iterations: int, into: Measurement | None) -> None:
    """One iteration and then `num_iterations` that count, each from the start of its forward to that of the next."""
    dist.barrier()
    last_s = 0.0
    for i in range(num_iterations + 2):
        start_s = time.perf_counter()
        if into is not None and i > 1:
            into.iteration_s.append(start_s - last_s)
        last_s = start_s
        if i == num_iterations + 1:
            break
        trainee.optimizer.zero_grad()
        x = trainee.forward(torch.zeros(()))
        forward_s = time.perf_counter()
        x.backward(torch.tensor(1.0 + trainee.iteration % 3))  # type: ignore[no-untyped-call]
        backward_s = time.perf_counter()
        trainee.optimizer.step()
        trainee.iteration += 1
        if into is not None and i:
            into.forward_s.append(forward_s - start_s)
            into.backward_s.append(backward_s - forward_s)
    trainee.settle()


def time_all_reduce(mb: float, repetitions: int = 2) -> list[float]:
    """Seconds of gloo's all_reduce of `mb` 10^6 bytes, after one that does not count."""
    tensor = torch.zeros(round(mb * MB / 4))
    times = []
    for _ in range(1 + repetitions):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start_s)
    return times[1:]


def _params_equal(trainees: Sequence[Trainee]) -> list[bool]:
    """Whether each method has the first communicating one's parameters, bit for bit, and the same on every rank."""
    reference: torch.Tensor | None = None
    equal = []
    for trainee in trainees:
        whole = torch.cat([p.reshape(-1) for p in trainee.whole_params()])
        first = whole.clone()
        dist.broadcast(first, 0)
        if trainee.method.communicates and reference is None:
            reference = whole
        same = torch.tensor(int(reference is not None and torch.equal(whole, reference) and torch.equal(whole, first)))
        dist.all_reduce(same, dist.ReduceOp.MIN)
        equal.append(bool(same))
    return equal


# ---------------------------------------------------------------------------------------------------- the command line


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options from which `layers_of` makes a model, for other subcommands."""
    parser.add_argument("--profile", metavar="FILE", help="layers from a JSON file instead of the next five options")
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--mb", type=float, default=40.0, help="all parameters, 10^6 bytes (40)")
    parser.add_argument("--growth", type=float, default=1.06, help="of each layer over the one before it (1.06)")
    parser.add_argument("--tf", type=float, default=0.15, help="forward time in seconds (0.15)")
    parser.add_argument("--tb", type=float, default=0.30, help="backward time in seconds (0.30)")


def layers_of(args: argparse.Namespace) -> list[LayerProfile]:
    if args.profile:
        return load_layers(args.profile)
    return grown_layers(args.layers, args.mb, args.tf, args.tb, args.growth)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--methods", default="ddp,ddp-best,fsdp2,dear", help="comma-separated; see bench/methods.py")
    parser.add_argument("--iterations", type=int, default=10, help="timed iterations a block (10)")
    parser.add_argument("--blocks", type=int, default=2, help="blocks a method, in turn with the others' (2)")
    parser.add_argument("--rate-mb", type=float, default=RATE_MB, help=f"all_reduce that measures the rate ({RATE_MB})")
    parser.add_argument("--timeout-s", type=float, default=900.0)


def run(args: argparse.Namespace) -> int:
    try:
        methods = parse_methods(args.methods)
        layers = layers_of(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    with cluster_of(args) as cluster:
        described = cluster.describe()
        by_rank: list[RankResult] = cluster.run_ranks(
            _rank,
            timeout_s=args.timeout_s,
            layers=layers,
            methods=methods,
            blocks=args.blocks,
            iterations=args.iterations,
            rate_mb=args.rate_mb,
        )
    record = _record(args, described, layers, methods, by_rank)
    print_record(record, _title(record))
    if args.json:
        append_json(args.json, record)
    if not all(row.get("params_equal", True) for row in record.rows):
        print("WRONG: parameters differ between methods or between ranks")
        return 1
    return int(args.check and not all(target.passed for target in record.targets))


def _record(
    args: argparse.Namespace,
    described: str,
    layers: Sequence[LayerProfile],
    methods: Sequence[Method],
    by_rank: Sequence[RankResult],
) -> Record:
    num_ranks = len(by_rank)
    all_reduce_s = float(np.median(np.max([result.rate_s for result in by_rank], axis=0)))
    bus_gbps = 2 * (num_ranks - 1) / num_ranks * args.rate_mb * MB * 8 / all_reduce_s / 1e9
    s_per_byte = all_reduce_s / (args.rate_mb * MB)
    none = methods.index(Method(NONE))
    forward_s, backward_s = (_median_s(by_rank, none, key) for key in ("forward_s", "backward_s"))
    bounds = {
        "dear": bound_s(layers, forward_s, backward_s, s_per_byte, halves=True),
        "dear-fill": _fill_bound_s(layers, forward_s, backward_s, s_per_byte),
        OTHERS: bound_s(layers, forward_s, backward_s, s_per_byte, halves=False),
    }
    rows = [_row(method, index, by_rank, bounds, _median_s(by_rank, none)) for index, method in enumerate(methods)]
    _add_ratios(rows)
    settings = {
        "cluster": described,
        "ranks": num_ranks,
        "layers": len(layers),
        "mb": round(by_rank[0].num_bytes / MB, 3),
        "tf_s": round(sum(layer.forward_s for layer in layers), 4),
        "tb_s": round(sum(layer.backward_s for layer in layers), 4),
        "profile": args.profile or f"one matrix a layer, growth {args.growth:g}",
        "optimizer": f"SGD(lr={LEARNING_RATE:g})",
        "blocks": args.blocks,
        "iterations": args.iterations,
    }
    details = {
        "all_reduce_mb": args.rate_mb,
        "all_reduce_s": round(all_reduce_s, 4),
        "bus_gbps": round(bus_gbps, 4),
        "forward_ms": round(1e3 * forward_s, 3),
        "backward_ms": round(1e3 * backward_s, 3),
    }
    return Record("replay", settings, rows, _targets(rows), details)


def _times_s(by_rank: Sequence[RankResult], index: int, key: str = "iteration_s") -> np.ndarray:
    """Averaged over ranks: they wait for each other, so the slowest of each iteration would count jitter twice."""
    return np.mean([getattr(result.measurements[index], key) for result in by_rank], axis=0)


def _median_s(by_rank: Sequence[RankResult], index: int, key: str = "iteration_s") -> float:
    return float(np.median(_times_s(by_rank, index, key)))


def _row(
    method: Method, index: int, by_rank: Sequence[RankResult], bounds: dict[str, float], none_s: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method.name, **percentiles(_times_s(by_rank, index))}
    if not method.communicates:
        return row
    bound = bounds.get(method.kind, bounds[OTHERS])
    row["exposed_ms"] = round(row["median_ms"] - 1e3 * none_s, 3)
    row["bound_ms"] = round(1e3 * bound, 3)
    row["bound_ratio"] = round(row["median_ms"] / 1e3 / bound, 4)
    measurement = by_rank[0].measurements[index]
    if measurement.num_buckets is not None:
        row["num_buckets"] = measurement.num_buckets
    row["params_equal"] = all(result.measurements[index].params_equal for result in by_rank)
    return row


def _add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """How many times as fast as DDP by default, and as the fastest DDP."""
    ddp = {row["method"]: row["median_ms"] for row in rows if row["method"].partition(":")[0] == "ddp"}
    for row in rows:
        if "bound_ms" in row and "ddp" in ddp:
            row["over_ddp"] = round(ddp["ddp"] / row["median_ms"], 4)
        if "bound_ms" in row and len(ddp) > 1:
            row["over_best_ddp"] = round(min(ddp.values()) / row["median_ms"], 4)


def _targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """For the fastest dear and the fastest dear-fill of the run."""

    def fastest(kind: str) -> dict[str, Any] | None:
        of_kind = [row for row in rows if row["method"].partition(":")[0] == kind and "bound_ms" in row]
        return min(of_kind, key=lambda row: row["median_ms"], default=None)

    dear_row, fill_row = fastest("dear"), fastest("dear-fill")
    targets = []
    if dear_row is not None:
        targets.append(Target(f"{dear_row['method']} / its bound", dear_row["bound_ratio"], 1.08))
        if "over_ddp" in dear_row:
            targets.append(Target(f"{dear_row['method']} / ddp", 1 / dear_row["over_ddp"], round(1 / 1.30, 4)))
        if "over_best_ddp" in dear_row:
            limit = round(1 / 1.12, 4)
            targets.append(Target(f"{dear_row['method']} / fastest ddp", 1 / dear_row["over_best_ddp"], limit))
    if fill_row is not None:
        targets.append(Target(f"{fill_row['method']} / its bound", fill_row["bound_ratio"], 1.10))
        if dear_row is not None:
            ratio = fill_row["median_ms"] / dear_row["median_ms"]
            targets.append(Target(f"{fill_row['method']} / {dear_row['method']}", ratio, 1.0))
    return targets


def _title(record: Record) -> str:
    s, d = record.settings, record.details
    return (
        f"replay: {s['layers']} layers, {s['mb']:g} MB, tf {s['tf_s']:g} s, tb {s['tb_s']:g} s; {s['cluster']}\n"
        f"gloo all_reduce of {d['all_reduce_mb']:g} MB: {d['all_reduce_s']:.3f} s, bus bandwidth "
        f"{d['bus_gbps']:.3f} Gbit/s; without communication "
        f"forward {d['forward_ms']:.1f} ms, backward {d['backward_ms']:.1f} ms"
    )

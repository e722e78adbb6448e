"""Every way to train in one run, interleaved: the paper's five models, their compute replayed over emulated hosts.

    python -m bench compare --hosts 4 --testbed balanced --model all --json out.jsonl
    python -m bench compare --real --hosts 2 --model resnet50 --batch 2 --methods ddp,dear

The testbed fixes the ratio of communication to compute (bench/compare/testbeds.py); bucket sizes are those of the model
at full size. `--real` trains the models themselves on synthetic batches, on the CPU or the GPU, over whatever connects
the ranks. JSON: one line for each method and model.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.cluster import Cluster
from bench.launch import World, run_ranks
from bench.methods import Method, parse_methods
from bench.replay import LayerProfile
from bench.simulate.networks import NETWORKS

from .measure import RankResult, Timing, measure_methods
from .replayed import Replayed
from .rows import line_header, lines_of, table_rows, targets_of
from .testbeds import TESTBEDS, Emulation, emulate

__all__ = ["DEFAULT_METHODS", "SUMMARY", "add_arguments", "replayed_lines", "run"]

SUMMARY = "every way to train, in one run: the paper's five models over emulated hosts, or for real"

ALL = "all"
LEARNING_RATE = 2.0**-10
OPTIMIZER = (torch.optim.SGD, {"lr": LEARNING_RATE})
RATE_MB_PER_GBPS = 160.0  # DESIGN's 160 MB on a link of 1 Gbit/s; shrinks with the link
REAL_RATE_MB = 160.0
INNER_RATE_FACTOR = 8  # of links inside a node
DEFAULT_METHODS = (
    "ddp,ddp:5,ddp:10,fsdp2:25,zero,horovod-package,wfbp,horovod,mg-wfbp,bytescheduler,"
    "dear:unfused,dear:25,dear:50,dear,dear:merge,dear:auto,dear-fill,dear-rs,dear-ag"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=ALL, help=f"{', '.join(NETWORKS)}, several with commas, or {ALL}")
    add("--testbed", choices=TESTBEDS, help="whose ratio of communication to compute to keep")
    add("--hosts", type=int, default=4, help="emulated hosts, one rank each (4)")
    add("--hosts-per-node", type=int, help="two levels: so many hosts share a node with a fast network inside")
    add("--methods", default=DEFAULT_METHODS, help="comma-separated; see bench/methods.py")
    add("--scale", type=float, help="of every tensor, and of the links with them (chosen for this machine)")
    add("--speed", type=float, help="how many times as fast as published compute is played (chosen likewise)")
    add("--iterations", type=int, default=5, help="timed iterations a block (5)")
    add("--blocks", type=int, default=2, help="blocks a method, in turn with the others' (2)")
    add("--real", action="store_true", help="train the models themselves on synthetic batches")
    add("--batch", type=int, help="with --real: examples a rank (the paper's)")
    add("--rate", help="with --real: of emulated links between the ranks, '1gbit' (none: this machine's loopback)")
    add("--timeout-s", type=float, default=1500.0, help="for one model (1500)")


def run(args: argparse.Namespace) -> int:
    models, methods = _checked(args)
    console = Console(width=None if Console().is_terminal else 200)
    status = 0
    run_id = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for model in models:
        start_s = time.monotonic()
        measure = _real_lines if args.real else replayed_lines
        lines = [line | {"run": run_id} for line in measure(args, model, methods)]
        _show(console, lines, time.monotonic() - start_s)
        if args.json:
            with Path(args.json).open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        wrong = [line["method"] for line in lines if line["params_equal"] is False]
        if wrong:
            console.print(f"WRONG: parameters of {', '.join(wrong)} differ from those of the first method")
        targets = [] if args.real else targets_of(lines)
        for target in targets:
            console.print(str(target), highlight=False, soft_wrap=True)
        status |= bool(wrong) or (args.check and not all(target.passed for target in targets))
    return int(status)


def _checked(args: argparse.Namespace) -> tuple[list[str], list[Method]]:
    """Ends the program if an option is wrong or would have no effect."""
    if args.real == (args.testbed is not None):
        raise SystemExit(f"error: give either --testbed ({', '.join(TESTBEDS)}) or --real")
    models = list(NETWORKS) if args.model == ALL else args.model.split(",")
    unknown = [model for model in models if model not in NETWORKS]
    if unknown:
        raise SystemExit(f"error: no model '{unknown[0]}'; expected {', '.join(NETWORKS)}, or {ALL}")
    if args.real:
        without = (("--scale", args.scale), ("--speed", args.speed), ("--hosts-per-node", args.hosts_per_node))
        for option, given in without:
            if given is not None:
                raise SystemExit(f"error: {option} has no effect with --real: models are trained as they are")
    for option, given in (("--batch", args.batch), ("--rate", args.rate)):
        if given is not None and not args.real:
            raise SystemExit(f"error: {option} has no effect without --real")
    for option, value in (("--scale", args.scale), ("--speed", args.speed), ("--batch", args.batch)):
        if value is not None and not value > 0:
            raise SystemExit(f"error: {option} {value:g}; expected more than 0")
    try:
        return models, parse_methods(args.methods)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


# ------------------------------------------------------------------------------------------------------------- measure


def replayed_lines(args: argparse.Namespace, model: str, methods: Sequence[Method]) -> list[dict[str, Any]]:
    """One line a method. `args`: those of `add_arguments`."""
    emulation = emulate(model, args.testbed, args.hosts, args.scale, args.speed)
    timing = Timing(args.blocks, args.iterations, RATE_MB_PER_GBPS * emulation.link_gbps)
    with _cluster(args, emulation) as cluster:
        described = cluster.describe()
        results: list[RankResult] = cluster.run_ranks(
            _replayed_rank,
            timeout_s=args.timeout_s,
            layers=emulation.layers,
            methods=methods,
            timing=timing,
            size_scale=emulation.scale,
        )
    settings = {
        "cluster": described,
        "scale": round(emulation.scale, 6),
        "speed": round(emulation.speed, 4),
        "ratio_of_testbed": round(emulation.ratio, 4),
        "mb": round(emulation.num_bytes / 1e6, 3),
        "layers": len(emulation.layers),
        "planned_compute_ms": round(emulation.compute_s * 1e3, 2),
        "optimizer": f"SGD(lr={LEARNING_RATE:g})",
        "blocks": args.blocks,
        "iterations": args.iterations,
        "rate_mb": round(timing.rate_mb, 2),
        "links": _links(results[0]),
    }
    base = {"model": model, "testbed": args.testbed, "hosts": args.hosts, **line_header("compare", settings)}
    return lines_of(base, methods, results, timing.rate_mb)


def _links(result: RankResult) -> list[dict[str, float]]:
    """Of dear's reduce-scatter, all-gather and all-reduce, as the planners were told."""
    profile = result.profile
    return [
        {"alpha_ms": round(link.alpha_s * 1e3, 4), "ns_per_byte": round(link.beta_s_per_byte * 1e9, 4)}
        for link in (profile.reduce_scatter, profile.all_gather, profile.all_reduce)
    ]


def _cluster(args: argparse.Namespace, emulation: Emulation) -> Cluster:
    try:
        if args.hosts_per_node is None:
            return Cluster(args.hosts, emulation.rate)
        inner = f"{round(emulation.link_gbps * INNER_RATE_FACTOR * 1e3)}mbit"
        return Cluster(args.hosts, inner, hosts_per_node=args.hosts_per_node, uplink_rate=emulation.rate)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def _replayed_rank(
    world: World, layers: Sequence[LayerProfile], methods: Sequence[Method], timing: Timing, size_scale: float
) -> RankResult:
    return measure_methods(world, methods, timing, functools.partial(Replayed, layers), OPTIMIZER, size_scale)


def _real_lines(args: argparse.Namespace, model: str, methods: Sequence[Method]) -> list[dict[str, Any]]:
    batch = args.batch or NETWORKS[model].batch
    timing = Timing(args.blocks, args.iterations, REAL_RATE_MB)
    kwargs = {"model": model, "batch": batch, "methods": methods, "timing": timing}
    if args.rate is None:
        described = f"{args.hosts} ranks on this machine"
        results: list[RankResult] = run_ranks(_real_rank, args.hosts, timeout_s=args.timeout_s, **kwargs)
    else:
        with Cluster(args.hosts, args.rate) as cluster:
            described = cluster.describe()
            results = cluster.run_ranks(_real_rank, timeout_s=args.timeout_s, **kwargs)
    settings = {
        "cluster": described,
        "batch": batch,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "mb": round(results[0].profile.num_bytes / 1e6, 3),
        "optimizer": f"SGD(lr={LEARNING_RATE:g})",
        "blocks": args.blocks,
        "iterations": args.iterations,
        "rate_mb": REAL_RATE_MB,
        "links": _links(results[0]),
    }
    base = {"model": model, "testbed": "real", "hosts": args.hosts, **line_header("compare", settings)}
    return lines_of(base, methods, results, timing.rate_mb)


def _real_rank(world: World, model: str, batch: int, methods: Sequence[Method], timing: Timing) -> RankResult:
    from .real import Real  # needs torchvision and transformers

    return measure_methods(world, methods, timing, functools.partial(Real, model, batch), OPTIMIZER, 1.0)


# ---------------------------------------------------------------------------------------------------------------- show


def _show(console: Console, lines: Sequence[Mapping[str, Any]], seconds: float) -> None:
    first = lines[0]
    settings = first["settings"]
    title = (
        f"{first['model']} on {first['testbed']}: {settings['cluster']}; without communication "
        f"{first['compute_ms']:.1f} ms, one all-reduce of everything {first['all_reduce_ms']:.1f} ms "
        f"(bus {first['bus_gbps']:.3f} Gbit/s); {seconds:.0f} s"
    )
    rows = table_rows(lines)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        is_text = name in ("method", "note")
        table.add_column(name.replace("_", " "), justify="left" if is_text else "right", no_wrap=name == "method")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)

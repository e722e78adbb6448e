"""Reduce-scatter and all-gather of ours against gloo's own collectives.

Ours take two ways: through memory, as they do between ranks of one host, and over the network's sockets, as they do
between hosts.

All of them run in the same processes, one after the other in every iteration, on fresh inputs, and every result is
compared with the right one element by element. Times are the slowest rank's, from a barrier to the result. Inputs are
integers, so that sums are exact in any order. 1 MB is 10^6 bytes; 1 MiB is 2^20.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dearcore.gloo import PIECE_BYTES, GlooCommunicator
from dearcore.streams import InlineStream

from .launch import World, run_ranks
from .record import Record, Target, append_json, percentiles, print_record

__all__ = [
    "ALL_GATHER",
    "BASELINE",
    "MEMORY",
    "REDUCE_SCATTER",
    "SOCKETS",
    "SUMMARY",
    "add_arguments",
    "measure_rank",
    "run",
]

SUMMARY = "reduce-scatter and all-gather against gloo's all_reduce"

MIB = 1024 * 1024
LIMIT = 0.55  # of gloo's all_reduce, for each half
BASELINE = "gloo all_reduce"
REDUCE_SCATTER, ALL_GATHER = "dear reduce_scatter", "dear all_gather"
MEMORY, SOCKETS = "memory", "sockets"


@dataclass(slots=True)
class Case:
    """One collective in one rank. `fill` prepares inputs, `run` is timed, `check` compares with the right result."""

    op: str
    way: str  # what carries it
    fill: Callable[[], Any]
    run: Callable[[], Any]
    check: Callable[[], bool]
    times_s: list[float] = field(default_factory=list)
    correct: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=float, default=32.0, help="size of the whole buffer, fp32 (32)")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument(
        "--piece-mib", type=float, nargs="+", default=[PIECE_BYTES / MIB], help="message sizes of the sockets"
    )
    parser.add_argument("--deterministic", action="store_true", help="sum in rank order")
    parser.add_argument("--timeout-s", type=float, default=300.0)


# Calls in a row that one time is the mean of, as in nccl-tests: ranks leave a barrier a few ms apart on a busy machine,
# and a single call would count that as its own.
BATCH = 4


def run(args: argparse.Namespace) -> int:
    numel = max(1, round(args.mb * 1e6 / 4 / args.ranks)) * args.ranks
    by_rank = run_ranks(
        measure_rank,
        args.ranks,
        timeout_s=args.timeout_s,
        numel=numel,
        num_iterations=args.iterations,
        pieces_mib=args.piece_mib,
        deterministic=args.deterministic,
    )
    rows = _rows(by_rank)
    targets = [
        Target(f"{row['op']} ({MEMORY}) / {BASELINE}", row["all_reduce_ratio"], LIMIT)
        for row in rows
        if row["way"] == MEMORY
    ]
    settings = {
        "ranks": args.ranks,
        "mb": numel * 4 / 1e6,
        "dtype": "float32",
        "iterations": args.iterations,
        "deterministic": args.deterministic,
    }
    record = Record("collectives", settings, rows, targets)
    title = f"collectives: {args.ranks} ranks, {numel * 4 / 1e6:g} MB, {args.iterations} iterations, the slowest rank's"
    print_record(record, title)
    if args.json:
        append_json(args.json, record)
    if not all(row["correct"] for row in rows):
        print("WRONG RESULTS")
        return 1
    return int(args.check and not all(target.passed for target in targets))


def _rows(by_rank: Sequence[list[Case]]) -> list[dict[str, Any]]:
    slowest_s = [np.max([cases[i].times_s for cases in by_rank], axis=0) for i in range(len(by_rank[0]))]
    baseline_s = next(t for case, t in zip(by_rank[0], slowest_s, strict=True) if case.op == BASELINE)
    rows = []
    for index, (case, times_s) in enumerate(zip(by_rank[0], slowest_s, strict=True)):
        row: dict[str, Any] = {"op": case.op, "way": case.way, **percentiles(times_s)}
        row["all_reduce_ratio"] = round(float(np.median(times_s) / np.median(baseline_s)), 4)
        row["correct"] = all(cases[index].correct for cases in by_rank)
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------------- in each rank


def measure_rank(
    world: World, numel: int, num_iterations: int, pieces_mib: Sequence[float], deterministic: bool
) -> list[Case]:
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    data = _Data(world, numel)
    cases = _gloo_cases(data)
    communicators = []
    for piece_mib in [0.0, *pieces_mib]:
        store = dist.PrefixStore(f"bench/{piece_mib}", world.store)
        through_memory = piece_mib == 0
        communicator = GlooCommunicator(
            store,
            world.rank,
            world.size,
            world.timeout,
            deterministic,
            piece_bytes=max(4, round(piece_mib * MIB)),
            use_host_memory=through_memory,
        )
        communicators.append(communicator)
        way = MEMORY if through_memory else SOCKETS if len(pieces_mib) == 1 else f"{SOCKETS}, {piece_mib:g} MiB"
        cases += _dear_cases(data, communicator, way)
    num_warmups = 2
    for iteration in range(num_warmups + num_iterations):
        for position in range(len(cases)):
            case = cases[(iteration + position) % len(cases)]
            dist.barrier()  # peers may still read the buffer that is filled
            case.fill()
            case.run()
            case.correct &= case.check()
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(BATCH):
                case.run()
            elapsed_s = (time.perf_counter() - start_s) / BATCH
            if iteration >= num_warmups:
                case.times_s.append(elapsed_s)
    dist.barrier()
    for communicator in communicators:
        communicator.close()
    dist.destroy_process_group()
    return [Case(c.op, c.way, _nothing, _nothing, _nothing, c.times_s, c.correct) for c in cases]


class _Data:
    """Inputs, right results, and one buffer that all cases use in turn."""

    def __init__(self, world: World, numel: int) -> None:
        self.rank, self.size = world.rank, world.size
        parts = [_values(rank, world.size, numel) for rank in range(world.size)]
        self.mine = parts[world.rank]
        self.sum = torch.stack(parts).sum(0)
        shard_numel = numel // world.size
        self.shard = slice(world.rank * shard_numel, (world.rank + 1) * shard_numel)
        self.gathered = torch.cat([part[r * shard_numel : (r + 1) * shard_numel] for r, part in enumerate(parts)])
        self.flat = torch.empty(numel)
        self.output = torch.empty(shard_numel)

    def fill_inputs(self) -> None:
        self.flat.copy_(self.mine)
        self.output.fill_(torch.nan)

    def fill_shard(self) -> None:
        self.flat.fill_(torch.nan)
        self.flat[self.shard] = self.mine[self.shard]

    def shard_is(self, divisor: int) -> bool:
        return torch.equal(self.output, self.sum[self.shard] / divisor)

    def flat_is(self, expected: torch.Tensor) -> bool:
        return torch.equal(self.flat, expected)


def _values(rank: int, size: int, numel: int) -> torch.Tensor:
    """Multiples of the number of ranks: their mean is exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1001, (numel,), generator=generator).to(torch.float32) * size


def _gloo_cases(data: _Data) -> list[Case]:
    def gather() -> None:
        dist.all_gather_into_tensor(data.flat, data.flat[data.shard].clone())

    return [
        Case(BASELINE, SOCKETS, data.fill_inputs, lambda: dist.all_reduce(data.flat), lambda: data.flat_is(data.sum)),
        Case(
            "gloo reduce_scatter_tensor",
            SOCKETS,
            data.fill_inputs,
            lambda: dist.reduce_scatter_tensor(data.output, data.flat),
            lambda: data.shard_is(1),
        ),
        Case("gloo all_gather_into_tensor", SOCKETS, data.fill_shard, gather, lambda: data.flat_is(data.gathered)),
    ]


def _dear_cases(data: _Data, communicator: GlooCommunicator, way: str) -> list[Case]:
    stream = InlineStream()
    grad_flat = communicator.new_flat(data.flat.numel(), data.flat.dtype, data.flat.device)
    half_bytes = (data.size - 1) * data.output.numel() * 4

    def sent_half(start: Callable[[], None]) -> None:
        before = communicator.bytes_sent
        start()
        assert communicator.bytes_sent - before == half_bytes, "a half sends (P-1)/P of the buffer"

    def reduce() -> None:
        communicator.start_reduce_scatter(data.output, grad_flat, data.size, stream, REDUCE_SCATTER)

    def fill_grads() -> None:
        grad_flat.copy_(data.mine)
        data.output.fill_(torch.nan)

    def gather() -> None:
        communicator.start_all_gather(data.flat, stream, ALL_GATHER)

    return [
        Case(
            REDUCE_SCATTER,
            way,
            fill_grads,
            lambda: sent_half(reduce),
            lambda: data.shard_is(data.size),
        ),
        Case(ALL_GATHER, way, data.fill_shard, lambda: sent_half(gather), lambda: data.flat_is(data.gathered)),
    ]


def _nothing() -> bool:
    return True

"""Collectives of dear between two ranks, 1 KB to 64 MB, against gloo's all_reduce of the same size in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bench import collectives
from bench.collectives import ALL_GATHER, BASELINE, MEMORY, REDUCE_SCATTER, SOCKETS
from bench.launch import run_ranks
from bench.micro.gate import Pair

NUM_RANKS = 2
TIMEOUT_S = 100.0
# of the whole buffer, in bytes
SIZES = {"1KB": 1_000, "64KB": 64_000, "1MB": 1_000_000, "16MB": 16_000_000, "64MB": 64_000_000}
ITERATIONS = {"16MB": 6, "64MB": 2}  # else:
MANY = 60

Times = Mapping[tuple[str, str], list[float]]  # (what, which way) -> the slowest rank's
_measured: dict[str, Times] = {}


def times_of(size: str, anew: bool) -> Times:
    """One run measures all collectives of a size, results checked element by element."""
    if anew or size not in _measured:
        numel = SIZES[size] // 4 // NUM_RANKS * NUM_RANKS
        kwargs: dict[str, Any] = {"numel": numel, "num_iterations": ITERATIONS.get(size, MANY)}
        kwargs |= {"pieces_mib": [collectives.PIECE_BYTES / collectives.MIB], "deterministic": False}
        by_rank = run_ranks(collectives.measure_rank, NUM_RANKS, timeout_s=TIMEOUT_S, **kwargs)
        assert all(case.correct for cases in by_rank for case in cases)
        _measured[size] = {
            (case.op, case.way): [max(times) for times in zip(*(cases[i].times_s for cases in by_rank), strict=True)]
            for i, case in enumerate(by_rank[0])
        }
    return _measured[size]


@pytest.mark.parametrize("way", [MEMORY, SOCKETS])
@pytest.mark.parametrize("op", [REDUCE_SCATTER, ALL_GATHER])
@pytest.mark.parametrize("size", list(SIZES))
def test_half_against_all_reduce(size: str, op: str, way: str, against: Callable[[Callable[[], Pair]], float]) -> None:
    attempts: list[Pair] = []

    def measure() -> Pair:
        times = times_of(size, anew=bool(attempts))
        attempts.append(Pair(times[op, way], times[BASELINE, SOCKETS]))
        return attempts[-1]

    against(measure)

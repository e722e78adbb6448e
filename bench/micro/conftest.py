"""The fixture `against`: measures ours and its reference in turn, tells pytest-benchmark, and asks the gate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench.micro.gate import ATTEMPTS, BASELINE, Gate, Pair, RecordedClock, ratio_of

_gate = pytest.StashKey[Gate]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-baseline", action="store_true", help="store the ratios of this run as the new baseline")


def pytest_configure(config: pytest.Config) -> None:
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    config.stash[_gate] = Gate(baseline, config.getoption("--write-baseline"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    gate = session.config.stash[_gate]
    if gate.writing and gate.seen:
        gate.save()


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> Iterator[RecordedClock]:
    recorded = RecordedClock()
    request.node.add_marker(pytest.mark.benchmark(timer=recorded))
    yield recorded


@pytest.fixture
def against(request: pytest.FixtureRequest, clock: RecordedClock) -> Callable[[Callable[[], Pair]], float]:
    """`against(measure)` calls `measure`, again if the ratio is too large, and fails if it stays so.

    A baseline is the median of as many attempts.
    """
    benchmark: Any = request.getfixturevalue("benchmark")  # after its clock
    gate, name = request.config.stash[_gate], request.node.name

    def compare(measure: Callable[[], Pair]) -> float:
        pairs = [measure()]
        while len(pairs) < ATTEMPTS and (gate.writing or not gate.passes(name, min(map(ratio_of, pairs)))):
            pairs.append(measure())
        pairs.sort(key=ratio_of)
        pair = pairs[len(pairs) // 2 if gate.writing else 0]  # a baseline should be neither lucky nor unlucky
        ratio = ratio_of(pair)
        benchmark.extra_info.update(ratio=round(ratio, 4), reference_us=round(min(pair.reference_s) * 1e6, 3))
        clock.load(pair.ours_s)
        benchmark.pedantic(clock.replay, rounds=len(pair.ours_s), iterations=1)
        if "cuda" in name and not gate.writing and name not in gate.baseline:
            pytest.skip(f"ratio {ratio:.3f}; no baseline of a GPU is stored (--write-baseline stores one)")
        gate.check(name, ratio)
        return ratio

    return compare

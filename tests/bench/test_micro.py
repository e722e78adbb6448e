"""The gate of the micro-benchmarks lets noise pass and stops what has become slower."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bench.micro.gate import BASELINE, LIMIT, Gate, Pair, RecordedClock, Regression, ratio_of, time_in_turn


def work() -> int:
    return sum(range(2000))


def slowed() -> int:
    time.sleep(0.002)  # many times what `work` takes
    return work()


def test_deliberate_slowdown_fails() -> None:
    before = ratio_of(time_in_turn(work, work, 20))
    gate = Gate({"work": before})
    gate.check("work", before)
    with pytest.raises(Regression, match=r"work takes .* times its reference"):
        gate.check("work", ratio_of(time_in_turn(slowed, work, 20)))


def test_limit_is_a_quarter() -> None:
    gate = Gate({"work": 2.0})
    gate.check("work", 2.0 * LIMIT - 1e-6)
    assert LIMIT == 1.25 and gate.passes("work", 2.49) and not gate.passes("work", 2.51)
    with pytest.raises(Regression, match="slower by 30 %"):
        gate.check("work", 2.6)
    with pytest.raises(Regression, match="no baseline"):
        gate.check("other", 1.0)


def test_baseline_is_written_and_kept(tmp_path: Path) -> None:
    gate = Gate({"old": 1.5, "work": 1.0}, writing=True)
    gate.check("work", 9.0)
    gate.save(tmp_path / "baseline.json")
    assert json.loads((tmp_path / "baseline.json").read_text()) == {"old": 1.5, "work": 9.0}


def test_ratio_is_that_of_the_shortest_times() -> None:
    assert ratio_of(Pair([3.0, 2.0, 9.0], [4.0, 8.0])) == 0.5


def test_clock_tells_recorded_times() -> None:
    clock = RecordedClock()
    clock.load([0.25, 0.5])
    times = []
    for _ in range(2):
        start_s = clock()
        clock.replay()
        times.append(clock() - start_s)
    assert times == [0.25, 0.5]


def test_stored_baseline_is_complete() -> None:
    stored = json.loads(BASELINE.read_text())
    names = {name.partition("[")[0] for name in stored}
    assert names >= {"test_pack_against_foreach_copy", "test_step_against_torch", "test_half_against_all_reduce"}
    assert all(ratio > 0 for ratio in stored.values())

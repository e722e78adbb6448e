"""A regression gate by ratios: what is ours against something of torch's that does the same, in the same run.

Times change with the machine and with what else it does; their ratio hardly does. Baselines are in baseline.json, which
`python -m pytest bench/micro --write-baseline` writes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["BASELINE", "Gate", "Pair", "RecordedClock", "Regression", "ratio_of", "time_in_turn"]

BASELINE = Path(__file__).with_name("baseline.json")
LIMIT = 1.25  # times the baseline
ATTEMPTS = 3  # a regression is there in each of them, a busy machine hardly


class Regression(AssertionError):
    """Ours has become slower against its reference."""


@dataclass(slots=True)
class Gate:
    """`baseline`: name -> ratio. With `writing`, ratios are noted and nothing fails."""

    baseline: dict[str, float]
    writing: bool = False
    seen: dict[str, float] = field(default_factory=dict)

    def check(self, name: str, ratio: float) -> None:
        """Raises Regression if `ratio` is more than a quarter above its baseline, or if there is none."""
        self.seen[name] = round(ratio, 4)
        if self.writing:
            return
        before = self.baseline.get(name)
        if before is None:
            raise Regression(f"{name} has no baseline (ratio {ratio:.3f}); --write-baseline stores one")
        if ratio > LIMIT * before:
            raise Regression(
                f"{name} takes {ratio:.3f} times its reference, before it was {before:.3f}: slower by "
                f"{100 * (ratio / before - 1):.0f} %; at most {100 * (LIMIT - 1):.0f} % are allowed. If that is meant, "
                "write a new baseline: python -m pytest bench/micro --write-baseline"
            )

    def passes(self, name: str, ratio: float) -> bool:
        return ratio <= LIMIT * self.baseline.get(name, 0.0)

    def save(self, path: Path = BASELINE) -> None:
        """Those that were not measured this time keep their ratio."""
        merged = dict(sorted({**self.baseline, **self.seen}.items()))
        path.write_text(json.dumps(merged, indent=1) + "\n")


class RecordedClock:
    """Time as pytest-benchmark shall see it: each call of `replay` takes the next of the recorded durations."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._durations: Iterator[float] = iter(())

    def load(self, durations_s: Sequence[float]) -> None:
        self._durations = iter(durations_s)

    def __call__(self) -> float:
        return self._now_s

    def replay(self) -> None:
        self._now_s += next(self._durations)


@dataclass(slots=True)
class Pair:
    """Durations of ours and of the reference, taken in turn."""

    ours_s: list[float]
    reference_s: list[float]


def time_in_turn(ours: Callable[[], object], reference: Callable[[], object], rounds: int) -> Pair:
    pair = Pair([], [])
    for call in (reference, ours):
        call()
    for _ in range(rounds):
        for call, into in ((reference, pair.reference_s), (ours, pair.ours_s)):
            start_s = time.perf_counter()
            call()
            into.append(time.perf_counter() - start_s)
    return pair


def ratio_of(pair: Pair) -> float:
    """Of the shortest times: what else a machine does can only add."""
    return min(pair.ours_s) / min(pair.reference_s)

"""Where the time of an iteration went, as far as this rank has waited for others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dearcore.heartbeat import Status
from dearcore.layout import Plan
from dearcore.trace import Trace

__all__ = ["Stats", "Trial", "Tuning", "Wait", "WaitLog"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits of one bucket, over all steps with this plan."""

    bucket: int
    module: str  # the module that touched it first, most recently
    mean_ms: float
    longest_ms: float


@dataclass(frozen=True, slots=True)
class Trial:
    fusion: str
    num_buckets: int
    iteration_ms: float  # median of a trial, averaged over ranks


@dataclass(frozen=True, slots=True)
class Tuning:
    """What fusion='auto' did. `print(tuning)` shows a table, in the order of the trials."""

    trials: tuple[Trial, ...]
    chosen: str
    num_iterations: int  # that the search took, measuring included
    lost_s: float  # of them, what they took longer than as many iterations of the chosen plan
    replanning_s: float  # within lost_s: changes of plan and the search itself
    moved_mb: float  # sent by this rank for changes of plan, 10^6 bytes

    def __str__(self) -> str:
        head = (
            f"tuned in {len(self.trials)} trials, {self.num_iterations} iterations: {self.chosen}. Cost: "
            f"{self.lost_s:.2f} s, {self.replanning_s:.2f} s of it for changes of plan ({self.moved_mb:.3f} MB sent)"
        )
        rows = [f"{t.iteration_ms:10.2f}  {t.num_buckets:7d}  {t.fusion}" for t in self.trials]
        return "\n".join([head, f"{'median ms':>10s}  {'buckets':>7s}  plan", *rows])


@dataclass(frozen=True, slots=True)
class Stats:
    """`print(stats)` shows a table, longest waits first."""

    rank: int
    num_steps: int
    iteration_ms: float  # mean time from one step() to the next
    waited_ms: float  # mean time an iteration has waited for parameters
    mb_sent_per_step: float  # 1 MB = 10^6 bytes
    waits: Sequence[Wait]
    slowest_rank: int | None  # the one that waits least for parameters; None until all have been heard of
    tuning: Tuning | None = None  # what fusion="auto" tried and chose, when it is done

    def __str__(self) -> str:
        head = (
            f"rank {self.rank}, {self.num_steps} steps: {self.iteration_ms:.2f} ms an iteration, "
            f"{self.waited_ms:.2f} ms of it "
            f"waiting for parameters, {self.mb_sent_per_step:.3f} MB sent a step"
        )
        if self.slowest_rank is not None:
            head += f"\nslowest rank (the others wait for it): {self.slowest_rank}"
        if self.tuning is not None:
            head += f"\n{self.tuning}"
        rows = [f"{'bucket':>6s}  {'mean ms':>8s}  {'longest ms':>10s}  touched first by"]
        rows += [f"{w.bucket:6d}  {w.mean_ms:8.3f}  {w.longest_ms:10.3f}  {w.module}" for w in self.waits]
        return "\n".join([head, *rows])


def _slowest(peers: Sequence[Status]) -> int | None:
    waited = [(peer.activity.waited_ms, peer.rank) for peer in peers if peer.activity is not None]
    return min(waited)[1] if waited and len(waited) == len(peers) else None


class WaitLog:
    """Waits of the thread that steps: those of others (evaluation, saving) delay no iteration."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.tuning: Tuning | None = None
        self._thread = threading.get_ident()
        self._waited_s = 0.0
        self._total_s: dict[int, float] = {}
        self._longest_s: dict[int, float] = {}
        self._module: dict[int, str] = {}
        self._num_steps = self._steps_before = 0  # all of them; those of earlier plans
        self._first_s = self._last_s = 0.0

    def waited(self, buckets: tuple[int, ...], touched: str, seconds: float) -> None:
        if threading.get_ident() != self._thread:
            return
        end_s = time.perf_counter()
        label = f"wait[{', '.join(map(str, buckets))}]" + (f" ({touched})" if touched else "")
        self._trace.add("compute", label, end_s - seconds, end_s)
        self._waited_s += seconds
        for bucket in buckets:
            self._longest_s[bucket] = max(self._longest_s.get(bucket, 0.0), seconds)
            self._total_s[bucket] = self._total_s.get(bucket, 0.0) + seconds
            if touched:
                self._module[bucket] = touched.rpartition(".")[0] or touched

    def plan_changed(self) -> None:
        """Waits belong to buckets, which have other numbers from now on."""
        self._total_s.clear()
        self._longest_s.clear()
        self._module.clear()
        self._steps_before = self._num_steps

    def step_ended(self) -> None:
        self._thread = threading.get_ident()
        self._last_s = time.perf_counter()
        if not self._num_steps:
            self._first_s = self._last_s
        self._num_steps += 1

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def waited_ms(self) -> float:
        """Mean time that an iteration has waited for parameters."""
        return 1e3 * self._waited_s / max(self._num_steps, 1)

    def stats(self, plan: Plan, rank: int, bytes_sent: int, peers: Sequence[Status]) -> Stats:
        steps = max(self._num_steps, 1)
        steps_of_plan = max(self._num_steps - self._steps_before, 1)
        waits = [
            Wait(
                bucket,
                self._module.get(bucket, plan.buckets[bucket].first_names(1)),
                1e3 * total / steps_of_plan,
                1e3 * self._longest_s.get(bucket, 0.0),
            )
            for bucket, total in list(self._total_s.items())  # the thread that steps may add to it
            if bucket < len(plan.buckets)
        ]
        return Stats(
            rank,
            self._num_steps,
            1e3 * (self._last_s - self._first_s) / max(self._num_steps - 1, 1),
            self.waited_ms,
            bytes_sent / 1e6 / steps,
            sorted(waits, key=lambda wait: -wait.mean_ms),
            _slowest(peers),
            self.tuning,
        )

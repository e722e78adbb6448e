"""How long an iteration of a plan and a schedule takes on a profile: four lanes, the executor's own rules.

The compute lane runs the forward layer by layer, each waiting until its buckets are fresh, then the backward. A
gradient that is ready launches ops exactly as `dear.scheduler` does: strictly in the schedule's order. The network lane
runs collectives in launch order, one at a time; the step lane runs steps in launch order. What is left is launched at
the end of the backward, and the next forward begins at once, so a collective may run into it.

Not modelled: padding and flags on the wire, contention of the lanes for memory or cores, packing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .layout import Plan
from .profile import Link, Profile
from .schedule import After, Op, OpKind, Schedule
from .trace import Span

__all__ = ["Prediction", "predict", "predict_iteration_s"]

MAX_ITERATIONS = 16  # a schedule that has not settled by then alternates; the last eight are averaged
SETTLED = 1e-9  # relative change of the iteration time


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one iteration in steady state, in seconds."""

    iteration_s: float
    exposed_s: float  # iteration_s minus that of a network that moves nothing
    spans: tuple[Span, ...]  # of the last iteration and what it leaves to the next, counted from its start


def predict(profile: Profile, plan: Plan, schedule: Schedule, num_spanned: int = 1) -> Prediction:
    """Spans are those of `num_spanned` iterations."""
    run = _Run(profile, plan, schedule)
    iteration_s = run.settle()
    nothing = Link(0.0, 0.0)
    silent = replace(profile, reduce_scatter=nothing, all_gather=nothing, all_reduce=nothing)
    silent_s = _Run(silent, plan, schedule).settle()
    start_s = run.now_s
    run.spans = []
    for _ in range(num_spanned):
        run.iterate()
    spans = [Span(s.lane, s.name, s.start_s - start_s, s.end_s - start_s) for s in run.spans]
    return Prediction(iteration_s, iteration_s - silent_s, tuple(spans))


def predict_iteration_s(profile: Profile, plan: Plan, schedule: Schedule) -> float:
    """The time of one iteration in steady state."""
    return _Run(profile, plan, schedule).settle()


class _Run:
    def __init__(self, profile: Profile, plan: Plan, schedule: Schedule) -> None:
        self._layers, self._ops = profile.layers, schedule.ops
        self._host_s_per_op = profile.host_s_per_op
        by_name: dict[str, list[int]] = {}
        for bucket in plan.buckets:
            for slot in bucket.slots:
                by_name.setdefault(slot.fqn, []).append(bucket.index)
        self._buckets_of = [by_name[layer.fqn] for layer in profile.layers]
        self._num_slots = [len(bucket.slots) for bucket in plan.buckets]
        self._durations = [_duration_s(op, profile, plan) for op in schedule.ops]
        self._whole_step_s = 0.0  # of the user's own optimizer, where the schedule has no steps
        self._is_stepped = any(op.kind is OpKind.STEP for op in schedule.ops)
        if not self._is_stepped:
            self._whole_step_s = profile.num_bytes * profile.step_s_per_byte
        self._gathered = any(op.kind is OpKind.ALL_GATHER for op in schedule.ops)
        self.now_s = self._network_s = self._step_s = 0.0
        self._reduced = [0.0] * len(plan.buckets)
        self._stepped = [0.0] * len(plan.buckets)
        self._fresh = [0.0] * len(plan.buckets)
        self.spans: list[Span] | None = None

    def settle(self) -> float:
        """Iterates until the time of an iteration no longer changes, and returns it."""
        times: list[float] = []
        for _ in range(MAX_ITERATIONS):
            start_s = self.now_s
            self.iterate()
            times.append(self.now_s - start_s)
            if len(times) > 2 and all(abs(t - times[-1]) <= SETTLED * times[-1] for t in times[-3:-1]):
                return times[-1]
        return sum(times[-8:]) / 8

    def iterate(self) -> None:
        for layer, buckets in zip(self._layers, self._buckets_of, strict=True):
            for bucket in buckets:
                if self._fresh[bucket] > self.now_s:
                    self.now_s = self._fresh[bucket]
            self._add("forward", layer.fqn, self.now_s, layer.forward_s)
            self.now_s += layer.forward_s
        self._cursor, self._missing = 0, list(self._num_slots)
        for position in reversed(range(len(self._layers))):
            layer = self._layers[position]
            self._add("backward", layer.fqn, self.now_s, layer.backward_s)
            self.now_s += layer.backward_s
            for bucket in self._buckets_of[position]:
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    self._advance(stepping=False)
        self._advance(stepping=True)
        if not self._is_stepped:
            self.now_s = max(self.now_s, *self._reduced)
            self._add("step", "step", self.now_s, self._whole_step_s)
            self.now_s += self._whole_step_s

    def _advance(self, stepping: bool) -> None:
        while self._cursor < len(self._ops):
            op = self._ops[self._cursor]
            if not stepping and (
                op.after is After.BACKWARD_END or (op.after is After.GRAD_READY and self._missing[op.bucket])
            ):
                return
            self._launch(op, self._durations[self._cursor])
            self._cursor += 1

    def _launch(self, op: Op, duration_s: float) -> None:
        self.now_s += self._host_s_per_op
        if op.kind is OpKind.STEP:
            start_s = max(self._step_s, self.now_s, self._reduced[op.bucket])
            self._step_s = self._stepped[op.bucket] = start_s + duration_s
            if not self._gathered:
                self._fresh[op.bucket] = self._step_s
        else:
            start_s = max(self._network_s, self.now_s)
            if op.kind is OpKind.ALL_GATHER:
                start_s = max(start_s, self._stepped[op.bucket])
            self._network_s = start_s + duration_s
            if op.kind is OpKind.ALL_GATHER:
                self._fresh[op.bucket] = self._network_s
            else:
                self._reduced[op.bucket] = self._network_s
        self._add("step" if op.kind is OpKind.STEP else "network", str(op), start_s, duration_s)

    def _add(self, lane: str, name: str, start_s: float, duration_s: float) -> None:
        if self.spans is not None:
            self.spans.append(Span(lane, name, start_s, start_s + duration_s))


def _duration_s(op: Op, profile: Profile, plan: Plan) -> float:
    bucket = plan.buckets[op.bucket]
    if op.kind is OpKind.STEP:
        return bucket.num_bytes / bucket.num_shards * profile.step_s_per_byte
    links: dict[OpKind, Link] = {
        OpKind.REDUCE_SCATTER: profile.reduce_scatter,
        OpKind.ALL_REDUCE: profile.all_reduce,
        OpKind.ALL_GATHER: profile.all_gather,
    }
    return links[op.kind].time_s(bucket.num_bytes)

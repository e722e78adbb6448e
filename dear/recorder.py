"""Times of the layers, taken while the model trains: when the forward touches a parameter, when its gradient is there.

A parameter's touch is heard by a gate of its own (see `parameters`), so it is seen wherever it happens, in whatever
kind of module, and the model gets one hook, which says when its forward has ended. Gradients ring anyway. On CUDA a
moment is an event on the compute stream, read later.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dearcore.layout import ParamSpec
from dearcore.profile import LayerTime, layer_times
from dearcore.streams import Stamp, Streams
from dearcore.trace import Span

from .doors import OwnHook, compiled_params
from .parameters import Gate
from .tracked import TrackedParameter

__all__ = ["Recorder", "Times", "agreed_layers"]

BACKWARD_OVER_FORWARD = 2.0  # of the last layer, where nobody said when the forward ended


@dataclass(slots=True)
class Times:
    """Medians of one rank, in seconds; of parameters by name.

    needed_s counts from the first touch in the forward, ready_s from the end of the forward.
    """

    needed_s: dict[str, float]
    forward_s: float
    ready_s: dict[str, float]
    step_s: float  # all optimizer steps of an iteration
    launch_s: float  # what the host spent to launch an iteration's ops


@dataclass(slots=True)
class _Iteration:
    start: Stamp
    needed: dict[int, Stamp] = field(default_factory=dict)
    forward_ends: list[Stamp] = field(default_factory=list)
    ready: dict[int, Stamp] = field(default_factory=dict)
    step_s: float = 0.0
    launch_s: float = 0.0


class Recorder:
    """Records iterations; between them, and after `close`, the model has nothing of it but the hook of its forward.

    While a parameter's gate is armed the parameter belongs to another class, so `end_iteration` has to come before
    anybody else arms gates.
    """

    def __init__(self, model: nn.Module, tracked: Sequence[TrackedParameter], streams: Streams) -> None:
        self._model, self._tracked, self._streams = model, tracked, streams
        self._gates = [
            Gate((), [(t.spec.fqn, t.param)], (), functools.partial(self._touched, t.spec.index)) for t in tracked
        ]
        self._iterations: list[_Iteration] = []
        self._now: _Iteration | None = None
        self._was_traced = False  # a compiler has met a gate
        self._handle: Any = None
        if not _may_be_traced(model):
            self._handle = model.register_forward_hook(_forward_hook(self._forward_ended))
        streams.trace.listener = self._heard

    def start_iteration(self, eager: Collection[int] = ()) -> None:
        """From now on touches and gradients count. `eager`: ids of parameters that compiled code reads."""
        hidden = {*eager, *compiled_params(self._model)}
        self._now = _Iteration(self._streams.new_stamp())
        for tracked, gate in zip(self._tracked, self._gates, strict=True):
            if id(tracked.param) not in hidden and not self._was_traced:
                gate.arm()

    def grad_arrived(self, index: int) -> None:
        """Of several backward passes the last one counts: gradients leave in it."""
        if self._now is not None:
            self._now.ready[index] = self._streams.new_stamp()

    def end_iteration(self) -> None:
        iteration, self._now = self._now, None
        self.release()
        if not self._was_traced and any(gate.compiler_touched for gate in self._gates):
            self._was_traced = True  # the model is compiled somewhere: this took seconds, and must not happen again
        elif iteration is not None:
            self._iterations.append(iteration)

    def release(self) -> None:
        """Gives parameters that nobody has touched their own class back."""
        for gate in self._gates:
            gate.wait()

    def add_launch(self, seconds: float) -> None:
        if self._iterations:
            self._iterations[-1].launch_s = seconds

    def close(self) -> None:
        self.end_iteration()
        self._streams.trace.listener = None
        if self._handle is not None:
            self._handle.remove()

    def times(self) -> Times:
        """Medians over the iterations in which gradients arrived."""
        needed: dict[int, list[float]] = {}
        ready: dict[int, list[float]] = {}
        forward: list[float] = []
        complete = [iteration for iteration in self._iterations if iteration.ready]
        for iteration in complete:
            start, forward_end, backward_start = _phases(iteration)
            forward.append(forward_end)
            for index, stamp in iteration.needed.items():
                needed.setdefault(index, []).append(stamp.seconds_since(start))
            for index, stamp in iteration.ready.items():
                since_start_s = stamp.seconds_since(start)
                ready.setdefault(index, []).append(max(0.0, since_start_s - backward_start))
        hidden = {t.spec.index for t in self._tracked} - needed.keys()
        behind_compiled = {i for i in hidden if i in ready}  # it was used, so it is needed when the forward begins
        names = [t.spec.fqn for t in self._tracked]
        return Times(
            {names[i]: statistics.median(s) for i, s in needed.items()} | {names[i]: 0.0 for i in behind_compiled},
            _median(forward),
            {names[i]: statistics.median(s) for i, s in ready.items()},
            _median([iteration.step_s for iteration in complete]),
            _median([iteration.launch_s for iteration in complete]),
        )

    def _touched(self, index: int, buckets: tuple[int, ...], touched: str, waited_s: float) -> None:
        if self._now is not None and not self._now.ready:  # else the gate is only released
            self._now.needed.setdefault(index, self._streams.new_stamp())  # of several threads the first

    def _forward_ended(self) -> None:
        if self._now is not None and torch.is_grad_enabled():
            self._now.forward_ends.append(self._streams.new_stamp())

    def _heard(self, span: Span) -> None:
        """Steps run after `end_iteration`, on a thread of their own."""
        if span.name.startswith("step[") and self._iterations:
            self._iterations[-1].step_s += span.end_s - span.start_s


def agreed_layers(specs: Sequence[ParamSpec], by_rank: Sequence[Times]) -> tuple[LayerTime, ...]:
    """Layers in the forward order of the first rank; a moment has come when it has come on the slowest rank."""

    def latest(of: Callable[[Times], dict[str, float]]) -> dict[str, float]:
        return {name: max(of(times).get(name, 0.0) for times in by_rank) for times in by_rank for name in of(times)}

    needed_s = latest(lambda times: times.needed_s)
    forward_s = max(times.forward_s for times in by_rank)
    ready_s = {name: forward_s + after_s for name, after_s in latest(lambda times: times.ready_s).items()}
    ordered = sorted(specs, key=lambda spec: by_rank[0].needed_s.get(spec.fqn, forward_s))
    at_s = 0.0
    for spec in ordered:  # ranks may differ in the order of what is needed at almost the same time
        if spec.fqn in needed_s:
            at_s = needed_s[spec.fqn] = max(at_s, needed_s[spec.fqn])
    return layer_times(ordered, needed_s, max(forward_s, at_s), forward_s, ready_s)


def _phases(iteration: _Iteration) -> tuple[Stamp, float, float]:
    """Start of the forward; its end and the start of the backward, in seconds from there.

    With several forwards the first one waits for parameters and the last one comes before the backward that counts.
    """
    start = min(iteration.needed.values(), key=lambda s: s.seconds_since(iteration.start), default=iteration.start)
    if iteration.forward_ends:
        ends = [stamp.seconds_since(start) for stamp in iteration.forward_ends]
        return start, ends[0], ends[-1]
    last_s = max((stamp.seconds_since(start) for stamp in iteration.needed.values()), default=0.0)
    first_ready_s = min(stamp.seconds_since(start) for stamp in iteration.ready.values())
    end_s = last_s + max(0.0, first_ready_s - last_s) / (1 + BACKWARD_OVER_FORWARD)
    return start, end_s, end_s


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _may_be_traced(model: nn.Module) -> bool:
    """A hook on a module that is compiled would be compiled into it."""
    return bool(compiled_params(model))


def _forward_hook(ended: Callable[[], None]) -> OwnHook:
    def hook(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            ended()

    return OwnHook(hook)

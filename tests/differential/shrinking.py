"""Makes a failing program shorter while it fails in the same way: greedy, one change at a time, the largest first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.differential.draw import objection
from tests.differential.program import (
    OPS,
    Backward,
    Broken,
    Freeze,
    FullGrad,
    Layer,
    Op,
    Optimizer,
    Options,
    Program,
    SchedulerStep,
    SetGrad,
    SetLr,
)
from tests.differential.running import Failure

__all__ = ["shrink"]

MAX_RUNS = 150
MAX_SECONDS = 120.0


def shrink(
    failure: Failure,
    run: Callable[[Program], Failure | None],
    max_runs: int = MAX_RUNS,
    max_seconds: float = MAX_SECONDS,
) -> Failure:
    """The shortest found in so many runs. `run` says how a program fails, or None."""
    if failure.kind.startswith("not alone"):
        return failure
    end_s, runs, changed = time.monotonic() + max_seconds, 0, True
    tried: set[str] = {repr(failure.program)}
    while changed:
        changed = False
        for smaller in candidates(failure.program):
            if repr(smaller) in tried or objection(smaller):
                continue
            if runs == max_runs or time.monotonic() > end_s:
                return failure
            tried.add(repr(smaller))
            runs += 1
            found = run(smaller)
            if found is not None and found.kind == failure.kind:
                failure, changed = found, True
                break
    return failure


def candidates(p: Program) -> Iterator[Program]:
    """Every program that is one change simpler; some make no sense."""
    yield from _with_fewer_steps(p)
    if p.ranks > 2:
        yield _on_two_ranks(p)
    yield from (_without_layer(p, i) for i in reversed(range(len(p.layers))) if len(p.layers) > 1)
    for field_ in ("scaler", "scheduler", "readers", "join", "deterministic"):
        empty = type(getattr(p, field_))()
        if getattr(p, field_) != empty:
            yield _without_orphans(replace(p, **{field_: empty}))
    yield from _with_fewer_ops(p)
    for s in range(max(p.join, default=0), len(p.steps) - 1):
        yield replace(p, steps=(*p.steps[:s], p.steps[s] + p.steps[s + 1], *p.steps[s + 2 :]))
    for one in _simpler(p.options, Options()):
        yield replace(p, options=one)
    if p.options.fusion != "sized":
        yield replace(p, options=replace(p.options, schedule="dear", fusion=None))
    yield from _with_simpler_optimizer(p)
    for i, layer in enumerate(p.layers):
        for one in _simpler_layers(layer):
            yield replace(p, layers=(*p.layers[:i], one, *p.layers[i + 1 :]))
    for s, step in enumerate(p.steps):
        for o, op in enumerate(step):
            for simple in _simpler(op, OPS[type(op).__name__](), keep=("batch", "layer", "group")):
                yield _with_step(p, s, (*step[:o], simple, *step[o + 1 :]))
    if not p.whole_numbers:
        yield replace(p, whole_numbers=True)


def _with_fewer_steps(p: Program) -> Iterator[Program]:
    size = len(p.steps)
    while size:
        for start in range(0, len(p.steps), size):
            yield _cut_steps(p, start, min(start + size, len(p.steps)))
        size //= 2


def _cut_steps(p: Program, start: int, end: int) -> Program:
    join = tuple(n - max(0, min(n, end) - start) for n in p.join)
    steps = p.steps[:start] + p.steps[end:]
    return _without_orphans(replace(p, steps=steps, join=join if max(join, default=0) else ()))


def _with_fewer_ops(p: Program) -> Iterator[Program]:
    for s, step in enumerate(p.steps):
        for o in range(len(step)):
            yield _without_orphans(_with_step(p, s, step[:o] + step[o + 1 :]))


def _with_step(p: Program, number: int, step: tuple[Op, ...]) -> Program:
    return replace(p, steps=(*p.steps[:number], step, *p.steps[number + 1 :]))


def _without_orphans(p: Program) -> Program:
    """Takes away what belonged to something that is gone."""
    steps = tuple(
        tuple(_tamed(p, op) for op in step if (p.scheduler or not isinstance(op, SchedulerStep)) and _stays(p, op))
        for step in p.steps
    )
    scheduler = p.scheduler if any(isinstance(op, SchedulerStep) for step in steps for op in step) else ""
    return replace(p, steps=steps, scheduler=scheduler)


def _stays(p: Program, op: Op) -> bool:
    return p.scaler or type(op).__name__ != "Unscale"


def _tamed(p: Program, op: Op) -> Op:
    return replace(op, inf=-1) if isinstance(op, Backward) and not p.scaler else op


def _on_two_ranks(p: Program) -> Program:
    def of_two(op: Op) -> Op:
        changes = {f.name: 1 for f in fields(op) if f.name in ("skip", "inf", "only") and getattr(op, f.name) > 1}
        return replace(op, **changes)

    steps = tuple(tuple(of_two(op) for op in step) for step in p.steps)
    return replace(p, ranks=2, steps=steps, join=p.join[:2])


def _without_layer(p: Program, gone: int) -> Program:
    layers = []
    for i, layer in enumerate(p.layers):
        if i != gone:
            tied = layer.tied_to
            layers.append(replace(layer, tied_to=-1 if tied == gone else tied - (tied > gone)))

    def renumbered(step: tuple[Op, ...]) -> Iterator[Op]:
        for op in step:
            if isinstance(op, Broken | FullGrad | Freeze | SetGrad):
                if op.layer == gone and not isinstance(op, Broken):
                    continue
                op = replace(op, layer=max(0, op.layer - (op.layer >= gone)))
            yield op

    return replace(p, layers=tuple(layers), steps=tuple(tuple(renumbered(step)) for step in p.steps))


def _with_simpler_optimizer(p: Program) -> Iterator[Program]:
    one, optimizer = replace, p.optimizer
    if len(optimizer.groups) > 1:
        steps = tuple(tuple(one(op, group=0) if isinstance(op, SetLr) else op for op in step) for step in p.steps)
        layers = tuple(one(layer, group=0) for layer in p.layers)
        yield one(p, optimizer=one(optimizer, groups=({},)), layers=layers, steps=steps)
    if optimizer.options or optimizer.name != "SGD":
        yield one(p, optimizer=one(optimizer, name="SGD", options={}))
    for key in optimizer.options:
        less = {k: v for k, v in optimizer.options.items() if k != key and k != "nesterov"}
        yield one(p, optimizer=one(optimizer, options=less))
    for simple in _simpler(optimizer, Optimizer(), keep=("name", "options", "groups")):
        yield one(p, optimizer=simple)


def _simpler_layers(layer: Layer) -> Iterator[Layer]:
    if layer.kind in ("conv", "norm"):
        yield replace(layer, kind="bare", sizes=(5,), strides="", checkpointed=False)
    if layer.kind == "linear" and layer.tied_to < 0:
        yield replace(layer, kind="bare", sizes=layer.sizes[:1], strides="", checkpointed=False)
    if layer.kind == "bare" and len(layer.sizes) > 1 and not layer.strides:
        yield replace(layer, sizes=layer.sizes[:1])
    yield from _simpler(layer, Layer(), keep=("kind", "sizes", "group"))


def _simpler(value: Any, default: Any, keep: tuple[str, ...] = ()) -> Iterator[Any]:
    """`value` with one field as in `default`."""
    for field_ in fields(value):
        plain = getattr(default, field_.name)
        if field_.name not in keep and getattr(value, field_.name) != plain:
            yield replace(value, **{field_.name: plain})

"""What a rank does that has run out of batches inside `join()`: it takes part in what the others start, giving nothing.

See joining.py for how it hears of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .engine import Engine
from .joining import Call, Heard
from .update import snapshot_hyper

__all__ = ["joined"]


@contextlib.contextmanager
def joined(engine: Engine) -> Iterator[None]:
    """Inside, ranks may have different numbers of batches. At the end, waits for the last one and helps it until then.

    A rank that raises tells the others and leaves at once.
    """
    announcer = engine.announcer
    announcer.begin()
    try:
        try:
            yield
        except BaseException:
            announcer.abort()
            raise
        if not engine.closed:
            announcer.active = False  # what is started from now on was announced by others
            _follow(engine)
    finally:
        announcer.end()


def _follow(engine: Engine) -> None:
    num_followed = 0
    while (heard := engine.announcer.hear()).call is not Call.END:
        _ACTIONS[heard.call](engine, heard)
        num_followed += 1
    _adopt_last(engine, num_followed)


def _adopt_last(engine: Engine, num_followed: int) -> None:
    """Takes over how the rank that went on longest has left options and gradients."""
    cleared = [t.spec.index for t in engine.tracked if t.param.grad is None]
    everyone = engine.announcer.exchange(
        (num_followed, snapshot_hyper(engine.optimizer, engine.agreed.per_rank), cleared)
    )
    fewest, hyper, cleared = min(everyone, key=lambda entry: entry[0])
    if num_followed > fewest:
        _take_options(engine, hyper)
        for index in cleared:
            engine.tracked[index].forget()


def _take_options(engine: Engine, hyper: list[dict[str, Any]]) -> None:
    for group, options in zip(engine.optimizer.param_groups, hyper, strict=True):
        group.update(options)


def _late(engine: Engine, heard: Heard) -> None:
    engine.replica.forget_averages(range(len(engine.tracked)), keep=heard.details)
    engine.replica.scheduler.finish_gradients()
    engine.update.gradients_finished()


def _step(engine: Engine, heard: Heard) -> None:
    _take_options(engine, heard.details)
    engine.apply()


def _unscale(engine: Engine, heard: Heard) -> None:
    device = engine.streams.device
    engine.update.unscale(torch.zeros(1, device=device), torch.full((1,), heard.details, device=device))


def _full_grad(engine: Engine, heard: Heard) -> None:
    engine.update.full_grad(engine.tracked[heard.details])


_ACTIONS: dict[Call, Callable[[Engine, Heard], object]] = {
    Call.ORDER: lambda engine, _: engine.adopt_observed_order(),
    Call.CLEAR: lambda engine, heard: engine.replica.clear(*heard.details),
    Call.REDUCE: lambda engine, heard: engine.replica.follow_reduction(heard.details),
    Call.LATE: _late,
    Call.STEP: _step,
    Call.ZERO_GRAD: lambda engine, heard: engine.begin_anew(heard.details),
    Call.CLIP_NORM: lambda engine, heard: engine.clip_norm(*heard.details),
    Call.CLIP_VALUE: lambda engine, heard: engine.clip_value(heard.details),
    Call.UNSCALE: _unscale,
    Call.FULL_GRAD: _full_grad,
    Call.STATE: lambda engine, _: engine.export_state(),
    Call.BUFFERS: lambda engine, heard: engine.broadcast_buffers(heard.leader),
}

"""What hooks call. They hold the engine weakly: a parameter must not keep an optimizer alive that was dropped."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from dearcore.errors import ScheduleError
from dearcore.heartbeat import Activity

from .joining import Call
from .stats import WaitLog

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["activity", "broadcast_buffers", "refuse", "remove", "ring", "unscale"]


def ring(this: weakref.ref[Engine], index: int, param: nn.Parameter) -> None:
    """A parameter's gradient has arrived."""
    engine = this()
    if engine is not None:
        engine.grad_arrived(index, param)


def unscale(
    this: weakref.ref[Engine], found_inf: torch.Tensor, inv_scale: torch.Tensor, plain: list[torch.Tensor]
) -> list[torch.Tensor]:
    """A GradScaler asks: see `Engine.unscale`."""
    engine = this()
    return plain if engine is None or engine.closed else engine.unscale(found_inf, inv_scale, plain)


def broadcast_buffers(this: weakref.ref[Engine], module: nn.Module, _: Any) -> None:
    """A forward of the model begins."""
    engine = this()
    if engine is not None and module.training and torch.is_grad_enabled():
        heard = engine.announcer.ask(Call.BUFFERS)
        engine.broadcast_buffers(0 if heard is None else heard.leader)


def activity(this: weakref.ref[Engine], log: WaitLog) -> Activity:
    """What the heartbeat tells the other ranks."""
    engine = this()
    if engine is None:  # dropped; its steps are still what the others may want to know
        return Activity(log.num_steps, "", log.waited_ms)
    communicator = engine.communicator
    return Activity(engine.replica.step, communicator.doing, engine.log.waited_ms, communicator.failed)


def refuse(why: str, param: nn.Parameter) -> NoReturn:
    """A parameter's gradient has arrived where nobody trains it."""
    raise ScheduleError(why)


def remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()

"""Uneven inputs: before each collective, ranks inside `opt.join()` say what they start; those without batches follow.

    joining.py    `Announcer` says and hears. Imports no other part of `dear`.
    replica.py, engine.py, optimizer.py    say each call where its collectives begin; outside `join()` that is one `if`.
    following.py  what a rank does at the end of its `join()`: hear a call, take part with nothing to give, until END.

An announcement is one `start_combine` of a few numbers on the communication stream, in front of the collectives that
it announces, so it costs a short message and the host goes on. Only if a rank follows already, or if ranks disagree,
do all exchange the details as well: the others' options, and what their gradients are added to.

    active ranks    REDUCE rs[1]  REDUCE rs[0]  LATE ...  STEP ag[0] ag[1]  |  all batches done: END
    a follower      REDUCE rs[1]  REDUCE rs[0]  LATE ...  STEP ag[0] ag[1]  |  END

All ranks say END: training is over. A rank that raises says ABORT, which is an error on all that go on.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from dearcore.communicator import Communicator
from dearcore.errors import CommunicatorError, ScheduleError
from dearcore.streams import InlineStream, Streams

from .ranks import gather_objects, wait_communication

__all__ = ["Announcer", "Call", "Heard"]

LABEL = "agreement of ranks inside join()"


class Call(IntEnum):
    """What is about to be started; the largest wins where ranks differ."""

    END = 0  # nothing more: this rank follows
    ORDER = 1  # exchange of the observed order of gradients
    CLEAR = 2  # forget some averages
    REDUCE = 3  # the next reduction of the schedule
    LATE = 4  # agreement on late gradients
    STEP = 5
    ZERO_GRAD = 6
    CLIP_NORM = 7
    CLIP_VALUE = 8
    UNSCALE = 9
    FULL_GRAD = 10
    STATE = 11
    BUFFERS = 12
    ABORT = 13  # this rank has raised


_NAMES = {
    Call.END: "the end of join()",
    Call.REDUCE: "backward()",
    Call.STEP: "step()",
    Call.ZERO_GRAD: "zero_grad()",
    Call.CLIP_NORM: "clip_grad_norm_()",
    Call.CLIP_VALUE: "clip_grad_value_()",
    Call.UNSCALE: "GradScaler.unscale_()",
    Call.FULL_GRAD: "full_grad()",
    Call.STATE: "state_dict()",
    Call.BUFFERS: "a forward that broadcasts buffers",
}
# Their details are what a user passes, so they must be the same on every rank.
_AGREED = frozenset(
    {Call.STEP, Call.ZERO_GRAD, Call.CLIP_NORM, Call.CLIP_VALUE, Call.UNSCALE, Call.FULL_GRAD, Call.STATE}
)
_TOP = 1 << 40  # above every call, rank and digest


@dataclass(slots=True)
class Heard:
    """One announcement, valid when the communication stream has passed."""

    call: Call = Call.END
    details: Any = None
    leader: int = 0  # the first rank that still has batches


class Announcer:
    """Of one optimizer. `is_open`: this rank is inside `join()`; `active`: and has batches."""

    _open: str = ""  # one `join()` at a time in a process: a follower hears one optimizer only

    def __init__(self, communicator: Communicator, streams: Streams) -> None:
        self._communicator, self._streams = communicator, streams
        self.active = self.is_open = False
        self.step = 0  # for labels

    def begin(self) -> None:
        if Announcer._open:
            raise ScheduleError(
                "join() inside another join(): a rank that has run out of batches can follow one optimizer only. Leave "
                "the other one first."
            )
        Announcer._open = "open"
        self.active = self.is_open = True

    def end(self) -> None:
        Announcer._open = ""
        self.active = self.is_open = False

    def say(self, call: Call, details: Any = None, compared: Any = None) -> None:
        """Enqueues an announcement, if this rank is inside `join()`. Errors surface where the stream is waited for.

        `details` are for those that follow. What is `compared` has to be the same on all ranks; None: the details.
        """
        if self.active:
            self._start(call, details, compared)

    def ask(self, call: Call, details: Any = None) -> Heard | None:
        """As `say`, but blocks until the ranks have agreed. None outside `join()`."""
        return self._finish(self._start(call, details)) if self.active else None

    def hear(self) -> Heard:
        """What the ranks that have batches start next; END if there are none. Blocks."""
        return self._finish(self._start(Call.END, None))

    def abort(self) -> None:
        """Tells the others that this rank has raised, without waiting for them."""
        self._start(Call.ABORT, None)

    def exchange(self, mine: Any) -> list[Any]:
        """Every rank's picklable object, by rank. Blocks."""
        return gather_objects(mine, self._communicator, self._streams, "end of join()")

    def _start(self, call: Call, details: Any, compared: Any = None) -> Heard:
        heard = Heard()
        label = f"{LABEL} in step {self.step}"
        compared = details if compared is None else compared
        self._streams.communication.run(label, lambda: self._agree(call, details, compared, heard, label))
        return heard

    def _finish(self, heard: Heard) -> Heard:
        wait_communication(self._streams)
        return heard

    def _agree(self, call: Call, details: Any, compared: Any, heard: Heard, label: str) -> None:
        """At once: for the communication stream."""
        rank, size = self._communicator.rank, self._communicator.size
        follows, aborts = call is Call.END, call is Call.ABORT
        digest = zlib.crc32(repr(_plain(compared)).encode()) if call in _AGREED else 0
        told = torch.tensor(
            [
                call,
                0 if follows else _TOP - call,
                follows,
                0 if follows else size - rank,
                digest,
                0 if follows else _TOP - digest,
                size - rank if aborts else 0,
            ],
            dtype=torch.int64,
        )
        self._communicator.start_combine(told, "max", InlineStream(), label)
        last, first, anyone_follows, leader, high, low, aborting = told.tolist()
        heard.call = Call(last)
        if heard.call is Call.END:
            return
        if aborting:
            if not aborts:
                raise CommunicatorError(
                    f"rank {size - aborting} of {size} has raised an error inside join(), so that this one cannot go "
                    "on. See that rank's traceback."
                )
            return
        heard.leader = size - leader
        differ = last != _TOP - first or high != _TOP - low
        if anyone_follows or differ:
            everyone: list[tuple[Call, Any, Any]] = []
            mine = (call, details, compared if differ else None)
            self._communicator.start_gather_objects(mine, everyone, InlineStream(), f"{LABEL}: details")
            if differ:
                raise ScheduleError(_difference([(r, said[0], said[2]) for r, said in enumerate(everyone)]))
            heard.details = everyone[heard.leader][1]


def _difference(everyone: list[tuple[int, Call, Any]]) -> str:
    """Of the ranks that have batches, the first two that say different things."""
    (rank, call, details), *others = [said for said in everyone if said[1] is not Call.END]
    for other, other_call, other_details in others:
        if other_call is not call:
            return (
                f"inside join(), rank {rank} has come to {_name(call)} and rank {other} to {_name(other_call)}. Ranks "
                "that have batches make the same calls in the same order."
            )
        mine, theirs = _first_difference(_plain(details), _plain(other_details))
        if mine != theirs:
            return (
                f"inside join(), ranks call {_name(call)} differently: rank {rank} with {mine}, rank {other} with "
                f"{theirs}. Options are the same on every rank; what counts batches (an LR scheduler, a GradScaler) "
                "falls behind on a rank that runs out of them: load its state from a rank that did not."
            )
    return "inside join(), ranks make different calls. Make the same calls in the same order on every rank."


def _first_difference(mine: Any, theirs: Any) -> tuple[Any, Any]:
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        for key in mine:
            if mine[key] != theirs[key]:
                first, second = _first_difference(mine[key], theirs[key])
                return f"{key}={first}", f"{key}={second}"
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for one, other in zip(mine, theirs, strict=True):
            if one != other:
                return _first_difference(one, other)
    return mine, theirs


def _plain(value: Any) -> Any:
    """Comparable by `==` and `repr`."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _name(call: Call) -> str:
    return _NAMES.get(call, "the end of a backward")

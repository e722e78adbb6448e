"""Ranks that are killed, stopped or raise at a random point, and what the others make of it.

Imported by ranks. A point is a step and a moment in it; moments inside a collective are on the communication thread.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dear
from dear.parameters import without_waiting
from tests.support.ranks import rank
from tests.support.reference import IntegerModel, integer_batches, weighted_sum_loss

KINDS = ("kill", "stall", "raise")
MOMENTS = ("forward", "backward", "before step", "after step", "before zero_grad", "collective", "any time")
NUM_STEPS = 8
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"fusion": None}, {"schedule": "wfbp"}, {"shard": False})


class Injected(Exception):
    """What the culprit raises."""


@dataclass(frozen=True, slots=True)
class Injection:
    seed: int
    kind: str
    size: int
    culprit: int
    step: int
    moment: str
    nth: int  # collective, counted from the beginning of that step
    options: dict[str, Any]

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.kind} rank {self.culprit} of {self.size} in step {self.step}, {self.moment}"
            f"{f' {self.nth}' if self.moment == 'collective' else ''}, {self.options}"
        )


def injection_of(seed: int) -> Injection:
    choose = random.Random(seed)
    kind = choose.choices(KINDS, (9, 4, 7))[0]  # a stall takes the longest
    size = choose.choice((2, 3, 3))
    moments = MOMENTS if kind != "raise" else MOMENTS[:5]  # exceptions come from the user's code
    return Injection(
        seed,
        kind,
        size,
        choose.randrange(size),
        choose.randrange(1, NUM_STEPS - 1),
        choose.choice(moments),
        choose.randrange(4),
        choose.choice(OPTIONS),
    )


@dataclass(frozen=True, slots=True)
class Witness:
    """What a rank that lives on has seen."""

    error: str
    error_type: str
    at_s: float  # monotonic, the same clock for all processes
    num_steps: int
    wrong: list[str]
    num_unreadable: int
    late_step: str  # what calling step() once more says


def train_until_it_fails(injection: Injection, expected: list[dict[str, Tensor]], folder: str) -> Witness | None:
    model = IntegerModel()
    sgd = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    optimizer = dear.DistributedOptimizer(sgd, model, **injection.options)
    batches = integer_batches(model, injection.size, NUM_STEPS)[rank()]
    trigger = _Trigger(injection, optimizer, folder)
    wrong: list[str] = []
    num_steps = 0
    try:
        for number, batch in enumerate(batches):
            trigger.begin(number)
            trigger.at("before zero_grad")
            optimizer.zero_grad()
            loss = weighted_sum_loss(_calling(model, lambda: trigger.at("forward")), batch)
            loss.register_hook(lambda grad: trigger.at("backward"))  # type: ignore[no-untyped-call]
            next(iter(model.parameters())).register_hook(lambda grad: trigger.at("backward"))  # type: ignore[no-untyped-call]
            loss.backward()
            trigger.at("before step")
            optimizer.step()
            trigger.at("after step")
            for name, param in model.named_parameters():
                if not torch.equal(param.detach(), expected[number][name]):
                    wrong.append(f"{name} after step {number}")
            num_steps += 1
    except dear.DearError as error:
        at_s = time.monotonic()
        num_unreadable = 0
        for name, param in model.named_parameters():  # of the step that failed: right, or an error
            try:
                value = param.detach().clone()
            except dear.DearError:
                num_unreadable += 1
                continue
            if not any(torch.equal(value, expected[k][name]) for k in (num_steps - 1, num_steps)):
                wrong.append(f"{name} after the error in step {num_steps}")
        return Witness(str(error), type(error).__name__, at_s, num_steps, wrong, num_unreadable, _step_again(optimizer))
    return None


def _step_again(optimizer: dear.DistributedOptimizer) -> str:
    try:
        with without_waiting():
            optimizer.step()
        optimizer.synchronize()
    except dear.DearError as error:
        return type(error).__name__
    return "nothing"


def _calling(model: IntegerModel, call: Callable[[], None]) -> IntegerModel:
    call()
    return model


class _Trigger:
    def __init__(self, injection: Injection, optimizer: dear.DistributedOptimizer, folder: str) -> None:
        self._injection, self._folder = injection, folder
        self._mine = rank() == injection.culprit
        self._step = -1
        self._passed: list[str] = []
        self._num_collectives = 0  # since the step of the injection began
        if self._mine and injection.moment == "collective":
            self._watch(optimizer._engine.communicator)

    def begin(self, step: int) -> None:
        self._step = step
        injection = self._injection
        if self._mine and step == injection.step and injection.moment == "any time":
            delay_s = random.Random(injection.seed).random() * 0.02
            # a process of its own, so that this one may be anywhere when it comes
            pid, number = os.getpid(), _SIGNALS[injection.kind]
            if os.fork() == 0:
                time.sleep(delay_s)
                self._note()
                os.kill(pid, number)
                os._exit(0)

    def at(self, moment: str) -> None:
        if self._mine and self._injection.moment == "any time" and self._step == NUM_STEPS - 1:
            time.sleep(0.2)  # the signal comes before the end
        if not self._mine or self._step != self._injection.step or moment != self._injection.moment:
            return
        first = f"{moment} {self._step}"
        if moment == "backward" and first not in self._passed and self._injection.nth % 2:
            self._passed.append(first)  # the later of the two moments of a backward
            return
        self._do()

    def _watch(self, communicator: Any) -> None:
        original = communicator._start

        def start(work: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            def watched(*inner: Any) -> None:
                if self._step >= self._injection.step:
                    if self._num_collectives == self._injection.nth:
                        self._do()
                    self._num_collectives += 1
                work(*inner)

            original(watched, *args, **kwargs)

        communicator._start = start

    def _do(self) -> None:
        self._note()
        if self._injection.kind == "raise":
            raise Injected(str(self._injection))
        os.kill(os.getpid(), _SIGNALS[self._injection.kind])

    def _note(self) -> None:
        Path(self._folder, "injected").write_text(str(time.monotonic()))


_SIGNALS = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP, "raise": signal.SIGCONT}

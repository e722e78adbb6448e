"""Random sleeps on every rank, before every collective and in hooks, change the timing and nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from dearcore.gloo import GlooCommunicator
from tests.parity.models import LayerwiseSGD, WideMLP
from tests.parity.trainers import Case, DearTrainer, Result, Trainer, check_parity, plain_steps, run_all
from tests.support.ranks import RankPool, rank
from tests.support.reference import OddMLP, assert_bit_equal, optimizer_of

LONGEST_S = 0.004
SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = optimizer_of(torch.optim.Adam, lr=0.01)


@contextmanager
def sleeps_before_collectives(sleep: Callable[..., None]) -> Iterator[None]:
    start = GlooCommunicator._start

    def start_later(self: GlooCommunicator, work: Callable[[int], None], *args: Any, **kwargs: Any) -> None:
        def late(tag: int) -> None:
            sleep()
            work(tag)

        start(self, late, *args, **kwargs)

    with mock.patch.object(GlooCommunicator, "_start", start_later):
        yield


def run_with_sleeps(case: Case) -> Result:
    """Collectives of this rank's thread are late, and so are its modules and its gradients."""
    # one generator a thread: what a rank draws must not depend on how threads interleave
    draw_late, draw_hooks = (random.Random(f"{case.options}{rank()}{thread}") for thread in range(2))

    def sleep_in_hook(*_: object) -> None:
        time.sleep(draw_hooks.uniform(0, LONGEST_S))

    with sleeps_before_collectives(lambda: time.sleep(draw_late.uniform(0, LONGEST_S))):
        trainer = DearTrainer(case)
        for module in trainer.model.modules():
            module.register_forward_pre_hook(sleep_in_hook)
        for number, param in enumerate(trainer.model.parameters()):
            if number % 2:
                param.register_hook(sleep_in_hook)
            else:
                param.register_post_accumulate_grad_hook(sleep_in_hook)
        case.script(trainer)
        result = trainer.result()
        trainer.optimizer.close()
        return result


def clipping_steps(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.clip_value(0.02)
        trainer.step()


def accumulating_steps(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        if index % 3 == 0:
            trainer.zero_grad()
        trainer.backward(index)
        if index % 3 == 2:
            trainer.step()


CASES = {
    "no fusion": Case(OddMLP(), SGD, options={"fusion": None}),
    "one bucket": Case(OddMLP(), ADAM),
    "split tensors": Case(WideMLP(), ADAM, options={"fusion": 0.05}, num_steps=6),
    "clipping": Case(OddMLP(), ADAM, clipping_steps, {"fusion": None}, num_steps=10),
    "accumulating": Case(OddMLP(), ADAM, accumulating_steps, {"fusion": None, "accumulate": 3}, num_steps=12),
    "gathered gradients": Case(OddMLP(), optimizer_of(LayerwiseSGD), plain_steps, {"fusion": None}, num_steps=10),
}


def test_sleeps_change_nothing_on_two_ranks(pool: RankPool) -> None:
    got = check_parity(pool, CASES, run_dear=run_with_sleeps)
    assert len(got) == len(CASES)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("deterministic", [False, True], ids=["ring", "exchange"])
def test_sleeps_change_nothing_on_more_ranks(pool: RankPool, size: int, deterministic: bool) -> None:
    """Against the same run without sleeps, which in deterministic mode is bit-equal to plain PyTorch as well."""
    cases = {
        "no fusion": Case(OddMLP(), ADAM, options={"fusion": None}, num_steps=4),
        "one bucket": Case(OddMLP(), SGD, num_steps=4),
        "gathered gradients": Case(OddMLP(), optimizer_of(LayerwiseSGD), options={"fusion": 0.0004}, num_steps=4),
    }
    quick = run_all(pool, cases, size, deterministic)
    late = run_all(pool, cases, size, deterministic, run_dear=run_with_sleeps)
    assert_bit_equal(late, quick, names=("with sleeps", "without"))
    assert len(late) == size

"""Schedules that step inside the backward come to the same weights, or refuse before any weight has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dear
from dearcore.layout import ParamSpec, Plan, plan_threshold, plan_unfused
from dearcore.schedule import After, Op, OpKind, Schedule
from tests.parity.models import MixedDtypes
from tests.parity.test_loops import (
    backward_without_step,
    backward_zero_backward,
    groups_of_three,
    groups_of_three_without_sync,
    never_zero,
    step_first,
    tolerance_of,
)
from tests.parity.test_sleeps import run_with_sleeps
from tests.parity.trainers import Case, MakeOptimizer, Script, Trainer, check_parity, plain_steps, run_all
from tests.support.ranks import RankPool, rank
from tests.support.reference import (
    IntegerModel,
    OddMLP,
    ReusedModel,
    TiedModel,
    UnusedModel,
    assert_bit_equal,
    make_batches,
    mse_loss,
    optimizer_of,
)

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
ADAM = optimizer_of(torch.optim.Adam, lr=0.01)
MIB = 0.0004  # a few buckets for a model of a few hundred parameters


def filling(model: nn.Module, size: int, fusion: float | None = None, all_early: bool = True) -> dict[str, Any]:
    """Every bucket (or all but the first layer's) is stepped and gathered as soon as it has been reduced."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    params = [ParamSpec(i, name, tuple(param.shape), param.dtype) for i, (name, param) in enumerate(trained)]
    plan: Plan = plan_unfused(params, size) if fusion is None else plan_threshold(params, size, fusion * 2**20)
    ops: list[Op] = []
    late: list[Op] = []
    for bucket in reversed(plan.buckets):
        is_early = all_early or bucket.index > 0
        ops.append(Op(OpKind.REDUCE_SCATTER, bucket.index, After.GRAD_READY))
        where, after = (ops, After.DONE) if is_early else (late, After.BACKWARD_END)
        where += [Op(OpKind.STEP, bucket.index, after), Op(OpKind.ALL_GATHER, bucket.index, After.DONE)]
    schedule = Schedule("dear-fill", (*ops, *late))
    assert len(schedule.early_buckets) == len(plan.buckets) - (0 if all_early else 1)
    return {"fusion": plan, "schedule": schedule}


def case(model: nn.Module, make_optimizer: MakeOptimizer, size: int, script: Script = plain_steps, **more: Any) -> Case:
    where = {name: more.pop(name) for name in ("fusion", "all_early") if name in more}
    options = {**filling(model, size, **where), **more.pop("options", {})}
    return Case(model, make_optimizer, script, options, deterministic=size > 2, **more)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": SGD,
    "plain SGD": optimizer_of(torch.optim.SGD, lr=0.05),
    "Adam": ADAM,
    "AdamW, amsgrad": optimizer_of(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "RMSprop": optimizer_of(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "Adagrad": optimizer_of(torch.optim.Adagrad, lr=0.05),
    "NAdam": optimizer_of(torch.optim.NAdam, lr=0.01),
    "ASGD": optimizer_of(torch.optim.ASGD, lr=0.05),
}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_20_steps_of_every_optimizer(pool: RankPool, size: int) -> None:
    model = OddMLP()
    cases = {name: case(model, make, size) for name, make in OPTIMIZERS.items()}
    cases["some early"] = case(model, ADAM, size, all_early=False)
    cases["fused"] = case(model, ADAM, size, fusion=MIB)
    check_parity(pool, cases, size)


def change_lr_before_step(trainer: Trainer) -> None:
    """The options that count are those at step(), as in plain PyTorch."""
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        if index % 3:
            trainer.optimizer.param_groups[0]["lr"] *= 0.75
        trainer.step()


def save_before_step(trainer: Trainer) -> None:
    """A checkpoint between backward and step holds the state before the step, and disturbs nothing."""
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        if index in (0, 4):
            trainer.note(trainer.optimizer.state_dict()["state"])
            trainer.note([param.detach().clone() for param in trainer.model.parameters()])
        trainer.step()


def grads_before_step(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.note_grads()
        trainer.step()


def weights_after_backward(trainer: Trainer) -> None:
    """Nobody sees a weight change before step()."""
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.note([param.detach().clone() for param in trainer.model.parameters()])
        trainer.step()


SCRIPTS: dict[str, tuple[Script, dict[str, Any]]] = {
    "lr changed before step": (change_lr_before_step, {}),
    "state_dict before step": (save_before_step, {}),
    "full_grad before step": (grads_before_step, {}),
    "weights after backward": (weights_after_backward, {}),
    "accumulate": (groups_of_three, {"options": {"accumulate": 3}}),
    "no_sync": (groups_of_three_without_sync, {}),
    "gradient probe": (backward_zero_backward, {}),
    "backward without step": (backward_without_step, {}),
    "step first": (step_first, {}),
    "never zeroed": (never_zero, {"tolerance": tolerance_of("never_zero")}),
}


@pytest.mark.parametrize("size", [2, 3])
def test_loops(pool: RankPool, size: int) -> None:
    model = OddMLP()
    cases = {
        f"{name}, {label}": case(model, make, size, script, num_steps=8, all_early=label == "SGD", **dict(more))
        for name, (script, more) in SCRIPTS.items()
        for label, make in (("SGD", SGD), ("Adam", ADAM))
    }
    check_parity(pool, cases, size)


@pytest.mark.parametrize("size", [2, 3])
def test_models(pool: RankPool, size: int) -> None:
    """Weights stay as they are until step(), so that they may be used again in the backward."""
    cases = {
        "tied": case(TiedModel(), ADAM, size),
        "reused": case(ReusedModel(), ADAM, size),
        "unused": case(UnusedModel(), SGD, size),
    }
    if size == 2:  # a third is not exact in bf16
        cases["mixed dtypes"] = case(MixedDtypes(), SGD, size, options={"master_dtype": None}, num_steps=6)
    check_parity(pool, cases, size)


def test_sleeps_change_nothing(pool: RankPool) -> None:
    model = OddMLP()
    check_parity(pool, {"all early": case(model, ADAM, 2, num_steps=6)}, run_dear=run_with_sleeps)


def test_masters_are_those_of_dear(pool: RankPool) -> None:
    """bf16 with fp32 masters: bit-equal to the schedule `dear` of the same plan."""
    model = IntegerModel(dtype=torch.bfloat16)
    for script in (plain_steps, change_lr_before_step):
        options = filling(model, 2, MIB)
        plain = {**options, "schedule": "dear"}
        (filled,) = _results(pool, {"fill": Case(model, ADAM, script, options, num_steps=8)})
        (expected,) = _results(pool, {"dear": Case(model, ADAM, script, plain, num_steps=8)})
        assert_bit_equal(filled, expected, names=("dear-fill", "dear"))


def _results(pool: RankPool, cases: dict[str, Case]) -> list[Any]:
    by_rank = run_all(pool, cases, 2)
    return [[ranks[name][0] for ranks in by_rank] for name in cases]


# What it refuses, before any weight has changed

Wrong = Callable[[Any, nn.Module, torch.Tensor], None]


def _second_backward(optimizer: Any, model: nn.Module, loss: torch.Tensor) -> None:
    mse_loss(model, make_batches(model, 2, 1)[0][0]).backward()


def _scale(optimizer: Any, model: nn.Module, loss: torch.Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(loss)
    scaler.step(optimizer)


def _drop(optimizer: Any, model: nn.Module, loss: torch.Tensor) -> None:
    next(model.parameters()).grad = None
    optimizer.step()


def _zero(optimizer: Any, model: nn.Module, loss: torch.Tensor) -> None:
    grad = next(model.parameters()).grad
    assert grad is not None
    grad.zero_()
    optimizer.step()


def _assign(optimizer: Any, model: nn.Module, loss: torch.Tensor) -> None:
    param = next(model.parameters())
    param.grad = torch.ones_like(param)
    optimizer.step()


REFUSED: dict[str, tuple[Wrong, str]] = {
    "clipping the norm": (lambda o, m, loss: o.clip_grad_norm_(1.0), "clipping does not go with schedule 'dear-fill'"),
    "clipping values": (lambda o, m, loss: o.clip_grad_value_(1.0), "clipping does not go with schedule 'dear-fill'"),
    "loss scaling": (_scale, "loss scaling does not go with schedule 'dear-fill'"),
    "a second backward": (_second_backward, "allows one backward a step"),
    "a dropped gradient": (_drop, "changed after the backward had stepped it"),
    "a zeroed gradient": (_zero, "changed after the backward had stepped it"),
    "an assigned gradient": (_assign, "changed after the backward had stepped it"),
}


def refused_then_right(kind: str) -> tuple[str, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """What it says; the weights before and after; and at the end, when zero_grad() has made all well."""
    model = OddMLP()
    optimizer = dear.DistributedOptimizer(ADAM(model), model, **filling(model, dear.size()))
    batches = make_batches(model, dear.size(), 3)[rank()]

    def weights() -> list[torch.Tensor]:
        return [param.detach().clone() for param in model.parameters()]

    def step(index: int) -> None:
        optimizer.zero_grad()
        mse_loss(model, batches[index]).backward()
        optimizer.step()

    step(0)
    before = weights()
    optimizer.zero_grad()
    loss = mse_loss(model, batches[1])
    loss.backward()
    text = ""
    try:
        REFUSED[kind][0](optimizer, model, loss.detach())
    except dear.ScheduleError as error:
        text = str(error)
    after = weights()
    step(2)
    return text, before, after, weights()


@functools.cache
def _right() -> list[torch.Tensor]:
    """Steps on batches 0 and 2 alone, in plain PyTorch."""
    model = OddMLP()
    optimizer, batches = ADAM(model), make_batches(model, 2, 3)
    for index in (0, 2):
        optimizer.zero_grad()
        for of_rank in batches:
            (mse_loss(model, of_rank[index]) / 2).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_leave_everything_as_it_was(pool: RankPool, kind: str) -> None:
    for text, before, after, at_the_end in pool.run(refused_then_right, kind, size=2):
        assert REFUSED[kind][1] in text
        assert "No weight has changed" in text
        assert_bit_equal(after, before)
        assert_bit_equal(at_the_end, _right())


def step_again(optimizer_steps: int) -> list[torch.Tensor]:
    model = OddMLP()
    optimizer = dear.DistributedOptimizer(SGD(model), model, **filling(model, dear.size()))
    mse_loss(model, make_batches(model, dear.size(), 1)[rank()][0]).backward()
    for _ in range(optimizer_steps):
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def test_a_second_step_applies_the_same_gradient_again(pool: RankPool) -> None:
    model = OddMLP()
    optimizer, batches = SGD(model), make_batches(model, 2, 1)
    for of_rank in batches:
        (mse_loss(model, of_rank[0]) / 2).backward()
    for _ in range(3):
        optimizer.step()
    assert_bit_equal(pool.run(step_again, 3, size=2), [[param.detach() for param in model.parameters()]] * 2)


def step_after_a_look(steps: int) -> list[torch.Tensor]:
    """Each step is preceded by a local backward whose average is looked at, which steps early, and then forgotten."""
    model = OddMLP()
    optimizer = dear.DistributedOptimizer(SGD(model), model, **filling(model, dear.size()))
    first, second = make_batches(model, dear.size(), 2)[rank()]
    for _ in range(steps):
        with optimizer.no_sync():
            mse_loss(model, first).backward()
        for param in model.parameters():
            optimizer.full_grad(param)
        optimizer.zero_grad()
        mse_loss(model, second).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def test_what_was_looked_at_and_forgotten_is_not_stepped(pool: RankPool) -> None:
    model = OddMLP()
    optimizer, batches = SGD(model), make_batches(model, 2, 2)
    for _ in range(3):
        optimizer.zero_grad()
        for of_rank in batches:
            (mse_loss(model, of_rank[1]) / 2).backward()
        optimizer.step()
    assert_bit_equal(pool.run(step_after_a_look, 3, size=2), [[param.detach() for param in model.parameters()]] * 2)

"""Parameter groups, learning-rate schedulers and edits of options act on the very step that they act on in PyTorch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.parity.trainers import Case, Trainer, breadth, check_parity
from tests.support.ranks import RankPool
from tests.support.reference import IntegerModel, OddMLP, optimizer_of

OPTIONS: list[dict[str, Any]] = [{}, {"fusion": None}, {"shard": False}]


def interleaved(cls: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """Matrices with decay, the rest with another learning rate and none; a third group stays empty."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return cls(  # type: ignore[call-arg]
        [
            {"params": matrices, "weight_decay": 0.25},
            {"params": others, "lr": 0.02, "weight_decay": 0.0},
            {"params": [], "lr": 3.0},
        ],
        lr=0.01,
    )


@pytest.mark.parametrize("size", [2, 3])
def test_interleaved_groups(pool: RankPool, size: int) -> None:
    model = OddMLP()
    makers = {
        cls.__name__: functools.partial(interleaved, cls)
        for cls in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop)
    }
    cases = {
        f"{name}, {options}": Case(model, make, options=options, num_steps=6, deterministic=size > 2)
        for name, make in makers.items()
        for options in (OPTIONS if size == 2 or name == "AdamW" else OPTIONS[:1])
    }
    for results in check_parity(pool, cases, size).values():
        assert [len(group["params"]) for group in results[0].optimizer_state["param_groups"]] == [2, 5, 0]


def halving(model: nn.Module) -> torch.optim.Optimizer:
    weights, biases = list(model.parameters())[::2], list(model.parameters())[1::2]
    return torch.optim.SGD([{"params": weights, "weight_decay": 0.5}, {"params": biases}], lr=1.0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_decay_stops_at_the_borders_of_groups(pool: RankPool, size: int) -> None:
    model = IntegerModel([(5,), (4,)] * 4)
    zeros = [[tuple(torch.zeros_like(p) for p in model.parameters())]] * size
    cases = {str(options): Case(model, halving, options=options, batches=zeros) for options in OPTIONS}
    for results in check_parity(pool, cases, size).values():
        for number, (name, param) in enumerate(model.named_parameters()):
            assert torch.equal(results[0].parameters[name], param / 2 if number % 2 == 0 else param)


# ---------------------------------------------------------------------------------------------------- schedulers

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
}


def make_scheduler(name: str, _: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return SCHEDULERS[name](optimizer)


def scheduled_steps(name: str, made_on: str, trainer: Trainer) -> None:
    warnings.filterwarnings("error", message="Detected call of")
    scheduler = trainer.prepared
    if scheduler is None:
        scheduler = SCHEDULERS[name](getattr(trainer, made_on))
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.step()
        if name == "plateau":
            scheduler.step(1.0)
        else:
            scheduler.step()
        trainer.note(scheduler.get_last_lr())
        trainer.note([group["lr"] for group in trainer.optimizer.param_groups])


MADE_ON = ("optimizer", "original", "before wrapping")
BUCKETS = {"fusion": 0.0004}  # MiB: three buckets


@breadth
@pytest.mark.parametrize("made_on", MADE_ON)
def test_schedulers(pool: RankPool, made_on: str, full: bool) -> None:
    model = OddMLP()
    makers = {
        "SGD": optimizer_of(torch.optim.SGD, lr=0.02, momentum=0.9),
        "Adam": optimizer_of(torch.optim.Adam, lr=0.02),
    }
    cases = {
        f"{name}, {optimizer}": Case(
            model,
            make,
            functools.partial(scheduled_steps, name, made_on),
            BUCKETS,
            num_steps=12,
            prepare=functools.partial(make_scheduler, name) if made_on == "before wrapping" else None,
        )
        for name in SCHEDULERS
        for optimizer, make in makers.items()
        if full or optimizer == "SGD" or name == "one cycle"  # which cycles momentum or betas too
    }
    for name, results in check_parity(pool, cases).items():
        assert len({note[0] for note in results[0].notes}) > 1, f"the learning rate never changed in case '{name}'"


# ---------------------------------------------------------------------------------------------------- edits

EDITS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.5}, {"momentum": 0.5}, {"lr": 0.01, "weight_decay": 0.1}, {"nesterov": True}, {"momentum": 0.0}],
    "Adam": [{"lr": 0.1}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.1}, {"eps": 1e-3}, {"amsgrad": False}],
    "RMSprop": [{"lr": 0.1}, {"alpha": 0.5}, {"weight_decay": 0.1}, {"eps": 1e-3}],
}


def edited_steps(edits: list[dict[str, Any]], through: str, when: str, trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        edit = edits[index // 3 - 1] if index % 3 == 0 and 0 < index // 3 <= len(edits) else {}
        trainer.zero_grad()
        if when == "before backward":
            getattr(trainer, through).param_groups[0].update(edit)
        trainer.backward(index)
        if when == "before step":
            getattr(trainer, through).param_groups[0].update(edit)
        trainer.step()
        if when == "after step":
            getattr(trainer, through).param_groups[0].update(edit)


WHEN = ("before backward", "before step", "after step")


@pytest.mark.parametrize("name", EDITS)
def test_edits_in_the_middle_of_a_run(pool: RankPool, name: str) -> None:
    model = OddMLP()
    more = {"momentum": 0.9} if name == "SGD" else {}
    make = optimizer_of(getattr(torch.optim, name), lr=0.02, **more)
    cases = {
        f"{when}, through {through}": Case(
            model, make, functools.partial(edited_steps, EDITS[name], through, when), BUCKETS
        )
        for when in WHEN
        for through in ("optimizer", "original")
    }
    for results in check_parity(pool, cases).values():
        assert results[0].optimizer_state["param_groups"][0].items() >= EDITS[name][-1].items()

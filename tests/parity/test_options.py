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

from tests.parity.trainers import Case, Trainer, check_parity
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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("size", [2, 3])
def test_interleaved_groups(
    pool: RankPool, size: int, cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    case = Case(OddMLP(), functools.partial(interleaved, cls), options=options, deterministic=True)
    got = check_parity(pool, case, size)
    assert [len(group["params"]) for group in got[0].optimizer_state["param_groups"]] == [2, 5, 0]


def halving(model: nn.Module) -> torch.optim.Optimizer:
    weights, biases = list(model.parameters())[::2], list(model.parameters())[1::2]
    return torch.optim.SGD([{"params": weights, "weight_decay": 0.5}, {"params": biases}], lr=1.0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_decay_stops_at_the_borders_of_groups(pool: RankPool, size: int, options: dict[str, Any]) -> None:
    model = IntegerModel([(5,), (4,)] * 4)
    zeros = [[tuple(torch.zeros_like(p) for p in model.parameters())]] * size
    got = check_parity(pool, Case(model, halving, options=options, batches=zeros), size)
    for number, (name, param) in enumerate(model.named_parameters()):
        assert torch.equal(got[0].parameters[name], param / 2 if number % 2 == 0 else param)


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


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("made_on", ["optimizer", "original", "before wrapping"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(pool: RankPool, name: str, made_on: str, cls: type[torch.optim.Optimizer]) -> None:
    momentum = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    case = Case(
        OddMLP(),
        optimizer_of(cls, lr=0.02, **momentum),
        functools.partial(scheduled_steps, name, made_on),
        {"fusion": None},
        num_steps=12,
        prepare=functools.partial(make_scheduler, name) if made_on == "before wrapping" else None,
    )
    got = check_parity(pool, case, 2)
    assert len({note[0] for note in got[0].notes}) > 1, "the learning rate never changed"


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


@pytest.mark.parametrize("when", ["before backward", "before step", "after step"])
@pytest.mark.parametrize("through", ["optimizer", "original"])
@pytest.mark.parametrize("name", EDITS)
def test_edits_in_the_middle_of_a_run(pool: RankPool, name: str, through: str, when: str) -> None:
    more = {"momentum": 0.9} if name == "SGD" else {}
    case = Case(
        OddMLP(),
        optimizer_of(getattr(torch.optim, name), lr=0.02, **more),
        functools.partial(edited_steps, EDITS[name], through, when),
        {"fusion": None},
    )
    got = check_parity(pool, case, 2)
    assert got[0].optimizer_state["param_groups"][0].items() >= EDITS[name][-1].items()

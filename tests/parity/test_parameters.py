"""Parameters of every kind: frozen, unused, tied, reused, empty, of no dimension, in any memory order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.models import Transposed
from tests.parity.trainers import Case, Trainer, check_parity
from tests.support.ranks import RankPool
from tests.support.reference import (
    IntegerModel,
    OddMLP,
    ReusedModel,
    TiedModel,
    TinyConv,
    UnusedModel,
    make_batches,
    optimizer_of,
)

OPTIMIZERS = {
    "sgd": optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": optimizer_of(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
OPTIONS: list[dict[str, Any]] = [{}, {"fusion": None}, {"shard": False}]

# which ranks use the layer `sometimes`, by step
USE = {
    "always": lambda rank, step: True,
    "never": lambda rank, step: False,
    "rank 0 only": lambda rank, step: rank == 0,
    "last rank only": lambda rank, step: rank == 1,
    "even steps": lambda rank, step: step % 2 == 0,
    "odd steps": lambda rank, step: step % 2 == 1,
    "alternating ranks": lambda rank, step: (rank + step) % 2 == 0,
    "now and then": lambda rank, step: (step * (rank + 3)) % 5 == 1,
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("use", USE)
@pytest.mark.parametrize("size", [2, 3])
def test_unused_parameters(pool: RankPool, size: int, use: str, optimizer: str, options: dict[str, Any]) -> None:
    model = UnusedModel()
    batches = [
        [(*batch, {"use_sometimes": USE[use](r, step)}) for step, batch in enumerate(steps)]
        for r, steps in enumerate(make_batches(model, size, 8))
    ]
    case = Case(model, OPTIMIZERS[optimizer], options=options, batches=batches, deterministic=True)
    got = check_parity(pool, case, size)
    untouched = ["never.weight", "never.bias", "frozen"] + ["sometimes.weight", "sometimes.bias"] * (use == "never")
    assert all(torch.equal(got[0].parameters[name], model.get_parameter(name)) for name in untouched)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "model",
    [TiedModel(), ReusedModel(), TinyConv(channels_last=True), Transposed(), OddMLP()],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("size", [2, 3])
def test_kinds(pool: RankPool, size: int, model: torch.nn.Module, optimizer: str, options: dict[str, Any]) -> None:
    case = Case(model, OPTIMIZERS[optimizer], steps_with_strides, options, num_steps=8, deterministic=True)
    got = check_parity(pool, case, size)
    assert got[0].notes[-1] == [p.stride() for p in model.parameters()]


def steps_with_strides(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.step()
    trainer.note([p.stride() for p in trainer.model.parameters()])


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "scalar": [()],
    "one element": [(1,)],
    "two": [(1,), ()],
    "empty first": [(0, 8), (3,), (5,)],
    "empty in the middle": [(3,), (8, 0), (5,)],
    "empty last": [(3,), (5,), (0,)],
    "empty everywhere": [(0,), (3,), (0, 8), (0,), (5,), (8, 0)],
    "only empty": [(0, 8)],
    "exact fit": [(16,), (16,), (32,)],
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sizes(pool: RankPool, size: int, shapes: str, optimizer: str, options: dict[str, Any]) -> None:
    case = Case(IntegerModel(SHAPES[shapes]), OPTIMIZERS[optimizer], options=options, num_steps=5)
    got = check_parity(pool, case, size)
    assert [tuple(p.shape) for p in got[0].parameters.values()] == SHAPES[shapes]

"""Parameters of every kind: frozen, unused, tied, reused, empty, of no dimension, in any memory order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.models import Transposed
from tests.parity.trainers import Case, Trainer, breadth, check_parity
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


@breadth
@pytest.mark.parametrize("size", [2, 3])
def test_unused_parameters(pool: RankPool, size: int, full: bool) -> None:
    model = UnusedModel()
    cases = {}
    for use in USE:
        batches = [
            [(*batch, {"use_sometimes": USE[use](r, step)}) for step, batch in enumerate(steps)]
            for r, steps in enumerate(make_batches(model, size, 6))
        ]
        for optimizer, options in _combinations(full, size):
            cases[f"{use}, {optimizer}, {options}"] = Case(
                model, OPTIMIZERS[optimizer], options=options, batches=batches, deterministic=size > 2
            )
    for name, results in check_parity(pool, cases, size).items():
        untouched = ["never.weight", "never.bias", "frozen"]
        untouched += ["sometimes.weight", "sometimes.bias"] * name.startswith("never")
        for each in untouched:
            assert torch.equal(results[0].parameters[each], model.get_parameter(each)), f"{each} in case '{name}'"


def _combinations(full: bool, size: int) -> list[tuple[str, dict[str, Any]]]:
    if full:
        return [(optimizer, options) for optimizer in OPTIMIZERS for options in OPTIONS]
    if size in (2, 1):
        return [("adamw", OPTIONS[0]), ("sgd", OPTIONS[1]), ("sgd", OPTIONS[2])]
    return [("sgd", OPTIONS[0]), ("adamw", OPTIONS[2])][: 5 - size]


KINDS: dict[str, torch.nn.Module] = {
    type(model).__name__: model
    for model in (TiedModel(), ReusedModel(), TinyConv(channels_last=True), Transposed(), OddMLP())
}


@breadth
@pytest.mark.parametrize("size", [2, 3])
def test_kinds(pool: RankPool, size: int, full: bool) -> None:
    cases = {
        f"{kind}, {optimizer}, {options}": Case(
            model, OPTIMIZERS[optimizer], steps_with_strides, options, num_steps=4, deterministic=size > 2
        )
        for kind, model in KINDS.items()
        for optimizer, options in _combinations(full, size)
    }
    for name, results in check_parity(pool, cases, size).items():
        assert results[0].notes[-1] == [p.stride() for p in cases[name].model.parameters()], f"case '{name}'"


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


@breadth
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sizes(pool: RankPool, size: int, full: bool) -> None:
    cases = {
        f"{name}, {optimizer}, {options}": Case(
            IntegerModel(shapes), OPTIMIZERS[optimizer], options=options, num_steps=3
        )
        for name, shapes in SHAPES.items()
        for optimizer, options in _combinations(full, size)
    }
    for name, results in check_parity(pool, cases, size).items():
        assert [tuple(p.shape) for p in results[0].parameters.values()] == SHAPES[name.split(",")[0]]


# ---------------------------------------------------------------------------------------------------- memory formats


def channels_last_on_rank_0(rank: int) -> torch.nn.Module:
    return _in_format(TinyConv(channels_last=True), rank == 0)


def contiguous_on_rank_0(rank: int) -> torch.nn.Module:
    return _in_format(TinyConv(), rank != 0)


def _in_format(model: torch.nn.Module, channels_last: bool) -> torch.nn.Module:
    return model.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_whose_weights_lie_differently_in_memory(pool: RankPool, size: int) -> None:
    """The first rank's memory format becomes everybody's."""
    models = {"channels_last": (TinyConv(channels_last=True), channels_last_on_rank_0)}
    models["contiguous"] = TinyConv(), contiguous_on_rank_0
    cases = {
        f"{name} on rank 0, {optimizer}, {options}": Case(
            model, OPTIMIZERS[optimizer], steps_with_strides, options, num_steps=4, model_of=of, deterministic=size > 2
        )
        for name, (model, of) in models.items()
        for optimizer, options in _combinations(False, size)
    }
    for name, results in check_parity(pool, cases, size).items():
        for result in results:
            assert result.notes[-1] == [p.stride() for p in cases[name].model.parameters()], f"case '{name}'"


# ---------------------------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("broadcast_buffers", [False, True])
def test_buffers_are_local_or_the_first_ranks(pool: RankPool, broadcast_buffers: bool, size: int) -> None:
    """BatchNorm's statistics, compared with DistributedDataParallel's on every rank."""
    model = TinyConv()
    cases = {
        str(options): Case(
            model,
            OPTIMIZERS["sgd"],
            options={"broadcast_buffers": broadcast_buffers, **options},
            num_steps=6,
            tolerance="exact" if size == 2 else "summation order",
        )
        for options in OPTIONS
    }
    for results in check_parity(pool, cases, size, ddp=True).values():
        means = [result.buffers["norm.running_mean"] for result in results]
        assert not torch.equal(means[0], means[1]), "every rank has seen other samples since the broadcast"
        assert int(results[0].buffers["norm.num_batches_tracked"]) == 6

"""Clipping acts on the averaged gradients of all ranks, and every rank learns the same true norm."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.trainers import Case, Trainer, check_parity
from tests.support.ranks import RankPool
from tests.support.reference import TOLERANCES, IntegerModel, OddMLP, TiedModel, UnusedModel, optimizer_of

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9)
INF = float("inf")
FUSIONS = [{"fusion": None}, {"fusion": 25.0}, {"shard": False}]


def norm_steps(max_norm: float, norm_type: float, trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.clip_norm(max_norm, norm_type)
        trainer.step()


def value_steps(value: float, trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.clip_value(value)
        trainer.step()


def both_steps(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.clip_value(0.1)
        trainer.clip_norm(0.3)
        trainer.clip_norm(0.2, INF)
        trainer.note_grads()
        trainer.step()


def _three_four(size: int, num_steps: int) -> list[list[tuple[torch.Tensor, ...]]]:
    """Mean gradients 3 and 4 in the first and the last of three parameters: their norm is 5."""
    zeros = torch.zeros(31)
    three, four = zeros.clone(), zeros.clone()
    three[0], four[30] = 3.0, 4.0
    return [[(three * (size if r == 0 else 0), zeros, four) for _ in range(num_steps)] for r in range(size)]


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (1.0, 7.0), (INF, 4.0)])
@pytest.mark.parametrize("options", FUSIONS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_exact_norm_is_exact(
    pool: RankPool, size: int, options: dict[str, Any], norm_type: float, norm: float
) -> None:
    case = Case(
        IntegerModel([(31,), (31,), (31,)]),
        optimizer_of(torch.optim.SGD, lr=0.5),
        functools.partial(norm_steps, 1.0, norm_type),
        options,
        batches=_three_four(size, 3),
    )
    got = check_parity(pool, case, size)
    assert [[note.item() for note in result.notes] for result in got] == [[norm] * 3] * size


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF])
@pytest.mark.parametrize("options", FUSIONS, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_any_norm_is_close(pool: RankPool, size: int, options: dict[str, Any], norm_type: float) -> None:
    script = functools.partial(norm_steps, 0.1, norm_type)
    case = Case(OddMLP(), SGD, script, options, num_steps=10, deterministic=True)
    got = check_parity(pool, case, size, TOLERANCES["exact" if norm_type == INF else "clip"])
    assert all(note.item() > 0.1 for note in got[0].notes), "nothing was clipped"


@pytest.mark.parametrize("script", [functools.partial(value_steps, 0.05), both_steps], ids=["value", "both"])
@pytest.mark.parametrize("options", FUSIONS, ids=str)
def test_values_are_clipped(pool: RankPool, options: dict[str, Any], script: Any) -> None:
    case = Case(OddMLP(), SGD, script, options, num_steps=10)
    got = check_parity(pool, case, 2, TOLERANCES["exact" if script is not both_steps else "clip"])
    assert got[0].losses


@pytest.mark.parametrize("model", [TiedModel(), UnusedModel()], ids=["tied", "unused"])
def test_a_parameter_counts_once_or_not_at_all(pool: RankPool, model: nn.Module) -> None:
    case = Case(model, SGD, functools.partial(norm_steps, 0.1, 2.0), num_steps=5)
    got = check_parity(pool, case, 2, TOLERANCES["clip"])
    assert len(got[0].notes) == 5


def test_a_norm_below_the_limit_changes_nothing(pool: RankPool) -> None:
    got = check_parity(
        pool, Case(OddMLP(), SGD, functools.partial(norm_steps, 1e6, 2.0), num_steps=5), 2, TOLERANCES["clip"]
    )
    unclipped = check_parity(pool, Case(OddMLP(), SGD, num_steps=5), 2)
    assert all(torch.equal(got[0].parameters[name], p) for name, p in unclipped[0].parameters.items())

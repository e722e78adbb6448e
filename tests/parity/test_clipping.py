"""Clipping acts on the averaged gradients of all ranks, and every rank learns the same true norm."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.parity.trainers import Case, Trainer, breadth, check_parity
from tests.support.ranks import RankPool
from tests.support.reference import IntegerModel, OddMLP, TiedModel, UnusedModel, assert_bit_equal, optimizer_of

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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_exact_norm_is_exact(pool: RankPool, size: int) -> None:
    model = IntegerModel([(31,), (31,), (31,)])
    norms = {2.0: 5.0, 1.0: 7.0, INF: 4.0}
    batches = _three_four(size, 3)
    cases = {
        (norm_type, str(options)): Case(
            model,
            optimizer_of(torch.optim.SGD, lr=0.5),
            functools.partial(norm_steps, 1.0, norm_type),
            options,
            batches=batches,
        )
        for norm_type in norms
        for options in FUSIONS
    }
    got = check_parity(pool, {f"norm {t:g}, {options}": case for (t, options), case in cases.items()}, size)
    for norm_type, options in cases:
        for result in got[f"norm {norm_type:g}, {options}"]:
            assert [note.item() for note in result.notes] == [norms[norm_type]] * 3, f"norm {norm_type:g}, {options}"


@breadth
@pytest.mark.parametrize("size", [2, 3])
def test_any_norm_is_close(pool: RankPool, size: int, full: bool) -> None:
    model = OddMLP()
    cases = {
        f"norm {norm_type:g}, {options}": Case(
            model,
            SGD,
            functools.partial(norm_steps, 0.1, norm_type),
            options,
            num_steps=10,
            deterministic=True,
            tolerance="exact" if norm_type == INF else "clip",
        )
        for norm_type in (2.0, 1.0, 3.0, INF)
        for options in (FUSIONS if full or norm_type == 2.0 else FUSIONS[1:])
    }
    for name, results in check_parity(pool, cases, size).items():
        assert all(note.item() > 0.1 for note in results[0].notes), f"nothing was clipped in case '{name}'"


def test_values_are_clipped(pool: RankPool) -> None:
    model = OddMLP()
    scripts = {"value": functools.partial(value_steps, 0.05), "both": both_steps}
    cases = {
        f"{name}, {options}": Case(
            model, SGD, script, options, num_steps=8, tolerance="clip" if name == "both" else "exact"
        )
        for name, script in scripts.items()
        for options in FUSIONS
    }
    got = check_parity(pool, cases)
    assert all(results[0].losses for results in got.values())


def test_a_parameter_counts_once_or_not_at_all(pool: RankPool) -> None:
    script = functools.partial(norm_steps, 0.1, 2.0)
    models: dict[str, nn.Module] = {"tied": TiedModel(), "unused": UnusedModel()}
    cases = {
        f"{name}, {options}": Case(model, SGD, script, options, num_steps=5, tolerance="clip")
        for name, model in models.items()
        for options in ({}, {"shard": False})
    }
    got = check_parity(pool, cases)
    assert all(len(results[0].notes) == 5 for results in got.values())


def test_a_norm_below_the_limit_changes_nothing(pool: RankPool) -> None:
    model = OddMLP()
    cases = {
        "clipped": Case(model, SGD, functools.partial(norm_steps, 1e6, 2.0), num_steps=5, tolerance="clip"),
        "not clipped": Case(model, SGD, num_steps=5),
    }
    got = check_parity(pool, cases)
    assert_bit_equal(got["clipped"][0].parameters, got["not clipped"][0].parameters)

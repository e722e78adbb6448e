"""State in torch's own format: saved on 2 ranks, resumed on any number, by dear or by the plain optimizer."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.trainers import Case, Result, Trainer, breadth, check_parity, run_under_dear
from tests.support.ranks import RankPool
from tests.support.reference import (
    IntegerModel,
    MakeOptimizer,
    TinyConv,
    UnusedModel,
    assert_bit_equal,
    optimizer_of,
)

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": optimizer_of(torch.optim.SGD, lr=0.05),
    "momentum": optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": optimizer_of(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adagrad": optimizer_of(torch.optim.Adagrad, lr=0.05),
    "nadam": optimizer_of(torch.optim.NAdam, lr=0.01),
    "asgd": optimizer_of(torch.optim.ASGD, lr=0.01),
}
MODELS: dict[str, nn.Module] = {
    "integer": IntegerModel(),
    "conv": TinyConv(channels_last=True),
    "unused": UnusedModel(),
}
OPTIONS: list[dict[str, Any]] = [{}, {"fusion": None}, {"shard": False}]


def _resumed(model: nn.Module, parameters: dict[str, torch.Tensor]) -> nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(parameters[name])
    return model


SavedRuns = dict[str, tuple[Case, Result]]


@pytest.fixture(scope="module")
def saved_on_two_ranks(pool: RankPool) -> SavedRuns:
    """Runs of 4 steps, in every combination of the above that a later test goes on with; names and what was saved."""
    cases = {
        f"{optimizer}, {options}": Case(MODELS["integer"], OPTIMIZERS[optimizer], options=options, num_steps=4)
        for optimizer in OPTIMIZERS
        for options in OPTIONS
    }
    cases |= {
        f"{optimizer}, {model}": Case(MODELS[model], OPTIMIZERS[optimizer], options={"fusion": None}, num_steps=4)
        for optimizer in ("momentum", "adam")
        for model in ("conv", "unused")
    }
    return {name: (cases[name], results[0]) for name, results in check_parity(pool, cases).items()}


def _going_on(saved: tuple[Case, Result], **more: Any) -> Case:
    first, result = saved
    return replace(
        first, model=_resumed(first.model, result.parameters), optimizer_state=result.optimizer_state, **more
    )


@breadth
@pytest.mark.parametrize("size", [1, 2, 3])
def test_saved_on_two_ranks_and_resumed_on_another_number(
    pool: RankPool, saved_on_two_ranks: SavedRuns, size: int, full: bool
) -> None:
    """By the wrapper or before wrapping. Dear's state is loaded into the plain optimizer of the reference as well."""
    cases = {}
    for optimizer in OPTIMIZERS:
        for options in OPTIONS:
            saved = saved_on_two_ranks[f"{optimizer}, {options}"]
            for before in (False, True) if full or options == {} else (options == {"fusion": None},):
                name = f"{optimizer}, {options}, loaded {'before wrapping' if before else 'by the wrapper'}"
                cases[name] = _going_on(saved, load_before_wrapping=before)
    got = check_parity(pool, cases, size)
    assert all(len(results) == size for results in got.values())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_layouts_and_missing_states(pool: RankPool, saved_on_two_ranks: SavedRuns, size: int) -> None:
    cases = {
        f"{optimizer}, {model}": _going_on(saved_on_two_ranks[f"{optimizer}, {model}"], options={}, deterministic=True)
        for optimizer in ("momentum", "adam")
        for model in ("conv", "unused")
    }
    got = check_parity(pool, cases, size)
    assert all(len(results) == size for results in got.values())


def test_a_loaded_state_can_be_saved_before_the_first_step(pool: RankPool, saved_on_two_ranks: SavedRuns) -> None:
    names = [f"{optimizer}, {options}" for optimizer in OPTIMIZERS for options in OPTIONS]
    got = check_parity(pool, {name: _going_on(saved_on_two_ranks[name], script=_no_steps) for name in names})
    for name in names:
        assert_bit_equal(got[name][0].optimizer_state, saved_on_two_ranks[name][1].optimizer_state, (name, "saved"))


def _no_steps(_: Trainer) -> None:
    """Saves what was loaded."""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_masters_survive(pool: RankPool, size: int) -> None:
    """Steps too small for bf16: a run that stops and goes on equals one that does not stop."""
    model = IntegerModel(dtype=torch.bfloat16)

    def gradients(mean: float) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full_like(p, mean) for p in model.parameters())

    def case(num_steps: int, num_ranks: int, **more: Any) -> Case:
        sgd = optimizer_of(torch.optim.SGD, lr=2**-12, momentum=0.5)
        # all from the first rank: a mean of 1 that is exact for any number of ranks
        batches = [[gradients(0.0 if r else num_ranks)] * num_steps for r in range(num_ranks)]
        return Case(**{"model": model, **more}, make_optimizer=sgd, batches=batches).resolved(0)

    (unbroken, _) = pool.run(run_under_dear, case(20, 2), size=2)
    (saved, _) = pool.run(run_under_dear, case(7, 2), size=2)
    resumed = case(13, size, model=_resumed(model, saved.parameters), optimizer_state=saved.optimizer_state)
    for got in pool.run(run_under_dear, resumed, size=size):
        assert_bit_equal(got.parameters, unbroken.parameters)
        assert_bit_equal(got.optimizer_state, unbroken.optimizer_state)
    assert "master_param" in saved.optimizer_state["state"][0]

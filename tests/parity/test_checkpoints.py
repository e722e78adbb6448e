"""State in torch's own format: saved on 2 ranks, resumed on any number, by dear or by the plain optimizer."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.trainers import Case, Trainer, check_parity, run_under_dear
from tests.support.ranks import RankPool
from tests.support.reference import IntegerModel, MakeOptimizer, TinyConv, UnusedModel, assert_bit_equal, optimizer_of

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


@pytest.mark.parametrize("before_wrapping", [False, True], ids=["by the wrapper", "before wrapping"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_resumed_on_another_number_of_ranks(
    pool: RankPool, size: int, optimizer: str, options: dict[str, Any], before_wrapping: bool
) -> None:
    """Both ways: dear's state is loaded into the plain optimizer of the reference, and equals it."""
    first = Case(MODELS["integer"], OPTIMIZERS[optimizer], options=options, num_steps=4)
    saved = check_parity(pool, first, 2)[0]
    model = _resumed(first.model, saved.parameters)
    case = replace(first, model=model, optimizer_state=saved.optimizer_state, load_before_wrapping=before_wrapping)
    got = check_parity(pool, case, size)
    assert len(got) == size


@pytest.mark.parametrize("name", ["conv", "unused"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_layouts_and_missing_states(pool: RankPool, size: int, optimizer: str, name: str) -> None:
    first = Case(MODELS[name], OPTIMIZERS[optimizer], options={"fusion": None}, num_steps=4)
    saved = check_parity(pool, first, 2)[0]
    model = _resumed(first.model, saved.parameters)
    case = replace(first, model=model, optimizer_state=saved.optimizer_state, options={}, deterministic=True)
    got = check_parity(pool, case, size)
    assert len(got) == size


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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_state_can_be_saved_before_the_first_step(
    pool: RankPool, optimizer: str, options: dict[str, Any]
) -> None:
    saved = check_parity(pool, Case(IntegerModel(), OPTIMIZERS[optimizer], options=options, num_steps=3), 2)[0]
    again = Case(
        IntegerModel(), OPTIMIZERS[optimizer], _no_steps, options, num_steps=1, optimizer_state=saved.optimizer_state
    )
    got = check_parity(pool, again, 2)
    assert_bit_equal(got[0].optimizer_state, saved.optimizer_state)


def _no_steps(_: Trainer) -> None:
    """Saves what was loaded."""

"""Every torch optimizer that steps on shards, against DistributedDataParallel with the same optimizer unwrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.models import WideMLP
from tests.parity.trainers import Case, check_parity
from tests.support.ranks import RankPool
from tests.support.reference import TOLERANCES, IntegerModel, MakeOptimizer, OddMLP, TinyConv, optimizer_of

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": optimizer_of(torch.optim.SGD, lr=0.1),
    "sgd momentum": optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "sgd nesterov": optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd weight decay": optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "sgd maximize": optimizer_of(torch.optim.SGD, lr=0.001, maximize=True),
    "adam": optimizer_of(torch.optim.Adam, lr=0.01),
    "adam amsgrad": optimizer_of(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": optimizer_of(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": optimizer_of(torch.optim.RMSprop, lr=0.01),
    "rmsprop centered": optimizer_of(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": optimizer_of(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
    "nadam": optimizer_of(torch.optim.NAdam, lr=0.01),
    "radam": optimizer_of(torch.optim.RAdam, lr=0.01),
    "adamax": optimizer_of(torch.optim.Adamax, lr=0.01),
    "adadelta": optimizer_of(torch.optim.Adadelta, lr=0.5),
    "rprop": optimizer_of(torch.optim.Rprop, lr=0.01),
    "asgd": optimizer_of(torch.optim.ASGD, lr=0.01),
}
# Updates that divide by the size of the gradient: where that is near zero, its rounding is no longer small beside it.
SMOOTH = ("sgd", "sgd momentum", "sgd nesterov", "sgd weight decay", "adagrad")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_are_bit_equal_to_ddp(pool: RankPool, name: str) -> None:
    got = check_parity(pool, Case(OddMLP(), OPTIMIZERS[name]), size=2, ddp=True)
    assert len(got[0].losses) == 20


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_more_ranks_are_bit_equal_to_ddp_on_exact_gradients(pool: RankPool, name: str, size: int) -> None:
    got = check_parity(pool, Case(IntegerModel(), OPTIMIZERS[name]), size=size, ddp=True)
    assert len(got) == size


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", SMOOTH)
def test_more_ranks_are_close_to_ddp_on_any_gradients(pool: RankPool, name: str, size: int) -> None:
    got = check_parity(pool, Case(OddMLP(), OPTIMIZERS[name]), size, TOLERANCES["summation order"], ddp=True)
    assert len(got) == size


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_more_ranks_are_bit_equal_in_deterministic_mode(pool: RankPool, name: str, size: int) -> None:
    got = check_parity(pool, Case(OddMLP(), OPTIMIZERS[name], deterministic=True), size)
    assert len(got) == size


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_is_bit_equal_to_the_plain_optimizer(pool: RankPool, name: str) -> None:
    got = check_parity(pool, Case(OddMLP(), OPTIMIZERS[name]), size=1)
    assert len(got) == 1


@pytest.mark.parametrize("model", [TinyConv(), WideMLP()], ids=["conv", "wide"])
@pytest.mark.parametrize("name", ["sgd momentum", "adamw"])
def test_other_models(pool: RankPool, name: str, model: torch.nn.Module) -> None:
    got = check_parity(pool, Case(model, OPTIMIZERS[name]), size=2, ddp=True)
    assert got[0].parameters.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_flags_for_implementations_are_kept(
    pool: RankPool, cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    tolerance = TOLERANCES["exact" if options.get("foreach") is False else "fused"]
    got = check_parity(pool, Case(OddMLP(), optimizer_of(cls, lr=0.01, **options)), 2, tolerance)
    assert got[0].optimizer_state["param_groups"][0].items() >= options.items()

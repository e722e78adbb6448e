"""Optimizers that are not element-wise get whole averaged gradients and run their own step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dear
from tests.parity.models import LayerwiseSGD, Matrices
from tests.parity.trainers import Case, check_parity
from tests.support.ranks import RankPool
from tests.support.reference import MakeOptimizer, OddMLP, TiedModel, TinyConv, UnusedModel, optimizer_of

OPTIMIZERS: dict[str, tuple[nn.Module, MakeOptimizer]] = {
    "layerwise": (OddMLP(), optimizer_of(LayerwiseSGD, lr=0.05)),
    "layerwise conv": (TinyConv(channels_last=True), optimizer_of(LayerwiseSGD, lr=0.05)),
    "layerwise tied": (TiedModel(), optimizer_of(LayerwiseSGD, lr=0.05)),
    "layerwise unused": (UnusedModel(), optimizer_of(LayerwiseSGD, lr=0.05)),
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["adafactor"] = (OddMLP(), optimizer_of(torch.optim.Adafactor, lr=0.05))
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = (Matrices(), optimizer_of(torch.optim.Muon, lr=0.05))


@pytest.mark.parametrize("fusion", [None, dear.NearbyLayers(2), 0.0002, 25.0], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks(pool: RankPool, name: str, fusion: Any) -> None:
    model, make_optimizer = OPTIMIZERS[name]
    got = check_parity(pool, Case(model, make_optimizer, options={"fusion": fusion}), 2)
    assert got[0].parameters.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_sizes(pool: RankPool, name: str, size: int) -> None:
    model, make_optimizer = OPTIMIZERS[name]
    got = check_parity(pool, Case(model, make_optimizer, deterministic=True), size)
    assert len(got) == size


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_shard_false_gives_elementwise_optimizers_whole_gradients(
    pool: RankPool, cls: type[torch.optim.Optimizer]
) -> None:
    got = check_parity(pool, Case(OddMLP(), optimizer_of(cls, lr=0.01), options={"shard": False}), 2)
    assert len(got) == 2


def test_shard_true_is_refused(pool: RankPool) -> None:
    case = Case(OddMLP(), optimizer_of(LayerwiseSGD), options={"shard": True})
    with pytest.raises(Exception, match="LayerwiseSGD is not known to be element-wise"):
        check_parity(pool, case, 2)

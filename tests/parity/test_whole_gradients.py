"""Optimizers that are not element-wise get whole averaged gradients and run their own step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dear
from tests.parity.models import LayerwiseSGD, Matrices
from tests.parity.trainers import Case, breadth, check_parity, run_under_dear
from tests.support.ranks import RankPool, assert_raised
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


@breadth
def test_two_ranks(pool: RankPool, full: bool) -> None:
    cases = {
        f"{name}, fusion {fusion}": Case(
            model,
            make_optimizer,
            options={"fusion": fusion},
            num_steps=20 if full or (name, fusion) == ("layerwise", None) else 6,
        )
        for name, (model, make_optimizer) in OPTIMIZERS.items()
        for fusion in (None, dear.NearbyLayers(2), 0.0002, 25.0)
        if full or name == "layerwise" or fusion == 0.0002 or (name, fusion) == ("layerwise unused", None)
    }
    for name, results in check_parity(pool, cases).items():
        assert results[0].parameters.keys() == dict(cases[name].model.named_parameters()).keys()


@pytest.mark.parametrize("size", [1, 3, 4])
def test_other_sizes(pool: RankPool, size: int) -> None:
    cases = {
        name: Case(model, make_optimizer, num_steps=20 if name == "layerwise" else 4, deterministic=True)
        for name, (model, make_optimizer) in OPTIMIZERS.items()
    }
    got = check_parity(pool, cases, size)
    assert all(len(results) == size for results in got.values())


def test_20_steps_of_a_layerwise_optimizer_are_bit_equal_to_ddp(pool: RankPool) -> None:
    model, make_optimizer = OPTIMIZERS["layerwise"]
    got = check_parity(pool, {"layerwise": Case(model, make_optimizer)}, ddp=True)
    assert len(got["layerwise"][0].losses) == 20


def test_shard_false_gives_elementwise_optimizers_whole_gradients(pool: RankPool) -> None:
    model = OddMLP()
    cases = {
        cls.__name__: Case(model, optimizer_of(cls, lr=0.01), options={"shard": False})
        for cls in (torch.optim.SGD, torch.optim.AdamW)
    }
    got = check_parity(pool, cases)
    assert len(got) == 2


def test_shard_true_is_refused(pool: RankPool) -> None:
    case = Case(OddMLP(), optimizer_of(LayerwiseSGD), options={"shard": True}).resolved(2)
    refused = pool.run(run_under_dear, case, expect_errors=True)
    assert_raised(refused, "ValueError", "LayerwiseSGD is not known to be element-wise")

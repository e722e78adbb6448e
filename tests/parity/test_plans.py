"""The plan decides how gradients travel, and nothing else: parameters are bit-equal whatever it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear
from tests.parity.models import WideMLP
from tests.parity.trainers import Case, DearTrainer, check_parity
from tests.support.ranks import RankPool, rank
from tests.support.reference import IntegerModel, OddMLP, TinyConv, optimizer_of

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
ADAM = optimizer_of(torch.optim.Adam, lr=0.01)
FUSIONS: dict[str, Any] = {
    "none": None,
    "1 layer": dear.NearbyLayers(1),
    "3 layers": dear.NearbyLayers(3),
    "0.001 MiB": 0.001,
    "0.1 MiB": 0.1,
    "25 MiB": 25.0,
}
MODELS = {"odd": OddMLP, "conv": TinyConv, "wide": WideMLP}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("model", MODELS)
def test_any_plan_comes_to_the_same_parameters(pool: RankPool, model: str, fusion: str, size: int) -> None:
    num_steps = 3 if (model, fusion) == ("wide", "0.001 MiB") else 20  # 136 buckets
    case = Case(MODELS[model](), SGD, options={"fusion": FUSIONS[fusion]}, deterministic=size > 2, num_steps=num_steps)
    got = check_parity(pool, case, size)
    assert len(got) == size


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_any_plan_is_exact_on_exact_gradients(pool: RankPool, fusion: str, size: int) -> None:
    got = check_parity(pool, Case(IntegerModel(), ADAM, options={"fusion": FUSIONS[fusion]}), size)
    assert len(got) == size


def _count_bytes(case: Case) -> list[int]:
    """[sent in the last 3 steps, 3 times what the plan says, bytes of all parameters, number of buckets]"""
    trainer = DearTrainer(case)
    for index in range(6):
        if index == 3:
            trainer.optimizer.synchronize()
            before = trainer.optimizer.bytes_sent
        trainer.zero_grad()
        trainer.backward(index)
        trainer.step()
    trainer.optimizer.synchronize()
    sent = trainer.optimizer.bytes_sent - before
    plan = trainer.optimizer.plan
    others = plan.world_size - 1
    wire = case.options.get("reduce_dtype")
    planned = sum(
        others * (b.region_numel * (wire or b.dtype).itemsize + b.padded_numel // plan.world_size * b.dtype.itemsize)
        for b in plan.buckets
    )
    num_bytes = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    return [sent, 3 * planned, num_bytes, len(plan.buckets)]


@pytest.mark.parametrize("deterministic", [False, True], ids=["ring", "exchange"])
@pytest.mark.parametrize("options", [{}, {"fusion": None}, {"fusion": 0.1}, {"reduce_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_sent_are_those_of_one_all_reduce(
    pool: RankPool, size: int, options: dict[str, Any], deterministic: bool
) -> None:
    case = Case(WideMLP(), SGD, options=options, num_steps=6).resolved(size)
    for sent, planned, num_bytes, num_buckets in pool.run(_count_bytes, case, size=size, deterministic=deterministic):
        assert sent == planned
        assert (num_buckets == 1) == ("fusion" not in options)
        if "reduce_dtype" not in options:
            all_reduce = 2 * (size - 1) / size * num_bytes
            assert all_reduce <= sent / 3 <= 1.02 * all_reduce  # padding and flags


def _bytes_of_one_step(case: Case, ask_often: bool) -> int:
    trainer = DearTrainer(case)
    for index in range(4):
        trainer.optimizer.synchronize()
        before = trainer.optimizer.bytes_sent
        trainer.zero_grad()
        trainer.backward(index)
        if ask_often:
            trainer.clip_value(10.0)
            trainer.clip_value(10.0)
        trainer.step()
    trainer.optimizer.synchronize()
    return trainer.optimizer.bytes_sent - before


@pytest.mark.parametrize("options", [{}, {"fusion": None}, {"shard": False}], ids=str)
def test_gradients_are_averaged_once(pool: RankPool, options: dict[str, Any]) -> None:
    """However often they are looked at before the step."""
    case = Case(OddMLP(), SGD, options=options, num_steps=4).resolved(2)
    once, often = (pool.run(_bytes_of_one_step, case, ask, size=2) for ask in (False, True))
    assert often == once


def _order_of_buckets(case: Case) -> list[str]:
    trainer = DearTrainer(case)
    case.script(trainer)
    return [slot.fqn for bucket in trainer.optimizer.plan.buckets for slot in bucket.slots] + [str(rank())]


def test_the_plan_follows_the_first_backward(pool: RankPool) -> None:
    case = Case(OddMLP(), SGD, options={"fusion": None}, num_steps=2).resolved(2)
    orders = [order[:-1] for order in pool.run(_order_of_buckets, case, size=2)]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(name for name, _ in OddMLP().named_parameters())
    first_layer = max(orders[0].index(name) for name in ("fc1.weight", "fc1.bias"))
    assert first_layer < min(orders[0].index(name) for name in ("fc2.weight", "fc2.bias"))

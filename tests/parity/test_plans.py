"""The plan decides how gradients travel, and nothing else: parameters are bit-equal whatever it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dear
from tests.parity.models import LayerwiseSGD, WideMLP
from tests.parity.trainers import Case, DearTrainer, Trainer, breadth, check_parity, run_all
from tests.support.ranks import RankPool
from tests.support.reference import IntegerModel, OddMLP, TinyConv, optimizer_of

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
ADAM = optimizer_of(torch.optim.Adam, lr=0.01)
FUSIONS: dict[str, Any] = {
    "no fusion": None,
    "1 layer": dear.NearbyLayers(1),
    "3 nearby layers": dear.NearbyLayers(3),
    "0.001 MiB": 0.001,
    "0.1 MiB": 0.1,
    "25 MiB": 25.0,
}
MODELS: dict[str, nn.Module] = {"odd": OddMLP(), "conv": TinyConv(), "wide": WideMLP(), "integer": IntegerModel()}


def _case(model: str, fusion: str, **more: Any) -> Case:
    return Case(**{"make_optimizer": SGD, **more}, model=MODELS[model], options={"fusion": FUSIONS[fusion]})


def test_20_steps_in_any_plan_are_bit_equal_on_two_ranks(pool: RankPool) -> None:
    cases = {f"{model}, {fusion}": _case(model, fusion) for model in ("odd", "integer") for fusion in FUSIONS}
    got = check_parity(pool, cases)
    assert all(len(results[0].losses) == 20 for results in got.values())


@pytest.mark.parametrize("size", [3, 4])
def test_20_steps_in_any_plan_are_bit_equal_in_deterministic_mode(pool: RankPool, size: int) -> None:
    got = check_parity(pool, {fusion: _case("odd", fusion, deterministic=True) for fusion in FUSIONS}, size)
    assert all(len(results[0].losses) == 20 for results in got.values())


@breadth
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_plan_comes_to_the_same_parameters(pool: RankPool, size: int, full: bool) -> None:
    """Models with convolutions, and with tensors that are split."""
    cases = {
        f"{model}, {fusion}": _case(
            model, fusion, make_optimizer=ADAM, deterministic=size > 2, num_steps=20 if full else 6
        )
        for model in ("conv", "wide")
        for fusion in FUSIONS
        if full or fusion in ((FUSIONS.keys() - {"0.001 MiB"}) if model == "wide" else ("no fusion", "3 nearby layers"))
    }
    if not full and size > 2:
        cases = {name: case for name, case in cases.items() if name.startswith("wide") and "no fusion" not in name}
    elif not full:
        cases["wide, 0.001 MiB"] = _case("wide", "0.001 MiB", num_steps=2)  # 136 buckets
    got = check_parity(pool, cases, size)
    assert len(got) >= 4


@breadth
@pytest.mark.parametrize("size", [3, 4])
def test_any_plan_is_exact_on_integer_multiples(pool: RankPool, size: int, full: bool) -> None:
    names = [name for name in FUSIONS if full or name != "1 layer"]
    steps = 20 if full else 6
    got = check_parity(pool, {n: _case("integer", n, make_optimizer=ADAM, num_steps=steps) for n in names}, size)
    assert len(got) == len(names)


# ---------------------------------------------------------------------------------------------------- bytes


def _count_bytes(case: Case) -> list[int]:
    """[sent in the last 3 steps, 3 times what the plan says, bytes of all parameters, number of buckets]"""
    trainer = DearTrainer(case)
    for index in range(5):
        if index == 2:
            trainer.optimizer.synchronize()
            before = trainer.optimizer.bytes_sent
        trainer.zero_grad()
        trainer.backward(index)
        trainer.step()
    trainer.optimizer.synchronize()
    sent = trainer.optimizer.bytes_sent - before
    plan = trainer.optimizer.plan
    size = int(dear.size())
    wire = case.options.get("reduce_dtype")
    planned = 0
    for bucket in plan.buckets:
        wire_bytes = (wire or bucket.dtype).itemsize
        if bucket.num_shards == 1:  # an all-reduce, cut into a part a rank
            planned += 2 * (size - 1) * -(-bucket.region_numel // size) * wire_bytes
        else:
            planned += (size - 1) * (bucket.region_numel * wire_bytes + bucket.shard_numel * bucket.dtype.itemsize)
    num_bytes = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    trainer.optimizer.close()
    return [sent, 3 * planned, num_bytes, len(plan.buckets)]


@pytest.mark.parametrize("deterministic", [False, True], ids=["ring", "exchange"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_sent_are_those_of_one_all_reduce(pool: RankPool, size: int, deterministic: bool) -> None:
    layerwise = optimizer_of(LayerwiseSGD)
    cases = {
        "default": _case("wide", "25 MiB", num_steps=5),
        "no fusion": _case("wide", "no fusion", num_steps=5),
        "0.1 MiB": _case("wide", "0.1 MiB", num_steps=5),
        "whole gradients": _case("wide", "25 MiB", num_steps=5, make_optimizer=layerwise),
        "whole gradients, 0.1 MiB": _case("wide", "0.1 MiB", num_steps=5, make_optimizer=layerwise),
        "bf16 on the wire": Case(MODELS["wide"], SGD, options={"reduce_dtype": torch.bfloat16}, num_steps=5),
    }
    for by_case in run_all(pool, cases, size, deterministic, run_dear=_count_bytes):
        for name, (counts, _) in by_case.items():
            sent, planned, num_bytes, num_buckets = counts
            assert sent == planned, f"case '{name}' on {size} ranks"
            assert (num_buckets == 1) == (cases[name].options.get("fusion", 25.0) == 25.0), f"case '{name}'"
            if "bf16" not in name:
                all_reduce = 2 * (size - 1) / size * num_bytes
                assert all_reduce <= sent / 3 <= 1.02 * all_reduce, f"case '{name}' on {size} ranks"  # padding, flags


def _look_once(trainer: Trainer) -> None:
    trainer.clip_value(10.0)


def _look_often(trainer: Trainer) -> None:
    trainer.clip_value(10.0)
    trainer.clip_value(10.0)


def _bytes_of_one_step(case: Case) -> int:
    """Of the last step; the script is what happens between backward and step."""
    trainer = DearTrainer(case)
    for index in range(4):
        trainer.optimizer.synchronize()
        before = trainer.optimizer.bytes_sent
        trainer.zero_grad()
        trainer.backward(index)
        case.script(trainer)
        trainer.step()
    trainer.optimizer.synchronize()
    return trainer.optimizer.bytes_sent - before


def _do_not_look(_: Trainer) -> None:
    pass


def test_gradients_are_averaged_once(pool: RankPool) -> None:
    """However often they are looked at before the step."""
    variants: list[dict[str, Any]] = [{}, {"fusion": None}, {"shard": False}]
    looks = (_do_not_look, _look_once, _look_often)
    cases = {
        f"{options}, {look.__name__}": Case(MODELS["odd"], SGD, look, options, num_steps=4)
        for options in variants
        for look in looks
    }
    for by_case in run_all(pool, cases, 2, run_dear=_bytes_of_one_step):
        for options in variants:
            sent = {by_case[f"{options}, {look.__name__}"][0] for look in looks}
            assert len(sent) == 1 and sent != {0}, f"{options}: {sent} bytes"


def _order_of_buckets(case: Case) -> list[str]:
    trainer = DearTrainer(case)
    case.script(trainer)
    return [slot.fqn for bucket in trainer.optimizer.plan.buckets for slot in bucket.slots]


def test_the_plan_follows_the_first_backward(pool: RankPool) -> None:
    case = Case(MODELS["odd"], SGD, options={"fusion": None}, num_steps=2)
    orders = [by_case["odd"][0] for by_case in run_all(pool, {"odd": case}, 2, run_dear=_order_of_buckets)]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(name for name, _ in MODELS["odd"].named_parameters())
    first_layer = max(orders[0].index(name) for name in ("fc1.weight", "fc1.bias"))
    assert first_layer < min(orders[0].index(name) for name in ("fc2.weight", "fc2.bias"))


def _default_plan() -> tuple[str, list[int]]:
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(30)])  # 30 MiB
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    return optimizer.plan.fusion, [bucket.num_bytes for bucket in optimizer.plan.buckets]


def test_buckets_are_a_tenth_of_the_model_by_default(pool: RankPool) -> None:
    for fusion, sizes in pool.run(_default_plan, size=2):
        assert fusion == "threshold 3 MiB"
        assert sizes == [3 * 2**20] * 10

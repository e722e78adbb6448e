"""Another plan in mid-training changes nothing: bit-equal to never changing it, whatever is pending."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dear
from dearcore.layout import ParamSpec, Plan, plan_nearby_layers, plan_threshold, plan_unfused
from dearcore.schedule import Schedule, plan_all_reduce, plan_dear
from tests.parity.models import LayerwiseSGD, MixedDtypes, WideMLP
from tests.support.ranks import RankPool, assert_raised
from tests.support.reference import MakeOptimizer, OddMLP, assert_bit_equal, make_batches, mse_loss, optimizer_of

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
ADAM = optimizer_of(torch.optim.AdamW, lr=0.01, amsgrad=True)
RPROP = optimizer_of(torch.optim.Rprop, lr=0.01)
NUM_STEPS = 6

Planned = tuple[Plan, Schedule]
Replan = Callable[[], None]


def _specs(model: nn.Module) -> list[ParamSpec]:
    return [ParamSpec(i, n, tuple(p.shape), p.dtype) for i, (n, p) in enumerate(model.named_parameters())]


def _plans(model: nn.Module, sharded: bool) -> list[Planned]:
    """Every pair of neighbours is another kind of change: split tensors, an order turned round, whole buckets."""
    specs, size = _specs(model), int(dear.size())
    shards = size if sharded else 1
    backwards = specs[::-1]
    # an all-reduce of bf16 rounds the average to bf16, which a reduce-scatter need not: that is no change of plan
    whole = shards if any(spec.dtype == torch.bfloat16 for spec in specs) else 1
    plans = [
        plan_unfused(specs, shards),
        plan_threshold(specs, shards, 2048),
        plan_threshold(specs, shards, 25 * 2**20),
        plan_nearby_layers(backwards, shards, 1),
        plan_threshold(specs, whole, 4096),
        plan_threshold(backwards, shards, 1024),
    ]
    return [
        (p, plan_dear(p) if p.num_shards == size and sharded else plan_all_reduce(p, "whole", step=sharded))
        for p in plans
    ]


class _Run:
    """One training, with another plan now and then or without."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, replans: bool, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = dear.DistributedOptimizer(make(self.model), self.model, **options)
        self.batches = make_batches(model, int(dear.size()), 2 * NUM_STEPS)[int(dear.rank())]
        self.losses: list[Tensor] = []
        self._plans = _plans(model, self.optimizer._engine.options.sharded) if replans else []
        self._num_replans = 0

    def backward(self, index: int) -> None:
        loss = mse_loss(self.model, self.batches[index])
        loss.backward()
        self.losses.append(loss.detach().clone())

    def replan(self) -> None:
        if self._plans:
            plan, schedule = self._plans[self._num_replans % len(self._plans)]
            self._num_replans += 1
            self.optimizer._engine.relayout(plan, schedule)
            assert self.optimizer.plan == plan and self.optimizer.schedule == schedule

    def result(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer.close()
        return {"params": params, "state": state, "losses": self.losses}


def _usual(run: _Run) -> None:
    for index in range(NUM_STEPS):
        run.optimizer.zero_grad()
        run.backward(index)
        run.optimizer.step()
        run.replan()


def _clipped(run: _Run) -> None:
    for index in range(NUM_STEPS):
        run.optimizer.zero_grad()
        run.replan()
        run.backward(index)
        run.optimizer.clip_grad_value_(0.01)
        run.optimizer.step()


def _never_zeroed(run: _Run) -> None:
    """Averaged gradients stay, and the next backward adds to them."""
    for index in range(NUM_STEPS):
        run.backward(index)
        run.optimizer.step()
        run.replan()


def _zeroed_in_place(run: _Run) -> None:
    for index in range(NUM_STEPS):
        run.optimizer.zero_grad(set_to_none=False)
        run.replan()
        run.backward(index)
        run.optimizer.step()


def _no_sync(run: _Run) -> None:
    """Local gradients are pending when the plan changes, sometimes on top of averaged ones."""
    for index in range(NUM_STEPS):
        if index % 3:
            run.optimizer.zero_grad()
        with run.optimizer.no_sync():
            run.backward(2 * index)
        if index:  # before, the optimizer is watching the order of the first gradients
            run.replan()
        run.backward(2 * index + 1)
        run.optimizer.step()


def _accumulating(run: _Run) -> None:
    """With accumulate=2: in mid-iteration."""
    for index in range(NUM_STEPS):
        run.optimizer.zero_grad()
        run.backward(2 * index)
        if index:
            run.replan()
        run.backward(2 * index + 1)
        run.optimizer.step()


def _partly_unused(run: _Run) -> None:
    """The first layer is frozen in every other step, so that step counts differ."""
    first = next(run.model.parameters())
    for index in range(NUM_STEPS):
        first.requires_grad_(index % 2 == 0)
        run.optimizer.zero_grad()
        run.backward(index)
        run.optimizer.step()
        run.replan()


def _never_zeroed_nor_used(run: _Run) -> None:
    """Frozen parameters keep their averages, so they are stepped all the same."""
    first = next(run.model.parameters())
    for index in range(NUM_STEPS):
        first.requires_grad_(index % 2 == 0)
        run.backward(index)
        run.optimizer.step()
        run.replan()


CASES: dict[str, tuple[nn.Module, MakeOptimizer, Callable[[_Run], None], dict[str, Any]]] = {
    "sgd": (OddMLP(), SGD, _usual, {}),
    "adam, tensors that are split": (WideMLP(), ADAM, _usual, {}),
    "rprop": (OddMLP(), RPROP, _usual, {"fusion": None}),
    "fp32, bf16 with masters, fp64": (MixedDtypes(), ADAM, _usual, {}),
    "masters, never zeroed": (MixedDtypes(), SGD, _never_zeroed, {"fusion": 0.001}),
    "clipped": (OddMLP(), ADAM, _clipped, {}),
    "never zeroed": (OddMLP(), ADAM, _never_zeroed, {"fusion": 0.001}),
    "zeroed in place": (OddMLP(), SGD, _zeroed_in_place, {}),
    "no_sync": (OddMLP(), SGD, _no_sync, {}),
    "accumulate": (OddMLP(), ADAM, _accumulating, {"accumulate": 2}),
    "partly unused": (OddMLP(), ADAM, _partly_unused, {}),
    "never zeroed, partly unused": (OddMLP(), SGD, _never_zeroed_nor_used, {}),
    "whole gradients": (OddMLP(), optimizer_of(LayerwiseSGD), _usual, {}),
    "whole gradients, no_sync": (OddMLP(), optimizer_of(LayerwiseSGD), _no_sync, {}),
    "whole gradients, never zeroed": (OddMLP(), SGD, _never_zeroed, {"shard": False}),
    "all-reduced, then sharded": (OddMLP(), ADAM, _usual, {"schedule": "wfbp"}),
}


def _compare(names: list[str]) -> None:
    for name in names:
        model, make, loop, options = CASES[name]
        results = []
        for replans in (False, True):
            run = _Run(model, make, replans, **options)
            loop(run)
            assert run._num_replans >= (NUM_STEPS - 1) * replans
            results.append(run.result())
        assert_bit_equal(results[1], results[0], (f"'{name}' with new plans", "without"))


def test_a_new_plan_in_mid_training_changes_no_bit(pool: RankPool) -> None:
    pool.run(_compare, list(CASES), size=2)


def test_nor_does_it_on_a_single_rank(pool: RankPool) -> None:
    pool.run(_compare, ["masters, never zeroed", "no_sync", "all-reduced, then sharded"], size=1)


def test_nor_does_it_on_three_ranks_in_deterministic_mode(pool: RankPool) -> None:
    """Fewer cases: what has more ranks to it is who sends what to whom."""
    names = [name for name in CASES if "whole" not in name and "zeroed in place" not in name and name != "sgd"]
    pool.run(_compare, names[::2], size=3, deterministic=True)


def _owners(plan: Plan) -> dict[tuple[str, int], int]:
    """Which rank holds each element of each parameter."""
    return {
        (slot.fqn, slot.start + i): (slot.offset + i) // bucket.shard_numel
        for bucket in plan.buckets
        for slot in bucket.slots
        for i in range(slot.numel)
    }


def _bytes_moved(zeroed: bool) -> list[int]:
    """[sent by this rank, elements that it loses]"""
    run = _Run(WideMLP(), SGD, False, fusion=0.05)
    for index in range(2):
        run.optimizer.zero_grad()
        run.backward(index)
        run.optimizer.step()
    if zeroed:
        run.optimizer.zero_grad()
    before = run.optimizer.plan
    after = plan_unfused(_specs(run.model), int(dear.size()))
    sent = run.optimizer._engine.relayout(after, plan_dear(after))
    assert run.optimizer._engine.relayout(after, plan_dear(after)) == 0  # to the same plan
    owners, rank = _owners(after), int(dear.rank())
    lost = sum(owner == rank and owners[element] != rank for element, owner in _owners(before).items())
    run.optimizer.close()
    return [sent, lost]


@pytest.mark.parametrize("zeroed", [False, True])
def test_only_what_changes_its_owner_is_sent(pool: RankPool, zeroed: bool) -> None:
    """Momentum, in fp32; averaged gradients too, unless they were cleared."""
    for sent, lost in pool.run(_bytes_moved, zeroed, size=3):
        assert lost > 100
        assert sent == lost * 4 * (1 if zeroed else 2)


def _what_is_left() -> list[bool]:
    run = _Run(OddMLP(), ADAM, True)
    run.backward(0)
    run.optimizer.step()
    gc.collect()
    gc.disable()  # which would find the rest some day
    try:
        engine = run.optimizer._engine
        old = [weakref.ref(bucket) for bucket in engine.replica.buckets]
        old += [weakref.ref(bucket._pool) for bucket in engine.replica.buckets]
        run.replan()
        return [reference() is not None for reference in old]
    finally:
        gc.enable()
        run.optimizer.close()


def test_the_old_plans_memory_is_free_at_once(pool: RankPool) -> None:
    """However often plans change, there is one layout, and for a moment two."""
    for left in pool.run(_what_is_left, size=2):
        assert left and not any(left)


def _in_mid_backward() -> None:
    run = _Run(OddMLP(), SGD, True)
    for index in range(2):
        run.optimizer.zero_grad()
        run.backward(index)
        if index:
            run.replan()
        run.optimizer.step()


def test_not_while_gradients_are_averaged(pool: RankPool) -> None:
    assert_raised(pool.run(_in_mid_backward, size=2, expect_errors=True), "ScheduleError", "between steps")

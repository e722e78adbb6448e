"""Uneven inputs: inside `join()` ranks have different numbers of batches, and training is what plain PyTorch makes of
zeros from those that have none left.

Cannot see: what other collectives do that a user starts inside.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dear
from tests.parity.models import LayerwiseSGD, WideMLP
from tests.support.ranks import RankPool, assert_raised, rank
from tests.support.reference import (
    IntegerModel,
    assert_bit_equal,
    integer_batches,
    make_batches,
    mean_in_rank_order,
    mse_loss,
    weighted_sum_loss,
)

Loop = Callable[["Loops", list[Any]], None]


class Loops:
    """One rank's training as users write it, under dear, or every rank's in plain PyTorch (`Plainly`)."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        self.plain = make(self.model)
        self.optimizer = dear.DistributedOptimizer(self.plain, self.model, **options)
        self.loss_fn = weighted_sum_loss if isinstance(model, IntegerModel) else mse_loss
        self.notes: list[Any] = []

    def backward(self, batch: Any) -> None:
        self.loss_fn(self.model, batch).backward()

    def result(self) -> tuple[dict[str, Tensor], dict[str, Any], list[Any]]:
        parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return parameters, self.optimizer.state_dict(), self.notes


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.25)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def layerwise(model: nn.Module) -> torch.optim.Optimizer:
    return LayerwiseSGD(model.parameters(), lr=0.125)


def every_step(loops: Loops, batches: list[Any]) -> None:
    for batch in batches:
        loops.optimizer.zero_grad()
        loops.backward(batch)
        loops.optimizer.step()


def zero_after(loops: Loops, batches: list[Any]) -> None:
    for batch in batches:
        loops.backward(batch)
        loops.optimizer.step()
        loops.optimizer.zero_grad()


def zeros_not_none(loops: Loops, batches: list[Any]) -> None:
    for batch in batches:
        loops.optimizer.zero_grad(set_to_none=False)
        loops.backward(batch)
        loops.optimizer.step()


def model_zeroes(loops: Loops, batches: list[Any]) -> None:
    for batch in batches:
        loops.model.zero_grad()
        loops.backward(batch)
        loops.optimizer.step()


def model_zeroes_after(loops: Loops, batches: list[Any]) -> None:
    for batch in batches:
        loops.backward(batch)
        loops.optimizer.step()
        loops.model.zero_grad()


def begun_twice(loops: Loops, batches: list[Any]) -> None:
    """What a first backward has left is forgotten behind the optimizer's back."""
    for batch in batches:
        loops.model.zero_grad()
        loops.backward(batch)
        loops.optimizer.full_grad(next(loops.model.parameters()))
        loops.model.zero_grad()
        loops.backward(batch)
        loops.optimizer.step()


def clipped(loops: Loops, batches: list[Any]) -> None:
    for batch in batches:
        loops.optimizer.zero_grad()
        loops.backward(batch)
        loops.optimizer.clip_grad_norm_(1.0)
        loops.optimizer.clip_grad_value_(0.125)
        loops.optimizer.step()


def probed(loops: Loops, batches: list[Any]) -> None:
    """A backward that counts for nothing, the averaged gradient, and the state in the middle of training."""
    for batch in batches:
        loops.optimizer.zero_grad()
        loops.backward(batch)
        loops.optimizer.zero_grad()
        loops.backward(batch)
        loops.optimizer.full_grad(next(loops.model.parameters()))
        loops.optimizer.step()
        loops.optimizer.state_dict()


def twice(loops: Loops, batches: list[Any]) -> None:
    """Two backwards a step, the second one late."""
    for batch in batches:
        loops.optimizer.zero_grad()
        loops.backward(batch)
        loops.backward(batch)
        loops.optimizer.step()


def never_zeroed(loops: Loops, batches: list[Any]) -> None:
    for batch in batches:
        loops.backward(batch)
        loops.optimizer.step()


def dropped_between(loops: Loops, batches: list[Any]) -> None:
    """One gradient is set to None between backward and step."""
    for batch in batches:
        loops.optimizer.zero_grad()
        loops.backward(batch)
        next(loops.model.parameters()).grad = None
        loops.optimizer.step()


def changing_options(loops: Loops, batches: list[Any]) -> None:
    for number, batch in enumerate(batches):
        loops.plain.param_groups[0]["lr"] = 0.125 / (number + 1)
        loops.optimizer.zero_grad()
        loops.backward(batch)
        loops.optimizer.step()


# What a rank trains: the options, the optimizer, the loop.
CASES: dict[str, tuple[dict[str, Any], Any, Loop]] = {
    "sharded": ({"fusion": None}, momentum, every_step),
    "one bucket": ({}, adam, every_step),
    "whole gradients": ({"fusion": None}, layerwise, every_step),
    "whole by choice": ({"shard": False}, momentum, every_step),
    "all-reduce": ({"schedule": "wfbp"}, momentum, every_step),
    "zero after": ({"fusion": None}, momentum, zero_after),
    "zeros": ({"fusion": None}, momentum, zeros_not_none),
    "zeros, whole": ({"shard": False}, momentum, zeros_not_none),
    "model zeroes": ({"fusion": None}, momentum, model_zeroes),
    "model zeroes, whole": ({"shard": False}, momentum, model_zeroes),
    "model zeroes after": ({"fusion": None}, momentum, model_zeroes_after),
    "model zeroes after, whole": ({"shard": False}, momentum, model_zeroes_after),
    "begun twice": ({"fusion": None}, momentum, begun_twice),
    "begun twice, whole": ({"shard": False}, momentum, begun_twice),
    "clipped": ({"fusion": None}, momentum, clipped),
    "clipped, whole": ({"shard": False}, momentum, clipped),
    "probed": ({"fusion": None}, momentum, probed),
    "probed, whole": ({"shard": False}, momentum, probed),
    "twice": ({"fusion": None}, momentum, twice),
    "twice, whole": ({"shard": False}, momentum, twice),
    "never zeroed": ({"fusion": None}, momentum, never_zeroed),
    "dropped between": ({"fusion": None}, momentum, dropped_between),
    "changing options": ({"fusion": None}, momentum, changing_options),
}


class _Mean:
    """`DistributedOptimizer` in plain PyTorch: averages over replicas, with zeros from those without a gradient."""

    def __init__(self, loops: Plainly) -> None:
        self.loops = loops

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.loops.average.zero_grad(set_to_none)
        self.loops.used = False

    def step(self) -> None:
        self.loops.plain.step()

    def clip_grad_norm_(self, value: float) -> None:
        nn.utils.clip_grad_norm_(self.loops.average.parameters(), value)

    def clip_grad_value_(self, value: float) -> None:
        nn.utils.clip_grad_value_(self.loops.average.parameters(), value)

    def full_grad(self, param: nn.Parameter) -> None: ...

    def state_dict(self) -> None: ...


class Plainly:
    """The same loops on one model: a batch is the list of all ranks' batches, None where a rank has none."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module) -> None:
        self.model = self.average = copy.deepcopy(model)
        self.plain = make(self.model)
        self.optimizer = _Mean(self)
        self.loss_fn = weighted_sum_loss if isinstance(model, IntegerModel) else mse_loss

    def backward(self, batch: list[Any]) -> None:
        grads: list[list[Tensor | None]] = []
        for of_rank in batch:
            replica = copy.deepcopy(self.model)
            replica.zero_grad()
            if of_rank is not None:
                self.loss_fn(replica, of_rank).backward()
            grads.append([p.grad for p in replica.parameters()])
        for param, *same in zip(self.model.parameters(), *grads, strict=True):
            mean = mean_in_rank_order(same)
            if mean is not None:
                param.grad = mean if param.grad is None else param.grad + mean


def train(
    cases: dict[str, tuple[dict[str, Any], Any, Loop]], model: nn.Module, batches: list[list[Any]], epochs: int
) -> dict[str, Any]:
    """Two epochs: after the first, a rank that followed goes on as if nothing had been."""
    results = {}
    for name, (options, make, loop) in cases.items():
        loops = Loops(make, model, **options)
        for _ in range(epochs):
            with loops.optimizer.join():
                loop(loops, batches[rank()])
        results[name] = loops.result()
        loops.optimizer.close()
    return results


@pytest.mark.parametrize(
    ("lengths", "names"),
    [
        ((4, 2), list(CASES)),
        ((0, 3), list(CASES)),
        ((3, 0, 1), ["sharded", "whole gradients", "clipped", "probed", "twice", "changing options"]),
        ((1, 4, 2), ["sharded", "all-reduce", "zeros", "model zeroes, whole", "never zeroed", "dropped between"]),
        ((2, 2), ["sharded", "whole gradients"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_uneven_batches(pool: RankPool, lengths: tuple[int, ...], names: list[str]) -> None:
    """Integer gradients: every sum and every average of two is exact, so parameters are equal to the last bit."""
    size = len(lengths)
    model = IntegerModel()
    batches = [
        list(of_rank)[:n] for of_rank, n in zip(integer_batches(model, size, max(lengths)), lengths, strict=True)
    ]
    cases = {name: CASES[name] for name in names}
    got = pool.run(train, cases, model, batches, 2, size=size, deterministic=True)
    together = [[of_rank[k] if k < len(of_rank) else None for of_rank in batches] for k in range(max(lengths))]
    for name, (_, make, loop) in cases.items():
        plainly = Plainly(make, model)
        for _ in range(2):
            loop(plainly, together)  # type: ignore[arg-type]
        expected = {n: p.detach() for n, p in plainly.model.named_parameters()}
        for r in range(size):
            if "clipped" in name:
                for n in expected:
                    torch.testing.assert_close(got[r][name][0][n], expected[n], rtol=1e-5, atol=1e-6)
                assert_bit_equal(got[r][name][0], got[0][name][0], (name, r))
            else:
                assert_bit_equal(got[r][name][0], expected, (name, f"rank {r}"))
        if "whole" not in name:
            assert_bit_equal(got[0][name][1]["state"], plainly.plain.state_dict()["state"], (name, "state"))


# ------------------------------------------------------------------------------------------------ other ways to train


def accumulating(batches: list[list[Any]], how: str) -> dict[str, Tensor]:
    """Two batches a step; a rank whose number is odd has one left."""
    options = {"accumulate": 2} if how == "accumulate" else {}
    loops = Loops(momentum, IntegerModel(), fusion=None, **options)
    with loops.optimizer.join():
        for number, batch in enumerate(batches[rank()]):
            if how == "no_sync" and number % 2 == 0:
                with loops.optimizer.no_sync():
                    loops.backward(batch)
            else:
                loops.backward(batch)
            if number % 2:
                loops.optimizer.step()
                loops.optimizer.zero_grad()
    return loops.result()[0]


@pytest.mark.parametrize("how", ["no_sync", "accumulate", "neither"])
def test_what_was_left_counts_in_the_next_step(pool: RankPool, how: str) -> None:
    model = IntegerModel()
    batches = [list(of_rank) for of_rank in integer_batches(model, 2, 6)]
    got = pool.run(accumulating, [batches[0], batches[1][:3]], how, size=2)
    plainly = Plainly(momentum, model)
    theirs = [*batches[1][:3], None, None, None]
    for number, pair in enumerate(zip(batches[0], theirs, strict=True)):
        plainly.backward(list(pair))
        if number % 2:
            plainly.optimizer.step()
            plainly.optimizer.zero_grad()
    expected = {n: p.detach() for n, p in plainly.model.named_parameters()}
    assert_bit_equal(got, [expected, expected])


def scaled(lengths: list[int]) -> tuple[dict[str, Tensor], float]:
    loops = Loops(momentum, IntegerModel(), fusion=None)
    batches = integer_batches(IntegerModel(), 2, max(lengths))[rank()]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    with loops.optimizer.join():
        for number, batch in enumerate(batches[: lengths[rank()]]):
            loops.optimizer.zero_grad()
            loss = weighted_sum_loss(loops.model, batch)
            scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
            scaler.unscale_(loops.optimizer)
            loops.optimizer.clip_grad_norm_(1e6)
            scaler.step(loops.optimizer)
            scaler.update()
    return loops.result()[0], scaler.get_scale()


def test_a_scaler_skips_for_all(pool: RankPool) -> None:
    """Step 2 overflows on the one rank that is left: both skip it."""
    got = pool.run(scaled, [4, 1], size=2)
    assert_bit_equal(got[0][0], got[1][0])
    assert (got[0][1], got[1][1]) == (2.0, 4.0)
    model, batches = IntegerModel(), integer_batches(IntegerModel(), 2, 4)
    plainly = Plainly(momentum, model)
    for number in (0, 1, 3):
        plainly.optimizer.zero_grad()
        plainly.backward([batches[0][number], batches[1][number] if number < 1 else None])
        plainly.optimizer.step()
    for name, param in plainly.model.named_parameters():
        torch.testing.assert_close(got[0][0][name], param.detach(), rtol=1e-5, atol=1e-6)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.fc(x))
        return y


def with_buffers(lengths: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(7)
    model = Normalised()
    optimizer = dear.DistributedOptimizer(momentum(model), model, broadcast_buffers=True)
    with optimizer.join():
        for number in range(lengths[rank()]):
            optimizer.zero_grad()
            model(torch.full((2, 3), float(number)) + torch.eye(3)[:2] * rank()).square().sum().backward()
            optimizer.step()
    with optimizer.join():
        pass
    return dict(model.named_parameters()), {name: b.clone() for name, b in model.named_buffers()}


def test_buffers_come_from_a_rank_that_goes_on(pool: RankPool) -> None:
    (first, buffers), (second, others) = pool.run(with_buffers, [1, 4], size=2)
    assert_bit_equal(first, second)
    assert int(others["norm.num_batches_tracked"]) == 4
    assert int(buffers["norm.num_batches_tracked"]) == 3, "what the last forward was given"


def wide_adam(lengths: list[int]) -> dict[str, Tensor]:
    loops = Loops(adam, WideMLP(), fusion=0.05)
    with loops.optimizer.join():
        every_step(loops, make_batches(WideMLP(), 3, 9)[rank()][: lengths[rank()]])
    parameters, state, _ = loops.result()
    assert all(float(s["step"]) == 9 for s in state["state"].values())
    return parameters


def test_split_tensors_on_three_ranks(pool: RankPool) -> None:
    lengths = [2, 9, 5]
    got = pool.run(wide_adam, lengths, size=3)
    assert_bit_equal(got[1:], [got[0]] * 2)
    batches, plainly = make_batches(WideMLP(), 3, 9), Plainly(adam, WideMLP())
    every_step(plainly, [[batches[r][k] if k < lengths[r] else None for r in range(3)] for k in range(9)])  # type: ignore[arg-type]
    for name, param in plainly.model.named_parameters():
        torch.testing.assert_close(got[0][name], param.detach(), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ when it goes wrong


def schedulers(every: str) -> list[float]:
    loops = Loops(momentum, IntegerModel())
    schedule = torch.optim.lr_scheduler.LambdaLR(loops.plain, lambda count: 1.0 / (1 + count))
    batches = integer_batches(IntegerModel(), 2, 4)[rank()][: (4, 2)[rank()]]
    for _ in range(2):
        with loops.optimizer.join():
            for batch in batches:
                loops.optimizer.zero_grad()
                loops.backward(batch)
                loops.optimizer.step()
                if every == "batch":
                    schedule.step()
        if every == "epoch":
            schedule.step()
    return [group["lr"] for group in loops.optimizer.param_groups]


def test_a_schedule_by_epochs_is_the_same_everywhere(pool: RankPool) -> None:
    assert pool.run(schedulers, "epoch", size=2) == [[0.125 / 3]] * 2


def test_a_schedule_by_batches_that_has_fallen_behind_is_found(pool: RankPool) -> None:
    outcomes = pool.run(schedulers, "batch", size=2, expect_errors=True)
    assert_raised(outcomes, "ScheduleError", r"call step\(\) differently: rank 0 with .*lr=.*LR scheduler")


def raising(where: str) -> float:
    loops = Loops(momentum, IntegerModel(), fusion=None)
    batches = integer_batches(IntegerModel(), 3, 4)[rank()]
    start_s = time.monotonic()
    try:
        with loops.optimizer.join():
            for number, batch in enumerate(batches[: (1, 4, 4)[rank()]]):
                loops.optimizer.zero_grad()
                if rank() == 2 and number == 2 and where == "forward":
                    raise ValueError("a bad batch")
                loops.backward(batch)
                if rank() == 2 and number == 2:
                    raise ValueError("a bad batch")
                loops.optimizer.step()
    finally:
        assert time.monotonic() - start_s < 10
    return 0.0


@pytest.mark.parametrize("where", ["forward", "after backward"])
def test_a_rank_that_raises_ends_it_for_all(pool: RankPool, where: str) -> None:
    outcomes = pool.run(raising, where, size=3, expect_errors=True, group_timeout_s=15)
    assert_raised(outcomes, "ValueError", "a bad batch", ranks=[2])
    assert_raised(outcomes, "CommunicatorError", r"[Rr]ank 2", ranks=[0, 1])


def disagreeing() -> None:
    loops = Loops(momentum, IntegerModel(), fusion=None)
    with loops.optimizer.join():
        loops.backward(integer_batches(IntegerModel(), 2, 1)[rank()][0])
        if rank() == 0:
            loops.optimizer.clip_grad_norm_(1.0)
        loops.optimizer.step()


def clipping_differently() -> None:
    loops = Loops(momentum, IntegerModel(), fusion=None)
    with loops.optimizer.join():
        loops.backward(integer_batches(IntegerModel(), 2, 1)[rank()][0])
        loops.optimizer.clip_grad_norm_(1.0 + rank())
        loops.optimizer.step()


def test_ranks_that_make_other_calls_are_told(pool: RankPool) -> None:
    outcomes = pool.run(disagreeing, size=2, expect_errors=True)
    assert_raised(outcomes, "ScheduleError", r"rank 0 has come to clip_grad_norm_\(\) and rank 1 to step\(\)")
    outcomes = pool.run(clipping_differently, size=2, expect_errors=True)
    assert_raised(outcomes, "ScheduleError", r"clip_grad_norm_\(\) differently: rank 0 with 1\.0, rank 1 with 2\.0")


def misused(how: str) -> None:
    loops = Loops(momentum, IntegerModel(), shard=False)
    if how == "nested":
        with loops.optimizer.join(), loops.optimizer.join():
            pass
    elif how == "load":
        with loops.optimizer.join():
            loops.optimizer.load_state_dict(loops.optimizer.state_dict())
    elif how == "never zeroed":
        with loops.optimizer.join():
            never_zeroed(loops, list(integer_batches(IntegerModel(), 1, 2)[0]))


@pytest.mark.parametrize(
    ("how", "text"),
    [("nested", r"join\(\) inside"), ("load", "load_state_dict"), ("never zeroed", r"opt\.zero_grad\(\) before each")],
)
def test_misuse_is_named(pool: RankPool, how: str, text: str) -> None:
    assert_raised(pool.run(misused, how, size=1, expect_errors=True), "ScheduleError", text)


def an_exception_that_is_handled() -> dict[str, Tensor]:
    """All ranks leave the block by an exception; they may go on afterwards."""
    loops = Loops(momentum, IntegerModel(), fusion=None)
    batches = integer_batches(IntegerModel(), 2, 3)[rank()]
    with pytest.raises(StopIteration), loops.optimizer.join():
        every_step(loops, list(batches[:1]))
        raise StopIteration
    with loops.optimizer.join():
        every_step(loops, list(batches[1 : 3 - rank()]))
    return loops.result()[0]


def test_all_ranks_may_leave_by_an_exception(pool: RankPool) -> None:
    got = pool.run(an_exception_that_is_handled, size=2)
    model, batches = IntegerModel(), integer_batches(IntegerModel(), 2, 3)
    plainly = Plainly(momentum, model)
    every_step(plainly, [[batches[0][0], batches[1][0]], [batches[0][1], batches[1][1]], [batches[0][2], None]])  # type: ignore[arg-type]
    expected = {n: p.detach() for n, p in plainly.model.named_parameters()}
    assert_bit_equal(got, [expected] * 2)

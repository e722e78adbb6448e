"""Ways to go silently wrong that somebody has tried; each must be right, or an error that says what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

import dear
from tests.support.ranks import RankPool, assert_raised, rank
from tests.support.reference import OddMLP, assert_bit_equal, make_batches, mse_loss, optimizer_of

SGD = optimizer_of(optim.SGD, lr=0.05, momentum=0.9)


class TwoParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(7))

    def forward(self, use_b: bool = True) -> torch.Tensor:
        return self.a.sum() + (self.b.sum() if use_b else 0.0)


@pytest.fixture
def alone() -> Iterator[None]:
    dear.init(backend="local")
    yield
    dear.shutdown()


def _wrapped(lr: float = 0.1, **options: Any) -> tuple[TwoParameters, dear.DistributedOptimizer]:
    model = TwoParameters()
    return model, dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=lr), model, **options)


def test_an_assigned_gradient_may_be_used_again_after_step(alone: None) -> None:
    model, optimizer = _wrapped()
    mine = torch.ones(5)
    for _ in range(10):
        mine.fill_(1.0)
        model.a.grad = mine
        optimizer.step()
        mine.fill_(100.0)
    torch.testing.assert_close(model.a.detach(), torch.zeros(5))


def test_gradients_of_no_sync_may_be_used_again_after_step(alone: None) -> None:
    model, optimizer = _wrapped()
    for _ in range(5):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model().backward()
        kept = [param.grad for param in model.parameters()]
        model().backward()
        optimizer.step()
        for grad in kept:
            assert grad is not None
            grad.fill_(100.0)
    torch.testing.assert_close(model.a.detach(), torch.zeros(5))


def test_a_skipped_step_does_not_hide_the_next_unscale(alone: None) -> None:
    model, optimizer = _wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for iteration in range(3):
        model.zero_grad()
        scaler.scale(model() * (float("inf") if iteration == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(model.a.detach(), torch.full((5,), 0.8))


@pytest.mark.parametrize("how", ["no_sync", "accumulate"])
def test_local_and_reduced_gradients_are_unscaled_once(alone: None, how: str) -> None:
    model, optimizer = _wrapped(accumulate=2 if how == "accumulate" else 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        optimizer.zero_grad()
        if how == "no_sync":
            with optimizer.no_sync():
                scaler.scale(model()).backward()
        else:
            scaler.scale(model()).backward()
        scaler.scale(model.b.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(model.a.detach(), torch.full((5,), 0.8))
    torch.testing.assert_close(model.b.detach(), torch.full((7,), 0.6))


def _inf_on_one_rank() -> tuple[torch.Tensor, float]:
    model, optimizer = _wrapped(accumulate=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for iteration in range(2):
        optimizer.zero_grad()
        for _ in range(2):  # a short group
            scaler.scale(model() * (float("inf") if iteration == 0 and dear.rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.a.detach().clone(), scaler.get_scale()


def test_all_ranks_skip_a_short_group_together(pool: RankPool) -> None:
    for weights, scale in pool.run(_inf_on_one_rank, size=2):
        torch.testing.assert_close(weights, torch.full((5,), 0.8))
        assert scale == 512.0


def test_a_nan_is_gone_after_its_step(alone: None) -> None:
    model, optimizer = _wrapped(fusion=None)
    norms = []
    for iteration in range(3):
        optimizer.zero_grad(set_to_none=False)
        (model() * (float("nan") if iteration == 0 else 1.0)).backward()
        norms.append(float(optimizer.clip_grad_norm_(1e6)))
        if iteration:
            optimizer.step()
    assert norms[1] == norms[2] == pytest.approx(12**0.5)
    torch.testing.assert_close(model.a.detach(), torch.full((5,), 0.8))


def _move_to_other_group(wrapped: optim.Optimizer) -> None:
    wrapped.param_groups[1]["params"].append(wrapped.param_groups[0]["params"].pop())


def _new_group(wrapped: optim.Optimizer) -> None:
    wrapped.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize("change", [_move_to_other_group, _new_group])
def test_groups_may_not_change_members(alone: None, change: Callable[[optim.Optimizer], None]) -> None:
    model = nn.ModuleList([TwoParameters(), TwoParameters()])
    wrapped = optim.SGD([{"params": [*m.parameters()], "lr": lr} for m, lr in zip(model, (1.0, 0.1), strict=True)])
    optimizer = dear.DistributedOptimizer(wrapped, model)
    change(wrapped)
    with pytest.raises(dear.ScheduleError, match="parameter groups"):
        optimizer.step()


def _zeroed_on_one_rank() -> None:
    model, optimizer = _wrapped()
    for _ in range(3):
        model().backward()
        optimizer.step()
        if dear.rank() == 1:
            model.zero_grad()
    optimizer.synchronize()


def test_a_gradient_forgotten_by_one_rank_only_is_an_error_on_all(pool: RankPool) -> None:
    outcomes = pool.run(_zeroed_on_one_rank, size=2, expect_errors=True)
    assert_raised(outcomes, "ScheduleError", r"zero_grad\(\) on all ranks")


def _smallest() -> list[torch.Tensor]:
    first = dear.rank() == 0
    unsigned = torch.tensor([0, 3] if first else [5, 2], dtype=torch.uint8)
    lowest = torch.tensor([torch.iinfo(torch.int64).min if first else 5])
    return [dear.allreduce(unsigned, dear.Min), dear.allreduce(lowest, dear.Min)]


def test_the_minimum_of_unsigned_and_of_the_smallest_number(pool: RankPool) -> None:
    for unsigned, lowest in pool.run(_smallest, size=2):
        assert unsigned.tolist() == [0, 2]
        assert lowest.item() == torch.iinfo(torch.int64).min


def test_the_largest_norm_with_an_empty_bucket(alone: None) -> None:
    model = nn.Sequential(nn.Linear(3, 0, bias=False), nn.Linear(0, 2))
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, fusion=None)
    model(torch.ones(1, 3)).sum().backward()
    assert float(optimizer.clip_grad_norm_(10.0, float("inf"))) == 1.0
    optimizer.step()
    optimizer.synchronize()


def _two_forwards() -> float:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, broadcast_buffers=True)
    (model(torch.randn(4, 3)).sum() + model(torch.randn(4, 3)).sum()).backward()
    optimizer.step()
    optimizer.synchronize()
    return float(model[1].num_batches_tracked)


def test_two_forwards_with_synchronised_buffers(pool: RankPool) -> None:
    """pytorch#22095: two forwards before one backward."""
    assert pool.run(_two_forwards, size=2) == [2.0, 2.0]


def _copies_of_a_model_with_synchronised_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, broadcast_buffers=True)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        if dear.rank() == 0:  # alone: a collective would wait for the other rank
            assert duplicate(torch.randn(4, 3)).shape == (4, 3)
    optimizer.close()


def test_copies_and_pickles_start_no_collective(pool: RankPool) -> None:
    assert pool.run(_copies_of_a_model_with_synchronised_buffers, size=2, group_timeout_s=5) == [None, None]


def test_a_compiled_module_with_a_door_can_be_copied(alone: None) -> None:
    model = torch.compile(TwoParameters(), backend="eager")
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    model().backward()
    optimizer.step()
    assert model._forward_pre_hooks, "the door"
    hooks = pickle.loads(pickle.dumps(list(model._forward_pre_hooks.values())))
    assert [hook(model, ()) for hook in hooks] == [None]
    assert [hook(model, ()) for hook in copy.deepcopy(list(model._forward_pre_hooks.values()))] == [None]


def test_a_checkpoint_of_another_optimizer_is_refused(alone: None) -> None:
    model = TwoParameters()
    optimizer = dear.DistributedOptimizer(optim.AdamW(model.parameters()), model)
    with pytest.raises(dear.ArgumentError, match=r"of another optimizer than AdamW.*betas"):
        optimizer.load_state_dict(optim.SGD(model.parameters(), lr=1.0).state_dict())


def clear_twice_on_one_rank(num_steps: int) -> list[torch.Tensor]:
    """Rank 0 clears its gradients once more than the others, as an evaluation of its own might."""
    model = OddMLP()
    optimizer = dear.DistributedOptimizer(SGD(model), model)
    for batch in make_batches(model, dear.size(), num_steps)[rank()]:
        optimizer.zero_grad()
        if rank() == 0:
            optimizer.zero_grad()
        mse_loss(model, batch).backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def test_one_rank_may_clear_its_gradients_once_more(pool: RankPool) -> None:
    model = OddMLP()
    optimizer, batches = SGD(model), make_batches(model, 2, 3)
    for index in range(3):
        optimizer.zero_grad()
        for of_rank in batches:
            (mse_loss(model, of_rank[index]) / 2).backward()
        optimizer.step()
    expected = [param.detach() for param in model.parameters()]
    assert_bit_equal(pool.run(clear_twice_on_one_rank, 3, size=2, timeout_s=30), [expected] * 2)

"""The collectives of the public API against what plain arithmetic gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear
from tests.support.ranks import RankPool, assert_raised
from tests.support.reference import assert_bit_equal, assert_same_on_all_ranks


def _mine(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * (rank + 1)).view(shape).to(dtype)


def _allreduce(shape: tuple[int, ...], dtype: torch.dtype, op: dear.ReduceOp) -> tuple[torch.Tensor, bool]:
    mine = _mine(shape, dtype, dear.rank())
    before = mine.clone()
    result = dear.allreduce(mine, op)
    return result, torch.equal(mine, before)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_allreduce(pool: RankPool, size: int, dtype: torch.dtype) -> None:
    for shape in ((), (0,), (7,), (3, 5)):
        for op in dear.ReduceOp:
            if op is dear.Average and not dtype.is_floating_point:
                continue
            results = pool.run(_allreduce, shape, dtype, op, size=size)
            stacked = torch.stack([_mine(shape, dtype, rank) for rank in range(size)]).double()
            expected = {
                dear.Sum: stacked.sum(0),
                dear.Average: stacked.mean(0),
                dear.Max: stacked.amax(0),
                dear.Min: stacked.amin(0),
            }[op].to(dtype)
            for result, unchanged in results:
                assert unchanged, "the argument must not change"
                assert_bit_equal(result, expected)


def _other_collectives() -> dict[str, Any]:
    rank, size = dear.rank(), dear.size()
    everything = {
        "allgather": dear.allgather(torch.full((rank + 1, 2), float(rank))),
        "reduce_scatter": dear.reduce_scatter(torch.arange(2.0 * size) * (rank + 1)),
        "broadcast": dear.broadcast(torch.tensor([float(rank), 1.0]), root_rank=size - 1),
        "broadcast_object": dear.broadcast_object({"rank": rank}, root_rank=size - 1),
    }
    dear.barrier()
    return everything


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_other_collectives(pool: RankPool, size: int) -> None:
    results = pool.run(_other_collectives, size=size)
    total = sum(range(1, size + 1))
    for rank, result in enumerate(results):
        assert_bit_equal(result["allgather"], torch.cat([torch.full((r + 1, 2), float(r)) for r in range(size)]))
        mine = torch.arange(2.0 * size)[2 * rank : 2 * rank + 2] * total / size
        assert_bit_equal(result["reduce_scatter"], mine)
        assert_bit_equal(result["broadcast"], torch.tensor([size - 1.0, 1.0]))
        assert result["broadcast_object"] == {"rank": size - 1}


def _resume() -> tuple[Any, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if dear.rank() == 0:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
    dear.broadcast_parameters(model.state_dict())
    dear.broadcast_optimizer_state(optimizer)
    return model.state_dict(), optimizer.state_dict()


def test_a_checkpoint_of_rank_0_reaches_all(pool: RankPool) -> None:
    """horovod#392, #526: options such as lr travel too."""
    results = pool.run(_resume, size=3)
    assert_same_on_all_ranks(results)
    assert results[2][1]["param_groups"][0]["lr"] == 0.01
    assert results[2][1]["state"][0]["step"] == 1


def _bad_call(what: str) -> None:
    rank = dear.rank()
    calls = {
        "average of whole numbers": lambda: dear.allreduce(torch.ones(2, dtype=torch.int64)),
        "op": lambda: dear.allreduce(torch.ones(2), "sum"),  # type: ignore[arg-type]
        "complex": lambda: dear.allreduce(torch.ones(2, dtype=torch.complex64)),
        "root": lambda: dear.broadcast(torch.ones(2), root_rank=9),
        "uneven": lambda: dear.reduce_scatter(torch.ones(3)),
        "0-dim": lambda: dear.allgather(torch.ones(())),
        "different parameters": lambda: dear.broadcast_parameters([torch.ones(2 + rank)]),
    }
    calls[what]()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("average of whole numbers", "dear.Sum"),
        ("op", "dear.Average"),
        ("complex", "view_as_real"),
        ("root", "from 0 to 1"),
        ("uneven", "share equally"),
        ("0-dim", "view"),
        ("different parameters", "on rank 1"),
    ],
)
def test_bad_calls_are_errors_everywhere(pool: RankPool, what: str, says: str) -> None:
    outcomes = pool.run(_bad_call, what, size=2, expect_errors=True)
    assert_raised(outcomes, "ArgumentError", says)

"""Ranks that train in groups: the mean is the group's, and groups do not meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.trainers import Case, Result, Trainer, compare, run_plainly, run_under_dear
from tests.support.ranks import RankPool, rank
from tests.support.reference import TOLERANCES, OddMLP, assert_same_on_all_ranks, optimizer_of

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9)
GROUPS = {"halves": [[0, 1], [2, 3]], "interleaved": [[0, 2], [1, 3]], "unequal": [[0, 1, 2], [3]]}


def run_in_groups(groups: list[list[int]], of_torch: bool, case: Case) -> Result:
    made = [dist.new_group(ranks) for ranks in groups] if of_torch else groups
    mine = next(i for i, ranks in enumerate(groups) if rank() in ranks)
    return run_under_dear(replace(case, options={**case.options, "group": made[mine]}))


def clipped_steps(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.clip_norm(0.5)
        trainer.step()


@pytest.mark.parametrize("options", [{}, {"fusion": None}, {"shard": False}], ids=str)
@pytest.mark.parametrize("of_torch", [False, True], ids=["ranks", "process groups"])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_train_apart(pool: RankPool, name: str, of_torch: bool, options: dict[str, Any]) -> None:
    case = Case(OddMLP(), SGD, clipped_steps, options, num_steps=8, deterministic=True).resolved(4)
    assert case.batches is not None
    got = pool.run(run_in_groups, GROUPS[name], of_torch, case, size=4, ddp=of_torch, deterministic=True)
    for ranks in GROUPS[name]:
        expected = run_plainly(replace(case, batches=[case.batches[r] for r in ranks]))
        assert_same_on_all_ranks([got[r].parameters for r in ranks])
        for r, reference in zip(ranks, expected, strict=True):
            compare(got[r], reference, case, TOLERANCES["clip"], f"rank {r}")

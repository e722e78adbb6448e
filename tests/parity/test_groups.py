"""Ranks that train in groups: the mean is the group's, and groups do not meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.trainers import Case, Result, Trained, Trainer, check_ranks, run_all, run_plainly, run_under_dear
from tests.support.ranks import RankPool, rank
from tests.support.reference import OddMLP, make_batches, optimizer_of

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9)
GROUPS = {"halves": [[0, 1], [2, 3]], "interleaved": [[0, 2], [1, 3]], "unequal": [[0, 1, 2], [3]]}


def run_in_groups(case: Case) -> Result:
    """`case.options["group"]` is a list of lists of ranks; of torch's process groups, if torch has any."""
    groups = case.options["group"]
    made = [dist.new_group(ranks) for ranks in groups] if dist.is_initialized() else groups
    mine = next(i for i, ranks in enumerate(groups) if rank() in ranks)
    return run_under_dear(replace(case, options={**case.options, "group": made[mine]}))


def clipped_steps(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.clip_norm(0.5)
        trainer.step()


@pytest.mark.parametrize("of_torch", [False, True], ids=["ranks", "process groups"])
def test_groups_train_apart(pool: RankPool, of_torch: bool) -> None:
    model = OddMLP()
    batches = make_batches(model, 4, 6)
    more: list[dict[str, Any]] = [{}, {"shard": False}, {"fusion": 0.0002}]
    cases = {
        f"{name}, {options}": Case(model, SGD, clipped_steps, {**options, "group": groups}, batches=batches)
        for name, groups in GROUPS.items()
        for options in more
    }
    by_rank = run_all(pool, cases, 4, deterministic=True, torch_groups=of_torch, run_dear=run_in_groups)
    for name, case in cases.items():
        for ranks in case.options["group"]:
            reference = replace(case, batches=[batches[r] for r in ranks], tolerance="clip")
            trained = Trained([by_rank[r][name][0] for r in ranks], run_plainly(reference))
            try:
                check_ranks(trained, reference, len(ranks))
            except AssertionError as error:
                raise AssertionError(f"case '{name}', ranks {ranks}: {error}") from error

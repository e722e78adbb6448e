"""What grows: memory, threads and file descriptors over many steps, and over many optimizers.

Cannot see: GPU memory; leaks of less than a few kilobytes a step.
"""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import dear
from tests.support.ranks import RankPool, rank

MIB = 1024 * 1024
length = pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["short", "long"])


@dataclass(frozen=True, slots=True)
class Usage:
    resident_bytes: int
    num_threads: int
    num_files: int
    num_tensors: int

    @staticmethod
    def now() -> Usage:
        gc.collect()
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return Usage(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
        )


class Shapeless(nn.Module):
    """Takes sequences of any length; the last layer is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 64)
        self.seldom = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        y: torch.Tensor = self.outer(torch.tanh(self.inner(x)))
        return self.seldom(y) if seldom else y


def many_steps(num_steps: int) -> list[Usage]:
    model = Shapeless()
    optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model, fusion=0.05)
    usages = []
    for number in range(num_steps):
        samples, positions = 1 + (7 * number + rank()) % 13, 1 + (11 * number) % 57
        optimizer.zero_grad()
        if number % 10 == 3:
            with optimizer.no_sync():
                model(torch.ones(samples, 3, 64), False).square().mean().backward()
        model(torch.ones(samples, positions, 64), number % 3 == 0).square().mean().backward()
        if number % 5 == 4:
            optimizer.clip_grad_norm_(1.0)
        if number % 50 == 49:
            optimizer.state_dict()
        optimizer.step()
        if (number + 1) % (num_steps // 4) == 0:
            optimizer.synchronize()
            usages.append(Usage.now())
    optimizer.close()
    return usages


@length
def test_changing_shapes(pool: RankPool, long: bool) -> None:
    """From a quarter of the way to the end; what torch and malloc keep has been reached by then."""
    for r, usages in enumerate(pool.run(many_steps, 2000 if long else 200, size=2, timeout_s=600 if long else 60)):
        print(f"rank {r}: resident MiB {[round(u.resident_bytes / MIB, 1) for u in usages]}")
        first, last = usages[0], usages[-1]
        assert last.num_threads == first.num_threads
        assert last.num_files == first.num_files
        assert last.num_tensors <= first.num_tensors
        assert last.resident_bytes - first.resident_bytes < 8 * MIB


def many_optimizers(count: int) -> tuple[list[Usage], int]:
    def one(number: int) -> weakref.ref[nn.Module]:
        model = Shapeless()
        options = ({}, {"fusion": None}, {"shard": False}, {"schedule": "wfbp"})[number % 4]
        optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, **options)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3, 64), True).square().mean().backward()
            optimizer.step()
        with optimizer.join():
            pass
        if number % 3:  # one in three is only dropped
            optimizer.close()
        return weakref.ref(model)

    for number in range(12):  # what torch builds once
        one(number)
    usages = [Usage.now()]
    models = []
    for _ in range(2):
        models += [one(number) for number in range(count // 2)]
        usages.append(Usage.now())
    return usages, sum(model() is not None for model in models)


@length
def test_wrap_and_close(pool: RankPool, long: bool) -> None:
    """Memory by its second half: until then malloc's arenas grow to their size, one for each thread."""
    for r, (usages, num_alive) in enumerate(pool.run(many_optimizers, 200 if long else 24, size=2, timeout_s=600)):
        print(f"rank {r}: resident MiB {[round(u.resident_bytes / MIB, 1) for u in usages]}")
        before, half, after = usages
        assert num_alive == 0
        assert after.num_threads == before.num_threads
        assert after.num_files == before.num_files
        assert after.num_tensors == before.num_tensors
        assert after.resident_bytes - half.resident_bytes < 12 * MIB

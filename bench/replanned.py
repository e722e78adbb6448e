"""One replayed model under one DistributedOptimizer whose plan changes: any number of plans in one run, fairly.

All plans share processes, connections, memory and the machine's moods; weights go on from one to the next.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import dear
from dear.stats import Tuning
from dearcore.layout import ParamSpec, Plan
from dearcore.profile import Profile
from dearcore.schedule import Schedule

from .launch import World
from .replay import LEARNING_RATE, DeviceClock, GradientSource, LayerProfile, ReplayNet

__all__ = ["Planned", "Replanned", "interleaved_s"]

Planned = tuple[Plan, Schedule]
NUM_SETTLING = 1  # iterations after a change of plan: the first one finds all parameters there


class Replanned:
    """A context manager in one rank; every method is for all ranks alike."""

    def __init__(self, world: World, layers: Sequence[LayerProfile], **options: Any) -> None:
        self._world, self._layers, self._options = world, layers, options

    def __enter__(self) -> Replanned:
        world = self._world
        dist.init_process_group(
            "gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        dear.init(backend="gloo", timeout=world.timeout)
        clock = DeviceClock()
        sources = [GradientSource(layer, 1000 * world.rank + i, world.size) for i, layer in enumerate(self._layers)]
        self._model = ReplayNet(self._layers, sources, clock)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self.optimizer = dear.DistributedOptimizer(optimizer, self._model, **self._options)
        self._iteration = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.optimizer.close()
        dear.shutdown()
        dist.destroy_process_group()

    def iterate(self, num_iterations: int) -> list[float]:
        """Seconds of each iteration, averaged over ranks: they wait for each other."""
        times_s = []
        last_s = time.perf_counter()
        for _ in range(num_iterations):
            self.optimizer.zero_grad()
            x = self._model(torch.zeros(()))
            x.backward(torch.tensor(1.0 + self._iteration % 3))
            self.optimizer.step()
            self._iteration += 1
            now_s = time.perf_counter()
            times_s.append(now_s - last_s)
            last_s = now_s
        agreed: list[float] = dear.allreduce(torch.tensor(times_s, dtype=torch.float64)).tolist()
        return agreed

    def times_s(self, planned: Planned, num_iterations: int) -> list[float]:
        """Of that many iterations under a plan."""
        self.optimizer._engine.relayout(*planned)
        return self.iterate(NUM_SETTLING + num_iterations)[NUM_SETTLING:]

    def tune(self, most: int) -> Tuning:
        """Trains until fusion='auto' has decided."""
        for _ in range(most):
            self.iterate(1)
            tuning = self.optimizer.stats().tuning
            if tuning is not None:
                return tuning
        raise RuntimeError(f"the tuner was not done after {most} iterations")

    def measured(self) -> Profile:
        """Trains until there is a profile."""
        self.optimizer.measure()
        while self.optimizer.profile is None:
            self.iterate(1)
        return self.optimizer.profile

    def params(self) -> list[ParamSpec]:
        """In the forward order of the profile."""
        engine = self.optimizer._engine
        assert engine.profile is not None
        return engine.profile.order([tracked.spec for tracked in engine.tracked])


def interleaved_s(replanned: Replanned, plans: Sequence[Planned], blocks: int, iterations: int) -> list[float]:
    """The median iteration of each plan, blocks of all plans in turn, each turn beginning with another."""
    times_s: list[list[float]] = [[] for _ in plans]
    for block in range(blocks):
        for position in range(len(plans)):
            index = (block + position) % len(plans)
            times_s[index] += replanned.times_s(plans[index], iterations)
    return [statistics.median(times) for times in times_s]

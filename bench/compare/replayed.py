"""The replay as a workload of `compare`: see bench/replay.py for how compute becomes timed waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from bench.methods import Trainee
from bench.replay import DeviceClock, GradientSource, LayerProfile, ReplayNet
from dearcore.profile import Link, Profile

from .testbeds import profile_of

__all__ = ["SLACK_S", "Replayed"]

# How late a host may be without its accelerator running dry: late wake-ups of a machine with fewer cores than ranks.
SLACK_S = 1e-3


class Replayed:
    """Gradients are integers times the number of ranks and steps are powers of two, so that weights are exact."""

    exact = True
    warmup_scales = (1.0, -1.0)  # the second takes back what the first did
    scales = (1.0, 2.0, 3.0)

    def __init__(self, layers: Sequence[LayerProfile]) -> None:
        self._layers = layers
        self._clock = DeviceClock(SLACK_S)
        rank = dist.get_rank()
        self._sources = [
            GradientSource(layer, 1000 * rank + i, dist.get_world_size()) for i, layer in enumerate(layers)
        ]

    def make(self) -> tuple[nn.Module, Sequence[nn.Module]]:
        model = ReplayNet(self._layers, self._sources, self._clock)
        return model, list(model.layers)

    def forward(self, trainee: Trainee) -> torch.Tensor:
        return trainee.forward(torch.zeros(()))

    def backward(self, result: torch.Tensor, scale: float) -> None:
        result.backward(torch.tensor(scale))  # type: ignore[no-untyped-call]

    def settle_memory(self, in_own_memory: bool) -> None:
        for source in self._sources:
            source.in_own_memory = not in_own_memory

    def spans(self, on: bool) -> list[tuple[str, float, float]]:
        spans, self._clock.spans = self._clock.spans or [], [] if on else None
        return spans

    def profile(self, trainee: Trainee, links: Sequence[Link]) -> Profile:
        return profile_of(self._layers, dist.get_world_size(), links=links)

"""Networks as profiles: true shapes, and compute times split over the layers by operation counts.

Only the time of a whole iteration was published. It is split in two steps: one third is the forward, two thirds the
backward; within each, a layer gets its share of an estimated cost on the published GPU (RTX 2080 Ti):

    convolution or linear layer:  2 x elements x positions / 8 TFLOP/s     (about 60 % of its fp32 peak)
    norm:                         20 B x channels x positions / 600 GB/s   (five passes over fp32 activations)
    bias, lookup:                 nothing

`positions`: see make_shapes.py. Activations without parameters ride with their norm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.workload import ParamShape, load_shapes
from dearcore.profile import LayerTime, Link, Profile

from .make_shapes import SHAPES

__all__ = ["NETWORKS", "Network", "load_profile", "split_compute"]

FLOP_PER_S = 8e12
BYTES_PER_S = 600e9
FORWARD_PART = 1 / 3


@dataclass(frozen=True, slots=True)
class Network:
    """A published workload: examples per GPU, and one GPU's compute time per iteration."""

    name: str
    batch: int
    compute_s: float


NETWORKS = {
    network.name: network
    for network in (
        Network("resnet50", 64, 0.2294),
        Network("densenet201", 32, 0.2125),
        Network("inception-v4", 64, 0.3532),
        Network("bert-base", 64, 0.2921),
        Network("bert-large", 32, 0.4222),
    )
}


def split_compute(
    shapes: Sequence[ParamShape], positions: Sequence[int], compute_s: float, forward_part: float = FORWARD_PART
) -> tuple[LayerTime, ...]:
    """One LayerTime for each parameter, fp32; their times add up to compute_s."""
    costs = [_cost_s(name, shape, uses) for (name, shape), uses in zip(shapes, positions, strict=True)]
    total_s = sum(costs)
    return tuple(
        LayerTime(
            name,
            tuple(shape),
            torch.float32,
            cost_s / total_s * compute_s * forward_part,
            cost_s / total_s * compute_s * (1 - forward_part),
        )
        for (name, shape), cost_s in zip(shapes, costs, strict=True)
    )


def load_profile(model: str, compute_s: float | None = None) -> Profile:
    """The profile of a network of bench/shapes/, on links without any cost; or of a FILE.json that Profile.to_json()
    wrote, with its own. `compute_s`: time of one iteration's compute, in place of the published (measured) one."""
    if model.endswith(".json"):
        profile = Profile.from_json(Path(model).read_text())
        measured_s = profile.tf_s + profile.tb_s
        return profile if compute_s is None else profile.scaled_compute(compute_s / measured_s)
    positions = json.loads((SHAPES / "positions.json").read_text())[model]
    layers = split_compute(load_shapes(model), positions, compute_s or NETWORKS[model].compute_s)
    return Profile(layers, 1, Link(0.0, 0.0), Link(0.0, 0.0), Link(0.0, 0.0))


def _cost_s(name: str, shape: Sequence[int], positions: int) -> float:
    numel = math.prod(shape)
    if len(shape) == 1 and not name.endswith("bias"):
        return 20.0 * numel * positions / BYTES_PER_S
    return 2.0 * numel * positions / FLOP_PER_S

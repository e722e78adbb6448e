"""From a published testbed to an emulated one: tensors and links shrink together, compute keeps its time.

What is kept is the ratio of communication (one all-reduce of everything) to compute. A testbed with P GPUs moves
2 (P - 1) / P of the bytes through each link; here fewer hosts do, over a link of the rate that gives the same ratio:

    10gbe-64   64 GPUs on 10 Gbit/s Ethernet, 1.70 ns per byte of an all-reduce (LB-OPT)
    ib-64      64 GPUs on 100 Gbit/s InfiniBand, 0.39 ns per byte at 32 GPUs (HKBU-HPML/ddl-benchmarks), as a ring at 64
    balanced   an all-reduce of everything takes 4/3 of compute

Example: ResNet-50 has 102.2 MB, so that an all-reduce on 10gbe-64 takes 174 ms beside 229 ms of compute: ratio 0.757.
Four hosts with a tenth of the tensors need 1.5 x 10.2 MB / 174 ms = 88 MB/s, a link of 0.74 Gbit/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.replay import LayerProfile
from bench.simulate.cluster import CLUSTERS
from bench.simulate.networks import NETWORKS, load_profile
from bench.workload import scaled
from dearcore.profile import LayerTime, Link, Profile

__all__ = ["GOODPUT", "TESTBEDS", "Emulation", "emulate", "profile_of"]

TESTBEDS = ("10gbe-64", "ib-64", "balanced")
BALANCED_RATIO = 4 / 3
NUM_GPUS = 64
MB = 1_000_000
# The model's size: moving bytes is work for the cores that all ranks share, and twenty copies have to fit.
MIN_MB, MAX_MB = 2.5, 10.0
MAX_LINK_GBPS = 0.5  # where the model is larger than MIN_MB
MAX_OVERLAPPED_S = 0.6  # of an ideal iteration with all-reduces; longer ones are played at higher speed
MIN_LAYER_S = 1e-3  # a layer of the replay computes at least so long in both directions: fewer wake-ups
GOODPUT = 0.957  # of a link's rate, under Ethernet, IP and TCP headers


@dataclass(frozen=True, slots=True)
class Emulation:
    """One model on one testbed, as it is replayed. Link rate and compute time are those of the replay."""

    model: str
    testbed: str
    num_hosts: int
    scale: float  # of tensors
    speed: float  # how many times as fast as published the compute is played
    ratio: float  # communication / compute, without latency
    layers: tuple[LayerProfile, ...]
    link_gbps: float

    @property
    def rate(self) -> str:
        """As tc writes it."""
        return f"{max(1, round(self.link_gbps * 1e3))}mbit"

    @property
    def compute_s(self) -> float:
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)


def emulate(
    model: str, testbed: str, num_hosts: int, scale: float | None = None, speed: float | None = None
) -> Emulation:
    """`scale` and `speed`: None chooses them for this machine, which changes the ratio by nothing."""
    profile = load_profile(model)
    compute_s = NETWORKS[model].compute_s
    ratio = _ratio(testbed, profile.num_bytes, compute_s)
    if speed is None:
        speed = max(1.0, compute_s * max(1.0, 1 / 3 + ratio) / MAX_OVERLAPPED_S)
    busy = 2 * (num_hosts - 1) / num_hosts / (ratio * compute_s / speed)  # link bytes per second, per byte of model
    if scale is None:
        largest = MAX_LINK_GBPS * GOODPUT * 1e9 / 8 / busy
        num_mb = profile.num_bytes / MB
        scale = min(1.0, max(MIN_MB, min(MAX_MB, largest / MB)) / num_mb)
    shapes = [shape for _, shape in scaled([(layer.fqn, layer.shape) for layer in profile.layers], scale)]
    layers = _merged(profile.layers, shapes, speed)
    num_bytes = sum(layer.num_bytes for layer in layers)
    link_gbps = busy * num_bytes * 8 / 1e9 / GOODPUT if num_hosts > 1 else MAX_LINK_GBPS
    return Emulation(model, testbed, num_hosts, scale, speed, ratio, layers, link_gbps)


def profile_of(
    layers: Sequence[LayerProfile], num_ranks: int, links: Sequence[Link] = (Link(0.0, 0.0),) * 3
) -> Profile:
    """What ReplayNet(layers) does, as planners and bounds want it; links: reduce-scatter, all-gather, all-reduce.

    All parameters of a layer are needed before it computes, and all its gradients are ready when it has.
    """
    times = []
    for i, layer in enumerate(layers):
        last = len(layer.shapes) - 1
        for j, shape in enumerate(layer.shapes):
            of_layer = (layer.forward_s, layer.backward_s) if j == last else (0.0, 0.0)
            times.append(LayerTime(f"layers.{i}.param{j}", shape, torch.float32, *of_layer))
    return Profile(tuple(times), num_ranks, *links)


def _ratio(testbed: str, num_bytes: int, compute_s: float) -> float:
    if testbed == "balanced":
        return BALANCED_RATIO
    if testbed not in TESTBEDS:
        raise ValueError(f"testbed {testbed!r} is not known; expected {', '.join(TESTBEDS)}.")
    all_reduce = CLUSTERS[testbed.removesuffix("-64")].all_reduce(NUM_GPUS)
    return all_reduce.beta_s_per_byte * num_bytes / compute_s


def _merged(times: Sequence[LayerTime], shapes: Sequence[tuple[int, ...]], speed: float) -> tuple[LayerProfile, ...]:
    """Neighbours become one layer until it computes long enough; what is left at the end joins the last one."""
    layers: list[LayerProfile] = []
    group: list[tuple[int, ...]] = []
    forward_s = backward_s = 0.0
    for time, shape in zip(times, shapes, strict=True):
        group.append(shape)
        forward_s += time.forward_s / speed
        backward_s += time.backward_s / speed
        if forward_s + backward_s >= MIN_LAYER_S:
            layers.append(LayerProfile(tuple(group), forward_s, backward_s))
            group, forward_s, backward_s = [], 0.0, 0.0
    if group and layers:
        last = layers.pop()
        group = [*last.shapes, *group]
        forward_s, backward_s = forward_s + last.forward_s, backward_s + last.backward_s
    if group:
        layers.append(LayerProfile(tuple(group), forward_s, backward_s))
    return tuple(layers)

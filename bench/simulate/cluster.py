"""What a collective costs on a cluster: rings, flat or inside and between nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dearcore.errors import ArgumentError
from dearcore.profile import Link, Profile

__all__ = ["CLUSTERS", "MAX_SHARDS", "Cluster", "on_cluster"]

MAX_SHARDS = 64  # plans for more ranks are made for as many: sizes and predicted times are the same


@dataclass(frozen=True, slots=True)
class Cluster:
    """A ring of P ranks moves (P - 1) / P of the bytes through every link, in P - 1 steps, for each half.

    With `ranks_per_node` = k > 1 and an inner rate, each half runs as two rings, one inside the nodes and one between
    them: the links between nodes move (N - 1) / N of the bytes for N = P / k nodes, in N - 1 steps.
    """

    bytes_per_s: float
    step_latency_s: float
    ranks_per_node: int = 1
    inner_bytes_per_s: float | None = None  # None: one flat ring
    inner_step_latency_s: float = 0.0

    def half(self, num_ranks: int) -> Link:
        """A reduce-scatter or an all-gather."""
        if self.inner_bytes_per_s is None:
            return _ring(num_ranks, self.bytes_per_s, self.step_latency_s)
        inside = min(self.ranks_per_node, num_ranks)
        if num_ranks % inside:
            raise ArgumentError(f"{num_ranks} ranks do not fill nodes of {inside}; expected a multiple.")
        inner = _ring(inside, self.inner_bytes_per_s, self.inner_step_latency_s)
        outer = _ring(num_ranks // inside, self.bytes_per_s, self.step_latency_s)
        return Link(inner.alpha_s + outer.alpha_s, inner.beta_s_per_byte + outer.beta_s_per_byte)

    def all_reduce(self, num_ranks: int) -> Link:
        half = self.half(num_ranks)
        return Link(2 * half.alpha_s, 2 * half.beta_s_per_byte)


def on_cluster(profile: Profile, cluster: Cluster, num_ranks: int) -> Profile:
    """The same network on `num_ranks` ranks of a cluster."""
    half, whole = cluster.half(num_ranks), cluster.all_reduce(num_ranks)
    shards = min(num_ranks, MAX_SHARDS)
    step = profile.step_s_per_byte * shards / num_ranks
    return replace(
        profile, world_size=shards, reduce_scatter=half, all_gather=half, all_reduce=whole, step_s_per_byte=step
    )


def _ring(num_ranks: int, bytes_per_s: float, step_latency_s: float) -> Link:
    return Link((num_ranks - 1) * step_latency_s, (num_ranks - 1) / num_ranks / bytes_per_s)


# Rates from published slopes of an all-reduce, 2 (P - 1) / P bytes / rate; latencies by `simulate --calibrate`.
CLUSTERS = {
    "10gbe": Cluster(2 * 63 / 64 / 1.70e-9, 15.5e-6),
    "ib": Cluster(2 * 31 / 32 / 0.39e-9, 0.0),
}

"""What the user asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dearcore.layout import NearbyLayers, Plan
from dearcore.profile import Profile
from dearcore.schedule import Schedule

__all__ = ["Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of a DistributedOptimizer, checked. `sharded`: the optimizer steps on shards."""

    schedule: str | Schedule
    fusion: float | NearbyLayers | Plan | str | None
    profile: Profile | None = field(repr=False)  # told line by line
    sharded: bool
    accumulate: int
    reduce_dtype: torch.dtype | None
    master_dtype: torch.dtype | None
    broadcast_buffers: bool
    broadcast: str = "trained"
    per_rank_options: tuple[str, ...] = ()

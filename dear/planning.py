"""From what the user asks for to a plan and a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dearcore.errors import ArgumentError
from dearcore.layout import (
    NearbyLayers,
    ParamSpec,
    Plan,
    plan_nearby_layers,
    plan_threshold,
    plan_unfused,
)
from dearcore.schedule import Schedule, plan_all_reduce, plan_dear

__all__ = ["check_fusion", "make_plan", "make_schedule"]

MIB = 1024 * 1024


def check_fusion(fusion: object) -> None:
    """Raises ArgumentError unless `fusion` is MiB > 0, None, NearbyLayers or a Plan."""
    if fusion is None or isinstance(fusion, (NearbyLayers, Plan)):
        return
    if isinstance(fusion, bool) or not isinstance(fusion, (int, float)) or not (math.isfinite(fusion) and fusion > 0):
        raise ArgumentError(
            f"fusion={fusion!r}; expected MiB a bucket (> 0), None for no fusion, dear.NearbyLayers(n), or a Plan."
        )


def make_plan(fusion: float | NearbyLayers | Plan | None, params: Sequence[ParamSpec], num_shards: int) -> Plan:
    """`params` stand in forward order."""
    if isinstance(fusion, Plan):
        fusion.check_fits(params, num_shards)
        return fusion
    if isinstance(fusion, NearbyLayers):
        return plan_nearby_layers(params, num_shards, fusion.num_layers)
    if fusion is None:
        return plan_unfused(params, num_shards)
    return plan_threshold(params, num_shards, fusion * MIB)


def make_schedule(schedule: str | Schedule, plan: Plan, sharded: bool) -> Schedule:
    """Raises ArgumentError for a name that is not known or a schedule that does not fit the plan."""
    if isinstance(schedule, Schedule):
        schedule.check_fits(plan)
        return schedule
    if schedule != "dear":
        raise ArgumentError(f"schedule={schedule!r}; expected 'dear', or a Schedule.")
    return plan_dear(plan) if sharded else plan_all_reduce(plan, "dear, whole gradients", step=False)

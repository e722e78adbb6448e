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
from dearcore.planners import NEEDS_TIMES, PLANNERS
from dearcore.profile import Profile
from dearcore.schedule import OpKind, Schedule, plan_all_reduce, plan_dear

__all__ = ["check_fusion", "make_plan", "make_plan_and_schedule"]

MIB = 1024 * 1024
DEFAULT_FUSION_MIB = 25.0  # of DistributedOptimizer


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


def make_plan_and_schedule(
    schedule: str | Schedule,
    fusion: float | NearbyLayers | Plan | None,
    params: Sequence[ParamSpec],
    world_size: int,
    sharded: bool,
    profile: Profile | None = None,
) -> tuple[Plan, Schedule]:
    """`params` stand in forward order. `sharded`: the optimizer may step shards; else the user's own steps once.

    Raises: ArgumentError for a name that is not known, an option without effect, a planner that lacks measured times,
    or a schedule that does not fit the plan.
    """
    num_shards = world_size if sharded else 1
    if isinstance(schedule, Schedule):
        if not isinstance(fusion, Plan):
            raise ArgumentError("a Schedule names buckets by number. Pass the Plan that it was made for as `fusion`.")
        schedule.check_fits(fusion)
        gathers_parameters = any(op.kind is OpKind.REDUCE_SCATTER for op in schedule.ops)
        if gathers_parameters and not sharded:
            raise ArgumentError(
                f"schedule '{schedule.name}' steps shards, but this optimizer steps as a whole. Use one that "
                "all-reduces."
            )
        return make_plan(fusion, params, world_size if gathers_parameters else 1), schedule
    if schedule == "dear":
        plan = make_plan(fusion, params, num_shards)
        return plan, plan_dear(plan) if sharded else plan_all_reduce(plan, "dear, whole gradients", step=False)
    if schedule not in PLANNERS:
        raise ArgumentError(f"schedule={schedule!r}; expected one of {', '.join(PLANNERS)}, or a Schedule.")
    if schedule == "dear-fill" and not sharded:
        raise ArgumentError("schedule='dear-fill' steps shards, but this optimizer steps as a whole. Use 'dear'.")
    if schedule in NEEDS_TIMES and profile is None:
        raise ArgumentError(f"schedule='{schedule}' plans with measured times. Take a profile of this model first.")
    if profile is None:
        profile = Profile.from_shapes(params, world_size)
    profile.check_fits(params, world_size)
    if fusion != DEFAULT_FUSION_MIB:
        raise ArgumentError(f"fusion={fusion!r} has no effect: schedule='{schedule}' makes its own plan. Leave it out.")
    plan, planned = PLANNERS[schedule](profile, params)
    if not sharded:
        planned = Schedule(schedule, tuple(op for op in planned.ops if op.kind is OpKind.ALL_REDUCE))
    return plan, planned

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
from dearcore.merging import merge_for_dear, merged_layers, plan_groups
from dearcore.planners import MERGE, NEEDS_TIMES, PLANNERS, dear_fill
from dearcore.profile import Profile
from dearcore.schedule import OpKind, Schedule, plan_all_reduce, plan_dear

__all__ = [
    "AUTO",
    "MIB",
    "check_fusion",
    "check_profile",
    "make_plan",
    "make_plan_and_schedule",
    "needs_times",
    "steps_all_everywhere",
]

MIB = 1024 * 1024
SIZED = "sized"  # fusion: a tenth of the model, within these
SMALLEST_MIB, LARGEST_MIB = 1.0, 25.0
AUTO = "auto"  # fusion: found by trials in the first iterations
FUSED = ("dear", "dear-fill")  # schedules whose buckets the user may choose


def check_fusion(fusion: object) -> None:
    """Raises ArgumentError unless `fusion` is MiB > 0, None, NearbyLayers, a Plan, 'sized', 'merge' or 'auto'."""
    if fusion is None or isinstance(fusion, (NearbyLayers, Plan)) or (isinstance(fusion, str) and fusion in _NAMED):
        return
    if isinstance(fusion, bool) or not isinstance(fusion, (int, float)) or not (math.isfinite(fusion) and fusion > 0):
        raise ArgumentError(
            f"fusion={fusion!r}; expected MiB a bucket (> 0), None for no fusion, dear.NearbyLayers(n), "
            f"'{SIZED}', '{MERGE}', '{AUTO}', or a Plan."
        )


_MEASURED = (MERGE, AUTO)
_NAMED = (SIZED, *_MEASURED)


def check_profile(profile: object, schedule: str | Schedule, fusion: object) -> None:
    """Raises ArgumentError unless `profile` is None, or a Profile that somebody plans with."""
    if profile is None:
        return
    if not isinstance(profile, Profile):
        raise ArgumentError(f"profile={profile!r}; expected a dear.Profile, or None to have times measured.")
    if not needs_times(schedule, fusion):
        raise ArgumentError(
            f"a profile has no effect with schedule={str(schedule).splitlines()[0]!r} and this fusion, which plan "
            f"from sizes alone. Leave it out, or plan with it: fusion='{MERGE}', or schedule='mg-wfbp', ..."
        )


def needs_times(schedule: str | Schedule, fusion: object) -> bool:
    """True if the plan follows from measured times."""
    return (isinstance(fusion, str) and fusion in _MEASURED) or (isinstance(schedule, str) and schedule in NEEDS_TIMES)


def steps_all_everywhere(schedule: str | Schedule, sharded: bool) -> bool:
    """True if every rank steps every weight, also where there are several."""
    if isinstance(schedule, Schedule):
        return all(op.kind is not OpKind.REDUCE_SCATTER for op in schedule.ops)
    return not sharded or schedule not in FUSED


def sized_mib(num_bytes: float) -> float:
    """MiB a bucket where nobody has measured.

    Many buckets hide more, few cost less latency. Ten leave a twentieth of the communication where it is always
    exposed, at the end of the backward and at the start of the forward; above 25 MiB latency is small anyway.
    """
    return min(LARGEST_MIB, max(SMALLEST_MIB, num_bytes / MIB / 10))


def make_plan(fusion: float | NearbyLayers | Plan | str | None, params: Sequence[ParamSpec], num_shards: int) -> Plan:
    """`params` stand in forward order. What needs measured times is as 'sized' until there are some."""
    if isinstance(fusion, Plan):
        fusion.check_fits(params, num_shards)
        return fusion
    if isinstance(fusion, NearbyLayers):
        return plan_nearby_layers(params, num_shards, fusion.num_layers)
    if fusion is None:
        return plan_unfused(params, num_shards)
    if isinstance(fusion, str):
        fusion = sized_mib(sum(param.num_bytes for param in params))
    return plan_threshold(params, num_shards, fusion * MIB)


def make_plan_and_schedule(
    schedule: str | Schedule,
    fusion: float | NearbyLayers | Plan | str | None,
    params: Sequence[ParamSpec],
    world_size: int,
    sharded: bool,
    profile: Profile | None = None,
) -> tuple[Plan, Schedule]:
    """`params` stand in forward order. `sharded`: the optimizer may step shards; else the user's own steps once.

    Where times are needed and there is no profile yet: what to train with until they have been measured.

    Raises: ArgumentError for a name that is not known, an option without effect, a profile of something else, or a
    schedule that does not fit the plan.
    """
    num_shards = world_size if sharded else 1
    if profile is not None:
        profile.check_fits(params, world_size)
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
    if fusion != SIZED and schedule not in FUSED and schedule in PLANNERS:
        raise ArgumentError(f"fusion={fusion!r} has no effect: schedule='{schedule}' makes its own plan. Leave it out.")
    if schedule == "dear":
        if fusion == MERGE and profile is not None:
            plan = _merged(profile, params, num_shards)
        else:
            plan = make_plan(fusion, params, num_shards)
        return plan, plan_dear(plan) if sharded else plan_all_reduce(plan, "dear, whole gradients", step=False)
    if schedule not in PLANNERS:
        raise ArgumentError(f"schedule={schedule!r}; expected one of {', '.join(PLANNERS)}, or a Schedule.")
    if schedule == "dear-fill":
        if not sharded:
            raise ArgumentError("schedule='dear-fill' steps shards, but this optimizer steps as a whole. Use 'dear'.")
        if profile is not None and fusion != AUTO:
            return dear_fill(profile, params, fusion=sized_mib(profile.num_bytes) if fusion == SIZED else fusion)
        plan = make_plan(fusion, params, num_shards)
        return plan, plan_dear(plan)
    if profile is None:
        profile = Profile.from_shapes(params, world_size)
        schedule = "ddp" if schedule in NEEDS_TIMES else schedule
    plan, planned = PLANNERS[schedule](profile, params)
    if not sharded:
        planned = Schedule(schedule, tuple(op for op in planned.ops if op.kind is OpKind.ALL_REDUCE))
    return plan, planned


def _merged(profile: Profile, params: Sequence[ParamSpec], num_shards: int) -> Plan:
    """Groups from latency, bandwidth and times; for whole gradients those of MG-WFBP."""
    ordered = profile.order(params)
    if num_shards > 1:
        return merge_for_dear(profile, ordered)
    return plan_groups(ordered, 1, merged_layers(profile), "merged gradients")

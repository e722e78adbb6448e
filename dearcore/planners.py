"""Ways to train in parallel, as data: each planner turns a profile into a plan and a schedule.

    plan, schedule = PLANNERS["mg-wfbp"](profile)

`params` are the parameters as their optimizer numbers them (default: numbered in forward order). Planners named in
`NEEDS_TIMES` read measured times; the others need only shapes (`Profile.from_shapes`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from .errors import ArgumentError
from .layout import NearbyLayers, ParamSpec, Plan, plan_nearby_layers, plan_threshold, plan_unfused
from .merging import merge_for_dear, merged_layers, plan_groups, plan_partitions
from .predict import predict_iteration_s
from .profile import Profile
from .schedule import After, Op, OpKind, Schedule, plan_all_reduce, plan_dear

__all__ = [
    "Fusion",
    "MERGE",
    "NEEDS_TIMES",
    "PLANNERS",
    "Planner",
    "bytescheduler",
    "ddp",
    "dear",
    "dear_fill",
    "horovod",
    "mg_wfbp",
    "wfbp",
]

MIB = 1024 * 1024
MERGE = "merge"  # dear's fusion: groups chosen from latency, bandwidth and the measured times
SLOWER = 1.25  # what links are taken to cost more, to decide between plans that are predicted to be equally good
WORTH = 1e-3  # a change of plan has to be predicted to gain at least this part of the iteration

Planned = tuple[Plan, Schedule]
Fusion = float | NearbyLayers | Plan | str | None  # MiB a bucket; the only string is MERGE


class Planner(Protocol):
    def __call__(self, profile: Profile, params: Sequence[ParamSpec] | None = None) -> Planned: ...


def wfbp(profile: Profile, params: Sequence[ParamSpec] | None = None) -> Planned:
    """Wait-free backpropagation: an all-reduce for each tensor as soon as its gradient is there."""
    return _reduced_whole(plan_unfused(_specs(profile, params), 1), "wfbp")


def ddp(
    profile: Profile,
    params: Sequence[ParamSpec] | None = None,
    *,
    bucket_bytes: float = 25 * MIB,
    first_bucket_bytes: float = MIB,
) -> Planned:
    """torch's DistributedDataParallel: a bucket closes when it has reached its size; the first one closes early.

    Filled in backward order; sizes count for each dtype on its own, as torch's reducer does it.
    """
    specs = _specs(profile, params)
    limits: dict[object, float] = {}
    open_groups: dict[object, list[int]] = {}
    groups: list[list[int]] = []
    for position in reversed(range(len(specs))):
        dtype = specs[position].dtype
        group = open_groups.setdefault(dtype, [])
        group.append(position)
        if sum(specs[i].num_bytes for i in group) >= limits.get(dtype, first_bucket_bytes):
            groups.append(open_groups.pop(dtype))
            limits[dtype] = bucket_bytes
    groups.extend(open_groups.values())
    return _reduced_whole(plan_groups(specs, 1, groups, f"ddp {bucket_bytes / MIB:g} MiB"), "ddp")


def horovod(
    profile: Profile,
    params: Sequence[ParamSpec] | None = None,
    *,
    fusion_bytes: float = 128 * MIB,
    cycle_s: float = 1e-3,
) -> Planned:
    """Horovod: a thread wakes once a cycle and reduces what has become ready, fused up to a threshold.

    A cycle that finds work ends when its all-reduces do, so that a slow network fuses more.
    """
    _need_times(profile, "horovod")
    specs, ready_s = _specs(profile, params), profile.ready_s()
    groups: list[list[int]] = []
    position = len(specs) - 1
    now_s = 0.0
    while position >= 0:
        now_s = max(now_s, math.ceil(ready_s[position] / cycle_s) * cycle_s)
        wake_s = now_s
        while position >= 0 and ready_s[position] <= wake_s:
            group: list[int] = []
            num_bytes = 0
            while position >= 0 and ready_s[position] <= wake_s:
                spec = specs[position]
                if group and (num_bytes + spec.num_bytes > fusion_bytes or spec.dtype != specs[group[0]].dtype):
                    break
                group.append(position)
                num_bytes += spec.num_bytes
                position -= 1
            groups.append(group)
            now_s += profile.all_reduce.time_s(num_bytes)
        now_s = max(now_s, wake_s + cycle_s)
    return _reduced_whole(plan_groups(specs, 1, groups, f"horovod cycles of {cycle_s * 1e3:g} ms"), "horovod")


def mg_wfbp(profile: Profile, params: Sequence[ParamSpec] | None = None) -> Planned:
    """MG-WFBP: gradients merge where waiting for the next one costs less than another latency."""
    _need_times(profile, "mg-wfbp")
    plan = plan_groups(_specs(profile, params), 1, merged_layers(profile), "merged gradients")
    return _reduced_whole(plan, "mg-wfbp")


def bytescheduler(
    profile: Profile,
    params: Sequence[ParamSpec] | None = None,
    *,
    partition_numel: int = 4_000_000,
    credit_numel: int = 16_000_000,
) -> Planned:
    """ByteScheduler: tensors cut into parts; of those that are ready, the one needed first in the forward goes first.

    Credit is what may have been handed to the network and not come back; what has been handed over keeps its place.
    """
    _need_times(profile, "bytescheduler")
    specs, ready_s = _specs(profile, params), profile.ready_s()
    plan = plan_partitions(specs, 1, partition_numel)
    position_of = {spec.index: position for position, spec in enumerate(specs)}
    arrivals = [(ready_s[position_of[bucket.slots[0].param]], bucket.index) for bucket in plan.buckets]
    heapq.heapify(arrivals)
    waiting: list[int] = []  # by priority: buckets stand in forward order
    in_flight: list[tuple[float, int]] = []  # end, elements
    order: list[int] = []
    now_s = network_s = 0.0
    while arrivals or waiting:
        while arrivals and arrivals[0][0] <= now_s:
            heapq.heappush(waiting, heapq.heappop(arrivals)[1])
        in_flight = [(end_s, numel) for end_s, numel in in_flight if end_s > now_s]
        while waiting:
            bucket = plan.buckets[waiting[0]]
            if in_flight and sum(numel for _, numel in in_flight) + bucket.numel > credit_numel:
                break
            order.append(heapq.heappop(waiting))
            network_s = max(network_s, now_s) + profile.all_reduce.time_s(bucket.num_bytes)
            in_flight.append((network_s, bucket.numel))
        events = [arrivals[0][0]] if arrivals else []
        if waiting:
            events.append(in_flight[0][0])
        now_s = min(events, default=now_s)
    ops = [Op(OpKind.ALL_REDUCE, bucket, After.GRAD_READY) for bucket in order]
    ops += [Op(OpKind.STEP, bucket, After.BACKWARD_END) for bucket in order]
    return _checked(plan, Schedule("bytescheduler", tuple(ops)))


def dear(
    profile: Profile,
    params: Sequence[ParamSpec] | None = None,
    *,
    fusion: Fusion = 25.0,
) -> Planned:
    """Reduce-scatters in the backward, all-gathers in the next forward.

    fusion: MiB a bucket, None for a bucket a tensor, NearbyLayers, MERGE, or a Plan.
    """
    specs, num_shards = _specs(profile, params), profile.world_size
    if fusion is None:
        plan = plan_unfused(specs, num_shards)
    elif isinstance(fusion, Plan):
        fusion.check_fits(specs, num_shards)
        plan = fusion
    elif isinstance(fusion, NearbyLayers):
        plan = plan_nearby_layers(specs, num_shards, fusion.num_layers)
    elif fusion == MERGE:
        _need_times(profile, "dear with fusion 'merge'")
        plan = merge_for_dear(profile, specs)
    elif isinstance(fusion, str) or not fusion > 0:
        raise ArgumentError(
            f"fusion={fusion!r}; expected MiB a bucket (> 0), None, NearbyLayers(n), a Plan or '{MERGE}'."
        )
    else:
        plan = plan_threshold(specs, num_shards, fusion * MIB)
    return _checked(plan, plan_dear(plan))


def dear_fill(
    profile: Profile,
    params: Sequence[ParamSpec] | None = None,
    *,
    fusion: Fusion = 25.0,
    density: float | None = None,
) -> Planned:
    """As `dear`, but buckets of the last layers are stepped and gathered while the network idles in the backward.

    density: this part of the buckets (the last ones; 0 to 1) may be gathered early, where it fits; None: as many as the
    predictor finds best, and of equally good ones the one that bears slower links best. No reduce-scatter that the end
    of the backward waits for leaves later than without. Where no gain is predicted the schedule is dear's.
    """
    _need_times(profile, "dear-fill")
    if density is not None:
        if not 0.0 <= density <= 1.0:
            raise ArgumentError(f"density={density!r}; expected a part of the buckets, 0.0 to 1.0.")
        plan, _ = dear(profile, params, fusion=fusion)
        return _checked(plan, _fill(profile, plan, round(density * (len(plan.buckets) - 1))))
    # what is best for dear need not be best for filling, so with MERGE others are tried too
    fusions = (MERGE, None, 2.0, 4.0, 8.0, 25.0) if fusion == MERGE else (fusion,)
    plans = [dear(profile, params, fusion=each)[0] for each in fusions]
    candidates = [(plans[0], plan_dear(plans[0]))]
    for plan in plans:
        candidates += [(plan, _fill(profile, plan, num_early)) for num_early in _counts(len(plan.buckets) - 1)]
    times_s = [predict_iteration_s(profile, *candidate) for candidate in candidates]
    longest_s = min(times_s[0], min(times_s) * (1 + WORTH))
    as_good = [candidate for candidate, time_s in zip(candidates, times_s, strict=True) if time_s <= longest_s]
    links = profile.reduce_scatter.slower(SLOWER), profile.all_gather.slower(SLOWER)
    slower = replace(profile, reduce_scatter=links[0], all_gather=links[1])
    slower_s = [predict_iteration_s(slower, *candidate) for candidate in as_good]
    longest_s = min(slower_s) * (1 + WORTH)
    return _checked(*next(each for each, time_s in zip(as_good, slower_s, strict=True) if time_s <= longest_s))


PLANNERS: Mapping[str, Planner] = {
    "wfbp": wfbp,
    "ddp": ddp,
    "horovod": horovod,
    "mg-wfbp": mg_wfbp,
    "bytescheduler": bytescheduler,
    "dear": dear,
    "dear-fill": dear_fill,
}
NEEDS_TIMES = frozenset({"horovod", "mg-wfbp", "bytescheduler", "dear-fill"})


def _specs(profile: Profile, params: Sequence[ParamSpec] | None) -> list[ParamSpec]:
    return profile.specs() if params is None else profile.order(params)


def _need_times(profile: Profile, name: str) -> None:
    if profile.tb_s <= 0:
        raise ArgumentError(f"'{name}' plans with measured times, and this profile has none. Measure the model first.")


def _reduced_whole(plan: Plan, name: str) -> Planned:
    return _checked(plan, plan_all_reduce(plan, name, step=True))


def _checked(plan: Plan, schedule: Schedule) -> Planned:
    schedule.check_fits(plan)
    return plan, schedule


def _counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, ...: a few numbers up to `most`."""
    counts = {round(2 ** (i / 2)) for i in range(2 * max(most, 1).bit_length() + 2)}
    return sorted({count for count in counts if count <= most} | ({most} if most > 0 else set()))


def _fill(profile: Profile, plan: Plan, num_early: int) -> Schedule:
    """Places all-gathers of the `num_early` last buckets where no reduction that matters has to wait for them."""
    position_of = {layer.fqn: position for position, layer in enumerate(profile.layers)}
    ready_s = profile.ready_s()
    order = [bucket.index for bucket in reversed(plan.buckets)]
    is_ready_s = [max(ready_s[position_of[slot.fqn]] for slot in bucket.slots) for bucket in plan.buckets]
    reduce_s = [profile.reduce_scatter.time_s(bucket.num_bytes) for bucket in plan.buckets]
    end_s = 0.0
    for index in order:
        end_s = max(end_s, is_ready_s[index]) + reduce_s[index]
    latest_s = [0.0] * len(order)  # start of each reduction that leaves the end of the last one where it is
    for index in reversed(order):
        end_s -= reduce_s[index]
        latest_s[index] = end_s
    early: dict[int, list[int]] = {}  # after which reduction which buckets are gathered
    pending: list[tuple[int, float]] = []  # bucket, end of its step
    network_s = step_s = 0.0
    for index, following in itertools.pairwise(order):
        network_s = max(network_s, is_ready_s[index]) + reduce_s[index]
        if index >= len(order) - num_early:
            bucket = plan.buckets[index]
            step_s = max(step_s, network_s) + bucket.num_bytes / bucket.num_shards * profile.step_s_per_byte
            pending.append((index, step_s))
        while pending:
            bucket_index, stepped_s = pending[0]
            gathered_s = max(network_s, stepped_s) + profile.all_gather.time_s(plan.buckets[bucket_index].num_bytes)
            if gathered_s > latest_s[following]:
                break
            early.setdefault(index, []).append(pending.pop(0)[0])
            network_s = gathered_s
    inside = {bucket for buckets in early.values() for bucket in buckets}
    ops: list[Op] = []
    for index in order:
        ops.append(Op(OpKind.REDUCE_SCATTER, index, After.GRAD_READY))
        if index in inside:
            ops.append(Op(OpKind.STEP, index, After.DONE))
        ops += [Op(OpKind.ALL_GATHER, bucket, After.DONE) for bucket in early.get(index, ())]
    for bucket in plan.buckets:
        if bucket.index not in inside:
            ops.append(Op(OpKind.STEP, bucket.index, After.BACKWARD_END))
            ops.append(Op(OpKind.ALL_GATHER, bucket.index, After.DONE))
    return Schedule("dear-fill" if inside else "dear", tuple(ops))

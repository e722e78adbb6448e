"""Planners: each rule against an example worked by hand, every schedule against the scheduler that runs it.

Cannot see: whether a real network behaves as the profile says.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dear.scheduler import Scheduler
from dearcore import planners
from dearcore.errors import ArgumentError
from dearcore.layout import NearbyLayers, ParamSpec, Plan, plan_threshold
from dearcore.merging import merge_for_dear, merged_layers, plan_groups
from dearcore.planners import MERGE, NEEDS_TIMES, PLANNERS
from dearcore.predict import predict, predict_iteration_s
from dearcore.profile import LayerTime, Link, Profile, dear_bound_s, dear_fill_bound_s, wfbp_bound_s
from dearcore.schedule import After, Op, OpKind, Schedule, plan_all_reduce, plan_dear

FREE = Link(0.0, 0.0)
MIB = 1024 * 1024


def profile_of(
    numels: Sequence[int],
    backward_s: Sequence[float],
    forward_s: Sequence[float] | None = None,
    alpha_s: float = 0.0,
    beta_s_per_element: float = 0.0,
    world_size: int = 2,
) -> Profile:
    """fp32 layers. Latency and time per element of an all-reduce; each half costs half of it."""
    forward_s = forward_s or [0.0] * len(numels)
    layers = tuple(
        LayerTime(f"layer{i}.weight", (numel,), torch.float32, f, b)
        for i, (numel, f, b) in enumerate(zip(numels, forward_s, backward_s, strict=True))
    )
    half = Link(alpha_s / 2, beta_s_per_element / 8)
    return Profile(layers, world_size, half, half, Link(alpha_s, beta_s_per_element / 4))


def tensors(plan: Plan) -> list[list[int]]:
    """The parameters of each bucket."""
    return [[slot.param for slot in bucket.slots] for bucket in plan.buckets]


def ops(schedule: Schedule) -> str:
    short = {"reduce_scatter": "rs", "all_gather": "ag", "all_reduce": "ar", "step": "step"}
    return " ".join(f"{short[op.kind.value]}{op.bucket}" for op in schedule.ops)


times = st.floats(0, 3, allow_nan=False)
profiles = st.builds(
    lambda rows, alpha, beta, world_size, step, host: replace(
        profile_of([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], alpha, beta, world_size),
        step_s_per_byte=step,
        host_s_per_op=host,
    ),
    st.lists(st.tuples(st.integers(0, 60), st.floats(1e-3, 3), times), min_size=1, max_size=12),
    st.floats(0, 1),
    st.floats(0, 0.2),
    st.integers(1, 5),
    st.floats(0, 0.01),
    st.floats(0, 0.01),
)


# --- each rule by hand ------------------------------------------------------------------------------------------------


def test_wfbp_reduces_each_tensor() -> None:
    plan, schedule = planners.wfbp(profile_of([5, 6, 7], [1, 1, 1]))
    assert (tensors(plan), plan.num_shards) == ([[0], [1], [2]], 1)
    assert ops(schedule) == "ar2 ar1 ar0 step0 step1 step2"


def test_the_example_of_merged_layers() -> None:
    """Ready at 1, 1.5 and 4 s; see its docstring."""
    profile = profile_of([1, 1, 1], [2.5, 0.5, 1.0], alpha_s=1.0)
    assert merged_layers(profile) == [[2, 1], [0]]
    plan, schedule = planners.mg_wfbp(profile)
    assert tensors(plan) == [[0], [1, 2]]
    assert ops(schedule) == "ar1 ar0 step0 step1"


@pytest.mark.parametrize(
    ("alpha_s", "expected"),
    [
        # Ready at 1, 2, 3, 6 s; four elements, 0.5 s each.
        # No latency: 3 runs 1 to 1.5, 2 runs 2 to 2.5, 1 runs 3 to 3.5, 0 runs 6 to 6.5: nothing waits.
        (0.0, [[3], [2], [1], [0]]),
        # 0.6 s: 3 would run 1 to 2.1; 2 is ready at 2, but waiting 1 s costs more than 0.6. It runs 2.1 to 3.2; 1 is
        # ready at 3, waiting 0.9 s. It runs 3.2 to 4.3.
        (0.6, [[3], [2], [1], [0]]),
        # 1.2 s: 3 would run 1 to 2.7; waiting 1 s for 2 costs less than 1.2. Both would run 2 to 4.2; so for 1. All
        # three would run 3 to 5.7: 0 comes later.
        (1.2, [[3, 2, 1], [0]]),
        # 1.6 s: the same three would run 3 to 6.1, but waiting 3 s for 0 costs more than 1.6.
        (1.6, [[3, 2, 1], [0]]),
        (3.5, [[3, 2, 1, 0]]),
    ],
)
def test_mg_wfbp_merges_by_the_published_rule(alpha_s: float, expected: list[list[int]]) -> None:
    assert merged_layers(profile_of([1, 1, 1, 1], [3, 1, 1, 1], None, alpha_s, 0.5)) == expected


def test_mg_wfbp_merges_what_queues_behind_a_slow_network() -> None:
    """Layer 2 runs 1 to 11 s. 1 is ready at 2, could start at 11 and so takes 0 (ready at 3) along."""
    assert merged_layers(profile_of([1, 1, 10], [1, 1, 1], None, 0.0, 1.0)) == [[2], [1, 0]]


def test_ddp_closes_the_first_bucket_early() -> None:
    """Backwards: 0.5 + 0.75 MiB reach 1; 20 + 10 reach 25; 3 are left."""
    quarter = MIB // 16
    profile = profile_of([12 * quarter, 40 * quarter, 80 * quarter, 3 * quarter, 2 * quarter], [1] * 5)
    plan, schedule = planners.ddp(profile)
    assert tensors(plan) == [[0], [1, 2], [3, 4]]
    assert ops(schedule) == "ar2 ar1 ar0 step0 step1 step2"


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.bfloat16])), min_size=1, max_size=25),
    st.integers(1, 100),
    st.integers(1, 300),
)
def test_ddp_fills_as_torch_does(rows: list[tuple[int, torch.dtype]], first_bytes: int, other_bytes: int) -> None:
    layers = tuple(LayerTime(f"p{i}", (n,), dtype, 0.0, 0.0) for i, (n, dtype) in enumerate(rows))
    plan, _ = planners.ddp(
        Profile(layers, 2, FREE, FREE, FREE), bucket_bytes=other_bytes, first_bucket_bytes=first_bytes
    )
    backwards = [torch.empty(n, dtype=dtype) for n, dtype in reversed(rows)]
    buckets, _ = dist._compute_bucket_assignment_by_size(backwards, [first_bytes, other_bytes])
    expected = sorted(sorted(len(rows) - 1 - i for i in bucket) for bucket in buckets)
    assert sorted(tensors(plan)) == expected


def test_horovod_reduces_what_a_cycle_finds() -> None:
    """Cycles of 1 s, one element takes 0.75 s. Ready: layer 4 at 0.5, 3 at 0.9, 2 at 1.5, 1 at 2.2, 0 at 4.6.

    The thread wakes at 1 with 4 and 3, is busy until 2.5, finds 2 and 1 at once, is busy until 4, wakes at 5 with 0.
    """
    profile = profile_of([1] * 5, [2.4, 0.7, 0.6, 0.4, 0.5], beta_s_per_element=0.75)
    plan, schedule = planners.horovod(profile, cycle_s=1.0)
    assert tensors(plan) == [[0], [1, 2], [3, 4]]
    assert ops(schedule) == "ar2 ar1 ar0 step0 step1 step2"
    small, _ = planners.horovod(profile, cycle_s=1.0, fusion_bytes=7)
    assert tensors(small) == [[0], [1], [2], [3], [4]]


def test_bytescheduler_lets_the_first_layers_overtake() -> None:
    """16 elements take 4 s, and are the credit and the largest part. Layer 2 (64 elements, 4 parts: buckets 2 to 5) is
    ready at 1 s: one part is on its way until 5 s. At 2 and 3 s layers 1 and 0 are ready: at 5 s layer 0 goes, then
    layer 1 (both fit the credit), then the other parts.
    """
    profile = profile_of([1, 2, 64], [1, 1, 1], beta_s_per_element=0.25)
    plan, schedule = planners.bytescheduler(profile, partition_numel=16, credit_numel=16)
    assert tensors(plan) == [[0], [1], [2], [2], [2], [2]]
    assert ops(schedule) == "ar2 ar0 ar1 ar3 ar4 ar5 step2 step0 step1 step3 step4 step5"
    _, eager = planners.bytescheduler(profile, partition_numel=16, credit_numel=1000)
    assert ops(eager).startswith("ar2 ar3 ar4 ar5 ar1 ar0")  # all was handed over at once


def test_dear_takes_every_fusion() -> None:
    profile = profile_of([MIB, MIB, MIB, MIB], [1] * 4)
    for fusion, expected in (
        (None, [[0], [1], [2], [3]]),
        (8.0, [[0, 1], [2, 3]]),
        (NearbyLayers(3), [[0, 1, 2], [3]]),
        (plan_threshold(profile.specs(), 2, 4 * MIB), [[0], [1], [2], [3]]),
        (MERGE, [[0, 1, 2, 3]]),  # nothing is gained by more messages where they take no time
    ):
        plan, schedule = planners.dear(profile, fusion=fusion)
        assert (tensors(plan), plan.num_shards) == (expected, 2)
        assert schedule == plan_dear(plan)
    for wrong in ("auto", 0, -1.0):
        with pytest.raises(ArgumentError, match=r"expected MiB a bucket .* or 'merge'"):
            planners.dear(profile, fusion=wrong)


def test_merging_weighs_latency_against_waiting() -> None:
    """With a latency above everything else one bucket is best; with none and a full network, one a tensor."""
    numels, layer_s = [100] * 6, [1.0] * 6
    for alpha_s, beta_s, num_buckets in ((50.0, 1e-3, 1), (0.0, 2e-2, 6)):
        profile = profile_of(numels, layer_s, layer_s, alpha_s, beta_s)
        assert len(merge_for_dear(profile, profile.specs()).buckets) == num_buckets


def test_merging_cuts_an_embedding_where_that_pays() -> None:
    """The first layer has 4 MiB, reduced last and gathered first: its step can run only under what is left of it.

    Whole: backward ends at 0.3 s, reduced at 4.3, stepped at 8.3, gathered at 12.3. Cut in 8, of 0.5 s for each half,
    the parts are reduced until 4.3, stepped from 0.8 to 4.8, and gathered until 8.8 at the latest.
    """
    numels, layer_s = [MIB, 100, 100], [0.1] * 3
    for alpha_s, largest in ((1e-3, MIB // 8), (1e4, MIB + 200)):
        profile = replace(profile_of(numels, layer_s, layer_s, alpha_s, 8 / MIB), step_s_per_byte=2 / MIB)
        plan = merge_for_dear(profile, profile.specs())
        assert max(bucket.numel for bucket in plan.buckets) == pytest.approx(largest, abs=8)


@settings(max_examples=25, deadline=None)
@given(profiles)
def test_merged_is_never_worse_than_a_fixed_size(profile: Profile) -> None:
    """Each bucket counts as a four-thousandth of the iteration."""
    costs_s = []
    for fusion in (MERGE, None, 25.0):
        plan, schedule = planners.dear(profile, fusion=fusion)
        costs_s.append(predict_iteration_s(profile, plan, schedule) * (1 + 2.5e-4 * len(plan.buckets)))
    assert costs_s[0] <= min(costs_s[1:]) * (1 + 1e-6)


def test_merged_has_few_buckets_where_the_network_idles() -> None:
    """Eighty layers of 1 ms, links that carry everything in a tenth of the backward and without latency.

    A bucket a layer and one tensor less at the end of the backward differ by microseconds; the first bucket, which
    nothing hides, is still a small one.
    """
    profile = profile_of([1000] * 80, [1e-3] * 80, [5e-4] * 80, 0.0, 8e-3 / 80_000)
    plan = merge_for_dear(profile, profile.specs())
    assert 2 <= len(plan.buckets) <= 8
    assert plan.buckets[0].numel <= 10_000


def test_dear_fill_uses_idle_time_in_the_backward() -> None:
    """Three layers, 3 s of backward each, both halves of a layer take 1 s each.

    Reduce-scatters run 3 to 4, 6 to 7, 9 to 10. The last one must not move, so an all-gather may end by 8 after the
    first and by 9 after the second: 4 to 5 and 7 to 8. Left is layer 0: 10 to 11. dear gathers until 13.
    """
    profile = profile_of([1, 1, 1], [3, 3, 3], [0.1] * 3, 0.0, 2.0)
    plan, schedule = planners.dear_fill(profile, fusion=None)
    assert ops(schedule) == "rs2 step2 ag2 rs1 step1 ag1 rs0 step0 ag0"
    inside = [op.after for op in schedule.ops if op.kind is OpKind.STEP]
    assert inside == [After.DONE, After.DONE, After.BACKWARD_END]
    assert schedule.name == "dear-fill"
    assert predict_iteration_s(profile, plan, schedule) == pytest.approx(11.3)
    assert predict_iteration_s(profile, plan, plan_dear(plan)) == pytest.approx(13.1)


def test_of_equally_good_schedules_dear_fill_bears_slower_links_best() -> None:
    """As above with a forward of 1 s a layer, under which dear's gathers just fit: 14 s, filled or not.

    With links a quarter slower dear takes 10.25 + 1.25 s to the first layer; gathers of the others end at 12.75 and 14
    s, so that the last layer ends at 15 s. With the others gathered in the backward it ends at 14.5 s.
    """
    profile = profile_of([1, 1, 1], [3, 3, 3], [1, 1, 1], 0.0, 2.0)
    plan, schedule = planners.dear_fill(profile, fusion=None)
    assert ops(schedule) == "rs2 step2 ag2 rs1 step1 ag1 rs0 step0 ag0"
    slower = replace(profile, reduce_scatter=profile.reduce_scatter.slower(1.25), all_gather=Link(0.0, 1.25 / 4))
    for each, filled_s, plain_s in ((profile, 14, 14), (slower, 14.5, 15)):
        assert predict_iteration_s(each, plan, schedule) == pytest.approx(filled_s)
        assert predict_iteration_s(each, plan, plan_dear(plan)) == pytest.approx(plain_s)


def test_dear_fill_is_dear_where_the_network_never_idles() -> None:
    profile = profile_of([1, 1, 1], [3, 3, 3], [0.1] * 3, 0.0, 10.0)
    plan, schedule = planners.dear_fill(profile, fusion=None)
    assert schedule == plan_dear(plan)


@settings(max_examples=50, deadline=None)
@given(profiles)
def test_dear_fill_is_never_worse_and_delays_no_last_reduction(profile: Profile) -> None:
    plain, filled = planners.dear(profile, fusion=None), planners.dear_fill(profile, fusion=None)
    assert predict_iteration_s(profile, *filled) <= predict_iteration_s(profile, *plain) * (1 + 1e-9)
    if profile.host_s_per_op == 0:
        ends = [
            max(s.end_s for s in predict(profile, *planned).spans if s.name.startswith("reduce_scatter"))
            - max(s.end_s for s in predict(profile, *planned).spans if s.lane == "backward")
            for planned in (plain, filled)
        ]
        assert ends[1] <= ends[0] + 1e-9


# --- what every planner promises --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=25, deadline=None)
@given(profile=profiles)
def test_every_planner_places_everything_and_respects_its_bound(name: str, profile: Profile) -> None:
    plan, schedule = PLANNERS[name](profile)
    plan.check_fits(profile.specs(), profile.world_size if name.startswith("dear") else 1)
    schedule.check_fits(plan)
    bound = {"bytescheduler": dear_fill_bound_s, "dear": dear_bound_s, "dear-fill": dear_fill_bound_s}
    iteration_s = predict_iteration_s(profile, plan, schedule)
    assert iteration_s >= bound.get(name, wfbp_bound_s)(profile) * (1 - 1e-6)
    assert run_scheduler(plan, schedule, random.Random(0)) == list(schedule.ops)


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_take_the_numbers_of_the_optimizer(name: str) -> None:
    profile = profile_of([4, 5, 6], [1, 1, 1], [1, 1, 1], 0.1, 0.1)
    params = [ParamSpec(7 - i, f"layer{i}.weight", (4 + i,), torch.float32) for i in (2, 0, 1)]
    plan, _ = PLANNERS[name](profile, params)
    assert [i for bucket in tensors(plan) for i in bucket] == [7, 6, 5]
    with pytest.raises(ArgumentError, match="does not train"):
        PLANNERS[name](profile, params[1:])


@pytest.mark.parametrize("name", PLANNERS)
def test_only_planners_that_read_times_need_them(name: str) -> None:
    profile = Profile.from_shapes(profile_of([4, 5, 6], [1, 1, 1]).specs(), 2)
    if name in NEEDS_TIMES:
        with pytest.raises(ArgumentError, match="Measure the model first"):
            PLANNERS[name](profile)
    else:
        PLANNERS[name](profile)


def test_the_same_profile_gives_the_same_plan() -> None:
    profile = profile_of(list(range(1, 30)), [0.1] * 29, [0.1] * 29, 0.05, 0.01)
    for planner in PLANNERS.values():
        assert planner(profile) == planner(profile)
    assert merge_for_dear(profile, profile.specs()) == merge_for_dear(profile, profile.specs())


def test_groups_keep_dtypes_apart() -> None:
    specs = [
        ParamSpec(0, "a", (4,), torch.float32),
        ParamSpec(1, "b", (4,), torch.bfloat16),
        ParamSpec(2, "c", (100,), torch.float32),
    ]
    plan = plan_groups(specs, 2, [[0, 1], [2]], "by hand", split_bytes=256)
    assert tensors(plan) == [[0], [1], [2], [2]]
    plan.check_fits(specs, 2)


# --- the checker ------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.ops: list[Op] = []

    def launch(self, op: Op) -> None:
        self.ops.append(op)

    def launch_late(self, late: Collection[int]) -> None:
        assert not late


def run_scheduler(plan: Plan, schedule: Schedule, order: random.Random) -> list[Op]:
    """One iteration of the real scheduler with gradients in any order; raises AssertionError if it is not right."""
    recorder = Recorder()
    scheduler = Scheduler(plan, schedule, recorder)
    arrivals = sorted(scheduler.buckets_of)
    order.shuffle(arrivals)
    arrived: set[int] = set()
    for param in arrivals:
        arrived.add(param)
        before = len(recorder.ops)
        scheduler.grad_ready(param)
        for op in recorder.ops[before:]:
            if op.kind.is_reduction:
                assert {slot.param for slot in plan.buckets[op.bucket].slots} <= arrived
    scheduler.finish_gradients()
    reduced = [op.bucket for op in recorder.ops if op.kind.is_reduction]
    assert sorted(reduced) == list(range(len(plan.buckets))), "a bucket is not reduced when clipping begins"
    scheduler.finish_step()
    for bucket in range(len(plan.buckets)):
        kinds = [op.kind for op in recorder.ops if op.bucket == bucket]
        whole = [OpKind.ALL_REDUCE], [OpKind.ALL_REDUCE, OpKind.STEP]
        assert kinds == [OpKind.REDUCE_SCATTER, OpKind.STEP, OpKind.ALL_GATHER] or kinds in whole
    assert len({op.kind for op in recorder.ops if op.kind.is_reduction}) == 1
    assert len({op.bucket for op in recorder.ops if op.kind is OpKind.STEP}) in (0, len(plan.buckets))
    return recorder.ops


@settings(max_examples=300)
@given(st.integers(1, 3), st.sampled_from(["dear", "dear-fill", "all-reduce", "whole"]), st.data())
def test_what_the_checker_lets_pass_runs_right(num_buckets: int, kind: str, data: st.DataObject) -> None:
    """A few changes to a right schedule: either the checker objects, or the scheduler does all that it should."""
    profile = profile_of([4] * num_buckets, [3] * num_buckets, [0.1] * num_buckets, 0.0, 0.2)
    plan = plan_threshold(profile.specs(), 2 if kind.startswith("dear") else 1, 16)
    if kind == "dear-fill":
        schedule = planners.dear_fill(profile, fusion=16 / MIB)[1]
    else:
        schedule = plan_dear(plan) if kind == "dear" else plan_all_reduce(plan, kind, step=kind == "all-reduce")
    changed = list(schedule.ops)
    for _ in range(data.draw(st.integers(0, 3))):
        position = data.draw(st.integers(0, len(changed) - 1))
        match data.draw(st.sampled_from(["move", "after", "kind", "drop", "twice"])):
            case "move":
                changed.insert(data.draw(st.integers(0, len(changed) - 1)), changed.pop(position))
            case "after":
                changed[position] = replace(changed[position], after=data.draw(st.sampled_from(After)))
            case "kind":
                changed[position] = replace(changed[position], kind=data.draw(st.sampled_from(OpKind)))
            case "drop" if len(changed) > 1:
                changed.pop(position)
            case _:
                changed.append(changed[position])
    candidate = Schedule("changed", tuple(changed))
    try:
        candidate.check_fits(plan)
    except ArgumentError:
        assert candidate != schedule
    else:
        for seed in range(3):
            assert run_scheduler(plan, candidate, random.Random(seed)) == changed


def test_the_checker_names_the_first_violation() -> None:
    plan = plan_threshold(profile_of([4, 4], [1, 1]).specs(), 2, 16)
    whole = plan_threshold(profile_of([4, 4], [1, 1]).specs(), 1, 16)
    right = plan_dear(plan).ops  # rs1 rs0 step0 ag0 step1 ag1
    reduced = plan_all_reduce(whole, "", step=True).ops  # ar1 ar0 step0 step1
    late = Op(OpKind.REDUCE_SCATTER, 1, After.BACKWARD_END)
    for broken, on, match in (
        (right[:-1], plan, r"bucket 1 .*: reduce_scatter, step; expected"),
        ((late, *right[1:]), plan, r"op 0: reduce_scatter\[1\] waits for 'backward_end'; expected 'grad_ready'"),
        ((*right[1:4], right[0], *right[4:]), plan, r"op 3: reduce_scatter\[1\] stands behind step\[0\]"),
        (
            (*right[:3], replace(right[3], after=After.GRAD_READY), *right[4:]),
            plan,
            r"op 3: all_gather\[0\] waits for gradients, which its reduction has done already",
        ),
        (reduced[:-1], whole, r"steps bucket 0 but not bucket 1; expected all or none"),
        (
            (reduced[0], right[1], *right[2:4], reduced[3]),
            whole,
            r"op 1: reduce_scatter\[0\] stands beside all_reduces",
        ),
        (
            (*reduced[:2], replace(reduced[2], after=After.DONE), reduced[3]),
            whole,
            r"op 2: step\[0\] would step inside the backward without anything to gather",
        ),
    ):
        with pytest.raises(ArgumentError, match=match):
            Schedule("broken", tuple(broken)).check_fits(on)


@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=20, deadline=None)
@given(profile=profiles)
def test_lanes_do_one_thing_at_a_time_and_nothing_is_used_too_early(name: str, profile: Profile) -> None:
    plan, schedule = PLANNERS[name](profile)
    prediction = predict(profile, plan, schedule, num_spanned=2)
    spans = prediction.spans
    for lane in ({"forward", "backward"}, {"network"}, {"step"}):
        mine = [span for span in spans if span.lane in lane]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(mine))
    second = spans[len(spans) // 2 :]
    last = "all_gather" if name.startswith("dear") else "step"
    fresh = {span.name: span.end_s for span in spans[: len(spans) // 2]}
    for bucket in plan.buckets:
        for slot in bucket.slots:
            (use,) = [span for span in second if (span.lane, span.name) == ("forward", slot.fqn)]
            assert fresh[f"{last}[{bucket.index}]"] <= use.start_s + 1e-9
    assert prediction.exposed_s >= -1e-9

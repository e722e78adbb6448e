"""Schedules as data: what `plan_dear` orders, and what no plan accepts.

Cannot see: whether the launched work overlaps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dearcore.errors import ArgumentError
from dearcore.layout import ParamSpec, Plan, plan_unfused
from dearcore.schedule import After, OpKind, Schedule, plan_all_reduce, plan_dear


def plan_of(num_buckets: int, num_shards: int = 2) -> Plan:
    specs = [ParamSpec(i, f"layer{i}.weight", (3,), torch.float32) for i in range(num_buckets)]
    return plan_unfused(specs, num_shards)


def test_dear_reduces_backwards_and_gathers_forwards() -> None:
    schedule = plan_dear(plan_of(3))
    assert [str(op) for op in schedule.ops] == [
        "reduce_scatter[2]",
        "reduce_scatter[1]",
        "reduce_scatter[0]",
        "step[0]",
        "all_gather[0]",
        "step[1]",
        "all_gather[1]",
        "step[2]",
        "all_gather[2]",
    ]
    assert {op.after for op in schedule.ops if op.kind is OpKind.REDUCE_SCATTER} == {After.GRAD_READY}
    assert {op.after for op in schedule.ops if op.kind is OpKind.STEP} == {After.BACKWARD_END}


def test_all_reduces_run_backwards_and_steps_forwards() -> None:
    stepped = plan_all_reduce(plan_of(2, 1), "ddp", step=True)
    assert [str(op) for op in stepped.ops] == ["all_reduce[1]", "all_reduce[0]", "step[0]", "step[1]"]
    whole = plan_all_reduce(plan_of(2, 1), "whole", step=False)
    assert [str(op) for op in whole.ops] == ["all_reduce[1]", "all_reduce[0]"]
    assert {op.after for op in whole.ops} == {After.GRAD_READY}
    assert [kind for kind in OpKind if kind.is_reduction] == [OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE]


@pytest.mark.parametrize("num_buckets", [1, 2, 7])
def test_schedules_fit_their_plan(num_buckets: int) -> None:
    plan, whole = plan_of(num_buckets), plan_of(num_buckets, num_shards=1)
    for schedule in (
        plan_dear(plan),
        plan_dear(whole),
        *(plan_all_reduce(whole, "ddp", step) for step in (True, False)),
    ):
        schedule.check_fits(plan if schedule.ops[0].kind is OpKind.REDUCE_SCATTER else whole)
        assert {op.bucket for op in schedule.ops} == set(range(num_buckets))
        assert len(set(schedule.ops)) == len(schedule.ops)


def test_a_schedule_prints_one_op_a_line() -> None:
    lines = str(plan_dear(plan_of(2))).splitlines()
    assert lines[0] == "schedule: dear, 6 ops"
    assert len(lines) == 7
    assert lines[1].split() == ["reduce_scatter", "bucket", "1", "after", "grad_ready"]


def test_what_does_not_fit_is_refused_and_named() -> None:
    plan = plan_of(2)
    ops = plan_dear(plan).ops
    for broken, match in (
        (ops[1:], r"bucket 1 \(layer1\.weight\): step, all_gather; expected"),
        (ops[:-1], r"bucket 1 \(layer1\.weight\): reduce_scatter, step; expected"),
        ((*ops, ops[0]), r"bucket 1 \(layer1\.weight\)"),
        ((*ops[:2], ops[3], ops[2], *ops[4:]), r"bucket 0 \(layer0\.weight\): reduce_scatter, all_gather, step"),
        ((*ops, replace(ops[0], bucket=5)), "names bucket 5; the plan has 2"),
        ((), "bucket 0.*nothing"),
    ):
        with pytest.raises(ArgumentError, match=match):
            Schedule("broken", tuple(broken)).check_fits(plan)


def test_a_bucket_that_is_cut_into_shards_cannot_be_reduced_whole() -> None:
    plan = plan_of(1, num_shards=2)
    with pytest.raises(ArgumentError, match=r"reduces bucket 0 whole.*2 shards"):
        plan_all_reduce(plan, "ddp", step=True).check_fits(plan)


def test_a_schedule_survives_json() -> None:
    for schedule in (plan_dear(plan_of(3)), plan_all_reduce(plan_of(2, 1), "ddp", step=True)):
        assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"name": "x", "ops": [["fly", 0, "done"]]}', '{"name": "x", "ops": [["step", 0]]}'],
)
def test_other_json_is_no_schedule(text: str) -> None:
    with pytest.raises(ArgumentError, match="expected the JSON of a schedule"):
        Schedule.from_json(text)

"""The scheduler with a launcher that only writes down what it is told: the order is all there is.

Cannot see: streams, buffers, what other ranks do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dear.scheduler import Scheduler
from dearcore.layout import ParamSpec, Plan, plan_nearby_layers, plan_threshold, plan_unfused
from dearcore.schedule import Op, OpKind, Schedule, plan_all_reduce, plan_dear

SHORT = {OpKind.REDUCE_SCATTER: "rs", OpKind.ALL_REDUCE: "ar", OpKind.ALL_GATHER: "ag", OpKind.STEP: "step"}


class Recorder:
    """What a Replica does, on paper."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_asked = 0

    def launch(self, op: Op) -> None:
        self.calls.append(f"{SHORT[op.kind]} {op.bucket}")

    def launch_late(self, late: Collection[int]) -> None:
        """Every rank is asked at the end of every backward; what has nothing to say is not written down."""
        self.num_asked += 1
        if late:
            self.calls.append(f"late {sorted(late)}")

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def specs(num_params: int, shape: tuple[int, ...] = (3,)) -> list[ParamSpec]:
    return [ParamSpec(i, f"layer{i // 2}.{'wb'[i % 2]}", shape, torch.float32) for i in range(num_params)]


def make(plan: Plan, schedule: Schedule | None = None, observing: bool = False) -> tuple[Scheduler, Recorder]:
    recorder = Recorder()
    return Scheduler(plan, schedule or plan_dear(plan), recorder, observing), recorder


STEP_3 = ["step 0", "ag 0", "step 1", "ag 1", "step 2", "ag 2"]


def test_one_iteration() -> None:
    scheduler, recorder = make(plan_unfused(specs(3), 2))
    seen = []
    for param in (2, 1, 0):
        scheduler.grad_ready(param)
        seen.append(recorder.take())
    assert seen == [["rs 2"], ["rs 1"], ["rs 0"]]
    scheduler.finish_gradients()
    assert recorder.take() == []
    assert recorder.num_asked == 1, "other ranks may have gradients that came late"
    scheduler.finish_step()
    assert recorder.take() == STEP_3


@pytest.mark.parametrize("arrivals", list(itertools.permutations(range(3))))
def test_the_order_of_arrival_does_not_matter(arrivals: tuple[int, ...]) -> None:
    scheduler, recorder = make(plan_unfused(specs(3), 2))
    for param in arrivals:
        scheduler.grad_ready(param)
    scheduler.finish_gradients()
    scheduler.finish_step()
    assert recorder.calls == ["rs 2", "rs 1", "rs 0", *STEP_3]


def test_an_early_bucket_waits_for_its_turn() -> None:
    scheduler, recorder = make(plan_unfused(specs(3), 2))
    scheduler.grad_ready(0)
    scheduler.grad_ready(1)
    assert recorder.take() == []
    scheduler.grad_ready(2)
    assert recorder.take() == ["rs 2", "rs 1", "rs 0"]


def test_a_bucket_leaves_with_its_last_gradient() -> None:
    scheduler, recorder = make(plan_nearby_layers(specs(4), 2, 1))
    scheduler.grad_ready(2)
    assert recorder.take() == []
    scheduler.grad_ready(3)
    assert recorder.take() == ["rs 1"]
    assert scheduler.is_reduced(2)
    assert not scheduler.is_reduced(1)


def test_a_gradient_that_rings_twice_before_its_bucket_leaves_counts_once() -> None:
    scheduler, recorder = make(plan_nearby_layers(specs(2), 2, 1))
    scheduler.grad_ready(1)
    scheduler.grad_ready(1)
    assert recorder.take() == []
    assert scheduler.late == set()
    scheduler.grad_ready(0)
    assert recorder.take() == ["rs 0"]


def test_missing_gradients_are_launched_at_the_end_of_the_backward() -> None:
    scheduler, recorder = make(plan_unfused(specs(3), 2))
    scheduler.grad_ready(1)
    scheduler.finish_gradients()
    assert recorder.take() == ["rs 2", "rs 1", "rs 0"]
    scheduler.finish_step()
    assert recorder.take() == STEP_3


def test_a_step_without_a_backward_launches_everything_all_the_same() -> None:
    scheduler, recorder = make(plan_unfused(specs(2), 2))
    assert not scheduler.has_begun
    scheduler.finish_gradients()
    scheduler.finish_step()
    assert recorder.take() == ["rs 1", "rs 0", "step 0", "ag 0", "step 1", "ag 1"]


def test_a_gradient_that_comes_late_makes_its_bucket_late_once() -> None:
    scheduler, recorder = make(plan_unfused(specs(3), 2))
    for param in (2, 1, 2, 2):
        scheduler.grad_ready(param)
    assert scheduler.late == {2}
    assert recorder.take() == ["rs 2", "rs 1"]
    scheduler.finish_gradients()
    assert recorder.take() == ["rs 0", "late [2]"]
    scheduler.finish_gradients()
    assert recorder.take() == []
    scheduler.finish_step()
    assert recorder.take() == STEP_3


def test_a_gradient_after_finish_gradients_needs_a_further_round() -> None:
    scheduler, recorder = make(plan_unfused(specs(2), 2))
    scheduler.finish_gradients()
    recorder.take()
    scheduler.grad_ready(0)
    assert scheduler.late == {0}
    scheduler.finish_gradients()
    assert recorder.take() == ["late [0]"]


def test_an_assigned_gradient_is_late_only_where_its_bucket_has_left() -> None:
    scheduler, recorder = make(plan_unfused(specs(2), 2))
    scheduler.mark_late(0)
    assert scheduler.late == set()
    scheduler.grad_ready(1)
    scheduler.mark_late(1)
    scheduler.finish_gradients()
    assert recorder.take() == ["rs 1", "rs 0", "late [1]"]


def test_the_parts_of_a_split_tensor_ring_together() -> None:
    plan = plan_threshold(specs(2, (96,)), 2, 32 * 4)
    scheduler, recorder = make(plan)
    assert scheduler.buckets_of == {0: (0, 1, 2), 1: (3, 4, 5)}
    scheduler.grad_ready(1)
    assert recorder.take() == ["rs 5", "rs 4", "rs 3"]
    scheduler.grad_ready(1)
    assert scheduler.late == {3, 4, 5}
    scheduler.grad_ready(0)
    assert recorder.take() == ["rs 2", "rs 1", "rs 0"]


def test_restart_forgets_an_iteration_that_had_no_step() -> None:
    scheduler, recorder = make(plan_unfused(specs(2), 2))
    scheduler.grad_ready(1)
    scheduler.grad_ready(1)
    scheduler.restart()
    assert (scheduler.late, scheduler.has_begun, scheduler.is_reduced(1)) == (set(), False, False)
    recorder.take()
    scheduler.grad_ready(1)
    scheduler.grad_ready(0)
    assert recorder.take() == ["rs 1", "rs 0"]


def test_every_iteration_is_alike() -> None:
    scheduler, recorder = make(plan_unfused(specs(2), 2))
    rounds = []
    for arrivals in ((1, 0), (0, 1), (1,), ()):
        for param in arrivals:
            scheduler.grad_ready(param)
        assert scheduler.has_begun == bool(arrivals)
        scheduler.finish_gradients()
        scheduler.finish_step()
        rounds.append(recorder.take())
    assert rounds == [["rs 1", "rs 0", "step 0", "ag 0", "step 1", "ag 1"]] * 4


def test_while_observing_nothing_leaves_and_the_order_is_kept() -> None:
    scheduler, recorder = make(plan_unfused(specs(3), 2), observing=True)
    for param in (1, 2, 1, 0):
        scheduler.grad_ready(param)
    assert recorder.take() == []
    assert scheduler.order == [1, 2, 0]
    assert scheduler.late == set()
    scheduler.finish_gradients()
    assert recorder.take() == ["rs 2", "rs 1", "rs 0"]
    assert not scheduler.observing
    scheduler.finish_step()
    assert recorder.take() == STEP_3
    scheduler.grad_ready(2)
    assert recorder.take() == ["rs 2"]


def test_observing_survives_a_restart() -> None:
    scheduler, recorder = make(plan_unfused(specs(2), 2), observing=True)
    scheduler.grad_ready(1)
    scheduler.restart()
    assert scheduler.order == []
    scheduler.grad_ready(0)
    scheduler.grad_ready(1)
    assert scheduler.observing
    assert scheduler.order == [0, 1]
    assert recorder.take() == []


@pytest.mark.parametrize(
    ("step", "last"), [(True, ["step 0", "step 1"]), (False, [])], ids=["stepped whole", "stepped by the user's own"]
)
def test_all_reduces(step: bool, last: list[str]) -> None:
    plan = plan_unfused(specs(2), 1)
    scheduler, recorder = make(plan, plan_all_reduce(plan, "ddp", step))
    scheduler.grad_ready(0)
    scheduler.grad_ready(1)
    scheduler.grad_ready(1)
    scheduler.finish_gradients()
    assert recorder.take() == ["ar 1", "ar 0", "late [1]"]
    scheduler.finish_step()
    assert recorder.take() == last


makers: st.SearchStrategy[Callable[[list[ParamSpec]], Plan]] = st.sampled_from(
    [
        lambda params: plan_unfused(params, 2),
        lambda params: plan_nearby_layers(params, 2, 2),
        lambda params: plan_threshold(params, 2, 100),
        lambda params: plan_threshold(params, 2, 1e9),
    ]
)


@given(makers, st.integers(1, 6), st.data())
def test_any_arrivals_any_plan(maker: Callable[[list[ParamSpec]], Plan], num_params: int, data: st.DataObject) -> None:
    """Whatever arrives, in whatever order and how often: ops leave in the schedule's order, each once an iteration."""
    plan = maker(specs(num_params, (40,)))
    schedule = plan_dear(plan)
    scheduler, recorder = make(plan, schedule)
    expected = [f"{SHORT[op.kind]} {op.bucket}" for op in schedule.ops]
    for _ in range(2):
        for param in data.draw(st.lists(st.integers(0, num_params - 1), max_size=12)):
            scheduler.grad_ready(param)
            assert recorder.calls == expected[: len(recorder.calls)]
        late = set(scheduler.late)
        scheduler.finish_gradients()
        scheduler.finish_step()
        calls = recorder.take()
        rounds = [call for call in calls if call.startswith("late")]
        assert [call for call in calls if call not in rounds] == expected
        assert rounds == ([f"late {sorted(late)}"] if late else [])

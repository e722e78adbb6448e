"""The thin scheduler: it hears gradients arrive and launches ops strictly in the schedule's order.

It never touches a device. What an op does is the launcher's business, so that tests can record the order instead.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from dearcore.errors import ScheduleError
from dearcore.layout import Plan
from dearcore.schedule import After, Op, OpKind, Schedule

__all__ = ["Launcher", "Scheduler"]


class Launcher(Protocol):
    def launch(self, op: Op) -> None:
        """Enqueues one op on its stream and returns."""

    def launch_late(self, late: Collection[int]) -> None:
        """Reduces once more the buckets that any rank finds in its `late`."""


class Scheduler:
    """Runs a schedule once an iteration. An iteration ends with `finish_step`, or with `restart` if there is no step.

    A bucket that is ready early waits for its turn; gradients that never come count as zero when
    `finish_gradients` is called. A gradient that comes when its bucket has left already is *late*: it stays local until
    `finish_gradients`, which has late gradients reduced in a further round.

    While `observing`, nothing is launched before `finish_gradients`, and `order` collects the order of arrival: the
    first backward shows in which order the plan should have its parameters.
    """

    def __init__(self, plan: Plan, schedule: Schedule, launcher: Launcher, observing: bool = False) -> None:
        self._ops = schedule.ops
        self._name, self._launcher = schedule.name, launcher
        self._fqns = {slot.param: slot.fqn for bucket in plan.buckets for slot in bucket.slots}
        self._num_slots = [len(bucket.slots) for bucket in plan.buckets]
        buckets_of: dict[int, tuple[int, ...]] = {}
        for bucket in plan.buckets:
            for slot in bucket.slots:
                buckets_of[slot.param] = (*buckets_of.get(slot.param, ()), bucket.index)
        self.buckets_of = buckets_of
        self.observing = observing
        self.order: list[int] = []
        self.restart()

    def restart(self) -> None:
        """Begins an iteration: nothing has arrived, nothing was launched."""
        self._cursor = 0
        self._missing = list(self._num_slots)
        self._rung = bytearray(max(self.buckets_of, default=-1) + 1)
        self._reduced = bytearray(len(self._num_slots))
        self._stepped = bytearray(len(self._num_slots))
        self._gradients_finished = False
        self._stepping = False
        self.late: set[int] = set()
        self.order.clear()
        self.has_begun = False  # a gradient has arrived in this iteration

    def grad_ready(self, param: int) -> None:
        """The doorbell: the gradient of `param` (its index in the plan) has arrived."""
        self.has_begun = True
        again = self._rung[param]
        self._rung[param] = 1
        if self.observing and not again:
            self.order.append(param)
        for bucket in self.buckets_of[param]:
            if self._reduced[bucket]:
                self.mark_late(param)
            elif not again:
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    self._advance()

    def is_reduced(self, param: int) -> bool:
        """True if (a part of) this parameter's gradient has left in this iteration."""
        return any(self._reduced[bucket] for bucket in self.buckets_of[param])

    def mark_late(self, param: int) -> None:
        """A gradient came again or was assigned by hand: it needs a further round if any part of it has left.

        Raises ScheduleError if the bucket has been stepped with the gradient that it had.
        """
        self.check_not_stepped(param)
        if self.is_reduced(param):
            self.late.update(self.buckets_of[param])

    def check_not_stepped(self, param: int) -> None:
        """Raises ScheduleError if this parameter was stepped already, which only some schedules do before step()."""
        if any(self._stepped[bucket] for bucket in self.buckets_of[param]):
            raise ScheduleError(
                f"the gradient of '{self._fqns[param]}' changed after the backward had stepped it: schedule "
                f"'{self._name}' allows one backward a step, and p.grad stays as it is until then. No weight has "
                "changed. Call zero_grad() before another backward (or use accumulate=, no_sync()), or use "
                "schedule='dear'."
            )

    def finish_gradients(self) -> None:
        """Launches all reductions that are left, then further rounds for what came too late. Collective."""
        self.observing = False
        self.launch_reductions()
        late, self.late = self.late, set()
        self._launcher.launch_late(late)

    def launch_reductions(self) -> None:
        """Launches the reductions that are left, with the gradients that are there."""
        self._gradients_finished = True
        self._advance()

    def next_reduction(self) -> Op:
        """For a rank that follows others: the reduction that they launch now. It counts as launched here."""
        op = self._ops[self._cursor]
        assert op.kind.is_reduction
        self._cursor += 1
        self._reduced[op.bucket] = 1
        self.has_begun = True
        return op

    def finish_step(self) -> None:
        """Launches everything that is left and begins the next iteration."""
        self._stepping = True
        self._advance()
        self.restart()

    def _advance(self) -> None:
        if self.observing:
            return
        while self._cursor < len(self._ops):
            op = self._ops[self._cursor]
            if op.after is After.GRAD_READY and self._missing[op.bucket] and not self._gradients_finished:
                return
            if op.after is After.BACKWARD_END and not self._stepping:
                return
            self._cursor += 1
            if op.kind.is_reduction:
                self._reduced[op.bucket] = 1
            elif op.kind is OpKind.STEP:
                self._stepped[op.bucket] = 1
            self._launcher.launch(op)

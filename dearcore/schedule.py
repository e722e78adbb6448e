"""One iteration's communication as plain data: an ordered list of ops, the same on every rank.

The executor launches ops strictly in this order, whatever the order in which gradients arrive. `after` says what has
to be true on the host before an op may be launched; what has to be true on the device is the streams' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .errors import ArgumentError
from .layout import Plan

__all__ = ["After", "Op", "OpKind", "Schedule", "plan_all_reduce", "plan_dear"]


class OpKind(Enum):
    REDUCE_SCATTER = "reduce_scatter"  # of gradients: each rank gets its shard of the average
    ALL_REDUCE = "all_reduce"  # of gradients: every rank gets the whole average
    STEP = "step"  # of the shard, or of the whole bucket after an all-reduce
    ALL_GATHER = "all_gather"  # of parameters, after the step

    @property
    def is_reduction(self) -> bool:
        return self in (OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE)


class After(Enum):
    """What an op waits for on the host."""

    GRAD_READY = "grad_ready"  # every slot of the bucket has its gradient
    BACKWARD_END = "backward_end"  # step() was called: what is missing counts as zero
    DONE = "done"  # nothing but the ops of the same bucket before it


@dataclass(frozen=True, slots=True)
class Op:
    kind: OpKind
    bucket: int
    after: After

    def __str__(self) -> str:
        return f"{self.kind.value}[{self.bucket}]"


@dataclass(frozen=True, slots=True)
class Schedule:
    """`print(schedule)` shows one op a line, in launch order."""

    name: str
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        lines = [f"{op.kind.value:15s} bucket {op.bucket:<4d} after {op.after.value}" for op in self.ops]
        return "\n".join([f"schedule: {self.name}, {len(self.ops)} ops", *lines])

    def check_fits(self, plan: Plan) -> None:
        """Raises ArgumentError unless each bucket is reduced once, then stepped once, then gathered if sharded."""
        for bucket in plan.buckets:
            got = [op.kind for op in self.ops if op.bucket == bucket.index]
            if got not in _LEGAL:
                found = ", ".join(kind.value for kind in got) or "nothing"
                raise ArgumentError(
                    f"schedule '{self.name}' does to bucket {bucket.index} ({bucket.first_names()}): {found}; expected "
                    "reduce_scatter, step, all_gather, in this order and once each (or all_reduce, step)."
                )
            if (got[0] is OpKind.ALL_REDUCE) != (plan.num_shards == 1) and plan.num_shards > 1:
                raise ArgumentError(
                    f"schedule '{self.name}' reduces bucket {bucket.index} whole, but the plan cuts it into "
                    f"{plan.num_shards} shards. Make the plan for one shard."
                )
        extra = {op.bucket for op in self.ops} - {bucket.index for bucket in plan.buckets}
        if extra:
            raise ArgumentError(f"schedule '{self.name}' names bucket {min(extra)}; the plan has {len(plan.buckets)}.")


_LEGAL = (
    [OpKind.REDUCE_SCATTER, OpKind.STEP, OpKind.ALL_GATHER],
    [OpKind.ALL_REDUCE, OpKind.STEP],
    [OpKind.ALL_REDUCE],  # the user's own optimizer steps when all gradients have come
)


def plan_dear(plan: Plan) -> Schedule:
    """DeAR (Zhang et al., arXiv 2302.12445): reduce-scatters in backward order, then all-gathers in forward order."""
    ops = [Op(OpKind.REDUCE_SCATTER, bucket.index, After.GRAD_READY) for bucket in reversed(plan.buckets)]
    for bucket in plan.buckets:
        ops.append(Op(OpKind.STEP, bucket.index, After.BACKWARD_END))
        ops.append(Op(OpKind.ALL_GATHER, bucket.index, After.DONE))
    return Schedule("dear", tuple(ops))


def plan_all_reduce(plan: Plan, name: str, step: bool) -> Schedule:
    """All-reduces in backward order; with `step`, buckets are stepped in forward order, whole, on every rank."""
    ops = [Op(OpKind.ALL_REDUCE, bucket.index, After.GRAD_READY) for bucket in reversed(plan.buckets)]
    if step:
        ops += [Op(OpKind.STEP, bucket.index, After.BACKWARD_END) for bucket in plan.buckets]
    return Schedule(name, tuple(ops))

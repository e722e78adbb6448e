"""One iteration's communication as plain data: an ordered list of ops, the same on every rank.

The executor launches ops strictly in this order, whatever the order in which gradients arrive. `after` says what has
to be true on the host before an op may be launched; what has to be true on the device is the streams' business.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from .checked_json import read_json
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
class _Record:
    """A schedule as it stands in JSON."""

    name: str
    ops: tuple[tuple[OpKind, int, After], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """`print(schedule)` shows one op a line, in launch order."""

    name: str
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        lines = [f"{op.kind.value:15s} bucket {op.bucket:<4d} after {op.after.value}" for op in self.ops]
        return "\n".join([f"schedule: {self.name}, {len(self.ops)} ops", *lines])

    def to_json(self) -> str:
        ops = [[op.kind.value, op.bucket, op.after.value] for op in self.ops]
        return json.dumps({"name": self.name, "ops": ops})

    @classmethod
    def from_json(cls, text: str | bytes) -> Schedule:
        """Raises ArgumentError if `text` is no schedule; it names the field."""
        record = read_json(_Record, text, "schedule")
        return cls(record.name, tuple(Op(*op) for op in record.ops))

    @property
    def early_buckets(self) -> frozenset[int]:
        """Buckets that are stepped before `optimizer.step()` is called, with the options of that moment."""
        early = set()
        for op in self.ops:
            if op.after is After.BACKWARD_END:
                break
            if op.kind is OpKind.STEP:
                early.add(op.bucket)
        return frozenset(early)

    def check_fits(self, plan: Plan) -> None:
        """Raises ArgumentError unless one iteration of `plan` would be right, in whatever order gradients arrive.

        What holds of a schedule that passes: every bucket is reduced once and in one way, stepped after its reduction
        and gathered after its step, once each, before the next forward; all reductions have been launched when the last
        gradient is there; all buckets are stepped by us, or none.
        """
        kinds: dict[int, list[OpKind]] = {}
        for op in self.ops:
            kinds.setdefault(op.bucket, []).append(op.kind)
        for bucket in plan.buckets:
            got = kinds.get(bucket.index, [])
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
        extra = kinds.keys() - {bucket.index for bucket in plan.buckets}
        if extra:
            raise ArgumentError(f"schedule '{self.name}' names bucket {min(extra)}; the plan has {len(plan.buckets)}.")
        self._check_order(plan)

    def _check_order(self, plan: Plan) -> None:
        """Raises ArgumentError with the first op, in launch order, after which an iteration could not be right."""
        reduced: dict[int, OpKind] = {}
        stepped: set[int] = set()
        end: Op | None = None  # the first op that waits for step()
        for number, op in enumerate(self.ops):
            who = f"schedule '{self.name}', op {number}: {op}"
            if op.kind.is_reduction:
                first = next(iter(reduced.values()), op.kind)
                if op.kind is not first:
                    raise ArgumentError(f"{who} stands beside {first.value}s; expected one kind for all buckets.")
                if op.after is not After.GRAD_READY:
                    raise ArgumentError(
                        f"{who} waits for '{op.after.value}'; expected '{After.GRAD_READY.value}': a gradient has to "
                        "be there before it is reduced."
                    )
                if end is not None:
                    raise ArgumentError(
                        f"{who} stands behind {end}, which waits for step(); expected every reduction before it, since "
                        "clipping and full_grad need all of them sooner."
                    )
                reduced[op.bucket] = op.kind
                continue
            if op.after is After.GRAD_READY:
                raise ArgumentError(
                    f"{who} waits for gradients, which its reduction has done already; expected '{After.DONE.value}' "
                    f"or '{After.BACKWARD_END.value}'."
                )
            if op.kind is OpKind.STEP:
                stepped.add(op.bucket)
                if reduced[op.bucket] is OpKind.ALL_REDUCE and op.after is After.DONE and end is None:
                    raise ArgumentError(
                        f"{who} would step inside the backward without anything to gather; expected "
                        f"'{After.BACKWARD_END.value}'."
                    )
            if op.after is After.BACKWARD_END and end is None:
                end = op
        if stepped and len(stepped) < len(plan.buckets):
            left = min(set(range(len(plan.buckets))) - stepped)
            raise ArgumentError(
                f"schedule '{self.name}' steps bucket {min(stepped)} but not bucket {left}; expected all or none."
            )


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

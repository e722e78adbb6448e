"""One iteration's communication as plain data: an ordered list of ops, the same on every rank.

The executor launches ops strictly in this order, whatever the order in which gradients arrive. `after` says what has
to be true on the host before an op may be launched; what has to be true on the device is the streams' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .errors import ArgumentError
from .layout import Plan

__all__ = ["After", "Op", "OpKind", "Part", "Schedule", "plan_dear", "plan_dear_gathering_gradients"]


class OpKind(Enum):
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    STEP = "step"


class Part(Enum):
    """What an op moves or changes."""

    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


class After(Enum):
    """What an op waits for on the host."""

    GRAD_READY = "grad_ready"  # every slot of the bucket has its gradient
    BACKWARD_END = "backward_end"  # step() was called: what is missing counts as zero
    DONE = "done"  # nothing but the ops of the same bucket before it


@dataclass(frozen=True, slots=True)
class Op:
    kind: OpKind
    bucket: int
    part: Part
    after: After

    def __str__(self) -> str:
        return f"{self.kind.value}[{self.bucket}]"


@dataclass(frozen=True, slots=True)
class Schedule:
    """`print(schedule)` shows one op a line, in launch order."""

    name: str
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        lines = [
            f"{op.kind.value:15s} bucket {op.bucket:<4d} {op.part.value:10s} after {op.after.value}" for op in self.ops
        ]
        return "\n".join([f"schedule: {self.name}, {len(self.ops)} ops", *lines])

    def check_fits(self, plan: Plan) -> None:
        """Raises ArgumentError unless each bucket is reduced once, then stepped once, then gathered.

        Gathered gradients need no step op: the wrapped optimizer steps them when all have come.
        """
        for bucket in plan.buckets:
            got = [(op.kind, op.part) for op in self.ops if op.bucket == bucket.index]
            if got not in _LEGAL:
                found = ", ".join(kind.value for kind, _ in got) or "nothing"
                raise ArgumentError(
                    f"schedule '{self.name}' does to bucket {bucket.index} ({bucket.first_names()}): {found}; expected "
                    "reduce_scatter, step, all_gather of parameters, in this order and once each (or reduce_scatter, "
                    "all_gather of gradients)."
                )
        extra = {op.bucket for op in self.ops} - {bucket.index for bucket in plan.buckets}
        if extra:
            raise ArgumentError(f"schedule '{self.name}' names bucket {min(extra)}; the plan has {len(plan.buckets)}.")


_RS = (OpKind.REDUCE_SCATTER, Part.GRADIENTS)
_STEP = (OpKind.STEP, Part.PARAMETERS)
_LEGAL: Sequence[list[tuple[OpKind, Part]]] = (
    [_RS, _STEP, (OpKind.ALL_GATHER, Part.PARAMETERS)],
    [_RS, (OpKind.ALL_GATHER, Part.GRADIENTS)],
)


def plan_dear(plan: Plan) -> Schedule:
    """DeAR (Zhang et al., arXiv 2302.12445): reduce-scatters in backward order, then all-gathers in forward order."""
    ops = [_reduce_scatter(bucket.index) for bucket in reversed(plan.buckets)]
    for bucket in plan.buckets:
        ops.append(Op(OpKind.STEP, bucket.index, Part.PARAMETERS, After.BACKWARD_END))
        ops.append(Op(OpKind.ALL_GATHER, bucket.index, Part.PARAMETERS, After.DONE))
    return Schedule("dear", tuple(ops))


def plan_dear_gathering_gradients(plan: Plan) -> Schedule:
    """For optimizers that need whole gradients: each bucket is gathered right behind its reduction, in the backward."""
    ops: list[Op] = []
    for bucket in reversed(plan.buckets):
        ops.append(_reduce_scatter(bucket.index))
        ops.append(Op(OpKind.ALL_GATHER, bucket.index, Part.GRADIENTS, After.DONE))
    return Schedule("dear, gradients gathered", tuple(ops))


def _reduce_scatter(bucket: int) -> Op:
    return Op(OpKind.REDUCE_SCATTER, bucket, Part.GRADIENTS, After.GRAD_READY)

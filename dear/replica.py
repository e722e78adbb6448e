"""What follows from a plan: the flat storage of the parameters, the buckets, the gates, and how ops are launched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from dearcore.bucket import BucketRuntime, FlatPool
from dearcore.communicator import Communicator
from dearcore.errors import ScheduleError
from dearcore.layout import Plan
from dearcore.schedule import Op, OpKind, Schedule
from dearcore.shard import OwnedSegment
from dearcore.streams import Event, InlineStream, Streams

from .agreed_options import BALLOT_BYTES, AgreedOptions, Values, difference, is_unanimous
from .doors import Doors
from .joining import Announcer, Call
from .parameters import Gate, without_waiting
from .ranks import wait_communication
from .scheduler import Scheduler
from .tracked import TrackedParameter

__all__ = ["Numerics", "Replica", "Standing", "settle_gradient"]


KEPT, CLEARED = 1, 2  # what a rank did with a parameter's average: added to it; forgot it after its reduction


@dataclass(frozen=True, slots=True)
class Numerics:
    """dtypes of one optimizer."""

    reduce_dtype: torch.dtype | None  # on the wire; None: the parameter's
    master_dtype: torch.dtype | None  # of the shards of bf16 and fp16 parameters; None: the parameter's

    def step_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.master_dtype if dtype in (torch.bfloat16, torch.float16) and self.master_dtype else dtype

    def wire_dtype(self, dtype: torch.dtype, *grad_dtypes: torch.dtype) -> torch.dtype:
        """For parameters of `dtype` whose gradients have these: wide enough for all."""
        return self.reduce_dtype or functools.reduce(torch.promote_types, grad_dtypes, dtype)


@dataclass(frozen=True, slots=True)
class Standing:
    """What a bucket's new gradients are added to, by parameter: the same on all ranks unless users do differently."""

    add: bool  # an earlier average stands in the reduced shard
    dropped: set[int]  # but of these nothing
    zeroed: set[int]  # and of these zeros
    kept: set[int]
    averages: set[int]  # whole averages that stand in `p.grad`


@dataclass(slots=True)
class Replica:
    """Parameters stand in one flat buffer for each dtype; `launch` turns ops of the schedule into enqueued work.

    `read_hyper` gives the options of each parameter group at this moment; `on_wait` hears of every wait of a gate.
    """

    plan: Plan
    schedule: Schedule
    tracked: Sequence[TrackedParameter]
    communicator: Communicator
    streams: Streams
    doors: Doors
    numerics: Numerics
    on_wait: Callable[[tuple[int, ...], str, float], None]
    read_hyper: Callable[[], Sequence[dict[str, Any]]]
    announcer: Announcer
    options: AgreedOptions
    observing: bool = False
    step: int = 0
    late_reduced: Event = field(init=False)  # late gradients -> shard step
    buckets: list[BucketRuntime] = field(init=False)
    gates: list[Gate] = field(init=False)
    scheduler: Scheduler = field(init=False)
    early: dict[int, bool] = field(init=False)  # buckets that the schedule steps in the backward: it has been done
    _hyper: Sequence[dict[str, Any]] | None = field(init=False, default=None)  # of the steps in this iteration
    reduced: set[int] = field(init=False, default_factory=set)  # buckets reduced since somebody cleared this
    late_buckets: set[int] = field(init=False, default_factory=set)  # of the last agreement, once it is reached
    contributed: set[int] = field(init=False, default_factory=set)  # parameters to whose average this rank has given
    _used: torch.Tensor | None = field(init=False, default=None)  # [num_params] by any rank; likewise
    _kept_and_cleared: dict[int, int] = field(init=False, default_factory=dict)  # since the ranks last told each other
    _first_part: dict[int, int] = field(init=False, default_factory=dict)  # of a parameter, in the order of reductions
    _last_part: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.late_reduced = self.streams.new_event()
        self.early = dict.fromkeys(sorted(self.schedule.early_buckets), False)
        self.buckets = self._make_buckets()
        self.scheduler = Scheduler(self.plan, self.schedule, self, self.observing)
        gates: dict[tuple[int, ...], list[TrackedParameter]] = {}
        for tracked in self.tracked:
            gates.setdefault(self.scheduler.buckets_of[tracked.spec.index], []).append(tracked)
        self.gates = [
            Gate(
                buckets,
                [named for t in members for named in _waiting(t)],
                [self.buckets[b].params_fresh for b in buckets],
                self.on_wait,
            )
            for buckets, members in gates.items()
        ]
        for op in self.schedule.ops:  # the parts of a split tensor leave one after the other
            if op.kind.is_reduction:
                for slot in self.plan.buckets[op.bucket].slots:
                    self._first_part.setdefault(slot.param, op.bucket)
                    self._last_part[slot.param] = op.bucket

    def launch(self, op: Op) -> None:
        bucket = self.buckets[op.bucket]
        if op.kind.is_reduction:
            self._reduce(bucket)
        elif op.kind is OpKind.STEP:
            self._step_bucket(bucket)
        else:
            bucket.start_all_gather(self.step)

    def finish_step(self) -> None:
        """Steps and gathers what the backward has not, with the options of now, and makes all of it the parameters'."""
        now = self.read_hyper()
        if self._hyper is not None and not _same(self._hyper, now):  # somebody changed them before step()
            self.discard_early()
        self._hyper = now
        self.streams.wait_compute()
        self.scheduler.finish_step()
        for index, stepped in self.early.items():
            if not stepped:
                self._step_bucket(self.buckets[index])
                self.buckets[index].start_all_gather(self.step)
        for index in self.early:
            self.buckets[index].start_commit()
            self.early[index] = False
        self._hyper = None

    def discard_early(self) -> None:
        """Takes back what the backward has stepped and step() has not confirmed."""
        for index, stepped in self.early.items():
            if stepped:
                self.buckets[index].start_discard()
                self.early[index] = False
        self._hyper = None

    def _step_bucket(self, bucket: BucketRuntime) -> None:
        if self._hyper is None:
            self._hyper = self.read_hyper()
        bucket.start_step(self._hyper)
        if bucket.is_early:
            self.early[bucket.index] = True

    def warm_up(self, hyper: Sequence[dict[str, Any]]) -> None:
        """Launches every kernel and collective of an iteration once, without effect. Collective; blocks until done.

        A kernel that CUDA loads at its first launch, and NCCL's first connection, may have to wait until the GPU is
        idle, which it is not while a collective waits for another rank.
        """
        with without_waiting():
            for op in self.schedule.ops:
                bucket = self.buckets[op.bucket]
                if op.kind.is_reduction:
                    params = [self.tracked[slot.param] for slot in bucket.layout.slots]
                    bucket.start_reduction([t.in_memory_order(t.param.detach()) for t in params], False, self.step)
                elif op.kind is OpKind.STEP:
                    bucket.start_idle_step(hyper)
                else:
                    bucket.start_all_gather(self.step)
        for bucket in self.buckets:
            if bucket.stepper is None:
                bucket.start_clear({slot.param for slot in bucket.layout.slots}, ())
            bucket.shard_stepped.wait_host()
        self.wait_communication()

    def launch_late(self, late: Collection[int]) -> None:
        """Reduces what came after its bucket had left, on this rank or any other.

        Which buckets these are is known to nobody before the ranks have told each other, so the communication stream
        itself asks and then does what is needed; the host goes on. The ranks also tell which averages they have
        cleared: if one has and another has not, what is left is a mixture, which is an error. So are options that
        differ, which they tell in a step.
        """
        if self.announcer.active:
            self.announcer.say(Call.LATE, {t.spec.index for t in self.tracked if t.holds_average()})
        communication, step = self.streams.communication, self.step
        num_buckets, num_params = len(self.buckets), len(self.tracked)
        ballot = self.options.take_ballot()
        told = torch.zeros(num_buckets + 3 * num_params + BALLOT_BYTES, dtype=torch.uint8)
        sizes = [num_buckets, *[num_params] * 3, BALLOT_BYTES]
        told_late, told_code, told_complement, told_used, told_ballot = torch.split(told, sizes)
        told_late[list(late)] = 1
        told_complement.fill_(3)  # where ranks differ, the two maxima exceed it
        if ballot.values is not None:
            told_ballot.copy_(torch.frombuffer(bytearray(ballot.code), dtype=torch.uint8))
        for index, code in self._kept_and_cleared.items():
            told_code[index], told_complement[index] = code, 3 - code
        self._kept_and_cleared.clear()
        in_order = [op.bucket for op in self.schedule.ops if op.kind.is_reduction and op.bucket in late]
        grads = {index: self._take_gradients(self.buckets[index]) for index in in_order}
        told_used[list(self.contributed)] = 1
        if any(tracked.whole is not None for tracked in self.tracked):  # averages that stand where others add to theirs
            for bucket in self.buckets:
                grads.setdefault(bucket.index, self._standing_averages(bucket))
        if grads:
            self.streams.wait_gradients(communication)
        kept = list(grads.values())
        for bucket in self.buckets:
            communication.wait(bucket.shard_stepped)
        label = f"agreement on late gradients in step {step}"
        agree = self.communicator.begin_combine(told, "max", label)

        def reduce_late() -> None:
            agree()
            differ = told_code + told_complement != 3
            if differ.any():
                raise ScheduleError(_mixture(self.tracked[int(differ.nonzero()[0])].spec.fqn))
            if not is_unanimous(told_ballot.tolist()):
                everyone: list[Values | None] = []
                label = f"options in step {step}"
                self.communicator.start_gather_objects(ballot.values, everyone, InlineStream(), label)
                raise ScheduleError(difference(everyone))
            self.late_buckets = set(told_late.nonzero().view(-1).tolist())
            self._used = told_used
            for index in sorted(self.late_buckets, reverse=True):
                self.buckets[index].reduce_late(grads.pop(index, None), step)

        communication.run(label, reduce_late)
        communication.record(self.late_reduced)
        if kept:
            self.streams.keep_until(self.late_reduced, kept)

    def changed_params(self) -> list[nn.Parameter]:
        """Those that the step which was launched last changes: any rank has given them a gradient.

        A rank that has itself given one to each parameter knows at once. Any other waits for the ranks' agreement,
        which is behind the reductions, before the gathers; on CUDA until these have been launched.
        """
        if len(self.contributed) == len(self.tracked):
            return [tracked.param for tracked in self.tracked]
        self.late_reduced.wait_launched()
        assert self._used is not None
        return [self.tracked[index].param for index in self._used.nonzero().view(-1).tolist()]

    def start_over(self) -> None:
        """Begins an iteration; all ranks have launched the same reductions before. Early steps are taken back."""
        self.discard_early()
        self.scheduler.restart()
        self.reduced.clear()
        self._kept_and_cleared.clear()

    def clear(self, dropped: Collection[int], zeroed: Collection[int]) -> None:
        """Forgets averaged gradients that the user has set to None (dropped) or to zeros (zeroed)."""
        self.contributed.difference_update(dropped)
        for param in {*dropped, *zeroed}:
            self._kept_and_cleared[param] = self._kept_and_cleared.get(param, 0) | CLEARED
        for index in sorted({b for param in {*dropped, *zeroed} for b in self.scheduler.buckets_of[param]}):
            self.buckets[index].start_clear(dropped, zeroed)

    def wait_communication(self) -> None:
        """Blocks the host until all that was enqueued on the communication stream has ended."""
        wait_communication(self.streams)

    def arm(self) -> None:
        self.doors.refresh(self.gates)
        for gate in self.gates:
            gate.arm()

    def inherit_gates(self, before: Replica) -> None:
        """Parameters that compiled code reads were found out under the plan before; under this one they still are."""
        eager = before.eager_params()
        for gate in self.gates:
            gate.is_eager = gate.holds_any(eager)

    def eager_params(self) -> set[int]:
        """ids of the parameters that compiled code reads."""
        return {id(param) for gate in self.gates if gate.is_eager for param in gate.params()}

    def wait_fresh(self) -> None:
        for gate in self.gates:
            gate.wait()

    def synchronize(self) -> None:
        """Blocks the host until every parameter is up to date."""
        self.wait_fresh()
        for bucket in self.buckets:
            bucket.params_fresh.wait_host()

    def retire(self) -> None:
        """Lets go of all memory at once: another plan has taken over, and nobody waits for a garbage collection."""
        self.buckets.clear()
        self.gates.clear()

    def release(self) -> None:
        """Gives every parameter memory of its own again; no gate is pending from now on."""
        for gate in self.gates:
            gate.close()
        for tracked in self.tracked:
            tracked.move_out()

    def follow_reduction(self, standing: Standing) -> None:
        """The next reduction, with what this rank has left, onto what other ranks' gradients are added to."""
        bucket = self.buckets[self.scheduler.next_reduction().bucket]
        self.forget_averages({slot.param for slot in bucket.layout.slots}, keep=standing.averages)
        with without_waiting():
            for slot in bucket.layout.slots:
                settle_gradient(self.tracked[slot.param])
        self._reduce_onto(bucket, standing)

    def forget_averages(self, params: Collection[int], keep: Collection[int]) -> None:
        """Whole averages in `p.grad` that the other ranks have forgotten."""
        with without_waiting():
            for index in params:
                if index not in keep and self.tracked[index].holds_average():
                    self.tracked[index].forget()

    def _reduce(self, bucket: BucketRuntime) -> None:
        """Takes the local gradients of the bucket's parameters, which become in-flight, and enqueues its reduction."""
        standing = Standing(False, set(), set(), set(), set())
        with without_waiting():
            for slot in bucket.layout.slots:
                tracked = self.tracked[slot.param]
                if tracked.whole is not None and tracked.holds_average():
                    standing.averages.add(slot.param)
                settle_gradient(tracked)
                if not tracked.retained:
                    standing.dropped.add(slot.param)
                elif not tracked.in_flight.zeroed:
                    standing.kept.add(slot.param)
                if tracked.in_flight.zeroed:
                    standing.zeroed.add(slot.param)
        standing = replace(standing, add=len(standing.dropped) < len(bucket.layout.slots))
        self.announcer.say(Call.REDUCE, standing)
        self._reduce_onto(bucket, standing)

    def _reduce_onto(self, bucket: BucketRuntime, standing: Standing) -> None:
        for param in standing.kept:
            self._kept_and_cleared[param] = KEPT
        self.contributed -= standing.dropped
        if standing.add and (standing.dropped or standing.zeroed):
            bucket.start_clear(standing.dropped, standing.zeroed)
        self.reduced.add(bucket.index)
        bucket.start_reduction(self._take_gradients(bucket), standing.add, self.step)

    def _take_gradients(self, bucket: BucketRuntime) -> list[torch.Tensor | None]:
        """The local gradients of the bucket's slots in memory order; from now on they are in flight."""
        grads: list[torch.Tensor | None] = []
        with without_waiting():
            for slot in bucket.layout.slots:
                tracked = self.tracked[slot.param]
                in_flight = tracked.in_flight
                if self._first_part[slot.param] == bucket.index:  # what comes from now on is late for every part
                    tracked.leaving = tracked.whole if tracked.holds_average() else in_flight.local
                    in_flight.local = None
                local = tracked.leaving
                if local is not None:
                    self.contributed.add(slot.param)
                grads.append(None if local is None else tracked.in_memory_order(local))
                if self._last_part[slot.param] == bucket.index:
                    tracked.leaving, in_flight.zeroed, tracked.retained = None, False, True
                    tracked.put_in_flight()
        return grads

    def _standing_averages(self, bucket: BucketRuntime) -> list[torch.Tensor | None]:
        slots = [self.tracked[slot.param] for slot in bucket.layout.slots]
        return [t.in_memory_order(t.whole) if t.whole is not None and t.holds_average() else None for t in slots]

    def _make_buckets(self) -> list[BucketRuntime]:
        mine = self.communicator.rank if self.plan.num_shards > 1 else 0
        storage = self._move_parameters()
        pools: dict[torch.dtype, FlatPool] = {}
        wires = [
            self.numerics.wire_dtype(b.dtype, *(self.tracked[slot.param].grad_dtype for slot in b.slots))
            for b in self.plan.buckets
        ]
        for wire in set(wires):
            sizes = [
                BucketRuntime.wire_numel(b, self.communicator.size)
                for b, its_wire in zip(self.plan.buckets, wires, strict=True)
                if its_wire == wire
            ]
            pools[wire] = FlatPool(max(sizes), wire, len(sizes), self.communicator, self.streams)
        buckets = []
        for layout, param_flat, wire in zip(self.plan.buckets, storage, wires, strict=True):
            step = self.numerics.step_dtype(layout.dtype)
            owned = [
                OwnedSegment(
                    layout.slots[s.slot].param,
                    s.start,
                    s.offset,
                    s.numel,
                    s.flag,
                    self.tracked[layout.slots[s.slot].param].group,
                    self.tracked[layout.slots[s.slot].param].grad_dtype_of_step(step),
                )
                for s in layout.segments()
                if s.shard == mine
            ]
            buckets.append(
                BucketRuntime(
                    layout,
                    param_flat,
                    pools[wire],
                    owned,
                    step,
                    wire,
                    self.communicator,
                    self.streams,
                    self.late_reduced,
                    layout.index in self.early,
                )
            )
        return buckets

    def _move_parameters(self) -> list[torch.Tensor]:
        """Moves every parameter into a flat buffer, keeping values and strides. Returns one flat a bucket."""
        flats: list[torch.Tensor] = []
        for dtype, numel in self._storage_numel().items():
            whole = torch.zeros(numel, dtype=dtype, device=self.streams.device)
            end = 0
            for bucket in self.plan.buckets:
                if bucket.dtype == dtype:
                    flats.append(whole[end : end + bucket.padded_numel])
                    end += _aligned(bucket.padded_numel, dtype)
        by_dtype = iter(flats)
        ordered = {
            id(b): next(by_dtype) for dtype in self._storage_numel() for b in self.plan.buckets if b.dtype == dtype
        }
        storage = [ordered[id(bucket)] for bucket in self.plan.buckets]
        for bucket, flat in zip(self.plan.buckets, storage, strict=True):
            for slot in bucket.slots:
                if slot.start == 0:
                    tracked = self.tracked[slot.param]
                    start = flat.storage_offset() + slot.offset
                    tracked.move_into(torch.as_strided(flat, tracked.spec.shape, tracked.strides, start))
        return storage

    def _storage_numel(self) -> dict[torch.dtype, int]:
        numel: dict[torch.dtype, int] = {}
        for bucket in self.plan.buckets:
            numel[bucket.dtype] = numel.get(bucket.dtype, 0) + _aligned(bucket.padded_numel, bucket.dtype)
        return numel


def _waiting(tracked: TrackedParameter) -> list[tuple[str, nn.Parameter]]:
    """What must not be read while the parameter is on its way."""
    aliases = [(alias.name, cast(nn.Parameter, alias.tensor)) for alias in tracked.aliases]
    return [(tracked.spec.fqn, tracked.param), *aliases]


def settle_gradient(tracked: TrackedParameter) -> None:
    """Brings our books in line with what `p.grad` is now: the user may have zeroed or assigned it."""
    grad, in_flight = tracked.param.grad, tracked.in_flight
    if grad is in_flight:
        return
    if grad is not None and in_flight.absorb(grad):
        tracked.put_in_flight()
        return
    tracked.retained = in_flight.zeroed = False
    in_flight.local = tracked.whole = tracked.leaving = None
    if grad is not None:  # others could see it: it may be their memory, which they are free to use again after step()
        in_flight.set_local(grad, copy=True)
        tracked.put_in_flight()


def _same(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> bool:
    """True if two readings of the groups' options are equal; tensors among them by value."""
    return len(before) == len(after) and all(
        old.keys() == new.keys()
        and all(
            torch.equal(value, new[key])
            if isinstance(value, torch.Tensor) and isinstance(new[key], torch.Tensor)
            else value == new[key]
            for key, value in old.items()
        )
        for old, new in zip(before, after, strict=True)
    )


def _mixture(fqn: str) -> str:
    return (
        f"the gradient of '{fqn}' was set to None or zeros on some ranks and not (or at another time) on "
        f"others, which no "
        "rank can undo. Call opt.zero_grad() on all ranks instead of the model's: it keeps them together."
    )


def _aligned(numel: int, dtype: torch.dtype) -> int:
    align = 64 // dtype.itemsize
    return -(-numel // align) * align

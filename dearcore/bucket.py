"""One bucket at run time: its buffers, its events, and the ops that move it from phase to phase."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any

import torch
from torch import optim

import dear_kernels

from .communicator import Communicator
from .errors import ScheduleError
from .kernel_step import make_stepper
from .layout import Bucket
from .shard import OwnedSegment, ShardStepper
from .streams import Event, InlineStream, Stream, Streams

__all__ = ["BucketRuntime", "FlatPool", "Phase", "accumulate_dtype"]


class Phase(Enum):
    """What was enqueued last for a bucket; events say what has finished."""

    READY = "ready for gradients"
    REDUCED = "reduce-scatter enqueued"
    STEPPED = "step enqueued"
    GATHERED = "all-gather enqueued"


_NEXT = {
    Phase.READY: (Phase.REDUCED,),
    Phase.REDUCED: (Phase.REDUCED, Phase.STEPPED),
    Phase.STEPPED: (Phase.GATHERED, Phase.REDUCED),  # a bucket that is not sharded needs no gather
    Phase.GATHERED: (Phase.REDUCED,),
}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of gradients are taken in fp32, of fp64 (parameters, or on the wire) in fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class FlatPool:
    """A few flat gradient buffers of one dtype, used in turn: one on the wire, one packed, one being packed."""

    NUM_BUFFERS = 3

    def __init__(
        self, numel: int, dtype: torch.dtype, num_buckets: int, communicator: Communicator, streams: Streams
    ) -> None:
        # two at least where peers read them: a buffer is free when the reduction after its own has completed
        count = min(self.NUM_BUFFERS, max(num_buckets, 2 if communicator.peers_read else 1))
        self._entries: list[tuple[torch.Tensor, Event]] = [
            (communicator.new_flat(numel, dtype, streams.device), streams.new_event()) for _ in range(count)
        ]
        self._next = 0
        self._peers_read = communicator.peers_read
        self._last_read: Event | None = None

    def take(self) -> tuple[torch.Tensor, Event]:
        """A buffer, and the event after which it may be written (to be recorded again when the buffer was read)."""
        entry = self._entries[self._next]
        self._next = (self._next + 1) % len(self._entries)
        return entry

    def record_read(self, flat_read: Event, communication: Stream) -> None:
        """To be called when a buffer's reduction was enqueued: says when the buffer may be written again."""
        if not self._peers_read:
            communication.record(flat_read)
            return
        if self._last_read is not None:
            communication.record(self._last_read)
        self._last_read = flat_read


class BucketRuntime:
    """Args:
    param_flat: [padded_numel], the parameters' own storage.
    pool: flat gradient buffers in the dtype of the wire.
    owned: this rank's segments, in the order of offsets.
    late_reduced: true when gradients that came after their bucket's reduction have been reduced too.
    step_dtype: dtype that the shard is stepped in; wider than the parameters' means a master copy of the shard.
    is_early: the bucket is stepped and gathered while the backward goes on. Parameters then stay as they are: what
        they will be is gathered beside them and takes their place by `start_commit`, or is forgotten by
        `start_discard`.
    """

    def __init__(
        self,
        layout: Bucket,
        param_flat: torch.Tensor,
        pool: FlatPool,
        owned: Sequence[OwnedSegment],
        step_dtype: torch.dtype,
        wire_dtype: torch.dtype,
        communicator: Communicator,
        streams: Streams,
        late_reduced: Event,
        is_early: bool = False,
    ) -> None:
        self._late_reduced = late_reduced
        self.layout, self.owned = layout, owned
        self._communicator, self._streams, self._pool = communicator, streams, pool
        self._phase = Phase.READY
        size = communicator.size
        assert layout.num_shards in (1, size), "a bucket is cut into one shard a rank, or not at all"
        self.is_sharded = layout.num_shards > 1  # else nothing is gathered, also where there is one rank
        self.shard_index = rank = communicator.rank if self.is_sharded else 0
        shard_numel, region_numel = layout.shard_numel, layout.region_numel
        device = param_flat.device
        self.param_flat = param_flat
        self.param_shard = param_flat[rank * shard_numel : (rank + 1) * shard_numel]
        self.is_early = is_early
        self._next_flat = torch.zeros_like(param_flat) if is_early else param_flat
        self._next_shard = self._next_flat[rank * shard_numel : (rank + 1) * shard_numel]
        self.has_master = step_dtype != layout.dtype
        # what is stepped
        self.master_shard = self.param_shard.to(step_dtype) if self.has_master else self._next_shard
        self._undo: Callable[[], None] | None = None  # of a step that is not committed yet
        accumulate = accumulate_dtype(torch.promote_types(layout.dtype, wire_dtype))
        self._wire_dtype = wire_dtype
        self.reduced_region = torch.zeros(region_numel, dtype=accumulate, device=device)
        self.grad_shard = self.reduced_region[:shard_numel]
        self._flags = self.reduced_region[shard_numel:]
        self.owned_flags = self._flags[: len(owned)]  # on how many ranks (times 1/P) each owned segment was used
        # what the stepper reads: the reduced shard itself unless the step runs in another dtype
        self.step_grad_shard = self.grad_shard if step_dtype == accumulate else self.grad_shard.to(step_dtype)
        self.stepper: ShardStepper | None = None
        # bf16 and fp16 gradients are scaled before the wire, where their sum could overflow; else the sum is scaled
        self._narrow_wire = torch.finfo(wire_dtype).bits < torch.finfo(accumulate).bits
        self._pack_scale = 1.0 / size if self._narrow_wire else 1.0
        self._divisor = 1 if self._narrow_wire else size
        self._table = self._new_table()
        self._late_table: dear_kernels.SegmentTable | None = None
        self._late_flat: torch.Tensor | None = None
        self._round_region: torch.Tensor | None = None
        self._shard_padding = _uncovered([slice(s.offset, s.offset + s.numel) for s in owned], shard_numel, device)
        spans = [slice(s.offset, s.offset + s.numel) for s in self._table.segments]
        flags = [slice(s.flag, s.flag + 1) for s in self._table.segments]
        self._padding = _uncovered([*spans, *flags], self.wire_numel(layout, size), device)
        self.grads_packed = streams.new_event()  # pack -> reduce-scatter
        self.grads_reduced = streams.new_event()  # reduce-scatter -> shard step
        self.shard_stepped = streams.new_event()  # shard step -> all-gather, next reduce-scatter
        self._next_gathered = streams.new_event()  # early all-gather -> commit
        self.params_gathered = streams.new_event()  # all-gather or commit -> next forward

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def params_fresh(self) -> Event:
        """Every rank's parameters are up to date."""
        return self.params_gathered if self.is_sharded or self.is_early else self.shard_stepped

    def make_stepper(self, optimizer: optim.Optimizer) -> None:
        low_precision = self._next_shard if self.has_master else None
        self.stepper = make_stepper(
            optimizer, self.owned, self.master_shard, self.step_grad_shard, low_precision, self.grad_shard
        )

    def _new_table(self) -> dear_kernels.SegmentTable:
        """Where gradients stand in the flat buffer. A table belongs to one stream: it remembers what it uploaded."""
        region_numel, shard_numel = self.layout.region_numel, self.layout.shard_numel
        return dear_kernels.SegmentTable(
            [
                dear_kernels.Segment(
                    tensor=segment.slot,
                    start=segment.start,
                    offset=segment.shard * region_numel + segment.offset,
                    numel=segment.numel,
                    flag=segment.shard * region_numel + shard_numel + segment.flag,
                )
                for segment in self.layout.segments()
            ],
            len(self.layout.slots),
        )

    @staticmethod
    def wire_numel(layout: Bucket, world_size: int) -> int:
        """Elements of the flat gradient buffer that a reduction needs: a multiple of the world size."""
        numel = layout.region_numel * layout.num_shards
        return -(-numel // world_size) * world_size

    def start_reduction(self, grads: Sequence[torch.Tensor | None], add: bool, step: int) -> None:
        """Packs one gradient a slot (None: missing, counts as zero and unused) and reduces the bucket.

        Gradients are indexed as parameters lie in memory, row-major. They are kept alive until they are packed.
        With `add` the result is added to what an earlier round left.
        """
        self._move(Phase.REDUCED)
        streams, communication = self._streams, self._streams.communication
        flat, flat_read = self._pool.take()
        grad_flat = flat[: self.wire_numel(self.layout, self._communicator.size)]
        streams.wait_gradients()
        streams.pack.wait(flat_read)
        held = list(grads)

        def pack() -> None:
            self._pack(grad_flat, held, self._table)
            held.clear()

        streams.pack.run(f"pack[{self.index}]", pack)
        streams.pack.record(self.grads_packed)
        streams.keep_until(self.grads_packed, grads)
        communication.wait(self.grads_packed)
        communication.wait(self.shard_stepped)
        output = self._further_round() if add else self.reduced_region
        self._start_collective(output, grad_flat, communication, step)
        self._pool.record_read(flat_read, communication)
        if add:
            communication.run(f"add[{self.index}]", lambda: self._add(output))
        communication.record(self.grads_reduced)

    def reduce_late(self, grads: Sequence[torch.Tensor | None] | None, step: int) -> None:
        """Adds the average of further gradients (None: this rank has none). At once: for the communication stream."""
        numel = self.wire_numel(self.layout, self._communicator.size)
        if self._late_flat is None or self._late_table is None:
            self._late_flat = torch.zeros(numel, dtype=self._wire_dtype, device=self.param_flat.device)
            self._late_table = self._new_table()
        grad_flat = self._late_flat
        self._pack(grad_flat, grads or [None] * len(self.layout.slots), self._late_table)
        output = torch.empty_like(self.reduced_region)
        self._start_collective(output, grad_flat, InlineStream(), step)
        self._add(output)

    def _further_round(self) -> torch.Tensor:
        """Where the result of a further round arrives before it is added."""
        if self._round_region is None:
            self._round_region = torch.empty_like(self.reduced_region)
            self._streams.wait_values()
        return self._round_region

    def _pack(
        self, grad_flat: torch.Tensor, grads: Sequence[torch.Tensor | None], table: dear_kernels.SegmentTable
    ) -> None:
        dear_kernels.pack_(grad_flat, grads, table, scale=self._pack_scale)
        if self._padding is not None:  # buckets of other sizes have used the buffer
            grad_flat.index_fill_(0, self._padding, 0)

    def _start_collective(self, output: torch.Tensor, grad_flat: torch.Tensor, stream: Stream, step: int) -> None:
        if self.is_sharded or self._communicator.size == 1:
            label = self._label("reduce_scatter", step)
            self._communicator.start_reduce_scatter(output, grad_flat, self._divisor, stream, label)
        else:
            label = self._label("all_reduce", step)
            self._communicator.start_all_reduce(output, grad_flat, self._divisor, stream, label)

    def _add(self, new: torch.Tensor) -> None:
        self.reduced_region.add_(new)

    def start_step(self, hyper: Sequence[dict[str, Any]]) -> None:
        """Steps this rank's shard with the options of each parameter group."""
        self._move(Phase.STEPPED)
        self.on_reduced(f"step[{self.index}]", lambda: self._step(hyper))

    def start_idle_step(self, hyper: Sequence[dict[str, Any]]) -> None:
        """Forgets what was reduced and steps as if nothing had been used: launches every kernel, changes nothing."""
        self._move(Phase.STEPPED)

        def step() -> None:
            self.reduced_region.zero_()
            self._step(hyper)

        self.on_reduced(f"idle_step[{self.index}]", step)

    def on_reduced(self, name: str, work: Callable[[], None]) -> None:
        """Runs `work`, which may read and change the reduced shard, after the reduction and before what follows it."""
        stream: Stream = self._streams.step
        stream.wait(self.grads_reduced)
        stream.wait(self._late_reduced)
        stream.run(name, work)
        stream.record(self.shard_stepped)

    def start_all_gather(self, step: int) -> None:
        """Gathers the parameters in place, or what they will be where the bucket is early."""
        self._move(Phase.GATHERED)
        communication = self._streams.communication
        communication.wait(self.shard_stepped)
        self._communicator.start_all_gather(self._next_flat, communication, self._label("all_gather", step))
        communication.record(self._next_gathered if self.is_early else self.params_gathered)

    def start_commit(self) -> None:
        """Parameters become what was stepped and gathered early."""
        stream = self._streams.step
        stream.wait(self._next_gathered)
        stream.wait(self._late_reduced)  # or the ranks have found that they cannot go on
        stream.run(f"commit[{self.index}]", self._commit)
        stream.record(self.params_gathered)

    def start_discard(self) -> None:
        """Takes back an early step: state and parameters are as if it had not been, the reduced gradients stand."""
        self._move(Phase.REDUCED)
        self._streams.step.wait(self._next_gathered)
        self.on_reduced(f"discard[{self.index}]", self._discard)

    def start_gather_of(self, shard: torch.Tensor, what: str, step: int) -> torch.Tensor:
        """Returns [num_shards, n], every `shard` [n] in its place, whole when the communication stream has passed."""
        communication, rank = self._streams.communication, self.shard_index
        whole = torch.empty(self.layout.num_shards, shard.numel(), dtype=shard.dtype, device=shard.device)
        self._streams.wait_values()
        communication.wait(self.grads_reduced)
        communication.wait(self.shard_stepped)
        communication.run(f"copy[{self.index}]", lambda: _discard(whole[rank].copy_(shard)))
        if self.is_sharded:
            self._communicator.start_all_gather(whole.view(-1), communication, self._label(what, step))
        return whole

    def _step(self, hyper: Sequence[dict[str, Any]]) -> None:
        assert self.stepper is not None
        if self.step_grad_shard is not self.grad_shard:
            self.step_grad_shard.copy_(self.grad_shard)
        if self.has_master:
            self._adopt_foreign_changes()
        if self.is_early:
            self._next_shard.copy_(self.param_shard)
            self._undo = self._snapshot()
        self.stepper.step(self.owned_flags, hyper)

    def _snapshot(self) -> Callable[[], None]:
        assert self.stepper is not None
        restore_state = self.stepper.snapshot()
        master = self.master_shard.clone() if self.has_master else None

        def undo() -> None:
            restore_state()
            if master is not None:
                self.master_shard.copy_(master)

        return undo

    def _commit(self) -> None:
        self.param_flat.copy_(self._next_flat)
        self._undo = None

    def _discard(self) -> None:
        assert self._undo is not None
        self._undo()
        self._undo = None

    def _adopt_foreign_changes(self) -> None:
        """Where a parameter is no longer its master's rounding, somebody else has written it: it becomes the master."""
        changed = self.master_shard.to(self.param_shard.dtype) != self.param_shard
        torch.where(changed, self.param_shard.to(self.master_shard.dtype), self.master_shard, out=self.master_shard)

    def start_clear(self, dropped: Collection[int], zeroed: Collection[int]) -> None:
        """Forgets averaged gradients: of `dropped` parameters as if unused, of `zeroed` ones as if they were zeros."""

        def clear() -> None:
            for segment in self.owned:
                if segment.param in dropped:
                    self._flags[segment.flag] = 0
                if segment.param in dropped or segment.param in zeroed:
                    self.grad_shard[segment.offset : segment.offset + segment.numel].zero_()
            if self._shard_padding is not None:  # a factor that was not finite has spoilt it too
                self.grad_shard.index_fill_(0, self._shard_padding, 0)

        self.on_reduced(f"clear[{self.index}]", clear)

    def _label(self, what: str, step: int) -> str:
        return f"{what}[{self.index}] ({self.layout.first_names()}) in step {step}"

    def _move(self, to: Phase) -> None:
        if to not in _NEXT[self._phase]:
            expected = " or ".join(phase.value for phase in _NEXT[self._phase])
            raise ScheduleError(
                f"bucket {self.index} cannot go from '{self._phase.value}' to '{to.value}'; expected {expected}. "
                "Was step() called before backward() finished?"
            )
        self._phase = to


def _uncovered(spans: Sequence[slice], numel: int, device: torch.device) -> torch.Tensor | None:
    """Elements of a buffer of `numel` that no span covers."""
    free = torch.ones(numel, dtype=torch.bool)
    for span in spans:
        free[span] = False
    padding = free.nonzero().view(-1)
    return padding.to(device) if padding.numel() else None


def _discard(_: object) -> None:
    return None

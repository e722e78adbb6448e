"""From one plan to another between two steps: this rank's shards are made from those that ranks held before.

Parameters are whole on every rank, so they are copied in memory. What travels is what only its owner has, the
optimizer's state, masters, and averaged gradients that have not been forgotten, and of these only the elements whose
owner changes: each rank sends them straight to their new owner.

    old shards, P = 2:  | a a a a | a b b b |        rank 1 sends the last of a to rank 0,
    new shards:         | a a a a a | b b b |        nothing else moves
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dearcore.communicator import NullCommunicator
from dearcore.layout import Plan
from dearcore.shard import SegmentState

from .checkpoint import MASTER
from .replica import Replica

__all__ = ["move_shards"]

REDUCED, FLAG = "reduced_grad", "used_flag"  # of the averaged gradient, beside the optimizer's own keys


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements [start, start + numel) of a parameter (memory order)."""

    param: int
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the state of a segment is made of: dtypes of what has a value for each element, and everything else."""

    elements: tuple[tuple[str, torch.dtype], ...]
    others: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class _Told:
    """What a rank tells about the segments it owns; few differ, so each kind is told once."""

    kinds: list[_Kind] = field(default_factory=list)
    kind_of: list[int] = field(default_factory=list)  # by segment


def move_shards(old: Replica, new: Replica) -> int:
    """Gives `new` this rank's part of what `old` holds, bit for bit. Collective; nothing may be under way.

    Returns the bytes that this rank has sent.
    """
    communicator, stream = old.communicator, old.streams.communication
    rank, size = communicator.rank, communicator.size
    if isinstance(communicator, NullCommunicator):
        return 0  # what others hold cannot be had
    mine = _Shards(old)
    told: list[_Told] = []
    communicator.start_gather_objects(mine.told, told, stream, "what shards hold, before a new plan")
    old.wait_communication()
    held = [_owned(old.plan, r) for r in range(size)]
    kinds = [
        {part: t.kinds[k] for part, k in zip(parts, t.kind_of, strict=True)}
        for parts, t in zip(held, told, strict=True)
    ]
    source = _Source(held, old.plan.num_shards)
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(size)]
    incoming: list[list[tuple[_Part, _Part]]] = [[] for _ in range(size)]  # (part, old segment that it stands in)
    for receiver in range(size):
        for part in _owned(new.plan, receiver):
            for sender, piece, segment in source.of(part, receiver):
                if sender == rank:
                    outgoing[receiver].extend(mine.cut(piece, segment, kinds[rank][segment]))
                if receiver == rank:
                    incoming[sender].append((piece, segment))
    sent = [_joined(tensors, old.streams.device) for tensors in outgoing]
    received = [
        torch.empty(
            sum(piece.numel * dtype.itemsize for piece, s in pieces for _, dtype in kinds[r][s].elements),
            dtype=torch.uint8,
            device=old.streams.device,
        )
        for r, pieces in enumerate(incoming)
    ]
    received[rank] = sent[rank]
    old.streams.wait_values()
    communicator.start_exchange(sent, received, stream, "move of shards to a new plan")
    old.wait_communication()
    states: dict[_Part, SegmentState] = {}
    for r, pieces in enumerate(incoming):
        at = 0
        for piece, segment in pieces:
            kind = kinds[r][segment]
            state = {key: _restored(value) for key, value in kind.others}
            for key, dtype in kind.elements:
                end = at + piece.numel * dtype.itemsize
                state[key] = received[r][at:end].clone().view(dtype)
                at = end
            states[piece] = state
    _load(new, states)
    return sum(tensor.numel() for r, tensor in enumerate(sent) if r != rank)


class _Shards:
    """What this rank holds, segment by segment."""

    def __init__(self, replica: Replica) -> None:
        self.told = _Told()
        self._states: dict[_Part, SegmentState] = {}
        known: dict[str, int] = {}
        for bucket in replica.buckets:
            bucket.shard_stepped.wait_host()
            states = bucket.stepper.export_state() if bucket.stepper is not None else [{} for _ in bucket.owned]
            for segment, state, flag in zip(bucket.owned, states, bucket.owned_flags.tolist(), strict=True):
                span = slice(segment.offset, segment.offset + segment.numel)
                if bucket.has_master:
                    state[MASTER] = bucket.master_shard[span]
                tracked = replica.tracked[segment.param]
                if tracked.retained and tracked.is_in_flight():  # else it was cleared
                    state[REDUCED], state[FLAG] = bucket.grad_shard[span], flag
                kind = _kind_of(state)
                number = known.setdefault(repr(kind), len(known))
                if number == len(self.told.kinds):
                    self.told.kinds.append(kind)
                self.told.kind_of.append(number)
                self._states[_Part(segment.param, segment.start, segment.numel)] = state

    def cut(self, piece: _Part, segment: _Part, kind: _Kind) -> Iterator[torch.Tensor]:
        state = self._states[segment]
        at = piece.start - segment.start
        for key, _ in kind.elements:
            yield state[key][at : at + piece.numel]


class _Source:
    """Where the elements of a part were: in whose shard, in which of its segments."""

    def __init__(self, held: Sequence[Sequence[_Part]], num_shards: int) -> None:
        self._is_whole = num_shards == 1
        self._segments: dict[int, list[tuple[_Part, int]]] = {}  # of each parameter, by start; owner
        for owner, parts in enumerate(held[:1] if self._is_whole else held):
            for part in parts:
                self._segments.setdefault(part.param, []).append((part, owner))

    def of(self, part: _Part, receiver: int) -> Iterator[tuple[int, _Part, _Part]]:
        """(owner, piece of `part`, its old segment). Where every rank has everything, each takes its own."""
        for segment, owner in self._segments[part.param]:
            start, end = max(part.start, segment.start), min(part.end, segment.end)
            if start < end or part.numel == segment.numel == 0:
                yield receiver if self._is_whole else owner, _Part(part.param, start, max(end - start, 0)), segment


def _owned(plan: Plan, rank: int) -> list[_Part]:
    """In the order of `BucketRuntime.owned`, bucket by bucket."""
    shard = rank if plan.num_shards > 1 else 0
    return [
        _Part(bucket.slots[s.slot].param, s.start, s.numel)
        for bucket in plan.buckets
        for s in bucket.segments()
        if s.shard == shard
    ]


def _kind_of(state: Mapping[str, Any]) -> _Kind:
    elements, others = [], []
    for key, value in sorted(state.items()):
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            elements.append((key, value.dtype))
        else:
            others.append((key, _Scalar(value.item(), value.dtype, str(value.device)) if _is_scalar(value) else value))
    return _Kind(tuple(elements), tuple(others))


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A tensor of one number, such as a step count: small to send, exact in double precision."""

    value: float
    dtype: torch.dtype
    device: str


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _restored(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype, device=value.device) if isinstance(value, _Scalar) else value


def _joined(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors])


def _load(replica: Replica, states: Mapping[_Part, SegmentState]) -> None:
    by_param: dict[int, list[_Part]] = {}
    for piece in sorted(states, key=lambda piece: (piece.param, piece.start)):
        by_param.setdefault(piece.param, []).append(piece)
    for bucket in replica.buckets:
        loaded: list[SegmentState] = []
        for position, segment in enumerate(bucket.owned):
            pieces = [
                piece
                for piece in by_param[segment.param]
                if segment.start <= piece.start and piece.start + piece.numel <= segment.start + segment.numel
            ]
            state = _whole(pieces, states)
            span = slice(segment.offset, segment.offset + segment.numel)
            if MASTER in state:
                bucket.master_shard[span] = state.pop(MASTER)
            if REDUCED in state:
                bucket.grad_shard[span] = state.pop(REDUCED)
                bucket.owned_flags[position] = state.pop(FLAG)
            loaded.append(state)
        if bucket.stepper is not None:
            bucket.stepper.load_state(loaded)


def _whole(pieces: Sequence[_Part], states: Mapping[_Part, SegmentState]) -> SegmentState:
    """The state of a segment from that of its pieces, which stand in order and have the same keys."""
    first = dict(states[pieces[0]])
    for before, after in itertools.pairwise(pieces):
        assert before.end == after.start, "every element has one old owner"
    for key, value in first.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            first[key] = torch.cat([states[piece][key] for piece in pieces])
    return first

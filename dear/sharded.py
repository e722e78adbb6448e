"""Optimizer state for `torch.distributed.checkpoint`: every rank saves what it owns, any number of ranks loads it.

A rank's part of a state is a range of the parameter in memory order; in the checkpoint it has the parameter's own shape
and the range is a few boxes of it. So neither the number of ranks, nor the plan, nor the memory format has to be the
same when it is loaded, and other programs find whole tensors under `state.<name of the parameter>.<key>`.

    {"state": {"fc.weight": {"exp_avg": OwnedState [5, 3], "step": OwnedState [], ...}, ...}, "param_groups": bytes}
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dearcore.boxes import Box, plan_boxes
from dearcore.bucket import BucketRuntime
from dearcore.errors import ArgumentError
from dearcore.shard import OwnedSegment, SegmentState, state_after_steps

from .checkpoint import MASTER, load_into_groups
from .replica import Replica
from .tracked import TrackedParameter

__all__ = ["OwnedState", "export_sharded", "export_whole", "import_sharded", "import_whole"]

HAS_STATE = "dear_has_state"  # 1 if the parameter was stepped before; if not, the rest of its state means nothing
NAMES = "dear_names"  # of the parameters of a group
_aten = torch.ops.aten


@dataclass(slots=True)
class _Piece:
    start: int  # in the parameter, memory order
    flat: torch.Tensor


class OwnedState(torch.Tensor):
    """One state of one parameter, of which this rank holds some elements. Only for saving and loading.

    It has the parameter's shape but no storage; `torch.distributed.checkpoint` asks it for chunks as it asks a DTensor.
    Copies of it (what an asynchronous save makes first) are of the same kind.
    """

    order: tuple[int, ...]  # dimensions from the slowest in memory to the fastest
    pieces: list[_Piece]
    is_number: bool  # one value for the whole parameter
    is_writer: bool  # of a number that several ranks hold, one writes

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        order: tuple[int, ...],
        pieces: list[_Piece],
        is_number: bool = False,
        is_writer: bool = True,
    ) -> OwnedState:
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device("cpu"), requires_grad=False
        )
        assert isinstance(self, OwnedState)
        self.order, self.pieces, self.is_number, self.is_writer = order, pieces, is_number, is_writer
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
            if self.is_writer
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(self._logical(box.offsets)), torch.Size(self._logical(box.sizes)))
            for _, box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for piece, box in self._boxes():
            if index.offset is None or tuple(index.offset) == self._logical(box.offsets):
                begin = box.start - piece.start
                view = piece.flat[begin : begin + box.numel].view(box.sizes)
                return view.permute([self.order.index(dim) for dim in range(len(self.order))])
        raise KeyError(f"{index}: this rank does not hold it")

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedState:
        return self._like(lambda flat: flat.clone())

    def __reduce_ex__(self, _: Any) -> Any:
        return OwnedState, (self.size(), self.dtype, self.order, self.pieces, self.is_number, self.is_writer)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        spans = ", ".join(f"{p.start}:{p.start + p.flat.numel()}" for p in self.pieces)
        return f"OwnedState({tuple(self.shape)}, {self.dtype}, elements {spans} here)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        this = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            return this._like(lambda flat: flat)
        if func in (_aten._to_copy.default, _aten.clone.default):
            return this._like(lambda flat: flat.clone())
        if func in (_aten.new_empty.default, _aten.zeros_like.default, _aten.empty_like.default):
            return this._like(torch.zeros_like)
        if func is _aten.copy_.default and isinstance(args[1], cls):
            for mine, theirs in zip(this.pieces, args[1].pieces, strict=True):
                mine.flat.copy_(theirs.flat)
            return this
        raise ArgumentError(
            f"an entry of sharded_state_dict() is for torch.distributed.checkpoint only, not for {func}. Use "
            "state_dict() for whole tensors."
        )

    def _boxes(self) -> Iterator[tuple[_Piece, Box]]:
        shape = [self.shape[dim] for dim in self.order]
        for piece in self.pieces:
            for box in plan_boxes(shape, piece.start, piece.start + piece.flat.numel()):
                yield piece, box

    def _logical(self, in_memory: Sequence[int]) -> tuple[int, ...]:
        return tuple(in_memory[self.order.index(dim)] for dim in range(len(self.order)))

    def _like(self, change: Callable[[torch.Tensor], torch.Tensor]) -> OwnedState:
        pieces = [_Piece(piece.start, change(piece.flat)) for piece in self.pieces]
        return OwnedState(self.size(), self.dtype, self.order, pieces, self.is_number, self.is_writer)


def export_sharded(replica: Replica, optimizer: optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """A copy on the CPU of what this rank owns, with zeros where there is no state yet: to save, or to load into.

    Args:
        names: of every parameter of the optimizer, by id.
    """
    states: dict[str, dict[str, OwnedState]] = {}
    expected: dict[tuple[int, torch.dtype, torch.dtype | None], SegmentState] = {}
    for bucket in replica.buckets:
        bucket.shard_stepped.wait_host()
        assert bucket.stepper is not None
        dtype = bucket.master_shard.dtype
        for segment, state in zip(bucket.owned, bucket.stepper.export_state(), strict=True):
            tracked = replica.tracked[segment.param]
            kind = segment.group, dtype, segment.grad_dtype
            if kind not in expected:
                expected[kind] = state_after_steps(optimizer, *kind, bucket.master_shard.device)
            complete = {**_zeros(expected[kind], segment.numel), **state}
            complete[HAS_STATE] = torch.tensor(float(bool(state)))
            if bucket.has_master:
                complete[MASTER] = bucket.master_shard[segment.offset : segment.offset + segment.numel]
            for key, value in complete.items():
                _add(states.setdefault(tracked.spec.fqn, {}), key, value, tracked, segment)
    groups = optimizer.state_dict()["param_groups"]
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        saved[NAMES] = [names[id(param)] for param in group["params"]]
    return {"state": states, "param_groups": _to_bytes(groups)}


def import_sharded(
    replica: Replica, optimizer: optim.Optimizer, names: Mapping[int, str], loaded: Mapping[str, Any]
) -> None:
    """Takes over what `export_sharded` has given, after it was loaded into.

    Raises ArgumentError where it does not fit, before anything has changed.
    """
    if not isinstance(loaded, Mapping) or not isinstance(loaded.get("param_groups"), bytes):
        raise ArgumentError(
            "load_sharded_state_dict expects what sharded_state_dict() returned, with a checkpoint loaded into it."
        )
    groups = _from_bytes(loaded["param_groups"])
    for number, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=False)):
        saved_names, have = saved.pop(NAMES), [names[id(param)] for param in group["params"]]
        if sorted(saved_names) != sorted(have):
            differing = sorted(set(saved_names) ^ set(have))[0]
            raise ArgumentError(
                f"the checkpoint's parameter group {number} is another one: '{differing}' is in only one of them. "
                "Build the optimizer with the groups that the checkpoint was saved with."
            )
        saved["params"] = list(range(len(have)))
    segments = [
        [_taken(loaded["state"], replica.tracked[segment.param], segment) for segment in bucket.owned]
        for bucket in replica.buckets
    ]
    load_into_groups(optimizer, {"state": {}, "param_groups": groups})
    for bucket, states in zip(replica.buckets, segments, strict=True):
        bucket.shard_stepped.wait_host()
        assert bucket.stepper is not None
        for segment, state in zip(bucket.owned, states, strict=True):
            master = state.pop(MASTER, None)
            if bucket.has_master and master is not None:
                bucket.master_shard[segment.offset : segment.offset + segment.numel] = master.to(bucket.master_shard)
            if not state.pop(HAS_STATE):
                state.clear()
        bucket.stepper.load_state([_on_device(state, bucket) for state in states])


def export_whole(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Where the user's own optimizer steps, every rank has everything; one writes it."""
    return {"whole": _to_bytes(optimizer.state_dict())}


def import_whole(optimizer: optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    if not isinstance(loaded, Mapping) or "whole" not in loaded:
        raise ArgumentError(
            f"this {type(optimizer).__name__} is not sharded, the checkpoint's optimizer is. Load it with the "
            "optimizer and the `shard` that it was saved with."
        )
    optimizer.load_state_dict(_from_bytes(loaded["whole"]))


def _add(states: dict[str, OwnedState], key: str, value: Any, tracked: TrackedParameter, segment: OwnedSegment) -> None:
    value = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    if value.dim() == 1 and value.numel() == segment.numel:
        if segment.numel:
            entry = states.get(key)
            if entry is None:
                entry = states[key] = OwnedState(torch.Size(tracked.spec.shape), value.dtype, tracked.order, [])
            entry.pieces.append(_Piece(segment.start, value.to("cpu", copy=True)))
    elif key not in states:  # one number for the whole parameter
        flat = value.detach().to("cpu", copy=True).reshape(-1)
        dims = tuple(range(value.dim()))
        states[key] = OwnedState(value.size(), value.dtype, dims, [_Piece(0, flat)], True, segment.start == 0)
    elif segment.start == 0:
        states[key].is_writer = True


def _taken(states: Mapping[str, Mapping[str, Any]], tracked: TrackedParameter, segment: OwnedSegment) -> SegmentState:
    """The state of one segment, from what was loaded."""
    taken: SegmentState = {}
    for key, entry in states.get(tracked.spec.fqn, {}).items():
        if entry.is_number:
            taken[key] = entry.pieces[0].flat.clone().view(entry.shape)
            continue
        piece = next((p for p in entry.pieces if p.start == segment.start), None)
        if piece is None or piece.flat.numel() != segment.numel:
            raise _of_another_plan(tracked.spec.fqn)
        taken[key] = piece.flat.clone()
    if HAS_STATE not in taken:
        raise _of_another_plan(tracked.spec.fqn)
    return taken


def _of_another_plan(fqn: str) -> ArgumentError:
    return ArgumentError(
        f"this state of '{fqn}' is not of the part that this rank owns. Call sharded_state_dict() on this optimizer, "
        "load the checkpoint into what it returns, and pass that."
    )


def _zeros(example: SegmentState, numel: int) -> SegmentState:
    return {
        key: torch.zeros(numel if value.dim() else (), dtype=value.dtype)
        for key, value in example.items()
        if isinstance(value, torch.Tensor)
    }


def _on_device(state: SegmentState, bucket: BucketRuntime) -> SegmentState:
    device = bucket.master_shard.device
    return {key: value.to(device) if value.dim() else value for key, value in state.items()}


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=True)

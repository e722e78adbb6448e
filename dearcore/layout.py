"""Where every parameter stands: pure functions of shapes, no device touched.

A *plan* cuts the parameters into *buckets*; bucket 0 holds the first layers of the forward. A bucket's flat
parameter buffer holds its slots one after the other and is cut into equal *shards*: one a rank where each rank steps
its part, a single one where every rank steps everything. The flat gradient buffer has the same shards, each followed by
*flags*: one element for each *segment* (a slot's part inside a shard) that says on how many ranks the parameter had a
gradient. So no extra collective is needed to leave unused parameters alone.

    parameters, P = 2:   | a a a a b | b b c c . |            shard_numel = 5
    gradients:           | a a a a b F F | b b c c . F F |    region_numel = 5 + num_flags
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from .checked_json import dtype_name, read_json
from .errors import ArgumentError

__all__ = [
    "Bucket",
    "NearbyLayers",
    "ParamSpec",
    "Plan",
    "Segment",
    "Slot",
    "dense_strides",
    "plan_nearby_layers",
    "plan_threshold",
    "plan_unfused",
]

SLOT_ALIGN_BYTES = 64  # what torch's allocator gives a tensor of its own: matrix kernels choose their path by it
SHARD_ALIGN_BYTES = 16  # one 128-bit access, so that shards stay vectorizable
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What a plan needs to know of one parameter. `index` is its place in the optimizer's list of parameters."""

    index: int
    fqn: str  # as in model.named_parameters()
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def module(self) -> str:
        return self.fqn.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a bucket, in elements."""

    param: int  # ParamSpec.index
    fqn: str
    start: int  # first element of the parameter (memory order) that stands here; > 0 only for a split tensor
    offset: int  # from the start of the flat parameter buffer
    numel: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A slot's part inside one shard, in elements."""

    slot: int  # position in Bucket.slots
    shard: int  # which rank owns it
    start: int  # first element of the parameter that stands here
    offset: int  # from the start of the shard
    numel: int
    flag: int  # which flag of the shard belongs to it


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is communicated together. Sizes in elements of the bucket's dtype."""

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    shard_numel: int
    num_flags: int
    num_shards: int

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.num_shards

    @property
    def region_numel(self) -> int:
        """A shard of the flat gradient buffer: payload, then flags."""
        return self.shard_numel + self.num_flags

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def segments(self) -> list[Segment]:
        """Every slot cut at the shard boundaries, in the order of offsets."""
        return _segments(self.slots, self.shard_numel, self.num_shards)

    def first_names(self, count: int = 3) -> str:
        names = [slot.fqn for slot in self.slots[:count]]
        return ", ".join(names) + (", ..." if len(self.slots) > count else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """The buckets of one optimizer, in forward order. `print(plan)` shows a table."""

    fusion: str  # what made it, for people
    num_shards: int
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ArgumentError(f"a plan has num_shards={self.num_shards}; expected at least one.")
        _check_coverage(self.buckets)
        for bucket in self.buckets:
            _check_regions(bucket, self.num_shards)

    def __str__(self) -> str:
        rows = [("bucket", "dtype", "tensors", "KiB", "padding %", "first parameters")]
        for bucket in self.buckets:
            padding = 100.0 * (1 - bucket.numel / bucket.padded_numel) if bucket.padded_numel else 0.0
            rows.append(
                (
                    str(bucket.index),
                    str(bucket.dtype).removeprefix("torch."),
                    str(len(bucket.slots)),
                    f"{bucket.num_bytes / 1024:.1f}",
                    f"{padding:.1f}",
                    bucket.first_names(),
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        body = "\n".join(
            "  ".join(c.rjust(w) if i < 5 else c for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        )
        return f"plan: {self.fusion}, {len(self.buckets)} buckets, {self.num_shards} shards\n{body}"

    def to_json(self) -> str:
        record = asdict(self)
        for bucket in record["buckets"]:
            bucket["dtype"] = dtype_name(bucket["dtype"])
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Raises ArgumentError if `text` is no plan; it names the field."""
        return read_json(cls, text, "plan")

    def check_fits(self, params: Sequence[ParamSpec], num_shards: int) -> None:
        """Raises ArgumentError unless this plan places exactly `params` in `num_shards` shards."""
        if self.num_shards != num_shards:
            raise ArgumentError(
                f"the plan cuts buckets into {self.num_shards} shards, this job needs {num_shards} (one a rank where "
                "parameters are sharded, else one). Make the plan anew."
            )
        placed: dict[int, int] = {}
        names: dict[int, tuple[str, torch.dtype]] = {}
        for bucket in self.buckets:
            for slot in bucket.slots:
                placed[slot.param] = placed.get(slot.param, 0) + slot.numel
                names[slot.param] = (slot.fqn, bucket.dtype)
        for spec in params:
            got = names.get(spec.index)
            if got is None:
                raise ArgumentError(f"the plan has no place for parameter '{spec.fqn}'. Make the plan from this model.")
            if got != (spec.fqn, spec.dtype) or placed[spec.index] != spec.numel:
                raise ArgumentError(
                    f"the plan places '{got[0]}' ({got[1]}, {placed[spec.index]} elements) where this model has "
                    f"'{spec.fqn}' ({spec.dtype}, {spec.numel} elements). Make the plan from this model."
                )
        extra = set(names) - {spec.index for spec in params}
        if extra:
            raise ArgumentError(f"the plan places '{names[min(extra)][0]}', which this optimizer does not train.")


@dataclass(frozen=True, slots=True)
class NearbyLayers:
    """Fusion rule: the parameters of every `num_layers` modules that are neighbours in the forward share a bucket."""

    num_layers: int

    def __post_init__(self) -> None:
        if not isinstance(self.num_layers, int) or self.num_layers < 1:
            raise ArgumentError(f"NearbyLayers expects a whole number of layers >= 1, got {self.num_layers!r}.")


def plan_threshold(params: Sequence[ParamSpec], num_shards: int, threshold_bytes: float, name: str = "") -> Plan:
    """Fills buckets from the last layer backwards up to `threshold_bytes`; larger tensors are split over several.

    `params` stand in forward order. Filling backwards leaves the small remainder to the first layers, whose bucket
    nothing can hide (its reduce-scatter comes last, its all-gather first). Each dtype has buckets of its own.
    """
    pieces: list[list[_Piece]] = []
    open_buckets: dict[torch.dtype, list[_Piece]] = {}
    for position, spec in reversed(list(enumerate(params))):
        if spec.num_bytes > threshold_bytes:
            pieces.extend([piece] for piece in _split(position, spec, num_shards, threshold_bytes))
            continue
        bucket = open_buckets.get(spec.dtype)
        if bucket is None or sum(p.spec.num_bytes for p in bucket) + spec.num_bytes > threshold_bytes:
            bucket = open_buckets[spec.dtype] = []
            pieces.append(bucket)
        bucket.insert(0, _Piece(position, spec, 0, spec.numel))
    return _plan_of(pieces, num_shards, name or f"threshold {threshold_bytes / MIB:g} MiB")


def plan_unfused(params: Sequence[ParamSpec], num_shards: int) -> Plan:
    """One bucket for each tensor."""
    pieces = [[_Piece(position, spec, 0, spec.numel)] for position, spec in enumerate(params)]
    return _plan_of(pieces, num_shards, "no fusion")


def plan_nearby_layers(params: Sequence[ParamSpec], num_shards: int, num_layers: int) -> Plan:
    """Every `num_layers` modules that are neighbours in the forward order share a bucket (one for each dtype)."""
    layers: list[str] = []
    pieces: dict[tuple[int, torch.dtype], list[_Piece]] = {}
    for position, spec in enumerate(params):
        if not layers or layers[-1] != spec.module:
            layers.append(spec.module)
        key = ((len(layers) - 1) // num_layers, spec.dtype)
        pieces.setdefault(key, []).append(_Piece(position, spec, 0, spec.numel))
    return _plan_of(list(pieces.values()), num_shards, f"{num_layers} nearby layers")


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """`strides` if they fill memory without holes or overlaps (in any order of dimensions), else row-major ones."""
    expected = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if stride != expected:
                break
            expected *= size
    else:
        return tuple(strides)
    row_major: list[int] = []
    step = 1
    for size in reversed(shape):
        row_major.insert(0, step)
        step *= max(size, 1)
    return tuple(row_major)


@dataclass(frozen=True, slots=True)
class _Piece:
    position: int  # in the forward order
    spec: ParamSpec
    start: int
    numel: int


def _split(position: int, spec: ParamSpec, num_shards: int, threshold_bytes: float) -> list[_Piece]:
    """Cuts a tensor into equal parts whose sizes need no padding, so that they stay contiguous in memory."""
    unit = num_shards * SLOT_ALIGN_BYTES // spec.dtype.itemsize
    num_parts = max(1, math.ceil(spec.num_bytes / max(threshold_bytes, 1)))
    part_numel = max(unit, math.ceil(spec.numel / num_parts / unit) * unit)
    starts = range(0, spec.numel, part_numel)
    return [_Piece(position, spec, start, min(part_numel, spec.numel - start)) for start in starts]


def _plan_of(pieces: list[list[_Piece]], num_shards: int, fusion: str) -> Plan:
    ordered = sorted(pieces, key=lambda bucket: (bucket[0].position, bucket[0].start))
    return Plan(fusion, num_shards, tuple(_bucket_of(i, bucket, num_shards) for i, bucket in enumerate(ordered)))


def _bucket_of(index: int, pieces: Iterable[_Piece], num_shards: int) -> Bucket:
    slots: list[Slot] = []
    end = 0
    dtype = torch.float32
    for piece in pieces:
        dtype = piece.spec.dtype
        align = SLOT_ALIGN_BYTES // dtype.itemsize
        offset = math.ceil(end / align) * align
        slots.append(Slot(piece.spec.index, piece.spec.fqn, piece.start, offset, piece.numel))
        end = offset + piece.numel
    align = SHARD_ALIGN_BYTES // dtype.itemsize
    shard_numel = math.ceil(end / (num_shards * align)) * align
    num_segments = [0] * num_shards
    for segment in _segments(tuple(slots), shard_numel, num_shards):
        num_segments[segment.shard] += 1
    num_flags = math.ceil(max(num_segments) / align) * align
    return Bucket(index, dtype, tuple(slots), shard_numel, num_flags, num_shards)


def _segments(slots: Sequence[Slot], shard_numel: int, num_shards: int) -> list[Segment]:
    segments: list[Segment] = []
    flags = [0] * num_shards
    for position, slot in enumerate(slots):
        at, end = slot.offset, slot.offset + slot.numel
        while True:  # an empty tensor has one empty segment, so that it keeps a flag and optimizer state
            shard = min(at // shard_numel, num_shards - 1) if shard_numel else 0
            stop = max(at, min(end, (shard + 1) * shard_numel))
            start = slot.start + at - slot.offset
            segments.append(Segment(position, shard, start, at - shard * shard_numel, stop - at, flags[shard]))
            flags[shard] += 1
            at = stop
            if at >= end:
                break
    return segments


def _check_coverage(buckets: Sequence[Bucket]) -> None:
    ends: dict[int, tuple[int, int]] = {}  # param -> (elements placed, last bucket)
    for expected, bucket in enumerate(buckets):
        if bucket.index != expected:
            raise ArgumentError(f"bucket {bucket.index} stands at position {expected} of the plan; number them from 0.")
        free = 0
        for slot in bucket.slots:
            if slot.offset < free or slot.offset + slot.numel > bucket.padded_numel:
                raise ArgumentError(
                    f"the plan puts '{slot.fqn}' at {slot.offset} to {slot.offset + slot.numel} of bucket "
                    f"{bucket.index}; "
                    f"expected a place between {free} and {bucket.padded_numel}, after the slots before it."
                )
            free = slot.offset + slot.numel
            placed, last = ends.get(slot.param, (0, -1))
            alone = len(bucket.slots) == 1 and (last < 0 or len(buckets[last].slots) == 1)
            split = slot.start > 0 or placed > 0
            if slot.start != placed or (split and (last != bucket.index - 1 or not alone)):
                raise ArgumentError(
                    f"the plan cuts parameter '{slot.fqn}' at element {slot.start}, expected {placed}: the parts of a "
                    "split tensor stand in order, each in a bucket of its own, one bucket after the other."
                )
            ends[slot.param] = (placed + slot.numel, bucket.index)


def _check_regions(bucket: Bucket, num_shards: int) -> None:
    if bucket.num_shards != num_shards:
        raise ArgumentError(f"bucket {bucket.index} has num_shards={bucket.num_shards}; its plan has {num_shards}.")
    used = max((segment.flag + 1 for segment in bucket.segments()), default=0)
    if bucket.num_flags < used:
        raise ArgumentError(
            f"bucket {bucket.index} has num_flags={bucket.num_flags}; expected {used} at least, one for each segment."
        )

"""Where things stand in a flat buffer: the static tables that pack, unpack and the optimizer steps share.

Everything here follows from shapes alone. The tables are built and checked once; a kernel launch only looks up.
Offsets are Python integers on the host and int64 in every device table, so nothing wraps past 2**31 elements.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Run", "Segment", "SegmentTable", "StepSegment", "StepTable", "compute_dtype"]

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# How many flat buffers one table remembers views of. A bucket sees a few pooled buffers, never many; each remembered
# one is kept alive, hence the bound.
MAX_CACHED_FLATS = 8

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of one tensor's elements inside a flat buffer. All extents are in elements.

    `numel` elements of list entry `tensor`, beginning at its row-major element `start`, stand at `offset` of the flat
    buffer. `flag` is the flat element that says whether the tensor was present (1) or missing (0); -1 for none.
    """

    tensor: int
    start: int
    offset: int
    numel: int
    flag: int = -1


@dataclass(frozen=True, slots=True)
class StepSegment:
    """`numel` elements of a flat shard from `offset` on, stepped with the hyper-parameters of group `group`."""

    offset: int
    numel: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments that one optimizer step may treat as a single tensor; `segment` is one of them."""

    offset: int
    numel: int
    group: int
    segment: int


def compute_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Dtype in which a value going from dtype `a` to dtype `b` is scaled: fp64 if either side is fp64, else fp32."""
    return torch.float64 if torch.float64 in (a, b) else torch.float32


def check_dtype(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; supported are float32, bfloat16, float16, float64. Cast it first."
        )


class _Cache:
    """A small least-recently-used cache; threads may share it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, build: Callable[[], _T]) -> _T:
        with self._lock:
            found: _T | None = self._entries.get(key)
            if found is None:
                found = self._entries[key] = build()
                if len(self._entries) > self._capacity:
                    self._entries.popitem(last=False)
            else:
                self._entries.move_to_end(key)
            return found

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


class SegmentTable:
    """The segments of one flat buffer, checked once, with everything derived from them.

    Args:
        segments: in any order; a tensor may be cut into several; zero-element segments are allowed.
        num_tensors: length of the tensor lists that `pack_` and `unpack_` will be given.

    `flat_numel` is the smallest flat buffer that fits; `tensor_numel[i]` the smallest tensor that may stand at list
    entry `i`. The table remembers views of the last few flat buffers it was used with and so keeps those alive;
    `release()` forgets them. On CUDA it also remembers what it has uploaded: use a table on one stream only.

    Raises:
        ValueError: a segment out of range, or two segments (or flags) that share an element.
    """

    def __init__(self, segments: Sequence[Segment], num_tensors: int) -> None:
        self.segments = tuple(segments)
        self.num_tensors = num_tensors
        self.tensor_numel = [0] * num_tensors
        self.by_tensor: list[list[int]] = [[] for _ in range(num_tensors)]
        for index, segment in enumerate(self.segments):
            _check_segment(index, segment, num_tensors)
            self.by_tensor[segment.tensor].append(index)
            self.tensor_numel[segment.tensor] = max(self.tensor_numel[segment.tensor], segment.start + segment.numel)
        self.flat_numel = _check_flat_extents(self.segments)
        _check_tensor_extents(self.segments)
        self.flags = [segment.flag for segment in self.segments if segment.flag >= 0]
        self.flats = _Cache(MAX_CACHED_FLATS)  # what is bound to one flat buffer
        self.device_tables = _Cache(64)  # static tables by (kind, device)
        self.uploads: dict[str, tuple[object, Tensor]] = {}  # what was sent last, with the values it holds

    def release(self) -> None:
        """Forgets all views and device tables; the next use builds them again."""
        self.flats.clear()
        self.device_tables.clear()
        self.uploads.clear()

    def check_flat(self, flat: Tensor) -> None:
        """Raises ValueError unless `flat` is a contiguous 1-D tensor of a supported dtype that fits this table."""
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(f"flat has shape {tuple(flat.shape)}, strides {flat.stride()}; expected contiguous 1-D.")
        if flat.numel() < self.flat_numel:
            raise ValueError(f"flat has {flat.numel()} elements; the segment table needs at least {self.flat_numel}.")
        check_dtype(flat, "flat")

    def check_tensor(self, index: int, tensor: Tensor) -> None:
        """Raises ValueError unless `tensor` may stand at list entry `index`."""
        if tensor.numel() < self.tensor_numel[index]:
            raise ValueError(
                f"tensor {index} has shape {tuple(tensor.shape)}, {tensor.numel()} elements; "
                f"its segments reach to element {self.tensor_numel[index]}."
            )
        check_dtype(tensor, f"tensor {index}")

    def check_length(self, tensors: Sequence[Tensor | None]) -> None:
        if len(tensors) != self.num_tensors:
            raise ValueError(
                f"got {len(tensors)} tensors; the segment table was built for {self.num_tensors}. "
                "Pass None for a missing one."
            )

    def tiles(self, block_numel: int, device: torch.device) -> Tensor:
        """`plan_tiles` of this table on `device`, made once."""
        return self.device_tables.get(
            ("tiles", block_numel, device), lambda: plan_tiles(self.segments, block_numel).to(device)
        )


def _check_segment(index: int, segment: Segment, num_tensors: int) -> None:
    if not 0 <= segment.tensor < num_tensors:
        raise ValueError(f"segment {index} names tensor {segment.tensor}; expected 0 to {num_tensors - 1}.")
    if segment.start < 0 or segment.offset < 0 or segment.numel < 0 or segment.flag < -1:
        raise ValueError(
            f"segment {index} is {segment}; start, offset and numel must not be negative, flag at least -1."
        )


def _check_flat_extents(segments: Sequence[Segment]) -> int:
    """Returns the end of the last used element of the flat buffer."""
    extents = [(s.offset, s.numel, f"segment {i}") for i, s in enumerate(segments) if s.numel]
    extents += [(s.flag, 1, f"the flag of segment {i}") for i, s in enumerate(segments) if s.flag >= 0]
    return _check_disjoint(extents, "of the flat buffer")


def _check_tensor_extents(segments: Sequence[Segment]) -> None:
    by_tensor: dict[int, list[tuple[int, int, str]]] = {}
    for i, s in enumerate(segments):
        if s.numel:
            by_tensor.setdefault(s.tensor, []).append((s.start, s.numel, f"segment {i}"))
    for tensor, extents in by_tensor.items():
        _check_disjoint(extents, f"of tensor {tensor}")


def _check_disjoint(extents: list[tuple[int, int, str]], where: str) -> int:
    """Extents are (first element, number of elements, name). Returns the largest end, 0 for none."""
    end, last = 0, ""
    for begin, numel, name in sorted(extents):
        if begin < end:
            raise ValueError(f"{last} and {name} share element {begin} {where}; every element may have one owner.")
        end, last = begin + numel, name
    return end


# Columns of a pack tile. A row holds all a program needs beside the tensor's address, so data is two loads away.
TILE_START, TILE_OFFSET, TILE_NUMEL, TILE_TENSOR, TILE_FLAG, TILE_COLUMNS = 0, 1, 2, 3, 4, 5


def plan_tiles(segments: Sequence[Segment], block_numel: int) -> Tensor:
    """Cuts segments into tiles of at most `block_numel` elements: the unit of work of one kernel program.

    Returns an int64 CPU tensor [num_tiles, 5] of (start in the tensor, offset in the flat buffer, numel, tensor, flag).
    The flag stands in a segment's first tile only, -1 elsewhere. A zero-element segment has a tile only for its flag.

        >>> plan_tiles([Segment(tensor=0, start=2, offset=10, numel=5, flag=20)], 4).tolist()
        [[2, 10, 4, 0, 20], [6, 14, 1, 0, -1]]
    """
    rows = [s for s in segments if s.numel or s.flag >= 0]
    if not rows:
        return torch.empty(0, TILE_COLUMNS, dtype=torch.int64)
    table = torch.tensor([(s.start, s.offset, s.numel, s.tensor, s.flag) for s in rows], dtype=torch.int64)
    tiles, first = _cut(table, TILE_NUMEL, (TILE_START, TILE_OFFSET), block_numel)
    tiles[~first, TILE_FLAG] = -1
    return tiles


def _cut(table: Tensor, numel_column: int, moving: tuple[int, ...], block_numel: int) -> tuple[Tensor, Tensor]:
    """Repeats each row once per block of its numel; `moving` columns advance. Also returns which rows are a first."""
    numel = table[:, numel_column]
    num_blocks = torch.clamp((numel + block_numel - 1) // block_numel, min=1)
    tiles = table.repeat_interleave(num_blocks, dim=0)
    block = torch.arange(len(tiles)) - (num_blocks.cumsum(0) - num_blocks).repeat_interleave(num_blocks)
    done = block * block_numel
    for column in moving:
        tiles[:, column] += done
    tiles[:, numel_column] = torch.clamp(tiles[:, numel_column] - done, max=block_numel)
    return tiles, block == 0


class StepTable:
    """The segments of one flat shard for the optimizer steps, checked once.

    Args:
        segments: disjoint, in any order; entry `i` belongs to element `i` of `steps` and `used`.
        shard_numel: elements of the shard; elements outside every segment are never written.
        absorb_gaps: elements between two neighbouring segments (padding) may be stepped like their neighbours, which
            lets the CPU path step both as one tensor. Only for padding whose content nobody reads.

    Raises:
        ValueError: a segment out of range, or two that share an element.
    """

    def __init__(self, segments: Sequence[StepSegment], shard_numel: int, *, absorb_gaps: bool = False) -> None:
        self.segments = tuple(segments)
        self.shard_numel = shard_numel
        self.num_segments = len(self.segments)
        self.num_groups = 1 + max((s.group for s in self.segments), default=-1)
        self._absorb_gaps = absorb_gaps
        for index, segment in enumerate(self.segments):
            if segment.offset < 0 or segment.numel < 0 or segment.group < 0:
                raise ValueError(f"step segment {index} is {segment}; no field may be negative.")
            if segment.offset + segment.numel > shard_numel:
                raise ValueError(
                    f"step segment {index} is {segment}; it ends beyond the shard of {shard_numel} elements."
                )
        _check_disjoint(
            [(s.offset, s.numel, f"step segment {i}") for i, s in enumerate(segments) if s.numel], "of the shard"
        )
        self._order = sorted((i for i, s in enumerate(segments) if s.numel), key=lambda i: self.segments[i].offset)
        self._uniform_runs: list[Run] | None = None
        self.device_tables = _Cache(64)
        self.uploads: dict[str, tuple[object, Tensor]] = {}

    def release(self) -> None:
        """Forgets all device tables; the next use builds them again."""
        self.device_tables.clear()
        self.uploads.clear()

    def check_shard(self, shard: Tensor, name: str) -> None:
        """Raises ValueError unless `shard` is contiguous, 1-D, of a supported dtype and of this table's extent."""
        if shard.dim() != 1 or not shard.is_contiguous() or shard.numel() != self.shard_numel:
            raise ValueError(
                f"{name} has shape {tuple(shard.shape)}, strides {shard.stride()}; "
                f"expected contiguous 1-D of {self.shard_numel} elements."
            )
        check_dtype(shard, name)

    def check_per_segment(self, values: Tensor, name: str) -> None:
        if values.dim() != 1 or values.numel() != self.num_segments:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}; expected 1-D of {self.num_segments}, one per segment."
            )

    def check_hyper(self, hyper: Sequence[Any]) -> None:
        if len(hyper) < self.num_groups:
            raise ValueError(f"got hyper-parameters of {len(hyper)} groups; the step table names {self.num_groups}.")

    def runs(self, steps: Sequence[float], used: Sequence[Any] | None) -> list[Run]:
        """Used elements as the fewest runs of one group and one step count, in the order of the shard."""
        if used is None and steps and min(steps) == max(steps):
            if self._uniform_runs is None:
                self._uniform_runs = self._merge([0.0] * self.num_segments, None)
            return self._uniform_runs
        return self._merge(steps, used)

    def _merge(self, steps: Sequence[float], used: Sequence[Any] | None) -> list[Run]:
        runs: list[Run] = []
        previous = -2  # position in the shard's order of the last segment taken
        for position, index in enumerate(self._order):
            if used is not None and not used[index]:
                continue
            segment = self.segments[index]
            end = segment.offset + segment.numel
            last = runs[-1] if runs else None
            if (
                last is not None
                and previous == position - 1
                and (self._absorb_gaps or last.offset + last.numel == segment.offset)
                and last.group == segment.group
                and steps[last.segment] == steps[index]
            ):
                runs[-1] = Run(last.offset, end - last.offset, last.group, last.segment)
            else:
                runs.append(Run(segment.offset, segment.numel, segment.group, index))
            previous = position
        return runs

    def tiles(self, block_numel: int, device: torch.device) -> Tensor:
        """`plan_step_tiles` of this table on `device`, made once."""
        return self.device_tables.get(
            ("tiles", block_numel, device), lambda: plan_step_tiles(self.segments, block_numel).to(device)
        )

    def groups(self, device: torch.device) -> Tensor:
        """int32 [num_segments]: the parameter group of each segment, on `device`, made once."""
        return self.device_tables.get(
            ("groups", device),
            lambda: torch.tensor([s.group for s in self.segments], dtype=torch.int32, device=device),
        )


# Columns of a step tile.
STEP_OFFSET, STEP_NUMEL, STEP_SEGMENT, STEP_COLUMNS = 0, 1, 2, 3


def plan_step_tiles(segments: Sequence[StepSegment], block_numel: int) -> Tensor:
    """Cuts step segments into tiles: int64 CPU tensor [num_tiles, 3] of (offset in the shard, numel, segment).

    >>> plan_step_tiles([StepSegment(offset=3, numel=5), StepSegment(offset=8, numel=1)], 4).tolist()
    [[3, 4, 0], [7, 1, 0], [8, 1, 1]]
    """
    rows = [(s.offset, s.numel, i) for i, s in enumerate(segments) if s.numel]
    if not rows:
        return torch.empty(0, STEP_COLUMNS, dtype=torch.int64)
    return _cut(torch.tensor(rows, dtype=torch.int64), STEP_NUMEL, (STEP_OFFSET,), block_numel)[0]

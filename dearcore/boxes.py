"""A range of a tensor's elements as boxes, for formats that know rectangles only. Pure functions of shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "plan_boxes"]


@dataclass(frozen=True, slots=True)
class Box:
    """Elements [offsets, offsets + sizes) of a row-major tensor; they lie one after the other from `start`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def plan_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cuts elements [start, stop) of a row-major tensor into as few boxes as rows allow, in order.

    Elements 2 to 10 of [4, 3]:     . . a      a is the end of a row: [0:1, 2:3]
                                    b b b      b are whole rows:      [1:3, 0:3]
                                    b b b
                                    c . .      c begins a row:        [3:4, 0:1]
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    row_numel = math.prod(shape[1:])
    first, end = -(-start // row_numel), stop // row_numel  # whole rows
    if first > end:  # inside one row
        return _in_row(shape, end, start, stop)
    boxes = _in_row(shape, first - 1, start, first * row_numel)
    if first < end:
        boxes.append(Box((first, *[0] * (len(shape) - 1)), (end - first, *shape[1:]), first * row_numel))
    return boxes + _in_row(shape, end, end * row_numel, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    base = row * math.prod(shape[1:])
    return [
        Box((row, *box.offsets), (1, *box.sizes), base + box.start)
        for box in plan_boxes(shape[1:], start - base, stop - base)
    ]

"""Ranges as boxes, against the elements themselves."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dearcore.boxes import Box, plan_boxes


def test_the_worked_example() -> None:
    assert plan_boxes((4, 3), 2, 10) == [Box((0, 2), (1, 1), 2), Box((1, 0), (2, 3), 3), Box((3, 0), (1, 1), 9)]


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_hold_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    elements = torch.arange(numel).view(shape)
    boxes = plan_boxes(shape, start, stop)
    found: list[int] = []
    for box in boxes:
        part = elements
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert part.reshape(-1)[0] == box.start
        assert box.numel == part.numel()
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(0, 3), max_size=3))
def test_nothing_makes_no_box(shape: list[int]) -> None:
    numel = math.prod(shape)
    assert plan_boxes(shape, numel, numel) == []

"""Tables: validation, tiles, and offsets beyond 2**31 (cases 91 to 93)."""

import pytest
import torch

from dear_kernels import Segment, SegmentTable, StepSegment, StepTable
from dear_kernels.addresses import collapse
from dear_kernels.segments import Run, plan_step_tiles, plan_tiles


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(2, 0, 0, 1)], "segment 0 names tensor 2; expected 0 to 1"),
        ([Segment(0, 0, -1, 1)], "must not be negative"),
        ([Segment(0, 0, 0, 4), Segment(1, 0, 3, 4)], "segment 0 and segment 1 share element 3 of the flat buffer"),
        ([Segment(0, 0, 0, 4, flag=2)], "segment 0 and the flag of segment 0 share element 2"),
        ([Segment(0, 0, 0, 1, flag=7), Segment(1, 0, 1, 1, flag=7)], "flag of segment 0 and the flag of segment 1"),
        ([Segment(0, 0, 0, 4), Segment(0, 3, 8, 4)], "segment 0 and segment 1 share element 3 of tensor 0"),
    ],
)
def test_bad_segments_raise(segments, message):
    with pytest.raises(ValueError, match=message):
        SegmentTable(segments, num_tensors=2)


def test_empty_segments_may_stand_anywhere():
    table = SegmentTable([Segment(0, 0, 0, 4), Segment(1, 0, 2, 0), Segment(1, 0, 4, 0)], num_tensors=2)
    assert table.flat_numel == 4
    assert plan_tiles(table.segments, 4).tolist() == [[0, 0, 4, 0, -1]]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([StepSegment(0, 5)], "ends beyond the shard of 4 elements"),
        ([StepSegment(0, 2), StepSegment(1, 2)], "step segment 0 and step segment 1 share element 1 of the shard"),
        ([StepSegment(0, 2, -1)], "no field may be negative"),
    ],
)
def test_bad_step_segments_raise(segments, message):
    with pytest.raises(ValueError, match=message):
        StepTable(segments, shard_numel=4)


def test_pack_tiles_example():
    assert plan_tiles([Segment(tensor=0, start=2, offset=10, numel=5, flag=20)], 4).tolist() == [
        [2, 10, 4, 0, 20],
        [6, 14, 1, 0, -1],
    ]


def test_step_tiles_example():
    tiles = plan_step_tiles([StepSegment(offset=3, numel=5), StepSegment(offset=8, numel=1)], 4)
    assert tiles.tolist() == [[3, 4, 0], [7, 1, 0], [8, 1, 1]]


@pytest.mark.parametrize("segments", [[], [Segment(0, 0, 0, 0)]])
def test_nothing_to_do_has_no_tiles(segments):
    assert plan_tiles(segments, 4).shape == (0, 5)
    assert plan_step_tiles([StepSegment(0, 0)], 4).shape == (0, 3)


def test_an_empty_segment_keeps_its_flag():
    assert plan_tiles([Segment(0, 0, 3, 0, flag=9)], 4).tolist() == [[0, 3, 0, 0, 9]]


def test_tiles_beyond_32_bits():
    """Fake sizes: 2**31 + 4096 elements of a tensor from element 2**32 on, at offset 2**33 of the flat buffer."""
    block = 1 << 20
    numel = 2**31 + 4096
    tiles = plan_tiles([Segment(0, 2**32, 2**33, numel, flag=2**34)], block)
    assert tiles.dtype == torch.int64
    assert len(tiles) == 2049
    assert tiles[-1].tolist() == [2**32 + 2**31, 2**33 + 2**31, 4096, 0, -1]
    assert tiles[:, 2].sum() == numel
    step_tiles = plan_step_tiles([StepSegment(2**33, numel)], block)
    assert step_tiles.dtype == torch.int64
    assert step_tiles[-1].tolist() == [2**33 + 2**31, 4096, 0]


def test_tiles_cover_each_element_once():
    segments = [Segment(0, 5, 100, 37, flag=0), Segment(1, 0, 3, 1), Segment(2, 0, 40, 16, flag=1)]
    covered = [
        (tensor, start + i, offset + i)
        for start, offset, numel, tensor, _ in plan_tiles(segments, 16).tolist()
        for i in range(numel)
    ]
    expected = [(s.tensor, s.start + i, s.offset + i) for s in segments for i in range(s.numel)]
    assert sorted(covered) == sorted(expected)


def test_neighbours_of_one_group_and_step_are_one_run():
    table = StepTable([StepSegment(4, 2, 0), StepSegment(0, 4, 0), StepSegment(6, 2, 1), StepSegment(9, 1, 1)], 10)
    assert table.runs([1, 1, 1, 1], None) == [Run(0, 6, 0, 1), Run(6, 2, 1, 2), Run(9, 1, 1, 3)]
    assert table.runs([2, 1, 1, 1], None) == [Run(0, 4, 0, 1), Run(4, 2, 0, 0), Run(6, 2, 1, 2), Run(9, 1, 1, 3)]
    assert table.runs([1, 1, 1, 1], [0, 1, 0, 1]) == [Run(0, 4, 0, 1), Run(9, 1, 1, 3)]


def test_gaps_are_absorbed_only_on_request_and_never_over_an_unused_segment():
    segments = [StepSegment(0, 2), StepSegment(3, 2), StepSegment(6, 2)]
    assert len(StepTable(segments, 8).runs([1, 1, 1], None)) == 3
    table = StepTable(segments, 8, absorb_gaps=True)
    assert table.runs([1, 1, 1], None) == [Run(0, 8, 0, 0)]
    assert table.runs([1, 1, 1], [1, 0, 1]) == [Run(0, 2, 0, 0), Run(6, 2, 0, 2)]


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((2, 3, 4, 5), (60, 1, 15, 3), [(20, 3), (3, 1), (2, 60)]),
        ((2, 3), (1, 2), [(3, 2), (2, 1)]),
        ((2, 1, 3), (3, 99, 1), [(6, 1)]),
        ((), (), [(1, 1)]),
        ((3, 4), (0, 1), [(4, 1), (3, 0)]),
    ],
)
def test_collapse(shape, stride, expected):
    assert collapse(shape, stride) == expected

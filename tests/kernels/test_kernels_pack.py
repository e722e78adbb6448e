"""The pack and unpack twins against a loop over single elements."""

import pytest
import torch

from dear_kernels import Segment, SegmentTable, pack_, unpack_
from tests.kernels.kernel_cases import DTYPES, naive_pack, naive_unpack, random_pack_case

KINDS = ("contiguous", "contiguous", "transposed", "channels_last", "sliced", "expanded")
SCALES = (1.0, 0.5, 1 / 3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("flat_dtype", DTYPES)
def test_pack_equals_a_loop(seed, flat_dtype):
    dtypes = DTYPES if seed % 2 else (DTYPES[seed],)
    case = random_pack_case(seed, dtypes, KINDS)
    scale = SCALES[seed % 3]
    flat = torch.randn(case.flat_numel).to(flat_dtype)
    expected = naive_pack(flat, case.tensors, case.table, scale)
    for _ in range(2):  # the second time with cached views
        pack_(flat, case.tensors, case.table, scale=scale)
        assert torch.equal(flat, expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("flat_dtype", DTYPES)
def test_unpack_equals_a_loop(seed, flat_dtype):
    case = random_pack_case(seed, DTYPES if seed % 2 else (DTYPES[seed],), KINDS[:-1])
    scale = SCALES[seed % 3]
    flat = torch.randint(-64, 64, (case.flat_numel,)).to(torch.float64).div(4).to(flat_dtype)
    expected = [None if t is None else naive_unpack(t, i, flat, case.table, scale) for i, t in enumerate(case.tensors)]
    unpack_(case.tensors, flat, case.table, scale=scale)
    for tensor, values in zip(case.tensors, expected, strict=True):
        assert tensor is None or torch.equal(tensor.flatten(), values)


@pytest.mark.parametrize("offset", range(1, 34))
def test_every_small_offset(offset):
    table = SegmentTable([Segment(0, 0, offset, 35, flag=0)], 1)
    flat = torch.full((80,), 9.0)
    pack_(flat, [torch.arange(35.0)], table)
    assert flat.tolist() == [1, *[9] * (offset - 1), *range(35), *[9] * (45 - offset)]


def test_a_tensor_that_goes_missing_and_comes_back():
    table = SegmentTable([Segment(0, 0, 0, 2, flag=4), Segment(1, 0, 2, 2, flag=5)], 2)
    flat = torch.full((6,), 9.0)
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    for tensors, expected in (
        ([a, b], [1, 2, 3, 4, 1, 1]),
        ([a, None], [1, 2, 0, 0, 1, 0]),
        ([None, None], [0, 0, 0, 0, 0, 0]),
        ([a, b], [1, 2, 3, 4, 1, 1]),
    ):
        pack_(flat, tensors, table)
        assert flat.tolist() == expected


def test_a_changed_shape_is_not_broadcast():
    """The same table serves (4,) and (2, 2); a (2,) tensor must raise and not fill both halves."""
    table = SegmentTable([Segment(0, 0, 0, 4)], 1)
    flat = torch.zeros(4)
    pack_(flat, [torch.arange(4.0)], table)
    pack_(flat, [torch.arange(4.0, 8).view(2, 2)], table)
    assert flat.tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"tensor 0 has shape \(2,\), 2 elements; its segments reach to element 4"):
        pack_(flat, [torch.zeros(2)], table)


def test_several_flat_buffers_and_release():
    table = SegmentTable([Segment(0, 0, 0, 2)], 1)
    flats = [torch.zeros(2) for _ in range(12)]
    for value, flat in enumerate(flats):
        pack_(flat, [torch.full((2,), float(value))], table)
    assert [flat.tolist() for flat in flats] == [[v, v] for v in range(12)]
    table.release()
    pack_(flats[0], [torch.ones(2)], table)
    assert flats[0].tolist() == [1, 1]


def test_nonfinite_values_and_signed_zero_pass():
    table = SegmentTable([Segment(0, 0, 1, 4)], 1)
    source = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])
    flat = torch.zeros(6, dtype=torch.bfloat16)
    pack_(flat, [source], table)
    assert torch.equal(flat[1:4].isnan(), torch.tensor([False, False, True]))
    assert flat[1] == float("inf") and flat[2] == -float("inf") and torch.signbit(flat[4])


def test_scale_is_applied_before_the_one_rounding():
    """40000 + 40000 would be inf in fp16; 40000 * 2 scaled by 1/2 in fp32 is not. And one rounding, not two."""
    table = SegmentTable([Segment(0, 0, 0, 1)], 1)
    flat = torch.zeros(1, dtype=torch.float16)
    pack_(flat, [torch.tensor([80000.0])], table, scale=0.5)
    assert flat.item() == 40000


@pytest.mark.parametrize(
    ("flat", "tensors", "message"),
    [
        (torch.zeros(3), [torch.zeros(4)], "flat has 3 elements; the segment table needs at least 4"),
        (torch.zeros(2, 2), [torch.zeros(4)], "expected contiguous 1-D"),
        (torch.zeros(8)[::2], [torch.zeros(4)], "expected contiguous 1-D"),
        (torch.zeros(4, dtype=torch.int32), [torch.zeros(4)], "flat has dtype torch.int32"),
        (torch.zeros(4), [torch.zeros(4, dtype=torch.int32)], "tensor 0 has dtype torch.int32"),
        (torch.zeros(4), [], "got 0 tensors; the segment table was built for 1"),
    ],
)
def test_bad_arguments_raise(flat, tensors, message):
    table = SegmentTable([Segment(0, 0, 0, 4)], 1)
    with pytest.raises(ValueError, match=message):
        pack_(flat, tensors, table)
    with pytest.raises(ValueError, match=message):
        unpack_(tensors, flat, table)


def test_nothing_to_pack():
    pack_(torch.zeros(0), [], SegmentTable([], 0))
    unpack_([], torch.zeros(0), SegmentTable([], 0))
    pack_(torch.zeros(0), [torch.zeros(0, 8)], SegmentTable([Segment(0, 0, 0, 0)], 1))
    flat = torch.full((1,), 9.0)
    pack_(flat, [torch.zeros(0, 8)], SegmentTable([Segment(0, 0, 0, 0, flag=0)], 1))
    assert flat.tolist() == [1]


def test_unpack_writes_parameters_and_bumps_versions():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    version = parameter._version
    unpack_([parameter], torch.arange(4.0), SegmentTable([Segment(0, 0, 0, 4)], 1))
    assert parameter.tolist() == [[0, 1], [2, 3]]
    assert parameter._version > version and parameter.grad_fn is None


def test_pack_reads_parameters():
    flat = torch.zeros(4)
    pack_(flat, [torch.nn.Parameter(torch.ones(4))], SegmentTable([Segment(0, 0, 0, 4)], 1), scale=0.5)
    assert flat.tolist() == [0.5] * 4 and not flat.requires_grad


def test_the_tail_beyond_32_bits():
    """Case 91 on the CPU: 4 GiB of address space, of which only the touched pages exist."""
    offset = 2**31 + 5
    table = SegmentTable([Segment(0, 0, offset, 3, flag=offset + 7)], 1)
    flat = torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    pack_(flat, [torch.tensor([1.0, 2.0, 3.0])], table)
    assert flat[offset : offset + 3].tolist() == [1, 2, 3] and flat[offset + 7] == 1
    out = torch.zeros(3)
    unpack_([out], flat, table)
    assert out.tolist() == [1, 2, 3]

"""The Triton kernels in Triton's interpreter, against their twins. Run by test_kernels_interpreter.py.

A file of its own, outside pytest's pattern: TRITON_INTERPRET must be set before the kernels are decorated, and a
process that has it set can no longer compile. Block sizes are shrunk so that small tensors take every path.

What this ring cannot see: races, misaligned vector accesses, rounding of bf16 (the interpreter truncates, so values are
chosen exactly representable), and launches.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from dear_kernels import (
    AdamHyper,
    Segment,
    SegmentTable,
    SGDHyper,
    StepSegment,
    StepTable,
    adam,
    norm,
    pack,
    rank_sum,
    reference,
    sgd,
    unpack,
)
from tests.kernels import kernel_cases
from tests.kernels.kernel_cases import DTYPES, random_pack_case, random_step_case, strided_tensor

KINDS = ("contiguous", "contiguous", "transposed", "channels_last", "sliced")
NUMELS = (5, 0, 32, 1, 70, 33, 64)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 32 elements, steps of 16, and no more than 3 programs, so that each walks over tiles (case 93)."""
    for module in (pack, unpack, sgd, adam):
        monkeypatch.setattr(module, "BLOCK_NUMEL", 32)
        monkeypatch.setattr(module, "EDGE_NUMEL", 16)
        monkeypatch.setattr(module, "MAX_PROGRAMS", 3)
    for module in (sgd, adam):
        monkeypatch.setattr(module, "SEGMENTS_PER_PROGRAM", 4)
    for module in (norm, rank_sum):
        monkeypatch.setattr(module, "BLOCK_NUMEL", 32)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (kernel_cases.check_pack_example, pack.pack_),
        (kernel_cases.check_unpack_example, unpack.unpack_),
        (kernel_cases.check_sgd_example, sgd.sgd_step_),
        (kernel_cases.check_adam_example, adam.adam_step_),
        (kernel_cases.check_norm_example, norm.norm_stats),
        (kernel_cases.check_sum_rows_example, rank_sum.sum_rows_),
    ],
    ids=["pack", "unpack", "sgd", "adam", "norm", "sum_rows"],
)
def test_worked_example(check, function):
    check(function)


# ------------------------------------------------------------------------------------------------ pack and unpack


@pytest.mark.parametrize("source_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("flat_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_pack_equals_its_twin(small_blocks, source_dtype, flat_dtype, scale):
    dtypes = DTYPES if source_dtype is None else (source_dtype,)
    case = random_pack_case(DTYPES.index(flat_dtype), dtypes, (*KINDS, "expanded"))
    flat = torch.full((case.flat_numel,), 9.0, dtype=flat_dtype)
    expected = flat.clone()
    pack.pack_(flat, case.tensors, case.table, scale=scale)
    reference.pack_(expected, case.tensors, case.table, scale=scale)
    assert torch.equal(flat, expected)


@pytest.mark.parametrize("target_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("flat_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_unpack_equals_its_twin(small_blocks, target_dtype, flat_dtype, scale):
    dtypes = DTYPES if target_dtype is None else (target_dtype,)
    case = random_pack_case(DTYPES.index(flat_dtype), dtypes, KINDS)
    flat = torch.randint(-64, 64, (case.flat_numel,)).to(torch.float64).div(4).to(flat_dtype)
    # clone keeps the strides of dense tensors only, so that sliced ones change theirs: all the better
    mine = [None if t is None else t.clone() for t in case.tensors]
    unpack.unpack_(case.tensors, flat, case.table, scale=scale)
    reference.unpack_(mine, flat, case.table, scale=scale)
    for tensor, expected in zip(case.tensors, mine, strict=True):
        assert tensor is None or torch.equal(tensor, expected)


@pytest.mark.parametrize("offset", range(1, 34))
@pytest.mark.parametrize("start", [0, 3, 4])
def test_every_small_offset(small_blocks, start, offset):
    """Two full tiles and one element; with start 0 or 4 every fourth offset has both sides aligned."""
    table = SegmentTable([Segment(0, start, offset, 65, flag=0)], 1)
    flat = torch.full((100,), 9.0)
    pack.pack_(flat, [torch.arange(70.0)], table)
    assert flat.tolist() == [1, *[9] * (offset - 1), *range(start, start + 65), *[9] * (35 - offset)]
    back = torch.full((70,), 7.0)
    unpack.unpack_([back], flat, table)
    assert back.tolist() == [*[7] * start, *range(start, start + 65), *[7] * (5 - start)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inexact_scale_rounds_once(small_blocks, dtype):
    torch.manual_seed(0)
    source, table = torch.randn(70).to(dtype), SegmentTable([Segment(0, 0, 0, 70)], 1)
    mine, expected = torch.zeros(70), torch.zeros(70)
    pack.pack_(mine, [source], table, scale=1 / 3)
    reference.pack_(expected, [source], table, scale=1 / 3)
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nonfinite_values_pass(small_blocks, dtype):
    source = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0] * 20, dtype=dtype)
    flat, table = torch.zeros(80, dtype=dtype), SegmentTable([Segment(0, 0, 0, 80)], 1)
    pack.pack_(flat, [source], table)
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(flat.isnan(), source.isnan())
    finite = ~source.isnan()
    assert torch.equal(flat.view(as_int)[finite], source.view(as_int)[finite])


def test_the_tail_beyond_32_bits():
    """Case 91: 4 GiB of address space, of which only the touched pages exist."""
    offset = 2**31 + 5
    table = SegmentTable([Segment(0, 0, offset, 3, flag=offset + 7)], 1)
    flat = torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    pack.pack_(flat, [torch.tensor([1.0, 2.0, 3.0])], table)
    assert flat[offset : offset + 3].tolist() == [1, 2, 3] and flat[offset + 7] == 1
    out = torch.zeros(3)
    unpack.unpack_([out], flat, table)
    assert out.tolist() == [1, 2, 3]
    small = torch.zeros(4)
    pack.pack_(small, [flat], SegmentTable([Segment(0, offset, 1, 3)], 1))
    assert small.tolist() == [0, 1, 2, 3]
    rows = flat[: 2**31].view(2**20, 2**11).t()  # strided: logical element (3, 2**20 - 1) stands near the end
    rows[3, 2**20 - 1] = 5
    element = 3 * 2**20 + 2**20 - 1
    pack.pack_(small, [rows], SegmentTable([Segment(0, element, 0, 1)], 1))
    assert small[0] == 5


class NoLaunch:
    def __getitem__(self, grid):
        raise AssertionError(f"launched with grid {grid}")


def test_nothing_to_do_launches_nothing(monkeypatch):
    """Case 92: no grid of size zero."""
    monkeypatch.setattr(pack, "_pack_kernel", NoLaunch())
    monkeypatch.setattr(unpack, "_unpack_kernel", NoLaunch())
    monkeypatch.setattr(norm, "_norm_kernel", NoLaunch())
    monkeypatch.setattr(sgd, "_sgd_kernel", NoLaunch())
    monkeypatch.setattr(adam, "_adam_kernel", NoLaunch())
    empty = torch.zeros(0)
    pack.pack_(empty, [], SegmentTable([], 0))
    pack.pack_(empty, [torch.zeros(0, 8)], SegmentTable([Segment(0, 0, 0, 0)], 1))
    unpack.unpack_([None], torch.zeros(4), SegmentTable([Segment(0, 0, 0, 4)], 1))
    assert norm.norm_stats(empty).tolist() == [0, 0]
    for segments in ([], [StepSegment(0, 0)]):
        table, steps = StepTable(segments, 0), torch.zeros(len(segments))
        sgd.sgd_step_(empty, empty, empty, table, [SGDHyper(0.1, 0.9)], steps, None)
        adam.adam_step_(empty, empty, empty, empty, None, table, [AdamHyper(0.1)], steps, None)
        assert steps.tolist() == [2.0] * len(segments)


def test_an_empty_tensor_raises_its_flag():
    flat = torch.full((2,), 9.0)
    table = SegmentTable([Segment(0, 0, 0, 0, flag=0), Segment(1, 0, 0, 0, flag=1)], 2)
    pack.pack_(flat, [torch.zeros(0, 8), None], table)
    assert flat.tolist() == [1, 0]


def test_versions_are_bumped():
    flat, table = torch.zeros(4), SegmentTable([Segment(0, 0, 0, 4)], 1)
    target, parameter = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4))
    before = (flat._version, target._version)
    pack.pack_(flat, [parameter], table)
    unpack.unpack_([target], flat, table)
    assert (flat._version, target._version) == (before[0] + 1, before[1] + 1)
    assert target.tolist() == [1] * 4


def test_expanded_targets_raise():
    with pytest.raises(ValueError, match="tensor 0 is expanded"):
        unpack.unpack_([torch.zeros(1).expand(4)], torch.zeros(4), SegmentTable([Segment(0, 0, 0, 4)], 1))


def test_many_dimensions():
    tensor = strided_tensor((2, 3, 2, 3, 2, 3), torch.float32, "transposed")
    flat, table = torch.zeros(216), SegmentTable([Segment(0, 0, 0, 216)], 1)
    pack.pack_(flat, [tensor], table)
    assert torch.equal(flat, tensor.flatten())


# ---------------------------------------------------------------------------------------------------------- steps


def check_step(step_, twin_, case, hyper, used, dtype, low=None):
    mine, expected = case.clone(), case.clone()
    copies = [None if low is None else torch.full((case.table.shard_numel,), 9.0, dtype=low) for _ in range(2)]
    for _ in range(2):
        mine.run(step_, hyper, used, low_precision_param=copies[0])
        expected.run(twin_, hyper, used, low_precision_param=copies[1])
    for (name, tensor), twin in zip(mine.tensors().items(), expected.tensors().values(), strict=True):
        # no FMA and the same order of operations on both sides; a few ulp remain for fused multiply-adds in PyTorch
        rtol = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(
            tensor, twin, rtol=rtol, atol=rtol / 10, equal_nan=True, msg=f"{name}: {tensor} instead of {twin}"
        )
    inside = torch.zeros_like(case.param, dtype=torch.bool)
    for index, segment in enumerate(case.table.segments):
        if used is None or used[index] != 0:
            inside[segment.offset : segment.offset + segment.numel] = True
    for tensor, before in zip([mine.param, *mine.state], [case.param, *case.state], strict=True):
        assert tensor is None or torch.equal(tensor[~inside], before[~inside])
    assert torch.equal(mine.steps, expected.steps)
    if low is not None:
        assert (copies[0][~inside] == 9).all()
        torch.testing.assert_close(copies[0], copies[1], rtol=2e-2, atol=1e-2)


USED = [None, torch.tensor([1.0, 0, 1, 1, 0, 2, 1]), torch.tensor([0, 1, 1, 0, 1, 1, 0]).bool()]


@pytest.mark.parametrize("used", USED, ids=["all", "float", "bool"])
@pytest.mark.parametrize("flags", range(6))
def test_sgd_equals_its_twin(small_blocks, flags, used):
    kinds = [
        SGDHyper(0.1),
        SGDHyper(0.1, 0.9),
        SGDHyper(0.1, 0.9, 0.2, 0.01),
        SGDHyper(0.1, 0.9, 0.0, 0.01, nesterov=True),
        SGDHyper(0.1, 0.9, 0.0, 0.0, maximize=True),
        SGDHyper(0.1, 0.0, 0.0, 0.01, maximize=True),
    ]
    hyper = [kinds[flags], kinds[(flags + 2) % 6]]
    check_step(
        sgd.sgd_step_,
        reference.sgd_step_,
        random_step_case(flags, 1, torch.float32, NUMELS),
        hyper,
        used,
        torch.float32,
    )


@pytest.mark.parametrize("used", USED, ids=["all", "float", "bool"])
@pytest.mark.parametrize("flags", range(6))
def test_adam_equals_its_twin(small_blocks, flags, used):
    kinds = [
        AdamHyper(0.1),
        AdamHyper(0.1, 0.3, 0.99, amsgrad=True),
        AdamHyper(0.1, weight_decay=0.1),
        AdamHyper(0.1, weight_decay=0.1, decoupled_weight_decay=True),
        AdamHyper(0.1, maximize=True, weight_decay=0.1, amsgrad=True),
        AdamHyper(0.1, 0.0, 0.9, eps=1e-3),
    ]
    hyper = [kinds[flags], kinds[(flags + 2) % 6]]
    check_step(
        adam.adam_step_,
        reference.adam_step_,
        random_step_case(flags, 3, torch.float32, NUMELS),
        hyper,
        used,
        torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=str)
def test_step_dtypes(small_blocks, dtype, low):
    case = random_step_case(0, 3, dtype, NUMELS)
    hyper = [AdamHyper(0.1, weight_decay=0.1), AdamHyper(0.01)]
    check_step(adam.adam_step_, reference.adam_step_, case, hyper, USED[1], dtype, low)
    case = random_step_case(0, 1, dtype, NUMELS)
    check_step(sgd.sgd_step_, reference.sgd_step_, case, [SGDHyper(0.1, 0.9), SGDHyper(0.2)], USED[1], dtype, low)


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
def test_aligned_full_blocks(small_blocks, low):
    """Segments of whole blocks at multiples of 16, so that the path without masks runs too."""
    segments = [StepSegment(0, 64), StepSegment(64, 32, 1), StepSegment(96, 39), StepSegment(144, 32)]
    used = torch.tensor([1.0, 1, 1, 0])
    for step_, twin_, num_states, hyper in (
        (adam.adam_step_, reference.adam_step_, 3, [AdamHyper(0.1, amsgrad=True), AdamHyper(0.2)]),
        (sgd.sgd_step_, reference.sgd_step_, 1, [SGDHyper(0.1, 0.9), SGDHyper(0.2)]),
    ):
        case = random_step_case(0, num_states, torch.float32, (176,))
        numel = case.param.numel()
        case.table, case.steps = StepTable(segments, numel), torch.tensor([0.0, 2, 2, 1])
        check_step(step_, twin_, case, hyper, used, torch.float32, low)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_step_gradient_dtypes(small_blocks, grad_dtype):
    case = random_step_case(0, 1, torch.float32, NUMELS)
    case.grad = case.grad.to(grad_dtype)
    check_step(sgd.sgd_step_, reference.sgd_step_, case, [SGDHyper(0.1, 0.9), SGDHyper(0.2)], None, torch.float32)


def test_steps_treat_nonfinite_gradients_as_the_twin_does(small_blocks):
    case = random_step_case(0, 3, torch.float32, NUMELS)
    case.grad[::3] = float("nan")
    case.grad[1::5] = float("inf")
    hyper = [AdamHyper(0.1, amsgrad=True), AdamHyper(0.1, weight_decay=0.1)]
    check_step(adam.adam_step_, reference.adam_step_, case, hyper, None, torch.float32)
    case.state = case.state[:1]
    check_step(sgd.sgd_step_, reference.sgd_step_, case, [SGDHyper(0.1, 0.9), SGDHyper(0.1)], None, torch.float32)


def test_first_update_ignores_what_the_buffer_held(small_blocks):
    buffer, param, grad = torch.full((40,), float("nan")), torch.ones(40), torch.arange(40.0)
    table = StepTable([StepSegment(0, 40)], 40)
    sgd.sgd_step_(param, grad, buffer, table, [SGDHyper(0.1, 0.9)], torch.zeros(1), None)
    assert torch.equal(buffer, grad) and param.isfinite().all()


def test_many_steps_keep_the_bias_correction_exact():
    """beta ** step = exp(step * ln beta) in fp64, at a step where fp32 would be wrong."""
    case = random_step_case(0, 2, torch.float64, (5,), 1)
    case.state.append(None)
    case.steps.fill_(123456.0)
    hyper = [AdamHyper(0.1, 0.9, 0.999999)]
    check_step(adam.adam_step_, reference.adam_step_, case, hyper, None, torch.float64)


# ----------------------------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 31, 32, 33, 1000])
def test_norm_equals_its_twin(small_blocks, monkeypatch, dtype, numel):
    monkeypatch.setattr(norm, "MAX_PROGRAMS", 4)
    torch.manual_seed(numel)
    shard = torch.randn(numel).to(dtype)
    torch.testing.assert_close(norm.norm_stats(shard), reference.norm_stats(shard), rtol=1e-14, atol=0)
    for value in (float("inf"), float("nan")):
        shard[numel // 2] = value
        assert norm.found_nonfinite(shard).item() == 1.0
    assert norm.norm_stats(torch.full((numel,), 1e200, dtype=torch.float64)).tolist() == [float("inf"), 0.0]


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 64, 70])
@pytest.mark.parametrize("num_rows", [1, 3, 4])
@pytest.mark.parametrize(("row_dtype", "dtype"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_rows_are_summed_in_their_order(small_blocks, numel, num_rows, row_dtype, dtype):
    """Magnitudes so different that another order gives other bits; the first row has a zero with a sign."""
    torch.manual_seed(numel)
    rows = (torch.randn(num_rows, numel, dtype=dtype) * 10.0 ** torch.randint(-6, 6, (num_rows, numel))).to(row_dtype)
    rows[0, 0] = -0.0
    mine, expected = torch.full((numel,), 9.0, dtype=dtype), torch.zeros(numel, dtype=dtype)
    rank_sum.sum_rows_(mine, rows, num_rows)
    reference.sum_rows_(expected, rows, num_rows)
    assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))

"""What the kernel tests share: the worked examples of the docstrings, random segment tables, and a slow plain oracle.

Not a test file. Every example takes the functions to run as an argument, so that the twins, the public functions and
the kernels in Triton's interpreter all run the same ones.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dear_kernels import AdamHyper, Segment, SegmentTable, SGDHyper, StepSegment, StepTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# ------------------------------------------------------------------------------------------------ worked examples


def example_table() -> SegmentTable:
    return SegmentTable(
        [Segment(0, 0, 0, 3, flag=3), Segment(0, 3, 4, 1, flag=6), Segment(1, 0, 5, 0, flag=7)], num_tensors=2
    )


def check_pack_example(pack_: Callable[..., None]) -> None:
    flat = torch.full((8,), 9.0)
    pack_(flat, [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None], example_table(), scale=0.5)
    assert flat.tolist() == [0.5, 1.0, 1.5, 1, 2.0, 9, 1, 0]


def check_unpack_example(unpack_: Callable[..., None]) -> None:
    a = torch.zeros(2, 2)
    unpack_([a, None], torch.tensor([0.5, 1.0, 1.5, 1, 2.0, 9, 1, 0]), example_table(), scale=2.0)
    assert a.tolist() == [[1, 2], [3, 4]]


def check_sgd_example(sgd_step_: Callable[..., None]) -> None:
    table = StepTable([StepSegment(0, 2), StepSegment(2, 1)], shard_numel=3)
    param, grad = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])
    buffer, steps, used = torch.zeros(3), torch.zeros(2), torch.tensor([1.0, 0.0])
    sgd_step_(param, grad, buffer, table, [SGDHyper(lr=0.5, momentum=0.5)], steps, used)
    assert (param.tolist(), buffer.tolist(), steps.tolist()) == ([0, 0, 3], [2, 4, 0], [1, 0])
    sgd_step_(param, grad, buffer, table, [SGDHyper(lr=0.5, momentum=0.5)], steps, used)
    assert (param.tolist(), buffer.tolist(), steps.tolist()) == ([-1.5, -3, 3], [3, 6, 0], [2, 0])


def check_adam_example(adam_step_: Callable[..., None]) -> None:
    table = StepTable([StepSegment(0, 2), StepSegment(2, 1)], shard_numel=3)
    param, grad = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, -4.0, 6.0])
    exp_avg, exp_avg_sq, steps = torch.zeros(3), torch.zeros(3), torch.zeros(2)
    hyper = [AdamHyper(lr=0.5, beta1=0.5, beta2=0.5, eps=0.0)]
    adam_step_(param, grad, exp_avg, exp_avg_sq, None, table, hyper, steps, torch.tensor([1.0, 0.0]))
    assert param.tolist() == [0.5, 2.5, 3]
    assert (exp_avg.tolist(), exp_avg_sq.tolist(), steps.tolist()) == ([1, -2, 0], [2, 8, 0], [1, 0])


def check_norm_example(norm_stats: Callable[..., Tensor]) -> None:
    assert norm_stats(torch.tensor([3.0, 4.0])).tolist() == [25, 0]
    assert norm_stats(torch.tensor([3.0, float("inf")])).tolist() == [float("inf"), 1]
    assert norm_stats(torch.tensor([])).tolist() == [0, 0]


# ------------------------------------------------------------------------------------------------ pack and unpack


@dataclass(frozen=True, slots=True)
class PackCase:
    table: SegmentTable
    tensors: list[Tensor | None]
    flat_numel: int


def strided_tensor(shape: Sequence[int], dtype: torch.dtype, kind: str) -> Tensor:
    """Small multiples of 1/4, exact in every dtype, laid out in memory as `kind` says."""
    values = torch.randint(-64, 64, tuple(shape)).to(torch.float64).div(4).to(dtype)
    if kind == "contiguous":
        return values
    if kind == "transposed":
        order = list(reversed(range(values.dim())))
        return values.permute(order).contiguous().permute(order)
    if kind == "channels_last":
        return values.to(memory_format=torch.channels_last) if values.dim() == 4 else values
    if kind == "sliced":
        wide = torch.zeros(*shape[:-1], 2 * shape[-1] + 1, dtype=dtype) if shape else torch.zeros(3, dtype=dtype)
        view = wide[..., 1::2] if shape else wide[1]
        return view.copy_(values)
    if kind == "expanded":
        return values[:1].expand(shape) if values.dim() else values
    raise AssertionError(kind)


SHAPES = [(), (1,), (7,), (0,), (3, 5), (0, 8), (2, 3, 4, 5), (33,), (16, 16), (5, 1, 3), (64,), (2, 2, 1, 2, 2)]


def random_pack_case(
    seed: int, dtypes: Sequence[torch.dtype], kinds: Sequence[str], *, gap: int = 3, missing: bool = True
) -> PackCase:
    """Tensors of odd shapes in a random order, some cut in up to three, with gaps, flags and missing ones."""
    random.seed(seed)
    torch.manual_seed(seed)
    tensors: list[Tensor | None] = []
    segments: list[Segment] = []
    offset = random.randint(0, 33)
    order = random.sample(range(len(SHAPES)), len(SHAPES))
    for index in order:
        tensor = strided_tensor(SHAPES[index], random.choice(list(dtypes)), random.choice(list(kinds)))
        cuts = sorted(random.sample(range(1, tensor.numel()), min(2, tensor.numel() - 1))) if tensor.numel() > 6 else []
        cuts = random.choice([[], cuts])
        for start, end in zip([0, *cuts], [*cuts, tensor.numel()], strict=True):
            flag = -1
            if random.random() < 0.7:
                flag = offset
                offset += 1
            segments.append(Segment(len(tensors), start, offset, end - start, flag))
            offset += end - start + random.randint(0, gap)
        tensors.append(None if missing and random.random() < 0.25 else tensor)
    random.shuffle(segments)
    return PackCase(SegmentTable(segments, len(tensors)), tensors, offset + 5)


def naive_pack(flat: Tensor, tensors: Sequence[Tensor | None], table: SegmentTable, scale: float) -> Tensor:
    """What `pack_` must leave in `flat`, one element at a time."""
    flat = flat.clone()
    for segment in table.segments:
        tensor = tensors[segment.tensor]
        for i in range(segment.numel):
            value = 0.0 if tensor is None else convert(logical(tensor, segment.start + i), flat.dtype, scale)
            flat[segment.offset + i] = value
        if segment.flag >= 0:
            flat[segment.flag] = 0 if tensor is None else 1
    return flat


def naive_unpack(tensor: Tensor, index: int, flat: Tensor, table: SegmentTable, scale: float) -> Tensor:
    """What `unpack_` must leave in list entry `index`, one element at a time, as a flat list in logical order."""
    result = tensor.flatten().clone()
    for segment in table.segments:
        if segment.tensor == index:
            for i in range(segment.numel):
                result[segment.start + i] = convert(flat[segment.offset + i], tensor.dtype, scale)
    return result


def logical(tensor: Tensor, element: int) -> Tensor:
    """The row-major logical element, by arithmetic on indices and not by reshaping."""
    index = []
    for size in reversed(tensor.shape):
        index.append(element % size)
        element //= size
    return tensor[tuple(reversed(index))]


def convert(value: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if scale == 1.0:
        return value.to(dtype)
    wide = torch.float64 if torch.float64 in (value.dtype, dtype) else torch.float32
    return (value.to(wide) * torch.tensor(scale, dtype=wide)).to(dtype)


# --------------------------------------------------------------------------------------------------------- steps


@dataclass(slots=True)
class StepCase:
    """Flat copies of what a step reads and writes. `state` is in the order of the step function's arguments."""

    table: StepTable
    param: Tensor
    grad: Tensor
    state: list[Tensor | None]
    steps: Tensor

    def clone(self) -> "StepCase":
        state = [None if t is None else t.clone() for t in self.state]
        return StepCase(self.table, self.param.clone(), self.grad.clone(), state, self.steps.clone())

    def run(self, step_: Callable[..., None], hyper: Sequence[Any], used: Tensor | None, **options: Any) -> None:
        step_(self.param, self.grad, *self.state, self.table, hyper, self.steps, used, **options)

    def tensors(self) -> dict[str, Tensor]:
        named = {"param": self.param, "steps": self.steps}
        return named | {f"state {i}": t for i, t in enumerate(self.state) if t is not None}


def random_step_case(
    seed: int, num_states: int, dtype: torch.dtype, numels: Sequence[int], num_groups: int = 2, *, gap: int = 2
) -> StepCase:
    """Segments of the given lengths with random groups and gaps; some have been stepped before."""
    random.seed(seed)
    torch.manual_seed(seed)
    segments, offset = [], random.randint(0, 3)
    for numel in numels:
        segments.append(StepSegment(offset, numel, random.randrange(num_groups)))
        offset += numel + random.randint(0, gap)
    shard_numel = offset + 3
    state: list[Tensor | None] = [torch.rand(shard_numel).to(dtype) for _ in range(num_states)]
    steps = torch.tensor([float(random.choice([0, 0, 3, 7])) for _ in numels])
    param, grad = torch.randn(shard_numel).to(dtype), torch.randn(shard_numel).to(dtype)
    return StepCase(StepTable(segments, shard_numel), param, grad, state, steps)


def check_sum_rows_example(sum_rows_):
    output = torch.full((3,), 9.0)
    sum_rows_(output, torch.tensor([[1.0, 2.0, 3.0], [5.0, 6.0, 8.0]]), 2)
    assert output.tolist() == [3, 4, 5.5]

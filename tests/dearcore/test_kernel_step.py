"""KernelStepper against TorchStepper: both must do what torch.optim does, on any mix of used segments and groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from dearcore.kernel_step import KernelStepper, has_kernel, make_stepper
from dearcore.shard import OwnedSegment, TorchStepper
from tests.support.reference import assert_bit_equal

SEGMENTS = [
    OwnedSegment(param=0, start=0, offset=0, numel=5, flag=0, group=0),
    OwnedSegment(param=1, start=3, offset=16, numel=7, flag=1, group=1),
    OwnedSegment(param=2, start=0, offset=32, numel=0, flag=2, group=1),
    OwnedSegment(param=3, start=0, offset=32, numel=3, flag=3, group=0),
]
SHARD_NUMEL = 40

CASES = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.AdamW, {"betas": (0.8, 0.9), "maximize": True}),
]


def _optimizer(kind: type[optim.Optimizer], options: dict[str, Any]) -> optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.01)]
    return kind(groups, **options)


def _hyper(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _payload(shard: torch.Tensor) -> list[torch.Tensor]:
    return [shard[s.offset : s.offset + s.numel] for s in SEGMENTS]


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if value is not None}


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_kernel_and_torch_agree_bit_for_bit(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    optimizer = _optimizer(kind, options)
    grad = torch.zeros(SHARD_NUMEL)
    params = [torch.zeros(SHARD_NUMEL), torch.zeros(SHARD_NUMEL)]
    low = [torch.zeros(SHARD_NUMEL, dtype=torch.bfloat16) for _ in range(2)]
    start = torch.randn(SHARD_NUMEL)
    for segment in SEGMENTS:
        span = slice(segment.offset, segment.offset + segment.numel)
        for param, rounded in zip(params, low, strict=True):
            param[span] = start[span]
            rounded[span] = start[span]
    steppers = [
        KernelStepper(optimizer, SEGMENTS, params[0], grad, low[0]),
        TorchStepper(optimizer, SEGMENTS, params[1], grad, low[1]),
    ]
    for used in ([1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]):
        for part in _payload(grad):
            part.copy_(torch.randn(part.shape))
        for stepper in steppers:
            with torch.no_grad():
                stepper.step(torch.tensor(used, dtype=torch.float32), _hyper(optimizer))
        assert_bit_equal(_payload(params[0]), _payload(params[1]), names=("kernel", "torch"))
        for rounded in low:
            assert_bit_equal(_payload(rounded), _payload(params[0].bfloat16()), names=("low precision", "rounded"))

    exported = [stepper.export_state() for stepper in steppers]
    for mine, theirs, segment in zip(*exported, SEGMENTS, strict=True):
        if segment.numel:
            assert_bit_equal(_numbers(mine), _numbers(theirs), names=("kernel", "torch"))


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_state_moves_between_both(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    """What one exports the other loads, and both go on alike."""
    optimizer = _optimizer(kind, options)
    grad, params = torch.randn(SHARD_NUMEL), [torch.zeros(SHARD_NUMEL), torch.zeros(SHARD_NUMEL)]
    kernel = KernelStepper(optimizer, SEGMENTS, params[0], grad)
    used = torch.ones(len(SEGMENTS))
    with torch.no_grad():
        kernel.step(used, _hyper(optimizer))
        kernel.step(torch.tensor([1.0, 0.0, 0.0, 1.0]), _hyper(optimizer))
        params[1].copy_(params[0])
        other = TorchStepper(optimizer, SEGMENTS, params[1], grad)
        other.load_state(kernel.export_state())
        other.step(used, _hyper(optimizer))
        kernel.step(used, _hyper(optimizer))
        assert_bit_equal(_payload(params[0]), _payload(params[1]), names=("kernel", "torch"))
        back = KernelStepper(optimizer, SEGMENTS, params[0], grad)
        back.load_state(other.export_state())
        back.step(used, _hyper(optimizer))
        other.step(used, _hyper(optimizer))
    assert_bit_equal(_payload(params[0]), _payload(params[1]), names=("kernel", "torch"))


def test_the_choice_of_a_stepper() -> None:
    shard = torch.zeros(SHARD_NUMEL)
    sgd = _optimizer(optim.SGD, {})
    assert isinstance(make_stepper(sgd, SEGMENTS, shard, shard, None), TorchStepper), "CPU: torch's own class"
    assert has_kernel(sgd)
    assert not has_kernel(_optimizer(optim.RMSprop, {}))
    sgd.param_groups[0]["lr"] = torch.tensor(0.1)
    assert not has_kernel(sgd), "a tensor lr would make the host wait"

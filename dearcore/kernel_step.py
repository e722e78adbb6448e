"""SGD, Adam and AdamW on one shard in one kernel launch; the host never waits for what the device knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import optim

import dear_kernels

from .shard import OwnedSegment, SegmentState, ShardStepper, TorchStepper

__all__ = ["KernelStepper", "has_kernel", "make_stepper"]


def has_kernel(optimizer: optim.Optimizer) -> bool:
    """True for SGD, Adam and AdamW with plain numbers as options."""
    return type(optimizer) in (optim.SGD, optim.Adam, optim.AdamW) and all(
        not isinstance(group["lr"], torch.Tensor) and not group.get("differentiable") and not group.get("capturable")
        for group in optimizer.param_groups
    )


def make_stepper(
    optimizer: optim.Optimizer,
    segments: Sequence[OwnedSegment],
    param_shard: torch.Tensor,
    grad_shard: torch.Tensor,
    low_precision_shard: torch.Tensor | None,
    average_shard: torch.Tensor | None = None,
) -> ShardStepper:
    """On CUDA a kernel of ours where there is one; else, and on CPU always, the optimizer's own class."""
    if param_shard.is_cuda and has_kernel(optimizer) and all(s.grad_dtype is None for s in segments):
        return KernelStepper(optimizer, segments, param_shard, grad_shard, low_precision_shard)
    return TorchStepper(optimizer, segments, param_shard, grad_shard, low_precision_shard, average_shard)


class KernelStepper:
    """Args as `TorchStepper`. State lives in flat buffers; every segment has a step count of its own on the device."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        segments: Sequence[OwnedSegment],
        param_shard: torch.Tensor,
        grad_shard: torch.Tensor,
        low_precision_shard: torch.Tensor | None = None,
    ) -> None:
        self._segments = segments
        self._param_shard, self._grad_shard, self._low_precision = param_shard, grad_shard, low_precision_shard
        self._table = dear_kernels.StepTable(
            [dear_kernels.StepSegment(s.offset, s.numel, s.group) for s in segments],
            param_shard.numel(),
            absorb_gaps=True,
        )
        self._steps = torch.zeros(len(segments), dtype=torch.float32, device=param_shard.device)
        self._is_adam = type(optimizer) is not optim.SGD
        self._buffers: dict[str, torch.Tensor] = {}

    def step(self, used: torch.Tensor, hyper: Sequence[dict[str, Any]]) -> None:
        if not self._segments:
            return
        (self._step_adam if self._is_adam else self._step_sgd)(used, hyper)

    def export_state(self) -> list[SegmentState]:
        steps = self._steps.tolist()
        states: list[SegmentState] = []
        for segment, count in zip(self._segments, steps, strict=True):
            span = slice(segment.offset, segment.offset + segment.numel)
            state = {name: buffer[span].clone() for name, buffer in self._buffers.items()} if count else {}
            if state and self._is_adam:
                state["step"] = torch.tensor(count)
            states.append(state)
        return states

    def load_state(self, states: Sequence[SegmentState]) -> None:
        self._buffers.clear()
        self._steps.zero_()
        for index, (segment, state) in enumerate(zip(self._segments, states, strict=True)):
            for name, value in state.items():
                if name == "step":
                    self._steps[index] = float(value)
                elif value is not None:
                    self._buffer(name)[segment.offset : segment.offset + segment.numel] = value
                    if not self._is_adam:
                        self._steps[index] = 1.0

    def snapshot(self) -> Callable[[], None]:
        steps, buffers = self._steps.clone(), {name: buffer.clone() for name, buffer in self._buffers.items()}

        def restore() -> None:
            self._steps.copy_(steps)
            for name, buffer in self._buffers.items():
                buffer.copy_(buffers[name]) if name in buffers else buffer.zero_()

        return restore

    def _step_sgd(self, used: torch.Tensor, hyper: Sequence[dict[str, Any]]) -> None:
        momentum = any(group["momentum"] for group in hyper)
        dear_kernels.sgd_step_(
            self._param_shard,
            self._grad_shard,
            self._buffer("momentum_buffer") if momentum else None,
            self._table,
            [
                dear_kernels.SGDHyper(
                    *(group[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"))
                )
                for group in hyper
            ],
            self._steps,
            used,
            low_precision_param=self._low_precision,
        )

    def _step_adam(self, used: torch.Tensor, hyper: Sequence[dict[str, Any]]) -> None:
        amsgrad = any(group["amsgrad"] for group in hyper)
        dear_kernels.adam_step_(
            self._param_shard,
            self._grad_shard,
            self._buffer("exp_avg"),
            self._buffer("exp_avg_sq"),
            self._buffer("max_exp_avg_sq") if amsgrad else None,
            self._table,
            [
                dear_kernels.AdamHyper(
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    amsgrad=group["amsgrad"],
                    maximize=group["maximize"],
                    decoupled_weight_decay=group.get("decoupled_weight_decay", False),
                )
                for group in hyper
            ],
            self._steps,
            used,
            low_precision_param=self._low_precision,
        )

    def _buffer(self, name: str) -> torch.Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.zeros_like(self._param_shard)
        return self._buffers[name]

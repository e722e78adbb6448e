"""Argument checks that a twin and its kernel share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dear_kernels.hyper import AdamHyper, SGDHyper
from dear_kernels.segments import StepTable, check_dtype

__all__ = ["check_adam", "check_norm", "check_sgd", "check_sum_rows"]


def check_sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    table: StepTable,
    hyper: Sequence[SGDHyper],
    steps: Tensor,
    used: Tensor | None,
    low_precision_param: Tensor | None,
) -> None:
    """Raises ValueError for arguments that `sgd_step_` cannot take."""
    _check_common(param, grad, table, hyper, steps, used, low_precision_param)
    if momentum_buffer is not None:
        _check_state(momentum_buffer, param, table, "momentum_buffer")
    elif any(h.momentum != 0 for h in hyper):
        raise ValueError("a group has momentum but momentum_buffer is None; pass a tensor like param.")


def check_adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    table: StepTable,
    hyper: Sequence[AdamHyper],
    steps: Tensor,
    used: Tensor | None,
    low_precision_param: Tensor | None,
) -> None:
    """Raises ValueError for arguments that `adam_step_` cannot take."""
    _check_common(param, grad, table, hyper, steps, used, low_precision_param)
    _check_state(exp_avg, param, table, "exp_avg")
    _check_state(exp_avg_sq, param, table, "exp_avg_sq")
    if max_exp_avg_sq is not None:
        _check_state(max_exp_avg_sq, param, table, "max_exp_avg_sq")
    elif any(h.amsgrad for h in hyper):
        raise ValueError("a group has amsgrad=True but max_exp_avg_sq is None; pass a tensor like param.")


def _check_common(
    param: Tensor,
    grad: Tensor,
    table: StepTable,
    hyper: Sequence[object],
    steps: Tensor,
    used: Tensor | None,
    low_precision_param: Tensor | None,
) -> None:
    table.check_hyper(hyper)
    table.check_shard(param, "param")
    table.check_shard(grad, "grad")
    table.check_per_segment(steps, "steps")
    if not steps.is_contiguous() or not steps.is_floating_point():
        raise ValueError(f"steps has dtype {steps.dtype}, stride {steps.stride()}; expected contiguous float32.")
    if used is not None:
        table.check_per_segment(used, "used")
    for tensor, name in (
        (grad, "grad"),
        (steps, "steps"),
        (used, "used"),
        (low_precision_param, "low_precision_param"),
    ):
        if tensor is not None and tensor.device != param.device:
            raise ValueError(f"{name} is on {tensor.device}; expected param's device {param.device}.")
    if low_precision_param is not None:
        table.check_shard(low_precision_param, "low_precision_param")


def _check_state(state: Tensor, param: Tensor, table: StepTable, name: str) -> None:
    table.check_shard(state, name)
    if state.device != param.device:
        raise ValueError(f"{name} is on {state.device}; expected param's device {param.device}.")
    if state.dtype != param.dtype:
        raise ValueError(f"{name} has dtype {state.dtype}; expected that of param, {param.dtype}.")


def check_norm(shard: Tensor, out: Tensor | None) -> None:
    """Raises ValueError for arguments that `norm_stats` cannot take."""
    if not shard.is_contiguous():
        raise ValueError(f"shard has shape {tuple(shard.shape)}, strides {shard.stride()}; expected contiguous.")
    check_dtype(shard, "shard")
    if out is not None and (out.dtype != torch.float64 or out.shape != (2,)):
        raise ValueError(f"out has shape {tuple(out.shape)}, dtype {out.dtype}; expected float64 of shape (2,).")


def check_sum_rows(output: Tensor, rows: Tensor, divisor: int) -> None:
    """Raises ValueError for arguments that `sum_rows_` cannot take."""
    if rows.dim() != 2 or not rows.is_contiguous() or rows.shape[0] == 0 or output.shape != rows.shape[1:]:
        raise ValueError(
            f"rows has shape {tuple(rows.shape)}, strides {rows.stride()}, output {tuple(output.shape)}; expected "
            "contiguous [num_rows, n] and [n]."
        )
    check_dtype(rows, "rows")
    if output.dtype not in (torch.float32, torch.float64) or not output.is_contiguous():
        raise ValueError(f"output has dtype {output.dtype}; sums are taken in contiguous float32 or float64.")
    if divisor < 1:
        raise ValueError(f"divisor={divisor}; expected at least 1.")

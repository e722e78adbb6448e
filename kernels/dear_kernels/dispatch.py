"""The public functions. CPU tensors go to the plain-PyTorch twin, CUDA tensors to the Triton kernel.

Triton is imported when the first kernel is launched, never before.
"""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from dear_kernels import reference
from dear_kernels.hyper import AdamHyper, SGDHyper
from dear_kernels.segments import SegmentTable, StepTable

__all__ = [
    "adam_step_",
    "found_nonfinite",
    "norm_stats",
    "pack_",
    "sgd_step_",
    "sum_of_squares",
    "sum_rows_",
    "unpack_",
]


@functools.cache
def _kernel(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"dear_kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            f"dear_kernels.{name} needs Triton for CUDA tensors and it is not installed. "
            "Install the triton that belongs to this torch, or use CPU tensors."
        ) from error


def pack_(flat: Tensor, tensors: Sequence[Tensor | None], table: SegmentTable, *, scale: float = 1.0) -> None:
    """Gathers tensors into a flat buffer, casts and scales them, and raises the used-flags; on CUDA in one launch.

    Args:
        flat: contiguous 1-D, at least `table.flat_numel` elements, float32, bfloat16, float16 or float64.
        tensors: `table.num_tensors` entries on flat's device, of any strides (their row-major logical order counts)
            and any of these dtypes. None is a missing tensor: its segments become 0 and their flags 0.
        scale: finite factor, applied in fp32 (fp64 if either dtype is fp64) before the one rounding to flat's dtype
            (from fp64 to bf16 or fp16 there are two, by way of fp32, as PyTorch casts).

    At return every segment and flag of `flat` is written (on CUDA: enqueued on the current stream), all other elements
    are as before. The tensors must stay alive and unchanged until that work is done. No launch if there is nothing to
    write. With `scale == 1` equal dtypes are copied bit for bit. On CUDA one launch per dtype among `tensors`.

    Raises:
        ValueError: wrong number of tensors, a tensor shorter than its segments, an unsupported dtype or device.

    Example: a (2, 2) tensor cut in two, a missing one, flags at 3, 6 and 7 of 8; element 5 belongs to nobody::

        table = SegmentTable([Segment(0, 0, 0, 3, flag=3), Segment(0, 3, 4, 1, flag=6), Segment(1, 0, 5, 0, flag=7)], 2)
        flat = torch.full((8,), 9.0)
        pack_(flat, [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None], table, scale=0.5)
        flat  # 0.5 1.0 1.5 | 1 | 2.0 | 9 | 1 | 0
    """
    if flat.is_cuda:
        _kernel("pack").pack_(flat, tensors, table, scale=scale)
    else:
        reference.pack_(flat, tensors, table, scale=scale)


def unpack_(tensors: Sequence[Tensor | None], flat: Tensor, table: SegmentTable, *, scale: float = 1.0) -> None:
    """Scatters a flat buffer's segments into tensors, cast and scaled: the reverse of `pack_`, flags not read.

    None entries are skipped. Elements of a tensor outside its segments are left alone. Otherwise as `pack_`.

    Example: `unpack_([a, None], flat, table, scale=2.0)` on the flat buffer of `pack_`'s example restores `a`.
    """
    if flat.is_cuda:
        _kernel("unpack").unpack_(tensors, flat, table, scale=scale)
    else:
        reference.unpack_(tensors, flat, table, scale=scale)


def sgd_step_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    table: StepTable,
    hyper: Sequence[SGDHyper],
    steps: Tensor,
    used: Tensor | None = None,
    *,
    low_precision_param: Tensor | None = None,
) -> None:
    """One step of `torch.optim.SGD` on a flat shard.

    Args:
        param: contiguous 1-D of `table.shard_numel` elements; written.
        grad: same extent, any supported dtype; read only, converted to param's dtype.
        momentum_buffer: like param; written. None if no group has momentum.
        hyper: one record per parameter group, looked up per segment.
        steps: contiguous 1-D float32, one element per segment: how many updates its momentum buffer has seen. 0 means
            there is none yet, whatever the buffer's memory holds: the first update sets it to the (decayed) gradient.
            Incremented where a segment is used and its group has momentum. torch's `momentum_buffer is None` is 0 here.
        used: 1-D tensor, one element per segment, nonzero = used; None = all. An unused segment stays bit-identical.
        low_precision_param: same extent, bf16 or fp16; receives the new parameter, rounded, where a segment is used.

    On CPU the bits are those of torch.optim's single-tensor path; on CUDA those of fp32 (fp64 for fp64) arithmetic, and
    the host never waits.

    Raises:
        ValueError: an argument of the wrong extent or dtype.

    Example: two segments, the second unused::

        table = StepTable([StepSegment(0, 2), StepSegment(2, 1)], shard_numel=3)
        param, grad, buffer, steps = tensor([1., 2., 3.]), tensor([2., 4., 6.]), zeros(3), zeros(2)
        for _ in range(2):
            sgd_step_(param, grad, buffer, table, [SGDHyper(lr=0.5, momentum=0.5)], steps, tensor([1., 0.]))
        # buffer: [2, 4, 0] then [3, 6, 0]; param: [0, 0, 3] then [-1.5, -3, 3]; steps: [2, 0]
    """
    module = _kernel("sgd") if param.is_cuda else reference
    module.sgd_step_(param, grad, momentum_buffer, table, hyper, steps, used, low_precision_param=low_precision_param)


def adam_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    table: StepTable,
    hyper: Sequence[AdamHyper],
    steps: Tensor,
    used: Tensor | None = None,
    *,
    low_precision_param: Tensor | None = None,
) -> None:
    """One step of `torch.optim.Adam` or `AdamW` on a flat shard.

    Args:
        param, grad, hyper, used, low_precision_param: as in `sgd_step_`.
        exp_avg, exp_avg_sq: like param; written. The caller starts them at zero.
        max_exp_avg_sq: like param; written. None if no group has amsgrad.
        steps: contiguous 1-D float32, one element per segment: number of updates so far; incremented where used.
            torch's `state["step"]`. The bias corrections follow from it on the device, in fp64.

    Otherwise as `sgd_step_`.

    Example: with beta1 = beta2 = 0.5, eps = 0 the first update moves each element by lr against its gradient's sign::

        table = StepTable([StepSegment(0, 2), StepSegment(2, 1)], shard_numel=3)
        param, grad, steps = tensor([1., 2., 3.]), tensor([2., -4., 6.]), zeros(2)
        hyper = [AdamHyper(lr=0.5, beta1=0.5, beta2=0.5, eps=0.0)]
        adam_step_(param, grad, zeros(3), zeros(3), None, table, hyper, steps, tensor([1., 0.]))
        # param: [0.5, 2.5, 3]; exp_avg: [1, -2, 0]; exp_avg_sq: [2, 8, 0]; steps: [1, 0]
    """
    module = _kernel("adam") if param.is_cuda else reference
    module.adam_step_(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        table,
        hyper,
        steps,
        used,
        low_precision_param=low_precision_param,
    )


def norm_stats(shard: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Returns float64 [2]: the sum of squares of `shard`, and 1 if any element is inf or NaN, else 0. One pass.

    `shard` is contiguous, of any shape and supported dtype; empty gives [0, 0]. Accumulated in fp64, in an order that
    depends on the number of elements only. `out` (float64 of shape (2,)) receives the result. The host never waits.

    Example: `norm_stats(torch.tensor([3.0, 4.0]))` is `[25, 0]`; of `[3.0, inf]` it is `[inf, 1]`.
    """
    return (_kernel("norm") if shard.is_cuda else reference).norm_stats(shard, out=out)  # type: ignore[no-any-return]


def sum_of_squares(shard: Tensor) -> Tensor:
    """Returns the sum of squares of `shard` as a 0-dim float64 tensor; see `norm_stats`."""
    return (_kernel("norm") if shard.is_cuda else reference).sum_of_squares(shard)  # type: ignore[no-any-return]


def found_nonfinite(shard: Tensor) -> Tensor:
    """Returns 1.0 as a 0-dim float32 tensor if any element of `shard` is inf or NaN, else 0.0; see `norm_stats`."""
    return (_kernel("norm") if shard.is_cuda else reference).found_nonfinite(shard)  # type: ignore[no-any-return]


def sum_rows_(output: Tensor, rows: Tensor, divisor: int) -> None:
    """`output` [n] = the sum of `rows` [num_rows, n], added in their order, divided by `divisor`.

    `output` is float32 or float64; rows of any supported dtype are converted to it before they are added. The bits do
    not depend on n or on the machine.

    Example: rows [[1, 2, 3], [5, 6, 8]] divided by 2 give [3, 4, 5.5].
    """
    (_kernel("rank_sum") if output.is_cuda else reference).sum_rows_(output, rows, divisor)

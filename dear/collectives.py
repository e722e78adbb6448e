"""Collectives for everything that is not training: metrics, start values, barriers. They block until done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, cast

import torch
from torch import optim

from dearcore.bucket import accumulate_dtype
from dearcore.errors import ArgumentError
from dearcore.storage import put_values

from .context import current

__all__ = [
    "Average",
    "Max",
    "Min",
    "ReduceOp",
    "Sum",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "reduce_scatter",
]


class ReduceOp(Enum):
    AVERAGE = "average"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


Average, Sum, Max, Min = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN


def allreduce(tensor: torch.Tensor, op: ReduceOp = Average) -> torch.Tensor:
    """Returns a new tensor, the same on every rank: the element-wise `op` over the ranks' tensors of equal shape.

    Floating point is summed in fp32 (fp64 for fp64). Raises ArgumentError for an average of whole numbers.
    """
    context = current()
    size = context.world.size
    _check_reduce(tensor, op)
    if op in (Max, Min):
        result = tensor.detach().clone(memory_format=torch.contiguous_format).cpu()
        context.communicator.start_combine(result, op.value, context.inline, "allreduce")
        return result.to(tensor.device)
    shard_numel = -(-tensor.numel() // size)
    flat = tensor.new_zeros(shard_numel * size, dtype=_sum_dtype(tensor))
    flat[: tensor.numel()] = tensor.detach().reshape(-1)
    context.communicator.start_reduce_scatter(
        _own(flat), flat.clone(), size if op is Average else 1, context.inline, "allreduce"
    )
    context.communicator.start_all_gather(flat, context.inline, "allreduce")
    return flat[: tensor.numel()].view(tensor.shape).to(tensor.dtype)


def reduce_scatter(tensor: torch.Tensor, op: ReduceOp = Average) -> torch.Tensor:
    """Returns this rank's part, [n, ...], of the reduction over the ranks' tensors [P * n, ...]."""
    context = current()
    size = context.world.size
    _check_reduce(tensor, op)
    if op not in (Average, Sum):
        raise ArgumentError(f"reduce_scatter supports Average and Sum, got {op}. Use allreduce and take a part.")
    if tensor.dim() == 0 or tensor.shape[0] % size:
        raise ArgumentError(
            f"reduce_scatter expects a first dimension that {size} ranks can share equally, got shape "
            f"{tuple(tensor.shape)}. Pad it."
        )
    flat = tensor.detach().to(_sum_dtype(tensor)).contiguous().view(-1).clone()
    output = torch.empty_like(_own(flat))
    context.communicator.start_reduce_scatter(
        output, flat, size if op is Average else 1, context.inline, "reduce_scatter"
    )
    return output.view(-1, *tensor.shape[1:]).to(tensor.dtype)


def allgather(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the ranks' tensors joined along the first dimension, which may differ from rank to rank."""
    context = current()
    if tensor.dim() == 0:
        raise ArgumentError("allgather joins along the first dimension; got a 0-dim tensor. Use tensor.view(1).")
    lengths = _gather_objects(tensor.shape[0])
    longest = max(lengths)
    whole = tensor.new_zeros(context.world.size, longest, *tensor.shape[1:])
    whole[context.world.rank, : tensor.shape[0]] = tensor.detach()
    context.communicator.start_all_gather(whole.view(-1), context.inline, "allgather")
    return torch.cat([part[:length] for part, length in zip(whole, lengths, strict=True)])


def broadcast(tensor: torch.Tensor, root_rank: int = 0) -> torch.Tensor:
    """Returns a new tensor with the root's values; shapes and dtypes must be the same on every rank."""
    context = current()
    _check_root(root_rank)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    context.communicator.start_broadcast(result, root_rank, context.inline, "broadcast")
    return result


def barrier() -> None:
    """Returns when every rank has called it."""
    _gather_objects(None)


def broadcast_object(obj: Any, root_rank: int = 0) -> Any:
    """Returns the root's picklable object on every rank."""
    _check_root(root_rank)
    return _gather_objects(obj if current().world.rank == root_rank else None)[root_rank]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor], root_rank: int = 0
) -> None:
    """Gives every rank the root's values, in place (else, where elements share memory and must not, in new memory).

    Args:
        params: a `state_dict()`, `named_parameters()` or `parameters()`; the same names and shapes on every rank.
    """
    _check_root(root_rank)
    items = list(params.items()) if isinstance(params, Mapping) else list(params)
    named = [
        cast("tuple[str, Any]", item if isinstance(item, tuple) else (f"tensor {i}", item))
        for i, item in enumerate(items)
    ]
    tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
    described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    everyone = _gather_objects(described)
    for other, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            index = next(i for i in range(len(theirs) + 1) if theirs[i : i + 1] != everyone[0][i : i + 1])
            raise ArgumentError(
                f"broadcast_parameters: entry {index} is {everyone[0][index : index + 1]} on rank 0 and "
                f"{theirs[index : index + 1]} on rank {other}. Pass the same tensors on every rank."
            )
    with torch.no_grad():
        for _, tensor in tensors:
            values = broadcast(tensor, root_rank)
            if not put_values(tensor, values):
                tensor.data = values


def broadcast_optimizer_state(optimizer: optim.Optimizer, root_rank: int = 0) -> None:
    """Gives every rank the root's optimizer state and options (lr, momentum, ...). Use it before wrapping."""
    _check_root(root_rank)
    is_root = current().world.rank == root_rank
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank)
    if not is_root:
        optimizer.load_state_dict(state)


def _gather_objects(mine: Any) -> list[Any]:
    gathered: list[Any] = []
    context = current()
    context.communicator.start_gather_objects(mine, gathered, context.inline, "exchange of objects")
    return gathered


def _own(flat: torch.Tensor) -> torch.Tensor:
    world = current().world
    numel = flat.numel() // world.size
    return flat[world.rank * numel : (world.rank + 1) * numel]


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    return accumulate_dtype(tensor.dtype) if tensor.is_floating_point() else tensor.dtype


def _check_reduce(tensor: torch.Tensor, op: ReduceOp) -> None:
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"op={op!r}; expected dear.Average, dear.Sum, dear.Max or dear.Min.")
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.dtype == torch.bool:
        raise ArgumentError(
            f"cannot reduce a tensor of {tensor.dtype}, {tensor.layout}. Use view_as_real, to_dense or int."
        )
    if op is Average and not tensor.is_floating_point():
        raise ArgumentError(f"the average of {tensor.dtype} is not a whole number. Use dear.Sum, or cast to float.")


def _check_root(root_rank: int) -> None:
    size = current().world.size
    if not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise ArgumentError(f"root_rank={root_rank!r}; expected a rank from 0 to {size - 1}.")

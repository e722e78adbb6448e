"""What construction sends from the first rank: which parameters and buffers all ranks must then have alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim

from dearcore.errors import ArgumentError

from .tracked import TrackedParameter

__all__ = ["check_alike", "check_scope", "tensors_in_scope"]

SCOPES = ("trained", "all", "none")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def check_scope(broadcast: object) -> None:
    if broadcast not in SCOPES:
        raise ArgumentError(f"broadcast={broadcast!r}; expected 'trained', 'all' or 'none'.")


def tensors_in_scope(
    model: nn.Module, optimizer: optim.Optimizer, tracked: Sequence[TrackedParameter], broadcast: str
) -> dict[str, torch.Tensor]:
    """By name, in the model's order; without aliases of trained parameters, whose memory is sent anyway.

    "trained": the optimizer's parameters (the frozen ones among them too), and the buffers beside them. A buffer
    belongs to the smallest module around it that has parameters (its own, or in submodules), and is sent if some of
    these are the optimizer's and so are all trainable ones. So an optimizer over `model.parameters()` has
    everything sent, and one over a part nothing of a part that is left out, whether frozen or trained by others.
    """
    if broadcast == "none":
        return {}
    aliases = {id(alias.tensor) for t in tracked for alias in t.aliases}
    ours = {id(param) for group in optimizer.param_groups for param in group["params"]}
    tensors: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        if id(param) not in aliases and (broadcast == "all" or id(param) in ours):
            tensors[name] = param
    for name, buffer in model.named_buffers():
        if id(buffer) not in aliases and (broadcast == "all" or _is_beside(model, name, ours)):
            tensors[name] = buffer
    return tensors


def check_alike(tracked: Sequence[TrackedParameter], gather: Callable[[Any], list[Any]]) -> None:
    """Raises the same ArgumentError on every rank if a trained parameter differs from the first rank's (a checksum)."""
    everyone = gather([_checksum(t.param.data) for t in tracked])
    for rank, theirs in enumerate(everyone):
        for index, (first, other) in enumerate(zip(everyone[0], theirs, strict=True)):
            if first != other:
                raise ArgumentError(
                    f"broadcast='none', but parameter '{tracked[index].spec.fqn}' has other values on rank {rank} than "
                    "on rank 0. Load the same values on every rank, or use broadcast='trained'."
                )


def _is_beside(model: nn.Module, name: str, ours: set[int]) -> bool:
    path = name.split(".")[:-1]
    for length in range(len(path), -1, -1):
        params = list(model.get_submodule(".".join(path[:length])).parameters())
        if params:
            return any(id(p) in ours for p in params) and all(id(p) in ours for p in params if p.requires_grad)
    return False


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bits, whatever the memory format."""
    return int(tensor.contiguous().view(-1).view(_WORDS[tensor.itemsize]).sum(dtype=torch.int64))

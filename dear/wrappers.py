"""Finds what else averages the gradients of a parameter. For errors only: it looks at every object."""

from __future__ import annotations

import gc

import torch
from torch.nn.parallel import DistributedDataParallel

from .parameters import without_waiting

__all__ = ["is_in_ddp"]


def is_in_ddp(grad: torch.Tensor) -> bool:
    """True if `grad` is the gradient of a parameter of a module that DistributedDataParallel wraps."""
    with without_waiting():
        return any(
            param.grad is grad
            for found in gc.get_objects()
            if issubclass(type(found), DistributedDataParallel)
            for param in found.parameters()
        )

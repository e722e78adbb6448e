"""Collectives that are not ours: those of synchronised batch norm, on torch's own NCCL communicator.

Two NCCL communicators on one GPU may wait for each other's multiprocessors, and would for ever if two ranks run them in
different order. So before each of torch's collectives the compute stream waits for ours, and ours that come later wait
for it: by events, in the forward and in the backward. What this costs is the overlap at these places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dearcore.streams import Streams

from .doors import OwnHook

__all__ = ["ForeignCollectives"]


class ForeignCollectives:
    """Orders the collectives of every `SyncBatchNorm` of a model against those on `streams.communication`."""

    def __init__(self, model: nn.Module, streams: Streams) -> None:
        self._before = _hidden(streams.wait_collectives)
        self._after = _hidden(streams.wait_values)
        self._handles: list[Any] = []
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                self._handles.append(module.register_forward_pre_hook(OwnHook(self._forward_begins)))
                self._handles.append(module.register_forward_hook(OwnHook(self._forward_ends)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forward_begins(self, module: nn.Module, *_: Any) -> None:
        self._before()

    def _forward_ends(self, module: nn.Module, _: Any, output: torch.Tensor) -> None:
        self._after()
        node = output.grad_fn
        if node is not None:  # of the module itself; what is done to the output in place has nodes of its own
            node.register_prehook(lambda *_: self._before())
            node.register_hook(lambda *_: self._after())


def _hidden(call: Callable[[], None]) -> Callable[[], None]:
    hidden: Callable[[], None] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return hidden

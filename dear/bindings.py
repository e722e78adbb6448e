"""Does the model still consist of the parameters that we train? Looked at before each step, at little cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn, optim

from dearcore.errors import ScheduleError

from .parameters import without_waiting
from .tracked import TrackedParameter

__all__ = ["Bindings"]


class Bindings:
    """Remembers where each parameter stands in the model and in memory.

    A tensor that was given other memory (`.to()` and back, `.data = ...`) is taken back into its place with its new
    values. What cannot be mended is a ScheduleError that names the parameter.
    """

    def __init__(self, model: nn.Module, tracked: Sequence[TrackedParameter], optimizer: optim.Optimizer) -> None:
        self._tracked = tracked
        trained = {id(t.param) for t in tracked}
        self._modules = list(model.modules())
        self._num_members = self._count()
        places: dict[int, tuple[dict[str, Any], str]] = {}
        for module in self._modules:
            for name, param in module._parameters.items():
                if param is not None:
                    places.setdefault(id(param), (module._parameters, name))
        self._places = [places[id(t.param)] for t in tracked]
        self._frozen = [
            (name, p)
            for name, p in model.named_parameters()
            if id(p) not in trained and any(p is q for group in optimizer.param_groups for q in group["params"])
        ]
        self.rebind()

    def rebind(self) -> None:
        """Takes the present memory of the parameters as the right one."""
        self._views = [t.param.data for t in self._tracked]
        self._addresses = [view.data_ptr() for view in self._views]

    def check(self) -> None:
        """Raises ScheduleError where the model has changed in a way that training would silently miss."""
        with without_waiting():
            for tracked, (owner, name), address in zip(self._tracked, self._places, self._addresses, strict=True):
                param = tracked.param
                if (owner[name] if name in owner else None) is not param:  # noqa: SIM401 (TorchScript's dicts)
                    raise ScheduleError(
                        f"parameter '{tracked.spec.fqn}' is no longer part of the model: it was replaced or "
                        f"removed after "
                        "wrapping (load_state_dict(assign=True), weight_norm, a new head, ...). Call "
                        "close() and wrap again."
                    )
                if param.data_ptr() != address and tracked.spec.numel:
                    self._take_back(tracked)
            for name, param in self._frozen:
                if param.requires_grad:
                    raise ScheduleError(
                        f"parameter '{name}' was frozen when the optimizer was wrapped and is trainable "
                        f"now. Call close() "
                        "and wrap again (a parameter that was trainable may be frozen and thawed at any time)."
                    )
            if self._count() != self._num_members:
                raise ScheduleError(
                    "the model has other parameters or modules than when it was wrapped. Call close() and "
                    "wrap again with "
                    "an optimizer over the new ones."
                )

    def _take_back(self, tracked: TrackedParameter) -> None:
        index = tracked.spec.index
        view, found = self._views[index], tracked.param.data
        if found.dtype != view.dtype or found.device != view.device or found.shape != view.shape:
            raise ScheduleError(
                f"parameter '{tracked.spec.fqn}' was {view.dtype} on {view.device} with shape "
                f"{tuple(view.shape)} when it "
                f"was wrapped and is {found.dtype} on {found.device} with shape {tuple(found.shape)} now. "
                f"Convert the model "
                "first, then wrap it."
            )
        with torch.no_grad():
            view.copy_(found)
        tracked.param.data = view

    def _count(self) -> int:
        return sum(len(module._parameters) + len(module._modules) for module in self._modules)

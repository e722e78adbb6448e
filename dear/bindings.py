"""Does the model still consist of the parameters that we train? Looked at before each step, at little cost."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn, optim

from dearcore.errors import ScheduleError

from .parameters import without_waiting
from .tracked import TrackedParameter

__all__ = ["Bindings", "warn_if_shared"]


class Bindings:
    """Remembers where each parameter stands in the model and in memory.

    A tensor that was given other memory (`.to()` and back, `.data = ...`) is taken back into its place with its new
    values; modules may be replaced as long as they have the same parameters. What cannot be mended is a ScheduleError
    that names the parameter.
    """

    def __init__(self, model: nn.Module, tracked: Sequence[TrackedParameter], optimizer: optim.Optimizer) -> None:
        self._model, self._tracked = model, tracked
        trained = {id(t.param) for t in tracked}
        in_optimizer = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._optimizer = optimizer
        self._groups = _groups_of(optimizer)
        self._known = {id(param) for param in model.parameters()}
        self._frozen = [
            (name, p) for name, p in model.named_parameters() if id(p) in in_optimizer and id(p) not in trained
        ]
        self._has_warned = False
        self._look_at_modules()
        self.rebind()

    def rebind(self) -> None:
        """Takes the present memory of the parameters as the right one."""
        self._addresses = [t.param.data_ptr() for t in self._tracked]

    def check(self) -> None:
        """Raises ScheduleError where the model has changed in a way that training would silently miss."""
        with without_waiting():
            if _groups_of(self._optimizer) != self._groups:
                raise ScheduleError(
                    "the parameter groups have other members than when the optimizer was wrapped. Take "
                    "state_dict(), call "
                    "close(), and wrap again; options such as lr may change at any time."
                )
            if self._modules_have_changed():
                self._check_parameters()
                self._look_at_modules()
            for tracked, address in zip(self._tracked, self._addresses, strict=True):
                if tracked.param.data_ptr() != address and tracked.spec.numel:
                    self._take_back(tracked)
            for name, param in self._frozen:
                if param.requires_grad:
                    raise ScheduleError(
                        f"parameter '{name}' was frozen when the optimizer was wrapped and is trainable now. Call "
                        "close() and wrap again (what was trainable may be frozen and thawed at any time)."
                    )

    def _look_at_modules(self) -> None:
        """Every parameter and submodule with the dict of its owner. TorchScript's dicts have no `get`."""
        self._dicts = [members for module in self._model.modules() for members in (module._parameters, module._modules)]
        self._members: list[tuple[Any, str, Any]] = [
            (members, name, member) for members in self._dicts for name, member in members.items()
        ]

    def _modules_have_changed(self) -> bool:
        return sum(map(len, self._dicts)) != len(self._members) or any(
            name not in members or members[name] is not member for members, name, member in self._members
        )

    def _check_parameters(self) -> None:
        params = dict(self._model.named_parameters())
        names = {id(param): name for name, param in params.items()}
        for tracked in self._tracked:
            if id(tracked.param) not in names:
                now = params.get(tracked.spec.fqn)
                if now is not None and type(now).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                    raise ScheduleError(
                        f"parameter '{tracked.spec.fqn}' has become a {type(now).__name__} after the "
                        "DistributedOptimizer was built: the model was also wrapped in FSDP (fully_shard), tensor "
                        "parallelism or the like, which average on their own. Use one of the two."
                    )
                raise ScheduleError(
                    f"parameter '{tracked.spec.fqn}' is no longer part of the model: it was replaced or removed after "
                    "wrapping (load_state_dict(assign=True), weight_norm, a new head, ...). Take state_dict(), call "
                    "close(), and wrap again."
                )
        new = [name for key, name in names.items() if key not in self._known]
        if new:
            raise ScheduleError(
                f"parameter '{new[0]}' was added to the model after wrapping. Call close(), add it to the torch "
                "optimizer, and wrap again."
            )

    def _take_back(self, tracked: TrackedParameter) -> None:
        view, found = tracked.memory, tracked.param.data
        assert view is not None
        if found.dtype != view.dtype or found.device != view.device or found.shape != view.shape:
            raise ScheduleError(
                f"parameter '{tracked.spec.fqn}' was {view.dtype} on {view.device} with shape {tuple(view.shape)} when "
                f"it was wrapped and is {found.dtype} on {found.device} with shape {tuple(found.shape)} now. Convert "
                "the model first, then wrap it."
            )
        self._warn_if_shared(tracked)
        tracked.take_back()

    def _warn_if_shared(self, tracked: TrackedParameter) -> None:
        if not self._has_warned:
            self._has_warned = warn_if_shared([tracked])


def warn_if_shared(tracked: Sequence[TrackedParameter]) -> bool:
    """Warns of parameters in memory that other processes may hold: what is trained stands in a bucket's memory.

    Not an error: whoever sends a model to another process moves it into shared memory, and most want its values only.
    """
    for t in tracked:
        if t.param.device.type == "cpu" and t.param.untyped_storage().is_shared():  # on CUDA it always is
            warnings.warn(
                f"parameter '{t.spec.fqn}' was in shared memory (share_memory_(), or sent to another process) and is "
                "trained in memory of this process from now on: other processes keep the values that it has now. Send "
                "parameters again whenever others shall see newer ones.",
                stacklevel=2,
            )
            return True
    return False


def _groups_of(optimizer: optim.Optimizer) -> list[list[int]]:
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]

"""The parameters that an optimizer trains, each with its place in the model, in memory and in the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn, optim
from torch.nn.parameter import is_lazy

from dearcore.errors import ArgumentError, ScheduleError
from dearcore.layout import ParamSpec, dense_strides
from dearcore.storage import overlap, own_storage, span_bytes

from .gradients import InFlightGradient, Unscale

__all__ = ["TrackedParameter", "track"]

WIRE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Follower(Protocol):
    """A tensor in the memory of a parameter, which goes where the parameter goes."""

    name: str
    tensor: torch.Tensor
    is_whole: bool

    def stands_in(self, memory: torch.Tensor) -> bool: ...

    def follow(self, memory: torch.Tensor) -> None: ...

    def leave(self) -> None: ...


@dataclass(slots=True)
class TrackedParameter:
    spec: ParamSpec
    param: nn.Parameter
    group: int  # position in optimizer.param_groups
    in_flight: InFlightGradient
    strides: tuple[int, ...] = ()
    _order: tuple[int, ...] | None = None  # permutation of dimensions that makes these strides row-major
    retained: bool = False  # an averaged gradient of it stands in the reduced shard
    leaving: torch.Tensor | None = None  # the gradient of which some parts have left and others have not
    whole: torch.Tensor | None = None  # the averaged gradient, where it was gathered and put into p.grad
    whole_version: int = 0  # of that tensor when it was last ours
    memory: torch.Tensor | None = None  # its place in a flat buffer, as a view of the buffer
    aliases: list[Follower] = field(default_factory=list)

    def move_into(self, memory: torch.Tensor) -> None:
        """Makes `memory`, a dense view, the parameter's, which keeps its values. Aliases go along.

        The parameter's storage object is its own; `memory` itself stays a view of what it is a part of, since the
        content of a storage object can be replaced (`share_memory_`).
        """
        self._stand_in(own_storage(memory.copy_(self.param.data)))
        self.memory = memory

    def take_back(self) -> None:
        """Into `memory` again, from the other memory that somebody has given the parameter."""
        assert self.memory is not None
        for alias in self.aliases:  # what was not moved along was left behind, with the values that it has
            if alias.stands_in(self.memory):
                alias.leave()
        self.move_into(self.memory)

    def move_out(self) -> None:
        """Into memory that is nobody else's."""
        old = self.param.data
        fresh = torch.empty_strided(old.shape, self.strides, dtype=old.dtype, device=old.device)
        self._stand_in(fresh.copy_(old))
        self.memory = None

    def _stand_in(self, own: torch.Tensor) -> None:
        before = self.param.data
        self.param.data = own
        self.aliases = [alias for alias in self.aliases if alias.stands_in(before)]
        for alias in self.aliases:
            alias.follow(own)

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of `p.grad`."""
        return self.in_flight.dtype

    def grad_dtype_of_step(self, dtype: torch.dtype) -> torch.dtype | None:
        """Of the gradients that the optimizer steps a shard of `dtype` with, where they have another."""
        return None if self.grad_dtype in (self.spec.dtype, dtype) else self.grad_dtype

    def is_in_flight(self) -> bool:
        """True if `p.grad` is the in-flight gradient, or a sum with it."""
        return isinstance(self.param.grad, InFlightGradient)

    def check_grad_dtype(self) -> None:
        """Raises ScheduleError where the parameter takes gradients of another dtype than when it was wrapped."""
        now = self.param.grad_dtype
        if now not in (None, self.grad_dtype):
            raise ScheduleError(
                f"parameter '{self.spec.fqn}' took gradients of {self.grad_dtype} when it was wrapped and has "
                f"grad_dtype {now} now. Set grad_dtype before wrapping, or call close(), set it, and wrap again."
            )

    def put_in_flight(self) -> None:
        """Makes the in-flight gradient the parameter's."""
        try:
            self.param.grad = self.in_flight
        except RuntimeError:
            self.check_grad_dtype()
            raise

    def put_average(self, average: torch.Tensor | None) -> None:
        """Makes `average` the parameter's gradient."""
        self.param.grad = self.whole = average
        self.whole_version = 0 if average is None else average._version

    def holds_average(self) -> bool:
        """True if `p.grad` is the averaged gradient that we put there, and nobody has changed it since."""
        whole = self.whole
        return whole is not None and self.param.grad is whole and whole._version == self.whole_version

    def forget(self) -> None:
        """No gradient, neither of this rank nor an average."""
        self.param.grad = self.whole = None
        self.in_flight.local = None

    def adopt_strides(self, strides: tuple[int, ...]) -> None:
        """Memory order is the order of `strides`, which are dense; the first rank's count."""
        self.strides = strides
        order = tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], self.spec.shape[d] == 1, d)))
        self._order = None if order == tuple(range(len(order))) else order

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions from the slowest in memory to the fastest."""
        return tuple(range(len(self.strides))) if self._order is None else self._order

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """`flat` [numel, memory order] in the parameter's shape and strides."""
        return torch.as_strided(flat, self.spec.shape, self.strides, flat.storage_offset())

    def in_memory_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape so that its row-major order is the parameter's memory order."""
        return tensor if self._order is None else tensor.permute(self._order)


def track(optimizer: optim.Optimizer, model: nn.Module, unscale: Unscale) -> list[TrackedParameter]:
    """Every trainable parameter of the optimizer, in the order of the model's forward as far as it is known.

    Raises ArgumentError where a parameter cannot be trained this way; the message names it.
    """
    names = {}
    for name, param in model.named_parameters():
        names[param] = name
    _check_model(model, names)
    groups: dict[nn.Parameter, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in names:
                raise ArgumentError(
                    f"parameter {position} of group {number} (shape {tuple(param.shape)}) of the optimizer "
                    f"is not in the "
                    "model. Pass the model that owns all parameters of the optimizer; for several modules, "
                    "put them into "
                    "an nn.ModuleList."
                )
            groups[param] = number
    tracked: list[TrackedParameter] = []
    for param, name in names.items():
        if param not in groups or not param.requires_grad:
            continue
        if param.dtype not in WIRE_DTYPES:
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in WIRE_DTYPES)
            raise ArgumentError(
                f"parameter '{name}' has dtype {str(param.dtype).removeprefix('torch.')}; the wire supports "
                f"{supported}. "
                "Cast the module before building DistributedOptimizer (view_as_real for complex parameters)."
            )
        spec = ParamSpec(len(tracked), name, tuple(param.shape), param.dtype)
        tracked.append(TrackedParameter(spec, param, groups[param], InFlightGradient(param, name, unscale)))
        tracked[-1].adopt_strides(dense_strides(param.shape, param.stride()))
    if not tracked:
        raise ArgumentError("the optimizer has no trainable parameter of this model. Pass the model that it trains.")
    devices = {t.param.device for t in tracked}
    if len(devices) > 1:
        raise ArgumentError(
            f"the parameters are on {', '.join(sorted(map(str, devices)))}; expected one device. Move the "
            f"model to one, or "
            "build one DistributedOptimizer for each part."
        )
    _check_shared_memory(tracked)
    return tracked


def _check_model(model: nn.Module, names: dict[nn.Parameter, str]) -> None:
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ArgumentError(
                f"{f'module {path!r}' if path else 'the model'} is wrapped in DistributedDataParallel, which averages "
                "gradients as well. Pass the module inside (`model.module`), and train that."
            )
    for param, name in names.items():
        if is_lazy(param):
            raise ArgumentError(
                f"parameter '{name}' has no shape yet (a lazy module). Run one forward before building "
                "DistributedOptimizer: `with torch.no_grad(): model(example)`."
            )
        if type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ArgumentError(
                f"parameter '{name}' is a {type(param).__name__}; expected a plain nn.Parameter that each rank holds "
                "whole. Wrap a model that is neither sharded (FSDP, DTensor) nor quantised."
            )


def _check_shared_memory(tracked: Sequence[TrackedParameter]) -> None:
    """Different Parameter objects over the same memory would drift apart once each has a place of its own."""
    spans = sorted((*span_bytes(t.param.data), t.spec.index) for t in tracked if t.spec.numel)
    reach: list[tuple[int, int]] = []  # (end, index) of those that go beyond the start of the next
    for start, end, index in spans:
        reach = [(other_end, other) for other_end, other in reach if other_end > start]
        for _, other in reach:
            if overlap(tracked[other].param, tracked[index].param):
                raise ArgumentError(
                    f"parameters '{tracked[other].spec.fqn}' and '{tracked[index].spec.fqn}' share memory but are "
                    "different Parameter objects. To tie them, assign the same Parameter to both modules; else clone "
                    "one."
                )
        reach.append((end, index))
